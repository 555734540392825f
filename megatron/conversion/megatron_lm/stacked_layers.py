"""A source with its layers stacked: one tensor for each kind of parameter, with a leading axis of layers.

The form that Megatron-core writes for models whose layers are all alike, and the only one that its newer model classes
ask for.
"""

from __future__ import annotations

import re

import torch

from megatron.conversion.model_space.source import Shape, Source, TensorInfo, TrainingState

_LAYER = re.compile(r"((?:optimizer\.state\.\w+\.)?decoder\.layers\.)(\d+)\.(.+)")


class StackedLayers:
    """`source` with stacked layers; its layers must be alike."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.by_layer, self.num_layers = source.tensors, int(source.args["num_layers"])
        self.description, self.args, self.unused = source.description, source.args, source.unused
        self.training: TrainingState | None = source.training
        self.tensors: dict[str, TensorInfo] = {}
        self._layers: dict[str, list[str]] = {}  # stacked key -> the key of every layer
        found: dict[str, dict[int, str]] = {}
        for key, info in source.tensors.items():
            match = _LAYER.fullmatch(key)
            if match is None:
                self.tensors[key] = info
                continue
            found.setdefault(match[1] + match[3], {})[int(match[2])] = key
        for key, layers in found.items():
            infos = {source.tensors[layer] for layer in layers.values()}
            if len(infos) > 1 or len(layers) != self.num_layers:
                raise ValueError(f"{self.description}: {key} is not alike in all {self.num_layers} layers")
            (info,) = infos
            self.tensors[key] = TensorInfo((len(layers), *info.shape), info.dtype)
            self._layers[key] = [layers[number] for number in range(self.num_layers)]

    def read(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        if key not in self._layers:
            return self._source.read(key, offset, shape)
        layers = self._layers[key][offset[0] : offset[0] + shape[0]]
        return torch.stack([self._source.read(layer, offset[1:], shape[1:]) for layer in layers])


def stacked_key(key: str, num_layers: int) -> str:
    """The key of a layer's object as a place in the grid of all layers."""
    match = _LAYER.fullmatch(key)
    return key if match is None else (match[1] + match[3]).replace("shard_0_1", f"shard_{match[2]}_{num_layers}")

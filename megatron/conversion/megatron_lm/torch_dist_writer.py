"""Writes a `Source` as a torch_dist iteration directory in one process, a few megabytes at a time.

Layers may be stacked: one tensor for each kind of parameter, with a leading axis of layers. It is the form that
Megatron-core writes for models whose layers are all alike, and the only one that its newer model classes ask for.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.files import Progress, no_progress
from megatron.conversion.megatron_lm.args import (
    ASKED_FOR,
    common_state,
    extra_states,
    in_chain,
    stored_model,
    with_asked_for,
)
from megatron.conversion.model_space.model import WORD_EMBEDDINGS
from megatron.conversion.model_space.source import Shape, Source, TensorInfo, TrainingState
from megatron.core.dist_checkpointing import ShardedObject, ShardedStateDict, ShardedTensor, save

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
    if match is None:
        return key
    module, _, grid = (match[1] + match[3]).rpartition("/shard_")
    if grid == "0_1":
        return f"{module}/shard_{match[2]}_{num_layers}"
    expert, _, experts = grid.partition("_")
    return f"{module}/shard_{match[2]}.{expert}_{num_layers}.{experts}"


def write_torch_dist(source: Source, directory: Path, files: int = 1, progress: Progress = no_progress) -> list[str]:
    """Write `directory` (an iteration), `files` files at once; it appears complete or not at all.

    Returns what could not be carried: nothing.
    """
    state: ShardedStateDict = {
        key: ShardedTensor.lazy(key, info.shape, info.dtype, partial(source.read, key))
        for key, info in source.tensors.items()
    }
    # What Megatron-core asks for, and the generators, for a run that goes on at the layout they belong to.
    state |= _extra_states(source)
    rng = source.training.rng if source.training is not None else {}
    state |= {key: ShardedObject(key, read()) for key, read in rng.items()}
    save(state, directory, common=_common(source), workers=files, progress=progress)
    return []


def _extra_states(source: Source) -> ShardedStateDict:
    experts = int(source.args.get("num_experts") or 0)
    if not isinstance(source, StackedLayers):
        return {**extra_states(source.tensors, experts)}
    entries = extra_states(source.by_layer, experts).values()
    keys = [stacked_key(entry.key, source.num_layers) for entry in entries]
    return {key: ShardedObject(key, entry.value) for key, entry in zip(keys, entries, strict=True)}


def _common(source: Source) -> dict[str, Any]:
    """`common.pt` of a checkpoint with the arguments and the training state of `source`."""
    training = source.training
    weights = source.tensors[WORD_EMBEDDINGS]
    config = dataclasses.asdict(stored_model(source.args, weights.shape[0], source.description))
    # Defaults first, then the model, then what the source says: None in the source must not hide a default.
    told = {name: value for name, value in source.args.items() if value is not None or name not in ASKED_FOR}
    del config["transformer_impl"]  # nothing is computed here
    args = with_asked_for(config | {"params_dtype": weights.dtype} | told)
    args |= {"ckpt_format": "torch_dist", "use_dist_ckpt": True}
    # Megatron-LM's reader takes the checkpoint's word for what it may ask for.
    args["no_save_optim"] = training is None or training.param_groups is None
    args["no_save_rng"] = training is None or not training.rng
    args.setdefault("consumed_train_samples", 0)
    args.setdefault("consumed_valid_samples", 0)
    common = common_state(argparse.Namespace(**args), training, stacked=isinstance(source, StackedLayers))
    if training is not None and training.param_groups is not None:
        optimizer: dict[str, Any] = {"optimizer": {"param_groups": training.param_groups}}
        if training.grad_scaler is not None:
            optimizer["grad_scaler"] = training.grad_scaler
        optimizer["param_state_sharding_type"] = "fully_reshardable"
        common["optimizer"] = in_chain(optimizer, args)
    if training is not None and training.scheduler is not None:
        common["opt_param_scheduler"] = training.scheduler
    return common

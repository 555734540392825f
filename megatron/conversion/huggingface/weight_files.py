"""The weight files of a Hugging Face directory: one file or shards with an index, safetensors or pickles of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from megatron.conversion.huggingface.safetensors_file import SafetensorsFile
from megatron.conversion.model_space.source import Shape, TensorInfo
from megatron.core.dist_checkpointing.format.input_files import named_file, read_json
from megatron.core.dist_checkpointing.format.schema import anything, file_name, key, mapping, record
from megatron.core.dist_checkpointing.format.unpickler import safe_load


class TensorFile(Protocol):
    tensors: dict[str, TensorInfo]

    def read(self, name: str, offset: Shape, shape: Shape) -> torch.Tensor: ...


class TorchFile:
    """`pytorch_model.bin` of old repositories, read without running anything."""

    def __init__(self, path: Path) -> None:
        state = mapping(anything, keys=key)(safe_load(path), str(path))
        self._state = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        self.tensors = {name: TensorInfo(tuple(value.shape), value.dtype) for name, value in self._state.items()}

    def read(self, name: str, offset: Shape, shape: Shape) -> torch.Tensor:
        return self._state[name][tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))].clone()


_INDEX = record({"weight_map": mapping(file_name, keys=key)})
_KINDS = (("model.safetensors", SafetensorsFile), ("pytorch_model.bin", TorchFile))


def open_weights(directory: Path) -> dict[str, TensorFile]:
    """Tensor name -> the file that holds it.

    Raises ValueError where a shard is missing, truncated, or lacks a tensor that the index promises.
    """
    for name, kind in _KINDS:
        index = directory / f"{name}.index.json"
        if index.exists():
            return _open_shards(directory, index, kind)
        if (directory / name).exists():
            file = kind(directory / name)
            return dict.fromkeys(file.tensors, file)
    raise ValueError(
        f"{directory} has neither model.safetensors nor model.safetensors.index.json (nor pytorch_model.bin)"
    )


def _open_shards(directory: Path, index: Path, kind: type[SafetensorsFile] | type[TorchFile]) -> dict[str, TensorFile]:
    weight_map = _INDEX(read_json(index), str(index))["weight_map"]
    paths = {name: named_file(directory, name, str(index)) for name in sorted(set(weight_map.values()))}
    missing = [name for name, path in paths.items() if not path.exists()]
    if missing:
        raise ValueError(f"{directory} lacks {len(missing)} of {len(paths)} shards: {', '.join(missing)}")
    files = {name: kind(path) for name, path in paths.items()}
    for tensor, name in weight_map.items():
        if tensor not in files[name].tensors:
            raise ValueError(f"{index} places {tensor} in {name}, which does not have it")
    return {tensor: files[name] for tensor, name in weight_map.items()}

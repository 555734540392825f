"""Models in files or in memory, which deltas compare and change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch
import xxhash

from megatron.conversion.huggingface.weight_files import open_weights
from megatron.conversion.model_space.lazy_tensors import cut_blocks, view_tensor
from megatron.core.dist_checkpointing.files import METADATA
from megatron.core.dist_checkpointing.mapping import Extent, LazyTensor
from megatron.core.object_path import ObjectPath, path_of
from megatron.core.safe_files import schema
from megatron.core.safe_files.reading import read_regular
from megatron.core.safe_files.torch_zip import view_bytes

BLOCK_ELEMENTS = 4 << 20  # read at a time
# Files of weights, which a model with other weights must not have: those that `open_weights` reads,
# and those of other programs
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pth", ".pt", ".gguf", ".distcp", ".index.json")

Weights = Mapping[str, torch.Tensor] | str | PathLike[str]
Tensors = dict[str, LazyTensor]


@dataclass(frozen=True)
class DeltaReport:
    """Size of a delta in comparison with the whole model."""

    changed_tensors: int
    changed_elements: int
    delta_bytes: int
    """Bytes of the tensors in the files of the delta."""
    model_bytes: int


def open_model(weights: Weights) -> Tensors:
    """Return the tensors of a model by name."""
    if isinstance(weights, str | PathLike):
        return open_weights(to_local(weights))
    return {name: view_tensor(tensor.detach()) for name, tensor in weights.items()}


def to_local(name: str | PathLike[str]) -> Path:
    """Return a path. Raises ValueError for a URL."""
    path = path_of(name)
    if isinstance(path, ObjectPath):
        raise ValueError(f"{path}: deltas and their models are directories, not in object storage")
    return path


def check_same_model(base: Tensors, new: Tensors) -> None:
    """Raise ValueError if names, shapes or dtypes differ."""
    faults = []
    for name in sorted(base.keys() | new.keys()):
        if base.get(name) == new.get(name):
            continue
        in_base = format_tensor(base.get(name))
        in_new = format_tensor(new.get(name))
        faults.append(f"{name}: {in_base} in the base, {in_new} in the new model")
    if faults:
        raise ValueError(
            "a delta is between two states of the same model, export both with the same options:\n"
            "  " + schema.abbreviate(faults)
        )


def format_tensor(tensor: LazyTensor | None) -> str:
    """Return shape and dtype for a message."""
    if tensor is None:
        return "absent"
    return f"{tensor.shape} {tensor.dtype_name}"


def read_flat(tensor: LazyTensor, box: Extent) -> torch.Tensor:
    """Return the elements of a box as one axis."""
    return tensor.read(*box).contiguous().view(-1)


def compute_digest(tensor: LazyTensor) -> str:
    """Return the digest of a tensor's bytes."""
    digest = xxhash.xxh3_128()
    for box in cut_blocks(tensor, BLOCK_ELEMENTS):
        elements = read_flat(tensor, box)
        digest.update(view_bytes(elements))
    return digest.hexdigest()


def copy_small_files(base: Path, directory: Path) -> None:
    """Copy all files but weights, e.g. configuration and tokenizer."""
    for path in sorted(base.iterdir()):
        is_weights = path.name.endswith(_WEIGHT_SUFFIXES) or path.name == METADATA
        if path.is_file() and not is_weights:
            (directory / path.name).write_bytes(read_regular(path))

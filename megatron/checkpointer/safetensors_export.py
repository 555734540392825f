"""Export of the weights of a checkpoint as safetensors files."""

from __future__ import annotations

import json
import math
import secrets
from pathlib import Path

import torch

from megatron.core.dist_checkpointing.box_table import StoredTensor
from megatron.core.dist_checkpointing.loading.reader import Reader
from megatron.core.durable_files import fsync_directory, remove, rename
from megatron.core.safe_files.errors import CheckpointError

_MODEL = "model."


def export_safetensors(source: Path, directory: Path, max_file_size: int) -> None:
    """Write the tensors under `model.` of the checkpoint `source` to the new `directory`.

    Files have at most `max_file_size` bytes of tensors, or one tensor; an index names the file of
    each, as transformers and others expect. The directory appears when it is complete.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise CheckpointError("exporting weights requires the package safetensors") from error
    if directory.exists():
        raise CheckpointError(f"{directory} exists: give a new directory")
    # Find the tensors of the model and distribute them over files.
    reader = Reader(source)
    model_tensors = {
        key.removeprefix(_MODEL): tensor
        for key, tensor in reader.metadata.tensors.items()
        if key.startswith(_MODEL)
    }
    if not model_tensors:
        raise CheckpointError(f"{source}: contains no tensors of a model")
    files = _distribute(model_tensors, max_file_size)
    # Write to a temporary directory and rename it at the end.
    unfinished = directory.with_name(f".{directory.name}-{secrets.token_hex(8)}")
    unfinished.mkdir(parents=True)
    try:
        file_of: dict[str, str] = {}
        for file_index, names in enumerate(files, 1):
            file = f"model-{file_index:05d}-of-{len(files):05d}.safetensors"
            # Memory is bounded by one file: its tensors are released before the next.
            tensors = {name: _read_whole(reader, name, model_tensors[name]) for name in names}
            save_file(tensors, unfinished / file, metadata={"format": "pt"})
            file_of |= dict.fromkeys(names, file)
        # The index that transformers reads for sharded weights
        total = sum(_size_of(tensor) for tensor in model_tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        text = json.dumps(index, indent=2, sort_keys=True)
        (unfinished / "model.safetensors.index.json").write_text(text, encoding="utf-8")
        rename(unfinished, directory)
        fsync_directory(directory.parent)
    except BaseException:
        remove(unfinished)
        raise


def _distribute(model_tensors: dict[str, StoredTensor], max_file_size: int) -> list[list[str]]:
    """Return the names of the tensors in each file, in order."""
    files: list[list[str]] = [[]]
    size = 0
    for name in sorted(model_tensors):
        nbytes = _size_of(model_tensors[name])
        if files[-1] and size + nbytes > max_file_size:
            files.append([])
            size = 0
        files[-1].append(name)
        size += nbytes
    return files


def _size_of(tensor: StoredTensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _read_whole(reader: Reader, name: str, tensor: StoredTensor) -> torch.Tensor:
    return reader.read(_MODEL + name, (0,) * len(tensor.shape), tensor.shape)

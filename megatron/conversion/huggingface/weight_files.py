"""The weight files of a Hugging Face directory: one file, or shards with an index.

They are safetensors, or, in old repositories, pickles of torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from megatron.conversion.huggingface.other_layouts import join_consolidated, open_dcp
from megatron.conversion.huggingface.safetensors_files import SafetensorsWriter, open_safetensors
from megatron.conversion.model_space.lazy_tensors import (
    are_equal,
    cut_blocks,
    view_tensor,
)
from megatron.conversion.model_space.pieces import run_jobs
from megatron.core.dist_checkpointing.files import METADATA
from megatron.core.dist_checkpointing.mapping import Extent, LazyTensor, TensorInfo
from megatron.core.dist_checkpointing.saving.commit import Progress
from megatron.core.durable_files import committed, encode_json, write_json
from megatron.core.object_path import ObjectPath
from megatron.core.run_checkpoint.keys import CONSOLIDATED, GGUF_FILES
from megatron.core.safe_files import safe_load, schema
from megatron.core.safe_files.named_files import find_named_file
from megatron.core.safe_files.reading import read_json

_INDEX = schema.record({"weight_map": schema.mapping(schema.file_name, keys=schema.key)})
_ZERO_SCRIPT = "zero_to_fp32.py"  # DeepSpeed saves it next to its files
_PICKLE = schema.mapping(schema.anything, keys=schema.key)


def open_torch_file(path: Path) -> dict[str, LazyTensor]:
    """Return the tensors of a `pytorch_model.bin`, read without running anything."""
    tensors: dict[str, LazyTensor] = {}
    for name, value in _PICKLE(safe_load(path), str(path)).items():
        if isinstance(value, torch.Tensor):
            tensors[name] = view_tensor(value)
    return tensors


_OPENERS: dict[str, Callable[[Path], dict[str, LazyTensor]]] = {
    "model.safetensors": open_safetensors,
    "pytorch_model.bin": open_torch_file,
}


def open_weights(directory: Path) -> dict[str, LazyTensor]:
    """Return the tensors of a model by name.

    Raises ValueError where a shard is missing or truncated, lacks a tensor of the index, or has one
    that the index does not list, and for an index next to a file of the whole model.
    """
    for name, open_file in _OPENERS.items():
        index = directory / f"{name}.index.json"
        if index.exists():
            return _open_shards(directory, index, open_file)
        if (directory / name).exists():
            return open_file(directory / name)
    # Layouts of other programs.
    consolidated = sorted(directory.glob(CONSOLIDATED))
    if consolidated:
        return join_consolidated([open_torch_file(path) for path in consolidated], str(directory))
    if (directory / METADATA).exists():
        return open_dcp(directory)
    hint = ""
    if (directory / _ZERO_SCRIPT).exists():
        # The trainer of transformers, without stage3_gather_16bit_weights_on_model_save.
        hint = f". With ZeRO-3, only DeepSpeed has saved it: run {_ZERO_SCRIPT} in that directory"
    gguf_files = sorted(directory.glob(GGUF_FILES))
    if gguf_files:
        hint = f". It has files in GGUF: give the path of one of them, e.g. {gguf_files[0]}"
    raise ValueError(
        f"{directory} has neither model.safetensors nor model.safetensors.index.json "
        f"(nor pytorch_model.bin){hint}"
    )


def _open_shards(
    directory: Path, index: Path, open_file: Callable[[Path], dict[str, LazyTensor]]
) -> dict[str, LazyTensor]:
    """Return the tensors of all shards that the index lists."""
    weight_map = _INDEX(read_json(index), str(index))["weight_map"]
    paths: dict[str, Path] = {}
    for name in sorted(set(weight_map.values())):
        paths[name] = find_named_file(directory, name, str(index))
    missing = [name for name, path in paths.items() if not path.exists()]
    if missing:
        raise ValueError(
            f"{directory} lacks {len(missing)} of {len(paths)} shards: {', '.join(missing)}"
        )
    _check_shards_listed(directory, index, paths)
    # Programs disagree about which of the two has precedence: transformers ignores the index.
    whole = index.name.removesuffix(".index.json")
    if whole not in paths and (directory / whole).exists():
        raise ValueError(
            f"{directory} contains two models, {whole} and the shards of {index.name}: remove the "
            "files of one of them"
        )
    # Open every file once, then look up each tensor in its file.
    shards = {name: open_file(path) for name, path in paths.items()}
    tensors: dict[str, LazyTensor] = {}
    for tensor, name in weight_map.items():
        if tensor not in shards[name]:
            raise ValueError(f"{index} places {tensor} in {name}, which does not have it")
        tensors[tensor] = shards[name][tensor]
    _check_listed(index, tensors, shards)
    _check_repeated(index, weight_map, shards)
    return tensors


def _check_shards_listed(directory: Path, index: Path, listed: Collection[str]) -> None:
    """Raise ValueError for shards of the same save that the index does not list."""
    saves = {re.sub(r"-\d+-of-", "-*-of-", name) for name in listed}
    shard_names: set[str] = set()
    for pattern in saves:
        if "-*-of-" in pattern:
            shard_names.update(path.name for path in directory.glob(pattern))
    unlisted = sorted(shard_names.difference(listed))
    if unlisted:
        raise ValueError(
            f"{index} does not list {len(unlisted)} of {len(shard_names)} shards: "
            f"{', '.join(unlisted)}"
        )


def _check_listed(
    index: Path, listed: Mapping[str, LazyTensor], shards: Mapping[str, Mapping[str, LazyTensor]]
) -> None:
    """Raise ValueError for tensors of the shards that the index does not list."""
    unlisted = []
    for shard in shards.values():
        unlisted += [tensor for tensor in shard if tensor not in listed]
    if unlisted:
        raise ValueError(
            f"{index} does not list {len(unlisted)} tensors of its shards, e.g. {unlisted[0]}: "
            "index and shards are of different saves, or the index is incomplete"
        )


def _check_repeated(
    index: Path, weight_map: Mapping[str, str], shards: Mapping[str, Mapping[str, LazyTensor]]
) -> None:
    """Raise ValueError if shards have different values of a tensor.

    transformers ignores the index and takes the last shard.
    """
    for name, shard in shards.items():
        for tensor, value in shard.items():
            listed = weight_map[tensor]
            if listed != name and not are_equal(value, shards[listed][tensor]):
                raise ValueError(
                    f"{index} places {tensor} in {listed}, and {name} has another value of it: "
                    "programs disagree about which one is used. Remove the wrong one"
                )


def check_weight_files(directory: Path, tensors: Mapping[str, LazyTensor]) -> None:
    """Read the headers of the weight files back: they must contain exactly `tensors`.

    Raises ValueError otherwise, or if the index and the files do not list the same tensors.
    """
    written = open_weights(directory)
    if written != tensors:
        differing = sorted(name for name, _ in written.items() ^ tensors.items())
        raise ValueError(
            f"{directory}: {len(written)} tensors were written, {len(tensors)} were expected; "
            f"{differing[0]} differs"
        )


_MAX_ELEMENTS = 4 << 20  # of a tensor that a worker holds, of at most four bytes each


def write_weight_files(
    directory: Path,
    stem: str,
    tensors: Mapping[str, LazyTensor],
    max_size: int,
    workers: int,
    progress: Progress,
) -> list[str]:
    """Write one file, or numbered shards of at most `max_size` bytes with an index.

    Returns the names of the files.
    """
    files = lay_out_weight_files(stem, tensors, max_size)

    def write(file: SafetensorsWriter, name: str, tensor: LazyTensor, box: Extent) -> None:
        offset, shape = box
        rows = tensor.read(offset, shape)
        file.write(name, rows, offset[0] if offset else 0)
        progress(rows.nbytes)

    # Write them. Any worker may write to any shard, so all are created first, and renamed when all
    # are complete. An upload sends its bytes in order, so it has one worker.
    if isinstance(directory, ObjectPath):
        workers = 1
    with ExitStack() as stack:
        writers: dict[str, SafetensorsWriter] = {}
        for file, shard in files.items():
            path = directory / file
            if not isinstance(path, ObjectPath):
                path = stack.enter_context(committed(path))
            writer = stack.enter_context(SafetensorsWriter(path, shard))
            writers |= dict.fromkeys(shard, writer)
        jobs = (
            partial(write, writers[name], name, tensor, box)
            for name, tensor in tensors.items()
            for box in cut_blocks(tensor, _MAX_ELEMENTS)
        )
        run_jobs(jobs, workers)
    write_index(directory, stem, files)
    return list(files)


def lay_out_weight_files(
    stem: str, tensors: Mapping[str, TensorInfo], max_size: int
) -> dict[str, dict[str, TensorInfo]]:
    """Return the tensors of each file by its name: one file, or numbered shards of at most
    `max_size` bytes.
    """
    shards = _split_into_shards(tensors, max_size)
    count = len(shards)
    if count == 1:
        return {f"{stem}.safetensors": shards[0]}
    files = {}
    for shard_number, shard in enumerate(shards, 1):
        files[f"{stem}-{shard_number:05d}-of-{count:05d}.safetensors"] = shard
    return files


def _split_into_shards(
    tensors: Mapping[str, TensorInfo], limit: int
) -> list[dict[str, TensorInfo]]:
    """Fill shards in order; a tensor larger than the limit has a file of its own."""
    shards: list[dict[str, TensorInfo]] = [{}]
    size = 0
    for name, info in tensors.items():
        if shards[-1] and size + info.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = info
        size += info.nbytes
    return shards


def write_index(directory: Path, stem: str, files: Mapping[str, Mapping[str, TensorInfo]]) -> None:
    """Write the index of a model of several files: the file of each tensor, and the total size."""
    if len(files) == 1:
        return
    weight_map: dict[str, str] = {}
    total_size = 0
    total_parameters = 0
    for file, shard in files.items():
        weight_map |= dict.fromkeys(shard, file)
        for info in shard.values():
            total_size += info.nbytes
            total_parameters += math.prod(info.shape)
    metadata = {"total_size": total_size, "total_parameters": total_parameters}
    path = directory / f"{stem}.safetensors.index.json"
    content = {"metadata": metadata, "weight_map": weight_map}
    if isinstance(path, ObjectPath):
        path.store.put(path.key, encode_json(content))
    else:
        write_json(path, content)

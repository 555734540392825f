"""Contents of a checkpoint, from its metadata and without reading tensors."""

from __future__ import annotations

import argparse
import fnmatch
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.commands.inspection.view import READ_EVERYTHING
from megatron.conversion.megatron_lm.args import read_common
from megatron.conversion.model_space.layouts import name_model_part
from megatron.conversion.opening import open_checkpoint
from megatron.core.dist_checkpointing import (
    CheckpointMetadata,
    Reader,
    StoredTensor,
    load_common,
    read_metadata,
)
from megatron.core.dist_checkpointing.format.checksums import find_checksums
from megatron.core.dist_checkpointing.mapping import TensorInfo
from megatron.planning.pictures import Shares

OPTIMIZER_STATE = "optimizer.state."  # prefix of keys, followed by the name of the state
# Axis in the output -> argument of the run.
LAYOUT_ARGS = {
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "dp": "data_parallel_size",
    "world": "world_size",
}


def collect_contents(path: Path, checkpoint_format: str, pattern: str) -> dict[str, Any]:
    """Return the fields of the JSON output, with the tensors whose keys match `pattern`."""
    # Formats differ in the facts that they store.
    tensors: Mapping[str, TensorInfo | StoredTensor]
    if checkpoint_format == "torch_dist":
        metadata = read_metadata(path)
        tensors = metadata.tensors
        facts = collect_torch_dist_facts(path, metadata)
    else:
        source = open_checkpoint(path, checkpoint_format, read_options=READ_EVERYTHING)
        tensors = source.tensors
        iteration = None
        if source.training is not None:
            iteration = source.training.iteration
        facts = collect_run_facts(source.args, iteration)

    described = {}
    for key in fnmatch.filter(tensors, pattern):
        described[key] = describe_tensor(tensors[key])
    return {
        "path": str(path),
        "format": checkpoint_format,
        **sum_sizes(tensors),
        **facts,
        "tensors": described,
    }


def describe_tensor(info: TensorInfo | StoredTensor) -> dict[str, Any]:
    """Return the entry of a tensor in the JSON output."""
    described = {
        "shape": list(info.shape),
        "dtype": info.dtype_name,
        "bytes": info.nbytes,
    }
    if isinstance(info, StoredTensor):
        described["chunks"] = len(info.chunks)
    return described


def sum_sizes(tensors: Mapping[str, TensorInfo | StoredTensor]) -> dict[str, Any]:
    """Return the number of tensors, and their bytes in total and by kind."""
    sizes: Counter[str] = Counter()
    for key, info in tensors.items():
        tensor_kind = name_kind(key)
        sizes[tensor_kind] += info.nbytes
    return {
        "num_tensors": len(tensors),
        "bytes": sum(sizes.values()),
        "bytes_by_kind": dict(sizes),
    }


def name_kind(key: str) -> str:
    """Return the kind of a tensor: weights, ema, or e.g. optimizer.state.exp_avg."""
    if key.startswith(OPTIMIZER_STATE):
        state, _, _ = key.removeprefix(OPTIMIZER_STATE).partition(".")
        return OPTIMIZER_STATE + state
    if key.startswith("ema."):
        return "ema"
    return "weights"


def collect_torch_dist_facts(path: Path, metadata: CheckpointMetadata) -> dict[str, Any]:
    """Return the origin of a torch_dist checkpoint, its objects and its files.

    The size of a missing file is None.
    """
    # Newer Megatron-LM stores the common state in a shard.
    common = load_common(path)
    if not common:
        common = read_common(Reader(path), path)

    # Other programs may store an instance of a class of theirs.
    args = common.get("args", {})
    if isinstance(args, argparse.Namespace):
        args = vars(args)
    if not isinstance(args, dict):
        args = {}

    # The metadata names the files, of which some may be missing.
    files: dict[str, int | None] = {}
    for name in sorted(metadata.file_sizes()):
        file = path / name
        files[name] = None
        if file.exists():
            files[name] = file.stat().st_size
    return {
        **collect_run_facts(args, common.get("iteration")),
        "objects": sorted(metadata.objects),
        "files": files,
        "checksums": find_checksums(path) is not None,
    }


def collect_run_facts(args: Mapping[str, Any], iteration: Any) -> dict[str, Any]:
    """Return the iteration, the layout that the checkpoint was written at, and the arguments."""
    layout = {}
    for axis, name in LAYOUT_ARGS.items():
        size = args.get(name)
        if size is not None:
            layout[axis] = size
    # Context parallelism is rare: leave its usual size out.
    if layout.get("cp") == 1:
        del layout["cp"]
    return {"iteration": iteration, "layout": layout, "args": dict(args)}


def compute_file_shares(path: Path) -> Shares:
    """Return bytes by file, part of the model and kind (weights, optimizer state, objects).

    A file is called `__{rank}_{writer}.distcp`, so this also shows the work of each rank.
    """
    metadata = read_metadata(path)
    # file -> part of the model -> kind -> bytes
    shares: dict[str, dict[str, dict[str, int]]] = {}
    for name in sorted(metadata.file_sizes(), key=extract_numbers):
        shares[name] = {}

    def add(file: str, model_part: str, tensor_kind: str, nbytes: int) -> None:
        sizes_by_part = shares[file]
        sizes_by_kind = sizes_by_part.setdefault(model_part, {})
        previous = sizes_by_kind.get(tensor_kind, 0)
        sizes_by_kind[tensor_kind] = previous + nbytes

    # Tensors, of which each chunk is in one file
    for key, tensor in metadata.tensors.items():
        model_part = name_model_part(key)
        tensor_kind = name_kind(key).removeprefix(OPTIMIZER_STATE)
        chunks = tensor.chunks
        file_indices = chunks.file.tolist()  # index in `chunks.files`
        lengths = chunks.length.tolist()  # bytes
        for file_index, length in zip(file_indices, lengths, strict=True):
            file = chunks.files[file_index]
            add(file, model_part, tensor_kind, length)

    # Objects, which several keys may share
    for location in set(metadata.objects.values()):
        add(location.file, "objects", "objects", location.length)
    return shares


def extract_numbers(name: str) -> tuple[int, ...]:
    """Return the numbers in a file name, which sort __2_0.distcp before __10_0.distcp."""
    digits = re.findall(r"\d+", name)
    return tuple(map(int, digits))

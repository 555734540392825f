"""Writes a `Source` as a torch_dist iteration directory in one process, a few megabytes at a time."""

from __future__ import annotations

import argparse
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.files import Progress, no_progress, run_jobs
from megatron.conversion.megatron_lm.extra_states import extra_states
from megatron.conversion.model_space.source import Source, TensorInfo
from megatron.core.dist_checkpointing.boxes import cut_rows, shifted
from megatron.core.dist_checkpointing.format.checksums import FileChecksums, checksums_of
from megatron.core.dist_checkpointing.format.metadata import Location
from megatron.core.dist_checkpointing.format.metadata_file import encode_metadata
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.planning.file_layout import FileLayout, PlacedItem, files_of, place_items
from megatron.core.dist_checkpointing.planning.planner import LocalSpec, TensorSpec, make_plan, pack
from megatron.core.dist_checkpointing.saving.commit import PendingSave, RankResult
from megatron.core.dist_checkpointing.saving.shard_file import ShardFile
from megatron.core.dist_checkpointing.saving.snapshot import common_archive, object_file
from megatron.core.durable_files import write_durably

_BUFFER = 32 << 20  # bytes; a multiple of the checksums' blocks

# The form of the optimizer state, in Megatron-core's terms: one key per layer, at the parameter's shape.
CONTENT_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
    "non_homogeneous_layers": True,
}


def write_torch_dist(source: Source, directory: Path, files: int = 1, progress: Progress = no_progress) -> list[str]:
    """Write `directory` (an iteration), `files` files at once; it appears complete or not at all.

    Returns what could not be carried: nothing.
    """
    spec = LocalSpec(tuple(_whole(key, info) for key, info in source.tensors.items()), ())
    placed = place_items(make_plan([pack(spec)]), files)
    layouts = files_of(spec, placed.of_rank(0), 0)
    save = PendingSave.begin(directory, f"convert-{os.getpid()}", 0, 1)
    written: dict[str, FileChecksums] = {}
    try:
        jobs = [_job(source, save.pending, layout, progress, written) for layout in layouts]
        run_jobs(jobs, files)
        objects = _write_objects(source, save.pending, files, written)
        metadata = encode_metadata(replace(placed.metadata(), objects=objects))
        save.commit(RankResult(written, {}), metadata, common_archive(common_state(source)))
    except BaseException as error:
        save.abandon(str(error))
        save.forget()
        raise
    return []


def _job(
    source: Source, directory: Path, layout: FileLayout, progress: Progress, written: dict[str, FileChecksums]
) -> Callable[[], None]:
    def job() -> None:
        written[layout.name] = _write_file(source, directory / layout.name, layout, progress)

    return job


def _write_objects(
    source: Source, directory: Path, files: int, written: dict[str, FileChecksums]
) -> dict[str, Location]:
    """What Megatron-core asks for, and the generators, for a run that goes on at the layout they belong to."""
    rng = source.training.rng if source.training is not None else {}
    generators = [ShardedObject(key, read()) for key, read in rng.items()]
    objects = object_file([*extra_states(source.tensors).values(), *generators], 0, files)
    if objects.content:
        write_durably(directory / objects.name, objects.content)
        written[objects.name] = checksums_of(objects.content)
    return objects.locations


def common_state(source: Source) -> dict[str, Any]:
    """`common.pt` of a checkpoint with the arguments and the training state of `source`."""
    training = source.training
    args = dict(source.args) | {"ckpt_format": "torch_dist", "use_dist_ckpt": True}
    # Megatron-LM's reader takes the checkpoint's word for what it may ask for.
    args["no_save_optim"] = training is None or training.param_groups is None
    args["no_save_rng"] = training is None or not training.rng
    args.setdefault("consumed_train_samples", 0)
    args.setdefault("consumed_valid_samples", 0)
    common: dict[str, Any] = {
        "args": argparse.Namespace(**args),
        "checkpoint_version": 3.0,
        "iteration": training.iteration if training else 0,
        "num_floating_point_operations_so_far": training.num_floating_point_operations_so_far if training else 0.0,
        "content_metadata": CONTENT_METADATA,
    }
    if training is not None and training.param_groups is not None:
        optimizer: dict[str, Any] = {"optimizer": {"param_groups": training.param_groups}}
        if training.grad_scaler is not None:
            optimizer["grad_scaler"] = training.grad_scaler
        common["optimizer"] = optimizer | {"param_state_sharding_type": "fully_reshardable"}
    if training is not None and training.scheduler is not None:
        common["opt_param_scheduler"] = training.scheduler
    return common


def _whole(key: str, info: TensorInfo) -> TensorSpec:
    return TensorSpec(key, info.shape, info.dtype, (((0,) * len(info.shape), info.shape),))


def _write_file(source: Source, path: Path, layout: FileLayout, progress: Progress) -> FileChecksums:
    """Stream the items of one file through a page-aligned buffer (for direct writes) into it."""
    shard = ShardFile(path, layout.size)
    buffer = memoryview(mmap.mmap(-1, _BUFFER))  # goes with its last slice, which an error's traceback may hold
    durable = False
    try:
        filled, offset = 0, 0
        for segment in _segments(source, layout):
            position = 0
            while position < len(segment):
                count = min(len(segment) - position, _BUFFER - filled)
                buffer[filled : filled + count] = segment[position : position + count]
                filled, position = filled + count, position + count
                if filled == _BUFFER:
                    shard.write(offset, buffer, filled)
                    filled, offset = 0, offset + _BUFFER
                    progress(_BUFFER)
        if filled:
            shard.write(offset, buffer, filled)
            progress(filled)
        durable = True
    finally:
        checksums = shard.close(durable)
    return checksums


def _segments(source: Source, layout: FileLayout) -> Iterator[memoryview]:
    """All bytes of a file in order."""
    for placed in layout.items:
        yield memoryview(placed.envelope.prefix)
        for tensor in _rows(source, placed):
            yield tensor.contiguous().view(-1).view(torch.uint8).numpy().data
        yield memoryview(placed.envelope.suffix)
        yield memoryview(bytes(placed.end - placed.position - placed.length))


def _rows(source: Source, placed: PlacedItem) -> Iterator[torch.Tensor]:
    """The item's tensor in runs of rows of at most the buffer's size."""
    key, offset, shape = placed.item.key, placed.item.offset, placed.item.shape
    for start, extent in cut_rows(shape, placed.item.dtype.itemsize, _BUFFER):
        yield source.read(key, shifted(offset, start), extent)

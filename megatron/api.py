"""Functions for Python programs: the tools without a command line.

See docs/library.md. Options have the names and meanings of the tools' flags. Errors of the caller
are ValueError, with the value, the reason and the fix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from megatron.conversion import checkpoint_conversion as conversion
from megatron.conversion import opening
from megatron.conversion.checkpoint_conversion import ConversionReport
from megatron.conversion.editing.merged_source import MergedSource
from megatron.conversion.model_space.optimizer_states import average_key
from megatron.conversion.model_space.views import AveragedWeights, get_dtype
from megatron.conversion.options import EditOptions, ReadOptions, WriteOptions
from megatron.core.dist_checkpointing.saving.commit import Progress, no_progress
from megatron.core.object_path import path_of
from megatron.core.run_checkpoint.keys import WORD_EMBEDDINGS
from megatron.core.run_checkpoint.source import Source
from megatron.core.wings import resolve
from megatron.transfer.deltas import (
    Patch,
    apply_delta,
    read_patches,
    write_delta,
)
from megatron.transfer.engine_shards import view_engine_shards
from megatron.transfer.engine_tensors import list_engine_tensors, view_engine_tensors
from megatron.transfer.models import DeltaReport
from megatron.transfer.routing import plan_transfer
from megatron.transfer.schedule import Transfer, TransferSchedule
from megatron.transfer.slime_deltas import write_slime_delta

if TYPE_CHECKING:
    from megatron.planning.run_plan import RunPlan

__all__ = [
    "ConversionReport",
    "DeltaReport",
    "EditOptions",
    "Patch",
    "ReadOptions",
    "Source",
    "Transfer",
    "TransferSchedule",
    "WriteOptions",
    "apply_delta",
    "convert",
    "list_engine_tensors",
    "merge",
    "open_checkpoint",
    "plan",
    "plan_transfer",
    "read_patches",
    "view_engine_shards",
    "view_engine_tensors",
    "write_delta",
    "write_slime_delta",
]

# Imported for `plan`: converters start faster without them
PARSE_FLAGS = "megatron.planning.alternatives:parse_planned_flags"
PLAN_FLAGS = "megatron.planning.alternatives:plan_flags"
MODEL_PROVIDER = "pretrain_gpt:model_provider"


def _ignore_size(num_bytes: int) -> None:
    """Ignore the number of bytes that follow."""


def open_checkpoint(
    path: str | Path,
    *,
    format: str = "auto",
    iteration: int | None = None,
    options: ReadOptions | None = None,
) -> Source:
    """Open a checkpoint of any format, without reading its tensors.

    `path` is a run's --save directory, one iteration, a model directory, or a URL in object
    storage. The result has `args`, `training` (iteration and samples; None for a model alone), and
    `tensors`, the global tensors by key: shape, dtype and `read(offset, extent)`.
    """
    return opening.open_checkpoint(path_of(path), format, iteration, options)


def convert(
    source: str | Path,
    target: str | Path,
    format: str,
    *,
    iteration: int | None = None,
    source_format: str = "auto",
    read_options: ReadOptions | None = None,
    write_options: WriteOptions | None = None,
    overwrite: bool = False,
    verify: bool = False,
    progress: Progress = no_progress,
    starting: Callable[[int], None] = _ignore_size,
) -> ConversionReport:
    """Write the checkpoint `source` to the directory `target`.

    `format` is torch_dist, legacy, hf or universal. The target appears complete or not at all. With
    `verify` it is read back and compared. `starting` receives the number of bytes to write or to
    compare, and `progress` those just done.
    """
    return conversion.convert(
        path_of(source),
        path_of(target),
        format,
        source_format,
        iteration,
        read_options,
        write_options,
        overwrite,
        verify,
        progress,
        starting,
    )


def merge(
    inputs: Sequence[str | Path],
    target: str | Path,
    *,
    weights: Sequence[float] | None = None,
    format: str | None = None,
    base: int = -1,
    keep_optimizer: bool = False,
    read_options: ReadOptions | None = None,
    write_options: WriteOptions | None = None,
    overwrite: bool = False,
    verify: bool = False,
    progress: Progress = no_progress,
    starting: Callable[[int], None] = _ignore_size,
) -> ConversionReport:
    """Write the sum of `inputs` times `weights` (default: their mean) to the directory `target`.

    Arguments, iteration, the default of `format` and, with `keep_optimizer`, the optimizer state
    are those of the input with the index `base`.
    """
    paths = [path_of(path) for path in inputs]
    if not paths:
        raise ValueError("merge needs at least one input")
    if not -len(paths) <= base < len(paths):
        raise ValueError(f"base={base} is not the index of one of {len(paths)} inputs")
    base %= len(paths)
    if weights is None:
        weights = [1 / len(paths)] * len(paths)
    if len(weights) != len(paths):
        raise ValueError(f"merge got {len(weights)} weights for {len(paths)} inputs")
    write_options = write_options or WriteOptions()

    # Main parameters are part of the optimizer state, which is read even if the result has none.
    checkpoints = [opening.require_checkpoint(path) for path in paths]
    sources = [opening.open_found(checkpoint, read_options) for checkpoint in checkpoints]
    # A sum of averages has no averages.
    options = dataclasses.replace(write_options, optimizer=True, weights="model")
    dtype = get_dtype(options.dtype)
    if write_options.weights == "ema":
        # The averages are fp32, and their sum is rounded once.
        dtype = dtype or sources[base].tensors[WORD_EMBEDDINGS].dtype
        sources = [AveragedWeights(source, torch.float32) for source in sources]

    # One tensor at a time is evaluated while the target is written.
    merged = MergedSource(sources, weights, base, dtype, keep_optimizer)
    ema_key = average_key(WORD_EMBEDDINGS)
    if any(ema_key in source.tensors for source in sources):
        options.note(
            "averages of the weights (ema.*) of the inputs: left out; --weights ema merges them"
        )
    report = conversion.write_checkpoint(
        merged,
        paths,
        path_of(target),
        format or checkpoints[base].format,
        options,
        overwrite,
        verify,
        progress,
        starting,
    )
    if options.foreign is not None:  # copied from another checkpoint
        return report
    return dataclasses.replace(report, foreign=dict.fromkeys(report.foreign, "merged"))


def plan(flags: Sequence[str], world_size: int = 1) -> RunPlan:
    """Return memory, checkpoint bytes, bubble and traffic of every stage of a run.

    `flags` are those of pretrain_gpt.py. `RunPlan.largest` is the memory of the fullest rank.
    """
    flag_values = resolve(PARSE_FLAGS)(flags)
    run_plan: RunPlan
    _, run_plan = resolve(PLAN_FLAGS)(flag_values, world_size, resolve(MODEL_PROVIDER))
    return run_plan

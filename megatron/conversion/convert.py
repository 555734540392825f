"""From any format to any format, through model space."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.deepspeed.writer import UniversalOptions, write_universal
from megatron.conversion.files import Progress, exclusive_output_dir, no_progress
from megatron.conversion.huggingface.writer import HuggingFaceOptions, write_huggingface
from megatron.conversion.megatron_lm.legacy_writer import write_legacy
from megatron.conversion.megatron_lm.torch_dist_writer import StackedLayers, write_torch_dist
from megatron.conversion.model_space.rank_layout import Layout
from megatron.conversion.model_space.source import (
    ADAM,
    Shape,
    Source,
    TensorInfo,
    TrainingState,
    full_precision_key,
    optimizer_states,
)
from megatron.conversion.open_checkpoint import Hints, open_checkpoint
from megatron.core.dist_checkpointing import write_tracker
from megatron.core.dist_checkpointing.format.schema import file_name
from megatron.core.durable_files import fsync_tree, put_in_place
from megatron.core.object_storage import ObjectPath

_VERIFY_BYTES = 64 << 20


@dataclass(frozen=True)
class Options:
    """How the target shall be; None means as the source is."""

    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    virtual_pipeline_parallel: int | None = None
    dtype: torch.dtype | None = None
    optimizer: bool = True
    vocab_size: int | None = None
    tokenizer: Path | None = None
    max_shard_size: int = 5 * 10**9
    optim_sidecar: bool = False
    workers: int = 1
    universal_style: str | None = None
    qkv_blocks: bool = False
    transformer_impl: str | None = None  # whose modules of Megatron-LM legacy files are for
    stacked_layers: bool = False
    trusted: tuple[Path, ...] = ()  # where a tokenizer that the checkpoint names may lie, besides the checkpoint itself
    note: Callable[[str], None] = lambda text: None  # told what else is worth a line


Writer = Callable[[Source, Path, Options, Progress], list[str]]  # returns what could not be carried


def _write_torch_dist(source: Source, root: Path, options: Options, progress: Progress) -> list[str]:
    stored = StackedLayers(source) if options.stacked_layers else source
    return _in_iteration(source, root, lambda to: write_torch_dist(stored, to, options.workers, progress))


def _write_legacy(source: Source, root: Path, options: Options, progress: Progress) -> list[str]:
    layout = _target_layout(source.args, options)
    return _in_iteration(source, root, lambda to: write_legacy(source, to, layout, options.workers, progress))


def _write_huggingface(source: Source, root: Path, options: Options, progress: Progress) -> list[str]:
    chosen = HuggingFaceOptions(
        options.dtype,
        options.max_shard_size,
        options.vocab_size,
        options.tokenizer,
        options.trusted,
        options.optim_sidecar and source.training is not None,
        options.workers,
        options.note,
    )
    return write_huggingface(source, root, chosen, progress)


def _write_universal(source: Source, root: Path, options: Options, progress: Progress) -> list[str]:
    tensor_parallel = options.tensor_parallel or source.args.get("tensor_model_parallel_size") or 1
    blocks = tensor_parallel if options.qkv_blocks else None
    chosen = UniversalOptions(options.universal_style, blocks, options.vocab_size, options.workers)
    return write_universal(source, root, chosen, progress)


WRITERS: dict[str, Writer] = {
    "torch_dist": _write_torch_dist,
    "legacy": _write_legacy,
    "hf": _write_huggingface,
    "universal": _write_universal,
}


@dataclass(frozen=True)
class ConversionReport:
    """What was converted, and what not."""

    source: str
    target: Path
    num_tensors: int
    not_carried: list[str]
    verified: int | None  # tensors compared with the source


def convert(
    load_dir: Path,
    save_dir: Path,
    saver: str,
    loader: str = "auto",
    step: int | None = None,
    hints: Hints | None = None,
    options: Options | None = None,
    overwrite: bool = False,
    verify: bool = False,
    progress: Progress = no_progress,
    starting: Callable[[int], None] = lambda nbytes: None,
) -> ConversionReport:
    """Write the checkpoint at `load_dir` to `save_dir` in the format `saver`; it appears there whole or not at all.

    `starting` is told how many bytes are to come: first to be written, then, with `verify`, compared. ValueError for
    an existing target without `overwrite`, an unreadable source, and a target that cannot hold the model: nothing is
    left behind then.
    """
    options = options or Options()
    options = dataclasses.replace(options, trusted=(*options.trusted, load_dir))
    source = open_checkpoint(load_dir, loader, step, hints)
    if save_dir.exists() and not (save_dir.is_dir() and not any(save_dir.iterdir())) and not overwrite:
        raise ValueError(f"{save_dir} exists: choose another --save-dir, or give --overwrite to replace it")
    if save_dir.resolve() == load_dir.resolve() or load_dir.resolve().is_relative_to(save_dir.resolve()):
        raise ValueError(f"--save-dir {save_dir} is or contains the source {load_dir}: nothing would be left of it")
    if isinstance(save_dir, ObjectPath) and (saver != "torch_dist" or overwrite):
        reason = "nothing is replaced there: delete it first" if overwrite else "give --saver torch_dist or a directory"
        raise ValueError(f"--save-dir {save_dir}: object storage holds torch_dist checkpoints alone; {reason}")
    changed = CastSource(source, options)
    starting(bytes_to_write(changed, saver, options))

    def compare_with_source(written: Path) -> int | None:
        if not verify:
            return None
        target = open_checkpoint(written)
        starting(sum(info.nbytes for info in target.tensors.values()))
        return compare(changed, target, progress)

    unused = [f"unused in the source: {name}" for name in source.unused]
    if isinstance(save_dir, ObjectPath):  # a commit there is one request, at the end
        not_carried = WRITERS[saver](changed, save_dir, options, progress)
        verified = compare_with_source(save_dir)
        return ConversionReport(source.description, save_dir, len(changed.tensors), not_carried + unused, verified)
    partial = save_dir.with_name(f".{save_dir.name}.converting")
    with exclusive_output_dir(partial):
        not_carried = WRITERS[saver](changed, partial, options, progress)
        fsync_tree(partial)
        verified = compare_with_source(partial)
        put_in_place(partial, save_dir)
    return ConversionReport(source.description, save_dir, len(changed.tensors), not_carried + unused, verified)


def bytes_to_write(source: Source, saver: str, options: Options) -> int:
    """About how many: without the little that a format adds."""
    weights = [info for key, info in source.tensors.items() if not key.startswith("optimizer.")]
    if saver == "hf" and not options.optim_sidecar:
        return sum(info.nbytes for info in weights)
    if saver == "universal":  # every state in fp32
        states = len(optimizer_states(source.tensors) or ADAM)
        return sum(states * 4 * math.prod(info.shape) for info in weights)
    return sum(info.nbytes for info in source.tensors.values())


class CastSource:
    """A source as the options want it: another dtype of the weights, or without the optimizer.

    A new dtype is cast from the fp32 main parameters where there are some.
    """

    def __init__(self, source: Source, options: Options) -> None:
        self._source, self._dtype = source, options.dtype
        self.description, self.unused = source.description, source.unused
        self.args = dict(source.args)
        self.training: TrainingState | None = source.training
        self.tensors: dict[str, TensorInfo] = {}
        for key, info in source.tensors.items():
            is_state = key.startswith("optimizer.state.")
            if is_state and not options.optimizer:
                continue
            cast = options.dtype is not None and not is_state
            self.tensors[key] = TensorInfo(info.shape, options.dtype) if cast and options.dtype else info
        if options.dtype is not None:
            self.args |= {"bf16": options.dtype == torch.bfloat16, "fp16": options.dtype == torch.float16}
            self.args["params_dtype"] = options.dtype
        if options.transformer_impl is not None:
            self.args["transformer_impl"] = options.transformer_impl
        if not options.optimizer and source.training is not None:
            self.training = dataclasses.replace(source.training, param_groups=None, scheduler=None, grad_scaler=None)

    def read(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        wanted = self.tensors[key].dtype
        if wanted != self._source.tensors[key].dtype:
            key = full_precision_key(key, self._source.tensors)
        return self._source.read(key, offset, shape).to(wanted)


def compare(source: Source, result: Source, progress: Progress = no_progress) -> int:
    """Number of tensors of `result` found bitwise equal to `source`; ValueError names the first that is not."""
    count = 0
    for key, info in result.tensors.items():
        if key not in source.tensors:
            raise ValueError(f"verification: {result.description} has {key}, which the source has not")
        rows = info.shape[0] if info.shape else 1
        step = max(1, _VERIFY_BYTES // max(1, info.nbytes // max(1, rows)))
        for first in range(0, rows, step):
            lead = (min(step, rows - first), *info.shape[1:]) if info.shape else ()
            offset = (first,) + (0,) * (len(info.shape) - 1) if info.shape else ()
            expected = source.read(key, offset, lead).to(info.dtype)
            if not torch.equal(result.read(key, offset, lead), expected):
                raise ValueError(f"verification: {key} differs from the source (rows from {first} on)")
            progress(expected.nbytes)
        count += 1
    lost = [key for key in source.tensors if key not in result.tensors and not _left_out(key, result)]
    if lost:
        raise ValueError(f"verification: {result.description} lacks {len(lost)} tensors of the source, {lost[0]} first")
    return count


def _left_out(key: str, result: Source) -> bool:
    """Optimizer state, where the result has none at all: the format cannot hold it, or it was not wanted."""
    return key.startswith("optimizer.") and not any(other.startswith("optimizer.") for other in result.tensors)


def _target_layout(args: Mapping[str, Any], options: Options) -> Layout:
    """The source's layout where the options say nothing; chunks and uneven stages go with their pipeline."""
    pp = options.pipeline_parallel or args.get("pipeline_model_parallel_size") or 1
    same_pipeline = pp == (args.get("pipeline_model_parallel_size") or 1)
    vpp = options.virtual_pipeline_parallel
    if vpp is None:
        vpp = (args.get("virtual_pipeline_model_parallel_size") or 1) if same_pipeline else 1
    ends = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    first, last = (args.get(name) if same_pipeline else None for name in ends)
    tp = options.tensor_parallel or args.get("tensor_model_parallel_size") or 1
    return Layout.of(args["num_layers"], tp, pp, vpp, first, last)


def _in_iteration(source: Source, root: Path, write: Callable[[Path], list[str]]) -> list[str]:
    """Below `root` as a run saves it: a directory per iteration, and the tracker last."""
    training = source.training
    begun = training is not None and (training.iteration > 0 or training.param_groups is not None)
    iteration: int | str = training.iteration if training is not None and begun else "release"
    name = iteration if isinstance(iteration, str) else f"iter_{iteration:07d}"
    not_carried = write(root / file_name(name, "the iteration"))
    write_tracker(root, iteration)
    return not_carried

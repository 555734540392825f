"""Conversion of a checkpoint: open one of any format, and write it in any other format.

Every format is read into and written from model space, see `core.run_checkpoint.source`.
"""

from __future__ import annotations

import dataclasses
import errno
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.deepspeed.universal_writer import write_universal
from megatron.conversion.editing.edits import apply_edits
from megatron.conversion.gguf.writer import write_gguf
from megatron.conversion.huggingface.adapter_writer import write_adapter
from megatron.conversion.huggingface.directory_writer import list_foreign_fields, write_huggingface
from megatron.conversion.megatron_lm.hybrid import HybridLayers
from megatron.conversion.megatron_lm.legacy_writer import write_legacy
from megatron.conversion.megatron_lm.torch_dist_writer import StackedLayers, write_torch_dist
from megatron.conversion.model_space.foreign import WithForeignTensors, foreign_name
from megatron.conversion.model_space.layouts import Layout
from megatron.conversion.model_space.lazy_tensors import cast
from megatron.conversion.model_space.optimizer_states import (
    ADAM,
    average_key,
    full_precision_key,
    has_mixed_states,
    optimizer_states,
)
from megatron.conversion.model_space.pieces import is_bitwise_equal
from megatron.conversion.model_space.views import AveragedWeights, SourceView, get_dtype
from megatron.conversion.opening import open_checkpoint, require_checkpoint
from megatron.conversion.options import GGUF_QUANTIZATIONS, ReadOptions, WriteOptions
from megatron.conversion.output_directory import replaced_directory
from megatron.conversion.stored_tokenizer import copy_tokenizer_files, write_tokenizer_files
from megatron.core.dist_checkpointing import CheckpointDirectory, load_common, write_tracker
from megatron.core.dist_checkpointing.mapping import TensorInfo, cut_rows
from megatron.core.dist_checkpointing.saving.commit import Progress, no_progress
from megatron.core.object_path import ObjectPath
from megatron.core.run_checkpoint.keys import WORD_EMBEDDINGS, is_foreign, is_weight
from megatron.core.run_checkpoint.native_reader import open_run_checkpoint
from megatron.core.run_checkpoint.source import Source
from megatron.core.safe_files.schema import file_name
from megatron.core.terminal import format_size

_COMPARED_BYTES = 64 << 20  # of a tensor at once
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


# ---- Writing ----


def _write_torch_dist(
    source: Source, root: Path, options: WriteOptions, progress: Progress
) -> list[str]:
    view = source
    if options.stacked_layers and options.hybrid_layers:
        raise ValueError(
            "--stacked-layers and --hybrid-layers are mutually exclusive: layers of HybridModel "
            "differ"
        )
    if options.stacked_layers:
        view = StackedLayers(source)
    elif options.hybrid_layers:
        view = HybridLayers(source)

    def write(directory: Path) -> list[str]:
        tokenizer = copy_tokenizer_files(source.args, options.trusted)
        return write_torch_dist(view, directory, options.workers, progress, tokenizer)

    return _write_iteration(source, root, write)


def _write_legacy(
    source: Source, root: Path, options: WriteOptions, progress: Progress
) -> list[str]:
    layout = choose_target_layout(source.args, options)

    def write(directory: Path) -> list[str]:
        lost = write_legacy(source, directory, layout, options.workers, progress)
        write_tokenizer_files(copy_tokenizer_files(source.args, options.trusted), directory)
        return lost

    return _write_iteration(source, root, write)


# Each returns a note for each part that is lost.
WRITERS: dict[str, Callable[[Source, Path, WriteOptions, Progress], list[str]]] = {
    "torch_dist": _write_torch_dist,
    "legacy": _write_legacy,
    "hf": write_huggingface,
    "universal": write_universal,
}
# The same for formats that contain weights only.
WEIGHT_WRITERS = {"gguf": write_gguf}


def _write_iteration(source: Source, root: Path, write: Callable[[Path], list[str]]) -> list[str]:
    """Write to a directory in `root` as a run does: one per iteration, and the tracker last."""
    training = source.training
    iteration: int | str = "release"
    if training is not None and (training.iteration > 0 or training.param_groups is not None):
        iteration = training.iteration
    directory = CheckpointDirectory(root).path(iteration)
    file_name(directory.name, "the iteration")
    not_carried = write(directory)
    write_tracker(root, iteration)
    return not_carried


def choose_target_layout(args: Mapping[str, Any], options: WriteOptions) -> Layout:
    """Return the layout to write: the source's, unless the options change it.

    Another number of stages resets chunks and uneven stages.
    """

    def get_stored_size(axis: str) -> int:
        return args.get(f"{axis}_parallel_size") or 1

    # Dense layers.
    tp = options.tensor_parallel or get_stored_size("tensor_model")
    stored_pp = get_stored_size("pipeline_model")
    pp = options.pipeline_parallel or stored_pp
    vpp = options.virtual_pipeline_parallel or 1
    splits: dict[str, Any] = {}
    if pp == stored_pp:
        vpp = options.virtual_pipeline_parallel or get_stored_size("virtual_pipeline_model")
        for name in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"):
            splits[name] = args.get(name)
    if (args.get("num_experts") or 0) <= 1:
        return Layout.of(args["num_layers"], tp, pp, vpp, splits)

    # Experts.
    ep = options.expert_parallel or get_stored_size("expert_model")
    etp = options.expert_tensor_parallel
    if ep == 1 and etp not in (None, tp):
        raise ValueError(
            f"--target-expert-tensor-parallel-size {etp} needs "
            "--target-expert-model-parallel-size: without expert parallelism legacy files split "
            f"experts as dense layers, over {tp} ranks"
        )
    if etp is None and tp == get_stored_size("tensor_model"):
        etp = args.get("expert_tensor_parallel_size")
    if ep == 1:  # experts are split like dense layers
        etp = None
    return Layout.of(args["num_layers"], tp, pp, vpp, splits, (ep, etp))


# ---- Conversion ----


@dataclass(frozen=True)
class ConversionReport:
    """The result of a conversion."""

    source: str
    target: Path
    saver: str  # format of the target
    num_tensors: int
    not_carried: list[str]  # parts that the target format cannot hold
    verified: int | None  # number of tensors compared with the source
    rounded: int  # number of tensors in a smaller dtype than in the source
    foreign: dict[str, str]  # tensor that the model does not have -> how it was converted
    unused: list[str]  # names of parts of the source that the model does not have, left out


def convert(
    load_dir: Path,
    save_dir: Path,
    saver: str,
    loader: str = "auto",
    step: int | None = None,
    read_options: ReadOptions | None = None,
    options: WriteOptions | None = None,
    overwrite: bool = False,
    verify: bool = False,
    progress: Progress = no_progress,
    starting: Callable[[int], None] = lambda nbytes: None,
) -> ConversionReport:
    """Write the checkpoint at `load_dir` to `save_dir` in the format `saver`.

    The target appears complete or not at all. With `verify` it is read back and compared with the
    source. `starting` receives the number of bytes to write and then the number to compare. Raises
    ValueError for an existing target without `overwrite`, an unreadable source, or a format that
    cannot hold the model; partial results are removed.
    """
    adapters = _open_adapters(load_dir, loader, step)
    if adapters is not None:
        return _write_adapters(adapters, load_dir, save_dir, saver, overwrite, progress)
    source = open_checkpoint(load_dir, loader, step, read_options)
    return write_checkpoint(
        source, [load_dir], save_dir, saver, options, overwrite, verify, progress, starting
    )


def _open_adapters(load_dir: Path, loader: str, step: int | None) -> Source | None:
    """Return the checkpoint of a run with adapters (--lora-rank), None for any other checkpoint."""
    checkpoint = require_checkpoint(load_dir, step, loader)
    if checkpoint.format != "torch_dist":
        return None
    common = load_common(checkpoint.directory)
    if getattr(common.get("args"), "lora_base_model", None) is None:
        return None
    return open_run_checkpoint(checkpoint.directory)


def _write_adapters(
    source: Source, load_dir: Path, save_dir: Path, saver: str, overwrite: bool, progress: Progress
) -> ConversionReport:
    """Write adapters as files of PEFT."""
    if saver != "hf":
        raise ValueError(
            f"{source.description} contains adapters, not a model: --saver hf writes them as files "
            "of PEFT, which --lora merges into their base model"
        )
    _check_target(save_dir, [load_dir], saver, overwrite)

    def write(directory: Path) -> ConversionReport:
        write_adapter(source, directory, progress)
        lost = ["state of the optimizer"] if optimizer_states(source.tensors) else []
        return ConversionReport(
            source.description, save_dir, saver, len(source.tensors), lost, None, 0, {}, []
        )

    return _write_beside(save_dir, _sum_bytes(source.tensors.values()), write)


def write_checkpoint(
    source: Source,
    origins: Sequence[Path],
    save_dir: Path,
    saver: str,
    options: WriteOptions | None = None,
    overwrite: bool = False,
    verify: bool = False,
    progress: Progress = no_progress,
    starting: Callable[[int], None] = lambda nbytes: None,
) -> ConversionReport:
    """Write `source`, which is read from the paths `origins`, as `convert` does."""
    options = options or WriteOptions()
    for original in (options.foreign, options.quantized_original):
        if original is not None:
            origins = [*origins, original]
    _check_target(save_dir, [*origins, *options.edits.adapters], saver, overwrite)
    if verify and options.quantization is not None:
        raise ValueError(
            f"--quantize {options.quantization} rounds the weights, so --verify-target would find "
            "differences: give one of them"
        )
    is_gguf_encoding = options.quantization in GGUF_QUANTIZATIONS
    if options.quantization is not None and is_gguf_encoding != (saver == "gguf"):
        raise ValueError(
            f"--quantize {options.quantization} is not an encoding of --saver {saver}: give "
            f"--saver gguf for {', '.join(GGUF_QUANTIZATIONS)}, --saver hf for the other encodings"
        )
    options = dataclasses.replace(
        options,
        trusted=(*options.trusted, *origins),
        optim_sidecar=options.optim_sidecar and source.training is not None,
    )
    if isinstance(save_dir, ObjectPath) and options.optim_sidecar and saver == "hf":
        raise ValueError(
            f"--save-dir {save_dir}: --save-optim-sidecar needs a directory; in object storage "
            "give --saver torch_dist, which contains the optimizer state"
        )
    source, changed, notes = _apply_options(source, saver, options)
    num_bytes = estimate_bytes(changed, saver, options)
    starting(num_bytes)

    def write(directory: Path) -> ConversionReport:
        lost = (WRITERS | WEIGHT_WRITERS)[saver](changed, directory, options, progress)
        lost += notes
        lost += [f"unused in the source: {name}" for name in source.unused]
        foreign = _describe_foreign(source, changed, options)
        compared = None
        rounded = 0
        if verify:
            target = _reopen(changed, directory, bool(foreign))
            starting(_sum_bytes(target.tensors.values()))
            compared = compare(changed, target, progress)
            rounded = _count_rounded(source, target)
        return ConversionReport(
            source.description,
            save_dir,
            saver,
            len(changed.tensors),
            lost,
            compared,
            rounded,
            foreign,
            source.unused,
        )

    # Object storage: the checkpoint or model is committed with one request at the end.
    if isinstance(save_dir, ObjectPath):
        return write(save_dir)
    return _write_beside(save_dir, num_bytes, write)


def _apply_options(
    source: Source, saver: str, options: WriteOptions
) -> tuple[Source, Source, list[str]]:
    """Return the source before and after edits and casts, and notes about parts that are left out.

    Both have the foreign tensors and the average that the options select.
    """
    if options.foreign is not None:
        kept = ReadOptions(keep_foreign=True, no_optim=True)
        original = open_checkpoint(options.foreign, read_options=kept)
        source = WithForeignTensors(source, original)
    notes = []
    if options.weights == "ema":
        source = AveragedWeights(source, get_dtype(options.dtype))
    elif saver != "torch_dist" and average_key(WORD_EMBEDDINGS) in source.tensors:
        notes.append("average of the weights (ema.*): give --weights ema to write it as weights")
    changed = CastSource(apply_edits(source, options), options)
    if saver != "torch_dist":
        changed.drop_average()
    _check_optimizer(changed, saver)
    return source, changed, notes


def _describe_foreign(source: Source, changed: Source, options: WriteOptions) -> dict[str, str]:
    """Return what happens to each foreign tensor, by name."""
    actions = {}
    for key, info in changed.tensors.items():
        if is_foreign(key):
            action = "copied as it is"
            if info != source.tensors[key]:
                action = f"cast to {info.dtype_name}"
            elif options.edits.adapters:
                action = "copied, unless an adapter changes it"
            actions[foreign_name(key)] = action
    return actions


def _reopen(written: Source, directory: Path, has_foreign: bool) -> Source:
    """Open the result, with the parts that `written` has."""
    # Universal files of a source without optimizer state contain zeros.
    read_options = ReadOptions(
        no_optim=not optimizer_states(written.tensors),
        ignored_fields=list_foreign_fields(written.args),
        keep_foreign=has_foreign,
    )
    return open_checkpoint(directory, read_options=read_options)


def _write_beside(
    save_dir: Path, num_bytes: int, write: Callable[[Path], ConversionReport]
) -> ConversionReport:
    """Write next to the target, which appears complete or not at all."""
    try:
        with replaced_directory(save_dir) as pending:
            report = write(pending)
    except OSError as error:
        if error.errno in _DISK_FULL:
            raise OSError(
                error.errno,
                f"{error.strerror}: {save_dir} was not written. It needs "
                f"{format_size(num_bytes)} of free space; an existing directory is replaced only "
                "when the new one is complete",
            ) from error
        raise
    return report


def _count_rounded(source: Source, target: Source) -> int:
    """Return the number of tensors that `target` has in a smaller dtype than `source`."""
    count = 0
    for key, info in target.tensors.items():
        original = source.tensors.get(key)
        if original is not None and original.dtype.itemsize > info.dtype.itemsize:
            count += 1
    return count


class CastSource(SourceView):
    """A view of a source with weights of another dtype, or without the optimizer.

    Weights of a new dtype are cast from the fp32 main parameters, if the source has them.
    """

    def __init__(self, source: Source, options: WriteOptions) -> None:
        super().__init__(source)
        dtype = get_dtype(options.dtype)
        if dtype is not None:
            for key, new_dtype in self.choose_dtypes(dtype).items():
                if new_dtype != self.tensors[key].dtype:
                    source_key = full_precision_key(key, source.tensors)
                    self.tensors[key] = cast(source.tensors[source_key], new_dtype)
            self.args["bf16"] = dtype == torch.bfloat16
            self.args["fp16"] = dtype == torch.float16
            self.args["params_dtype"] = dtype
        if options.target_transformer_impl is not None:
            self.args["transformer_impl"] = options.target_transformer_impl
        if not options.optimizer:
            self.drop_optimizer()


_OBJECT_SAVERS = ("torch_dist", "hf")


def _check_target(save_dir: Path, origins: Sequence[Path], saver: str, overwrite: bool) -> None:
    """Raise ValueError unless the target may be written."""
    is_empty = save_dir.is_dir() and not any(save_dir.iterdir())
    if save_dir.exists() and not is_empty and not overwrite:
        raise ValueError(
            f"{save_dir} exists: choose another --save-dir, or give --overwrite to replace it"
        )
    # The target must not replace a source.
    target = save_dir.resolve()
    for origin in origins:
        if origin.resolve().is_relative_to(target):
            raise ValueError(
                f"--save-dir {save_dir} is or contains the source {origin}, which would be lost: "
                "choose another"
            )
    # Only these formats have a file whose upload completes them.
    if not isinstance(save_dir, ObjectPath):
        return
    if overwrite:
        raise ValueError(
            f"--save-dir {save_dir}: --overwrite is for directories: a target in object storage "
            "cannot be replaced, so delete it first"
        )
    if saver not in _OBJECT_SAVERS:
        raise ValueError(
            f"--save-dir {save_dir}: object storage can only contain torch_dist checkpoints and "
            "Hugging Face models; give --saver torch_dist or hf, or a directory"
        )


def _check_optimizer(source: Source, saver: str) -> None:
    """Raise ValueError for optimizer state that files of the format cannot contain."""
    if saver not in ("legacy", "universal") or not optimizer_states(source.tensors):
        return
    if has_mixed_states(source.args):
        raise ValueError(
            f"{source.description}: the optimizer is {source.args['optimizer']}, whose state "
            f"{saver} files cannot contain, because matrices have other states than the rest: give "
            "--saver torch_dist or --saver hf --save-optim-sidecar, or leave it out (--no-optim)"
        )


def estimate_bytes(source: Source, saver: str, options: WriteOptions) -> int:
    """Return the bytes to write, without the overhead of the format."""
    weights: list[TensorInfo] = []
    foreign: list[TensorInfo] = []
    for key, tensor in source.tensors.items():
        if is_weight(key):
            is_matrix = ".linear_" in key and key.endswith("weight") and len(tensor.shape) > 1
            if options.quantization is not None and is_matrix:  # and a few scales
                weights.append(TensorInfo(tensor.shape, torch.float8_e4m3fn))
            else:
                weights.append(tensor)
        elif is_foreign(key):
            foreign.append(tensor)
    if saver in ("hf", "gguf") and not options.optim_sidecar:
        return _sum_bytes(weights) + _sum_bytes(foreign)
    if saver == "universal":  # every state in fp32
        num_states = len(optimizer_states(source.tensors) or ADAM)
        num_elements = sum(math.prod(info.shape) for info in weights)
        return num_states * num_elements * torch.float32.itemsize + _sum_bytes(foreign)
    return _sum_bytes(source.tensors.values())


def _sum_bytes(tensors: Iterable[TensorInfo]) -> int:
    return sum(info.nbytes for info in tensors)


def compare(source: Source, result: Source, progress: Progress = no_progress) -> int:
    """Return the number of tensors of `result`, all bitwise equal to `source`.

    Raises ValueError for the first difference.
    """
    # Every tensor of the result is that of the source.
    for key, tensor in result.tensors.items():
        if key not in source.tensors:
            raise ValueError(
                f"verification: {result.description} has {key}, which the source lacks"
            )
        original = cast(source.tensors[key], tensor.dtype)
        for offset, shape in cut_rows(tensor.shape, tensor.dtype.itemsize, _COMPARED_BYTES):
            expected = original.read(offset, shape)
            if not is_bitwise_equal(tensor.read(offset, shape), expected):
                raise ValueError(
                    f"verification: {key} differs from the source (in the box at {offset} of "
                    f"{shape})"
                )
            progress(expected.nbytes)

    # Every tensor of the source is in the result. A result without any optimizer state has no place
    # for it, or it was not requested.
    has_optimizer = bool(optimizer_states(result.tensors))
    lost = []
    for key in source.tensors:
        is_wanted = has_optimizer or not key.startswith("optimizer.")
        if is_wanted and key not in result.tensors:
            lost.append(key)
    if lost:
        raise ValueError(
            f"verification: {result.description} lacks {len(lost)} tensors of the source, "
            f"{lost[0]} first"
        )
    return len(result.tensors)

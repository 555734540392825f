"""Exports of a run during training: Hugging Face models, Megatron-LM's legacy files.

Files of these formats contain parts of several ranks. So all ranks write torch_dist, and rank 0
rewrites it in the other format, tensor by tensor, before the directory gets its name. Training
imports this module if a flag requests an export (see `training/checkpoint/export.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.huggingface.adapter_writer import choose_adapter_family, write_adapter
from megatron.conversion.huggingface.adapters import ADAPTER_CONFIG
from megatron.conversion.huggingface.directory_writer import check_quantizable, remove_model
from megatron.conversion.huggingface.export_plan import plan_export
from megatron.conversion.huggingface.families import choose_family
from megatron.conversion.megatron_lm.args import read_arguments
from megatron.conversion.megatron_lm.legacy_writer import write_legacy
from megatron.conversion.model_space.layouts import Layout
from megatron.conversion.model_space.views import get_dtype
from megatron.conversion.opening import open_checkpoint
from megatron.conversion.options import WriteOptions
from megatron.conversion.output_directory import pending_name
from megatron.core.dist_checkpointing import CheckpointDirectory, clean_up
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.dist_checkpointing.saving.commit import Progress, Rewrite
from megatron.core.dist_checkpointing.saving.model_export import ConvertedTarget, StagedTarget
from megatron.core.dist_checkpointing.saving.pending_export import ExportTarget
from megatron.core.durable_files import check_free_space, discard, fsync_directory, rename
from megatron.core.object_files import check_conditional_requests
from megatron.core.object_path import ObjectPath
from megatron.core.run_checkpoint.formats import is_huggingface
from megatron.core.run_checkpoint.native_reader import open_run_checkpoint
from megatron.core.run_checkpoint.source import Source
from megatron.core.transformer.transformer_config import TransformerConfig

logger = logging.getLogger(__name__)


def make_legacy_rewrite(
    num_layers: int,
    sizes: tuple[int, int, int],
    splits: Mapping[str, Any],
    experts: tuple[int, int | None],
) -> Rewrite:
    """Return a function that rewrites a torch_dist checkpoint as Megatron-LM's legacy files.

    `sizes` are those of TP, PP and VPP, `experts` those of EP and expert TP.
    """
    layout = Layout.of(num_layers, *sizes, splits, experts)

    def rewrite(directory: Path, progress: Progress) -> None:
        source = open_checkpoint(directory)
        _replace_files(
            directory, lambda target: write_legacy(source, target, layout, progress=progress)
        )

    return rewrite


class HuggingFaceExporter:
    """Writer of a run's model to the directory --save-hf.

    With `is_periodic`, the directory contains one model per exported iteration, otherwise it is the
    final model. `tokenizer_files` may be outside of the checkpoint. `dtype` is that of weights that
    are not quantized; None is that of the run.
    """

    def __init__(
        self,
        directory: Path,
        is_periodic: bool,
        keep_last: int | None,
        dtype: str | None,
        quantization: str | None,
        tokenizer_files: tuple[Path, ...],
    ) -> None:
        self._directory = directory
        self._is_periodic = is_periodic
        self._keep_last = keep_last
        self._options = WriteOptions(
            trusted=tokenizer_files, dtype=dtype, quantization=quantization
        )

    def check_target(self, model: TransformerConfig) -> None:
        """Raise ValueError before training if the model could not be written after it."""
        # The model, and then the directory: a run must not fail for these after days.
        family = choose_family(model, None)
        if self._options.quantization is not None:
            check_quantizable(family, model, self._options.quantization)
        directory = self._directory
        if isinstance(directory, ObjectPath):
            bucket = directory
            Coordination.of(None).run_on_rank0(lambda: check_conditional_requests(bucket))
        if not directory.exists():
            return
        if self._is_periodic:
            if not directory.is_dir() or is_huggingface(directory):
                raise ValueError(
                    f"--save-hf {directory} is a model or a file: with --save-hf-interval give a "
                    "directory for one model per exported iteration"
                )
            return
        is_empty = directory.is_dir() and not any(directory.iterdir())
        if not is_empty and not (directory.is_dir() and is_huggingface(directory)):
            raise ValueError(
                f"--save-hf {directory} exists and is not a Hugging Face model: give another "
                "directory"
            )

    def plan(self, common: dict[str, Any], vocab_size: int) -> ExportTarget:
        """Return where and how models are saved next to checkpoints.

        All ranks write them from the staging buffers of the checkpoint, if the format permits it.
        Otherwise rank 0 converts the committed checkpoint.

        Raises ValueError, the same on all ranks, for a model that transformers cannot express.
        """
        args = read_arguments(common, "this run")
        args["model_vocab_size"] = vocab_size
        try:
            plan = plan_export(args, self._options.trusted, dtype=get_dtype(self._options.dtype))
        except ValueError as error:
            raise ValueError(f"--save-hf-interval: {error}") from error
        # Ranks have parts of the blocks of a quantized matrix, and cannot write to the middle of an
        # object.
        if isinstance(self._directory, ObjectPath) or self._options.quantization is not None:
            return ConvertedTarget(
                root=self._directory,
                convert=self._convert_saved,
                keep_last=self._keep_last,
                remove=remove_model,
            )
        return StagedTarget(root=self._directory, plan=plan, keep_last=self._keep_last)

    def _convert_saved(self, checkpoint: Path, target: Path) -> None:
        """Write the model in a committed checkpoint to `target`, replacing an earlier one."""
        is_object = isinstance(target, ObjectPath)
        if is_object:
            remove_model(target)
        convert(checkpoint, target, "hf", options=self._options, overwrite=not is_object)

    def remove_unfinished(self) -> None:
        """Remove the exports that an earlier launch has not completed; none may be in progress."""
        directory = self._directory
        clean_up(directory)
        if not isinstance(directory, ObjectPath):
            for path in directory.glob(pending_name("iter_*")):
                discard(path)
            return
        exports = CheckpointDirectory(directory)
        for iteration in exports.list_iterations():
            if not is_huggingface(exports.path(iteration)):
                remove_model(exports.path(iteration))

    def warn_if_missing(self, save: str, iteration: int) -> None:
        """Warn if the export of a checkpoint in `save` does not exist."""
        export = CheckpointDirectory(self._directory).path(iteration)
        if is_huggingface(export):
            return
        options = ""
        if self._options.quantization is not None:
            options = f" --quantize {self._options.quantization}"
        elif self._options.dtype is not None:
            options = f" --dtype {self._options.dtype}"
        logger.warning(
            f"the checkpoint of iteration {iteration} was saved without its export {export}, e.g., "
            "because the run was killed in between. To make it: python tools/checkpoint/convert.py "
            f"--load-dir {save} --ckpt-step {iteration} --save-dir {export} --saver hf{options}"
        )

    def rewrite(self, directory: Path, progress: Progress) -> None:
        """Replace the files of a torch_dist checkpoint by those of the model."""
        _replace_files(
            directory,
            lambda target: convert(
                directory, target, "hf", options=self._options, progress=progress
            ),
        )


class AdapterExporter:
    """Writer of a run's adapters (--lora-rank) to the directory --save-hf, as files of PEFT."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def check_target(self, model: TransformerConfig) -> None:
        """Raise ValueError before training if the adapters could not be written after it."""
        choose_adapter_family(model, None)
        directory = self._directory
        is_adapter = (directory / ADAPTER_CONFIG).is_file()
        if directory.exists() and not is_adapter and any(directory.iterdir()):
            raise ValueError(
                f"--save-hf {directory} exists and is not an adapter of PEFT: give another "
                "directory"
            )

    def rewrite(self, directory: Path, progress: Progress) -> None:
        """Replace the files of a torch_dist checkpoint by those of the adapters."""
        source = open_run_checkpoint(directory)
        assert source is not None
        _replace_files(directory, lambda target: _write_adapter(source, target, progress))


def _write_adapter(source: Source, target: Path, progress: Progress) -> None:
    target.mkdir()
    write_adapter(source, target, progress)


def _replace_files(directory: Path, write: Callable[[Path], object]) -> None:
    """Replace the files in `directory`, durably, by those that `write` creates from them.

    `write` must make its files durable. If it raises an error, its files remain in `directory`,
    which the caller removes.
    """
    old_files = list(directory.iterdir())
    check_free_space(directory, sum(path.stat().st_size for path in old_files))
    # Inside the pending directory: an aborted save then removes both forms at once.
    target = directory / "rewritten"
    write(target)
    # An interruption here leaves an unfinished save, which readers do not take for a checkpoint.
    for path in old_files:
        path.unlink()
    for path in list(target.iterdir()):
        rename(path, directory / path.name)
    target.rmdir()
    fsync_directory(directory)

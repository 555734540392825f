"""Exports of a run to other formats than torch_dist: Hugging Face, Megatron-LM's legacy files.

The wing `conversion.run_exports` writes them. Training imports both if a flag requests an export.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing import CheckpointError, save
from megatron.core.dist_checkpointing.files import remove_unfinished
from megatron.core.dist_checkpointing.saving.commit import Progress, Rewrite
from megatron.core.dist_checkpointing.saving.pending_export import ExportTarget
from megatron.core.object_path import path_of
from megatron.core.optimizer import get_update_rule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.wings import resolve
from megatron.training.checkpoint.contents import get_model_state, start_common_state
from megatron.training.config.run_config import Config
from megatron.training.config.run_options import HF_DTYPES, HF_QUANTIZATIONS
from megatron.training.run import Run
from megatron.training.training import save_checkpoint

logger = logging.getLogger(__name__)

_HUGGING_FACE = "megatron.conversion.run_exports:HuggingFaceExporter"
_ADAPTERS = "megatron.conversion.run_exports:AdapterExporter"
_LEGACY = "megatron.conversion.run_exports:make_legacy_rewrite"


class ModelExporter(Protocol):
    """Writer of a run's model in another format."""

    def check_target(self, model: TransformerConfig) -> None:
        """Raise ValueError, before training, if the model cannot be written. Collective."""

    def plan(self, common: dict[str, Any], vocab_size: int) -> ExportTarget:
        """Return where and how models are saved next to checkpoints."""
        ...

    def remove_unfinished(self) -> None:
        """Remove the exports that an earlier launch has not completed."""

    def warn_if_missing(self, save: str, iteration: int) -> None:
        """Warn if the export of a checkpoint in `save` does not exist."""

    def rewrite(self, directory: Path, progress: Progress) -> None:
        """Replace the files of a torch_dist checkpoint by those of the model."""


def make_legacy_rewrite(config: Config) -> Rewrite:
    """Return a function that rewrites a torch_dist checkpoint as Megatron-LM's legacy files.

    They are `mp_rank_XX[_YYY]/model_optim_rng.pt` and `distrib_optim.pt`, for the layout of the
    run.
    """
    parallel = config.parallel
    sizes = parallel.tp_size, parallel.pp_size, parallel.vpp_size
    # Without expert parallelism, the names of the directories have no expert rank.
    experts: tuple[int, int | None] = (1, None)
    if parallel.ep_size > 1:
        experts = (parallel.ep_size, parallel.etp_size)
    splits = vars(config.pipeline_layout)
    rewrite: Rewrite = resolve(_LEGACY)(config.model.num_layers, sizes, splits, experts)
    return rewrite


def save_converted(run: Run) -> None:
    """Save the loaded checkpoint in the format --ckpt-convert-format, where Megatron-LM puts it."""
    config = run.config.checkpoint
    assert config.ckpt_convert_format is not None and config.ckpt_convert_save is not None
    save_checkpoint(
        run,
        os.path.join(config.ckpt_convert_save, config.ckpt_convert_format),
        config.ckpt_convert_format,
    )
    run.saver.close()


def _make_exporter(config: Config) -> ModelExporter:
    """Return the exporter of models, or of adapters, to --save-hf."""
    flags = config.checkpoint
    assert flags.save_hf is not None
    exporter: ModelExporter
    if config.lora.lora_rank is not None:
        exporter = resolve(_ADAPTERS)(path_of(flags.save_hf))
        return exporter
    dtype = flags.save_hf_dtype
    tokenizer = config.tokenizer
    names = (tokenizer.tokenizer_model, tokenizer.vocab_file, tokenizer.merge_file)
    exporter = resolve(_HUGGING_FACE)(
        path_of(flags.save_hf),
        is_periodic=flags.save_hf_interval is not None,
        keep_last=flags.save_hf_keep_last,
        dtype=dtype if dtype in HF_DTYPES else None,
        quantization=dtype if dtype in HF_QUANTIZATIONS else None,
        # transformers needs these files, too. The user has named them, so they may be outside of
        # the checkpoint.
        tokenizer_files=tuple(Path(name) for name in names if name is not None),
    )
    return exporter


def check_hf_target(run: Run) -> None:
    """Raise ValueError before training if --save-hf could not be written after it. Collective."""
    _make_exporter(run.config).check_target(run.config.model)


def plan_hf_exports(run: Run) -> ExportTarget | None:
    """Return where and how models are saved next to checkpoints, None without --save-hf-interval.

    Raises ValueError, the same on all ranks, for a model that transformers cannot express.
    """
    if run.config.checkpoint.save_hf_interval is None:
        return None
    return _make_exporter(run.config).plan(start_common_state(run)(), run.vocab_size)


def check_earlier_exports(run: Run, loaded: Path | None) -> None:
    """Remove the exports that an earlier launch has not completed; none may be in progress.

    Warns if the checkpoint `loaded` of this run was due for an export that does not exist: a launch
    that is killed after the commit of a checkpoint loses its export.
    """
    exporter = _make_exporter(run.config)
    exporter.remove_unfinished()
    save = run.config.checkpoint.save
    if loaded is None or save is None or not run.is_export_due:
        return
    if loaded.parent.resolve() != path_of(save).resolve():
        return  # of another run, or on the disks of the nodes
    exporter.warn_if_missing(save, run.state.iteration)


def save_hf(run: Run) -> None:
    """Write the final model to --save-hf, unless --save-hf-interval exports it. Collective.

    The directory appears, or is replaced, as a whole. Raises ValueError on every rank if it could
    not be written.
    """
    config = run.config.checkpoint
    if config.save_hf is None or config.save_hf_interval is not None:
        return
    exporter = _make_exporter(run.config)
    directory = Path(config.save_hf)
    common = start_common_state(run)()
    # An inference model has no optimizer.
    for key in ("optimizer", "opt_param_scheduler"):
        common.pop(key, None)
    _remove_unfinished(run, directory)
    try:
        weights = run.optimizer.weights(get_model_state(run))
        save(weights, directory, common=common, rewrite=exporter.rewrite)
    except CheckpointError as error:  # on every rank
        _remove_unfinished(run, directory)
        raise ValueError(f"--save-hf: {error}") from error
    logger.info(f"saved {directory} in Hugging Face format")


def _remove_unfinished(run: Run, directory: Path) -> None:
    """Remove the files of an attempt that was killed or has failed on some ranks. Collective."""
    dist.barrier()
    if run.ps.rank == 0:
        remove_unfinished(directory)
    dist.barrier()


def find_export_problems(config: Config) -> Iterator[str]:
    """Yield problems of the options of models in Hugging Face format."""
    checkpoint = config.checkpoint
    interval = checkpoint.save_hf_interval
    if "://" in (checkpoint.save_hf or "") and interval is None:
        yield (
            f"--save-hf {checkpoint.save_hf}: models in object storage are converted from "
            "checkpoints: give --save-hf-interval, or a directory"
        )
    yield from _find_dtype_problems(config)
    if interval is None or checkpoint.save is None or checkpoint.save_hf is None:
        return
    if os.path.abspath(checkpoint.save_hf) == os.path.abspath(checkpoint.save):
        yield (
            f"--save-hf {checkpoint.save_hf} is the directory of --save: with --save-hf-interval "
            "give another one"
        )


def _find_dtype_problems(config: Config) -> Iterator[str]:
    """Yield problems of the data type of the models."""
    dtype = config.checkpoint.save_hf_dtype
    if dtype is None:
        return
    weights = config.model.params_dtype
    if dtype in HF_QUANTIZATIONS:
        return
    if weights not in (torch.float32, HF_DTYPES[dtype]):
        yield (
            f"--save-hf-dtype {dtype} with weights in {weights}: models are cast from the weights, "
            f"which would be rounded twice; convert checkpoints with convert.py --dtype {dtype}"
        )


def find_legacy_problems(config: Config) -> Iterator[str]:
    """Yield targets and optimizer states that Megatron-LM's legacy files do not support."""
    checkpoint = config.checkpoint
    # Rank 0 writes legacy files from the complete torch_dist files of all ranks, on a file system.
    targets = []
    if checkpoint.ckpt_format == "torch":
        targets.append(("--ckpt-format", "--save", checkpoint.save))
    if checkpoint.ckpt_convert_format == "torch":
        targets.append(
            ("--ckpt-convert-format", "--ckpt-convert-save", checkpoint.ckpt_convert_save)
        )
    for format_flag, target_flag, target in targets:
        if "://" in (target or ""):
            yield (
                f"{format_flag} torch: object storage ({target_flag} {target}) supports only "
                "torch_dist checkpoints"
            )
    yield from _find_state_problems(config)


def _find_state_problems(config: Config) -> Iterator[str]:
    """Yield an optimizer whose state legacy files cannot contain, before the first save fails."""
    checkpoint = config.checkpoint
    optimizer = config.optimizer.optimizer
    if get_update_rule(optimizer).HAS_UNIFORM_STATE or checkpoint.no_save_optim:
        return
    if checkpoint.save is not None and checkpoint.ckpt_format == "torch":
        yield (
            f"--ckpt-format torch cannot store the state of --optimizer {optimizer}: use "
            "--ckpt-format torch_dist or --no-save-optim"
        )
    if checkpoint.ckpt_convert_format == "torch":
        yield (
            f"--ckpt-convert-format torch cannot store the state of --optimizer {optimizer}: give "
            "--no-save-optim"
        )

"""Write checkpoints in other formats than torch_dist: Megatron-LM's legacy files, Hugging Face.

Files of these formats contain parts of several ranks. So all ranks write torch_dist, and rank 0
rewrites it in the other format, tensor by tensor, before the directory gets its name.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.conversion.choices import DTYPES, QUANTIZATIONS
from megatron.conversion.convert import convert
from megatron.conversion.huggingface.directory import check_quantizable, remove_model
from megatron.conversion.huggingface.export_plan import plan_export
from megatron.conversion.huggingface.families import choose_family
from megatron.conversion.megatron_lm.args import read_arguments
from megatron.conversion.megatron_lm.legacy_writer import write_legacy
from megatron.conversion.model_space.model import Layout
from megatron.conversion.opening import open_checkpoint
from megatron.conversion.options import WriteOptions
from megatron.conversion.output_directory import pending_name
from megatron.core.dist_checkpointing import (
    CheckpointDirectory,
    CheckpointError,
    clean_up,
    save,
)
from megatron.core.dist_checkpointing.files import remove_unfinished
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.dist_checkpointing.saving.commit import Progress, Rewrite
from megatron.core.dist_checkpointing.saving.model_export import ExportTarget
from megatron.core.durable_files import check_free_space, discard, fsync_directory
from megatron.core.object_storage import ObjectPath, check_conditional_requests, path_of
from megatron.core.run_checkpoint.formats import is_huggingface
from megatron.training.checkpoint.contents import get_common_state, get_model_state
from megatron.training.config.run_config import Config
from megatron.training.run import Run

logger = logging.getLogger(__name__)


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
    layout = Layout.of(config.model.num_layers, *sizes, vars(config.pipeline_layout), experts)

    def rewrite(directory: Path, progress: Progress) -> None:
        source = open_checkpoint(directory)
        _replace_files(
            directory, lambda target: write_legacy(source, target, layout, progress=progress)
        )

    return rewrite


def check_hf_target(run: Run) -> None:
    """Raise ValueError before training if --save-hf could not be written after it."""
    target = run.config.checkpoint.save_hf
    if target is None:
        return
    # The model, and then the directory: a run must not fail for these after days.
    family = choose_family(run.config.model, None)
    if run.config.checkpoint.save_hf_dtype in QUANTIZATIONS:
        check_quantizable(family, run.config.model)
    directory = path_of(target)
    if isinstance(directory, ObjectPath):
        bucket = directory
        Coordination.of(None).run_on_rank0(lambda: check_conditional_requests(bucket))
    if not directory.exists():
        return
    if run.config.checkpoint.save_hf_interval is not None:
        if not directory.is_dir() or is_huggingface(directory):
            raise ValueError(
                f"--save-hf {directory} is a model or a file: with --save-hf-interval give a "
                "directory for one model per exported iteration"
            )
        return
    is_empty = directory.is_dir() and not any(directory.iterdir())
    if not is_empty and not (directory.is_dir() and is_huggingface(directory)):
        raise ValueError(
            f"--save-hf {directory} exists and is not a Hugging Face model: give another directory"
        )


def plan_hf_exports(run: Run) -> ExportTarget | None:
    """Return where and how models are saved next to checkpoints, None without --save-hf-interval.

    All ranks write them from the staging buffers of the checkpoint, if the format permits it.
    Otherwise rank 0 converts the committed checkpoint.

    Raises ValueError, the same on all ranks, for a model that transformers cannot express.
    """
    config = run.config.checkpoint
    if config.save_hf_interval is None:
        return None
    assert config.save_hf is not None
    args = read_arguments(get_common_state(run), "this run")
    args["model_vocab_size"] = run.vocab_size
    try:
        plan = plan_export(args, _list_tokenizer_files(run), dtype=_get_export_dtype(run))
    except ValueError as error:
        raise ValueError(f"--save-hf-interval: {error}") from error
    root = path_of(config.save_hf)
    keep_last = config.save_hf_keep_last
    # Ranks have parts of the blocks of a quantized matrix, and cannot write to the middle of an
    # object.
    if isinstance(root, ObjectPath) or config.save_hf_dtype in QUANTIZATIONS:
        convert_saved = partial(_convert_saved, _make_export_options(run))
        return ExportTarget(root, convert=convert_saved, keep_last=keep_last, remove=remove_model)
    return ExportTarget(root, plan, keep_last=keep_last)


def _convert_saved(options: WriteOptions, checkpoint: Path, target: Path) -> None:
    """Write the model in a committed checkpoint to `target`, replacing an earlier one."""
    is_object = isinstance(target, ObjectPath)
    if is_object:
        remove_model(target)
    convert(checkpoint, target, "hf", options=options, overwrite=not is_object)


def remove_unfinished_exports(target: ExportTarget) -> None:
    """Remove the exports that an earlier launch has not completed; none may be in progress."""
    clean_up(target.root)
    if not isinstance(target.root, ObjectPath):
        for path in target.root.glob(pending_name("iter_*")):
            discard(path)
        return
    exports = CheckpointDirectory(target.root)
    for iteration in exports.list_iterations():
        if not is_huggingface(exports.path(iteration)):
            remove_model(exports.path(iteration))


def report_missing_export(run: Run, loaded: Path) -> None:
    """Warn if the checkpoint `loaded` of this run was due for an export that does not exist.

    A launch that is killed after the commit of a checkpoint loses its export.
    """
    target = get_due_export(run)
    save = run.config.checkpoint.save
    if target is None or save is None:
        return
    if loaded.parent.resolve() != path_of(save).resolve():
        return  # of another run, or on the disks of the nodes
    iteration = run.state.iteration
    export = CheckpointDirectory(target.root).path(iteration)
    if is_huggingface(export):
        return
    dtype = run.config.checkpoint.save_hf_dtype
    options = ""
    if dtype in QUANTIZATIONS:
        options = f" --quantize {dtype}"
    elif dtype is not None:
        options = f" --dtype {dtype}"
    logger.warning(
        f"the checkpoint of iteration {iteration} was saved without its export {export}, e.g., "
        "because the run was killed in between. To make it: python tools/checkpoint/convert.py "
        f"--load-dir {save} --ckpt-step {iteration} --save-dir {export} --saver hf{options}"
    )


def get_due_export(run: Run) -> ExportTarget | None:
    """Return where the present iteration is exported to, None if it is not due."""
    interval = run.config.checkpoint.save_hf_interval
    if interval is None or (run.state.iteration % interval and not run.is_complete):
        return None
    return run.hf_exports


def _get_export_dtype(run: Run) -> torch.dtype | None:
    """Return the dtype of weights that are not quantized; None is that of the run."""
    name = DTYPES.get(run.config.checkpoint.save_hf_dtype or "")
    if name is None:
        return None
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _make_export_options(run: Run) -> WriteOptions:
    """Return the options of an export by conversion."""
    config = run.config.checkpoint
    quantization = config.save_hf_dtype if config.save_hf_dtype in QUANTIZATIONS else None
    return WriteOptions(
        trusted=_list_tokenizer_files(run),
        dtype=_get_export_dtype(run),
        quantization=quantization,
    )


def _list_tokenizer_files(run: Run) -> tuple[Path, ...]:
    """Return the files of the tokenizer on the command line, which transformers also needs.

    The user has named them, so they may be outside of the checkpoint.
    """
    flags = run.config.tokenizer
    names = (flags.tokenizer_model, flags.vocab_file, flags.merge_file)
    return tuple(Path(name) for name in names if name is not None)


def save_hf(run: Run) -> None:
    """Write the final model to --save-hf, unless --save-hf-interval exports it. Collective.

    The directory appears, or is replaced, as a whole. Raises ValueError on every rank if it could
    not be written.
    """
    config = run.config.checkpoint
    if config.save_hf is None or config.save_hf_interval is not None:
        return
    directory = Path(config.save_hf)
    common = get_common_state(run)
    # An inference model has no optimizer.
    for key in ("optimizer", "opt_param_scheduler"):
        common.pop(key, None)
    rewrite = partial(_rewrite_as_hf, _make_export_options(run))
    _remove_unfinished(run, directory)
    try:
        weights = run.optimizer.weights(get_model_state(run))
        save(weights, directory, common=common, rewrite=rewrite)
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


def _rewrite_as_hf(options: WriteOptions, directory: Path, progress: Progress) -> None:
    _replace_files(
        directory,
        lambda target: convert(directory, target, "hf", options=options, progress=progress),
    )


def _replace_files(directory: Path, write: Callable[[Path], object]) -> None:
    """Replace the files in `directory`, durably, by those that `write` creates from them.

    `write` must make its files durable. If it raises an error, its files remain in `directory`,
    which the caller removes.
    """
    stored = list(directory.iterdir())
    check_free_space(directory, sum(path.stat().st_size for path in stored))
    # Inside the pending directory: an aborted save then removes both forms at once.
    target = directory / "rewritten"
    write(target)
    # An interruption here leaves an unfinished save, which readers do not take for a checkpoint.
    for path in stored:
        path.unlink()
    for path in list(target.iterdir()):
        os.rename(path, directory / path.name)
    target.rmdir()
    fsync_directory(directory)

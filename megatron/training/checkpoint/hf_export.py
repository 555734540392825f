"""--save-hf: the model of a run as a Hugging Face directory, from any layout."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megatron.conversion.convert import Options, convert
from megatron.conversion.files import Progress
from megatron.conversion.huggingface.families import choose_family
from megatron.conversion.huggingface.reader import is_huggingface
from megatron.core.dist_checkpointing import CheckpointError, save
from megatron.core.dist_checkpointing.files import remove_unfinished
from megatron.training.checkpoint.checkpointing import common_state, model_state
from megatron.training.checkpoint.convert_in_place import replace_files
from megatron.training.run import Run

logger = logging.getLogger(__name__)


def check_hf_target(run: Run) -> None:
    """Raise ValueError before the first step where the last one could not be followed by --save-hf."""
    target = run.config.checkpoint.save_hf
    if target is None:
        return
    choose_family(run.config.model, None)
    directory = Path(target)
    if directory.exists() and not (directory.is_dir() and (is_huggingface(directory) or not any(directory.iterdir()))):
        raise ValueError(f"--save-hf {directory} exists and is no model of Hugging Face's form: give another directory")


def save_hf(run: Run) -> None:
    """Write --save-hf: every rank its part of the weights as torch_dist, and rank 0 converts that. Collective.

    The directory appears, or is replaced, as a whole. Raises ValueError on every rank if it could not be written.
    """
    assert run.config.checkpoint.save_hf is not None
    directory = Path(run.config.checkpoint.save_hf)
    flags = run.config.tokenizer
    own = tuple(Path(name) for name in (flags.tokenizer_model, flags.vocab_file, flags.merge_file) if name is not None)
    _begin_anew(run, directory)
    common = {key: value for key, value in common_state(run).items() if key not in ("optimizer", "opt_param_scheduler")}
    try:
        save(model_state(run), directory, common=common, rewrite=partial(_rewrite_as_hf, Options(trusted=own)))
    except CheckpointError as error:  # on every rank
        _begin_anew(run, directory)
        raise ValueError(f"--save-hf: {error}") from error
    logger.info(f"saved {directory} in Hugging Face's form")


def _begin_anew(run: Run, directory: Path) -> None:
    """Remove what an attempt has left that was killed, or whose ranks failed one after the other. Collective."""
    dist.barrier()
    if run.ps.rank == 0:
        remove_unfinished(directory)
    dist.barrier()


def _rewrite_as_hf(options: Options, directory: Path, progress: Progress) -> None:
    replace_files(directory, lambda made: convert(directory, made, "hf", options=options, progress=progress))

"""Checkpoints in another program's form: legacy files (--ckpt-format torch) and Hugging Face's (--save-hf).

Their files do not lie where the ranks hold their parts, so all ranks write torch_dist, and rank 0 puts the other form
in its place, tensor by tensor, before the directory gets its name.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.conversion.convert import Options, convert
from megatron.conversion.files import Progress
from megatron.conversion.huggingface.families import choose_family
from megatron.conversion.huggingface.reader import is_huggingface
from megatron.conversion.megatron_lm.legacy_writer import write_legacy
from megatron.conversion.model_space.rank_layout import RULES, Layout
from megatron.conversion.open_checkpoint import open_checkpoint
from megatron.core.dist_checkpointing import CheckpointError, ShardedStateDict, save
from megatron.core.dist_checkpointing.files import remove_unfinished
from megatron.core.dist_checkpointing.saving.commit import Rewrite
from megatron.core.durable_files import check_free_space, fsync_directory
from megatron.training.config.run_config import Config
from megatron.training.run import Run

logger = logging.getLogger(__name__)


def rewriting_as_legacy(config: Config) -> Rewrite:
    """What puts Megatron-LM's legacy files, for the layout of the run, in the place of a torch_dist checkpoint's:
    `mp_rank_XX[_YYY]/model_optim_rng.pt` and `distrib_optim.pt`."""
    parallel, stages = config.parallel, config.pipeline_layout
    layout = Layout.of(
        config.model.num_layers,
        parallel.tp_size,
        parallel.pp_size,
        parallel.vpp_size,
        stages.decoder_first_pipeline_num_layers,
        stages.decoder_last_pipeline_num_layers,
        **{rule: getattr(stages, name) for name, rule in RULES.items() if getattr(stages, name)},
    )

    def rewrite(directory: Path, progress: Progress) -> None:
        source = open_checkpoint(directory)
        _replace_files(directory, lambda made: write_legacy(source, made, layout, progress=progress))

    return rewrite


def check_hf_target(run: Run) -> None:
    """Raise ValueError before the first step where the last one could not be followed by --save-hf."""
    target = run.config.checkpoint.save_hf
    if target is None:
        return
    choose_family(run.config.model, None)
    directory = Path(target)
    if directory.exists() and not (directory.is_dir() and (is_huggingface(directory) or not any(directory.iterdir()))):
        raise ValueError(f"--save-hf {directory} exists and is no model of Hugging Face's form: give another directory")


def save_hf(run: Run, model: ShardedStateDict, common: dict[str, Any]) -> None:
    """Write --save-hf from the weights `model` and the `common` state of the run. Collective.

    The directory appears, or is replaced, as a whole. Raises ValueError on every rank if it could not be written.
    """
    assert run.config.checkpoint.save_hf is not None
    directory = Path(run.config.checkpoint.save_hf)
    flags = run.config.tokenizer
    own = tuple(Path(name) for name in (flags.tokenizer_model, flags.vocab_file, flags.merge_file) if name is not None)
    _begin_anew(run, directory)
    common = {key: value for key, value in common.items() if key not in ("optimizer", "opt_param_scheduler")}
    try:
        save(model, directory, common=common, rewrite=partial(_rewrite_as_hf, Options(trusted=own)))
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
    _replace_files(directory, lambda made: convert(directory, made, "hf", options=options, progress=progress))


def _replace_files(directory: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a directory from the files that lie in `directory`, and durably put its files in their place.

    What it writes must be durable. Raises what it raises, or OSError; there is more in `directory` then than before.
    """
    stored = list(directory.iterdir())
    check_free_space(directory, sum(path.stat().st_size for path in stored))
    made = directory / "rewritten"
    write(made)
    for path in stored:
        path.unlink()
    for path in list(made.iterdir()):
        os.rename(path, directory / path.name)
    made.rmdir()
    fsync_directory(directory)

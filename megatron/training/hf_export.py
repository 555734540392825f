"""--save-hf: the model of a run as a Hugging Face directory, from any layout."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch.distributed as dist

from megatron.conversion.convert import convert
from megatron.conversion.hf_families import choose_family
from megatron.conversion.huggingface import is_huggingface
from megatron.core.dist_checkpointing import save
from megatron.training.checkpointing import common_state, model_state
from megatron.training.initialize import print_rank_0
from megatron.training.run import Run


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

    `directory` appears, or is replaced, as a whole. Raises ValueError on every rank if it could not be written.
    """
    assert run.config.checkpoint.save_hf is not None
    directory = Path(run.config.checkpoint.save_hf)
    scratch = directory.with_name(f".{directory.name}.torch_dist")
    common = {key: value for key, value in common_state(run).items() if key not in ("optimizer", "opt_param_scheduler")}
    save(model_state(run), scratch, common=common)
    dist.barrier()  # rank 0 may not remove what another rank has yet to find committed
    outcome: list[str | None] = [None]
    if run.ps.rank == 0:
        try:
            convert(scratch, directory, "hf", overwrite=True)
        except (ValueError, OSError) as error:
            outcome = [f"--save-hf {directory} could not be written: {error}"]
        shutil.rmtree(scratch, ignore_errors=True)
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise ValueError(outcome[0])
    print_rank_0(f" > saved {directory} in Hugging Face's form")

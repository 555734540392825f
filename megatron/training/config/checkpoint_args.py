"""Read the arguments that --use-checkpoint-args requests from the checkpoint to load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.flags import raise_problems
from megatron.core.object_path import path_of
from megatron.core.run_checkpoint.formats import find_checkpoint, open_in_any_form
from megatron.training.config.arguments import FlagValues, build
from megatron.training.config.options import DistributedConfig
from megatron.training.config.parsing import make_flag_parser
from megatron.training.config.stored_args import normalize_stored_args
from megatron.training.initialize import join


def read_checkpoint_args(argv: Sequence[str], world_size: int = 1) -> dict[str, Any] | None:
    """Return the arguments of the checkpoint that --load and --ckpt-step select, for `parse_args`.

    None without --use-checkpoint-args, and empty if --load is the same directory as --save and
    contains no checkpoint yet. Raises ValueError for any other missing or damaged checkpoint.

    Collective if `world_size` > 1: the ranks join the process group and rank 0 reads for all.
    With a `world_size` of 1 the process reads the checkpoint itself and no group is started.
    """
    command_line = make_flag_parser().parse(argv)
    flag_values = command_line.flag_values
    if not flag_values.get("use_checkpoint_args"):
        return None
    try:
        if flag_values.get("load") is None:
            raise ValueError("--use-checkpoint-args requires --load, the checkpoint to read")
        if world_size == 1:
            return _read(flag_values)
        join(build(DistributedConfig, flag_values))
        return Coordination.of(None).run_on_rank0(lambda: _read(flag_values))
    except ValueError as error:
        raise_problems([*command_line.problems, str(error)])
        raise


def _read(flag_values: FlagValues) -> dict[str, Any]:
    load = flag_values["load"]
    checkpoint = find_checkpoint(load, flag_values.get("ckpt_step"))
    if checkpoint is not None:
        # The general reader compares the arguments with the stored tensors: arguments of a foreign
        # checkpoint may describe a model of any size, which must not be allocated.
        source = open_in_any_form(checkpoint, optimizer=False)
        return normalize_stored_args(source.args)
    save = flag_values.get("save")
    is_first_start = save is not None and path_of(save).resolve() == path_of(load).resolve()
    if is_first_start and not flag_values.get("exit_on_missing_checkpoint"):
        return {}
    raise ValueError(f"--use-checkpoint-args: --load {load} contains no checkpoint")

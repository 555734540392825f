"""`pretrain_gpt.py --dry-run`: the plan of a run, or everything that keeps it from starting."""

from __future__ import annotations

import os
from collections.abc import Sequence

from megatron.core.flags import raise_problems
from megatron.planning.launch_check import (
    LaunchFlags,
    find_launch_problems,
    find_shortages,
)
from megatron.planning.run_plan import plan_run
from megatron.planning.summary import format_plan, set_planned_vocab_size
from megatron.training.config.checkpoint_args import read_checkpoint_args
from megatron.training.config.parsing import compute_replica_size, parse_args
from megatron.training.config.run_config import ModelProvider
from megatron.training.rendezvous import environment_world_size


def dry_run(argv: Sequence[str], model_provider: ModelProvider) -> str:
    """Return the summary and the plan of a run with these flags, without starting it.

    The run has $WORLD_SIZE processes; by default as many as one replica of the model. Raises
    ValueError with all problems if the run would not start: of flags, files, packages, memory and
    space on disks.
    """
    # The number of ranks affects the plan, but no process is launched.
    is_launched = "WORLD_SIZE" in os.environ
    problems: list[str] = []
    try:
        world_size = environment_world_size() if is_launched else compute_replica_size(argv)
        # A dry run has no process group, so that this process reads the checkpoint.
        config = parse_args(argv, world_size, read_checkpoint_args(argv))
    except ValueError as error:
        problems = str(error).splitlines() + find_launch_problems(LaunchFlags.parse(argv))
        raise_problems(dict.fromkeys(problems))
    raise_problems(find_launch_problems(LaunchFlags.of_config(config)))
    set_planned_vocab_size(config)
    plan = plan_run(config, world_size, model_provider)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    raise_problems(find_shortages(config, plan, processes))
    return format_plan(config, world_size, plan)

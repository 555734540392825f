"""`pretrain_gpt.py --dry-run`: the plan of a run, or everything that keeps it from starting."""

from __future__ import annotations

import math
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
from megatron.training.config.parsing import make_flag_parser, parse_args
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


def compute_replica_size(argv: Sequence[str]) -> int:
    """Return the minimum number of processes for the model and its experts; 1 if no flag
    sets it.
    """
    flag_values = make_flag_parser().parse(argv).flag_values

    def get_size(axis: str) -> int:
        return max(1, flag_values.get(f"{axis}_parallel_size", 1))

    # The dense layers and the experts of a stage divide the same ranks in two ways.
    dense = get_size("tensor_model") * get_size("context")
    experts = get_size("expert_model")
    if (flag_values.get("num_experts") or 0) > 1:
        experts *= flag_values.get("expert_tensor_parallel_size") or get_size("tensor_model")
    return get_size("pipeline_model") * math.lcm(dense, experts)

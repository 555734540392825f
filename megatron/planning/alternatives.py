"""Plans for the flags of a run, and changes of flags that need less memory."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.planning.run_plan import RunPlan, plan_run
from megatron.planning.summary import set_planned_vocab_size
from megatron.training.config.arguments import FlagValues, parse_flags
from megatron.training.config.checkpoint_args import read_checkpoint_args
from megatron.training.config.parsing import make_config, make_flag_parser, use_stored_args
from megatron.training.config.run_config import Config, ModelProvider

ALTERNATIVES: list[tuple[str, dict[str, Any]]] = [
    ("--use-distributed-optimizer", {"use_distributed_optimizer": True}),
    ("--recompute-granularity selective", {"recompute_granularity": "selective"}),
    (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ),
    ("--micro-batch-size 1", {"micro_batch_size": 1}),
    ("--sequence-parallel", {"sequence_parallel": True}),
]
"""Changes of flags that can reduce memory."""


@dataclass(frozen=True)
class Alternative:
    """A single change of the flags, and the bytes on the rank with the most memory in use."""

    flags: str
    memory: int


def parse_planned_flags(argv: Sequence[str]) -> FlagValues:
    """Return the given flags of a run by field name; flags that do not affect plans are optional.

    Raises ValueError that lists all problems.
    """
    flag_values, _ = parse_flags(make_flag_parser(), argv)
    stored_args = read_checkpoint_args(argv)
    if stored_args is not None:
        flag_values, _ = use_stored_args(flag_values, stored_args)
    flag_values = {"lr": 1.0, "min_lr": 0.0} | flag_values
    if "train_samples" not in flag_values and "sft_epochs" not in flag_values:
        flag_values.setdefault("train_iters", 1)
    return flag_values


def plan_flags(
    flag_values: FlagValues,
    world_size: int,
    model_provider: ModelProvider,
) -> tuple[Config, RunPlan]:
    """Return the configuration for the given flags and its plan. Raises ValueError if such a run is
    impossible.
    """
    config = make_config(flag_values, world_size)
    set_planned_vocab_size(config)
    return config, plan_run(config, world_size, model_provider)


def find_alternatives(
    flag_values: FlagValues,
    world_size: int,
    model_provider: ModelProvider,
    needed: int,
) -> list[Alternative]:
    """Return the single changes of flags that need less memory than `needed` bytes."""
    changes = list(ALTERNATIVES)
    # Twice the ranks along one axis, at the same world size.
    for axis in ("tensor_model_parallel", "context_parallel", "pipeline_model_parallel"):
        field = f"{axis}_size"
        size = 2 * flag_values.get(field, 1)
        flags = f"--{field.replace('_', '-')} {size}"
        changes.append((flags, {field: size}))

    alternatives = []
    for flags, change in changes:
        if change.items() <= flag_values.items():
            continue  # the run has these flags already
        with contextlib.suppress(ValueError):  # impossible with this model or number of ranks
            _, plan = plan_flags(flag_values | change, world_size, model_provider)
            if plan.largest < needed:
                alternatives.append(Alternative(flags, plan.largest))
    return alternatives

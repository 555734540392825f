"""Mixed-precision optimizer over flat shards, gradient clipping, loss scaling, and schedules."""

from megatron.core.optimizer.flat_shard import AVERAGE_PREFIX
from megatron.core.optimizer.grad_norm import counts_for_model
from megatron.core.optimizer.optimizer import MegatronOptimizer, StepResult
from megatron.core.optimizer.optimizer_config import OptimizerConfig, SchedulerConfig
from megatron.core.optimizer.param_scheduler import OptimizerParamScheduler, Schedule, make_schedule
from megatron.core.optimizer.update_rules import (
    UPDATE_RULES,
    get_update_rule,
    select_states,
)

__all__ = [
    "AVERAGE_PREFIX",
    "UPDATE_RULES",
    "MegatronOptimizer",
    "OptimizerConfig",
    "OptimizerParamScheduler",
    "Schedule",
    "SchedulerConfig",
    "StepResult",
    "counts_for_model",
    "get_update_rule",
    "make_schedule",
    "select_states",
]

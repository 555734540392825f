"""Mixed-precision optimizer over flat shards, gradient clipping, loss scaling, and schedules."""

from megatron.core.optimizer.config import OptimizerConfig, SchedulerConfig
from megatron.core.optimizer.flat_shard import state_names
from megatron.core.optimizer.optimizer import MegatronOptimizer, StepResult, counts_for_model
from megatron.core.optimizer.param_scheduler import OptimizerParamScheduler, Schedule, make_schedule

__all__ = [
    "MegatronOptimizer",
    "OptimizerConfig",
    "OptimizerParamScheduler",
    "Schedule",
    "SchedulerConfig",
    "StepResult",
    "counts_for_model",
    "make_schedule",
    "state_names",
]

"""Pipeline parallelism: the layers of each stage, schedules as data, and the one executor that runs
them.
"""

from megatron.core.pipeline_parallel.executor import MicrobatchStep, run_schedule
from megatron.core.pipeline_parallel.schedules import (
    Action,
    Message,
    Tick,
    check_group_size,
    groups_fit,
    pipeline_layer_ranges,
    schedule,
)

__all__ = [
    "Action",
    "MicrobatchStep",
    "Message",
    "Tick",
    "check_group_size",
    "groups_fit",
    "pipeline_layer_ranges",
    "run_schedule",
    "schedule",
]

"""Pipeline parallelism: the layers of each stage, schedules as data, and their executor."""

from megatron.core.pipeline_parallel.executor import MicrobatchStep, run_schedule
from megatron.core.pipeline_parallel.layer_ranges import pipeline_layer_ranges
from megatron.core.pipeline_parallel.schedules import (
    Action,
    Message,
    Tick,
    check_group_size,
    groups_fit,
    schedule,
)

__all__ = [
    "Action",
    "Message",
    "MicrobatchStep",
    "Tick",
    "check_group_size",
    "groups_fit",
    "pipeline_layer_ranges",
    "run_schedule",
    "schedule",
]

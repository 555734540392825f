"""Data parallelism over contiguous buffers in buckets."""

from megatron.core.distributed.distributed_data_parallel import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)

__all__ = ["DistributedDataParallel", "DistributedDataParallelConfig", "finalize_model_grads"]

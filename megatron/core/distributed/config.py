"""Options of data parallelism. Field names are Megatron-LM's argument names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron.core.utils import flag, raise_problems


@dataclass
class DistributedDataParallelConfig:
    """How gradients are reduced and parameters gathered over the data-parallel axis."""

    use_distributed_optimizer: bool = flag(False)
    """Shard main parameters and optimizer state over the data-parallel ranks (ZeRO-1)."""
    overlap_grad_reduce: bool = flag(False)
    """Reduce each bucket of gradients while the backward pass goes on."""
    overlap_param_gather: bool = flag(False)
    """Gather each bucket of updated parameters while the next forward pass goes on; needs the distributed optimizer."""
    grad_reduce_in_bf16: bool = flag(False)
    """Accumulate and reduce gradients of a bf16 model in bf16: half the memory and traffic, at a loss of precision."""
    ddp_bucket_size: int | None = flag(None)
    """Elements after which a bucket is closed. Default: max(40e6, 1e6 * DP) with an overlap, else no limit."""
    ddp_num_buckets: int | None = flag(None)
    """About how many buckets there are per model chunk, in place of --ddp-bucket-size."""

    def __post_init__(self) -> None:
        raise_problems(self._problems())

    def _problems(self) -> Iterator[str]:
        if self.overlap_param_gather and not self.use_distributed_optimizer:
            yield (
                "--overlap-param-gather needs --use-distributed-optimizer: without it every rank updates all of its "
                "parameters and there is nothing to gather"
            )
        if self.ddp_bucket_size is not None and self.ddp_num_buckets is not None:
            yield (
                f"--ddp-bucket-size {self.ddp_bucket_size} and --ddp-num-buckets {self.ddp_num_buckets} exclude "
                "each other: give one of them"
            )
        for name in ("ddp_bucket_size", "ddp_num_buckets"):
            value = getattr(self, name)
            if value is not None and value < 1:
                yield f"--{name.replace('_', '-')} must be positive, got {value}"

    def grad_dtype(self, param_dtype: torch.dtype) -> torch.dtype:
        """In which gradients of parameters of `param_dtype` are accumulated and reduced.

        fp32, unless it is said otherwise: bf16 drops small gradients over many microbatches.
        """
        in_bf16 = self.grad_reduce_in_bf16 and param_dtype == torch.bfloat16
        return torch.bfloat16 if in_bf16 else torch.float32

    def bucket_size(self, num_elements: int, dp_size: int) -> int:
        """Elements after which a bucket of a chunk of `num_elements` is closed."""
        if self.ddp_bucket_size is not None:
            return self.ddp_bucket_size
        if self.ddp_num_buckets is not None:
            return max(1, num_elements // self.ddp_num_buckets)
        if self.overlap_grad_reduce or self.overlap_param_gather:
            return max(40_000_000, 1_000_000 * dp_size)  # large enough for the bandwidth of many ranks
        return max(1, num_elements)

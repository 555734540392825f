"""Data parallelism: gradients are summed bucket by bucket during the backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.distributed.param_and_grad_buffer import Bucket, ParamAndGradBuffer
from megatron.core.flags import FlagSection, flag
from megatron.core.module import MegatronModule, param_info
from megatron.core.parallel_state import Axis, ParallelState
from megatron.core.tensor_parallel.layers import mark_main_grad_as_stale, take_stale_mark


@dataclass
class DistributedDataParallelConfig(FlagSection):
    """Options of the gradient reduction and parameter gathering over data parallelism."""

    use_distributed_optimizer: bool = flag(False)
    """Shard main parameters and optimizer state over the data-parallel ranks (ZeRO-1)."""
    overlap_grad_reduce: bool = flag(False)
    """Reduce each bucket of gradients during the backward pass."""
    overlap_param_gather: bool = flag(
        False,
        requires={"use_distributed_optimizer": True},
        reason="without it each rank updates all of its parameters, so there are none to gather",
    )
    """Gather each bucket of updated parameters during the next forward pass; requires
    --use-distributed-optimizer.
    """
    grad_reduce_in_bf16: bool = flag(
        False,
        requires={"bf16": True},
        reason="gradients of an fp32 or fp16 model are reduced in fp32",
    )
    """Accumulate and reduce gradients of a bf16 model in bf16, which halves their buffer and
    traffic at a loss of precision. The optimizer copies its shard to fp32, so that memory is saved
    only with --use-distributed-optimizer.
    """
    main_grads_dtype: str = flag(
        "fp32",
        choices=("fp32", "bf16"),
        requires={"bf16": True},
        reason="gradients of an fp32 or fp16 model are reduced in fp32",
    )
    """Data type in which gradients of a bf16 model are accumulated and reduced: bf16 is the same as
    --grad-reduce-in-bf16.
    """
    ddp_bucket_size: int | None = flag(None, positive=True)
    """Elements after which a bucket is closed. Default: max(40e6, 1e6 * DP)."""
    ddp_num_buckets: int | None = flag(None, positive=True, excludes={"ddp_bucket_size": True})
    """Approximate number of buckets per model chunk, instead of --ddp-bucket-size."""

    gradient_accumulation_fusion: bool = flag(True, "--no-gradient-accumulation-fusion")
    """Overwrite gradients in the first micro-batch of an iteration, instead of zeroing them before
    and adding to them.
    """

    @property
    def reduces_in_bf16(self) -> bool:
        """Return whether gradients of a bf16 model are accumulated and reduced in bf16."""
        return self.grad_reduce_in_bf16 or self.main_grads_dtype == "bf16"

    def grad_dtype(self, param_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of `param_dtype` are accumulated and reduced.

        The default is fp32, because bf16 drops small gradients over many micro-batches.
        """
        if self.reduces_in_bf16 and param_dtype == torch.bfloat16:
            return torch.bfloat16
        return torch.float32

    def bucket_size(self, num_elements: int, dp_size: int) -> int:
        """Return the elements after which a bucket of a chunk of `num_elements` is closed."""
        if self.ddp_bucket_size is not None:
            return self.ddp_bucket_size
        if self.ddp_num_buckets is not None:
            return max(1, num_elements // self.ddp_num_buckets)
        # Large enough for full bandwidth with many ranks. Without overlap, too: Muon and AdEMAMix
        # need temporary copies of a bucket.
        return max(40_000_000, 1_000_000 * dp_size)


class DistributedDataParallel(MegatronModule):
    """Model chunk that accumulates gradients in `param.main_grad` and sums them over `dp`.

    Gradients of experts are summed over `edp`, the ranks with the same experts (default: `dp`). All
    gradients are divided by the size of `dp`, because with fewer replicas an expert has processed
    the tokens of more ranks.

    An iteration::

        chunk.zero_grad_buffer()
        with chunk.no_sync():               # all micro-batches except the last one
            forward, backward, ...
        forward, backward                   # the last one; with overlap_grad_reduce, reductions
                                            # start as buckets are completed
        finalize_model_grads([chunk], ps)   # starts the other reductions and waits for all
        optimizer.step()                    # ends with start_param_sync

    With `run_schedule`, its `before_last_backward` sets `require_sync` instead of `no_sync`.

    The optimizer divides the sum by `grad_divisor` when it reads the gradients, at no extra cost. A
    backward pass may add a parameter's gradient to `main_grad` itself, which it gets from
    `tensor_parallel.layers.open_main_grad`; it then returns None.
    """

    def __init__(
        self,
        module: MegatronModule,
        config: DistributedDataParallelConfig,
        dp: Axis,
        edp: Axis | None = None,
        *,
        keep_values: bool = True,
    ) -> None:
        """Wrap `module`. Without `keep_values` its parameters become zero, to be initialized."""
        super().__init__()
        self.module = module
        self.config = config
        self.dp = dp
        self.edp = edp or dp
        # The axis over which main parameters and optimizer state are sharded
        self.shard = dp if config.use_distributed_optimizer else Axis()
        self.require_sync = True  # False while more micro-batches follow
        self.grad_divisor: float | torch.Tensor = float(dp.size)
        self.flat_buffers = _make_buffers(module, config, dp, self.edp, keep_values)
        self.buckets = _sort_by_completion(module, self.flat_buffers)
        # Collectives are matched by their order, so all ranks must start them in the same order,
        # although backward passes may complete the buckets in different orders: a bucket that is
        # complete early waits for those before it.
        self._next_bucket = 0  # the first bucket whose reduction has not started
        bucket_of = {}
        for bucket in self.buckets:
            for param in bucket.params:
                bucket_of[param] = bucket
        # Gradients that are added to `main_grad` directly do not pass through `param.grad`, so that
        # post-accumulate hooks would miss them. Hooks on the autograd nodes run in either case.
        self._grad_accumulators = self._register_grad_hooks(bucket_of)
        if config.overlap_param_gather:
            self._register_gather_hooks(bucket_of)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def sharded_state_dict(self, prefix: str = "") -> ShardedStateDict:
        """Return the wrapped module's state, under its keys, once its parameters are complete."""
        self.finish_param_sync()
        return self.module.sharded_state_dict(prefix)

    def zero_grad_buffer(self) -> None:
        """Discard all gradients at the start of an iteration.

        With --no-gradient-accumulation-fusion they become zero. Otherwise the first gradient of a
        parameter overwrites that of the last iteration, and `start_grad_reduce` zeroes those of
        parameters without one. Gaps between parameters are never written.
        """
        for bucket in self.buckets:
            bucket.missing = set(bucket.params)
            if self.config.gradient_accumulation_fusion:
                for param in bucket.params:
                    mark_main_grad_as_stale(param)
        if not self.config.gradient_accumulation_fusion:
            for buffer in self.flat_buffers:
                buffer.grad_data.zero_()
        self._next_bucket = 0
        self.grad_divisor = float(self.dp.size)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context for backward passes that are not the last ones of the iteration."""
        self.require_sync = False
        try:
            yield
        finally:
            self.require_sync = True

    def start_grad_sync(self) -> None:
        """Start the remaining reductions."""
        while self._next_bucket < len(self.buckets):
            self._start_next_bucket()

    def finish_grad_sync(self) -> None:
        """Wait until `grad_shard` of each bucket contains the sum over DP."""
        self.start_grad_sync()
        for bucket in self.buckets:
            bucket.finish_grad_reduce()

    def start_param_sync(self) -> None:
        """Start gathering the updated shards, in the order of the forward pass.

        Without --overlap-param-gather, wait for them.
        """
        # Buckets are in backward order.
        for bucket in reversed(self.buckets):
            bucket.start_param_gather()
        if not self.config.overlap_param_gather:
            self.finish_param_sync()

    def finish_param_sync(self) -> None:
        """Wait until all parameters are complete; call before reading them outside `forward`."""
        for bucket in self.buckets:
            bucket.finish_param_gather()

    def _register_gather_hooks(self, bucket_of: dict[nn.Parameter, Bucket]) -> None:
        """Wait for a unit's parameters before its `forward`, for all others after the last layer.

        The latter include the output matrix, which is used without a call of its module.
        """
        for unit, recurse in iterate_forward_units(self.module):
            used = set()
            for param in unit.parameters(recurse):
                if param in bucket_of:
                    used.add(bucket_of[param])
            if used:
                unit.register_forward_pre_hook(partial(_wait_for_params, used))
        layers = list(iterate_outermost_layers(self.module))
        if layers:
            layers[-1].register_forward_hook(partial(_wait_for_params, self.buckets))

    def _register_grad_hooks(self, bucket_of: dict[nn.Parameter, Bucket]) -> list[Node]:
        """Call `_accumulate_grad` after autograd has processed each parameter's gradient, or None.

        The hooks are on autograd's accumulation nodes, which the returned list keeps alive.
        """
        nodes: list[Node] = []
        for param, bucket in bucket_of.items():
            node = get_gradient_edge(param).node
            node.register_hook(partial(self._accumulate_grad, param, bucket))
            nodes.append(node)
        return nodes

    def _accumulate_grad(self, param: nn.Parameter, bucket: Bucket, *_: Any) -> None:
        """Add the gradient to `main_grad`; runs after each backward pass through `param`."""
        assert bucket.params_complete, (
            "a parameter was used before it was gathered: its module was not called"
        )
        # Accumulate in `main_grad`, in fp32 by default, and free autograd's tensor at once.
        if param.grad is not None:
            if take_stale_mark(param):
                param.main_grad.copy_(param.grad)  # type: ignore[attr-defined]
            else:
                param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
            param.grad = None
        # In the last backward pass, start the reduction of each bucket that is now complete.
        if self.require_sync and self.config.overlap_grad_reduce:
            assert param in bucket.missing, (
                "a parameter got a second gradient after it was counted as complete"
            )
            bucket.missing.remove(param)
            num_buckets = len(self.buckets)
            while self._next_bucket < num_buckets and not self.buckets[self._next_bucket].missing:
                self._start_next_bucket()

    def _start_next_bucket(self) -> None:
        """Start the reduction of the next bucket in the order that is common to all ranks."""
        self.buckets[self._next_bucket].start_grad_reduce()
        self._next_bucket += 1


def iterate_outermost_layers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the members of the module lists in `module` that are not nested in other lists."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from iterate_outermost_layers(child)


def iterate_forward_units(module: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Yield (module, recurse) of modules that wait for their parameters before `forward`.

    These are the outermost layers and the largest modules without layers. `recurse`: the unit also
    waits for the parameters of its children, which it may use without calling the children.
    """
    has_layers = next(iterate_outermost_layers(module), None) is not None
    yield module, not has_layers
    if not has_layers:
        return
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            for layer in child:
                yield layer, True
        else:
            yield from iterate_forward_units(child)


def _make_buffers(
    module: nn.Module,
    config: DistributedDataParallelConfig,
    dp: Axis,
    edp: Axis,
    keep_values: bool,
) -> list[ParamAndGradBuffer]:
    """Return one buffer per dtype, or fp8, and reduction axis of the parameters."""
    # (dtype, is fp8, ranks of the reduction axis) -> parameters
    params_by_buffer: dict[
        tuple[torch.dtype, bool, tuple[int, ...]], list[tuple[str, nn.Parameter]]
    ] = {}
    # Without expert parallelism both axes have the same ranks, and share a buffer.
    axis_of_ranks = {edp.ranks: edp, dp.ranks: dp}
    for name, param in module.named_parameters():
        if param.requires_grad:
            info = param_info(param)
            axis = edp if info.sharding.is_expert else dp
            buffer_key = (param.dtype, info.fp8 is not None, axis.ranks)
            params_by_buffer.setdefault(buffer_key, []).append((name, param))
    buffers = []
    for (dtype, _, ranks), named_params in params_by_buffer.items():
        axis = axis_of_ranks[ranks]
        shard = axis if config.use_distributed_optimizer else Axis()
        num_elements = sum(param.numel() for _, param in named_params)
        bucket_size = config.bucket_size(num_elements, axis.size)
        grad_dtype = config.grad_dtype(dtype)
        buffers.append(
            ParamAndGradBuffer(named_params, grad_dtype, bucket_size, axis, shard, keep_values)
        )
    return buffers


def _sort_by_completion(module: nn.Module, buffers: list[ParamAndGradBuffer]) -> list[Bucket]:
    """Return the buckets of all buffers in the approximate order of their completion."""
    buckets: list[Bucket] = []
    for buffer in buffers:
        buckets += buffer.buckets
    if len(buffers) == 1:
        return buckets
    # The buckets of one buffer are in order. Those of several are merged: a bucket is complete
    # after its first parameter in the order of the forward pass.
    index_of = {param: index for index, param in enumerate(module.parameters())}

    def find_first_param(bucket: Bucket) -> int:
        return min(index_of[param] for param in bucket.params)

    buckets.sort(key=lambda bucket: -find_first_param(bucket))
    return buckets


def _wait_for_params(buckets: Iterable[Bucket], *_: Any) -> None:
    for bucket in buckets:
        bucket.finish_param_gather()


def finalize_model_grads(
    chunks: Sequence[DistributedDataParallel],
    ps: ParallelState,
    num_tokens: torch.Tensor | None = None,
) -> None:
    """Finish the reduction of gradients. Collective over all ranks.

    Afterwards `grad_shard / grad_divisor` of each bucket is the gradient of the global batch.

    The sum over DP, which may have started during the backward pass, comes first. As sums commute,
    all other reductions run on its result: only on the shards, with 1/DP of the bytes. This
    requires equal shards at both ends, which holds because tensor-parallel ranks have equal plans,
    and a tied embedding is a bucket of its own on the first and the last stage.

    `num_tokens` (with --calculate-per-token-loss, whose loss is a sum over tokens) is the number of
    tokens that the last virtual stage on this rank has processed in this iteration, 0 on the other
    pipeline stages.
    """
    # Sum over data parallelism
    for chunk in chunks:
        chunk.finish_grad_sync()

    # Sums of tied embeddings, and of gradients that are partial under sequence parallelism
    tied: list[torch.Tensor] = []
    partial_grads: list[torch.Tensor] = []
    for chunk in chunks:
        for bucket in chunk.buckets:
            tied += bucket.grad_ranges(lambda info: info.shared_embedding)
            partial_grads += bucket.grad_ranges(lambda info: info.partial_grad)
    _all_reduce(tied, ps.embedding)
    _all_reduce(partial_grads, ps.tp)

    # Number of tokens of the global batch
    if num_tokens is not None:
        total = num_tokens.to(torch.float64, copy=True)
        _all_reduce([total], ps.pp)
        _all_reduce([total], ps.dp_cp)
        for chunk in chunks:
            chunk.grad_divisor = total.clamp(min=1.0)


def _all_reduce(tensors: Sequence[torch.Tensor], axis: Axis) -> None:
    """Sum each tensor over `axis`, all concurrently."""
    if axis.size == 1:
        return
    works = []
    for tensor in tensors:
        works.append(dist.all_reduce(tensor, group=axis.group, async_op=True))
    for work in works:
        work.wait()

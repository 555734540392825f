"""A model chunk whose gradients are summed over data parallelism, bucket by bucket, during the
backward pass.
"""

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
from megatron.core.flags import find_range_problems, flag, raise_problems
from megatron.core.module import MegatronModule, param_info
from megatron.core.parallel_state import Axis, ParallelState


@dataclass
class DistributedDataParallelConfig:
    """How gradients are reduced and parameters gathered over the data-parallel axis."""

    use_distributed_optimizer: bool = flag(False)
    """Shard main parameters and optimizer state over the data-parallel ranks (ZeRO-1)."""
    overlap_grad_reduce: bool = flag(False)
    """Reduce each bucket of gradients during the backward pass."""
    overlap_param_gather: bool = flag(False)
    """Gather each bucket of updated parameters during the next forward pass; needs the distributed
    optimizer.
    """
    grad_reduce_in_bf16: bool = flag(False)
    """Accumulate and reduce gradients of a bf16 model in bf16: half the memory and traffic, at a
    loss of precision.
    """
    ddp_bucket_size: int | None = flag(None, positive=True)
    """Elements after which a bucket is closed. Default: max(40e6, 1e6 * DP) with an overlap, else
    no limit.
    """
    ddp_num_buckets: int | None = flag(None, positive=True)
    """About how many buckets there are per model chunk, in place of --ddp-bucket-size."""

    def __post_init__(self) -> None:
        raise_problems([*find_range_problems(self), *self._problems()])

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
            return max(
                40_000_000, 1_000_000 * dp_size
            )  # large enough for the bandwidth of many ranks
        return max(1, num_elements)


class DistributedDataParallel(MegatronModule):
    """Gradients are accumulated in `param.main_grad` and summed over `dp` after the last
    microbatch.

    Those of experts are summed over `edp`, the ranks that hold the same ones (by default `dp`,
    too). All are divided by the size of `dp`: with fewer replicas, an expert has seen the tokens of
    more ranks.

    An iteration::

        chunk.zero_grad_buffer()
        with chunk.no_sync():                   # all microbatches but the last
            forward, backward, ...
        forward, backward                       # the last; with overlap_grad_reduce reductions start as buckets fill
        finalize_model_grads([chunk], ps)       # the rest of the reductions; waits for them
        optimizer.step()                        # ends in start_param_sync
        (or zero_grad_buffer, run_schedule with before_last_backward setting `require_sync`, finalize_model_grads, step)

    The sum is divided by `grad_divisor` where the optimizer reads it, which costs nothing there. A
    backward pass that adds a parameter's gradient into `main_grad` itself returns None for it.
    """

    def __init__(
        self,
        module: MegatronModule,
        config: DistributedDataParallelConfig,
        dp: Axis,
        edp: Axis | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.config = config
        self.dp = dp
        self.edp = dp if edp is None else edp
        self.shard = dp if config.use_distributed_optimizer else Axis()
        self.require_sync = True  # False: more microbatches follow
        self.grad_divisor: float | torch.Tensor = float(dp.size)
        self.flat_buffers = _make_buffers(module, config, dp, self.edp)
        self.buckets = _in_order_of_completion(module, self.flat_buffers)
        # Collectives match by order, so every rank must start them in the same one, whatever the
        # order in which its backward pass completes the buckets: a bucket that is complete early
        # waits for those before it.
        self._next_bucket = 0  # the first bucket whose reduction has not started
        bucket_of = {param: bucket for bucket in self.buckets for param in bucket.params}
        # Gradients that are added to `main_grad` never pass through `param.grad`, so a
        # post-accumulate hook would not see them: the hooks are on the autograd nodes, which run in
        # either case.
        self._grad_accumulators = self._register_grad_hooks(bucket_of)
        if config.overlap_param_gather:
            self._register_gather_hooks(bucket_of)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def sharded_state_dict(self, prefix: str = "") -> ShardedStateDict:
        """That of the wrapped module, under its own keys, once its parameters are complete."""
        self.finish_param_sync()
        return self.module.sharded_state_dict(prefix)

    def zero_grad_buffer(self) -> None:
        """Start an iteration."""
        for buffer in self.flat_buffers:
            buffer.grad_data.zero_()
        for bucket in self.buckets:
            bucket.missing = set(bucket.params)
        self._next_bucket = 0
        self.grad_divisor = float(self.dp.size)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside are not the last of the iteration."""
        self.require_sync = False
        try:
            yield
        finally:
            self.require_sync = True

    def start_grad_sync(self) -> None:
        """Start the reductions that have not started yet."""
        while self._next_bucket < len(self.buckets):
            self._start_next_bucket()

    def finish_grad_sync(self) -> None:
        """Wait until `grad_shard` of every bucket holds the sum over DP."""
        self.start_grad_sync()
        for bucket in self.buckets:
            bucket.finish_grad_reduce()

    def start_param_sync(self) -> None:
        """Gather the updated shards in the order of the forward pass; waits for them only without
        overlap.
        """
        for bucket in reversed(self.buckets):
            bucket.start_param_gather()
        if not self.config.overlap_param_gather:
            self.finish_param_sync()

    def finish_param_sync(self) -> None:
        """Wait until every parameter is complete; call before reading parameters outside of
        `forward`.
        """
        for bucket in self.buckets:
            bucket.finish_param_gather()

    def _register_gather_hooks(self, bucket_of: dict[nn.Parameter, Bucket]) -> None:
        """Wait for a unit's parameters before its `forward`, and for all that is left after the
        last layer.

        (The output matrix is used without a call of the module that has it.)
        """
        for unit, recurse in forward_units(self.module):
            used = {bucket_of[param] for param in unit.parameters(recurse) if param in bucket_of}
            if used:
                unit.register_forward_pre_hook(partial(_wait_for_params, used))
        for last_layer in list(outermost_layers(self.module))[-1:]:
            last_layer.register_forward_hook(partial(_wait_for_params, self.buckets))

    def _register_grad_hooks(self, bucket_of: dict[nn.Parameter, Bucket]) -> list[Node]:
        """Call `_accumulate_grad` after autograd has handled each parameter's gradient, also if it
        is None.

        The hooks hang on autograd's accumulating nodes, which live as long as the returned list.
        """
        nodes: list[Node] = []
        for param, bucket in bucket_of.items():
            nodes.append(get_gradient_edge(param).node)
            nodes[-1].register_hook(partial(self._accumulate_grad, param, bucket))
        return nodes

    def _accumulate_grad(self, param: nn.Parameter, bucket: Bucket, *_: Any) -> None:
        """Runs after each backward pass through `param`."""
        assert bucket.params_complete, (
            "a parameter was used before it was gathered: its module was not called"
        )
        if param.grad is not None:
            param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
            param.grad = None
        if self.require_sync and self.config.overlap_grad_reduce:
            assert param in bucket.missing, (
                "a parameter got a second gradient after it was counted as complete"
            )
            bucket.missing.remove(param)
            while (
                self._next_bucket < len(self.buckets)
                and not self.buckets[self._next_bucket].missing
            ):
                self._start_next_bucket()

    def _start_next_bucket(self) -> None:
        self.buckets[self._next_bucket].start_grad_reduce()
        self._next_bucket += 1


def outermost_layers(module: nn.Module) -> Iterator[nn.Module]:
    """The members of the lists in `module` that are in no other list."""
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else outermost_layers(child)


def forward_units(module: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Modules that wait for their parameters before `forward`, as (module, with those of its
    children).

    These are the outermost layers and, beside them, the largest modules without layers. A unit may
    use the parameters of its children without calling them.
    """
    if not any(True for _ in outermost_layers(module)):
        yield module, True
        return
    yield module, False
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from ((layer, True) for layer in child)
        else:
            yield from forward_units(child)


def _make_buffers(
    module: nn.Module, config: DistributedDataParallelConfig, dp: Axis, edp: Axis
) -> list[ParamAndGradBuffer]:
    """One buffer for the parameters of each dtype, and those in fp8, that are reduced over the same
    ranks.
    """
    kinds: dict[tuple[torch.dtype, bool, tuple[int, ...]], list[tuple[str, nn.Parameter]]] = {}
    axes = {axis.ranks: axis for axis in (edp, dp)}
    for name, param in module.named_parameters():
        if param.requires_grad:
            info = param_info(param)
            axis = edp if info.sharding.is_expert else dp
            kinds.setdefault((param.dtype, info.fp8 is not None, axis.ranks), []).append(
                (name, param)
            )
    buffers = []
    for (dtype, _, ranks), named_params in kinds.items():
        axis = axes[ranks]
        shard = axis if config.use_distributed_optimizer else Axis()
        bucket_size = config.bucket_size(sum(param.numel() for _, param in named_params), axis.size)
        buffers.append(
            ParamAndGradBuffer(named_params, config.grad_dtype(dtype), bucket_size, axis, shard)
        )
    return buffers


def _in_order_of_completion(module: nn.Module, buffers: list[ParamAndGradBuffer]) -> list[Bucket]:
    """The buckets of all buffers in about the order in which a backward pass completes them."""
    buckets = [bucket for buffer in buffers for bucket in buffer.buckets]
    if len(buffers) > 1:
        place = {param: index for index, param in enumerate(module.parameters())}
        buckets.sort(key=lambda bucket: -min(place[param] for param in bucket.params))
    return buckets


def _wait_for_params(buckets: Iterable[Bucket], *_: Any) -> None:
    for bucket in buckets:
        bucket.finish_param_gather()


def finalize_model_grads(
    chunks: Sequence[DistributedDataParallel],
    ps: ParallelState,
    num_tokens: torch.Tensor | None = None,
) -> None:
    """After it every bucket's `grad_shard` over `grad_divisor` is the gradient of the whole global
    batch.

    First the sum over DP, which may have started during backward. All other sums run on its result,
    as sums commute: on the shards alone, with a DP-th of the bytes. That needs equal shards at both
    ends: tensor-parallel ranks have equal plans, and a tied embedding is a bucket of its own, so
    its shards on the first and last stage correspond.

    `num_tokens` (with --calculate-per-token-loss, where the loss is a sum over tokens): tokens that this rank's last
    virtual stage has seen in this iteration, 0 on the other pipeline stages.
    """
    for chunk in chunks:
        chunk.finish_grad_sync()
    buckets = [bucket for chunk in chunks for bucket in chunk.buckets]
    _all_reduce(
        [g for b in buckets for g in b.grad_ranges(lambda info: info.shared_embedding)],
        ps.embedding,
    )
    _all_reduce([g for b in buckets for g in b.grad_ranges(lambda info: info.partial_grad)], ps.tp)
    if num_tokens is not None:
        total = num_tokens.to(torch.float64, copy=True)
        _all_reduce([total], ps.pp)
        _all_reduce([total], ps.dp_cp)
        for chunk in chunks:
            chunk.grad_divisor = total.clamp(min=1.0)


def _all_reduce(tensors: Sequence[torch.Tensor], axis: Axis) -> None:
    """Sum every tensor over `axis`, all at once."""
    if axis.size == 1:
        return
    work = [dist.all_reduce(tensor, group=axis.group, async_op=True) for tensor in tensors]
    for pending in work:
        pending.wait()

"""Stand-ins for a device and for other ranks: tensors without memory.

`PlannedDevice` lets a model on torch's meta device, whose tensors have shapes but no data, run as
on another device. `LiveBytes` counts what such tensors would allocate, and `RecordingGroup` what a
rank would send.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.core.parallel_state import Axis, ParallelState

META = torch.device("meta")


@contextmanager
def groups_known(ps: ParallelState) -> Iterator[None]:
    """Let torch know the group of CP: for messages it looks up the backend and the ranks."""
    if ps.cp.group is None:
        yield
        return
    world = dist.distributed_c10d._world
    world.pg_map[ps.cp.group] = ("fake", None)  # type: ignore[assignment]
    world.pg_group_ranks[ps.cp.group] = {rank: index for index, rank in enumerate(ps.cp.ranks)}
    try:
        yield
    finally:
        del world.pg_map[ps.cp.group]
        del world.pg_group_ranks[ps.cp.group]


@contextmanager
def compiler_absent() -> Iterator[None]:
    """Keep torch from importing its compiler, which takes two seconds.

    It computes shapes in Python functions that it excludes from compilation at their first call.
    Recomputation needs the compiler's options.
    """
    name = "torch._dynamo"
    if name in sys.modules:
        yield
        return
    stand_in = ModuleType(name)
    stand_in.disable = lambda function, *options, **names: function  # type: ignore[attr-defined]
    sys.modules[name] = stand_in
    torch._dynamo = stand_in
    try:
        yield
    finally:
        del sys.modules[name]
        del torch._dynamo


@contextmanager
def shapes_compared() -> Iterator[None]:
    """Let torch compare shapes and dtypes, but not devices, of recomputed tensors.

    Inside torch's functions `PlannedDevice` does not apply.
    """
    checks = torch.utils.checkpoint._allowed_determinism_checks_to_fns
    default = checks["default"]
    checks["default"] = lambda tensor: (tensor.shape, tensor.dtype)
    try:
        yield
    finally:
        checks["default"] = default


def run_backward(root: Tensor) -> None:
    """Compute the gradients of a scalar, as `torch.autograd.backward` does.

    That function would disable `PlannedDevice` inside.
    """
    gradients = (torch.ones_like(root),)
    _engine_run_backward(
        (root,), gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages of the meta device that were created inside.

    `peak` is their maximum since `reset`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._total = 0
        self.peak = 0

    def count(self) -> int:
        """Return the bytes of the storages that still exist."""
        expired = [key for key, (storage, _) in self._storages.items() if storage.expired()]
        for key in expired:
            _, size = self._storages.pop(key)
            self._total -= size
        return self._total

    def reset(self) -> None:
        """Start to measure the peak from the current bytes."""
        self.peak = self.count()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [result] if isinstance(result, Tensor) else tree_leaves(result)
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.is_meta:
                self._add(tensor.untyped_storage())
        # Counting is slow, and only necessary if the bytes could be a new peak.
        if self._total > self.peak:
            self.peak = max(self.peak, self.count())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        reference, size = self._storages.get(key, (None, 0))
        # Another storage may have had the same address.
        if reference is None or reference.expired():
            self._storages[key] = (StorageWeakRef(storage), storage.nbytes())
            self._total += storage.nbytes() - size


class _Done(dist.Work):
    """A finished operation."""

    def wait(self, *timeout: Any) -> bool:
        return True


class RecordingGroup(dist.ProcessGroup):
    """Stand-in for the process group of an axis: counts bytes without sending them."""

    def __init__(self, axis: Axis, label: str, sent: Counter[tuple[str, str]]) -> None:
        super().__init__(axis.rank, axis.size)  # type: ignore[call-arg]
        self._label = label
        self._sent = sent

    def record(self, operation: str, payload: Tensor | list[Tensor]) -> _Done:
        """Count the bytes of one tensor."""
        tensor = payload if isinstance(payload, Tensor) else payload[0]
        self._sent[self._label, operation] += tensor.nbytes
        return _Done()


def _make_operation(operation: str, argument: int) -> Callable[..., _Done]:
    """Make the method of an operation whose unsharded tensor is argument number `argument`."""

    def run(group: RecordingGroup, *args: Any) -> _Done:
        return group.record(operation, args[argument])

    return run


for _method, _operation, _argument in (
    ("allreduce", "all_reduce", 0),
    ("_allgather_base", "all_gather", 0),
    ("_reduce_scatter_base", "reduce_scatter", 1),
    ("alltoall_base", "all_to_all", 1),
    # The same in torch from 2.13 on
    ("all_gather_single", "all_gather", 0),
    ("reduce_scatter_single", "reduce_scatter", 1),
    ("all_to_all_single", "all_to_all", 1),
    ("send", "send", 0),
):
    setattr(RecordingGroup, _method, _make_operation(_operation, _argument))
RecordingGroup.recv = lambda *args: _Done()  # type: ignore[method-assign]


class _FusedAttention(torch.autograd.Function):
    """Attention of one kernel in each direction, with its result in the layout of the query.

    It keeps its inputs, its result and an fp32 number per row.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        out = torch.empty_like(query)
        log_sum_exp = query.new_empty(query.shape[:3], dtype=torch.float32)  # [b, heads, s]
        ctx.save_for_backward(query, key, value, mask, out, log_sum_exp)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


class _FusedNorm(torch.autograd.Function):
    """Norm of one kernel in each direction, which keeps its input and fp32 numbers of each row.

    On the meta device torch would run a dozen operations, and import its compiler.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, num_statistics: int
    ) -> Tensor:
        statistics = x.new_empty(num_statistics, *x.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(x, weight, bias, statistics)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *inputs, _ = ctx.saved_tensors
        gradients = [None if tensor is None else torch.empty_like(tensor) for tensor in inputs]
        return *gradients, None


class PlannedDevice(TorchFunctionMode):
    """Lets tensors without memory pass for tensors of the planned device.

    Code that selects a kernel by device takes the branch of that device. `num_rows` is the number
    of rows that the experts of a rank process: where code reads such counts, all experts get the
    same.
    """

    def __init__(self, device: torch.device, num_rows: int) -> None:
        super().__init__()
        self._device = device
        self._num_rows = num_rows

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        replacement = _REPLACEMENTS.get(func)
        if replacement is not None and args[0].is_meta:
            return replacement(self, *args, **kwargs)
        if func in _device_constructors():
            kwargs.setdefault("device", META)
            kwargs.pop("pin_memory", None)
        args = tuple(map(self._replace_device, args))
        if "device" in kwargs:
            kwargs["device"] = self._replace_device(kwargs["device"])
        return func(*args, **kwargs)

    def _replace_device(self, argument: Any) -> Any:
        is_planned = isinstance(argument, torch.device) and argument.type == self._device.type
        return META if is_planned else argument

    def get_device(self, tensor: Tensor) -> torch.device:
        return self._device

    def is_cuda(self, tensor: Tensor) -> bool:
        return self._device.type == "cuda"

    def read_scalar(self, counts: Tensor) -> int:
        """Return the number of rows of all experts, or 0 for a difference."""
        return 0 if counts.is_floating_point() else self._num_rows

    def read_list(self, counts: Tensor) -> list[Any]:
        """Return equal numbers of rows for the entries of the last dimension."""
        if counts.dim() > 1:
            return [self.read_list(row) for row in counts]
        quotient, remainder = divmod(self._num_rows, len(counts))
        return [quotient + (index < remainder) for index in range(len(counts))]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Run the kernel that torch's SDPA selects on the planned device."""
        if self._device.type == "cpu" and dropout_p:
            # Plain products, which keep all scores, as torch selects on the meta device
            return F.scaled_dot_product_attention(
                query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
        return _FusedAttention.apply(query, key, value, mask)

    def drop(
        self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """Drop elements; CUDA keeps a mask of booleans, the CPU one in the dtype of `x`."""
        if self._device.type == "cuda":
            return torch.native_dropout(x, p, training)[0]
        return F.dropout(x, p, training)

    def normalize_rms(
        self, x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float = 1e-5
    ) -> Tensor:
        """Run a fused RMSNorm, which keeps the scale of each row."""
        return _FusedNorm.apply(x, weight, None, 1)

    def normalize(
        self,
        x: Tensor,
        shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        """Run a fused LayerNorm, which keeps the scale and the mean of each row."""
        return _FusedNorm.apply(x, weight, bias, 2)

    def add_product(self, total: Tensor, *matrices: Tensor, **options: Any) -> Tensor:
        """Add a product to an fp32 matrix in one kernel, which exists on CUDA only."""
        if "out_dtype" in options:
            return total
        return torch.addmm(total, *matrices, **options)


_REPLACEMENTS: dict[Callable[..., Any], Callable[..., Any]] = {
    Tensor.device.__get__: PlannedDevice.get_device,
    Tensor.is_cuda.__get__: PlannedDevice.is_cuda,  # type: ignore[attr-defined]
    Tensor.item: PlannedDevice.read_scalar,
    Tensor.__int__: PlannedDevice.read_scalar,
    Tensor.tolist: PlannedDevice.read_list,
    F.scaled_dot_product_attention: PlannedDevice.attend,
    F.dropout: PlannedDevice.drop,
    F.layer_norm: PlannedDevice.normalize,
    F.rms_norm: PlannedDevice.normalize_rms,
    torch.addmm: PlannedDevice.add_product,
}

"""CUDA tensors without memory on a machine without CUDA, and a record of the operators they reach."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Call(NamedTuple):
    operator: str
    args: tuple[Any, ...]


@contextlib.contextmanager
def record_fake_calls() -> Iterator[list[Call]]:
    """Record calls of operators in order. Tensors on any device can be created, and have no data."""
    recorder = _Recorder()
    with FakeTensorMode(allow_non_fake_inputs=True), recorder, _MethodsWithoutDevice():
        yield recorder.calls


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append(Call(func._schema.name.removeprefix("aten::"), args))
        return func(*args, **(kwargs or {}))


class _MethodsWithoutDevice(TorchFunctionMode):
    """Replaces methods that need a device even if the tensor is fake."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        function = _REPLACEMENTS.get(func, func)
        return function(*args, **(kwargs or {}))


def _select(tensor: Tensor, index: Any) -> Tensor:
    parts = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in parts:
        gap = parts.index(Ellipsis)
        num_dimensions = sum(part is not None for part in parts) - 1
        parts[gap : gap + 1] = [slice(None)] * (tensor.dim() - num_dimensions)
    dim = 0
    for part in parts:
        if part is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(part, slice):
            start, stop, step = part.indices(tensor.shape[dim])
            assert step == 1
            tensor = tensor.narrow(dim, start, max(0, stop - start))
        else:
            tensor = tensor.select(dim, part)
            continue
        dim += 1
    return tensor


def _assign(tensor: Tensor, index: Any, value: Tensor) -> None:
    torch.ops.aten.copy_.default(_select(tensor, index), value)


def _make_contiguous(tensor: Tensor) -> Tensor:
    if tensor.is_contiguous():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _convert(tensor: Tensor, target: Any = torch.float32) -> Tensor:
    name = "device" if isinstance(target, torch.device) else "dtype"
    if target in (tensor.device, tensor.dtype):
        return tensor
    return torch.ops.aten._to_copy.default(tensor, **{name: target})


_REPLACEMENTS = {
    Tensor.__getitem__: _select,
    Tensor.__setitem__: _assign,
    Tensor.contiguous: _make_contiguous,
    Tensor.copy_: torch.ops.aten.copy_.default,
    Tensor.float: _convert,
    Tensor.to: _convert,
}

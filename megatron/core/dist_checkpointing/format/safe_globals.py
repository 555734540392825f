"""What a checkpoint's pickle may name, and what it gets instead.

Opcodes of a pickle can call objects (REDUCE), instantiate classes (NEWOBJ) and set attributes (BUILD). So everything
that is handed to the unpickler is either immutable (dtypes, `OrderedDict`) or sealed here: calling it builds plain
data, setting anything on it raises.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import math
import pathlib
import re
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np

from megatron.core.dist_checkpointing.format.schema import MAX_RANK, UnsafePickleError, is_dtype, printable, shown
from megatron.core.lazy_import import lazy_module

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")

DTYPE_NAME = re.compile(r"(?:b?float|u?int|complex|bits|quint|qint)\d+\w*|bool")


class Budget:
    """How much may be copied while a file of `nbytes` is opened: else many views of one value fill the memory."""

    def __init__(self, nbytes: int) -> None:
        self._left = 65536 + 4 * nbytes

    def charge(self, amount: int) -> None:
        self._left -= amount
        if self._left < 0:
            raise UnsafePickleError("it copies far more than it holds")


class Storage(Protocol):
    """The content of a record of the archive, in memory or in the file."""

    @property
    def nbytes(self) -> int: ...

    def view(self, dtype: torch.dtype, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Any:
        """The tensor that views it from element `offset` on, which it holds."""
        ...


class _SealedType(type):
    """Classes on which a pickle cannot set attributes."""

    def __setattr__(cls, name: str, value: Any) -> NoReturn:
        raise UnsafePickleError(f"a pickle tries to set {shown(name)} of a class")

    __delattr__ = __setattr__  # type: ignore[assignment]


class Placeholder(metaclass=_SealedType):
    """An instance of a class of another project: name (`type(x).__module__`, `__qualname__`), arguments and state.

    Compared by identity: hashing contents would let a file make dictionaries of placeholders quadratic.
    """

    __slots__ = ("args", "items", "state")
    args: tuple[Any, ...]
    state: Any
    items: list[Any] | tuple[()]  # of a subclass of list or dict

    def __new__(cls, *args: Any, **kwargs: Any) -> Placeholder:
        self = object.__new__(cls)
        self.args, self.state, self.items = args, kwargs or None, ()
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        self.extend((item,))

    def extend(self, items: Any) -> None:
        if not self.items:
            self.items = []
        self.items.extend(items)

    def __setitem__(self, key: Any, item: Any) -> None:
        self.append((key, item))

    def __repr__(self) -> str:
        """Name and arguments; never what these contain."""
        return (
            f"<{printable(f'{type(self).__module__}.{type(self).__qualname__}')}({', '.join(map(shown, self.args))})>"
        )


@lru_cache(maxsize=4096)
def placeholder_type(module: str, name: str) -> type[Placeholder]:
    return _SealedType(name, (Placeholder,), {"__module__": module, "__slots__": ()})  # type: ignore[return-value]


class Sealed:
    """What a pickle may hold but not change. BUILD, the opcode that sets attributes, asks for `__setstate__` first."""

    def __setstate__(self, state: Any) -> None:
        raise UnsafePickleError(f"a pickle tries to set the state of a {type(self).__name__}")


class DtypeName(Sealed, str):
    """Stands for a dtype of torch, such as torch.bfloat16, where its name is enough."""


class Stub(Sealed, metaclass=_SealedType):
    """Stands for a value that is built after the pickle has ended."""

    def resolve(self, resolver: Resolver) -> Any:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class StorageKind(Sealed):
    """A storage class such as `torch.FloatStorage`: nothing but its dtype."""

    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class StorageRef(Sealed):
    """The record `data/<key>` with `numel` elements of `dtype`."""

    dtype: torch.dtype
    key: str
    numel: int


@dataclass(frozen=True, eq=False)
class Function(Sealed):
    """A function that a pickle may call; what it may copy is bounded by a budget, one for each pickle."""

    call: Callable[..., Any]
    budget: Budget | None = None

    def __call__(self, *args: Any) -> Any:
        if self.budget is not None:
            self.budget.charge(sum(len(arg) for arg in args if isinstance(arg, _SIZED)))
        return self.call(*args)


_LEAVES = frozenset([int, float, bool, str, bytes, type(None), complex, DtypeName])


def is_leaf(value: Any) -> bool:
    """Whether nothing is in it."""
    kind = type(value)
    return kind in _LEAVES or (kind.__module__ == "torch" and kind.__qualname__ in ("dtype", "Size"))


class Resolver:
    """Replaces stubs in a structure of containers by what they stand for, containers in place where possible.

    Not a function in itself: one that knew itself would keep the mapped file until the next garbage collection.
    """

    def __init__(self, storage: Callable[[StorageRef], Storage], budget: Budget) -> None:
        self.storage, self.budget = storage, budget
        self._memo: dict[int, Any] = {}

    def walk(self, value: Any) -> Any:
        kind, memo = type(value), self._memo
        if is_leaf(value):
            return value
        if id(value) in memo:
            return memo[id(value)][0]
        if isinstance(value, Stub):
            result = value.resolve(self)
        elif isinstance(value, dict):
            memo[id(value)] = (value, value)  # before its content, which may refer to it
            for key, item in list(value.items()):
                value[key] = self.walk(item)
            return value
        elif kind is list:
            memo[id(value)] = (value, value)
            value[:] = map(self.walk, value)
            return value
        elif kind is tuple:
            items = [self.walk(item) for item in value]
            result = tuple(items) if any(a is not b for a, b in zip(items, value, strict=True)) else value
        elif isinstance(value, Placeholder):
            memo[id(value)] = (value, value)
            value.args, value.state, value.items = map(self.walk, (value.args, value.state, value.items))
            return value
        else:
            result = value
        memo[id(value)] = (result, value)  # the original is kept alive: its id must stay taken
        return result


_SIZED = (str, bytes, bytearray, list, tuple, dict, set, frozenset)
_SMALL = 65536  # elements that a tensor may have beyond those of its storage


def _extents(value: Any) -> tuple[int, ...]:
    """A shape or strides."""
    if not isinstance(value, tuple | list) or len(value) > MAX_RANK or not all(type(n) is int for n in value):
        raise UnsafePickleError(f"a tensor of shape or strides {shown(value)}")
    return tuple(value)


class TensorStub(Stub):
    """A tensor over a record of the archive."""

    def __init__(self, storage: Any, offset: int, shape: Any, stride: Any, dtype: torch.dtype) -> None:
        if not isinstance(storage, StorageRef):
            raise UnsafePickleError(f"a tensor over {shown(storage)} instead of a storage")
        shape, stride = _extents(shape), _extents(stride)
        if type(offset) is not int or len(shape) != len(stride):
            raise UnsafePickleError(f"a tensor with offset {shown(offset)}, shape {shape}, strides {stride}")
        self.storage, self.offset, self.shape, self.stride, self.dtype = storage, offset, shape, stride, dtype

    def resolve(self, resolver: Resolver) -> Any:
        data, dtype, shape = resolver.storage(self.storage), self.dtype, self.shape
        if min((self.offset, *shape, *self.stride), default=0) < 0:
            raise ValueError(f"tensor with offset {self.offset}, shape {shape}, strides {self.stride}")
        if 0 in shape:
            return torch.empty(shape, dtype=dtype)
        numel = data.nbytes // dtype.itemsize
        last = self.offset + sum((n - 1) * s for n, s in zip(shape, self.stride, strict=True))
        if last >= numel:
            raise ValueError(f"tensor of shape {shape} at {self.offset} exceeds its storage of {numel} elements")
        # Strides of 0 repeat elements: a few bytes would stand for terabytes as soon as somebody copies them.
        if math.prod(shape) > max(numel, _SMALL):
            raise ValueError(f"tensor of shape {shape} repeats the {numel} elements of its storage")
        return data.view(dtype, self.offset, shape, self.stride)


def _tensor_v2(storage: Any, offset: int, shape: Any, stride: Any, *_: Any) -> TensorStub:
    return TensorStub(storage, offset, shape, stride, storage.dtype)


def _tensor_v3(storage: Any, offset: int, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *_: Any) -> Any:
    if not is_dtype(dtype):
        raise UnsafePickleError(f"a tensor of dtype {shown(dtype)}")
    return TensorStub(storage, offset, shape, stride, dtype)


def _same_tensor(data: Any, *_: Any) -> TensorStub:
    """A parameter, or a tensor that carries Python attributes: only its values matter."""
    if not isinstance(data, TensorStub):
        raise UnsafePickleError(f"a parameter over {shown(data)}")
    return data


def _tensor_with_attributes(function: Any, kind: Any, args: Any, state: Any) -> TensorStub:
    if not isinstance(function, Function):
        raise UnsafePickleError(f"a tensor rebuilt by {shown(function)}")
    return _same_tensor(function(*args))


def _content(data: Any) -> bytes:
    """Of an array; old pickles have it as text."""
    if not isinstance(data, str | bytes | bytearray):
        raise UnsafePickleError(f"an array of {shown(data)}")
    return data.encode("latin1") if isinstance(data, str) else bytes(data)


class _ArrayStub(Stub):
    """A numpy array; `__setstate__` is how numpy pickles carry the content."""

    shape: tuple[int, ...] = (0,)
    dtype: Any = None
    data = b""
    fortran: Any = False

    def __setstate__(self, state: Any) -> None:
        _, shape, self.dtype, self.fortran, data = state
        self.shape, self.data = _extents(shape), _content(data)

    def resolve(self, resolver: Resolver) -> np.ndarray:
        if not isinstance(self.dtype, _DtypeStub):
            raise UnsafePickleError(f"a numpy array of dtype {shown(self.dtype)}")
        resolver.budget.charge(len(self.data))
        array = np.frombuffer(self.data, self.dtype.dtype)
        return (array.reshape(self.shape[::-1]).T if self.fortran else array.reshape(self.shape)).copy()


class _DtypeStub(Stub):
    """A numpy dtype of plain numbers or text."""

    def __init__(self, name: Any, *_: Any) -> None:
        dtype = np.dtype(name if type(name) is str and len(name) < 32 and "," not in name else "V")
        if dtype.kind not in "biufcSU":
            raise UnsafePickleError(f"numpy dtype {shown(name)}")
        self.dtype = dtype

    def __setstate__(self, state: Any) -> None:
        if state[1] == ">":
            self.dtype = self.dtype.newbyteorder(">")

    def resolve(self, resolver: Resolver) -> np.dtype:
        return self.dtype


def _numpy_scalar(dtype: Any, data: Any) -> Any:
    if not isinstance(dtype, _DtypeStub):
        raise UnsafePickleError(f"a numpy scalar of dtype {shown(dtype)}")
    return np.frombuffer(_content(data), dtype.dtype)[0]


class _NamespaceStub(Stub):
    """`argparse.Namespace`, where Megatron-LM keeps its arguments."""

    state: Mapping[str, Any] = {}  # a pickle has none for one without attributes

    def __setstate__(self, state: Any) -> None:
        if type(state) is not dict or not all(type(name) is str for name in state):
            raise UnsafePickleError(f"arguments that are {shown(state)}")
        self.state = state

    def resolve(self, resolver: Resolver) -> argparse.Namespace:
        return argparse.Namespace(**{name: resolver.walk(value) for name, value in self.state.items()})


class _SignalStub(Stub):
    """A member of `signal.Signals`: one object for the whole process, on which no pickle may set attributes."""

    def __init__(self, number: Any) -> None:
        if type(number) is not int:
            raise UnsafePickleError(f"a signal {shown(number)}")
        self.number = number

    def resolve(self, resolver: Resolver) -> signal.Signals:
        return signal.Signals(self.number)


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """How protocol 2 writes bytes."""
    if not isinstance(text, str) or encoding not in ("latin1", "utf-8"):
        raise UnsafePickleError(f"_codecs.encode with {shown(encoding)}")
    return text.encode(encoding)


def _bytearray(data: Any = b"", encoding: Any = "latin1") -> bytearray:
    return bytearray(_encode(data, encoding) if isinstance(data, str) else _content(data))


_FLAT = (int, float, bool, str, bytes, type(None), DtypeName)


def _hashable(values: Iterable[Any]) -> list[Any]:
    """Members of a set, keys of a dictionary: plain values, and a few flat tuples of them."""
    members, odd = list(values), 0
    for value in members:
        if (type(value) in _FLAT or is_dtype(value)) and not (type(value) is int and value.bit_length() > 64):
            continue
        odd += 1
        if odd > 1000 or type(value) is not tuple or not all(type(item) in _FLAT or is_dtype(item) for item in value):
            raise UnsafePickleError(f"a set or dictionary with {shown(value)} in it")
    return members


def _dict(kind: type[dict], *args: Any) -> dict[Any, Any]:
    """Of a dictionary or of pairs."""
    if not args or type(args[0]) is dict:
        return kind(*args)
    pairs = [tuple(pair) for pair in args[0]]
    _hashable(pair[0] for pair in pairs)
    return kind(pairs)


def _of(make: Callable[..., Any], *kinds: type) -> Function:
    """A function of short values of these types."""

    def call(*args: Any) -> Any:
        if not all(type(arg) in kinds and (type(arg) is not str or len(arg) <= 4096) for arg in args):
            raise UnsafePickleError(f"a call with {', '.join(map(shown, args))}")
        return make(*args)

    return Function(call)


@lru_cache
def torch_globals() -> dict[tuple[str, str], Any]:
    """Those of torch, but for its dtypes. Only a pickle that names one of them needs torch."""
    storages = {
        name: StorageKind(dtype)
        for dtype, name in torch.storage._dtype_to_storage_type_map().items()
        if not name.startswith("Q")
    }
    return {
        **{("torch", name): kind for name, kind in storages.items()},
        ("torch.storage", "UntypedStorage"): StorageKind(torch.uint8),
        ("torch", "UntypedStorage"): StorageKind(torch.uint8),
        ("torch", "Size"): Function(lambda extents=(): torch.Size(_extents(extents))),
        ("torch", "device"): _of(torch.device, str, int),
        ("torch", "Tensor"): placeholder_type("torch", "Tensor"),
        ("torch.nn.parameter", "Parameter"): placeholder_type("torch.nn.parameter", "Parameter"),
        ("torch._utils", "_rebuild_tensor"): Function(_tensor_v2),
        ("torch._utils", "_rebuild_tensor_v2"): Function(_tensor_v2),
        ("torch._utils", "_rebuild_tensor_v3"): Function(_tensor_v3),
        ("torch._utils", "_rebuild_parameter"): Function(_same_tensor),
        ("torch._utils", "_rebuild_parameter_with_state"): Function(_same_tensor),
        ("torch._tensor", "_rebuild_from_type_v2"): Function(_tensor_with_attributes),
    }


# What stands for globals of torch where no tensor is asked for.
NAMES_OF_TORCH: dict[tuple[str, str], Any] = {
    ("torch", "Size"): Function(lambda extents=(): _extents(extents)),
}

SAFE_GLOBALS: dict[tuple[str, str], Any] = {
    ("torch.serialization", "_get_layout"): _of(str, str),
    ("numpy", "dtype"): _DtypeStub,
    ("numpy", "ndarray"): placeholder_type("numpy", "ndarray"),
    ("numpy.core.multiarray", "_reconstruct"): Function(lambda *args: _ArrayStub()),
    ("numpy.core.multiarray", "scalar"): Function(_numpy_scalar),
    ("argparse", "Namespace"): _NamespaceStub,
    ("builtins", "set"): Function(lambda items=(): set(_hashable(items))),
    ("builtins", "frozenset"): Function(lambda items=(): frozenset(_hashable(items))),
    ("builtins", "complex"): _of(complex, int, float),
    ("builtins", "bytearray"): Function(_bytearray),
    ("builtins", "slice"): _of(slice, int, type(None)),
    ("collections", "OrderedDict"): Function(partial(_dict, collections.OrderedDict)),
    ("collections", "defaultdict"): Function(lambda factory=None, *args: _dict(dict, *args)),
    ("collections", "deque"): Function(lambda items=(), maxlen=None: list(items)),
    ("_codecs", "encode"): Function(_encode),
    ("signal", "Signals"): _SignalStub,
    **{("signal", member.name): _SignalStub(int(member)) for member in signal.Signals},  # how Python 3.10 writes them
    ("datetime", "timedelta"): _of(datetime.timedelta, int, float),
    ("datetime", "datetime"): _of(datetime.datetime, int, bytes, str),
    **{
        ("pathlib", name): _of(pathlib.PurePosixPath, str)
        for name in ("Path", "PosixPath", "PurePath", "PurePosixPath")
    },
}

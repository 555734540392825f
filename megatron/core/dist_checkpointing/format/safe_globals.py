"""What a checkpoint's pickle may name, and what it gets instead: plain values, and functions that
build plain values.

Every function here must be harmless and quick for any arguments at all, tensors of a mapped file
included.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import math
import pathlib
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megatron.core.dist_checkpointing.format.schema import (
    MAX_RANK,
    UnsafePickleError,
    format_value,
    is_dtype,
)
from megatron.core.dist_checkpointing.mapping import Shape
from megatron.core.lazy_import import lazy_module
from megatron.core.terminal import escape_control_chars

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")

DTYPE_NAME = re.compile(r"(?:b?float|u?int|complex|bits|quint|qint)\d+\w*|bool")


class Placeholder:
    """An instance of a class of another project: name (`type(x).__module__`, `__qualname__`),
    arguments and state.

    Compared by identity: hashing contents would let a file make dictionaries of placeholders
    quadratic.
    """

    __slots__ = ("args", "items", "state")

    args: tuple[Any, ...]
    state: Any
    items: list[Any] | tuple[()]  # of a subclass of list or dict

    def __repr__(self) -> str:
        """Name and arguments; never what these contain."""
        name = escape_control_chars(f"{type(self).__module__}.{type(self).__qualname__}")
        return f"<{name}({', '.join(map(format_value, self.args))})>"


@lru_cache(maxsize=4096)
def placeholder_type(module: str, name: str) -> type[Placeholder]:
    return type(name, (Placeholder,), {"__module__": module, "__slots__": ()})


class DtypeName(str):
    """Stands for a dtype of torch, such as torch.bfloat16, where its name is enough."""

    __slots__ = ()


class Storage(NamedTuple):
    """The content of one of the archive, in memory or in the file."""

    nbytes: int
    view: Callable[[torch.dtype, int, Shape, Shape], Any]
    """(dtype, offset, shape, strides) -> the tensor of these elements, which it holds"""


@dataclass(frozen=True, eq=False)
class StorageKind:
    """A storage class such as `torch.FloatStorage`: nothing but its dtype."""

    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class TypedStorage:
    """What a persistent id means: a record, as elements of `dtype`."""

    dtype: torch.dtype
    content: Storage


@dataclass(frozen=True, eq=False)
class Function:
    """A function that a pickle may call. `hashed` gives those parts of its arguments that it is
    going to hash.
    """

    call: Callable[..., Any]
    hashed: Callable[..., list[Any]] | None = None


_SMALL = 65536  # elements that a tensor may have beyond those of its storage


def _extents(value: Any) -> tuple[int, ...]:
    """A shape or strides."""
    if (
        not isinstance(value, tuple | list)
        or len(value) > MAX_RANK
        or not all(type(n) is int for n in value)
    ):
        raise UnsafePickleError(f"a tensor of shape or strides {format_value(value)}")
    return tuple(value)


def _unbuildable(layout: str) -> UnsafePickleError:
    return UnsafePickleError(f"cannot be rebuilt: a tensor of {layout}")


def _tensor(
    storage: Any, offset: Any, shape: Any, stride: Any, dtype: torch.dtype | None = None
) -> Any:
    """A tensor over a record of the archive."""
    if not isinstance(storage, TypedStorage):
        raise UnsafePickleError(f"a tensor over {format_value(storage)} instead of a storage")
    shape = _extents(shape)
    stride = _extents(stride)
    content = storage.content
    dtype = dtype or storage.dtype
    if type(offset) is not int or len(shape) != len(stride) or min((offset, *shape, *stride)) < 0:
        raise _unbuildable(f"offset {format_value(offset)}, shape {shape}, strides {stride}")
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    numel = content.nbytes // dtype.itemsize
    last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    if last >= numel:
        raise _unbuildable(
            f"shape {shape} at {offset}, which exceeds its storage of {numel} elements"
        )
    # Strides of 0 repeat elements: a few bytes would stand for terabytes as soon as somebody copies
    # them.
    if math.prod(shape) > max(numel, _SMALL):
        raise _unbuildable(f"shape {shape}, which repeats the {numel} elements of its storage")
    return content.view(dtype, offset, shape, stride)


def _tensor_v2(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> Any:
    return _tensor(storage, offset, shape, stride)


def _tensor_v3(
    storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *_: Any
) -> Any:
    if not is_dtype(dtype):
        raise UnsafePickleError(f"a tensor of dtype {format_value(dtype)}")
    return _tensor(storage, offset, shape, stride, dtype)


def _tensor_with_attributes(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """Only its values matter."""
    rebuilds = isinstance(function, Function) and function.call in (_tensor_v2, _tensor_v3)
    if not rebuilds or type(args) is not tuple:
        raise UnsafePickleError(f"a tensor rebuilt by {format_value(function)}")
    return function.call(*args)


def _content(data: Any) -> bytes:
    """Of an array; old pickles have it as text."""
    if not isinstance(data, str | bytes | bytearray):
        raise UnsafePickleError(f"an array of {format_value(data)}")
    return data.encode("latin1") if isinstance(data, str) else bytes(data)


def _numpy_dtype(name: Any, *_: Any) -> np.dtype:
    """Of plain numbers or text; its own object, because the byte order follows in its state."""
    plain = type(name) is str and len(name) < 32 and "," not in name
    dtype = np.dtype(name, False, True) if plain else None
    if dtype is None or dtype.kind not in "biufcSU":
        raise UnsafePickleError(f"numpy dtype {format_value(name)}")
    return dtype


def _numpy_scalar(dtype: Any, data: Any) -> Any:
    if not isinstance(dtype, np.dtype):
        raise UnsafePickleError(f"a numpy scalar of dtype {format_value(dtype)}")
    return np.frombuffer(_content(data), dtype)[0]


def set_numpy_state(value: Any, state: Any) -> None:
    """How numpy's pickles carry the byte order of a dtype, shape and content of an array."""
    if not isinstance(value, np.ndarray):
        if state[1] == ">":
            value.__setstate__(value.newbyteorder(">").__reduce__()[2])
        return
    _, shape, dtype, fortran, data = state
    if not isinstance(dtype, np.dtype):
        raise UnsafePickleError(f"a numpy array of dtype {format_value(dtype)}")
    flat = np.frombuffer(_content(data), dtype)
    shape = _extents(shape)
    array = flat.reshape(shape[::-1]).T if fortran else flat.reshape(shape)
    own: Any = array.__reduce__()[2]  # it trusts what it is given
    value.__setstate__(own)


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """How protocol 2 writes bytes."""
    if not isinstance(text, str) or encoding not in ("latin1", "utf-8"):
        raise UnsafePickleError(f"_codecs.encode with {format_value(encoding)}")
    return text.encode(encoding)


def _bytearray(data: Any = b"", encoding: Any = "latin1") -> bytearray:
    return bytearray(_encode(data, encoding) if isinstance(data, str) else _content(data))


def _items(value: Any = ()) -> list[Any]:
    """Of a plain container."""
    if type(value) not in (list, tuple, dict, set):
        raise UnsafePickleError(f"the items of {format_value(value)}")
    return list(value)


def _pairs(content: Any = ()) -> list[Any]:
    """Of a dictionary, which is one already or a list of pairs."""
    pairs = list(content.items()) if type(content) is dict else _items(content)
    if not all(type(pair) in (list, tuple) and len(pair) == 2 for pair in pairs):
        raise UnsafePickleError("a dictionary made of other things than pairs")
    return pairs


def _dict_of(kind: type[dict]) -> Function:
    return Function(
        lambda *args: kind(_pairs(*args)), lambda *args: [key for key, _ in _pairs(*args)]
    )


def _of(make: Callable[..., Any], *kinds: type) -> Function:
    """A function of short values of these types."""

    def call(*args: Any) -> Any:
        if not all(
            type(arg) in kinds and (type(arg) is not str or len(arg) <= 4096) for arg in args
        ):
            raise UnsafePickleError(f"a call with {', '.join(map(format_value, args))}")
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
    same = Function(lambda data, *_: data)  # a parameter: only its values matter
    return {
        **{("torch", name): kind for name, kind in storages.items()},
        ("torch.storage", "UntypedStorage"): StorageKind(torch.uint8),
        ("torch", "UntypedStorage"): StorageKind(torch.uint8),
        ("torch", "Size"): Function(lambda shape=(): torch.Size(_extents(shape))),
        ("torch", "device"): _of(torch.device, str, int),
        ("torch", "Tensor"): placeholder_type("torch", "Tensor"),
        ("torch.nn.parameter", "Parameter"): placeholder_type("torch.nn.parameter", "Parameter"),
        ("torch._utils", "_rebuild_tensor"): Function(_tensor_v2),
        ("torch._utils", "_rebuild_tensor_v2"): Function(_tensor_v2),
        ("torch._utils", "_rebuild_tensor_v3"): Function(_tensor_v3),
        ("torch._utils", "_rebuild_parameter"): same,
        ("torch._utils", "_rebuild_parameter_with_state"): same,
        ("torch._tensor", "_rebuild_from_type_v2"): Function(_tensor_with_attributes),
    }


PLAIN_SIZE = Function(
    lambda shape=(): _extents(shape)
)  # stands for torch.Size where no tensor is asked for

SAFE_GLOBALS: dict[tuple[str, str], Any] = {
    ("torch.serialization", "_get_layout"): _of(str, str),
    ("numpy", "dtype"): Function(_numpy_dtype),
    ("numpy", "ndarray"): placeholder_type("numpy", "ndarray"),
    ("numpy.core.multiarray", "_reconstruct"): Function(lambda *_: np.empty(0)),
    ("numpy.core.multiarray", "scalar"): Function(_numpy_scalar),
    ("argparse", "Namespace"): Function(argparse.Namespace),
    ("builtins", "set"): Function(lambda *args: set(_items(*args)), _items),
    ("builtins", "frozenset"): Function(lambda *args: frozenset(_items(*args)), _items),
    ("builtins", "complex"): _of(complex, int, float),
    ("builtins", "bytearray"): Function(_bytearray),
    ("builtins", "slice"): _of(slice, int, type(None)),
    ("collections", "OrderedDict"): _dict_of(collections.OrderedDict),
    ("collections", "defaultdict"): Function(lambda *_: {}),  # its items follow
    ("collections", "deque"): Function(lambda items=(), *_: _items(items)),
    ("_codecs", "encode"): Function(_encode),
    ("signal", "Signals"): _of(signal.Signals, int),
    **{("signal", member.name): member for member in signal.Signals},  # how Python 3.10 writes them
    ("datetime", "timedelta"): _of(datetime.timedelta, int, float),
    ("datetime", "datetime"): _of(datetime.datetime, int, bytes, str),
    **{
        ("pathlib", name): _of(pathlib.PurePosixPath, str)
        for name in ("Path", "PosixPath", "PurePath", "PurePosixPath")
    },
}

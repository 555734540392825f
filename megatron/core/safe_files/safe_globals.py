"""The globals that a pickle of a checkpoint may name, and their replacements.

The replacements are plain values, and functions that build plain values. Each function must be
harmless and fast for any arguments, including tensors of a mapped file.
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
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron.core.safe_files.errors import UnsafePickleError
from megatron.core.safe_files.schema import MAX_RANK, Shape, format_value, is_dtype, tensor_shape
from megatron.core.terminal import escape_control_chars

DTYPE_NAME = re.compile(r"(?:b?float|u?int|complex|bits|quint|qint)\d+\w*|bool")


class Placeholder:
    """An instance of a class of another project, with its arguments and state.

    The name of the class is `type(x).__module__` and `__qualname__`. Instances are compared by
    identity: if contents were hashed, a file could make dictionaries of placeholders quadratic.
    """

    __slots__ = ("args", "items", "state")

    args: tuple[Any, ...]
    state: Any
    items: list[Any] | tuple[()]  # for a subclass of list or dict

    def __repr__(self) -> str:
        """Return the name and the arguments, but not the contents of containers."""
        name = escape_control_chars(f"{type(self).__module__}.{type(self).__qualname__}")
        arguments = ", ".join(map(format_value, self.args))
        return f"<{name}({arguments})>"


@lru_cache(maxsize=4096)
def make_placeholder_type(module: str, name: str) -> type[Placeholder]:
    """Return a class without behavior that has the name of a class of another project."""
    return type(name, (Placeholder,), {"__module__": module, "__slots__": ()})


def make_placeholder(placeholder_type: Any, args: tuple[Any, ...], state: Any) -> Placeholder:
    """Return an instance. Raises UnsafePickleError for any other type."""
    if type(placeholder_type) is not type or not issubclass(placeholder_type, Placeholder):
        raise UnsafePickleError(f"a pickle calls {format_value(placeholder_type)}")
    instance = placeholder_type.__new__(placeholder_type)
    instance.args = args
    instance.state = state
    instance.items = ()
    return instance


class DtypeName(str):
    """Name of a dtype, such as torch.bfloat16, which this version of torch may lack."""

    __slots__ = ()


class Storage(NamedTuple):
    """A record of the archive with tensor data, in memory or in the file."""

    nbytes: int
    view: Callable[[torch.dtype, int, Shape, Shape], Any]
    """Returns the tensor for (dtype, offset, shape, strides), in elements, inside the record."""


@dataclass(frozen=True, eq=False)
class StorageKind:
    """A storage class such as `torch.FloatStorage`, reduced to its dtype."""

    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class TypedStorage:
    """A record with elements of `dtype`, as named by a persistent id."""

    dtype: torch.dtype
    content: Storage


@dataclass(frozen=True, eq=False)
class Function:
    """A function that a pickle may call. `hashed` returns the values that the call will hash."""

    call: Callable[..., Any]
    hashed: Callable[..., list[Any]] | None = None


_MAX_EXPANDED = 65536  # elements of a tensor that is larger than its storage


def _check_extents(value: Any) -> tuple[int, ...]:
    """Return a shape or strides as a tuple. Raises UnsafePickleError for any other value."""
    is_sequence = isinstance(value, tuple | list) and len(value) <= MAX_RANK
    if not is_sequence or not all(type(extent) is int for extent in value):
        raise UnsafePickleError(f"a tensor of shape or strides {format_value(value)}")
    return tuple(value)


def _make_layout_error(layout: str) -> UnsafePickleError:
    """Return an error about a tensor whose shape or strides do not fit its storage."""
    return UnsafePickleError(f"cannot be rebuilt: a tensor of {layout}")


def _build_tensor(
    storage: Any, offset: Any, shape: Any, stride: Any, dtype: torch.dtype | None = None
) -> Any:
    """Build a tensor over a record of the archive. Offset and strides are in elements.

    Raises UnsafePickleError for a tensor that its storage does not contain.
    """
    # Check the types.
    if not isinstance(storage, TypedStorage):
        raise UnsafePickleError(f"a tensor over {format_value(storage)} instead of a storage")
    shape = _check_extents(shape)
    stride = _check_extents(stride)
    is_layout = (
        type(offset) is int
        and len(shape) == len(stride)
        and min((offset, *shape, *stride)) >= 0  # torch has no negative strides
    )
    if not is_layout:
        raise _make_layout_error(f"offset {format_value(offset)}, shape {shape}, strides {stride}")
    tensor_shape(shape, "the shape of a tensor")
    dtype = dtype or storage.dtype
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)

    # The last element must be in the storage.
    content = storage.content
    numel = content.nbytes // dtype.itemsize
    last = offset
    for extent, step in zip(shape, stride, strict=True):
        last += (extent - 1) * step
    if last >= numel:
        raise _make_layout_error(
            f"shape {shape} at {offset}, which exceeds its storage of {numel} elements"
        )

    # Strides of 0 repeat elements: a few bytes could become terabytes when the tensor is copied.
    if math.prod(shape) > max(numel, _MAX_EXPANDED):
        raise _make_layout_error(
            f"shape {shape}, which repeats the {numel} elements of its storage"
        )
    return content.view(dtype, offset, shape, stride)


def _build_tensor_v2(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> Any:
    """Build a tensor of the dtype of its storage."""
    return _build_tensor(storage, offset, shape, stride)


def _build_tensor_v3(
    storage: Any, offset: Any, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *_: Any
) -> Any:
    """Build a tensor over an untyped storage."""
    if not is_dtype(dtype):
        raise UnsafePickleError(f"a tensor of dtype {format_value(dtype)}")
    return _build_tensor(storage, offset, shape, stride, dtype)


# Names the function that builds a tensor of attributes.
_WRAPPER = make_placeholder_type("torch._utils", "_rebuild_wrapper_subclass")


def _build_tensor_subclass(function: Any, tensor_class: Any, args: Any, state: Any) -> Any:
    """Build the values of a tensor subclass, without its attributes.

    A subclass that consists of its attributes, such as a DTensor, becomes a placeholder with them.
    """
    if function is _WRAPPER:
        return make_placeholder(tensor_class, (), state)
    builders = (_build_tensor_v2, _build_tensor_v3)
    is_builder = isinstance(function, Function) and function.call in builders
    if not is_builder or type(args) is not tuple:
        raise UnsafePickleError(f"a tensor rebuilt by {format_value(function)}")
    return function.call(*args)


def _decode_content(data: Any) -> bytes:
    """Return the bytes of an array, which old pickles store as text."""
    if not isinstance(data, str | bytes | bytearray):
        raise UnsafePickleError(f"an array of {format_value(data)}")
    if isinstance(data, str):
        return data.encode("latin1")
    return bytes(data)


def _build_numpy_dtype(name: Any, *_: Any) -> np.dtype:
    """Build a dtype of plain numbers or text.

    It is a new object, because the pickle sets its byte order afterwards.
    """
    # A comma would define a structured dtype.
    if type(name) is str and len(name) < 32 and "," not in name:
        dtype = np.dtype(name, align=False, copy=True)
        if dtype.kind in "biufcSU":  # numbers, bytes and text; not objects
            return dtype
    raise UnsafePickleError(f"numpy dtype {format_value(name)}")


def _build_numpy_scalar(dtype: Any, data: Any) -> Any:
    """Build a scalar from its bytes."""
    if not isinstance(dtype, np.dtype):
        raise UnsafePickleError(f"a numpy scalar of dtype {format_value(dtype)}")
    return np.frombuffer(_decode_content(data), dtype)[0]


def set_numpy_state(value: Any, state: Any) -> None:
    """Set the byte order of a dtype, or shape and content of an array, as in numpy's pickles."""
    # `__setstate__` trusts its argument, so it gets the state of a dtype or an array built here.
    if not isinstance(value, np.ndarray):
        byte_order = state[1]
        if byte_order == ">":
            _copy_state(value.newbyteorder(">"), value)
        return

    _, shape, dtype, is_column_major, data = state
    if not isinstance(dtype, np.dtype):
        raise UnsafePickleError(f"a numpy array of dtype {format_value(dtype)}")
    flat = np.frombuffer(_decode_content(data), dtype)
    shape = _check_extents(shape)
    array = flat.reshape(shape)
    if is_column_major:
        reversed_shape = shape[::-1]
        array = flat.reshape(reversed_shape).T
    _copy_state(array, value)


def _copy_state(source: Any, target: Any) -> None:
    """Set the state of a numpy object to that of another one."""
    _, _, state = source.__reduce__()
    target.__setstate__(state)


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """Encode text as bytes, which is how protocol 2 stores bytes."""
    if not isinstance(text, str) or encoding not in ("latin1", "utf-8"):
        raise UnsafePickleError(f"_codecs.encode with {format_value(encoding)}")
    return text.encode(encoding)


def _build_bytearray(data: Any = b"", encoding: Any = "latin1") -> bytearray:
    """Build a bytearray from bytes, or from text in protocol 2."""
    if isinstance(data, str):
        return bytearray(_encode(data, encoding))
    return bytearray(_decode_content(data))


def _list_items(value: Any = ()) -> list[Any]:
    """Return the items of a plain container."""
    if type(value) not in (list, tuple, dict, set):
        raise UnsafePickleError(f"the items of {format_value(value)}")
    return list(value)


def _list_pairs(content: Any = ()) -> list[Any]:
    """Return the (key, value) pairs of a dictionary, or of a list of pairs."""
    if type(content) is dict:
        return list(content.items())
    pairs = _list_items(content)
    for pair in pairs:
        if type(pair) not in (list, tuple) or len(pair) != 2:
            raise UnsafePickleError("a dictionary that is not built from pairs")
    return pairs


def _make_dict_function(dict_class: type[dict]) -> Function:
    """Return the constructor of a dictionary, which hashes its keys."""

    def build(*args: Any) -> Any:
        pairs = _list_pairs(*args)
        return dict_class(pairs)

    def list_keys(*args: Any) -> list[Any]:
        pairs = _list_pairs(*args)
        return [key for key, _ in pairs]

    return Function(build, list_keys)


def _restrict(make: Callable[..., Any], *arg_types: type) -> Function:
    """Restrict a function to short arguments of these types."""

    def call(*args: Any) -> Any:
        for arg in args:
            is_long = type(arg) is str and len(arg) > 4096
            if type(arg) not in arg_types or is_long:
                arguments = ", ".join(map(format_value, args))
                raise UnsafePickleError(f"a call with {arguments}")
        return make(*args)

    return Function(call)


@lru_cache
def get_torch_globals() -> dict[tuple[str, str], Any]:
    """Return the globals of torch except dtypes."""
    storages: dict[tuple[str, str], Any] = {}
    for dtype, name in torch.storage._dtype_to_storage_type_map().items():
        is_quantized = name.startswith("Q")
        if not is_quantized:
            storages["torch", name] = StorageKind(dtype)
    take_tensor = Function(lambda data, *_: data)  # a parameter is read as a tensor
    return {
        **storages,
        ("torch.storage", "UntypedStorage"): StorageKind(torch.uint8),
        ("torch", "UntypedStorage"): StorageKind(torch.uint8),
        ("torch", "Size"): Function(lambda shape=(): torch.Size(_check_extents(shape))),
        ("torch", "device"): _restrict(torch.device, str, int),
        ("torch", "Tensor"): make_placeholder_type("torch", "Tensor"),
        ("torch.nn.parameter", "Parameter"): make_placeholder_type(
            "torch.nn.parameter", "Parameter"
        ),
        ("torch._utils", "_rebuild_tensor"): Function(_build_tensor_v2),
        ("torch._utils", "_rebuild_tensor_v2"): Function(_build_tensor_v2),
        ("torch._utils", "_rebuild_tensor_v3"): Function(_build_tensor_v3),
        ("torch._utils", "_rebuild_wrapper_subclass"): _WRAPPER,
        ("torch._utils", "_rebuild_parameter"): take_tensor,
        ("torch._utils", "_rebuild_parameter_with_state"): take_tensor,
        ("torch._tensor", "_rebuild_from_type_v2"): Function(_build_tensor_subclass),
    }


# Replaces torch.Size in metadata, whose shapes are plain tuples.
PLAIN_SIZE = Function(lambda shape=(): _check_extents(shape))

SAFE_GLOBALS: dict[tuple[str, str], Any] = {
    ("torch.serialization", "_get_layout"): _restrict(str, str),
    ("numpy", "dtype"): Function(_build_numpy_dtype),
    ("numpy", "ndarray"): make_placeholder_type("numpy", "ndarray"),
    ("numpy.core.multiarray", "_reconstruct"): Function(lambda *_: np.empty(0)),
    ("numpy.core.multiarray", "scalar"): Function(_build_numpy_scalar),
    ("argparse", "Namespace"): Function(argparse.Namespace),
    ("builtins", "set"): Function(lambda *args: set(_list_items(*args)), _list_items),
    ("builtins", "frozenset"): Function(lambda *args: frozenset(_list_items(*args)), _list_items),
    ("builtins", "complex"): _restrict(complex, int, float),
    ("builtins", "bytearray"): Function(_build_bytearray),
    ("builtins", "slice"): _restrict(slice, int, type(None)),
    ("collections", "OrderedDict"): _make_dict_function(collections.OrderedDict),
    ("collections", "defaultdict"): Function(lambda *_: {}),  # the pickle adds the items
    ("collections", "deque"): Function(lambda items=(), *_: _list_items(items)),
    ("_codecs", "encode"): Function(_encode),
    ("signal", "Signals"): _restrict(signal.Signals, int),
    **{("signal", member.name): member for member in signal.Signals},  # as pickled by Python 3.10
    ("datetime", "timedelta"): _restrict(datetime.timedelta, int, float),
    ("datetime", "datetime"): _restrict(datetime.datetime, int, bytes, str),
    **{
        ("pathlib", name): _restrict(pathlib.PurePosixPath, str)
        for name in ("Path", "PosixPath", "PurePath", "PurePosixPath")
    },
}

"""What a checkpoint's pickle may name, and what it gets instead.

Opcodes of a pickle can call objects (REDUCE), instantiate classes (NEWOBJ) and set attributes (BUILD). So everything
that is handed to the unpickler is either immutable (dtypes, `OrderedDict`) or sealed here: calling it builds plain
data, setting anything on it raises.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import pathlib
import signal
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np
import torch

from megatron.core.dist_checkpointing.errors import UnsafePickleError
from megatron.core.dist_checkpointing.format.lazy_tensor import FileStorage, FileTensor

Walk = Callable[[Any], Any]
StorageOf = Callable[["StorageRef"], torch.Tensor | FileStorage]


class _SealedType(type):
    """Classes on which a pickle cannot set attributes."""

    def __setattr__(cls, name: str, value: Any) -> NoReturn:
        raise UnsafePickleError(f"a pickle tries to set {cls.__name__}.{name}")

    __delattr__ = __setattr__  # type: ignore[assignment]


class Placeholder(metaclass=_SealedType):
    """An instance of a class of another project: name (`type(x).__module__`, `__qualname__`), arguments and state.

    Compared by identity: hashing contents would let a file make dictionaries of placeholders quadratic.
    """

    args: tuple[Any, ...]
    state: Any
    items: list[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Placeholder:
        self = object.__new__(cls)
        vars(self).update(args=args, state=kwargs or None, items=[])
        return self

    def __setstate__(self, state: Any) -> None:
        vars(self)["state"] = state

    def append(self, item: Any) -> None:  # a subclass of list
        self.items.append(item)

    def extend(self, items: Any) -> None:
        self.items.extend(items)

    def __setitem__(self, key: Any, item: Any) -> None:  # a subclass of dict
        self.items.append((key, item))

    def __repr__(self) -> str:
        arguments = ", ".join(map(repr, self.args)) + ("" if self.state is None else f", {self.state!r}")
        return f"<{type(self).__module__}.{type(self).__qualname__}({arguments})>"


@lru_cache(maxsize=4096)
def placeholder_type(module: str, name: str) -> type[Placeholder]:
    return _SealedType(name, (Placeholder,), {"__module__": module})  # type: ignore[return-value]


class Stub(metaclass=_SealedType):
    """Stands for a value that is built after the pickle has ended."""

    def resolve(self, walk: Walk, storage: StorageOf | None) -> Any:
        raise NotImplementedError


class StorageKind:
    """A storage class such as `torch.FloatStorage`: nothing but its dtype."""

    __slots__ = ("dtype",)
    dtype: torch.dtype

    def __init__(self, dtype: torch.dtype) -> None:
        object.__setattr__(self, "dtype", dtype)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise UnsafePickleError(f"a pickle tries to set {name} of a storage class")


class StorageRef:
    """The record `data/<key>` with `numel` elements of `dtype`."""

    __slots__ = ("dtype", "key", "numel")

    def __init__(self, dtype: torch.dtype, key: str, numel: int) -> None:
        self.dtype, self.key, self.numel = dtype, key, numel

    def __setstate__(self, state: Any) -> NoReturn:
        raise UnsafePickleError("a pickle tries to set the state of a storage")


class _Function:
    """A function that a pickle may call; nothing can be set on it."""

    __slots__ = ("_call",)
    _call: Callable[..., Any]

    def __init__(self, call: Callable[..., Any]) -> None:
        object.__setattr__(self, "_call", call)

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise UnsafePickleError(f"a pickle tries to set {name} of a function")

    def __setstate__(self, state: Any) -> NoReturn:
        raise UnsafePickleError("a pickle tries to set the state of a function")


class TensorStub(Stub):
    """A tensor over a record of the archive."""

    storage: StorageRef
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def __init__(self, storage: Any, offset: int, shape: Any, stride: Any, dtype: torch.dtype) -> None:
        if not isinstance(storage, StorageRef):
            raise UnsafePickleError(f"a tensor over {type(storage).__name__} instead of a storage")
        self.__dict__.update(storage=storage, offset=offset, shape=tuple(shape), stride=tuple(stride), dtype=dtype)

    def __setstate__(self, state: Any) -> NoReturn:
        raise UnsafePickleError("a pickle tries to set the state of a tensor")

    def resolve(self, walk: Walk, storage: StorageOf | None) -> torch.Tensor | FileTensor:
        if storage is None:
            raise UnsafePickleError("a tensor where none can be")
        data, dtype, shape = storage(self.storage), self.dtype, self.shape
        if min((self.offset, *shape, *self.stride), default=0) < 0:
            raise ValueError(f"tensor with offset {self.offset}, shape {shape}, strides {self.stride}")
        if 0 in shape:
            return torch.empty(shape, dtype=dtype)
        nbytes = data.nbytes
        numel = nbytes // dtype.itemsize
        last = self.offset + sum((n - 1) * s for n, s in zip(shape, self.stride, strict=True))
        if last >= numel:
            raise ValueError(f"tensor of shape {shape} at {self.offset} exceeds its storage of {numel} elements")
        if isinstance(data, FileStorage):
            return data.tensor(dtype, self.offset, shape, self.stride)
        data = data[: numel * dtype.itemsize]
        if data.storage_offset() % dtype.itemsize or data.data_ptr() % dtype.itemsize:
            data = data.clone()
        typed = data.view(dtype)
        return typed.as_strided(shape, self.stride, typed.storage_offset() + self.offset)


def _tensor_v2(storage: Any, offset: int, shape: Any, stride: Any, *_: Any) -> TensorStub:
    return TensorStub(storage, offset, shape, stride, storage.dtype)


def _tensor_v3(storage: Any, offset: int, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *_: Any) -> Any:
    if not isinstance(dtype, torch.dtype):
        raise UnsafePickleError(f"a tensor of dtype {dtype!r:.60}")
    return TensorStub(storage, offset, shape, stride, dtype)


def _same_tensor(data: Any, *_: Any) -> TensorStub:
    """A parameter, or a tensor that carries Python attributes: only its values matter."""
    if not isinstance(data, TensorStub):
        raise UnsafePickleError(f"a parameter over {type(data).__name__}")
    return data


def _tensor_with_attributes(function: Any, kind: Any, args: Any, state: Any) -> TensorStub:
    if not isinstance(function, _Function):
        raise UnsafePickleError(f"a tensor rebuilt by {function!r:.60}")
    return _same_tensor(function(*args))


class _ArrayStub(Stub):
    """A numpy array; `__setstate__` is how numpy pickles carry the content."""

    def __init__(self, shape: Any = (0,), dtype: Any = None, data: Any = b"", fortran: bool = False) -> None:
        self.__dict__.update(shape=shape, dtype=dtype, data=data, fortran=fortran)

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        self.__dict__.update(shape=shape, dtype=dtype, data=data, fortran=fortran)

    def resolve(self, walk: Walk, storage: StorageOf | None) -> np.ndarray:
        fields = vars(self)
        if not isinstance(fields["dtype"], _DtypeStub):
            raise UnsafePickleError(f"a numpy array of dtype {fields['dtype']!r:.60}")
        data = fields["data"].encode("latin1") if isinstance(fields["data"], str) else bytes(fields["data"])
        array = np.frombuffer(data, fields["dtype"].dtype)
        shape = tuple(fields["shape"])
        return (array.reshape(shape[::-1]).T if fields["fortran"] else array.reshape(shape)).copy()


class _DtypeStub(Stub):
    """A numpy dtype of plain numbers or text."""

    def __init__(self, name: Any, *_: Any) -> None:
        dtype = np.dtype(str(name))
        if dtype.kind not in "biufcSU":
            raise UnsafePickleError(f"numpy dtype {name!r:.60}")
        self.__dict__["dtype"] = dtype

    def __setstate__(self, state: Any) -> None:
        if state[1] == ">":
            self.__dict__["dtype"] = self.dtype.newbyteorder(">")

    dtype: np.dtype

    def resolve(self, walk: Walk, storage: StorageOf | None) -> np.dtype:
        return self.dtype


def _numpy_scalar(dtype: Any, data: Any) -> Any:
    if not isinstance(dtype, _DtypeStub):
        raise UnsafePickleError(f"a numpy scalar of dtype {dtype!r:.60}")
    data = data.encode("latin1") if isinstance(data, str) else data
    return np.frombuffer(data, dtype.dtype)[0]


class _NamespaceStub(Stub):
    """`argparse.Namespace`, where Megatron-LM keeps its arguments."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = dict(state)

    def resolve(self, walk: Walk, storage: StorageOf | None) -> argparse.Namespace:
        namespace = argparse.Namespace()
        vars(namespace).update({str(name): walk(value) for name, value in vars(self).get("state", {}).items()})
        return namespace


def _reconstructor(kind: Any, base: Any, state: Any) -> Any:
    """How protocols 0 and 1 make instances."""
    if not (isinstance(kind, _SealedType) and issubclass(kind, (Placeholder, _NamespaceStub))):
        raise UnsafePickleError(f"an instance of {kind!r:.60}")
    return kind()


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """How protocol 2 writes bytes."""
    if not isinstance(text, str) or encoding not in ("latin1", "utf-8"):
        raise UnsafePickleError(f"_codecs.encode with {encoding!r:.60}")
    return text.encode(encoding)


def _bytearray(data: Any = b"", encoding: str = "latin1") -> bytearray:
    return bytearray(data.encode(encoding) if isinstance(data, str) else bytes(memoryview(data)))


_STORAGES = {
    name: StorageKind(dtype)
    for dtype, name in torch.storage._dtype_to_storage_type_map().items()
    if not name.startswith("Q")
}

SAFE_GLOBALS: dict[tuple[str, str], Any] = {
    **{("torch", name): kind for name, kind in _STORAGES.items()},
    ("torch.storage", "UntypedStorage"): StorageKind(torch.uint8),
    ("torch", "UntypedStorage"): StorageKind(torch.uint8),
    ("torch", "Size"): _Function(lambda extents=(): torch.Size(tuple(extents))),
    ("torch", "device"): _Function(lambda *args: torch.device(*args)),
    ("torch", "Tensor"): placeholder_type("torch", "Tensor"),
    ("torch.nn.parameter", "Parameter"): placeholder_type("torch.nn.parameter", "Parameter"),
    ("torch._utils", "_rebuild_tensor"): _Function(_tensor_v2),
    ("torch._utils", "_rebuild_tensor_v2"): _Function(_tensor_v2),
    ("torch._utils", "_rebuild_tensor_v3"): _Function(_tensor_v3),
    ("torch._utils", "_rebuild_parameter"): _Function(_same_tensor),
    ("torch._utils", "_rebuild_parameter_with_state"): _Function(_same_tensor),
    ("torch._tensor", "_rebuild_from_type_v2"): _Function(_tensor_with_attributes),
    ("torch.serialization", "_get_layout"): _Function(lambda name: str(name)),
    ("numpy", "dtype"): _DtypeStub,
    ("numpy", "ndarray"): placeholder_type("numpy", "ndarray"),
    ("numpy.core.multiarray", "_reconstruct"): _Function(lambda *args: _ArrayStub()),
    ("numpy.core.multiarray", "scalar"): _Function(_numpy_scalar),
    ("argparse", "Namespace"): _NamespaceStub,
    ("builtins", "set"): _Function(lambda items=(): set(items)),
    ("builtins", "frozenset"): _Function(lambda items=(): frozenset(items)),
    ("builtins", "complex"): _Function(lambda *args: complex(*args)),
    ("builtins", "bytearray"): _Function(_bytearray),
    ("builtins", "slice"): _Function(lambda *args: slice(*args)),
    ("builtins", "object"): placeholder_type("builtins", "object"),
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): _Function(lambda factory=None, *args: dict(*args)),
    ("collections", "deque"): _Function(lambda items=(), maxlen=None: list(items)),
    ("copyreg", "_reconstructor"): _Function(_reconstructor),
    ("_codecs", "encode"): _Function(_encode),
    ("signal", "Signals"): _Function(lambda number: signal.Signals(number)),
    ("datetime", "timedelta"): _Function(lambda *args: datetime.timedelta(*args)),
    ("datetime", "datetime"): _Function(lambda *args: datetime.datetime(*args)),
    **{
        ("pathlib", name): _Function(lambda *parts: pathlib.PurePosixPath(*parts))
        for name in ("Path", "PosixPath", "PurePath", "PurePosixPath")
    },
}

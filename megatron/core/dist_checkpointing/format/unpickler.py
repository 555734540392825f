"""No code runs from a file: an allow-list unpickler, and `safe_load` in place of `torch.load`.

Three formats force pickles on us (`.metadata`, `common.pt` and bytes entries, legacy `.pt`). A pickle is a program;
what it can do is decided by the globals it may name. Here a global is one of

* a value or a *sealed* function of `safe_globals`: it builds plain data, and nothing can be set on it;
* for a class of another project (Megatron's enums, say): an inert `Placeholder` that remembers name and arguments;
* anything else of the standard library, torch or numpy: `UnsafePickleError`, before anything was called.

Before it runs, `pickle_scan` has seen that it ends, and how much memory it takes. Tensors and arrays are built after
the pickle has ended, so that no opcode ever sees one.
"""

from __future__ import annotations

import argparse
import io
import math
import mmap as mmap_module
import os
import pickle
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.core.dist_checkpointing.boxes import Shape
from megatron.core.dist_checkpointing.files import COMMON
from megatron.core.dist_checkpointing.format.checksums import BlockVerifier
from megatron.core.dist_checkpointing.format.pickle_scan import scan_pickle
from megatron.core.dist_checkpointing.format.safe_globals import (
    DTYPE_NAME,
    NAMES_OF_TORCH,
    SAFE_GLOBALS,
    Budget,
    DtypeName,
    Function,
    Placeholder,
    Resolver,
    Storage,
    StorageKind,
    StorageRef,
    TensorStub,
    is_leaf,
    placeholder_type,
    torch_globals,
)
from megatron.core.dist_checkpointing.format.schema import (
    MAX_DEPTH,
    CheckpointError,
    UnsafePickleError,
    open_file,
    printable,
    shown,
)
from megatron.core.dist_checkpointing.format.torch_zip import Archive, FileTensor
from megatron.core.lazy_import import lazy_module
from megatron.core.object_storage import path_of

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")

_OTHER_MODULES = {  # of other versions of Python and numpy
    "__builtin__": "builtins",
    "copy_reg": "copyreg",
    "numpy._core.multiarray": "numpy.core.multiarray",
    "pathlib._local": "pathlib",
}
_GUARDED = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "pip", "setuptools", "pkg_resources", "_pytest"}
_MAX_NAMES = 1000  # classes and functions; a type is made for each that is not known
_UNFOLDED = 10**6  # values that containers may unfold to, and 8 times what the file holds
# Records of save plans: read as placeholders, never used.
_INERT_PACKAGES = ("torch.distributed.checkpoint.", "torch.distributed._shard.", "torch.distributed.tensor.")


class _MemoryStorage(NamedTuple):
    """A record that is mapped or was read."""

    data: torch.Tensor  # 1-D, uint8

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def view(self, dtype: torch.dtype, offset: int, shape: Shape, stride: Shape) -> torch.Tensor:
        typed = self.data[: self.nbytes // dtype.itemsize * dtype.itemsize].view(dtype)
        return typed.as_strided(shape, stride, typed.storage_offset() + offset)


class _FileStorage(NamedTuple):
    """A record that stays in the file: `nbytes` from byte `position` on."""

    path: Path
    position: int
    nbytes: int
    budget: Budget

    def view(self, dtype: torch.dtype, offset: int, shape: Shape, stride: Shape) -> FileTensor | torch.Tensor:
        """Read at once if it is not row-major, which no checkpoint of a model needs."""
        if stride == torch.empty(shape, device="meta").stride() or math.prod(shape) <= 1:
            return FileTensor(self.path, self.position + offset * dtype.itemsize, dtype, shape)
        span = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        self.budget.charge(span * dtype.itemsize)
        whole = FileTensor(self.path, self.position, dtype, (self.nbytes // dtype.itemsize,))
        return whole.read_flat(offset, span).as_strided(shape, stride)


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, placeholders: bool, names: bool) -> None:
        super().__init__(io.BytesIO(data), encoding="latin1")  # old pickles hold numpy bytes in latin-1 strings
        self._placeholders, self._names = placeholders, names
        self._known: dict[tuple[str, str], Any] = {}
        self.budget = Budget(len(data))

    def find_class(self, module: str, name: str) -> Any:
        known = self._known.get((module, name))
        if known is None:
            if len(self._known) == _MAX_NAMES:
                raise UnsafePickleError(f"its pickle names more than {_MAX_NAMES} classes and functions")
            known = self._find(module, name)
            if isinstance(known, Function):
                known = replace(known, budget=self.budget)
            self._known[module, name] = known
        return known

    def _find(self, module: str, name: str) -> Any:
        module = _OTHER_MODULES.get(module, module)
        if module.startswith("torch.cuda"):
            module = "torch"  # `torch.cuda.FloatStorage`: where the tensor lived does not matter
        if (module, name) in SAFE_GLOBALS:
            return SAFE_GLOBALS[module, name]
        if self._names and module == "torch" and DTYPE_NAME.fullmatch(name):
            return DtypeName(f"torch.{name}")
        if self._names and (module, name) in NAMES_OF_TORCH:
            return NAMES_OF_TORCH[module, name]
        if module.partition(".")[0] == "torch" and not module.startswith(_INERT_PACKAGES):
            if (module, name) in torch_globals():
                return torch_globals()[module, name]
            found = vars(sys.modules["torch"]).get(name) if module == "torch" else None
            if isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
                return found
        if module.partition(".")[0] in _GUARDED and not module.startswith(_INERT_PACKAGES):
            raise UnsafePickleError(
                f"its pickle names {printable(f'{module}.{name}')}, which no checkpoint needs. Nothing was executed. "
                "If you trust the file, load it with torch.load(weights_only=False) and save its plain values again."
            )
        if not self._placeholders:
            raise UnsafePickleError(f"holds a {printable(f'{module}.{name}')}; only plain values can be stored")
        return placeholder_type(module, name)

    def persistent_load(self, pid: Any) -> StorageRef:
        if type(pid) is tuple and len(pid) >= 5:
            tag, kind, key, _, numel = pid[:5]
            if tag == "storage" and isinstance(kind, StorageKind) and type(key) in (str, int) and type(numel) is int:
                return StorageRef(kind.dtype, str(key), numel)
        raise UnsafePickleError(f"unknown persistent id {shown(pid)}")


def safe_loads(data: bytes | memoryview, where: str) -> Any:
    """The object of a bare pickle of plain values and placeholders (`.metadata`); anything richer stays a `Stub`.

    Dtypes are their names: the file is read without torch. It may unfold without end: only `safe_load` promises what
    can be printed or copied.
    """
    return _unpickle(bytes(data), where, names=True)[0]


def tensor_layout(data: bytes, where: str) -> tuple[torch.dtype, Shape, Shape] | None:
    """(dtype, shape, strides) of the tensor whose pickle this is, if its storage begins with it; else None."""
    root, _ = _unpickle(data, where)
    if not isinstance(root, TensorStub) or root.offset != 0:
        return None
    return root.dtype, root.shape, root.stride


def safe_load(
    source: str | os.PathLike[str] | bytes,
    *,
    mmap: bool = True,
    where: str | None = None,
    placeholders: bool = True,
    names: bool = False,
) -> Any:
    """What `torch.load(source, weights_only=False, map_location="cpu")` returns, without running anything.

    `source` is a path or the bytes of an archive. With `mmap` the tensors of a path are views of the mapped file:
    nothing is read before it is used and writing to them changes memory only. Without, each is read at once.
    Classes of other projects become `Placeholder`s (or an error, without `placeholders`), dtypes with `names` their
    names: without tensors in it the file is then read without torch. Raises CheckpointError that names `where`, by
    default the path; UnsafePickleError for a refused global.
    """
    if isinstance(source, bytes):
        return _load_archive(bytearray(source), where or "pickle", placeholders, names, check_crc=True)
    path = path_of(source)
    where = where or str(path)
    try:
        with open_file(path) as file:
            if mmap and file.size and file.descriptor is not None:
                mapped = mmap_module.mmap(file.descriptor, 0, access=mmap_module.ACCESS_COPY)
                return _load_archive(mapped, where, placeholders, names)
            return _load_archive(bytearray(file.read(0, file.size)), where, placeholders, names, check_crc=True)
    except OSError as error:
        raise CheckpointError(f"{where}: cannot be read: {error.strerror}") from error


def load_common(directory: str | os.PathLike[str], *, verify: bool = False, names: bool = False) -> dict[str, Any]:
    """What was saved as `common`; {} if the checkpoint has no `common.pt`. With `names` dtypes are their names."""
    path = path_of(directory) / COMMON
    if not path.exists():
        return {}
    if verify:
        BlockVerifier(path.parent).check_file(COMMON)
    common = safe_load(path, mmap=False, names=names)
    if not isinstance(common, dict):
        raise CheckpointError(f"{path}: holds a {type(common).__name__} instead of a dict")
    return common


def safe_open(source: str | os.PathLike[str], *, placeholders: bool = True) -> Any:
    """As `safe_load`, but with a `FileTensor` in place of every tensor: only the structure is read."""
    path = path_of(source)
    try:
        with open_file(path) as file:
            budget = Budget(file.size)
            archive = _open_archive(file.read, file.size, str(path))

            def storage(name: str) -> _FileStorage:
                return _FileStorage(path, archive.data_offset(name), archive.records[name].size, budget)

            return _load(archive, storage, str(path), placeholders)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _load_archive(
    buffer: bytearray | mmap_module.mmap, where: str, placeholders: bool, names: bool, check_crc: bool = False
) -> Any:
    """`check_crc`: the bytes are in memory, so that looking at all of them costs little."""
    view = memoryview(buffer)
    archive = _open_archive(lambda offset, size: view[offset : offset + size], len(buffer), where)
    storages: dict[str, _MemoryStorage] = {}

    def storage(name: str) -> _MemoryStorage:
        """Shared by all tensors that view it."""
        if name not in storages:
            size, offset = archive.records[name].size, archive.data_offset(name)
            if check_crc:
                archive.check_crc(name, view[offset : offset + size])
            data = (
                torch.frombuffer(buffer, dtype=torch.uint8, count=size, offset=offset)
                if size
                else torch.empty(0, dtype=torch.uint8)
            )
            # Aligned for every dtype, copied once.
            storages[name] = _MemoryStorage(data.clone() if data.data_ptr() % 16 else data)
        return storages[name]

    return _load(archive, storage, where, placeholders, names)


def _open_archive(read: Callable[[int, int], bytes | memoryview], length: int, where: str) -> Archive:
    if not length:
        raise CheckpointError(f"{where}: the file is empty")
    start = bytes(read(0, 8))
    if start[:4] != b"PK\3\4":
        raise CheckpointError(
            f"{where}: not a torch.save archive (zip), it starts with {start!r}. Files of torch < 1.6 must "
            "be saved again with a newer torch."
        )
    archive = Archive(read, length, where)
    if "byteorder" in archive.records and archive.read("byteorder") != b"little":
        raise CheckpointError(f"{where}: written on a big-endian machine, which is not supported")
    return archive


def _load(
    archive: Archive, storage: Callable[[str], Storage], where: str, placeholders: bool, names: bool = False
) -> Any:
    """The object in `archive`; `storage` gives the content of a record."""
    root, unpickler = _unpickle(archive.read("data.pkl"), where, placeholders, names)

    def storage_of(ref: StorageRef) -> Storage:
        name = f"data/{ref.key}"
        if name not in archive.records:
            raise CheckpointError(f"{where}: tensor data {name} is missing")
        return storage(name)

    return _resolve(root, where, storage_of, unpickler.budget)


def _unpickle(data: bytes, where: str, placeholders: bool = True, names: bool = False) -> tuple[Any, _Unpickler]:
    """Stubs included."""
    unpickler = _Unpickler(data, placeholders, names)
    try:
        scan_pickle(data)  # before the first opcode runs: nothing below is safe for a pickle that it refuses
        return unpickler.load(), unpickler
    except UnsafePickleError as error:
        raise UnsafePickleError(f"{where}: {error}") from None
    except Exception as error:  # a damaged pickle can raise anything
        reason = printable(f"{type(error).__name__}: {error}")[:300]
        raise CheckpointError(f"{where}: not an intact pickle ({reason})") from error


def _resolve(root: Any, where: str, storage: Callable[[StorageRef], Storage], budget: Budget) -> Any:
    """The structure with its stubs replaced by what they stand for."""
    try:
        result = Resolver(storage, budget).walk(root)
        check_bounded(result, where)
        return result
    except UnsafePickleError as error:
        raise UnsafePickleError(f"{where}: {error}") from None
    except CheckpointError:
        raise
    except RecursionError:
        raise CheckpointError(f"{where}: cannot be rebuilt: its containers are nested too deep") from None
    except Exception as error:
        reason = printable(f"{type(error).__name__}: {error}")[:300]
        raise CheckpointError(f"{where}: cannot be rebuilt ({reason})") from error


def check_bounded(root: Any, where: str) -> None:
    """Raises CheckpointError for containers that hold themselves, are too deep, or unfold too far.

    A list that holds another one twice, that one a third twice, and so on, takes 60 bytes in a pickle and no end of
    time in `repr`, `==`, `json.dumps` or `copy`. Each container is looked at once.
    """
    sizes: dict[int, float] = {}

    def size_of(value: Any, depth: int) -> float:
        children = _children(value)
        if children is None:
            return 1
        if depth > MAX_DEPTH:
            raise CheckpointError(f"{where}: its containers are nested more than {MAX_DEPTH} deep")
        size = sizes.get(id(value))
        if size is None:
            sizes[id(value)] = math.inf  # while it is open
            size = 1.0
            for child in children:
                size += 1 if is_leaf(child) else size_of(child, depth + 1)
            sizes[id(value)] = size
            count[0] += len(children)
        return size

    count = [0]
    if size_of(root, 0) > _UNFOLDED + 8 * count[0]:
        raise CheckpointError(f"{where}: a container holds itself, or unfolds to far more values than are in the file")


def _children(value: Any) -> Collection[Any] | None:
    if isinstance(value, dict):
        return value.values()  # keys are flat
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if isinstance(value, argparse.Namespace):
        return vars(value).values()
    if isinstance(value, Placeholder):
        return (value.args, value.state, value.items)
    return None

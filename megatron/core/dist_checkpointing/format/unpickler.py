"""No code runs from a file: an unpickler for plain data.

Three formats force pickles on us (`.metadata`, `common.pt` and bytes entries, legacy `.pt`). A
pickle is a program for a small stack machine. The standard library's trusts it: it calls,
instantiates and sets what it is told to, a memo index of 2^30 takes 8 GB, a tuple in a tuple in a
tuple as the key of a dictionary overflows the C stack when it is hashed, one that holds another one
twice is hashed without end. So the machine is written here, for what Python pickles in protocols 2
to 5. A global is one of

* a value or a function of `safe_globals`: it builds plain data;
* for a class of another project (Megatron's enums, say): an inert `Placeholder` that remembers name and arguments;
* anything else of the standard library, torch or numpy: `UnsafePickleError`, before anything was called.

Nothing but a `Placeholder` and plain containers is ever changed, nothing but plain values is
hashed, and time and memory are bounded by the size of the pickle.
"""

from __future__ import annotations

import argparse
import math
import struct
import sys
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron.core.dist_checkpointing.format.safe_globals import (
    DTYPE_NAME,
    PLAIN_SIZE,
    SAFE_GLOBALS,
    DtypeName,
    Function,
    Placeholder,
    Storage,
    StorageKind,
    TypedStorage,
    placeholder_type,
    set_numpy_state,
    torch_globals,
)
from megatron.core.dist_checkpointing.format.schema import (
    MAX_DEPTH,
    CheckpointError,
    UnsafePickleError,
    format_value,
    is_dtype,
)
from megatron.core.lazy_import import lazy_module
from megatron.core.terminal import escape_control_chars

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
_GUARDED = frozenset(sys.stdlib_module_names) | {
    "torch",
    "numpy",
    "pip",
    "setuptools",
    "pkg_resources",
    "_pytest",
}
# Records of save plans: read as placeholders, never used.
_INERT_PACKAGES = (
    "torch.distributed.checkpoint.",
    "torch.distributed._shard.",
    "torch.distributed.tensor.",
)

# What is free, and what each byte of a pickle allows beyond. A .metadata has 0.48 opcodes and 0.04
# objects per byte.
_FREE_OPCODES = 500_000
_OPCODES_PER_BYTE = 0.6
_FREE_OBJECTS = 50_000
_OBJECTS_PER_BYTE = 1 / 16
# bytes; a .metadata takes up to 16
_FREE_MEMORY = 32 << 20
_MEMORY_PER_BYTE = 20
# bytes
_OBJECT_SIZE = 100
_DICT_SIZE = 232
_LIST_SIZE = 64
# What a copy takes for each item.
_BYTES_PER_ITEM: dict[Any, int] = {
    **dict.fromkeys((str, bytes, bytearray), 1),
    **dict.fromkeys((list, tuple, dict, set, frozenset), 64),
}
_MAX_NAMES = 1000  # classes and functions; a type is made for each that is not known
_MAX_ODD_KEYS = 1000  # tuples and the like collide in hashing if their author wants it
_UNFOLDED = 10**6  # values that containers may unfold to, and 8 times what the file holds
_LEAVES = frozenset([int, float, bool, str, bytes, type(None), complex, DtypeName])


class Budget:
    """How many bytes may be taken while a file is opened."""

    def __init__(self, nbytes: int) -> None:
        self.allowed = self._left = nbytes

    def charge(self, nbytes: int) -> None:
        self._left -= nbytes
        if self._left < 0:
            raise UnsafePickleError(
                f"its content would need more than {self.allowed} bytes of memory"
            )


class _Unpickler:
    """Runs one pickle; `storage` gives the content of a record of the archive around it."""

    def __init__(
        self, data: bytes, storage: Callable[[str], Storage] | None, placeholders: bool, names: bool
    ) -> None:
        self.data = data
        self.position = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self.charge = Budget(_FREE_MEMORY + _MEMORY_PER_BYTE * len(data)).charge
        self._objects_left = _FREE_OBJECTS + int(_OBJECTS_PER_BYTE * len(data))
        self._odd_keys = 0
        self._storage = storage
        self._placeholders = placeholders
        self._names = names
        self._known: dict[tuple[str, str], Any] = {}

    def run(self) -> Any:
        data = self.data
        stack = self.stack
        memo = self.memo
        marks = self.marks
        position = 0
        limit = _FREE_OPCODES + int(_OPCODES_PER_BYTE * len(data))
        for _ in range(limit):
            opcode = data[position]
            position += 1
            # A .metadata is references to its memo for the most part: these opcodes are worth their
            # lines.
            if opcode == 0x94:  # MEMOIZE
                memo.append(stack[-1])
            elif opcode == 0x68:  # BINGET
                stack.append(memo[data[position]])
                position += 1
            elif opcode == 0x6A:  # LONG_BINGET
                stack.append(memo[int.from_bytes(data[position : position + 4], "little")])
                position += 4
            elif opcode == 0x4B:  # BININT1
                stack.append(data[position])
                position += 1
            elif 0x85 <= opcode <= 0x87:  # TUPLE1, TUPLE2, TUPLE3
                items = tuple(stack[0x84 - opcode :])
                del stack[0x84 - opcode :]
                self.push_new(items, _LIST_SIZE)
            elif opcode == 0x28:  # MARK
                marks.append(len(stack))
            elif opcode == 0x2E:  # STOP
                return stack.pop()
            elif opcode in _OPCODES:
                self.position = position
                _OPCODES[opcode](self)
                position = self.position
            else:
                raise UnsafePickleError(
                    f"its pickle has the opcode {opcode:#04x}, which no checkpoint needs"
                )
        raise UnsafePickleError(f"its pickle has more than {limit} steps in {len(data)} bytes")

    # What follows an opcode

    def take(self, size: int) -> bytes:
        content = self.data[self.position : self.position + size]
        if len(content) != size:
            raise EOFError("it is cut")
        self.position += size
        return content

    def number(self, size: int) -> int:
        self.position += size
        return int.from_bytes(self.data[self.position - size : self.position], "little")

    def line(self) -> str:
        start = self.position
        end = self.data.index(b"\n", self.position)
        self.position = end + 1
        return self.data[start:end].decode()

    # Stack and memo

    def push_new(self, value: Any, size: int) -> None:
        self.charge(size)
        self.stack.append(value)

    def top(self, count: int) -> list[Any]:
        """Take so many values from the stack."""
        values = self.stack[-count:]
        if len(values) != count:
            raise IndexError("its stack is empty")
        del self.stack[-count:]
        return values

    def above_mark(self) -> list[Any]:
        mark = self.marks.pop()
        values = self.stack[mark:]
        del self.stack[mark:]
        return values

    def pop(self) -> None:
        """A value, or the mark above it."""
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self.stack.pop()

    def put(self, number: int) -> None:
        # Every writer numbers its values in turn; a list as long as the number would be the attack.
        if number > len(self.memo):
            raise UnsafePickleError(
                f"its pickle stores value {number} after {len(self.memo)} others"
            )
        self.memo[number : number + 1] = [self.stack[-1]]

    # Containers

    def check_hashed(self, values: Iterable[Any]) -> None:
        """Keys of a dictionary, members of a set: plain values, and a few others, such as flat
        tuples.
        """
        for value in values:
            kind = type(value)
            if kind is str or (kind is int and value.bit_length() <= 64):
                continue
            if (
                (kind is not int and kind in _LEAVES)
                or isinstance(value, Placeholder)
                or is_dtype(value)
            ):
                continue
            if isinstance(value, tuple) and not all(
                type(item) in _LEAVES or is_dtype(item) for item in value
            ):
                raise UnsafePickleError("its dictionaries or sets have nested tuples as keys")
            self._odd_keys += 1
            if self._odd_keys > _MAX_ODD_KEYS:
                raise UnsafePickleError(
                    f"its dictionaries have more than {_MAX_ODD_KEYS} keys that are no plain values"
                )

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        keys = items[::2]
        values = items[1::2]
        if isinstance(target, dict):
            self.check_hashed(keys)
            target.update(zip(keys, values, strict=True))
        else:
            self.extend(list(zip(keys, values, strict=True)))

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Placeholder):
            target.items = target.items or []
            target.items += items
        elif type(target) is list:
            target += items
        else:
            raise UnsafePickleError(f"a pickle appends to {format_value(target)}")

    def add(self, members: list[Any]) -> None:
        self.check_hashed(members)
        if type(self.stack[-1]) is not set:
            raise UnsafePickleError(f"a pickle adds members to {format_value(self.stack[-1])}")
        self.stack[-1].update(members)

    def push_frozen(self, members: list[Any]) -> None:
        self.check_hashed(members)
        self.push_new(frozenset(members), _DICT_SIZE)

    # Globals and what is made of them

    def find(self, module: Any, name: Any) -> Any:
        if type(module) is not str or type(name) is not str:
            raise UnsafePickleError(f"its pickle names {format_value(module)}.{format_value(name)}")
        if (module, name) not in self._known:
            if len(self._known) == _MAX_NAMES:
                raise UnsafePickleError(
                    f"its pickle names more than {_MAX_NAMES} classes and functions"
                )
            self._known[module, name] = self._find(module, name)
        return self._known[module, name]

    def _find(self, module: str, name: str) -> Any:
        module = _OTHER_MODULES.get(module, module)
        if module.startswith("torch.cuda"):
            module = "torch"  # `torch.cuda.FloatStorage`: where the tensor lived does not matter
        if (module, name) in SAFE_GLOBALS:
            return SAFE_GLOBALS[module, name]
        if self._names and module == "torch" and DTYPE_NAME.fullmatch(name):
            return DtypeName(f"torch.{name}")
        if self._names and (module, name) == ("torch", "Size"):
            return PLAIN_SIZE
        if module.partition(".")[0] == "torch" and not module.startswith(_INERT_PACKAGES):
            if (module, name) in torch_globals():
                return torch_globals()[module, name]
            found = vars(sys.modules["torch"]).get(name) if module == "torch" else None
            if isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
                return found
        if module.partition(".")[0] in _GUARDED and not module.startswith(_INERT_PACKAGES):
            raise UnsafePickleError(
                f"its pickle names {escape_control_chars(f'{module}.{name}')}, which no checkpoint needs. "
                "Nothing was executed. "
                "If you trust the file, load it with torch.load(weights_only=False) and save its plain values again."
            )
        if not self._placeholders:
            raise UnsafePickleError(
                f"holds a {escape_control_chars(f'{module}.{name}')}; only plain values can be stored"
            )
        return placeholder_type(module, name)

    def charge_copies(self, values: Iterable[Any]) -> None:
        """A function may copy what it is given."""
        for value in values:
            if type(value) in _BYTES_PER_ITEM:
                self.charge(_BYTES_PER_ITEM[type(value)] * len(value))

    def call(self, state: Any = None) -> None:
        """REDUCE and NEWOBJ alike."""
        args = self.stack.pop()
        function = self.stack.pop()
        self._objects_left -= 1
        if self._objects_left < 0:
            raise UnsafePickleError(f"its pickle of {len(self.data)} bytes makes too many objects")
        if type(args) is not tuple:
            raise UnsafePickleError(f"a pickle calls with {format_value(args)}")
        self.charge(_OBJECT_SIZE)
        if type(function) is type and issubclass(function, Placeholder):
            value: Any = function.__new__(function)
            value.args = args
            value.state = state or None
            value.items = ()
        elif type(function) is Function and not state:
            self.charge_copies(args)
            if function.hashed is not None:
                self.check_hashed(function.hashed(*args))
            value = function.call(*args)
        else:
            raise UnsafePickleError(f"a pickle calls {format_value(function)}")
        self.stack.append(value)

    def build(self, state: Any) -> None:
        target = self.stack[-1]
        if isinstance(target, Placeholder):
            target.state = state
        elif type(target) is argparse.Namespace:
            if type(state) is not dict or not all(type(name) is str for name in state):
                raise UnsafePickleError(f"arguments that are {format_value(state)}")
            self.charge_copies((state,))
            vars(target).update(state)
        elif isinstance(target, np.dtype | np.ndarray) and type(state) is tuple:
            self.charge_copies(state)
            set_numpy_state(target, state)
        elif not isinstance(
            target, dict
        ):  # a dictionary's own attributes (`_metadata` of torch) nobody reads
            raise UnsafePickleError(f"a pickle tries to set the state of {format_value(target)}")

    def typed_storage(self, pid: Any) -> TypedStorage:
        """The record `data/<key>` with elements of a kind."""
        if type(pid) is tuple and len(pid) >= 5 and self._storage is not None:
            tag, kind, key, *_ = pid
            if tag == "storage" and isinstance(kind, StorageKind) and type(key) in (str, int):
                return TypedStorage(kind.dtype, self._storage(f"data/{key}"))
        raise UnsafePickleError(f"unknown persistent id {format_value(pid)}")


def _counted(size: int, decode: Callable[[bytes], Any]) -> Callable[[_Unpickler], None]:
    """An opcode that is followed by a length of `size` bytes and the content."""
    return lambda run: run.stack.append(decode(run.take(run.number(size))))


def _utf8(content: bytes) -> str:
    return content.decode("utf-8", "surrogatepass")


def _latin1(content: bytes) -> str:
    return content.decode("latin1")  # of old pickles, which hold numpy's bytes in it


def _signed(content: bytes) -> int:
    return int.from_bytes(content, "little", signed=True)


_OPCODES: dict[int, Callable[[_Unpickler], object]] = {
    0x80: lambda run: run.take(1),  # PROTO
    0x95: lambda run: run.take(8),  # FRAME
    # Plain values
    ord("N"): lambda run: run.stack.append(None),
    0x88: lambda run: run.stack.append(True),
    0x89: lambda run: run.stack.append(False),
    ord("M"): lambda run: run.stack.append(run.number(2)),
    ord("J"): lambda run: run.stack.append(_signed(run.take(4))),
    ord("G"): lambda run: run.stack.extend(struct.unpack(">d", run.take(8))),
    **{op: _counted(size, _signed) for op, size in ((0x8A, 1), (0x8B, 4))},
    **{op: _counted(size, _utf8) for op, size in ((0x8C, 1), (ord("X"), 4), (0x8D, 8))},
    **{op: _counted(size, _latin1) for op, size in ((ord("U"), 1), (ord("T"), 4))},
    **{op: _counted(size, bytes) for op, size in ((ord("C"), 1), (ord("B"), 4), (0x8E, 8))},
    0x96: _counted(8, bytearray),
    # Memo and stack
    ord("q"): lambda run: run.put(run.number(1)),
    ord("r"): lambda run: run.put(run.number(4)),
    ord("0"): _Unpickler.pop,
    ord("1"): _Unpickler.above_mark,
    # Containers
    ord(")"): lambda run: run.stack.append(()),
    ord("]"): lambda run: run.push_new([], _LIST_SIZE),
    ord("}"): lambda run: run.push_new({}, _DICT_SIZE),
    0x8F: lambda run: run.push_new(set(), _DICT_SIZE),
    ord("t"): lambda run: run.push_new(tuple(run.above_mark()), _LIST_SIZE),
    ord("a"): lambda run: run.extend(run.top(1)),
    ord("e"): lambda run: run.extend(run.above_mark()),
    ord("s"): lambda run: run.set_items(run.top(2)),
    ord("u"): lambda run: run.set_items(run.above_mark()),
    0x90: lambda run: run.add(run.above_mark()),
    0x91: lambda run: run.push_frozen(run.above_mark()),
    # Globals
    ord("c"): lambda run: run.stack.append(run.find(run.line(), run.line())),
    0x93: lambda run: run.stack.append(run.find(*run.top(2))),
    ord("R"): _Unpickler.call,
    0x81: _Unpickler.call,
    0x92: lambda run: run.call(run.stack.pop()),
    ord("b"): lambda run: run.build(run.stack.pop()),
    ord("Q"): lambda run: run.stack.append(run.typed_storage(run.stack.pop())),
}


def unpickle(
    data: bytes,
    where: str,
    storage: Callable[[str], Storage] | None = None,
    placeholders: bool = True,
    names: bool = False,
) -> Any:
    """The object of a bare pickle; with `names` the dtypes in it are their names, and it is read
    without torch.

    It may unfold without end: only `torch_load.safe_load` promises what can be printed or copied.
    """
    try:
        return _Unpickler(data, storage, placeholders, names).run()
    except UnsafePickleError as error:
        raise UnsafePickleError(f"{where}: {error}") from None
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        reason = escape_control_chars(f"{type(error).__name__}: {error}")[:300]
        raise CheckpointError(f"{where}: not an intact pickle ({reason})") from error


def check_bounded(root: Any, where: str) -> None:
    """Raises CheckpointError for containers that hold themselves, are too deep, or unfold too far.

    A list that holds another one twice, that one a third twice, and so on, takes 60 bytes in a
    pickle and no end of time in `repr`, `==`, `json.dumps` or `copy`. Each container is looked at
    once.
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
                size += 1 if type(child) in _LEAVES else size_of(child, depth + 1)
            sizes[id(value)] = size
            count[0] += len(children)
        return size

    count = [0]
    if size_of(root, 0) > _UNFOLDED + 8 * count[0]:
        raise CheckpointError(
            f"{where}: a container holds itself, or unfolds to far more values than are in the file"
        )


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

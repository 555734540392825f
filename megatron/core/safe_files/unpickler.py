"""An unpickler for plain data that executes no code from the file.

Three formats consist of pickles: `.metadata`, `common.pt` with bytes entries, and legacy `.pt`. A
pickle is a program for a stack machine, and the machine of the standard library trusts it: it makes
any call that the program requests, allocates 8 GB for a memo index of 2^30, overflows the C stack
when it hashes a deeply nested tuple, and never finishes hashing a tuple that contains another one
twice, 60 levels deep. This module implements the machine for the opcodes that Python writes in
protocols 2 to 5. A global is one of

* a value or a function of `safe_globals`, which builds plain data;
* for a class of another project (e.g., Megatron's enums): an inert `Placeholder` with its name and
  arguments;
* anything else of the standard library, torch or numpy: `UnsafePickleError`, before any call.

Only `Placeholder`s and plain containers are modified, only plain values are hashed, and time and
memory are bounded by the size of the pickle.
"""

from __future__ import annotations

import argparse
import math
import struct
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np
import torch

from megatron.core.safe_files.errors import CheckpointError, UnsafePickleError
from megatron.core.safe_files.safe_globals import (
    DTYPE_NAME,
    PLAIN_SIZE,
    SAFE_GLOBALS,
    DtypeName,
    Function,
    Placeholder,
    Storage,
    StorageKind,
    TypedStorage,
    get_torch_globals,
    make_placeholder,
    make_placeholder_type,
    set_numpy_state,
)
from megatron.core.safe_files.schema import MAX_DEPTH, format_value, is_dtype
from megatron.core.terminal import escape_control_chars

_RENAMED_MODULES = {  # name in other versions of Python and numpy -> name here
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
# Records of DCP's save plans, which are never used, and of DTensors become placeholders.
_INERT_PACKAGES = (
    "torch.distributed.checkpoint.",
    "torch.distributed._shard.",
    "torch.distributed.tensor.",
    "torch.distributed._tensor.",  # in torch 2.4 and earlier
    "torch.distributed.device_mesh.",
    "torch.distributed._mesh_layout.",
)

# Fixed budgets, plus an allowance per byte of the pickle. A .metadata has 0.48 opcodes and 0.04
# objects per byte, and takes up to 16 bytes of memory per byte.
_FREE_OPCODES = 500_000
_OPCODES_PER_BYTE = 0.6
_FREE_OBJECTS = 50_000
_OBJECTS_PER_BYTE = 1 / 16
_FREE_MEMORY = 32 << 20
_MEMORY_PER_BYTE = 20
# Approximate bytes of an empty instance.
_OBJECT_SIZE = 100
_DICT_SIZE = 232
_LIST_SIZE = 64
# Bytes per item of a copy.
_BYTES_PER_ITEM: dict[Any, int] = {
    **dict.fromkeys((str, bytes, bytearray), 1),
    **dict.fromkeys((list, tuple, dict, set, frozenset), 64),
}
_MAX_NAMES = 1000  # classes and functions: a type is created for each unknown one
_MAX_ODD_KEYS = 1000  # keys such as tuples, whose hashes an attacker can make collide
# Values to which containers may unfold, beyond 8 times the number of values in the file.
_MAX_UNFOLDED = 10**6
_LEAVES = frozenset([int, float, bool, str, bytes, type(None), complex, DtypeName])


class Budget:
    """Limit of the bytes that opening a file may allocate."""

    def __init__(self, nbytes: int) -> None:
        self.allowed = nbytes
        self._left = nbytes

    def charge(self, nbytes: int) -> None:
        """Count an allocation. Raises UnsafePickleError if the limit is exceeded."""
        self._left -= nbytes
        if self._left < 0:
            raise UnsafePickleError(
                f"its content would need more than {self.allowed} bytes of memory"
            )


class _Unpickler:
    """The stack machine for one pickle.

    `storage(name)` returns a record of the archive that contains the pickle.
    """

    def __init__(
        self, data: bytes, storage: Callable[[str], Storage] | None, placeholders: bool, names: bool
    ) -> None:
        # State of the machine
        self.data = data
        self.position = 0  # of the next byte
        self.stack: list[Any] = []
        self.marks: list[int] = []  # positions in the stack
        self.memo: list[Any] = []

        # Limits
        budget = Budget(_FREE_MEMORY + _MEMORY_PER_BYTE * len(data))
        self.charge = budget.charge
        self._objects_left = _FREE_OBJECTS + int(_OBJECTS_PER_BYTE * len(data))
        self._odd_keys = 0

        # Options of `unpickle`
        self._storage = storage
        self._placeholders = placeholders
        self._names = names
        self._known: dict[tuple[str, str], Any] = {}  # replacements of globals found so far

    def run(self) -> Any:
        """Execute the pickle and return its object."""
        data = self.data
        stack = self.stack
        memo = self.memo
        marks = self.marks
        position = 0
        limit = _FREE_OPCODES + int(_OPCODES_PER_BYTE * len(data))
        for _ in range(limit):
            opcode = data[position]
            position += 1
            # The most frequent opcodes of a .metadata, mostly references to the memo, are handled
            # here for speed.
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
                first = 0x84 - opcode  # -1, -2 or -3
                items = tuple(stack[first:])
                del stack[first:]
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

    # Arguments of opcodes

    def read_bytes(self, size: int) -> bytes:
        """Return the next bytes. Raises EOFError if there are fewer."""
        content = self.data[self.position : self.position + size]
        if len(content) != size:
            raise EOFError("it is cut")
        self.position += size
        return content

    def read_number(self, size: int) -> int:
        """Return an unsigned number of `size` bytes."""
        start = self.position
        self.position += size
        return int.from_bytes(self.data[start : self.position], "little")

    def read_line(self) -> str:
        """Return the text up to the end of the line."""
        start = self.position
        end = self.data.index(b"\n", self.position)
        self.position = end + 1
        return self.data[start:end].decode()

    # Stack and memo

    def push_new(self, value: Any, size: int) -> None:
        """Push a new container, which takes `size` bytes of memory."""
        self.charge(size)
        self.stack.append(value)

    def pop_many(self, count: int) -> list[Any]:
        """Pop `count` values from the stack."""
        values = self.stack[-count:]
        if len(values) != count:
            raise IndexError("its stack is empty")
        del self.stack[-count:]
        return values

    def pop_to_mark(self) -> list[Any]:
        """Pop the values above the topmost mark, and the mark."""
        mark = self.marks.pop()
        values = self.stack[mark:]
        del self.stack[mark:]
        return values

    def pop(self) -> None:
        """Pop a value, or the mark if it is on top."""
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self.stack.pop()

    def put(self, memo_index: int) -> None:
        """Store the value on top of the stack in the memo."""
        # Every writer numbers its values consecutively. A memo as long as the number would let a
        # few bytes allocate gigabytes.
        if memo_index > len(self.memo):
            raise UnsafePickleError(
                f"its pickle stores value {memo_index} after {len(self.memo)} others"
            )
        self.memo[memo_index : memo_index + 1] = [self.stack[-1]]

    # Containers

    def check_hashed(self, values: Iterable[Any]) -> None:
        """Check keys of a dictionary or members of a set before they are hashed.

        Plain values are allowed, and a limited number of others, such as flat tuples. Raises
        UnsafePickleError for nested tuples, and if there are too many others.
        """
        for value in values:
            # Texts and small integers first, for speed.
            value_type = type(value)
            if value_type is str or (value_type is int and value.bit_length() <= 64):
                continue
            # Large integers can be made to collide.
            is_leaf = value_type is not int and value_type in _LEAVES
            if is_leaf or isinstance(value, Placeholder) or is_dtype(value):
                continue

            if isinstance(value, tuple):
                is_flat = all(type(item) in _LEAVES or is_dtype(item) for item in value)
                if not is_flat:
                    raise UnsafePickleError("its dictionaries or sets have nested tuples as keys")
            self._odd_keys += 1
            if self._odd_keys > _MAX_ODD_KEYS:
                raise UnsafePickleError(
                    f"its dictionaries have more than {_MAX_ODD_KEYS} keys "
                    "that are not plain values"
                )

    def set_items(self, items: list[Any]) -> None:
        """Set alternating keys and values in the dictionary on top of the stack."""
        target = self.stack[-1]
        keys = items[::2]
        values = items[1::2]
        pairs = zip(keys, values, strict=True)
        if isinstance(target, dict):
            self.check_hashed(keys)
            target.update(pairs)
        else:
            self.extend(list(pairs))

    def extend(self, items: list[Any]) -> None:
        """Append items to the list on top of the stack."""
        target = self.stack[-1]
        if isinstance(target, Placeholder):
            target.items = target.items or []
            target.items += items
        elif type(target) is list:
            target += items
        else:
            raise UnsafePickleError(f"a pickle appends to {format_value(target)}")

    def add(self, members: list[Any]) -> None:
        """Add members to the set on top of the stack."""
        self.check_hashed(members)
        target = self.stack[-1]
        if type(target) is not set:
            raise UnsafePickleError(f"a pickle adds members to {format_value(target)}")
        target.update(members)

    def push_frozen(self, members: list[Any]) -> None:
        """Push a frozenset."""
        self.check_hashed(members)
        self.push_new(frozenset(members), _DICT_SIZE)

    # Globals and calls

    def find(self, module: Any, name: Any) -> Any:
        """Return the replacement of a global. Raises UnsafePickleError for a refused one."""
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
        """Find the replacement of a global that is not known yet."""
        # Other names of the same thing
        module = _RENAMED_MODULES.get(module, module)
        if module.startswith("torch.cuda"):
            module = "torch"  # e.g., `torch.cuda.FloatStorage`: the device is ignored

        # Harmless values and functions
        if (module, name) in SAFE_GLOBALS:
            return SAFE_GLOBALS[module, name]
        if self._names and module == "torch":
            if DTYPE_NAME.fullmatch(name):
                return DtypeName(f"torch.{name}")
            if name == "Size":
                return PLAIN_SIZE

        # Values and functions of torch
        package, _, _ = module.partition(".")
        is_inert = f"{module}.".startswith(_INERT_PACKAGES)
        if package == "torch" and not is_inert:
            torch_globals = get_torch_globals()
            if (module, name) in torch_globals:
                return torch_globals[module, name]
            if module == "torch":
                constant = vars(torch).get(name)
                if isinstance(constant, (torch.dtype, torch.layout, torch.memory_format)):
                    return constant

        # Everything else: refused, or an inert placeholder
        full_name = escape_control_chars(f"{module}.{name}")
        if package in _GUARDED and not is_inert:
            raise UnsafePickleError(
                f"its pickle names {full_name}, which no checkpoint needs. "
                "No code was executed. "
                "If you trust the file, load it with torch.load(weights_only=False) "
                "and save its plain values again."
            )
        if not self._placeholders:
            raise UnsafePickleError(f"contains a {full_name}; only plain values can be stored")
        return make_placeholder_type(module, name)

    def charge_copies(self, values: Iterable[Any]) -> None:
        """Account for the copies that a function may make of its arguments."""
        for value in values:
            item_size = _BYTES_PER_ITEM.get(type(value))
            if item_size is not None:
                self.charge(item_size * len(value))

    def call(self, state: Any = None) -> None:
        """Execute REDUCE or NEWOBJ; `state` are the keyword arguments of NEWOBJ_EX."""
        args = self.stack.pop()
        function = self.stack.pop()

        # Limit the number and the memory of the results.
        self._objects_left -= 1
        if self._objects_left < 0:
            raise UnsafePickleError(f"its pickle of {len(self.data)} bytes makes too many objects")
        if type(args) is not tuple:
            raise UnsafePickleError(f"a pickle calls with {format_value(args)}")
        self.charge(_OBJECT_SIZE)

        # Call a known function, or instantiate a placeholder.
        if type(function) is Function and not state:
            self.charge_copies(args)
            if function.hashed is not None:
                self.check_hashed(function.hashed(*args))
            value = function.call(*args)
        else:
            value = make_placeholder(function, args, state or None)
        self.stack.append(value)

    def build(self, state: Any) -> None:
        """Set the state of the object on top of the stack."""
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
        elif not isinstance(target, dict):
            # A dictionary ignores attributes, such as torch's `_metadata`.
            raise UnsafePickleError(f"a pickle tries to set the state of {format_value(target)}")

    def find_storage(self, pid: Any) -> TypedStorage:
        """Return the storage that a persistent id names: the record `data/<key>` as a dtype."""
        # torch's are ("storage", class, key of the record, device, number of elements).
        if type(pid) is tuple and len(pid) >= 5 and self._storage is not None:
            tag, storage_kind, key, *_ = pid
            is_storage = tag == "storage" and isinstance(storage_kind, StorageKind)
            if is_storage and type(key) in (str, int):
                content = self._storage(f"data/{key}")
                return TypedStorage(storage_kind.dtype, content)
        raise UnsafePickleError(f"unknown persistent id {format_value(pid)}")


def _read_counted(size: int, decode: Callable[[bytes], Any]) -> Callable[[_Unpickler], None]:
    """Return the handler of an opcode followed by a length of `size` bytes and the content."""

    def push(run: _Unpickler) -> None:
        length = run.read_number(size)
        content = run.read_bytes(length)
        run.stack.append(decode(content))

    return push


def _decode_utf8(content: bytes) -> str:
    """Decode a text, which may contain surrogates."""
    return content.decode("utf-8", "surrogatepass")


def _decode_latin1(content: bytes) -> str:
    """Decode a text of an old pickle, which stores numpy's bytes as text."""
    return content.decode("latin1")


def _decode_signed(content: bytes) -> int:
    """Decode an integer in two's complement."""
    return int.from_bytes(content, "little", signed=True)


_OPCODES: dict[int, Callable[[_Unpickler], object]] = {
    0x80: lambda run: run.read_bytes(1),  # PROTO
    0x95: lambda run: run.read_bytes(8),  # FRAME
    # Plain values
    ord("N"): lambda run: run.stack.append(None),
    0x88: lambda run: run.stack.append(True),
    0x89: lambda run: run.stack.append(False),
    ord("M"): lambda run: run.stack.append(run.read_number(2)),
    ord("J"): lambda run: run.stack.append(_decode_signed(run.read_bytes(4))),
    ord("G"): lambda run: run.stack.extend(struct.unpack(">d", run.read_bytes(8))),
    # Integers
    0x8A: _read_counted(1, _decode_signed),
    0x8B: _read_counted(4, _decode_signed),
    # Texts
    0x8C: _read_counted(1, _decode_utf8),
    ord("X"): _read_counted(4, _decode_utf8),
    0x8D: _read_counted(8, _decode_utf8),
    ord("U"): _read_counted(1, _decode_latin1),
    ord("T"): _read_counted(4, _decode_latin1),
    # Bytes
    ord("C"): _read_counted(1, bytes),
    ord("B"): _read_counted(4, bytes),
    0x8E: _read_counted(8, bytes),
    0x96: _read_counted(8, bytearray),
    # Memo and stack
    ord("q"): lambda run: run.put(run.read_number(1)),
    ord("r"): lambda run: run.put(run.read_number(4)),
    ord("0"): _Unpickler.pop,
    ord("1"): _Unpickler.pop_to_mark,
    # Containers
    ord(")"): lambda run: run.stack.append(()),
    ord("]"): lambda run: run.push_new([], _LIST_SIZE),
    ord("}"): lambda run: run.push_new({}, _DICT_SIZE),
    0x8F: lambda run: run.push_new(set(), _DICT_SIZE),
    ord("t"): lambda run: run.push_new(tuple(run.pop_to_mark()), _LIST_SIZE),
    ord("a"): lambda run: run.extend(run.pop_many(1)),
    ord("e"): lambda run: run.extend(run.pop_to_mark()),
    ord("s"): lambda run: run.set_items(run.pop_many(2)),
    ord("u"): lambda run: run.set_items(run.pop_to_mark()),
    0x90: lambda run: run.add(run.pop_to_mark()),
    0x91: lambda run: run.push_frozen(run.pop_to_mark()),
    # Globals
    ord("c"): lambda run: run.stack.append(run.find(run.read_line(), run.read_line())),
    0x93: lambda run: run.stack.append(run.find(*run.pop_many(2))),
    ord("R"): _Unpickler.call,
    0x81: _Unpickler.call,
    0x92: lambda run: run.call(run.stack.pop()),
    ord("b"): lambda run: run.build(run.stack.pop()),
    ord("Q"): lambda run: run.stack.append(run.find_storage(run.stack.pop())),
}


def unpickle(
    data: bytes,
    location: str,
    storage: Callable[[str], Storage] | None = None,
    placeholders: bool = True,
    names: bool = False,
) -> Any:
    """Return the object of a bare pickle.

    With `names`, dtypes are returned as names, so that any dtype is accepted, and sizes as tuples.
    Without `placeholders`, classes of other projects are an error. The result may unfold without
    end when it is printed or copied; `check_bounded` excludes that.
    """
    try:
        return _Unpickler(data, storage, placeholders, names).run()
    except UnsafePickleError as error:
        raise UnsafePickleError(f"{location}: {error}") from None
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can cause any error
        reason = escape_control_chars(f"{type(error).__name__}: {error}")
        raise CheckpointError(f"{location}: not an intact pickle ({reason[:300]})") from error


def check_bounded(root: Any, location: str) -> None:
    """Raise CheckpointError for cyclic or deeply nested containers, and ones that unfold too far.

    A list that contains another one twice, which contains a third one twice, and so on, takes 60
    bytes in a pickle, but `repr`, `==`, `json.dumps` and `copy` never finish. Each container is
    visited once.
    """
    sizes: dict[int, float] = {}  # id of a container -> number of values when it is unfolded
    num_values = 0  # in all containers, each counted once

    def unfold(value: Any, depth: int) -> float:
        """Return the number of values that a value unfolds to."""
        nonlocal num_values
        children = _get_children(value)
        if children is None:
            return 1
        if depth > MAX_DEPTH:
            raise CheckpointError(
                f"{location}: its containers are nested more than {MAX_DEPTH} deep"
            )
        container = id(value)
        if container in sizes:
            return sizes[container]

        # Infinite until all children are counted: a cycle unfolds without end.
        sizes[container] = math.inf
        size = 1.0
        for child in children:
            if type(child) in _LEAVES:  # without a call, for speed
                size += 1
            else:
                size += unfold(child, depth + 1)
        sizes[container] = size
        num_values += len(children)
        return size

    unfolded = unfold(root, 0)
    if unfolded > _MAX_UNFOLDED + 8 * num_values:
        raise CheckpointError(
            f"{location}: a container contains itself, "
            "or unfolds to far more values than are in the file"
        )


def _get_children(value: Any) -> Collection[Any] | None:
    """Return the values in a container; None for any other value."""
    if isinstance(value, dict):
        return value.values()  # keys are plain or flat
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if isinstance(value, argparse.Namespace):
        return vars(value).values()
    if isinstance(value, Placeholder):
        return (value.args, value.state, value.items)
    return None

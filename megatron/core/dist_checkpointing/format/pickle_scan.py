"""What a pickle is going to do, seen before it does anything.

The unpickler of the standard library trusts its input: a memo index of 2^30 takes 8 GB, a tuple in a tuple in a tuple
as the key of a dictionary overflows the C stack when it is hashed, one that holds another one twice is hashed without
end, ten bytes announce a buffer of a terabyte. So the opcodes are run here first on an abstract stack that knows of
every value only what hashing it would cost. A pickle that passes takes time and memory in proportion to its size.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron.core.dist_checkpointing.format.schema import CheckpointError, UnsafePickleError

# What a value on the stack is. From 1 on: a tuple, so many levels deep.
_SCALAR, _CONTAINER, _OBJECT, _MADE = 0, -1, -2, -3  # _OBJECT: hashed by identity; _MADE: by a function, or a long int

# What is free, and what each byte of a pickle allows beyond. A .metadata has 0.48 opcodes and 0.04 objects per byte.
_FREE_OPCODES, _OPCODES_PER_BYTE = 500_000, 0.6
_FREE_OBJECTS, _OBJECTS_PER_BYTE = 50_000, 1 / 16
_FREE_MEMORY, _MEMORY_PER_BYTE = 32 << 20, 20  # bytes; a .metadata takes 12
_OBJECT_SIZE, _DICT_SIZE, _LIST_SIZE, _MEMO_SIZE = 100, 232, 64, 16  # bytes
_MAX_GLOBALS = 20_000
_MAX_MADE_KEYS = 1000  # tuples and the like collide in hashing if their author wants it
_LONG_INT_BYTES = 8  # longer ones collide, too

# Opcode -> (values taken from the stack, kind of the value pushed, bytes of its argument, memory). What takes values
# calls something.
_FIXED: dict[int, tuple[int, int, int, int]] = {
    **{op: (0, _SCALAR, 0, 0) for op in b"N\x88\x89"},
    **{op: (0, _SCALAR, size, 0) for op, size in zip(b"KMJG", (1, 2, 4, 8), strict=True)},
    ord(")"): (0, 1, 0, 0),
    ord("]"): (0, _CONTAINER, 0, _LIST_SIZE),
    ord("}"): (0, _CONTAINER, 0, _DICT_SIZE),
    0x8F: (0, _CONTAINER, 0, _DICT_SIZE),  # EMPTY_SET
    ord("R"): (2, _MADE, 0, _OBJECT_SIZE),
    ord("Q"): (1, _MADE, 0, _OBJECT_SIZE),  # BINPERSID
    0x81: (2, _OBJECT, 0, _OBJECT_SIZE),  # NEWOBJ
    0x92: (3, _OBJECT, 0, _OBJECT_SIZE),  # NEWOBJ_EX
}
# Opcode -> bytes of the length that precedes its content.
_PREFIXED = {op: size for size, ops in {1: b"\x8cUC", 4: b"XTB", 8: b"\x8d\x8e"}.items() for op in ops}


def scan_pickle(data: bytes | memoryview) -> None:
    """Raises CheckpointError or UnsafePickleError unless unpickling `data` is cheap and safe. Calls nothing."""
    try:
        _Scan(data).run()
    except (IndexError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError("it is cut, or damaged") from error


class _Scan:
    def __init__(self, data: bytes | memoryview) -> None:
        self.data = bytes(data)
        self.position = 0
        self.stack: list[int] = []
        self.marks: list[int] = []
        self.memo: list[int] = []
        self.memory = self.objects = self.made_keys = self.globals = 0

    def run(self) -> None:
        limit = _FREE_OPCODES + int(_OPCODES_PER_BYTE * len(self.data))
        if not self._run(limit):
            raise UnsafePickleError(f"its pickle has more than {limit} steps in {len(self.data)} bytes")
        allowed = _FREE_OBJECTS + int(_OBJECTS_PER_BYTE * len(self.data))
        if self.objects > allowed:
            raise UnsafePickleError(f"its pickle of {len(self.data)} bytes makes more than {allowed} objects")
        needed = self.memory + _MEMO_SIZE * len(self.memo)
        if needed > _FREE_MEMORY + _MEMORY_PER_BYTE * len(self.data):
            raise UnsafePickleError(f"its pickle of {len(self.data)} bytes would need {needed} bytes of memory")

    def _run(self, limit: int) -> bool:
        """Whether STOP came within `limit` opcodes. This loop is all of the time: frequent opcodes first, no calls."""
        data, stack, memo, marks = self.data, self.stack, self.memo, self.marks
        push, position, memory, objects = stack.append, 0, 0, 0
        for _ in range(limit):
            opcode = data[position]
            position += 1
            if opcode == 0x94:  # MEMOIZE
                memo.append(stack[-1])
            elif opcode in _FIXED:  # most of the others: a table costs one look-up for all of them
                taken, kind, size, needed = _FIXED[opcode]
                if taken:
                    del stack[-taken:]
                    objects += 1
                push(kind)
                position += size
                memory += needed
            elif opcode == 0x68:  # BINGET
                push(memo[data[position]])
                position += 1
            elif opcode == 0x6A:  # LONG_BINGET
                push(memo[int.from_bytes(data[position : position + 4], "little")])
                position += 4
            elif 0x85 <= opcode <= 0x87:  # TUPLE1, TUPLE2, TUPLE3
                values = stack[0x84 - opcode :]
                del stack[0x84 - opcode :]
                push(max(0, *values) + 1)
                memory += _LIST_SIZE
            elif opcode == 0x28:  # MARK
                marks.append(len(stack))
            elif opcode == 0x62:  # BUILD
                stack.pop()
            elif opcode == 0x75:  # SETITEMS
                mark = marks.pop()
                self._hashed(stack[mark::2])
                del stack[mark:]
            elif opcode in _PREFIXED:
                push(_SCALAR)
                size = _PREFIXED[opcode]
                position += size + int.from_bytes(data[position : position + size], "little")
            elif opcode == 0x71 and data[position] == len(memo):  # BINPUT of the next number
                memo.append(stack[-1])
                position += 1
            elif opcode == 0x2E:  # STOP
                self.memory += memory
                self.objects += objects
                return True
            else:
                self.position = position
                _HANDLERS.get(opcode, _Scan._unknown)(self)
                position = self.position
        return False

    # Arguments

    def _number(self, size: int) -> int:
        self.position += size
        return int.from_bytes(self.data[self.position - size : self.position], "little")

    def _line(self) -> bytes:
        start, end = self.position, self.data.index(b"\n", self.position)
        self.position = end + 1
        return self.data[start:end]

    def _above_mark(self) -> list[int]:
        mark = self.marks.pop()
        values = self.stack[mark:]
        del self.stack[mark:]
        return values

    def _hashed(self, kinds: list[int]) -> None:
        """Keys of a dictionary or members of a set: plain, or flat tuples."""
        if not kinds or (max(kinds) <= _SCALAR and min(kinds) > _MADE):
            return
        if max(kinds) > 1:
            raise UnsafePickleError("its dictionaries or sets have nested tuples as keys")
        self.made_keys += sum(kind == 1 or kind == _MADE for kind in kinds)
        if self.made_keys > _MAX_MADE_KEYS:
            raise UnsafePickleError(f"its dictionaries have more than {_MAX_MADE_KEYS} keys that are no plain values")

    # Opcodes

    def _unknown(self) -> None:
        opcode = self.data[self.position - 1]
        raise UnsafePickleError(f"its pickle has the opcode {opcode:#04x}, which no checkpoint needs")

    def _pop(self) -> None:
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self.stack.pop()

    def _dup(self) -> None:
        self.stack.append(self.stack[-1])

    def _skip(self, size: int) -> None:
        self.position += size

    def _frame(self) -> None:
        if self._number(8) > len(self.data) - self.position:
            raise CheckpointError("a frame of it ends behind its end")

    def _long(self, size: int) -> None:
        length = self._number(size)
        self.position += length
        self.stack.append(_SCALAR if length <= _LONG_INT_BYTES else _MADE)

    def _text_number(self) -> None:
        self.stack.append(_SCALAR if len(self._line()) <= 2 * _LONG_INT_BYTES else _MADE)

    def _text(self) -> None:
        self._line()
        self.stack.append(_SCALAR)

    def _bytearray8(self) -> None:
        length = self._number(8)
        self.position += length
        self.stack.append(_CONTAINER)

    def _tuple_from_mark(self) -> None:
        self.stack.append(max(0, 0, *self._above_mark()) + 1)
        self.memory += _LIST_SIZE

    def _list_from_mark(self) -> None:
        self._above_mark()
        self.memory += _LIST_SIZE
        self.stack.append(_CONTAINER)

    def _dict_from_mark(self) -> None:
        self._hashed(self._above_mark()[::2])
        self.memory += _DICT_SIZE
        self.stack.append(_CONTAINER)

    def _drop(self) -> None:
        self.stack.pop()

    def _setitem(self) -> None:
        self._hashed(self.stack[-2:-1])
        del self.stack[-2:]

    def _additems(self) -> None:
        self._hashed(self._above_mark())

    def _frozenset(self) -> None:
        self._hashed(self._above_mark())
        self.memory += _DICT_SIZE
        self.stack.append(_MADE)

    def _call_from_mark(self, lines: int) -> None:
        for _ in range(lines):
            self._line()
        self._above_mark()
        self.memory += _OBJECT_SIZE
        self.objects += 1
        self.stack.append(_MADE)

    def _global(self) -> None:
        self._line()
        self._line()
        self._named()
        self.stack.append(_SCALAR)

    def _stack_global(self) -> None:
        self._named()
        del self.stack[-2:]
        self.stack.append(_SCALAR)

    def _named(self) -> None:
        self.globals += 1
        if self.globals > _MAX_GLOBALS:
            raise UnsafePickleError(f"its pickle names more than {_MAX_GLOBALS} globals")

    def _get(self) -> None:
        number = int(self._line())
        if number < 0:
            raise CheckpointError(f"it asks for value {number}")
        self.stack.append(self.memo[number])

    def _put(self, number: int) -> None:
        # Every writer numbers its values in turn; a list as long as the number would be the attack.
        if number > len(self.memo):
            raise UnsafePickleError(f"its pickle stores value {number} after {len(self.memo)} others")
        self.memo[number : number + 1] = self.stack[-1:]


_HANDLERS: dict[int, Callable[[_Scan], object]] = {
    ord("0"): _Scan._pop,
    ord("1"): _Scan._above_mark,
    ord("2"): _Scan._dup,
    ord("F"): _Scan._text,
    ord("S"): _Scan._text,
    ord("V"): _Scan._text,
    ord("I"): _Scan._text_number,
    ord("L"): _Scan._text_number,
    0x8A: lambda scan: scan._long(1),
    0x8B: lambda scan: scan._long(4),
    0x96: _Scan._bytearray8,
    ord("t"): _Scan._tuple_from_mark,
    ord("l"): _Scan._list_from_mark,
    ord("d"): _Scan._dict_from_mark,
    ord("a"): _Scan._drop,  # APPEND
    ord("e"): _Scan._above_mark,  # APPENDS
    ord("s"): _Scan._setitem,
    0x90: _Scan._additems,
    0x91: _Scan._frozenset,
    ord("o"): lambda scan: scan._call_from_mark(0),
    ord("i"): lambda scan: scan._call_from_mark(2),
    ord("c"): _Scan._global,
    0x93: _Scan._stack_global,
    ord("g"): _Scan._get,
    ord("p"): lambda scan: scan._put(int(scan._line())),
    ord("q"): lambda scan: scan._put(scan._number(1)),
    ord("r"): lambda scan: scan._put(scan._number(4)),
    0x80: lambda scan: scan._skip(1),  # PROTO
    0x95: _Scan._frame,
}

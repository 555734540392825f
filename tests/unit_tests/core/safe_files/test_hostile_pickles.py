"""Pickles that try to hang, crash or exhaust memory are refused within the limits of SECURITY.md.

Each payload runs in a child process with limited memory and processor time, because a failure may
be a crash rather than an exception.
"""

import io
import math
import pickle
import struct
from collections.abc import Callable

import pytest
import torch

from megatron.core.dist_checkpointing.format.metadata_codec import decode_metadata
from megatron.core.safe_files.errors import CheckpointError
from megatron.core.safe_files.torch_load import safe_load
from megatron.core.safe_files.unpickler import unpickle
from tests.support.limited_process import run_limited
from tests.unit_tests.core.safe_files.test_safe_unpickle import archive_with

# The bounds that SECURITY.md states, for a file of n bytes. The kernel counts whole seconds.
SECONDS = 2
SECONDS_PER_BYTE = 500e-9
MEMORY = 64 << 20
MEMORY_PER_BYTE = 20

PROTO = b"\x80\x04"


def doubled(levels: int) -> bytes:
    """Pickle a tuple that contains one tuple twice, and so on: hash, repr and == never finish."""
    return PROTO + b")" + b"".join(b"\x94" + bytes([0x68, n]) * 2 + b"\x86" for n in range(levels))


def doubled_lists(levels: int) -> bytes:
    """Pickle lists like `doubled`."""
    return (
        PROTO + b"]\x94" + b"".join(b"]\x94(" + bytes([0x68, n]) * 2 + b"e" for n in range(levels))
    )


def deep(opcode: bytes, levels: int) -> bytes:
    return PROTO + b")" + opcode * levels


def call(module: str, name: str, arguments: bytes) -> bytes:
    """Return the opcodes of module.name(arguments); `arguments` pushes one tuple."""
    return b"c" + f"{module}\n{name}\n".encode() + arguments + b"R"


def as_key(value: bytes) -> bytes:
    return b"}" + value.removeprefix(PROTO) + b"Ns."


def member(value: bytes) -> bytes:
    return b"\x8f(" + value.removeprefix(PROTO) + b"\x90."


def colliding_ints(count: int) -> bytes:
    """Pickle integers with hash 0."""
    items = (n * (2**61 - 1) for n in range(count))
    return b"}(" + b"".join(b"\x8a\x12" + n.to_bytes(18, "little") + b"N" for n in items) + b"u."


def colliding_tuples(count: int) -> bytes:
    return (
        b"}(" + b"".join(b"J" + struct.pack("<i", n) + b"K\x01\x86N" for n in range(count)) + b"u."
    )


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


SHARED = doubled(60).removeprefix(PROTO)
DEEP = b")" + b"\x85" * 40_000
BIG_LIST = b"](" + b"N" * 50_000 + b"e\x94"
PAYLOADS = {
    "deep tuple as a key": as_key(deep(b"\x85", 40_000)),
    "deep tuple in a set": member(deep(b"\x85", 40_000)),
    "deep tuple in a frozenset": b"(" + deep(b"\x85", 40_000).removeprefix(PROTO) + b"\x91.",
    "deep tuple in set()": call("builtins", "set", b"](" + DEEP + b"e\x85") + b".",
    "deep tuple in OrderedDict()": call("collections", "OrderedDict", b"](](" + DEEP + b"Neae\x85")
    + b".",
    "deep tuple": deep(b"\x85", 50_000) + b".",
    "deep list": b"]" * 50_000 + b"a" * 49_999 + b".",
    "nested slice": b"cbuiltins\nslice\nq\x000K\x00"
    + b"q\x01"
    + b"0h\x00h\x01\x85Rq\x01" * 40_000
    + b"h\x01.",
    "memo index": b"Nr\xff\xff\xff\x3f.",
    "memo index as text": b"Np1073741823\n.",
    "shared tuples": doubled(60) + b".",
    "shared tuples as a key": as_key(doubled(60)),
    "shared tuples in a set": member(doubled(60)),
    "shared lists": doubled_lists(60) + b".",
    "shared tuples as arguments of a class": b"csomeproject\nX\n" + SHARED + b"\x81.",
    "shared tuples as a persistent id": doubled(60) + b"Q.",
    "shared tuples as a dtype": b"cnumpy\ndtype\n" + SHARED + b"\x85\x81.",
    "shared tuples as a signal": call("signal", "Signals", SHARED + b"\x85") + b".",
    "shared tuples as a layout": call("torch.serialization", "_get_layout", SHARED + b"\x85")
    + b".",
    "shared tuples as a codec": call("_codecs", "encode", b"N" + SHARED + b"\x86") + b".",
    "colliding ints": colliding_ints(10_000),
    "colliding ints in a set": colliding_ints(10_000).replace(b"}(", b"\x8f(", 1)[:-2] + b"\x90.",
    "tuples as keys": colliding_tuples(30_000),
    "bytearray of text": call(
        "builtins", "bytearray", text("a" * 60_000) + text("punycode") + b"\x86"
    )
    + b".",
    "bytearray of a number": call("builtins", "bytearray", b"J\xff\xff\xff\x7f\x85") + b".",
    "array of a number": call("numpy.core.multiarray", "_reconstruct", b")")
    + b"(K\x01K\x01\x85"
    + call("numpy", "dtype", b"U\x02u1\x85").replace(b"R", b"\x81")
    + b"\x89J\xff\xff\xff\x7ftb.",
    "complex of text": call("builtins", "complex", text("1" * 50_000) + b"\x85") + b".",
    "announced bytes": b"\x8e" + struct.pack("<Q", 1 << 40) + b".",
    "announced bytearray": b"\x96" + struct.pack("<Q", 1 << 40) + b".",
    "announced text": b"\x8d" + struct.pack("<Q", 1 << 62) + b".",
    "announced int": b"\x8b\xff\xff\xff\x7f.",
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.",
    "a list copied again and again": BIG_LIST
    + b"0("
    + call("collections", "deque", b"h\x00\x85") * 20_000
    + b"t.",
    "a text copied again and again": text("a" * 50_000)
    + b"\x940("
    + call("_codecs", "encode", b"h\x00U\x06latin1\x86") * 20_000
    + b"t.",
    "classes": b"(" + b"".join(b"ca\nb%d\n" % n for n in range(40_000)) + b"t.",
    "one class again and again": b"(" + b"ca\nb\n" * 40_000 + b"t.",
    "instances": b"cx\nX\n\x940(" + b"h\x00)\x81" * 50_000 + b"t.",
    "dictionaries": b"(" + b"}" * 150_000 + b"t.",
    "memo": b"N" + b"\x94" * 200_000 + b".",
    "stack": b"(" + b"N" * 200_000 + b"t.",
    "duplicates": b"(N" + b"2" * 200_000 + b"t.",
    "no end": b"N0" * 200_000,
}


def try_to_read(read: Callable[[], object], size: int) -> str:
    """Return "refused", "loaded", or a description of another outcome.

    The process has the limits of SECURITY.md for a file of `size` bytes.
    """

    def attempt() -> str:
        try:
            repr(read())
        except CheckpointError as error:
            is_short = len(str(error)) < 2000 and "\n" not in str(error)
            return "refused" if is_short else "a long message"
        return "loaded"

    seconds = SECONDS + math.ceil(SECONDS_PER_BYTE * max(0, size - 1_000_000))
    return run_limited(attempt, MEMORY + MEMORY_PER_BYTE * size, seconds)


@pytest.mark.parametrize("name", PAYLOADS)
def test_cost_of_hostile_pickles_is_bounded(name: str) -> None:
    payload = PAYLOADS[name]
    archive = archive_with(payload)
    assert try_to_read(lambda: safe_load(archive), len(payload)) in ("refused", "loaded")
    assert try_to_read(lambda: decode_metadata(payload, "here"), len(payload)) == "refused"


LARGE_PAYLOADS = {
    "colliding ints": lambda: colliding_ints(200_000),
    "tuples as keys": lambda: colliding_tuples(600_000),
    "classes": lambda: b"(" + b"".join(b"ca\nb%d\n" % n for n in range(500_000)) + b"t.",
    "instances": lambda: b"cx\nX\n\x940(" + b"h\x00)\x81" * 1_200_000 + b"t.",
    "dictionaries": lambda: b"(" + b"}" * 5_000_000 + b"t.",
    "memo": lambda: b"N" + b"\x94" * 5_000_000 + b".",
    "deep tuple": lambda: deep(b"\x85", 5_000_000) + b".",
    "shared lists": lambda: doubled_lists(250) + b"0" + b"N0" * 2_500_000 + b".",
}


@pytest.mark.parametrize("name", LARGE_PAYLOADS)
def test_cost_of_large_hostile_pickles_is_proportional_to_their_size(name: str) -> None:
    payload = LARGE_PAYLOADS[name]()
    assert 4_000_000 < len(payload) < 9_000_000
    assert try_to_read(lambda: decode_metadata(payload, "here"), len(payload)) == "refused"


def tensor_over(
    record: bytes, shape: bytes, stride: bytes, before: bytes = b"", behind: bytes = b""
) -> bytes:
    """Make an archive whose pickle builds a tensor over one record and uses it."""
    storage = b"(U\x07storagectorch\nFloatStorage\nU\x010U\x03cpuK\x04tQ"
    pickled = b"\x80\x02" + before + b"ctorch._utils\n_rebuild_tensor_v2\n("
    pickled += storage + b"K\x00" + shape + stride + b"\x89}tR" + behind + b"."
    writer_buffer = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(writer_buffer)
    writer.write_record("data.pkl", pickled, len(pickled))
    writer.write_record("data/0", record, len(record))
    writer.write_end_of_file()
    return writer_buffer.getvalue()


def test_views_of_one_record_are_bounded(tmp_path) -> None:
    huge = tensor_over(bytes(16), b"J\xff\xff\xff\x7f\x85", b"K\x00\x85")
    with pytest.raises(CheckpointError, match="repeats the 4 elements of its storage"):
        safe_load(huge)
    rank = b"(" + b"K\x01" * 65 + b"t"
    with pytest.raises(CheckpointError, match="a tensor of shape or strides a tuple of 65 entries"):
        safe_load(tensor_over(bytes(16), rank, rank))


def test_members_that_collide_are_counted_over_all_sets() -> None:
    """A thousand such members cost milliseconds in one set, but seconds in a hundred sets."""
    hash_0 = b"".join(
        b"\x8a\x12" + (n * (2**61 - 1)).to_bytes(18, "little") + b"\x85" for n in range(1000)
    )
    sets = b"(cbuiltins\nset\n\x94" + b"h\x01h\x00\x85R" * 2 + b"t."
    with pytest.raises(CheckpointError, match="more than 1000 keys that are not plain values"):
        unpickle(PROTO + b"]\x94(" + hash_0 + b"e0" + sets, "here")


TENSOR_USES = {
    "members": (b"cbuiltins\nset\n", b"\x85R"),
    "a deque": (b"ccollections\ndeque\n", b"\x85R"),
    "pairs": (b"ccollections\nOrderedDict\n", b"\x85R"),
    "extents": (b"ctorch\nSize\n", b"\x85R"),
    "arguments": (b"csomeproject\nX\n", b"R"),
    "arguments of a rebuild": (
        b"ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_tensor_v2\nN",
        b"NtR",
    ),
    "a state": (b"cnumpy.core.multiarray\n_reconstruct\n)R", b"b"),
    "what is built": (b"", b"}U\x01xNsb"),
    "what is appended to": (b"", b"Na"),
    "a storage": (b"ctorch._utils\n_rebuild_tensor_v2\n(", b"K\x00))\x89}tR"),
}


@pytest.mark.parametrize("use", TENSOR_USES)
def test_tensors_are_only_used_as_values(use: str) -> None:
    """A tensor may be a mapped terabyte: it is neither iterated over nor modified."""
    assert safe_load(tensor_over(bytes(16), b"K\x04\x85", b"K\x01\x85")).numel() == 4
    with pytest.raises(CheckpointError, match="pickle: "):
        safe_load(tensor_over(bytes(16), b"K\x04\x85", b"K\x01\x85", *TENSOR_USES[use]))


def test_changed_records_are_detected() -> None:
    content = bytearray(archive_with(pickle.dumps({"iteration": 7}, 2)))
    position = content.index(b"iteration")
    content[position] ^= 1
    with pytest.raises(CheckpointError, match=r"data\.pkl does not have its CRC-32"):
        safe_load(bytes(content))


def test_values_pickled_by_python_are_loaded() -> None:
    """All protocols of checkpoints are supported; torch.save uses 2."""
    values = [
        None, True, 1, -1, 2**31, 2**70, 1.5, "text", "x" * 300, b"bytes", b"y" * 300, bytearray(b"z"), (), (1,),
        (1, 2), (1, 2, 3), tuple(range(9)), [], [1], list(range(2000)), {}, {1: 2}, {n: (n, [n]) for n in range(900)},
        {1, 2}, frozenset([1, 2]), [[[[1]]]], {"a": {("k", 1): [1, (2, (3, (4,)))]}}, torch.float32,
    ]  # fmt: skip
    for protocol in range(2, 6):
        assert unpickle(pickle.dumps(values, protocol), "here") == values

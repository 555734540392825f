"""Damages files: bytes anywhere, and values inside of files that stay well-formed."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import pickle
import random
import re
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash

Mutation = Callable[[bytes, random.Random], bytes]

WEIRD: list[Any] = [
    None, True, False, -1, 0, 1, 7, 10**8, 2**31, 2**63, 2**70, -(2**70), 0.5, 1e308, float("nan"), float("inf"), "",
    "x", "../../x", "/dev/zero", "a\nb\x1b[31m", "\ud800", "x" * 5000, [], {}, [[[]]], [1, 2, 3], [None],
    {"a": {"b": 1}},
]  # fmt: skip
WEIRD_IN_PICKLES = [
    *WEIRD,
    b"bytes",
    (1, 2),
    ((1,),),
    torch.zeros(2),
    torch.float32,
    {1: 2},
    argparse.Namespace(a=1),
]

_FOOTER = struct.Struct(
    "<QQQ8s"
)  # position, length and hash of the index of a .metadata, magic number


def damaged_bytes(content: bytes, rng: random.Random) -> bytes:
    """Flip, overwrite, insert, remove, repeat or cut bytes."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5))):
        position = (
            rng.randrange(len(data) + 1)
            if rng.random() < 0.7
            else rng.randrange(min(len(data), 200) + 1)
        )
        size = rng.choice((1, 1, 2, 4, 8, 100))
        mutation = rng.randrange(6)
        if mutation == 0 and position < len(data):
            data[position] ^= 1 << rng.randrange(8)
        elif mutation == 1:
            data[position : position + size] = rng.randbytes(size)
        elif mutation == 2:
            data[position:position] = rng.randbytes(size)
        elif mutation == 3:
            del data[position : position + size]
        elif mutation == 4:
            data[position:position] = data[max(0, position - size) : position]
        elif rng.random() < 0.3:
            del data[position:]
        else:
            data[position : position + size] = rng.choice((b"\0", b"\xff", b"\x7f")) * size
    return bytes(data)


def find_places(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of all values inside `value`."""
    if depth > 12:
        return

    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list):
        children = list(enumerate(value))
    elif dataclasses.is_dataclass(value) or isinstance(value, argparse.Namespace):
        children = list(vars(value).items())
    elif isinstance(value, tuple):
        for item in value:
            yield from find_places(item, depth + 1)
        return
    else:
        return

    for key, child in children:
        yield value, key
        yield from find_places(child, depth + 1)


def damage_value(root: Any, rng: random.Random, weird: list[Any]) -> Any:
    """Replace or remove one or a few values, or now and then the root itself."""
    if rng.random() < 0.03:
        return rng.choice(weird)

    for _ in range(rng.choice((1, 1, 1, 3))):
        candidates = list(find_places(root))
        if not candidates:
            return rng.choice(weird)
        if rng.random() < 0.5:
            candidates = candidates[:60]  # values near the root are read first
        container, key = rng.choice(candidates)
        _change(container, key, rng, weird)
    return root


def _change(container: Any, key: Any, rng: random.Random, weird: list[Any]) -> None:
    remove = rng.random() < 0.25
    if isinstance(container, dict):
        if rng.random() < 0.05:
            container[rng.choice(["x", "", "../x", "\ud800", "a" * 300])] = container.pop(key)
        elif remove:
            del container[key]
        else:
            container[key] = rng.choice(weird)
    elif isinstance(container, list):
        if remove:
            del container[key]
        else:
            container[key] = rng.choice(weird)
    elif remove:
        vars(container).pop(key)
    else:
        object.__setattr__(container, key, rng.choice(weird))


def damaged_json(content: bytes, rng: random.Random) -> bytes:
    return json.dumps(damage_value(json.loads(content), rng, WEIRD)).encode()


def damaged_safetensors(content: bytes, rng: random.Random) -> bytes:
    """Damage the header."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = damaged_json(content[8:end], rng)
    return len(header).to_bytes(8, "little") + header + content[end:]


_GGUF_NAME = re.compile(rb"[a-z][a-z0-9_]*(?:\.[a-z0-9_]+)+")
_GGUF_COUNTS = (0, 1, 2, 5, 8, 9, 32, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 64) - 1)


def damaged_gguf(content: bytes, rng: random.Random) -> bytes:
    """Change a count at the beginning, or a length, type, dimension, value or offset at a name."""
    names = list(_GGUF_NAME.finditer(content[:4096]))
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2))):
        match = rng.choice(names)
        after = match.end() + rng.choice((0, 4, 8, 12, 16, 20, 24, 28))
        position = rng.choice((4, 8, 16, match.start() - 8, after, after, after))
        size = rng.choice((4, 8))
        value = rng.choice(_GGUF_COUNTS) % (1 << 8 * size)
        data[position : position + size] = value.to_bytes(size, "little")
    return bytes(data)


def damaged_archive(content: bytes, rng: random.Random) -> bytes:
    """Change a value in a file of torch.save, or damage its pickle and correct the checksum."""
    try:
        value = torch.load(io.BytesIO(content), weights_only=False)
    except ModuleNotFoundError:
        return _with_other_program(content, rng)

    if rng.random() < 0.3:
        return _with_other_program(content, rng)
    buffer = io.BytesIO()
    torch.save(damage_value(value, rng, WEIRD_IN_PICKLES), buffer)
    return buffer.getvalue()


def _with_other_program(content: bytes, rng: random.Random) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(buffer, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, damaged_bytes(data, rng) if name.endswith("data.pkl") else data)
    return buffer.getvalue()


def damaged_pickle(content: bytes, rng: random.Random) -> bytes:
    return pickle.dumps(damage_value(pickle.loads(content), rng, WEIRD_IN_PICKLES), 4)


def damaged_index(content: bytes, rng: random.Random) -> bytes:
    """Damage the index that follows the pickle in our .metadata, and correct its checksum."""
    position, length, _, magic = _FOOTER.unpack(content[-_FOOTER.size :])
    index = damaged_json(content[position : position + length], rng)
    footer = _FOOTER.pack(position, len(index), xxhash.xxh3_64_intdigest(index), magic)
    return content[:position] + index + footer


YAML_SNIPPETS = (
    "&a [*a, *a]", "*a", "!!timestamp foo", "!!int ''", "!!float ''", "!!python/object/apply:os.system [x]",
    "{<<: {a: 1}}", "<<: *a", "[" * 300 + "]" * 300, "!!binary x", "? x", "|\n  a", "2001-99-99", "0o9", "1e999",
    ".inf", ".nan", "~", "\t", "'", '"\\x1b[2J"', "\x85", "9" * 5000, "{a: b, a: c}", "--- x", "...", "%YAML 9.9",
)  # fmt: skip


def damaged_yaml(content: bytes, rng: random.Random) -> bytes:
    """Replace the value of some lines, keeping their indentation."""
    lines = content.decode().splitlines()
    for _ in range(rng.choice((1, 1, 3))):
        index = rng.randrange(len(lines))
        key, colon, _ = lines[index].partition(":")
        weird = rng.choice(WEIRD) if rng.random() < 0.4 else rng.choice(YAML_SNIPPETS)
        value = weird if isinstance(weird, str) else json.dumps(weird)
        mutation = rng.randrange(4)
        if mutation == 0:
            del lines[index]
        elif mutation == 1:
            lines.insert(index, lines[index])
        else:
            lines[index] = f"{key}{colon} {value}"

        if not lines:
            break
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def damaged_checksums(content: bytes, rng: random.Random) -> bytes:
    """Damage the records of checksums.bin, and correct the checksum at the end."""
    body = damaged_bytes(content[:-8], rng)
    return body + xxhash.xxh3_64_digest(body)


def damaged_sentencepiece(content: bytes, rng: random.Random) -> bytes:
    """Change fields of a SentencePiece model: pieces (1), trainer (2), normalizer (3)."""
    fields = list(_parse_protobuf(content))
    for _ in range(rng.choice((1, 1, 3))):
        index = rng.randrange(len(fields))
        tag, body = fields[index]
        mutation = rng.randrange(5)
        if mutation == 0:
            del fields[index]
        elif mutation == 1:
            fields.insert(index, fields[rng.randrange(len(fields))])
        elif mutation == 2:
            fields[index] = (rng.randrange(1, 6), body)
        elif mutation == 3 and tag == 1:
            score = struct.pack("<f", rng.choice((float("inf"), float("nan"), -float("inf"), 1e38)))
            text = rng.choice(("", "x" * 5000, "\n\x1b[2J", "</s>", "<0x41>", "\u202e")).encode()
            piece = b"\x0a" + _encode_varint(len(text)) + text + b"\x15" + score
            fields[index] = (1, piece + b"\x18" + _encode_varint(rng.randrange(300)))
        else:
            fields[index] = (tag, damaged_bytes(body, rng))
    return b"".join(
        _encode_varint(tag << 3 | 2) + _encode_varint(len(body)) + body for tag, body in fields
    )


def _parse_protobuf(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (number, content) of the fields of a message that has only nested messages."""
    position = 0
    while position < len(content):
        tag, position = _decode_varint(content, position)
        size, position = _decode_varint(content, position)
        assert tag & 7 == 2
        yield tag >> 3, content[position : position + size]
        position += size


def _decode_varint(content: bytes, position: int) -> tuple[int, int]:
    value = 0
    shift = 0
    while True:
        byte = content[position]
        position += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, position


def _encode_varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def damaged_lines(content: bytes, rng: random.Random) -> bytes:
    """Damage one of several JSON objects."""
    lines = content.splitlines()
    index = rng.randrange(len(lines))
    lines[index] = damaged_json(lines[index], rng)
    return b"\n".join(lines) + b"\n"


def damage(path: Path, mutation: Mutation | None, rng: random.Random) -> None:
    """Damage a file in place, by `mutation` in three of four cases."""
    content = path.read_bytes()
    changed = None
    if mutation is not None and rng.random() < 0.75:
        try:
            changed = mutation(content, rng)
        except Exception:  # the value cannot be written, or the file not be parsed
            changed = None

    path.unlink()  # other hard links to the file stay intact
    path.write_bytes(damaged_bytes(content, rng) if changed is None else changed)

"""Damage of files: bytes anywhere, and values inside of JSON and pickles that stay well-formed."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import pickle
import random
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash

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
    """Flip, overwrite, insert, remove, repeat, cut."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5))):
        place = (
            rng.randrange(len(data) + 1)
            if rng.random() < 0.7
            else rng.randrange(min(len(data), 200) + 1)
        )
        size = rng.choice((1, 1, 2, 4, 8, 100))
        kind = rng.randrange(6)
        if kind == 0 and place < len(data):
            data[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[place : place + size] = rng.randbytes(size)
        elif kind == 2:
            data[place:place] = rng.randbytes(size)
        elif kind == 3:
            del data[place : place + size]
        elif kind == 4:
            data[place:place] = data[max(0, place - size) : place]
        elif rng.random() < 0.3:
            del data[place:]
        else:
            data[place : place + size] = rng.choice((b"\0", b"\xff", b"\x7f")) * size
    return bytes(data)


def places(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything inside."""
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
            yield from places(item, depth + 1)
        return
    else:
        return
    for key, child in children:
        yield value, key
        yield from places(child, depth + 1)


def damage_value(root: Any, rng: random.Random, weird: list[Any]) -> Any:
    """One or a few values replaced or removed; the root itself now and then."""
    if rng.random() < 0.03:
        return rng.choice(weird)
    for _ in range(rng.choice((1, 1, 1, 3))):
        found = list(places(root))
        if not found:
            return rng.choice(weird)
        depths = found if rng.random() < 0.5 else found[:60]  # what is near the root is read first
        container, key = rng.choice(depths)
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
    """The header."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = damaged_json(content[8:end], rng)
    return len(header).to_bytes(8, "little") + header + content[end:]


def damaged_archive(content: bytes, rng: random.Random) -> bytes:
    """What torch.save has written, with another value in it; or its program damaged, under a good
    checksum.
    """
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
    """Of our .metadata: what stands behind the pickle, under a good checksum."""
    position, length, _, magic = _FOOTER.unpack(content[-_FOOTER.size :])
    index = damaged_json(content[position : position + length], rng)
    footer = _FOOTER.pack(position, len(index), xxhash.xxh3_64_intdigest(index), magic)
    return content[:position] + index + footer


def damaged_lines(content: bytes, rng: random.Random) -> bytes:
    """One of several JSON objects."""
    lines = content.splitlines()
    number = rng.randrange(len(lines))
    lines[number] = damaged_json(lines[number], rng)
    return b"\n".join(lines) + b"\n"


def damage(
    path: Path, structural: Callable[[bytes, random.Random], bytes] | None, rng: random.Random
) -> None:
    content = path.read_bytes()
    changed = None
    if structural is not None and rng.random() < 0.75:
        try:
            changed = structural(content, rng)
        except Exception:  # the value cannot be written, or not read by anyone else
            changed = None
    path.unlink()  # its other links stay as they are
    path.write_bytes(damaged_bytes(content, rng) if changed is None else changed)

"""Opening files that a stranger may have made: regular ones only, of bounded size, inside the directory they belong to.

A pipe would be waited for without end, `/dev/zero` read without end, and a link or a `../` in a file's content would
make us read what its author has no right to.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from megatron.core.dist_checkpointing.format.schema import MAX_DEPTH, CheckpointError, file_name, printable

MAX_JSON = 256 << 20  # bytes


def open_descriptor(path: str | os.PathLike[str]) -> int:
    """`path` for reading. Raises CheckpointError unless it is a regular file, OSError if it is not there."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # non-blocking: a pipe opens at once
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{printable(str(path))} is not a regular file")
    return descriptor


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """The same as an unbuffered file."""
    return open(open_descriptor(path), "rb", buffering=0)


def read_regular(path: str | os.PathLike[str], limit: int = MAX_JSON) -> bytes:
    """All of a regular file. Raises CheckpointError if it has more than `limit` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise CheckpointError(f"{printable(str(path))} has {size} bytes, more than the {limit} that it may have")
        content = bytearray()
        while chunk := file.read(max(1, size - len(content))):
            content += chunk
            if len(content) > limit:
                raise CheckpointError(f"{printable(str(path))} grows while it is read")
    return bytes(content)


def read_json(path: str | os.PathLike[str]) -> Any:
    """The content of a JSON file. Raises CheckpointError naming the file for anything else, OSError without it."""
    return parse_json(read_regular(path), printable(str(path)))


def parse_json(content: bytes, where: str, **options: Any) -> Any:
    """As `json.loads`, at most `MAX_DEPTH` deep. Raises CheckpointError naming `where`."""
    try:
        value = json.loads(content, **options)
    except RecursionError as error:
        raise CheckpointError(f"{where} is not valid JSON: it is nested too deep") from error
    except ValueError as error:
        raise CheckpointError(f"{where} is not valid JSON ({error}): it is damaged or no such file") from error
    level = [value]
    for _ in range(MAX_DEPTH):
        containers = [item for item in level if type(item) in (dict, list)]
        level = [child for item in containers for child in (item.values() if type(item) is dict else item)]
        if not level:
            return value
    raise CheckpointError(f"{where} is not valid JSON: it is nested more than {MAX_DEPTH} deep")


def named_file(directory: Path, name: Any, where: str) -> Path:
    """The file that the content of another one names: a regular file in `directory`.

    Links may lead to other places in it and, in a cache of Hugging Face (`models--*/snapshots/<revision>`), to its
    blobs. Raises CheckpointError naming `where` and the name; a file that is missing is for the caller to find out.
    """
    path = directory / file_name(name, where)
    real, home = path.resolve(), directory.resolve()
    roots = [home]
    if home.parent.name == "snapshots":
        roots.append(home.parents[1] / "blobs")
    if not any(real.is_relative_to(root) for root in roots):
        raise CheckpointError(f"{where}: {name} is a link to {printable(str(real))}, outside of {home}")
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{where}: {name} is not a regular file")
    return path

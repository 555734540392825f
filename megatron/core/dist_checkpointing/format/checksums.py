"""Hashes of all blocks of all files, so that any range can be verified when it is read.

`checksums.bin` is stored next to the files of a checkpoint; other readers ignore it. It consists of
a header line with algorithm and block size, a record for each file, and the xxh3_64 of everything
before. A record is: uint16 length of the name, name, uint64 size in bytes, 8 bytes xxh3_64 of each
block in order (the last block may be short), all little endian. Each rank encodes the records of
its files, and a save does not parse them.

Older checkpoints have `checksums.json` instead: a line of JSON `{"algorithm": "xxh3_64",
"block_size": 1048576, "files": {name: {"size": bytes, "blocks": hex}}}` and its xxh3_64.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import xxhash

from megatron.core.safe_files import schema
from megatron.core.safe_files.errors import CheckpointError
from megatron.core.safe_files.reading import open_file
from megatron.core.wings import resolve

CHECKSUMS = "checksums.bin"
OLD_CHECKSUMS = "checksums.json"
BLOCK_SIZE = 1 << 20
DIGEST_SIZE = 8
ALGORITHM = "xxh3_64"
_HEADER = f"{ALGORITHM} {BLOCK_SIZE}\n".encode()
_NAME_LENGTH = struct.Struct("<H")
_SIZE = struct.Struct("<Q")
_DECODE_JSON = "megatron.core.dist_checkpointing.format.old_checksums:decode_json"


class FileChecksums(NamedTuple):
    """Size of a file and the digests of its blocks, `DIGEST_SIZE` bytes each."""

    size: int
    blocks: bytes


def hash_blocks(data: bytes | memoryview) -> bytes:
    """Return the digests of consecutive blocks of `data`."""
    view = memoryview(data)
    digests = []
    for start in range(0, len(view), BLOCK_SIZE):
        digests.append(xxhash.xxh3_64_digest(view[start : start + BLOCK_SIZE]))
    return b"".join(digests)


def split_at_blocks(start: int, stop: int, max_blocks: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of the pieces of a range: its whole blocks, at most `max_blocks` at
    once, and the parts of blocks at its ends.
    """
    while start < stop:
        num_blocks = 0
        if start % BLOCK_SIZE == 0:
            num_blocks = min(max_blocks, (stop - start) // BLOCK_SIZE)
        if num_blocks > 0:
            end = start + num_blocks * BLOCK_SIZE
        else:
            end = min(stop, (start // BLOCK_SIZE + 1) * BLOCK_SIZE)
        yield start, end
        start = end


def count_blocks(size: int) -> int:
    """Return the number of blocks of `size` bytes; the last one may be short."""
    return -(-size // BLOCK_SIZE)


def get_digests_size(size: int) -> int:
    """Return the bytes of the digests of a file of `size` bytes."""
    return count_blocks(size) * DIGEST_SIZE


def compute_checksums(*buffers: bytes) -> FileChecksums:
    """Compute the checksums of a file that consists of `buffers`."""
    digests = [hash_blocks(block) for block in split_into_blocks(buffers)]
    size = sum(map(len, buffers))
    return FileChecksums(size, b"".join(digests))


def split_into_blocks(buffers: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the same bytes cut into blocks.

    Large parts are copied block by block, because a copy holds the interpreter's lock.
    """
    gathered: list[bytes] = []  # the beginning of the next block
    size = 0  # bytes in `gathered`
    for buffer in buffers:
        # Complete as many blocks as possible with this buffer.
        start = 0
        while size + len(buffer) - start >= BLOCK_SIZE:
            end = start + BLOCK_SIZE - size
            gathered.append(buffer[start:end])
            yield b"".join(gathered)
            gathered = []
            size = 0
            start = end
        # Keep the rest.
        gathered.append(buffer[start:])
        size += len(buffer) - start
    if size:
        yield b"".join(gathered)


def encode_checksum_records(files: Mapping[str, FileChecksums]) -> bytes:
    """Encode the records of files."""
    fields = []
    for name, file in files.items():
        encoded = name.encode()
        fields.append(_NAME_LENGTH.pack(len(encoded)))
        fields.append(encoded)
        fields.append(_SIZE.pack(file.size))
        fields.append(file.blocks)
    return b"".join(fields)


def seal_checksums(*records: bytes) -> tuple[bytes, ...]:
    """Return the content of `checksums.bin` in parts.

    The content is large at scale, and joining it would hold the interpreter's lock.
    """
    digest = xxhash.xxh3_64(_HEADER)
    for record in records:
        digest.update(record)
    return (_HEADER, *records, digest.digest())


def decode_checksums(data: bytes, location: str) -> dict[str, FileChecksums]:
    """Decode either form, by file name. Raises CheckpointError if any byte has changed."""
    if data.startswith(b"{"):
        old_files: dict[str, FileChecksums] = resolve(_DECODE_JSON)(data, location)
        return old_files

    # The hash of the whole content, and the header.
    content = memoryview(data)[:-DIGEST_SIZE]
    if data[-DIGEST_SIZE:] != xxhash.xxh3_64_digest(content):
        raise CheckpointError(f"{location}: damaged (it does not have the checksum it ends with)")
    if not data.startswith(_HEADER):
        raise CheckpointError(f"{location}: checksums of an unknown kind: {data[:40]!r}")

    # The records.
    files: dict[str, FileChecksums] = {}
    position = len(_HEADER)
    try:
        while position < len(content):
            # Name.
            (length,) = _NAME_LENGTH.unpack_from(content, position)
            position += _NAME_LENGTH.size
            encoded = bytes(content[position : position + length])
            name = schema.file_name(encoded.decode(), location)
            position += length
            # Size.
            (size,) = _SIZE.unpack_from(content, position)
            position += _SIZE.size
            # Digests.
            end = position + get_digests_size(size)
            if end > len(content):
                raise ValueError(f"the blocks of {name} are cut off")
            files[name] = FileChecksums(size, bytes(content[position:end]))
            position = end
    except (struct.error, ValueError) as error:
        raise CheckpointError(f"{location}: damaged: {error}") from error
    return files


def find_checksums(directory: Path) -> Path | None:
    """Return the file with the checksums, or None if another program wrote the checkpoint."""
    for name in (CHECKSUMS, OLD_CHECKSUMS):
        if (directory / name).exists():
            return directory / name
    return None


def read_checksums(directory: Path) -> dict[str, FileChecksums]:
    """Read the checksums, by file name.

    Raises CheckpointError if there are none, because another program wrote the checkpoint.
    """
    path = find_checksums(directory)
    if path is None:
        raise CheckpointError(
            f"{directory / CHECKSUMS}: missing: the checkpoint was written without checksums, "
            "so it cannot be verified"
        )
    with open_file(path) as file:
        content = file.read_whole()
    return decode_checksums(content, str(path))

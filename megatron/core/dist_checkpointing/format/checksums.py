"""A hash for every block of every file, so that any range that is read can be checked.

`checksums.json` stands beside the checkpoint's files; other readers ignore it. Two lines: a JSON object
`{"algorithm": "xxh3_64", "block_size": 1048576, "files": {name: {"size": bytes, "blocks": hex}}}` with 16 hex digits
for each block of the file in order (the last block may be short), and the xxh3_64 of the first line.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import xxhash

from megatron.core.dist_checkpointing.errors import CheckpointError

BLOCK_SIZE = 1 << 20
DIGEST_SIZE = 8
_ALGORITHM = "xxh3_64"


class FileChecksums(NamedTuple):
    """Length of a file and the digests of its blocks, `DIGEST_SIZE` bytes each."""

    size: int
    blocks: bytes


def hash_blocks(data: bytes | memoryview) -> bytes:
    """The digests of consecutive blocks of `data`."""
    view = memoryview(data)
    return b"".join(xxhash.xxh3_64_digest(view[i : i + BLOCK_SIZE]) for i in range(0, len(view), BLOCK_SIZE))


def checksums_of(content: bytes) -> FileChecksums:
    return FileChecksums(len(content), hash_blocks(content))


def encode_checksums(files: dict[str, FileChecksums]) -> bytes:
    entries = {name: {"size": file.size, "blocks": file.blocks.hex()} for name, file in sorted(files.items())}
    body = {"algorithm": _ALGORITHM, "block_size": BLOCK_SIZE, "files": entries}
    line = json.dumps(body, separators=(",", ":")).encode()
    return line + b"\n" + xxhash.xxh3_64_hexdigest(line).encode() + b"\n"


def decode_checksums(data: bytes, where: str) -> dict[str, FileChecksums]:
    """Raises CheckpointError if any byte of it changed."""
    line, _, digest = data.partition(b"\n")
    if digest != xxhash.xxh3_64_hexdigest(line).encode() + b"\n":
        raise CheckpointError(f"{where}: damaged (it does not have the checksum it ends with)")
    body = json.loads(line)
    if body["algorithm"] != _ALGORITHM or body["block_size"] != BLOCK_SIZE:
        raise CheckpointError(f"{where}: checksums of kind {body['algorithm']} over {body['block_size']} bytes")
    return {name: FileChecksums(file["size"], bytes.fromhex(file["blocks"])) for name, file in body["files"].items()}

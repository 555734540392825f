"""The checksums of older checkpoints, in JSON."""

from __future__ import annotations

import xxhash

from megatron.core.dist_checkpointing.format.checksums import (
    ALGORITHM,
    BLOCK_SIZE,
    FileChecksums,
    get_digests_size,
)
from megatron.core.safe_files import schema
from megatron.core.safe_files.errors import CheckpointError
from megatron.core.safe_files.reading import parse_json

_FILE = schema.record({"size": schema.COUNT, "blocks": schema.text(1 << 32)})
_FORM = schema.record(
    {
        "algorithm": schema.one_of(ALGORITHM),
        "block_size": schema.one_of(BLOCK_SIZE),
        "files": schema.mapping(_FILE, schema.file_name),
    }
)


def decode_json(data: bytes, location: str) -> dict[str, FileChecksums]:
    """Decode the form of older checkpoints: a line of JSON, and its hash."""
    encoded_body, _, digest = data.partition(b"\n")
    if digest != xxhash.xxh3_64_hexdigest(encoded_body).encode() + b"\n":
        raise CheckpointError(f"{location}: damaged (it does not have the checksum it ends with)")
    body = _FORM(parse_json(encoded_body, location), location)
    files: dict[str, FileChecksums] = {}
    # The hashes of a file's blocks are stored as hexadecimal digits.
    for name, file in body["files"].items():
        size = file["size"]
        try:
            digests = bytes.fromhex(file["blocks"])
        except ValueError as error:
            raise CheckpointError(
                f"{location}: {name}: the blocks are not hexadecimal digits"
            ) from error
        if len(digests) != get_digests_size(size):
            raise CheckpointError(
                f"{location}: {name}: {len(digests)} bytes of hashes for {size} bytes"
            )
        files[name] = FileChecksums(size, digests)
    return files

"""A checkpoint in object storage: its objects have their final names at once, and `metadata.json` makes them one.

The order: `.claim`; data files, whose names carry the id of the save, so that no two saves share one; `checksums.bin`,
`common.pt`, `.metadata`; and last `metadata.json` with size and xxh3 of every file, by one conditional request. Readers
trust that alone. `object_generation` says why an old owner cannot commit.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from megatron.core.dist_checkpointing import files
from megatron.core.dist_checkpointing.format.checksums import (
    CHECKSUMS,
    FileChecksums,
    checksum_records,
    checksums_of,
    decode_checksums,
    seal_checksums,
)
from megatron.core.dist_checkpointing.format.schema import CheckpointError
from megatron.core.dist_checkpointing.generation import Generation, SupersededError
from megatron.core.dist_checkpointing.object_generation import CLAIM, put_checked, remove_objects, revoke
from megatron.core.dist_checkpointing.saving.commit import PendingCheckpoint, Rewrite
from megatron.core.dist_checkpointing.saving.shard_file import Progress, Shard, ShardUpload
from megatron.core.object_storage import ConflictError, ObjectPath


def pending_checkpoint(directory: Path, save_id: str, generation: Generation | None) -> PendingCheckpoint:
    """A checkpoint that will be `directory`, wherever that is."""
    if isinstance(directory, ObjectPath):
        return ObjectCheckpoint(directory, save_id, generation)
    return PendingCheckpoint(directory, save_id, generation)


class ObjectCheckpoint(PendingCheckpoint):
    """Without a generation (tools), the claim alone decides: a directory that anything lies in is refused."""

    directory: ObjectPath

    def __init__(self, directory: ObjectPath, save_id: str, generation: Generation | None = None) -> None:
        super().__init__(directory, save_id, generation)
        self._claimed = self._committing = False
        self._revocation: str | None = None  # version of the note that the commit replaces

    def begin(self, nbytes: int) -> None:
        store, claim = self.directory.store, self.directory / CLAIM
        since = datetime.now(timezone.utc).isoformat(timespec="seconds")
        owner = {"save_id": self.save_id, "host": socket.gethostname(), "pid": os.getpid(), "since": since}
        content = json.dumps(owner).encode()
        if self.generation is not None:
            put_checked(self.directory, CLAIM, content, self.generation.check)
            if self.directory.store.version((self.directory / files.METADATA_JSON).key) is not None:
                # An earlier save, whole or not: of a branch that was left, or of a start that is gone.
                self._revocation = revoke(self.directory, self.generation.check)
        else:
            try:
                store.create(claim.key, content)
            except ConflictError as error:
                raise CheckpointError(self._refusal(claim)) from error
        self._claimed = True

    def _refusal(self, claim: Path) -> str:
        if files.read_commit(self.directory) is not None:
            return f"{self.directory} holds a checkpoint already: give another place, or delete that"
        owner = claim.read_text()[:300]
        return f"{self.directory} is being written by {owner}. If that is gone, delete {claim} and try again"

    def name_of(self, name: str) -> str:
        stem, dot, ending = name.rpartition(".")
        return f"{stem}-{self.save_id}{dot}{ending}"

    def open_shard(self, name: str, size: int) -> Shard:
        return ShardUpload(self.directory / name, size)

    def write_file(self, name: str, *parts: bytes) -> None:
        content = b"".join(parts)
        if self.generation is None or name.endswith(".distcp"):
            self.directory.store.create((self.directory / name).key, content)
        else:  # an old owner that wakes up must not change what its successor has committed
            put_checked(self.directory, name, content, self.generation.check)

    def finish(self, sums: Mapping[str, FileChecksums]) -> None:
        """Objects are durable when their upload has ended."""

    def commit(
        self,
        checksums: Iterable[bytes],
        metadata: Sequence[bytes],
        common: bytes,
        beside: Mapping[str, bytes],
        rewrite: Rewrite | None = None,
        progress: Progress = lambda nbytes: None,
    ) -> None:
        if rewrite is not None:
            raise CheckpointError(f"{self.directory}: object storage holds torch_dist checkpoints alone")
        contents: dict[str, Sequence[bytes]] = {files.COMMON: [common], files.METADATA: metadata}
        contents |= {name: [content] for name, content in beside.items()}
        ours = checksum_records({name: checksums_of(*parts) for name, parts in contents.items()})
        contents[CHECKSUMS] = seal_checksums(*checksums, ours)
        for name, parts in contents.items():
            self.write_file(name, *parts)
            progress(0)
        every = decode_checksums(b"".join(contents[CHECKSUMS]), CHECKSUMS)
        every[CHECKSUMS] = checksums_of(*contents[CHECKSUMS])
        content = files.encode_commit(self.save_id, every)
        if self.generation is not None:
            self.generation.check()
        key = (self.directory / files.METADATA_JSON).key
        self._committing = True
        if self._revocation is None:
            self.directory.store.create(key, content)
        else:
            self.directory.store.replace(key, content, self._revocation)

    def abandon(self) -> None:
        with contextlib.suppress(OSError, SupersededError):  # what stays is removed by the next start
            if not self._claimed:
                return
            if self._committing and self.generation is not None:
                revoke(self.directory, self.generation.check)  # the commit that failed may still arrive
            elif self.generation is not None:
                mine = [key for key in self.directory.store.sizes(self.directory.key) if f"-{self.save_id}." in key]
                self.directory.store.delete(mine)
            else:
                remove_objects(self.directory)

"""Checkpoints in object storage: the generations and saves of a file system, without renames.

The objects of a checkpoint have their final names at once. They are written in this order:
`.claim`; data files, whose names contain the id of the save, so that no two saves share one;
`checksums.bin`, `common.pt`, `.metadata`; and last `metadata.json` with size and xxh3 of every
file. Readers trust only that file.

It is written by one conditional request: before, `metadata.json` either does not exist or is a note
that an earlier save was revoked. A launch creates the object `.generation-0000007-<token>`, and
then revokes every save that has claimed its directory (`iter_*/.claim`) and is not committed: the
note takes the name that its commit needs. The owner claims first, then writes, then checks that it
is still the owner, and then commits. So an old owner that has claimed before the takeover finds the
note, and one that claims after it finds the new generation. No clock is involved, however long the
old owner was suspended. Objects with names that another save may use, too, are written in three
steps: read the version, check the generation, replace that version.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import xxhash

from megatron.core.dist_checkpointing.background import map_in_threads
from megatron.core.dist_checkpointing.files import (
    BACKEND,
    CLAIM,
    COMMON,
    METADATA,
    METADATA_JSON,
    read_commit,
)
from megatron.core.dist_checkpointing.format.checksums import (
    CHECKSUMS,
    FileChecksums,
    compute_checksums,
    decode_checksums,
    encode_checksum_records,
    seal_checksums,
)
from megatron.core.dist_checkpointing.ownership.fencing import (
    Generation,
    SupersededError,
    find_newest,
    generations_in,
)
from megatron.core.dist_checkpointing.saving.commit import (
    PendingCheckpoint,
    Progress,
    Rewrite,
    no_progress,
)
from megatron.core.dist_checkpointing.saving.shard import Shard
from megatron.core.object_files import OrderedUpload
from megatron.core.object_path import ObjectPath
from megatron.core.object_storage import ConflictError
from megatron.core.safe_files.errors import CheckpointError
from megatron.core.safe_files.reading import read_json


@dataclass(frozen=True)
class ObjectGeneration(Generation):
    """The right of one launch to change the directory of checkpoints `root` in object storage.

    The generation is one object. It exists as soon as it is created, so that a launch which lists
    the generations afterwards sees all that were created before.
    """

    root: ObjectPath

    def _revoke_older(self) -> None:
        # A former owner may still be writing: revoke its claims, so that it cannot commit.
        def revoke_claim(directory: ObjectPath) -> None:
            if (directory / CLAIM).is_file():
                revoke(directory, self.check, committed=False)

        map_in_threads(revoke_claim, self.root.glob("iter_*"))
        # The newest generation decides: the older ones have no effect any more.
        older = [generation for generation in generations_in(self.root) if generation < self.id]
        self.root.store.delete([f"{self.root.key}/{generation.name}" for generation in older])

    def is_current(self) -> bool:
        """Return whether no other launch has taken over."""
        return find_newest(self.root) == self.id

    def check(self, cause: BaseException | None = None) -> None:
        """Raise SupersededError if another launch has taken over."""
        generation_ids = generations_in(self.root)
        # Without any generation the prefix was emptied, not taken over: `restore` creates ours
        # again.
        if not generation_ids or generation_ids[-1] == self.id:
            return
        # The next owner deletes this generation only after its own claim.
        if self.id in generation_ids:
            successor = generation_ids[-1]
        else:
            other_generation = self._find_successor()
            if other_generation is None:
                return
            successor = other_generation
        raise self.superseded_by(successor) from cause

    def publish(self, name: str, content: bytes) -> None:
        """Replace the object `name` as its owner.

        The tracker, for example, is a hint for other programs; ours look for the newest commit.
        """
        put_checked(self.root, name, content, self.check)

    def stage_tracker(self, iteration: int | str) -> None:
        """Return at once: object storage is never full."""

    def put_aside(self, directories: list[Path]) -> list[Path]:
        """Revoke checkpoints, so that they stop being checkpoints; `remove` deletes the rest."""
        aside: list[Path] = []
        for directory in directories:
            assert isinstance(directory, ObjectPath)
            revoke(directory, self.check)
            aside.append(directory)
        return aside

    def remove(self, aside: Path) -> None:
        """Delete the objects of a revoked checkpoint."""
        with contextlib.suppress(OSError, SupersededError):
            self.check()
            remove_objects(aside)

    def _claim(self) -> None:
        self.root.store.create(self._key, json.dumps(self.owner).encode())

    def _withdraw(self) -> None:
        self.root.store.delete([self._key])

    @property
    def _key(self) -> str:
        return f"{self.root.key}/{self.id.name}"


class ShardUpload(Shard):
    """A multipart upload. The number of writer threads bounds the pieces that wait."""

    def __init__(self, path: ObjectPath, size: int) -> None:
        super().__init__(size)
        self._upload = OrderedUpload(path, size)

    def _write(self, offset: int, view: memoryview, length: int) -> None:
        self._upload.write(offset, view[:length])

    def _close(self, durable: bool) -> None:
        if durable:
            self._upload.close()


class ObjectCheckpoint(PendingCheckpoint):
    """A checkpoint that is being written to object storage.

    Without a generation (tools), only the claim decides: a directory that contains a claim is an
    error.
    """

    directory: ObjectPath

    def __init__(
        self, directory: ObjectPath, save_id: str, generation: Generation | None = None
    ) -> None:
        super().__init__(directory, save_id, generation, directory)
        self._claimed = False
        self._committing = False
        self._revocation: str | None = None  # version of the note that the commit replaces

    def begin(self, nbytes: int) -> None:
        store = self.directory.store
        claim = self.directory / CLAIM
        since = datetime.now(timezone.utc).isoformat(timespec="seconds")
        owner = {
            "save_id": self.save_id,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": since,
        }
        content = json.dumps(owner).encode()
        # With an owner the claim of an earlier save may be replaced; without one it is an error.
        if self.generation is not None:
            self.generation.restore()
            put_checked(self.directory, CLAIM, content, self.generation.check)
            if self.directory.store.version((self.directory / METADATA_JSON).key) is not None:
                # An earlier save, complete or not, of another branch or of an earlier launch.
                self._revocation = revoke(self.directory, self.generation.check)
        else:
            try:
                store.create(claim.key, content)
            except ConflictError as error:
                raise CheckpointError(self._explain_conflict(claim)) from error
        self._claimed = True

    def _explain_conflict(self, claim: Path) -> str:
        if read_commit(self.directory) is not None:
            return f"{self.directory} holds a checkpoint already: give another path, or delete that"
        owner = claim.read_text()[:300]
        return (
            f"{self.directory} is being written by {owner}. If that program has ended, delete "
            f"{claim} and try again"
        )

    def name_of(self, name: str) -> str:
        stem, dot, ending = name.rpartition(".")
        return f"{stem}-{self.save_id}{dot}{ending}"

    def open_shard(self, name: str, size: int) -> Shard:
        return ShardUpload(self.directory / name, size)

    def write_file(self, name: str, *buffers: bytes) -> None:
        content = b"".join(buffers)
        if self.generation is None or name.endswith(".distcp"):
            self.directory.store.create((self.directory / name).key, content)
        else:  # an old owner that wakes up must not change a checkpoint of its successor
            put_checked(self.directory, name, content, self.generation.check)

    def finish(self, sums: Mapping[str, FileChecksums]) -> None:
        """Return at once: objects are durable when their upload has ended."""

    def commit(
        self,
        checksums: Iterable[bytes],
        metadata: Sequence[bytes],
        common: bytes,
        extra_files: Mapping[str, bytes],
        rewrite: Rewrite | None = None,
        progress: Progress = no_progress,
    ) -> None:
        if rewrite is not None:
            raise CheckpointError(f"{self.directory}: object storage is for torch_dist checkpoints")
        # 1. The small files, and the checksums of all files but the commit.
        contents: dict[str, Sequence[bytes]] = {COMMON: [common], METADATA: metadata}
        for name, content in extra_files.items():
            if "/" in name:  # checksums are those of files in the directory itself
                self.write_file(name, content)
            else:
                contents[name] = [content]
        own_records = encode_checksum_records(
            {name: compute_checksums(*buffers) for name, buffers in contents.items()}
        )
        contents[CHECKSUMS] = seal_checksums(*checksums, own_records)
        for name, buffers in contents.items():
            self.write_file(name, *buffers)
            progress(0)
        # 2. The commit: one conditional request, which lists all files.
        every = decode_checksums(b"".join(contents[CHECKSUMS]), CHECKSUMS)
        every[CHECKSUMS] = compute_checksums(*contents[CHECKSUMS])
        content = encode_commit(self.save_id, every)
        if self.generation is not None:
            self.generation.check()
        key = (self.directory / METADATA_JSON).key
        # The condition fails if another save has committed or revoked in the meantime.
        self._committing = True
        if self._revocation is None:
            self.directory.store.create(key, content)
        else:
            self.directory.store.replace(key, content, self._revocation)

    def is_committed(self) -> bool:
        metadata = self.directory / METADATA_JSON
        return metadata.is_file() and read_json(metadata).get("save_id") == self.save_id

    def abandon(self) -> None:
        # The next launch removes the objects that are left after an error.
        with contextlib.suppress(OSError, SupersededError):
            if not self._claimed:
                return
            if self.generation is None:
                remove_objects(self.directory)
            elif self._committing:
                # The request that seems to have failed may still arrive.
                revoke(self.directory, self.generation.check)
            else:
                # Only objects with the id of this save: others may belong to a newer one.
                keys = self.directory.store.sizes(self.directory.key)
                own_keys = [key for key in keys if f"-{self.save_id}." in key]
                self.directory.store.delete(own_keys)


def put_checked(directory: ObjectPath, name: str, content: bytes, check: Callable[[], None]) -> str:
    """Write an object that other saves have written, or may write; returns its version.

    `check` raises SupersededError if another launch has taken over. After a takeover that follows
    the check, the object has another version, and the request fails.
    """
    store = directory.store
    key = (directory / name).key
    while True:
        e_tag = store.version(key)
        check()
        # Try again if another process has just written or removed it.
        with contextlib.suppress(ConflictError, FileNotFoundError):
            if e_tag is None:
                return store.create(key, content)
            return store.replace(key, content, e_tag)


def revoke(directory: ObjectPath, check: Callable[[], None], committed: bool = True) -> str | None:
    """Prevent the save of `directory` in progress from committing, and delete its data.

    With `committed`, a committed checkpoint is revoked, too; without it, None is returned for one.
    Returns the version of the note in `metadata.json`, which the next commit replaces.
    """
    store = directory.store
    key = (directory / METADATA_JSON).key
    # A random content gives every note another version.
    note = json.dumps({"revoked": secrets.token_hex(8)}).encode()
    while True:
        e_tag = store.version(key)
        if not committed and read_commit(directory) is not None:
            return None
        data_files = [name for name in store.sizes(directory.key) if name.endswith(".distcp")]
        check()
        with contextlib.suppress(ConflictError, FileNotFoundError):
            version = store.create(key, note) if e_tag is None else store.replace(key, note, e_tag)
            store.delete(data_files)
            return version


def remove_objects(directory: Path) -> None:
    """Delete all objects of `directory`, the claim last."""
    assert isinstance(directory, ObjectPath)
    keys = list(directory.store.sizes(directory.key))
    claims = [key for key in keys if key.endswith(f"/{CLAIM}")]
    # Another save can begin once the claim is deleted.
    directory.store.delete([key for key in keys if key not in claims])
    directory.store.delete(claims)


def encode_commit(save_id: str, sums: Mapping[str, tuple[int, bytes]]) -> bytes:
    """Return the content of `metadata.json` for a checkpoint in object storage.

    It contains the size of each file and the xxh3_64 of its blocks' hashes. `sums` are
    `FileChecksums` by name.
    """
    listed = {
        name: (size, xxhash.xxh3_64_hexdigest(blocks)) for name, (size, blocks) in sums.items()
    }
    return json.dumps({**BACKEND, "save_id": save_id, "files": listed}).encode()

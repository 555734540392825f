"""From many durable shards to one checkpoint: a directory that grows under another name and gets
its own by one rename.

All ranks write their shards to it; rank 0 makes it, adds the small files that belong to all, and
renames it. Writes are large and go past the page cache, which costs a tenth of the CPU time of
buffered ones and leaves the page cache to the data loader.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from megatron.core.dist_checkpointing import files
from megatron.core.dist_checkpointing.background import PAGE, Slot
from megatron.core.dist_checkpointing.format.checksums import (
    BLOCK_SIZE,
    CHECKSUMS,
    DIGEST_SIZE,
    FileChecksums,
    compute_checksums,
    encode_checksum_records,
    hash_blocks,
    seal_checksums,
)
from megatron.core.dist_checkpointing.generation import Generation, SupersededError
from megatron.core.dist_checkpointing.saving.save_barrier import Outcome
from megatron.core.durable_files import (
    check_free_space,
    discard,
    fsync_directory,
    naming,
    put_in_place,
    write_flushed,
)

_DIRECT = os.O_DIRECT if hasattr(os, "O_DIRECT") else 0
_MODE = 0o666  # less the umask, as for every file that `open` creates

Progress = Callable[[int], None]  # called now and then with the number of bytes just written

Rewrite = Callable[[Path, Progress], None]
"""Puts other files in the place of a checkpoint's, durably, in the directory where it grows.

It calls its second argument now and then, with the bytes just written, so that the other ranks know
that it works.
"""


class Shard:
    """A data file of known size, written in aligned pieces by any thread, with a hash of every
    block on the way.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._digests = bytearray(-(-size // BLOCK_SIZE) * DIGEST_SIZE)

    def write(self, offset: int, slot: Slot, length: int) -> None:
        """Write the first `length` bytes of `slot`, which may be used again afterwards."""
        digests = hash_blocks(slot.view[:length])
        first = offset // BLOCK_SIZE * DIGEST_SIZE
        self._digests[first : first + len(digests)] = digests
        self._write(offset, slot.view, length)

    def close(self, durable: bool) -> FileChecksums:
        """Make it durable, or give it up."""
        self._close(durable)
        return FileChecksums(self._size, bytes(self._digests))

    def _write(self, offset: int, view: memoryview, length: int) -> None:
        raise NotImplementedError

    def _close(self, durable: bool) -> None:
        raise NotImplementedError


class ShardFile(Shard):
    """In a file system; past its end, the rest of the last page of a slot is zeroed."""

    def __init__(self, path: Path, size: int) -> None:
        super().__init__(size)
        self._path = path
        self._direct = bool(_DIRECT)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            self._descriptor = os.open(path, flags | _DIRECT, _MODE)
        except OSError as error:
            if error.errno != errno.EINVAL or not _DIRECT:
                raise
            self._direct = False  # not every file system has direct writes
            self._descriptor = os.open(path, flags, _MODE)

    def _write(self, offset: int, view: memoryview, length: int) -> None:
        padded = min(len(view), -(-length // PAGE) * PAGE) if self._direct else length
        view[length:padded] = bytes(padded - length)  # cut off by `close`
        position = 0
        while position < padded:
            direct = self._direct
            try:
                with naming(self._path):
                    position += os.pwrite(
                        self._descriptor, view[position:padded], offset + position
                    )
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                self._leave_direct()
            else:
                if position % PAGE and position < padded:
                    self._leave_direct()  # a short write left us unaligned

    def _leave_direct(self) -> None:
        """Some file systems accept direct files and refuse direct writes: go on with buffered ones."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
        self._direct = False

    def _close(self, durable: bool) -> None:
        try:
            if durable:
                with naming(self._path):
                    os.ftruncate(self._descriptor, self._size)
                    os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


class PendingCheckpoint:
    """A checkpoint that grows under another name and will be `directory`.

    Sequence of calls: `begin` on rank 0; `open_shard`, `write_file` and `finish` on all ranks;
    then, on rank 0, `commit`, or `abandon` as often as need be; then all ranks `end`. `warnings`
    are what the save has not achieved on this rank although it can be committed.
    """

    def __init__(
        self,
        directory: Path,
        save_id: str,
        generation: Generation | None = None,
        pending: Path | None = None,
    ) -> None:
        """It grows as `pending`: beside `directory`, or inside the `generation` that owns the
        directory of checkpoints.
        """
        self.directory = directory
        self.save_id = save_id
        self.generation = generation
        if pending is None and generation is not None:
            pending = generation.directory / f"saving-{directory.name}-{save_id}"
        self.pending = pending or files.pending_directory(directory, save_id)
        self.warnings: list[str] = []

    def begin(self, nbytes: int) -> None:
        """Before any rank writes: make the directory. Raises OSError if `nbytes` do not fit."""
        if self.generation is None:
            self.pending.parent.mkdir(parents=True, exist_ok=True)
        else:
            self.generation.restore()
        self.pending.mkdir()
        check_free_space(self.pending, nbytes)

    def name_of(self, name: str) -> str:
        """The name there of the data file that the plan calls `name`."""
        return name

    def open_shard(self, name: str, size: int) -> Shard:
        return ShardFile(self.pending / name, size)

    def write_file(self, name: str, *parts: bytes) -> None:
        """A small file as a whole."""
        write_flushed(self.pending / name, *parts)

    def finish(self, sums: Mapping[str, FileChecksums]) -> None:
        """After the last file of this rank, which have these `sums`: make the names durable."""
        if sums:
            fsync_directory(self.pending)

    def commit(
        self,
        checksums: Iterable[bytes],
        metadata: Sequence[bytes],
        common: bytes,
        extra_files: Mapping[str, bytes],
        rewrite: Rewrite | None = None,
        progress: Progress = lambda nbytes: None,
    ) -> None:
        """Complete the checkpoint and give it its name.

        `metadata` is the content of `.metadata`, in parts; `checksums` are the records of all ranks; `extra_files` are
        further small files, which a `rewrite` does not touch.
        """
        backend = json.dumps(files.BACKEND).encode()
        contents = {
            files.COMMON: [common],
            files.METADATA: metadata,
            files.METADATA_JSON: [backend],
        }
        ours = encode_checksum_records(
            {name: compute_checksums(*parts) for name, parts in contents.items()}
        )
        self.write_file(CHECKSUMS, *seal_checksums(*checksums, ours))
        for name, parts in contents.items():
            self.write_file(name, *parts)
        if rewrite is not None:
            rewrite(self.pending, progress)
        for name, content in extra_files.items():
            self.write_file(name, content)
        progress(0)  # the last chance to learn that other ranks have given this save up
        self._publish()

    def _publish(self) -> None:
        """All files are there."""
        fsync_directory(self.pending)
        put_in_place(self.pending, self.directory)

    def is_committed(self) -> bool:
        """Return whether this save has committed the checkpoint, for a rank without news of it."""
        return not self.pending.exists() and files.is_complete(self.directory)

    def explain(self, failure: BaseException) -> BaseException:
        """The reason behind `failure`: SupersededError if another start has taken over the
        directory.
        """
        try:
            if self.generation is not None:
                self.generation.check(failure)
        except SupersededError as superseded:
            return superseded
        except OSError:  # the storage that failed does not answer this question either
            pass
        return failure

    def abandon(self) -> None:
        """Remove everything, as far as possible."""
        discard(self.pending)

    def end(self, outcome: Outcome) -> None:
        """On every rank, when all know how the save has ended."""

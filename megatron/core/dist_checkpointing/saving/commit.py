"""From durable data files to one checkpoint: a directory that grows under another name.

All ranks write their data files to it. Rank 0 creates it, adds the small files that belong to all
ranks, and gives it its name by one rename.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from megatron.core.dist_checkpointing import files
from megatron.core.dist_checkpointing.format.checksums import (
    CHECKSUMS,
    FileChecksums,
    compute_checksums,
    encode_checksum_records,
    seal_checksums,
)
from megatron.core.dist_checkpointing.ownership.fencing import Generation, SupersededError
from megatron.core.dist_checkpointing.ownership.lineage import iteration_in_name
from megatron.core.dist_checkpointing.saving.save_barrier import Outcome
from megatron.core.dist_checkpointing.saving.shard import Shard, ShardFile
from megatron.core.durable_files import (
    DISCARDED,
    check_free_space,
    describe_shortage,
    discard,
    fsync_directory,
    put_in_place,
    remove,
    write_flushed,
)
from megatron.core.object_path import ObjectPath
from megatron.core.safe_files.errors import CheckpointError
from megatron.core.wings import resolve

_OBJECT_CHECKPOINT = "megatron.core.dist_checkpointing.saving.object_commit:ObjectCheckpoint"

Progress = Callable[[int], None]
"""Callback that receives the number of bytes written since the last call.

It raises CheckpointError if the save has failed on another rank.
"""


def no_progress(nbytes: int) -> None:
    """Ignore the progress: the default `Progress`."""


Rewrite = Callable[[Path, Progress], None]
"""Durably replaces the files of a checkpoint in the directory where it grows."""


class PendingCheckpoint:
    """A checkpoint that grows under another name before it becomes `directory`.

    Sequence of calls: `begin` on rank 0; `open_shard`, `write_file` and `finish` on all ranks; then
    `commit` on rank 0, or `abandon`, which may be repeated; then `end` on all ranks. `warnings`
    describe parts that are missing on this rank without preventing the commit.
    """

    def __init__(
        self,
        directory: Path,
        save_id: str,
        generation: Generation | None = None,
        pending: Path | None = None,
    ) -> None:
        """Let it grow as `pending`, by default next to `directory`.

        With a `generation` it grows inside the directory of that.
        """
        self.directory = directory
        self.save_id = save_id
        self.generation = generation
        if pending is None and generation is not None:
            pending = generation.directory / f"saving-{directory.name}-{save_id}"
        self.pending = pending or files.pending_directory(directory, save_id)
        self.warnings: list[str] = []

    def begin(self, nbytes: int) -> None:
        """Create the directory, before any rank writes. Raises OSError if `nbytes` do not fit."""
        if self.generation is None:
            self.pending.parent.mkdir(parents=True, exist_ok=True)
        else:
            self.generation.restore()
            # Failed saves whose files could not be removed at the time still occupy the disk.
            for path in self.generation.directory.glob(f"{DISCARDED}*"):
                with contextlib.suppress(OSError):
                    remove(path)
        # Fails if the name exists, so that two saves never write to the same directory.
        self.pending.mkdir()
        check_free_space(self.pending, nbytes)

    def name_of(self, name: str) -> str:
        """Return the final name of the data file that the plan calls `name`."""
        return name

    def open_shard(self, name: str, size: int) -> Shard:
        return ShardFile(self.pending / name, size)

    def write_file(self, name: str, *buffers: bytes) -> None:
        """Write a small file at once, possibly in a folder of its own."""
        path = self.pending / name
        if path.parent == self.pending:
            write_flushed(path, *buffers)
            return
        # `_publish` makes the name of the folder itself durable.
        path.parent.mkdir(exist_ok=True)
        write_flushed(path, *buffers)
        fsync_directory(path.parent)

    def finish(self, sums: Mapping[str, FileChecksums]) -> None:
        """Return at once: the files of this rank are durable; `sums` are their checksums.

        Rank 0 makes the names of all ranks durable in `_publish`, with one flush of the directory.
        The names of a shared directory are on the server, or in the kernel that all ranks share:
        creating a file through NFS is synchronous, and a flush by any client of Lustre, GPFS or
        CephFS covers what the server has accepted before. A flush per rank would be as many
        commits of the server's journal.
        """

    def commit(
        self,
        checksums: Iterable[bytes],
        metadata: Sequence[bytes],
        common: bytes,
        extra_files: Mapping[str, bytes],
        rewrite: Rewrite | None = None,
        progress: Progress = no_progress,
    ) -> None:
        """Add the small files and give the checkpoint its name.

        `metadata` is the content of `.metadata`, in parts. `checksums` are the records of all
        ranks. `extra_files` are further small files, by path, which a `rewrite` does not touch.
        """
        backend = json.dumps(files.BACKEND).encode()
        contents = {
            files.COMMON: [common],
            files.METADATA: metadata,
            files.METADATA_JSON: [backend],
        }
        # Checksums cover all files in the directory itself, those of folders excepted.
        sums = {name: compute_checksums(*buffers) for name, buffers in contents.items()}
        for name, content in extra_files.items():
            if "/" not in name:
                sums[name] = compute_checksums(content)
        own_records = encode_checksum_records(sums)
        self.write_file(CHECKSUMS, *seal_checksums(*checksums, own_records))
        for name, buffers in contents.items():
            self.write_file(name, *buffers)
        if rewrite is not None:
            rewrite(self.pending, progress)
        for name, content in extra_files.items():
            self.write_file(name, content)
        progress(0)  # the last chance to learn that other ranks have given this save up
        self._publish()

    def _publish(self) -> None:
        """Give the complete directory its name."""
        # Names first: after a power loss, a renamed directory must contain all its files.
        fsync_directory(self.pending)
        iteration = iteration_in_name(self.directory)
        if self.generation is not None and iteration > 0:
            self.generation.stage_tracker(iteration)
        put_in_place(self.pending, self.directory)

    def is_committed(self) -> bool:
        """Return whether this save has committed the checkpoint, for a rank without news of it."""
        return not self.pending.exists() and files.is_complete(self.directory)

    def explain(self, failure: BaseException) -> BaseException:
        """Return the cause of `failure`: SupersededError after a takeover of the directory.

        If the disk is full, the result names what must be freed for the next save.
        """
        try:
            if self.generation is not None:
                self.generation.check(failure)
            is_full = os.strerror(errno.ENOSPC) in str(failure)
            if is_full and not isinstance(self.directory, ObjectPath):
                return self._explain_full_disk(failure)
        except SupersededError as superseded:
            return superseded
        except OSError:  # the storage that failed cannot be read, either
            pass
        return failure

    def _explain_full_disk(self, failure: BaseException) -> BaseException:
        """Compare the free space with the newest checkpoint in the directory."""
        siblings = self.directory.parent.glob("iter_*")
        for sibling in sorted(siblings, key=iteration_in_name, reverse=True):
            if files.is_complete(sibling):
                shortage = describe_shortage(self.pending, sibling)
                break
        else:
            return failure
        if shortage is None:
            return failure
        return CheckpointError(
            f"{failure}. For a checkpoint as large as {sibling.name}, {shortage}"
        )

    def abandon(self) -> None:
        """Remove everything, as far as possible."""
        discard(self.pending)

    def end(self, outcome: Outcome) -> None:
        """Clean up on every rank, once the outcome is known."""


def pending_checkpoint(
    directory: Path, save_id: str, generation: Generation | None
) -> PendingCheckpoint:
    """Return a checkpoint to be written to `directory`, of a file system or object storage."""
    checkpoint_class: type[PendingCheckpoint] = PendingCheckpoint
    if isinstance(directory, ObjectPath):
        checkpoint_class = resolve(_OBJECT_CHECKPOINT)
    return checkpoint_class(directory, save_id, generation)

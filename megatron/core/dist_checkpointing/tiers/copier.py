"""Copies of node-local checkpoints in the shared directory.

Every rank reads back the files that it has just written, via a few megabytes of host memory, while
training and later local saves continue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from megatron.core.dist_checkpointing.background import Slot, StagingBuffer, Workers
from megatron.core.dist_checkpointing.format.checksums import FileChecksums, hash_blocks
from megatron.core.dist_checkpointing.local_checkpoints import Copier
from megatron.core.dist_checkpointing.ownership.fencing import Generation
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.dist_checkpointing.planning.rank_plan import FileChunk
from megatron.core.dist_checkpointing.saving.commit import (
    PendingCheckpoint,
    Progress,
    pending_checkpoint,
)
from megatron.core.dist_checkpointing.saving.objects import ObjectFile
from megatron.core.dist_checkpointing.saving.save_thread import Hooks, SaveHandle
from megatron.core.dist_checkpointing.saving.saver import MakeExport
from megatron.core.dist_checkpointing.saving.staging import StageAndWrite
from megatron.core.dist_checkpointing.tiers.local_tier import LocalCheckpoint
from megatron.core.safe_files.errors import CheckpointError
from megatron.core.safe_files.reading import open_file


class CheckpointCopier(Copier):
    """Copies node-local checkpoints to a shared directory, one at a time.

    All ranks make the same calls in the same order.
    """

    def __init__(self, *, workers: int = 2, timeout: float = 600.0) -> None:
        super().__init__(
            Coordination.of(None), timeout, lambda nbytes: None, "checkpoint-copy-thread"
        )
        self._pool = Workers(workers, "checkpoint-copier")
        self._buffer = StagingBuffer(workers, pinned=False)

    def copy(
        self,
        local: SaveHandle,
        directory: Path,
        *,
        generation: Generation | None = None,
        before_writing: Callable[[], None] = lambda: None,
        extra_files: Mapping[str, bytes] | None = None,
        on_commit: Callable[[], None] = lambda: None,
        export: MakeExport | None = None,
    ) -> SaveHandle:
        self._wait_for_current()
        started = time.perf_counter()
        checkpoint = local.pending
        assert isinstance(checkpoint, LocalCheckpoint)
        # Both saves use one store: the suffix keeps their keys apart.
        barrier = self._make_barrier(f"{checkpoint.save_id}/copy")
        pending = pending_checkpoint(directory, checkpoint.save_id, generation)
        hooks = Hooks(before_writing, None, extra_files or {}, on_commit)
        current = SaveHandle(local.plan, barrier, pending, hooks, started)
        if export is not None:
            current.export = export(checkpoint.save_id)
        self._start(current)
        checkpoint.keep_until(current.done)
        current.make_common = local.make_common
        current.failure = local.failure
        # Without a transfer the local save has failed, and the copy fails with it.
        if local.transfer is not None:
            current.transfer = _FromDisk(
                local, checkpoint, local.transfer.make_objects, self._pool, self._buffer.slots
            )
        self._run_in_background(current, self._stage, self._write, self._commit)
        return current

    def close(self) -> None:
        super().close()
        self._pool.close()
        self._buffer.close()


class _FromDisk(StageAndWrite):
    """Transfer of the data files of `checkpoint` that the save `local` writes on this rank."""

    def __init__(
        self,
        local: SaveHandle,
        checkpoint: LocalCheckpoint,
        make_objects: Callable[[], ObjectFile],
        pool: Workers,
        slots: list[Slot],
    ) -> None:
        super().__init__(local.plan, (), make_objects, pool, lambda: slots)
        self._local = local
        self._checkpoint = checkpoint

    def stage(self) -> None:
        """Wait until the files are complete."""
        error = self._local.wait().error
        if error is not None:
            raise CheckpointError(f"there is no local checkpoint to copy: {error}")
        super().stage()

    def _copy_and_hash(self, chunk: FileChunk, slot: Slot) -> bytes:
        with open_file(self._checkpoint.directory / self._files[chunk.file].name) as file:
            file.read_into(slot.view[: chunk.length], chunk.offset)
            file.forget(chunk.offset, chunk.length)
        return hash_blocks(slot.view[: chunk.length])

    def write(self, target: PendingCheckpoint, progress: Progress) -> dict[str, FileChecksums]:
        sums = super().write(target, progress)
        self.staged_at = 0.0  # no live tensor was staged
        # The same bytes were read and written: comparing them with the hashes of the local save
        # detects damage on the disk.
        for name, expected in self._checkpoint.data_files().items():
            if sums[target.name_of(name)] != expected:
                path = self._checkpoint.directory / name
                raise CheckpointError(
                    f"{path}: damaged on the disk of its node since it was written"
                )
        return sums

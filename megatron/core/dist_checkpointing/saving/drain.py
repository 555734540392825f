"""From the nodes' own disks to where all nodes find it: a checkpoint is staged once, and copied from there.

Every rank reads back the files that it has just written to its node, through a few megabytes of host memory, while
training and later local saves go on. The commit is that of any other save (`commit.py`, `object_commit.py`).
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megatron.core.dist_checkpointing.background import SLOT_SIZE, Slot, StagingBuffer, Workers
from megatron.core.dist_checkpointing.format.checksums import FileChecksums
from megatron.core.dist_checkpointing.format.schema import CheckpointError, open_file
from megatron.core.dist_checkpointing.generation import Generation
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.dist_checkpointing.saving.conductor import Conductor, Hooks, SaveHandle, Snapshot
from megatron.core.dist_checkpointing.saving.local_commit import LocalCheckpoint
from megatron.core.dist_checkpointing.saving.object_commit import pending_checkpoint
from megatron.core.dist_checkpointing.saving.shard_file import Progress, ShardTarget


class Drainer(Conductor):
    """Copies local checkpoints, one after the other. All ranks of `group` make the same calls in the same order."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        workers: int = 2,
        timeout: float = 600.0,
        progress: Progress = lambda nbytes: None,
    ) -> None:
        super().__init__(Coordination.of(group), timeout, progress, "checkpoint-drain-conductor")
        self._pool = Workers(workers, "checkpoint-drainer")
        self._buffer = StagingBuffer(workers, pinned=False)

    def drain(
        self,
        local: SaveHandle,
        directory: Path,
        *,
        generation: Generation | None = None,
        before_writing: Callable[[], None] = lambda: None,
        beside: Mapping[str, bytes] | None = None,
        on_commit: Callable[[], None] = lambda: None,
    ) -> SaveHandle:
        """Begin to copy the save `local` to `directory` when it has ended; waits for the copy before this one.

        If `local` fails, so does this. The other arguments are those of `AsyncSaver.save`.
        """
        started = time.perf_counter()
        self._wait_for_current()
        checkpoint = local.pending
        assert isinstance(checkpoint, LocalCheckpoint)
        # Both saves talk over one store: a path of its own keeps their keys apart.
        barrier = self._barrier(f"{checkpoint.save_id}/drain")
        pending = pending_checkpoint(directory, checkpoint.save_id, generation)
        current = self._current = SaveHandle(local.plan, barrier, pending, started)
        checkpoint.keep_until(current.done)
        current.snapshot = local.snapshot
        if isinstance(local.snapshot, Snapshot):
            files = _LocalFiles(local, checkpoint, self._pool, self._buffer.slots)
            current.snapshot = local.snapshot._replace(transfer=files)
        hooks = Hooks(before_writing, None, beside or {}, on_commit)
        self._thread.submit(lambda: self._conduct(current, hooks))
        return current

    def close(self) -> None:
        super().close()
        self._pool.close()
        self._buffer.close()


class _LocalFiles:
    """The transfer of what `local` has written on this rank."""

    staged_at = 0.0

    def __init__(self, local: SaveHandle, checkpoint: LocalCheckpoint, pool: Workers, slots: list[Slot]) -> None:
        self._local, self._checkpoint, self._pool = local, checkpoint, pool
        self._slots: queue.SimpleQueue[Slot] = queue.SimpleQueue()  # those that are free: one for each thread
        for slot in slots:
            self._slots.put(slot)
        self._failed = False

    def begin(self) -> None:
        """Wait until it is there."""
        error = self._local.wait().error
        if error is not None:
            raise CheckpointError(f"there is no local checkpoint to copy: {error}")

    def write(self, target: ShardTarget, progress: Progress) -> dict[str, FileChecksums]:
        files = self._checkpoint.data_files()
        copies = [self._pool.submit(partial(self._copy, file, target, progress)) for file in files.items()]
        errors = [copy.exception() for copy in copies]  # all files are closed before any error is raised
        for error in errors:
            if error is not None:
                raise error
        result = {target.name_of(name): sums for name, sums in files.items()}
        target.finish(result)
        return result

    def abort(self) -> None:
        """`write` has ended all copies."""

    def _copy(self, entry: tuple[str, FileChecksums], target: ShardTarget, progress: Progress) -> None:
        name, expected = entry
        path, slot = self._checkpoint.directory / name, self._slots.get()
        try:
            shard = target.open_shard(target.name_of(name), expected.size)
            try:
                with open_file(path) as file:
                    for offset in range(0, expected.size, SLOT_SIZE):
                        if self._failed:
                            raise CheckpointError("another file could not be copied")
                        length = min(SLOT_SIZE, expected.size - offset)
                        file.read_into(slot.view[:length], offset)
                        file.forget(offset, length)
                        shard.write(offset, slot.view, length)
                        progress(length)
            except BaseException:
                shard.close(durable=False)
                raise
            # What was written is what was read, so the hashes of the local save tell whether the disk has damaged it.
            if shard.close(durable=True) != expected:
                raise CheckpointError(f"{path}: damaged on the disk of its node since it was written")
        except BaseException:
            self._failed = True
            raise
        finally:
            self._slots.put(slot)

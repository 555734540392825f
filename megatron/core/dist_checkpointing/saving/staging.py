"""Snapshot of the state: from live tensors into host buffers that are allocated once and used for
every save.

The buffer contains images of the files as they will be on disk, in slots of `SLOT_SIZE` bytes:
page-aligned and sized in whole pages, so that they can be written past the page cache.

A rank's part of a save is a queue: chunks of the live state go through the slots into durable
files. With a slot for every chunk, the first tasks of the queue fill all slots, while the directory
is still being created; the writes follow. So the snapshot is complete as early as possible.

Copies from a device: `device_staging.py`.

With fewer slots (`--ckpt-staging-mem-limit`, synchronous saves) the snapshot takes as long as the
writes: each task stages a chunk and writes it at once, while its bytes are in the processor's
cache. Objects and `common` are copied by the save call (`objects.py`): later changes do not reach
the checkpoint.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron.core.dist_checkpointing.background import Slot, Workers
from megatron.core.dist_checkpointing.format.checksums import (
    BLOCK_SIZE,
    FileChecksums,
    compute_checksums,
    hash_blocks,
)
from megatron.core.dist_checkpointing.planning.rank_plan import FileChunk, RankPlan
from megatron.core.dist_checkpointing.saving.commit import PendingCheckpoint, Progress
from megatron.core.dist_checkpointing.saving.live_items import LiveItem
from megatron.core.dist_checkpointing.saving.objects import ObjectFile
from megatron.core.dist_checkpointing.saving.shard import Shard
from megatron.core.safe_files.errors import CheckpointError
from megatron.core.safe_files.schema import abbreviate

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.saving.pending_export import PendingExport


class StageAndWrite:
    """Transfer of this rank's data from live `items` to the data files of a checkpoint.

    `stage` allocates the slots and fills them; it touches no file. Call `abort` if `write` is not
    called or has failed. `staged` is set once the live tensors are not needed any more.
    """

    on_device = False

    def __init__(
        self,
        plan: RankPlan,
        items: Sequence[LiveItem],
        make_objects: Callable[[], ObjectFile],
        pool: Workers,
        make_slots: Callable[[], list[Slot]],
    ) -> None:
        self.make_objects = make_objects
        self.staged = threading.Event()
        self.export: PendingExport | None = None  # of the same bytes
        self.staged_at = 0.0  # time.perf_counter
        self._plan = plan
        self._files = plan.files
        self._chunks = plan.chunks
        self._items = items
        self._unstaged = len(plan.chunks)
        self._lock = threading.Lock()
        # Tasks of the pool, in the order of submission; `write` waits for all of them.
        self._futures: list[Future[Any]] = []
        self._failed = False
        self._pool = pool
        self._make_slots = make_slots
        self._slots: list[Slot] = []
        self._target: PendingCheckpoint
        self._progress: Progress
        self._may_write = threading.Event()  # set once the target exists
        # Files by their index, each opened by the first task that writes to it.
        self._open: dict[int, Shard] = {}
        self._opening = [threading.Lock() for _ in plan.files]

    def stage(self) -> None:
        """Allocate the slots, and fill them if there is one for every chunk."""
        self._slots = self._make_slots()
        if not self._chunks:
            self._finish_staging()
        if self._fits_in_slots():
            self._stage_all()  # otherwise, `write` stages the chunks

    def _stage_all(self) -> None:
        """Submit the tasks that stage every chunk in a slot of its own, and write it."""
        # Queue all copies before the first write, because writes block until the target exists.
        # Each chunk has a task of its own, so that the copies run in the threads of the pool.
        with self._lock:
            for index in range(len(self._chunks)):
                self._futures.append(self._pool.submit(partial(self._stage_ahead, index)))

    def before_change(self) -> None:
        """Return when the tensors may change."""
        self.staged.wait()

    def _fits_in_slots(self) -> bool:
        return len(self._chunks) <= len(self._slots)

    def write(self, target: PendingCheckpoint, progress: Progress) -> dict[str, FileChecksums]:
        """Write all files durably to `target` and return their checksums. Raises the first
        error.
        """
        self._target = target
        self._progress = progress
        self._may_write.set()
        if not self._fits_in_slots():
            self._submit_by_slot()
        result: dict[str, FileChecksums] = {}
        objects = self.make_objects()
        if objects.content:
            name = target.name_of(objects.name)
            target.write_file(name, objects.content)
            result[name] = compute_checksums(objects.content)
        self._wait_for_tasks()
        self._check_staged()
        if self._failed:
            raise CheckpointError("cancelled")
        shards = self._open
        self._open = {}
        # Flushing waits for the disk: flush all files at once.
        closing = []
        for index in range(len(self._files)):
            closing.append(self._pool.submit(partial(shards[index].close, durable=True)))
        # Close every file before raising any error.
        sums = [future.exception() or future.result() for future in closing]
        for file, checksums in zip(self._files, sums, strict=True):
            if isinstance(checksums, BaseException):
                raise checksums
            result[target.name_of(file.name)] = checksums
        target.finish(result)
        return result

    def _wait_for_tasks(self) -> None:
        """Wait until all tasks have ended. Raises the first error."""
        for future in self._futures:  # tasks append further ones while this runs
            error = future.exception()
            if error is not None:
                # Without these names, the frame in the traceback does not refer to the error.
                try:
                    raise error
                finally:
                    del error, future

    def _check_staged(self) -> None:
        """Raise CheckpointError if a tensor was changed before it was staged."""

    def abort(self) -> None:
        """Wait for the running tasks, and close all files."""
        self.cancel()
        self._may_write.set()
        for future in self._futures:  # tasks append further ones while this runs
            future.exception()
        shards = self._open
        self._open = {}
        for shard in shards.values():
            with contextlib.suppress(OSError):  # a network file system reports earlier writes here
                shard.close(durable=False)
        # The exceptions of tasks refer to this object, and would keep the slots (see `_write` of
        # `SaveThread` for the consequences).
        self._futures = []
        self._slots = []
        self.staged.set()

    def cancel(self) -> None:
        """Make `write` raise once the running tasks are done; callable from any thread."""
        self._failed = True

    def _stage_ahead(self, index: int) -> None:
        """Stage a chunk into its own slot, and submit the task that writes it."""
        if self._failed:
            return
        chunk = self._chunks[index]
        slot = self._slots[index]
        digests = self._stage(chunk, slot)
        with self._lock:
            self._futures.append(self._pool.submit(partial(self._write, chunk, slot, digests)))

    def _submit_by_slot(self) -> None:
        """Submit a task for each chunk that stages and writes it in the next free slot."""
        free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for slot in self._slots:
            free.put(slot)

        def stage_and_write(chunk: FileChunk) -> None:
            slot = free.get()
            try:
                if not self._failed:
                    digests = self._stage(chunk, slot)
                    self._write(chunk, slot, digests)
            finally:
                free.put(slot)

        for chunk in self._chunks:
            self._futures.append(self._pool.submit(partial(stage_and_write, chunk)))

    def _stage(self, chunk: FileChunk, slot: Slot) -> bytes | None:
        """Fill the slot of a chunk; return the digests of its blocks, if they are known."""
        digests = self._fill(chunk, slot)
        with self._lock:
            self._unstaged -= 1
            last = self._unstaged == 0
        if last:
            self._finish_staging()
        return digests

    def _fill(self, chunk: FileChunk, slot: Slot) -> bytes | None:
        return self._copy_and_hash(chunk, slot)

    def _copy_and_hash(self, chunk: FileChunk, slot: Slot) -> bytes:
        """Fill a slot from host memory and return the digests of its blocks."""
        digests = []
        hashed = 0
        for at, index, item_slice in chunk.list_parts(self._plan.items):
            live = self._items[index]
            blocks = (
                [(at, item_slice)]
                if isinstance(item_slice, bytes)
                else live.split_at_blocks(at, item_slice)
            )
            for start, content in blocks:
                end = start + len(content)
                is_whole_blocks = start % BLOCK_SIZE == 0 and end % BLOCK_SIZE == 0
                if is_whole_blocks and isinstance(content, range) and live.tensor is not None:
                    digests.append(live.copy_and_hash(slot, start, content))
                    hashed = end
                    continue
                copy_on_host(live, slot, start, content)
                complete = end // BLOCK_SIZE * BLOCK_SIZE
                if complete > hashed:
                    digests.append(hash_blocks(slot.view[hashed:complete]))
                    hashed = complete
        # The last block of a file may be short.
        digests.append(hash_blocks(slot.view[hashed : chunk.length]))
        return b"".join(digests)

    def _finish_staging(self) -> None:
        try:
            self._check_unmodified()
        finally:
            self._items = ()  # temporary copies can go
            self.staged_at = time.perf_counter()
            self.staged.set()

    def _check_unmodified(self) -> None:
        """Raise CheckpointError if a tensor was changed in place before it was staged."""
        modified = dict.fromkeys(live.item.key for live in self._items if live.was_modified())
        if modified:
            raise CheckpointError(
                f"changed before their values were staged: {abbreviate([*modified], 5, ', ')}: "
                "call wait_staged() between save() and the first operation that changes a tensor"
            )

    def _write(self, chunk: FileChunk, slot: Slot, digests: bytes | None) -> None:
        if not self._can_write():
            return
        self._open_shard(chunk.file).write(chunk.offset, slot, chunk.length, digests)
        self._finish_chunk(chunk, slot)

    def _can_write(self) -> bool:
        """Wait for the target; return False if the save has been cancelled."""
        self._may_write.wait()
        return not self._failed

    def _finish_chunk(self, chunk: FileChunk, slot: Slot) -> None:
        """Pass a chunk that was written to the export, and report progress."""
        if self.export is not None:
            self.export.write(self._plan.items, chunk, slot)
        self._progress(chunk.length)

    def _open_shard(self, index: int) -> Shard:
        """Return an open file; creates it and reserves its space for the first caller.

        The files are created in parallel: reserving space takes seconds for gigabytes of a tmpfs.
        """
        with self._opening[index]:
            if index not in self._open:
                file = self._files[index]
                try:
                    shard = self._target.open_shard(self._target.name_of(file.name), file.size)
                except BaseException:
                    self.cancel()  # the tasks after this one need not try again
                    raise
                self._open[index] = shard
            return self._open[index]


def copy_on_host(live: LiveItem, slot: Slot, at: int, item_slice: bytes | range) -> None:
    """Copy a part of an item in host memory to byte `at` of a slot."""
    if isinstance(item_slice, bytes):
        slot.view[at : at + len(item_slice)] = item_slice
    else:
        live.copy(slot, at, item_slice)

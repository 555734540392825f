"""Snapshot of the state: from live tensors into host buffers that are allocated once and used for
every save.

The buffer contains images of the files as they will be on disk, in slots of `SLOT_SIZE` bytes:
page-aligned and sized in whole pages, so that they can be written past the page cache.

A rank's part of a save is a queue: chunks of the live state go through the slots into durable
files. With a slot for every chunk, the first tasks of the queue fill all slots, while the directory
is still being created; the writes follow. So the snapshot is complete as early as possible.

Copies from a device have a thread of their own, which keeps few of them in flight: the driver
accepts about a thousand, and then blocks the launches of training. The copies end during the next
forward and backward pass. What is left before the update is copied on the device, if its memory
permits, and from there to the host during the following iteration.

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
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

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
from megatron.core.private_operators import copy_tensors
from megatron.core.safe_files.errors import CheckpointError
from megatron.core.safe_files.schema import abbreviate

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.saving.pending_export import PendingExport

_COPIED_AT_ONCE = 16
"""Slots that one call fills from a device: the interpreter is busy for microseconds per call, and a
launch from the training thread waits that long. The first write begins after 128 MiB.
"""
_IN_FLIGHT = 3
"""Calls whose copies may be queued on the device: enough to keep it busy for 7 ms."""
_MEMORY_MARGIN = 1 << 30  # bytes of the device that a snapshot leaves free

_PRODUCTS = threading.Lock()
"""Held while a product of elements and their scale is on the device."""


class _DeviceBatch(NamedTuple):
    """Copies from a device into several slots: elements of slots, and what is copied to them.

    A scale, if it is not None, is multiplied with the elements that are copied.
    """

    targets: list[torch.Tensor]
    contents: list[torch.Tensor]
    scales: list[torch.Tensor | None]

    def clone(self) -> _DeviceBatch:
        """Copy the contents and scales on the device, in the current stream."""
        contents = [torch.empty_like(content) for content in self.contents]
        if contents:
            copy_tensors(contents, self.contents)
        scales = [None if scale is None else scale.clone() for scale in self.scales]
        return self._replace(contents=contents, scales=scales)

    def start(self) -> None:
        """Queue the copies in the current stream.

        One call, which releases the interpreter, queues all that have no scale.
        """
        targets = []
        contents = []
        for target, content, scale in zip(self.targets, self.contents, self.scales, strict=True):
            if scale is None:
                targets.append(target)
                contents.append(content)
                continue
            # One product at a time: its memory serves for the next one, because the stream is the
            # same.
            with _PRODUCTS:
                target.copy_(content.to(target.dtype).mul_(scale), non_blocking=True)
        if targets:
            copy_tensors(targets, contents)


class StageAndWrite:
    """Transfer of this rank's data from live `items` to the data files of a checkpoint.

    `stage` allocates the slots and fills them; it touches no file. Call `abort` if `write` is not
    called or has failed. `staged` is set once the live tensors are not needed any more; they may
    change earlier, after `before_change`. Copies from a device are queued in `stream`, by `stager`.
    """

    def __init__(
        self,
        plan: RankPlan,
        items: Sequence[LiveItem],
        make_objects: Callable[[], ObjectFile],
        stream: torch.cuda.Stream | None,
        pool: Workers,
        make_slots: Callable[[], list[Slot]],
        stager: Workers | None = None,
    ) -> None:
        self.make_objects = make_objects
        self.staged = threading.Event()
        self.export: PendingExport | None = None  # of the same bytes
        self.staged_at = 0.0  # time.perf_counter
        self._may_change = False  # training has called `before_change`
        self._plan = plan
        self._files = plan.files
        self._chunks = plan.chunks
        self._stream = stream
        self._items = items
        self._unstaged = len(plan.chunks)
        self._lock = threading.Lock()
        # Tasks of the pool, in the order of submission; `write` waits for all of them.
        self._futures: list[Future[Any]] = []
        self._failed = False
        self._error: CheckpointError | None = None  # a tensor was changed too early
        self._pool = pool
        self._make_slots = make_slots
        # Copies from the device
        self._stager = stager
        self._queueing = threading.Lock()  # guards the following
        self._unqueued: list[range] = []  # batches of chunks whose copies are not queued yet
        # Copies on the device, by the first chunk of the batch
        self._snapshots: dict[int, _DeviceBatch] = {}
        self._slots: list[Slot] = []
        self._target: PendingCheckpoint
        self._progress: Progress
        self._may_write = threading.Event()  # set once the target exists
        # Files by their index, each opened by the first task that writes to it.
        self._open: dict[int, Shard] = {}
        self._opening = [threading.Lock() for _ in plan.files]

    @property
    def on_device(self) -> bool:
        return self._stream is not None

    def stage(self) -> None:
        """Allocate the slots, and fill them if there is one for every chunk."""
        self._slots = self._make_slots()
        if not self._chunks:
            self._finish_staging()
        if not self._fits_in_slots():
            return  # `write` stages the chunks
        if self._stager is not None:
            self._futures.append(self._stager.submit(self._stage_from_device))
            return
        # Queue all copies before the first write, because writes block until the target exists.
        # Each chunk has a task of its own, so that the copies run in the threads of the pool.
        with self._lock:
            for index in range(len(self._chunks)):
                self._futures.append(self._pool.submit(partial(self._stage_ahead, index)))

    def before_change(self) -> None:
        """Return when the tensors may change; on a device, in the current stream.

        Copies what is not staged yet on the device, if its memory permits.
        """
        if self._may_change:
            return
        if self._stream is not None and not self.staged.is_set():
            # Copying continues while the device is computing: less is left at the end.
            current = torch.cuda.current_stream()
            computed = current.record_event(torch.cuda.Event(blocking=True))
            computed.synchronize()
            with self._queueing:
                self._may_change = self._take_snapshot()
        if not self._may_change:
            self.staged.wait()
            self._may_change = True
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

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
        if self._error is not None:
            raise self._error
        if self.on_device and not self._may_change:
            self._check_unmodified()  # copies on the device may have been overtaken by changes
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
        self._snapshots = {}
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
        copied, digests = self._stage(chunk, slot)
        with self._lock:
            self._futures.append(
                self._pool.submit(partial(self._write, chunk, slot, copied, digests))
            )

    def _stage_from_device(self) -> None:
        """Stage all chunks, each into its own slot, and submit the tasks that write them.

        Runs in the thread of the stager.
        """
        # Host memory first: a snapshot contains the rest.
        if not all(live.is_on_device for live in self._items):
            for chunk, slot in zip(self._chunks, self._slots, strict=False):
                self._copy_host_items(chunk, slot)
        indices = range(len(self._chunks))
        starts = indices[::_COPIED_AT_ONCE]
        with self._queueing:
            self._unqueued = [indices[start : start + _COPIED_AT_ONCE] for start in starts]
        in_flight: deque[tuple[range, torch.cuda.Event]] = deque()
        try:
            for _ in starts:
                if len(in_flight) == _IN_FLIGHT:
                    self._submit_writes(*in_flight.popleft())
                if self._failed:
                    break
                with self._queueing:
                    batch = self._unqueued.pop(0)
                    copies = self._snapshots.get(batch.start) or self._select_copies(batch)
                    in_flight.append((batch, self._start_copies(copies)))
            self._finish_staging()
        finally:
            while in_flight:
                self._submit_writes(*in_flight.popleft())

    def _submit_writes(self, batch: range, copied: torch.cuda.Event) -> None:
        """Wait until the slots of some chunks are filled, and submit the tasks that write them."""
        copied.synchronize()  # sleeps without the interpreter
        # Only now: the memory of a snapshot belongs to the stream of training.
        self._snapshots.pop(batch.start, None)
        with self._lock:
            for index in batch:
                write = partial(self._write, self._chunks[index], self._slots[index], None, None)
                self._futures.append(self._pool.submit(write))

    def _take_snapshot(self) -> bool:
        """Copy the chunks that are not queued yet on the device, in the current stream.

        Returns False if there is nothing to copy or too little memory.
        """
        assert self._stream is not None
        nbytes = sum(self._chunks[index].length for batch in self._unqueued for index in batch)
        if nbytes == 0 or nbytes > _find_free_memory():
            return False
        try:
            self._check_unmodified()
            for batch in self._unqueued:
                self._snapshots[batch.start] = self._select_copies(batch).clone()
        except CheckpointError as error:
            self._error = error  # `write` raises it
            self.cancel()
        except torch.OutOfMemoryError:  # free, but fragmented
            self._snapshots = {}
            return False
        self._stream.wait_stream(torch.cuda.current_stream())
        return True

    def _submit_by_slot(self) -> None:
        """Submit a task for each chunk that stages and writes it in the next free slot."""
        free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for slot in self._slots:
            free.put(slot)

        def stage_and_write(chunk: FileChunk) -> None:
            slot = free.get()
            try:
                if not self._failed:
                    copied, digests = self._stage(chunk, slot)
                    self._write(chunk, slot, copied, digests)
            finally:
                free.put(slot)

        for chunk in self._chunks:
            self._futures.append(self._pool.submit(partial(stage_and_write, chunk)))

    def _stage(self, chunk: FileChunk, slot: Slot) -> tuple[torch.cuda.Event | None, bytes | None]:
        """Fill the slot of a chunk, or queue its copies on the device.

        A device fills the slot asynchronously, until the event that is returned. Also returns the
        digests of the blocks, if they are known.
        """
        copied = None
        digests = None
        if self.on_device:
            self._copy_host_items(chunk, slot)
            copied = self._start_copies(self._select_parts([(chunk, slot)]))
        else:
            digests = self._copy_and_hash(chunk, slot)
        with self._lock:
            self._unstaged -= 1
            last = self._unstaged == 0
        if last:
            self._finish_staging()
        return copied, digests

    def _copy_host_items(self, chunk: FileChunk, slot: Slot) -> None:
        """Copy the items of a chunk that are in host memory."""
        for at, index, item_slice in chunk.list_parts(self._plan.items):
            if not self._items[index].is_on_device:
                _copy_on_host(self._items[index], slot, at, item_slice)

    def _select_copies(self, batch: range) -> _DeviceBatch:
        """Return the copies from the device for the chunks with these indices."""
        return self._select_parts([(self._chunks[index], self._slots[index]) for index in batch])

    def _select_parts(self, batch: Sequence[tuple[FileChunk, Slot]]) -> _DeviceBatch:
        """Return the copies from the device for some chunks, and write their items' envelopes."""
        copies = _DeviceBatch([], [], [])
        for chunk, slot in batch:
            for at, index, item_slice in chunk.list_parts(self._plan.items):
                live = self._items[index]
                if not live.is_on_device:
                    continue
                if isinstance(item_slice, bytes):
                    _copy_on_host(live, slot, at, item_slice)
                    continue
                target, content = live.select(slot, at, item_slice)
                copies.targets.append(target)
                copies.contents.append(content)
                copies.scales.append(live.scale)
        return copies

    def _start_copies(self, copies: _DeviceBatch) -> torch.cuda.Event:
        """Queue copies, and return the event after them."""
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            copies.start()
            # Reached once the slots are filled; a thread that waits for it does not spin.
            return self._stream.record_event(torch.cuda.Event(blocking=True))

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
                _copy_on_host(live, slot, start, content)
                complete = end // BLOCK_SIZE * BLOCK_SIZE
                if complete > hashed:
                    digests.append(hash_blocks(slot.view[hashed:complete]))
                    hashed = complete
        # The last block of a file may be short.
        digests.append(hash_blocks(slot.view[hashed : chunk.length]))
        return b"".join(digests)

    def _finish_staging(self) -> None:
        try:
            if not self._may_change:
                self._check_unmodified()
        finally:
            if self._stream is None:
                self._items = ()  # temporary copies can go; on a device they may still be read
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

    def _write(
        self, chunk: FileChunk, slot: Slot, copied: torch.cuda.Event | None, digests: bytes | None
    ) -> None:
        self._may_write.wait()
        if self._failed:
            return
        shard = self._open_shard(chunk.file)
        if copied is not None:
            copied.synchronize()
        shard.write(chunk.offset, slot, chunk.length, digests)
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


def _find_free_memory() -> int:
    """Return the bytes of the device that training does not use, at its peak so far."""
    free, _ = torch.cuda.mem_get_info()
    cached = torch.cuda.memory_reserved() - torch.cuda.max_memory_allocated()
    return free + cached - _MEMORY_MARGIN


def _copy_on_host(live: LiveItem, slot: Slot, at: int, item_slice: bytes | range) -> None:
    """Copy a part of an item in host memory to byte `at` of a slot."""
    if isinstance(item_slice, bytes):
        slot.view[at : at + len(item_slice)] = item_slice
    else:
        live.copy(slot, at, item_slice)

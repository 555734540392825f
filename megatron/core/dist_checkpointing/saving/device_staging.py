"""Snapshot of tensors on a device, as `staging.py` for those in host memory.

Copies have a thread of their own, which keeps few of them in flight: the driver accepts about a
thousand, and then blocks the launches of training. The copies end during the next forward and
backward pass. Before the update, the rest is copied on the device, if its memory permits, and from
there to the host during the following iteration.

Training also waits whenever another thread has the interpreter. So a task writes many megabytes in
one call that does not need it, and a file has one task at a time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from megatron.core.dist_checkpointing.background import Slot, Workers
from megatron.core.dist_checkpointing.planning.rank_plan import FileChunk, RankPlan
from megatron.core.dist_checkpointing.saving.live_items import LiveItem
from megatron.core.dist_checkpointing.saving.objects import ObjectFile
from megatron.core.dist_checkpointing.saving.shard import Piece
from megatron.core.dist_checkpointing.saving.staging import StageAndWrite, copy_on_host
from megatron.core.private_operators import copy_tensors
from megatron.core.safe_files.errors import CheckpointError

_COPIED_AT_ONCE = 16
"""Slots that one call fills from a device: the interpreter is busy for microseconds per call, and a
launch from the training thread waits that long. The first write begins after 128 MiB.
"""
_IN_FLIGHT = 3
"""Calls whose copies may be queued on the device: enough to keep it busy for 7 ms. One while
training waits to change the tensors, because it waits for their end.
"""
_WRITTEN_AT_ONCE = 16
"""Chunks of a file that one task writes: each needs the interpreter, for which training waits."""
_MEMORY_MARGIN = 1 << 30  # bytes of the device that a snapshot leaves free

_PRODUCTS = threading.Lock()
"""Held while a product of elements and their scale is on the device."""


class _DeviceBatch(NamedTuple):
    """Copies from a device into several slots: elements of slots, and the elements for them.

    A scale, if it is not None, is multiplied with the elements that are copied.
    """

    targets: list[torch.Tensor]
    contents: list[torch.Tensor]
    scales: list[torch.Tensor | None]

    def allocate_copy(self) -> _DeviceCopy:
        """Allocate memory for the contents and scales on the device, in the current stream."""
        contents = [torch.empty_like(content) for content in self.contents]
        scales = [None if scale is None else torch.empty_like(scale) for scale in self.scales]
        sources = []
        targets = []
        for source, target in zip(
            [*self.contents, *self.scales], [*contents, *scales], strict=True
        ):
            if source is None or target is None:
                continue
            if _consists_of_words(source):
                source = source.view(torch.int64)
                target = target.view(torch.int64)
            sources.append(source)
            targets.append(target)
        return _DeviceCopy(self._replace(contents=contents, scales=scales), sources, targets)

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


class _DeviceCopy(NamedTuple):
    """Copy of a batch on the device, which `fill_copies` fills."""

    batch: _DeviceBatch
    sources: list[torch.Tensor]
    targets: list[torch.Tensor]


def fill_copies(copies: Sequence[_DeviceCopy]) -> None:
    """Fill copies on the device, in the current stream.

    One call per dtype: training waits for the interpreter after each of them.
    """
    by_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for copy in copies:
        for source, target in zip(copy.sources, copy.targets, strict=True):
            sources, targets = by_dtype.setdefault(source.dtype, ([], []))
            sources.append(source)
            targets.append(target)
    for sources, targets in by_dtype.values():
        copy_tensors(targets, sources)


def _consists_of_words(content: torch.Tensor) -> bool:
    """Return whether `content` is bytes that can be viewed as int64.

    torch's kernel for lists copies four elements of any size per access.
    """
    size = torch.int64.itemsize
    is_aligned = content.storage_offset() % size == 0 and content.numel() % size == 0
    return content.dtype == torch.uint8 and is_aligned


class StageFromDevice(StageAndWrite):
    """Transfer of this rank's data, some of it on a device, to the data files of a checkpoint.

    The tensors may change after `before_change`, which is before `staged` if they were copied on
    the device. Copies are queued in `stream` by `stager`.
    """

    on_device = True

    def __init__(
        self,
        plan: RankPlan,
        items: Sequence[LiveItem],
        make_objects: Callable[[], ObjectFile],
        pool: Workers,
        make_slots: Callable[[], list[Slot]],
        stream: torch.cuda.Stream,
        stager: Workers,
    ) -> None:
        super().__init__(plan, items, make_objects, pool, make_slots)
        self._stream = stream
        self._stager = stager
        self._is_awaited = False  # training waits in `before_change`
        self._may_change = False  # training has called `before_change`
        self._error: CheckpointError | None = None  # a tensor was changed too early
        self._queueing = threading.Lock()  # guards the following
        self._unqueued: list[range] = []  # batches of chunks whose copies are not queued yet
        # Copies on the device, by the first chunk of the batch
        self._snapshots: dict[int, _DeviceBatch] = {}
        # Chunks that wait for their task, by file, and the files that have a task
        self._copied: dict[int, deque[int]] = defaultdict(deque)
        self._writing: set[int] = set()

    def before_change(self) -> None:
        """Return when the tensors may change in the current stream.

        Chunks that are not staged yet are copied on the device, if its memory permits.
        """
        if self._may_change:
            return
        if not self.staged.is_set():
            # Copying continues while the device is computing: less is left at the end.
            current = torch.cuda.current_stream()
            computed = current.record_event(torch.cuda.Event(blocking=True))
            self._is_awaited = True
            # While the device is busy: it waits for the host afterwards.
            free = _find_free_memory()
            allocated = self._allocate_copies(free, computed)
            computed.synchronize()
            with self._queueing:
                self._may_change = self._take_snapshot(allocated, free)
            self._is_awaited = False
        if not self._may_change:
            self.staged.wait()
            self._may_change = True
        torch.cuda.current_stream().wait_stream(self._stream)

    def warm_up(self) -> None:
        """Do the one-time work of the first save before training: allocate the slots, select all
        copies, and load kernels.

        CUDA loads a kernel when it is first launched, for which it may wait for the device. The
        slots are filled with values that no save uses.
        """
        self._slots = self._make_slots()
        indices = range(min(len(self._chunks), len(self._slots)))
        for start in indices[::_COPIED_AT_ONCE]:
            self._select_copies(indices[start : start + _COPIED_AT_ONCE])
        copy = self._select_copies(indices[:1]).allocate_copy()
        fill_copies([copy])
        self._stream.wait_stream(torch.cuda.current_stream())
        self._start_copies(copy.batch).synchronize()
        self._slots = []

    def abort(self) -> None:
        """Wait for the running tasks, close all files, and free the memory on the device."""
        super().abort()
        self._snapshots = {}

    def _stage_all(self) -> None:
        self._futures.append(self._stager.submit(self._stage_from_device))

    def _fill(self, chunk: FileChunk, slot: Slot) -> None:
        """Fill the slot of a chunk, of which there are fewer than chunks."""
        self._fill_from_host(chunk, slot)
        self._start_copies(self._select_parts([(chunk, slot)])).synchronize()

    def _check_staged(self) -> None:
        if self._error is not None:
            raise self._error
        if not self._may_change:
            self._check_unmodified()  # copies may have been overtaken by changes

    def _finish_staging(self) -> None:
        try:
            if not self._may_change:
                self._check_unmodified()
        finally:
            self.staged_at = time.perf_counter()
            self.staged.set()

    def _stage_from_device(self) -> None:
        """Stage all chunks, each into its own slot, and submit the tasks that write them.

        Runs in the thread of the stager.
        """
        # Host memory first: a snapshot contains the rest.
        if not all(live.is_on_device for live in self._items):
            for chunk, slot in zip(self._chunks, self._slots, strict=False):
                self._fill_from_host(chunk, slot)
        indices = range(len(self._chunks))
        starts = indices[::_COPIED_AT_ONCE]
        with self._queueing:
            self._unqueued = [indices[start : start + _COPIED_AT_ONCE] for start in starts]
        in_flight: deque[tuple[range, torch.cuda.Event]] = deque()
        try:
            for _ in starts:
                while len(in_flight) >= (1 if self._is_awaited else _IN_FLIGHT):
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
                file = self._chunks[index].file
                self._copied[file].append(index)
                if file not in self._writing:
                    self._writing.add(file)
                    self._futures.append(self._pool.submit(partial(self._write_copied, file)))

    def _write_copied(self, file: int) -> None:
        """Write all copied chunks of a file, also those that are copied meanwhile.

        A file has one task at a time: file systems like tmpfs let one thread write to it.
        """
        while indices := self._take_copied(file):
            if not self._can_write():
                return
            pieces: list[Piece] = []
            for index in indices:
                chunk = self._chunks[index]
                pieces.append((chunk.offset, self._slots[index], chunk.length))
            self._open_shard(file).write_pieces(pieces)
            for index in indices:
                self._finish_chunk(self._chunks[index], self._slots[index])

    def _take_copied(self, file: int) -> list[int]:
        """Return the next chunks of a file; if there are none, its task ends."""
        with self._lock:
            copied = self._copied[file]
            indices = [copied.popleft() for _ in range(min(len(copied), _WRITTEN_AT_ONCE))]
            if not indices:
                self._writing.remove(file)
            return indices

    def _allocate_copies(self, free: int, computed: torch.cuda.Event) -> dict[int, _DeviceCopy]:
        """Allocate copies of the last batches, by their first chunk, until the event is reached.

        They are as large as the memory that torch has reserved and does not use, so that the peak
        does not depend on how far the host is ahead of the device.
        """
        unused = min(free, torch.cuda.memory_reserved() - torch.cuda.memory_allocated())
        with self._queueing:
            unqueued = [*self._unqueued]
        copies: dict[int, _DeviceCopy] = {}
        with contextlib.suppress(torch.OutOfMemoryError):  # unused, but fragmented
            for batch in reversed(unqueued):
                unused -= self._count_bytes(batch)
                if unused < 0 or computed.query():
                    break
                copies[batch.start] = self._select_copies(batch).allocate_copy()
        return copies

    def _take_snapshot(self, allocated: dict[int, _DeviceCopy], free: int) -> bool:
        """Copy the chunks that are not queued yet on the device, in the current stream.

        `allocated` has copies of batches by their first chunk. Returns False if all are queued, or
        if there is too little `free` memory.
        """
        nbytes = sum(self._count_bytes(batch) for batch in self._unqueued)
        if nbytes == 0 or nbytes > free:
            return False
        copies: dict[int, _DeviceCopy] = {}
        try:
            self._check_unmodified()
            for batch in self._unqueued:
                copy = allocated.get(batch.start)
                copies[batch.start] = copy or self._select_copies(batch).allocate_copy()
        except CheckpointError as error:
            self._error = error  # `write` raises it
            self.cancel()
        except torch.OutOfMemoryError:  # free, but fragmented
            return False
        fill_copies([*copies.values()])
        self._snapshots = {start: copy.batch for start, copy in copies.items()}
        self._stream.wait_stream(torch.cuda.current_stream())
        return True

    def _count_bytes(self, batch: range) -> int:
        return sum(self._chunks[index].length for index in batch)

    def _fill_from_host(self, chunk: FileChunk, slot: Slot) -> None:
        """Copy the items of a chunk that are in host memory."""
        for at, index, item_slice in chunk.list_parts(self._plan.items):
            if not self._items[index].is_on_device:
                copy_on_host(self._items[index], slot, at, item_slice)

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
                    copy_on_host(live, slot, at, item_slice)
                    continue
                target, content = live.select(slot, at, item_slice)
                copies.targets.append(target)
                copies.contents.append(content)
                copies.scales.append(live.scale)
        return copies

    def _start_copies(self, copies: _DeviceBatch) -> torch.cuda.Event:
        """Queue copies, and return the event after them."""
        with torch.cuda.stream(self._stream):
            copies.start()
            # Reached once the slots are filled; a thread that waits for it does not spin.
            return self._stream.record_event(torch.cuda.Event(blocking=True))


def _find_free_memory() -> int:
    """Return the bytes of the device that training does not use, at its peak so far."""
    free, _ = torch.cuda.mem_get_info()
    cached = torch.cuda.memory_reserved() - torch.cuda.max_memory_allocated()
    return free + cached - _MEMORY_MARGIN

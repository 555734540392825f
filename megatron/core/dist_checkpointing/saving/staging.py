"""Snapshot of the state: from live tensors into host buffers that are allocated once and used for
every save.

The buffer contains images of the files as they will be on disk, in slots of `SLOT_SIZE` bytes:
page-aligned and sized in whole pages, so that they can be written past the page cache.

A rank's part of a save is a queue: chunks of the live state go through the slots into durable
files. With a slot for every chunk, the first tasks of the queue fill all slots, while the files are
still being created; the writes follow. So the snapshot is complete as early as possible. With fewer
slots (`--ckpt-staging-mem-limit`, synchronous saves) the snapshot takes as long as the writes: each
task stages a chunk and writes it at once, while its bytes are in the processor's cache. Objects and
`common` are copied by the save call (`objects.py`): later changes do not reach the checkpoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from megatron.core.dist_checkpointing.background import SLOT_SIZE, Slot, Workers
from megatron.core.dist_checkpointing.format.checksums import (
    BLOCK_SIZE,
    FileChecksums,
    compute_checksums,
    hash_blocks,
    split_at_blocks,
)
from megatron.core.dist_checkpointing.format.hashed_copy import copy_and_hash
from megatron.core.dist_checkpointing.mapping import (
    ShardedStateDict,
    ShardedTensor,
    find_row_axis,
    locate_rows,
    narrow,
    to_absolute,
    to_relative,
)
from megatron.core.dist_checkpointing.planning.rank_plan import FileChunk, RankPlan, WriteItem
from megatron.core.dist_checkpointing.saving.commit import PendingCheckpoint, Progress
from megatron.core.dist_checkpointing.saving.objects import ObjectFile
from megatron.core.dist_checkpointing.saving.pending_export import PendingExport
from megatron.core.dist_checkpointing.saving.shard import Shard
from megatron.core.private_operators import copy_tensors
from megatron.core.safe_files.errors import CheckpointError
from megatron.core.safe_files.schema import abbreviate

_COPIED_AT_ONCE = 16
"""Slots that one call fills from a device: the interpreter is busy for microseconds per call, and a
launch from the training thread waits that long. The first write begins after 128 MiB.
"""

_PRODUCTS = threading.Lock()
"""Held while a product of elements and their scale is on the device."""


class LiveItem:
    """The raw data of an item in one save: a contiguous live tensor, or rows that are read.

    The elements are converted to the dtype of the item while they are copied, in the background. A
    `scale`, a tensor of one element, is multiplied with them.
    """

    def __init__(self, item: WriteItem, entry: ShardedTensor) -> None:
        self.item = item
        self.scale = entry.scale
        self._read = entry.read
        self.tensor: torch.Tensor | None = None  # kept alive until the copy is done
        if entry.read is None:
            self.tensor = _select_rows(entry, item)
            self._version = _version_of(self.tensor)

    @property
    def is_on_device(self) -> bool:
        return self.tensor is not None and self.tensor.device.type != "cpu"

    @property
    def is_converted(self) -> bool:
        """Return whether the checkpoint stores another dtype than that of the tensor."""
        return self.tensor is not None and self.tensor.dtype != self.item.dtype

    def was_modified(self) -> bool:
        """Return whether an operation has changed the tensor in place since the save began."""
        return self.tensor is not None and _version_of(self.tensor) != self._version

    def select(self, slot: Slot, at: int, data: range) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the elements of a slot from byte `at` on, and the elements to copy to them.

        `data` is the range of bytes of the item.
        """
        assert self.tensor is not None
        # Bytes are copied as they are, elements of another dtype are cast.
        content = self.tensor.detach().reshape(-1)
        dtype = self.item.dtype if self.is_converted else torch.uint8
        if not self.is_converted:
            content = content.view(torch.uint8)
        target = slot.tensor[at : at + len(data)].view(dtype)
        first = data.start // dtype.itemsize
        return target, content[first : first + target.numel()]

    def copy(self, slot: Slot, at: int, data: range) -> None:
        """Copy a range of bytes from host memory, or read it, to byte `at` of a slot."""
        if self.tensor is None:
            slot.tensor[at : at + len(data)] = self._read_bytes(data)
        elif self.is_converted:
            target, content = self.select(slot, at, data)
            target.copy_(content)
            if self.scale is not None:
                target.mul_(self.scale)
        else:
            # memmove on addresses releases the interpreter's lock and starts no threads of torch's
            # own.
            source = self.tensor.data_ptr() + data.start
            ctypes.memmove(slot.address + at, source, len(data))

    def copy_and_hash(self, slot: Slot, at: int, data: range) -> bytes:
        """Copy whole blocks of checksums from host memory and return their digests."""
        assert self.tensor is not None
        if self.is_converted:
            self.copy(slot, at, data)
            return hash_blocks(slot.view[at : at + len(data)])
        source = self.tensor.data_ptr() + data.start
        return copy_and_hash(slot.address + at, source, len(data))

    def split_at_blocks(self, at: int, data: range) -> Iterator[tuple[int, range]]:
        """Separate the whole blocks of checksums from the ends of a range of bytes.

        Yields (byte of the slot, bytes of the item). The blocks of a converted tensor are separate,
        so that each is hashed while it is in the processor's second-level cache. Data that is read
        remains whole: it is read in whole rows.
        """
        if self.tensor is None:
            yield at, data
            return
        max_blocks = 1 if self.is_converted else SLOT_SIZE // BLOCK_SIZE
        for start, end in split_at_blocks(at, at + len(data), max_blocks):
            yield start, data[start - at : end - at]

    def _read_bytes(self, data: range) -> torch.Tensor:
        """Read a range of bytes, in whole rows."""
        assert self._read is not None
        item = self.item
        axis = find_row_axis(item.shape)
        row_bytes = item.nbytes // (1 if axis is None else item.shape[axis])
        first = data.start // row_bytes
        last = -(-data.stop // row_bytes)
        offset, shape = locate_rows(item.shape, first, last - first)
        values = self._read(to_absolute(item.offset, offset), shape)
        # The range may begin in the middle of a row.
        skipped = data.start - first * row_bytes
        return values.contiguous().view(-1).view(torch.uint8)[skipped : skipped + len(data)]


def _version_of(tensor: torch.Tensor) -> int:
    # Views share the counter of their base. Inference tensors have none.
    return 0 if tensor.is_inference() else tensor._version


def bind_items(items: Sequence[WriteItem], state: ShardedStateDict) -> list[LiveItem]:
    """Return the data of all items, over the live tensors of `state`."""
    tensors: dict[str, ShardedTensor] = {}
    for entry in state.values():
        if isinstance(entry, ShardedTensor):
            tensors[entry.key] = entry
    return [LiveItem(item, tensors[item.key]) for item in items]


def _select_rows(entry: ShardedTensor, item: WriteItem) -> torch.Tensor:
    """Return a contiguous tensor with the values of an item; views are kept with the entry."""
    key = (item.box, item.offset, item.shape)
    cached: torch.Tensor | None = entry.derived.get(key)
    if cached is not None:
        return cached
    # An empty box may have the same offset as the one after it, so take the last one.
    boxes = [box.tensor for box in entry.boxes if box.offset == item.box]
    box = boxes[-1]
    # Usually a view: an item is contiguous in a row-major box. Any other box is copied now.
    view = narrow(box, to_relative(item.offset, item.box), item.shape)
    tensor = view.contiguous()
    if tensor is view:
        entry.derived[key] = tensor
    return tensor


class StageAndWrite:
    """Transfer of this rank's data from live `items` to the data files of a checkpoint.

    `stage` allocates the slots and fills them; it touches no file. Call `abort` if `write` is not
    called or has failed. `staged` is set once the live tensors are not needed any more.
    """

    def __init__(
        self,
        plan: RankPlan,
        items: Sequence[LiveItem],
        make_objects: Callable[[], ObjectFile],
        stream: torch.cuda.Stream | None,
        pool: Workers,
        make_slots: Callable[[], list[Slot]],
    ) -> None:
        self.make_objects = make_objects
        self.staged = threading.Event()
        self.export: PendingExport | None = None  # of the same bytes
        self.waited_for = False  # training waits for the copies before it changes the tensors
        self.staged_at = 0.0  # time.perf_counter
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
        self._pool = pool
        self._make_slots = make_slots
        self._slots: list[Slot]
        self._progress: Progress
        self._open: list[Shard] = []
        self._files_are_open = threading.Event()

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
        # Queue all copies before the first write, because writes block until their file is open.
        with self._lock:
            indices = range(len(self._chunks))
            # Copies on the host run in the threads of the pool, so that each has a task of its own.
            step = _COPIED_AT_ONCE if self.on_device else 1
            for start in range(0, len(indices), step):
                batch = indices[start : start + step]
                self._futures.append(self._pool.submit(partial(self._stage_ahead, batch)))

    def _fits_in_slots(self) -> bool:
        return len(self._chunks) <= len(self._slots)

    def write(self, target: PendingCheckpoint, progress: Progress) -> dict[str, FileChecksums]:
        """Write all files durably to `target` and return their checksums. Raises the first
        error.
        """
        self._progress = progress
        # Create all files, which releases the tasks that wait to write.
        for file in self._files:
            self._open.append(target.open_shard(target.name_of(file.name), file.size))
        self._files_are_open.set()
        if not self._fits_in_slots():
            self._submit_by_slot()
        result: dict[str, FileChecksums] = {}
        objects = self.make_objects()
        if objects.content:
            name = target.name_of(objects.name)
            target.write_file(name, objects.content)
            result[name] = compute_checksums(objects.content)
        self._wait_for_tasks()
        if self.on_device and not self.waited_for:
            self._check_unmodified()  # copies on the device may have been overtaken by changes
        if self._failed:
            raise CheckpointError("cancelled")
        shards = self._open
        self._open = []
        # Flushing waits for the disk: flush all files at once.
        closing = [self._pool.submit(partial(shard.close, durable=True)) for shard in shards]
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
        self._files_are_open.set()
        for future in self._futures:  # tasks append further ones while this runs
            future.exception()
        shards = self._open
        self._open = []
        for shard in shards:
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

    def _stage_ahead(self, indices: Sequence[int]) -> None:
        """Stage some chunks, each into its own slot, and submit the tasks that write them."""
        if self._failed:
            return
        batch = [(self._chunks[index], self._slots[index]) for index in indices]
        copied, digests = self._stage(batch)
        with self._lock:
            for (chunk, slot), digests_of_chunk in zip(batch, digests, strict=True):
                write = partial(self._write, chunk, slot, copied, digests_of_chunk)
                self._futures.append(self._pool.submit(write))

    def _submit_by_slot(self) -> None:
        """Submit a task for each chunk that stages and writes it in the next free slot."""
        free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for slot in self._slots:
            free.put(slot)

        def stage_and_write(chunk: FileChunk) -> None:
            slot = free.get()
            try:
                if not self._failed:
                    copied, [digests] = self._stage([(chunk, slot)])
                    self._write(chunk, slot, copied, digests)
            finally:
                free.put(slot)

        for chunk in self._chunks:
            self._futures.append(self._pool.submit(partial(stage_and_write, chunk)))

    def _stage(
        self, batch: Sequence[tuple[FileChunk, Slot]]
    ) -> tuple[torch.cuda.Event | None, list[bytes | None]]:
        """Fill the slots of some chunks, or queue their copies on the device.

        A device fills the slots asynchronously, until the event that is returned. Also returns the
        digests of the blocks of each chunk, as far as they are known.
        """
        copied = None
        digests: list[bytes | None] = [None] * len(batch)
        if self.on_device:
            copied = self._copy_from_device(batch)
        else:
            digests = [self._copy_and_hash(chunk, slot) for chunk, slot in batch]
        with self._lock:
            self._unstaged -= len(batch)
            last = self._unstaged == 0
        if last:
            self._finish_staging()
        return copied, digests

    def _copy_from_device(self, batch: Sequence[tuple[FileChunk, Slot]]) -> torch.cuda.Event:
        """Queue the copies of some chunks; return the event after them.

        All copies are queued by one call that releases the interpreter, and one for each part with
        a scale.
        """
        assert self._stream is not None
        targets: list[torch.Tensor] = []
        contents: list[torch.Tensor] = []
        scaled: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        with torch.cuda.stream(self._stream):
            for chunk, slot in batch:
                for at, index, item_slice in chunk.list_parts(self._plan.items):
                    live = self._items[index]
                    if isinstance(item_slice, bytes) or not live.is_on_device:
                        _copy_on_host(live, slot, at, item_slice)
                        continue
                    target, content = live.select(slot, at, item_slice)
                    if live.scale is not None:
                        scaled.append((target, content, live.scale))
                    else:
                        targets.append(target)
                        contents.append(content)
            if targets:
                copy_tensors(targets, contents)
            # One product at a time: its memory serves for the next one, because the stream is the
            # same.
            for target, content, scale in scaled:
                with _PRODUCTS:
                    target.copy_(content.to(target.dtype).mul_(scale), non_blocking=True)
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
        self._files_are_open.wait()
        if self._failed:
            return
        if copied is not None:
            copied.synchronize()
        self._open[chunk.file].write(chunk.offset, slot, chunk.length, digests)
        if self.export is not None:
            self.export.write(self._plan.items, chunk, slot)
        self._progress(chunk.length)


def _copy_on_host(live: LiveItem, slot: Slot, at: int, item_slice: bytes | range) -> None:
    """Copy a part of an item in host memory to byte `at` of a slot."""
    if isinstance(item_slice, bytes):
        slot.view[at : at + len(item_slice)] = item_slice
    else:
        live.copy(slot, at, item_slice)

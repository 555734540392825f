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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

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
    Shape,
    ShardedStateDict,
    ShardedTensor,
    find_row_axis,
    narrow,
    to_relative,
)
from megatron.core.dist_checkpointing.planning.items import Item
from megatron.core.dist_checkpointing.planning.save_plan import FileChunk, FilePlan, SourceRange
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


class LiveSource:
    """A contiguous live tensor whose elements are copied as `dtype` in the background.

    With `scale`, a tensor of one element, they are multiplied.
    """

    def __init__(
        self, key: str, tensor: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None
    ) -> None:
        self.key = key
        self.scale = scale
        self._tensor = tensor  # kept alive until the copy is done
        self._version = _version_of(tensor)
        # Bytes are copied as they are, elements of another dtype are cast.
        self._dtype = torch.uint8 if tensor.dtype == dtype else dtype
        content = tensor.detach().reshape(-1)
        self._content = content.view(torch.uint8) if tensor.dtype == dtype else content

    @property
    def is_converted(self) -> bool:
        """Return whether the checkpoint stores another dtype than that of the tensor."""
        return self._dtype != torch.uint8

    def was_modified(self) -> bool:
        """Return whether an operation has changed the tensor in place since the save began."""
        return _version_of(self._tensor) != self._version

    def select(self, slot: Slot, part: SourceRange) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the place of a part in a slot, and the elements to copy to it."""
        target = slot.tensor[part.at : part.at + part.length].view(self._dtype)
        first = part.start // self._dtype.itemsize
        return target, self._content[first : first + target.numel()]


def _version_of(tensor: torch.Tensor) -> int:
    # Views share the counter of their base. Inference tensors have none.
    return 0 if tensor.is_inference() else tensor._version


class HostSource(LiveSource):
    """A contiguous CPU tensor."""

    def copy(self, slot: Slot, part: SourceRange) -> None:
        if self.is_converted:
            target, content = self.select(slot, part)
            target.copy_(content)
            if self.scale is not None:
                target.mul_(self.scale)
            return
        # memmove on addresses releases the interpreter's lock and starts no threads of torch's own.
        ctypes.memmove(slot.address + part.at, self._address_of(part), part.length)

    def copy_and_hash(self, slot: Slot, part: SourceRange) -> bytes:
        """Copy whole blocks of checksums and return their digests."""
        if self.is_converted:
            self.copy(slot, part)
            return hash_blocks(slot.view[part.at : part.at + part.length])
        return copy_and_hash(slot.address + part.at, self._address_of(part), part.length)

    def _address_of(self, part: SourceRange) -> int:
        return self._tensor.data_ptr() + part.start


class DeviceSource(LiveSource):
    """A contiguous tensor on an accelerator."""


class DeviceCopies:
    """Copies from a device to slots, queued by one call that releases the interpreter, and one for
    each part with a scale.
    """

    def __init__(self) -> None:
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        self._scaled: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def add(self, source: DeviceSource, slot: Slot, part: SourceRange) -> None:
        target, content = source.select(slot, part)
        if source.scale is not None:
            self._scaled.append((target, content, source.scale))
            return
        self._targets.append(target)
        self._sources.append(content)

    def queue(self) -> None:
        """Queue all copies on the current stream."""
        if self._targets:
            copy_tensors(self._targets, self._sources)
        # One product at a time: its memory serves for the next one, because the stream is the same.
        for target, content, scale in self._scaled:
            with _PRODUCTS:
                target.copy_(content.to(target.dtype).mul_(scale), non_blocking=True)


class LazySource:
    """The bytes of an item that is read while it is staged, in whole rows."""

    def __init__(self, read: Callable[[Shape, Shape], torch.Tensor], item: Item) -> None:
        self._read = read
        self._item = item

    def copy(self, slot: Slot, part: SourceRange) -> None:
        item = self._item
        axis = find_row_axis(self._item.shape)
        row = item.nbytes // (1 if axis is None else item.shape[axis])
        first = part.start // row
        last = -(-(part.start + part.length) // row)
        rows = item.select_rows(first, last - first)
        values = self._read(rows.offset, rows.shape).contiguous().view(-1).view(torch.uint8)
        # A part may begin in the middle of a row.
        skipped = part.start - first * row
        slot.tensor[part.at : part.at + part.length] = values[skipped : skipped + part.length]


ByteSource = bytes | HostSource | DeviceSource | LazySource


def bind_sources(plan: FilePlan, state: ShardedStateDict) -> list[ByteSource]:
    """Return all sources, numbered as in `FilePlan`, over the live tensors of `state`."""
    tensors: dict[str, ShardedTensor] = {}
    for entry in state.values():
        if isinstance(entry, ShardedTensor):
            tensors[entry.key] = entry

    # Three sources per item: prefix, raw data, suffix.
    sources: list[ByteSource] = []
    for file in plan.files:
        for item, _, prefix, suffix in file.items:
            entry = tensors[item.key]
            if entry.read is not None:
                data: ByteSource = LazySource(entry.read, item)
            else:
                data = _bind_item(item, _select_item(entry, item), entry.scale)
            sources += [prefix, data, suffix]
    return sources


def _bind_item(
    item: Item, tensor: torch.Tensor, scale: torch.Tensor | None
) -> HostSource | DeviceSource:
    """Return the elements of an item, which is the contiguous `tensor`."""
    if tensor.device.type == "cpu":
        return HostSource(item.key, tensor, item.dtype, scale)
    return DeviceSource(item.key, tensor, item.dtype, scale)


def _select_item(entry: ShardedTensor, item: Item) -> torch.Tensor:
    """Return a contiguous tensor with the values of an item; views are kept with the entry."""
    place = (item.box, item.offset, item.shape)
    known: torch.Tensor | None = entry.derived.get(place)
    if known is not None:
        return known
    # An empty box may have the same offset as the one after it, so take the last one.
    boxes = [box.tensor for box in entry.boxes if box.offset == item.box]
    box = boxes[-1]
    # Usually a view: an item is contiguous in a row-major box. Any other box is copied now.
    view = narrow(box, to_relative(item.offset, item.box), item.shape)
    tensor = view.contiguous()
    if tensor is view:
        entry.derived[place] = tensor
    return tensor


def copy_on_host(source: ByteSource, slot: Slot, part: SourceRange) -> None:
    """Copy a part of a source in host memory to its place in a slot."""
    if isinstance(source, bytes):
        content = source[part.start : part.start + part.length]
        slot.view[part.at : part.at + part.length] = content
        return
    assert not isinstance(source, DeviceSource)
    source.copy(slot, part)


def split_part(part: SourceRange, source: ByteSource) -> list[SourceRange]:
    """Separate the whole blocks of checksums from the ends of a live tensor's part.

    The blocks of a converted tensor are separate pieces, so that each is hashed while it is in the
    processor's second-level cache. Other sources remain whole: short ones, and those that are read
    in whole rows.
    """
    if not isinstance(source, HostSource):
        return [part]
    max_blocks = 1 if source.is_converted else SLOT_SIZE // BLOCK_SIZE
    pieces = []
    for at, end in split_at_blocks(part.at, part.at + part.length, max_blocks):
        start = part.start + at - part.at
        pieces.append(SourceRange(at, part.source, start, end - at))
    return pieces


class StagedChunk(NamedTuple):
    """A chunk in its slot.

    A device fills the slot asynchronously, until the event `copied`. `digests` are those of the
    blocks, if they are known.
    """

    chunk: FileChunk
    slot: Slot
    copied: torch.cuda.Event | None
    digests: bytes | None


class StageAndWrite:
    """Transfer of this rank's data from `sources` to the data files of a checkpoint.

    `begin` allocates the slots and fills them; it touches no file. Call `abort` if `write` is not
    called or has failed. `staged` is set once the live tensors are not needed any more.
    """

    def __init__(
        self,
        plan: FilePlan,
        sources: Sequence[ByteSource],
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
        self._sources = sources
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

    def begin(self) -> None:
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
        for staged in self._stage(batch):
            with self._lock:
                self._futures.append(self._pool.submit(partial(self._write, staged)))

    def _submit_by_slot(self) -> None:
        """Submit a task for each chunk that stages and writes it in the next free slot."""
        free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for slot in self._slots:
            free.put(slot)

        def stage_and_write(chunk: FileChunk) -> None:
            slot = free.get()
            try:
                if not self._failed:
                    [staged] = self._stage([(chunk, slot)])
                    self._write(staged)
            finally:
                free.put(slot)

        for chunk in self._chunks:
            self._futures.append(self._pool.submit(partial(stage_and_write, chunk)))

    def _stage(self, batch: Sequence[tuple[FileChunk, Slot]]) -> list[StagedChunk]:
        """Fill the slots of some chunks, or queue their copies on the device."""
        staged = self._copy_from_device(batch) if self.on_device else self._copy_on_host(batch)
        with self._lock:
            self._unstaged -= len(batch)
            last = self._unstaged == 0
        if last:
            self._finish_staging()
        return staged

    def _copy_from_device(self, batch: Sequence[tuple[FileChunk, Slot]]) -> list[StagedChunk]:
        assert self._stream is not None
        with torch.cuda.stream(self._stream):
            copies = DeviceCopies()
            for chunk, slot in batch:
                for part in chunk.parts:
                    source = self._sources[part.source]
                    if isinstance(source, DeviceSource):
                        copies.add(source, slot, part)
                    else:
                        copy_on_host(source, slot, part)
            copies.queue()
            # Reached once the slots are filled; a thread that waits for it does not spin.
            copied = self._stream.record_event(torch.cuda.Event(blocking=True))
        return [StagedChunk(chunk, slot, copied, digests=None) for chunk, slot in batch]

    def _copy_on_host(self, batch: Sequence[tuple[FileChunk, Slot]]) -> list[StagedChunk]:
        staged = []
        for chunk, slot in batch:
            digests = self._copy_and_hash(chunk, slot)
            staged.append(StagedChunk(chunk, slot, None, digests))
        return staged

    def _copy_and_hash(self, chunk: FileChunk, slot: Slot) -> bytes:
        """Fill a slot from host memory and return the digests of its blocks."""
        digests = []
        hashed = 0
        # The parts are in order and cover the chunk.
        for part in chunk.parts:
            source = self._sources[part.source]
            for piece in split_part(part, source):
                end = piece.at + piece.length
                is_whole_blocks = piece.at % BLOCK_SIZE == 0 and end % BLOCK_SIZE == 0
                if is_whole_blocks and isinstance(source, HostSource):
                    digests.append(source.copy_and_hash(slot, piece))
                    hashed = end
                    continue
                copy_on_host(source, slot, piece)
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
                self._sources = ()  # temporary copies can go; on a device they may still be read
            self.staged_at = time.perf_counter()
            self.staged.set()

    def _check_unmodified(self) -> None:
        """Raise CheckpointError if a tensor was changed in place before it was staged."""
        live = [source for source in self._sources if isinstance(source, LiveSource)]
        modified = dict.fromkeys(source.key for source in live if source.was_modified())
        if modified:
            raise CheckpointError(
                f"changed before their values were staged: {abbreviate([*modified], 5, ', ')}: "
                "call "
                "wait_staged() between save() and the first operation that changes a tensor"
            )

    def _write(self, staged: StagedChunk) -> None:
        self._files_are_open.wait()
        if self._failed:
            return
        if staged.copied is not None:
            staged.copied.synchronize()
        chunk = staged.chunk
        self._open[chunk.file].write(chunk.offset, staged.slot, chunk.length, staged.digests)
        if self.export is not None:
            self.export.write(self._plan, chunk, staged.slot)
        self._progress(chunk.length)

"""One rank's part of a save: chunks of the live state through staging slots into durable files.

The first tasks of the queue fill all slots, while the files are still being created; the writes follow. When a slot is
written, the next chunk is staged into it. So with room for everything the snapshot is complete as early as possible,
and with less the memory stays bounded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.checksums import FileChecksums, checksums_of
from megatron.core.dist_checkpointing.planning.file_layout import FileLayout
from megatron.core.dist_checkpointing.saving.commit import Progress
from megatron.core.dist_checkpointing.saving.shard_file import ShardFile
from megatron.core.dist_checkpointing.saving.snapshot import ObjectFile
from megatron.core.dist_checkpointing.saving.staging import Chunk, Slot, Source
from megatron.core.dist_checkpointing.threads import Workers
from megatron.core.durable_files import fsync_directory, write_flushed


class Transfer:
    """Stages and writes `chunks` of `sources`; `staged` is set when the live tensors are not needed any more.

    `stage` begins to copy and touches no file; `write` returns when all files are durable; `abort` if it is not called
    or has failed.
    """

    def __init__(
        self,
        files: Sequence[FileLayout],
        chunks: Sequence[Chunk],
        sources: Sequence[Source],
        objects: ObjectFile,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self.staged = threading.Event()
        self.staged_at = 0.0
        self._files, self._chunks, self._objects, self._stream = files, chunks, objects, stream
        self._sources: Sequence[Source] = sources
        self._unstaged = len(chunks)
        self._lock = threading.Lock()
        self._futures: list[Future[Any]] = []
        self._failed = False
        self._pool: Workers
        self._slots: list[Slot]
        self._progress: Progress
        self._open: list[ShardFile] = []
        self._files_are_open = threading.Event()

    @property
    def on_device(self) -> bool:
        return self._stream is not None

    def stage(self, pool: Workers, slots: list[Slot]) -> None:
        """Begin to copy as much as there are slots for."""
        self._pool, self._slots = pool, slots
        if not self._chunks:
            self._finish_staging()
        with self._lock:  # all copies stand in the queue before the first write, which waits for its file
            for index in range(min(len(slots), len(self._chunks))):
                self._futures.append(pool.submit(partial(self._stage, index)))

    def write(self, directory: Path, progress: Progress) -> dict[str, FileChecksums]:
        """Returns when all files are durable in `directory`. Raises the first error of any piece."""
        self._progress = progress
        for file in self._files:
            self._open.append(ShardFile(directory / file.name, file.size))
        self._files_are_open.set()
        result: dict[str, FileChecksums] = {}
        if self._objects.content:
            write_flushed(directory / self._objects.name, self._objects.content)
            result[self._objects.name] = checksums_of(self._objects.content)
        self._wait()
        shards, self._open = self._open, []
        closing = [self._pool.submit(partial(shard.close, durable=True)) for shard in shards]
        sums = [future.exception() or future.result() for future in closing]  # every file is closed before any error
        for file, checksums in zip(self._files, sums, strict=True):
            if isinstance(checksums, BaseException):
                raise checksums
            result[file.name] = checksums
        if result:
            fsync_directory(directory)
        return result

    def abort(self) -> None:
        """Let the tasks under way run out, and close all files."""
        self._failed = True
        self._files_are_open.set()
        position = 0
        while position < len(self._futures):
            self._futures[position].exception()
            position += 1
        shards, self._open = self._open, []
        for shard in shards:
            shard.close(durable=False)
        self.staged.set()

    def _submit(self, task: Any, index: int) -> None:
        with self._lock:
            self._futures.append(self._pool.submit(partial(task, index)))

    def cancel(self) -> None:
        """From any thread: `write` raises as soon as the pieces under way are done."""
        self._failed = True

    def _wait(self) -> None:
        """Until all tasks are done, those included that others submit meanwhile; raises the first error."""
        position = 0
        while position < len(self._futures):
            self._futures[position].result()
            position += 1
        if self._failed:
            raise CheckpointError("cancelled")

    def _stage(self, index: int) -> None:
        if self._failed:
            return
        chunk, slot = self._chunks[index], self._slots[index % len(self._slots)]
        copied = None
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for part in chunk.parts:
                self._sources[part.source].copy(slot, part)
            if self._stream is not None:
                copied = self._stream.record_event()
        with self._lock:
            self._unstaged -= 1
            last = self._unstaged == 0
        if last:
            self._finish_staging()
        self._submit(lambda number: self._write(number, copied), index)

    def _finish_staging(self) -> None:
        if self._stream is None:
            self._sources = ()  # temporary copies can go; on a device they may still be read
        self.staged_at = time.perf_counter()
        self.staged.set()

    def _write(self, index: int, copied: torch.cuda.Event | None) -> None:
        self._files_are_open.wait()
        if self._failed:
            return
        chunk, slot = self._chunks[index], self._slots[index % len(self._slots)]
        if copied is not None:
            copied.synchronize()
        self._open[chunk.file].write(chunk.offset, slot.view, chunk.length)
        self._progress(chunk.length)
        following = index + len(self._slots)
        if following < len(self._chunks):
            self._stage(following)

"""Saving in four steps, of which only the first two involve the training thread.

* **plan** (`prepare`, or the first `save`): all ranks describe their state, rank 0 assigns a writer
  to every box. Collective; the plan is cached while the structure is unchanged.
* **stage**: live tensors are copied into host buffers, in the background. `wait_staged` returns
  when that is done: call it before anything changes the tensors, which is the optimizer step.
  Objects and `common` are copied before `save` returns, and encoded in the background. No file is
  touched before, and none on the training thread.
* **write**: shard files, durable, with checksums, by background threads.
* **commit**: by rank 0 when all ranks are durable (`save_thread.py`, `commit.py`). No collective.

A save that fails is reported (`poll`, `finish`), its files are removed, and training can go on.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing.background import (
    SLOT_SIZE,
    StagingBuffer,
    Workers,
    default_workers,
)
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.dist_checkpointing.ownership.fencing import Generation
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.dist_checkpointing.planning.rank_plan import Planner, RankPlan
from megatron.core.dist_checkpointing.planning.save_plan import file_name
from megatron.core.dist_checkpointing.saving.commit import (
    PendingCheckpoint,
    Rewrite,
    pending_checkpoint,
)
from megatron.core.dist_checkpointing.saving.live_items import LiveItem, bind_items
from megatron.core.dist_checkpointing.saving.objects import (
    ObjectFile,
    encode_common,
    encode_objects,
    snapshot_common,
    snapshot_objects,
)
from megatron.core.dist_checkpointing.saving.save_thread import (
    Hooks,
    SaveHandle,
    SaveReport,
    SaveThread,
)
from megatron.core.dist_checkpointing.saving.staging import StageAndWrite
from megatron.core.object_path import path_of
from megatron.core.safe_files.errors import CheckpointError
from megatron.core.wings import resolve

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.saving.device_staging import StageFromDevice
    from megatron.core.dist_checkpointing.saving.pending_export import PendingExport

logger = logging.getLogger(__name__)

_STAGE_FROM_DEVICE = "megatron.core.dist_checkpointing.saving.device_staging:StageFromDevice"

Common = dict[str, Any] | Callable[[], dict[str, Any]]
MakeExport = Callable[[str], "PendingExport"]
"""Makes the export of a save from the save's id."""


class AsyncSaver(SaveThread):
    """Saves checkpoints of one state repeatedly.

    All ranks of `group` make the same calls in the same order. `fully_parallel` distributes the
    writing of replicated boxes. Each rank writes `workers` files at once, by default
    `default_workers()`; the value of rank 0 determines the number of files. `staging_mem_limit`
    (bytes) limits the host buffers: below the size of a rank's share, the snapshot takes as long as
    writing. Leaving a `with` block by an exception cancels the save in progress.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        fully_parallel: bool = True,
        workers: int | None = None,
        staging_mem_limit: int | None = None,
        timeout: float = 600.0,
        assume_constant_structure: bool = False,
        progress: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        if workers is None:
            workers = default_workers()
        if workers < 1:
            raise ValueError(f"workers {workers} must be at least 1")
        super().__init__(Coordination.of(group), timeout, progress, "checkpoint-save-thread")
        self._planner = Planner(
            self._coordination, fully_parallel, workers, assume_constant_structure
        )
        self._workers = workers
        self._count = 0
        # At least two slots: one is written while the other one is filled.
        self._max_slots = (
            None if staging_mem_limit is None else max(2, staging_mem_limit // SLOT_SIZE)
        )
        self._buffer: StagingBuffer | None = None
        self._stream: torch.cuda.Stream | None = None
        self._stager: Workers | None = None  # queues copies in this stream
        self._pool = Workers(
            2 * workers, "checkpoint-writer"
        )  # while one copies and hashes, another one writes

    def prepare(self, state: ShardedStateDict) -> Future[object]:
        """Plan and allocate before the first save, which then costs as much as the others.

        Collective. Returns at once; the result is ready when the memory is allocated. A failure is
        not reported here: the first save tries again.
        """
        # The buffers need the plan for their size, and the tensors for the kind of memory.
        plan = self._planner.plan_for(state)
        tensors = [entry for entry in state.values() if not isinstance(entry, ShardedObject)]
        if any(box.tensor.is_cuda for entry in tensors for box in entry.boxes):
            items = bind_items(plan.items, state)
            transfer = self._transfer_from_device(plan, items, lambda: ObjectFile("", b"", {}))
            return self._thread.submit(transfer.warm_up)
        return self._thread.submit(lambda: self._slots(plan, pinned=False, touch=True))

    def save(
        self,
        state: ShardedStateDict,
        directory: str | os.PathLike[str],
        *,
        common: Common,
        generation: Generation | None = None,
        pending: Callable[[str], PendingCheckpoint] | None = None,
        before_writing: Callable[[], None] = lambda: None,
        rewrite: Rewrite | None = None,
        extra_files: Mapping[str, bytes] | None = None,
        on_commit: Callable[[], None] = lambda: None,
        export: MakeExport | None = None,
        since: float | None = None,
    ) -> SaveHandle:
        """Begin to save `state` as the checkpoint `directory`; waits for the save before it, if
        that still runs.

        `common` is stored by rank 0; a function that returns it is called in the background. With a
        `generation` the checkpoint appears only as long as that owns the directory of checkpoints.
        `pending` makes another kind of checkpoint from the save's id. `export` makes an export of
        the same tensors, which is committed after the checkpoint; its failure is a warning.

        On rank 0, in the background: `before_writing` runs before any rank writes; `rewrite` stores
        the checkpoint in another form before it has its name; `extra_files` are small files that
        are added to it then; `on_commit` runs right after the commit (it moves the tracker). Only
        planning errors are raised; all others are reported. Times are measured from `since`
        (time.perf_counter), by default from this call.
        """
        # Phase 1: plan. The cached plan is valid if the structure is unchanged on all ranks.
        self._wait_for_current()
        started = time.perf_counter() if since is None else since
        plan = self._planner.plan_for(state)
        self._count += 1
        save_id = f"{plan.nonce}-{self._count}"
        grows = (
            pending_checkpoint(path_of(directory), save_id, generation)
            if pending is None
            else pending(save_id)
        )
        # Take the snapshot: objects now, tensors while they are staged.
        hooks = Hooks(before_writing, rewrite, extra_files or {}, on_commit)
        current = SaveHandle(plan, self._make_barrier(save_id), grows, hooks, started)
        if export is not None:
            current.export = export(save_id)
        # If this rank fails, the others must learn of it: continue, so that the save fails on every
        # rank.
        current.failure = CheckpointError("interrupted")
        self._start(current)
        try:
            current.make_common, current.transfer = self._take_snapshot(plan, state, common)
            current.failure = None
        except Exception as error:
            current.failure = error
        finally:
            # Phases 2 to 4, in the background
            self._run_in_background(current, self._stage, self._write, self._commit)
        current.report.call_wait = current.elapsed()
        return current

    def wait_staged(self) -> None:
        """Return once the tensors of the last save may change.

        On CUDA the current stream waits for the copies that are in flight; the host waits for the
        stream, so that as many as possible have ended.
        """
        current = self._current
        if current is None or current.transfer is None or current.done():
            return
        transfer = current.transfer
        if not transfer.on_device:
            begin = time.perf_counter()
            transfer.before_change()
            current.report.update_wait += time.perf_counter() - begin
        elif current.device_wait is None:
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
            transfer.before_change()
            events[1].record()
            current.device_wait = events

    def close(self) -> None:
        """Finish, end the threads and free the buffers."""
        super().close()
        self._pool.close()
        if self._stager is not None:
            self._stager.close()
            self._stager = None
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(self, exception_type: object, *_: object) -> None:
        if (
            exception_type is not None
            and self._current is not None
            and self._current.transfer is not None
        ):
            self._current.transfer.cancel()
        self.close()

    def _take_snapshot(
        self, plan: RankPlan, state: ShardedStateDict, common: Common
    ) -> tuple[Callable[[], bytes], StageAndWrite]:
        """Copy objects that may change and `common` before `save` returns.

        Returns the function that makes the content of common.pt, and the transfer of everything
        else.
        """
        make_archive = self._snapshot_common(common)
        # Objects that this rank writes.
        local_keys = set(plan.objects)
        entries = [
            entry
            for entry in state.values()
            if isinstance(entry, ShardedObject) and entry.key in local_keys
        ]
        objects = snapshot_objects(entries)
        name = file_name(self._coordination.rank, plan.files_per_rank)
        make_objects = cache(partial(encode_objects, objects, name))
        # They keep the live tensors alive until they are copied.
        items = bind_items(plan.items, state)
        if any(live.is_on_device for live in items):
            return make_archive, self._transfer_from_device(plan, items, make_objects)
        slots = partial(self._slots, plan, pinned=False)
        return make_archive, StageAndWrite(plan, items, make_objects, self._pool, slots)

    def _transfer_from_device(
        self, plan: RankPlan, items: Sequence[LiveItem], make_objects: Callable[[], ObjectFile]
    ) -> StageFromDevice:
        self._stream = self._stream or torch.cuda.Stream()
        self._stager = self._stager or Workers(1, "checkpoint-stager")
        # The copies must see the last update.
        self._stream.wait_stream(torch.cuda.current_stream())
        slots = partial(self._slots, plan, pinned=True)
        arguments = (plan, items, make_objects, self._pool, slots, self._stream, self._stager)
        transfer: StageFromDevice = resolve(_STAGE_FROM_DEVICE)(*arguments)
        return transfer

    def _snapshot_common(self, common: Common) -> Callable[[], bytes]:
        if not self._coordination.is_coordinator:
            return bytes
        if callable(common):
            return cache(lambda: encode_common(common()))
        return cache(snapshot_common(common))

    def _slots(self, plan: RankPlan, pinned: bool, touch: bool = False) -> list:
        """Return the staging slots; allocates them if the plan needs more."""
        # One slot per chunk stages the whole share at once; a limit makes slots circulate.
        needed = max(1, min(len(plan.chunks), self._max_slots or len(plan.chunks)))
        if self._buffer is None or len(self._buffer.slots) < needed:
            if self._buffer is not None:
                self._buffer.close()
                self._buffer = None  # in case the allocation below fails
            self._buffer = self._allocate(needed, pinned)
            if touch:
                self._buffer.touch()
        return self._buffer.slots

    def _allocate(self, count: int, pinned: bool) -> StagingBuffer:
        """Allocate slots; fewer or unpinned ones if that many cannot be pinned.

        The limit of pinned memory depends on the host and its other processes. A slower save is
        better than none.
        """
        if not pinned:
            return StagingBuffer(count, pinned=False)
        # Try all slots, then as many as keep the writers busy.
        fewest = min(count, staging_for_waiting(self._workers) // SLOT_SIZE)
        for attempt in (count, fewest):
            try:
                buffer = StagingBuffer(attempt, pinned=True)
            except MemoryError as error:
                failure = str(error)  # the error refers to the memory that was not pinned
                continue
            if attempt < count:
                self._max_slots = attempt
                logger.warning(
                    f"{failure}: asynchronous saves use {attempt * SLOT_SIZE >> 20} MiB per rank "
                    "instead, and take longer to copy the state"
                )
            return buffer
        logger.warning(
            f"{failure}: asynchronous saves use {fewest * SLOT_SIZE >> 20} MiB of memory that is "
            "not pinned, and training waits for their copies"
        )
        self._max_slots = fewest
        return StagingBuffer(fewest, pinned=False)


def staging_for_waiting(workers: int) -> int:
    """Return the bytes of host buffers that keep `workers` writers busy.

    Staging the whole shard only helps asynchronous saves.
    """
    return 8 * workers * SLOT_SIZE


def save(
    state: ShardedStateDict,
    directory: str | os.PathLike[str],
    *,
    common: dict[str, Any],
    group: dist.ProcessGroup | None = None,
    fully_parallel: bool = True,
    workers: int | None = None,
    on_commit: Callable[[], None] = lambda: None,
    rewrite: Rewrite | None = None,
    extra_files: Mapping[str, bytes] | None = None,
    timeout: float = 600.0,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> SaveReport:
    """Save synchronously: return on every rank once the checkpoint is committed.

    Raises CheckpointError on every rank if the save fails. No file of it is left then, and an
    earlier checkpoint in `directory` is unchanged.
    """
    if workers is None:
        workers = default_workers()
    with AsyncSaver(
        group,
        fully_parallel=fully_parallel,
        workers=workers,
        staging_mem_limit=staging_for_waiting(workers),
        timeout=timeout,
        progress=progress,
    ) as saver:
        saver.save(
            state,
            directory,
            common=common,
            on_commit=on_commit,
            rewrite=rewrite,
            extra_files=extra_files,
        )
        (report,) = saver.finish()
    if report.error is not None:
        raise CheckpointError(f"{report.directory}: not saved: {report.error}")
    return report

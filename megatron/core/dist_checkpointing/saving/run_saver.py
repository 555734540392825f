"""Save the checkpoints of a run, one after another, synchronously or in the background."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.core.dist_checkpointing.background import default_workers, end_saver_at_exit
from megatron.core.dist_checkpointing.checkpoint_directory import CheckpointDirectory
from megatron.core.dist_checkpointing.files import is_complete, read_tracker, write_tracker
from megatron.core.dist_checkpointing.local_checkpoints import (
    Copier,
    Tier,
    TierSaver,
    make_copier,
    make_local_saver,
)
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.ownership.fencing import Generation
from megatron.core.dist_checkpointing.ownership.lineage import (
    LINEAGE,
    Lineage,
    Segment,
    iteration_in_name,
)
from megatron.core.dist_checkpointing.saving.commit import Rewrite
from megatron.core.dist_checkpointing.saving.retention import (
    Retention,
    RetentionRules,
)
from megatron.core.dist_checkpointing.saving.save_cost import IterationTimes
from megatron.core.dist_checkpointing.saving.save_thread import SaveHandle, SaveReport, SaveThread
from megatron.core.dist_checkpointing.saving.saver import (
    AsyncSaver,
    Common,
    staging_for_waiting,
)
from megatron.core.safe_files.errors import CheckpointError

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.saving.pending_export import ExportTarget

logger = logging.getLogger(__name__)


class SaveFailedError(ValueError):
    """A checkpoint could not be saved, and the run must stop, or must not end as a success."""


@dataclass(frozen=True)
class SaveOptions:
    """Options for saving the checkpoints of a run.

    `async_save` writes them in the background. `fully_parallel` distributes the writing of
    replicated data over all ranks that hold it. Each rank writes `workers` files at once.
    `staging_mem_limit` limits the host buffers of a rank, in bytes. A save fails if the process of
    any rank is dead or suspended for `timeout` seconds. `assume_constant_structure` plans only the
    first save. With `must_succeed` a failed save is an error instead of a warning. `retention`
    applies to the checkpoints that `is_checkpoint` recognizes. `files` are small files that every
    checkpoint contains, by their path in it. The first of every `replication_interval` checkpoints
    on the disks of the nodes is replicated.
    """

    async_save: bool = False
    fully_parallel: bool = True
    workers: int = field(default_factory=default_workers)
    staging_mem_limit: int | None = None
    timeout: float = 600.0
    assume_constant_structure: bool = False
    must_succeed: bool = False
    retention: RetentionRules = field(default_factory=RetentionRules)
    is_checkpoint: Callable[[Path], bool] = is_complete
    files: Mapping[str, bytes] = field(default_factory=dict)
    replication_interval: int = 1


SavedCallback = Callable[[SaveReport, bool], None]


class RunSaver:
    """Saves all checkpoints of a run, so that the plan and host buffers are made only once.

    With a local tier and `async_save`, a checkpoint is first saved to the disks of the nodes and
    copied to the run's directory from there: a slow upload then delays neither training nor later
    local saves. It is saved directly to the run's directory when training ends, with a `rewrite`,
    and if the last local save has failed. `on_saved` is called with the report of each committed
    checkpoint, and whether it is a local one.

    Sequence of calls, on all ranks: `own` at the start; `save` after an iteration; `before_update`
    before the optimizer changes anything; `after_iteration` after each iteration; `close` and
    `check_last_save` at the end. Iterations in a block of `iteration` are measured: what they lose
    during a save is reported as a cost of the save.

    A save that fails is reported, and the previous checkpoint remains the newest. Training
    continues, unless it `must_succeed` or another launch has taken over the directory: then `save`
    and `close` raise SaveFailedError. With `async_save` the ranks notice a failure at different
    times, so it is only recorded in `failure` until all ranks call `stop` together.
    """

    def __init__(
        self,
        options: SaveOptions,
        on_saved: SavedCallback = lambda report, is_local: None,
    ) -> None:
        self._options = options
        self._on_saved = on_saved

        # Threads and buffers, created when they are first used.
        self._saver: AsyncSaver | None = None
        self._copier: Copier | None = None
        self._local_saver: TierSaver | None = None
        self._preparation: Future[object] | None = None

        self._times = IterationTimes()
        self._unreported: list[SaveReport] = []  # ended during iterations that still run on a GPU

        # Ownership of the run's directory and of the one on the nodes.
        self._generation: Generation | None = None
        self._retention: Retention | None = None
        self._tier: Tier | None = None
        self._loaded_locally: str | None = None
        self._lineage = Lineage(())  # of the checkpoint that the run has continued from
        self._parent: int | None = None  # iteration of the checkpoint before

        # Steps after the last commit that are not done yet, of this launch or of the one before.
        self._after_commit: Callable[[], None] | None = None

        # Outcomes of earlier saves.
        self._local_report: SaveReport | None = None  # of the last local save
        self._copied_report: SaveReport | None = None  # of the last local save to be copied
        # Level and text, logged after the message of the save that caused the removal.
        self._removal_messages: list[tuple[int, str]] = []
        self._last_failure: str | None = None  # of the last save, if it failed
        self.failure: str | None = None
        end_saver_at_exit(self)
        self.expected_seconds = 0.0  # how long the last save took from the call to the commit

    @property
    def generation(self) -> Generation | None:
        """The ownership of the run's directory; None for a run that is not saved."""
        return self._generation

    def own(
        self,
        generation: Generation | None,
        tier: Tier | None = None,
        lineage: Lineage | None = None,
        loaded_locally: str | None = None,
    ) -> None:
        """Save to the directory of `generation` as its owner, and to the nodes with a `tier`.

        Checkpoints descend from `lineage`. `loaded_locally` is the checkpoint on the disks of the
        nodes that the run has loaded, if any.
        """
        self._generation = generation
        self._tier = tier
        self._loaded_locally = loaded_locally
        # Rules of retention apply to this directory only: the nodes keep two checkpoints.
        if generation is not None:
            options = self._options
            self._retention = Retention(options.retention, generation, options.is_checkpoint)
        if lineage is not None:
            self._lineage = lineage
            self._parent = lineage.iteration if lineage.branch else None
        if loaded_locally is None:
            self._after_commit = self._repeat_retention

    # ---- Saving ----

    def prepare(self, state: ShardedStateDict) -> None:
        """Plan and begin to allocate host memory for background saves of `state`. Collective.

        Pinning takes seconds for tens of gigabytes, for which the first save would delay training.
        """
        if self._options.async_save:
            self._preparation = self._get_saver().prepare(state)

    def finish_preparing(self) -> None:
        """Wait for the memory that `prepare` allocates; the first save reports a failure."""
        if self._preparation is not None:
            self._preparation.exception()
            self._preparation = None

    def save(
        self,
        state: ShardedStateDict,
        root: Path,
        iteration: int,
        common: Common,
        rewrite: Rewrite | None = None,
        since: float | None = None,
        last: bool = True,
        loss: float | None = None,
        check: Callable[[], None] = lambda: None,
        export: ExportTarget | None = None,
    ) -> None:
        """Begin a save under `root` after the previous ones; if not `async_save`, also finish it.

        `rewrite` converts the files before the directory gets its name. Training has been waiting
        since `since` (time.perf_counter), and ends if this is the `last` save. `loss` is the
        validation loss of `state`, if it was measured. `check` runs in the background of rank 0
        before anything is written; the save fails if it raises. With an `export` the same tensors
        are also written there.
        """
        # Wait for the saves before this one, and report them.
        began = time.perf_counter()
        since = began if since is None else since
        self._report(self._finish_saves(), on_all_ranks=True)
        since += time.perf_counter() - began  # this wait belongs to the previous save

        generation = self._get_owner(root)
        lineage = self._make_lineage(generation, iteration)
        directory = CheckpointDirectory(root).path(iteration)
        extra_files = {} if generation is None else {LINEAGE: lineage.encode(self._parent)}
        if rewrite is None:
            extra_files |= self._options.files

        # Steps in the background: before the first file, after the commit, and an export.
        before_writing = partial(self._before_writing, check)
        on_commit = partial(self._make_latest, root, iteration, generation, lineage, loss)
        check_owner = generation.check if generation is not None else _accept
        make_export = None if export is None else partial(export.start, iteration, check_owner)

        # Save to the nodes and copy from there, or save directly.
        in_background = self._options.async_save and not last
        self._copied_report = None
        use_tier = self._tier is not None and in_background and rewrite is None
        if use_tier and not _has_failed(self._local_report):
            local = self._begin_locally(state, iteration, common, since, check)
            self._get_copier().copy(
                local,
                directory,
                generation=generation,
                before_writing=before_writing,
                extra_files=extra_files,
                on_commit=on_commit,
                export=make_export,
            )
            self._copied_report = local.report
        else:
            self._get_saver().save(
                state,
                directory,
                common=common,
                generation=generation,
                before_writing=before_writing,
                rewrite=rewrite,
                extra_files=extra_files,
                on_commit=on_commit,
                export=make_export,
                since=since,
            )
        self._finish_unless_async()

    def save_locally(
        self,
        state: ShardedStateDict,
        iteration: int,
        common: Common,
        since: float,
        loss: float | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin a save to the disks of the nodes; if not `async_save`, also finish it.

        See `save` for the arguments.
        """
        assert self._generation is not None
        # The copy of an earlier checkpoint may continue: it reads files, not tensors.
        if self._saver is not None:
            # Only this rank may have reached this point: copies end at different times.
            self._report(self._take_unreported() + self._saver.finish(), on_all_ranks=False)
        if _has_failed(self._copied_report):
            # A checkpoint was not copied because the local save of it failed: save directly.
            root = self._generation.root
            self.save(state, root, iteration, common, since=since, loss=loss, check=check)
            return
        self._begin_locally(state, iteration, common, since, check)
        self._finish_unless_async()

    def _begin_locally(
        self,
        state: ShardedStateDict,
        iteration: int,
        common: Common,
        since: float,
        check: Callable[[], None],
    ) -> SaveHandle:
        assert self._tier is not None and self._generation is not None
        if self._local_saver is None:
            self._local_saver = make_local_saver(
                self._tier,
                self._generation,
                self._loaded_locally,
                self._options.replication_interval,
            )
        lineage = self._make_lineage(self._generation, iteration)
        handle = self._get_saver().save(
            state,
            self._tier.root,
            common=common,
            pending=partial(self._local_saver.checkpoint, iteration),
            before_writing=check,
            extra_files={LINEAGE: lineage.encode(self._parent)},
            since=since,
        )
        self._local_report = handle.report
        return handle

    def _finish_unless_async(self) -> None:
        if self._options.async_save:
            self.after_iteration()
        else:
            self.finish()

    def _get_owner(self, root: Path) -> Generation | None:
        """Return the ownership of `root`; None for the target of a conversion, without an owner."""
        if self._generation is not None and root == self._generation.root:
            return self._generation
        return None

    def _make_lineage(self, generation: Generation | None, iteration: int) -> Lineage:
        """Return the lineage of the checkpoint of `iteration`."""
        if generation is None:
            return self._lineage.descend(Segment(0, iteration))
        return self._lineage.descend(generation.segment(iteration), generation.owner.get("job_id"))

    def _get_saver(self) -> AsyncSaver:
        if self._saver is not None:
            return self._saver
        options = self._options
        # Without `async_save` training waits anyway, so a few buffers per writer suffice.
        limit = options.staging_mem_limit
        if limit is None and not options.async_save:
            limit = staging_for_waiting(options.workers)
        self._saver = AsyncSaver(
            fully_parallel=options.fully_parallel,
            workers=options.workers,
            staging_mem_limit=limit,
            timeout=options.timeout,
            assume_constant_structure=options.assume_constant_structure,
        )
        return self._saver

    def _get_copier(self) -> Copier:
        if self._copier is None:
            options = self._options
            self._copier = make_copier(options.workers, options.timeout)
        return self._copier

    # ---- Waiting ----

    @property
    def _threads(self) -> list[SaveThread]:
        return [thread for thread in (self._saver, self._copier) if thread is not None]

    def _finish_saves(self) -> list[SaveReport]:
        """Wait for all saves in progress, and return their reports."""
        reports = self._take_unreported()
        for thread in self._threads:
            reports += thread.finish()
        return reports

    def _take_unreported(self) -> list[SaveReport]:
        reports = self._unreported
        self._unreported = []
        return reports

    def iteration(self) -> AbstractContextManager[None]:
        """Return a context manager that measures the iteration in its block."""
        return self._times.measure(self._find_save_in_progress())

    def _find_save_in_progress(self) -> SaveReport | None:
        """Return the save in progress, or the last one while files that it supersedes are removed.

        These removals take time from training, too.
        """
        for thread in self._threads:
            if thread.in_progress is not None:
                return thread.in_progress
        if self._unreported and self._is_removing:
            return self._unreported[-1]
        return None

    @property
    def _is_removing(self) -> bool:
        return self._retention is not None and self._retention.is_removing

    def before_update(self) -> None:
        """Wait until the tensors of a save in progress may change."""
        if self._saver is not None:
            self._saver.wait_staged()

    def after_iteration(self) -> None:
        """Report the saves that have ended, once the cost of all their iterations is known."""
        for thread in self._threads:
            self._unreported += thread.poll()
        measured: list[SaveReport] = []
        is_removing = self._is_removing
        for save in self._take_unreported():
            has_failed = save.error is not None
            is_measured = self._times.is_measured(save) and not is_removing
            (measured if has_failed or is_measured else self._unreported).append(save)
        self._report(measured, on_all_ranks=False)

    def finish(self) -> None:
        """Wait for the saves in progress, and report them."""
        self._report(self._finish_saves(), on_all_ranks=True)

    def stop(self) -> None:
        """Raise SaveFailedError for a failed background save; all ranks call this together."""
        failure = self.failure
        self.failure = None
        raise SaveFailedError(
            failure or "a checkpoint was not saved: another rank reports the reason"
        )

    def close(self) -> None:
        """Finish the saves in progress, end the threads and release the buffers."""
        try:
            self.finish()
        finally:
            if self._retention is not None:
                self._retention.close()
            for thread in self._threads:
                thread.close()
            if self._local_saver is not None:
                self._local_saver.close()
            # They are created again if another save follows.
            self._saver = None
            self._copier = None
            self._local_saver = None

    def end_alone(self) -> None:
        """Finish the saves in progress of a program that ends without `close`, and log them.

        It makes no collective calls, because other ranks may have ended in another way.
        """
        for thread in self._threads:
            if thread.busy:
                logger.warning("the program ends during a save: waiting for it")
            thread.wait_alone()
        for report in self._finish_saves():
            if report.error is None:
                logger.info(f"saved {report.directory} when the program ended")
            else:
                logger.error(f"{report.directory} was not saved: {report.error}")
        if self._retention is not None:
            self._retention.close()
        for thread in self._threads:
            thread.end_alone()
        self._saver = None
        self._copier = None

    @property
    def last_save_failed(self) -> bool:
        """Return whether the last save that has ended was not committed."""
        return self._last_failure is not None

    def check_last_save(self) -> None:
        """Raise SaveFailedError if the last save of the run has failed.

        Such a run must not end as a success.
        """
        if self._last_failure is not None:
            raise SaveFailedError(f"{self._last_failure}. It was the last save of the run")

    # ---- Reporting ----

    def _before_writing(self, check: Callable[[], None]) -> None:
        """Check the state, and wait until the disk has room, on rank 0 in the background."""
        # The removals that free room run in the background of the last save.
        check()
        if self._retention is None:
            return
        if self._after_commit is not None:
            # If they fail again, the next commit repeats them.
            with contextlib.suppress(OSError, CheckpointError):
                self._after_commit()
        self._retention.wait()

    def _make_latest(
        self,
        root: Path,
        iteration: int,
        generation: Generation | None,
        lineage: Lineage,
        loss: float | None,
    ) -> None:
        """Make a committed checkpoint the latest one, on rank 0 in the background."""
        if generation is None:
            write_tracker(root, iteration)
            return
        # Repeated before the next save if it fails.
        self._after_commit = partial(self._make_latest, root, iteration, generation, lineage, loss)
        generation.move_tracker(iteration)
        self._remove_superseded(iteration, lineage, math.nan if loss is None else loss)
        self._after_commit = None

    def _repeat_retention(self) -> None:
        """Remove checkpoints that the loaded one supersedes.

        The launch that saved it may have been killed before, and the disk may be full without that.
        """
        assert self._generation is not None
        self._after_commit = None
        root = self._generation.root
        lineage = self._lineage
        # A run that has returned to an earlier checkpoint keeps the later ones.
        if lineage.branch and read_tracker(root) == lineage.iteration:
            self._remove_superseded(lineage.iteration, lineage)

    def _remove_superseded(
        self, iteration: int, lineage: Lineage, loss: float | None = None
    ) -> None:
        assert self._retention is not None
        try:
            removed = self._retention.apply(iteration, lineage, loss)
        except OSError as error:  # this does not affect the checkpoint that was just committed
            message = f"old checkpoints could not be removed: {error}"
            self._removal_messages.append((logging.WARNING, message))
            return
        if removed:
            names = ", ".join(path.name for path in removed)
            self._removal_messages.append((logging.INFO, f"removed {names}"))

    def _report(self, reports: list[SaveReport], on_all_ranks: bool) -> None:
        """Log how saves have ended. With `on_all_ranks`, all ranks are here and can stop
        together.
        """
        for report in reports:
            self._times.charge(report)
            is_local = self._tier is not None and report.directory.parent == self._tier.root
            if report.error is None:
                self._report_success(report, is_local)
            else:
                self._report_failure(report, is_local)
        if on_all_ranks and self.failure is not None:
            self.stop()

    def _report_failure(self, report: SaveReport, is_local: bool) -> None:
        message = f"{report.directory} was not saved: {report.error}"
        # The local save has failed, and with it the copy: the failure was reported already.
        if not is_local and _has_failed(self._copied_report):
            logger.warning(f"{message}. The next save goes straight to {report.directory.parent}")
            return
        if not is_local:
            self._last_failure = message
            if self._retention is not None:
                self._retention.forget()
        # A run that has lost its directory cannot save any more: it must stop.
        if report.superseded or (self._options.must_succeed and not is_local):
            self.failure = message
        else:
            remaining = "the previous checkpoint is still the newest"
            if self._parent is None:
                remaining = "there is no checkpoint yet"
            logger.warning(f"{message}. Training continues; {remaining}")

    def _report_success(self, report: SaveReport, is_local: bool) -> None:
        # Local checkpoints are temporary: only others become the parent of the next one.
        if not is_local:
            self.expected_seconds = report.total
            self._parent = iteration_in_name(report.directory)
            self._last_failure = None
        self._on_saved(report, is_local)
        # Log the save, then the messages of the removals that followed it.
        lost = f"training lost {report.blocking * 1e3:.0f} ms"
        if report.end_wait:
            lost += f", of which {report.end_wait * 1e3:.0f} ms waiting for the end of the save"
        milliseconds = f"{report.total * 1e3:.0f} ms ({lost})"
        speed = f"{report.total_bytes / 1e9:.3f} GB at {report.gb_per_second:.2f} GB/s"
        logger.info(f"saved {report.directory} in {milliseconds}: {speed}")
        if report.exported is not None:
            logger.info(f"exported the model to {report.exported}")
        if report.warning is not None:
            logger.warning(f"{report.directory.name}: {report.warning}")
        if not is_local:
            for level, text in self._removal_messages:
                logger.log(level, text)
            self._removal_messages = []


def _accept() -> None:
    """Accept a save to a directory that has no owner."""


def _has_failed(report: SaveReport | None) -> bool:
    """Return whether a save was begun and has ended with an error."""
    return report is not None and report.error is not None

"""Writes the checkpoints of a run, while training waits or behind it with --async-save, and removes
old ones.

Nothing is removed before its successor is durable and the tracker names it. A removal is a rename
into the generation of the run, made durable, and only then the files are removed: whenever the
machine stops, what has the name of a checkpoint is whole.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from megatron.conversion.formats import FORMATS, iteration_directory, iteration_of, saved_iterations
from megatron.core.dist_checkpointing import (
    AsyncSaver,
    CheckpointCopier,
    Generation,
    Lineage,
    SaveHandle,
    SaveReport,
    Segment,
    is_complete,
    load_common,
    read_lineage,
    staging_for_waiting,
    write_tracker,
)
from megatron.core.dist_checkpointing.background import Workers
from megatron.core.dist_checkpointing.lineage import LINEAGE
from megatron.core.dist_checkpointing.local_tier import LocalSaver, LocalTier
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.saving.commit import Rewrite
from megatron.core.dist_checkpointing.saving.save_thread import SaveThread
from megatron.training.config.options import CheckpointConfig
from megatron.training.reporting.logging import report_line

logger = logging.getLogger(__name__)

VALIDATION_LOSS = (
    "validation_loss"  # in common.pt: the loss at the very iteration of the checkpoint
)


class SaveFailedError(ValueError):
    """A checkpoint could not be saved, and the run must stop, or must not end as a success."""


class CheckpointSaver:
    """One saver for the whole run, so that plan and host buffers are made once, whatever they are
    saved to.

    With a local tier and --async-save a checkpoint reaches --save by way of the nodes' disks, where
    a slow upload holds up neither training nor later local saves. It is saved straight to --save
    when training ends, in other formats than torch_dist, and when the nodes cannot hold it.

    Sequence of calls, on all ranks: `own` at the start; `save` after an
    iteration; `before_update` before the optimizer changes anything; `after_iteration` after each;
    `close` and `check_last_save` at the end.

    A save that fails is reported, and the previous checkpoint remains the newest. Training
    continues, unless
    --exit-on-save-failure is given or another start has taken over the directory: then `save` and `close` raise
    SaveFailedError. With --async-save the ranks notice at different times, so a failure is only
    noted in `failure` until they call `stop` together.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self._saver: AsyncSaver | None = None
        self._copier: CheckpointCopier | None = None
        self._tier: LocalTier | None = None
        self._nodes: LocalSaver | None = None
        self._local: SaveReport | None = None  # of the last local save
        self._to_copy: SaveReport | None = None  # of the last local save that was for --save, too
        self._loaded_locally: str | None = None
        self._generation: Generation | None = None
        self._retention: Retention | None = None
        self._start = Lineage(())  # of the checkpoint that this start continues from
        self._parent: int | None = None  # iteration of the checkpoint before
        self._must_succeed = config.exit_on_save_failure or config.ckpt_convert_save is not None
        self._committed: list[tuple[int, dict[str, float]]] = []
        self._removals: list[
            tuple[int, str]
        ] = []  # level and text, logged after the save that made room
        self._last_failure: str | None = None  # of the last save, if it failed
        self.failure: str | None = None
        self.expected_seconds = 0.0  # how long the last save took from the call to the commit

    @property
    def generation(self) -> Generation | None:
        """The ownership of --save; None for a run that saves nothing there."""
        return self._generation

    def own(
        self,
        generation: Generation | None,
        tier: LocalTier | None = None,
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
        if generation is not None:
            self._retention = Retention(self._config, generation)
        if lineage is not None:
            self._start = lineage
            self._parent = lineage.iteration if lineage.branch else None

    def save(
        self,
        state: ShardedStateDict,
        root: Path,
        iteration: int,
        common: dict[str, Any],
        rewrite: Rewrite | None = None,
        since: float | None = None,
        last: bool = True,
    ) -> None:
        """Begin a save under `root`, waiting for the ones before; without --async-save also end it.

        `rewrite` converts the files before the directory gets its name. Training has waited since `since`
        (time.perf_counter), and ends if this is the `last` save.
        """
        began = time.perf_counter()
        since = began if since is None else since
        self._report(self._wait(), together=True)
        since += time.perf_counter() - began  # counted for the save that was waited for
        # A conversion (--ckpt-convert-save) writes to another directory than --save: nobody owns
        # that one.
        generation = (
            self._generation
            if self._generation is not None and root == self._generation.root
            else None
        )
        lineage = self._lineage(generation, iteration)
        loss = common.get(VALIDATION_LOSS, math.nan)

        def on_commit() -> None:  # on rank 0, when the checkpoint is durable and has its name
            if generation is None:  # --ckpt-convert-save
                write_tracker(root, iteration)
                return
            generation.move_tracker(iteration)
            self._remove_superseded(iteration, lineage, loss)

        directory = iteration_directory(root, iteration)
        behind = self._config.async_save and not last
        commit: dict[str, Any] = {
            "generation": generation,
            "before_writing": self._make_room,
            "extra_files": {} if generation is None else {LINEAGE: lineage.encode(self._parent)},
            "on_commit": on_commit,
        }
        self._to_copy = None
        if self._tier is not None and behind and rewrite is None and not _failed(self._local):
            local = self._begin_locally(state, iteration, common, since)
            self._copier = self._copier or CheckpointCopier(
                workers=self._config.dist_ckpt_workers, timeout=self._timeout
            )
            self._copier.copy(local, directory, **commit)
            self._to_copy = local.report
        else:
            self._begin(state, directory, since, common=common, rewrite=rewrite, **commit)
        self._begun()

    def save_locally(
        self, state: ShardedStateDict, iteration: int, common: dict[str, Any], since: float
    ) -> None:
        """The same, on the disks of the nodes."""
        assert self._generation is not None
        if self._saver is not None:
            # Not together: a copy to --save may have ended on some ranks only.
            self._report(self._saver.finish(), together=False)
        if _failed(self._to_copy):  # this one makes up for it
            self.save(state, self._generation.root, iteration, common, since=since)
            return
        self._begin_locally(state, iteration, common, since)
        self._begun()

    def _begin_locally(
        self, state: ShardedStateDict, iteration: int, common: dict[str, Any], since: float
    ) -> SaveHandle:
        assert self._tier is not None and self._generation is not None
        self._nodes = self._nodes or LocalSaver(self._tier, self._generation, self._loaded_locally)
        handle = self._begin(
            state,
            self._tier.root,
            since,
            common=common,
            pending=partial(self._nodes.checkpoint, iteration),
            extra_files={LINEAGE: self._lineage(self._generation, iteration).encode(self._parent)},
        )
        self._local = handle.report
        return handle

    def _begin(
        self, state: ShardedStateDict, directory: Path, since: float, **what: Any
    ) -> SaveHandle:
        """Training has waited since `since`."""
        self._saver = self._saver or self._make_saver()
        return self._saver.save(state, directory, since=since, **what)

    def _begun(self) -> None:
        if self._config.async_save:
            self.after_iteration()
        else:
            self.finish()

    @property
    def _savers(self) -> list[SaveThread]:
        return [saver for saver in (self._saver, self._copier) if saver is not None]

    def _wait(self) -> list[SaveReport]:
        """For all saves under way."""
        return [report for saver in self._savers for report in saver.finish()]

    def before_update(self) -> None:
        """Wait until the tensors of a save under way may change."""
        if self._saver is not None:
            self._saver.wait_staged()

    def after_iteration(self) -> None:
        """Report the saves that have ended."""
        for saver in self._savers:
            self._report(saver.poll(), together=False)

    def finish(self) -> None:
        """Wait for the saves under way."""
        self._report(self._wait(), together=True)

    def stop(self) -> None:
        """Raise what a save behind training failed with."""
        failure = self.failure
        self.failure = None
        raise SaveFailedError(failure or "a checkpoint was not saved: another rank says why")

    def close(self) -> None:
        try:
            self.finish()
        finally:
            if self._retention is not None:
                self._retention.close()
            for saver in self._savers:
                saver.close()
            if self._nodes is not None:
                self._nodes.close()
            self._saver = self._copier = self._nodes = None

    def check_last_save(self) -> None:
        """Raise SaveFailedError if the last save of the run has failed: it must not end as a
        success.
        """
        if self._last_failure is not None:
            raise SaveFailedError(f"{self._last_failure}. It was the last save of the run")

    def take_committed(self) -> list[tuple[int, dict[str, float]]]:
        """Iteration and points for TensorBoard of the saves that were committed since the last
        call.
        """
        committed = self._committed
        self._committed = []
        return committed

    def _make_saver(self) -> AsyncSaver:
        config = self._config
        limit = None
        if config.ckpt_staging_mem_limit is not None:
            limit = int(config.ckpt_staging_mem_limit * 2**30)
        elif not config.async_save:
            limit = staging_for_waiting(config.dist_ckpt_workers)
        return AsyncSaver(
            fully_parallel=config.ckpt_fully_parallel_save,
            workers=config.dist_ckpt_workers,
            staging_mem_limit=limit,
            timeout=self._timeout,
            assume_constant_structure=config.ckpt_assume_constant_structure,
        )

    @property
    def _timeout(self) -> float:
        return 60 * self._config.ckpt_save_timeout_minutes

    def _make_room(self) -> None:
        if self._retention is not None:
            self._retention.wait()

    def _lineage(self, generation: Generation | None, iteration: int) -> Lineage:
        segment = Segment(0, iteration) if generation is None else generation.segment(iteration)
        job = None if generation is None else generation.owner.get("job_id")
        return self._start.descend(segment, job)

    def _remove_superseded(self, iteration: int, lineage: Lineage, loss: float) -> None:
        assert self._retention is not None
        try:
            removed = self._retention.apply(iteration, lineage, loss)
        except OSError as error:  # the new checkpoint is committed all the same
            self._removals.append(
                (logging.WARNING, f"old checkpoints could not be removed: {error}")
            )
            return
        if removed:
            self._removals.append(
                (logging.INFO, f"removed {', '.join(path.name for path in removed)}")
            )

    def _report(self, reports: list[SaveReport], together: bool) -> None:
        """`together`: all ranks have reached this point, so that all can stop here."""
        for report in reports:
            locally = self._tier is not None and report.directory.parent == self._tier.root
            if report.error is None:
                self._report_success(report, locally)
                continue
            message = f"{report.directory} was not saved: {report.error}"
            if not locally and _failed(self._to_copy):
                logger.warning(
                    f"{message}. The next save goes straight to {report.directory.parent}"
                )
                continue
            if not locally:
                self._last_failure = message
            if (self._must_succeed and not locally) or report.superseded:
                self.failure = message
            else:
                logger.warning(
                    f"{message}. Training continues; the previous checkpoint is still the newest"
                )
        if together and self.failure is not None:
            self.stop()

    def _report_success(self, report: SaveReport, locally: bool) -> None:
        iteration = iteration_of(report.directory)
        points = scalars(report)
        self._committed.append(
            (
                iteration,
                {f"local-{name}": value for name, value in points.items()} if locally else points,
            )
        )
        if not locally:
            self.expected_seconds = report.total
            self._parent = iteration
            self._last_failure = None
        report_line(  # in Megatron-LM's words, which other programs wait for
            f"  successfully saved {'local ' if locally else ''}checkpoint from iteration {iteration:7d} to "
            f"{report.directory.parent}",
            event="local-save" if locally else "save",
            directory=str(report.directory),
            iteration=iteration,
            **points,
        )
        milliseconds = (
            f"{report.total * 1e3:.0f} ms (training blocked {report.blocking * 1e3:.0f} ms)"
        )
        speed = f"{report.total_bytes / 1e9:.3f} GB at {report.gb_per_second:.2f} GB/s"
        logger.info(f"saved {report.directory} in {milliseconds}: {speed}")
        if report.warning is not None:
            logger.warning(f"{report.directory.name}: {report.warning}")
        if not locally:
            for level, text in self._removals:
                logger.log(level, text)
            self._removals = []


def _failed(report: SaveReport | None) -> bool:
    """Of a save that has ended or was not begun."""
    return report is not None and report.error is not None


def scalars(report: SaveReport) -> dict[str, float]:
    """The points of a committed save for TensorBoard."""
    return {
        "save-blocking-time": report.blocking,
        "save-staging-time": report.staging,
        "save-writing-time": report.writing,
        "save-commit-time": report.commit,
        "save-total-time": report.total,
        "save-gigabytes": report.total_bytes / 1e9,
        "save-gigabytes-per-second": report.gb_per_second,
    }


def to_delete(
    saved: Collection[int], newest: int, rules: CheckpointConfig, losses: Mapping[int, float]
) -> list[int]:
    """The iterations of `saved`, all of one branch, that no rule keeps, in order; `newest` was just
    committed.
    """
    if not rules.removes_checkpoints:
        return []
    present = sorted({*saved, newest})
    kept = set(present[-(rules.keep_last_n or 1) :])
    if rules.save_retain_interval is not None:
        kept |= {iteration for iteration in present if iteration % rules.save_retain_interval == 0}
    if rules.keep_best_n is not None:
        measured = [
            iteration for iteration in present if math.isfinite(losses.get(iteration, math.nan))
        ]
        best = sorted(measured, key=lambda iteration: (losses[iteration], -iteration))
        kept |= set(best[: rules.keep_best_n])
    return [iteration for iteration in present if iteration not in kept]


class Retention:
    """Applies --keep-last-n and the like to the directory that `generation` owns; used by rank 0.

    Call `apply` after every commit, `wait` before the next save writes anything, so that it finds
    the room, and `close` at the end. The directory is read once: nobody else may change it.
    """

    def __init__(self, rules: CheckpointConfig, generation: Generation) -> None:
        self._rules = rules
        self._generation = generation
        self._losses: dict[int, float] | None = None  # of the checkpoints on the branch of the run
        self._remover: Workers | None = None
        self._removals: list[Future[None]] = []

    def apply(self, newest: int, lineage: Lineage, loss: float) -> list[Path]:
        """Put aside what `newest`, just committed with this `lineage` and validation loss,
        supersedes.

        The files are removed in the background. Returns the directories. Checkpoints of other
        branches do not count and are not removed.
        """
        if not self._rules.removes_checkpoints:
            return []
        root = self._generation.root
        if self._losses is None:
            self._losses = self._find(lineage)
        self._losses[newest] = loss
        superfluous = to_delete(self._losses, newest, self._rules, self._losses)
        doomed = self._generation.put_aside(
            [iteration_directory(root, iteration) for iteration in superfluous]
        )
        for iteration in superfluous:
            del self._losses[iteration]
        if doomed:
            self._remover = self._remover or Workers(1, "checkpoint-remover")
            self._removals += [
                self._remover.submit(partial(self._generation.remove, path)) for path in doomed
            ]
        return [iteration_directory(root, iteration) for iteration in superfluous]

    def wait(self) -> None:
        """Return when everything that was put aside is removed."""
        for removal in self._removals:
            removal.result()
        self._removals = []

    def close(self) -> None:
        self.wait()
        if self._remover is not None:
            self._remover.close()
            self._remover = None

    def _find(self, lineage: Lineage) -> dict[int, float]:
        """The checkpoints on the branch that ends with `lineage`, and their losses."""
        found = {}
        for iteration in saved_iterations(self._generation.root):
            directory = iteration_directory(self._generation.root, iteration)
            if holds_checkpoint(directory) and lineage.includes(read_lineage(directory)):
                found[iteration] = (
                    _stored_loss(directory) if self._rules.keep_best_n is not None else math.nan
                )
        return found


def holds_checkpoint(directory: Path) -> bool:
    """Whether `directory` is a checkpoint that training wrote, of either format; both appear whole
    under their name.
    """
    return is_complete(directory) or FORMATS["legacy"](directory)


def _stored_loss(directory: Path) -> float:
    """The validation loss in a checkpoint; NaN if none was measured at its iteration, or it cannot
    be read.
    """
    try:
        return float(load_common(directory).get(VALIDATION_LOSS, math.nan))
    except (OSError, ValueError):
        return math.nan

"""Writes the checkpoints of a run: while training waits, or behind it with --async-save."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import Any

from megatron.conversion.find_checkpoint import iteration_directory, iteration_of
from megatron.core.dist_checkpointing import (
    AsyncSaver,
    Generation,
    Lineage,
    SaveReport,
    read_lineage,
    staging_for_waiting,
    write_tracker,
)
from megatron.core.dist_checkpointing.generation import LINEAGE
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.saving.commit import Rewrite
from megatron.training.checkpoint.retention import VALIDATION_LOSS, Retention, RetentionPolicy
from megatron.training.config.options import CheckpointConfig
from megatron.training.reporting import console

logger = logging.getLogger(__name__)


class SaveFailedError(ValueError):
    """A checkpoint could not be saved, and the run must stop, or must not end as a success."""


class CheckpointSaver:
    """One saver for the whole run, so that plan and host buffers are made once.

    Sequence of calls, on all ranks: `own` and `continue_from` at the start; `save` after an iteration; `before_update`
    before the optimizer changes anything; `after_iteration` after each; `close` and `check_last_save` at the end.

    A save that fails is reported, and the previous checkpoint remains the newest. Training continues, unless
    --exit-on-save-failure is given or another start has taken over the directory: then `save` and `close` raise
    SaveFailedError. With --async-save the ranks notice at different times, so a failure is only noted in `failure`
    until they call `stop` together.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self._saver: AsyncSaver | None = None
        self._policy = RetentionPolicy(config.keep_last_n, config.save_retain_interval, config.keep_best_n)
        self._generation: Generation | None = None
        self._retention: Retention | None = None
        self._start: Lineage | None = None  # of the checkpoint that this start continues from
        self._parent: int | None = None  # iteration of the checkpoint before
        self._must_succeed = config.exit_on_save_failure or config.ckpt_convert_save is not None
        self._committed: list[SaveReport] = []
        self._removals: list[tuple[int, str]] = []  # level and text, logged after the save that made room
        self._waited = 0.0  # seconds that training waited before the last save could begin
        self._last_failure: str | None = None  # of the last save, if it failed
        self.failure: str | None = None
        self.expected_seconds = 0.0  # how long the last save took from the call to the commit

    def own(self, generation: Generation | None) -> None:
        """Save to the directory of `generation` as its owner."""
        self._generation = generation
        if generation is not None:
            self._retention = Retention(self._policy, generation)

    def continue_from(self, loaded: Path) -> None:
        """Record `loaded` as the parent of the checkpoints to come, if it lies in the directory they are saved to."""
        if self._generation is not None and loaded.parent.resolve() == self._generation.root.resolve():
            self._start = read_lineage(loaded)
            self._parent = self._start.iteration

    def save(
        self,
        state: ShardedStateDict,
        root: Path,
        iteration: int,
        common: dict[str, Any],
        rewrite: Rewrite | None = None,
        since: float | None = None,
    ) -> None:
        """Begin a save under `root`, waiting for the one before; without --async-save also end it.

        `rewrite` converts the files before the directory gets its name. Training has waited since `since`
        (time.perf_counter).
        """
        since = time.perf_counter() if since is None else since
        if self._saver is None:
            self._saver = self._make_saver()
        self.finish()
        # A conversion (--ckpt-convert-save) writes to another directory than --save: nobody owns that one.
        generation = self._generation if self._generation is not None and root == self._generation.root else None
        lineage = self._lineage(generation, iteration)
        loss = common.get(VALIDATION_LOSS, math.nan)

        def on_commit() -> None:  # on rank 0, when the checkpoint is durable and has its name
            if generation is None:  # --ckpt-convert-save
                write_tracker(root, iteration)
                return
            generation.move_tracker(iteration)
            self._remove_superseded(iteration, lineage, loss)

        self._waited = time.perf_counter() - since
        self._saver.save(
            state,
            iteration_directory(root, iteration),
            common=common,
            generation=generation,
            before_writing=self._make_room,
            rewrite=rewrite,
            beside={} if generation is None else {LINEAGE: lineage.encode(self._parent)},
            on_commit=on_commit,
        )
        if self._config.async_save:
            self.after_iteration()
        else:
            self.finish()

    def before_update(self) -> None:
        """Wait until the tensors of a save under way may change."""
        if self._saver is not None:
            self._saver.wait_staged()

    def after_iteration(self) -> None:
        """Report the saves that have ended."""
        if self._saver is not None:
            self._report(self._saver.poll(), together=False)

    def finish(self) -> None:
        """Wait for the save under way."""
        if self._saver is not None:
            self._report(self._saver.finish(), together=True)

    def stop(self) -> None:
        """Raise what a save behind training failed with."""
        failure, self.failure = self.failure, None
        raise SaveFailedError(failure or "a checkpoint was not saved: another rank says why")

    def close(self) -> None:
        try:
            self.finish()
        finally:
            if self._retention is not None:
                self._retention.close()
            if self._saver is not None:
                self._saver.close()
                self._saver = None

    def check_last_save(self) -> None:
        """Raise SaveFailedError if the last save of the run has failed: it must not end as a success."""
        if self._last_failure is not None:
            raise SaveFailedError(f"{self._last_failure}. It was the last save of the run")

    def take_committed(self) -> list[SaveReport]:
        """Of the saves that were committed since the last call."""
        committed, self._committed = self._committed, []
        return committed

    def _make_saver(self) -> AsyncSaver:
        config, limit = self._config, None
        if config.ckpt_staging_mem_limit is not None:
            limit = int(config.ckpt_staging_mem_limit * 2**30)
        elif not config.async_save:
            limit = staging_for_waiting(config.dist_ckpt_workers)
        return AsyncSaver(
            fully_parallel=config.ckpt_fully_parallel_save,
            workers=config.dist_ckpt_workers,
            staging_mem_limit=limit,
            timeout=60 * config.ckpt_save_timeout_minutes,
            assume_constant_structure=config.ckpt_assume_constant_structure,
        )

    def _make_room(self) -> None:
        if self._retention is not None:
            self._retention.wait()

    def _lineage(self, generation: Generation | None, iteration: int) -> Lineage:
        number = 0 if generation is None else generation.number
        return Lineage(((number, iteration),)) if self._start is None else self._start.descend(number, iteration)

    def _remove_superseded(self, iteration: int, lineage: Lineage, loss: float) -> None:
        assert self._retention is not None
        try:
            removed = self._retention.apply(iteration, lineage, loss)
        except OSError as error:  # the new checkpoint is committed all the same
            self._removals.append((logging.WARNING, f"old checkpoints could not be removed: {error}"))
            return
        if removed:
            self._removals.append((logging.INFO, f"removed {', '.join(path.name for path in removed)}"))

    def _report(self, reports: list[SaveReport], together: bool) -> None:
        """`together`: all ranks have reached this point, so that all can stop here."""
        for report in reports:
            if report.error is None:
                self._report_success(report)
                continue
            self._last_failure = message = f"{report.directory} was not saved: {report.error}"
            if self._must_succeed or report.superseded:
                self.failure = message
            else:
                logger.warning(f"{message}. Training continues; the previous checkpoint is still the newest")
        if together and self.failure is not None:
            self.stop()

    def _report_success(self, report: SaveReport) -> None:
        report.blocking += self._waited
        self.expected_seconds = report.total
        self._committed.append(report)
        self._parent, self._last_failure = iteration_of(report.directory), None
        console.report(  # in Megatron-LM's words, which other programs wait for
            f"  successfully saved checkpoint from iteration {self._parent:7d} to {report.directory.parent}",
            event="save",
            directory=str(report.directory),
            iteration=self._parent,
            **scalars(report),
        )
        milliseconds = f"{report.total * 1e3:.0f} ms (training blocked {report.blocking * 1e3:.0f} ms)"
        speed = f"{report.total_bytes / 1e9:.3f} GB at {report.gb_per_second:.2f} GB/s"
        logger.info(f"saved {report.directory} in {milliseconds}: {speed}")
        for level, text in self._removals:
            logger.log(level, text)
        self._removals = []


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

"""Writes the checkpoints of a run: while training waits, or behind it with --async-save."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.conversion.open_checkpoint import iteration_directory, iteration_of
from megatron.core.dist_checkpointing import AsyncSaver, SaveReport, staging_for_waiting, write_tracker
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.saving.commit import Rewrite
from megatron.training.checkpoint.retention import Retention, RetentionPolicy
from megatron.training.config.options import CheckpointConfig
from megatron.training.reporting import console

logger = logging.getLogger(__name__)


class SaveFailedError(ValueError):
    """A checkpoint could not be saved, and the run was told to stop then (--exit-on-save-failure)."""


class CheckpointSaver:
    """One saver for the whole run, so that plan and host buffers are made once.

    Sequence of calls, on all ranks: `save` after an iteration; `before_update` before the optimizer changes anything;
    `after_iteration` now and then; `close` at the end. A save that fails is reported and leaves the previous checkpoint
    the newest; training goes on, unless --exit-on-save-failure: then `save` and `close` raise SaveFailedError, while a
    save behind training sets `failure`: the ranks notice at different times, and must call `stop` together.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self._saver: AsyncSaver | None = None
        self._retention = Retention(
            RetentionPolicy(config.keep_last_n, config.save_retain_interval, config.keep_best_n)
        )
        self._must_succeed = config.exit_on_save_failure or config.ckpt_convert_save is not None
        self._committed: list[SaveReport] = []
        self._removals: list[tuple[int, str]] = []  # level and text, told after the save that made room
        self._waited = 0.0  # seconds that the last save had to wait for the one before
        self.failure: str | None = None
        self.expected_seconds = 0.0  # how long the last save took from the call to the commit

    def save(
        self,
        state: ShardedStateDict,
        root: Path,
        iteration: int,
        common: dict[str, Any],
        rewrite: Rewrite | None = None,
    ) -> None:
        """Begin a save under `root`, waiting for the one before; without --async-save also end it.

        `rewrite` puts it into another form before it has its name.
        """
        if self._saver is None:
            self._saver = self._make_saver()
        began = time.perf_counter()
        self.finish()
        self._retention.wait()
        self._waited = time.perf_counter() - began
        directory = iteration_directory(root, iteration)
        on_commit = self._committing(root, iteration)
        self._saver.save(state, directory, common=common, on_commit=on_commit, rewrite=rewrite)
        if self._config.async_save:
            self.after_iteration()
        else:
            self.finish()

    def before_update(self) -> None:
        """Wait until the tensors of a save under way may change."""
        if self._saver is not None:
            self._saver.wait_staged()

    def after_iteration(self) -> None:
        """Tell of the saves that have ended."""
        if self._saver is not None:
            self._tell(self._saver.poll(), together=False)

    def finish(self) -> None:
        """Wait for the save under way."""
        if self._saver is not None:
            self._tell(self._saver.finish(), together=True)

    def stop(self) -> None:
        """Raise what a save behind training failed with."""
        failure, self.failure = self.failure, None
        raise SaveFailedError(failure or "a checkpoint was not saved: another rank says why")

    def close(self) -> None:
        try:
            self.finish()
        finally:
            self._retention.close()
            if self._saver is not None:
                self._saver.close()
                self._saver = None

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
            assume_constant_structure=config.ckpt_assume_constant_structure,
        )

    def _committing(self, root: Path, iteration: int) -> Callable[[], None]:
        """What rank 0 does as soon as the checkpoint is there: move the tracker, and remove what it supersedes."""

        def on_commit() -> None:
            write_tracker(root, iteration)
            if self._config.save is not None and root == Path(self._config.save):  # not --ckpt-convert-save
                self._remove_superseded(root)

        return on_commit

    def _remove_superseded(self, root: Path) -> None:
        try:
            removed = self._retention.apply(root)
        except OSError as error:  # the new checkpoint stands in any case
            self._removals.append((logging.WARNING, f"old checkpoints in {root} could not be removed: {error}"))
            return
        if removed:
            self._removals.append((logging.INFO, f"removed {', '.join(path.name for path in removed)}"))

    def _tell(self, reports: list[SaveReport], together: bool) -> None:
        """`together`: all ranks are at the same place, and can stop there."""
        for report in reports:
            if report.error is None:
                report.blocking += self._waited
                self.expected_seconds = report.total
                self._committed.append(report)
                iteration = iteration_of(report.directory)
                console.report(  # in Megatron-LM's words, which other programs wait for
                    f"  successfully saved checkpoint from iteration {iteration:7d} to {report.directory.parent}",
                    event="save",
                    directory=str(report.directory),
                    iteration=iteration,
                    **scalars(report),
                )
                logger.info(f"saved {report.directory}: {describe(report)}")
                for level, text in self._removals:
                    logger.log(level, text)
                self._removals = []
                continue
            message = f"{report.directory} was not saved: {report.error}"
            if not self._must_succeed:
                logger.warning(f"{message}. Training goes on; the checkpoint before it is still the newest")
                continue
            self.failure = message
        if together and self.failure is not None:
            self.stop()


def describe(report: SaveReport) -> str:
    """Where the time of a committed save went: training was held up for `blocking` alone."""
    times = ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in stages(report).items())
    return f"{times}; {report.total_bytes / 1e9:.3f} GB at {report.gb_per_second:.2f} GB/s"


def stages(report: SaveReport) -> dict[str, float]:
    """Seconds that training waited, from the call to the last copy, to the last durable shard, and the commit's."""
    return {
        "blocking": report.blocking,
        "staged after": report.staging,
        "written after": report.writing,
        "commit": report.commit,
        "in all": report.total,
    }


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

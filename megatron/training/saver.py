"""Writes the checkpoints of a run: while training waits, or behind it with --async-save."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.conversion.rank_layout import Layout
from megatron.core.dist_checkpointing import AsyncSaver, SaveReport, write_tracker
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.training.checkpoint_dir import iteration_directory, iteration_of
from megatron.training.config import CheckpointConfig
from megatron.training.initialize import print_rank_0
from megatron.training.legacy_save import intermediate_directory, rewrite_as_legacy
from megatron.training.retention import Retention, RetentionPolicy


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
        self._removals: list[str] = []  # what is to be told of them, after the save that made room for them
        self._waited = 0.0  # seconds that the last save had to wait for the one before
        self.failure: str | None = None
        self.expected_seconds = 0.0  # how long the last save took from the call to the commit

    def save(
        self, state: ShardedStateDict, root: Path, iteration: int, common: dict[str, Any], legacy: Layout | None = None
    ) -> None:
        """Begin a save under `root`, waiting for the one before; without --async-save also end it.

        With `legacy` in Megatron-LM's legacy format for that layout; then training always waits.
        """
        if self._saver is None:
            self._saver = self._make_saver()
        began = time.perf_counter()
        self.finish()
        self._retention.wait()
        self._waited = time.perf_counter() - began
        directory = iteration_directory(root, iteration)
        if legacy is not None:
            self._save_legacy(self._saver, state, directory, common, legacy)
            return
        self._saver.save(state, directory, common=common, on_commit=self._committing(root, iteration))
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
        limit = self._config.ckpt_staging_mem_limit
        return AsyncSaver(
            fully_parallel=self._config.ckpt_fully_parallel_save,
            workers=self._config.dist_ckpt_workers,
            staging_mem_limit=None if limit is None else int(limit * 2**30),
            assume_constant_structure=self._config.ckpt_assume_constant_structure,
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
            self._removals.append(f"WARNING: old checkpoints in {root} could not be removed: {error}")
            return
        if removed:
            self._removals.append(f"removed {', '.join(path.name for path in removed)}")

    def _save_legacy(
        self, saver: AsyncSaver, state: ShardedStateDict, directory: Path, common: dict[str, Any], layout: Layout
    ) -> None:
        """All ranks write torch_dist, rank 0 turns it into legacy files."""
        began, stored = time.perf_counter(), intermediate_directory(directory)
        saver.save(state, stored, common=common)
        (report,) = saver.finish()
        report.directory = directory
        # Together: rank 0 may not remove what another rank has yet to find committed.
        errors: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, report.error)
        report.error = report.error or next((error for error in errors if error is not None), None)
        written = time.perf_counter()
        if report.error is None:
            report.error = self._rewrite(stored, directory, layout)
            now = time.perf_counter()
            report.commit += now - written
            report.blocking = report.total = now - began
        self._tell([report], together=True)

    def _rewrite(self, stored: Path, directory: Path, layout: Layout) -> str | None:
        """Why it failed, or None; the same on all ranks."""
        reason: list[str | None] = [None]
        if dist.get_rank() == 0:
            try:
                rewrite_as_legacy(stored, directory, layout)
                self._committing(directory.parent, iteration_of(directory))()
            except Exception as error:  # whatever it is, the other ranks wait for the outcome
                reason = [f"{type(error).__name__}: {error}"]
            finally:
                shutil.rmtree(stored, ignore_errors=True)
        dist.broadcast_object_list(reason, src=0)
        return reason[0]

    def _tell(self, reports: list[SaveReport], together: bool) -> None:
        """`together`: all ranks are at the same place, and can stop there."""
        for report in reports:
            if report.error is None:
                report.blocking += self._waited
                self.expected_seconds = report.total
                self._committed.append(report)
                print_rank_0(f" > saved {report.directory}: {describe(report)}")
                for text in self._removals:
                    print_rank_0(f" > {text}")
                self._removals = []
                continue
            message = f"{report.directory} was not saved: {report.error}"
            if not self._must_succeed:
                print_rank_0(f" > WARNING: {message}. Training goes on; the checkpoint before it is still the newest")
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

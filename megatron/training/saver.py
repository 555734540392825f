"""Writes the checkpoints of a run: while training waits, or behind it with --async-save."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import AsyncSaver, SaveReport
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.training.config import CheckpointConfig
from megatron.training.initialize import print_rank_0


class CheckpointSaver:
    """One saver for the whole run, so that plan and host buffers are made once.

    Sequence of calls, on all ranks: `save` after an iteration; `before_update` before the optimizer changes anything;
    `after_iteration` now and then; `finish` at the end. A save that fails is reported and leaves the previous
    checkpoint the newest; training goes on, unless --exit-on-save-failure.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self._saver: AsyncSaver | None = None

    def save(
        self, state: ShardedStateDict, directory: Path, common: dict[str, Any], on_commit: Callable[[], None]
    ) -> None:
        """Begin a save, waiting for the one before; without --async-save also end it."""
        if self._saver is None:
            limit = self._config.ckpt_staging_mem_limit
            self._saver = AsyncSaver(
                fully_parallel=self._config.ckpt_fully_parallel_save,
                workers=self._config.dist_ckpt_workers,
                staging_mem_limit=None if limit is None else int(limit * 2**30),
                assume_constant_structure=self._config.ckpt_assume_constant_structure,
            )
        self._saver.save(state, directory, common=common, on_commit=on_commit)
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
            self._tell(self._saver.poll())

    def finish(self) -> None:
        """Wait for the save under way."""
        if self._saver is not None:
            self._tell(self._saver.finish())

    def close(self) -> None:
        self.finish()
        if self._saver is not None:
            self._saver.close()
            self._saver = None

    def _tell(self, reports: list[SaveReport]) -> None:
        for report in reports:
            if report.error is None:
                print_rank_0(f" > saved {report.directory}: {describe(report)}")
                continue
            message = f"{report.directory} was not saved: {report.error}"
            if self._config.exit_on_save_failure or self._config.ckpt_convert_save is not None:
                raise ValueError(message)
            print_rank_0(f" > WARNING: {message}. Training goes on; the checkpoint before it is still the newest")


def describe(report: SaveReport) -> str:
    """Where the time of a committed save went: training was held up for `blocking` alone."""
    times = ", ".join(
        f"{name} {seconds * 1e3:.0f} ms"
        for name, seconds in (
            ("blocking", report.blocking),
            ("staged after", report.staging),
            ("written after", report.writing),
            ("commit", report.commit),
        )
    )
    return f"{times}; {report.total_bytes / 1e9:.3f} GB at {report.gb_per_second:.2f} GB/s"

"""Retention: remove old checkpoints by --keep-last-n, --save-retain-interval and --keep-best-n."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from megatron.conversion.formats import FORMATS
from megatron.core.dist_checkpointing import (
    CheckpointDirectory,
    Generation,
    Lineage,
    is_complete,
    load_common,
)
from megatron.core.dist_checkpointing.background import Workers
from megatron.training.config.options import CheckpointConfig

# In common.pt: the loss that was measured at the iteration of the checkpoint.
VALIDATION_LOSS = "validation_loss"


def select_superseded(
    saved: Collection[int], newest: int, rules: CheckpointConfig, losses: Mapping[int, float]
) -> list[int]:
    """Return the iterations of `saved` that no rule keeps, in order.

    All of `saved` are of one branch, which ends with `newest`. That one is always kept.
    """
    if not rules.removes_checkpoints:
        return []
    present = sorted({newest, *(iteration for iteration in saved if iteration < newest)})
    kept = {newest, *present[-(rules.keep_last_n or 1) :]}
    if rules.save_retain_interval is not None:
        kept |= {iteration for iteration in present if iteration % rules.save_retain_interval == 0}
    if rules.keep_best_n is not None:
        measured = [it for it in present if math.isfinite(losses.get(it, math.nan))]
        # Of equal losses, the later checkpoint is the better one.
        measured.sort(key=lambda iteration: (losses[iteration], -iteration))
        kept |= set(measured[: rules.keep_best_n])
    return [iteration for iteration in present if iteration not in kept]


class Retention:
    """Applies the rules to the directory that `generation` owns; used by rank 0.

    A checkpoint is removed after its successor is durable and the tracker names that. It is first
    renamed into the generation, durably, and then its files are removed in the background: whenever
    the machine stops, every directory with the name of a checkpoint is complete.

    Call `apply` after every commit, `wait` before the next save writes anything, so that the disk
    has room, and `close` at the end. The directory is read once: only its owner changes it.
    """

    def __init__(self, rules: CheckpointConfig, generation: Generation) -> None:
        self._rules = rules
        self._generation = generation
        self._directory = CheckpointDirectory(generation.root)
        self._losses: dict[int, float] | None = None  # of the checkpoints on the branch of the run
        self._remover: Workers | None = None
        self._removals: list[Future[None]] = []

    def apply(self, newest: int, lineage: Lineage, loss: float) -> list[Path]:
        """Remove the checkpoints that `newest`, just committed, supersedes; returns them.

        `lineage` and validation `loss` are those of `newest`. Checkpoints of other branches do not
        count and are not removed.
        """
        if not self._rules.removes_checkpoints:
            return []
        if self._losses is None:
            self._losses = self._find_losses(lineage)
        self._losses[newest] = loss
        superseded = select_superseded(self._losses, newest, self._rules, self._losses)
        directories = [self._directory.path(iteration) for iteration in superseded]
        aside = self._generation.put_aside(directories)
        for iteration in superseded:
            del self._losses[iteration]
        if aside and self._remover is None:
            self._remover = Workers(1, "checkpoint-remover")
        for path in aside:
            assert self._remover is not None
            self._removals.append(self._remover.submit(partial(self._generation.remove, path)))
        return directories

    def wait(self) -> None:
        """Return when the files of all superseded checkpoints are removed."""
        for removal in self._removals:
            removal.result()
        self._removals = []

    def close(self) -> None:
        """Wait for the removals and end the thread."""
        self.wait()
        if self._remover is not None:
            self._remover.close()
            self._remover = None

    def _find_losses(self, lineage: Lineage) -> dict[int, float]:
        """Return the validation losses of the checkpoints on the branch that ends with
        `lineage`.
        """
        losses = {}
        for iteration in self._directory.list_branch(lineage):
            path = self._directory.path(iteration)
            if is_checkpoint(path):
                needs_loss = self._rules.keep_best_n is not None
                losses[iteration] = _read_loss(path) if needs_loss else math.nan
        return losses


def is_checkpoint(directory: Path) -> bool:
    """Return whether `directory` is a checkpoint that training wrote, in either format."""
    return is_complete(directory) or FORMATS["legacy"](directory)


def _read_loss(directory: Path) -> float:
    """Read the validation loss in a checkpoint; NaN if it has none or cannot be read."""
    try:
        return float(load_common(directory).get(VALIDATION_LOSS, math.nan))
    except (OSError, ValueError):
        return math.nan

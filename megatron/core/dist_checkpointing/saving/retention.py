"""Retention: which checkpoints of a run are removed after a newer one is committed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron.core.dist_checkpointing.background import Workers, map_in_threads
from megatron.core.dist_checkpointing.checkpoint_directory import CheckpointDirectory
from megatron.core.dist_checkpointing.files import is_complete
from megatron.core.dist_checkpointing.format.verified_file import load_common
from megatron.core.dist_checkpointing.ownership.fencing import Generation
from megatron.core.dist_checkpointing.ownership.lineage import Lineage

# In common.pt: the loss that was measured at the iteration of the checkpoint.
VALIDATION_LOSS = "validation_loss"


@dataclass(frozen=True)
class RetentionRules:
    """Rules for keeping checkpoints. Without any rule all are kept.

    A checkpoint is kept if any rule keeps it; the newest one always is. `keep_last` keeps the last
    N (1 if only other rules are given), `keep_every` the multiples of N iterations, and `keep_best`
    the N with the lowest validation loss.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: int | None = None

    @property
    def removes_checkpoints(self) -> bool:
        """Return whether any rule is given."""
        rules = (self.keep_last, self.keep_every, self.keep_best)
        return any(rule is not None for rule in rules)


def select_superseded(
    saved: Collection[int], newest: int, rules: RetentionRules, losses: Mapping[int, float]
) -> list[int]:
    """Return the iterations of `saved` that no rule keeps, in order.

    All of `saved` are of one branch, which ends with `newest`. That one is always kept.
    """
    if not rules.removes_checkpoints:
        return []
    present = sorted({newest, *(iteration for iteration in saved if iteration < newest)})
    kept = {newest, *present[-(rules.keep_last or 1) :]}
    if rules.keep_every is not None:
        kept |= {iteration for iteration in present if iteration % rules.keep_every == 0}
    if rules.keep_best is not None:
        # Checkpoints of iterations without an evaluation have NaN.
        measured = [it for it in present if math.isfinite(losses.get(it, math.nan))]
        # Of equal losses, the later checkpoint is the better one.
        measured.sort(key=lambda iteration: (losses[iteration], -iteration))
        kept |= set(measured[: rules.keep_best])
    return [iteration for iteration in present if iteration not in kept]


class Retention:
    """Applies the rules to the directory that `generation` owns; used by rank 0.

    A checkpoint is removed after its successor is durable and the tracker names that. It is first
    renamed into the generation, durably, and then its files are removed in the background: whenever
    the machine stops, every directory with the name of a checkpoint is complete.

    Call `apply` after every commit, `wait` before the next save writes anything, so that the disk
    has room, and `close` at the end. The directory is read once, because only its owner changes it,
    and again after `forget`. `is_checkpoint` recognizes the directories that the rules apply to.
    """

    def __init__(
        self,
        rules: RetentionRules,
        generation: Generation,
        is_checkpoint: Callable[[Path], bool] = is_complete,
    ) -> None:
        self._rules = rules
        self._generation = generation
        self._is_checkpoint = is_checkpoint
        self._directory = CheckpointDirectory(generation.root)
        self._losses: dict[int, float] = {}  # of the checkpoints on the branch of the run
        self._is_read = False
        self._remover: Workers | None = None
        self._removals: list[Future[None]] = []

    def apply(self, newest: int, lineage: Lineage, loss: float | None) -> list[Path]:
        """Remove the checkpoints that `newest`, just committed, supersedes; returns them.

        `lineage` and validation `loss` are those of `newest`; with None the loss is read from the
        checkpoint. Checkpoints of other branches do not count and are not removed.
        """
        if not self._rules.removes_checkpoints:
            return []
        # The first call reads the directory; later ones know what was added and removed.
        if not self._is_read:
            self._is_read = True
            self._losses = self._find_losses(lineage)
        if loss is not None:
            self._losses[newest] = loss
        superseded = select_superseded(self._losses, newest, self._rules, self._losses)
        # Rename now, remove in the background.
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

    def forget(self) -> None:
        """Let the next `apply` read the directory again; any thread may call it.

        A save that is reported as failed may have left its checkpoint, if the file system failed
        after the commit.
        """
        self._is_read = False

    def wait(self) -> None:
        """Return when the files of all superseded checkpoints are removed."""
        for removal in self._removals:
            removal.result()
        self._removals = []

    @property
    def is_removing(self) -> bool:
        """Return whether files of superseded checkpoints are being removed in the background."""
        return not all(removal.done() for removal in list(self._removals))

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
        branch = self._directory.list_branch(lineage)

        def read(iteration: int) -> float | None:
            """Return the loss, NaN if it is not needed, None for another directory."""
            path = self._directory.path(iteration)
            if not self._is_checkpoint(path):
                return None
            return math.nan if self._rules.keep_best is None else _read_loss(path)

        losses = zip(branch, map_in_threads(read, branch), strict=True)
        return {iteration: loss for iteration, loss in losses if loss is not None}


def _read_loss(directory: Path) -> float:
    """Read the validation loss in a checkpoint; NaN if it has none or cannot be read."""
    try:
        return float(load_common(directory).get(VALIDATION_LOSS, math.nan))
    except (OSError, ValueError):
        return math.nan

"""Which checkpoints of a run are kept, and the removal of the others.

Nothing is removed before its successor is durable and the tracker names it. A removal is a rename into the generation
of the run, made durable, and only then the files are removed: whenever the machine stops, what has the name of a
checkpoint is whole.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron.conversion.formats import FORMATS, iteration_directory, saved_iterations
from megatron.core.dist_checkpointing import Generation, Lineage, is_complete, load_common, read_lineage
from megatron.core.dist_checkpointing.background import Workers

VALIDATION_LOSS = "validation_loss"  # in common.pt: the loss at the very iteration of the checkpoint


@dataclass(frozen=True)
class RetentionPolicy:
    """A checkpoint is kept if any of the rules keeps it; the newest one always is. Without a rule all are."""

    keep_last_n: int | None = None
    save_retain_interval: int | None = None
    keep_best_n: int | None = None

    @property
    def deletes(self) -> bool:
        return any(rule is not None for rule in (self.keep_last_n, self.save_retain_interval, self.keep_best_n))


def to_delete(saved: Collection[int], newest: int, policy: RetentionPolicy, losses: Mapping[int, float]) -> list[int]:
    """The iterations of `saved`, all of one branch, that no rule keeps, in order; `newest` was just committed."""
    if not policy.deletes:
        return []
    present = sorted({*saved, newest})
    kept = set(present[-(policy.keep_last_n or 1) :])
    if policy.save_retain_interval is not None:
        kept |= {iteration for iteration in present if iteration % policy.save_retain_interval == 0}
    if policy.keep_best_n is not None:
        measured = [iteration for iteration in present if math.isfinite(losses.get(iteration, math.nan))]
        best = sorted(measured, key=lambda iteration: (losses[iteration], -iteration))
        kept |= set(best[: policy.keep_best_n])
    return [iteration for iteration in present if iteration not in kept]


class Retention:
    """Applies a policy to the directory of checkpoints that `generation` owns; used by rank 0.

    Call `apply` after every commit, `wait` before the next save writes anything, so that it finds the room, and `close`
    at the end. The directory is read once: nobody else may change it.
    """

    def __init__(self, policy: RetentionPolicy, generation: Generation) -> None:
        self._policy, self._generation = policy, generation
        self._losses: dict[int, float] | None = None  # of the checkpoints on the branch of the run
        self._remover: Workers | None = None
        self._removals: list[Future[None]] = []

    def apply(self, newest: int, lineage: Lineage, loss: float) -> list[Path]:
        """Put aside what `newest`, just committed with this `lineage` and validation loss, supersedes.

        The files are removed in the background. Returns the directories. Checkpoints of other branches do not count and
        are not removed.
        """
        if not self._policy.deletes:
            return []
        root = self._generation.root
        if self._losses is None:
            self._losses = self._find(lineage)
        self._losses[newest] = loss
        superfluous = to_delete(self._losses, newest, self._policy, self._losses)
        doomed = self._generation.put_aside([iteration_directory(root, iteration) for iteration in superfluous])
        for iteration in superfluous:
            del self._losses[iteration]
        if doomed:
            self._remover = self._remover or Workers(1, "checkpoint-remover")
            self._removals += [self._remover.submit(partial(self._generation.remove, path)) for path in doomed]
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
                found[iteration] = _stored_loss(directory) if self._policy.keep_best_n is not None else math.nan
        return found


def holds_checkpoint(directory: Path) -> bool:
    """Whether `directory` is a checkpoint that training wrote, of either format; both appear whole under their name."""
    return is_complete(directory) or FORMATS["legacy"](directory)


def _stored_loss(directory: Path) -> float:
    """The validation loss in a checkpoint; NaN if none was measured at its iteration, or it cannot be read."""
    try:
        return float(load_common(directory).get(VALIDATION_LOSS, math.nan))
    except (OSError, ValueError):
        return math.nan

"""Which checkpoints of a run are kept, and the removal of the others.

Nothing is removed before its successor is durable and the tracker names it. A removal is a rename to a name that never
looks like a checkpoint, made durable, and only then the files go: whenever the machine stops, what has the name of a
checkpoint is whole.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron.conversion.megatron_lm.legacy_reader import MODEL_FILE
from megatron.conversion.open_checkpoint import iteration_directory, saved_iterations
from megatron.core.dist_checkpointing import is_complete, load_common, read_tracker
from megatron.core.dist_checkpointing.threads import Workers
from megatron.core.durable_files import fsync_directory, remove

VALIDATION_LOSS = "validation_loss"  # in common.pt: the loss at the very iteration of the checkpoint
_DELETING = ".deleting-"


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
    """The iterations of `saved` that no rule keeps, in order; `newest` is the one just committed.

    Checkpoints after `newest` are of a branch that the run has left (--ckpt-step): they neither count nor go.
    """
    if not policy.deletes:
        return []
    present = sorted(iteration for iteration in {*saved, newest} if iteration <= newest)
    kept = set(present[-(policy.keep_last_n or 1) :])
    if policy.save_retain_interval is not None:
        kept |= {iteration for iteration in present if iteration % policy.save_retain_interval == 0}
    if policy.keep_best_n is not None:
        measured = [iteration for iteration in present if math.isfinite(losses.get(iteration, math.nan))]
        best = sorted(measured, key=lambda iteration: (losses[iteration], -iteration))
        kept |= set(best[: policy.keep_best_n])
    return [iteration for iteration in present if iteration not in kept]


class Retention:
    """Applies a policy to one directory of checkpoints; used by one rank.

    After every commit `apply`; before the next save `wait`, so that it finds the room; `close` at the end.
    """

    def __init__(self, policy: RetentionPolicy) -> None:
        self._policy = policy
        self._losses: dict[int, float] = {}
        self._remover: Workers | None = None
        self._removals: list[Future[None]] = []

    def apply(self, root: Path) -> list[Path]:
        """Give the checkpoints to remove another name, and remove them in the background; returns what they were.

        Does nothing unless the tracker names a complete checkpoint: it is the one that makes the others superfluous.
        """
        newest = read_tracker(root)
        if not isinstance(newest, int) or not holds_checkpoint(iteration_directory(root, newest)):
            return []
        saved = [i for i in saved_iterations(root) if holds_checkpoint(iteration_directory(root, i))]
        if self._policy.keep_best_n is not None:
            self._read_losses(root, saved)
        directories = [iteration_directory(root, i) for i in to_delete(saved, newest, self._policy, self._losses)]
        doomed = [_put_aside(directory) for directory in directories]
        if doomed:
            fsync_directory(root)  # no removal may become durable before the renames
            self._remover = self._remover or Workers(1, "checkpoint-remover")
            self._removals += [self._remover.submit(partial(_remove, path)) for path in doomed]
        return directories

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

    def _read_losses(self, root: Path, saved: Collection[int]) -> None:
        for iteration in saved:
            if iteration not in self._losses:
                self._losses[iteration] = _stored_loss(iteration_directory(root, iteration))


def holds_checkpoint(directory: Path) -> bool:
    """Whether `directory` is a checkpoint that training wrote, of either format; both appear whole under their name."""
    return is_complete(directory) or any(directory.glob(f"mp_rank_*/{MODEL_FILE}"))


def remove_leftovers(root: str | Path) -> list[str]:
    """Finish the removals that a crash cut off; returns the removed names. No run may be saving to `root`."""
    leftovers = sorted(Path(root).glob(f"{_DELETING}*"))
    for path in leftovers:
        _remove(path)
    return [path.name for path in leftovers]


def _stored_loss(directory: Path) -> float:
    """The validation loss in a checkpoint; NaN if none was measured at its iteration, or it cannot be read."""
    try:
        return float(load_common(directory).get(VALIDATION_LOSS, math.nan))
    except (OSError, ValueError):
        return math.nan


def _put_aside(directory: Path) -> Path:
    aside = directory.with_name(_DELETING + directory.name)
    _remove(aside)  # of an earlier removal that could not be finished
    os.rename(directory, aside)
    return aside


def _remove(path: Path) -> None:
    """As far as possible: what stays goes at the next start."""
    with contextlib.suppress(OSError):
        remove(path)

"""Interface of exports: a model that a save also writes to files of another format.

The implementations are in `model_export`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.dist_checkpointing.background import Slot
from megatron.core.dist_checkpointing.checkpoint_directory import CheckpointDirectory
from megatron.core.dist_checkpointing.planning.rank_plan import FileChunk, WriteItem
from megatron.core.durable_files import discard

Check = Callable[[], None]
"""Raises an error if another launch has taken over the run."""


@dataclass(frozen=True, kw_only=True)
class ExportTarget:
    """Exports of a run: one directory per exported iteration in `root`."""

    root: Path
    keep_last: int | None = None
    """Number of exports to keep; None keeps all."""
    remove: Callable[[Path], None] = discard
    """Removes an export."""

    def start(self, iteration: int, check: Check, save_id: str) -> PendingExport:
        """Return the export of one save on this rank."""
        raise NotImplementedError


class PendingExport:
    """One export on one rank.

    No method raises: an export that fails is reported in `failure`, and the checkpoint is saved
    nevertheless. Sequence of calls: `begin` on rank 0; `write` for every chunk and `close` on all
    ranks; then `commit` on rank 0, or `abandon`, which may be repeated.
    """

    def __init__(self, target: ExportTarget, iteration: int) -> None:
        self.directory = CheckpointDirectory(target.root).path(iteration)
        self.failure: str | None = None
        self._target = target
        self._iteration = iteration
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Prepare for the writes of all ranks."""

    def write(self, items: Sequence[WriteItem], chunk: FileChunk, slot: Slot) -> None:
        """Write the elements of the export that a staged chunk of `items` contains."""

    def close(self) -> int:
        """Make this rank's elements durable; return their bytes, or 0 after a failure."""
        return 0

    def commit(self, nbytes: int, checkpoint: Path) -> bool:
        """Complete the export, after all ranks have written `nbytes` and after the commit of
        `checkpoint`. Returns whether that was possible.
        """
        try:
            if self.failure is None:
                self._complete(nbytes, checkpoint)
                self._remove_older()
        except Exception as error:
            self._fail(error)
        if self.failure is not None:
            self.abandon()
        return self.failure is None

    def abandon(self) -> None:
        """Remove the files of an export that was not committed, as far as possible."""

    @property
    def warnings(self) -> list[str]:
        """The failure of this rank, unless it follows from one that rank 0 reports."""
        if self.failure is None:
            return []
        return [f"the model was not exported to {self.directory}: {self.failure}"]

    def _complete(self, nbytes: int, checkpoint: Path) -> None:
        raise NotImplementedError

    def _fail(self, error: Exception) -> None:
        """Keep the first failure."""
        with self._lock:
            if self.failure is None:
                self.failure = f"{type(error).__name__}: {error}"
                if isinstance(error, OSError):
                    self.failure = str(error)

    def _remove_older(self) -> None:
        """Remove all but the newest exports up to this one.

        Later iterations belong to a branch that this run has left: a repeated save replaces them.
        """
        if self._target.keep_last is None:
            return
        root = CheckpointDirectory(self._target.root)
        # Includes the export that was just completed.
        older = [iteration for iteration in root.list_iterations() if iteration <= self._iteration]
        for iteration in sorted(older)[: -self._target.keep_last]:
            self._target.remove(root.path(iteration))

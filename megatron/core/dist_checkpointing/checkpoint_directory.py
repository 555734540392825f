"""A directory of checkpoints: the names of its entries and the branches that they form."""

from __future__ import annotations

import os
from pathlib import Path

from megatron.core.dist_checkpointing.files import read_commit
from megatron.core.dist_checkpointing.lineage import Lineage, on_branch, read_lineage
from megatron.core.object_storage import ObjectPath, path_of


class CheckpointDirectory:
    """The checkpoints in `root`, which need not exist."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = path_of(root)

    def path(self, iteration: int | str) -> Path:
        """Return the directory of a checkpoint, which need not exist.

        `iteration` is a number, or the name of a checkpoint that has none, such as "release".
        """
        name = iteration if isinstance(iteration, str) else f"iter_{iteration:07d}"
        return self.root / name

    def list_iterations(self) -> list[int]:
        """Return the iterations that have a directory, complete or not, in order."""
        iterations = []
        for path in self.root.glob("iter_*"):
            # Other names are copies or files of the user.
            digits = path.name.removeprefix("iter_")
            if digits.isascii() and digits.isdigit():
                iterations.append(int(digits))
        return sorted(iterations)

    def read_lineages(self) -> dict[int, Lineage]:
        """Return the lineages by iteration, without unfinished saves in object storage."""
        # One small file is read per checkpoint.
        lineages = {}
        for iteration in self.list_iterations():
            path = self.path(iteration)
            if not is_unfinished(path):
                lineages[iteration] = read_lineage(path)
        return lineages

    def list_branch(self, head: Lineage | None = None) -> list[int]:
        """Return the iterations on the branch that ends with `head`, newest first.

        Only this method decides which of two checkpoints is newer. By default the branch is that of
        the latest start.
        """
        return on_branch(self.read_lineages(), head)

    def list_misnamed(self) -> list[Path]:
        """Return the checkpoints whose lineage ends with another iteration than their name.

        They are copies, such as `cp -r iter_0000004 iter_0009999`.
        """
        lineages = self.read_lineages()
        names = [number for number, lineage in lineages.items() if lineage.iteration != number]
        return [self.path(iteration) for iteration in names]


def is_unfinished(directory: Path) -> bool:
    """Return whether `directory` is an unfinished save.

    Only in object storage do unfinished saves have the name of the checkpoint.
    """
    return isinstance(directory, ObjectPath) and read_commit(directory) is None

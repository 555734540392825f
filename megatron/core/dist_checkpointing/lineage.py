"""Which checkpoints of a directory are ancestors of which: the branch decides what is newest, not the number.

After a rollback (`--ckpt-step 4`, then new saves) a directory holds two branches. Every checkpoint stores its lineage
in `lineage.json`: for each start of the job that trained a part of it, the generation of that start and the last
iteration that came from it. A checkpoint without that file belongs to generation 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

LINEAGE = "lineage.json"


class Lineage(NamedTuple):
    """The branch that ends with a checkpoint: (generation, last iteration) pairs, the checkpoint itself last."""

    branch: tuple[tuple[int, int], ...]

    @property
    def generation(self) -> int:
        return self.branch[-1][0]

    @property
    def iteration(self) -> int:
        return self.branch[-1][1]

    def descend(self, generation: int, iteration: int) -> Lineage:
        """That of the checkpoint that `generation` saves at `iteration`, having started from this one."""
        return Lineage((*self.branch, (generation, iteration)))

    def includes(self, other: Lineage) -> bool:
        """Whether `other` is this checkpoint or an ancestor of it."""
        return any(other.generation == generation and other.iteration <= last for generation, last in self.branch)

    def encode(self, parent: int | None) -> bytes:
        """The content of `lineage.json`; `parent` is the iteration of the checkpoint before, for reports."""
        content = {"generation": self.generation, "parent": parent, "branch": self.branch}
        return json.dumps(content).encode()


def read_lineage(directory: Path) -> Lineage:
    """That of the checkpoint `iter_<n>` in `directory`; one without an intact `lineage.json` is of generation 0."""
    try:
        pairs = json.loads((directory / LINEAGE).read_bytes())["branch"]
        branch = tuple((int(generation), int(iteration)) for generation, iteration in pairs)
        return Lineage(branch[:]) if branch else _of_number(directory)
    except (OSError, ValueError, TypeError, KeyError):
        return _of_number(directory)


def read_parent(directory: Path) -> int | None:
    """The iteration of the checkpoint before; None: there was none, or it is not known."""
    try:
        parent = json.loads((directory / LINEAGE).read_bytes())["parent"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return parent if type(parent) is int else None


def _of_number(directory: Path) -> Lineage:
    digits = directory.name.removeprefix("iter_")
    return Lineage(((0, int(digits) if digits.isdigit() else 0),))


def on_branch(saved: Mapping[int, Lineage], head: Lineage | None = None) -> list[int]:
    """The iterations of `saved` on one branch, newest first: what to load, and what to fall back on.

    `head` is the newest checkpoint of the branch (the one that the tracker names, even if it is damaged); without it,
    the branch is that of the latest generation. Checkpoints of other branches are left out.
    """
    if head is None:
        head = max(saved.values(), key=lambda lineage: (lineage.generation, lineage.iteration), default=None)
    if head is None:
        return []
    return sorted((iteration for iteration, lineage in saved.items() if head.includes(lineage)), reverse=True)

"""A directory of checkpoints: the names of its entries and the branches that they form."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import xxhash

from megatron.core.dist_checkpointing.background import map_in_threads
from megatron.core.dist_checkpointing.choice import Candidate
from megatron.core.dist_checkpointing.files import METADATA_JSON, read_commit, read_tracker
from megatron.core.dist_checkpointing.format import checksums
from megatron.core.dist_checkpointing.format.metadata_codec import read_metadata
from megatron.core.dist_checkpointing.ownership.fencing import find_interrupted_commit
from megatron.core.dist_checkpointing.ownership.lineage import (
    Lineage,
    find_lineage_problem,
    on_branch,
    read_lineage,
)
from megatron.core.object_path import ObjectPath, path_of
from megatron.core.safe_files.reading import open_file


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
        """Return the lineages by iteration. The latest one is of a finished save.

        Others may be of unfinished saves in object storage.
        """
        # One small file is read per checkpoint.
        iterations = self.list_iterations()
        lineages = dict(
            zip(
                iterations,
                map_in_threads(read_lineage, [self.path(iteration) for iteration in iterations]),
                strict=True,
            )
        )
        # An unfinished save must not determine the branch of the run.
        while lineages:
            latest = max(lineages, key=lambda iteration: lineages[iteration].order)
            if not is_unfinished(self.path(latest)):
                break
            del lineages[latest]
        return lineages

    def list_newer(
        self, lineage: Lineage, find_problem: Callable[[Path], str | None]
    ) -> list[Candidate]:
        """Return the complete checkpoints of later iterations that are newer than `lineage`.

        `find_problem` returns why a checkpoint cannot be loaded, None if it can.
        """
        if isinstance(self.root, ObjectPath):
            return []  # the tracker, which could have been edited, is only a hint there
        later = [
            self.path(iteration)
            for iteration in self.list_iterations()
            if iteration > lineage.iteration
        ]
        newer = []
        for path, later_lineage in zip(later, map_in_threads(read_lineage, later), strict=True):
            # Those of an abandoned branch are older: the run has returned before.
            if later_lineage.order > lineage.order and find_problem(path) is None:
                newer.append(Candidate(str(path), later_lineage))
        return newer

    def describe(
        self, find_problem: Callable[[Path], str | None]
    ) -> tuple[list[Candidate], list[Candidate]]:
        """Return the checkpoints of the run in the order in which they are used, and newer ones.

        The first list begins with the checkpoint that the tracker names, or with the latest one,
        and ends with the first usable one. See `choice.Inventory` for the second one.
        """
        tracked = None
        if not isinstance(self.root, ObjectPath):
            tracked = find_interrupted_commit(self.root) or read_tracker(self.root)
        head = None
        if tracked is not None and self.path(tracked).exists():
            head = read_lineage(self.path(tracked))
        lineages = self.read_lineages()
        shared = []
        for iteration in on_branch(lineages, head):
            path = self.path(iteration)
            shared.append(Candidate(str(path), lineages[iteration], find_problem(path)))
            if shared[-1].problem is None:
                return shared, self.list_newer(lineages[iteration], find_problem)
        return shared, []

    def list_branch(self, head: Lineage | None = None) -> list[int]:
        """Return the iterations on the branch that ends with `head`, newest first.

        Only this method decides which of two checkpoints is newer. By default the branch is that of
        the latest start.
        """
        return on_branch(self.read_lineages(), head)


def is_unfinished(directory: Path) -> bool:
    """Return whether `directory` is an unfinished save.

    Only in object storage do unfinished saves have the name of the checkpoint.
    """
    return isinstance(directory, ObjectPath) and read_commit(directory) is None


# ---- Completeness: the files of a checkpoint and their sizes, without reading shards ----


def find_missing_or_truncated(directory: str | os.PathLike[str]) -> list[str]:
    """List files that are missing or shorter than at the commit, without reading their content.

    Checkpoints of other programs do not contain a list of files; the files that `.metadata` refers
    to are checked instead.
    """
    path = path_of(directory)
    problems = []
    if isinstance(path, ObjectPath) and (listed := read_commit(path)) != {}:
        return _find_object_problems(path, listed)
    # Without its lineage a checkpoint is taken for one of another program.
    lineage_problem = find_lineage_problem(path)
    if lineage_problem is not None:
        problems.append(lineage_problem)
    # Checksums list the exact sizes; `.metadata` alone specifies minimum sizes.
    if checksums.find_checksums(path) is not None:
        exact = True
        sizes = {name: sums.size for name, sums in checksums.read_checksums(path).items()}
    else:
        exact = False
        sizes = read_metadata(path).file_sizes()
    for name, expected in sizes.items():
        try:
            size = (path / name).stat().st_size
        except OSError:
            problems.append(f"{name} is missing")
            continue
        if size < expected or (exact and size != expected):
            problems.append(f"{name} has {size} bytes instead of {expected}")
    return problems


def _find_object_problems(
    path: ObjectPath, listed: Mapping[str, tuple[int, str]] | None
) -> list[str]:
    """Compare sizes of all objects, and content of small ones, with `metadata.json`."""
    if listed is None:
        return [f"{METADATA_JSON} does not record a commit"]
    problems = []
    # Shards are compared by size only, since reading them would download the checkpoint.
    there = path.store.sizes(path.key)
    for name, (expected, digest) in listed.items():
        size = there.get((path / name).key)
        if size is None:
            problems.append(f"{name} is missing")
        elif size != expected:
            problems.append(f"{name} has {size} bytes instead of {expected}")
        elif not name.endswith(".distcp"):
            with open_file(path / name) as file:
                sums = checksums.compute_checksums(file.read_whole())
            if xxhash.xxh3_64_hexdigest(sums.blocks) != digest:
                problems.append(f"{name} does not match the hash in {METADATA_JSON}")
    return problems

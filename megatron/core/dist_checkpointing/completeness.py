"""Completeness of a checkpoint: its files and their sizes, without reading shards."""

from __future__ import annotations

import os
from collections.abc import Mapping

import xxhash

from megatron.core.dist_checkpointing.files import METADATA_JSON, read_commit
from megatron.core.dist_checkpointing.format import checksums
from megatron.core.dist_checkpointing.format.metadata_codec import read_metadata
from megatron.core.dist_checkpointing.lineage import find_lineage_problem
from megatron.core.object_path import ObjectPath, path_of
from megatron.core.safe_files.reading import open_file


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

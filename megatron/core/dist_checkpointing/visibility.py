"""Waiting until all ranks see files of a shared file system.

The client of a network file system may remember for a while that a name does not exist.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.object_path import ObjectPath
from megatron.core.safe_files.errors import CheckpointError

# Seconds in which all ranks see a new name: an NFS client may remember for 30 seconds (acdirmin)
# that a directory has no such entry.
VISIBLE_WITHIN = 40.0
_PAUSE = 0.1  # seconds between two looks
_SHARDS = ".distcp"  # file name extension


def wait_until_visible(paths: Iterable[Path]) -> list[Path]:
    """Wait for files that another rank has seen, and return those that do not appear in time."""
    deadline = time.monotonic() + VISIBLE_WITHIN
    late = list(paths)
    while True:
        late = [path for path in late if not path.exists()]
        if not late or time.monotonic() > deadline:
            return late
        time.sleep(_PAUSE)


def wait_until_all_ranks_see(directory: Path, ranks: Coordination) -> None:
    """Wait until every rank sees the files of a checkpoint that rank 0 sees. Collective.

    Shards are left out, because there are many: a `Reader` waits for those that it opens. A rank
    that opens a checkpoint without its `common.pt` or `checksums.bin` would take it for a
    checkpoint of another program, or not verify it. Raises CheckpointError on every rank if a file
    stays invisible on one.
    """
    if isinstance(directory, ObjectPath):
        return
    names = ranks.run_on_rank0(lambda: _list_small_files(directory))

    def wait() -> None:
        late = wait_until_visible(directory / name for name in names)
        if late:
            raise CheckpointError(
                f"{late[0]} is not visible, but rank 0 sees it: the checkpoint must be in a "
                "directory that all nodes share, or be copied to every node"
            )

    ranks.run_on_all(wait)


def _list_small_files(directory: Path) -> list[str]:
    """Return the names of the files and directories in a checkpoint, except shards."""
    names = []
    for path in directory.iterdir():
        # Dangling links are invisible everywhere.
        if path.suffix != _SHARDS and path.exists():
            names.append(path.name)
    return names

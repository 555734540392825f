"""The checkpoint to use instead of a damaged one."""

from __future__ import annotations

import logging
from pathlib import Path

from megatron.core.dist_checkpointing import CheckpointDirectory
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.dist_checkpointing.verification import find_damage
from megatron.core.run_checkpoint.formats import find_problem, list_newest_first

logger = logging.getLogger(__name__)

_TRIED = 3  # older checkpoints that are read


def find_older_intact(directory: Path) -> Path | None:
    """Return the newest checkpoint before `directory` whose checksums match. Collective."""
    ranks = Coordination.of(None)
    candidates = ranks.run_on_rank0(lambda: _list_older(directory))
    for candidate in candidates:
        logger.info(f"{directory} is damaged: comparing the checksums of {candidate}")
        problems = find_damage(candidate, ranks.rank, ranks.size)
        if ranks.all_true(not problems):
            return candidate
    return None


def _list_older(directory: Path) -> list[Path]:
    """Return complete checkpoints of the same branch as `directory`, newest first."""
    root = directory.parent
    checkpoints = CheckpointDirectory(root)
    iterations = sorted(checkpoints.list_iterations())
    paths = [checkpoints.path(iteration) for iteration in iterations]
    if directory not in paths:
        return []
    before = paths[: paths.index(directory)]
    older: list[Path] = []
    for path in list_newest_first(root, directory):
        if len(older) < _TRIED and path in before and find_problem(path) is None:
            older.append(path)
    return older

"""Name an older, intact checkpoint when the one that a run starts from turns out to be damaged."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from megatron.core.dist_checkpointing import CheckpointDirectory, DamagedError
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.run_checkpoint.formats import find_problem, list_newest_first
from megatron.core.wings import resolve

logger = logging.getLogger(__name__)

FIND_DAMAGE = "megatron.core.dist_checkpointing.verification:find_damage"

_TRIED = 3  # older checkpoints that are read


@contextlib.contextmanager
def damage_explained(directory: Path) -> Iterator[None]:
    """Add the fix to a DamagedError of the block, which all ranks raise together.

    The fix is the newest older checkpoint of the same run whose checksums match. All ranks share
    the reading of it, so that this takes about as long as a load.
    """
    try:
        yield
    except DamagedError as error:
        root = directory.parent
        intact = _find_older_intact(directory)
        if intact is None:
            raise
        raise DamagedError(
            f"{error}\n{intact.name} is intact: continue from it with --load {root} --ckpt-step "
            f"{int(intact.name.removeprefix('iter_'))}"
        ) from error


def _find_older_intact(directory: Path) -> Path | None:
    """Return the newest checkpoint before `directory` whose checksums match. Collective."""
    ranks = Coordination.of(None)
    candidates = ranks.run_on_rank0(lambda: _list_older(directory))
    for candidate in candidates:
        logger.info(f"{directory} is damaged: comparing the checksums of {candidate}")
        problems = resolve(FIND_DAMAGE)(candidate, ranks.rank, ranks.size)
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

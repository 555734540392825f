"""The directory of a run's checkpoints: `latest_checkpointed_iteration.txt` and `iter_0000010/`.

The tracker names the checkpoint to load. It moves last, so what it names is complete unless something was lost since.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from megatron.core.dist_checkpointing import CheckpointError, is_complete, missing_or_truncated, read_tracker

RELEASE = "release"  # in a tracker and as a directory: weights that belong to no iteration


def iteration_directory(root: str | Path, iteration: int) -> Path:
    return Path(root) / f"iter_{iteration:07d}"


def iteration_of(directory: Path) -> int:
    return int(directory.name.removeprefix("iter_"))


def check_writable(root: str | Path) -> None:
    """Create `root` if need be; ValueError if files cannot be written there (better now than after hours)."""
    try:
        Path(root).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        raise ValueError(f"checkpoints cannot be saved to {root}: {error}") from error


def saved_iterations(root: str | Path) -> list[int]:
    """Iterations that have a directory under `root`, in order; complete or not."""
    names = [path.name.removeprefix("iter_") for path in Path(root).glob("iter_*")]
    return sorted(int(name) for name in names if name.isdigit())


def fault(directory: Path) -> str | None:
    """Why the checkpoint `directory` cannot be loaded, as far as names and sizes of its files tell; None if it can."""
    if not is_complete(directory):
        return "it is not complete"
    try:
        problems = missing_or_truncated(directory)
    except CheckpointError as error:
        return str(error)
    return f"it is damaged: {'; '.join(problems[:3])}" if problems else None


def complete_iterations(root: str | Path) -> list[int]:
    """Those of `saved_iterations` that can be loaded."""
    return [iteration for iteration in saved_iterations(root) if fault(iteration_directory(root, iteration)) is None]


def find_checkpoint(root: str | Path, step: int | None) -> tuple[Path | None, str | None]:
    """The directory to load and a note if it is not the one that the tracker names; (None, None) if there is none.

    Iteration `step` if given, else what the tracker names, else (the tracker is gone, or that checkpoint is incomplete
    or damaged) the newest complete one. ValueError when what is asked for is not there.
    """
    if step is not None:
        found = iteration_directory(root, step)
        if (problem := fault(found)) is not None:
            raise ValueError(f"--ckpt-step {step}: {found} cannot be loaded, {problem}; {_listed(root)}")
        return found, None
    newest, reason = read_tracker(root), "there is no tracker file"
    if newest is not None:
        named = Path(root) / RELEASE if newest == RELEASE else iteration_directory(root, int(newest))
        if (problem := fault(named)) is None:
            return named, None
        reason = f"the tracker names {newest}, but {problem}"
    complete = complete_iterations(root)
    if complete:
        found = iteration_directory(root, complete[-1])
        return found, f"{reason}: taking {found}, the newest complete checkpoint"
    if newest is not None:
        raise ValueError(f"{root}: {reason}; {_listed(root)}")
    return None, None


def _listed(root: str | Path) -> str:
    """What is there, for messages."""
    if not Path(root).is_dir():
        return f"{root} is no directory"
    iterations = complete_iterations(root)
    return f"complete are: {', '.join(map(str, iterations))}" if iterations else f"{root} holds no complete checkpoint"

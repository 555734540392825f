"""The directory of a run's checkpoints: `latest_checkpointed_iteration.txt` and `iter_0000010/`.

The tracker names the newest checkpoint and moves last, so what it names is complete unless the disk was damaged.
"""

from __future__ import annotations

import os
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"  # in a tracker: weights that belong to no iteration


def iteration_directory(root: str | Path, iteration: int) -> Path:
    return Path(root) / f"iter_{iteration:07d}"


def saved_iterations(root: str | Path) -> list[int]:
    """Iterations that have a directory under `root`, in order; complete or not."""
    names = [path.name.removeprefix("iter_") for path in Path(root).glob("iter_*")]
    return sorted(int(name) for name in names if name.isdigit())


def read_tracker(root: str | Path) -> int | str | None:
    """The newest iteration, "release", or None without a tracker; ValueError if it is neither."""
    path = Path(root) / TRACKER
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None
    if text == RELEASE:
        return RELEASE
    if not text.isdecimal():
        raise ValueError(
            f"{path} should hold an iteration, but holds {text[:40]!r}; there is {_listed(root)}: choose with "
            "--ckpt-step, or write the number into the file"
        )
    return int(text)


def write_tracker(root: str | Path, iteration: int) -> None:
    """Make `iteration` the newest checkpoint: durable before it is visible, never half written."""
    path = Path(root) / TRACKER
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w") as file:
        file.write(str(iteration))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    directory = os.open(root, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def find_checkpoint(root: str | Path, step: int | None) -> Path | None:
    """The directory of the checkpoint to load: that of iteration `step`, or the newest; None if there is none at all.

    ValueError when a checkpoint is named that is not there.
    """
    if step is not None:
        found = iteration_directory(root, step)
        if not found.is_dir():
            raise ValueError(f"--ckpt-step {step}: {found} does not exist; there is {_listed(root)}")
        return found
    newest = read_tracker(root)
    if newest is None:
        if saved_iterations(root):
            raise ValueError(
                f"{Path(root) / TRACKER} is missing, but there is {_listed(root)}: choose with --ckpt-step"
            )
        return None
    found = Path(root) / RELEASE if newest == RELEASE else iteration_directory(root, int(newest))
    if not found.is_dir():
        raise ValueError(
            f"{Path(root) / TRACKER} names {newest}, but {found} does not exist; there is {_listed(root)}: choose with "
            "--ckpt-step"
        )
    return found


def _listed(root: str | Path) -> str:
    """What is there, for messages."""
    if not Path(root).is_dir():
        return f"no directory {root}"
    iterations = saved_iterations(root)
    return f"iteration {', '.join(map(str, iterations))}" if iterations else "no checkpoint"

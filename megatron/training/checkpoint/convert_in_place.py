"""A checkpoint in another form than it was saved in: its files are replaced before it gets its name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from megatron.core.durable_files import check_free_space, fsync_directory


def replace_files(directory: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a directory from the files that lie in `directory`, and durably put its files in their place.

    What it writes must be durable. Raises what it raises, or OSError; there is more in `directory` then than before.
    """
    stored = list(directory.iterdir())
    check_free_space(directory, sum(path.stat().st_size for path in stored))
    made = directory / "rewritten"
    write(made)
    for path in stored:
        path.unlink()
    for path in list(made.iterdir()):
        os.rename(path, directory / path.name)
    made.rmdir()
    fsync_directory(directory)

"""Files that the content of another file names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core.safe_files.errors import CheckpointError
from megatron.core.safe_files.reading import find_outside_target
from megatron.core.safe_files.schema import file_name
from megatron.core.terminal import escape_control_chars


def find_named_file(directory: Path, name: Any, location: str) -> Path:
    """Return the path of a file in `directory` that the content of another file names.

    Raises CheckpointError naming `location` if it is not a name, or not the name of a regular file.
    A missing file is left to the caller.
    """
    path = directory / file_name(name, location)
    target = find_outside_target(path)
    if target is not None:
        raise CheckpointError(
            f"{location}: {name} is a link to {escape_control_chars(target)}, outside of "
            f"{directory}"
        )
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{location}: {name} is not a regular file")
    return path

"""Symbolic links inside checkpoints: none may lead out of the checkpoint that contains it.

A checkpoint from a stranger could otherwise contain `__0_0.distcp -> /home/me/private/...` and have
a conversion copy the data of another checkpoint into an export. A directory that the user names may
itself be a link, and the layout of Hugging Face's cache is allowed: files in
`models--*/snapshots/<revision>` are links to `../../blobs` of the same model.
"""

from __future__ import annotations

import os
from pathlib import Path

from megatron.core.object_path import ObjectPath

FOLLOW_LINKS = "MEGATRON_FOLLOW_LINKS"

# Directories named by the user: absolute paths as given. Their real paths may change: a run that
# saves goes on if its directory is moved and a link to the new place is left.
_named_directories: set[str] = set()


def confine_links(directory: Path) -> None:
    """Refuse links anywhere below `directory`, which the user has named, that lead out of it.

    Without this call, a file is confined to the directory that contains it.
    """
    if isinstance(directory, ObjectPath):
        return
    _named_directories.add(os.path.abspath(directory))


def allow_links() -> None:
    """Follow all links, in this process and its children (`--follow-links`)."""
    os.environ[FOLLOW_LINKS] = "1"


def find_outside_target(path: str | os.PathLike[str]) -> str | None:
    """Return the target of `path` if it leaves its checkpoint via a link, else None."""
    are_links_allowed = os.environ.get(FOLLOW_LINKS, "0") not in ("", "0")
    if are_links_allowed or isinstance(path, ObjectPath):
        return None
    target = os.path.realpath(path)
    home = _find_home(os.path.abspath(path))
    if _is_inside(target, home):
        return None
    # Hugging Face's cache: snapshots/<revision>/<file> is a link to blobs/<hash>.
    snapshots = Path(home).parent
    blobs = snapshots.parent / "blobs"
    if snapshots.name == "snapshots" and _is_inside(target, str(blobs)):
        return None
    return target


def _find_home(path: str) -> str:
    """Return the real path of the directory that links at `path` must not leave."""
    # The outermost directory: if a program opens `run` and then `run/iter_0000010`, the latter
    # must not be a link that leaves `run`.
    containing = [named for named in _named_directories if _is_inside(path, named)]
    if containing:
        return os.path.realpath(min(containing, key=len))
    return os.path.realpath(os.path.dirname(path))


def _is_inside(path: str, directory: str) -> bool:
    """Return whether an absolute path is below a directory."""
    return path.startswith(directory.rstrip("/") + "/")

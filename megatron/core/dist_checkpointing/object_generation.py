"""Who owns a directory of checkpoints in object storage: the same generations as in a file system, without rename.

A checkpoint is committed by one conditional request for its `metadata.json`, which either does not exist or is a note
that an earlier save was revoked. A start takes the object `.generation-0000007` by a conditional request, and then
revokes every save that has claimed its place (`iter_*/.claim`) and is not committed: the note takes the name that its
commit needs. The owner claims first, then writes, then looks whether it is still the owner, and then commits. So an
old owner whose claim came before the takeover finds the note, and one whose claim came after it finds the new
generation: no clock decides, however long it was stopped. Whatever has a name that another save may use, too, is
written in three steps: read the version, check the generation, replace that version. Nothing but data files, whose
names belong to one save, is ever deleted below a directory that may be saved to again.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.files import METADATA, METADATA_JSON, TRACKER, read_commit
from megatron.core.dist_checkpointing.generation import Generation, read_lineage
from megatron.core.object_storage import ConflictError, ObjectPath

CLAIM = ".claim"
_PREFIX = ".generation-"


class ObjectGeneration(Generation):
    """The right of one start to change the directory of checkpoints `root` in object storage."""

    root: ObjectPath

    @classmethod
    def take(cls, root: Path, owner: dict[str, Any]) -> ObjectGeneration:
        """The next generation of `root`; whoever had it before has lost it, and can commit nothing any more."""
        assert isinstance(root, ObjectPath)
        token = secrets.token_hex(8)
        content = {"token": token, "since": datetime.now(timezone.utc).isoformat(timespec="seconds"), **owner}
        number = max([_newest(root), *(read_lineage(path).generation for path in root.glob("iter_*"))])
        while True:
            number += 1
            mine = f"{root.key}/{_PREFIX}{number:07d}"
            try:
                root.store.create(mine, json.dumps(content).encode())
            except ConflictError:  # another start took this number
                continue
            newest = _newest(root)
            if newest <= number:
                break
            # Faster starts had taken this number, and later ones, which removed it.
            root.store.delete([mine])
            number = newest
        generation = cls(root, number, token)
        for directory in root.glob("iter_*"):
            assert isinstance(directory, ObjectPath)
            if (directory / CLAIM).is_file():
                revoke(directory, generation.check, committed=False)
        root.store.delete([f"{root.key}/{_PREFIX}{older:07d}" for older in _numbers(root) if older < number])
        return generation

    def is_current(self) -> bool:
        return _newest(self.root) == self.number and _owner(self.root, self.number).get("token") == self.token

    def check(self, cause: BaseException | None = None) -> None:
        newest = _newest(self.root)
        if newest > self.number:
            raise self.superseded_by(newest, _owner(self.root, newest)) from cause

    def move_tracker(self, iteration: int | str) -> None:
        """A hint for other programs; ours look for the newest commit."""
        self.check()
        self.root.store.put((self.root / TRACKER).key, str(iteration).encode())

    def put_aside(self, directories: list[Path]) -> list[Path]:
        """First it stops being a checkpoint, then `remove` takes its data."""
        self.check()
        for directory in directories:
            (directory / METADATA_JSON).unlink()
            (directory / METADATA).unlink()
        return directories

    def remove(self, directory: Path) -> None:
        with contextlib.suppress(OSError):
            remove_objects(directory)


def take_generation(root: Path, owner: dict[str, Any]) -> Generation:
    """The next generation of the directory of checkpoints `root`, wherever that is."""
    return (ObjectGeneration if isinstance(root, ObjectPath) else Generation).take(root, owner)


def put_checked(directory: ObjectPath, name: str, content: bytes, check: Callable[[], None]) -> str:
    """Write an object that other saves have written, or may write; returns its version.

    `check` raises SupersededError if another start has taken over. If that happens after the check, the new owner's
    version is another one, and this request is refused.
    """
    store, key = directory.store, (directory / name).key
    while True:
        e_tag = store.version(key)
        check()
        with contextlib.suppress(ConflictError, FileNotFoundError):  # somebody has just written or removed it
            return store.create(key, content) if e_tag is None else store.replace(key, content, e_tag)


def revoke(directory: ObjectPath, check: Callable[[], None], committed: bool = True) -> str | None:
    """Make sure that no save of `directory` under way can commit, and remove its data; with `committed`, also what is
    committed there, otherwise None is returned for that.

    Returns the version of the note in `metadata.json` that says so; the next commit replaces it.
    """
    store, key = directory.store, (directory / METADATA_JSON).key
    note = json.dumps({"revoked": secrets.token_hex(8)}).encode()  # never twice the same: neither is its version
    while True:
        e_tag = store.version(key)
        if not committed and read_commit(directory) is not None:
            return None
        doomed = [data for data in store.sizes(directory.key) if data.endswith(".distcp")]
        check()
        with contextlib.suppress(ConflictError, FileNotFoundError):
            e_tag = store.create(key, note) if e_tag is None else store.replace(key, note, e_tag)
            store.delete(doomed)
            return e_tag


def remove_objects(directory: Path) -> None:
    """All of them, the claim last."""
    assert isinstance(directory, ObjectPath)
    doomed = list(directory.store.sizes(directory.key))
    directory.store.delete([key for key in doomed if not key.endswith(f"/{CLAIM}")])
    directory.store.delete([key for key in doomed if key.endswith(f"/{CLAIM}")])


def _numbers(root: ObjectPath) -> list[int]:
    names = [key.rpartition("/")[2].removeprefix(_PREFIX) for key in root.store.children(root.key)[1]]
    return sorted(int(name) for name in names if name.isdigit())


def _newest(root: ObjectPath) -> int:
    return max(_numbers(root), default=0)


def _owner(root: ObjectPath, number: int) -> dict[str, Any]:
    try:
        content = json.loads((root / f"{_PREFIX}{number:07d}").read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}

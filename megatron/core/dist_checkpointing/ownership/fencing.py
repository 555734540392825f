"""Fencing: ownership of a directory of checkpoints by one launch of a job.

Every launch that saves takes the next generation. It creates `.generation-0000007-<token>/`, where
the token is random, and renames the directories of earlier generations away. An owner changes the
directory of checkpoints only by renames from or to a path inside its own generation: to add a
finished checkpoint, to move the tracker, to remove a checkpoint. All of these renames fail for the
old owner as soon as a successor has taken over, wherever the old owner was suspended. No check
precedes the action.

The token makes the path unique. Numbers repeat when the directory of checkpoints is removed,
renamed or restored from a backup while a launch is suspended or running; without the token, that
launch would find its number again, in a directory that belongs to another run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core.dist_checkpointing.background import map_in_threads
from megatron.core.dist_checkpointing.files import TRACKER
from megatron.core.dist_checkpointing.ownership.lineage import MAX_GENERATION, Segment, read_lineage
from megatron.core.durable_files import (
    REPLACED,
    fsync_directory,
    remove,
    rename,
    restore_replaced,
    write_flushed,
)
from megatron.core.object_path import ObjectPath
from megatron.core.safe_files.errors import CheckpointError
from megatron.core.safe_files.reading import parse_json, read_regular
from megatron.core.terminal import escape_control_chars
from megatron.core.wings import resolve

logger = logging.getLogger(__name__)

GENERATION = ".generation-"
OWNER = "owner.json"
_CLAIM = ".claim-"
_REVOKED = ".revoked-"
_DELETING = "deleting-"
# The directories of older versions of this program have no token.
_NAME = re.compile(r"\.generation-(\d{1,9})(?:-([0-9a-zA-Z]{1,64}))?")
_OWNER_LIMIT = 1 << 20  # bytes of owner.json
_OBJECT_GENERATION = "megatron.core.dist_checkpointing.saving.object_commit:ObjectGeneration"
_LOOKS = 3  # listings without any generation before one counts as removed
_PAUSE = 0.02  # seconds between them


class SupersededError(CheckpointError):
    """Another launch has taken over the directory of checkpoints; this one must not change it."""


class GenerationId(NamedTuple):
    """Number and token of a generation; of two generations, the greater one is newer."""

    number: int
    token: str

    @property
    def name(self) -> str:
        suffix = f"-{self.token}" if self.token else ""
        return f"{GENERATION}{self.number:07d}{suffix}"


@dataclass(frozen=True)
class Generation:
    """The right of one launch to change the directory of checkpoints `root`.

    `owner` describes the launch for the error of those who lose the directory to it. `known` are
    the launches (number, token) that had saved checkpoints in `root` when the generation was taken.
    """

    root: Path
    number: int
    token: str
    owner: dict[str, Any] = field(default_factory=dict, compare=False)
    known_starts: frozenset[tuple[int, str | None]] = field(default=frozenset(), compare=False)

    @property
    def id(self) -> GenerationId:
        return GenerationId(self.number, self.token)

    @property
    def directory(self) -> Path:
        return self.root / self.id.name

    def segment(self, iteration: int) -> Segment:
        """Return the part of a lineage that this launch trains, up to `iteration`."""
        return Segment(self.number, iteration, self.token or None)

    @classmethod
    def take(cls, root: Path, owner: dict[str, Any], above: int = 0) -> Generation:
        """Take the next generation of the existing directory `root`; its former owner loses it.

        Unfinished files of former owners are removed; a checkpoint that they were about to replace
        gets its name back. The number exceeds `above` and that of every checkpoint in `root`.
        """
        # Choose a number above all numbers that are or were in use here.
        token = secrets.token_hex(8)
        content = describe_owner(token, owner)
        known_starts = find_starts(root)
        generation_numbers = [above, *(generation_number for generation_number, _ in known_starts)]
        newest = find_newest(root)
        if newest is not None:
            generation_numbers.append(newest.number)
        generation_number = max(generation_numbers) + 1
        while True:
            generation = cls(root, generation_number, token, content, known_starts)
            generation._claim()
            # A launch that lists the generations after its claim sees all earlier claims: of two
            # simultaneous launches, at least one sees the other.
            newest = find_newest(root)
            if newest is None or newest <= generation.id:
                break
            generation._withdraw()
            generation_number = newest.number + 1
        generation._revoke_older()
        return generation

    def is_current(self) -> bool:
        """Return whether this rank sees the generation, and no other launch has taken over.

        Raises OSError if the file system fails.
        """
        try:
            owner = _read_owner_file(self.root, self.id)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return owner.get("token") == self.token

    @contextlib.contextmanager
    def fenced(self) -> Iterator[None]:
        """Turn an OSError of the block that is caused by a takeover into SupersededError."""
        try:
            yield
        except OSError as error:
            self.check(error)
            raise  # a real error of the file system

    def check(self, cause: BaseException | None = None) -> None:
        """Raise SupersededError if another launch has taken over."""
        if not self.root.is_dir() or self.is_current():
            return
        successor = self._find_successor()
        if successor is not None:
            raise self.superseded_by(successor) from cause

    def superseded_by(self, successor: GenerationId) -> SupersededError:
        """Return the error that names the launch that has taken over."""
        content = read_owner(self.root, successor)
        shown = {"since", "host", "pid", "job"}
        who = ", ".join(f"{key} {content[key]}" for key in content if key in shown)
        return SupersededError(
            f"{self.root}: another launch has taken over this directory (generation "
            f"{successor.number}: {escape_control_chars(who)}). This run (generation "
            f"{self.number}) no longer writes to it; continue it with another --save"
        )

    def restore(self) -> None:
        """Create the directory of this generation again if it was removed but not taken over.

        A cleaner of hidden files, or `rm -rf run/.generation-*`, removes it under a live run.
        Raises SupersededError if `root` now belongs to another launch, or contains checkpoints of a
        launch that this one has not seen: the directory was replaced by that of another run.
        """
        if not self.root.is_dir() or self.is_current():
            return
        self.check()
        # Refuse the directory if another run has replaced it with its own.
        unseen = find_starts(self.root) - self.known_starts - {(self.number, self.token)}
        strangers = sorted(
            generation_number for generation_number, _ in unseen if generation_number > 0
        )
        if strangers:
            generation_list = ", ".join(map(str, strangers))
            raise SupersededError(
                f"{self.root}: this directory was replaced by that of another run: it contains "
                f"checkpoints of generation {generation_list}, which this run (generation "
                f"{self.number}) has not seen. It no longer writes to it; continue it with "
                "another --save"
            )
        # Claim again, then look for launches that claimed in the meantime, as `take` does.
        self._claim()
        successor = self._find_successor()
        if successor is not None:
            self._withdraw()
            raise self.superseded_by(successor)
        logger.warning(
            f"{self.directory} was removed while this run was saving to {self.root}. No other "
            "launch has taken over, so the directory was created again and the run goes on"
        )

    def publish(self, name: str, content: bytes) -> None:
        """Write the file `name` of `root` durably, as a whole, and only as its owner."""
        self._stage(name, content)
        # The source is inside the generation, so that the rename fails after a takeover.
        with self.fenced():
            rename(self.directory / name, self.root / name)
            fsync_directory(self.root)

    def stage_tracker(self, iteration: int | str) -> None:
        """Write the file that `move_tracker` gives its name; call it right before the commit.

        A disk that the commit fills has no room for it afterwards. If this launch is killed between
        the two, the file shows that the tracker is behind (see `find_interrupted_commit`).
        """
        self._stage(TRACKER, str(iteration).encode())

    def move_tracker(self, iteration: int | str) -> None:
        """Name the latest checkpoint, durably; call it after that is committed, never before."""
        self.publish(TRACKER, str(iteration).encode())

    def _stage(self, name: str, content: bytes) -> None:
        """Write the file `name` inside the generation, unless it has this content already."""
        path = self.directory / name
        with self.fenced():
            if not path.is_file() or path.read_bytes() != content:
                write_flushed(path, content)

    def put_aside(self, directories: list[Path]) -> list[Path]:
        """Rename checkpoints out of the directory of checkpoints, durably.

        Returns their new paths, for `remove`. Directories that do not exist are left out.
        """
        # Removals that earlier calls could not finish.
        for path in self.directory.glob(f"{_DELETING}*"):
            remove(path)
        # Rename all of them first: removing the content of one can take minutes.
        aside = []
        for directory in directories:
            path = self.directory / f"{_DELETING}{directory.name}"
            with contextlib.suppress(FileNotFoundError), self.fenced():
                rename(directory, path)
                aside.append(path)
        if aside:
            fsync_directory(self.root)  # no removal may become durable before the renames
        return aside

    def remove(self, aside: Path) -> None:
        """Remove a directory that was put aside; the next `put_aside` removes leftovers."""
        with contextlib.suppress(OSError):
            remove(aside)

    def _claim(self) -> None:
        """Create the directory of this generation, with `owner.json` in it, by one rename."""
        claim = self.root / f"{_CLAIM}{self.token}"
        while True:
            try:
                claim.mkdir(exist_ok=True)
                write_flushed(claim / OWNER, json.dumps(self.owner).encode())
                rename(claim, self.directory)
                break
            except FileNotFoundError:
                # A faster launch has removed our claim together with those of crashed launches.
                if not self.root.is_dir():
                    raise
        fsync_directory(self.root)

    def _withdraw(self) -> None:
        claim = self.root / f"{_CLAIM}{self.token}"
        with contextlib.suppress(FileNotFoundError):  # a newer launch has revoked it already
            os.rename(self.directory, claim)
        remove(claim)

    def _find_successor(self) -> GenerationId | None:
        """Return the newest other generation; None if there is none.

        Call it if the own directory is missing. A listing of a directory that changes meanwhile can
        miss both the generation that is renamed away and the one that replaces it, so an empty
        listing is repeated.
        """
        for attempt in range(_LOOKS):
            if attempt > 0:
                time.sleep(_PAUSE)
            other_generations = [
                generation_id
                for generation_id in generations_in(self.root)
                if generation_id != self.id
            ]
            if other_generations:
                return other_generations[-1]
        return None

    def _revoke_older(self) -> None:
        """Make former owners lose the directory."""
        try:
            self._remove_older()
        except OSError:
            # Without the permission to revoke, the former owner keeps the directory.
            self._withdraw()
            raise

    def _remove_older(self) -> None:
        """Rename earlier generations and claims away, then remove them with their content."""
        # Claims of launches that crashed before their rename are removed, too.
        older = [
            generation_id.name
            for generation_id in generations_in(self.root)
            if generation_id < self.id
        ]
        older += [path.name for path in self.root.glob(f"{_CLAIM}*")]
        for name in older:
            revoked = self.root / f"{_REVOKED}{name.removeprefix('.')}-{self.token}"
            with contextlib.suppress(FileNotFoundError):  # another launch was faster
                os.rename(self.root / name, revoked)
        # The renames must be durable before the content is removed.
        fsync_directory(self.root)
        for revoked in sorted(self.root.glob(f"{_REVOKED}*")):
            # A link could point at any directory: it is removed, never followed.
            if revoked.is_dir() and not revoked.is_symlink():
                _restore_all_replaced(revoked, self.root)
                _move_interrupted_tracker(revoked, self.root)
            remove(revoked)


def _restore_all_replaced(revoked: Path, root: Path) -> None:
    """Give checkpoints that a former owner was about to replace their names back."""
    with contextlib.suppress(FileNotFoundError):  # another launch is faster
        for path in revoked.glob(f"{REPLACED}*"):
            if not path.is_symlink():
                restore_replaced(path, root)


def _move_interrupted_tracker(revoked: Path, root: Path) -> None:
    """Move the tracker of a former owner that was killed between a commit and that step."""
    # Another launch may be faster.
    with contextlib.suppress(FileNotFoundError):
        if _read_interrupted_commit(revoked, root) is not None:
            rename(revoked / TRACKER, root / TRACKER)
            fsync_directory(root)


def find_interrupted_commit(root: Path) -> int | None:
    """Return the iteration that the owner of `root` has committed without moving the tracker.

    None in the usual case, and in object storage, where the tracker is only a hint.
    """
    newest = find_newest(root)
    if newest is None or isinstance(root, ObjectPath):
        return None
    return _read_interrupted_commit(root / newest.name, root)


def _read_interrupted_commit(generation: Path, root: Path) -> int | None:
    try:
        content = read_regular(generation / TRACKER).strip()
    except (FileNotFoundError, NotADirectoryError, CheckpointError):
        return None
    if not (content.isascii() and content.isdigit()):
        return None
    # The checkpoint of that name may be an older one, which was about to be replaced.
    iteration = int(content)
    token = _parse_owner(generation / OWNER).get("token")
    lineage = read_lineage(root / f"iter_{iteration:07d}")
    is_committed = token is not None and (lineage.token, lineage.iteration) == (token, iteration)
    return iteration if is_committed else None


def describe_owner(token: str, owner: dict[str, Any]) -> dict[str, Any]:
    """Return the content of `owner.json`."""
    since = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"token": token, "since": since, **owner}


def generations_in(root: Path) -> list[GenerationId]:
    """Return the generations that `root` contains, oldest first."""
    generation_ids = []
    for path in root.glob(f"{GENERATION}*"):
        # Other names are not ours, e.g., of an editor or a file manager.
        match = _NAME.fullmatch(path.name)
        if match is not None:
            generation_ids.append(GenerationId(int(match[1]), match[2] or ""))
    return sorted(generation_ids)


def find_newest(root: Path) -> GenerationId | None:
    """Return the newest generation in `root`, None if there is none."""
    generation_ids = generations_in(root)
    return generation_ids[-1] if generation_ids else None


def find_starts(root: Path) -> frozenset[tuple[int, str | None]]:
    """Return generation number and token of the launches that saved the checkpoints in `root`."""
    starts = set()
    for lineage in map_in_threads(read_lineage, root.glob("iter_*")):
        starts.add((min(lineage.generation, MAX_GENERATION), lineage.token))
    return frozenset(starts)


def read_owner(root: Path, generation: GenerationId) -> dict[str, Any]:
    """Read who owns `generation` of `root`; empty if that cannot be read."""
    try:
        return _read_owner_file(root, generation)
    except OSError:
        return {}


def _read_owner_file(root: Path, generation: GenerationId) -> dict[str, Any]:
    """Read who owns `generation` of `root`; empty if that is not valid. Raises OSError."""
    path = root / generation.name
    if not isinstance(root, ObjectPath):  # there a generation is one object
        path = path / OWNER
    return _parse_owner(path)


def _parse_owner(path: Path) -> dict[str, Any]:
    """Return the content of an `owner.json`; empty if that is not valid. Raises OSError."""
    try:
        content = parse_json(read_regular(path, limit=_OWNER_LIMIT), str(path))
    except CheckpointError:
        return {}
    return content if isinstance(content, dict) else {}


def take_generation(root: Path, owner: dict[str, Any], above: int = 0) -> Generation:
    """Take the next generation of a directory of checkpoints in a file system or object storage."""
    generation_class: type[Generation] = Generation
    if isinstance(root, ObjectPath):
        generation_class = resolve(_OBJECT_GENERATION)
    return generation_class.take(root, owner, above)

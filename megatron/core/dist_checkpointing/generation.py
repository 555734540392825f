"""Which start of a job owns a directory of checkpoints, and which checkpoints are ancestors of
which.

Every start takes the next generation: it makes `.generation-0000007/`, and renames the directories
of earlier generations away. Whatever an owner puts into the directory of checkpoints, or takes out
of it, is one rename from or to a path inside its own generation: a finished checkpoint, the
tracker, a checkpoint to be removed. So all of that fails for the old owner as soon as a successor
has taken over, wherever it was stopped: no check precedes the action.

The branch decides what is newest, not the number. After a rollback (`--ckpt-step 4`, then new
saves) a directory holds two branches. Every checkpoint stores its lineage in `lineage.json`: for
each start of the job that trained a part of it, the generation of that start and the last iteration
that came from it. A checkpoint without that file belongs to generation 0.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core.dist_checkpointing.files import TRACKER
from megatron.core.dist_checkpointing.format.schema import CheckpointError, read_json
from megatron.core.durable_files import (
    REPLACED,
    fsync_directory,
    remove,
    restore_replaced,
    write_flushed,
)

GENERATION = ".generation-"
_CLAIM = ".claim-"
_REVOKED = ".revoked-"
_DELETING = "deleting-"
_OWNER = "owner.json"


class SupersededError(CheckpointError):
    """Another start has taken over the directory of checkpoints; this one must not touch it any
    more.
    """


class Generation(NamedTuple):
    """The right of one start to change the directory of checkpoints `root`; `token` is its secret
    name.
    """

    root: Path
    number: int
    token: str

    @property
    def directory(self) -> Path:
        return self.root / f"{GENERATION}{self.number:07d}"

    @classmethod
    def take(cls, root: Path, owner: dict[str, Any]) -> Generation:
        """The next generation of the existing directory `root`; whoever had it before has lost it.

        `owner` says who takes it, for the error of those who lose it. What they left unfinished is removed; a
        checkpoint that they were about to replace gets its name back.
        """
        token = secrets.token_hex(8)
        content = {
            "token": token,
            "since": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **owner,
        }
        claim = root / f"{_CLAIM}{token}"
        while True:
            numbers = [
                _newest(root),
                *(read_lineage(path).generation for path in root.glob("iter_*")),
            ]
            generation = cls(root, max(numbers) + 1, token)
            try:
                claim.mkdir(exist_ok=True)
                write_flushed(claim / _OWNER, json.dumps(content).encode())
                # A rename onto a directory that is not empty fails: of two starts, one gets the
                # number.
                os.rename(
                    claim, generation.directory
                )  # fails if it exists: a generation is never empty
                if _newest(root) == generation.number:
                    break
                os.rename(
                    generation.directory, claim
                )  # faster starts had taken this number, and later ones
            except (
                OSError
            ) as error:  # another start took this number, or has cleared our claim away
                if (
                    error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOENT)
                    or not root.is_dir()
                ):
                    remove(claim)
                    raise
        fsync_directory(root)
        generation._revoke_older()
        return generation

    def is_current(self) -> bool:
        """Whether this rank sees the generation, and nobody has taken it over."""
        return read_owner(self.directory / _OWNER).get("token") == self.token

    @contextlib.contextmanager
    def fenced(self) -> Iterator[None]:
        """Errors of the block that come from the loss of this generation are SupersededError."""
        try:
            yield
        except OSError as error:
            self.check(error)
            raise

    def check(self, cause: BaseException | None = None) -> None:
        """Raises SupersededError if another start has taken over."""
        if not self.root.is_dir() or self.is_current():
            return
        newest = _newest(self.root)
        if newest <= self.number:
            return  # the directory was damaged, not taken over
        raise self.superseded_by(
            newest, read_owner(self.root / f"{GENERATION}{newest:07d}" / _OWNER)
        ) from cause

    def superseded_by(self, newest: int, owner: dict[str, Any]) -> SupersededError:
        who = ", ".join(f"{key} {value}" for key, value in owner.items() if key != "token")
        return SupersededError(
            f"{self.root}: another start has taken over this directory (generation {newest}: {who}). This run "
            f"(generation {self.number}) changes nothing in it any more; give it another --save to go on"
        )

    def move_tracker(self, iteration: int | str) -> None:
        """Name the latest checkpoint, durably; call it when that is committed, never before."""
        with self.fenced():
            ours = self.directory / TRACKER
            write_flushed(ours, str(iteration).encode())
            os.rename(ours, self.root / TRACKER)
            fsync_directory(self.root)

    def put_aside(self, directories: list[Path]) -> list[Path]:
        """Take checkpoints out of the directory of checkpoints, durably; returns where they are
        now, for `remove`.
        """
        for path in self.directory.glob(
            f"{_DELETING}*"
        ):  # of earlier removals that could not be finished
            remove(path)
        aside = []
        for directory in directories:
            path = self.directory / f"{_DELETING}{directory.name}"
            with (
                contextlib.suppress(FileNotFoundError),
                self.fenced(),
            ):  # somebody else may have removed it
                os.rename(directory, path)
                aside.append(path)
        if aside:
            fsync_directory(self.root)  # no removal may become durable before the renames
        return aside

    def remove(self, aside: Path) -> None:
        """As far as possible: what stays goes with the next that are put aside, or at the next
        start.
        """
        with contextlib.suppress(OSError):
            remove(aside)

    def _revoke_older(self) -> None:
        older = [number for number in generations_in(self.root) if number < self.number]
        names = [f"{GENERATION}{number:07d}" for number in older]
        names += [path.name for path in self.root.glob(f"{_CLAIM}*")]
        for name in (
            names
        ):  # renamed before they are emptied: an empty generation could be taken by a rename
            with contextlib.suppress(FileNotFoundError):  # another start was faster
                os.rename(
                    self.root / name, self.root / f"{_REVOKED}{name.removeprefix('.')}-{self.token}"
                )
        fsync_directory(self.root)
        for revoked in sorted(self.root.glob(f"{_REVOKED}*")):
            with contextlib.suppress(FileNotFoundError):  # likewise
                for path in revoked.glob(f"{REPLACED}*"):
                    restore_replaced(path, self.root)
            remove(revoked)


def generations_in(root: Path) -> list[int]:
    """Of the generations that `root` has, in order."""
    names = [path.name.removeprefix(GENERATION) for path in root.glob(f"{GENERATION}*")]
    return sorted(int(name) for name in names if name.isdigit())


def _newest(root: Path) -> int:
    """The highest generation, or 0.

    A listing of a directory that changes meanwhile can miss both the generation that is left and
    the one that is taken instead. Numbers only rise, so whoever then asks for them one by one, in
    rising order, meets the one that is there.
    """
    newest = max(generations_in(root), default=0)
    while ahead := [
        n for n in range(newest + 1, newest + 17) if (root / f"{GENERATION}{n:07d}").exists()
    ]:
        newest = ahead[-1]
    return newest


def read_owner(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


LINEAGE = "lineage.json"


class Lineage(NamedTuple):
    """The branch that ends with a checkpoint: (generation, last iteration) pairs, the checkpoint
    itself last.
    """

    branch: tuple[tuple[int, int], ...]

    @property
    def generation(self) -> int:
        return self.branch[-1][0]

    @property
    def iteration(self) -> int:
        return self.branch[-1][1]

    def descend(self, generation: int, iteration: int) -> Lineage:
        """That of the checkpoint that `generation` saves at `iteration`, having started from this
        one.
        """
        return Lineage((*self.branch, (generation, iteration)))

    def includes(self, other: Lineage) -> bool:
        """Whether `other` is this checkpoint or an ancestor of it."""
        return any(
            other.generation == generation and other.iteration <= last
            for generation, last in self.branch
        )

    def encode(self, parent: int | None) -> bytes:
        """The content of `lineage.json`; `parent` is the iteration of the checkpoint before, for
        reports.
        """
        content = {"generation": self.generation, "parent": parent, "branch": self.branch}
        return json.dumps(content).encode()


def read_lineage(directory: Path) -> Lineage:
    """That of the checkpoint `iter_<n>` in `directory`; one without an intact `lineage.json` is of
    generation 0.
    """
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        pairs = read_json(directory / LINEAGE)["branch"]
        if branch := tuple((int(generation), int(iteration)) for generation, iteration in pairs):
            return Lineage(branch)
    digits = directory.name.removeprefix("iter_")
    return Lineage(((0, int(digits) if digits.isdigit() else 0),))


def read_parent(directory: Path) -> int | None:
    """The iteration of the checkpoint before; None: there was none, or it is not known."""
    try:
        parent = json.loads((directory / LINEAGE).read_bytes())["parent"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return parent if type(parent) is int else None


def on_branch(saved: Mapping[int, Lineage], head: Lineage | None = None) -> list[int]:
    """The iterations of `saved` on one branch, newest first: what to load, and what to fall back
    on.

    `head` is the newest checkpoint of the branch (the one that the tracker names, even if it is damaged); without it,
    the branch is that of the latest generation. Checkpoints of other branches are left out.
    """
    if head is None:
        head = max(
            saved.values(),
            key=lambda lineage: (lineage.generation, lineage.iteration),
            default=None,
        )
    if head is None:
        return []
    return sorted(
        (iteration for iteration, lineage in saved.items() if head.includes(lineage)), reverse=True
    )

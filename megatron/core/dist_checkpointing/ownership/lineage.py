"""Checkpoint lineage: which launches of a run trained a checkpoint.

The lineage, not the iteration number, decides which checkpoint is newest. After a rollback
(`--ckpt-step 4`, then new saves) a directory contains two branches: iteration 10 of the old branch
is older than iteration 6 of the new one. Every checkpoint stores its lineage in `lineage.json`.
A checkpoint without a valid file belongs to generation 0.

A launch is identified by its generation number and its fencing token. Numbers repeat when a
directory is removed, renamed or restored from a backup; tokens do not. Files that were written
before tokens existed have none, and their launches are identified by the number alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core.safe_files import schema
from megatron.core.safe_files.errors import CheckpointError
from megatron.core.safe_files.reading import parse_json, read_regular
from megatron.core.terminal import escape_control_chars

LINEAGE = "lineage.json"
MAX_GENERATION = 10**9
_MAX_STARTS = 100_000  # in one lineage
_MAX_SIZE = 16 << 20  # bytes of lineage.json

_SEGMENT = schema.sequence(schema.integer(), 2, 2)
_ORIGIN = schema.record(
    {
        "checkpoint": schema.text(),
        "weights_only": schema.boolean,
        "step": schema.optional(schema.COUNT),
    }
)
_FILE = schema.record(
    {
        "branch": schema.sequence(_SEGMENT, _MAX_STARTS, 1),
        "parent?": schema.optional(schema.COUNT),
        "tokens?": schema.sequence(schema.optional(schema.text(64)), _MAX_STARTS, 1),
        "origin?": schema.optional(_ORIGIN),
        "job?": schema.optional(schema.text(256)),
    }
)


class Segment(NamedTuple):
    """The iterations of a lineage that one launch trained, up to and including `iteration`."""

    generation: int
    iteration: int
    token: str | None = None


class Origin(NamedTuple):
    """The checkpoint that the command line named when a branch began, and how it was loaded.

    `checkpoint` identifies it across directories: see `identify_checkpoint`. `step` is the value
    of --ckpt-step.
    """

    checkpoint: str
    weights_only: bool
    step: int | None = None


class Lineage(NamedTuple):
    """The branch that ends with a checkpoint, which is the end of the last segment.

    `origin` is None for a branch that began with random weights, or before origins were recorded.
    `job` identifies the job whose launch saved the checkpoint.
    """

    branch: tuple[Segment, ...]
    origin: Origin | None = None
    job: str | None = None

    @property
    def generation(self) -> int:
        return self.branch[-1].generation

    @property
    def iteration(self) -> int:
        return self.branch[-1].iteration

    @property
    def order(self) -> tuple[int, int]:
        """Return (launch, iteration): of two checkpoints of a run, the greater one is newer."""
        return self.generation, self.iteration

    @property
    def token(self) -> str | None:
        return self.branch[-1].token

    def descend(self, segment: Segment, job: str | None = None) -> Lineage:
        """Return the lineage of a checkpoint whose launch continued from this one."""
        return Lineage((*self.branch, segment), self.origin, job)

    def includes(self, candidate: Lineage) -> bool:
        """Return whether `candidate` is this checkpoint or an ancestor of it."""
        # An ancestor was saved by a launch of the branch, before the branch left it.
        for segment in self.branch:
            same_start = (segment.generation, segment.token) == (
                candidate.generation,
                candidate.token,
            )
            if same_start and candidate.iteration <= segment.iteration:
                return True
        return False

    def encode(self, parent: int | None) -> bytes:
        """Return the content of `lineage.json`; `parent` is the iteration saved before this one."""
        content: dict[str, Any] = {
            "generation": self.generation,
            "parent": parent,
            "branch": [(segment.generation, segment.iteration) for segment in self.branch],
        }
        # Apart from `branch`, so that older versions of this program can read the file.
        tokens = [segment.token for segment in self.branch]
        if any(token is not None for token in tokens):
            content["tokens"] = tokens
        if self.origin is not None:
            content["origin"] = self.origin._asdict()
        if self.job is not None:
            content["job"] = self.job
        return json.dumps(content).encode()


def iteration_in_name(directory: Path) -> int:
    """Return the iteration in the name of a checkpoint directory, 0 if the name has none.

    Checkpoints on the disks of nodes are called `iter_0000010-<generation>.<save>`.
    """
    digits = directory.name.removeprefix("iter_").partition("-")[0]
    return int(digits) if digits.isascii() and digits.isdigit() else 0


def read_lineage(directory: Path) -> Lineage:
    """Read the lineage of a checkpoint; one without a valid file belongs to generation 0.

    Raises OSError if the storage fails: a checkpoint whose file cannot be read at the moment must
    not look like one of another program.
    """
    try:
        content = _read_file(directory)
        # Older checkpoints have no tokens.
        tokens = content.get("tokens") or [None] * len(content["branch"])
        if len(tokens) != len(content["branch"]):
            raise CheckpointError(
                f"{directory / LINEAGE}: {len(tokens)} tokens are too few or many"
            )
        segments = []
        for (generation, iteration), token in zip(content["branch"], tokens, strict=True):
            # The next launch takes the largest number plus one: a huge one must not exhaust them.
            if generation > MAX_GENERATION:
                schema.refuse(f"{directory / LINEAGE}: a generation", generation, "plausible")
            segments.append(Segment(generation, iteration, token))
    except (FileNotFoundError, NotADirectoryError, CheckpointError):
        return Lineage((Segment(0, iteration_in_name(directory)),))
    # The checkpoint of another directory from which this run started.
    stored_origin = content.get("origin")
    origin = None
    if stored_origin is not None:
        origin = Origin(
            stored_origin["checkpoint"], stored_origin["weights_only"], stored_origin["step"]
        )
    return Lineage(tuple(segments), origin, content.get("job"))


def read_parent(directory: Path) -> int | None:
    """Read the iteration of the checkpoint saved before; None if there was none or it is
    unknown.
    """
    try:
        parent: int | None = _read_file(directory).get("parent")
    except (OSError, CheckpointError):
        return None
    return parent


def find_lineage_problem(directory: Path) -> str | None:
    """Return the reason for which `lineage.json` is not valid; None if it is, or is missing."""
    try:
        _read_file(directory)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, CheckpointError) as error:
        return str(error)
    return None


def _read_file(directory: Path) -> dict[str, Any]:
    path = directory / LINEAGE
    content = parse_json(read_regular(path, limit=_MAX_SIZE), escape_control_chars(str(path)))
    result: dict[str, Any] = _FILE(content, escape_control_chars(str(path)))
    return result


def identify_checkpoint(directory: Path) -> str:
    """Return a name for a checkpoint that a copy in another directory shares.

    It consists of the fencing token of the launch that saved it and the iteration. A checkpoint
    without a token (of another program, or older) is identified by its path.
    """
    lineage = read_lineage(directory)
    if lineage.token is not None:
        return f"{lineage.token}@{lineage.iteration}"
    return str(directory.resolve())


def on_branch(saved: Mapping[int, Lineage], head: Lineage | None = None) -> list[int]:
    """Return the iterations of `saved` on one branch, newest first.

    `head` is the newest checkpoint of the branch (the one that the tracker names, even if it is
    damaged); without it, the branch is that of the latest generation. A checkpoint whose lineage
    ends with another iteration than its name is a copy under another name, and belongs to no
    branch.
    """
    # Leave out copies under another name.
    intact = {
        iteration: lineage for iteration, lineage in saved.items() if lineage.iteration == iteration
    }
    if head is None:
        head = _latest(intact.values())
    if head is None:
        return []
    iterations = [iteration for iteration, lineage in intact.items() if head.includes(lineage)]
    return sorted(iterations, reverse=True)


def _latest(lineages: Iterable[Lineage]) -> Lineage | None:
    return max(lineages, key=lambda lineage: lineage.order, default=None)

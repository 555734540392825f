"""Which checkpoint a path means, in which format, whether it is whole, and opening it as a `Source`.

The one answer for training, convert.py and inspect.py. A directory of checkpoints holds a tracker and `iter_0000010/`,
`release/` or, from DeepSpeed, `global_step10_universal/`. The tracker moves last, so what it names is complete unless
something was lost since; then the newest complete checkpoint stands in. There is one way to load: a run's own
checkpoint is a `Source` like any other, and one engine reads them all.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.conversion.deepspeed.files import LATEST, ZERO, read_latest, universal_faults
from megatron.conversion.deepspeed.reader import UniversalSource
from megatron.conversion.huggingface.reader import HuggingFaceSource, is_huggingface
from megatron.conversion.megatron_lm.args import param_groups, read_common, training_state
from megatron.conversion.megatron_lm.legacy_reader import LegacySource, is_legacy, legacy_faults
from megatron.conversion.megatron_lm.torch_dist_reader import TorchDistSource, is_torch_dist, torch_dist_faults
from megatron.conversion.model_space.source import Shape, Source, TensorInfo, TrainingState
from megatron.core.dist_checkpointing import (
    CheckpointError,
    LoadReport,
    Reader,
    ShardedStateDict,
    ShardedTensor,
    fill,
    on_branch,
    read_lineage,
    read_tracker,
)
from megatron.core.dist_checkpointing.files import read_commit
from megatron.core.dist_checkpointing.format.checksums import CHECKSUMS
from megatron.core.dist_checkpointing.format.schema import COUNT, number, record
from megatron.core.dist_checkpointing.loading.reader import Request
from megatron.core.object_storage import ObjectPath, path_of
from megatron.core.progress import Progress

logger = logging.getLogger(__name__)

RELEASE = "release"  # in a tracker and as a directory: weights that belong to no iteration
_UNIVERSAL = re.compile(r"global_step(\d+)_universal")


@dataclass(frozen=True)
class Hints:
    """What the user knows of a source and its files do not tell."""

    args: Mapping[str, Any] = field(default_factory=dict)  # they win over those in the files
    ignored_fields: tuple[str, ...] = ()  # of config.json, known to be harmless
    qkv_layout: str | None = None  # of a universal checkpoint
    optimizer: bool = True  # False: its state is passed over, whatever it is
    as_saved: bool = False  # what a run of ours saved keeps its keys and is not compared with its arguments
    verify: bool = False  # compare what is read with the checksums


class NoCheckpointError(ValueError):
    """A path does not name one checkpoint in a format that we know."""


def _open_torch_dist(directory: Path, hints: Hints) -> Source:
    if hints.as_saved:
        common = read_common(directory, verify=hints.verify)
        if (common.get("content_metadata") or {}).get("non_homogeneous_layers"):
            return RunCheckpoint(directory, common, hints.verify)
    return TorchDistSource(directory, hints.optimizer, hints.verify)


class Format(NamedTuple):
    """How a format is recognised, checked and opened."""

    is_one: Callable[[Path], bool]
    faults: Callable[[Path], list[str]]  # what is missing or truncated, without reading tensors
    open: Callable[[Path, Hints], Source]


FORMATS: dict[str, Format] = {
    "torch_dist": Format(is_torch_dist, torch_dist_faults, _open_torch_dist),
    "legacy": Format(is_legacy, legacy_faults, lambda directory, hints: LegacySource(directory, hints.optimizer)),
    "hf": Format(
        is_huggingface,
        lambda directory: [],  # all of its files are looked at when it is opened
        lambda directory, hints: HuggingFaceSource(directory, hints.args, hints.ignored_fields, hints.optimizer),
    ),
    "universal": Format(
        lambda directory: (directory / ZERO).is_dir(),
        universal_faults,
        lambda directory, hints: UniversalSource(directory, hints.args, hints.qkv_layout, hints.optimizer),
    ),
}


class Found(NamedTuple):
    """A checkpoint that can be opened; `note` says why it is not the one that the tracker names."""

    directory: Path
    format: str
    note: str | None = None


def find_checkpoint(root: str | Path, step: int | None = None, loader: str = "auto") -> Found | None:
    """The checkpoint that `root` means, or None if there is none at all.

    `root` itself if it is one; iteration `step`, if given; else what the tracker names; else (the tracker is lost or
    damaged, or that checkpoint is) the newest complete one. Raises NoCheckpointError if what is asked for is not there
    or not whole, and if there are checkpoints, but none that is whole: to start from scratch would overwrite them.
    `loader` names the format of a directory that looks like several.
    """
    root = path_of(root)
    if step is None and _formats_of(root):
        return Found(root, detect(root, loader))
    if step is None and isinstance(root, ObjectPath):  # the tracker is a hint there: what is committed counts
        whole = next((directory for directory in newest_first(root) if fault(directory) is None), None)
        if whole is not None:
            return Found(whole, detect(whole, loader))
    named, reason = (None, None) if isinstance(root, ObjectPath) and step is None else named_checkpoint(root, step)
    if named is not None:
        if (problem := fault(named)) is None:
            return Found(named, detect(named, loader))
        if step is not None:
            raise NoCheckpointError(f"{reason}: {named} cannot be loaded, {problem}; {_listed(root)}")
        reason = f"{reason}, but {problem}"
    others = [directory for directory in newest_first(root, named) if directory != named]
    if reason is None and not others:
        return None
    reason = reason or "there is no tracker file"
    for directory in others:
        if fault(directory) is None:
            note = f"{reason}: taking {directory}, the newest complete checkpoint"
            return Found(directory, detect(directory, loader), note)
    raise NoCheckpointError(f"{root}: {reason}; {_listed(root)}")


def named_checkpoint(root: Path, step: int | None) -> tuple[Path | None, str | None]:
    """What `step`, if given, or the tracker names, whole or not, and the words for it.

    Only words for a damaged tracker, nothing without one.
    """
    if step is not None:
        return checkpoint_directory(root, step), f"--ckpt-step {step}"
    try:
        tag = read_latest(root)
        if tag is not None:
            return root / tag, f"{LATEST} names {tag}"
        named = read_tracker(root)
    except CheckpointError as error:
        return None, str(error)
    return (None, None) if named is None else (checkpoint_directory(root, named), f"the tracker names {named}")


def newest_first(root: Path, head: Path | None = None) -> list[Path]:
    """The checkpoints in `root`, whole or not, in the order in which they stand in for one that is lost.

    The one place that decides which of two checkpoints is newer: of iterations, those on the branch that ends with
    `head` count, without one those on the branch of the latest start (see `dist_checkpointing.lineage`).
    """
    iterations = [i for i in saved_iterations(root) if _may_be_checkpoint(iteration_directory(root, i))]
    lineages = {i: read_lineage(iteration_directory(root, i)) for i in iterations}
    end = read_lineage(head) if head is not None and head.is_dir() and head.parent == root else None
    numbered = {iteration_directory(root, i): i for i in on_branch(lineages, end)}
    for path in root.glob("global_step*_universal"):
        if (match := _UNIVERSAL.fullmatch(path.name)) is not None:
            numbered[path] = int(match[1])
    ordered = [*sorted(numbered, key=lambda path: -numbered[path]), root / RELEASE]
    return [path for path in ordered if path.is_dir() and any(path.iterdir())]


def _may_be_checkpoint(directory: Path) -> bool:
    """In object storage an unfinished save has the final name, too."""
    return not isinstance(directory, ObjectPath) or read_commit(directory) is not None


def iteration_directory(root: str | Path, iteration: int) -> Path:
    return path_of(root) / f"iter_{iteration:07d}"


def iteration_of(directory: Path) -> int:
    return int(directory.name.removeprefix("iter_"))


def saved_iterations(root: str | Path) -> list[int]:
    """Iterations that have a directory under `root`, in order; complete or not."""
    names = [path.name.removeprefix("iter_") for path in path_of(root).glob("iter_*")]
    return sorted(int(name) for name in names if name.isdigit())


def checkpoint_directory(root: Path, named: int | str) -> Path:
    """Where the iteration `named`, or the release, is or would be."""
    if isinstance(named, str):
        return root / named
    universal = root / f"global_step{named}_universal"
    directory = iteration_directory(root, named)
    return universal if universal.is_dir() and not directory.is_dir() else directory


def fault(directory: Path) -> str | None:
    """Why the checkpoint `directory` cannot be loaded, as far as can be told without reading tensors; None if it can.

    It asks for every file of every rank: one rank calls it.
    """
    formats = _formats_of(directory)
    if not formats:
        return "it is not complete" if directory.is_dir() else "it does not exist"
    try:
        problems = [problem for name in formats for problem in FORMATS[name].faults(directory)]
    except CheckpointError as error:
        return f"it is damaged: {error}"
    more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
    return f"it is damaged: {'; '.join(problems[:3])}{more}" if problems else None


def detect(directory: Path, loader: str = "auto") -> str:
    """The format of a directory: `loader`, or the one it looks like. NoCheckpointError unless it is exactly one."""
    formats = _formats_of(directory) if loader == "auto" else [loader]
    if len(formats) != 1:
        what = "looks like " + " and ".join(formats) if formats else "is in no format that we know"
        raise NoCheckpointError(f"{directory} {what}: name it with --loader ({', '.join(FORMATS)})")
    return formats[0]


def require_checkpoint(root: Path, step: int | None = None, loader: str = "auto") -> Found:
    """As `find_checkpoint`, but NoCheckpointError where there is none, and the note is logged: for tools."""
    found = find_checkpoint(root, step, loader)
    if found is None:
        there = ", ".join(sorted(path.name for path in root.iterdir())[:8]) if root.is_dir() else "no such directory"
        raise NoCheckpointError(
            f"{root} is no checkpoint in a format that we know ({', '.join(FORMATS)}); it holds: {there}"
        )
    if found.note is not None:
        logger.warning(found.note)
    return found


def open_checkpoint(root: Path, loader: str = "auto", step: int | None = None, hints: Hints | None = None) -> Source:
    """The checkpoint that `root` means as a `Source`."""
    return open_found(require_checkpoint(root, step, loader), hints)


def open_found(found: Found, hints: Hints | None = None) -> Source:
    """A checkpoint that was found, perhaps by another process."""
    hints = hints or Hints()
    if hints.verify and not (found.directory / CHECKSUMS).is_file():
        raise ValueError(
            f"--ckpt-verify: {found.directory} ({found.format}) has no {CHECKSUMS} to compare it with: leave the flag "
            "away, or convert the checkpoint first (tools/checkpoint/convert.py --saver torch_dist)"
        )
    source = FORMATS[found.format].open(found.directory, hints)
    source.args.update(hints.args)
    return source


def _formats_of(directory: Path) -> list[str]:
    return [name for name, form in FORMATS.items() if form.is_one(directory)]


def _listed(root: Path) -> str:
    """What is there, for messages."""
    if not root.is_dir():
        return f"{root} is no directory"
    faults = {directory.name: fault(directory) for directory in newest_first(root)}
    complete = [name for name, problem in faults.items() if problem is None]
    if complete:
        return f"complete are: {', '.join(complete)}"
    found = "".join(f"\n  {name}: {problem}" for name, problem in list(faults.items())[:5])
    return f"{root} holds no complete checkpoint{found}"


_POSITION = record({"iteration": COUNT, "num_floating_point_operations_so_far": number(0)})
_CONSUMED = record({"consumed_train_samples": COUNT, "consumed_valid_samples": COUNT})


class RunCheckpoint:
    """A torch_dist directory that a run of this program saved: its keys are model space, whatever the model is.

    `common` is the content of its common.pt. With `verify` all that is read is compared with the checksums.
    """

    def __init__(self, directory: Path, common: Mapping[str, Any], verify: bool = False) -> None:
        self.description = str(directory)
        if "args" not in common:
            raise CheckpointError(f"{directory} holds tensors, but not the arguments and the state of a training run")
        self.args: dict[str, Any] = dict(vars(common["args"]))
        if "iteration" in common or "optimizer" in common:  # else it is a released model, converted
            _POSITION(common, f"{directory}: the state of the run")
            _CONSUMED(self.args, f"{directory}: the arguments of the run")
        self.reader = Reader(directory, verify=verify)
        self.unused: list[str] = []
        stored = self.reader.metadata
        self.tensors = {key: TensorInfo(tensor.shape, tensor.dtype) for key, tensor in stored.tensors.items()}
        self.training: TrainingState | None = training_state(common, self.args, param_groups(common.get("optimizer")))
        generators = [key for key in stored.objects if key.startswith("rng_state/")]
        self.training.rng = {key: partial(self.reader.read_object, key) for key in generators}

    def read(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        return self.reader.read(key, offset, shape)


class _SourceReader:
    """What the engine reads a `Source` of another program by: tensors box by box, generators as objects."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.metadata = self
        self.tensors = source.tensors
        self.objects: Collection[str] = source.training.rng if source.training is not None else ()
        self.bytes_needed = self.bytes_read = 0

    def read_into(self, requests: Sequence[Request], workers: int = 1) -> None:
        """In one thread: sources make no promise about more."""
        for key, offset, target in requests:
            target.copy_(self._source.read(key, offset, tuple(target.shape)))
            self.bytes_needed += target.numel() * self.tensors[key].dtype.itemsize
            self.bytes_read = self.bytes_needed

    def read_object(self, key: str) -> Any:
        assert self._source.training is not None
        return self._source.training.rng[key]()


def load_from_source(state: ShardedStateDict, source: Source, **options: Any) -> LoadReport:
    """Fill the tensors of `state` in place from `source`; a collective. Options are those of `fill`.

    Raises CheckpointError on every rank if any rank fails; the tensors are undefined then.
    """
    reader = source.reader if isinstance(source, RunCheckpoint) else _SourceReader(source)
    total = sum(
        box.tensor.nbytes for entry in state.values() if isinstance(entry, ShardedTensor) for box in entry.boxes
    )
    quiet = dist.is_initialized() and dist.get_rank() > 0  # the first rank's share stands for all
    with Progress(f"loading {source.description}", total, count=lambda: reader.bytes_read, quiet=quiet):
        return fill(state, reader, source.description, **options)

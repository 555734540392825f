"""The formats of checkpoints: how each is recognised, and which checkpoint a path means, in which
format, and whether it is complete; and what a user may ask of a conversion.

The one answer for training, convert.py and inspect_checkpoint.py. A directory of checkpoints holds
a tracker and `iter_0000010/`, `release/` or, from DeepSpeed, `global_step10_universal/`. The
tracker moves last, so what it names is complete unless something was lost since; then the newest
complete checkpoint is taken instead. All of this needs no torch, but for the faults of other
formats than torch_dist.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.core.dist_checkpointing import (
    CheckpointError,
    is_complete,
    missing_or_truncated,
    on_branch,
    read_lineage,
    read_tracker,
)
from megatron.core.dist_checkpointing.files import METADATA, METADATA_JSON, read_commit
from megatron.core.dist_checkpointing.format.links import confine_links
from megatron.core.dist_checkpointing.format.schema import file_name, read_json, read_regular
from megatron.core.lazy_import import lazy_module
from megatron.core.object_storage import ObjectPath, path_of

if TYPE_CHECKING:
    import torch

    from megatron.conversion.deepspeed import files as universal
    from megatron.conversion.megatron_lm import args as legacy
else:
    universal = lazy_module("megatron.conversion.deepspeed.files")
    legacy = lazy_module("megatron.conversion.megatron_lm.args")

logger = logging.getLogger(__name__)

# of a rank in a legacy directory
MODEL_FILE = "model_optim_rng.pt"
OPTIMIZER_FILE = "distrib_optim.pt"
LATEST = "latest_universal"
ZERO = "zero"
_UNIVERSAL = re.compile(r"global_step(\d+)_universal")
RELEASE = "release"  # in a tracker and as a directory: weights that belong to no iteration
STYLES = ("pipeline", "bigscience", "no-pipeline")  # of names in universal checkpoints
QKV_LAYOUTS = ("groups", "tp-blocks")  # of universal checkpoints


def is_unfinished(directory: Path) -> bool:
    """In object storage an unfinished save has the final names, too."""
    return isinstance(directory, ObjectPath) and read_commit(directory) is None


def is_huggingface(directory: Path) -> bool:
    """Whether `directory` holds a model of transformers."""
    path = directory / "config.json"
    hf = read_json(path) if path.is_file() else None
    return isinstance(hf, dict) and ("model_type" in hf or "architectures" in hf)


# Each is read and written. By name: whether a directory looks like it.
FORMATS: dict[str, Callable[[Path], bool]] = {
    "torch_dist": lambda directory: (
        (directory / METADATA).is_file() and not is_unfinished(directory)
    ),
    "legacy": lambda directory: any(directory.glob(f"mp_rank_*/{MODEL_FILE}")),
    "hf": is_huggingface,
    "universal": lambda directory: (directory / ZERO).is_dir(),
}


def formats_of(directory: Path) -> list[str]:
    return [name for name, is_one in FORMATS.items() if is_one(directory)]


def read_latest(root: Path) -> str | None:
    """The directory that `latest_universal` in `root` names; None without that file,
    CheckpointError for a bad name.
    """
    path = root / LATEST
    if not path.is_file():
        return None
    name = read_regular(path, limit=4096).decode(errors="replace").strip()
    return file_name(name, f"{path}: the name in it")


class NoCheckpointError(ValueError):
    """A path does not name exactly one checkpoint in a known format."""


# By format: which files are missing or truncated, found without reading tensors.
_FAULTS: dict[str, Callable[[Path], list[str]]] = {
    "torch_dist": lambda it: (
        missing_or_truncated(it) if is_complete(it) else [f"{METADATA_JSON} is missing"]
    ),
    "legacy": lambda directory: legacy.legacy_faults(directory),
    "hf": lambda directory: [],  # opening it checks all of its files
    "universal": lambda directory: universal.universal_faults(directory),
}


class Found(NamedTuple):
    """A checkpoint that can be opened; `note` says why it is not the one that the tracker names."""

    directory: Path
    format: str
    note: str | None = None


def find_checkpoint(
    root: str | Path, step: int | None = None, loader: str = "auto"
) -> Found | None:
    """The checkpoint that `root` means, or None if there is none at all.

    `root` itself if it is one; iteration `step`, if given; else what the tracker names; else (the tracker or that
    checkpoint is lost or damaged) the newest complete one. Raises NoCheckpointError if `step` is
    missing or incomplete, or if no checkpoint is complete: starting from scratch would overwrite
    them. `loader` names the format of a directory that looks like several.
    """
    root = path_of(root)
    confine_links(root)
    if step is None and formats_of(root):
        return Found(root, detect(root, loader))
    if step is None and isinstance(
        root, ObjectPath
    ):  # the tracker is a hint there: what is committed counts
        whole = next(
            (directory for directory in newest_first(root) if fault(directory) is None), None
        )
        if whole is not None:
            return Found(whole, detect(whole, loader))
    named, reason = (
        (None, None)
        if isinstance(root, ObjectPath) and step is None
        else named_checkpoint(root, step)
    )
    if named is not None:
        if (problem := fault(named)) is None:
            return Found(named, detect(named, loader))
        if step is not None:
            raise NoCheckpointError(
                f"{reason}: {named} cannot be loaded, {problem}; {_listed(root)}"
            )
        reason = f"{reason}, but {problem}"
    # Nothing usable is named. Only now are all checkpoints looked at: on a parallel file system
    # that takes a while.
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
    """What `step`, if given, or the tracker names, complete or not, and a description for messages.

    Only the description for a damaged tracker; neither without a tracker.
    """
    confine_links(root)
    if step is not None:
        return checkpoint_directory(root, step), f"--ckpt-step {step}"
    try:
        tag = read_latest(root)
        if tag is not None:
            return root / tag, f"{LATEST} names {tag}"
        named = read_tracker(root)
    except CheckpointError as error:
        return None, str(error)
    return (
        (None, None)
        if named is None
        else (checkpoint_directory(root, named), f"the tracker names {named}")
    )


def newest_first(root: Path, head: Path | None = None) -> list[Path]:
    """The checkpoints in `root`, complete or not, in the order in which they replace a lost one.

    Only this function decides which of two checkpoints is newer. Iterations must be on the branch
    that ends with `head`, or by default on the branch of the latest start (see
    `dist_checkpointing.lineage`).
    """
    iterations = [
        i for i in saved_iterations(root) if not is_unfinished(iteration_directory(root, i))
    ]
    lineages = {i: read_lineage(iteration_directory(root, i)) for i in iterations}
    end = read_lineage(head) if head is not None and head.is_dir() and head.parent == root else None
    numbered = {iteration_directory(root, i): i for i in on_branch(lineages, end)}
    for path in root.glob("global_step*_universal"):
        if (match := _UNIVERSAL.fullmatch(path.name)) is not None:
            numbered[path] = int(match[1])
    ordered = [*sorted(numbered, key=lambda path: -numbered[path]), root / RELEASE]
    return [path for path in ordered if path.is_dir() and any(path.iterdir())]


def iteration_directory(root: str | Path, iteration: int) -> Path:
    return path_of(root) / f"iter_{iteration:07d}"


def iteration_of(directory: Path) -> int:
    """That of a checkpoint in a directory of them, or on the nodes' disks (`iter_0000010-<save>`)."""
    return int(directory.name.removeprefix("iter_").partition("-")[0])


def saved_iterations(root: str | Path) -> list[int]:
    """Iterations that have a directory under `root`, in order; complete or not."""
    names = [path.name.removeprefix("iter_") for path in path_of(root).glob("iter_*")]
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def checkpoint_directory(root: Path, named: int | str) -> Path:
    """Where the iteration `named`, or the release, is or would be."""
    if isinstance(named, str):
        return root / named
    universal = root / f"global_step{named}_universal"
    directory = iteration_directory(root, named)
    return universal if universal.is_dir() and not directory.is_dir() else directory


def fault(directory: Path) -> str | None:
    """Why the checkpoint `directory` cannot be loaded, judged without reading tensors; None if it
    can.

    It looks at the files of all ranks, so only one rank should call it.
    """
    formats = formats_of(directory)
    if not formats:
        return "it is not complete" if directory.is_dir() else "it does not exist"
    try:
        problems = [problem for name in formats for problem in _FAULTS[name](directory)]
    except CheckpointError as error:
        return f"it is damaged: {error}"
    more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
    return f"it is damaged: {'; '.join(problems[:3])}{more}" if problems else None


def detect(directory: Path, loader: str = "auto") -> str:
    """The format of a directory: `loader`, or the one it looks like. NoCheckpointError unless it is
    exactly one.
    """
    formats = formats_of(directory) if loader == "auto" else [loader]
    if len(formats) != 1:
        what = "looks like " + " and ".join(formats) if formats else "is in no known format"
        raise NoCheckpointError(f"{directory} {what}: name it with --loader ({', '.join(FORMATS)})")
    return formats[0]


def require_checkpoint(root: Path, step: int | None = None, loader: str = "auto") -> Found:
    """As `find_checkpoint`, but NoCheckpointError where there is none, and the note is logged: for
    tools.
    """
    found = find_checkpoint(root, step, loader)
    if found is None:
        there = (
            ", ".join(sorted(path.name for path in root.iterdir())[:8])
            if root.is_dir()
            else "no such directory"
        )
        raise NoCheckpointError(
            f"{root} holds no checkpoint in a known format ({', '.join(FORMATS)}); it holds: {there}"
        )
    if found.note is not None:
        logger.warning(found.note)
    return found


def _listed(root: Path) -> str:
    """What is there, for messages."""
    if not root.is_dir():
        return f"{root} is not a directory"
    faults = {directory.name: fault(directory) for directory in newest_first(root)}
    complete = [name for name, problem in faults.items() if problem is None]
    if complete:
        return f"complete are: {', '.join(complete)}"
    found = "".join(f"\n  {name}: {problem}" for name, problem in list(faults.items())[:5])
    return f"{root} holds no complete checkpoint{found}"


def is_extra_state(key: str) -> bool:
    """Whether an object is the state that a module of Megatron-core keeps beside its parameters."""
    return "._extra_state/shard_" in key


@dataclass(frozen=True)
class Hints:
    """What the user knows about a source that its files do not say, and what is wanted of it."""

    args: Mapping[str, Any] = field(
        default_factory=dict
    )  # Megatron-LM's names; they override those in the files
    ignored_fields: tuple[str, ...] = ()  # of config.json, known to be harmless
    # Of a universal checkpoint: "groups" (per query group its queries, key, value) or "tp-blocks"
    # (Megatron-DeepSpeed since December 2024: per tensor-parallel rank all queries, keys, values).
    # Default: what the arguments imply.
    qkv_layout: str | None = None
    optimizer: bool = True  # False: skip its state, whatever it is
    as_saved: bool = False  # keep the keys of what a run here saved, whatever its model
    # Whether to compare what is read with checksums.bin: None: if the checkpoint has it, True:
    # required, False: never.
    verify: bool | None = None


@dataclass(frozen=True)
class Options:
    """How the target shall be; None means as the source is."""

    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    virtual_pipeline_parallel: int | None = None
    expert_parallel: int | None = None
    expert_tensor_parallel: int | None = None
    dtype: torch.dtype | None = None  # of the weights
    optimizer: bool = True
    vocab_size: int | None = None  # rows beyond it are cut
    tokenizer: Path | None = (
        None  # a directory or SentencePiece model; default: the one in the arguments
    )
    max_shard_size: int = 5 * 10**9
    optim_sidecar: bool = False
    workers: int = 1
    universal_style: str | None = (
        None  # pipeline, bigscience or no-pipeline; default: bigscience for models like BLOOM
    )
    qkv_blocks: bool = (
        False  # as Megatron-DeepSpeed has them since December 2024, for the target's TP size
    )
    transformer_impl: str | None = None  # whose modules of Megatron-LM legacy files are for
    stacked_layers: bool = False
    trusted: tuple[
        Path, ...
    ] = ()  # where a tokenizer that the checkpoint names may lie, besides the checkpoint itself
    note: Callable[[str], None] = lambda text: None  # receives further lines for the user


def parse_size(text: str | int) -> int:
    """Bytes of "5GB", "300MB", "2GiB" or a plain number; decimal units as in `transformers`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *(?:([KMGT])(I?))?B?", str(text).strip().upper())
    size = (
        int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " "))
        if match
        else 0
    )
    if size <= 0:
        raise ValueError(
            f"--max-shard-size {text!r}: give a number with KB, MB, GB, KiB, MiB or GiB, such as 5GB"
        )
    return size

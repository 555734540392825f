"""Which checkpoint a path names, and in which format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.conversion.deepspeed.files import find_universal
from megatron.conversion.deepspeed.reader import UniversalSource
from megatron.conversion.huggingface.reader import HuggingFaceSource, is_huggingface
from megatron.conversion.megatron_lm.legacy_reader import LegacySource, is_legacy
from megatron.conversion.megatron_lm.torch_dist_reader import TorchDistSource
from megatron.conversion.model_space.source import Source
from megatron.core.dist_checkpointing import read_tracker


def is_torch_dist(directory: Path) -> bool:
    return (directory / ".metadata").is_file()


@dataclass(frozen=True)
class Hints:
    """What the user knows of a source and its files do not tell."""

    args: Mapping[str, Any] = field(default_factory=dict)  # they win over those in the files
    ignored_fields: tuple[str, ...] = ()  # of config.json, known to be harmless
    qkv_layout: str | None = None  # of a universal checkpoint
    optimizer: bool = True  # False: its state is passed over, whatever it is


class NoCheckpointError(ValueError):
    """A path does not name one checkpoint in a format that we know."""


Opener = Callable[[Path, Hints], Source]

# Format -> (is it one?, open it).
READERS: dict[str, tuple[Callable[[Path], bool], Opener]] = {
    "torch_dist": (is_torch_dist, lambda directory, hints: TorchDistSource(directory, hints.optimizer)),
    "legacy": (is_legacy, lambda directory, hints: LegacySource(directory, hints.optimizer)),
    "hf": (
        is_huggingface,
        lambda directory, hints: HuggingFaceSource(directory, hints.args, hints.ignored_fields, hints.optimizer),
    ),
    "universal": (
        lambda directory: find_universal(directory) is not None,
        lambda directory, hints: UniversalSource(directory, hints.args, hints.qkv_layout, hints.optimizer),
    ),
}


def locate(root: Path, step: int | None = None) -> Path:
    """The directory that holds the files: `root` itself, or the iteration that `step` or its tracker names.

    Raises NoCheckpointError when there is nothing.
    """
    if step is None and any(is_one(root) for is_one, _ in READERS.values()):
        return root
    newest = read_tracker(root) if step is None else step
    if newest is None:
        found = ", ".join(sorted(path.name for path in root.iterdir())[:8]) if root.is_dir() else "no such directory"
        raise NoCheckpointError(
            f"{root} is no checkpoint in a format that we know ({', '.join(READERS)}); it holds: {found}"
        )
    directory = root / (newest if isinstance(newest, str) else f"iter_{newest:07d}")
    universal = root / f"global_step{newest}_universal"
    if universal.is_dir() and not directory.is_dir():
        return universal
    if not directory.is_dir():
        named = f"--ckpt-step {step}" if step is not None else f"the tracker in {root} says {newest}, but"
        there = ", ".join(sorted(path.name for path in root.glob("iter_*"))) or "no iteration"
        raise NoCheckpointError(f"{named} {directory} does not exist; there is {there}")
    return directory


def detect(directory: Path) -> str:
    """The format of a directory. Raises NoCheckpointError unless it is exactly one."""
    formats = [name for name, (is_one, _) in READERS.items() if is_one(directory)]
    if len(formats) != 1:
        what = "looks like " + " and ".join(formats) if formats else "is in no format that we know"
        raise NoCheckpointError(f"{directory} {what}: name it with --loader ({', '.join(READERS)})")
    return formats[0]


def open_checkpoint(root: Path, loader: str = "auto", step: int | None = None, hints: Hints | None = None) -> Source:
    """The checkpoint at `root` as a `Source`."""
    directory = locate(root, step)
    _, opener = READERS[detect(directory) if loader == "auto" else loader]
    hints = hints or Hints()
    source = opener(directory, hints)
    source.args.update(hints.args)
    return source

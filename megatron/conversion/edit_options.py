"""Edits of a model: options and their parsers. This module does not import torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

_T = TypeVar("_T")

_MAX_LAYERS = 10_000


@dataclass(frozen=True)
class EditOptions:
    """Changes of the model between reading and writing. None leaves the model unchanged."""

    layers: tuple[int, ...] | None = None
    """Number in the source of each layer of the result."""
    vocab_size: int | None = None
    """Number of rows of the word embedding and the output layer."""
    new_rows: str = "mean"
    """Values of rows that are added."""
    experts: int | None = None
    """Number of copies of each dense MLP that become experts."""
    topk: int | None = None
    """Experts per token. Default: as in the arguments, else 2."""
    adapters: tuple[Path, ...] = ()
    """Directories of LoRA adapters of PEFT to merge, in order."""


def parse_layers(text: str) -> tuple[int, ...]:
    """Return the layers that `0-11,6-17` lists: numbers and inclusive ranges, in order."""
    layers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part.strip(), re.ASCII)
        if match is None:
            raise ValueError(f"{part.strip()!r} is not a layer (5) or a range of layers (0-11)")
        first = int(match[1])
        last = int(match[2] or first)
        if last < first:
            raise ValueError(f"{part.strip()} ends before it begins")
        if len(layers) + last - first >= _MAX_LAYERS:
            raise ValueError(f"the result has more than {_MAX_LAYERS} layers")
        layers += range(first, last + 1)
    return tuple(layers)


class Rename(NamedTuple):
    """A new name for tensors of a source. One `*` in both matches any text."""

    old: str
    new: str

    def apply(self, name: str) -> str | None:
        """Return the new name of the tensor `name`, or None if this rename does not apply."""
        text = _match_name(self.old, name)
        if text is None:
            return None
        return self.new.replace("*", text)


class ForeignSplit(NamedTuple):
    """The axis that tensor-parallel ranks split foreign tensors over. `*` matches any text."""

    name: str
    axis: int

    def fits(self, name: str) -> bool:
        return _match_name(self.name, name) is not None


def _match_name(pattern: str, name: str) -> str | None:
    """Return the text that `*` matches in `name`, "" without a `*`, None for another name."""
    if "*" not in pattern:
        return "" if name == pattern else None
    before, _, after = pattern.partition("*")
    fits = len(name) >= len(before) + len(after)
    if not fits or not name.startswith(before) or not name.endswith(after):
        return None
    return name[len(before) : len(name) - len(after)]


def parse_foreign_split(text: str) -> ForeignSplit:
    """Return the split that `name=axis` specifies."""
    name, separator, axis = text.rpartition("=")
    if not separator or not name or re.fullmatch(r"[0-7]", axis, re.ASCII) is None:
        raise ValueError(f"{text!r} is not NAME=AXIS with an axis from 0 to 7")
    if name.count("*") > 1:
        raise ValueError(f"{text!r}: NAME has more than one *")
    return ForeignSplit(name, int(axis))


def parse_rename(text: str) -> Rename:
    """Return the rename that `old=new` specifies."""
    old, separator, new = text.partition("=")
    if not separator or not old or not new:
        raise ValueError(f"{text!r} is not OLD=NEW")
    if old.count("*") > 1 or old.count("*") != new.count("*"):
        raise ValueError(f"{text!r}: OLD and NEW need one * each, or none")
    return Rename(old, new)


def rename_tensors(
    tensors: Mapping[str, _T], renames: Sequence[Rename], where: str
) -> dict[str, _T]:
    """Return `tensors` under their new names. The first rename that fits a name is applied.

    Raises ValueError for a rename that fits no name, and for two tensors with the same new name.
    """
    result: dict[str, _T] = {}
    unused = list(renames)
    old_names: dict[str, str] = {}
    for name, value in tensors.items():
        new = name
        for rename in renames:
            renamed = rename.apply(name)
            if renamed is not None:
                new = renamed
                if rename in unused:
                    unused.remove(rename)
                break
        if new in result:
            raise ValueError(f"--rename: {where}: {old_names[new]} and {name} both become {new}")
        result[new] = value
        old_names[new] = name
    # A rename without effect is most likely a typing error.
    if unused:
        raise ValueError(f"--rename {unused[0].old}={unused[0].new}: {where} has no such tensor")
    return result

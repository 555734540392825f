"""Edits of a model: options and their parsers. This module does not import torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

NEW_ROWS = ("mean", "init", "zero")  # initial values of new rows of the vocabulary
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

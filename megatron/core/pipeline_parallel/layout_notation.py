"""Megatron-LM's notation of --pipeline-model-parallel-layout: a letter per module of each chunk."""

from __future__ import annotations

import re

from megatron.core.pipeline_parallel.layer_ranges import LAYOUT

_MAX_REPEAT = 9999


def parse_layout(layout: str) -> list[int]:
    """Return the number of layers of each chunk, in model order, from Megatron-LM's notation.

    E is the embedding, t a layer, m a layer for multi-token prediction, L the loss, | separates
    chunks, and *n repeats a letter or a group in parentheses. Raises ValueError for any other
    notation.
    """
    return [chunk.count("t") for chunk in _split_layout(layout)]


def count_mtp_layers(layout: str) -> int:
    """Return the number of layers for multi-token prediction (m), all in the last chunk."""
    return _split_layout(layout)[-1].count("m")


def _split_layout(layout: str) -> list[str]:
    """Return the letters of each chunk."""
    # Expand repeated groups, then repeated letters; groups do not nest.
    text = re.sub(r"\(([^()]+)\)\*(\d+)", _repeat, layout.replace(",", ""))
    text = re.sub(r"(.)\*(\d+)", _repeat, text)
    if re.search(r"m[^mL]", text):
        raise ValueError(
            f"{LAYOUT} {layout}: the layers for multi-token prediction (m) use the embedding and "
            "the output layer of the last chunk. Put them directly before L"
        )
    if not re.fullmatch(r"E[t|]*m*L", text):
        raise ValueError(
            f"{LAYOUT} {layout}: expected E, then t and |, then m, then L, with *n after a letter "
            "or (group)"
        )
    chunks = text.split("|")
    if "" in chunks:
        raise ValueError(f"{LAYOUT} {layout}: chunk {chunks.index('')} is empty")
    return chunks


def _repeat(match: re.Match[str]) -> str:
    """Return the text of the first group, as often as the second group specifies."""
    text, count = match.groups()
    if len(count) > len(str(_MAX_REPEAT)):
        raise ValueError(f"{LAYOUT}: repeat count {count} is too large (limit {_MAX_REPEAT})")
    return str(text * int(count))

"""The file of --per-split-data-args-path: the data of each split."""

from __future__ import annotations

import json

from megatron.core.datasets.config import SPLITS, Split, read_text


def read_split_lists(path: str) -> dict[Split, list[str]]:
    """Return the non-empty lists of --per-split-data-args-path."""
    try:
        lists = json.loads(read_text(path, "--per-split-data-args-path"))
    except json.JSONDecodeError as error:
        raise ValueError(f"--per-split-data-args-path {path}: not JSON: {error}") from None
    is_valid = isinstance(lists, dict) and set(lists) <= set(SPLITS)
    if not is_valid or not all(map(_is_list_of_words, lists.values())):
        raise ValueError(
            f"--per-split-data-args-path {path}: expected "
            '{"train": [...], "valid": [...], "test": [...]}'
        )
    # The weights of a blend may be numbers.
    words = {}
    for split in SPLITS:
        if lists.get(split):
            words[split] = [str(word) for word in lists[split]]
    return words


def _is_list_of_words(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, str | int | float) for item in value)

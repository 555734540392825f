"""Types of tokenizers in GGUF files, by `tokenizer.ggml.model` and `tokenizer.ggml.pre`.

llama.cpp knows how a byte-level tokenizer splits text only by its name in `tokenizer.ggml.pre`. Its
converter derives the name from a hash of the tokens of a text, which identifies the vocabularies of
published models; here the name follows from the split itself, which also fits other vocabularies.

To add one, add a row to `PRE_TOKENIZERS`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BYTE_LEVEL = "gpt2"  # tokenizer.ggml.model of byte-level BPE
SENTENCEPIECE = "llama"
SPACE = "\u2581"


class TokenType(enum.IntEnum):
    """Values in `tokenizer.ggml.token_type`; those of SentencePiece are the same."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class PreTokenizer:
    """How a byte-level tokenizer treats text before its merges, and llama.cpp's names for it.

    `split` is the regular expression of words; None is GPT-2's.
    """

    names: tuple[str, ...]
    split: str | None = None
    splits_digits: bool = False
    normalizes: bool = False  # to NFC, which llama.cpp does not do
    ignores_merges: bool = False  # for a word that is a token
    adds_bos: bool = False  # unless the file states otherwise


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_SIGNS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_SIGNS}"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = (
    rf"{_BEFORE_WORD}{_UPPER}*{_LOWER}+|{_BEFORE_WORD}{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)

# The first name is written.
PRE_TOKENIZERS = (
    PreTokenizer(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"),
        _LLAMA3,
        ignores_merges=True,
        adds_bos=True,
    ),
    PreTokenizer(("dbrx", "smaug-bpe"), _LLAMA3),
    PreTokenizer(("qwen2",), _QWEN2, normalizes=True),
    PreTokenizer(("deepseek-r1-qwen",), _QWEN2),
    PreTokenizer(("tekken",), _TEKKEN, ignores_merges=True, adds_bos=True),
    PreTokenizer(("smollm",), splits_digits=True),
    PreTokenizer(("gpt-2",)),
)


def find_pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    """Return the row of `tokenizer.ggml.pre`. Raises ValueError for a name that is not known."""
    name = metadata.get("tokenizer.ggml.pre")
    for row in PRE_TOKENIZERS:
        if name in row.names:
            return row
    known = ", ".join(row.names[0] for row in PRE_TOKENIZERS)
    raise ValueError(f"tokenizer.ggml.pre = {name!r} is not read, only {known} are")


def make_pipeline(row: PreTokenizer) -> dict[str, Any]:
    """Return the parts of a tokenizer.json that precede the merges."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps: list[dict[str, Any]] = []
    if row.splits_digits:
        steps.append({"type": "Digits", "individual_digits": True})
    if row.split is not None:
        pattern = {"Regex": row.split}
        steps.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
    steps.append({**byte_level, "use_regex": row.split is None})
    pre_tokenizer = {"type": "Sequence", "pretokenizers": steps}
    if len(steps) == 1:
        (pre_tokenizer,) = steps
    return {
        "normalizer": {"type": "NFC"} if row.normalizes else None,
        "pre_tokenizer": pre_tokenizer,
    }


def recognize_pipeline(pipeline: Mapping[str, Any]) -> PreTokenizer:
    """Return the row that splits text as the content of a tokenizer.json.

    Raises ValueError for other tokenizers.
    """
    ignores_merges = bool(pipeline["model"].get("ignore_merges"))
    steps = _list_steps(pipeline.get("pre_tokenizer"), "pretokenizers")
    normalizers = _list_steps(pipeline.get("normalizer"), "normalizers")
    for row in PRE_TOKENIZERS:
        expected = make_pipeline(row)
        is_same_split = steps == _list_steps(expected["pre_tokenizer"], "pretokenizers")
        is_normalized = normalizers == _list_steps(expected["normalizer"], "normalizers")
        if is_same_split and is_normalized and row.ignores_merges == ignores_merges:
            return row
    known = ", ".join(row.names[0] for row in PRE_TOKENIZERS)
    raise ValueError(
        f"its pre-tokenizer and normalizer are not those of a tokenizer of llama.cpp ({known})"
    )


def _list_steps(part: Mapping[str, Any] | None, members: str) -> list[dict[str, Any]]:
    """Return the steps of a part without settings that do not change tokens."""
    if part is None:
        return []
    steps = part.get(members, []) if part["type"] == "Sequence" else [part]
    ignored = ("trim_offsets",)
    return [{name: step[name] for name in step if name not in ignored} for step in steps]


_PREPEND = {"type": "Prepend", "prepend": SPACE}
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}


def has_space_prefix(pipeline: Mapping[str, Any]) -> bool:
    """Return whether SentencePiece BPE in a tokenizer.json adds a space before a text.

    Raises ValueError for one that treats text in another way.
    """
    steps = _list_steps(pipeline.get("pre_tokenizer"), "pretokenizers")
    normalizers = _list_steps(pipeline.get("normalizer"), "normalizers")
    if not steps and normalizers in ([_PREPEND, _REPLACE], [_REPLACE]):
        return _PREPEND in normalizers
    if len(steps) == 1 and not normalizers:
        (step,) = steps
        is_whole = step.get("split") is False and step.get("replacement") == SPACE
        if step.get("type") == "Metaspace" and is_whole:
            return bool(step.get("prepend_scheme") != "never")
    raise ValueError("its pre-tokenizer and normalizer are not those of a SentencePiece model")

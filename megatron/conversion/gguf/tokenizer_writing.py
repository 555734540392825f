"""The tokenizer of a model of transformers as metadata of a GGUF file.

Sources of the entries: `set_vocab` in llama.cpp's conversion/base.py, and `SpecialVocab` of gguf.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron.conversion.gguf.tokenizer_types import (
    BYTE_LEVEL,
    PRE_TOKENIZERS,
    SENTENCEPIECE,
    PreTokenizer,
    TokenType,
    has_space_prefix,
    recognize_pipeline,
)
from megatron.conversion.huggingface.sentencepiece_model import (
    check_model,
    compute_scores,
    make_tokenizer,
    open_model,
)
from megatron.core.safe_files import schema
from megatron.core.safe_files.reading import read_json, read_regular

_SPACE = "\u2581"
_ADDED_SCORE = -1000.0
_UNUSED_SCORE = -10000.0
_GPT2 = next(row for row in PRE_TOKENIZERS if row.names == ("gpt-2",))
# Names that mean a special token, also of a token that is added as an ordinary one
_SPECIAL_NAMES = ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
_SPECIAL_AFFIXES = (("<|", "|>"), ("<\uff5c", "\uff5c>"), ("<unused", ">"))
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


_ID = schema.integer(0, 2**31 - 1)
_TEXT = schema.text(1 << 16)
_STEP = schema.record({"type": _TEXT})
_ENTRIES = schema.sequence(schema.mapping(schema.mapping(schema.anything)))
_PIPELINE = schema.record(
    {
        "model": schema.record(
            {"vocab": schema.anything, "merges?": schema.sequence(schema.plain)}
        ),
        "added_tokens": schema.sequence(
            schema.record({"id": _ID, "content": _TEXT, "special": schema.boolean})
        ),
        "pre_tokenizer?": schema.optional(
            schema.record({"type": _TEXT, "pretokenizers?": schema.sequence(_STEP)})
        ),
        "normalizer?": schema.optional(
            schema.record({"type": _TEXT, "normalizers?": schema.sequence(_STEP)})
        ),
        "post_processor?": schema.optional(
            schema.record(
                {
                    "single?": schema.anything,
                    "processors?": schema.sequence(schema.record({"single?": schema.anything})),
                }
            )
        ),
    }
)
_CONFIG = schema.record(
    {
        "added_tokens_decoder?": schema.mapping(
            schema.record({"content": _TEXT, "special?": schema.boolean})
        )
    }
)


class _Token(NamedTuple):
    """An entry of the vocabulary."""

    text: str
    token_type: TokenType
    score: float = 0.0


class _TokenizerFiles(NamedTuple):
    """Contents of the JSON files of a tokenizer, empty for files that do not exist."""

    pipeline: dict[str, Any]  # tokenizer.json
    config: dict[str, Any]  # tokenizer_config.json
    added_tokens: dict[str, int]  # added_tokens.json


def make_tokenizer_metadata(
    directory: Path, vocab_size: int, ids: Mapping[str, int | None]
) -> dict[str, Any]:
    """Return the entries for the tokenizer in a directory of transformers.

    `ids` are the special tokens of config.json (bos_token_id, ...). Raises ValueError for a
    tokenizer that llama.cpp does not have, or one with more than `vocab_size` tokens.
    """
    files = _TokenizerFiles(
        _read_json(directory / "tokenizer.json", _PIPELINE),
        _read_json(directory / "tokenizer_config.json", _CONFIG),
        _read_json(directory / "added_tokens.json", schema.mapping(_ID)),
    )
    if (directory / "tokenizer.model").is_file():
        metadata, tokens = _describe_sentencepiece(directory / "tokenizer.model", files)
    elif files.pipeline.get("model", {}).get("byte_fallback"):
        metadata, tokens = _describe_pieces(files)
    elif files.pipeline or (directory / "merges.txt").is_file():
        metadata, tokens = _describe_byte_level(directory, files)
    else:
        raise ValueError("it has neither tokenizer.json nor tokenizer.model")

    # The vocabulary has a token for each row of the embedding.
    if max(tokens, default=0) >= vocab_size:
        raise ValueError(f"it has {max(tokens) + 1} tokens, but the model has only {vocab_size}")
    entries = []
    for token_id in range(vocab_size):
        placeholder = _Token(f"[PAD{token_id}]", TokenType.UNUSED, _UNUSED_SCORE)
        entries.append(tokens.get(token_id, placeholder))
    texts = [entry.text for entry in entries]
    types = [int(entry.token_type) for entry in entries]
    scores = [float(entry.score) for entry in entries]
    metadata["tokenizer.ggml.tokens"] = texts
    metadata["tokenizer.ggml.token_type"] = types
    if metadata["tokenizer.ggml.model"] == SENTENCEPIECE:
        metadata["tokenizer.ggml.scores"] = scores
    specials = _describe_specials(directory, files, tokens, ids)
    return metadata | specials


def _read_json(path: Path, check: schema.Check) -> Any:
    return check(read_json(path), str(path)) if path.is_file() else {}


def _looks_special(token: str) -> bool:
    """Return whether a token is a special one by its name."""
    for prefix, suffix in _SPECIAL_AFFIXES:
        if token.startswith(prefix) and token.endswith(suffix):
            return True
    return token in _SPECIAL_NAMES


def _make_added(content: str, is_special: bool) -> _Token:
    """Return the entry of a token that is matched before text is split."""
    if is_special or _looks_special(content):
        return _Token(content, TokenType.CONTROL, _ADDED_SCORE)
    return _Token(content.replace(_SPACE, " "), TokenType.USER_DEFINED, _ADDED_SCORE)


# ---- SentencePiece ----


def _describe_sentencepiece(
    path: Path, files: _TokenizerFiles
) -> tuple[dict[str, Any], dict[int, _Token]]:
    """Return the entries and the tokens of a SentencePiece model. Raises ValueError for others."""
    content = read_regular(path)
    check_model(content, str(path))
    processor = open_model(content)
    if make_tokenizer(processor) is None:
        raise ValueError("it is a SentencePiece model that normalizes text, or a unigram model")

    # Pieces
    tokens = {}
    types = {
        TokenType.UNKNOWN: processor.is_unknown,
        TokenType.CONTROL: processor.is_control,
        TokenType.UNUSED: processor.is_unused,
        TokenType.BYTE: processor.is_byte,
    }
    for token_id in range(processor.vocab_size()):
        token_type = TokenType.NORMAL
        for candidate, has_type in types.items():
            if has_type(token_id):
                token_type = candidate
        piece = processor.id_to_piece(token_id)
        score = processor.get_score(token_id)
        tokens[token_id] = _Token(piece, token_type, score)

    # Tokens that transformers adds; tokenizer.json repeats special pieces.
    for token, token_id in files.added_tokens.items():
        tokens[token_id] = _Token(token, TokenType.USER_DEFINED, _ADDED_SCORE)
    for token_id, fields in files.config.get("added_tokens_decoder", {}).items():
        tokens[int(token_id)] = _make_added(fields["content"], fields.get("special", False))
    _add_tokens(tokens, files)

    has_prefix = files.config.get("add_prefix_space")
    if has_prefix is None:
        normalized = processor.normalize("a")
        has_prefix = normalized.startswith(_SPACE)
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": SENTENCEPIECE,
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.add_space_prefix": bool(has_prefix),
    }
    for role, entry_name in _ROLES.items():
        special_id = getattr(processor, f"{role}_id")()
        if special_id >= 0:
            metadata[f"tokenizer.ggml.{entry_name}_token_id"] = special_id
    return metadata, tokens


def _add_tokens(tokens: dict[int, _Token], files: _TokenizerFiles) -> None:
    """Add the tokens of tokenizer.json that are matched before text is split."""
    for fields in files.pipeline.get("added_tokens", ()):
        token_id = fields["id"]
        entry = tokens.get(token_id)
        if entry is None or entry.token_type == TokenType.NORMAL:
            tokens[token_id] = _make_added(fields["content"], fields["special"])


def _describe_pieces(files: _TokenizerFiles) -> tuple[dict[str, Any], dict[int, _Token]]:
    """Return the entries and the tokens of SentencePiece BPE that is stored as a tokenizer.json.

    llama.cpp's converter gives all pieces the same score, so that llama.cpp merges them from left
    to right; here the scores are those of the merges. Raises ValueError for other tokenizers.
    """
    has_prefix = has_space_prefix(files.pipeline)
    model = files.pipeline["model"]
    tokens = {}
    for piece, token_id in model["vocab"].items():
        token_type = TokenType.NORMAL
        if piece == model.get("unk_token"):
            token_type = TokenType.UNKNOWN
        elif _BYTE.fullmatch(piece):
            token_type = TokenType.BYTE
        tokens[token_id] = _Token(piece, token_type, _ADDED_SCORE)
    _add_tokens(tokens, files)

    # Scores of the pieces that text is split into
    pieces = {}
    for token_id, entry in tokens.items():
        if entry.token_type == TokenType.NORMAL:
            pieces[entry.text] = token_id
    scores = compute_scores(pieces, model["merges"])
    for piece, score in scores.items():
        token_id = pieces[piece]
        tokens[token_id] = _Token(piece, TokenType.NORMAL, score)
    metadata = {
        "tokenizer.ggml.model": SENTENCEPIECE,
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.add_space_prefix": has_prefix,
        # llama.cpp adds one by default.
        "tokenizer.ggml.add_bos_token": False,
    }
    return metadata, tokens


# ---- Byte-level BPE ----


def _describe_byte_level(
    directory: Path, files: _TokenizerFiles
) -> tuple[dict[str, Any], dict[int, _Token]]:
    """Return the entries and the tokens of byte-level BPE. Raises ValueError for others."""
    row, vocabulary, merges = _read_byte_level(directory, files)
    tokens = {}
    for token, token_id in vocabulary.items():
        tokens[token_id] = _Token(token, TokenType.NORMAL)
    for fields in files.pipeline.get("added_tokens", ()):
        tokens[fields["id"]] = _make_added(fields["content"], fields["special"])
    metadata = {
        "tokenizer.ggml.model": BYTE_LEVEL,
        "tokenizer.ggml.pre": row.names[0],
        "tokenizer.ggml.merges": merges,
        # llama.cpp has a default for each pre-tokenizer.
        "tokenizer.ggml.add_bos_token": False,
    }
    return metadata, tokens


def _read_byte_level(
    directory: Path, files: _TokenizerFiles
) -> tuple[PreTokenizer, dict[str, int], list[str]]:
    """Return pre-tokenizer, vocabulary and merges of tokenizer.json or of GPT-2's two files."""
    # GPT-2
    if not files.pipeline:
        lines = read_regular(directory / "merges.txt").decode().splitlines()
        merges = [line for line in lines if line and not line.startswith("#version")]
        vocabulary = read_json(directory / "vocab.json")
        return _GPT2, vocabulary, merges

    # tokenizer.json, whose merges are pairs in newer versions
    model = files.pipeline["model"]
    if model.get("type") != "BPE" or not isinstance(model["vocab"], dict):
        raise ValueError(f"its model is {model.get('type')}, not BPE")
    row = recognize_pipeline(files.pipeline)
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
    return row, model["vocab"], merges


# ---- Special tokens ----


def _describe_specials(
    directory: Path,
    files: _TokenizerFiles,
    tokens: Mapping[int, _Token],
    ids: Mapping[str, int | None],
) -> dict[str, Any]:
    """Return the entries of the special tokens, of adding them to a text, and of conversations."""
    token_ids = {entry.text: token_id for token_id, entry in tokens.items()}
    metadata: dict[str, Any] = {}
    for role, entry in _ROLES.items():
        token = files.config.get(f"{role}_token")
        if isinstance(token, dict):
            token = token.get("content")
        token_id = ids.get(f"{role}_token_id")
        if isinstance(token, str):
            token_id = token_ids.get(token)
        if type(token_id) is int and token_id in tokens:
            metadata[f"tokenizer.ggml.{entry}_token_id"] = token_id

    # Those that are added to a text
    first, last = _find_added(files.pipeline)
    for role, added in (("bos", first), ("eos", last)):
        stated = files.config.get(f"add_{role}_token")
        special = metadata.get(f"tokenizer.ggml.{role}_token_id")
        key = f"tokenizer.ggml.add_{role}_token"
        if isinstance(stated, bool):
            metadata[key] = stated
        elif added is not None:
            metadata[key] = token_ids.get(added) == special

    # The template of conversations, which is a file in newer versions
    template = files.config.get("chat_template")
    template_path = directory / "chat_template.jinja"
    if template_path.is_file():
        template = read_regular(template_path).decode()
    if isinstance(template, str):
        metadata["tokenizer.chat_template"] = template
    return metadata


def _find_added(pipeline: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the tokens that the post-processor adds before and after a text."""
    processor = pipeline.get("post_processor") or {}
    steps = processor.get("processors", [processor])
    for step in steps:
        if step.get("type") != "TemplateProcessing":
            continue
        entries = _ENTRIES(
            step.get("single") or [], "tokenizer.json: the post-processor's template"
        )
        if len(entries) > 1:
            first = entries[0].get("SpecialToken", {})
            last = entries[-1].get("SpecialToken", {})
            return first.get("id"), last.get("id")
    return None, None

"""The tokenizer in a GGUF file as files of transformers.

Byte-level BPE becomes tokenizer.json with the pre-tokenizer that `tokenizer.ggml.pre` means. The
others are SentencePiece models, whose pieces the file has: they become tokenizer.model, and the
tokenizer.json that splits text as it does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron.conversion.gguf.file_format import read_arrays
from megatron.conversion.gguf.tokenizer_types import (
    BYTE_LEVEL,
    SENTENCEPIECE,
    TokenType,
    find_pre_tokenizer,
    make_pipeline,
)
from megatron.conversion.huggingface.sentencepiece_model import make_tokenizer, open_model
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.safe_files import schema

if TYPE_CHECKING:
    from tokenizers import AddedToken

_PREFIX = "tokenizer.ggml."
_SPACE = "\u2581"
_PLACEHOLDER = re.compile(r"\[PAD\d+\]")  # of rows of the embedding without a token
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_TOKENS = schema.sequence(schema.text(1 << 16))
_MERGES = schema.sequence(schema.text(1 << 17))
_SCORES = schema.sequence(schema.number())
_TYPES = schema.sequence(schema.one_of(*map(int, TokenType)))


class StoredTokenizer(NamedTuple):
    """A tokenizer in a GGUF file."""

    files: dict[str, bytes]  # name in transformers -> content
    ids: dict[str, int]  # bos_token_id, ...: those of the special tokens that it has
    num_tokens: int  # the largest token plus 1


class _Vocabulary(NamedTuple):
    """Tokens by id, without placeholders, and the settings of special tokens."""

    tokens: dict[int, str]
    types: dict[int, TokenType]
    scores: Sequence[float]
    merges: Sequence[str]
    specials: dict[str, int]  # bos, eos, unk, pad
    metadata: Mapping[str, Any]

    def adds(self, role: str, default: bool) -> bool:
        """Return whether the tokenizer adds a special token to a text."""
        stated = self.metadata.get(f"{_PREFIX}add_{role}_token")
        return role in self.specials and bool(default if stated is None else stated)


def find_unread_tokenizer(metadata: Mapping[str, Any]) -> str | None:
    """Return why the tokenizer of a file cannot be read; None if it can, or if there is none."""
    model = metadata.get(f"{_PREFIX}model", "none")
    if model in ("none", SENTENCEPIECE):
        return None
    if model != BYTE_LEVEL:
        return f"tokenizer.ggml.model = {schema.format_value(model)} is not read"
    try:
        find_pre_tokenizer(metadata)
    except ValueError as error:
        return str(error)
    return None


def read_tokenizer(path: Path) -> StoredTokenizer:
    """Return the tokenizer in a file. Raises ValueError if there is none that can be read."""
    metadata = read_arrays(path)
    model = metadata.get(f"{_PREFIX}model", "none")
    problem = find_unread_tokenizer(metadata)
    if model == "none":
        problem = "the file has no tokenizer"
    if problem is not None:
        raise CheckpointError(f"{path}: {problem}: use the original tokenizer of transformers")
    vocabulary = _read_vocabulary(metadata, path)

    # The files
    if model == BYTE_LEVEL:
        files = {"tokenizer.json": _make_byte_level(vocabulary)}
    else:
        files = _make_sentencepiece(vocabulary, path)
    fields: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for role, token_id in vocabulary.specials.items():
        fields[f"{role}_token"] = vocabulary.tokens[token_id]
    files["tokenizer_config.json"] = _dump(fields)
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        files["chat_template.jinja"] = template.encode()
    ids = {f"{role}_token_id": token_id for role, token_id in vocabulary.specials.items()}
    return StoredTokenizer(files, ids, max(vocabulary.tokens) + 1)


def read_tokenizer_files(path: Path) -> dict[str, bytes]:
    """Return the files of transformers of the tokenizer in a file."""
    return read_tokenizer(path).files


def _dump(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, indent=2).encode()


def _read_vocabulary(metadata: Mapping[str, Any], path: Path) -> _Vocabulary:
    """Return the checked vocabulary. Raises CheckpointError if its parts do not fit together."""
    tokens = _TOKENS(metadata.get(f"{_PREFIX}tokens"), f"{path}: tokenizer.ggml.tokens")
    types = metadata.get(f"{_PREFIX}token_type")
    if types is None:
        types = [int(TokenType.NORMAL)] * len(tokens)
    types = _TYPES(types, f"{path}: tokenizer.ggml.token_type")
    scores = _SCORES(metadata.get(f"{_PREFIX}scores") or [], f"{path}: tokenizer.ggml.scores")
    merges = _MERGES(metadata.get(f"{_PREFIX}merges") or [], f"{path}: tokenizer.ggml.merges")
    if len(types) != len(tokens) or (scores and len(scores) != len(tokens)):
        raise CheckpointError(
            f"{path}: {len(tokens)} tokens have {len(types)} types and {len(scores)} scores: the "
            "file is damaged"
        )
    kept = {}
    kept_types = {}
    for token_id, token in enumerate(tokens):
        if types[token_id] != TokenType.UNUSED or not _PLACEHOLDER.fullmatch(token):
            kept[token_id] = token
            kept_types[token_id] = TokenType(types[token_id])
    if len(set(kept.values())) != len(kept) or not kept:
        raise CheckpointError(f"{path}: tokens occur twice, or there are none")

    specials = {}
    for role, entry in _ROLES.items():
        special_id = metadata.get(f"{_PREFIX}{entry}_token_id")
        if special_id in kept:
            specials[role] = special_id
    return _Vocabulary(kept, kept_types, scores, merges, specials, metadata)


def _list_added(vocabulary: _Vocabulary) -> list[AddedToken]:
    """Return the tokens that are matched in a text before it is split."""
    import tokenizers  # here, because other formats do not need it

    added = []
    for token_id, token in vocabulary.tokens.items():
        token_type = vocabulary.types[token_id]
        is_special = token_type in (TokenType.CONTROL, TokenType.UNKNOWN)
        is_text = token.strip(f" {_SPACE}") != ""  # runs of spaces are made by merges
        is_added = token_type == TokenType.USER_DEFINED and is_text
        if is_special or is_added:
            entry = tokenizers.AddedToken(
                token,
                normalized=False,
                special=is_special,
            )
            added.append(entry)
    return added


def _make_template(vocabulary: _Vocabulary, adds_bos: bool) -> dict[str, Any] | None:
    """Return the post-processor that adds special tokens to a text, if any."""
    entries: dict[str, dict[str, Any]] = {}
    special_tokens = {}
    for role, default in (("bos", adds_bos), ("eos", False)):
        if vocabulary.adds(role, default):
            token_id = vocabulary.specials[role]
            token = vocabulary.tokens[token_id]
            entries[role] = {
                "SpecialToken": {
                    "id": token,
                    "type_id": 0,
                },
            }
            special_tokens[token] = {
                "id": token,
                "ids": [token_id],
                "tokens": [token],
            }
    if not entries:
        return None
    bos = [entries["bos"]] if "bos" in entries else []
    eos = [entries["eos"]] if "eos" in entries else []
    first = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [*bos, first, *eos],
        "pair": [*bos, first, *eos, *bos, second, *eos],
        "special_tokens": special_tokens,
    }


def _make_byte_level(vocabulary: _Vocabulary) -> bytes:
    """Return the tokenizer.json of byte-level BPE."""
    import tokenizers  # here, because other formats do not need it

    row = find_pre_tokenizer(vocabulary.metadata)
    model = {
        "type": "BPE",
        "vocab": {token: token_id for token_id, token in vocabulary.tokens.items()},
        "merges": vocabulary.merges,
        "byte_fallback": False,
        "fuse_unk": False,
        "ignore_merges": row.ignores_merges,
    }
    decoder = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    pipeline = {
        "version": "1.0",
        "added_tokens": [],
        **make_pipeline(row),
        "post_processor": _make_template(vocabulary, row.adds_bos),
        "decoder": decoder,
        "model": model,
    }
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(pipeline))
    tokenizer.add_tokens(_list_added(vocabulary))
    return tokenizer.to_str(pretty=True).encode()


def _make_sentencepiece(vocabulary: _Vocabulary, path: Path) -> dict[str, bytes]:
    """Return tokenizer.model, and the tokenizer.json that splits text as it does."""
    _check_scores(vocabulary, path)
    content = _encode_model(vocabulary)
    try:
        tokenizer = make_tokenizer(open_model(content))
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: its tokenizer is not a SentencePiece model") from error
    if tokenizer is None:
        raise CheckpointError(
            f"{path}: its tokenizer is a unigram model, which llama.cpp does not have: the file is "
            "damaged"
        )
    tokenizer.add_tokens(_list_added(vocabulary))
    pipeline = json.loads(tokenizer.to_str())
    pipeline["post_processor"] = _make_template(vocabulary, adds_bos=True)
    return {
        "tokenizer.model": content,
        "tokenizer.json": _dump(pipeline),
    }


def _check_scores(vocabulary: _Vocabulary, path: Path) -> None:
    """Raise CheckpointError if scores do not define the order of merges."""
    types = vocabulary.types
    pieces = [index for index in types if types[index] == TokenType.NORMAL]
    scores = {0.0}
    if vocabulary.scores:
        scores = {vocabulary.scores[index] for index in pieces}
    if len(pieces) > 1 and len(scores) == 1:
        raise CheckpointError(
            f"{path}: all pieces of its tokenizer have the score {scores.pop():g}, as llama.cpp's "
            "converter writes them without tokenizer.model, so that their merges are unknown: use "
            "the original tokenizer of transformers"
        )


def _encode_model(vocabulary: _Vocabulary) -> bytes:
    """Return the SentencePiece model of the pieces: BPE that does not normalize text."""
    from sentencepiece import sentencepiece_model_pb2  # here, because it needs protobuf

    model = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # is generated
    for token_id in range(max(vocabulary.tokens) + 1):
        piece = model.pieces.add()
        token_type = vocabulary.types.get(token_id, TokenType.UNUSED)
        piece.piece = vocabulary.tokens.get(token_id, f"[PAD{token_id}]")
        piece.type = int(token_type)
        if token_type == TokenType.USER_DEFINED:
            piece.piece = piece.piece.replace(" ", _SPACE)
        elif vocabulary.scores:  # which llama.cpp's converter changes for tokens of users
            piece.score = vocabulary.scores[token_id]
    trainer = model.trainer_spec
    trainer.model_type = trainer.BPE
    trainer.vocab_size = len(model.pieces)
    trainer.byte_fallback = TokenType.BYTE in vocabulary.types.values()
    for role in _ROLES:
        setattr(trainer, f"{role}_id", vocabulary.specials.get(role, -1))
    normalizer = model.normalizer_spec
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = bool(vocabulary.metadata.get(f"{_PREFIX}add_space_prefix", True))
    normalizer.remove_extra_whitespaces = False
    content: bytes = model.SerializeToString()
    return content

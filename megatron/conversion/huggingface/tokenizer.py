"""The tokenizer beside a model of transformers: files that travel along, and the ids of its special tokens."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sentencepiece

from megatron.conversion.huggingface.sentencepiece import sentencepiece_tokenizer
from megatron.core.durable_files import committed, read_json, write_json

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
_MARKS = ("tokenizer.json", "tokenizer.model", "vocab.json")  # each alone makes a tokenizer
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def tokenizer_arguments(directory: Path, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for training with the tokenizer of a model's directory, and its token ids."""
    arguments: dict[str, Any] = {"hf_token_ids": {name: hf.get(name) for name in _IDS}}
    if any((directory / name).exists() for name in _MARKS):
        arguments |= {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(directory)}
    return arguments


def export_tokenizer(
    args: Mapping[str, Any], tokenizer: Path | None, directory: Path
) -> tuple[dict[str, Any], list[str]]:
    """Copy the tokenizer that `args` (or the user) names into `directory`.

    Returns the token ids for config.json, all null where nothing is known, and what could not be carried.
    """
    ids = dict.fromkeys(_IDS) | dict(args.get("hf_token_ids") or {})
    if tokenizer is None and args.get("tokenizer_model"):
        tokenizer = Path(args["tokenizer_model"])
    if tokenizer is None and args.get("vocab_file") and args.get("merge_file"):
        return _export_bpe(Path(args["vocab_file"]), Path(args["merge_file"]), directory, ids)
    if tokenizer is None:
        return ids, []
    if tokenizer.is_dir():
        return _export_directory(tokenizer, directory, ids), []
    if tokenizer.is_file():
        return _export_sentencepiece(tokenizer, directory)
    return ids, [f"tokenizer: {tokenizer} is not here; give --tokenizer"]


def _export_directory(tokenizer: Path, directory: Path, ids: dict[str, Any]) -> dict[str, Any]:
    for name in (*_FILES, "generation_config.json"):
        _copy(tokenizer / name, directory / name)
    for name in ("generation_config.json", "config.json"):  # config.json last: it decides
        if (tokenizer / name).exists():
            told = read_json(tokenizer / name)
            ids |= {name: told[name] for name in _IDS if told.get(name) is not None}
    return ids


def _export_sentencepiece(model: Path, directory: Path) -> tuple[dict[str, Any], list[str]]:
    """The model itself, and where it has an exact counterpart a tokenizer that transformers loads."""
    _copy(model, directory / "tokenizer.model")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    numbers = (processor.bos_id(), processor.eos_id(), processor.pad_id())
    ids = {name: number if number >= 0 else None for name, number in zip(_IDS, numbers, strict=True)}
    tokenizer = sentencepiece_tokenizer(model)
    if tokenizer is None:
        return ids, ["tokenizer: transformers would not split text as its SentencePiece model; use tokenizer.model"]
    with committed(directory / "tokenizer.json") as temporary:
        tokenizer.save(str(temporary))
    names = {name.removesuffix("_id"): processor.id_to_piece(id_) for name, id_ in ids.items() if id_ is not None}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
    write_json(directory / "tokenizer_config.json", config)
    return ids, []


def _export_bpe(vocab: Path, merges: Path, directory: Path, ids: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    missing = [
        f"tokenizer: {path} is not here; give --tokenizer with a directory that has both"
        for path in (vocab, merges)
        if not path.exists()
    ]
    if missing:
        return ids, missing
    _copy(vocab, directory / "vocab.json")
    _copy(merges, directory / "merges.txt")
    write_json(directory / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"})
    end = read_json(vocab).get("<|endoftext|>")
    return ids | {"bos_token_id": end, "eos_token_id": end}, []


def write_generation_config(directory: Path, ids: Mapping[str, Any]) -> None:
    """Unless one came with the tokenizer."""
    path = directory / "generation_config.json"
    if not path.exists():
        told = {name: value for name, value in ids.items() if value is not None}
        write_json(path, {"_from_model_config": True, **told})


def _copy(source: Path, target: Path) -> None:
    if source.exists():
        with committed(target) as temporary:
            shutil.copyfile(source, temporary)  # content only: the mode is that of a new file

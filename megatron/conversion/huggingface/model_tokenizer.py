"""The tokenizer next to a model of transformers: its files, and the ids of its special tokens.

A checkpoint only names its tokenizer, and may name any file. So a path from a checkpoint is used
only if it is in a directory that the user has named (links resolved), and a file is copied only if
its content is of the kind that its name promises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.conversion.huggingface.sentencepiece_model import (
    check_model,
    make_tokenizer,
    open_model,
)
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.durable_files import committed, write_json
from megatron.core.run_checkpoint.keys import GGUF_FILES, PROCESSOR_FILES
from megatron.core.run_checkpoint.tokenizer_files import make_tokenizer_path
from megatron.core.safe_files import schema
from megatron.core.safe_files.named_files import find_named_file
from megatron.core.safe_files.reading import parse_json, read_json, read_regular
from megatron.core.wings import resolve

_MARKS = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one of them makes a tokenizer
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_READ_GGUF = "megatron.conversion.gguf.tokenizer_reading:read_tokenizer"
_TOKEN = schema.integer(-1, 2**31 - 1)


def _check_token_ids(value: Any, location: str) -> Any:
    """Check None, a token, or several: a text may end in more than one way."""
    if value is None:
        return value
    if type(value) is list:
        return schema.sequence(_TOKEN, 1000)(value, location)
    return _TOKEN(value, location)


_GENERATION = "generation_config.json"
_GENERATION_DEFAULTS = schema.optional(schema.mapping(schema.anything))
TOKEN_IDS = schema.record({f"{name}?": _check_token_ids for name in _IDS})


def select_stated_ids(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ids of special tokens that a config.json states."""
    return {name: fields[name] for name in _IDS if fields.get(name) is not None}


def read_tokenizer_arguments(directory: Path, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for training with the tokenizer of a model's directory, and its ids.

    Without a tokenizer they contain the defaults of generation, which are otherwise one of its
    files.
    """
    TOKEN_IDS(hf, str(directory / "config.json"))
    arguments: dict[str, Any] = {"hf_token_ids": {name: hf.get(name) for name in _IDS}}
    generation = find_named_file(directory, _GENERATION, str(directory))
    if _is_tokenizer(directory):
        arguments["tokenizer_type"] = "HuggingFaceTokenizer"
        arguments["tokenizer_model"] = str(directory)
    elif generation.exists():
        defaults = read_json(generation)
        _GENERATION_DEFAULTS(defaults, str(generation))
        arguments["hf_generation_config"] = defaults
    return arguments


def _is_tokenizer(directory: Path) -> bool:
    return any((directory / name).exists() for name in _MARKS)


def _check_vocabulary(value: Any, location: str) -> Any:
    """Check the vocabulary of tokenizer.json: ids by piece, or a list of pieces."""
    if isinstance(value, list):
        return value
    return _VOCABULARY(value, location)


_VOCABULARY = schema.mapping(_TOKEN)
_TOKENIZER = schema.record(
    {
        "model": schema.record({"vocab": _check_vocabulary}),
        "added_tokens?": schema.optional(schema.sequence(schema.record({"id": _TOKEN}))),
    }
)


@dataclass
class ExportedTokenizer:
    """The outcome of `export_tokenizer`."""

    ids: dict[str, Any]  # for config.json; null where unknown
    lost: list[str]  # notes about files that were not copied
    copied: list[str]  # "source -> name"
    origin: Path | None = None  # directory of the tokenizer


def export_tokenizer(
    args: Mapping[str, Any], tokenizer: Path | None, directory: Path, trusted: Sequence[Path] = ()
) -> ExportedTokenizer:
    """Copy a tokenizer into `directory`: that of the user, or the one that `args` name.

    The latter is copied only from a `trusted` directory.
    """
    known_ids = args.get("hf_token_ids") or {}
    TOKEN_IDS(known_ids, "the arguments: hf_token_ids")
    ids = {name: known_ids.get(name) for name in _IDS}
    result = ExportedTokenizer(ids, lost=[], copied=[])
    is_own = tokenizer is None
    if tokenizer is not None:
        trusted = (*trusted, tokenizer)

    # Find the tokenizer. That of GPT-2 has two files.
    bpe = [args.get("vocab_file"), args.get("merge_file")]
    if tokenizer is None and args.get("tokenizer_model"):
        tokenizer = _confirm_path(args["tokenizer_model"], trusted, result)
    elif all(bpe) and _allows_bpe(tokenizer):
        vocab, merges = (_confirm_path(value, trusted, result) for value in bpe)
        if vocab is not None and merges is not None:
            _export_bpe(vocab, merges, directory, result)
        return result

    # Copy it.
    if tokenizer is None:
        return result
    if tokenizer.is_dir():
        _export_directory(tokenizer, directory, result, is_own)
    elif tokenizer.match(GGUF_FILES):
        _export_gguf(tokenizer, directory, result)
    elif tokenizer.is_file():
        _export_sentencepiece(tokenizer, directory, result)
    else:
        result.lost.append(f"tokenizer: {tokenizer} does not exist; give --tokenizer")
    return result


def copy_processor(result: ExportedTokenizer, fallback: Path | None, directory: Path) -> None:
    """Copy the files that prepare the images of a multimodal model into `directory`: those next to
    the tokenizer of `result`, or else in the directory `fallback`.
    """
    is_copied = False
    for origin in (result.origin, fallback):
        if origin is None or is_copied:
            continue
        for name in PROCESSOR_FILES:
            path = find_named_file(origin, name, str(origin))
            if path.exists():
                is_copied = _copy(path, directory / name, result) or is_copied
    if not is_copied:
        result.lost.append(
            f"processor: {', '.join(PROCESSOR_FILES)} of the original model were not found"
        )


def count_tokens(
    args: Mapping[str, Any], tokenizer: Path | None, trusted: Sequence[Path] = ()
) -> int | None:
    """Return the highest token of the tokenizer that `export_tokenizer` would copy, plus 1.

    None if there is none. Raises CheckpointError for damaged files.
    """
    if tokenizer is None and args.get("tokenizer_model"):
        unknown = ExportedTokenizer({}, [], [])
        tokenizer = _confirm_path(args["tokenizer_model"], trusted, unknown)
    if tokenizer is None:
        last = args.get("null_tokenizer_eod_id")
        if args.get("tokenizer_type") != "NullTokenizer" or last is None:
            return None
        return int(last) + 1
    if tokenizer.match(GGUF_FILES):
        return int(resolve(_READ_GGUF)(tokenizer).num_tokens)
    if tokenizer.is_file():  # a SentencePiece model
        return _count_pieces(tokenizer)
    tokens = _collect_tokens(tokenizer)
    if not tokens:
        return None
    return max(tokens) + 1


def _collect_tokens(tokenizer: Path) -> set[int]:
    """Return the tokens in all files of a tokenizer's directory."""
    tokens: set[int] = set()
    for name in ("vocab.json", "added_tokens.json"):
        path = find_named_file(tokenizer, name, str(tokenizer))
        if path.exists():
            vocabulary = _VOCABULARY(read_json(path), str(path))
            tokens.update(vocabulary.values())

    path = find_named_file(tokenizer, "tokenizer.json", str(tokenizer))
    if path.exists():
        content = _TOKENIZER(read_json(path), str(path))
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, dict):
            tokens.update(vocabulary.values())
        else:  # unigram models have a list of pieces
            tokens.update(range(len(vocabulary)))
        for token in content.get("added_tokens") or ():
            tokens.add(token["id"])

    path = find_named_file(tokenizer, "tokenizer.model", str(tokenizer))
    if path.exists():
        tokens.update(range(_count_pieces(path)))
    return tokens


def _count_pieces(model: Path) -> int:
    """Return the number of pieces of a SentencePiece model."""
    content = read_regular(model)
    check_model(content, str(model))
    return int(open_model(content).vocab_size())


def _allows_bpe(tokenizer: Path | None) -> bool:
    """Return whether the user named no tokenizer, or only a directory of trusted files."""
    return tokenizer is None or (tokenizer.is_dir() and not _is_tokenizer(tokenizer))


def _confirm_path(value: Any, trusted: Sequence[Path], result: ExportedTokenizer) -> Path | None:
    """Return a path of a checkpoint if it is in a trusted directory; else note that it is lost."""
    if type(value) is str and "\0" not in value:
        path = make_tokenizer_path(value).resolve()
        if any(path.is_relative_to(root.resolve()) for root in trusted):
            return path
    result.lost.append(
        f"tokenizer: the checkpoint names {schema.format_value(value)}, which is outside of its "
        "directory; give --tokenizer to copy it"
    )
    return None


def _export_directory(
    tokenizer: Path, directory: Path, result: ExportedTokenizer, is_own: bool
) -> None:
    """Copy the files of a Hugging Face tokenizer and read the ids of its special tokens.

    With `is_own`, it is the model's, so the ids of its config.json precede those of generation.
    """
    stated_ids = select_stated_ids(result.ids) if is_own else {}
    result.origin = tokenizer
    for name in _CONTENTS:
        path = find_named_file(tokenizer, name, str(tokenizer))
        if path.exists():
            _copy(path, directory / name, result)
    for name in (_GENERATION, "config.json"):  # config.json last: it takes precedence
        path = find_named_file(tokenizer, name, str(tokenizer))
        if not path.exists():
            continue
        stated = TOKEN_IDS(read_json(path), str(path))
        for id_name in _IDS:
            if name == _GENERATION and id_name in stated_ids:
                continue
            if stated.get(id_name) is not None:
                result.ids[id_name] = stated[id_name]


def _export_gguf(model: Path, directory: Path, result: ExportedTokenizer) -> None:
    """Write the tokenizer in a GGUF file."""
    tokenizer = resolve(_READ_GGUF)(model)
    for name, content in tokenizer.files.items():
        with committed(directory / name) as temporary:
            temporary.write_bytes(content)
        result.copied.append(f"{model} -> {name}")
    for id_name in _IDS:
        result.ids[id_name] = tokenizer.ids.get(id_name)


def _export_sentencepiece(model: Path, directory: Path, result: ExportedTokenizer) -> None:
    """Copy the model, and write the tokenizer.json that splits text exactly as it does, if any."""
    if not _copy(model, directory / "tokenizer.model", result):
        return
    processor = open_model((directory / "tokenizer.model").read_bytes())

    # Special tokens; -1 means that the model does not have one.
    token_ids = (processor.bos_id(), processor.eos_id(), processor.pad_id())
    names: dict[str, str] = {}
    for id_name, token_id in zip(_IDS, token_ids, strict=True):
        result.ids[id_name] = None
        if token_id >= 0:
            result.ids[id_name] = token_id
            names[id_name.removesuffix("_id")] = processor.id_to_piece(token_id)

    # The tokenizer of transformers.
    tokenizer = make_tokenizer(processor)
    if tokenizer is None:
        result.lost.append(
            "tokenizer: transformers would not split text as its SentencePiece model; use "
            "tokenizer.model"
        )
        return
    with committed(directory / "tokenizer.json") as temporary:
        tokenizer.save(str(temporary))
    fixed = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    write_json(directory / "tokenizer_config.json", fixed | names)


def _export_bpe(vocab: Path, merges: Path, directory: Path, result: ExportedTokenizer) -> None:
    """Copy the two files of a GPT-2 tokenizer."""
    missing = [path for path in (vocab, merges) if not path.exists()]
    for path in missing:
        result.lost.append(
            f"tokenizer: {path} does not exist; give --tokenizer with a directory that has both"
        )
    if missing:
        return
    for path, name in ((vocab, "vocab.json"), (merges, "merges.txt")):
        if not _copy(path, directory / name, result):
            return
    write_json(directory / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"})
    end = read_json(directory / "vocab.json").get("<|endoftext|>")
    result.ids |= {"bos_token_id": end, "eos_token_id": end}


def write_generation_config(
    directory: Path, args: Mapping[str, Any], ids: Mapping[str, Any]
) -> None:
    """Write generation_config.json unless one came with the tokenizer: the model's, or the ids."""
    path = directory / _GENERATION
    if path.exists():
        return
    config = args.get("hf_generation_config")
    _GENERATION_DEFAULTS(config, "the arguments: hf_generation_config")
    if config is None:
        config = {"_from_model_config": True}
        for name, value in ids.items():
            if value is not None:
                config[name] = value
    write_json(path, config)


def _copy(source: Path, target: Path, result: ExportedTokenizer) -> bool:
    """Copy the content of a file, not its mode; return False if its check fails."""
    try:
        content = read_regular(source)
        _CHECKS[target.name](content, str(source))
    except CheckpointError as error:
        result.lost.append(f"tokenizer: {error}")
        return False
    with committed(target) as temporary:
        temporary.write_bytes(content)
    result.copied.append(f"{source} -> {target.name}")
    return True


# Checks of content: `check(content, where)` raises CheckpointError.


def _json(check: Callable[[Any, str], Any]) -> Callable[[bytes, str], None]:
    """Return a check of content that is JSON whose value passes `check`."""

    def check_content(content: bytes, location: str) -> None:
        check(parse_json(content, location), location)

    return check_content


def _decode_lines(content: bytes, location: str) -> list[str]:
    """Return the lines of a text; raise CheckpointError for other content."""
    try:
        return content.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{location} is not text: {error}") from error


def _check_merges(content: bytes, location: str) -> None:
    for merge in content.decode("utf-8", errors="replace").split("\n"):
        if merge and not merge.startswith("#version") and len(merge.split(" ")) != 2:
            raise CheckpointError(
                f"{location} is not a list of merges: every line must have the two parts of a token"
            )


def _check_template(content: bytes, location: str) -> None:
    for text in _decode_lines(content, location):
        if "{{" in text or "{%" in text:
            return
    raise CheckpointError(f"{location} is not a Jinja template")


_OBJECT = _json(schema.mapping(schema.anything))
# Files that are copied -> check of their content.
_CONTENTS: dict[str, Callable[[bytes, str], None]] = {
    "tokenizer.json": _json(schema.record({"model": schema.mapping(schema.anything)})),
    "tokenizer_config.json": _OBJECT,
    "special_tokens_map.json": _OBJECT,
    "added_tokens.json": _OBJECT,
    "tokenizer.model": check_model,
    "vocab.json": _json(schema.mapping(_TOKEN)),
    "merges.txt": _check_merges,
    "chat_template.jinja": _check_template,
    _GENERATION: _OBJECT,
}
_CHECKS = _CONTENTS | dict.fromkeys(PROCESSOR_FILES, _OBJECT)

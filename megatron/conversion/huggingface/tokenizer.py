"""The tokenizer beside a model of transformers: its files, and the ids of its special tokens.

A checkpoint only names its tokenizer, and may name any file. So a path from a checkpoint is used
only if it lies in a directory that the user has named (links resolved), and a file is copied only
if it is what its name says.

A SentencePiece model is also written as `tokenizer.json`, so that transformers splits text exactly
as training did: transformers' own Llama tokenizer adds no space before a text that begins with one,
which SentencePiece does. The file written here says the same as the model: prefix, spaces, pieces
and their merges, bytes for what is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.dist_checkpointing.format import schema
from megatron.core.durable_files import committed, write_json
from megatron.core.lazy_import import lazy_module

if TYPE_CHECKING:
    import sentencepiece
    import tokenizers
else:
    sentencepiece = lazy_module("sentencepiece")
    tokenizers = lazy_module("tokenizers")

SPACE = "\u2581"
_PROBE = "  a  \u00bd\uff21 "  # spaces and characters that a normalizer would change


def sentencepiece_tokenizer(model: Path) -> tokenizers.Tokenizer | None:
    """The same tokenizer for transformers; None for a model that it could not repeat exactly.

    That is one that normalizes text, or a unigram model (it chooses otherwise between segmentations
    of equal score).
    """
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    scores = [processor.get_score(number) for number in range(processor.vocab_size())]
    # Scores of a BPE model are whole numbers that count down from 0 in the order of the merges.
    if not all(score.is_integer() for score in scores):
        return None
    plain = _PROBE.replace(" ", SPACE)
    normalized = processor.normalize(_PROBE)
    if normalized not in (plain, SPACE + plain):
        return None
    prefix = normalized != plain
    pieces = [processor.id_to_piece(number) for number in range(len(scores))]
    numbers = {piece: number for number, piece in enumerate(pieces)}
    bpe = tokenizers.models.BPE(
        numbers,
        _merge_pairs(numbers, scores),
        unk_token=pieces[processor.unk_id()],
        fuse_unk=True,
        byte_fallback=any(processor.is_byte(number) for number in range(len(pieces))),
    )
    tokenizer = tokenizers.Tokenizer(bpe)
    steps = [tokenizers.normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [*steps, tokenizers.normalizers.Replace(" ", SPACE)]
    )
    undo = [tokenizers.decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace(SPACE, " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            *undo,
        ]
    )
    special = [
        p for n, p in enumerate(pieces) if processor.is_control(n) or processor.is_unknown(n)
    ]
    tokenizer.add_special_tokens(
        [tokenizers.AddedToken(piece, normalized=False, special=True) for piece in special]
    )
    return tokenizer


def _merge_pairs(numbers: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a piece of two others, the best pieces first."""
    ranked = []
    for piece, number in numbers.items():
        for cut in range(1, len(piece)):
            left = piece[:cut]
            right = piece[cut:]
            if left in numbers and right in numbers:
                ranked.append((-scores[number], numbers[left], numbers[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


_MARKS = ("tokenizer.json", "tokenizer.model", "vocab.json")  # each alone makes a tokenizer
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_TOKEN = schema.integer(-1, 2**31 - 1)


def _token_ids(value: Any, where: str) -> Any:
    """None, a token, or several: a text may end in more than one way."""
    if value is None:
        return value
    return (
        schema.sequence(_TOKEN, 1000)(value, where) if type(value) is list else _TOKEN(value, where)
    )


TOKEN_IDS = schema.record({f"{name}?": _token_ids for name in _IDS})


def tokenizer_arguments(directory: Path, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for training with the tokenizer of a model's directory, and its token ids."""
    TOKEN_IDS(hf, str(directory / "config.json"))
    arguments: dict[str, Any] = {"hf_token_ids": {name: hf.get(name) for name in _IDS}}
    if _is_tokenizer(directory):
        arguments |= {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(directory)}
    return arguments


def _is_tokenizer(directory: Path) -> bool:
    return any((directory / name).exists() for name in _MARKS)


@dataclass
class ExportedTokenizer:
    """What `export_tokenizer` has done."""

    ids: dict[str, Any]  # for config.json; null where nothing is known
    lost: list[str]  # what could not be carried
    copied: list[str]  # "source -> name"


def export_tokenizer(
    args: Mapping[str, Any], tokenizer: Path | None, directory: Path, trusted: Sequence[Path] = ()
) -> ExportedTokenizer:
    """Copy the tokenizer that the user names into `directory`, or else the one in `args` if it lies
    in `trusted`.
    """
    told = args.get("hf_token_ids") or {}
    TOKEN_IDS(told, "the arguments: hf_token_ids")
    result = ExportedTokenizer({name: told.get(name) for name in _IDS}, [], [])
    trusted = (*trusted, tokenizer) if tokenizer is not None else trusted
    bpe = [args.get("vocab_file"), args.get("merge_file")]
    if tokenizer is None and args.get("tokenizer_model"):
        tokenizer = _confirmed(args["tokenizer_model"], trusted, result)
    elif all(bpe) and (tokenizer is None or (tokenizer.is_dir() and not _is_tokenizer(tokenizer))):
        vocab, merges = (_confirmed(value, trusted, result) for value in bpe)
        if vocab is not None and merges is not None:
            _export_bpe(vocab, merges, directory, result)
        return result
    if tokenizer is None:
        return result
    if tokenizer.is_dir():
        _export_directory(tokenizer, directory, result)
    elif tokenizer.is_file():
        _export_sentencepiece(tokenizer, directory, result)
    else:
        result.lost.append(f"tokenizer: {tokenizer} is not here; give --tokenizer")
    return result


def _confirmed(value: Any, trusted: Sequence[Path], result: ExportedTokenizer) -> Path | None:
    """The path that a checkpoint names, if it lies where the user said that its files are."""
    if type(value) is str and "\0" not in value:
        path = Path(value).resolve()
        if any(path.is_relative_to(root.resolve()) for root in trusted):
            return path
    told = f"tokenizer: the checkpoint names {schema.format_value(value)}, which lies outside of its directory"
    result.lost.append(f"{told}; give --tokenizer to copy it")
    return None


def _export_directory(tokenizer: Path, directory: Path, result: ExportedTokenizer) -> None:
    for name in _CONTENTS:
        path = schema.named_file(tokenizer, name, str(tokenizer))
        if path.exists():
            _copy(path, directory / name, result)
    for name in ("generation_config.json", "config.json"):  # config.json last: it decides
        path = schema.named_file(tokenizer, name, str(tokenizer))
        if path.exists():
            told = TOKEN_IDS(schema.read_json(path), str(path))
            result.ids |= {name: told[name] for name in _IDS if told.get(name) is not None}


def _export_sentencepiece(model: Path, directory: Path, result: ExportedTokenizer) -> None:
    """The model itself, and where it has an exact counterpart a tokenizer that transformers loads."""
    if not _copy(model, directory / "tokenizer.model", result):
        return
    processor = sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))
    numbers = (processor.bos_id(), processor.eos_id(), processor.pad_id())
    result.ids = {
        name: number if number >= 0 else None for name, number in zip(_IDS, numbers, strict=True)
    }
    tokenizer = sentencepiece_tokenizer(directory / "tokenizer.model")
    if tokenizer is None:
        lost = "tokenizer: transformers would not split text as its SentencePiece model; use tokenizer.model"
        result.lost.append(lost)
        return
    with committed(directory / "tokenizer.json") as temporary:
        tokenizer.save(str(temporary))
    names = {
        name.removesuffix("_id"): processor.id_to_piece(i)
        for name, i in result.ids.items()
        if i is not None
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **names,
    }
    write_json(directory / "tokenizer_config.json", config)


def _export_bpe(vocab: Path, merges: Path, directory: Path, result: ExportedTokenizer) -> None:
    missing = [path for path in (vocab, merges) if not path.exists()]
    result.lost += [
        f"tokenizer: {path} is not here; give --tokenizer with a directory that has both"
        for path in missing
    ]
    copies = {vocab: "vocab.json", merges: "merges.txt"}
    if missing or not all(_copy(path, directory / name, result) for path, name in copies.items()):
        return
    write_json(directory / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"})
    end = schema.read_json(directory / "vocab.json").get("<|endoftext|>")
    result.ids |= {"bos_token_id": end, "eos_token_id": end}


def write_generation_config(directory: Path, ids: Mapping[str, Any]) -> None:
    """Unless one came with the tokenizer."""
    path = directory / "generation_config.json"
    if not path.exists():
        told = {name: value for name, value in ids.items() if value is not None}
        write_json(path, {"_from_model_config": True, **told})


def _copy(source: Path, target: Path, result: ExportedTokenizer) -> bool:
    """Whether `source` was copied: content only, the mode is that of a new file."""
    try:
        content = schema.read_regular(source)
        _CONTENTS[target.name](content, str(source))
    except CheckpointError as error:
        result.lost.append(f"tokenizer: {error}")
        return False
    with committed(target) as temporary:
        temporary.write_bytes(content)
    result.copied.append(f"{source} -> {target.name}")
    return True


def _json(check: Callable[[Any, str], Any]) -> Callable[[bytes, str], None]:
    def check_content(content: bytes, where: str) -> None:
        check(schema.parse_json(content, where), where)

    return check_content


def _sentencepiece(content: bytes, where: str) -> None:
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=content)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{where} is not a SentencePiece model") from error
    for number in range(processor.vocab_size()):
        score = processor.get_score(number)
        if not math.isfinite(score):
            raise CheckpointError(
                f"{where}: piece {number} has score {score}: scores must be finite, so this "
                "SentencePiece model is damaged"
            )


def _lines(content: bytes, where: str) -> list[str]:
    try:
        return content.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where} is not text: {error}") from error


def _merges(content: bytes, where: str) -> None:
    lines = [line for line in content.decode("utf-8", errors="replace").split("\n") if line]
    if not all(line.startswith("#version") or len(line.split(" ")) == 2 for line in lines):
        raise CheckpointError(
            f"{where} does not have two parts of a token on every line: it is not a list of merges"
        )


def _template(content: bytes, where: str) -> None:
    if not any("{{" in line or "{%" in line for line in _lines(content, where)):
        raise CheckpointError(f"{where} is not a Jinja template")


_OBJECT = _json(schema.mapping(schema.anything))
# The files that are copied, and what each must be.
_CONTENTS: dict[str, Callable[[bytes, str], None]] = {
    "tokenizer.json": _json(schema.record({"model": schema.mapping(schema.anything)})),
    "tokenizer_config.json": _OBJECT,
    "special_tokens_map.json": _OBJECT,
    "added_tokens.json": _OBJECT,
    "tokenizer.model": _sentencepiece,
    "vocab.json": _json(schema.mapping(_TOKEN)),
    "merges.txt": _merges,
    "chat_template.jinja": _template,
    "generation_config.json": _OBJECT,
}

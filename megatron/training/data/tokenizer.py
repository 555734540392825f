"""Text to token ids and back: one value, made by one function per --tokenizer-type."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.core.flags import flag


@dataclass
class TokenizerConfig:
    """Which tokenizer. Field names are Megatron-LM's argument names."""

    tokenizer_type: str | None = flag(None)
    """Kind of tokenizer: GPT2BPETokenizer (the default), SentencePieceTokenizer or
    GPTSentencePieceTokenizer, Llama2Tokenizer (begins every text with BOS), HuggingFaceTokenizer
    (or PretrainedFromHF, TokenizerFromFile), TikTokenizer or Llama3Tokenizer (both need the package
    tiktoken), or NullTokenizer.
    """
    tokenizer_model: str | None = flag(
        None, "--tokenizer-model", "--tokenizer-name-or-path", "--tokenizer-file"
    )
    """SentencePiece: the .model file. HuggingFaceTokenizer: a directory, a tokenizer.json, or a
    name on the hub. TikTokenizer: a JSON file of ranks. Llama3Tokenizer: Meta's tokenizer.model.
    """
    special_tokens: list[str] | None = flag(
        None, "--tokenizer-special-tokens", "--tiktoken-special-tokens"
    )
    """Tokens that are added where the tokenizer lacks them, for HuggingFaceTokenizer,
    GPT2BPETokenizer and, with
    --legacy-tokenizer, SentencePieceTokenizer. TikTokenizer: its first tokens, <unk> <s> </s> among them.
    """
    legacy_tokenizer: bool = flag(False)
    """SentencePieceTokenizer as Megatron-LM had it before 0.16: <CLS>, <SEP>, <EOD> and <MASK> are
    added to the pieces of the model, are read from text, and EOD is <EOD>.
    """
    tiktoken_pattern: str | None = flag(None, choices=("v1", "v2"))
    """TikTokenizer: by which of Megatron-LM's two patterns text is cut into words. Default: v2."""
    tiktoken_num_special_tokens: int = flag(1000, positive=True)
    """TikTokenizer: ids in front of the ranks; those that --tokenizer-special-tokens leaves are
    <SPECIAL_n>.
    """
    trust_remote_code: bool = flag(False)
    """Run the code that a Hugging Face tokenizer's directory brings along. Never taken from a
    checkpoint.
    """
    vocab_file: str | None = flag(None)
    """GPT2BPETokenizer: the vocab.json file."""
    merge_file: str | None = flag(None)
    """GPT2BPETokenizer: the merges.txt file."""
    vocab_size: int | None = flag(None)
    """Number of tokens of the model. Default: the tokenizer's. With NullTokenizer n means n + 1
    tokens, EOD = n. TikTokenizer: how many of its file are read, with the special ones (default:
    131072).
    """
    null_tokenizer_eod_id: int | None = flag(None)
    """NullTokenizer: the end of a document, one of the n tokens of --vocab-size n, as in
    Megatron-LM since 0.19.
    """
    make_vocab_size_divisible_by: int = flag(128, positive=True)
    """The embedding is padded to a multiple of this times the tensor-parallel size; padding never
    changes the loss.
    """

    def __post_init__(self) -> None:
        if self.tokenizer_type is not None and self.tokenizer_type not in TOKENIZERS:
            raise ValueError(
                f"--tokenizer-type {self.tokenizer_type}: choose one of {', '.join(TOKENIZERS)}"
            )

    @property
    def kind(self) -> str:
        """The type, or the default that Megatron-LM's pretrain_gpt.py has, too."""
        return self.tokenizer_type or "GPT2BPETokenizer"


@dataclass(frozen=True)
class Tokenizer:
    """`tokenize` adds no special tokens: documents are separated by `eod`, appended by tools/preprocess_data.py."""

    vocab_size: int
    """All ids are below it."""
    eod: int
    """The end-of-document token."""
    pad: int | None
    """The padding token, if there is one."""
    tokenize: Callable[[str], list[int]]
    detokenize: Callable[[Sequence[int]], str]
    token_id: Callable[[str], int | None]
    """The id of a token by its name, special or not; None: there is no such token."""
    config: TokenizerConfig

    def __reduce__(self) -> tuple[Any, ...]:
        return build_tokenizer, (self.config,)  # another process reads the files itself


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that the flags name; ValueError when a flag or a file is missing."""
    if config.tokenizer_type is None and config.vocab_file is None and config.merge_file is None:
        raise ValueError(
            "no tokenizer: give --tokenizer-type, or --vocab-file and --merge-file for GPT2BPETokenizer"
        )
    return TOKENIZERS[config.kind](config)


def _path(config: TokenizerConfig, flag_name: str) -> Path:
    value = getattr(config, flag_name.removeprefix("--").replace("-", "_"))
    if value is None:
        raise ValueError(f"--tokenizer-type {config.kind} needs {flag_name}")
    if not Path(value).exists():
        raise ValueError(f"{flag_name} {value}: no such file or directory")
    return Path(value)


def _null(config: TokenizerConfig) -> Tokenizer:
    """Text is decimal ids separated by spaces: `--vocab-size n` makes n + 1 tokens, the last of
    them EOD.

    With --null-tokenizer-eod-id there are n, and this is one of them.
    """
    given = config.vocab_size
    eod = config.null_tokenizer_eod_id
    if given is None or given < 1:
        raise ValueError(
            f"--tokenizer-type NullTokenizer needs a positive --vocab-size, got {given}"
        )
    if eod is not None and not 0 <= eod < given:
        raise ValueError(
            f"--null-tokenizer-eod-id {eod} is not one of the {given} tokens of --vocab-size"
        )
    vocab_size = given + 1 if eod is None else given

    def tokenize(text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError:
            raise ValueError(
                f"NullTokenizer reads decimal ids separated by spaces, not {text[:80]!r}"
            ) from None
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            wrong = next(i for i in ids if not 0 <= i < vocab_size)
            raise ValueError(f"id {wrong} is not in 0..{vocab_size - 1}: raise --vocab-size")
        return ids

    return Tokenizer(
        vocab_size,
        eod=vocab_size - 1 if eod is None else eod,
        pad=None,
        tokenize=tokenize,
        detokenize=lambda ids: " ".join(map(str, ids)),
        token_id=lambda token: (
            int(token) if token.isdecimal() and int(token) < vocab_size else None
        ),
        config=config,
    )


def _sentencepiece(config: TokenizerConfig) -> Tokenizer:
    """A SentencePiece model as it is, as in Megatron-LM since 0.16: no pieces are added to it, EOD
    is its end-of-sentence piece. Of --legacy-tokenizer see `_with_special_pieces`.
    """
    import sentencepiece  # here, so that runs with other tokenizers do not need it

    path = _path(config, "--tokenizer-model")
    legacy = config.legacy_tokenizer and config.kind == "SentencePieceTokenizer"
    if config.special_tokens and not legacy:
        raise ValueError(
            f"--tokenizer-special-tokens {' '.join(config.special_tokens)}: nothing is added to a SentencePiece "
            "model; train it with them, or give SentencePieceTokenizer and --legacy-tokenizer"
        )
    try:
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"--tokenizer-model {path} is not a SentencePiece model: {error}"
        ) from None
    if pieces.eos_id() < 0:
        raise ValueError(
            f"--tokenizer-model {path} has no end-of-sentence piece, which separates documents: train it with an "
            "eos_id (SentencePiece's default)"
        )

    def token_id(token: str) -> int | None:
        found = pieces.piece_to_id(token)
        return (
            found if pieces.id_to_piece(found) == token else None
        )  # any unknown piece has the id of <unk>

    plain = Tokenizer(
        pieces.vocab_size(),
        eod=pieces.eos_id(),
        pad=None if pieces.pad_id() < 0 else pieces.pad_id(),
        tokenize=pieces.encode,
        detokenize=lambda ids: pieces.decode(list(ids)),
        token_id=token_id,
        config=config,
    )
    if config.kind == "Llama2Tokenizer":  # every text begins with BOS
        return replace(plain, tokenize=lambda text: [pieces.bos_id(), *pieces.encode(text)])
    return _with_special_pieces(plain) if legacy else plain


def _with_special_pieces(plain: Tokenizer) -> Tokenizer:
    """--legacy-tokenizer: special tokens stand behind the pieces of the model, and text that contains them becomes
    them.
    """
    special: dict[str, int] = {}
    vocab_size = plain.vocab_size
    for token in ("<CLS>", "<SEP>", "<EOD>", "<MASK>", *(plain.config.special_tokens or ())):
        known = plain.token_id(token)
        special[token] = vocab_size if known is None else known
        vocab_size += known is None
    names = {number: token for token, number in special.items()}
    pattern = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))))

    def tokenize(text: str) -> list[int]:
        ids: list[int] = []
        start = 0
        for match in pattern.finditer(text):
            ids += [*plain.tokenize(text[start : match.start()]), special[match[0]]]
            start = match.end()
        return ids + plain.tokenize(text[start:])

    def detokenize(ids: Sequence[int]) -> str:
        """Special tokens have a space on either side, as Megatron-LM writes them."""
        parts: list[str] = []
        run: list[int] = []
        for number in ids:
            if number in names:
                parts += [plain.detokenize(run), f" {names[number]} "]
                run = []
            else:
                run.append(number)
        return "".join([*parts, plain.detokenize(run)])

    return replace(
        plain,
        vocab_size=vocab_size,
        eod=special["<EOD>"],
        tokenize=tokenize,
        detokenize=detokenize,
        token_id=lambda token: special[token] if token in special else plain.token_id(token),
    )


# What published tokenizers call the token that ends a document; a tokenizer.json alone does not
# say.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[EOS]")


def _huggingface(config: TokenizerConfig) -> Tokenizer:
    """A tokenizer of `transformers`: a directory, a tokenizer.json, or a name on the hub. EOD is
    its EOS token.
    """
    if config.tokenizer_model is None:
        raise ValueError("--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model")
    tokenizer = _load_huggingface(config.tokenizer_model, config.trust_remote_code)
    tokenizer.model_max_length = (
        10**30
    )  # documents may be longer than a model's context: no warning
    tokenizer.add_tokens(config.special_tokens or [], special_tokens=True)
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"--tokenizer-model {config.tokenizer_model} has no EOS token, which separates documents: set eos_token in "
            "its tokenizer_config.json"
        )
    ids = tokenizer.get_vocab().values()
    return Tokenizer(
        max(len(tokenizer), max(ids, default=-1) + 1),
        eod=tokenizer.eos_token_id,
        pad=tokenizer.pad_token_id,
        tokenize=lambda text: tokenizer.encode(text, add_special_tokens=False),
        detokenize=lambda ids: tokenizer.decode(list(ids), clean_up_tokenization_spaces=False),
        token_id=tokenizer.get_vocab().get,
        config=config,
    )


def _load_huggingface(name: str, trust_remote_code: bool) -> Any:
    """A directory; the directory of a tokenizer.json that has its configuration beside it, or the
    file alone; or a name on the hub, which comes from the local cache if it is there.
    """
    path = Path(name)
    missing = f"--tokenizer-model {name}: no such file or directory"
    exists = path.exists()
    if not exists and (not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith(".")):
        raise ValueError(f"{missing}, and no name on the Hugging Face hub")
    from transformers import (
        AutoTokenizer,
        PreTrainedTokenizerFast,
    )  # here: it takes seconds to import

    if path.is_file() and (path.parent / "tokenizer_config.json").is_file():
        path = path.parent
    try:
        if not path.is_file():
            return AutoTokenizer.from_pretrained(
                str(path), local_files_only=exists, trust_remote_code=trust_remote_code
            )
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    except (
        Exception
    ) as error:  # of the network, the hub, or the libraries below, which raise bare Exception
        if exists:
            raise ValueError(
                f"--tokenizer-model {path} is not a Hugging Face tokenizer: {error}"
            ) from error
        raise ValueError(
            f"{missing}, and it could not be loaded from the Hugging Face hub ({str(error).splitlines()[0]}): download "
            "it where there is a network and give its directory"
        ) from None
    known = tokenizer.get_vocab()
    tokenizer.eos_token = next((token for token in END_TOKENS if token in known), None)
    return tokenizer


END_OF_TEXT = "<|endoftext|>"


def _gpt2(config: TokenizerConfig) -> Tokenizer:
    """GPT-2's byte-level BPE (Radford et al. 2019). EOD is `<|endoftext|>`, which text itself can
    never produce.
    """
    from tokenizers import Tokenizer as Pipeline
    from tokenizers import decoders, models, pre_tokenizers

    vocab_file = _path(config, "--vocab-file")
    merge_file = _path(config, "--merge-file")
    try:
        vocab = json.loads(vocab_file.read_text(encoding="utf-8"))
        pipeline = Pipeline(models.BPE.from_file(str(vocab_file), str(merge_file)))
    except Exception as error:  # tokenizers raises bare Exception
        raise ValueError(
            f"--vocab-file {vocab_file}, --merge-file {merge_file}: cannot be read: {error}"
        ) from None
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    if END_OF_TEXT not in vocab:
        raise ValueError(
            f"--vocab-file {vocab_file} has no {END_OF_TEXT}, which separates documents"
        )
    pipeline.add_special_tokens(
        [token for token in config.special_tokens or () if token not in vocab]
    )
    return Tokenizer(
        max(pipeline.get_vocab().values()) + 1,
        eod=vocab[END_OF_TEXT],
        pad=None,
        tokenize=lambda text: pipeline.encode(text, add_special_tokens=False).ids,
        detokenize=lambda ids: pipeline.decode(list(ids), skip_special_tokens=False),
        token_id=pipeline.token_to_id,
        config=config,
    )


# How text is cut into words before its bytes are merged. v1 and v2 are Megatron-LM's, the third is
# Llama 3's.
TIKTOKEN_PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}
TIKTOKEN_SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
TIKTOKEN_VOCAB_SIZE = 2**17
_LLAMA3_NAMED = {
    0: "begin_of_text",
    1: "end_of_text",
    6: "start_header_id",
    7: "end_header_id",
    9: "eot_id",
}


def _tiktoken(
    config: TokenizerConfig,
    ranks: dict[bytes, int],
    special: dict[str, int],
    pattern: str,
    eod: str,
) -> Tokenizer:
    """Byte-level BPE by the package tiktoken: bytes with their ranks, and special tokens, which
    text never becomes.
    """
    try:
        import tiktoken  # here, so that runs with other tokenizers do not need it
    except ImportError:
        raise ValueError(
            "--tokenizer-type TikTokenizer and Llama3Tokenizer need the package tiktoken: pip install 'tiktoken<1'"
        ) from None
    encoding = tiktoken.Encoding(
        "tokenizer",
        pat_str=TIKTOKEN_PATTERNS[pattern],
        mergeable_ranks=ranks,
        special_tokens=special,
    )

    def token_id(token: str) -> int | None:
        try:
            return encoding.encode_single_token(token)
        except KeyError:
            return None

    return Tokenizer(
        encoding.n_vocab,
        eod=special[eod],
        pad=special.get("<pad>"),
        tokenize=encoding.encode_ordinary,
        detokenize=lambda ids: encoding.decode(list(ids)),
        token_id=token_id,
        config=config,
    )


def _megatron_tiktoken(config: TokenizerConfig) -> Tokenizer:
    """Megatron-LM's form: special tokens first, then the ranks of a JSON list up to the size of the
    vocabulary.
    """
    path = _path(config, "--tokenizer-model")
    first = config.tiktoken_num_special_tokens
    special = list(TIKTOKEN_SPECIAL if config.special_tokens is None else config.special_tokens)
    size = config.vocab_size or TIKTOKEN_VOCAB_SIZE
    lacking = [token for token in TIKTOKEN_SPECIAL[:3] if token not in special]
    if lacking or len(set(special)) < len(special):
        raise ValueError(
            f"--tokenizer-special-tokens {' '.join(special)}: <unk>, <s> and </s> must be there, none twice"
        )
    if not len(special) <= first < size:
        raise ValueError(
            f"--tiktoken-num-special-tokens {first} must be at least the {len(special)} special tokens, and less than "
            f"the {size} of the vocabulary"
        )
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))[: size - first]
        ranks = {
            base64.b64decode(row["token_bytes"], validate=True): first + row["rank"] for row in rows
        }
    except (ValueError, KeyError, TypeError, binascii.Error) as error:
        raise ValueError(
            f"--tokenizer-model {path} is no JSON list of token_bytes and rank: {error}"
        ) from None
    if sorted(ranks.values()) != list(range(first, size)):
        raise ValueError(
            f"--tokenizer-model {path} has {len(ranks)} ranks, not each of 0 to {size - first - 1} once: give "
            f"--vocab-size {first + len(ranks)}"
        )
    special += [f"<SPECIAL_{number}>" for number in range(len(special), first)]
    numbered = {token: number for number, token in enumerate(special)}
    return _tiktoken(config, ranks, numbered, config.tiktoken_pattern or "v2", "</s>")


def _llama3(config: TokenizerConfig) -> Tokenizer:
    """Meta's file, a line `base64 rank` for each token, and 256 special tokens behind them."""
    path = _path(config, "--tokenizer-model")
    if path.is_dir() or path.suffix == ".json":  # as Hugging Face has it
        return _huggingface(config)
    try:
        lines = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (ValueError, binascii.Error) as error:
        raise ValueError(
            f"--tokenizer-model {path} has a line that is not a token and its rank: {error}"
        ) from None
    if not ranks or sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(
            f"--tokenizer-model {path}: the ranks of {len(ranks)} tokens must be 0, 1, 2, ..."
        )
    reserved = iter(range(256))
    names = [
        _LLAMA3_NAMED.get(place) or f"reserved_special_token_{next(reserved)}"
        for place in range(256)
    ]
    special = {f"<|{name}|>": len(ranks) + place for place, name in enumerate(names)}
    return _tiktoken(config, ranks, special, "llama3", "<|end_of_text|>")


TOKENIZERS: dict[str, Callable[[TokenizerConfig], Tokenizer]] = {
    "SentencePieceTokenizer": _sentencepiece,
    "GPTSentencePieceTokenizer": _sentencepiece,
    "Llama2Tokenizer": _sentencepiece,
    "Llama3Tokenizer": _llama3,
    "HuggingFaceTokenizer": _huggingface,
    "PretrainedFromHF": _huggingface,  # in DeepSpeed's forks
    "TokenizerFromFile": _huggingface,  # in BigCode's fork
    "GPT2BPETokenizer": _gpt2,
    "TikTokenizer": _megatron_tiktoken,
    "NullTokenizer": _null,
}

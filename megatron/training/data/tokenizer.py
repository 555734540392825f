"""Text to token ids and back: one small interface, one class per --tokenizer-type."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron.core.utils import flag


class Tokenizer(Protocol):
    """`tokenize` adds no special tokens: documents are separated by `eod`, appended by tools/preprocess_data.py."""

    @property
    def vocab_size(self) -> int:
        """All ids are below it."""

    @property
    def eod(self) -> int:
        """The end-of-document token."""

    @property
    def pad(self) -> int | None:
        """The padding token, if there is one."""

    def tokenize(self, text: str) -> list[int]: ...

    def detokenize(self, ids: Sequence[int]) -> str: ...

    def token_id(self, token: str) -> int | None:
        """The id of a token by its name, special or not; None: there is no such token."""


@dataclass
class TokenizerConfig:
    """Which tokenizer. Field names are Megatron-LM's argument names."""

    tokenizer_type: str | None = flag(None)
    """Kind of tokenizer: GPT2BPETokenizer (the default), SentencePieceTokenizer or GPTSentencePieceTokenizer,
    Llama2Tokenizer (begins every text with BOS), HuggingFaceTokenizer (or PretrainedFromHF, TokenizerFromFile),
    TikTokenizer or Llama3Tokenizer (both need the package tiktoken), or NullTokenizer."""
    tokenizer_model: str | None = flag(None, "--tokenizer-model", "--tokenizer-name-or-path", "--tokenizer-file")
    """SentencePiece: the .model file. HuggingFaceTokenizer: a directory, a tokenizer.json, or a name on the hub.
    TikTokenizer: a JSON file of ranks. Llama3Tokenizer: Meta's tokenizer.model."""
    special_tokens: list[str] | None = flag(None, "--tokenizer-special-tokens", "--tiktoken-special-tokens")
    """Tokens that are added where the tokenizer lacks them, for HuggingFaceTokenizer, GPT2BPETokenizer and, with
    --legacy-tokenizer, SentencePieceTokenizer. TikTokenizer: its first tokens, <unk> <s> </s> among them."""
    legacy_tokenizer: bool = flag(False)
    """SentencePieceTokenizer as Megatron-LM had it before 0.16: <CLS>, <SEP>, <EOD> and <MASK> are added to the pieces
    of the model, are read from text, and EOD is <EOD>."""
    tiktoken_pattern: str | None = flag(None, choices=("v1", "v2"))
    """TikTokenizer: by which of Megatron-LM's two patterns text is cut into words. Default: v2."""
    tiktoken_num_special_tokens: int = flag(1000)
    """TikTokenizer: ids in front of the ranks; those that --tokenizer-special-tokens leaves are <SPECIAL_n>."""
    trust_remote_code: bool = flag(False)
    """Run the code that a Hugging Face tokenizer's directory brings along. Never taken from a checkpoint."""
    vocab_file: str | None = flag(None)
    """GPT2BPETokenizer: the vocab.json file."""
    merge_file: str | None = flag(None)
    """GPT2BPETokenizer: the merges.txt file."""
    vocab_size: int | None = flag(None)
    """Number of tokens of the model. Default: the tokenizer's. With NullTokenizer n means n + 1 tokens, EOD = n.
    TikTokenizer: how many of its file are read, with the special ones (default: 131072)."""
    null_tokenizer_eod_id: int | None = flag(None)
    """NullTokenizer: the end of a document, one of the n tokens of --vocab-size n, as in Megatron-LM since 0.19."""
    make_vocab_size_divisible_by: int = flag(128)
    """The embedding is padded to a multiple of this times the tensor-parallel size; padding never changes the loss."""

    def __post_init__(self) -> None:
        if self.tokenizer_type is not None and self.tokenizer_type not in TOKENIZERS:
            raise ValueError(f"--tokenizer-type {self.tokenizer_type}: choose one of {', '.join(TOKENIZERS)}")

    @property
    def kind(self) -> str:
        """The type, or the default that Megatron-LM's pretrain_gpt.py has, too."""
        return self.tokenizer_type or "GPT2BPETokenizer"


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer that the flags name; ValueError when a flag or a file is missing."""
    if config.tokenizer_type is None and config.vocab_file is None and config.merge_file is None:
        raise ValueError("no tokenizer: give --tokenizer-type, or --vocab-file and --merge-file for GPT2BPETokenizer")
    return TOKENIZERS[config.kind](config)


def _path(kind: str, flag_name: str, value: str | None) -> Path:
    if value is None:
        raise ValueError(f"--tokenizer-type {kind} needs {flag_name}")
    if not Path(value).exists():
        raise ValueError(f"{flag_name} {value}: no such file or directory")
    return Path(value)


class NullTokenizer:
    """Text is decimal ids separated by spaces: `--vocab-size n` makes n + 1 tokens, the last of them EOD.

    With `eod` there are n, and this is one of them.
    """

    pad = None

    def __init__(self, vocab_size: int | None, eod: int | None = None) -> None:
        if vocab_size is None or vocab_size < 1:
            raise ValueError(f"--tokenizer-type NullTokenizer needs a positive --vocab-size, got {vocab_size}")
        if eod is not None and not 0 <= eod < vocab_size:
            raise ValueError(f"--null-tokenizer-eod-id {eod} is not one of the {vocab_size} tokens of --vocab-size")
        self.vocab_size = vocab_size + 1 if eod is None else vocab_size
        self.eod = self.vocab_size - 1 if eod is None else eod

    def tokenize(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError:
            raise ValueError(f"NullTokenizer reads decimal ids separated by spaces, not {text[:80]!r}") from None
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            wrong = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise ValueError(f"id {wrong} is not in 0..{self.vocab_size - 1}: raise --vocab-size")
        return ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def token_id(self, token: str) -> int | None:
        return int(token) if token.isdecimal() and int(token) < self.vocab_size else None


class SentencePieceTokenizer:
    """A SentencePiece model as it is: no pieces are added to it, EOD is its end-of-sentence piece.

    So has Megatron-LM it since 0.16; `LegacySentencePieceTokenizer` is what it had before.
    """

    def __init__(self, model_file: Path) -> None:
        import sentencepiece  # here, so that runs with other tokenizers do not need it

        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
        except (OSError, RuntimeError) as error:
            raise ValueError(f"--tokenizer-model {model_file} is not a SentencePiece model: {error}") from None
        self.vocab_size: int = self._processor.vocab_size()
        self.pad = None if self._processor.pad_id() < 0 else self._processor.pad_id()
        self.eod: int = self._processor.eos_id()
        if self.eod < 0:
            raise ValueError(
                f"--tokenizer-model {model_file} has no end-of-sentence piece, which separates documents: train it "
                "with an eos_id (SentencePiece's default)"
            )

    def tokenize(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._processor.decode(list(ids))

    def token_id(self, token: str) -> int | None:
        found = self._processor.piece_to_id(token)
        return found if self._processor.id_to_piece(found) == token else None  # any unknown piece has the id of <unk>


class LegacySentencePieceTokenizer(SentencePieceTokenizer):
    """Special tokens stand behind the pieces of the model, and text that contains them becomes them."""

    def __init__(self, model_file: Path, special_tokens: Sequence[str]) -> None:
        super().__init__(model_file)
        self._special: dict[str, int] = {}
        for token in ("<CLS>", "<SEP>", "<EOD>", "<MASK>", *special_tokens):
            known = super().token_id(token)
            self._special[token] = self.vocab_size if known is None else known
            self.vocab_size += known is None
        self._names = {number: token for token, number in self._special.items()}
        self._pattern = re.compile("|".join(map(re.escape, sorted(self._special, key=len, reverse=True))))
        self.eod = self._special["<EOD>"]

    def tokenize(self, text: str) -> list[int]:
        ids: list[int] = []
        start = 0
        for match in self._pattern.finditer(text):
            ids += [*super().tokenize(text[start : match.start()]), self._special[match[0]]]
            start = match.end()
        return ids + super().tokenize(text[start:])

    def detokenize(self, ids: Sequence[int]) -> str:
        """Special tokens have a space on either side, as Megatron-LM writes them."""
        parts: list[str] = []
        plain: list[int] = []
        for number in ids:
            if number in self._names:
                parts += [super().detokenize(plain), f" {self._names[number]} "]
                plain = []
            else:
                plain.append(number)
        return "".join([*parts, super().detokenize(plain)])

    def token_id(self, token: str) -> int | None:
        return self._special[token] if token in self._special else super().token_id(token)


class Llama2Tokenizer(SentencePieceTokenizer):
    """Llama 2's SentencePiece model: every text begins with its BOS piece."""

    def tokenize(self, text: str) -> list[int]:
        return [self._processor.bos_id(), *super().tokenize(text)]


# What published tokenizers call the token that ends a document; a tokenizer.json alone does not say.
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[EOS]")


class HuggingFaceTokenizer:
    """A tokenizer of `transformers`: a directory, a tokenizer.json, or a name on the hub. EOD is its EOS token."""

    def __init__(self, path: str | None, trust_remote_code: bool = False, special_tokens: Sequence[str] = ()) -> None:
        if path is None:
            raise ValueError("--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model")
        self._tokenizer = _load_huggingface(path, trust_remote_code)
        self._tokenizer.model_max_length = 10**30  # documents may be longer than a model's context: no warning
        self._tokenizer.add_tokens(list(special_tokens), special_tokens=True)
        ids = self._tokenizer.get_vocab().values()
        self.vocab_size: int = max(len(self._tokenizer), max(ids, default=-1) + 1)
        self.pad: int | None = self._tokenizer.pad_token_id
        if self._tokenizer.eos_token_id is None:
            raise ValueError(
                f"--tokenizer-model {path} has no EOS token, which separates documents: set eos_token in its "
                "tokenizer_config.json"
            )
        self.eod: int = self._tokenizer.eos_token_id

    def tokenize(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)

    def token_id(self, token: str) -> int | None:
        return self._tokenizer.get_vocab().get(token)


def _load_huggingface(name: str, trust_remote_code: bool) -> Any:
    """A directory; the directory of a tokenizer.json that has its configuration beside it, or the file alone; or a name
    on the hub, which comes from the local cache if it is there."""
    path, missing = Path(name), f"--tokenizer-model {name}: no such file or directory"
    exists = path.exists()
    if not exists and (not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith(".")):
        raise ValueError(f"{missing}, and no name on the Hugging Face hub")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # here: it takes seconds to import

    if path.is_file() and (path.parent / "tokenizer_config.json").is_file():
        path = path.parent
    try:
        if not path.is_file():
            return AutoTokenizer.from_pretrained(
                str(path), local_files_only=exists, trust_remote_code=trust_remote_code
            )
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))
    except Exception as error:  # of the network, the hub, or the libraries below, which raise bare Exception
        if exists:
            raise ValueError(f"--tokenizer-model {path} is not a Hugging Face tokenizer: {error}") from error
        raise ValueError(
            f"{missing}, and it could not be loaded from the Hugging Face hub ({str(error).splitlines()[0]}): download "
            "it where there is a network and give its directory"
        ) from None
    known = tokenizer.get_vocab()
    tokenizer.eos_token = next((token for token in END_TOKENS if token in known), None)
    return tokenizer


class GPT2BPETokenizer:
    """GPT-2's byte-level BPE (Radford et al. 2019). EOD is `<|endoftext|>`, which text itself can never produce."""

    END_OF_TEXT = "<|endoftext|>"
    pad = None

    def __init__(self, vocab_file: Path, merge_file: Path, special_tokens: Sequence[str] = ()) -> None:
        from tokenizers import Tokenizer as Pipeline
        from tokenizers import decoders, models, pre_tokenizers

        try:
            vocab = json.loads(vocab_file.read_text(encoding="utf-8"))
            self._pipeline = Pipeline(models.BPE.from_file(str(vocab_file), str(merge_file)))
        except Exception as error:  # tokenizers raises bare Exception
            raise ValueError(f"--vocab-file {vocab_file}, --merge-file {merge_file}: cannot be read: {error}") from None
        self._pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._pipeline.decoder = decoders.ByteLevel()
        if self.END_OF_TEXT not in vocab:
            raise ValueError(f"--vocab-file {vocab_file} has no {self.END_OF_TEXT}, which separates documents")
        self.eod: int = vocab[self.END_OF_TEXT]
        self._pipeline.add_special_tokens([token for token in special_tokens if token not in vocab])
        self.vocab_size: int = max(self._pipeline.get_vocab().values()) + 1

    def tokenize(self, text: str) -> list[int]:
        return self._pipeline.encode(text, add_special_tokens=False).ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._pipeline.decode(list(ids), skip_special_tokens=False)

    def token_id(self, token: str) -> int | None:
        return self._pipeline.token_to_id(token)


# How text is cut into words before its bytes are merged. v1 and v2 are Megatron-LM's, the third is Llama 3's.
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
_LLAMA3_NAMED = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 7: "end_header_id", 9: "eot_id"}


class TikTokenizer:
    """Byte-level BPE by the package tiktoken: bytes with their ranks, and special tokens, which text never becomes."""

    def __init__(
        self, ranks: dict[bytes, int], special: dict[str, int], pattern: str, eod: str, pad: str | None
    ) -> None:
        self._special = special
        self._encoding = _import_tiktoken().Encoding(
            "tokenizer", pat_str=TIKTOKEN_PATTERNS[pattern], mergeable_ranks=ranks, special_tokens=special
        )
        self.vocab_size: int = self._encoding.n_vocab
        self.eod, self.pad = special[eod], None if pad is None else special.get(pad)

    def tokenize(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._encoding.decode(list(ids))

    def token_id(self, token: str) -> int | None:
        try:
            return self._encoding.encode_single_token(token)
        except KeyError:
            return None


def _import_tiktoken() -> Any:
    try:
        import tiktoken  # here, so that runs with other tokenizers do not need it
    except ImportError:
        raise ValueError(
            "--tokenizer-type TikTokenizer and Llama3Tokenizer need the package tiktoken: pip install 'tiktoken<1'"
        ) from None
    return tiktoken


def _megatron_tiktoken(config: TokenizerConfig) -> Tokenizer:
    """Megatron-LM's form: special tokens first, then the ranks of a JSON list up to the size of the vocabulary."""
    path, first = _path(config.kind, "--tokenizer-model", config.tokenizer_model), config.tiktoken_num_special_tokens
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
        ranks = {base64.b64decode(row["token_bytes"], validate=True): first + row["rank"] for row in rows}
    except (ValueError, KeyError, TypeError, binascii.Error) as error:
        raise ValueError(f"--tokenizer-model {path} is no JSON list of token_bytes and rank: {error}") from None
    if sorted(ranks.values()) != list(range(first, size)):
        raise ValueError(
            f"--tokenizer-model {path} has {len(ranks)} ranks, not each of 0 to {size - first - 1} once: give "
            f"--vocab-size {first + len(ranks)}"
        )
    special += [f"<SPECIAL_{number}>" for number in range(len(special), first)]
    numbered = {token: number for number, token in enumerate(special)}
    return TikTokenizer(ranks, numbered, config.tiktoken_pattern or "v2", "</s>", "<pad>")


def _llama3(config: TokenizerConfig) -> Tokenizer:
    """Meta's file, a line `base64 rank` for each token, and 256 special tokens behind them."""
    path = _path(config.kind, "--tokenizer-model", config.tokenizer_model)
    if path.is_dir() or path.suffix == ".json":  # as Hugging Face has it
        return _huggingface(config)
    try:
        lines = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (ValueError, binascii.Error) as error:
        raise ValueError(f"--tokenizer-model {path} has a line that is not a token and its rank: {error}") from None
    if not ranks or sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"--tokenizer-model {path}: the ranks of {len(ranks)} tokens must be 0, 1, 2, ...")
    reserved = iter(range(256))
    names = [_LLAMA3_NAMED.get(place) or f"reserved_special_token_{next(reserved)}" for place in range(256)]
    special = {f"<|{name}|>": len(ranks) + place for place, name in enumerate(names)}
    return TikTokenizer(ranks, special, "llama3", "<|end_of_text|>", None)


def _sentencepiece(of: type[SentencePieceTokenizer]) -> Callable[[TokenizerConfig], Tokenizer]:
    def build(config: TokenizerConfig) -> Tokenizer:
        path = _path(config.kind, "--tokenizer-model", config.tokenizer_model)
        if config.legacy_tokenizer and config.kind == "SentencePieceTokenizer":
            return LegacySentencePieceTokenizer(path, config.special_tokens or ())
        if config.special_tokens:
            raise ValueError(
                f"--tokenizer-special-tokens {' '.join(config.special_tokens)}: nothing is added to a SentencePiece "
                "model; train it with them, or give SentencePieceTokenizer and --legacy-tokenizer"
            )
        return of(path)

    return build


def _huggingface(config: TokenizerConfig) -> Tokenizer:
    return HuggingFaceTokenizer(config.tokenizer_model, config.trust_remote_code, config.special_tokens or ())


def _gpt2(config: TokenizerConfig) -> Tokenizer:
    vocab_file = _path(config.kind, "--vocab-file", config.vocab_file)
    merge_file = _path(config.kind, "--merge-file", config.merge_file)
    return GPT2BPETokenizer(vocab_file, merge_file, config.special_tokens or ())


TOKENIZERS: dict[str, Callable[[TokenizerConfig], Tokenizer]] = {
    "SentencePieceTokenizer": _sentencepiece(SentencePieceTokenizer),
    "GPTSentencePieceTokenizer": _sentencepiece(SentencePieceTokenizer),
    "Llama2Tokenizer": _sentencepiece(Llama2Tokenizer),
    "Llama3Tokenizer": _llama3,
    "HuggingFaceTokenizer": _huggingface,
    "PretrainedFromHF": _huggingface,  # in DeepSpeed's forks
    "TokenizerFromFile": _huggingface,  # in BigCode's fork
    "GPT2BPETokenizer": _gpt2,
    "TikTokenizer": _megatron_tiktoken,
    "NullTokenizer": lambda config: NullTokenizer(config.vocab_size, config.null_tokenizer_eod_id),
}

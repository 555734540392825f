"""Tokenizers: text to token ids and back. Those of other libraries are imported on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.flags import FlagSection, flag
from megatron.core.wings import resolve

# ---- Flags ----

# `tokenizer.TOKENIZERS` contains the function that builds each of them.
TOKENIZER_TYPES = (
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "Llama3Tokenizer",
    "HuggingFaceTokenizer",
    "PretrainedFromHF",
    "TokenizerFromFile",
    "GPT2BPETokenizer",
    "TikTokenizer",
    "NullTokenizer",
)


@dataclass
class TokenizerConfig(FlagSection):
    """Selection of a tokenizer. Field names are Megatron-LM's argument names."""

    tokenizer_type: str | None = flag(None, choices=TOKENIZER_TYPES)
    """Kind of tokenizer; with --vocab-file or --merge-file the default is GPT2BPETokenizer.
    Llama2Tokenizer begins every text with BOS. PretrainedFromHF and TokenizerFromFile are other
    names of HuggingFaceTokenizer. TikTokenizer and Llama3Tokenizer require the package tiktoken.
    """
    tokenizer_model: str | None = flag(
        None, "--tokenizer-model", "--tokenizer-name-or-path", "--tokenizer-file"
    )
    """SentencePiece: the .model file. HuggingFaceTokenizer: a directory, a tokenizer.json, a GGUF
    file, or a name on the hub. TikTokenizer: a JSON file of ranks. Llama3Tokenizer: Meta's
    tokenizer.model.
    """
    special_tokens: list[str] | None = flag(
        None, "--tokenizer-special-tokens", "--tiktoken-special-tokens"
    )
    """Tokens to add if the tokenizer does not have them, for HuggingFaceTokenizer,
    GPT2BPETokenizer and, with --legacy-tokenizer, SentencePieceTokenizer. TikTokenizer: its first
    tokens, which must include <unk>, <s> and </s>.
    """
    legacy_tokenizer: bool = flag(False)
    """Use SentencePieceTokenizer as in Megatron-LM before 0.16: <CLS>, <SEP>, <EOD> and <MASK> are
    added to the pieces of the model and recognized in text, and EOD is <EOD>.
    """
    tiktoken_pattern: str | None = flag(None, choices=("v1", "v2"))
    """TikTokenizer: which of Megatron-LM's two patterns splits text into words. Default: v2."""
    tiktoken_num_special_tokens: int = flag(1000, positive=True)
    """TikTokenizer: number of ids before the ranks. Ids without a name in
    --tokenizer-special-tokens are called <SPECIAL_n>.
    """
    trust_remote_code: bool = flag(False)
    """Run Python code that is part of a Hugging Face tokenizer's directory. Never taken from a
    checkpoint.
    """
    vocab_file: str | None = flag(None)
    """GPT2BPETokenizer: the vocab.json file."""
    merge_file: str | None = flag(None)
    """GPT2BPETokenizer: the merges.txt file."""
    vocab_size: int | None = flag(None)
    """Number of tokens of the model. Default: the tokenizer's. With NullTokenizer, n means n + 1
    tokens, EOD = n. TikTokenizer: number of tokens to read from its file, special ones included
    (default: 131072).
    """
    null_tokenizer_eod_id: int | None = flag(None)
    """NullTokenizer: id of the end-of-document token, one of the n tokens of --vocab-size n, as in
    Megatron-LM since 0.19.
    """
    make_vocab_size_divisible_by: int = flag(128, positive=True)
    """Pad the embedding to a multiple of this times the tensor-parallel size. Padding never changes
    the loss.
    """

    @property
    def kind(self) -> str:
        """The type; the default is that of Megatron-LM's pretrain_gpt.py."""
        return self.tokenizer_type or "GPT2BPETokenizer"


# ---- Tokenizers ----


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer, independent of the library that implements it.

    `tokenize` adds no special tokens: tools/preprocess_data.py appends `eod` to documents.
    """

    vocab_size: int
    """All ids are less than this."""
    eod: int
    """Id of the end-of-document token."""
    pad: int | None
    """Id of the padding token; None if there is none."""
    tokenize: Callable[[str], list[int]]
    detokenize: Callable[[Sequence[int]], str]
    token_id: Callable[[str], int | None]
    """Return the id of a token by its name, or None if the tokenizer does not have it."""
    config: TokenizerConfig

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process reads the files itself: most libraries' objects cannot be pickled.
        return build_tokenizer, (self.config,)


def build_null_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Build a tokenizer of text that consists of decimal ids separated by spaces.

    `--vocab-size n` means n + 1 tokens, the last of them EOD. With --null-tokenizer-eod-id there
    are n tokens, and EOD is one of them.
    """
    num_ids = config.vocab_size
    eod = config.null_tokenizer_eod_id
    if num_ids is None or num_ids < 1:
        raise ValueError(
            f"--tokenizer-type NullTokenizer requires a positive --vocab-size, got {num_ids}"
        )
    if eod is not None and not 0 <= eod < num_ids:
        raise ValueError(
            f"--null-tokenizer-eod-id {eod} is not one of the {num_ids} tokens of --vocab-size"
        )
    # Without an EOD of its own the tokenizer adds one after the given tokens.
    vocab_size = num_ids + 1 if eod is None else num_ids

    def tokenize(text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError:
            raise ValueError(
                f"NullTokenizer reads decimal ids separated by spaces, not {text[:80]!r}"
            ) from None
        for token in ids:
            if not 0 <= token < vocab_size:
                raise ValueError(f"id {token} is not in 0..{vocab_size - 1}: raise --vocab-size")
        return ids

    def token_id(token: str) -> int | None:
        if token.isdecimal() and int(token) < vocab_size:
            return int(token)
        return None

    return Tokenizer(
        vocab_size,
        eod=vocab_size - 1 if eod is None else eod,
        pad=None,
        tokenize=tokenize,
        detokenize=lambda ids: " ".join(map(str, ids)),
        token_id=token_id,
        config=config,
    )


# Imported for the --tokenizer-type that is given.
TOKENIZERS = {
    "SentencePieceTokenizer": "megatron.training.data.tokenizer_libraries:build_sentencepiece",
    "GPTSentencePieceTokenizer": "megatron.training.data.tokenizer_libraries:build_sentencepiece",
    "Llama2Tokenizer": "megatron.training.data.tokenizer_libraries:build_sentencepiece",
    "Llama3Tokenizer": "megatron.training.data.tokenizer_libraries:build_llama3",
    "HuggingFaceTokenizer": "megatron.training.data.tokenizer_libraries:build_huggingface",
    # In DeepSpeed's forks
    "PretrainedFromHF": "megatron.training.data.tokenizer_libraries:build_huggingface",
    # In BigCode's fork
    "TokenizerFromFile": "megatron.training.data.tokenizer_libraries:build_huggingface",
    "GPT2BPETokenizer": "megatron.training.data.tokenizer_libraries:build_gpt2",
    "TikTokenizer": "megatron.training.data.tokenizer_libraries:build_megatron_tiktoken",
    "NullTokenizer": "megatron.training.data.tokenizer:build_null_tokenizer",
}
assert tuple(TOKENIZERS) == TOKENIZER_TYPES


def build_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Build the tokenizer that the flags select. Raises ValueError if a flag or file is missing."""
    if config.tokenizer_type is None and config.vocab_file is None and config.merge_file is None:
        raise ValueError(
            "no tokenizer: give --tokenizer-type, or --vocab-file and --merge-file for "
            "GPT2BPETokenizer"
        )
    tokenizer: Tokenizer = resolve(TOKENIZERS[config.kind])(config)
    return tokenizer

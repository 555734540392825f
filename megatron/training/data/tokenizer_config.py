"""Flags that select a tokenizer.

This module does not import torch, because tools parse these flags before they import it.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.flags import FlagSection, flag

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
    """SentencePiece: the .model file. HuggingFaceTokenizer: a directory, a tokenizer.json, or a
    name on the hub. TikTokenizer: a JSON file of ranks. Llama3Tokenizer: Meta's tokenizer.model.
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

"""Fill in the middle (Bavarian et al. 2022): documents are cut at two places, and the middle moves to the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from megatron.core.datasets.config import GPTDatasetConfig


class TextTokenizer(Protocol):
    """The part of a tokenizer that is used here."""

    @property
    def tokenize(self) -> Callable[[str], list[int]]: ...

    @property
    def detokenize(self) -> Callable[[Sequence[int]], str]: ...

    @property
    def token_id(self) -> Callable[[str], int | None]: ...


class FillInTheMiddle:
    """A row of tokens to one of the same length in which a share --fim-rate of the documents is reordered.

        PSM   <prefix> prefix <suffix> suffix <middle> middle
        SPM   <prefix> <suffix> suffix <middle> prefix middle      with --fim-spm-rate

    Documents are cut between characters, so the tokens at a cut differ from those of the whole text. The draws and
    their order are Megatron-LM's. Its generator runs from sample to sample; ours comes with every row, so that a sample
    does not depend on those read before it.
    """

    def __init__(self, config: GPTDatasetConfig, tokenizer: TextTokenizer) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.prefix = self._token("--fim-prefix-token", config.fim_prefix_token)
        self.middle = self._token("--fim-middle-token", config.fim_middle_token)
        self.suffix = self._token("--fim-suffix-token", config.fim_suffix_token)
        self.pad = self._token("--fim-pad-token", config.fim_pad_token)
        self.eod = self._token("--fim-eod-token", config.fim_eod_token)
        self._special = [self.prefix, self.middle, self.suffix, self.pad, self.eod]
        self.fragment_end: int | None = None
        if config.fim_split_sample is not None:
            self.fragment_end = self._token("--fim-split-sample", config.fim_split_sample)
            self._special.append(self.fragment_end)
        self._begins = len(tokenizer.tokenize(""))  # tokens that every text begins with, such as BOS

    def _token(self, flag_name: str, token: str) -> int:
        found = self.tokenizer.token_id(token)
        if found is None:
            raise ValueError(
                f"{flag_name} {token}: the tokenizer has no such token; name one that it has, or add this one "
                "(--tokenizer-special-tokens)"
            )
        return found

    def __call__(self, text: np.ndarray, random: np.random.RandomState) -> np.ndarray:
        documents = _between(text, self.eod, lambda document: self._document(document, random))
        reordered = np.concatenate(list(documents))[: len(text)]
        return np.append(reordered, np.full(len(text) - len(reordered), self.pad))

    def _document(self, document: np.ndarray, random: np.random.RandomState) -> np.ndarray:
        """Each fragment by itself where --fim-split-sample cuts the document (files of a repository)."""
        rate = self.config.fim_rate
        if self.fragment_end is None or self.fragment_end not in document:
            return self._reordered(document, rate, random)
        if not random.binomial(1, rate):
            return document
        fragment_rate = self.config.fim_fragment_rate
        assert fragment_rate is not None
        fragments = _between(
            document, self.fragment_end, lambda fragment: self._reordered(fragment, fragment_rate, random)
        )
        return np.concatenate(list(fragments))

    def _reordered(self, piece: np.ndarray, rate: float, random: np.random.RandomState) -> np.ndarray:
        if not random.binomial(1, rate):
            return piece
        text = self.tokenizer.detokenize(piece[~np.isin(piece, self._special)].tolist())
        if self.config.fim_no_prefix is not None and text.startswith(self.config.fim_no_prefix):
            return piece
        first, second = sorted(random.randint(0, len(text) + 1, size=2))
        prefix, middle, suffix = map(self._tokens, (text[:first], text[first:second], text[second:]))
        if random.binomial(1, self.config.fim_spm_rate):
            ids = [self.prefix, self.suffix, *suffix, self.middle, *prefix, *middle]
        else:
            ids = [self.prefix, *prefix, self.suffix, *suffix, self.middle, *middle]
        return np.array(ids, dtype=np.int64)

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer.tokenize(text)[self._begins :]


def _between(
    tokens: np.ndarray, separator: int, change: Callable[[np.ndarray], np.ndarray]
) -> Iterator[np.ndarray | list[int]]:
    """The pieces between separators, changed, each with its separator; empty ones vanish, but for the last."""
    start = 0
    for place in np.flatnonzero(tokens == separator).tolist():
        if place > start:
            yield change(tokens[start:place])
            yield [separator]
        start = place + 1
    yield change(tokens[start:])

"""Fill-in-the-middle: reordering of documents (Bavarian et al. 2022)."""

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
    """Reorders a share --fim-rate of the documents in a row of tokens, whose length is unchanged.

        PSM   <prefix> prefix <suffix> suffix <middle> middle
        SPM   <prefix> <suffix> suffix <middle> prefix middle      (a share --fim-spm-rate of these)

    Documents are cut between characters, so the tokens at a cut differ from those of the whole
    text. The random draws and their order are Megatron-LM's. There, one generator serves all
    samples in turn; here each row has its own, so that a sample does not depend on those read
    before it.
    """

    def __init__(self, config: GPTDatasetConfig, tokenizer: TextTokenizer) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.prefix = self._find_token("--fim-prefix-token", config.fim_prefix_token)
        self.middle = self._find_token("--fim-middle-token", config.fim_middle_token)
        self.suffix = self._find_token("--fim-suffix-token", config.fim_suffix_token)
        self.pad = self._find_token("--fim-pad-token", config.fim_pad_token)
        self.eod = self._find_token("--fim-eod-token", config.fim_eod_token)
        self._special = [self.prefix, self.middle, self.suffix, self.pad, self.eod]
        self.fragment_end: int | None = None
        if config.fim_split_sample is not None:
            self.fragment_end = self._find_token("--fim-split-sample", config.fim_split_sample)
            self._special.append(self.fragment_end)
        # Number of tokens at the beginning of any text, e.g. BOS.
        self._num_leading_tokens = len(tokenizer.tokenize(""))

    def _find_token(self, flag_name: str, token: str) -> int:
        token_id = self.tokenizer.token_id(token)
        if token_id is None:
            raise ValueError(
                f"{flag_name} {token}: the tokenizer has no such token; name an existing token, or "
                "add this one (--tokenizer-special-tokens)"
            )
        return token_id

    def __call__(self, text: np.ndarray, random: np.random.RandomState) -> np.ndarray:
        """Return the tokens with reordered documents, cut or padded to the same length."""
        segments = _map_between(
            text, self.eod, lambda document: self._reorder_document(document, random)
        )
        length = len(text)
        # Special tokens make a row longer, and tokenizing parts may make it shorter.
        reordered = np.concatenate(list(segments))[:length]
        padding = np.full(length - len(reordered), self.pad)
        return np.append(reordered, padding)

    def _reorder_document(self, document: np.ndarray, random: np.random.RandomState) -> np.ndarray:
        """Reorder a document, or each fragment of it if --fim-split-sample occurs in it.

        Fragments are, for example, the files of a repository.
        """
        rate = self.config.fim_rate
        if self.fragment_end is None or self.fragment_end not in document:
            return self._reorder(document, rate, random)
        if not random.binomial(1, rate):
            return document
        fragment_rate = self.config.fim_fragment_rate
        assert fragment_rate is not None
        segments = _map_between(
            document,
            self.fragment_end,
            lambda fragment: self._reorder(fragment, fragment_rate, random),
        )
        return np.concatenate(list(segments))

    def _reorder(
        self, segment: np.ndarray, rate: float, random: np.random.RandomState
    ) -> np.ndarray:
        """Reorder one piece of text with probability `rate`."""
        if not random.binomial(1, rate):
            return segment
        # Special tokens have no text.
        is_text = ~np.isin(segment, self._special)
        text = self.tokenizer.detokenize(segment[is_text].tolist())
        excluded_prefix = self.config.fim_no_prefix
        if excluded_prefix is not None and text.startswith(excluded_prefix):
            return segment

        # Cut the text at two random positions.
        # Both cuts may be at either end, so that parts may be empty.
        first, second = sorted(random.randint(0, len(text) + 1, size=2))
        prefix = self._tokenize(text[:first])
        middle = self._tokenize(text[first:second])
        suffix = self._tokenize(text[second:])
        if random.binomial(1, self.config.fim_spm_rate):
            ids = [self.prefix, self.suffix, *suffix, self.middle, *prefix, *middle]
        else:
            ids = [self.prefix, *prefix, self.suffix, *suffix, self.middle, *middle]
        return np.array(ids, dtype=np.int64)

    def _tokenize(self, text: str) -> list[int]:
        """Return the tokens of a part of a text, without those at the beginning of any text."""
        tokens = self.tokenizer.tokenize(text)
        return tokens[self._num_leading_tokens :]


def _map_between(
    tokens: np.ndarray, separator: int, function: Callable[[np.ndarray], np.ndarray]
) -> Iterator[np.ndarray | list[int]]:
    """Yield `function` of each piece between separators, each followed by its separator.

    Empty pieces are dropped together with their separator, except for the last piece.
    """
    start = 0
    for position in np.flatnonzero(tokens == separator).tolist():
        if position > start:
            yield function(tokens[start:position])
            yield [separator]
        start = position + 1
    yield function(tokens[start:])

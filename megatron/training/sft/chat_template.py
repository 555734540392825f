"""Token ids of an example, and which of them are trained on, via the tokenizer's chat template."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.core.terminal import format_error
from megatron.training.data.documents import BadLine, Chunk
from megatron.training.sft.examples import (
    Conversation,
    Example,
    Message,
    TextPair,
    parse_example,
    parse_preference,
)

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Span = tuple[int, int]  # half-open range of characters


@dataclass(frozen=True)
class EncodedExamples:
    """The concatenated examples of a chunk.

    An example has two lengths: the tokens before the first one that is trained on, and the others.
    Tokens that are not trained on are stored as their complement (`~token`), a negative number.
    """

    tokens: np.ndarray  # int32
    lengths: list[int]


class ExampleEncoder:
    """Function from a chunk of records to tokens and loss masks; runs in worker processes.

    `tokenizer` is one of transformers, `train_on` the value of --sft-train-on, and `exclude` that
    of --sft-exclude. With `reads_pairs` (--dpo) a record is two examples.
    """

    def __init__(
        self,
        tokenizer: Any,
        train_on: str,
        exclude: Sequence[str] = (),
        reads_pairs: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.reads_pairs = reads_pairs
        self.train_on = train_on
        if len(exclude) % 2:
            raise ValueError(
                f"--sft-exclude has {len(exclude)} strings: give pairs, the text that an excluded "
                "range begins with and the text that it ends with"
            )
        self.exclude = tuple(zip(exclude[::2], exclude[1::2], strict=True))
        if not tokenizer.is_fast:
            raise ValueError(
                f"--sft: {type(tokenizer).__name__} does not report the characters of a token, "
                "which loss masks are made of: use a tokenizer with a tokenizer.json"
            )
        self.template: str | None = None
        if tokenizer.chat_template is not None:
            self.template = tokenizer.get_chat_template()
        self.has_markers = _GENERATION.search(self.template or "") is not None

    def __call__(self, chunk: Chunk) -> EncodedExamples:
        """Return the examples of a chunk.

        Raises ValueError with file, line, reason and fix for the first bad example.
        """
        rows = []
        lengths: list[int] = []
        for line_number, content in chunk.documents:
            try:
                encoded = [self.encode(example) for example in self._parse(content)]
            except ValueError as error:
                bad_line = BadLine(chunk.path, line_number, format_error(error))
                raise ValueError(str(bad_line)) from None
            for ids, is_trained in encoded:
                num_context = int(is_trained.argmax())
                lengths += [num_context, len(ids) - num_context]
                rows.append(np.where(is_trained, ids, ~ids))
        return EncodedExamples(np.concatenate(rows), lengths)

    def _parse(self, content: bytes) -> tuple[Example, ...]:
        """Return the examples of a record."""
        if self.reads_pairs:
            return parse_preference(content)
        return (parse_example(content),)

    def encode(self, example: Example) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids (int32 [length]) and whether each is trained on (bool [length])."""
        if isinstance(example, TextPair):
            ids, is_trained = self._encode_text(example)
        elif self.has_markers and example.num_context is None and self.train_on != "all":
            ids, is_trained = self._encode_marked(example)
        else:
            ids, is_trained = self._encode_by_prefixes(example)
        if self.train_on == "all":
            is_trained[:] = True
        elif self.train_on == "last":
            _keep_last_run(is_trained)
        if self.exclude:
            self._exclude(example, is_trained)
        is_trained[:1] = False  # no position predicts the first token
        if not is_trained.any():
            raise ValueError(
                f"no token is trained on with --sft-train-on {self.train_on}: the example needs an "
                "assistant message or a completion that is not empty and not excluded; add one, "
                "or remove the example"
            )
        return ids, is_trained

    def _exclude(self, example: Example, is_trained: np.ndarray) -> None:
        """Clear the tokens of all text that --sft-exclude specifies."""
        if isinstance(example, TextPair):
            text = self._join(example)
        else:
            text = self._apply_template(example, example.messages)
        _, offsets = self._tokenize(text, add_special_tokens=isinstance(example, TextPair))
        for start, end in _find_excluded(text, self.exclude):
            is_trained[_overlaps(offsets, start, end)] = False

    def _join(self, pair: TextPair) -> str:
        """Return prompt and completion as one text, which ends with EOS."""
        text = pair.prompt + pair.completion
        eos: str = self.tokenizer.eos_token
        return text if text.endswith(eos) else text + eos

    def _encode_text(self, pair: TextPair) -> tuple[np.ndarray, np.ndarray]:
        """Encode plain text, which ends with EOS; the completion is trained on."""
        ids, offsets = self._tokenize(self._join(pair), add_special_tokens=True)
        return ids, _mark_suffix(offsets, len(pair.prompt))

    def _encode_marked(self, conversation: Conversation) -> tuple[np.ndarray, np.ndarray]:
        """Train on the text between {% generation %} and {% endgeneration %}."""
        encoded = self._apply_template(
            conversation, conversation.messages, tokenize=True, return_assistant_tokens_mask=True
        )
        ids = np.array(encoded["input_ids"], dtype=np.int32)
        return ids, np.array(encoded["assistant_masks"], dtype=np.bool_)

    def _encode_by_prefixes(self, conversation: Conversation) -> tuple[np.ndarray, np.ndarray]:
        """Train on the text of assistant messages, without their headers.

        A message is the difference between the rendered text with it and without it.
        """
        text: str = self._apply_template(conversation, conversation.messages)
        ids, offsets = self._tokenize(text, add_special_tokens=False)
        if self.train_on == "all":
            return ids, np.ones(len(ids), dtype=np.bool_)
        if conversation.num_context is not None:
            start = self._measure_prefix(conversation, conversation.num_context, text, True)
            return ids, _mark_suffix(offsets, start)

        turns = []
        for index, message in enumerate(conversation.messages):
            if message["role"] == "assistant":
                turns.append(index)
        if self.train_on == "last":
            turns = turns[-1:]
        is_trained = np.zeros(len(ids), dtype=np.bool_)
        for index in turns:
            start = self._measure_prefix(conversation, index, text, True)
            end = self._measure_prefix(conversation, index + 1, text, False)
            is_trained |= _overlaps(offsets, start, end)
        return ids, is_trained

    def _measure_prefix(
        self, conversation: Conversation, num_messages: int, text: str, is_prompt: bool
    ) -> int:
        """Return the number of characters of the first messages in the rendering `text` of all.

        With `is_prompt` they include the header of the next, assistant message.
        """
        if num_messages == 0:
            return 0
        if num_messages == len(conversation.messages):
            return len(text)
        messages = conversation.messages[:num_messages]
        prefix: str = self._apply_template(conversation, messages, add_generation_prompt=is_prompt)
        if not text.startswith(prefix):
            common = len(os.path.commonprefix([text, prefix]))  # of strings, not of paths
            raise ValueError(
                f"the chat template renders the first {num_messages} messages differently when "
                f"others follow: {prefix[common : common + 40]!r} becomes "
                f"{text[common : common + 40]!r} at character {common}, so the trained text is "
                "unknown. Mark it with {% generation %} and {% endgeneration %} in the template "
                "(TRL has such templates, *_training.jinja), or use --sft-train-on last or all"
            )
        return len(prefix)

    def _apply_template(
        self, conversation: Conversation, messages: list[Message], **options: Any
    ) -> Any:
        """Return the rendered text, or what `options` request. Raises ValueError if it fails."""
        if self.template is None:
            raise ValueError(
                f"the tokenizer {self.tokenizer.name_or_path} has no chat template, which messages "
                "need: put a chat_template.jinja into its directory, or use prompt and completion "
                "as strings"
            )
        options = {"tokenize": False, "return_dict": True} | options
        try:
            return self.tokenizer.apply_chat_template(messages, tools=conversation.tools, **options)
        except Exception as error:  # jinja2 and the template raise many types
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(
                f"the chat template fails for the roles {roles}: {type(error).__name__}: {error}; "
                "change the example or the template"
            ) from None

    def _tokenize(self, text: str, add_special_tokens: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return ids (int32 [length]) and the characters of each token, int64 [length, 2]."""
        encoded = self.tokenizer(
            text, add_special_tokens=add_special_tokens, return_offsets_mapping=True
        )
        ids = np.array(encoded["input_ids"], dtype=np.int32)
        return ids, np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)


def _find_excluded(text: str, pairs: Iterable[tuple[str, str]]) -> Iterator[Span]:
    """Yield the characters of each shortest range that begins and ends with the texts of a pair."""
    for first, last in pairs:
        previous_end = 0
        end = text.find(last)
        while end >= 0:
            start = text.rfind(first, previous_end, end)
            previous_end = end + len(last)
            if start >= 0:
                yield start, previous_end
            end = text.find(last, previous_end)


def _overlaps(offsets: np.ndarray, start: int, end: int) -> np.ndarray:
    """Return whether each token contains characters of the range from `start` to `end`."""
    return (offsets[:, 1] > start) & (offsets[:, 0] < end)


def _mark_suffix(offsets: np.ndarray, start: int) -> np.ndarray:
    """Return a mask of all tokens from the first one that contains a character after `start`."""
    return np.maximum.accumulate(offsets[:, 1] > start)


def _keep_last_run(mask: np.ndarray) -> None:
    """Clear all but the last run of ones."""
    positions = np.flatnonzero(mask)
    gaps = np.flatnonzero(np.diff(positions) > 1)
    if len(gaps):
        mask[: positions[gaps[-1]] + 1] = False

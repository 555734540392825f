"""Conversion of text to token files, for tools/preprocess_data.py."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping

from megatron.core.datasets import token_dtype
from megatron.core.datasets.indexed_dataset_builder import IndexedDatasetBuilder
from megatron.core.progress import ProgressBar
from megatron.core.terminal import print_line
from megatron.training.data.document_encoder import DocumentEncoder, WorkerLimits, encode_chunks
from megatron.training.data.documents import (
    BadLine,
    Chunk,
    check_bad_lines,
    count_bytes,
    find_files,
    read_chunks,
)
from megatron.training.data.preprocess_config import PreprocessConfig
from megatron.training.data.tokenizer import TokenizerConfig, build_tokenizer

MAX_BAD_LINES_PRINTED = 10


class EncodingProgress:
    """Display of progress: a bar on a terminal, else a line every `log_interval` documents."""

    def __init__(self, bar: ProgressBar, log_interval: int) -> None:
        self.num_documents = 0
        self._bar = bar
        self._log_interval = log_interval
        self._start = time.perf_counter()

    def add(self, num_documents: int, num_bytes: int) -> None:
        """Count documents of the input and their bytes."""
        self._bar.add(num_bytes)
        intervals_before = self.num_documents // self._log_interval
        self.num_documents += num_documents
        intervals = self.num_documents // self._log_interval
        if intervals > intervals_before and self._bar.quiet:
            self.print()

    def print(self) -> None:
        """Print the number of documents so far and their rate."""
        seconds = max(time.perf_counter() - self._start, 1e-9)
        rate = self.num_documents / seconds
        message = f"{self.num_documents} documents, {rate:.1f} docs/s; {self._bar}"
        print_line(message, file=sys.stderr)


def preprocess(config: PreprocessConfig, tokenizer_config: TokenizerConfig) -> None:
    """Read documents, tokenize them in parallel, and write the token files.

    Raises ValueError if there are more bad lines than allowed, or no tokens.
    """
    # Find the input, and build the encoder.
    assert config.input is not None and config.output_prefix is not None
    paths = find_files(config.input)
    tokenizer = build_tokenizer(tokenizer_config)
    # The worker processes use all cores: threads of the tokenizer would compete with them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    limits = WorkerLimits(config.num_workers, config.document_cpu_seconds)
    encoder = DocumentEncoder(tokenizer, config.keys, config.append_eod, limits)

    prefixes = {key: f"{config.output_prefix}_{key}_document" for key in config.keys}
    dtype = token_dtype(tokenizer.vocab_size)
    bad_lines: list[BadLine] = []
    with contextlib.ExitStack() as stack:
        # Open the outputs; an exception discards their files.
        builders = {}
        for key, prefix in prefixes.items():
            builder = IndexedDatasetBuilder(prefix, dtype)
            builders[key] = stack.enter_context(builder)
        bar = ProgressBar("tokenizing", count_bytes(paths), quiet=not sys.stderr.isatty())
        progress = EncodingProgress(stack.enter_context(bar), config.log_interval)

        # Start the workers; closing the generator stops them.
        chunks = _read_all_chunks(paths, config)
        encoded_chunks = encode_chunks(chunks, encoder, config.num_workers)
        stack.enter_context(contextlib.closing(encoded_chunks))

        # Write tokens in the order of the input.
        for chunk, encoded in encoded_chunks:
            bad_lines += encoded.bad_lines
            check_bad_lines(bad_lines, config.skip_bad_lines)
            for key, tokens in encoded.tokens.items():
                builders[key].add(*tokens)
            progress.add(encoded.num_documents, chunk.num_bytes)
        check_outputs(builders, len(paths))

    # Report.
    progress.print()
    print_bad_lines(bad_lines)
    # Documents without tokens are good, too.
    num_good = progress.num_documents - len(bad_lines)
    for key, builder in builders.items():
        print_output(prefixes[key], builder, num_good)


def _read_all_chunks(paths: list[str], config: PreprocessConfig) -> Iterator[Chunk]:
    """Yield the documents of all files in chunks."""
    max_bytes = int(config.max_document_mb * 1e6)
    for path in paths:
        is_json = config.is_json(path)
        yield from read_chunks(path, is_json, config.text_documents, max_bytes, config.keys)


def check_outputs(builders: Mapping[str, IndexedDatasetBuilder], num_files: int) -> None:
    """Raise ValueError if the output of a key is empty; `num_files` is that of the input."""
    for key, builder in builders.items():
        if builder.num_documents == 0:
            raise ValueError(
                f"no document of {num_files} files has any token of {key!r}: no files are written"
            )


def print_output(prefix: str, builder: IndexedDatasetBuilder, num_documents: int) -> None:
    """Report the documents and tokens that were written, of `num_documents` in the input."""
    documents = f"{builder.num_documents} documents"
    num_empty = num_documents - builder.num_documents
    if num_empty:
        documents += f" ({num_empty} empty ones left out)"
    print_line(f"{prefix}: {documents}, {builder.num_tokens} tokens", file=sys.stderr)


def print_bad_lines(bad_lines: list[BadLine]) -> None:
    """Report the lines that were skipped: their number, and the first ones."""
    if not bad_lines:
        return
    print_line(f"{len(bad_lines)} bad lines skipped:", file=sys.stderr)
    for bad in bad_lines[:MAX_BAD_LINES_PRINTED]:
        print_line(f"  {bad}", file=sys.stderr)
    num_others = len(bad_lines) - MAX_BAD_LINES_PRINTED
    if num_others > 0:
        print_line(f"  and {num_others} more", file=sys.stderr)

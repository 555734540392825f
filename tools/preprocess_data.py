"""Convert text to the .bin/.idx token files that training reads.

    python tools/preprocess_data.py --input corpus/*.jsonl --output-prefix data/corpus --append-eod
        --workers 8 --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model

Inputs are read in the given order: JSON lines (.jsonl, .ndjson, .json: one object per line) or
plain text (any other name), optionally compressed (.gz). Documents keep the order of the input for
any number of workers. The output `<prefix>_<key>_document.bin/.idx` appears when it is complete: an
interrupted run leaves no files.

A line that cannot be tokenized is an error that names the file and the line; --skip-bad-lines N
leaves out up to N of them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.datasets import IndexedDatasetBuilder, token_dtype
from megatron.core.flags import FlagSection, flag
from megatron.core.progress import ProgressBar
from megatron.core.terminal import format_error, print_line
from megatron.training.config.arguments import FlagParser, build, parse_flags
from megatron.training.data.documents import (
    BadLine,
    Chunk,
    count_bytes,
    find_files,
    is_json_file,
    read_chunks,
)
from megatron.training.data.tokenizer import TokenizerConfig, build_tokenizer

MAX_BAD_LINES_PRINTED = 10


@dataclass
class PreprocessConfig(FlagSection):
    """Input, its documents, and output."""

    input: list[str] | None = flag(None)
    """Files or patterns ('corpus/**/*.txt', in quotes), read in this order; the files that match a
    pattern are sorted.
    """
    output_prefix: str | None = flag(None)
    """Prefix of the output files <prefix>_<key>_document.bin and .idx."""
    input_format: str = flag("auto", choices=("auto", "jsonl", "text"))
    """auto: .jsonl, .ndjson and .json (also .gz) contain one JSON object per line, other files
    plain text.
    """
    json_keys: list[str] | None = flag(None)
    """Fields of the JSON objects, each written to its own files. A field is a string, or a list of
    strings that is one document of several sequences. Default: text.
    """
    text_documents: str = flag("file", choices=("file", "block", "line"))
    """Documents of plain text: each file, each block of lines between blank lines, or each line."""
    append_eod: bool = flag(False)
    """Append the end-of-document token to every document."""
    workers: int | None = flag(None, positive=True)
    """Number of processes that tokenize. Default: one per core."""
    skip_bad_lines: int = flag(0, at_least=0)
    """Skip up to N lines that cannot be tokenized, and report them, instead of stopping at the
    first one.
    """
    max_document_mb: float = flag(256.0, positive=True)
    """Size of a document, in MB, above which it is a bad line."""
    document_cpu_seconds: float = flag(60.0, positive=True)
    """Processor time for a small document, in seconds, after which it is a bad line; large
    documents get more.
    """
    log_interval: int = flag(1000, positive=True)
    """Number of documents between progress lines, if the output is not a terminal."""

    def find_problems(self) -> Iterator[str]:
        if not self.input or self.output_prefix is None:
            yield "--input and --output-prefix are required (--help lists all flags)"

    @property
    def num_workers(self) -> int:
        return self.workers or os.cpu_count() or 1

    @property
    def keys(self) -> list[str]:
        return self.json_keys or ["text"]

    def is_json(self, path: str) -> bool:
        """Return whether a file contains JSON lines."""
        if self.input_format == "auto":
            return is_json_file(path)
        return self.input_format == "jsonl"


class Progress:
    """Display of the progress: a bar on a terminal, otherwise a line every `log_interval`
    documents.
    """

    def __init__(self, bar: ProgressBar, log_interval: int) -> None:
        self.num_documents = 0
        self._bar = bar
        self._log_interval = log_interval
        self._start = time.perf_counter()

    def add(self, num_documents: int, num_bytes: int) -> None:
        self._bar.add(num_bytes)
        before = self.num_documents // self._log_interval
        self.num_documents += num_documents
        is_due = self.num_documents // self._log_interval > before
        if is_due and self._bar.quiet:
            self.print()

    def print(self) -> None:
        seconds = max(time.perf_counter() - self._start, 1e-9)
        rate = self.num_documents / seconds
        line = f"{self.num_documents} documents, {rate:.1f} docs/s; {self._bar}"
        print_line(line, file=sys.stderr)


def main(argv: list[str] | None = None) -> None:
    sections = {"Text and documents": PreprocessConfig, "Tokenizer": TokenizerConfig}
    try:
        given, _ = parse_flags(FlagParser(sections), sys.argv[1:] if argv is None else argv)
        preprocess(build(PreprocessConfig, given), build(TokenizerConfig, given))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {format_error(error)}")
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        sys.exit("error: a worker process was killed (out of memory?): try fewer --workers")
    except KeyboardInterrupt:
        sys.exit("interrupted: no files are written")


def preprocess(config: PreprocessConfig, tokenizer_config: TokenizerConfig) -> None:
    """Read documents, tokenize them in parallel, and write the token files."""
    # Imported after the flags are parsed: it imports torch, which takes seconds.
    from megatron.training.data.document_encoder import DocumentEncoder, WorkerLimits, encode_chunks

    assert config.input is not None and config.output_prefix is not None
    paths = find_files(config.input)
    tokenizer = build_tokenizer(tokenizer_config)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the worker processes are the parallelism

    limits = WorkerLimits(config.num_workers, config.document_cpu_seconds)
    encoder = DocumentEncoder(tokenizer, config.keys, config.append_eod, limits)
    chunks = _read_all_chunks(paths, config)
    prefixes = {key: f"{config.output_prefix}_{key}_document" for key in config.keys}
    bad_lines: list[BadLine] = []
    with contextlib.ExitStack() as stack:
        # Open the outputs; an exception discards their files.
        builders = {}
        for key, prefix in prefixes.items():
            builder = IndexedDatasetBuilder(prefix, token_dtype(tokenizer.vocab_size))
            builders[key] = stack.enter_context(builder)
        bar = ProgressBar("tokenizing", count_bytes(paths), quiet=not sys.stderr.isatty())
        progress = Progress(stack.enter_context(bar), config.log_interval)
        encoded_chunks = stack.enter_context(
            contextlib.closing(encode_chunks(chunks, encoder, config.num_workers))
        )

        # Write tokens in the order of the input.
        for chunk, encoded in encoded_chunks:
            bad_lines += encoded.bad_lines
            check_bad_lines(bad_lines, config.skip_bad_lines)
            for key, tokens in encoded.tokens.items():
                builders[key].add(*tokens)
            progress.add(encoded.num_documents, chunk.num_bytes)
        for key, builder in builders.items():
            if builder.num_documents == 0:
                raise ValueError(
                    f"no document of {len(paths)} files has any token of {key!r}: no files are "
                    "written"
                )

    progress.print()
    print_bad_lines(bad_lines)
    for key, builder in builders.items():
        documents = f"{builder.num_documents} documents"
        num_empty = progress.num_documents - len(bad_lines) - builder.num_documents
        if num_empty:
            documents += f" ({num_empty} empty ones left out)"
        print_line(
            f"{prefixes[key]}: {documents}, {builder.num_tokens} tokens",
            file=sys.stderr,
        )


def _read_all_chunks(paths: list[str], config: PreprocessConfig) -> Iterator[Chunk]:
    max_bytes = int(config.max_document_mb * 1e6)
    for path in paths:
        yield from read_chunks(path, config.is_json(path), config.text_documents, max_bytes)


def check_bad_lines(bad_lines: list[BadLine], limit: int) -> None:
    """Raise ValueError with the first line above the number to skip."""
    if len(bad_lines) <= limit:
        return
    hint = ""
    if limit > 0:
        hint = f" (bad line {limit + 1}; --skip-bad-lines {limit} allows {limit})"
    raise ValueError(f"{bad_lines[limit]}{hint}")


def print_bad_lines(bad_lines: list[BadLine]) -> None:
    """Report the lines that were skipped: their number, and the first ones."""
    if not bad_lines:
        return
    print_line(f"{len(bad_lines)} bad lines skipped:", file=sys.stderr)
    for bad in bad_lines[:MAX_BAD_LINES_PRINTED]:
        print_line(f"  {bad}", file=sys.stderr)
    if len(bad_lines) > MAX_BAD_LINES_PRINTED:
        print_line(f"  and {len(bad_lines) - MAX_BAD_LINES_PRINTED} more", file=sys.stderr)


if __name__ == "__main__":
    # Unwind on SIGTERM: discard the files, end the workers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    main()

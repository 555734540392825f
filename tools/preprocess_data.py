"""Turn text into the .bin/.idx token files that training reads.

    python tools/preprocess_data.py --input corpus/*.jsonl --output-prefix data/corpus --append-eod --workers 8
        --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model

Inputs, in the order given: JSON lines (.jsonl, .ndjson, .json: one object a line) or plain text
(anything else), each also compressed (.gz). Documents keep the order of the input whatever the
number of workers. The output `<prefix>_<key>_document.bin/.idx` appears when everything is written:
an interrupted run leaves none.
"""

from __future__ import annotations

import contextlib
import glob
import gzip
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from megatron.core.datasets import IndexedDatasetBuilder, token_dtype
from megatron.core.datasets.ordered_workers import OrderedWorkers
from megatron.core.flags import flag
from megatron.core.progress import ProgressBar
from megatron.training.config.arguments import FlagParser, build, parse_flags
from megatron.training.data.tokenizer import Tokenizer, TokenizerConfig, build_tokenizer

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
CHUNK_BYTES = 1 << 18  # text that travels to a worker at a time
CHUNKS_AHEAD = 4  # per worker: bounds the memory and keeps all workers busy


@dataclass
class PreprocessConfig:
    """What to read, how to cut it into documents, and where to write the tokens."""

    input: list[str] | None = flag(None)
    """Files or patterns ('corpus/**/*.txt', in quotes), read in this order; the files of a pattern
    are sorted.
    """
    output_prefix: str | None = flag(None)
    """Files <prefix>_<key>_document.bin and .idx are written."""
    input_format: str = flag("auto", choices=("auto", "jsonl", "text"))
    """auto: .jsonl, .ndjson and .json (also .gz) hold a JSON object per line, all else is plain
    text.
    """
    json_keys: list[str] | None = flag(None)
    """Fields of the JSON objects, each written to files of its own; a field is a string, or a list
    of them that makes one document of several sequences. Default: text.
    """
    text_documents: str = flag("file", choices=("file", "block", "line"))
    """What is one document of plain text: a file, a block of lines between blank lines, or a line.
    """
    append_eod: bool = flag(False)
    """Append the end-of-document token to every document."""
    workers: int | None = flag(None, positive=True)
    """Processes that tokenize. Default: one per core."""
    log_interval: int = flag(1000, positive=True)
    """Documents between progress lines, where the output is no terminal."""

    def __post_init__(self) -> None:
        if not self.input or self.output_prefix is None:
            raise ValueError("--input and --output-prefix are required (--help lists all flags)")

    @property
    def num_workers(self) -> int:
        return self.workers or os.cpu_count() or 1

    @property
    def keys(self) -> list[str]:
        return self.json_keys or ["text"]


@dataclass(frozen=True)
class LineBatch:
    """Undecoded documents of one file, each with the number of its first line."""

    path: str
    is_json: bool
    documents: list[tuple[int, bytes]]

    @property
    def num_bytes(self) -> int:
        return sum(len(document) for _, document in self.documents)


Tokens = tuple[np.ndarray, list[int], list[int]]
"""Documents one after the other: tokens, tokens per sequence, sequences per document."""


def main(argv: list[str] | None = None) -> None:
    sections = {"Text and documents": PreprocessConfig, "Tokenizer": TokenizerConfig}
    try:
        given, _ = parse_flags(FlagParser(sections), sys.argv[1:] if argv is None else argv)
        preprocess(build(PreprocessConfig, given), build(TokenizerConfig, given))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        sys.exit("error: a worker process was killed (out of memory?): try fewer --workers")
    except KeyboardInterrupt:
        sys.exit("interrupted: nothing is written")


def preprocess(config: PreprocessConfig, tokenizer_config: TokenizerConfig) -> None:
    """Read, tokenize in parallel, write."""
    assert config.input is not None and config.output_prefix is not None
    paths = find_files(config.input)
    tokenizer = build_tokenizer(tokenizer_config)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism

    chunks = (chunk for path in paths for chunk in read_chunks(path, config))
    encoder = Encoder(tokenizer, config.keys, config.append_eod)
    workers = config.num_workers if config.num_workers > 1 else 0
    with contextlib.ExitStack() as stack:
        prefixes = {key: f"{config.output_prefix}_{key}_document" for key in config.keys}
        builders = {
            key: stack.enter_context(
                IndexedDatasetBuilder(prefix, token_dtype(tokenizer.vocab_size))
            )
            for key, prefix in prefixes.items()
        }
        bar = stack.enter_context(
            ProgressBar("tokenizing", total_bytes(paths), quiet=not sys.stderr.isatty())
        )
        documents = 0
        began = time.perf_counter()

        def report() -> None:
            rate = documents / max(time.perf_counter() - began, 1e-9)
            print(
                f"{documents} documents, {rate:.1f} docs/s; {bar}",
                file=sys.stderr,
                flush=True,
            )

        encoded_chunks = stack.enter_context(
            contextlib.closing(OrderedWorkers(encoder, chunks, workers, CHUNKS_AHEAD))
        )
        for chunk, encoded in encoded_chunks:
            for key, result in encoded.items():
                builders[key].add(*result)
            bar.add(chunk.num_bytes)
            due = (
                documents // config.log_interval
                < (documents + len(chunk.documents)) // config.log_interval
            )
            documents += len(chunk.documents)
            if due and bar.quiet:  # on a terminal the bar says it
                report()
        for key, builder in builders.items():
            if builder.num_documents == 0:
                raise ValueError(
                    f"no document of {len(paths)} files has any token of {key!r}: nothing is written"
                )
    report()
    for key, builder in builders.items():
        empty = documents - builder.num_documents
        skipped = f" ({empty} empty ones left out)" if empty else ""
        print(
            f"{prefixes[key]}: {builder.num_documents} documents{skipped}, {builder.num_tokens} tokens",
            file=sys.stderr,
        )


# Reading


def find_files(patterns: list[str]) -> list[str]:
    """The files of all patterns, each at its first place."""
    paths: dict[str, None] = {}
    for pattern in patterns:
        found = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        files = [path for path in found if not os.path.isdir(path)]  # a pipe will do
        if not files:
            hint = (
                f": it is a directory, give a pattern such as '{pattern}/**/*.txt'"
                if os.path.isdir(pattern)
                else ""
            )
            raise ValueError(f"--input {pattern}: no such file{hint}")
        paths.update(dict.fromkeys(files))
    return list(paths)


def total_bytes(paths: Iterable[str]) -> int | None:
    """Of text to come; None where that is not known before it is read."""
    if any(path.endswith(".gz") or not os.path.isfile(path) for path in paths):
        return None
    return sum(os.path.getsize(path) for path in paths)


def read_chunks(path: str, config: PreprocessConfig) -> Iterator[LineBatch]:
    """The documents of a file, about CHUNK_BYTES at a time."""
    is_json = config.input_format == "jsonl"
    if config.input_format == "auto":
        is_json = path.removesuffix(".gz").endswith(JSON_SUFFIXES)
    split = split_lines if is_json else SPLITTERS[config.text_documents]
    try:
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            batch: list[tuple[int, bytes]] = []
            size = 0
            for line, document in split(file):
                batch.append((line, document))
                size += len(document)
                if size >= CHUNK_BYTES:
                    yield LineBatch(path, is_json, batch)
                    batch = []
                    size = 0
            if batch:
                yield LineBatch(path, is_json, batch)
    except (OSError, EOFError) as error:  # EOFError: a cut .gz
        raise ValueError(f"{path}: cannot be read: {error}") from error


Splitter = Callable[[Iterable[bytes]], Iterator[tuple[int, bytes]]]


def split_lines(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield number, line.rstrip(b"\r\n")


def split_blocks(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    for is_text, group in itertools.groupby(
        enumerate(lines, start=1), key=lambda row: bool(row[1].strip())
    ):
        if is_text:
            numbers, block = zip(*group, strict=True)
            yield numbers[0], b"".join(block).rstrip(b"\r\n")


def split_file(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    text = b"".join(lines)
    if text.strip():
        yield 1, text


SPLITTERS: dict[str, Splitter] = {"file": split_file, "block": split_blocks, "line": split_lines}


# Tokenizing


@dataclass(frozen=True)
class Encoder:
    """Chunks to tokens."""

    tokenizer: Tokenizer
    keys: list[str]
    append_eod: bool

    def __call__(self, chunk: LineBatch) -> dict[str, Tokens]:
        dtype = token_dtype(self.tokenizer.vocab_size)
        columns: dict[str, list[list[list[int]]]] = {key: [] for key in self.keys}
        for line, document in chunk.documents:
            try:
                for key, texts in self._fields(document, chunk.is_json).items():
                    columns[key].append(self._document(texts))
            except ValueError as error:
                raise ValueError(f"{chunk.path}:{line}: {error}") from None
        return {key: _pack(documents, dtype) for key, documents in columns.items()}

    def _fields(self, document: bytes, is_json: bool) -> dict[str, list[str]]:
        """Texts of every key; several texts are the sequences of one document."""
        try:
            text = document.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8: {error}") from None
        if not is_json:
            return {key: [text] for key in self.keys}
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
        if not isinstance(record, dict):
            raise ValueError(f"expected a JSON object, got {type(record).__name__}")
        return {key: _texts(record, key) for key in self.keys}

    def _document(self, texts: list[str]) -> list[list[int]]:
        sequences = [ids for ids in map(self.tokenizer.tokenize, texts) if ids]
        if sequences and self.append_eod:
            sequences[-1].append(self.tokenizer.eod)
        return sequences


def _texts(record: dict, key: str) -> list[str]:
    if key not in record:
        raise ValueError(f"no field {key!r}, only {', '.join(map(repr, record))}: see --json-keys")
    value = record[key]
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f"field {key!r} is {json.dumps(value)[:60]}, expected a string or a list of strings"
        )
    return texts


def _pack(documents: list[list[list[int]]], dtype: np.dtype) -> Tokens:
    """Documents without tokens are left out."""
    sequences = [sequence for document in documents for sequence in document]
    arrays = [np.array(sequence, dtype=dtype) for sequence in sequences]
    tokens = np.concatenate(arrays) if arrays else np.empty(0, dtype)
    return tokens, list(map(len, sequences)), [len(document) for document in documents if document]


if __name__ == "__main__":
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # unwind: discard files, end workers
    main()

"""Tokenize documents in worker processes that survive hostile text and tokenizers.

Tokenizers are native code that no Python timeout interrupts: a regular expression can take
exponential time, a rewriting rule can grow a text without bound, and the library can abort. Workers
therefore run under limits of the kernel. A worker that exceeds one dies; the main process finds the
document that it was working on, marks it as bad and continues with new workers.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import multiprocessing
import os
import resource
import signal
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import numpy as np
from torch.utils.data import get_worker_info

from megatron.core.datasets import token_dtype
from megatron.core.datasets.ordered_workers import OrderedWorkers
from megatron.core.safe_files.schema import format_value
from megatron.core.terminal import format_error
from megatron.training.data.documents import BadLine, Chunk
from megatron.training.data.tokenizer import Tokenizer
from megatron.training.data.tokenizer_libraries import is_rust_panic

CHUNKS_AHEAD = 4  # per worker: bounds the memory and keeps all workers busy
WORKER_MEMORY = 4 << 30  # bytes that tokenizing a small document may add to a worker
MEMORY_PER_BYTE = 512  # additional bytes of memory per byte of a document
SECONDS_PER_BYTE = 2e-5  # additional processor time: 50 kB/s is slow even for Python
DOCUMENT_CPU_SECONDS = 60.0
MAX_KEYS_SHOWN = 8

Tokens = tuple[np.ndarray, list[int], list[int]]
"""Documents in a row: tokens, tokens per sequence, sequences per document."""


@dataclass(frozen=True)
class EncodedChunk:
    """Tokens of a chunk by key, and the lines that could not be tokenized, in order."""

    tokens: dict[str, Tokens]
    num_documents: int
    bad_lines: list[BadLine]


class WorkerLimits:
    """Limits of processor time and memory for each document, and the current document of each
    worker.

    Created by the main process, used by forked workers.
    """

    _FIELDS = 2  # per worker: process id, line of its document

    def __init__(self, num_workers: int, seconds: float) -> None:
        self.seconds = seconds
        # Shared memory, so that the main process can read the entries of a dead worker.
        self._positions = multiprocessing.RawArray(ctypes.c_int64, self._FIELDS * num_workers)
        self._paths = [multiprocessing.RawArray(ctypes.c_char, 4096) for _ in range(num_workers)]
        self._base_memory: int | None = None
        self._current: tuple[int, int] | None = None

    def begin_chunk(self, path: str) -> None:
        """Record the file of the next documents. Called by a worker."""
        worker = get_worker_info()
        if worker is None:
            return
        self._paths[worker.id].value = os.fsencode(path)[:4095]
        self._positions[self._FIELDS * worker.id] = os.getpid()

    def begin_document(self, line_number: int, num_bytes: int) -> None:
        """Record the line of a document, and set the limits for it. Called by a worker."""
        worker = get_worker_info()
        if worker is None:
            return
        self._positions[self._FIELDS * worker.id + 1] = line_number
        if self._base_memory is None:
            # A worker that exceeds its limits is expected to die: without a core dump of gigabytes.
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            self._base_memory = _read_address_space()

        # Rounded, so that the limits change rarely: each change is two system calls.
        end = time.process_time() + self.seconds + SECONDS_PER_BYTE * num_bytes
        seconds = int(end) + 1
        rounded_bytes = num_bytes >> 20 << 20
        memory = self._base_memory + WORKER_MEMORY + MEMORY_PER_BYTE * rounded_bytes
        if (seconds, memory) != self._current:
            _set_soft_limit(resource.RLIMIT_CPU, seconds)
            if self._base_memory:
                _set_soft_limit(resource.RLIMIT_AS, memory)
            self._current = (seconds, memory)

    def find_document(self, exit_codes: Mapping[int, int]) -> BadLine | None:
        """Return the document on which a worker died; None if none died on a document.

        `exit_codes` are those of dead workers, by process id. (The DataLoader's own error does not
        always name the signal.)
        """
        reasons: dict[int, str] = {
            signal.SIGXCPU: f"the tokenizer takes more than {self.seconds:g} s of processor time",
            signal.SIGABRT: "the tokenizer aborted, or takes too much memory",
            signal.SIGSEGV: "the tokenizer crashed",
        }
        for worker, path in enumerate(self._paths):
            pid = self._positions[self._FIELDS * worker]
            line_number = self._positions[self._FIELDS * worker + 1]
            # A negative exit code is the number of the signal that killed the process.
            reason = reasons.get(-exit_codes.get(pid, 0))
            if reason is not None and line_number > 0:
                return BadLine(os.fsdecode(path.value), line_number, reason)
        return None


def encode_chunks(
    chunks: Iterable[Chunk], encoder: DocumentEncoder, num_workers: int
) -> Generator[tuple[Chunk, EncodedChunk], None, None]:
    """Yield every chunk with its tokens, in order, tokenized by `num_workers` processes.

    Raises RuntimeError if a worker is killed for another reason than a document.
    """
    source = iter(chunks)
    in_flight: deque[Chunk] = deque()  # read, but not yielded

    def read_on() -> Iterator[Chunk]:
        for chunk in source:
            in_flight.append(chunk)
            yield chunk

    workers: OrderedWorkers[Chunk, EncodedChunk] | None = None
    death: RuntimeError | None = None
    try:
        while True:
            # torch's SIGCHLD handler can raise for a second worker at any point of this block.
            try:
                if workers is not None:
                    workers.close()
                if death is not None:
                    assert workers is not None
                    bad = encoder.limits.find_document(workers.exit_codes)
                    _mark_bad_line(in_flight, bad, death)
                    death = None
                # Chunks whose results were lost with the workers come first.
                work = itertools.chain(list(in_flight), read_on())
                workers = OrderedWorkers(encoder, work, num_workers, CHUNKS_AHEAD)
                for _, encoded in workers:
                    with _defer_worker_deaths():
                        yield in_flight[0], encoded
                        in_flight.popleft()
                return
            except RuntimeError as error:
                if error is death:  # not explained by a document
                    raise
                death = error
    finally:
        if workers is not None:
            workers.close()


def _mark_bad_line(in_flight: deque[Chunk], bad: BadLine | None, death: RuntimeError) -> None:
    """Mark the document that a worker died on as bad, or raise `death` if there is none."""
    for index, chunk in enumerate(in_flight):
        if bad is not None and chunk.path == bad.path and bad.line_number in dict(chunk.documents):
            in_flight[index] = chunk.without(bad)
            return
    raise death


@contextmanager
def _defer_worker_deaths() -> Iterator[None]:
    """Let torch report a dead worker after the block.

    Its SIGCHLD handler raises wherever the main thread is, for example while results are written.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    arrived: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGCHLD, lambda signum, frame: arrived.append((signum, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)
    if arrived and callable(handler):
        handler(*arrived[0])


@dataclass(frozen=True)
class DocumentEncoder:
    """Function from a chunk to its tokens; runs in worker processes."""

    tokenizer: Tokenizer
    keys: list[str]
    append_eod: bool
    limits: WorkerLimits

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        dtype = token_dtype(self.tokenizer.vocab_size)
        # key -> document -> sequence -> tokens
        columns: dict[str, list[list[np.ndarray]]] = {key: [] for key in self.keys}
        bad_lines = list(chunk.bad_lines)
        self.limits.begin_chunk(chunk.path)
        for line_number, content in chunk.documents:
            self.limits.begin_document(line_number, len(content))
            try:
                document = {}
                for key, texts in self._parse(content, chunk.is_json).items():
                    document[key] = self._encode(texts, dtype)
            except ValueError as error:
                bad_lines.append(BadLine(chunk.path, line_number, format_error(error)))
                continue
            # Only when all keys are tokenized, so that they have the same documents.
            for key, sequences in document.items():
                columns[key].append(sequences)
        # Lines that the reader and the tokenizer have rejected, in the order of the file.
        bad_lines.sort(key=lambda bad: bad.line_number)
        tokens = {key: _pack(documents, dtype) for key, documents in columns.items()}
        return EncodedChunk(tokens, len(chunk.documents) + len(chunk.bad_lines), bad_lines)

    def _parse(self, content: bytes, is_json: bool) -> dict[str, list[str]]:
        """Return the texts of each key; several texts are the sequences of one document."""
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8: {error}") from None
        if not is_json:
            return {key: [text] for key in self.keys}
        try:
            # Malformed lines of any kind become a ValueError, which --skip-bad-lines counts.
            record = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
        except RecursionError:
            raise ValueError("not JSON: nested too deep") from None
        if not isinstance(record, dict):
            raise ValueError(f"expected a JSON object, got {type(record).__name__}")
        return {key: _get_texts(record, key) for key in self.keys}

    def _encode(self, texts: list[str], dtype: np.dtype) -> list[np.ndarray]:
        """Return the tokens of each sequence of a document, without empty ones."""
        sequences = []
        for text in texts:
            ids = self._tokenize(text)
            if ids:
                sequences.append(ids)
        # One EOD ends the document, not each of its sequences.
        if sequences and self.append_eod:
            sequences[-1].append(self.tokenizer.eod)
        try:
            return [np.array(sequence, dtype=dtype) for sequence in sequences]
        except OverflowError:
            largest = max(map(max, sequences))
            raise ValueError(
                f"the tokenizer gives id {largest}, which {dtype} cannot store"
            ) from None

    def _tokenize(self, text: str) -> list[int]:
        """Return the ids of a text. Raises ValueError for any error of the library."""
        try:
            return self.tokenizer.tokenize(text)
        except ValueError:
            raise
        except MemoryError:
            raise ValueError("the tokenizer takes too much memory") from None
        except BaseException as error:
            if not isinstance(error, Exception) and not is_rust_panic(error):
                raise
            raise ValueError(f"the tokenizer failed: {type(error).__name__}: {error}") from None


def _get_texts(record: dict[str, object], key: str) -> list[str]:
    if key not in record:
        names = [format_value(name) for name in itertools.islice(record, MAX_KEYS_SHOWN)]
        if len(record) > MAX_KEYS_SHOWN:
            names.append("...")
        raise ValueError(f"no field {key!r}, only {', '.join(names)}: see --json-keys")
    value = record[key]
    # A list of strings is one document of several sequences.
    values = value if isinstance(value, list) else [value]
    texts: list[str] = []
    for text in values:
        if not isinstance(text, str):
            raise ValueError(
                f"field {key!r} is {format_value(value)}, expected a string or a list of strings"
            )
        if not text.isascii():
            _check_surrogates(key, text)
        texts.append(text)
    return texts


def _check_surrogates(key: str, text: str) -> None:
    """Raise ValueError for half of a surrogate pair, which JSON can express and UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"field {key!r} has a lone surrogate {format_value(text[error.start])} "
            f"at character {error.start}"
        ) from None


def _pack(documents: list[list[np.ndarray]], dtype: np.dtype) -> Tokens:
    """Concatenate documents; documents without tokens are omitted."""
    sequences = [np.empty(0, dtype)]  # so that there is one to concatenate
    lengths: list[int] = []
    sequences_per_document: list[int] = []
    for document in documents:
        if document:
            sequences += document
            lengths += map(len, document)
            sequences_per_document.append(len(document))
    return np.concatenate(sequences), lengths, sequences_per_document


def _read_address_space() -> int:
    """Return the bytes of address space that this process uses; 0 where there is no /proc."""
    if not os.path.exists("/proc/self/statm"):
        return 0
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _set_soft_limit(resource_id: int, value: int) -> None:
    _, hard = resource.getrlimit(resource_id)
    # An unprivileged process may not exceed its hard limit.
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(resource_id, (value, hard))

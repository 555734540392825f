"""Read documents from JSON lines and plain text, optionally compressed, and from tables."""

from __future__ import annotations

import glob
import gzip
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, cast

from megatron.core.terminal import escape_control_chars
from megatron.core.wings import resolve

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
TABLE_SUFFIXES = (".parquet", ".arrow")
COMPRESSED_SUFFIXES = (".gz", ".zst")
MAX_DOCUMENT_MB = 256.0
CHUNK_BYTES = 1 << 18  # text per unit of work
SKIP_BYTES = 1 << 20  # read at once from the rest of a line that is too long

Line = tuple[int, bytes | None]
"""Number of a line, from 1, and its content; None if it is longer than the limit. Documents have
the same form, with the number of their first line.
"""


@dataclass(frozen=True)
class BadLine:
    """A line that cannot be tokenized, and the reason."""

    path: str
    line_number: int
    reason: str

    def __str__(self) -> str:
        return f"{escape_control_chars(self.path)}:{self.line_number}: {self.reason}"


@dataclass(frozen=True)
class Chunk:
    """Undecoded documents of one file, and those that could not be read."""

    path: str
    is_json: bool
    documents: list[tuple[int, bytes]]
    bad_lines: list[BadLine]
    num_bytes: int

    def without(self, bad: BadLine) -> Chunk:
        """Return this chunk with the document that starts at a bad line marked as such."""
        # The other documents of the chunk are tokenized again.
        documents = [document for document in self.documents if document[0] != bad.line_number]
        bad_lines = sorted([*self.bad_lines, bad], key=lambda bad: bad.line_number)
        return Chunk(self.path, self.is_json, documents, bad_lines, self.num_bytes)


def find_files(patterns: list[str]) -> list[str]:
    """Return the files that match the patterns, in order, each once."""
    # A dictionary keeps the order of insertion, and each path once.
    paths: dict[str, None] = {}
    for pattern in patterns:
        paths_of_pattern = [pattern]  # the name of a file may contain wildcards
        if not os.path.exists(pattern):
            paths_of_pattern = sorted(glob.glob(pattern, recursive=True))
        files = [path for path in paths_of_pattern if not os.path.isdir(path)]  # a pipe is accepted
        if not files:
            name = escape_control_chars(pattern)
            hint = ""
            if os.path.isdir(pattern):
                hint = f": it is a directory, give a pattern such as '{name}/**/*.txt'"
            raise ValueError(f"--input {name}: no such file{hint}")
        paths.update(dict.fromkeys(files))
    return list(paths)


def count_bytes(paths: Iterable[str]) -> int | None:
    """Return the size of the uncompressed text; None if it is unknown before reading."""
    encoded = COMPRESSED_SUFFIXES + TABLE_SUFFIXES
    if any(path.endswith(encoded) or not os.path.isfile(path) for path in paths):
        return None
    return sum(os.path.getsize(path) for path in paths)


def strip_compression(path: str) -> str:
    """Return a path without .gz or .zst."""
    for suffix in COMPRESSED_SUFFIXES:
        path = path.removesuffix(suffix)
    return path


def has_fields(path: str) -> bool:
    """Return whether the documents of a file are JSON objects or rows of a table, by its name."""
    return path.endswith(TABLE_SUFFIXES) or strip_compression(path).endswith(JSON_SUFFIXES)


def read_chunks(
    path: str,
    is_json: bool,
    text_documents: str,
    max_document_bytes: int,
    columns: Sequence[str],
) -> Iterator[Chunk]:
    """Yield the documents of a file in chunks of about `CHUNK_BYTES`.

    `text_documents` defines the documents of plain text: see `SPLITTERS`. Of tables only `columns`
    are read, each row as a JSON object. Raises ValueError if the file cannot be read.
    """
    documents: list[tuple[int, bytes]] = []
    bad_lines: list[BadLine] = []
    size = 0
    for line_number, content in _read_documents(
        path, is_json, text_documents, max_document_bytes, columns
    ):
        if content is None:
            reason = (
                f"the document is larger than {max_document_bytes / 1e6:g} MB: "
                "raise --max-document-mb, or split it"
            )
            bad_lines.append(BadLine(path, line_number, reason))
        else:
            documents.append((line_number, content))
            size += len(content)
        # A bad line ends its chunk, so that it is reported without delay.
        if size >= CHUNK_BYTES or bad_lines:
            yield Chunk(path, is_json, documents, bad_lines, size)
            documents = []
            bad_lines = []
            size = 0
    if documents:
        yield Chunk(path, is_json, documents, bad_lines, size)


def _read_documents(
    path: str, is_json: bool, text_documents: str, limit: int, columns: Sequence[str]
) -> Iterator[Line]:
    """Yield the documents of a file. Raises ValueError if it cannot be read."""
    if path.endswith(TABLE_SUFFIXES):
        yield from resolve(_READ_ROWS)(path, columns, limit)
        return
    split = split_into_lines if is_json else SPLITTERS[text_documents]
    try:
        with _open_decompressed(path) as file:
            yield from split(read_lines(file, limit), limit)
    except (OSError, EOFError) as error:  # EOFError: a truncated .gz
        raise ValueError(f"{escape_control_chars(path)}: cannot be read: {error}") from error


_READ_ROWS = "megatron.training.data.data_files:read_rows"
_OPEN_ZSTANDARD = "megatron.training.data.data_files:open_zstandard"


def _open_decompressed(path: str) -> BinaryIO:
    if path.endswith(".zst"):
        file: BinaryIO = resolve(_OPEN_ZSTANDARD)(path)
        return file
    if path.endswith(".gz"):
        return cast(BinaryIO, gzip.open(path, "rb"))
    return open(path, "rb")


def check_bad_lines(bad_lines: list[BadLine], limit: int) -> None:
    """Raise ValueError with the first bad line beyond `limit`, the number that may be skipped."""
    if len(bad_lines) <= limit:
        return
    hint = ""
    if limit > 0:
        hint = f" (bad line {limit + 1}; --skip-bad-lines {limit} allows {limit})"
    raise ValueError(f"{bad_lines[limit]}{hint}")


def read_lines(file: BinaryIO, limit: int) -> Iterator[Line]:
    """Yield the lines of a file; the content of lines above `limit` bytes is skipped.

    A few megabytes of gzip can contain a line of gigabytes.
    """
    line_number = 0
    while content := file.readline(limit + 1):
        line_number += 1
        if len(content) <= limit or content.endswith(b"\n"):
            yield line_number, content
            continue
        # Skip the rest of the line.
        while content and not content.endswith(b"\n"):
            content = file.readline(SKIP_BYTES)
        yield line_number, None


Splitter = Callable[[Iterable[Line], int], Iterator[Line]]


def split_into_lines(file_lines: Iterable[Line], limit: int) -> Iterator[Line]:
    """Yield every line that is not blank as a document."""
    for line_number, content in file_lines:
        if content is None:
            yield line_number, None
        elif content.strip():
            yield line_number, content.rstrip(b"\r\n")


def split_into_blocks(file_lines: Iterable[Line], limit: int) -> Iterator[Line]:
    """Yield every group of lines between blank lines as a document."""
    for is_text, group in itertools.groupby(file_lines, key=_is_text):
        if is_text:
            line_number, text = _join(group, limit)
            if text is not None:
                text = text.rstrip(b"\r\n")
            yield line_number, text


def split_into_files(file_lines: Iterable[Line], limit: int) -> Iterator[Line]:
    """Yield the whole file as a document, unless it is blank."""
    _, text = _join(file_lines, limit)
    if text is None or text.strip():
        yield 1, text


SPLITTERS: dict[str, Splitter] = {
    "file": split_into_files,
    "block": split_into_blocks,
    "line": split_into_lines,
}


def _is_text(row: Line) -> bool:
    _, content = row
    return content is None or bool(content.strip())


def _join(file_lines: Iterable[Line], limit: int) -> Line:
    """Return the lines as one text with the number of the first, or None if the text is larger than
    `limit`. Consumes all lines.
    """
    first = 0
    contents: list[bytes] = []
    size = 0
    is_too_large = False
    for line_number, content in file_lines:
        first = first or line_number
        if content is not None:
            size += len(content)
        if content is None or size > limit:
            is_too_large = True
        if is_too_large:
            contents.clear()  # to bound the memory, however long the text is
        else:
            assert content is not None
            contents.append(content)
    return first, None if is_too_large else b"".join(contents)

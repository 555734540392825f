"""Data files of a path, rows of tables, and .zst files, whose packages are imported on demand."""

from __future__ import annotations

import glob
import importlib
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from megatron.core.terminal import escape_control_chars
from megatron.training.data.documents import (
    COMPRESSED_SUFFIXES,
    JSON_SUFFIXES,
    TABLE_SUFFIXES,
    Line,
    has_fields,
    strip_compression,
)

ROWS_PER_BATCH = 512
COMPRESSED_BLOCK = 1 << 12  # bytes; may decompress to 128 MB
SUFFIXES = (
    f"{', '.join(JSON_SUFFIXES)} (also {', '.join(COMPRESSED_SUFFIXES)}), "
    f"{' or '.join(TABLE_SUFFIXES)}"
)


def find_data_files(path: str) -> list[str]:
    """Return the data files of a file, a pattern ('data/train-*.parquet') or a folder, sorted.

    A folder contains a data set of the Hugging Face hub, or of `save_to_disk`. If some of its files
    or folders have "train" in their names, the others belong to other splits.
    """
    name = escape_control_chars(path)
    if not Path(path).is_dir():
        paths = [path] if Path(path).exists() else sorted(glob.glob(path, recursive=True))
        if not paths:
            raise ValueError(f"--data-path {name}: no such file or folder, and no file matches it")
        for file in paths:
            if not has_fields(file):
                raise ValueError(
                    f"{escape_control_chars(file)}: its name does not end with {SUFFIXES}: convert "
                    "it to JSON lines, or rename it"
                )
        return paths

    paths = []
    for file_path in sorted(Path(path).rglob("*")):
        # JSON files of a data set's folder contain its metadata.
        is_metadata = strip_compression(file_path.name).endswith(".json")
        if has_fields(file_path.name) and not is_metadata:
            paths.append(str(file_path))
    train = [file for file in paths if "train" in str(Path(file).relative_to(path))]
    if not paths:
        raise ValueError(
            f"--data-path {name}: the folder has no .jsonl, .ndjson, .parquet or .arrow file; give "
            "the path of a file"
        )
    return train or paths


def _import_package(package: str, path: str, alternative: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        name = package.partition(".")[0]
        raise ValueError(
            f"{escape_control_chars(path)}: this file needs the package {name}: pip install "
            f"{name}, or {alternative}"
        ) from None


def read_rows(path: str, columns: Sequence[str], limit: int) -> Iterator[Line]:
    """Yield the number of each row of a .parquet or .arrow file, and some of its columns as JSON.

    Rows above `limit` bytes are None. Raises ValueError if the file cannot be read, or has none of
    the columns.
    """
    name = escape_control_chars(path)
    alternative = "convert it to JSON lines"
    pyarrow = _import_package("pyarrow", path, alternative)
    parquet = _import_package("pyarrow.parquet", path, alternative)
    try:
        if path.endswith(".parquet"):
            table = parquet.ParquetFile(path)
            column_names = table.schema_arrow.names
        else:
            table = pyarrow.ipc.open_stream(path)
            column_names = table.schema.names
        # Other columns may have types that JSON lacks.
        selected = [column for column in column_names if column in columns]
        if not selected:
            raise ValueError(
                f"{name}: the columns are {', '.join(map(repr, column_names))}, none of them "
                f"{' or '.join(map(repr, columns))}: rename a column, or select one (--json-keys)"
            )
        batches = table
        if path.endswith(".parquet"):
            batches = table.iter_batches(ROWS_PER_BATCH, columns=selected)
        row_number = 0
        for batch in batches:
            for record in batch.select(selected).to_pylist():
                row_number += 1
                content = json.dumps(record).encode()
                yield row_number, content if len(content) <= limit else None
    except (OSError, TypeError, pyarrow.ArrowException) as error:
        raise ValueError(f"{name}: cannot be read: {error}") from error


def open_zstandard(path: str) -> BinaryIO:
    """Open a .zst file for reading."""
    package = _import_package("zstandard", path, "decompress it")
    return cast(BinaryIO, io.BufferedReader(_ZstandardReader(path, package), 1 << 18))


class _ZstandardReader(io.RawIOBase):
    """Decompressed content of a .zst file of any number of frames.

    The package's own reader takes a truncated file for a complete one.
    """

    def __init__(self, path: str, package: Any) -> None:
        self._package = package
        self._file = open(path, "rb")  # noqa: SIM115 - closed by `close`
        self._decompressor: Any = None  # of the current frame
        self._compressed = b""
        self._content = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._content and self._read_block():
            pass
        count = min(len(buffer), len(self._content))
        buffer[:count] = self._content[:count]
        self._content = self._content[count:]
        return count

    def _read_block(self) -> bool:
        """Decompress a block; return whether there is one. Raises OSError for damaged files."""
        compressed = self._compressed or self._file.read(COMPRESSED_BLOCK)
        self._compressed = b""
        if not compressed:
            if self._decompressor is not None:
                raise OSError("it ends in the middle of a frame: the file is truncated")
            return False
        if self._decompressor is None:
            self._decompressor = self._package.ZstdDecompressor().decompressobj()
        try:
            self._content = memoryview(self._decompressor.decompress(compressed))
        except self._package.ZstdError as error:
            raise OSError(str(error)) from error
        if self._decompressor.eof:
            self._compressed = self._decompressor.unused_data
            self._decompressor = None
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

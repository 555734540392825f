"""Writes token files, which `indexed_dataset` reads."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import DTypeLike

from megatron.core.datasets.indexed_dataset import DTYPES, HEADER, MAGIC, VERSION
from megatron.core.durable_files import fsync_directory, fsync_file, rename, temporary_name

_DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}


class IndexedDatasetBuilder:
    """Writes `<prefix>.bin` and `<prefix>.idx`.

    Call `add` any number of times, then `commit`; as a context manager it commits at the end, or
    discards its files after an exception. Neither file has its name before `commit`, so an
    interrupted run leaves no dataset.
    """

    def __init__(self, prefix: str | os.PathLike, dtype: DTypeLike) -> None:
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in _DTYPE_CODES:
            raise ValueError(
                f"tokens cannot be stored as {self.dtype.name}; choose from "
                f"{sorted(map(str, _DTYPE_CODES))}"
            )
        self.num_tokens = 0
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._temporary = {
            "bin": temporary_name(f"{self.prefix}.bin"),
            "idx": temporary_name(f"{self.prefix}.idx"),
        }
        Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
        # Closed by commit or discard.
        self._file = open(self._temporary["bin"], "wb")  # noqa: SIM115

    @property
    def num_sequences(self) -> int:
        return len(self._lengths)

    @property
    def num_documents(self) -> int:
        return len(self._documents) - 1

    def add(
        self,
        tokens: np.ndarray | Sequence[int],
        lengths: Sequence[int] | None = None,
        documents: Sequence[int] | None = None,
    ) -> None:
        """Append `tokens`, by default as one sequence in one document.

        `lengths` are the tokens of each sequence, `documents` the sequences of each document.
        """
        token_array = self._to_dtype(np.asarray(tokens))
        if lengths is None:
            lengths = [len(token_array)]
        if documents is None:
            documents = [len(lengths)]
        assert sum(lengths) == len(token_array) and sum(documents) == len(lengths)
        self._file.write(token_array.tobytes())
        self.num_tokens += len(token_array)
        self._lengths.extend(lengths)
        # Documents are stored as the number of sequences before their end.
        for count in documents:
            self._documents.append(self._documents[-1] + count)

    def _to_dtype(self, tokens: np.ndarray) -> np.ndarray:
        """Convert tokens to the dtype of the file. Raises ValueError if they do not fit."""
        assert tokens.ndim == 1, tokens.shape
        if self.dtype.kind in "iu" and len(tokens):
            limits = np.iinfo(self.dtype)
            low = tokens.min()
            high = tokens.max()
            if low < limits.min or high > limits.max:
                token = low if low < limits.min else high
                raise ValueError(
                    f"token {token} does not fit the {self.dtype.name} tokens of {self.prefix}.bin "
                    f"({limits.min}..{limits.max}): the tokenizer's vocab_size is too small"
                )
        return tokens.astype(self.dtype)

    def commit(self) -> None:
        """Give both files their names, the .idx last, so that a visible .idx is a whole dataset."""
        self._file.close()

        # Write the index.
        lengths = np.asarray(self._lengths, dtype="<i4")
        documents = np.asarray(self._documents, dtype="<i8")
        offsets = np.zeros(len(lengths), dtype="<i8")
        np.cumsum(lengths[:-1], dtype=np.int64, out=offsets[1:])
        offsets *= self.dtype.itemsize
        dtype_code = _DTYPE_CODES[self.dtype]
        header = HEADER.pack(MAGIC, VERSION, dtype_code, len(lengths), len(documents))
        with open(self._temporary["idx"], "wb") as file:
            file.write(header)
            for values in (lengths, offsets, documents):
                file.write(values.tobytes())

        # Flush before renaming: after a power failure a named file must be complete.
        for temporary in self._temporary.values():
            fsync_file(temporary)
        # An old index must never exist next to new tokens.
        Path(f"{self.prefix}.idx").unlink(missing_ok=True)
        for name in ("bin", "idx"):
            rename(self._temporary[name], f"{self.prefix}.{name}")
        fsync_directory(Path(self.prefix).parent)

    def discard(self) -> None:
        """Remove the temporary files."""
        self._file.close()
        for path in self._temporary.values():
            path.unlink(missing_ok=True)

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if exception_type is None:
            self.commit()
        else:
            self.discard()

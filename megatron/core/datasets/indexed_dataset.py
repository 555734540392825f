"""Token sequences on disk: `<prefix>.bin` contains the tokens, `<prefix>.idx` their index.

The format is Megatron-LM's, byte for byte; all numbers are little-endian::

    .bin  tokens of all sequences, without gaps
    .idx  9 bytes    magic `MMIDIDX\\0\\0`
          uint64     version = 1
          uint8      dtype code
          uint64     N, number of sequences
          uint64     D, number of documents + 1
          int32[N]   sequence lengths in tokens
          int64[N]   byte offsets of the sequences
          int64[D]   first sequence of each document, then N

A dataset exists when its .idx exists, because the builder writes it last.
"""

from __future__ import annotations

import mmap
import os
import struct

import numpy as np

from megatron.core.wings import resolve

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")

DTYPES: dict[int, np.dtype] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}

_EXPLAIN_PREFIX = "megatron.core.datasets.file_problems:explain_prefix"
_EXPLAIN_SIZE = "megatron.core.datasets.file_problems:explain_size"
_BLOCK_SIZE = 4096  # bytes, a page: the least that a disk reads
UINT16_VOCAB_LIMIT = 65500  # Megatron-LM's limit, a little below 2**16


def token_dtype(vocab_size: int) -> np.dtype:
    """Return Megatron-LM's token type for a vocabulary: uint16 below 65500 tokens, else int32."""
    if vocab_size < UINT16_VOCAB_LIMIT:
        return np.dtype(np.uint16)
    return np.dtype(np.int32)


def is_dataset(prefix: str) -> bool:
    """Return whether a data path is the prefix of a dataset."""
    return os.path.isfile(f"{prefix}.idx")


class IndexedDataset:
    """Read access to the sequences of a dataset.

    Sequence i has `lengths[i]` tokens at byte `offsets[i]` of the .bin. With `use_mmap` the .bin is
    mapped, so that the ranks of a node share the page cache. Otherwise each read is a `pread`, for
    network file systems with slow mappings. Opening a dataset checks its two files against each
    other.
    """

    def __init__(self, prefix: str | os.PathLike, use_mmap: bool = True) -> None:
        self.prefix = os.fspath(prefix)
        self.use_mmap = use_mmap
        self.dtype, self.lengths, self.offsets, self.documents = _read_index(self.prefix)
        # The file is open as long as the dataset exists.
        self._file = open(f"{self.prefix}.bin", "rb", buffering=0)  # noqa: SIM115
        self._map: mmap.mmap | None = None
        if use_mmap:
            self._map = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, sequence: int) -> np.ndarray:
        return self.read(sequence)

    def read(self, sequence: int, start: int = 0, count: int | None = None) -> np.ndarray:
        """Return `count` tokens of a sequence from token `start` on, by default up to its end.

        The array is read-only, in the dtype of the file.
        """
        if not 0 <= sequence < len(self):
            raise IndexError(f"sequence {sequence} of {self.prefix}, which has {len(self)}")
        length = int(self.lengths[sequence])
        if count is None:
            count = length - start
        assert min(start, count) >= 0 and start + count <= length, (sequence, start, count, length)
        itemsize = self.dtype.itemsize
        offset = int(self.offsets[sequence]) + start * itemsize
        # A view of the mapped file, or a copy of the bytes without a map.
        if self._map is not None:
            return np.frombuffer(self._map, self.dtype, count, offset)
        content = self._pread(count * itemsize, offset)
        return np.frombuffer(content, self.dtype)

    def _pread(self, num_bytes: int, offset: int) -> bytes:
        """Read exactly `num_bytes`; a single `pread` may return fewer."""
        data = b""
        while num_bytes:
            more = os.pread(self._file.fileno(), num_bytes, offset)
            if not more:
                raise OSError(f"{self.prefix}.bin ended at byte {offset} while it was read")
            data += more
            num_bytes -= len(more)
            offset += len(more)
        return data

    def read_blocks(self, num_blocks: int) -> bytes:
        """Return `num_blocks` evenly spaced blocks of the .bin, from its first to its last byte."""
        end = os.fstat(self._file.fileno()).st_size
        size = min(_BLOCK_SIZE, end)
        starts = np.linspace(0, end - size, num_blocks, dtype=np.int64)
        blocks = [self._pread(size, start) for start in starts.tolist()]
        return b"".join(blocks)

    def __reduce__(self) -> tuple:
        return type(self), (self.prefix, self.use_mmap)  # other processes open the files themselves


def _read_index(prefix: str) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """Return (dtype, lengths, offsets, documents), mapped from `<prefix>.idx`.

    Raises ValueError for missing, truncated or damaged files.
    """
    path = f"{prefix}.idx"
    for needed in (path, f"{prefix}.bin"):
        if not os.path.isfile(needed):
            hint = resolve(_EXPLAIN_PREFIX)(prefix)
            raise ValueError(f"no dataset at {prefix!r}: {needed} does not exist. {hint}")

    # Map the index: it may have 10^9 entries, of which a rank reads few.
    dtype, num_sequences, num_documents = _read_header(path)
    buffer = np.memmap(path, np.uint8, "r")
    # The arrays follow each other without gaps.
    lengths = np.frombuffer(buffer, "<i4", num_sequences, HEADER.size)
    offsets_start = HEADER.size + lengths.nbytes
    offsets = np.frombuffer(buffer, "<i8", num_sequences, offsets_start)
    documents_start = offsets_start + offsets.nbytes
    documents = np.frombuffer(buffer, "<i8", num_documents, documents_start)
    if num_documents < 2 or documents[0] != 0 or documents[-1] != num_sequences:
        raise ValueError(
            f"{path}: its document boundaries do not range from 0 to {num_sequences}: it is damaged"
        )
    end = _check_offsets(path, lengths, offsets, dtype.itemsize)

    size = os.path.getsize(f"{prefix}.bin")
    if size != end:  # the .bin is truncated, or the .idx belongs to another dataset
        problem = resolve(_EXPLAIN_SIZE)(prefix, dtype, lengths, size, end)
        raise ValueError(problem)
    return dtype, lengths, offsets, documents


def _read_header(path: str) -> tuple[np.dtype, int, int]:
    """Return the dtype of the tokens, N and D of an index.

    Raises ValueError for a damaged header, and for one that does not fit the size of the file.
    """
    size = os.path.getsize(path)
    if size < HEADER.size:
        raise ValueError(
            f"{path} has {size} bytes, less than the {HEADER.size} of an index header: it is empty "
            "or truncated"
        )

    with open(path, "rb") as file:
        header = file.read(HEADER.size)
    magic, version, code, num_sequences, num_documents = HEADER.unpack(header)
    if magic != MAGIC:
        raise ValueError(
            f"{path} starts with {magic!r}, not with {MAGIC!r}: it is not the index of a dataset"
        )
    if version != VERSION:
        raise ValueError(f"{path} has index version {version}; only version {VERSION} is known")
    if code not in DTYPES:
        raise ValueError(f"{path} has token dtype code {code}; known codes are {sorted(DTYPES)}")
    expected = HEADER.size + 12 * num_sequences + 8 * num_documents
    if size != expected:
        raise ValueError(
            f"{path} has {size} bytes, but its header announces {num_sequences} sequences and "
            f"{num_documents} document boundaries, which take {expected}: it is truncated or "
            "damaged, write it again with tools/preprocess_data.py"
        )
    if num_sequences == 0:
        raise ValueError(f"{path} holds no sequences: the dataset is empty")
    return DTYPES[code], num_sequences, num_documents


def _check_offsets(path: str, lengths: np.ndarray, offsets: np.ndarray, itemsize: int) -> int:
    """Return the byte after the last sequence.

    Raises ValueError unless the sequences follow each other without gaps, from byte 0 on.
    """
    end = 0
    block = 1 << 20  # bounds memory: an index can have 10^9 entries
    for first in range(0, len(lengths), block):
        rows = slice(first, first + block)
        sizes = lengths[rows].astype(np.int64) * itemsize
        ends = end + np.cumsum(sizes)
        expected = ends - sizes
        is_wrong = (sizes < 0) | (offsets[rows] != expected)
        if is_wrong.any():
            in_block = int(np.argmax(is_wrong))
            sequence = first + in_block
            raise ValueError(
                f"{path} is damaged: sequence {sequence} has {lengths[sequence]} tokens from byte "
                f"{offsets[sequence]} on, but the one before ends at byte {expected[in_block]}"
            )
        end = int(ends[-1])
    return end

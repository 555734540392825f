"""Checking a whole checkpoint: completeness, coverage, checksums; and comparing contents, whatever the layout.

The digest of a global tensor does not depend on how it is cut. Element number i (row-major in the global tensor) is an
unsigned integer e_i of b bits: its bytes, little-endian. With f_i = e_i xor (e_i >> b / 2),

    digest = sum over i of  f_i * T[i mod 65536] * A(i div 65536)   mod 2^64
    T[r] = splitmix64(r) | 1        A(q) = splitmix64(2^32 + q) | 1

where 16-byte elements count as two of 8 bytes. A sum does not care about order, so any tiling gives the same number and
partial sums of boxes just add up. All weights are odd and f is one-to-one, so a change of a single element always
changes the digest. Changes of several are missed with a probability of 2^-64, at most 2^-33 if all of them are
multiples of a high power of two.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from megatron.core.dist_checkpointing.boxes import Shape, byte_runs, cut_rows, shifted
from megatron.core.dist_checkpointing.files import CHECKSUMS, COMMON, METADATA, METADATA_JSON, OLD_CHECKSUMS
from megatron.core.dist_checkpointing.format.checksums import (
    BLOCK_SIZE,
    DIGEST_SIZE,
    FileChecksums,
    find_checksums,
    hash_blocks,
    read_checksums,
)
from megatron.core.dist_checkpointing.format.metadata import CheckpointMetadata
from megatron.core.dist_checkpointing.format.schema import (
    CheckpointError,
    file_name,
    mapping,
    open_descriptor,
    open_regular,
    read_json,
    record,
    text,
)
from megatron.core.dist_checkpointing.format.unpickler import safe_load
from megatron.core.dist_checkpointing.generation import LINEAGE
from megatron.core.dist_checkpointing.loading.reader import Reader, read_metadata
from megatron.core.durable_files import write_json

_READ_SIZE = 8 * BLOCK_SIZE
INTEGRITY = "integrity.json"  # Megatron-LM's --verify-integrity: a hash of every file beside it
_INTEGRITY = record({"algorithm?": text(), "files": mapping(text())})


@dataclass
class VerifyReport:
    """What `verify` found. Without checksums (`has_checksums` False) content cannot be vouched for, only structure."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # odd but harmless
    has_checksums: bool = False
    files: int = 0
    bytes: int = 0
    tensors: int = 0
    objects: int = 0

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(
    directory: str | os.PathLike[str], *, workers: int = 4, progress: Callable[[int], None] = lambda count: None
) -> VerifyReport:
    """Check everything: files present and whole, every tensor tiled exactly by its chunks, every checksum.

    Reads the whole checkpoint, `progress` gets the number of bytes read since its last call. Problems are collected,
    one line each with the file or key; nothing is raised for a damaged checkpoint.
    """
    path = Path(directory)
    report = VerifyReport()
    if not path.is_dir():
        report.problems.append(f"{path}: no such directory")
        return report
    metadata = _check_structure(path, report)
    if (path / INTEGRITY).exists():
        _check_integrity(path, report, progress)
    try:
        sums = read_checksums(path)
    except CheckpointError as error:
        if find_checksums(path) is not None:
            report.problems.append(str(error))
        else:
            report.notes.append(str(error))
        return report
    report.has_checksums = True
    if metadata is not None:
        unprotected = metadata.file_sizes().keys() - sums.keys()
        report.problems += [f"{path / name}: there are no checksums of it" for name in sorted(unprotected)]
    with ThreadPoolExecutor(workers, "checkpoint-verifier") as pool:
        for problem in pool.map(lambda name: _check_content(path / name, sums[name], progress), sorted(sums)):
            report.problems += problem
    report.files, report.bytes = len(sums), sum(file.size for file in sums.values())
    return report


def missing_or_truncated(directory: str | os.PathLike[str]) -> list[str]:
    """Files of a checkpoint that are not there, or shorter than when it was committed; content is not read.

    Checkpoints of other programs carry no list of their files: what `.metadata` speaks of is looked for.
    """
    path, problems = Path(directory), []
    if find_checksums(path) is not None:
        exact, sizes = True, {name: sums.size for name, sums in read_checksums(path).items()}
    else:
        exact, sizes = False, read_metadata(path).file_sizes()
    for name, expected in sizes.items():
        try:
            size = (path / name).stat().st_size
        except OSError:
            problems.append(f"{name} is missing")
            continue
        if size < expected or (exact and size != expected):
            problems.append(f"{name} has {size} bytes instead of {expected}")
    return problems


def _check_structure(path: Path, report: VerifyReport) -> CheckpointMetadata | None:
    """Everything that can be known without reading the shards."""
    metadata = None
    try:
        metadata = read_metadata(path)
    except CheckpointError as error:
        report.problems.append(str(error))
    try:
        read_json(path / METADATA_JSON)
    except FileNotFoundError:
        report.notes.append(f"{path / METADATA_JSON}: missing (a plain DCP checkpoint)")
    except ValueError as error:
        report.problems.append(str(error))
    if (path / COMMON).exists():
        try:
            safe_load(path / COMMON, mmap=False)
        except CheckpointError as error:
            report.problems.append(str(error))
    if metadata is None:
        return None
    report.tensors, report.objects = len(metadata.tensors), len(metadata.objects)
    for key, tensor in metadata.tensors.items():
        try:
            fault = tensor.chunks.find_fault(tensor.shape)
        except CheckpointError as error:
            fault = str(error)
        if fault is not None:
            report.problems.append(f"{path / METADATA}: {key} {tensor.shape}: {fault}")
    for name, size in sorted(metadata.file_sizes().items()):
        shard = path / name
        if not shard.is_file():
            report.problems.append(f"{shard}: the shard file is missing")
        elif shard.stat().st_size < size:
            report.problems.append(f"{shard}: truncated: it has {shard.stat().st_size} bytes, {size} are in use")
    known = {
        METADATA,
        METADATA_JSON,
        COMMON,
        CHECKSUMS,
        OLD_CHECKSUMS,
        LINEAGE,
        INTEGRITY,
    } | metadata.file_sizes().keys()
    unknown = sorted(file.name for file in path.iterdir() if file.is_file() and file.name not in known)
    report.notes += [f"{path / name}: belongs to no tensor and no object" for name in unknown]
    return metadata


def _check_integrity(path: Path, report: VerifyReport, progress: Callable[[int], None]) -> None:
    """The hashes that Megatron-LM wrote."""
    try:
        manifest = _INTEGRITY(read_json(path / INTEGRITY), str(path / INTEGRITY))
        names = [file_name(name, str(path / INTEGRITY)) for name in manifest["files"]]
    except ValueError as error:
        report.problems.append(str(error))
        return
    if manifest.get("algorithm", "sha256") != "sha256":
        report.problems.append(f"{path / INTEGRITY}: unknown algorithm {manifest['algorithm']!r}, only sha256 is known")
        return
    for name in names:
        try:
            found = _sha256(path / name, progress)
        except OSError as error:
            report.problems.append(f"{path / name}: {INTEGRITY} names it, but it cannot be read: {error.strerror}")
            continue
        except CheckpointError as error:
            report.problems.append(str(error))
            continue
        if found != manifest["files"][name]:
            report.problems.append(f"{path / name}: damaged: its content is not what {INTEGRITY} vouches for")
    report.has_checksums, report.files = True, len(names)


def write_integrity(directory: str | os.PathLike[str], progress: Callable[[int], None] = lambda count: None) -> Path:
    """Write the list of hashes that Megatron-LM's --verify-integrity checks at a load; returns its path.

    It vouches for the files as they are now: `verify` first.
    """
    path = Path(directory)
    names = sorted(file.name for file in path.iterdir() if file.is_file() and file.name != INTEGRITY)
    files = {name: _sha256(path / name, progress) for name in names}
    write_json(path / INTEGRITY, {"algorithm": "sha256", "files": files})
    return path / INTEGRITY


def _sha256(path: Path, progress: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(_READ_SIZE):
            digest.update(block)
            progress(len(block))
    return digest.hexdigest()


def _check_content(path: Path, expected: FileChecksums, progress: Callable[[int], None]) -> list[str]:
    """The checksums of one whole file; damaged ranges are merged."""
    try:
        descriptor = open_descriptor(path)
    except OSError as error:
        return [f"{path}: cannot be opened: {error.strerror}"]
    except CheckpointError as error:
        return [str(error)]
    problems = []
    try:
        size = os.fstat(descriptor).st_size
        if size != expected.size:
            problems.append(f"{path}: has {size} bytes instead of {expected.size}")
        damaged: list[int] = []
        for offset in range(0, min(size, expected.size), _READ_SIZE):
            content = os.pread(descriptor, _READ_SIZE, offset)
            found, first = hash_blocks(content), offset // BLOCK_SIZE
            for i in range(len(found) // DIGEST_SIZE):
                place = slice((first + i) * DIGEST_SIZE, (first + i + 1) * DIGEST_SIZE)
                if found[i * DIGEST_SIZE : (i + 1) * DIGEST_SIZE] != expected.blocks[place]:
                    damaged.append(first + i)
            progress(len(content))
        if damaged:
            ranges = ", ".join(f"{i * BLOCK_SIZE}..{min(size, (i + 1) * BLOCK_SIZE)}" for i in damaged[:10])
            more = f" and {len(damaged) - 10} more blocks" if len(damaged) > 10 else ""
            problems.append(f"{path}: damaged: wrong checksum of bytes {ranges}{more}")
    except OSError as error:
        problems.append(f"{path}: cannot be read: {error.strerror}")
    finally:
        os.close(descriptor)
    return problems


def total_bytes(directory: str | os.PathLike[str]) -> int:
    """How much `verify` is going to read."""
    try:
        return sum(file.size for file in read_checksums(Path(directory)).values())
    except CheckpointError:
        return 0


_BLOCK = 1 << 16  # elements that share a block weight
_LONG = 1 << 13  # elements: runs from here on are handled one by one, shorter ones many at once
_STEP = 1 << 17  # elements handled at once
_SLICE = 64 << 20  # bytes of a stored chunk in memory at once


def splitmix64(x: np.ndarray) -> np.ndarray:
    """Vigna's generator as a function of its counter, on uint64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _block_weights(numbers: np.ndarray) -> np.ndarray:
    return splitmix64(numbers.astype(np.uint64) + np.uint64(1 << 32)) | np.uint64(1)


_WEIGHTS = splitmix64(np.arange(_BLOCK, dtype=np.uint64)) | np.uint64(1)
_CYCLE = np.concatenate([_WEIGHTS, _WEIGHTS[:_LONG]])  # the weights of a run that crosses into the next block


def partial_digest(tensor: torch.Tensor, offset: Shape, global_shape: Shape) -> int:
    """What the box `tensor` (CPU) at `offset` adds to the digest of its global tensor; sum these modulo 2^64."""
    words, offset, shape, global_shape = _as_words(tensor, offset, global_shape)
    if words.size == 0:
        return 0
    runs = byte_runs(global_shape, offset, shape, itemsize=1)
    run = runs[0].length
    rows = words.reshape(-1, run)
    starts = np.concatenate([first + np.arange(repeats) * stride for first, _, stride, repeats in runs])
    alone = (starts % _BLOCK + run > _BLOCK) if run < _LONG else np.ones(len(rows), dtype=bool)
    total = sum(_weigh_run(rows[i], int(starts[i])) for i in np.flatnonzero(alone))
    if not alone.all():
        total += _weigh_short_runs(rows, starts, alone)
    return total % (1 << 64)


def tensor_digest(reader: Reader, key: str) -> int:
    """The digest of a stored tensor, chunk by chunk: no more than a chunk's slice is in memory."""
    stored = reader.metadata.tensors[key]
    total = 0
    for chunk in stored.chunks:
        for offset, shape in cut_rows(chunk.shape, stored.dtype.itemsize, _SLICE):
            place = shifted(chunk.offset, offset)
            total += partial_digest(reader.read(key, place, shape), place, stored.shape)
    return total % (1 << 64)


def format_digest(value: int) -> str:
    return f"{value % (1 << 64):016x}"


def _weigh_run(row: np.ndarray, start: int) -> int:
    """Contiguous elements, block by block."""
    total = position = 0
    while position < len(row):
        number, first = divmod(start + position, _BLOCK)
        count = min(len(row) - position, _BLOCK - first)
        block = _block_weights(np.array([number]))[0]
        total += int(np.dot(_mix(row[position : position + count]), _WEIGHTS[first : first + count])) * int(block)
        position += count
    return total


def _weigh_short_runs(rows: np.ndarray, starts: np.ndarray, alone: np.ndarray) -> int:
    """All runs that lie in one block each (not `alone`), many at a time."""
    run = rows.shape[1]
    windows = np.lib.stride_tricks.sliding_window_view(_CYCLE, run)
    total, step = 0, max(1, _STEP // run)
    for first in range(0, len(rows), step):
        place = starts[first : first + step]
        sums = np.einsum("ij,ij->i", _mix(rows[first : first + step]), windows[place % _BLOCK])
        sums[alone[first : first + step]] = 0
        total += int(np.dot(sums, _block_weights(place // _BLOCK)))
    return total


def _mix(words: np.ndarray) -> np.ndarray:
    """f as above: high bits, like signs, reach the low ones, which a product modulo 2^64 preserves best."""
    return (words ^ (words >> words.dtype.type(4 * words.itemsize))).astype(np.uint64)


def _as_words(tensor: torch.Tensor, offset: Shape, global_shape: Shape) -> tuple[np.ndarray, Shape, Shape, Shape]:
    """The elements as unsigned integers, and the box in terms of them."""
    flat = tensor.detach().contiguous().reshape(-1)
    size = min(8, tensor.dtype.itemsize)
    words = flat.view(torch.uint8).numpy().view(f"<u{size}")
    if tensor.dtype.itemsize == 16:
        return words, (*offset, 0), (*tensor.shape, 2), (*global_shape, 2)
    return words, offset, tuple(tensor.shape), global_shape

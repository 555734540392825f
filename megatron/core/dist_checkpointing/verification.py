"""Verifies a whole checkpoint: completeness, coverage, checksums."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import xxhash

from megatron.core.dist_checkpointing.box_table import CheckpointMetadata, StoredTensor
from megatron.core.dist_checkpointing.files import (
    CLAIM,
    COMMON,
    INTEGRITY,
    METADATA,
    METADATA_JSON,
)
from megatron.core.dist_checkpointing.format import checksums
from megatron.core.dist_checkpointing.format.metadata_codec import read_metadata
from megatron.core.dist_checkpointing.ownership.lineage import LINEAGE, find_lineage_problem
from megatron.core.durable_files import write_json
from megatron.core.object_path import path_of
from megatron.core.safe_files import schema
from megatron.core.safe_files.errors import CheckpointError
from megatron.core.safe_files.reading import open_file, read_json
from megatron.core.safe_files.torch_load import safe_load
from megatron.core.safe_files.torch_zip import view_bytes

T = TypeVar("T")

_SHOWN_BLOCKS = 10  # damaged ones in a message
_READ_SIZE = 8 * checksums.BLOCK_SIZE
_INTEGRITY = schema.record({"algorithm?": schema.text(), "files": schema.mapping(schema.text())})


@dataclass
class VerifyReport:
    """Result of `verify`. Without checksums (`has_checksums` False), only structure is verified."""

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
    directory: str | os.PathLike[str],
    *,
    workers: int = 4,
    progress: Callable[[int], None] = lambda count: None,
) -> VerifyReport:
    """Verify that all files are complete, all tensors are tiled, and all checksums match.

    Reads the whole checkpoint; `progress` is called with the number of bytes read since its last
    call. Problems are collected, one line each with the file or key. A damaged checkpoint does not
    raise an error.
    """
    path = path_of(directory)
    report = VerifyReport()
    if not path.is_dir():
        report.problems.append(f"{path}: no such directory")
        return report

    # Structure, and the hashes of Megatron-LM
    metadata = _check_structure(path, report)
    if (path / INTEGRITY).exists():
        _check_integrity(path, report, progress, metadata)

    # Our checksums, if there are any
    try:
        sums = checksums.read_checksums(path)
    except CheckpointError as error:
        if checksums.find_checksums(path) is not None:
            report.problems.append(str(error))
        elif not report.has_checksums:
            report.notes.append(str(error))
        return report
    report.has_checksums = True
    if metadata is not None:
        for name in sorted(metadata.file_sizes().keys() - sums.keys()):
            report.problems.append(f"{path / name}: it has no checksums")

    # Content of all files
    with ThreadPoolExecutor(workers, "checkpoint-verifier") as pool:
        for problem in pool.map(
            lambda name: _check_content(path / name, sums[name], progress), sorted(sums)
        ):
            report.problems += problem
    report.files = len(sums)
    report.bytes = sum(file.size for file in sums.values())
    return report


def find_damage(directory: str | os.PathLike[str], first: int = 0, step: int = 1) -> list[str]:
    """List files whose content differs from their checksums; reads the content.

    It reads every `step`-th file from the one with number `first`, so that ranks can share the
    work. A checkpoint without checksums cannot be compared, which is a problem, too.
    """
    path = path_of(directory)
    try:
        sums = checksums.read_checksums(path)
    except (OSError, CheckpointError) as error:
        return [str(error)]
    problems = []
    for name in sorted(sums)[first::step]:
        problems += _check_content(path / name, sums[name], lambda count: None)
    return problems


def _collect_problems(report: VerifyReport, check: Callable[[], T]) -> T | None:
    """Return the result of `check`; if it fails, record the problem and return None."""
    try:
        return check()
    except CheckpointError as error:
        report.problems.append(str(error))
        return None


def _find_tiling_problem(tensor: StoredTensor) -> str | None:
    return tensor.chunks.find_gap_or_overlap(tensor.shape)


def _check_structure(path: Path, report: VerifyReport) -> CheckpointMetadata | None:
    """Check everything that does not require reading the shards."""
    # Small files
    metadata = _collect_problems(report, lambda: read_metadata(path))
    if (path / METADATA_JSON).exists():
        _collect_problems(report, lambda: read_json(path / METADATA_JSON))
    else:
        report.notes.append(f"{path / METADATA_JSON}: missing (a plain DCP checkpoint)")
    lineage_problem = find_lineage_problem(path)
    if lineage_problem is not None:
        report.problems.append(lineage_problem)
    if (path / COMMON).exists():
        _collect_problems(report, lambda: safe_load(path / COMMON, mmap=False))
    if metadata is None:
        return None

    # Every tensor is covered by its chunks.
    report.tensors = len(metadata.tensors)
    report.objects = len(metadata.objects)
    for key, tensor in metadata.tensors.items():
        fault = _collect_problems(report, partial(_find_tiling_problem, tensor))
        if fault is not None:
            report.problems.append(f"{path / METADATA}: {key} {tensor.shape}: {fault}")

    # Compare the shards that exist with those in the metadata.
    for name, size in sorted(metadata.file_sizes().items()):
        shard = path / name
        if not shard.is_file():
            report.problems.append(f"{shard}: the shard file is missing")
        elif shard.stat().st_size < size:
            report.problems.append(
                f"{shard}: truncated: it has {shard.stat().st_size} bytes, {size} are in use"
            )
    expected_names = {
        METADATA,
        METADATA_JSON,
        COMMON,
        INTEGRITY,
        checksums.CHECKSUMS,
        checksums.OLD_CHECKSUMS,
        LINEAGE,
        INTEGRITY,
        CLAIM,
    }
    expected_names |= metadata.file_sizes().keys()
    for name in _list_files(path):
        if name not in expected_names:
            report.notes.append(f"{path / name}: belongs to no tensor and no object")
    return metadata


def _list_files(directory: Path) -> list[str]:
    """Return the names of the files in a directory, in order."""
    return sorted(path.name for path in directory.iterdir() if path.is_file())


def _check_integrity(
    path: Path,
    report: VerifyReport,
    progress: Callable[[int], None],
    metadata: CheckpointMetadata | None,
) -> None:
    """Check the hashes that Megatron-LM wrote, and that every file with tensors has one."""
    try:
        manifest = _INTEGRITY(read_json(path / INTEGRITY), str(path / INTEGRITY))
        names = [schema.file_name(name, str(path / INTEGRITY)) for name in manifest["files"]]
    except ValueError as error:
        report.problems.append(str(error))
        return
    if manifest.get("algorithm", "sha256") != "sha256":
        report.problems.append(
            f"{path / INTEGRITY}: unknown algorithm {manifest['algorithm']!r}, only sha256 is known"
        )
        return
    # A file without a hash may have been replaced.
    if metadata is not None:
        for name in sorted(metadata.file_sizes().keys() - set(names)):
            report.problems.append(f"{path / name}: {INTEGRITY} has no hash of it")
    for name in names:
        try:
            digest = _collect_problems(report, partial(_sha256, path / name, progress))
            if digest not in (None, manifest["files"][name]):
                report.problems.append(
                    f"{path / name}: damaged: its content does not match the hash in {INTEGRITY}"
                )
        except OSError as error:
            report.problems.append(
                f"{path / name}: {INTEGRITY} names it, but it cannot be read: {error.strerror}"
            )
    # Record the files that have been compared.
    report.has_checksums = True
    report.files = len(names)
    for name in names:
        if (path / name).is_file():
            report.bytes += (path / name).stat().st_size


def find_integrity_problems(directory: str | os.PathLike[str]) -> list[str]:
    """Compare every file with `integrity.json`; return a line for each that is damaged or
    missing.
    """
    report = VerifyReport()
    path = path_of(directory)
    metadata = _collect_problems(report, lambda: read_metadata(path))
    _check_integrity(path, report, lambda count: None, metadata)
    return report.problems


def write_integrity(
    directory: str | os.PathLike[str], progress: Callable[[int], None] = lambda count: None
) -> Path:
    """Write the hashes that Megatron-LM's --verify-integrity checks at a load; return the path.

    The hashes are those of the current content, so call `verify` first.
    """
    path = path_of(directory)
    files: dict[str, str] = {}
    for name in _list_files(path):
        if name != INTEGRITY:
            files[name] = _sha256(path / name, progress)
    write_json(path / INTEGRITY, {"algorithm": "sha256", "files": files})
    return path / INTEGRITY


def _sha256(path: Path, progress: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with open_file(path) as file:
        for offset in range(0, file.size, _READ_SIZE):
            block = file.read(offset, _READ_SIZE)
            digest.update(block)
            progress(len(block))
    return digest.hexdigest()


def _check_content(
    path: Path, expected: checksums.FileChecksums, progress: Callable[[int], None]
) -> list[str]:
    """Verify the checksums of one file; consecutive damaged blocks are one problem."""
    problems = []
    damaged: list[int] = []  # numbers of blocks
    try:
        with open_file(path) as file:
            size = file.size
            if size != expected.size:
                problems.append(f"{path}: has {size} bytes instead of {expected.size}")
            for offset in range(0, min(size, expected.size), _READ_SIZE):
                content = file.read(offset, _READ_SIZE)
                first = offset // checksums.BLOCK_SIZE
                damaged += _find_damaged_blocks(content, first, expected.blocks)
                progress(len(content))
    except OSError as error:
        return [f"{path}: cannot be opened: {error.strerror}"]
    except CheckpointError as error:
        return [str(error)]
    if damaged:
        ranges = []
        for block_index in damaged[:_SHOWN_BLOCKS]:
            start = block_index * checksums.BLOCK_SIZE
            stop = min(size, start + checksums.BLOCK_SIZE)
            ranges.append(f"{start}..{stop}")
        text = ", ".join(ranges)
        if len(damaged) > _SHOWN_BLOCKS:
            text += f" and {len(damaged) - _SHOWN_BLOCKS} more blocks"
        problems.append(f"{path}: damaged: wrong checksum of bytes {text}")
    return problems


def _find_damaged_blocks(content: bytes | memoryview, first: int, expected: bytes) -> list[int]:
    """Return the blocks of `content` whose hash differs; its first one has number `first`.

    `expected` contains the hashes of all blocks of the file.
    """
    hashes = checksums.hash_blocks(content)
    size = checksums.DIGEST_SIZE
    damaged = []
    for block_index in range(len(hashes) // size):
        expected_start = (first + block_index) * size
        if (
            hashes[block_index * size : (block_index + 1) * size]
            != expected[expected_start : expected_start + size]
        ):
            damaged.append(first + block_index)
    return damaged


def compute_verify_size(directory: str | os.PathLike[str]) -> int:
    """Return the bytes that `verify` will read."""
    try:
        return sum(file.size for file in checksums.read_checksums(path_of(directory)).values())
    except CheckpointError:
        return 0


def compute_digest(slices: Iterable[torch.Tensor]) -> str:
    """Return the xxh3_128 of a tensor's bytes in row-major order, for any layout and format.

    `slices` are its rows in order, so that a large tensor need not be in memory.
    """
    digest = xxhash.xxh3_128()
    for tensor_slice in slices:
        digest.update(view_bytes(tensor_slice.contiguous().view(-1)))
    return digest.hexdigest()

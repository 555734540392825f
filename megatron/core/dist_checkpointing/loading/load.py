"""Loading in place, at any layout, and the comparison of requested keys with stored ones."""

from __future__ import annotations

import difflib
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from megatron.core.dist_checkpointing.files import COMMON_STATE
from megatron.core.dist_checkpointing.loading.reader import Reader, Request
from megatron.core.dist_checkpointing.mapping import (
    Box,
    Shape,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    find_row_axis,
    locate_rows,
    narrow,
    to_absolute,
)
from megatron.core.dist_checkpointing.planning.balancing import cut_into_shares, level_loads
from megatron.core.dist_checkpointing.planning.collection import LocalSpec, describe
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.safe_files.errors import CheckpointError
from megatron.core.safe_files.schema import abbreviate

logger = logging.getLogger(__name__)

_ROUND_BYTES = 256 << 20  # the buffer of one round of gathering, all ranks together
_LARGEST_PART = 16 << 20  # bytes that one rank contributes to a round
_DIGEST_SIZE = 16  # bytes of an xxh3_128 digest
_MAX_SUGGESTIONS = 200  # keys for which similar keys are searched
_MAX_LINES = 50  # keys listed in an error

BoxOf = dict[tuple[str, Shape], Box]  # by key and offset

# Reactions of `STRICTNESS`
RAISE = "raise"
LOG = "log"
RETURN = "return"
IGNORE = "ignore"

# Reactions to keys that are requested but not stored ("unexpected"), and to keys that are stored
# but not requested ("missing").
STRICTNESS = {
    "assume_ok_unexpected": (RAISE, IGNORE),  # checked here, since that is cheap
    "log_unexpected": (LOG, IGNORE),
    "log_all": (LOG, LOG),
    "raise_unexpected": (RAISE, IGNORE),
    "raise_all": (RAISE, RAISE),
    "return_unexpected": (RETURN, IGNORE),
    "return_all": (RETURN, RETURN),
    "ignore_all": (IGNORE, IGNORE),
}
"""Megatron-LM's values of `--dist-ckpt-strictness`."""


@dataclass
class LoadReport:
    """Result of a load besides the tensors.

    `unexpected` and `missing` are set with the return_* values of strictness.
    """

    objects: dict[str, Any] = field(default_factory=dict)  # by key of the ShardedObject
    # Requested but not in the checkpoint: their tensors are unchanged.
    unexpected: list[str] = field(default_factory=list)
    # In the checkpoint, but requested by no rank.
    missing: list[str] = field(default_factory=list)
    bytes_needed: int = 0
    bytes_read: int = 0
    seconds: float = 0.0


class Contents(Protocol):
    """Tensors and objects of a checkpoint."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """Return the tensors by key; values have the global `shape`."""
        ...

    @property
    def objects(self) -> Collection[str]: ...


class BoxReader(Protocol):
    """Source of a load: a `Reader`, or a checkpoint of another format.

    Its errors are ValueErrors.
    """

    bytes_needed: int
    bytes_read: int

    @property
    def metadata(self) -> Contents: ...

    def read_into(self, requests: Sequence[Request], workers: int = 1) -> None: ...

    def read_object(self, key: str) -> Any: ...


def load(
    state: ShardedStateDict,
    directory: str | os.PathLike[str],
    *,
    group: dist.ProcessGroup | None = None,
    strictness: str = "raise_all",
    skip: Callable[[str], bool] = lambda key: False,
    workers: int = 4,
    verify: bool = True,
    parallelization_group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Fill the tensors of `state` in place from a checkpoint saved at any layout. Collective.

    `strictness` takes Megatron-LM's values. `skip` selects keys of the checkpoint that may be left
    out (e.g. those of the optimizer). Tensors are converted if their dtype is not the stored one.
    `verify` compares everything that is read with the checksums, if the checkpoint has any. With a
    `parallelization_group` (data-parallel replicas), data that all of its ranks need is read once
    and exchanged among them. Raises CheckpointError on every rank if any rank fails; the content of
    the tensors is undefined then.
    """
    reader = Coordination.of(group).run_on_all(lambda: Reader(directory, verify=verify))
    return fill(
        state,
        reader,
        str(directory),
        group=group,
        strictness=strictness,
        skip=skip,
        workers=workers,
        parallelization_group=parallelization_group,
    )


def fill(
    state: ShardedStateDict,
    reader: BoxReader,
    location: str,
    *,
    group: dist.ProcessGroup | None = None,
    strictness: str = "raise_all",
    skip: Callable[[str], bool] = lambda key: False,
    workers: int = 4,
    parallelization_group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Load from a source that is open already, of any format. Collective.

    `location` names it in messages; see `load` for the other arguments.
    """
    if strictness not in STRICTNESS:
        raise ValueError(f"strictness {strictness!r} is none of {', '.join(STRICTNESS)}")
    started = time.perf_counter()
    coordination = Coordination.of(group)

    def compare() -> tuple[LocalSpec, _KeyComparison]:
        """Compare the keys of this rank with the checkpoint."""
        spec = describe(state)
        _check_apart(state)
        return spec, _compare_keys(spec, reader.metadata)

    def make_reports(comparisons: list[_KeyComparison]) -> list[LoadReport]:
        """Return the report of every rank, on rank 0."""
        merged = _merge_comparisons(comparisons, reader.metadata, skip, location)
        report = _apply_strictness(merged, strictness, reader.metadata, location)
        return [report] * coordination.size

    # Phase 1: compare the keys of all ranks with the checkpoint.
    spec, comparison = coordination.run_on_all(compare)
    report: LoadReport = coordination.gather_compute_scatter(comparison, make_reports)

    # Phase 2: read. All ranks learn of an error of any rank before they wait for its share.
    shared = _find_shared_boxes(reader, spec, parallelization_group)
    shares = _divide_evenly(shared, _index_boxes(state), parallelization_group)
    report.objects = coordination.run_on_all(
        lambda: _read_local(state, reader, workers, shared, shares, parallelization_group)
    )

    # Phase 3: exchange the data that replicas have read for each other.
    if any(shares):
        _all_gather_shares(shares, parallelization_group)
    report.seconds = time.perf_counter() - started
    report.bytes_needed = reader.bytes_needed
    report.bytes_read = reader.bytes_read
    return report


def _check_apart(state: ShardedStateDict) -> None:
    """Assert that no memory is filled from two keys, for which threads would race.

    Only contiguous boxes are checked.
    """
    # The memory of each box: (address of the first byte, address after the last byte, key)
    spans = []
    for (key, _), box in _index_boxes(state).items():
        tensor = box.tensor
        if tensor.is_contiguous() and tensor.nbytes:
            start = tensor.data_ptr()
            spans.append((start, start + tensor.nbytes, key))
    # Sorted by address, only neighbors can overlap.
    spans.sort()
    for (_, stop, key), (next_start, _, next_key) in pairwise(spans):
        overlap = next_start < stop
        assert not overlap or key == next_key, (
            f"{key} and {next_key} are the same memory, which must have one source"
        )


def _index_boxes(state: ShardedStateDict) -> BoxOf:
    """Return the local boxes of all tensors by key and offset."""
    boxes = {}
    for entry in state.values():
        if isinstance(entry, ShardedTensor):
            for box in entry.boxes:
                boxes[entry.key, box.offset] = box
    return boxes


def _read_local(
    state: ShardedStateDict,
    reader: BoxReader,
    workers: int,
    shared: list[tuple[str, Shape]],
    shares: list[list[Request]],
    group: dist.ProcessGroup | None,
) -> dict[str, Any]:
    """Read this rank's share of shared boxes, all other boxes completely, and the objects.

    Returns the objects by key. Keys that the checkpoint does not have are left out.
    """
    contents = reader.metadata
    is_shared = set(shared)

    # Boxes that are not shared
    requests = []
    for (key, offset), box in _index_boxes(state).items():
        if (key, offset) not in is_shared and key in contents.tensors:
            requests.append((key, box))
    # This rank's share of the others
    if shares:
        requests += shares[dist.get_rank(group)]
    reader.read_into(requests, workers)

    # Objects
    objects = {}
    for entry in state.values():
        if isinstance(entry, ShardedObject) and entry.key in contents.objects:
            objects[entry.key] = reader.read_object(entry.key)
    return objects


def _find_shared_boxes(
    reader: BoxReader, spec: LocalSpec, group: dist.ProcessGroup | None
) -> list[tuple[str, Shape]]:
    """Return key and offset of the boxes that all ranks of `group` have. Collective.

    Data-parallel replicas have equal boxes of the weights. Boxes of one rank only (optimizer
    shards) are not shared. Returns the same list on every rank, [] without a group. Ranks exchange
    a digest per box instead of the boxes, because a replica has tens of thousands of them.
    """
    if group is None or dist.get_world_size(group) == 1:
        return []
    boxes = []
    for (key, _, dtype), boxes_of_tensor in zip(spec.tensors, spec.boxes, strict=True):
        if key in reader.metadata.tensors:
            for offset, shape in boxes_of_tensor:
                boxes.append((key, offset, shape, str(dtype)))
    # All ranks must list their boxes in the same order, although their models may have another one.
    boxes.sort()

    digests = [xxhash.xxh3_128_digest(repr(box).encode()) for box in boxes]
    common = set(digests)
    packed_of_ranks = Coordination.of(group).all_gather(b"".join(digests))
    for packed in packed_of_ranks:
        common &= _unpack_digests(packed)
    shared = []
    for (key, offset, _, _), digest in zip(boxes, digests, strict=True):
        if digest in common:
            shared.append((key, offset))
    return shared


def _divide_evenly(
    shared: list[tuple[str, Shape]], boxes: BoxOf, group: dist.ProcessGroup | None
) -> list[list[Request]]:
    """Return the rows of shared boxes that each rank of `group` reads: equal bytes, up to a row.

    Returns [] if there is nothing to share.
    """
    if not shared:
        return []
    # (rows, bytes) of each box, and the bytes of all boxes
    sizes = []
    total = 0
    for key_and_offset in shared:
        tensor = boxes[key_and_offset].tensor
        axis = find_row_axis(tuple(tensor.shape))
        num_rows = 1 if axis is None else tensor.shape[axis]
        sizes.append((num_rows, tensor.nbytes))
        total += tensor.nbytes

    # Unlike in a save, no rank has other boxes to begin with.
    size = dist.get_world_size(group)
    bytes_of_ranks = level_loads([0] * size, total)
    shares: list[list[Request]] = [[] for _ in range(size)]
    for rank, index, first, count in cut_into_shares(bytes_of_ranks, sizes):
        key, offset = shared[index]
        box = boxes[key, offset]
        start, shape = locate_rows(box.shape, first, count)
        target = narrow(box.tensor.detach(), start, shape)
        shares[rank].append((key, Box(to_absolute(offset, start), target)))
    return shares


def _unpack_digests(packed: bytes) -> set[bytes]:
    """Return the digests that are concatenated in `packed`."""
    starts = range(0, len(packed), _DIGEST_SIZE)
    return {packed[start : start + _DIGEST_SIZE] for start in starts}


def _all_gather_shares(shares: list[list[Request]], group: dist.ProcessGroup | None) -> None:
    """Gather the shares that the ranks of `group` have read, in place. Collective."""
    rank = dist.get_rank(group)
    size = dist.get_world_size(group)
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")

    # The memory of all shares, by rank, and the bytes of the longest share
    views_by_rank = []
    longest = 0
    for share in shares:
        views = [box.tensor for _, box in share]
        views_by_rank.append(views)
        nbytes = sum(view.nbytes for view in views)
        longest = max(longest, nbytes)

    # Gather in rounds: whole shares at once would double the memory of a replica.
    largest_part = min(_LARGEST_PART, _ROUND_BYTES // size)
    part_size = max(1, min(longest, largest_part))
    sent = torch.empty(part_size, dtype=torch.uint8, device=device)
    received = torch.empty(size, part_size, dtype=torch.uint8, device=device)
    parts_by_rank = list(received.unbind())
    for start in range(0, longest, part_size):
        _pack_bytes(views_by_rank[rank], start, sent)
        dist.all_gather(parts_by_rank, sent, group=group)
        for source_rank in range(size):
            if source_rank != rank:
                _unpack_bytes(parts_by_rank[source_rank], views_by_rank[source_rank], start)


class _Overlap(NamedTuple):
    """The part of a tensor that is in the buffer of a round of gathering."""

    tensor: torch.Tensor
    in_tensor: slice  # bytes
    in_buffer: slice  # bytes


def _find_overlaps(tensors: list[torch.Tensor], start: int, size: int) -> Iterator[_Overlap]:
    """Yield the parts of tensors in bytes [start, start + size) of their concatenation."""
    stop = start + size
    position = 0  # of the tensor in the concatenation
    for tensor in tensors:
        first = max(start, position)
        last = min(stop, position + tensor.nbytes)
        if first < last:
            in_tensor = slice(first - position, last - position)
            in_buffer = slice(first - start, last - start)
            yield _Overlap(tensor, in_tensor, in_buffer)
        position += tensor.nbytes


def _pack_bytes(tensors: list[torch.Tensor], start: int, buffer: torch.Tensor) -> None:
    """Fill `buffer` with the bytes of concatenated tensors from `start` on."""
    for tensor, in_tensor, in_buffer in _find_overlaps(tensors, start, len(buffer)):
        flat = tensor.reshape(-1).view(torch.uint8)
        buffer[in_buffer].copy_(flat[in_tensor])


def _unpack_bytes(buffer: torch.Tensor, tensors: list[torch.Tensor], start: int) -> None:
    """Copy `buffer` to the bytes of concatenated tensors from `start` on."""
    for tensor, in_tensor, in_buffer in _find_overlaps(tensors, start, len(buffer)):
        flat = tensor.reshape(-1).view(torch.uint8)
        flat[in_tensor].copy_(buffer[in_buffer])
        if not tensor.is_contiguous():  # then `flat` was a copy
            tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))


class _KeyComparison(NamedTuple):
    """Comparison of one rank's keys with the checkpoint.

    It is small at any scale, because rank 0 merges those of all ranks.
    """

    wrong: list[str]  # lines about keys whose shape or kind differs
    unexpected: list[str]  # keys that this rank requests and the checkpoint does not have
    requested: bytes  # one bit per key of `_list_keys`: 1 if this rank requests it


def _compare_keys(spec: LocalSpec, contents: Contents) -> _KeyComparison:
    """Compare the keys that this rank requests with the checkpoint."""
    # Keys whose kind or shape differs
    wrong = []
    for key, shape, _ in spec.tensors:
        if key in contents.objects:
            wrong.append(f"{key}: an object in the checkpoint, a tensor here")
        elif key in contents.tensors:
            stored_shape = contents.tensors[key].shape
            if stored_shape != shape:
                wrong.append(f"{key}: {stored_shape} in the checkpoint, {shape} here")
    for key in spec.objects:
        if key in contents.tensors:
            wrong.append(f"{key}: a tensor in the checkpoint, an object here")

    # Keys that only this rank has
    requested = {key for key, _, _ in spec.tensors}
    requested.update(spec.objects)
    checkpoint_keys = _list_keys(contents)
    unexpected = sorted(requested - set(checkpoint_keys))

    # Stored keys that this rank requests, as bits: rank 0 receives them from every rank, and a
    # large model has tens of thousands of keys.
    is_requested = np.array([key in requested for key in checkpoint_keys], dtype=bool)
    bits = np.packbits(is_requested)
    return _KeyComparison(wrong, unexpected, bits.tobytes())


def _merge_comparisons(
    comparisons: Sequence[_KeyComparison],
    contents: Contents,
    skip: Callable[[str], bool],
    location: str,
) -> LoadReport:
    """Return the unexpected and missing keys of all ranks together.

    Raises CheckpointError if a shape or kind differs.
    """
    wrong: set[str] = set()
    unexpected: set[str] = set()
    rows = []
    for comparison in comparisons:
        wrong.update(comparison.wrong)
        unexpected.update(comparison.unexpected)
        rows.append(np.frombuffer(comparison.requested, np.uint8))
    if wrong:
        summary = abbreviate(sorted(wrong), _MAX_LINES)
        raise CheckpointError(f"{location}: does not fit this model:\n  {summary}")

    # A key is missing if no rank requests it.
    checkpoint_keys = _list_keys(contents)
    bits_by_rank = np.stack(rows)  # [ranks, bytes]
    bits_of_any_rank = np.bitwise_or.reduce(bits_by_rank, axis=0)  # [bytes]
    requested = np.unpackbits(bits_of_any_rank, count=len(checkpoint_keys))  # [keys], 0 or 1
    missing = []
    for key, is_requested in zip(checkpoint_keys, requested, strict=True):
        # The common state is read with `load_common`, outside of the plan of a load.
        if not is_requested and key != COMMON_STATE and not skip(key):
            missing.append(key)
    return LoadReport(unexpected=sorted(unexpected), missing=missing)


def _list_keys(contents: Contents) -> list[str]:
    """Return all keys of a checkpoint, sorted, so that they have the same order on all ranks."""
    return sorted(contents.tensors.keys() | set(contents.objects))


def _apply_strictness(
    report: LoadReport, strictness: str, contents: Contents, location: str
) -> LoadReport:
    """Raise or log according to `strictness`; return the keys that are left to the caller."""
    unexpected_reaction, missing_reaction = STRICTNESS[strictness]
    unexpected_lines = _suggest_similar_keys(report.unexpected, _list_keys(contents))
    problems = (
        ("requested but not in the checkpoint", unexpected_lines, unexpected_reaction),
        ("in the checkpoint but not requested by any rank", report.missing, missing_reaction),
    )

    # Report both problems in one error.
    errors = []
    for title, affected_keys, reaction in problems:
        if not affected_keys:
            continue
        text = f"keys {title} ({len(affected_keys)}):\n  {abbreviate(affected_keys, _MAX_LINES)}"
        if reaction == RAISE:
            errors.append(text)
        elif reaction == LOG:
            logger.warning("%s: %s", location, text)
    if errors:
        text = "\n".join(errors)
        raise CheckpointError(f"{location}: {text}")

    # Return only the keys that the caller handles.
    left = LoadReport()
    if unexpected_reaction == RETURN:
        left.unexpected = report.unexpected
    if missing_reaction == RETURN:
        left.missing = report.missing
    return left


def _suggest_similar_keys(keys: list[str], checkpoint_keys: list[str]) -> list[str]:
    """Return one line per key: the key, and the most similar ones of the checkpoint."""
    descriptions = []
    # The search takes time: only the first keys get suggestions.
    for key in keys[:_MAX_SUGGESTIONS]:
        similar = difflib.get_close_matches(key, checkpoint_keys, n=2, cutoff=0.75)
        description = key
        if similar:
            description = f"{key} (there is {' and '.join(similar)})"
        descriptions.append(description)
    descriptions.extend(keys[_MAX_SUGGESTIONS:])
    return descriptions

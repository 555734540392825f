"""Loading in place, at any layout, and the comparison of requested keys with stored ones."""

from __future__ import annotations

import difflib
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from megatron.core.dist_checkpointing.files import COMMON_STATE
from megatron.core.dist_checkpointing.format.schema import CheckpointError
from megatron.core.dist_checkpointing.loading.reader import Reader, Request
from megatron.core.dist_checkpointing.mapping import (
    Box,
    Shape,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    narrow,
    to_relative,
)
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.dist_checkpointing.planning.planner import (
    Item,
    LocalSpec,
    abbreviate,
    describe,
    share_evenly,
)

logger = logging.getLogger(__name__)

_ROUND_BYTES = 256 << 20  # the buffer of one round of gathering, all ranks together
_LARGEST_PART = 16 << 20
_DIGEST_SIZE = 16
_MAX_SUGGESTIONS = 200

BoxOf = dict[tuple[str, Shape], Box]

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
    options: dict[str, Any] = {
        "group": group,
        "strictness": strictness,
        "skip": skip,
        "workers": workers,
    }
    return fill(
        state, reader, str(directory), **options, parallelization_group=parallelization_group
    )


def fill(
    state: ShardedStateDict,
    reader: BoxReader,
    where: str,
    *,
    group: dist.ProcessGroup | None = None,
    strictness: str = "raise_all",
    skip: Callable[[str], bool] = lambda key: False,
    workers: int = 4,
    parallelization_group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Load from a source that is open already, of any format. Collective.

    `where` names it in messages; see `load` for the other arguments.
    """
    if strictness not in STRICTNESS:
        raise ValueError(f"strictness {strictness!r} is none of {', '.join(STRICTNESS)}")
    started = time.perf_counter()
    coordination = Coordination.of(group)

    def compare() -> tuple[LocalSpec, _KeyComparison]:
        spec = describe(state)
        _check_apart(state)
        return spec, _compare_keys(spec, reader.metadata)

    def make_reports(comparisons: list[_KeyComparison]) -> list[LoadReport]:
        merged = _merge_comparisons(comparisons, reader.metadata, skip, where)
        report = _apply_strictness(merged, strictness, reader.metadata, where)
        return [report] * coordination.size

    # Phase 1: compare the keys of all ranks with the checkpoint.
    spec, comparison = coordination.run_on_all(compare)
    report: LoadReport = coordination.gather_compute_scatter(comparison, make_reports)

    # Phase 2: read. All ranks learn of an error of any rank before they wait for its share.
    shares = _share_reading(reader, spec, parallelization_group)
    report.objects = coordination.run_on_all(
        lambda: _read_local(state, reader, workers, shares, parallelization_group)
    )

    # Phase 3: exchange the data that replicas have read for each other.
    if any(shares):
        _all_gather_shares(shares, _index_boxes(state), parallelization_group)
    report.seconds = time.perf_counter() - started
    report.bytes_needed = reader.bytes_needed
    report.bytes_read = reader.bytes_read
    return report


def _check_apart(state: ShardedStateDict) -> None:
    """Assert that no memory is filled from two keys, for which threads would race.

    Only contiguous boxes are checked.
    """
    spans = []
    for (key, _), box in _index_boxes(state).items():
        tensor = box.tensor
        if tensor.is_contiguous() and tensor.nbytes:
            start = tensor.data_ptr()
            spans.append((start, start + tensor.nbytes, key))
    spans.sort()
    for (_, stop, key), (next_start, _, next_key) in pairwise(spans):
        assert stop <= next_start or key == next_key, (
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


def _select_view(item: Item, boxes: BoxOf) -> torch.Tensor:
    """Return the rows of the local box that `item` selects."""
    whole = boxes[item.key, item.box].tensor.detach()
    return narrow(whole, to_relative(item.offset, item.box), item.shape)


def _read_local(
    state: ShardedStateDict,
    reader: BoxReader,
    workers: int,
    shares: list[list[Item]],
    group: dist.ProcessGroup | None,
) -> dict[str, Any]:
    """Read this rank's share of shared boxes, all other boxes completely, and the objects.

    Returns the objects by key. Keys that the checkpoint does not have are left out.
    """
    contents = reader.metadata
    boxes = _index_boxes(state)
    shared = set()
    for share in shares:
        for item in share:
            shared.add((item.key, item.box))

    # Boxes of this rank only, then its share of the others
    requests = []
    for (key, offset), box in boxes.items():
        if (key, offset) not in shared and key in contents.tensors:
            requests.append(Request(key, offset, box.tensor))
    if shares:
        for item in shares[dist.get_rank(group)]:
            requests.append(Request(item.key, item.offset, _select_view(item, boxes)))
    reader.read_into(requests, workers)

    objects = {}
    for entry in state.values():
        if isinstance(entry, ShardedObject) and entry.key in contents.objects:
            objects[entry.key] = reader.read_object(entry.key)
    return objects


def _share_reading(
    reader: BoxReader, spec: LocalSpec, group: dist.ProcessGroup | None
) -> list[list[Item]]:
    """Return the rows that each rank of `group` reads of shared boxes. Collective.

    Data-parallel replicas have equal boxes of the weights: each reads an equal share of these,
    which are then gathered. Boxes of one rank only (optimizer shards) are not shared. Returns the
    same shares on every rank, [] without a group. Ranks exchange a digest per box instead of the
    boxes, because a replica has tens of thousands of them.
    """
    if group is None or dist.get_world_size(group) == 1:
        return []
    boxes = []
    for tensor in spec.tensors:
        if tensor.key in reader.metadata.tensors:
            for offset, shape in tensor.boxes:
                boxes.append(Item(tensor.key, tensor.dtype, offset, offset, shape))
    # All ranks must number their boxes equally, although their models may have another order.
    boxes.sort()

    # Find the boxes that all ranks have.
    digests = [xxhash.xxh3_128_digest(repr(item).encode()) for item in boxes]
    common = set(digests)
    for packed in Coordination.of(group).all_gather(b"".join(digests)):
        common &= _unpack_digests(packed)
    shared = []
    for item, digest in zip(boxes, digests, strict=True):
        if digest in common:
            shared.append(item)
    return share_evenly(shared, dist.get_world_size(group))


def _unpack_digests(packed: bytes) -> set[bytes]:
    """Return the digests that are concatenated in `packed`."""
    starts = range(0, len(packed), _DIGEST_SIZE)
    return {packed[start : start + _DIGEST_SIZE] for start in starts}


def _all_gather_shares(
    shares: list[list[Item]], boxes: BoxOf, group: dist.ProcessGroup | None
) -> None:
    """Gather the shares that the ranks of `group` have read, in place. Collective."""
    rank = dist.get_rank(group)
    size = dist.get_world_size(group)
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")

    # The memory of all shares, by rank, and the bytes of the longest share
    views_of_ranks = []
    longest = 0
    for share in shares:
        views = [_select_view(item, boxes) for item in share]
        views_of_ranks.append(views)
        longest = max(longest, sum(view.nbytes for view in views))

    # Rounds of bounded size: gathering whole shares at once would double the memory of a replica.
    round_size = max(1, min(longest, _LARGEST_PART, _ROUND_BYTES // size))
    mine = torch.empty(round_size, dtype=torch.uint8, device=device)
    received = torch.empty(size, round_size, dtype=torch.uint8, device=device)
    for start in range(0, longest, round_size):
        _copy_bytes(views_of_ranks[rank], start, mine)
        dist.all_gather(list(received.unbind()), mine, group=group)
        for other in range(size):
            if other != rank:
                _copy_bytes(views_of_ranks[other], start, received[other], fill=True)


def _copy_bytes(
    tensors: list[torch.Tensor], start: int, buffer: torch.Tensor, fill: bool = False
) -> None:
    """Copy bytes of concatenated tensors, from `start` on, to `buffer`; with `fill` from it."""
    stop = start + len(buffer)
    position = 0
    for tensor in tensors:
        # The bytes [first, last) of all tensors are in this one and in the buffer.
        first = max(start, position)
        last = min(stop, position + tensor.nbytes)
        if first < last:
            flat = tensor.reshape(-1).view(torch.uint8)
            in_tensor = flat[first - position : last - position]
            in_buffer = buffer[first - start : last - start]
            if fill:
                in_tensor.copy_(in_buffer)
                if not tensor.is_contiguous():  # then `flat` was a copy
                    tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))
            else:
                in_buffer.copy_(in_tensor)
        position += tensor.nbytes


class _KeyComparison(NamedTuple):
    """Comparison of one rank's keys with the checkpoint.

    It is small at any scale, because rank 0 merges those of all ranks.
    """

    wrong: list[str]  # lines about keys whose shape or kind differs
    unexpected: list[str]
    requested: bytes  # a bit per key of the checkpoint, in sorted order: requested by this rank


def _compare_keys(spec: LocalSpec, contents: Contents) -> _KeyComparison:
    """Compare the keys that this rank requests with the checkpoint."""
    # Keys whose kind or shape differs
    requested: set[str] = set()
    wrong = []
    for key, shape, *_ in spec.tensors:
        requested.add(key)
        if key in contents.objects:
            wrong.append(f"{key}: an object in the checkpoint, a tensor here")
        elif key in contents.tensors and contents.tensors[key].shape != shape:
            wrong.append(f"{key}: {contents.tensors[key].shape} in the checkpoint, {shape} here")
    for key in spec.objects:
        requested.add(key)
        if key in contents.tensors:
            wrong.append(f"{key}: a tensor in the checkpoint, an object here")

    # Keys that one side lacks. The requested ones are sent as bits, because rank 0 receives them
    # from every rank, and a large model has tens of thousands of keys.
    stored = _list_keys(contents)
    unexpected = sorted(requested - set(stored))
    is_requested = np.array([key in requested for key in stored], dtype=bool)
    return _KeyComparison(wrong, unexpected, np.packbits(is_requested).tobytes())


def _merge_comparisons(
    comparisons: Sequence[_KeyComparison],
    contents: Contents,
    skip: Callable[[str], bool],
    where: str,
) -> LoadReport:
    """Merge the comparisons of all ranks. Raises CheckpointError if a shape or kind differs."""
    wrong: set[str] = set()
    unexpected: set[str] = set()
    rows = []
    for comparison in comparisons:
        wrong.update(comparison.wrong)
        unexpected.update(comparison.unexpected)
        rows.append(np.frombuffer(comparison.requested, np.uint8))
    if wrong:
        raise CheckpointError(
            f"{where}: does not fit this model:\n  " + abbreviate(sorted(wrong), 50)
        )

    # A key is missing if no rank requests it.
    stored = _list_keys(contents)
    bits_of_any_rank = np.bitwise_or.reduce(np.stack(rows), axis=0)  # [bytes]
    requested = np.unpackbits(bits_of_any_rank, count=len(stored))
    missing = []
    for key, is_requested in zip(stored, requested, strict=True):
        # The common state is read with `load_common`, outside of the plan of a load.
        if not is_requested and key != COMMON_STATE and not skip(key):
            missing.append(key)
    return LoadReport(unexpected=sorted(unexpected), missing=missing)


def _list_keys(contents: Contents) -> list[str]:
    """Return all keys of a checkpoint in the order of the bits of `_KeyComparison.requested`."""
    return sorted(contents.tensors.keys() | set(contents.objects))


def _apply_strictness(
    report: LoadReport, strictness: str, contents: Contents, where: str
) -> LoadReport:
    """Raise or log according to `strictness`; return the keys that are left to the caller."""
    unexpected_reaction, missing_reaction = STRICTNESS[strictness]
    unexpected_lines = _suggest_similar_keys(report.unexpected, _list_keys(contents))
    problems = (
        ("requested but not in the checkpoint", unexpected_lines, unexpected_reaction),
        ("in the checkpoint but not requested by any rank", report.missing, missing_reaction),
    )
    raised = []
    for title, lines, reaction in problems:
        text = f"keys {title} ({len(lines)}):\n  {abbreviate(lines, 50)}"
        if lines and reaction == RAISE:
            raised.append(text)
        elif lines and reaction == LOG:
            logger.warning("%s: %s", where, text)
    if raised:
        raise CheckpointError(f"{where}: " + "\n".join(raised))

    # Return only the keys that the caller handles.
    left = LoadReport()
    if unexpected_reaction == RETURN:
        left.unexpected = report.unexpected
    if missing_reaction == RETURN:
        left.missing = report.missing
    return left


def _suggest_similar_keys(keys: list[str], stored: list[str]) -> list[str]:
    """Return the keys, each with the most similar ones of the checkpoint.

    The search takes time: only the first keys are searched for.
    """
    lines = []
    for key in keys[:_MAX_SUGGESTIONS]:
        similar = difflib.get_close_matches(key, stored, n=2, cutoff=0.75)
        if similar:
            key = f"{key} (there is {' and '.join(similar)})"
        lines.append(key)
    return lines + keys[_MAX_SUGGESTIONS:]

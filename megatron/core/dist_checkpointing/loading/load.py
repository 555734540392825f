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

    def report_of(comparisons: list[_KeyComparison]) -> list[LoadReport]:
        merged = _merge_comparisons(comparisons, reader.metadata, skip, where)
        return [_apply_strictness(merged, strictness, reader.metadata, where)] * coordination.size

    # All ranks learn of an error of any rank before they wait for the share of another one.
    spec, comparison = coordination.run_on_all(compare)
    report: LoadReport = coordination.gather_compute_scatter(comparison, report_of)
    shares = _share_reading(reader, spec, parallelization_group)
    objects = coordination.run_on_all(
        lambda: _read_local(state, reader, workers, shares, parallelization_group)
    )
    if any(shares):
        _all_gather_shares(shares, _boxes_of(state), parallelization_group)
    report.objects = objects
    report.seconds = time.perf_counter() - started
    report.bytes_needed = reader.bytes_needed
    report.bytes_read = reader.bytes_read
    return report


def _check_apart(state: ShardedStateDict) -> None:
    """Assert that no memory is filled from two keys, for which threads would race.

    Only contiguous boxes are checked.
    """
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, key)
        for (key, _), box in _boxes_of(state).items()
        if (tensor := box.tensor).is_contiguous() and tensor.nbytes
    )
    for (_, stop, key), (start, _, other) in pairwise(spans):
        assert stop <= start or key == other, (
            f"{key} and {other} are the same memory, which must have one source"
        )


def _boxes_of(state: ShardedStateDict) -> BoxOf:
    tensors = [entry for entry in state.values() if isinstance(entry, ShardedTensor)]
    return {(entry.key, box.offset): box for entry in tensors for box in entry.boxes}


def _view_of(item: Item, boxes: BoxOf) -> torch.Tensor:
    """Return the rows of the local box that `item` selects."""
    return narrow(
        boxes[item.key, item.box].tensor.detach(), to_relative(item.offset, item.box), item.shape
    )


def _read_local(
    state: ShardedStateDict,
    reader: BoxReader,
    workers: int,
    shares: list[list[Item]],
    group: dist.ProcessGroup | None,
) -> dict[str, Any]:
    """Read this rank's share of shared boxes, and all other boxes completely."""
    boxes = _boxes_of(state)
    shared = {(item.key, item.box) for share in shares for item in share}
    alone = [
        place for place in boxes if place not in shared and place[0] in reader.metadata.tensors
    ]
    requests = [Request(key, offset, boxes[key, offset].tensor) for key, offset in alone]
    if shares:
        mine = shares[dist.get_rank(group)]
        requests += [Request(item.key, item.offset, _view_of(item, boxes)) for item in mine]
    reader.read_into(requests, workers)
    wanted = [entry.key for entry in state.values() if isinstance(entry, ShardedObject)]
    return {key: reader.read_object(key) for key in wanted if key in reader.metadata.objects}


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
    # Sorted, so that all ranks number their boxes equally: their models may have another order.
    boxes = sorted(
        Item(tensor.key, tensor.dtype, offset, offset, shape)
        for tensor in spec.tensors
        if tensor.key in reader.metadata.tensors
        for offset, shape in tensor.boxes
    )
    digests = [xxhash.xxh3_128_digest(repr(item).encode()) for item in boxes]
    everywhere = set(digests)
    for packed in Coordination.of(group).all_gather(b"".join(digests)):
        everywhere &= {packed[i : i + _DIGEST_SIZE] for i in range(0, len(packed), _DIGEST_SIZE)}
    shared = [item for item, digest in zip(boxes, digests, strict=True) if digest in everywhere]
    return share_evenly(shared, dist.get_world_size(group))


def _all_gather_shares(
    shares: list[list[Item]], boxes: BoxOf, group: dist.ProcessGroup | None
) -> None:
    """Gather the shares that the ranks of `group` have read, in place. Collective."""
    rank = dist.get_rank(group)
    size = dist.get_world_size(group)
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    views = [[_view_of(item, boxes) for item in share] for share in shares]
    longest = max(sum(view.nbytes for view in share) for share in views)
    part = max(1, min(longest, _LARGEST_PART, _ROUND_BYTES // size))
    mine = torch.empty(part, dtype=torch.uint8, device=device)
    received = torch.empty(size, part, dtype=torch.uint8, device=device)
    # Rounds of bounded size: gathering whole shares at once would double the memory of a replica.
    for start in range(0, longest, part):
        _copy_bytes(views[rank], start, mine)
        dist.all_gather(list(received.unbind()), mine, group=group)
        for other in range(size):
            if other != rank:
                _copy_bytes(views[other], start, received[other], fill=True)


def _copy_bytes(
    tensors: list[torch.Tensor], start: int, buffer: torch.Tensor, fill: bool = False
) -> None:
    """Copy bytes of concatenated tensors, from `start` on, to `buffer`; with `fill` from it."""
    position = 0
    for tensor in tensors:
        first = max(start, position)
        last = min(start + len(buffer), position + tensor.nbytes)
        if first < last:
            flat = tensor.reshape(-1).view(torch.uint8)
            part = buffer[first - start : last - start]
            inside = slice(first - position, last - position)
            if not fill:
                part.copy_(flat[inside])
            else:
                flat[inside] = part
                if not tensor.is_contiguous():  # then `flat` was a copy
                    tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))
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
    shapes: dict[str, tuple[int, ...] | None] = {
        tensor.key: tensor.shape for tensor in spec.tensors
    }
    shapes.update(dict.fromkeys(spec.objects))
    wrong = []
    for key, shape in shapes.items():
        if shape is None and key in contents.tensors:
            wrong.append(f"{key}: a tensor in the checkpoint, an object here")
        elif shape is not None and key in contents.objects:
            wrong.append(f"{key}: an object in the checkpoint, a tensor here")
        elif shape is not None and key in contents.tensors and contents.tensors[key].shape != shape:
            wrong.append(f"{key}: {contents.tensors[key].shape} in the checkpoint, {shape} here")
    stored = _stored_keys(contents)
    # Bits, because rank 0 receives them from every rank, and a large model has tens of thousands of
    # keys.
    requested = np.packbits(
        np.fromiter((key in shapes for key in stored), dtype=bool, count=len(stored))
    )
    return _KeyComparison(wrong, sorted(shapes.keys() - set(stored)), requested.tobytes())


def _merge_comparisons(
    comparisons: Sequence[_KeyComparison],
    contents: Contents,
    skip: Callable[[str], bool],
    where: str,
) -> LoadReport:
    """Merge the comparisons of all ranks. Raises CheckpointError if a shape or kind differs."""
    wrong = sorted({line for comparison in comparisons for line in comparison.wrong})
    if wrong:
        raise CheckpointError(f"{where}: does not fit this model:\n  " + abbreviate(wrong, 50))
    unexpected = sorted({key for comparison in comparisons for key in comparison.unexpected})
    by_rank = np.frombuffer(b"".join(c.requested for c in comparisons), np.uint8).reshape(
        len(comparisons), -1
    )
    stored = _stored_keys(contents)
    requested = np.unpackbits(np.bitwise_or.reduce(by_rank, axis=0), count=len(stored))
    missing = []
    for key, is_requested in zip(stored, requested, strict=True):
        if not is_requested and not skip(key):
            missing.append(key)
    return LoadReport(unexpected=unexpected, missing=missing)


def _stored_keys(contents: Contents) -> list[str]:
    return sorted(contents.tensors.keys() | set(contents.objects))


def _apply_strictness(
    report: LoadReport, strictness: str, contents: Contents, where: str
) -> LoadReport:
    """Raise or log according to `strictness`; return the keys that are left to the caller."""
    stored = _stored_keys(contents)
    unexpected = [_suggest_similar(key, stored) for key in report.unexpected[:200]]
    unexpected += report.unexpected[200:]
    titles = ("asked for but not in the checkpoint", "in the checkpoint but asked for by no rank")
    raised = []
    left = []
    found = ((report.unexpected, unexpected), (report.missing, report.missing))
    for (keys, lines), title, reaction in zip(found, titles, STRICTNESS[strictness], strict=True):
        text = f"keys {title} ({len(keys)}):\n  {abbreviate(lines, 50)}"
        if keys and reaction == RAISE:
            raised.append(text)
        elif keys and reaction == LOG:
            logger.warning("%s: %s", where, text)
        left.append(keys if reaction == RETURN else [])
    if raised:
        raise CheckpointError(f"{where}: " + "\n".join(raised))
    return LoadReport(unexpected=left[0], missing=left[1])


def _suggest_similar(key: str, stored: list[str]) -> str:
    near = difflib.get_close_matches(key, stored, n=2, cutoff=0.75)
    return f"{key} (there is {' and '.join(near)})" if near else key

"""Loading in place, at any layout."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch.distributed as dist

from megatron.core.dist_checkpointing.files import COMMON
from megatron.core.dist_checkpointing.format.checksums import BlockVerifier
from megatron.core.dist_checkpointing.format.schema import CheckpointError
from megatron.core.dist_checkpointing.format.unpickler import safe_load
from megatron.core.dist_checkpointing.loading.fully_parallel_load import (
    all_gather_shares,
    boxes_of,
    share_reading,
    view_of,
)
from megatron.core.dist_checkpointing.loading.reader import Reader, Request
from megatron.core.dist_checkpointing.loading.strictness import (
    Contents,
    KeyComparison,
    KeyReport,
    apply_strictness,
    check_strictness,
    compare_keys,
    merge_comparisons,
)
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.dist_checkpointing.planning.planner import Item, LocalSpec, describe
from megatron.core.object_storage import path_of


@dataclass
class LoadReport:
    """What a load brought besides the tensors. `unexpected` and `missing` keys are filled by return_* strictness."""

    objects: dict[str, Any] = field(default_factory=dict)  # by key of the ShardedObject
    unexpected: list[str] = field(default_factory=list)  # asked for, not in the checkpoint: left as they were
    missing: list[str] = field(default_factory=list)  # in the checkpoint, asked for by no rank
    bytes_needed: int = 0
    bytes_read: int = 0
    seconds: float = 0.0


def load(
    state: ShardedStateDict,
    directory: str | os.PathLike[str],
    *,
    group: dist.ProcessGroup | None = None,
    strictness: str = "raise_all",
    skip: Callable[[str], bool] = lambda key: False,
    workers: int = 4,
    verify: bool = False,
    parallelization_group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Fill the tensors of `state` in place from the checkpoint, whatever layout wrote it; a collective.

    `strictness` takes Megatron-LM's values; `skip` says which keys of the checkpoint are left out on purpose (the
    optimizer's, say). Tensors are converted if their dtype is not the stored one. `verify` checks what is read.
    `parallelization_group` (data-parallel replicas): what all its ranks want is read once and exchanged among them.
    Raises CheckpointError on every rank if any rank fails; the tensors are undefined then.
    """
    coordination = Coordination.of(group)
    reader: Reader | None = None
    error: CheckpointError | None = None
    try:
        reader = Reader(directory, verify=verify)
    except CheckpointError as caught:
        error = caught
    coordination.raise_together(error)
    assert reader is not None
    options: dict[str, Any] = {"group": group, "strictness": strictness, "skip": skip, "workers": workers}
    return fill(state, reader, str(directory), **options, parallelization_group=parallelization_group)


class BoxReader(Protocol):
    """Where a load reads from: a `Reader`, or a checkpoint of another format. Errors are ValueErrors."""

    bytes_needed: int
    bytes_read: int

    @property
    def metadata(self) -> Contents: ...

    def read_into(self, requests: Sequence[Request], workers: int = 1) -> None: ...

    def read_object(self, key: str) -> Any: ...


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
    """`load` from what is open already, whatever its format; `where` names it in messages. A collective."""
    check_strictness(strictness)
    started = time.perf_counter()
    coordination = Coordination.of(group)
    error: ValueError | None = None
    spec, comparison = LocalSpec((), ()), KeyComparison([], [], b"")
    try:
        spec = describe(state)
        _check_apart(state)
        comparison = compare_keys(spec, reader.metadata)
    except ValueError as caught:
        error = caught
    coordination.raise_together(error)

    def report_of(comparisons: list[KeyComparison]) -> list[KeyReport]:
        merged = merge_comparisons(comparisons, reader.metadata, skip, where)
        return [apply_strictness(merged, strictness, reader.metadata, where)] * coordination.size

    report: KeyReport = coordination.map_at_coordinator(comparison, report_of)
    # All ranks agree so far. From here on an error of one is told to all before anybody waits for its share.
    shares = _shares(reader, spec, parallelization_group)
    try:
        objects = _read_local(state, reader, workers, shares, parallelization_group)
    except ValueError as caught:
        error = caught
    coordination.raise_together(error)
    if any(shares):
        all_gather_shares(shares, boxes_of(state), parallelization_group)
    seconds = time.perf_counter() - started
    return LoadReport(objects, report.unexpected, report.missing, reader.bytes_needed, reader.bytes_read, seconds)


def _check_apart(state: ShardedStateDict) -> None:
    """No memory is filled from two keys: threads would race for it. (Only contiguous boxes are looked at.)"""
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, key)
        for (key, _), box in boxes_of(state).items()
        if (tensor := box.tensor).is_contiguous() and tensor.nbytes
    )
    for (_, stop, key), (start, _, other) in pairwise(spans):
        assert stop <= start or key == other, f"{key} and {other} are the same memory, which must have one source"


def _shares(reader: BoxReader, spec: LocalSpec, group: dist.ProcessGroup | None) -> list[list[Item]]:
    """Who reads what of the boxes that all ranks of `group` want; empty without a group."""
    if group is None or dist.get_world_size(group) == 1:
        return []
    stored = spec._replace(tensors=tuple(t for t in spec.tensors if t.key in reader.metadata.tensors))
    return share_reading(stored, group)


def _read_local(
    state: ShardedStateDict,
    reader: BoxReader,
    workers: int,
    shares: list[list[Item]],
    group: dist.ProcessGroup | None,
) -> dict[str, Any]:
    """Read into this rank's boxes: of the shared ones its own share only, all others whole."""
    boxes = boxes_of(state)
    shared = {(item.key, item.box) for share in shares for item in share}
    alone = [place for place in boxes if place not in shared and place[0] in reader.metadata.tensors]
    requests = [Request(key, offset, boxes[key, offset].tensor) for key, offset in alone]
    if shares:
        mine = shares[dist.get_rank(group)]
        requests += [Request(item.key, item.offset, view_of(item, boxes)) for item in mine]
    reader.read_into(requests, workers)
    wanted = [entry.key for entry in state.values() if isinstance(entry, ShardedObject)]
    return {key: reader.read_object(key) for key in wanted if key in reader.metadata.objects}


def load_common(directory: str | os.PathLike[str], *, verify: bool = False) -> dict[str, Any]:
    """What was saved as `common`; {} if the checkpoint has no `common.pt`."""
    path = path_of(directory) / COMMON
    if not path.exists():
        return {}
    if verify:
        BlockVerifier(path.parent).check_file(COMMON)
    common = safe_load(path, mmap=False)
    if not isinstance(common, dict):
        raise CheckpointError(f"{path}: holds a {type(common).__name__} instead of a dict")
    return common

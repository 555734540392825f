"""Collectives and messages that this process has started, and the time it has waited for them.

`recorded` replaces methods of torch's classes while its block is active, so that it sees the calls
of all modules. A call costs microseconds.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

_METHODS = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_to_all_single",
    "allgather",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)
"""Methods of ProcessGroup that start communication; each version of torch has most of them."""
_MAX_LISTED = 8  # ranks


@dataclass(frozen=True)
class Operation:
    """A collective or message of the training thread."""

    name: str
    group: str
    index: int  # among the operations of the group, from 1

    def __str__(self) -> str:
        return f"{self.name.strip('_')} {self.index} of {self.group}"


class CollectiveRecorder:
    """Counts of operations by group; the last one of the training thread, which creates it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[str] = Counter()
        self.last: Operation | None = None
        self.is_waiting = False
        self.waited_seconds = 0.0
        self._clock = clock
        self._training_thread = threading.get_ident()
        self._labels: dict[str, str] = {}

    def record(self, name: str, group: dist.ProcessGroup) -> None:
        """Record that this thread starts an operation."""
        label = self._labels.get(group.group_name)
        if label is None:
            label = self._labels[group.group_name] = describe_group(group)
        self.counts[label] += 1
        if self._is_training():
            self.last = Operation(name, label, self.counts[label])

    def wait(self, wait: Callable[..., Any], work: dist.Work, *args: Any, **options: Any) -> Any:
        """Call `wait(work, ...)`, and add its duration if this is the training thread."""
        if threading.get_ident() != self._training_thread:
            return wait(work, *args, **options)
        since = self._clock()
        self.is_waiting = True
        try:
            return wait(work, *args, **options)
        finally:
            self.is_waiting = False
            self.waited_seconds += self._clock() - since

    def _is_training(self) -> bool:
        """Return whether this is the training thread or one of autograd's, which are not Python's.

        Background saves have threads and groups of their own.
        """
        thread = threading.get_ident()
        if thread == self._training_thread:
            return True
        return all(thread != python_thread.ident for python_thread in threading.enumerate())


def describe_group(group: dist.ProcessGroup) -> str:
    """Return the description of a group and its ranks, the same on each of them."""
    description = "world" if group.group_desc == "default_pg" else group.group_desc
    try:
        ranks = dist.get_process_group_ranks(group)
    except (KeyError, ValueError):  # it is being created
        return description
    return f"{description} ({describe_ranks(ranks)})"


def describe_ranks(ranks: Sequence[int]) -> str:
    """Return a list of ranks as text, shortened if it is long."""
    label = "rank" if len(ranks) == 1 else "ranks"
    listed = ", ".join(map(str, ranks[:_MAX_LISTED]))
    if len(ranks) <= _MAX_LISTED:
        return f"{label} {listed}"
    return f"{label} {listed}, ..., {ranks[-1]}: {len(ranks)} of them"


@contextmanager
def recorded() -> Iterator[CollectiveRecorder]:
    """Record the operations of all process groups inside the block."""
    recorder = CollectiveRecorder()
    replaced: list[tuple[type, str, Any]] = []

    def replace(owner: type, name: str, method: Any) -> None:
        # Not `getattr`, which returns a function that does not bind to its instance.
        replaced.append((owner, name, vars(owner)[name]))
        setattr(owner, name, method)

    wait = dist.Work.wait
    for name in _METHODS:
        if name in vars(dist.ProcessGroup):
            start = _make_start(recorder, name, getattr(dist.ProcessGroup, name))
            replace(dist.ProcessGroup, name, start)
    replace(
        dist.Work,
        "wait",
        lambda work, *args, **options: recorder.wait(wait, work, *args, **options),
    )
    try:
        yield recorder
    finally:
        for owner, name, method in replaced:
            setattr(owner, name, method)


def _make_start(
    recorder: CollectiveRecorder, name: str, method: Callable[..., Any]
) -> Callable[..., Any]:
    def start(group: dist.ProcessGroup, *args: Any, **options: Any) -> Any:
        recorder.record(name, group)
        return method(group, *args, **options)

    return start

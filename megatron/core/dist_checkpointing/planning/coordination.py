"""The collectives of planning and loading, which are local in a process without process group."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from megatron.core.object_path import ObjectPath
from megatron.core.safe_files.errors import CheckpointError, DamagedError

T = TypeVar("T")


# gloo groups of the ranks of NCCL groups. An entry ends with its NCCL group, e.g., at an in-process
# restart.
_host_groups: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def _get_host_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return `group`, or a gloo group of the same ranks if `group` uses NCCL.

    The first call for a group is collective.
    """
    if dist.get_backend(group) != "nccl":
        return group
    device_group = dist.group.WORLD if group is None else group
    assert device_group is not None
    if device_group not in _host_groups:
        ranks = dist.get_process_group_ranks(device_group)
        _host_groups[device_group] = dist.new_group(
            ranks, backend="gloo", use_local_synchronization=True
        )
    return _host_groups[device_group]


def _encode(value: Any) -> torch.Tensor:
    """Return the bytes of a value for another rank of the same job."""
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _decode(content: torch.Tensor) -> Any:
    return pickle.loads(content.numpy().data)


def _wait_for(transfers: list[dist.Work | None]) -> None:
    for transfer in transfers:
        assert transfer is not None
        transfer.wait()


@dataclass(frozen=True)
class Coordination:
    """Rank and size in `group`; rank 0 coordinates.

    Objects are exchanged on the CPU if the group uses gloo.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Coordination:
        """Return the coordination of `group`.

        None is the default group, or a single process if torch.distributed is not initialized.
        """
        if group is None and not dist.is_initialized():
            return cls(None, 0, 1)
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    @property
    def is_coordinator(self) -> bool:
        return self.rank == 0

    def all_true(self, value: bool) -> bool:
        """Return whether `value` is true on every rank, via an all-reduce of one number.

        It does not wait for a GPU: NCCL runs the operations of a communicator one after another, so
        that its all-reduce would end after those of training that are queued.
        """
        if self.size == 1:
            return value
        # The minimum is 0 as soon as one rank has False.
        flag = torch.tensor([int(value)], dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=_get_host_group(self.group))
        return bool(flag.item())

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank. Values are pickled."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=_get_host_group(self.group))
        return values

    def run_on_rank0(self, function: Callable[[], T]) -> T:
        """Return the result of `function()`, computed on rank 0, on all ranks.

        Its ValueError or OSError is raised on all ranks.
        """
        # Errors are broadcast like results: otherwise the other ranks would wait forever.
        answer: list[Any] = [None]
        if self.is_coordinator:
            try:
                answer = [function()]
            except (ValueError, OSError) as error:
                answer = [error]
        if self.size > 1:
            group = _get_host_group(self.group)
            dist.broadcast_object_list(answer, src=self._global_rank(0), group=group)
        if isinstance(answer[0], (ValueError, OSError)):
            raise answer[0]
        result: T = answer[0]
        return result

    def gather_compute_scatter(self, value: Any, function: Callable[[list[Any]], list[Any]]) -> Any:
        """Return this rank's entry of `function(values of all ranks)`, computed on rank 0.

        Its CheckpointError is raised on all ranks.
        """
        values = self._gather(value)
        results: list[Any] | None = None
        if self.is_coordinator:
            assert values is not None
            try:
                results = function(values)
            except CheckpointError as error:
                # Every rank receives the error as its entry.
                results = [error] * self.size
        result = self._scatter(results)
        if isinstance(result, CheckpointError):
            raise result
        return result

    def raise_on_all(self, error: Exception | None) -> None:
        """Raise CheckpointError on all ranks, naming the failed ones, if any rank has an error.

        It is a DamagedError if that of any rank is one.
        """
        # Without errors, the usual case, only one number is exchanged.
        if self.all_true(error is None):
            return
        if self.size == 1 and error is not None:
            raise error
        failure = None
        if error is not None:
            failure = (str(error), isinstance(error, DamagedError))
        failures = self.all_gather(failure)

        # One line per distinct message, with the ranks that report it
        ranks_of_text: dict[str, list[str]] = {}
        is_damage = False
        for rank, failure in enumerate(failures):
            if failure is not None:
                ranks = ranks_of_text.setdefault(failure[0], [])
                ranks.append(str(rank))
                is_damage |= failure[1]
        messages = []
        for text, ranks in ranks_of_text.items():
            all_ranks = ", ".join(ranks)
            messages.append(f"rank {all_ranks}: {text}")
        error_type = DamagedError if is_damage else CheckpointError
        raise error_type("\n".join(messages)) from error

    def run_on_all(self, function: Callable[[], T]) -> T:
        """Return the result of `function()` on this rank.

        If it raises a ValueError or an OSError on any rank, all ranks raise CheckpointError.
        """
        result: list[T] = []
        error: ValueError | OSError | None = None
        try:
            result.append(function())
        except (ValueError, OSError) as caught:
            error = caught
        self.raise_on_all(error)
        return result[0]

    def _gather(self, value: Any) -> list[Any] | None:
        """Return the values of all ranks on the coordinator, None elsewhere.

        Each rank sends as many bytes as its value has. `dist.gather_object` would pad all of them
        to the largest one, and with NCCL exchange them on the GPU.
        """
        if self.size == 1:
            return [value]
        group = _get_host_group(self.group)
        content = _encode(value)
        size = torch.tensor([content.numel()])
        if not self.is_coordinator:
            dist.gather(size, dst=self._global_rank(0), group=group)
            dist.send(content, self._global_rank(0), group=group)
            return None
        sizes = [torch.empty_like(size) for _ in range(self.size)]
        dist.gather(size, sizes, dst=self._global_rank(0), group=group)
        contents = [content]
        transfers = []
        for rank in range(1, self.size):
            contents.append(torch.empty(int(sizes[rank]), dtype=torch.uint8))
            transfers.append(dist.irecv(contents[rank], self._global_rank(rank), group=group))
        _wait_for(transfers)
        return [_decode(received) for received in contents]

    def _scatter(self, values: list[Any] | None) -> Any:
        """Return this rank's entry of `values`, which the coordinator has; see `_gather`."""
        if self.size == 1:
            assert values is not None
            return values[0]
        group = _get_host_group(self.group)
        size = torch.empty(1, dtype=torch.int64)
        if not self.is_coordinator:
            dist.scatter(size, src=self._global_rank(0), group=group)
            content = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(content, self._global_rank(0), group=group)
            return _decode(content)
        assert values is not None
        contents = [_encode(value) for value in values]
        sizes = [torch.tensor([content.numel()]) for content in contents]
        dist.scatter(size, sizes, src=self._global_rank(0), group=group)
        transfers = []
        for rank in range(1, self.size):
            transfers.append(dist.isend(contents[rank], self._global_rank(rank), group=group))
        _wait_for(transfers)
        return values[0]

    def _global_rank(self, rank: int) -> int:
        """Return the rank in the world of a rank of the group."""
        if self.group is None:
            return rank
        return dist.get_global_rank(self.group, rank)


# ---- Waiting until all ranks see files of a shared file system ----
#
# The client of a network file system may remember for a while that a name does not exist.

# Seconds in which all ranks see a new name: an NFS client may remember for 30 seconds (acdirmin)
# that a directory has no such entry.
VISIBLE_WITHIN = 40.0
_PAUSE = 0.1  # seconds between two looks
_SHARDS = ".distcp"  # file name extension


def wait_until_visible(paths: Iterable[Path]) -> list[Path]:
    """Wait for files that another rank has seen, and return those that do not appear in time."""
    deadline = time.monotonic() + VISIBLE_WITHIN
    late = list(paths)
    while True:
        late = [path for path in late if not path.exists()]
        if not late or time.monotonic() > deadline:
            return late
        time.sleep(_PAUSE)


def wait_until_all_ranks_see(directory: Path, ranks: Coordination) -> None:
    """Wait until every rank sees the files of a checkpoint that rank 0 sees. Collective.

    Shards are left out, because there are many: a `Reader` waits for those that it opens. A rank
    that opens a checkpoint without its `common.pt` or `checksums.bin` would take it for a
    checkpoint of another program, or not verify it. Raises CheckpointError on every rank if a file
    stays invisible on one.
    """
    if isinstance(directory, ObjectPath):
        return
    names = ranks.run_on_rank0(lambda: _list_small_files(directory))

    def wait() -> None:
        late = wait_until_visible(directory / name for name in names)
        if late:
            raise CheckpointError(
                f"{late[0]} is not visible, but rank 0 sees it: the checkpoint must be in a "
                "directory that all nodes share, or be copied to every node"
            )

    ranks.run_on_all(wait)


def _list_small_files(directory: Path) -> list[str]:
    """Return the names of the files and directories in a checkpoint, except shards.

    A checkpoint that is a file contains none.
    """
    names = []
    for path in directory.glob("*"):
        # Dangling links are invisible everywhere.
        if path.suffix != _SHARDS and path.exists():
            names.append(path.name)
    return names

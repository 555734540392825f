"""Checkpoints on the disks of the nodes, as the rest of the engine knows them.

The implementation is the package `tiers`, which the functions of this module import.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, Protocol

from megatron.core.dist_checkpointing.choice import Candidate
from megatron.core.dist_checkpointing.ownership.fencing import Generation, GenerationId
from megatron.core.dist_checkpointing.ownership.lineage import Lineage
from megatron.core.dist_checkpointing.saving.commit import PendingCheckpoint
from megatron.core.dist_checkpointing.saving.save_thread import SaveHandle, SaveThread
from megatron.core.dist_checkpointing.saving.saver import MakeExport
from megatron.core.wings import resolve

_LOCAL_TIER = "megatron.core.dist_checkpointing.tiers.local_tier:LocalTier"
_LOCAL_SAVER = "megatron.core.dist_checkpointing.tiers.local_tier:LocalSaver"
_COPIER = "megatron.core.dist_checkpointing.tiers.copier:CheckpointCopier"
_FIND = "megatron.core.dist_checkpointing.tiers.distributed_local_checkpoint:find_on_all_nodes"
_OPEN = (
    "megatron.core.dist_checkpointing.tiers.distributed_local_checkpoint:DistributedLocalCheckpoint"
)


class WriterFiles(NamedTuple):
    """The copies of the files of one writer."""

    marker_size: int  # bytes of the file with its checksums
    nodes: list[int]  # nodes that have all files of the writer


class LocalCheckpointInfo(NamedTuple):
    """A checkpoint on the disks of all nodes together; one with a `problem` is not complete."""

    name: str
    writers: list[WriterFiles]  # by rank of the writer
    lineage: Lineage
    problem: str | None = None

    def to_candidate(self, damaged: Collection[str] = ()) -> Candidate:
        """Return the entry for the choice; `damaged` are names of those that could not be read."""
        problem = self.problem
        if problem is None and self.name in damaged:
            problem = "it is damaged"
        return Candidate(self.name, self.lineage, problem, is_local=True)


class LocalInventory(NamedTuple):
    """The local checkpoints of a run, newest first, and those of directories of other runs."""

    checkpoints: list[LocalCheckpointInfo] = []
    of_other_runs: list[Candidate] = []

    @property
    def usable(self) -> list[LocalCheckpointInfo]:
        return [info for info in self.checkpoints if info.problem is None]


class Tier(Protocol):
    """Storage of a run on the disks of the nodes (`tiers.local_tier.LocalTier`)."""

    @property
    def root(self) -> Path:
        """Return the directory of this node that contains the checkpoints."""

    def list_generations(self) -> list[GenerationId]:
        """Return the launches that have recorded themselves or saved on this node."""

    def record_generation(self, generation: GenerationId) -> None:
        """Record on this node that a launch has taken `generation`."""


class TierSaver(Protocol):
    """State that all saves to the nodes share (`tiers.local_tier.LocalSaver`)."""

    def checkpoint(self, iteration: int, save_id: str) -> PendingCheckpoint:
        """Begin a checkpoint; all ranks do at the same time."""

    def close(self) -> None:
        """End the threads that receive replicas."""


class OpenLocalCheckpoint(Protocol):
    """An open checkpoint whose files are on the disks of several nodes."""

    @property
    def directory(self) -> Path:
        """Return the path from which all readers of checkpoints read it."""

    def close(self) -> None:
        """Close it, once all ranks have read their data. Collective."""


def create_tier(
    root: Path,
    copies: int = 1,
    distance: int | None = None,
    timeout: timedelta = timedelta(minutes=10),
) -> Tier:
    """Create the directories of a run on the disks of the nodes. Collective.

    See `tiers.local_tier.LocalTier.create`.
    """
    tier: Tier = resolve(_LOCAL_TIER).create(root, copies, distance, timeout)
    return tier


def find_local_checkpoints(tier: Tier | None) -> LocalInventory:
    """Return the local checkpoints on rank 0, and nothing elsewhere or without a tier.

    Collective.
    """
    if tier is None:
        return LocalInventory()
    inventory: LocalInventory = resolve(_FIND)(tier)
    return inventory


def open_local_checkpoint(tier: Tier, info: LocalCheckpointInfo) -> OpenLocalCheckpoint:
    """Open a checkpoint on the disks of the nodes. Collective."""
    checkpoint: OpenLocalCheckpoint = resolve(_OPEN)(tier, info)
    return checkpoint


def make_local_saver(
    tier: Tier, generation: Generation, loaded: str | None, replication_interval: int
) -> TierSaver:
    """Return the state of saves to the nodes; `loaded` is the local checkpoint to keep."""
    saver: TierSaver = resolve(_LOCAL_SAVER)(tier, generation, loaded, replication_interval)
    return saver


class Copier(SaveThread):
    """Interface of `tiers.copier.CheckpointCopier`, which copies local checkpoints to `--save`."""

    def copy(
        self,
        local: SaveHandle,
        directory: Path,
        *,
        generation: Generation | None = None,
        before_writing: Callable[[], None] = lambda: None,
        extra_files: Mapping[str, bytes] | None = None,
        on_commit: Callable[[], None] = lambda: None,
        export: MakeExport | None = None,
    ) -> SaveHandle:
        """Begin to copy the save `local` to `directory` once it has ended.

        Waits for the previous copy. If `local` fails, so does the copy. The other arguments are
        those of `AsyncSaver.save`.
        """
        raise NotImplementedError


def make_copier(workers: int, timeout: float) -> Copier:
    """Return the thread that copies local checkpoints to the shared directory."""
    copier: Copier = resolve(_COPIER)(workers=workers, timeout=timeout)
    return copier

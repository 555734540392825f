"""Checkpoints on the nodes' own disks, and which node stores which files.

Every node has `<directory>/<run>/iter_0000030-0000007.1a2b3c4d-5/`, named by the iteration, the
launch of the job that saved it (`Generation.number`) and the id of the save. Its files are those of
an ordinary torch_dist checkpoint: the ones that the ranks of the node wrote, and replicas of other
ranks' files under the same names. A marker per writer is written last and contains the checksums of
that writer's files. Rank 0 writes the files that belong to all ranks, and its marker is the last
one of all. A save is complete if the marker of every writer is on some node.

No name contains a rank of the run that reads: after a node was replaced, the launcher may assign
other ranks to the remaining nodes, or there may be fewer of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from megatron.core.dist_checkpointing.background import StagingBuffer, Workers
from megatron.core.dist_checkpointing.format.checksums import (
    FileChecksums,
    compute_checksums,
    decode_checksums,
    encode_checksum_records,
    seal_checksums,
)
from megatron.core.dist_checkpointing.ownership.fencing import (
    Generation,
    GenerationId,
    generations_in,
)
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.dist_checkpointing.saving.commit import PendingCheckpoint
from megatron.core.dist_checkpointing.saving.save_barrier import Outcome
from megatron.core.dist_checkpointing.saving.shard import ShardFile
from megatron.core.dist_checkpointing.tiers.replication import (
    JOB_SECRET,
    MAX_MARKER,
    MessageAuthenticator,
    ReplicaLink,
    ReplicaReceiver,
    ReplicatedShard,
    marker_name,
    parse_marker_name,
    write_marker,
)
from megatron.core.durable_files import committed, remove, write_flushed
from megatron.core.safe_files.errors import CheckpointError
from megatron.core.safe_files.reading import read_regular

logger = logging.getLogger(__name__)

_NODE = ".node"  # a file with random content: ranks that read the same content share a directory
_NAME = re.compile(r"iter_(\d{1,18})-(\d{1,18})\.[\w-]+")


def order_of(name: str) -> tuple[int, int]:
    """Return (launch of the job, iteration) of a local checkpoint.

    Checkpoints of a later launch replace those of an earlier one, as after a rollback.
    """
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return int(match[2]), int(match[1])


def form_replication_groups(size: int, distance: int, factor: int) -> list[list[int]]:
    """Return groups of `factor` ranks, `distance` apart, that store replicas of each other's files.

    The last group takes the remaining ranks. Every rank is in one group, so the number of its
    connections does not grow with the world size.
    """
    groups = []
    for first in range(min(distance, size)):
        # `distance` is usually the number of ranks per node: the members are on different nodes.
        members = list(range(first, size, distance))
        count = len(members) // factor
        if count == 0:
            raise CheckpointError(
                f"{factor} copies of the files of rank {first}, on ranks {distance} apart, need "
                f"{factor * distance} ranks, but there are {size}: use a smaller "
                "--replication-jump or --replication-factor, or more nodes"
            )
        for group_index in range(count):
            end = factor * (group_index + 1) if group_index < count - 1 else len(members)
            groups.append(members[factor * group_index : end])
    return groups


class Replication(NamedTuple):
    """Ranks that receive replicas of this rank's files, and ranks whose replicas it receives."""

    targets: list[int] = []
    sources: list[int] = []
    group: dist.ProcessGroup | None = None  # of all of them (gloo)
    authenticator: MessageAuthenticator = MessageAuthenticator(None)


class LocalTier(NamedTuple):
    """Node-local storage of a run in directory `root` of this node.

    `nodes[r]` is the node of rank r, identified by the lowest rank on it.
    """

    root: Path
    rank: int
    nodes: list[int]
    replication: Replication

    @classmethod
    def create(
        cls,
        root: Path,
        copies: int = 1,
        distance: int | None = None,
        timeout: timedelta = timedelta(minutes=10),
    ) -> LocalTier:
        """Create the directories and the replication groups. Collective.

        With `copies` > 1 every file is stored on that many nodes (or on all, if there are fewer),
        on ranks that are `distance` apart, by default the number of ranks per node. Raises
        CheckpointError on every rank.
        """
        # Find out which ranks share a node: they read the same token.
        ranks = Coordination.of(None)
        # Read again once all ranks have written: without hard links a rank may replace the file
        # after another one has read it.
        ranks.run_on_all(lambda: _read_or_create_node_token(root))
        token = ranks.run_on_all(lambda: _read_or_create_node_token(root))
        first: dict[str, int] = {}  # token -> lowest rank that has read it
        nodes = []
        for rank, name in enumerate(ranks.all_gather(token)):
            nodes.append(first.setdefault(name, rank))
        count = len(first)

        # Form replication groups.
        if count < copies:  # a job that continues on fewer nodes must not fail for that
            logger.warning(
                f"local checkpoints are kept {count} times instead of {copies}: there are not "
                "more nodes"
            )
            copies = count
        if count > 1 and not os.environ.get(JOB_SECRET):
            logger.info(
                "messages between nodes about local checkpoints are not authenticated: "
                f"{JOB_SECRET} is not set, so the network of the job must be trusted"
            )
        replication = Replication()
        if copies > 1:
            replication = _create_replication(ranks.rank, nodes, copies, distance, timeout)
        return cls(root, ranks.rank, nodes, replication)

    @property
    def node(self) -> int:
        return self.nodes[self.rank]

    def ranks_of(self, node: int) -> list[int]:
        return [rank for rank, node_of_rank in enumerate(self.nodes) if node_of_rank == node]

    def list_checkpoints(self) -> list[str]:
        """Return the names of checkpoints of which this node has any files, oldest first."""
        names = [path.name for path in self.root.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(names, key=order_of)

    def list_generations(self) -> list[GenerationId]:
        """Return the launches that have recorded themselves or saved checkpoints on this node.

        Names of checkpoints contain no token.
        """
        saved = [GenerationId(order_of(name)[0], "") for name in self.list_checkpoints()]
        return generations_in(self.root) + saved

    def record_generation(self, generation: GenerationId) -> None:
        """Record on this node that a launch has taken `generation`; remove older records."""
        if self.rank != self.node:
            return  # one rank per node suffices
        try:
            (self.root / generation.name).touch()
            for older in generations_in(self.root):
                if older.number < generation.number:
                    remove(self.root / older.name)
        except OSError as error:
            raise CheckpointError(
                f"local checkpoints cannot be saved to {self.root}: {error}"
            ) from error

    def find_writers(self, name: str) -> dict[int, tuple[int, int]]:
        """Return the writers whose files this node has: (number of writers, size of the marker).

        Sizes of files are compared here, their contents when they are read.
        """
        result = {}
        for path in (self.root / name).iterdir():
            marker = parse_marker_name(path.name)
            if marker is None:
                continue
            # The files of a damaged marker count as missing.
            with contextlib.suppress(OSError, CheckpointError):
                content = read_regular(path, limit=MAX_MARKER)
                sums = decode_checksums(content, str(path))
                if _has_sizes(path.parent, sums):
                    writer, count = marker
                    result[writer] = count, len(content)
        return result


def _has_sizes(directory: Path, sums: Mapping[str, FileChecksums]) -> bool:
    """Return whether all files have the sizes that their writer recorded."""
    for name, expected in sums.items():
        if (directory / name).stat().st_size != expected.size:
            return False
    return True


def _read_or_create_node_token(root: Path) -> str:
    path = root / _NODE
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            # Of the ranks of a node, the first one determines the content.
            with committed(path, replace=False) as temporary:
                temporary.write_text(secrets.token_hex(8))
        return path.read_text()
    except OSError as error:
        raise CheckpointError(f"local checkpoints cannot be saved to {root}: {error}") from error


def _create_replication(
    rank: int, nodes: list[int], copies: int, distance: int | None, timeout: timedelta
) -> Replication:
    """Create the group of this rank. Collective."""
    # Ranks that receive replicas of this rank, and ranks whose replicas it receives
    distance = distance or nodes.count(nodes[0])
    groups = form_replication_groups(len(nodes), distance, copies)
    # A ring: every rank sends to the next `copies - 1` ranks of its group.
    (members,) = (group for group in groups if rank in group)
    member_index = members.index(rank)
    size = len(members)
    targets = [members[(member_index + step) % size] for step in range(1, copies)]
    sources = [members[(member_index - step) % size] for step in range(1, copies)]

    # Replicas on the same node would be lost together.
    on_node = defaultdict(list)
    for member in (rank, *targets):
        on_node[nodes[member]].append(member)
    shared = []
    for members_there in on_node.values():
        if len(members_there) > 1:
            shared.append(f"ranks {', '.join(map(str, members_there))}")
    error = None
    if shared:
        error = CheckpointError(
            f"{' and '.join(shared)} keep copies of the same files, but share a directory, so they "
            f"would be lost together: give a --replication-jump (now {distance}) that leads to "
            "another node, and each node its own --non-persistent-local-ckpt-dir"
        )
    Coordination.of(None).raise_on_all(error)
    group = dist.new_group(members, timeout=timeout, backend="gloo", use_local_synchronization=True)
    return Replication(targets, sources, group, MessageAuthenticator.create(group))


class LocalSaver:
    """Shared state of all saves to this node: replica receivers and checkpoints to keep."""

    def __init__(
        self,
        tier: LocalTier,
        generation: Generation,
        kept: str | None,
        replication_interval: int = 1,
    ) -> None:
        """`kept` is the local checkpoint that this launch has loaded.

        The first of every `replication_interval` checkpoints is replicated.
        """
        self.tier = tier
        self._replication_interval = replication_interval
        self._num_checkpoints = 0  # begun by this object, the same number on all ranks
        self._generation = generation
        self._kept = kept
        # Name of the checkpoint that is being copied to --save, and whether that has ended.
        self._being_copied: tuple[str, Callable[[], bool]] = "", lambda: True
        # One thread and one slot for each rank whose replicas this rank receives.
        sources = len(tier.replication.sources)
        self._receivers = Workers(sources, "checkpoint-receiver")
        self._buffer = StagingBuffer(max(1, sources), pinned=False)

    def checkpoint(self, iteration: int, save_id: str) -> LocalCheckpoint:
        """Begin a checkpoint and to receive its replicas; all ranks do at the same time."""
        is_replicated = self._num_checkpoints % self._replication_interval == 0
        self._num_checkpoints += 1
        pending = LocalCheckpoint(self, iteration, save_id, self._generation, is_replicated)
        if not is_replicated:
            return pending
        _, sources, group, authenticator = self.tier.replication
        for source, slot in zip(sources, self._buffer.slots, strict=False):
            receiver = ReplicaReceiver(
                pending.directory, self.tier.rank, source, group, authenticator, slot
            )
            pending.received.append(self._receivers.submit(receiver.run))
        return pending

    def keep_until(self, name: str, is_copied: Callable[[], bool]) -> None:
        """Keep `name`, which is being copied to --save, until `is_copied` returns true."""
        self._being_copied = name, is_copied

    def remove_superseded(self, name: str, replicated: bool) -> None:
        """Remove older checkpoints now that `name` is complete on all nodes.

        Two are kept: `name`, and the last one before it that has all its replicas; furthermore the
        one that is being copied.
        """
        # Until `name` has all its replicas, the loss of a node would lose it: keep the one before.
        being_copied, is_copied = self._being_copied
        keep = (name, self._kept, None if is_copied() else being_copied)
        if self.tier.rank == self.tier.node:
            # Newer checkpoints exist if the next save has already begun.
            for checkpoint_name in self.tier.list_checkpoints():
                if checkpoint_name not in keep and order_of(checkpoint_name) <= order_of(name):
                    remove(self.tier.root / checkpoint_name)
        if replicated:
            self._kept = name

    def close(self) -> None:
        self._receivers.close()


class LocalCheckpoint(PendingCheckpoint):
    """A checkpoint that every rank writes to its node's disk; rank 0's marker is the commit."""

    def __init__(
        self,
        saver: LocalSaver,
        iteration: int,
        save_id: str,
        generation: Generation,
        is_replicated: bool,
    ) -> None:
        tier = saver.tier
        directory = tier.root / f"iter_{iteration:07d}-{generation.number:07d}.{save_id}"
        super().__init__(directory, save_id, generation, directory)
        self._saver = saver
        self._rank = tier.rank
        self._size = len(tier.nodes)
        self._sums: dict[str, FileChecksums] = {}
        self.received: list[Future[None]] = []
        self._is_replicated = is_replicated
        self._links: list[ReplicaLink] = []
        if is_replicated:
            targets, _, group, authenticator = tier.replication
            for target in targets:
                link = ReplicaLink(tier.rank, target, group, authenticator, directory.name)
                self._links.append(link)

    def keep_until(self, is_copied: Callable[[], bool]) -> None:
        self._saver.keep_until(self.directory.name, is_copied)

    def data_files(self) -> dict[str, FileChecksums]:
        """Return the checksums of this rank's data files, once the save has ended."""
        return {name: sums for name, sums in self._sums.items() if name.endswith(".distcp")}

    def begin(self, nbytes: int) -> None:
        """Free space is checked per node."""

    def open_shard(self, name: str, size: int) -> ShardFile:
        self.directory.mkdir(parents=True, exist_ok=True)
        return ReplicatedShard(self.directory / name, size, self._links)

    def write_file(self, name: str, *buffers: bytes) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        write_flushed(self.directory / name, *buffers)
        self._sums[name] = compute_checksums(*buffers)
        self._send(name, b"".join(buffers))

    def _send(self, name: str, content: bytes) -> None:
        for link in self._links:
            link.send_content(name, content)

    def finish(self, sums: Mapping[str, FileChecksums]) -> None:
        # Rank 0 seals in `_publish`, after all other ranks: its marker is the commit.
        self._sums |= sums
        if self._rank != 0:
            self._seal()

    def _publish(self) -> None:
        self._seal()

    def _seal(self) -> None:
        """Write the marker: all files of this rank are durable here. Then wait for the replicas."""
        name = marker_name(self._rank, self._size)
        content = b"".join(seal_checksums(encode_checksum_records(self._sums)))
        write_marker(self.directory / name, content)
        self._send(name, content)
        # A missing replica is a warning: the checkpoint itself is complete on this node.
        for link in self._links:
            problem = link.receive_answer()
            if problem is not None:
                self.warnings.append(f"no replica on rank {link.target}: {problem}")

    def abandon(self) -> None:
        """Leave the removal of the directory to `end`, on every node."""

    def is_committed(self) -> bool:
        return False  # only the node of rank 0 has its marker

    def end(self, outcome: Outcome) -> None:
        for link in self._links:
            link.abort()
        for received in self.received:
            received.exception()
        with contextlib.suppress(OSError):  # leftovers are removed after the next save
            if outcome.error is None:
                has_all_replicas = self._is_replicated and outcome.warning is None
                self._saver.remove_superseded(self.directory.name, has_all_replicas)
            elif self._rank == self._saver.tier.node:
                remove(self.directory)

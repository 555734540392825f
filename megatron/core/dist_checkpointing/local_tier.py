"""Which node keeps what of the checkpoints that lie on the nodes' own disks.

`<directory>/<run>/iter_0000030-0000007.1a2b3c4d-5/` on every node: the iteration, the start of the job that saved it
(`Generation.number`) and the id of the save. The files in it are those of one ordinary torch_dist checkpoint: a node
has the ones that its ranks wrote, and replicas of its neighbours' under the same names. A marker for each writer,
written last, holds the checksums of that writer's files. Rank 0 writes the files that belong to all, and its marker is
the last of all: a save is whole if every writer's marker is on some node.

No name contains a rank of the run that reads: after a node was replaced, the launcher may give a surviving node other
ranks, or there may be fewer.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections import defaultdict
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from megatron.core.dist_checkpointing.format.checksums import decode_checksums
from megatron.core.dist_checkpointing.format.schema import CheckpointError, read_regular
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.durable_files import committed

logger = logging.getLogger(__name__)

_NODE = ".node"  # its random content names the node: two ranks that read the same share a directory
_NAME = re.compile(r"iter_(\d+)-(\d+)\.[\w-]+")
_MARKER = re.compile(r"\.done-(\d+)-of-(\d+)")
_DATA_FILE = re.compile(r"__(\d+)_\d+\.distcp")


def checkpoint_name(iteration: int, generation: int, save_id: str) -> str:
    return f"iter_{iteration:07d}-{generation:07d}.{save_id}"


def order_of(name: str) -> tuple[int, int]:
    """(start of the job, iteration): what a later start saved replaces what an earlier one did, as after a rollback."""
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return int(match[2]), int(match[1])


def marker_name(writer: int, size: int) -> str:
    return f".done-{writer}-of-{size}"


def writer_of(file: str) -> int:
    """The rank of the save that wrote `file`."""
    match = _DATA_FILE.fullmatch(file)
    return 0 if match is None else int(match[1])


def cliques(size: int, jump: int, factor: int) -> list[list[int]]:
    """Ranks that keep replicas of each other: `jump` apart, `factor` of them, or more where that is not even.

    A rank is in one of them whatever the size of the world, so its connections do not grow with it.
    """
    groups = []
    for first in range(min(jump, size)):
        members = list(range(first, size, jump))
        count = len(members) // factor
        if count == 0:
            raise CheckpointError(
                f"{factor} copies of what rank {first} writes, on ranks {jump} apart, need {factor * jump} ranks, "
                f"but there are {size}: use a smaller --replication-jump or --replication-factor, or more nodes"
            )
        starts = [factor * number for number in range(count)]
        groups += [members[a:b] for a, b in zip(starts, [*starts[1:], len(members)], strict=True)]
    return groups


class Replication(NamedTuple):
    """Where the replicas of this rank's files go, and whose come here; `group` is the clique's own (gloo)."""

    targets: list[int]
    sources: list[int]
    group: dist.ProcessGroup


class LocalTier(NamedTuple):
    """`root` is this run's directory on this node; `nodes[r]` is the node of rank r, named by its lowest rank."""

    root: Path
    rank: int
    nodes: list[int]
    replication: Replication | None

    @classmethod
    def create(
        cls, root: Path, copies: int = 1, jump: int | None = None, timeout: timedelta = timedelta(minutes=10)
    ) -> LocalTier:
        """A collective. With `copies` > 1 every file is on that many nodes, on ranks that are `jump` apart, by default
        the ranks of a node; with fewer nodes on fewer. Raises CheckpointError on every rank."""
        ranks = Coordination.of(None)
        # Read again when all have written: without hard links a rank may replace what another one has read.
        ranks.together(lambda: _node_token(root))
        token = ranks.together(lambda: _node_token(root))
        first: dict[str, int] = {}
        nodes = [first.setdefault(name, rank) for rank, name in enumerate(ranks.all_gather(token))]
        count = len(first)
        if count < copies:  # a job that goes on with fewer nodes must not end for that
            logger.warning(f"local checkpoints are kept {count} times instead of {copies}: there are no more nodes")
            copies = count
        replication = _replicate(ranks.rank, nodes, copies, jump, timeout) if copies > 1 else None
        return cls(root, ranks.rank, nodes, replication)

    @property
    def node(self) -> int:
        return self.nodes[self.rank]

    def ranks_of(self, node: int) -> list[int]:
        return [rank for rank, other in enumerate(self.nodes) if other == node]

    def names(self) -> list[str]:
        """The checkpoints of which this node has anything, oldest first."""
        names = [path.name for path in self.root.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(names, key=order_of)

    def held(self, name: str) -> dict[int, tuple[int, int]]:
        """The writers whose files this node has, to (number of writers of the save, size of the marker).

        Sizes are compared; contents are when they are read.
        """
        result = {}
        for path in (self.root / name).iterdir():
            match = _MARKER.fullmatch(path.name)
            if match is not None and (size := _intact(path)) is not None:
                result[int(match[1])] = int(match[2]), size
        return result


def _intact(marker: Path) -> int | None:
    """The size of the marker, if it is whole and its files are there."""
    try:
        content = read_regular(marker)
        sums = decode_checksums(content, str(marker))
        if all((marker.parent / file).stat().st_size == size for file, (size, _) in sums.items()):
            return len(content)
    except (OSError, CheckpointError):
        pass
    return None


def _node_token(root: Path) -> str:
    path = root / _NODE
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            with committed(path, replace=False) as temporary:  # of the ranks of a node, the first one's stays
                temporary.write_text(secrets.token_hex(8))
        return path.read_text()
    except OSError as error:
        raise CheckpointError(f"local checkpoints cannot be saved to {root}: {error}") from error


def _replicate(rank: int, nodes: list[int], copies: int, jump: int | None, timeout: timedelta) -> Replication:
    jump = jump or nodes.count(nodes[0])
    (clique,) = (group for group in cliques(len(nodes), jump, copies) if rank in group)
    place, size = clique.index(rank), len(clique)
    targets = [clique[(place + step) % size] for step in range(1, copies)]
    on_node = defaultdict(list)
    for member in (rank, *targets):
        on_node[nodes[member]].append(member)
    together = [f"ranks {', '.join(map(str, members))}" for members in on_node.values() if len(members) > 1]
    error = None
    if together:
        error = CheckpointError(
            f"{' and '.join(together)} keep copies of the same files, but share a directory, so they would be lost "
            f"together: give a --replication-jump (now {jump}) that leads to another node, and each node its own "
            "--non-persistent-local-ckpt-dir"
        )
    Coordination.of(None).raise_together(error)
    group = dist.new_group(clique, timeout=timeout, backend="gloo", use_local_synchronization=True)
    return Replication(targets, [clique[(place - step) % size] for step in range(1, copies)], group)

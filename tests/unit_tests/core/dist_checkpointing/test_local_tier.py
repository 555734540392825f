"""Checkpoints on the nodes' disks: placement of replicas, and guarantees of a save when a
neighbour fails.
"""

import os
import resource
import shutil
import signal
import threading
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing import (
    AsyncSaver,
    Box,
    CheckpointError,
    Generation,
    Reader,
    ShardedObject,
    ShardedTensor,
)
from megatron.core.dist_checkpointing.background import PAGE, SLOT_SIZE, StagingBuffer
from megatron.core.dist_checkpointing.format.checksums import (
    BLOCK_SIZE,
    encode_checksum_records,
    seal_checksums,
)
from megatron.core.dist_checkpointing.local_checkpoints import find_local_checkpoints
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.dist_checkpointing.tiers import distributed_local_checkpoint
from megatron.core.dist_checkpointing.tiers.copier import CheckpointCopier
from megatron.core.dist_checkpointing.tiers.distributed_local_checkpoint import (
    DistributedLocalCheckpoint,
    _merge_nodes,
    _Node,
)
from megatron.core.dist_checkpointing.tiers.local_tier import (
    LocalSaver,
    LocalTier,
    form_replication_groups,
)
from megatron.core.dist_checkpointing.tiers.replication import (
    JOB_SECRET,
    MessageAuthenticator,
    ReplicaLink,
    ReplicaReceiver,
)
from megatron.core.dist_checkpointing.verification import verify

ROWS = 50_000  # of rank 0, which writes 4 MB; rank 1 writes 80 bytes


@pytest.mark.parametrize("copies", [2, 3])
@pytest.mark.parametrize(("size", "jump"), [(6, 1), (7, 2), (8, 2), (16, 4), (19, 4), (12, 4)])
def test_every_rank_is_in_one_replication_group(size, jump, copies):
    groups = form_replication_groups(size, jump, copies)
    assert sorted(rank for group in groups for rank in group) == list(range(size))
    for group in groups:
        assert copies <= len(group) < 2 * copies
        assert {rank % jump for rank in group} == {group[0] % jump}


def test_too_few_ranks_for_the_copies():
    with pytest.raises(
        CheckpointError,
        match="3 copies of the files of rank 0, on ranks 4 apart, need 12 ranks",
    ):
        form_replication_groups(8, 4, 3)


@contextmanager
def files_up_to(limit):
    """The kernel refuses to let a file of this process grow further."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def state_of(rank, value):
    big = torch.full((ROWS if rank == 0 else 1, 20), float(value))
    tensor = ShardedTensor(
        "big",
        (ROWS + 1, 20),
        big.dtype,
        (Box((0 if rank == 0 else ROWS, 0), big),),
    )
    return {"big": tensor, "own": ShardedObject(f"own/{rank}", value)}


class Node:
    """A rank alone on its node, which saves 1, 2, 3 ... as the iterations of the same number."""

    def __init__(self, rank, root, replication_interval=1):
        self.rank = rank
        self.tier = LocalTier.create(Path(root) / f"node{rank}", 2)
        self.saver = AsyncSaver(workers=1)
        self.nodes = LocalSaver(
            self.tier,
            Generation(Path(root), 1, ""),
            None,
            replication_interval,
        )

    def save(self, iteration):
        return self.begin(iteration).wait()

    def begin(self, iteration):
        pending = partial(self.nodes.checkpoint, iteration)
        options = {"common": {"iteration": iteration}, "pending": pending}
        return self.saver.save(state_of(self.rank, iteration), self.tier.root, **options)

    def kept(self):
        return [int(name[5:12]) for name in self.tier.list_checkpoints()]

    def close(self):
        self.saver.close()
        self.nodes.close()


def without_room(rank, size, root):
    """Rank 1 has room for its own file alone, and then not even for that."""
    node = Node(rank, root)
    results = []
    for iteration, limit in enumerate(
        (1 << 30, 1 << 20, 1 << 20, 50 if rank == 1 else 1 << 30, 1 << 30),
        1,
    ):
        with files_up_to(limit if rank == 1 else resource.RLIM_INFINITY):
            report = node.save(iteration)
        dist.barrier()
        results.append((report.error, report.warning, node.kept()))

    node.close()
    return results


def test_a_neighbour_without_room_costs_a_warning_and_a_rank_without_room_the_save(pool, tmp_path):
    """The last save that has all its replicas stays until there is another one."""
    for results in pool.run(without_room, 2, str(tmp_path)):
        first, second, third, fourth, fifth = results
        assert first == (None, None, [1])

        # Saves without a replica
        error, warning, kept = second
        assert error is None
        assert "rank 0: no replica on rank 1: " in warning
        assert "File too large" in warning
        assert kept == [1, 2]
        error, _, kept = third
        assert error is None
        assert kept == [1, 3]

        # A failed save, whose files are removed
        error, _, kept = fourth
        assert "File too large" in error
        assert kept == [1, 3]

        assert fifth == (None, None, [1, 5])


def long_names(rank, size, root):
    """Save with a message of rank 1 that is cut in the middle of a character in one of two cases."""
    warnings = []
    for length in (1, 2):
        node = Node(rank, Path(root, "x" * length, "\N{EURO SIGN}" * 80, "\N{EURO SIGN}" * 80))
        with files_up_to(1 << 20 if rank == 1 else resource.RLIM_INFINITY):
            report = node.save(1)
        warnings.append((report.error, report.warning))
        node.close()
    return warnings


def test_a_long_reason_without_a_replica_is_a_warning(pool, tmp_path):
    for error, warning in pool.run(long_names, 2, str(tmp_path))[0]:
        assert error is None
        assert "no replica on rank 1: [Errno 27] File too large" in warning


def test_a_stray_file_among_the_local_checkpoints_is_left_out(tmp_path, caplog):
    tier = LocalTier.create(tmp_path)
    nodes = LocalSaver(tier, Generation(tmp_path, 1, ""), None)
    state = {"w": ShardedTensor.replicated("w", torch.ones(3))}
    pending = partial(nodes.checkpoint, 1)
    with AsyncSaver() as saver:
        assert saver.save(state, tmp_path, common={}, pending=pending).wait().error is None
    (tmp_path / "iter_0000000-0000001.stray").write_bytes(b"")
    (actual,) = find_local_checkpoints(tier).usable

    assert actual.lineage.order == (1, 1)
    assert "iter_0000000-0000001.stray cannot be read" in caplog.text


def damaged_on_the_way(rank, size, root):
    node = Node(rank, root)
    send = dist.send
    if rank == 0:

        def flipping(tensor, *args):
            if tensor.numel() > 1 << 20:
                tensor = tensor.clone()
                tensor[12345] ^= 1
            send(tensor, *args)

        dist.send = flipping

    try:
        report = node.save(1)
    finally:
        dist.send = send

    node.close()
    return (
        report.error,
        report.warning,
        sorted(node.tier.find_writers(node.tier.list_checkpoints()[0])),
    )


def test_files_damaged_in_transit_are_not_replicas(pool, tmp_path):
    for rank, (error, warning, held) in enumerate(pool.run(damaged_on_the_way, 2, str(tmp_path))):
        assert error is None
        assert warning == "rank 0: no replica on rank 1: __0_0.distcp came damaged"
        assert held == ([0, 1] if rank == 0 else [1])


def save_with_interval(rank, size, root):
    """Save six times, then lose the disk of rank 1."""
    node = Node(rank, root, replication_interval=3)
    kept = []
    writers = []
    for iteration in range(1, 7):
        report = node.save(iteration)
        assert report.error is None
        assert report.warning is None
        dist.barrier()
        kept.append(node.kept())
        newest = node.tier.list_checkpoints()[-1]
        writers.append(sorted(node.tier.find_writers(newest)))

    node.close()
    if rank == 1:
        shutil.rmtree(node.tier.root)
    dist.barrier()
    usable = find_local_checkpoints(LocalTier.create(node.tier.root, 2)).usable
    return kept, writers, [found.lineage.order[1] for found in usable]


def test_replication_interval(pool, tmp_path):
    """The loss of a node goes back to the last replicated checkpoint, which is kept until then."""
    results = pool.run(save_with_interval, 2, str(tmp_path))
    for rank, (kept, writers, _) in enumerate(results):
        assert kept == [[1], [1, 2], [1, 3], [1, 4], [4, 5], [4, 6]]
        assert writers == [[0, 1], [rank], [rank], [0, 1], [rank], [rank]]
    usable = results[0][2]
    assert usable == [4]


def drain_while_saving_on(rank, size, root):
    """The first of five saves is being copied until the fourth is there. The last one is damaged on
    rank 0's disk.
    """
    node = Node(rank, root)
    released = threading.Event()
    root = Path(root)
    copier = CheckpointCopier(workers=1)
    local = node.begin(1)
    drained = copier.copy(
        local,
        root / "iter_0000001",
        before_writing=released.wait,
        extra_files={"x": b"y"},
    )
    assert local.wait().error is None

    kept = [(node.save(iteration).error, dist.barrier(), node.kept())[2] for iteration in (2, 3, 4)]
    released.set()
    reports = [drained.wait()]
    assert node.save(5).error is None

    dist.barrier()
    kept.append(node.kept())
    local = node.begin(6)
    local.wait()

    if rank == 0:
        path = node.tier.root / node.tier.list_checkpoints()[-1] / "__0_0.distcp"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)

    reports.append(copier.copy(local, root / "iter_0000006").wait())
    copier.close()
    node.close()
    return kept, reports


def test_a_local_checkpoint_is_copied_to_where_all_nodes_find_it(pool, tmp_path):
    """Nothing is staged again, later local saves go on meanwhile, and it is kept as long; damage
    never reaches --save. What arrives is byte for byte what a save without local tier writes.
    """
    for kept, (good, bad) in pool.run(drain_while_saving_on, 2, str(tmp_path)):
        assert kept == [[1, 2], [1, 2, 3], [1, 3, 4], [4, 5]]
        assert (good.error, good.staging, good.blocking) == (None, 0.0, 0.0)
        assert "__0_0.distcp: damaged on the disk of its node" in bad.error

    drained = tmp_path / "iter_0000001"
    assert verify(drained).ok
    assert not (tmp_path / "iter_0000006").exists()
    assert (drained / "x").read_bytes() == b"y"

    pool.run(save_directly, 2, str(tmp_path / "direct"))
    contents = [
        {path.name: path.read_bytes() for path in root.iterdir()}
        for root in (drained, tmp_path / "direct")
    ]
    assert contents[0] == contents[1]


def save_directly(rank, size, directory):
    common = {"iteration": 1}
    files = {"x": b"y"}
    with AsyncSaver(workers=1) as saver:
        handle = saver.save(state_of(rank, 1), directory, common=common, extra_files=files)
        assert handle.wait().error is None


def share_a_directory(rank, size, root):
    with pytest.raises(
        CheckpointError,
        match=r"ranks 0, 1 keep copies of the same files, but share a directory",
    ):
        LocalTier.create(Path(root) / f"node{rank // 2}", 2, distance=1)

    with pytest.raises(
        CheckpointError,
        match="local checkpoints cannot be saved to .*: .*Not a directory",
    ):
        LocalTier.create(Path(__file__) / "node")


def test_replicas_on_the_own_node_and_no_directory_are_errors(pool, tmp_path):
    pool.run(share_a_directory, 4, str(tmp_path))


def named_at_once(rank, size, root):
    """Both ranks of a node name it at the same time, where there are no hard links; the later one
    replaces the name.
    """
    root = Path(root)

    def link(*_):
        while len(list(root.glob("*.tmp-*"))) < size and not (root / ".node").exists():
            pass
        raise PermissionError("no hard links")

    def replace(source, target):
        if rank == 1:
            while not (root / "read").exists():
                pass
        os.rename(source, target)

    def together(ranks, function):
        result = function()
        (root / "read").touch()
        dist.barrier()
        return result

    with (
        mock.patch.object(os, "link", link),
        mock.patch.object(os, "replace", replace),
        mock.patch.object(Coordination, "run_on_all", together),
    ):
        return LocalTier.create(root).nodes


def test_ranks_of_a_node_agree_on_its_name_without_hard_links(pool, tmp_path):
    assert pool.run(named_at_once, 2, str(tmp_path)) == [[0, 0], [0, 0]]


def superseded(rank, size, root):
    """The earlier launch continues to save; its saves do not count and replace no files."""
    new = Node(rank, root)
    old = Node(rank, root)
    new.nodes = LocalSaver(new.tier, Generation(Path(root), 2, ""), None)
    names = []
    for node, iteration in ((old, 5), (new, 4), (old, 6), (old, 7)):
        assert node.save(iteration).error is None
        dist.barrier()
        names.append([held.lineage.order for held in find_local_checkpoints(node.tier).usable])

    assert new.save(5).error is None

    dist.barrier()
    names.append([held.lineage.order for held in find_local_checkpoints(new.tier).usable])
    old.close()
    new.close()
    return names


def test_superseded_launch_does_not_change_saves_of_its_successor(pool, tmp_path):
    actual, _ = pool.run(superseded, 2, str(tmp_path))
    assert actual == [
        [(1, 5)],
        [(2, 4)],
        [(2, 4), (1, 6)],
        [(2, 4), (1, 7), (1, 6)],
        [(2, 5), (2, 4)],
    ]


def read_at_random(rank, size, root, flips):
    """Every byte of every file of one node is flipped in turn; all is read on every rank."""
    node = Node(rank, root)
    assert node.save(1).error is None

    node.close()
    files = sorted(path for path in (node.tier.root / node.tier.list_checkpoints()[0]).iterdir())
    generator = torch.Generator().manual_seed(0)
    for _ in range(flips):
        path = files[int(torch.randint(len(files), (), generator=generator))]
        content = bytearray(path.read_bytes())
        if rank == 0:
            damaged = bytearray(content)
            damaged[int(torch.randint(len(content), (), generator=generator))] ^= 1 << 3
            path.write_bytes(damaged)

        dist.barrier()
        held = [find_local_checkpoints(node.tier).usable]
        dist.broadcast_object_list(held, 0)
        local = DistributedLocalCheckpoint(node.tier, held[0][0])
        values = Reader(local.directory).read("big", (0, 0), (ROWS + 1, 20))
        local.close()
        assert (values == 1).all()

        path.write_bytes(content)


@pytest.mark.parametrize("flips", [5, pytest.param(300, marks=pytest.mark.slow)])
def test_no_flipped_byte_is_ever_loaded(pool, tmp_path, flips):
    pool.run(read_at_random, 2, str(tmp_path), flips, timeout=600)


def a_holder_is_stopped(rank, size, root):
    """Rank 1 has lost its disk, and rank 0 is stopped while rank 1 reads."""
    node = Node(rank, root)
    assert node.save(1).error is None

    node.close()
    held = [find_local_checkpoints(node.tier).usable]
    dist.broadcast_object_list(held, 0)
    writers = [files._replace(nodes=[0]) for files in held[0][0].writers]
    only_there = held[0][0]._replace(writers=writers)
    local = DistributedLocalCheckpoint(node.tier, only_there)
    pids = [None] * size
    dist.all_gather_object(pids, os.getpid())
    results = None
    if rank == 1:
        local.sums("__0_0.distcp")
        os.kill(pids[0], signal.SIGSTOP)
        try:
            with mock.patch.object(distributed_local_checkpoint, "_PATIENCE", timedelta(seconds=1)):
                local.read_blocks_into(memoryview(bytearray(BLOCK_SIZE)), "__0_0.distcp", 0)
        except CheckpointError as error:
            results = str(error)
        finally:
            os.kill(pids[0], signal.SIGCONT)

    dist.barrier()
    return results


def test_a_holder_that_hangs_is_named(pool, tmp_path):
    _, results = pool.run(a_holder_is_stopped, 2, str(tmp_path))
    assert "__0_0.distcp: rank 0, whose node has it, is dead or hanging" in results


def send_forged_pieces(rank, size, root, pieces):
    """Rank 0 sends `pieces` (name, size, position, length) and a marker for them."""
    group = dist.group.WORLD
    directory = Path(root, "checkpoint")
    if rank == 0:
        link = ReplicaLink(0, 1, group, MessageAuthenticator(None), directory.name)
        for name, file_size, position, length in pieces:
            frame = torch.zeros(PAGE + min(length, SLOT_SIZE), dtype=torch.uint8)
            link.send(frame, name, file_size, position, length)
        if not name.startswith(".done-"):  # the receiver answers after any marker
            link.send_content(".done-0-of-2", b"x")
        return link.receive_answer()

    slot = StagingBuffer(1, pinned=False).slots[0]
    ReplicaReceiver(directory, 1, 0, group, MessageAuthenticator(None), slot).run()
    return sorted(str(path.relative_to(root)) for path in Path(root).rglob("*"))


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (("../../escaped.txt", 10, 0, 10), "without a path"),
        (("/tmp/escaped.txt", 10, 0, 10), "without a path"),
        (("__1_0.distcp", 10, 0, 10), "__1_0.distcp belongs to rank 1"),
        ((".done-0-of-99999999999", 10, 0, 10), "is not the name of a marker"),
        ((".done-1-of-2", 10, 0, 10), ".done-1-of-2 belongs to rank 1"),
        (("__0_0.distcp", 10, 5, 10), "10 bytes at 5 of __0_0.distcp, which has 10 bytes"),
        (("__0_0.distcp", 1 << 62, 0, 10), "No space left"),
    ],
)
def test_receiver_refuses_forged_pieces(pool, tmp_path, piece, message):
    answer, files = pool.run(send_forged_pieces, 2, str(tmp_path), [piece])
    assert message in answer
    assert set(files) <= {"checkpoint"}


def test_marker_with_an_implausible_number_of_writers_is_ignored(tmp_path, caplog):
    tier = LocalTier.create(tmp_path)
    directory = tmp_path / "iter_0000001-0000001.forged"
    directory.mkdir()
    content = b"".join(seal_checksums(encode_checksum_records({})))
    for count in (99999999999, 1 << 21):
        (directory / f".done-0-of-{count}").write_bytes(content)

    assert tier.find_writers(directory.name) == {}
    assert find_local_checkpoints(tier).usable == []

    forged = {"iter_0000001-0000001.forged": {0: (99999999999, 10)}}
    assert _merge_nodes([_Node(forged, {}, [])]).usable == []


def save_with_secret(rank, size, root, tampered):
    """Save with a secret, read from the other node, and count the messages that carry a MAC."""
    with mock.patch.dict(os.environ, {JOB_SECRET: "a secret of the job"}):
        node = Node(rank, root)
        if rank == 0 and tampered:
            node.tier.replication.authenticator._key = b"another key"
        report = node.save(1)
        checkpoints = [find_local_checkpoints(node.tier).usable]
        dist.broadcast_object_list(checkpoints, 0)
        writers = [files for files in checkpoints[0][0].writers if 0 in files.nodes]
        only_on_rank_0 = [files._replace(nodes=[0]) for files in writers]
        values = None
        if not tampered:
            info = checkpoints[0][0]._replace(writers=only_on_rank_0)
            local = DistributedLocalCheckpoint(node.tier, info)
            values = Reader(local.directory).read("big", (0, 0), (ROWS + 1, 20))
            local.close()

        node.close()
    return report.error, report.warning, values is not None and bool((values == 1).all())


def test_replicas_are_authenticated_with_the_secret_of_the_job(pool, tmp_path):
    for result in pool.run(save_with_secret, 2, str(tmp_path / "same"), False):
        assert result == (None, None, True)
    for error, warning, _ in pool.run(save_with_secret, 2, str(tmp_path / "tampered"), True):
        assert error is None
        assert "rank 0: no replica on rank 1: a message of rank 0 is not authentic" in warning or (
            "rank 0: no replica on rank 1: its answer is not authentic" in warning
        )


def create_with_secret_of_rank(rank, size, root):
    different = {JOB_SECRET: f"secret {rank}"}
    missing = {JOB_SECRET: "secret" if rank == 0 else ""}
    for environment, message in (
        (different, "differs between ranks"),
        (missing, "is set on some ranks only"),
    ):
        with (
            mock.patch.dict(os.environ, environment),
            pytest.raises(CheckpointError, match=f"{JOB_SECRET} {message}"),
        ):
            LocalTier.create(Path(root) / f"node{rank}", 2)


def test_different_secrets_are_refused_at_start_up(pool, tmp_path):
    pool.run(create_with_secret_of_rank, 2, str(tmp_path))

"""Cost of rank 0's commit at scale: reports of 16,384 ranks are merged and written during training.

Every rank reports over a real TCPStore as in a save (objects, checksums of its files); then rank 0
collects the reports and commits. Its CPU time bounds how long it can hold the interpreter lock. The
benchmark also measures how long another thread waits for the lock, with and without a commit.

    python benchmarks/checkpoint_commit.py    # 16384 ranks, 350 MB each (405B in training)
    python benchmarks/checkpoint_commit.py --world 1024 --megabytes 1000
"""

import argparse
import gc
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from scratch import create_scratch_directory

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron.core.dist_checkpointing.box_table import (  # noqa: E402
    BoxTable,
    CheckpointMetadata,
    Location,
    StoredTensor,
)
from megatron.core.dist_checkpointing.format.checksums import (  # noqa: E402
    BLOCK_SIZE,
    DIGEST_SIZE,
    FileChecksums,
    encode_checksum_records,
)
from megatron.core.dist_checkpointing.format.metadata_codec import MetadataEncoder  # noqa: E402
from megatron.core.dist_checkpointing.saving.commit import PendingCheckpoint  # noqa: E402
from megatron.core.dist_checkpointing.saving.save_barrier import (  # noqa: E402
    Heartbeat,
    SaveBarrier,
)

FILES = 2  # of tensors, per rank
TENSORS = 4608  # 128 layers of nine, each as weight, main parameter and two moments
BOXES = 76  # that a rank writes
ROW_ELEMENTS = 16384


class Ticker(threading.Thread):
    """Stand-in for the training thread, which needs the interpreter lock every millisecond.

    `longest` is its longest wait for the lock, in seconds.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.longest = 0.0
        self._running = True

    def run(self) -> None:
        while self._running:
            before = time.perf_counter()
            time.sleep(0.001)
            wait = time.perf_counter() - before - 0.001
            self.longest = max(self.longest, wait)

    def __enter__(self) -> "Ticker":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._running = False
        self.join()


def name_file(rank: int, number: int) -> str:
    return f"__{rank}_{number}.distcp"


def make_metadata(world: int) -> CheckpointMetadata:
    """Return the stored boxes of all tensors; about a million for 405B."""
    names = []
    for rank in range(world):
        for number in range(FILES):
            names.append(name_file(rank, number))
    files = tuple(names)

    num_boxes = max(1, world * BOXES // TENSORS)
    index = np.arange(num_boxes)
    offsets = np.stack([index, np.zeros_like(index)], axis=1)  # one row each
    shapes = np.broadcast_to(np.array([1, ROW_ELEMENTS]), (num_boxes, 2))
    nbytes = np.full(num_boxes, 2 * ROW_ELEMENTS)
    metadata = CheckpointMetadata()
    for tensor in range(TENSORS):
        # Neighboring boxes are in different files, as of different ranks.
        file_of_box = (index * 61 + tensor) % len(files)
        position = (tensor + index) % BOXES << 22
        table = BoxTable(
            offsets, shapes, file=file_of_box, position=position, length=nbytes, files=files
        )
        stored = StoredTensor((num_boxes, ROW_ELEMENTS), torch.bfloat16, table)
        metadata.tensors[f"decoder.layers.{tensor}.weight"] = stored
    return metadata


class Job:
    """Ranks that report to rank 0 over a store."""

    def __init__(self, world: int, megabytes: int) -> None:
        self.world = world
        self._blocks = megabytes // FILES  # per file
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=10)
        )

    def make_barrier(self, save_id: str, rank: int) -> SaveBarrier:
        """Return the barrier of a rank in a save."""
        heartbeat = Heartbeat(self._store, "bench", rank, self.world, 600)
        return SaveBarrier(self._store, save_id, rank, self.world, heartbeat)

    def report(self, save_id: str, rank: int, object_size: int) -> None:
        """Report the objects and files of a rank, as at the end of its writes."""
        size = self._blocks * BLOCK_SIZE
        digests = bytes(self._blocks * DIGEST_SIZE)
        checksums = {}
        for number in range(FILES):
            checksums[name_file(rank, number)] = FileChecksums(size, digests)
        # Objects are in a file of their own.
        location = Location(name_file(rank, FILES), 0, object_size)
        objects = {f"rng_state/{rank}": location}
        barrier = self.make_barrier(save_id, rank)
        barrier.report(objects, encode_checksum_records(checksums))

    def report_all(self, save_id: str, object_size: int) -> float:
        """Report as all ranks, one after the other; return the seconds of one report."""
        began = time.perf_counter()
        for rank in range(self.world):
            self.report(save_id, rank, object_size)
        return (time.perf_counter() - began) / self.world


@dataclass
class CommitCost:
    """Seconds of a commit on rank 0."""

    until_collected: float
    until_committed: float
    cpu: float
    cpu_of_encoding: float


def commit(
    barrier: SaveBarrier, pending: PendingCheckpoint, encoder: MetadataEncoder
) -> CommitCost:
    """Collect the reports of all ranks, and commit the checkpoint."""
    began = time.perf_counter()
    cpu_began = time.thread_time()
    objects, checksums = barrier.collect()
    collected = time.perf_counter()

    encoding_began = time.thread_time()
    metadata = encoder.encode(objects)
    encoded = time.thread_time()

    pending.commit(checksums, metadata, b"", {})
    return CommitCost(
        until_collected=collected - began,
        until_committed=time.perf_counter() - began,
        cpu=time.thread_time() - cpu_began,
        cpu_of_encoding=encoded - encoding_began,
    )


def measure_commit(job: Job, save_id: str, encoder: MetadataEncoder, root: Path) -> None:
    """Commit a checkpoint, and print its cost and the waits of another thread."""
    directory = root / "iter_0000001"
    barrier = job.make_barrier(save_id, rank=0)
    pending = PendingCheckpoint(directory, save_id)
    pending.begin(0)
    with Ticker() as idle:
        time.sleep(1)
    with Ticker() as ticker:
        cost = commit(barrier, pending, encoder)

    checksums_size = (directory / "checksums.bin").stat().st_size / 1e6
    metadata_size = (directory / ".metadata").stat().st_size / 1e6
    print(
        f"{job.world} ranks: checksums.bin {checksums_size:.1f} MB, "
        f".metadata {metadata_size:.1f} MB; "
        f"collected after {1e3 * cost.until_collected:.0f} ms, "
        f"committed after {1e3 * cost.until_committed:.0f} ms; "
        f"rank 0's thread used {1e3 * cost.cpu:.0f} ms of CPU, "
        f"{1e3 * cost.cpu_of_encoding:.0f} ms of it to encode .metadata, "
        f"another thread waited {1e3 * ticker.longest:.0f} ms at the longest "
        f"({1e3 * idle.longest:.0f} ms without a commit)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", type=int, default=16384, help="number of ranks")
    parser.add_argument("--megabytes", type=int, default=350, help="megabytes written by each rank")
    parser.add_argument(
        "--saves",
        type=int,
        default=3,
        help="the first one encodes all metadata, the third one other places of objects",
    )
    args = parser.parse_args()
    # As in pretrain_gpt.py: a full collection does not visit objects created by imports.
    gc.freeze()
    job = Job(args.world, args.megabytes)
    encoder = MetadataEncoder(make_metadata(args.world))
    with create_scratch_directory("commit") as root:
        for number in range(args.saves):
            save_id = f"save-{number}"
            # The objects of the third save are larger, those of the second are not.
            object_size = 16384 + 1024 * (number // 2)
            seconds = job.report_all(save_id, object_size)
            print(f"reports: {1e6 * seconds:.0f} us each, from one client after the other")
            measure_commit(job, save_id, encoder, root)


if __name__ == "__main__":
    main()

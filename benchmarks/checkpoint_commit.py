"""Cost of rank 0's commit at scale: reports of 16,384 ranks are merged and written during training.

Every rank reports over a real TCPStore as in a save (objects, checksums of its files); then rank 0
collects the reports and commits. Its CPU time bounds how long it can hold the interpreter lock. The
benchmark also measures how long another thread waits for the lock, with and without a commit.

    python benchmarks/checkpoint_commit.py                        # 16384 ranks, 350 MB each (405B in training)
    python benchmarks/checkpoint_commit.py --world 1024 --megabytes 1000
"""

import argparse
import shutil
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron.core.dist_checkpointing.format.checksums import (  # noqa: E402
    BLOCK_SIZE,
    DIGEST_SIZE,
    FileChecksums,
    encode_checksum_records,
)
from megatron.core.dist_checkpointing.format.metadata import (  # noqa: E402
    CheckpointMetadata,
    ChunkTable,
    Location,
    StoredTensor,
)
from megatron.core.dist_checkpointing.planning.save_plan import MetadataCache  # noqa: E402
from megatron.core.dist_checkpointing.saving.commit import PendingCheckpoint  # noqa: E402
from megatron.core.dist_checkpointing.saving.save_barrier import (  # noqa: E402
    Heartbeat,
    SaveBarrier,
)

FILES = 2  # of tensors, per rank
TENSORS = 4608  # 128 layers of nine, each as weight, main parameter and two moments
BOXES = 76  # that a rank writes


class Ticker(threading.Thread):
    """Stand-in for the training thread: measures its longest wait for the lock, trying every
    millisecond.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.longest = 0.0
        self.running = True

    def run(self) -> None:
        while self.running:
            before = time.perf_counter()
            time.sleep(0.001)
            self.longest = max(self.longest, time.perf_counter() - before - 0.001)

    def stop(self) -> None:
        self.running = False
        self.join()


def stored_tensors(world: int) -> CheckpointMetadata:
    """Return the stored boxes of all tensors; about a million for 405B."""
    files = tuple(f"__{rank}_{n}.distcp" for rank in range(world) for n in range(FILES))
    boxes = max(1, world * BOXES // TENSORS)
    number = np.arange(boxes)
    result = CheckpointMetadata()
    for tensor in range(TENSORS):
        file = (number * 61 + tensor) % len(files)
        position = (tensor + number) % BOXES << 22
        offset = np.stack([number, 0 * number], axis=1)
        shape = np.broadcast_to(np.array([1, 16384]), (boxes, 2))
        table = ChunkTable(offset, shape, files, file, position, np.full(boxes, 32768))
        result.tensors[f"decoder.layers.{tensor}.weight"] = StoredTensor(
            (boxes, 16384), torch.bfloat16, table
        )
    return result


def make_barrier(store: dist.Store, save_id: str, rank: int, world: int) -> SaveBarrier:
    return SaveBarrier(store, save_id, rank, world, Heartbeat(store, "bench", rank, world, 600))


def report(
    store: dist.Store, save_id: str, rank: int, world: int, blocks: int, object_size: int
) -> None:
    size = blocks * BLOCK_SIZE // FILES
    digests = bytes(blocks // FILES * DIGEST_SIZE)
    sums = {f"__{rank}_{n}.distcp": FileChecksums(size, digests) for n in range(FILES)}
    places = {f"rng_state/{rank}": Location(f"__{rank}_{FILES}.distcp", 0, object_size)}
    make_barrier(store, save_id, rank, world).report(places, encode_checksum_records(sums))


def commit(store: dist.Store, save_id: str, world: int, cache: MetadataCache, root: Path) -> None:
    barrier = make_barrier(store, save_id, 0, world)
    pending = PendingCheckpoint(root / "iter_0000001", save_id)
    pending.begin(0)
    idle = Ticker()
    idle.start()
    time.sleep(1)
    idle.stop()
    ticker = Ticker()
    ticker.start()
    began = time.perf_counter()
    cpu = time.thread_time()
    objects, checksums = barrier.collect()
    collected = time.perf_counter() - began
    encoding = time.thread_time()
    metadata = cache.encode(objects)
    encoding = time.thread_time() - encoding
    pending.commit(checksums, metadata, b"", {})
    cpu = time.thread_time() - cpu
    seconds = time.perf_counter() - began
    ticker.stop()
    sizes = [
        (root / "iter_0000001" / name).stat().st_size / 1e6
        for name in ("checksums.bin", ".metadata")
    ]
    print(
        f"{world} ranks: checksums.bin {sizes[0]:.1f} MB, .metadata {sizes[1]:.1f} MB; "
        f"collected after {1e3 * collected:.0f} ms, committed after "
        f"{1e3 * seconds:.0f} ms; rank 0's thread used {1e3 * cpu:.0f} ms of CPU, "
        f"{1e3 * encoding:.0f} ms of it to encode .metadata, another thread "
        "waited "
        f"{1e3 * ticker.longest:.0f} ms at the longest ({1e3 * idle.longest:.0f} ms without a "
        "commit)"
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
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=10)
    )
    cache = MetadataCache(stored_tensors(args.world))
    root = Path(tempfile.mkdtemp())
    try:
        for number in range(args.saves):
            began = time.perf_counter()
            for rank in range(args.world):
                save_id = f"save-{number}"
                # The objects of the third save are larger, those of the second are not.
                object_size = 16384 + 1024 * (number // 2)
                report(store, save_id, rank, args.world, args.megabytes, object_size)
            seconds = time.perf_counter() - began
            print(
                f"reports: {1e6 * seconds / args.world:.0f} us each, from one client after the "
                "other"
            )
            commit(store, f"save-{number}", args.world, cache, root)
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()

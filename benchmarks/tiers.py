"""Cost of checkpoints on local disks, with and without replicas, and recovery after a node is lost.

Two processes are two nodes. Everything is measured in one run, in turns; results are medians, with a
replication interval of the means over that many saves.
"lost" is the training time that a save costs: a window of iterations (GEMMs, then an update) with a
save, minus the same without; the window ends with the save. CPU seconds are those of a process
beyond the same iterations without a save. "exchange" is the part of a load that waits for other
nodes. "restart" runs two torchrun agents, loses a node with its disk and adds another one; times
are from SIGKILL to the next step and to the next new step.

    python benchmarks/tiers.py                             # 1.6 GB of state, in the current directory's file system
    python benchmarks/tiers.py --size-gb 0.2 --turns 3
    python benchmarks/tiers.py --restart                   # only the loss of a node: 82 MB of state
    python benchmarks/tiers.py --restart --size-gb 1.6     # where reading and repeated iterations matter
    python benchmarks/tiers.py --lost-processes --turns 5  # restarts by torchrun and in the process
    python benchmarks/tiers.py --store local --size-gb 0.2 # only object storage, with a server on this machine
    AWS_ENDPOINT_URL=... python benchmarks/tiers.py --store s3://bucket/prefix

Over plain http, data is signed with a SHA-256, unlike over https; AWS_UNSIGNED_PAYLOAD=true
disables it.
"""

import argparse
import contextlib
import os
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron.core.dist_checkpointing import AsyncSaver, Generation, ShardedTensor, load, save  # noqa: E402
from megatron.core.dist_checkpointing.loading import distributed_local_checkpoint  # noqa: E402
from megatron.core.dist_checkpointing.loading.distributed_local_checkpoint import (
    DistributedLocalCheckpoint,
    find_local_checkpoints,
)  # noqa: E402
from megatron.core.dist_checkpointing.local_tier import LocalSaver, LocalTier  # noqa: E402
from megatron.core.object_storage import PART_SIZE, path_of  # noqa: E402
from megatron.training.reporting.run_record import read_record  # noqa: E402
from tests.support.cluster import Cluster  # noqa: E402
from tests.support.object_server import object_server  # noqa: E402
from tests.support.processes import children_of, is_leader, is_running  # noqa: E402

COLUMNS = 4096
TENSORS = 8
WAYS = {  # -> copies, replication interval
    "own disk": (1, 1),
    "own disk and a copy": (2, 1),
    "a copy of every fourth": (2, 4),
}
RUN = (
    "--num-layers 4 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 2 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 4000 --lr 1e-4 "
    "--num-workers 0 --train-iters 1000 --eval-iters 0 --use-distributed-optimizer --log-interval "
    "1 --async-save "
    "--save-interval 10 "
)
LOCAL = "--non-persistent-ckpt-type local --non-persistent-save-interval 2 --replication "
LOST_AFTER = (
    18  # iterations: the last checkpoint of --save is that of 10, the nodes have a newer one
)


class Training:
    """Iterations of GEMMs and an update of the state, which waits until the state is staged."""

    def __init__(self, size_gb: float, rank: int, size: int) -> None:
        rows = int(size_gb * 1e9 / size / TENSORS / COLUMNS / 4)
        self.tensors = [
            torch.full((rows, COLUMNS), float(rank + number)) for number in range(TENSORS)
        ]
        names = (f"layers.{number}" for number in range(TENSORS))
        self.state = {
            name: ShardedTensor.split(name, tensor, 0, rank, size)
            for name, tensor in zip(names, self.tensors, strict=True)
        }
        self.bytes = sum(tensor.nbytes for tensor in self.tensors)
        self._matrix = torch.randn(768, 768)

    def iterate(self, before_update) -> None:
        for _ in range(12):
            self._matrix @ self._matrix
        before_update()
        for tensor in self.tensors:
            tensor[:8].add_(0)


def window(training, saver, begin):
    """Return (iterations, seconds, CPU seconds, report) until the save started by `begin` has
    finished.
    """
    wall = time.perf_counter()
    cpu = time.process_time()
    iterations = 0
    handle = begin()
    while not handle.done() or iterations < 3:
        training.iterate(saver.wait_staged)
        iterations += 1
    (report,) = saver.finish()
    assert report.error is None and report.warning is None, report
    return iterations, time.perf_counter() - wall, time.process_time() - cpu, report


def per_iteration(training, count=20):
    wall = time.perf_counter()
    cpu = time.process_time()
    for _ in range(count):
        training.iterate(lambda: None)
    return (time.perf_counter() - wall) / count, (time.process_time() - cpu) / count


def measure_save(training, root, saver, pending):
    """Return the costs of one save."""
    dist.barrier()
    wall, cpu = per_iteration(training)
    dist.barrier()
    begin = partial(saver.save, training.state, root, common={"iteration": 1}, pending=pending)
    iterations, seconds, cpu_seconds, report = window(training, saver, begin)
    return {
        "training blocked, ms": report.blocking * 1e3,
        "training time lost, ms": (seconds - iterations * wall) * 1e3,
        "until committed, s": report.total,
        "CPU s per GB saved": (cpu_seconds - iterations * cpu) / training.bytes * 1e9,
    }


def measure_saves(rank, size, training, root, turns):
    results = defaultdict(lambda: defaultdict(list))
    savers = {}
    for way, (copies, interval) in WAYS.items():
        directory = root / f"copies{copies}-interval{interval}" / f"node{rank}"
        tier = LocalTier.create(directory, copies)
        savers[way] = AsyncSaver(), LocalSaver(tier, Generation(root, 1, ""), None, interval)
        savers[way][0].prepare(training.state).result()
    for turn in range(turns + 1):
        for way, (saver, nodes) in savers.items():
            _, interval = WAYS[way]
            costs = []
            for number in range(interval):
                pending = partial(nodes.checkpoint, turn * interval + number + 1)
                costs.append(measure_save(training, root, saver, pending))
            if turn:  # the first one warms up
                for name in costs[0]:
                    results[way][name].append(statistics.mean(cost[name] for cost in costs))
    for saver, nodes in savers.values():
        saver.close()
        nodes.close()
    return results


def timed(owner, name, but_in):
    """Record the seconds of every later call of a function in threads other than `but_in`."""
    method = getattr(owner, name)
    seconds = []

    def call(*arguments):
        started = time.perf_counter()
        result = method(*arguments)
        if threading.current_thread().name != but_in:
            seconds.append(time.perf_counter() - started)
        return result

    setattr(owner, name, call)
    return seconds


def slowest(seconds):
    value = torch.tensor(seconds)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def measure_loads(rank, size, training, root, turns):
    """Measure a load after node 1 lost its disk, and the same from a shared directory."""
    results = defaultdict(lambda: defaultdict(list))
    save(training.state, root / "persistent", common={"iteration": 1})
    if rank == 1:
        shutil.rmtree(root / "copies2-interval1" / "node1")
    exchange = timed(distributed_local_checkpoint, "_wait", but_in="checkpoint-server")
    for _ in range(turns):
        dist.barrier()
        exchange.clear()
        started = time.perf_counter()
        tier = LocalTier.create(root / "copies2-interval1" / f"node{rank}", 2)
        held = [find_local_checkpoints(tier)]
        dist.broadcast_object_list(held, 0)
        local = DistributedLocalCheckpoint(tier, held[0][0])
        results["from the copies"]["find and open, s"].append(time.perf_counter() - started)
        started = time.perf_counter()
        load(training.state, local.directory)
        local.close()
        results["from the copies"]["read, exchange and verify, s"].append(
            time.perf_counter() - started
        )
        results["from the copies"]["of it exchange, on node 1, s"].append(
            slowest(sum(exchange, 0.0))
        )
        dist.barrier()
        started = time.perf_counter()
        load(training.state, root / "persistent", verify=True)
        results["from a shared directory"]["read, exchange and verify, s"].append(
            time.perf_counter() - started
        )
    return results


def hidden_size(size_gb):
    """Return the hidden size of a model with that much state: 16 bytes for each of its 48 h^2 +
    8000 h parameters.
    """
    return round(((8000**2 + 4 * 48 * size_gb * 1e9 / 16) ** 0.5 - 8000) / 96 / 64) * 64


def measure_restart(root, flags):
    """Measure the loss of a node with its disk and its replacement."""
    save = root / "run"
    cluster = Cluster(root, 2, 1, f"{RUN} {flags} --save {save} --load {save}")
    starts = lambda: read_record(save)  # noqa: E731
    done = lambda: max((start.last for start in starts()), default=0)  # noqa: E731
    try:
        cluster.start("a")
        cluster.start("b")
        cluster.until(lambda: done() >= LOST_AFTER)
        workers = cluster.workers("a")
        killed = time.time()
        last = done()
        cluster.lose("b")
        cluster.start("c")
        cluster.until(lambda: not any(map(is_running, workers)))
        noticed = time.time()
        cluster.until(lambda: starts()[-1].start["time"] > noticed and done() > last)
        again = starts()[-1]
    finally:
        cluster.close()
    began = again.began
    loading = again.start["loading"]
    trains = again.start["time"]
    new = next(row["time"] for row in again.intervals if row["iteration"] > last)
    return {
        "detect, s": noticed - killed,
        "rendezvous, start of processes, s": began - noticed,
        "find, build the model, s": trains - began - loading,
        "read, exchange and verify, s": loading,
        "first step, s": again.intervals[0]["time"] - trains,
        "to the next step, s": again.intervals[0]["time"] - killed,
        "iterations done again": last - again.first,
        "to a new step, s": new - killed,
    }


def measure_lost_processes(root, flags, in_process):
    """Measure the loss of all ranks of a node and of its disk; the launcher of the node remains."""
    save = root / "run"
    batch = "--global-batch-size 4"
    cluster = Cluster(root, 2, 2, f"{RUN} {batch} {flags} --save {save} --load {save}")
    starts = lambda: read_record(save)  # noqa: E731
    done = lambda: max((start.last for start in starts()), default=0)  # noqa: E731
    try:
        cluster.start("a")
        cluster.start("b")
        cluster.until(lambda: done() >= LOST_AFTER)
        lost = cluster.workers("b")
        if in_process:
            lost = [child for monitor in lost for child in children_of(monitor) if is_leader(child)]
        killed = time.time()
        for pid in lost:
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(cluster.disk("b"))
        cluster.until(lambda: starts()[-1].began > killed and starts()[-1].intervals)
        again = starts()[-1]
    finally:
        cluster.close()
    return {
        "processes end and start, s": again.began - killed,
        "groups, model, data and reading, s": again.start["time"] - again.began,
        "of it reading, s": again.start["loading"],
        "first step, s": again.intervals[0]["time"] - again.start["time"],
        "to the next step, s": again.intervals[0]["time"] - killed,
    }


def compare_restarts(root, turns, size_gb):
    """Compare restarts by torchrun and in the process, which take turns."""
    results = defaultdict(lambda: defaultdict(list))
    width = f"--hidden-size {hidden_size(size_gb)} {LOCAL}"
    for turn in range(turns):
        for way, flags in (("by torchrun", ""), ("in process", "--inprocess-restart")):
            directory = root / f"{way}{turn}".replace(" ", "_")
            directory.mkdir()
            measured = measure_lost_processes(directory, f"{width} {flags}", bool(flags))
            for name, value in measured.items():
                results[way][name].append(value)
            shutil.rmtree(directory)
    return results


def measure_restarts(root, turns, size_gb):
    results = defaultdict(lambda: defaultdict(list))
    width = f"--hidden-size {hidden_size(size_gb)}"
    for turn in range(turns):
        for way, flags in (("with copies on nodes", LOCAL), ("from --save alone", "")):
            directory = root / f"{way}{turn}".replace(" ", "_")
            directory.mkdir()
            for name, value in measure_restart(directory, f"{width} {flags}").items():
                results[way][name].append(value)
            shutil.rmtree(directory)
    return results


def measure_store(rank, size, training, prefix, turns):
    """Compare with one plain upload and download of the same bytes per rank through obstore."""
    results = defaultdict(lambda: defaultdict(list))
    content = b"".join(tensor.numpy().tobytes() for tensor in training.tensors)
    with AsyncSaver() as saver:
        for turn in range(turns):
            path = path_of(f"{prefix}/{turn}-{rank}")
            dist.barrier()
            started = time.perf_counter()
            upload = path.store.upload(path.key, len(content))
            for offset in range(0, len(content), PART_SIZE):
                upload.write(content[offset : offset + PART_SIZE])
            upload.close()
            dist.barrier()
            results["plain obstore"]["put, GB/s"].append(
                size * len(content) / (time.perf_counter() - started) / 1e9
            )
            cpu = time.process_time()
            report = saver.save(
                training.state, f"{prefix}/iter_{turn:07d}", common={"iteration": 1}
            ).wait()
            saver.finish()
            assert report.error is None, report
            results["checkpoint"]["CPU s per GB saved"].append(
                (time.process_time() - cpu) / len(content) * 1e9
            )
            results["checkpoint"]["put, GB/s"].append(report.gb_per_second)
            dist.barrier()
            started = time.perf_counter()
            for offset in range(0, len(content), 64 << 20):
                path.store.get_range(path.key, offset, min(64 << 20, len(content) - offset))
            dist.barrier()
            results["plain obstore"]["get, GB/s"].append(
                size * len(content) / (time.perf_counter() - started) / 1e9
            )
            started = time.perf_counter()
            load(training.state, f"{prefix}/iter_{turn:07d}")
            dist.barrier()
            results["checkpoint"]["get, GB/s"].append(
                size * len(content) / (time.perf_counter() - started) / 1e9
            )
    return results


def worker(rank, size, options, root, port):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
    )
    training = Training(options.size_gb, rank, size)
    if options.store:
        tables = [measure_store(rank, size, training, options.store, options.turns)]
    else:
        tables = [measure_saves(rank, size, training, root, options.turns)]
        tables.append(measure_loads(rank, size, training, root, options.turns))
    if rank == 0:
        print(
            f"{options.size_gb} GB of state on {size} nodes of one process, medians of "
            f"{options.turns} turns"
        )
        for results in tables:
            show(results)
    dist.barrier()
    dist.destroy_process_group()


def show(results):
    rows = dict.fromkeys(name for values in results.values() for name in values)
    print(f"\n| {'':34} | {' | '.join(results)} |\n|{'---|' * (len(results) + 1)}")
    for row in rows:
        cells = [f"{statistics.median(v[row]):.3g}" if row in v else "" for v in results.values()]
        print(f"| {row:34} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size-gb", type=float, help="of all nodes together; default 1.6, with --restart 0.082"
    )
    parser.add_argument("--turns", type=int, help="default 5, with --restart 1")
    parser.add_argument("--directory", default=".", help="on the disk to measure")
    parser.add_argument(
        "--store", help="measure object storage, and nothing else: s3://bucket/prefix, or `local`"
    )
    parser.add_argument(
        "--restart", action="store_true", help="measure the loss of a node, and nothing else"
    )
    parser.add_argument(
        "--lost-processes",
        action="store_true",
        help="measure the loss of the ranks of a node, and nothing else",
    )
    options = parser.parse_args()
    measures_restart = options.restart or options.lost_processes
    options.turns = options.turns or (1 if measures_restart else 5)
    options.size_gb = options.size_gb or (0.082 if measures_restart else 1.6)
    with contextlib.ExitStack() as stack:
        if options.store == "local":
            stack.enter_context(object_server())
            options.store = "s3://bucket/run"
        root = stack.enter_context(
            tempfile.TemporaryDirectory(dir=options.directory, prefix="tiers-")
        )
        if options.restart:
            show(measure_restarts(Path(root), options.turns, options.size_gb))
            return
        if options.lost_processes:
            show(compare_restarts(Path(root), options.turns, options.size_gb))
            return
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = store.port
        del store
        mp.spawn(worker, (2, options, Path(root), port), nprocs=2)


if __name__ == "__main__":
    main()

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
import math
import os
import shutil
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from scratch import create_scratch_directory

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron.core.dist_checkpointing import (  # noqa: E402
    AsyncSaver,
    Generation,
    ShardedStateDict,
    ShardedTensor,
    load,
    save,
)
from megatron.core.dist_checkpointing.local_checkpoints import find_local_checkpoints  # noqa: E402
from megatron.core.dist_checkpointing.tiers import distributed_local_checkpoint  # noqa: E402
from megatron.core.dist_checkpointing.tiers.distributed_local_checkpoint import (
    DistributedLocalCheckpoint,  # noqa: E402
)
from megatron.core.dist_checkpointing.tiers.local_tier import LocalSaver, LocalTier  # noqa: E402
from megatron.core.object_path import path_of
from megatron.core.object_storage import PART_SIZE
from megatron.training.reporting.recorded_launches import RecordedLaunch, read_record  # noqa: E402
from tests.support.cluster import Cluster  # noqa: E402
from tests.support.object_server import object_server  # noqa: E402
from tests.support.processes import children_of, is_leader, is_running  # noqa: E402

NODES = 2
COLUMNS = 4096
TENSORS = 8
GEMMS = 12  # per iteration
MIN_ITERATIONS = 3  # of a window with a save

GET_SIZE = 64 << 20  # bytes of one plain download

RUN = """
    --num-layers 4
    --num-attention-heads 4
    --seq-length 32
    --max-position-embeddings 32
    --micro-batch-size 1
    --global-batch-size 2
    --mock-data
    --tokenizer-type NullTokenizer
    --vocab-size 4000
    --lr 1e-4
    --num-workers 0
    --train-iters 1000
    --eval-iters 0
    --use-distributed-optimizer
    --log-interval 1
    --async-save
    --save-interval 10
"""
LOCAL = "--non-persistent-ckpt-type local --non-persistent-save-interval 2 --replication"
# After this iteration the newest checkpoint in --save is that of iteration 10, and the nodes have a
# newer one.
LOST_AFTER = 18

# Row of a table -> value of one turn.
Measured = dict[str, float]


class Table:
    """Values of all turns, by column and row."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, list[float]]] = {}

    def add(self, column: str, measured: Measured) -> None:
        """Add the values of one turn."""
        rows = self._values.setdefault(column, {})
        for name, value in measured.items():
            rows.setdefault(name, []).append(value)

    def print(self) -> None:
        """Print the medians as a Markdown table, with an empty cell where a column has no value."""
        header = " | ".join(self._values)
        rules = "---|" * (len(self._values) + 1)
        print(f"\n| {'':34} | {header} |")
        print(f"|{rules}")

        row_names: dict[str, None] = {}
        for rows in self._values.values():
            row_names |= dict.fromkeys(rows)
        for name in row_names:
            cells = []
            for rows in self._values.values():
                cell = ""
                if name in rows:
                    cell = f"{statistics.median(rows[name]):.3g}"
                cells.append(cell)
            print(f"| {name:34} | {' | '.join(cells)} |")


# ---- Training ----


@dataclass
class Clocks:
    """Wall time and processor time, in seconds."""

    wall: float
    cpu: float

    @classmethod
    def read(cls) -> "Clocks":
        return cls(time.perf_counter(), time.process_time())

    def measure(self) -> "Clocks":
        """Return the time since these clocks were read."""
        now = Clocks.read()
        return Clocks(now.wall - self.wall, now.cpu - self.cpu)


class Training:
    """Iterations of GEMMs and an update of the state, which waits until the state is staged."""

    def __init__(self, size_gb: float, rank: int) -> None:
        elements = size_gb * 1e9 / 4  # fp32
        rows = int(elements / NODES / TENSORS / COLUMNS)
        self.rank = rank
        self.tensors: list[torch.Tensor] = []
        self.state: ShardedStateDict = {}
        self.bytes = 0
        for number in range(TENSORS):
            name = f"layers.{number}"
            tensor = torch.full((rows, COLUMNS), float(rank + number))
            self.tensors.append(tensor)
            self.state[name] = ShardedTensor.split(name, tensor, 0, rank, NODES)
            self.bytes += tensor.nbytes
        self._matrix = torch.randn(768, 768)

    def iterate(self, wait_staged: Callable[[], None] | None = None) -> None:
        """Run one iteration, and call `wait_staged` before the update."""
        for _ in range(GEMMS):
            self._matrix @ self._matrix
        if wait_staged is not None:
            wait_staged()
        for tensor in self.tensors:
            tensor[:8].add_(0)

    def measure_iteration(self, count: int = 20) -> Clocks:
        """Return the mean time of an iteration without a save."""
        began = Clocks.read()
        for _ in range(count):
            self.iterate()
        total = began.measure()
        return Clocks(total.wall / count, total.cpu / count)


# ---- Saves to local disks ----


@dataclass
class Way:
    """One way to save: number of copies, and local checkpoints for one that is replicated."""

    copies: int
    interval: int

    def directory(self, root: Path, rank: int) -> Path:
        """Return the local disk of a node."""
        return root / f"copies{self.copies}-interval{self.interval}" / f"node{rank}"


WITHOUT_REPLICAS = Way(copies=1, interval=1)
WITH_REPLICAS = Way(copies=2, interval=1)
WAYS = {
    "own disk": WITHOUT_REPLICAS,
    "own disk and a replica": WITH_REPLICAS,
    "a replica of every fourth": Way(copies=2, interval=4),
}


class LocalSaves:
    """The savers of one way, and its costs."""

    def __init__(self, way: Way, training: Training, root: Path) -> None:
        self.way = way
        self._training = training
        self._root = root
        self._iteration = 0
        tier = LocalTier.create(way.directory(root, training.rank), way.copies)
        generation = Generation(root, 1, "")
        self._nodes = LocalSaver(tier, generation, None, way.interval)
        self._saver = AsyncSaver()
        self._saver.prepare(training.state).result()

    def measure_turn(self) -> Measured:
        """Return the mean costs of as many saves as there are in a replication interval."""
        costs = []
        for _ in range(self.way.interval):
            costs.append(self._measure_save())
        means = {}
        for name in costs[0]:
            means[name] = statistics.mean(cost[name] for cost in costs)
        return means

    def _measure_save(self) -> Measured:
        """Return the costs of one save, next to the same iterations without a save."""
        self._iteration += 1
        training = self._training
        dist.barrier()
        iteration = training.measure_iteration()
        dist.barrier()

        # Train until the save has finished.
        began = Clocks.read()
        handle = self._saver.save(
            training.state,
            self._root,
            common={"iteration": 1},
            pending=partial(self._nodes.checkpoint, self._iteration),
        )
        iterations = 0
        while not handle.done() or iterations < MIN_ITERATIONS:
            training.iterate(self._saver.wait_staged)
            iterations += 1
        (report,) = self._saver.finish()
        window = began.measure()
        assert report.error is None and report.warning is None, report

        lost_wall = window.wall - iterations * iteration.wall
        lost_cpu = window.cpu - iterations * iteration.cpu
        return {
            "training blocked, ms": report.blocking * 1e3,
            "training time lost, ms": lost_wall * 1e3,
            "until committed, s": report.total,
            "CPU s per GB saved": lost_cpu / (training.bytes / 1e9),
        }

    def close(self) -> None:
        self._saver.close()
        self._nodes.close()


def measure_saves(training: Training, root: Path, turns: int) -> Table:
    """Measure all ways to save, which take turns after one that warms up."""
    contestants = {name: LocalSaves(way, training, root) for name, way in WAYS.items()}
    table = Table()
    for saves in contestants.values():
        saves.measure_turn()
    for _ in range(turns):
        for name, saves in contestants.items():
            table.add(name, saves.measure_turn())
    for saves in contestants.values():
        saves.close()
    return table


# ---- Loads after a node has lost its disk ----


def record_calls(module: ModuleType, name: str, excluded_thread: str) -> list[float]:
    """Replace a function by one that records its seconds, except in threads of a name."""
    function = getattr(module, name)
    seconds: list[float] = []

    def call(*arguments: object) -> object:
        began = time.perf_counter()
        result = function(*arguments)
        if threading.current_thread().name != excluded_thread:
            seconds.append(time.perf_counter() - began)
        return result

    setattr(module, name, call)
    return seconds


def reduce_max(seconds: float) -> float:
    """Return the time of the slowest rank."""
    value = torch.tensor(seconds)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return value.item()


def open_newest_local_checkpoint(tier: LocalTier) -> DistributedLocalCheckpoint:
    """Open the newest local checkpoint that rank 0 finds, on all ranks."""
    found = [find_local_checkpoints(tier).usable]
    dist.broadcast_object_list(found, 0)
    return DistributedLocalCheckpoint(tier, found[0][0])


def measure_loads(training: Training, root: Path, turns: int) -> Table:
    """Measure a load after node 1 lost its disk, and the same from a shared directory."""
    table = Table()
    save(training.state, root / "persistent", common={"iteration": 1})
    disk = WITH_REPLICAS.directory(root, training.rank)
    if training.rank == 1:
        shutil.rmtree(disk)
    # The server thread waits for requests, not for data.
    waits = record_calls(distributed_local_checkpoint, "_wait", "checkpoint-server")
    for _ in range(turns):
        dist.barrier()
        waits.clear()
        began = time.perf_counter()
        local = open_newest_local_checkpoint(LocalTier.create(disk, WITH_REPLICAS.copies))
        opened = time.perf_counter()
        load(training.state, local.directory)
        local.close()
        ended = time.perf_counter()
        from_replicas = {
            "find and open, s": opened - began,
            "read, exchange and verify, s": ended - opened,
            "of it exchange, on node 1, s": reduce_max(math.fsum(waits)),
        }
        table.add("from the replicas", from_replicas)

        dist.barrier()
        began = time.perf_counter()
        load(training.state, root / "persistent", verify=True)
        seconds = time.perf_counter() - began
        table.add("from a shared directory", {"read, exchange and verify, s": seconds})
    return table


# ---- Restarts ----


def compute_hidden_size(size_gb: float) -> int:
    """Return the hidden size h of a model with that much state, a multiple of 64.

    The model has 48 h^2 + 8000 h parameters with 16 bytes of state each.
    """
    parameters = size_gb * 1e9 / 16
    hidden_size = (math.sqrt(8000**2 + 4 * 48 * parameters) - 8000) / (2 * 48)
    return round(hidden_size / 64) * 64


class Job:
    """Training on the nodes `a` and `b` of a cluster on this machine."""

    def __init__(self, root: Path, processes: int, flags: str) -> None:
        self._save = root / "run"
        flags = f"{RUN} {flags} --save {self._save} --load {self._save}"
        self.cluster = Cluster(root, NODES, processes, flags)

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *error: object) -> None:
        self.cluster.close()

    def train(self) -> None:
        """Start both nodes, and return when a node is to be lost."""
        self.cluster.start("a")
        self.cluster.start("b")
        self.cluster.until(lambda: self.last_iteration() >= LOST_AFTER)

    def newest_launch(self) -> RecordedLaunch:
        return read_record(self._save)[-1]

    def last_iteration(self) -> int:
        """Return the last iteration of any launch, or 0 before the first one."""
        last = 0
        for launch in read_record(self._save):
            last = max(last, launch.last)
        return last


def measure_restart(root: Path, flags: str) -> Measured:
    """Measure the loss of a node with its disk and its replacement."""
    with Job(root, processes=1, flags=flags) as job:
        job.train()
        survivors = job.cluster.workers("a")
        killed = time.time()
        last = job.last_iteration()
        job.cluster.lose("b")
        job.cluster.start("c")
        job.cluster.until(lambda: not any(map(is_running, survivors)))
        noticed = time.time()

        def trains_again() -> bool:
            has_restarted = job.newest_launch().start["time"] > noticed
            return has_restarted and job.last_iteration() > last

        job.cluster.until(trains_again)
        launch = job.newest_launch()

    ready = launch.start["time"]
    loading = launch.start["loading"]
    first_step = launch.intervals[0]["time"]
    new_step = next(row["time"] for row in launch.intervals if row["iteration"] > last)
    return {
        "detect, s": noticed - killed,
        "rendezvous, start of processes, s": launch.began - noticed,
        "find, build the model, s": ready - launch.began - loading,
        "read, exchange and verify, s": loading,
        "first step, s": first_step - ready,
        "to the next step, s": first_step - killed,
        "repeated iterations": last - launch.first,
        "to a new step, s": new_step - killed,
    }


def find_training_processes(launched: list[int], in_process: bool) -> list[int]:
    """Return the processes that train.

    With in-process restart they are children of the launched ones, and lead process groups.
    """
    if not in_process:
        return launched
    found = []
    for monitor in launched:
        found += filter(is_leader, children_of(monitor))
    return found


def measure_lost_processes(root: Path, flags: str, in_process: bool) -> Measured:
    """Measure the loss of all ranks of a node and of its disk; the launcher of the node remains."""
    with Job(root, processes=2, flags=f"--global-batch-size 4 {flags}") as job:
        job.train()
        lost = find_training_processes(job.cluster.workers("b"), in_process)
        killed = time.time()
        for pid in lost:
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(job.cluster.disk("b"))

        def trains_again() -> bool:
            launch = job.newest_launch()
            return launch.began > killed and len(launch.intervals) > 0

        job.cluster.until(trains_again)
        launch = job.newest_launch()

    ready = launch.start["time"]
    first_step = launch.intervals[0]["time"]
    return {
        "processes end and start, s": launch.began - killed,
        "groups, model, data and reading, s": ready - launch.began,
        "of it reading, s": launch.start["loading"],
        "first step, s": first_step - ready,
        "to the next step, s": first_step - killed,
    }


def compare_runs(
    root: Path,
    turns: int,
    contestants: dict[str, Callable[[Path], Measured]],
) -> Table:
    """Measure contestants, which take turns, each in a directory of its own."""
    table = Table()
    for turn in range(turns):
        for name, measure in contestants.items():
            directory = root / f"{name}{turn}".replace(" ", "_")
            directory.mkdir()
            table.add(name, measure(directory))
            shutil.rmtree(directory)
    return table


def compare_restarts(root: Path, turns: int, size_gb: float) -> Table:
    """Compare restarts from local checkpoints and from `--save`."""
    width = f"--hidden-size {compute_hidden_size(size_gb)}"
    contestants = {
        "with replicas on nodes": partial(measure_restart, flags=f"{width} {LOCAL}"),
        "from --save alone": partial(measure_restart, flags=width),
    }
    return compare_runs(root, turns, contestants)


def compare_lost_processes(root: Path, turns: int, size_gb: float) -> Table:
    """Compare restarts by torchrun and in the process."""
    flags = f"--hidden-size {compute_hidden_size(size_gb)} {LOCAL}"
    in_process_flags = f"{flags} --inprocess-restart"
    by_torchrun = partial(measure_lost_processes, flags=flags, in_process=False)
    in_process = partial(measure_lost_processes, flags=in_process_flags, in_process=True)
    return compare_runs(root, turns, {"by torchrun": by_torchrun, "in process": in_process})


# ---- Object storage ----


class PlainObject:
    """Uploads and downloads of this rank's bytes through obstore, without a checkpoint."""

    def __init__(self, url: str, content: bytes) -> None:
        self._path = path_of(url)
        self._content = content

    def upload(self) -> None:
        upload = self._path.store.upload(self._path.key, len(self._content))
        for offset in range(0, len(self._content), PART_SIZE):
            upload.write(self._content[offset : offset + PART_SIZE])
        upload.close()

    def download(self) -> None:
        for offset in range(0, len(self._content), GET_SIZE):
            size = min(GET_SIZE, len(self._content) - offset)
            self._path.store.get_range(self._path.key, offset, size)


def measure_on_all_ranks(action: Callable[[], None]) -> float:
    """Return the seconds until all ranks have finished an action."""
    dist.barrier()
    began = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - began


def measure_store(training: Training, prefix: str, turns: int) -> Table:
    """Compare with one plain upload and download of the same bytes per rank through obstore."""
    table = Table()
    content = b"".join(tensor.numpy().tobytes() for tensor in training.tensors)
    gigabytes = len(content) / 1e9
    with AsyncSaver() as saver:
        for turn in range(turns):
            checkpoint = f"{prefix}/iter_{turn:07d}"
            plain = PlainObject(f"{prefix}/{turn}-{training.rank}", content)
            uploading = measure_on_all_ranks(plain.upload)

            began = Clocks.read()
            handle = saver.save(training.state, checkpoint, common={"iteration": 1})
            report = handle.wait()
            saver.finish()
            saving = began.measure()
            assert report.error is None, report

            downloading = measure_on_all_ranks(plain.download)
            loading = measure_on_all_ranks(partial(load, training.state, checkpoint))
            of_plain_object = {
                "put, GB/s": NODES * gigabytes / uploading,
                "get, GB/s": NODES * gigabytes / downloading,
            }
            of_checkpoint = {
                "put, GB/s": report.gb_per_second,
                "get, GB/s": NODES * gigabytes / loading,
                "CPU s per GB saved": saving.cpu / gigabytes,
            }
            table.add("plain obstore", of_plain_object)
            table.add("checkpoint", of_checkpoint)
    return table


# ---- Command line ----


def run_node(rank: int, options: argparse.Namespace, root: Path, port: int) -> None:
    """Measure as the process of one node, and print the tables on node 0."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=NODES)
    training = Training(options.size_gb, rank)
    tables = []
    if options.store:
        tables.append(measure_store(training, options.store, options.turns))
    else:
        tables.append(measure_saves(training, root, options.turns))
        tables.append(measure_loads(training, root, options.turns))
    if rank == 0:
        print(
            f"{options.size_gb} GB of state on {NODES} nodes of one process, medians of "
            f"{options.turns} turns"
        )
        for table in tables:
            table.print()
    dist.barrier()
    dist.destroy_process_group()


def start_nodes(options: argparse.Namespace, root: Path) -> None:
    """Run both nodes, and wait until they have finished."""
    # The store finds a free port, on which the nodes meet.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    mp.spawn(run_node, (options, root, port), nprocs=NODES)


def parse_arguments() -> argparse.Namespace:
    """Return the flags of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size-gb", type=float, help="of all nodes together; default 1.6, with --restart 0.082"
    )
    parser.add_argument("--turns", type=int, help="default 5, with --restart 1")
    parser.add_argument("--directory", type=Path, default=Path(), help="on the disk to measure")
    parser.add_argument(
        "--store", help="measure only object storage: s3://bucket/prefix, or `local`"
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="measure only the loss of a node",
    )
    parser.add_argument(
        "--lost-processes",
        action="store_true",
        help="measure only the loss of the ranks of a node",
    )
    options = parser.parse_args()

    default_turns = 5
    default_size_gb = 1.6
    if options.restart or options.lost_processes:
        default_turns = 1
        default_size_gb = 0.082
    options.turns = options.turns or default_turns
    options.size_gb = options.size_gb or default_size_gb
    return options


def main() -> None:
    options = parse_arguments()
    with contextlib.ExitStack() as stack:
        if options.store == "local":
            stack.enter_context(object_server())
            options.store = "s3://bucket/run"
        root = stack.enter_context(create_scratch_directory("tiers", options.directory))
        if options.restart:
            compare_restarts(root, options.turns, options.size_gb).print()
        elif options.lost_processes:
            compare_lost_processes(root, options.turns, options.size_gb).print()
        else:
            start_nodes(options, root)


if __name__ == "__main__":
    main()

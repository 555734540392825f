"""Checkpoint speed compared with torch.distributed.checkpoint (DCP) in one run.

Both save the same state to the same disk with fsync. The state is sharded over the processes
(DTensors for DCP, boxes for us): bf16 weights, fp32 main parameters and two moments. Contestants
take turns, so that noise affects all of them; results are medians. "lost" is the training time that
a save costs: the time of a window of iterations (GEMMs, then an update of all tensors) with a save,
minus the same without.

    python benchmarks/checkpoint.py                          # 1.6 GB, 2 processes
    python benchmarks/checkpoint.py --size-gb 0.2 --repeats 2
    python benchmarks/checkpoint.py --flatness               # fixed size; 1, 2, 4, 8 processes
    python benchmarks/checkpoint.py --only-lost --repeats 20 # ours and a copy of the same bytes
"""

import argparse
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from megatron.core.dist_checkpointing import (  # noqa: E402
    AsyncSaver,
    SaveHandle,
    ShardedStateDict,
    ShardedTensor,
    load,
    staging_for_waiting,
    verify,
)

COLUMNS = 4096
NAMES = ("weight", "main", "exp_avg", "exp_avg_sq")
WINDOW = 6  # iterations after a save whose time counts
# The same where only our saves are measured, which end within it
SHORT_WINDOW = 2
SHORT_GEMMS = 8
COPIED_AT_ONCE = 8 << 20


class State:
    """One set of tensors in two representations: for DCP and for this project."""

    def __init__(self, rows: int, layers: int, dim: int = 0, fill: bool = True) -> None:
        rank = dist.get_rank()
        size = dist.get_world_size()
        self.dtensors: dict[str, torch.Tensor] = {}
        self.boxes: ShardedStateDict = {}
        mesh = init_device_mesh("cpu", (size,))
        shape = [rows, COLUMNS]
        shape[dim] //= size
        for layer in range(layers):
            for name in NAMES:
                key = f"layers.{layer}.{name}"
                local = torch.full(
                    shape, -1.0, dtype=torch.bfloat16 if name == "weight" else torch.float32
                )
                if fill:
                    place = (
                        torch.arange(local.numel()) + layer * 7 + NAMES.index(name) * 3 + rank * 11
                    )
                    local.copy_((place % 251).view(shape))
                self.dtensors[key] = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)
                self.boxes[key] = ShardedTensor.split(key, local, dim, rank, size)
        self.locals = [entry.boxes[0].tensor for entry in self.boxes.values()]
        self.nbytes = size * sum(tensor.nbytes for tensor in self.locals)

    def update(self) -> None:
        for tensor in self.locals:
            tensor.add_(1).sub_(1)

    def clear(self) -> None:
        for tensor in self.locals:
            tensor.fill_(-1)

    def checksum(self) -> float:
        total = torch.tensor(
            sum(float(tensor.float().sum(dtype=torch.float64)) for tensor in self.locals)
        )
        dist.all_reduce(total)
        return total.item()


def writer(path: Path, workers: int) -> dcp.FileSystemWriter:
    return dcp.FileSystemWriter(path, thread_count=workers, sync_files=True, overwrite=True)


def committed(handle: SaveHandle) -> None:
    error = handle.wait().error
    assert error is None, error


def timed(action: Callable[[], object]) -> float:
    """Return the seconds until the slowest process has finished."""
    dist.barrier()
    began = time.perf_counter()
    action()
    seconds = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


class PlainWrite:
    """The limit of the disk: every process writes its bytes with large writes from several threads,
    then fsync.
    """

    def __init__(self, state: State, path: Path, workers: int, direct: bool) -> None:
        size = state.nbytes // dist.get_world_size() // workers >> 23 << 23
        self._buffers = [
            torch.empty(size + 4096, dtype=torch.uint8).fill_(i + 1) for i in range(workers)
        ]
        self._size = size
        self._path = path
        self._flags = os.O_DIRECT if direct else 0

    def __call__(self) -> None:
        self._path.mkdir(exist_ok=True, parents=True)
        threads = [
            threading.Thread(target=self._write, args=(i,)) for i in range(len(self._buffers))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _write(self, index: int) -> None:
        name = self._path / f"{dist.get_rank()}_{index}"
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | self._flags, 0o644)
        start = -self._buffers[index].data_ptr() % 4096
        view = memoryview(self._buffers[index].numpy())[start : start + self._size]
        for offset in range(0, self._size, 8 << 20):
            os.write(descriptor, view[offset : offset + (8 << 20)])
        os.fsync(descriptor)
        os.close(descriptor)


class PlainCopy:
    """The limit of a snapshot: every process copies its bytes to other memory, by as many threads
    as stage a save.
    """

    def __init__(self, state: State, workers: int) -> None:
        self._parts: list[tuple[int, int, int]] = []  # (target, source, length)
        self._targets: list[torch.Tensor] = []  # kept alive
        for source in state.locals:
            target = torch.zeros_like(source)
            self._targets.append(target)
            for start in range(0, source.nbytes, COPIED_AT_ONCE):
                length = min(COPIED_AT_ONCE, source.nbytes - start)
                self._parts.append((target.data_ptr() + start, source.data_ptr() + start, length))
        self._pool = ThreadPoolExecutor(2 * workers)

    def __call__(self) -> None:
        for _ in self._pool.map(lambda part: ctypes.memmove(*part), self._parts):
            pass

    def close(self) -> None:
        self._pool.shutdown()


def evict(directory: Path) -> None:
    """Remove the files from the page cache."""
    dist.barrier()
    if dist.get_rank() == 0:
        for path in directory.iterdir():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    dist.barrier()


def bytes_from_disk() -> int:
    """Return the bytes this process has caused to be read from storage."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


class Bench:
    """One process of the benchmark; results are identical on all processes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.layers = 8
        size = dist.get_world_size()
        per_row = self.layers * COLUMNS * (2 + 3 * 4)
        self.rows = max(1, round(args.size_gb * 1e9 / per_row / size / 8)) * size * 8
        self.state = State(self.rows, self.layers)
        self.root = Path(args.directory)
        self.saver = AsyncSaver(workers=args.workers)
        self.saver.prepare(self.state.boxes).result()
        self.results: dict[str, dict[str, float]] = {}
        self.began = time.monotonic()

    def announce(self, text: str) -> None:
        """Print the current measurement and the elapsed time; other output takes minutes."""
        if dist.get_rank() == 0:
            print(f"{time.monotonic() - self.began:6.0f} s  {text}", file=sys.stderr, flush=True)

    def path(self, name: str) -> Path:
        return self.root / name

    def repeat(self, contestants: dict[str, Callable[[], dict[str, float]]]) -> None:
        """Return medians of `repeats` turns of all contestants, after a warm-up turn."""
        samples: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
        for round_number in range(self.args.repeats + 1):
            for name, run in contestants.items():
                measured = run()
                seconds = ", ".join(
                    f"{key} {value:.2f} s" for key, value in measured.items() if "bytes" not in key
                )
                self.announce(f"round {round_number} of {self.args.repeats}, {name}: {seconds}")
                if round_number:
                    samples[name].append(measured)
        for name, values in samples.items():
            medians = {key: statistics.median(value[key] for value in values) for key in values[0]}
            self.results.setdefault(name, {}).update(medians)

    def remove(self, path: Path) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
            os.sync()
        dist.barrier()

    # Synchronous saves

    def sync_saves(self) -> None:
        state = self.state
        workers = self.args.workers

        saver = AsyncSaver(
            workers=workers, staging_mem_limit=staging_for_waiting(workers)
        )  # as without --async-save
        saver.prepare(state.boxes).result()

        def ours() -> dict[str, float]:
            self.remove(self.path("ours"))
            return {
                "sync save": timed(
                    lambda: committed(saver.save(state.boxes, self.path("ours"), common={}))
                )
            }

        def theirs() -> dict[str, float]:
            self.remove(self.path("dcp"))
            storage = writer(self.path("dcp"), workers)
            return {"sync save": timed(lambda: dcp.save(state.dtensors, storage_writer=storage))}

        plain = {
            direct: PlainWrite(state, self.path("plain"), workers, direct)
            for direct in (False, True)
        }

        def floor(direct: bool) -> dict[str, float]:
            self.remove(self.path("plain"))
            return {"sync save": timed(plain[direct])}

        self.repeat(
            {
                "ours": ours,
                "dcp": theirs,
                "plain write": lambda: floor(False),
                "plain O_DIRECT": lambda: floor(True),
            }
        )
        self.remove(self.path("plain"))
        saver.close()

    # Asynchronous saves

    def async_saves(self) -> None:
        state = self.state
        workers = self.args.workers

        def ours() -> dict[str, float]:
            def save() -> Callable[[], object]:
                handle = self.saver.save(state.boxes, self.path("ours_async"), common={})
                return lambda: committed(handle)

            return self.training(save, self.path("ours_async"), self.saver.wait_staged)

        def theirs() -> dict[str, float]:
            def save() -> Callable[[], object]:
                return dcp.async_save(
                    state.dtensors, storage_writer=writer(self.path("dcp_async"), workers)
                ).result

            return self.training(save, self.path("dcp_async"), lambda: None)

        stager = DefaultStager(
            StagingOptions(False, False, use_async_staging=True, use_non_blocking_copy=False)
        )
        staging: list[Callable[[], object]] = []

        def theirs_with_stager() -> dict[str, float]:
            """DCP with its own asynchronous staging thread and cached buffers."""

            def save() -> Callable[[], object]:
                storage = writer(self.path("dcp_async"), workers)
                response = dcp.async_save(
                    state.dtensors, storage_writer=storage, async_stager=stager
                )
                staging[:] = [response.staging_completion.result]
                return response.upload_completion.result

            return self.training(save, self.path("dcp_async"), lambda: [wait() for wait in staging])

        self.repeat({"ours": ours, "dcp": theirs, "dcp, async stager": theirs_with_stager})
        stager.close()

    def training(
        self, save: Callable[[], Callable[[], object]], path: Path, before_step: Callable[[], None]
    ) -> dict:
        """Run one window with a save and one without."""
        self.remove(path)
        calm = self.window(None, before_step)
        dist.barrier()
        began = time.perf_counter()
        blocked: list[float] = []
        watchers: list[Future[float]] = []

        def begin() -> None:
            start = time.perf_counter()
            wait = save()
            blocked.append(time.perf_counter() - start)
            watchers.append(
                watcher.submit(lambda: (wait(), time.perf_counter())[1])
            )  # when it is durable

        with ThreadPoolExecutor(1) as watcher:
            with_save = self.window(begin, before_step, blocked)
        total = watchers[0].result() - began
        numbers = torch.tensor(
            [sum(blocked), with_save - calm, total, calm / WINDOW], dtype=torch.float64
        )
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        blocking, lost, until_durable, iteration = numbers.tolist()
        return {
            "async blocking": blocking,
            "async lost": lost,
            "async total": until_durable,
            "iteration": iteration,
        }

    def lost_time(self) -> None:
        """Measure the training time lost to a save of ours, next to a copy of the same bytes.

        Many short windows with and without a save take turns with copies. Processor time is that
        of all processes: other programs hardly affect it, and training on all cores loses it.
        """
        path = self.path("ours_lost")
        copy = PlainCopy(self.state, self.args.workers)
        handles: list[SaveHandle] = []

        def begin() -> None:
            handles.append(self.saver.save(self.state.boxes, path, common={}))

        def train(begin: Callable[[], None] | None) -> None:
            self.window(begin, self.saver.wait_staged, length=SHORT_WINDOW, gemms=SHORT_GEMMS)

        contestants: dict[str, Callable[[], None]] = {
            "calm": lambda: train(None),
            "save": lambda: train(begin),
            "copy": copy,
        }
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        processor: dict[str, list[float]] = {name: [] for name in contestants}
        num_late = 0
        for turn in range(self.args.repeats + 1):
            self.remove(path)
            for name, action in contestants.items():
                began = time.process_time()
                elapsed = timed(action)
                used = torch.tensor(time.process_time() - began)
                dist.all_reduce(used)
                if turn:  # the first turn warms up
                    seconds[name].append(elapsed)
                    processor[name].append(used.item())
            # The window of a save must be longer than the save.
            if not handles[-1].done():
                num_late += 1
            committed(handles[-1])
        copy.close()
        self.remove(path)
        self.announce(f"{num_late} of {self.args.repeats + 1} saves were longer than their window")
        for name, samples in (("time", seconds), ("processor time", processor)):
            medians = {key: statistics.median(values) for key, values in samples.items()}
            self.results.setdefault("ours", {})[f"async lost, {name}"] = (
                medians["save"] - medians["calm"]
            )
            self.results.setdefault("copy", {})[f"async lost, {name}"] = medians["copy"]

    def window(
        self,
        begin: Callable[[], None] | None,
        before_step: Callable[[], None],
        blocked: list[float] | None = None,
        length: int = WINDOW,
        gemms: int | None = None,
    ) -> float:
        a = torch.randn(1024, 1024)
        dist.barrier()
        start = time.perf_counter()
        if begin is not None:
            begin()
        for _ in range(length):
            for _ in range(gemms or self.args.gemms):
                torch.mm(a, a)
            waiting = time.perf_counter()
            before_step()
            if blocked is not None:
                blocked.append(time.perf_counter() - waiting)
            self.state.update()
        return time.perf_counter() - start

    # Loads

    def loads(self) -> None:
        """Measure loads at the same and another layout, of both writers' files, from page cache and
        disk.
        """
        expected = self.state.checksum()
        same = State(self.rows, self.layers, fill=False)
        turned = State(self.rows, self.layers, dim=1, fill=False)
        for files in ("dcp", "ours"):
            for label, target in (
                (f"load {files} files", same),
                (f"reshard {files} files", turned),
            ):
                for cold in (False, True):
                    name = label + (" from disk" if cold else "")

                    def theirs(
                        target: State = target,
                        files: str = files,
                        name: str = name,
                        cold: bool = cold,
                    ) -> dict:
                        def action() -> None:
                            dcp.load(target.dtensors, checkpoint_id=self.path(files))

                        return self._load(target, files, name, cold, expected, action)

                    def ours(
                        target: State = target,
                        files: str = files,
                        name: str = name,
                        cold: bool = cold,
                    ) -> dict:
                        def action() -> None:
                            load(target.boxes, self.path(files))  # with its own default of threads

                        return self._load(target, files, name, cold, expected, action)

                    contestants = {"dcp": theirs, "ours": ours}
                    if cold:  # limit of the disk, in the order of the files
                        contestants["plain read"] = lambda files=files, name=name: self._plain_read(
                            files, name
                        )
                    self.repeat(contestants)

    def _plain_read(self, files: str, name: str) -> dict[str, float]:
        """Let every process read its share of the files with large reads into one 8 MiB buffer per
        thread.
        """
        evict(self.path(files))
        paths = sorted(self.path(files).glob("*.distcp"))[dist.get_rank() :: dist.get_world_size()]

        def read(path: Path) -> None:
            buffer = bytearray(8 << 20)
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

        with ThreadPoolExecutor(self.args.workers) as pool:
            return {name: timed(lambda: list(pool.map(read, paths)))}

    def _load(
        self,
        target: State,
        files: str,
        name: str,
        cold: bool,
        expected: float,
        action: Callable[[], None],
    ) -> dict[str, float]:
        """Return the seconds of a load; from disk also the bytes read per byte of state, over all
        processes.
        """
        target.clear()
        if cold:
            evict(self.path(files))
        before = bytes_from_disk()
        seconds = timed(action)
        fetched = torch.tensor(float(bytes_from_disk() - before))
        dist.all_reduce(fetched)
        assert target.checksum() == expected
        results = {name: seconds}
        return results | (
            {f"{name}: bytes read / needed": fetched.item() / self.state.nbytes} if cold else {}
        )

    def verification(self) -> None:
        if dist.get_rank() == 0:
            began = time.perf_counter()
            report = verify(self.path("ours"))
            assert report.ok, report.problems
            self.results["ours"]["verify"] = time.perf_counter() - began


def worker(args: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    bench = Bench(args)
    if args.only_lost:
        bench.lost_time()
    else:
        bench.sync_saves()
    if not (args.only_sync or args.only_lost):
        if not args.only_loads:
            bench.async_saves()
        bench.loads()
        bench.verification()
    bench.saver.close()
    if dist.get_rank() == 0:
        print(json.dumps({"bytes": bench.state.nbytes, "results": bench.results}))
    dist.barrier()
    dist.destroy_process_group()


def launch(processes: int, argv: list[str]) -> dict:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    result = subprocess.run(
        [*command, __file__, "--worker", *argv], env=environment, stdout=subprocess.PIPE, text=True
    )
    if result.returncode:
        raise SystemExit(result.returncode)
    return json.loads(result.stdout.strip().splitlines()[-1])


def print_table(measured: dict) -> None:
    results = measured["results"]
    nbytes = measured["bytes"]
    rows = list(dict.fromkeys(row for values in results.values() for row in values))
    print(f"{'':40}" + "".join(f"{name:>22}" for name in results))
    for row in rows:
        cells = ""
        for values in results.values():
            if row not in values:
                cells += f"{'':>22}"
            elif "bytes" in row:
                cells += f"{values[row]:>22.3f}"
            else:
                speed = (
                    ""
                    if row.startswith(("async b", "async l", "iter"))
                    else f" {nbytes / values[row] / 1e9:5.2f} GB/s"
                )
                cells += f"{1e3 * values[row]:>11.0f} ms{speed:>8}".rjust(22)
        print(f"{row:40}{cells}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size-gb", type=float, default=1.6, help="bytes of the whole state")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--workers", type=int, default=2, help="writer threads and files per process, for all"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gemms", type=int, default=40, help="1024^3 GEMMs per training iteration")
    parser.add_argument(
        "--directory", default="/tmp/benchmark_checkpoint", help="on the disk to measure"
    )
    parser.add_argument(
        "--flatness",
        action="store_true",
        help="sync save of the same bytes by 1, 2, 4, 8 processes",
    )
    parser.add_argument("--only-sync", action="store_true")
    parser.add_argument("--only-loads", action="store_true")
    parser.add_argument(
        "--only-lost",
        action="store_true",
        help="training time lost to our saves, relative to a copy of the same bytes",
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    argv = [item for item in sys.argv[1:] if item != "--flatness"]
    try:
        for processes in (1, 2, 4, 8) if args.flatness else (args.processes,):
            measured = launch(processes, argv + (["--only-sync"] if args.flatness else []))
            print(
                f"\n{processes} processes, {measured['bytes'] / 1e9:.2f} GB in all, medians of "
                f"{args.repeats}"
            )
            print_table(measured)
    finally:
        shutil.rmtree(args.directory, ignore_errors=True)


if __name__ == "__main__":
    main()

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
from dataclasses import dataclass
from functools import partial
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
)
from megatron.core.dist_checkpointing.verification import verify  # noqa: E402

LAYERS = 8
COLUMNS = 4096
NAMES = ("weight", "main", "exp_avg", "exp_avg_sq")
BYTES_PER_PARAMETER = 2 + 3 * 4  # bf16 weight, three fp32 tensors
ROWS_UNIT = 8  # every process has a multiple of this number of rows

WINDOW = 6  # iterations after a save whose time counts
# --only-lost measures only our saves, which end within a shorter window.
SHORT_WINDOW = 2
SHORT_GEMMS = 8

BLOCK_BYTES = 8 << 20  # of plain copies, reads and writes
PAGE_BYTES = 4096

# Row of the table -> seconds, or bytes read per byte of state.
Measured = dict[str, float]
# Measures one turn of a contestant.
Contestant = Callable[[], Measured]
# Starts, waits or measures something; the result is ignored.
Action = Callable[[], object]
# Begins a save; returns an action that waits until the checkpoint is durable.
BeginSave = Callable[[], Action]
# Contestant -> seconds of its turns.
Samples = dict[str, list[float]]


class State:
    """One set of tensors in two representations: for DCP and for this project."""

    def __init__(
        self,
        rows: int,
        layers: int,
        dim: int = 0,
        fill: bool = True,
    ) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.dim = dim  # that is sharded
        self.mesh = init_device_mesh("cpu", (self.size,))
        self.dtensors: dict[str, torch.Tensor] = {}
        self.boxes: ShardedStateDict = {}
        self.locals: list[torch.Tensor] = []

        shape = [rows, COLUMNS]
        shape[dim] //= self.size
        for layer in range(layers):
            for index, name in enumerate(NAMES):
                dtype = torch.float32
                if name == "weight":
                    dtype = torch.bfloat16
                local = torch.full(shape, -1.0, dtype=dtype)
                if fill:
                    # Values differ between layers, names and ranks, so that a mix-up is noticed.
                    offset = layer * 7 + index * 3 + self.rank * 11
                    fill_with_pattern(local, offset)
                self._add_tensor(f"layers.{layer}.{name}", local)

        local_bytes = sum(tensor.nbytes for tensor in self.locals)
        self.nbytes = self.size * local_bytes

    def _add_tensor(self, key: str, local: torch.Tensor) -> None:
        """Add this rank's shard of a tensor to both representations, which share its memory."""
        placements = [Shard(self.dim)]
        self.dtensors[key] = DTensor.from_local(
            local,
            self.mesh,
            placements,
            run_check=False,
        )
        entry = ShardedTensor.split(key, local, self.dim, self.rank, self.size)
        self.boxes[key] = entry
        self.locals.append(entry.boxes[0].tensor)

    def update(self) -> None:
        """Write all tensors, as an optimizer step does, without changing their values."""
        for tensor in self.locals:
            tensor.add_(1).sub_(1)

    def clear(self) -> None:
        """Overwrite all tensors, so that a load that skips one of them is noticed."""
        for tensor in self.locals:
            tensor.fill_(-1)

    def checksum(self) -> float:
        """Return the sum of all elements on all processes, which is the same at every layout."""
        local_sum = 0.0
        for tensor in self.locals:
            # float64 sums of integers are exact, so they do not depend on the layout.
            tensor_sum = tensor.float().sum(dtype=torch.float64)
            local_sum += float(tensor_sum)
        total = torch.tensor(local_sum)
        dist.all_reduce(total)
        return total.item()


def fill_with_pattern(tensor: torch.Tensor, offset: int) -> None:
    """Fill a tensor with integers that bf16 represents exactly and that differ by `offset`."""
    positions = torch.arange(tensor.numel())
    values = (positions + offset) % 251
    tensor.copy_(values.view(tensor.shape))


def make_dcp_writer(path: Path, workers: int) -> dcp.FileSystemWriter:
    """Return a DCP writer that flushes its files to disk, as our saves do."""
    return dcp.FileSystemWriter(
        path,
        thread_count=workers,
        sync_files=True,
        overwrite=True,
    )


def wait_for_commit(handle: SaveHandle) -> None:
    """Wait until a save of ours is durable, and check that it succeeded."""
    error = handle.wait().error
    assert error is None, error


def wait_until_durable(wait: Action) -> float:
    """Return the time at which a save that `wait` waits for is durable."""
    wait()
    return time.perf_counter()


def measure_seconds(action: Action) -> float:
    """Return the seconds until the slowest process has finished."""
    # All processes start together: a rank that is late does not count as time of the others.
    dist.barrier()
    began = time.perf_counter()
    action()
    elapsed = time.perf_counter() - began
    slowest = torch.tensor(elapsed)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def measure_processor_seconds(action: Action) -> tuple[float, float]:
    """Return the seconds of the slowest process and the processor seconds of all processes."""
    began = time.process_time()
    seconds = measure_seconds(action)
    used = time.process_time() - began
    total_used = torch.tensor(used)
    dist.all_reduce(total_used)
    return seconds, total_used.item()


def reduce_to_maxima(measured: Measured) -> Measured:
    """Return the numbers of the slowest process for each row."""
    numbers = torch.tensor(list(measured.values()), dtype=torch.float64)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return dict(zip(measured, numbers.tolist(), strict=True))


class DcpSaver:
    """Asynchronous saves of DCP into one directory, each of which replaces the previous one."""

    def __init__(self, state: State, path: Path, workers: int, with_stager: bool) -> None:
        self._state = state
        self._path = path
        self._workers = workers
        self._stager: DefaultStager | None = None
        if with_stager:
            # A staging thread of DCP with cached buffers. Pinned memory requires CUDA, and shared
            # memory is for other processes.
            options = StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=True,
                use_non_blocking_copy=False,
            )
            self._stager = DefaultStager(options)
        self._staged: Future | None = None  # of the latest save through the stager

    def begin_save(self) -> Action:
        """Begin a save, and return an action that waits until it is durable."""
        storage = make_dcp_writer(self._path, self._workers)
        if self._stager is None:
            future = dcp.async_save(self._state.dtensors, storage_writer=storage)
            return future.result
        response = dcp.async_save(
            self._state.dtensors,
            storage_writer=storage,
            async_stager=self._stager,
        )
        self._staged = response.staging_completion
        return response.upload_completion.result

    def wait_staged(self) -> None:
        """Wait until the tensors may change: at once without a stager, as DCP has copied them."""
        if self._staged is not None:
            self._staged.result()

    def close(self) -> None:
        """End the staging thread."""
        if self._stager is not None:
            self._stager.close()


class PlainWrite:
    """The limit of the disk: every process writes its bytes with large writes from several threads,
    then fsync.
    """

    def __init__(
        self,
        state: State,
        path: Path,
        workers: int,
        direct: bool,
    ) -> None:
        self._rank = state.rank
        self._path = path
        self._flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        if direct:
            self._flags |= os.O_DIRECT

        # Only whole blocks: O_DIRECT rejects lengths that are not aligned.
        bytes_per_thread = state.nbytes // state.size // workers
        self._size = bytes_per_thread // BLOCK_BYTES * BLOCK_BYTES
        self._buffers: list[torch.Tensor] = []
        for index in range(workers):
            # One page more than is written: the start is moved to a page boundary.
            buffer = torch.empty(self._size + PAGE_BYTES, dtype=torch.uint8)
            # Filled here, so that page faults are not measured.
            buffer.fill_(index + 1)
            self._buffers.append(buffer)

    def __call__(self) -> None:
        """Write all files of this process, and return when they are on disk."""
        self._path.mkdir(exist_ok=True, parents=True)
        threads: list[threading.Thread] = []
        for index in range(len(self._buffers)):
            thread = threading.Thread(target=self._write, args=(index,))
            threads.append(thread)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _write(self, index: int) -> None:
        """Write the file of one thread, and flush it."""
        path = self._path / f"{self._rank}_{index}"
        descriptor = os.open(path, self._flags, 0o644)

        # O_DIRECT requires memory that starts at a page boundary.
        buffer = self._buffers[index]
        start = -buffer.data_ptr() % PAGE_BYTES
        whole_buffer = memoryview(buffer.numpy())
        view = whole_buffer[start : start + self._size]

        for offset in range(0, self._size, BLOCK_BYTES):
            block = view[offset : offset + BLOCK_BYTES]
            os.write(descriptor, block)
        # Also with O_DIRECT, which does not flush the cache of the disk or the metadata.
        os.fsync(descriptor)
        os.close(descriptor)


class PlainCopy:
    """The limit of a snapshot: every process copies its bytes to other memory, by as many threads
    as stage a save.
    """

    def __init__(self, state: State, workers: int) -> None:
        self._blocks: list[tuple[int, int, int]] = []  # (target, source, length)
        self._targets: list[torch.Tensor] = []  # kept alive
        for source in state.locals:
            # Zeroed memory is mapped already: page faults are not measured.
            target = torch.zeros_like(source)
            self._targets.append(target)
            self._add_blocks(target, source)
        self._pool = ThreadPoolExecutor(2 * workers)

    def _add_blocks(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Split the copy of a tensor into blocks, so that all threads have work until the end."""
        target_address = target.data_ptr()
        source_address = source.data_ptr()
        for start in range(0, source.nbytes, BLOCK_BYTES):
            length = min(BLOCK_BYTES, source.nbytes - start)
            block = (target_address + start, source_address + start, length)
            self._blocks.append(block)

    def __call__(self) -> None:
        """Copy the bytes of this process."""
        # ctypes releases the GIL during a call: the threads copy in parallel.
        copies = self._pool.map(lambda block: ctypes.memmove(*block), self._blocks)
        for _ in copies:
            pass

    def close(self) -> None:
        self._pool.shutdown()


def evict(directory: Path) -> None:
    """Remove the files from the page cache, so that the next load reads them from disk."""
    dist.barrier()
    if dist.get_rank() == 0:
        for path in directory.iterdir():
            # Drops only clean pages, which all are: both writers have flushed their files.
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    dist.barrier()


def read_bytes_from_disk() -> int:
    """Return the bytes this process has caused to be read from storage."""
    text = Path("/proc/self/io").read_text()
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, value = line.split(": ")
        fields[name] = value
    return int(fields["read_bytes"])


def read_file(path: Path) -> None:
    """Read a file with large reads into one buffer."""
    buffer = bytearray(BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


@dataclass
class LoadCase:
    """One row of the table of loads, measured for every contestant."""

    name: str
    path: Path  # files of one of the writers
    target: State
    cold: bool  # from disk instead of the page cache
    expected: float  # checksum of the loaded state


class Bench:
    """One process of the benchmark; results are identical on all processes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.is_rank0 = dist.get_rank() == 0
        self.root = Path(args.directory)
        self.rows = self._choose_rows()
        self.state = State(self.rows, LAYERS)
        self.saver = AsyncSaver(workers=args.workers)
        # Allocate the staging memory now, as a training program does before its first save.
        self.saver.prepare(self.state.boxes).result()
        self.results: dict[str, Measured] = {}
        self.began = time.monotonic()

    def _choose_rows(self) -> int:
        """Return the number of rows of every tensor for a state of about `--size-gb`."""
        size = dist.get_world_size()
        bytes_per_row = LAYERS * COLUMNS * BYTES_PER_PARAMETER
        wanted_rows = self.args.size_gb * 1e9 / bytes_per_row
        multiple = round(wanted_rows / size / ROWS_UNIT)
        return max(1, multiple) * size * ROWS_UNIT

    def announce(self, text: str) -> None:
        """Print the current measurement and the elapsed time; other output takes minutes."""
        if self.is_rank0:
            elapsed = time.monotonic() - self.began
            print(f"{elapsed:6.0f} s  {text}", file=sys.stderr, flush=True)

    def repeat(self, contestants: dict[str, Contestant]) -> None:
        """Store medians of `repeats` turns of all contestants, after a warm-up turn."""
        samples: dict[str, list[Measured]] = {name: [] for name in contestants}
        # Contestants take turns: a slow phase of the machine affects all of them.
        for turn in range(self.args.repeats + 1):
            for name, run in contestants.items():
                measured = run()
                self._announce_turn(turn, name, measured)
                # The first turn warms up: it starts threads and touches memory for the first time.
                if turn > 0:
                    samples[name].append(measured)
        for name, turns in samples.items():
            self._store_medians(name, turns)

    def _announce_turn(self, turn: int, name: str, measured: Measured) -> None:
        """Print the seconds of a turn."""
        parts: list[str] = []
        for row, value in measured.items():
            if "bytes" not in row:
                parts.append(f"{row} {value:.2f} s")
        seconds = ", ".join(parts)
        self.announce(f"round {turn} of {self.args.repeats}, {name}: {seconds}")

    def _store_medians(self, name: str, turns: list[Measured]) -> None:
        """Store the medians of a contestant next to the results of earlier measurements."""
        results = self.results.setdefault(name, {})
        for row in turns[0]:
            # Unlike the mean, the median ignores a turn that another program delayed.
            values = [measured[row] for measured in turns]
            results[row] = statistics.median(values)

    def remove(self, path: Path) -> None:
        """Remove a directory, and flush the disk."""
        dist.barrier()
        if self.is_rank0:
            shutil.rmtree(path, ignore_errors=True)
            # The next contestant must not wait for writes of the previous one.
            os.sync()
        dist.barrier()

    # Synchronous saves

    def measure_sync_saves(self) -> None:
        """Compare saves that training waits for, next to plain writes of the same bytes."""
        state = self.state
        workers = self.args.workers
        ours_path = self.root / "ours"
        dcp_path = self.root / "dcp"
        plain_path = self.root / "plain"
        # A saver like that of training without --async-save, which stages less memory.
        saver = AsyncSaver(workers=workers, staging_mem_limit=staging_for_waiting(workers))
        saver.prepare(state.boxes).result()
        buffered_write = PlainWrite(state, plain_path, workers, direct=False)
        direct_write = PlainWrite(state, plain_path, workers, direct=True)

        def save_ours() -> None:
            handle = saver.save(state.boxes, ours_path, common={})
            wait_for_commit(handle)

        def run_dcp() -> Measured:
            # A writer is for one save; its creation is not measured.
            storage = make_dcp_writer(dcp_path, workers)
            save = partial(dcp.save, state.dtensors, storage_writer=storage)
            return self._run_sync_save(dcp_path, save)

        contestants: dict[str, Contestant] = {
            "ours": lambda: self._run_sync_save(ours_path, save_ours),
            "dcp": run_dcp,
            "plain write": lambda: self._run_sync_save(plain_path, buffered_write),
            "plain O_DIRECT": lambda: self._run_sync_save(plain_path, direct_write),
        }
        self.repeat(contestants)
        # The checkpoints are kept: the loads read them.
        self.remove(plain_path)
        saver.close()

    def _run_sync_save(self, path: Path, save: Action) -> Measured:
        """Measure a save into a new directory."""
        self.remove(path)
        seconds = measure_seconds(save)
        return {"sync save": seconds}

    # Asynchronous saves

    def measure_async_saves(self) -> None:
        """Compare saves that proceed in the background of training."""
        ours_path = self.root / "ours_async"
        dcp_path = self.root / "dcp_async"
        workers = self.args.workers
        dcp_saver = DcpSaver(self.state, dcp_path, workers, with_stager=False)
        dcp_saver_with_stager = DcpSaver(self.state, dcp_path, workers, with_stager=True)

        def begin_ours() -> Action:
            handle = self.saver.save(self.state.boxes, ours_path, common={})
            return partial(wait_for_commit, handle)

        contestants: dict[str, Contestant] = {
            "ours": lambda: self.train_with_save(
                begin_ours,
                ours_path,
                self.saver.wait_staged,
            ),
            "dcp": lambda: self.train_with_save(
                dcp_saver.begin_save,
                dcp_path,
                dcp_saver.wait_staged,
            ),
            "dcp, async stager": lambda: self.train_with_save(
                dcp_saver_with_stager.begin_save,
                dcp_path,
                dcp_saver_with_stager.wait_staged,
            ),
        }
        self.repeat(contestants)
        dcp_saver_with_stager.close()

    def train_with_save(self, begin_save: BeginSave, path: Path, before_step: Action) -> Measured:
        """Return the seconds that an asynchronous save costs a window of iterations.

        `begin_save` blocks training; so does `before_step`, which waits until the update may
        overwrite the tensors.
        """
        # Both windows run in one turn, so that slow drifts of the machine cancel out.
        self.remove(path)
        calm = self.run_window(None, before_step)

        dist.barrier()
        began = time.perf_counter()
        blocked: list[float] = []
        durable: list[Future[float]] = []

        def begin() -> None:
            start = time.perf_counter()
            wait = begin_save()
            elapsed = time.perf_counter() - start
            blocked.append(elapsed)
            end_of_save = watcher.submit(wait_until_durable, wait)
            durable.append(end_of_save)

        # A thread notes the time of the commit, which may precede the end of the window.
        with ThreadPoolExecutor(1) as watcher:
            with_save = self.run_window(begin, before_step, blocked)
        total = durable[0].result() - began

        measured = {
            "async blocking": sum(blocked),
            "async lost": with_save - calm,
            "async total": total,
            "iteration": calm / WINDOW,
        }
        return reduce_to_maxima(measured)

    def run_window(
        self,
        begin: Action | None,
        before_step: Action,
        blocked: list[float] | None = None,
        length: int = WINDOW,
        gemms: int | None = None,
    ) -> float:
        """Return the seconds of a window of iterations that starts with `begin`.

        The seconds of every `before_step` are appended to `blocked`.
        """
        num_gemms = gemms or self.args.gemms
        matrix = torch.randn(1024, 1024)

        dist.barrier()
        start = time.perf_counter()
        if begin is not None:
            begin()
        for _ in range(length):
            # Forward and backward pass: the state is only read.
            for _ in range(num_gemms):
                torch.mm(matrix, matrix)
            # Update: waits until the save has copied the state.
            waiting = time.perf_counter()
            before_step()
            waited = time.perf_counter() - waiting
            if blocked is not None:
                blocked.append(waited)
            self.state.update()
        return time.perf_counter() - start

    def measure_lost_time(self) -> None:
        """Measure the training time lost to a save of ours, next to a copy of the same bytes.

        Many short windows with and without a save take turns with copies. Processor time is that
        of all processes: other programs hardly affect it, and training on all cores loses it.
        """
        path = self.root / "ours_lost"
        copy = PlainCopy(self.state, self.args.workers)
        handles: list[SaveHandle] = []

        def begin() -> None:
            handle = self.saver.save(self.state.boxes, path, common={})
            handles.append(handle)

        # Waits before each update also without a save, so that the windows differ only in the save.
        def train(begin: Action | None) -> None:
            self.run_window(
                begin,
                self.saver.wait_staged,
                length=SHORT_WINDOW,
                gemms=SHORT_GEMMS,
            )

        contestants: dict[str, Action] = {
            "calm": lambda: train(None),
            "save": lambda: train(begin),
            "copy": copy,
        }
        seconds, processor = self._repeat_windows(path, contestants, handles)
        copy.close()
        self.remove(path)
        self._store_lost_time("time", seconds)
        self._store_lost_time("processor time", processor)

    def _repeat_windows(
        self,
        path: Path,
        contestants: dict[str, Action],
        handles: list[SaveHandle],
    ) -> tuple[Samples, Samples]:
        """Return the seconds and the processor seconds of `repeats` turns of all contestants."""
        seconds: Samples = {name: [] for name in contestants}
        processor: Samples = {name: [] for name in contestants}
        num_turns = self.args.repeats + 1
        num_late = 0
        for turn in range(num_turns):
            self.remove(path)
            for name, action in contestants.items():
                elapsed, used = measure_processor_seconds(action)
                # The first turn warms up.
                if turn > 0:
                    seconds[name].append(elapsed)
                    processor[name].append(used)
            # A save that outlasts its window costs time that is not measured.
            if not handles[-1].done():
                num_late += 1
            wait_for_commit(handles[-1])
        self.announce(f"{num_late} of {num_turns} saves were longer than their window")
        return seconds, processor

    def _store_lost_time(self, unit: str, samples: Samples) -> None:
        """Store the cost of a save and of a copy in a unit of time."""
        calm = statistics.median(samples["calm"])
        save = statistics.median(samples["save"])
        copy = statistics.median(samples["copy"])
        row = f"async lost, {unit}"
        ours_results = self.results.setdefault("ours", {})
        ours_results[row] = save - calm
        copy_results = self.results.setdefault("copy", {})
        copy_results[row] = copy

    # Loads

    def measure_loads(self) -> None:
        """Measure loads at the same and another layout, of both writers' files, from page cache and
        disk.
        """
        expected = self.state.checksum()
        same = State(self.rows, LAYERS, fill=False)
        turned = State(self.rows, LAYERS, dim=1, fill=False)
        for files in ("dcp", "ours"):
            targets = {f"load {files} files": same, f"reshard {files} files": turned}
            for label, target in targets.items():
                for cold in (False, True):
                    name = label
                    if cold:
                        name += " from disk"
                    case = LoadCase(
                        name,
                        self.root / files,
                        target,
                        cold,
                        expected,
                    )
                    self._compare_loads(case)

    def _compare_loads(self, case: LoadCase) -> None:
        """Measure one row for all contestants, which take turns."""

        def load_dcp() -> None:
            dcp.load(case.target.dtensors, checkpoint_id=case.path)

        def load_ours() -> None:
            # Without --workers: our load chooses its number of threads.
            load(case.target.boxes, case.path)

        contestants: dict[str, Contestant] = {
            "dcp": lambda: self._run_load(case, load_dcp),
            "ours": lambda: self._run_load(case, load_ours),
        }
        if case.cold:
            # The limit of the disk: reads in the order of the files.
            contestants["plain read"] = lambda: self._read_plainly(case)
        self.repeat(contestants)

    def _read_plainly(self, case: LoadCase) -> Measured:
        """Let every process read its share of the files with large reads into one buffer per
        thread.
        """
        evict(case.path)
        all_files = sorted(case.path.glob("*.distcp"))
        files = all_files[self.state.rank :: self.state.size]
        with ThreadPoolExecutor(self.args.workers) as pool:
            seconds = measure_seconds(lambda: list(pool.map(read_file, files)))
        return {case.name: seconds}

    def _run_load(self, case: LoadCase, action: Action) -> Measured:
        """Return the seconds of a load; from disk also the bytes read per byte of state, over all
        processes.
        """
        case.target.clear()
        if case.cold:
            evict(case.path)

        before = read_bytes_from_disk()
        seconds = measure_seconds(action)
        after = read_bytes_from_disk()
        fetched = torch.tensor(float(after - before))
        dist.all_reduce(fetched)

        # A fast load of wrong values does not count.
        assert case.target.checksum() == case.expected
        measured = {case.name: seconds}
        if case.cold:
            row = f"{case.name}: bytes read / needed"
            measured[row] = fetched.item() / self.state.nbytes
        return measured

    def measure_verification(self) -> None:
        """Measure a check of all checksums of our checkpoint by one process."""
        if self.is_rank0:
            began = time.perf_counter()
            report = verify(self.root / "ours")
            assert report.ok, report.problems
            elapsed = time.perf_counter() - began
            self.results["ours"]["verify"] = elapsed


def run_worker(args: argparse.Namespace) -> None:
    """Measure as one of the processes; rank 0 prints the results as JSON for `launch`."""
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    # Processes share the cores: threads of GEMMs would compete with those of saves.
    torch.set_num_threads(1)
    bench = Bench(args)
    if args.only_lost:
        bench.measure_lost_time()
    else:
        # First, because the loads and the verification read its checkpoints.
        bench.measure_sync_saves()
    if not (args.only_sync or args.only_lost):
        if not args.only_loads:
            bench.measure_async_saves()
        bench.measure_loads()
        bench.measure_verification()
    bench.saver.close()
    if bench.is_rank0:
        output = {"bytes": bench.state.nbytes, "results": bench.results}
        print(json.dumps(output))
    dist.barrier()
    dist.destroy_process_group()


def launch(processes: int, argv: list[str]) -> dict:
    """Run the benchmark on a number of processes, and return the results."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(processes),
    ]
    command += [__file__, "--worker", *argv]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    result = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    if result.returncode:
        raise SystemExit(result.returncode)
    # Libraries may print other lines before the results.
    lines = result.stdout.strip().splitlines()
    return json.loads(lines[-1])


def print_table(measured: dict) -> None:
    """Print one column per contestant and one row per measurement."""
    results = measured["results"]
    nbytes = measured["bytes"]
    # A dictionary keeps the rows in the order of their measurement.
    rows: dict[str, None] = {}
    header = f"{'':40}"
    for name, values in results.items():
        header += f"{name:>22}"
        rows.update(dict.fromkeys(values))
    print(header)
    for row in rows:
        cells = ""
        for values in results.values():
            cells += format_cell(row, values.get(row), nbytes)
        print(f"{row:40}{cells}")


def format_cell(row: str, value: float | None, nbytes: int) -> str:
    """Return milliseconds and GB/s; the cell is empty if the contestant has no such row."""
    if value is None:
        return f"{'':>22}"
    if "bytes" in row:
        return f"{value:>22.3f}"
    # "async blocking", "async lost" and "iteration" are not the time of moving all bytes.
    speed = ""
    if not row.startswith(("async b", "async l", "iter")):
        gigabytes_per_second = nbytes / value / 1e9
        speed = f" {gigabytes_per_second:5.2f} GB/s"
    milliseconds = 1e3 * value
    cell = f"{milliseconds:>11.0f} ms{speed:>8}"
    return cell.rjust(22)


def parse_arguments() -> argparse.Namespace:
    """Return the flags of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size-gb",
        type=float,
        default=1.6,
        help="bytes of the whole state",
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--workers",
        type=int,
        default=2,
        help="writer threads and files per process, for all",
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--gemms",
        type=int,
        default=40,
        help="1024^3 GEMMs per training iteration",
    )
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
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if args.worker:
        run_worker(args)
        return
    # Workers receive the same flags, except for the one that selects the numbers of processes.
    worker_flags = [item for item in sys.argv[1:] if item != "--flatness"]
    process_counts = [args.processes]
    if args.flatness:
        worker_flags.append("--only-sync")
        process_counts = [1, 2, 4, 8]
    try:
        for processes in process_counts:
            measured = launch(processes, worker_flags)
            gigabytes = measured["bytes"] / 1e9
            print(f"\n{processes} processes, {gigabytes:.2f} GB in all, medians of {args.repeats}")
            print_table(measured)
    finally:
        shutil.rmtree(args.directory, ignore_errors=True)


if __name__ == "__main__":
    main()

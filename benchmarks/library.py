"""`Checkpointer` compared with torch.distributed.checkpoint (DCP) in an FSDP2 training loop.

Two processes train a model that is sharded by `fully_shard`, with AdamW. Contestants save the same
state to the same disk and take turns; results are medians. "blocking" is the time of the call,
"lost" the time of a window of iterations with a save minus the same without, "durable" the time
from the call until the checkpoint is committed. "reshard" loads into a model that is sharded along
the other dimension. "plain read" is the limit of the loads: each process reads the bytes of its own
state into memory, without a comparison of checksums.

torch_checkpointing is a contestant if it is installed. It never flushes its files to the disk, so
its "durable" is the time until they are renamed.

    python benchmarks/library.py                    # 1.6 GB
    python benchmarks/library.py --size-gb 0.2 --repeats 2
    python benchmarks/library.py --model small      # 6,000 tensors of 4 KB
    python benchmarks/library.py --model experts    # 64 experts in each of 8 layers
    pip install --no-deps torch_checkpointing==0.1.1
"""

import argparse
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from megatron.checkpointer import Checkpointer  # noqa: E402
from megatron.core.dist_checkpointing import SaveReport  # noqa: E402

WIDTH = 2048
BYTES_PER_PARAMETER = 12  # fp32 weight and two moments
# Iterations after a save whose time counts: the shortest time in which every save becomes durable.
# In a longer one the noise of the training exceeds the cost of a save.
WINDOW = 2
SHAPES = {  # of --model: number of parameters, shape of each
    "small": (2000, (32, 32)),
    "experts": (8 * 64 * 2, (256, 128)),  # two matrices per expert
}
LAYERS_OF_SHAPES = 8
READ_SIZE = 4 << 20  # bytes of a plain read
OURS = "Checkpointer"
DCP_THREAD = "DCP, thread"
DCP_PROCESS = "DCP, process"
PEER = "torch_checkpointing"
LIMIT = "plain read"

# Column of the table -> seconds.
Measured = dict[str, float]
# Measures one turn of a contestant.
Contestant = Callable[[], Measured]
# Waits for a commit, and returns when it was done.
Wait = Callable[[], float]
# Begins a save.
BeginSave = Callable[[], Wait]


class ManyMatrices(nn.Module):
    """Parameters of one shape, each of which changes the output a little."""

    def __init__(self, number: int, shape: tuple[int, int]) -> None:
        super().__init__()
        self.matrices = nn.ParameterList()
        for _ in range(number):
            self.matrices.append(torch.randn(shape))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        # Every parameter receives a gradient, so that it has optimizer state to save.
        sums = torch.stack([matrix.sum() for matrix in self.matrices])
        return batch + sums.mean()


def make_model(kind: str, size_gb: float) -> nn.Sequential:
    """Return the model of --model; its layers are sharded one by one."""
    layers: list[nn.Module] = []
    if kind in SHAPES:
        number, shape = SHAPES[kind]
        for _ in range(LAYERS_OF_SHAPES):
            layer = ManyMatrices(number // LAYERS_OF_SHAPES, shape)
            layers.append(layer)
    else:
        num_parameters = size_gb * 1e9 / BYTES_PER_PARAMETER
        num_layers = round(num_parameters / WIDTH**2)
        for _ in range(max(1, num_layers)):
            layers.append(nn.Linear(WIDTH, WIDTH, bias=False))
    return nn.Sequential(*layers)


class Program:
    """A model sharded along dimension `dim`, with its optimizer."""

    def __init__(self, args: argparse.Namespace, dim: int = 0) -> None:
        # The same weights on all ranks, and in the programs that load.
        torch.manual_seed(0)
        self.model = make_model(args.model, args.size_gb)
        self.num_parameters = 0
        for parameter in self.model.parameters():
            self.num_parameters += parameter.numel()

        def choose_placement(parameter: nn.Parameter) -> Shard:
            return Shard(dim)

        for layer in self.model:
            fully_shard(layer, shard_placement_fn=choose_placement)
        fully_shard(self.model, shard_placement_fn=choose_placement)

        # Created after sharding: its state is sharded like the parameters.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(64, WIDTH)
        # torch_checkpointing requires a lock that delays the update until the state is staged.
        self.lock_update: Callable[[], AbstractContextManager] = nullcontext

    def train_step(self) -> None:
        """Train one iteration, as the loop of a program does."""
        error = self.model(self.batch) - self.batch
        loss = error.square().mean()
        loss.backward()
        with self.lock_update():
            self.optimizer.step()
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, object]:
        """Return the state as DCP saves it."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict) -> None:
        """Load a state that DCP has filled."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def checksum(self) -> float:
        """Return a sum over weights and moments, the same at every sharding."""
        tensors = list(self.model.parameters())
        for parameter in self.model.parameters():
            state = self.optimizer.state[parameter]
            tensors += [state["exp_avg"], state["exp_avg_sq"]]
        local_sum = 0.0
        for tensor in tensors:
            # Absolute values: errors of opposite sign must not cancel out.
            tensor_sum = tensor.to_local().double().abs().sum()
            local_sum += float(tensor_sum)
        total = torch.tensor(local_sum, dtype=torch.float64)
        dist.all_reduce(total)
        return total.item()


def make_peer() -> Any:
    """Return a CheckpointManager of torch_checkpointing, or None if it is not installed."""
    try:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
        from torch_checkpointing.config import AsyncCheckpointSaverConfig
        from torch_checkpointing.staging import CheckpointStagerConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
    except ImportError:
        return None
    # Its defaults for staging require CUDA, as does resharding on several ranks. By default it
    # writes through O_DIRECT from unaligned buffers, which ext4 rejects.
    staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
    process = CheckpointProcessConfig(subprocess_init_timeout_secs=300)
    save = AsyncCheckpointSaverConfig(staging_config=staging, process_config=process)
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    return CheckpointManager.Config(save=save, storage_config=storage).build()


def make_waiter(future: Future) -> Wait:
    """Return a function that waits for the future, and returns when it was done."""
    # The future may be done long before the wait: a callback notes the time.
    ended: list[float] = []

    def note(done: Future) -> None:
        now = time.perf_counter()
        ended.append(now)

    future.add_done_callback(note)

    def wait() -> float:
        future.result()
        # Waiters are notified before callbacks are called.
        while not ended:
            time.sleep(0.001)
        return ended[0]

    return wait


def reduce_to_maxima(measured: Measured) -> Measured:
    """Return the times of the slowest process."""
    numbers = torch.tensor(list(measured.values()), dtype=torch.float64)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return dict(zip(measured, numbers.tolist(), strict=True))


@dataclass
class LoadCase:
    """One column of the table of loads, measured for every contestant."""

    name: str
    program: Program  # that loads
    expected: float  # checksum of the loaded state


class Benchmark:
    """One process of the benchmark; results are identical on all processes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        root = Path(args.directory)
        self.ours_path = root / "ours"
        self.dcp_path = root / "dcp"
        self.peer_path = root / "peer"
        self.program = Program(args)
        self.nbytes = self.program.num_parameters * BYTES_PER_PARAMETER
        # The first step creates the moments, which are a part of every save.
        self.program.train_step()
        self.peer = make_peer()
        # A collective of a background thread must not meet those of training in one group.
        self.group = dist.new_group(backend="gloo")

    def measure(self, contestants: dict[str, Contestant]) -> dict[str, Measured]:
        """Return medians of `repeats` turns of all contestants, after a warm-up turn."""
        samples: dict[str, list[Measured]] = {name: [] for name in contestants}
        # Contestants take turns: a slow phase of the machine affects all of them.
        for turn in range(self.args.repeats + 1):
            for name, run in contestants.items():
                measured = run()
                self._announce_turn(turn, name, measured)
                # The first turn warms up: it starts threads and touches memory for the first time.
                if turn > 0:
                    samples[name].append(measured)

        results: dict[str, Measured] = {}
        for name, turns in samples.items():
            results[name] = {}
            for column in turns[0]:
                # Unlike the mean, the median ignores a turn that another program delayed.
                values = [measured[column] for measured in turns]
                results[name][column] = statistics.median(values)
        return results

    def _announce_turn(self, turn: int, name: str, measured: Measured) -> None:
        """Print the seconds of a turn; other output takes minutes."""
        if dist.get_rank() == 0:
            parts: list[str] = []
            for column, seconds in measured.items():
                parts.append(f"{column} {seconds:.3f}")
            text = ", ".join(parts)
            print(f"round {turn}, {name}: {text}", file=sys.stderr, flush=True)

    def remove(self, path: Path) -> None:
        """Remove a directory, and flush the disk."""
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
            # The next contestant must not wait for writes of the previous one.
            os.sync()
        dist.barrier()

    # ---- Saves ----

    def measure_saves(self) -> dict[str, Measured]:
        """Compare saves in the background of training, and save the state that is loaded later."""
        reports: list[SaveReport] = []
        # Keeps one checkpoint, as the other contestants do.
        ckpt = Checkpointer(
            self.ours_path,
            self.program.model,
            self.program.optimizer,
            keep_last=1,
            on_saved=reports.append,
        )
        # Takes ownership of the directory, which is empty.
        ckpt.load()
        iterations = itertools.count(1)

        def begin_ours() -> Wait:
            began = time.perf_counter()
            ckpt.save(next(iterations))

            def wait() -> float:
                ckpt.finish()
                report = reports.pop()
                return began + report.total

            return wait

        contestants = self._make_contestants(begin_ours)
        results = self.measure(contestants)

        ckpt.save(next(iterations))
        ckpt.close()
        self._save_by_others()
        return results

    def _make_contestants(self, begin_ours: BeginSave) -> dict[str, Contestant]:
        """Return the contestants of the saves."""
        begin_by_thread = partial(self._begin_dcp, AsyncCheckpointerType.THREAD)
        begin_by_process = partial(self._begin_dcp, AsyncCheckpointerType.PROCESS)
        contestants: dict[str, Contestant] = {
            OURS: lambda: self.train_window(begin_ours),
            DCP_THREAD: lambda: self.train_window(begin_by_thread),
        }
        if self.args.process:
            contestants[DCP_PROCESS] = lambda: self.train_window(begin_by_process)
        if self.peer is not None:
            # Free unless a save of the peer is being staged: it does not delay the others.
            self.program.lock_update = self.peer.lock
            contestants[PEER] = self._run_peer_window
        return contestants

    def _begin_dcp(self, kind: AsyncCheckpointerType) -> Wait:
        """Begin a save of DCP that replaces the previous one and is flushed, as ours is."""
        writer = dcp.FileSystemWriter(
            self.dcp_path,
            thread_count=2,
            sync_files=True,
            overwrite=True,
        )
        future = dcp.async_save(
            self.program.state_dict(),
            storage_writer=writer,
            process_group=self.group,
            async_checkpointer_type=kind,
        )
        return make_waiter(future)

    def _run_peer_window(self) -> Measured:
        """Save by torch_checkpointing in a window of iterations; it keeps one checkpoint."""
        self.remove(self.peer_path)
        return self.train_window(self._begin_peer)

    def _begin_peer(self) -> Wait:
        """Begin a save of torch_checkpointing."""
        state = self.program.state_dict()
        future = self.peer.save(str(self.peer_path), state)
        return make_waiter(future)

    def _save_by_others(self) -> None:
        """Save the state that DCP and the peer load: training has changed it since their saves."""
        if self.peer is not None:
            self.remove(self.peer_path)
            wait = self._begin_peer()
            wait()
        self.remove(self.dcp_path)
        writer = dcp.FileSystemWriter(self.dcp_path, thread_count=2, sync_files=True)
        dcp.save(self.program.state_dict(), storage_writer=writer)

    def train_window(self, begin: BeginSave) -> Measured:
        """Run one window of iterations without a save and one with."""
        # Both windows run in one turn, so that slow drifts of the machine cancel out.
        calm = self.run_iterations()
        dist.barrier()
        began = time.perf_counter()
        wait = begin()
        blocking = time.perf_counter() - began
        with_save = blocking + self.run_iterations()
        durable = wait() - began
        measured = {
            "blocking": blocking,
            "lost": with_save - calm,
            "durable": durable,
        }
        return reduce_to_maxima(measured)

    def run_iterations(self) -> float:
        """Return the seconds of a window of iterations."""
        began = time.perf_counter()
        for _ in range(WINDOW):
            self.program.train_step()
        return time.perf_counter() - began

    # ---- Loads ----

    def measure_loads(self) -> dict[str, Measured]:
        """Compare loads at the same sharding and at another one."""
        expected = self.program.checksum()
        same = Program(self.args)
        turned = Program(self.args, dim=1)
        for program in (same, turned):
            # Both begin with optimizer state that exists.
            program.train_step()
        cases = [
            LoadCase("load", same, expected),
            LoadCase("reshard", turned, expected),
        ]

        results: dict[str, Measured] = {OURS: {}, DCP_THREAD: {}, LIMIT: {}}
        if self.peer is not None:
            results[PEER] = {}
        for case in cases:
            for name, measured in self._compare_loads(case).items():
                results[name] |= measured
        if self.peer is not None:
            self.peer.close()
        return results

    def _compare_loads(self, case: LoadCase) -> dict[str, Measured]:
        """Measure one column for all contestants, which take turns."""
        program = case.program

        def run_ours() -> Measured:
            # A program creates its Checkpointer before it loads: only `load` is measured.
            ckpt = Checkpointer(self.ours_path, program.model, program.optimizer)
            return self._run_load(case, ckpt.load)

        def load_dcp() -> None:
            state = program.state_dict()
            dcp.load(state, checkpoint_id=self.dcp_path)
            program.load_state_dict(state)

        def load_peer() -> None:
            state = program.state_dict()
            self.peer.load(str(self.peer_path), into=state)
            program.load_state_dict(state)

        contestants: dict[str, Contestant] = {
            OURS: run_ours,
            DCP_THREAD: lambda: self._run_load(case, load_dcp),
            LIMIT: lambda: self._read_plainly(case),
        }
        # The peer cannot reshard on several ranks without CUDA.
        if self.peer is not None and case.name == "load":
            contestants[PEER] = lambda: self._run_load(case, load_peer)
        return self.measure(contestants)

    def _read_plainly(self, case: LoadCase) -> Measured:
        """Return the seconds of reading the bytes of this process's state from its own files."""
        # The only checkpoint: earlier ones are removed.
        (directory,) = self.ours_path.glob("iter_*")
        files = sorted(directory.glob(f"__{dist.get_rank()}_*.distcp"))
        size = sum(path.stat().st_size for path in files)
        # Memory that has its pages, as the tensors of a program have.
        memory = torch.ones(size, dtype=torch.uint8).numpy()
        position = 0
        dist.barrier()
        began = time.perf_counter()
        for path in files:
            with open(path, "rb", buffering=0) as file:
                while count := file.readinto(memory[position : position + READ_SIZE]):
                    position += count
        seconds = time.perf_counter() - began
        assert position == size
        return reduce_to_maxima({case.name: seconds})

    def _run_load(self, case: LoadCase, load: Callable[[], object]) -> Measured:
        """Return the seconds of a load, after which the checksum is compared."""
        # Other values than those to load: a load that skips a tensor is noticed.
        case.program.train_step()
        dist.barrier()
        began = time.perf_counter()
        load()
        seconds = time.perf_counter() - began

        found = case.program.checksum()
        # The order of summation depends on the sharding.
        tolerance = 1e-9 * case.expected
        message = f"{case.name}: {found} instead of {case.expected}"
        assert abs(found - case.expected) <= tolerance, message
        return reduce_to_maxima({case.name: seconds})


def format_table(results: dict[str, Measured]) -> str:
    """Return a table of milliseconds, with the ratio to ours in brackets."""
    columns = list(results[OURS])
    header = f"{'':16}"
    for column in columns:
        header += f"{column:>20}"
    lines = [header]
    for name, measured in results.items():
        line = f"{name:16}"
        for column in columns:
            # Not every contestant reshards, or loads at all.
            text = "-"
            if column in measured:
                text = f"{measured[column] * 1e3:.0f} ms"
                if name != OURS:
                    ratio = measured[column] / results[OURS][column]
                    text += f" ({ratio:.1f}x)"
            line += f"{text:>20}"
        lines.append(line)
    return "\n".join(lines)


def run_rank(args: argparse.Namespace) -> None:
    """Measure as one of the processes; rank 0 prints the table."""
    dist.init_process_group("gloo")
    warnings.filterwarnings("ignore")
    # Processes share the cores: threads of training would compete with those of saves.
    torch.set_num_threads(1)
    benchmark = Benchmark(args)
    # First, because the loads read its checkpoints.
    results = benchmark.measure_saves()
    for name, measured in benchmark.measure_loads().items():
        results.setdefault(name, {}).update(measured)
    if dist.get_rank() == 0:
        gigabytes = benchmark.nbytes / 1e9
        print(f"FSDP2 on {dist.get_world_size()} processes, {gigabytes:.2f} GB")
        print(format_table(results), flush=True)
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    """Return the flags of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size-gb", type=float, default=1.6, help="of the state of --model layers")
    parser.add_argument(
        "--model",
        default="layers",
        choices=["layers", *SHAPES],
        help="square layers, or many small tensors",
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", default=str(ROOT / "build/benchmark_library"))
    parser.add_argument("--process", action="store_true", help="DCP in a process of its own, too")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    # Set by torch.distributed.run, which starts this file again on every rank.
    if "RANK" in os.environ:
        run_rank(args)
        return
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(args.processes)]
    # An aborted benchmark may have left checkpoints, which the Checkpointer would resume from.
    shutil.rmtree(args.directory, ignore_errors=True)
    try:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *launcher, __file__, *sys.argv[1:]]
        subprocess.run(command, check=True, env=environment)
    finally:
        shutil.rmtree(args.directory, ignore_errors=True)


if __name__ == "__main__":
    main()

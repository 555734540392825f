"""`Checkpointer` compared with torch.distributed.checkpoint (DCP) in an FSDP2 training loop.

Two processes train a model that is sharded by `fully_shard`, with AdamW. Contestants save the same
state to the same disk and take turns; results are medians. "blocking" is the time of the call,
"lost" the time of a window of iterations with a save minus the same without, "durable" the time
from the call until the checkpoint is committed. "reshard" loads into a model that is sharded along
the other dimension.

torch_checkpointing is a contestant if it is installed. It never flushes its files to the disk, so
its "durable" is the time until they are renamed.

    python benchmarks/library.py                    # 1.6 GB
    python benchmarks/library.py --size-gb 0.2 --repeats 2
    python benchmarks/library.py --model small      # 6,000 tensors of 4 KB
    python benchmarks/library.py --model experts    # 64 experts in each of 8 layers
    pip install --no-deps torch_checkpointing==0.1.1
"""

import argparse
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

from megatron.core.dist_checkpointing import Checkpointer, SaveReport  # noqa: E402

WIDTH = 2048
BYTES_PER_PARAMETER = 12  # fp32 weight and two moments
WINDOW = 6  # iterations after a save whose time counts
SHAPES = {  # of --model: number of parameters, shape of each
    "small": (2000, (32, 32)),
    "experts": (8 * 64 * 2, (256, 128)),  # two matrices per expert
}
OURS = "Checkpointer"
PEER = "torch_checkpointing"


class ManyMatrices(nn.Module):
    """Parameters of one shape, each of which changes the output a little."""

    def __init__(self, number: int, shape: tuple[int, int]) -> None:
        super().__init__()
        self.matrices = nn.ParameterList([torch.randn(shape) for _ in range(number)])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        sums = torch.stack([matrix.sum() for matrix in self.matrices])
        return batch + sums.mean()


def make_model(kind: str, size_gb: float) -> nn.Sequential:
    """Return the model of --model; its layers are sharded one by one."""
    if kind in SHAPES:
        number, shape = SHAPES[kind]
        num_layers = 8
        return nn.Sequential(
            *(ManyMatrices(number // num_layers, shape) for _ in range(num_layers))
        )
    num_layers = max(1, round(size_gb * 1e9 / BYTES_PER_PARAMETER / WIDTH**2))
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)))


class Program:
    """A model sharded along dimension `dim`, with its optimizer."""

    def __init__(self, args: argparse.Namespace, dim: int = 0) -> None:
        torch.manual_seed(0)
        self.model = make_model(args.model, args.size_gb)
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        for layer in self.model:
            fully_shard(layer, shard_placement_fn=lambda parameter: Shard(dim))
        fully_shard(self.model, shard_placement_fn=lambda parameter: Shard(dim))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randn(64, WIDTH)
        # torch_checkpointing requires a lock that delays the update until the state is staged.
        self.lock_update: Callable[[], AbstractContextManager] = nullcontext

    def train_step(self) -> None:
        (self.model(self.batch) - self.batch).square().mean().backward()
        with self.lock_update():
            self.optimizer.step()
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, object]:
        """Return the state as DCP saves it."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict) -> None:
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
        local = sum(float(tensor.to_local().double().abs().sum()) for tensor in tensors)
        total = torch.tensor(local, dtype=torch.float64)
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


# Begins a save; returns a function that waits for the commit, and the time of the commit if known.
Begin = Callable[[], Callable[[], float]]


def make_waiter(future: Future) -> Callable[[], float]:
    """Return a function that waits for the future, and returns when it was done."""
    ended: list[float] = []

    def note(done: Future) -> None:
        ended.append(time.perf_counter())

    future.add_done_callback(note)

    def wait() -> float:
        future.result()
        while not ended:
            time.sleep(0.001)
        return ended[0]

    return wait


class Benchmark:
    """One process of the benchmark; results are identical on all processes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.root = Path(args.directory)
        self.program = Program(args)
        self.nbytes = self.program.num_parameters * BYTES_PER_PARAMETER
        self.program.train_step()
        self.peer = make_peer()
        # A collective of a background thread must not meet those of training in one group.
        self.group = dist.new_group(backend="gloo")

    def measure(self, contestants: dict[str, Callable[[], dict]]) -> dict[str, dict[str, float]]:
        """Return medians of `repeats` turns of all contestants, after a warm-up turn."""
        samples: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
        for round_number in range(self.args.repeats + 1):
            for name, run in contestants.items():
                measured = run()
                if dist.get_rank() == 0:
                    text = ", ".join(f"{key} {value:.3f}" for key, value in measured.items())
                    print(f"round {round_number}, {name}: {text}", file=sys.stderr, flush=True)
                if round_number:
                    samples[name].append(measured)
        return {
            name: {key: statistics.median(value[key] for value in values) for key in values[0]}
            for name, values in samples.items()
        }

    def remove(self, path: Path) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
            os.sync()
        dist.barrier()

    # ---- Saves ----

    def saves(self) -> dict[str, dict[str, float]]:
        reports: list[SaveReport] = []
        ckpt = Checkpointer(
            self.root / "ours",
            self.program.model,
            self.program.optimizer,
            keep_last=1,
            on_saved=reports.append,
        )
        ckpt.load()
        iterations = iter(range(1, 1000))

        def begin_ours() -> Callable[[], float]:
            began = time.perf_counter()
            ckpt.save(next(iterations))

            def wait() -> float:
                ckpt.finish()
                return began + reports.pop().total

            return wait

        def begin_dcp(kind: AsyncCheckpointerType) -> Callable[[], float]:
            writer = dcp.FileSystemWriter(
                self.root / "dcp", thread_count=2, sync_files=True, overwrite=True
            )
            future = dcp.async_save(
                self.program.state_dict(),
                storage_writer=writer,
                process_group=self.group,
                async_checkpointer_type=kind,
            )
            return make_waiter(future)

        contestants = {
            OURS: lambda: self.train_window(begin_ours),
            "DCP, thread": lambda: self.train_window(
                lambda: begin_dcp(AsyncCheckpointerType.THREAD)
            ),
        }
        if self.args.process:
            contestants["DCP, process"] = lambda: self.train_window(
                lambda: begin_dcp(AsyncCheckpointerType.PROCESS)
            )
        if self.peer is not None:
            self.program.lock_update = self.peer.lock
            contestants[PEER] = self.run_peer_window
        results = self.measure(contestants)

        # Save the state that is loaded below.
        ckpt.save(next(iterations))
        ckpt.close()
        if self.peer is not None:
            self.remove(self.root / "peer")
            wait = self.begin_peer()
            wait()
        self.remove(self.root / "dcp")
        writer = dcp.FileSystemWriter(self.root / "dcp", thread_count=2, sync_files=True)
        dcp.save(self.program.state_dict(), storage_writer=writer)
        return results

    def run_peer_window(self) -> dict[str, float]:
        """Save by torch_checkpointing in a window of iterations; it keeps one checkpoint."""
        self.remove(self.root / "peer")
        return self.train_window(self.begin_peer)

    def begin_peer(self) -> Callable[[], float]:
        future = self.peer.save(str(self.root / "peer"), self.program.state_dict())
        return make_waiter(future)

    def train_window(self, begin: Begin) -> dict[str, float]:
        """Run one window of iterations without a save and one with."""
        calm = self.run_iterations()
        dist.barrier()
        began = time.perf_counter()
        wait = begin()
        blocking = time.perf_counter() - began
        with_save = blocking + self.run_iterations()
        durable = wait() - began
        return self.maxima({"blocking": blocking, "lost": with_save - calm, "durable": durable})

    def run_iterations(self) -> float:
        began = time.perf_counter()
        for _ in range(WINDOW):
            self.program.train_step()
        return time.perf_counter() - began

    def maxima(self, measured: dict[str, float]) -> dict[str, float]:
        """Return the times of the slowest process."""
        numbers = torch.tensor(list(measured.values()), dtype=torch.float64)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        return dict(zip(measured, numbers.tolist(), strict=True))

    # ---- Loads ----

    def loads(self) -> dict[str, dict[str, float]]:
        expected = self.program.checksum()
        targets = {"load": Program(self.args), "reshard": Program(self.args, dim=1)}
        for program in targets.values():
            program.train_step()  # both begin with optimizer state that exists
        results: dict[str, dict[str, float]] = {OURS: {}, "DCP, thread": {}}
        if self.peer is not None:
            results[PEER] = {}
        for name, program in targets.items():

            def ours(program: Program = program, name: str = name) -> dict[str, float]:
                ckpt = Checkpointer(self.root / "ours", program.model, program.optimizer)
                return self.check_load(name, lambda: ckpt.load(), program, expected)

            def theirs(program: Program = program, name: str = name) -> dict[str, float]:
                def load() -> None:
                    state = program.state_dict()
                    dcp.load(state, checkpoint_id=self.root / "dcp")
                    program.load_state_dict(state)

                return self.check_load(name, load, program, expected)

            def peer(program: Program = program, name: str = name) -> dict[str, float]:
                def load() -> None:
                    state = program.state_dict()
                    self.peer.load(str(self.root / "peer"), into=state)
                    program.load_state_dict(state)

                return self.check_load(name, load, program, expected)

            contestants = {OURS: ours, "DCP, thread": theirs}
            if self.peer is not None and name == "load":
                contestants[PEER] = peer
            for contestant, measured in self.measure(contestants).items():
                results[contestant] |= measured
        if self.peer is not None:
            self.peer.close()
        return results

    def check_load(
        self, name: str, load: Callable[[], object], program: Program, expected: float
    ) -> dict[str, float]:
        program.train_step()  # other values than those to load
        dist.barrier()
        began = time.perf_counter()
        load()
        seconds = time.perf_counter() - began
        found = program.checksum()
        assert abs(found - expected) <= 1e-9 * expected, f"{name}: {found} instead of {expected}"
        return self.maxima({name: seconds})


def format_table(results: dict[str, dict[str, float]]) -> str:
    """Return a table of milliseconds, with the ratio to ours in brackets."""
    columns = list(results[OURS])
    lines = [f"{'':16}" + "".join(f"{column:>20}" for column in columns)]
    for name, measured in results.items():
        cells = ""
        for column in columns:
            text = "-"
            if column in measured:
                text = f"{measured[column] * 1e3:.0f} ms"
                if name != OURS:
                    text += f" ({measured[column] / results[OURS][column]:.1f}x)"
            cells += f"{text:>20}"
        lines.append(f"{name:16}{cells}")
    return "\n".join(lines)


def run_rank(args: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    benchmark = Benchmark(args)
    results = benchmark.saves()
    for name, measured in benchmark.loads().items():
        results[name] |= measured
    if dist.get_rank() == 0:
        print(f"FSDP2 on {dist.get_world_size()} processes, {benchmark.nbytes / 1e9:.2f} GB")
        print(format_table(results), flush=True)
    dist.destroy_process_group()


def main() -> None:
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
    args = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(args)
        return
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(args.processes)]
    shutil.rmtree(args.directory, ignore_errors=True)
    try:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *launcher, __file__, *sys.argv[1:]]
        subprocess.run(command, check=True, env=environment)
    finally:
        shutil.rmtree(args.directory, ignore_errors=True)


if __name__ == "__main__":
    main()

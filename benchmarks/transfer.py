"""Weights of a layout in the memory of another one: replay of a plan against alternatives.

Two processes (gloo) have the layers of a model split over TP 2; the second one fills a whole copy,
as an inference engine has it. Alternatives are planning before every transfer, and loading a
checkpoint, which is in the page cache and whose save is not counted. They take turns; the medians
count.

    python benchmarks/transfer.py                       # 1 GB in bf16
    python benchmarks/transfer.py --layers 2 --rounds 3  # small, to try it out
"""

import argparse
import socket
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from scratch import DIRECTORY_HELP, create_scratch_directory  # noqa: E402

from megatron.core.dist_checkpointing import (  # noqa: E402
    ShardedStateDict,
    ShardedTensor,
    load,
    save,
)
from megatron.transfer.routing import plan_transfer  # noqa: E402

HIDDEN = 1024
MATRICES = {"qkv": 3, "proj": 1, "fc1": 8, "fc2": 4}  # rows / HIDDEN


def make_states(rank: int, layers: int) -> tuple[ShardedStateDict, ShardedStateDict]:
    """Return the shard of this rank, and on rank 1 the whole tensors."""
    source: ShardedStateDict = {}
    target: ShardedStateDict = {}
    for layer in range(layers):
        for name, multiple in MATRICES.items():
            key = f"layers.{layer}.{name}"
            rows = multiple * HIDDEN
            shard = torch.randn(rows // 2, HIDDEN).bfloat16()
            source[key] = ShardedTensor.split(key, shard, 0, rank, 2)
            if rank == 1:
                whole = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16)
                target[key] = ShardedTensor.replicated(key, whole)
    return source, target


def measure(action: Callable[[], object]) -> float:
    """Return the seconds until all ranks have done it."""
    dist.barrier()
    started = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - started


def run(rank: int, address: str, directory: str, layers: int, rounds: int) -> None:
    """Measure as one rank; rank 0 prints the table."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    source, target = make_states(rank, layers)
    schedule = plan_transfer(source, target)
    transfer = schedule.bind(source, target)

    path = Path(directory) / "checkpoint"
    save(source, path, common={})
    actions = {
        "replay": transfer.run,
        "plan and run": lambda: plan_transfer(source, target).run(source, target),
        "load of a checkpoint": lambda: load(target, path),
    }
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for index in range(rounds + 1):
        for name, action in actions.items():
            duration = measure(action)
            if index > 0:  # after a warm-up
                seconds[name].append(duration)
    if rank == 0:
        print_table({name: statistics.median(values) for name, values in seconds.items()})
        print(f"{schedule.bytes_moved / 1e6:.0f} MB moved, the minimum")
    dist.destroy_process_group()


def print_table(medians: dict[str, float]) -> None:
    """Print the medians and their ratios to a replay."""
    for name, duration in medians.items():
        ratio = duration / medians["replay"]
        print(f"{name:24} {1000 * duration:8.0f} ms {ratio:8.1f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, help=DIRECTORY_HELP)
    args = parser.parse_args()
    with create_scratch_directory("transfer", args.directory) as directory:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        torch.multiprocessing.spawn(
            run, (address, str(directory), args.layers, args.rounds), nprocs=2
        )


if __name__ == "__main__":
    main()

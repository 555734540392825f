"""From the command line to the first training iteration, and to it from a checkpoint of another layout.

Start-up: a model of 35,000 parameters under torchrun, up to the log line of its first iteration, against the limit: the
same processes with `import torch`, a process group and one all-reduce. The tools are measured against `import torch`.
Resume: a run of TP2 goes on at DP2 with the distributed optimizer, up to the log line of its next iteration, against
torchrun processes that do nothing but load the same number of bytes with torch.distributed.checkpoint into DTensors
that are sharded the other way. Contestants take turns; reported are medians. Files come from the page cache.

    python benchmarks/startup.py                       # start-up, tools and resume
    python benchmarks/startup.py --size-gb 0.2 --turns 3
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
MODEL = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --mock-data --seed 1 "
    "--tokenizer-type NullTokenizer --hidden-dropout 0 --attention-dropout 0 --num-workers 0 --num-threads 1 "
    "--lr 1e-3 --lr-decay-style constant --log-interval 1 --eval-iters 0 --micro-batch-size 1 --global-batch-size 2 "
)
TINY = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 60 "
HIDDEN, VOCABULARY = 1024, 16000
# Without --help or anything else of ours: what every run of two processes must do.
LIMIT = """
import datetime, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=5))
dist.all_reduce(torch.ones(1))
print("iteration", flush=True)
"""
# Bytes of fp32 as [layers of] rows x columns, written split along dimension 0 and read along dimension 1.
DCP = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
directory, layers, write = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "write"
dist.init_process_group("gloo")
mesh, dim = init_device_mesh("cpu", (2,)), 0 if write else 1
shape = [4096, 4096]
shape[dim] //= 2
local = [torch.ones(shape) for _ in range(layers)]
state = {f"layers.{i}": DTensor.from_local(x, mesh, [Shard(dim)], run_check=False) for i, x in enumerate(local)}
(dcp.save if write else dcp.load)(state, checkpoint_id=directory)
print("iteration", flush=True)
"""


def until_iteration(command: list[str]) -> float:
    """Seconds until the command has written a line with an iteration; it is left to end."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    start = time.perf_counter()
    seconds = None
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        assert run.stdout is not None
        lines = []
        for line in run.stdout:
            lines.append(line)
            if seconds is None and "iteration" in line and ("lm loss" in line or line.startswith("iteration")):
                seconds = time.perf_counter() - start
    if run.returncode or seconds is None:
        raise RuntimeError(f"{' '.join(command)}\n{''.join(lines)}")
    return seconds


def until_end(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def train(flags: str) -> list[str]:
    return [*TORCHRUN, str(ROOT / "pretrain_gpt.py"), *flags.split()]


def compare(contestants: dict[str, Callable[[], float]], turns: int) -> dict[str, float]:
    """Medians of seconds, after a first turn that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(turns + 1):
        for name, measure in contestants.items():
            value = measure()
            if turn:
                seconds[name].append(value)
    return {name: statistics.median(values) for name, values in seconds.items()}


def print_rows(title: str, medians: dict[str, float], limit: str) -> None:
    print(f"\n| {title} | s | against the first row |\n|---|---|---|")
    for name, median in medians.items():
        print(f"| {name} | {median:.2f} | {'' if name == limit else f'{median / medians[limit]:.2f}x'} |")


def measure_start_up(directory: Path, turns: int) -> None:
    limit = directory / "limit.py"
    limit.write_text(LIMIT)
    medians = compare(
        {
            "import torch, process group, all-reduce": lambda: until_iteration([*TORCHRUN, str(limit)]),
            "pretrain_gpt.py, first iteration": lambda: until_iteration(train(f"{MODEL}{TINY}--train-iters 1")),
        },
        turns,
    )
    print_rows("start-up, torchrun with two processes", medians, "import torch, process group, all-reduce")


def measure_tools(directory: Path, turns: int) -> None:
    checkpoint = directory / "tiny"
    until_iteration(train(f"{MODEL}{TINY}--train-iters 1 --save {checkpoint} --save-interval 1"))
    convert, inspect = (str(ROOT / "tools/checkpoint" / name) for name in ("convert.py", "inspect.py"))
    commands = {
        "import torch": ["-c", "import torch"],
        "convert.py --help": [convert, "--help"],
        "inspect.py --help": [inspect, "--help"],
        "inspect.py show": [inspect, "show", str(checkpoint)],
        "inspect.py verify": [inspect, "verify", str(checkpoint)],
    }
    contestants = {name: partial(until_end, [sys.executable, *command]) for name, command in commands.items()}
    print_rows("tools", compare(contestants, turns), "import torch")


def measure_resume(directory: Path, size_gb: float, turns: int) -> None:
    """fp32: 12 bytes of a parameter travel, as fp32 bytes of DCP's."""
    layers = max(1, round((size_gb * 1e9 / 12 - 2 * VOCABULARY * HIDDEN) / (11 * HIDDEN**2)))
    model = (
        f"{MODEL}--num-layers {layers} --hidden-size {HIDDEN} --ffn-hidden-size {HIDDEN * 5 // 2} --seq-length 32 "
        f"--num-attention-heads 16 --vocab-size {VOCABULARY} --untie-embeddings-and-output-weights "
    )
    ours, theirs = directory / "ours", directory / "dcp"
    until_iteration(train(f"{model}--tensor-model-parallel-size 2 --train-iters 1 --save {ours} --save-interval 1"))
    size = sum(file.stat().st_size for file in ours.rglob("*") if file.is_file())
    script = directory / "dcp.py"
    script.write_text(DCP)
    tensors = str(round(size / 4096**2 / 4))
    until_iteration([*TORCHRUN, str(script), str(theirs), tensors, "write"])
    print(f"\n{size / 1e9:.2f} GB written at TP2")
    limit = "DCP alone: import, process group, load, sharded the other way"
    resume = f"{model}--use-distributed-optimizer --load {ours} --train-iters 2"
    medians = compare(
        {
            limit: lambda: until_iteration([*TORCHRUN, str(script), str(theirs), tensors, "read"]),
            "pretrain_gpt.py at DP2, first iteration": lambda: until_iteration(train(resume)),
            "the same from random weights": lambda: until_iteration(
                train(f"{model}--use-distributed-optimizer --train-iters 1")
            ),
        },
        turns,
    )
    print_rows("resume", medians, limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-gb", type=float, default=1.6, help="of the checkpoint that is resumed from")
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        measure_start_up(Path(name), args.turns)
        measure_tools(Path(name), args.turns)
        measure_resume(Path(name), args.size_gb, max(1, args.turns // 2))


if __name__ == "__main__":
    main()

"""Time from the command line to the first training iteration, from scratch and from a checkpoint.

Start-up: a model of 35,000 parameters under torchrun, up to the log line of its first iteration.
The limit is `import torch`, a process group and one all-reduce in as many processes. Tools are
compared with `import torch` in processor time (minimum of all turns). Resume: a run of TP2
continues at DP2 with the distributed optimizer. Peers that do the same on the same shapes: a
transformers model under FSDP with torch.distributed.checkpoint, whose files are sharded along the
other dimension, and megatron-core, which reads our files. Contestants take turns; results are
medians. Files are in the page cache and modules are compiled.

    python benchmarks/startup.py                       # start-up, tools and resume
    python benchmarks/startup.py --size-gb 0.2 --turns 3
    python benchmarks/startup.py --megatron-core-python PATH   # also megatron-core, from its own environment
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
TWO_PROCESSES = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TORCHRUN = [sys.executable, *TWO_PROCESSES]
MODEL = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--mock-data --seed 1 "
    "--tokenizer-type NullTokenizer --hidden-dropout 0 --attention-dropout 0 --num-workers 0 "
    "--num-threads 1 "
    "--lr 1e-3 --lr-decay-style constant --log-interval 1 --eval-iters 0 --micro-batch-size 1 "
    "--global-batch-size 2 "
)
TINY = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 60 "
HIDDEN = 1024
VOCABULARY = 16000
# The minimum of any run of two processes.
LIMIT = """
import datetime, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=5))
dist.all_reduce(torch.ones(1))
print("iteration", flush=True)
"""


def make_environment(command: list[str]) -> dict[str, str]:
    """Return the environment for an interpreter.

    Another Python has its own `megatron`. Bytecode is enabled: otherwise every start would compile
    our modules, but not torch's.
    """
    python_path = str(ROOT) if command[0] == sys.executable else ""
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path}
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    return variables


def measure_until_iteration(command: list[str]) -> float:
    """Return the seconds until the command prints a line with an iteration, then let it finish."""
    start = time.perf_counter()
    seconds = None
    variables = make_environment(command)
    with subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        assert run.stdout is not None
        lines = []
        for line in run.stdout:
            lines.append(line)
            # The log line of `pretrain_gpt.py`, or the line that the other programs print.
            has_iteration = line.startswith("iteration") or (
                "iteration" in line and "lm loss" in line
            )
            if has_iteration and seconds is None:
                seconds = time.perf_counter() - start
    if run.returncode or seconds is None:
        raise RuntimeError(f"{' '.join(command)}\n{''.join(lines)}")
    return seconds


def measure_processor_time(command: list[str]) -> float:
    """Return user and system seconds of a command.

    The exit status is ignored: `diff` reports differences with it.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=make_environment(command), stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def make_training_command(flags: str) -> list[str]:
    return [*TORCHRUN, str(ROOT / "pretrain_gpt.py"), *flags.split()]


def compare(
    contestants: dict[str, Callable[[], float]],
    turns: int,
    reduce: Callable[[list[float]], float] = statistics.median,
) -> dict[str, float]:
    """Return the median seconds of each contestant, or the result of `reduce`, after a warm-up
    turn.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(turns + 1):
        for name, measure in contestants.items():
            value = measure()
            if turn:
                seconds[name].append(value)
    return {name: reduce(values) for name, values in seconds.items()}


def print_rows(title: str, medians: dict[str, float], limit: str) -> None:
    print(f"\n| {title} | s | against {limit} |\n|---|---|---|")
    for name, median in medians.items():
        ratio = f"{median / medians[limit]:.2f}x"
        if name == limit:
            ratio = ""
        print(f"| {name} | {median:.2f} | {ratio} |")


def measure_start_up(directory: Path, turns: int) -> None:
    limit_script = directory / "limit.py"
    limit_script.write_text(LIMIT)
    limit = "import torch, process group, all-reduce"
    commands = {
        limit: [*TORCHRUN, str(limit_script)],
        "pretrain_gpt.py, first iteration": make_training_command(f"{MODEL}{TINY}--train-iters 1"),
    }
    contestants = {}
    for name, command in commands.items():
        contestants[name] = partial(measure_until_iteration, command)
    medians = compare(contestants, turns)
    print_rows("start-up, torchrun with two processes", medians, limit)


def measure_tools(directory: Path, turns: int) -> None:
    checkpoint = directory / "tiny"
    legacy = directory / "legacy"
    for save in (f"--save {checkpoint}", f"--ckpt-format torch --save {legacy}"):
        measure_until_iteration(
            make_training_command(f"{MODEL}{TINY}--train-iters 1 {save} --save-interval 1")
        )
    convert = str(ROOT / "tools/checkpoint/convert.py")
    inspect = str(ROOT / "tools/checkpoint/inspect_checkpoint.py")
    diff = [inspect, "diff", str(checkpoint), str(legacy)]
    conversion = (
        f"--saver hf --overwrite --load-dir {checkpoint} --save-dir {directory / 'hf'}".split()
    )
    commands = {
        "import torch": ["-c", "import torch"],
        "convert.py --help": [convert, "--help"],
        "inspect_checkpoint.py --help": [inspect, "--help"],
        "inspect_checkpoint.py show": [inspect, "show", str(checkpoint)],
        "inspect_checkpoint.py verify": [inspect, "verify", str(checkpoint)],
        "inspect_checkpoint.py diff, torch_dist and legacy": diff,
        "convert.py, torch_dist to hf": [convert, *conversion],
        "pretrain_gpt.py --help": [str(ROOT / "pretrain_gpt.py"), "--help"],
    }
    contestants = {}
    for name, command in commands.items():
        contestants[name] = partial(measure_processor_time, [sys.executable, *command])
    print_rows("tools, processor time", compare(contestants, turns, min), "import torch")


def measure_resume(directory: Path, size_gb: float, turns: int, megatron_core: str | None) -> None:
    """Measure resuming in fp32, where 12 bytes per parameter are read."""
    layers = max(1, round((size_gb * 1e9 / 12 - 2 * VOCABULARY * HIDDEN) / (11 * HIDDEN**2)))
    ffn = HIDDEN * 5 // 2
    heads = 16
    length = 32
    model = (
        f"{MODEL}--num-layers {layers} --hidden-size {HIDDEN} --ffn-hidden-size {ffn} "
        f"--seq-length {length} --num-attention-heads {heads} --vocab-size {VOCABULARY} "
        "--untie-embeddings-and-output-weights "
    )
    ours = directory / "ours"
    theirs = directory / "dcp"
    saving = f"--tensor-model-parallel-size 2 --train-iters 1 --save {ours} --save-interval 1"
    measure_until_iteration(make_training_command(model + saving))
    size = sum(file.stat().st_size for file in ours.rglob("*") if file.is_file())
    numbers = map(str, (layers, HIDDEN, ffn, heads, VOCABULARY, length))
    dcp = [*TORCHRUN, str(ROOT / "benchmarks/peers/dcp_resume.py"), str(theirs), *numbers]
    measure_until_iteration([*dcp, "--write"])
    print(f"\n{size / 1e9:.2f} GB written at TP2")
    peers = {"transformers, FSDP, DCP: load and one step": partial(measure_until_iteration, dcp)}
    if megatron_core:
        program = [str(ROOT / "benchmarks/peers/megatron_core_resume.py"), str(ours), str(length)]
        peers["megatron-core, distributed optimizer: load and one step"] = partial(
            measure_until_iteration, [megatron_core, *TWO_PROCESSES, *program]
        )
    at_dp2 = f"{model}--use-distributed-optimizer --train-iters"
    resume = make_training_command(f"{at_dp2} 2 --load {ours}")
    start = make_training_command(f"{at_dp2} 1")
    own = {
        "pretrain_gpt.py at DP2, first iteration": partial(measure_until_iteration, resume),
        "the same from random weights": partial(measure_until_iteration, start),
    }
    medians = compare(peers | own, turns)
    print_rows("resume", medians, min(peers, key=medians.__getitem__))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size-gb", type=float, default=1.6, help="of the checkpoint that is resumed from"
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--megatron-core-python", metavar="PATH", help="Python of an environment with megatron-core"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        measure_start_up(Path(name), args.turns)
        measure_tools(Path(name), args.turns)
        measure_resume(Path(name), args.size_gb, args.turns, args.megatron_core_python)


if __name__ == "__main__":
    main()

"""Training time lost to models that are exported next to checkpoints (--save-hf-interval).

One run of `pretrain_gpt.py` saves asynchronously, and exports a model with every second save. Each
save interval has three equal parts. A save must be committed within the first part, so that the
other two are training without a save, measured seconds later on the same machine. "lost" is the
time of the first part beyond the mean of the other two, and "no save" is the difference between
these two: the noise. Medians over all intervals but the first two, of the slowest rank; the
processor time is that of all threads of all ranks, and of the machine including writes that the
kernel makes later.

    python benchmarks/exports.py                           # 0.75 GB of state: a Llama of 54M parameters
    python benchmarks/exports.py --hidden 256 --minutes 1  # small, to try it out
    python benchmarks/exports.py --ranks 1                 # one core remains free on a machine of two
    python benchmarks/exports.py --fp32                    # weights are cast to bf16 for the export
    python benchmarks/exports.py --store                   # models in object storage, with a server here
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import pretrain_gpt  # noqa: E402
from megatron.training.reporting.run_record import read_record  # noqa: E402
from tests.support.object_server import object_server  # noqa: E402

RANK_PROGRAM = "--rank-program"
WAYS = ("save", "save and export")
CLOCKS = ("wall", "ranks", "machine")


def run_rank(target: Path, argv: list[str]) -> None:
    """Train as one rank and write its clocks after every iteration to a file in `target`."""
    marks: list[dict[str, float]] = []

    def mark() -> None:
        marks.append(
            {
                "time": time.time(),
                "wall": time.perf_counter(),
                "ranks": time.process_time(),
                "machine": read_machine_time(),
            }
        )

    pretrain_gpt.train(argv, mark)
    (target / f"marks-{os.environ['RANK']}.json").write_text(json.dumps(marks))


def read_machine_time() -> float:
    """Return the seconds that all processors of the machine have been busy."""
    with open("/proc/stat") as file:
        user, nice, system, _, _, irq, softirq, *_ = map(int, file.readline().split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def train(root: Path, args: argparse.Namespace) -> list[list[dict[str, float]]]:
    """Run the training and return the marks of each rank."""
    heads = max(1, args.hidden // 64)
    interval = 3 * args.part
    flags = f"""--num-layers {args.layers} --hidden-size {args.hidden} --num-attention-heads {heads}
        --swiglu --ffn-hidden-size {args.hidden * 11 // 4} --seq-length {args.seq_length}
        --max-position-embeddings {args.seq_length} --normalization RMSNorm --eval-iters 0
        --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights
        --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 1
        --global-batch-size {args.ranks} --use-distributed-optimizer --lr 1e-4
        --train-iters 100000 --exit-duration-in-mins {args.minutes} --log-interval 1 --num-threads 1 --mock-data
        --tokenizer-type NullTokenizer --vocab-size {args.vocab - 1}
        --lr-decay-style constant --save {root / "run"} --async-save --keep-last-n 1 --save-interval {interval}
        --save-hf {args.target or root / "models"} --save-hf-interval {2 * interval}
        --save-hf-keep-last 1 --save-hf-dtype bf16 {"" if args.fp32 else "--bf16"}"""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(args.ranks)]
    command += [__file__, RANK_PROGRAM, str(root), *flags.split()]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    root.mkdir(parents=True)
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    marks = []
    for rank in range(args.ranks):
        marks.append(json.loads((root / f"marks-{rank}.json").read_text()))
    return marks


def measure_parts(
    ranks: list[list[dict[str, float]]], first: int, length: int
) -> list[dict[str, float]]:
    """Return the counts of each clock in three parts of `length` iterations that follow `first`."""
    parts = []
    for start in range(first, first + 3 * length, length):
        counts = {}
        for clock in CLOCKS:
            found = [marks[start + length - 1][clock] - marks[start - 1][clock] for marks in ranks]
            counts[clock] = sum(found) if clock == "ranks" else max(found)
        parts.append(counts)
    return parts


def main() -> None:
    if sys.argv[1:2] == [RANK_PROGRAM]:
        run_rank(Path(sys.argv[2]), sys.argv[3:])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=16000)
    parser.add_argument("--seq-length", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--part", type=int, default=8, help="iterations per third of an interval")
    parser.add_argument("--minutes", type=float, default=2.4, help="length of the run")
    parser.add_argument("--fp32", action="store_true", help="train in fp32, export bf16")
    parser.add_argument("--store", action="store_true", help="export to object storage")
    parser.add_argument("--directory", type=Path, default=Path("/tmp/benchmark_exports"))
    args = parser.parse_args()
    args.target = None
    with contextlib.ExitStack() as stack:
        if args.store:
            stack.enter_context(object_server())
            args.target = "s3://bucket/models"
        shutil.rmtree(args.directory, ignore_errors=True)
        ranks = train(args.directory, args)
        (launch,) = read_record(args.directory / "run")
        shutil.rmtree(args.directory)

    # A save begins after the mark of its iteration, except for time at the end of that iteration.
    lost = {way: {clock: [] for clock in CLOCKS} for way in ("no save", *WAYS)}
    seconds = []
    late = 0
    interval = 3 * args.part
    num_saves = len(ranks[0]) // interval - 1
    for number in range(3, num_saves + 1):
        iteration = number * interval
        parts = measure_parts(ranks, iteration, args.part)
        seconds.append(parts[1]["wall"])
        (committed,) = [row["time"] for row in launch.points if row["iteration"] == iteration]
        late += committed > ranks[0][iteration + args.part - 1]["time"]
        for clock in CLOCKS:
            saving, second, third = (part[clock] for part in parts)
            lost[WAYS[(number + 1) % 2]][clock].append(saving - (second + third) / 2)
            lost["no save"][clock].append(second - third)

    print(f"{args.part} iterations without a save: {statistics.median(seconds):.2f} s")
    if late:
        print(f"{late} of {num_saves - 2} saves were not committed within them: increase --part")
    for way, clocks in lost.items():
        words = []
        for clock in CLOCKS:
            median = statistics.median(clocks[clock])
            words.append(f"{clock} {median * 1e3:.0f} ms")
        listed = " ".join(f"{value * 1e3:.0f}" for value in clocks["wall"])
        print(f"{way}: lost per save: {', '.join(words)}; wall of each: {listed}")


if __name__ == "__main__":
    main()

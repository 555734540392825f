"""Training time lost to models that are exported next to checkpoints (--save-hf-interval).

One run of `pretrain_gpt.py` saves asynchronously, and exports a model with every second save. Each
save interval has three equal parts. A save must be committed within the first part, so that the
other two are training without a save, measured seconds later on the same machine. "lost" is the
time of the first part beyond the mean of the other two, and "no save" is the difference between
these two: the noise. Medians over all intervals but the first two, of the slowest rank; the
processor time is that of all threads of all ranks, and of the machine including writes that the
kernel makes later.

    python benchmarks/exports.py                           # 0.75 GB of state: 54M parameters
    python benchmarks/exports.py --hidden 256 --minutes 1  # small, to try it out
    python benchmarks/exports.py --ranks 1                 # one core of two remains free
    python benchmarks/exports.py --fp32                    # weights are cast to bf16 for the export
    python benchmarks/exports.py --store                   # object storage, with a server here
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from scratch import DIRECTORY_HELP, create_scratch_directory

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import pretrain_gpt  # noqa: E402
from megatron.training.reporting.recorded_launches import RecordedLaunch, read_record  # noqa: E402
from tests.support.object_server import object_server  # noqa: E402

RANK_PROGRAM = "--rank-program"
NO_SAVE = "no save"
SAVE = "save"
SAVE_AND_EXPORT = "save and export"
CLOCKS = ("wall", "ranks", "machine")
FIRST_SAVE = 3  # earlier intervals warm up

Mark = dict[str, float]  # seconds of each clock after an iteration


# The program of a rank


def run_rank(target: Path, argv: list[str]) -> None:
    """Train as one rank and write its clocks after every iteration to a file in `target`."""
    marks: list[Mark] = []

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
    path = target / f"marks-{os.environ['RANK']}.json"
    path.write_text(json.dumps(marks))


def read_machine_time() -> float:
    """Return the seconds that all processors of the machine have been busy."""
    with open("/proc/stat") as file:
        fields = file.readline().split()
    # The first field is the name. Idle time and waits for I/O are left out.
    user, nice, system, _, _, irq, softirq, *_ = map(int, fields[1:])
    ticks = user + nice + system + irq + softirq
    return ticks / os.sysconf("SC_CLK_TCK")


# The run


def build_flags(root: Path, target: str, args: argparse.Namespace) -> list[str]:
    """Return the flags of `pretrain_gpt.py` for a run that exports to `target`."""
    interval = 3 * args.part
    flags = f"""
        --num-layers {args.layers}
        --hidden-size {args.hidden}
        --num-attention-heads {max(1, args.hidden // 64)}
        --swiglu
        --ffn-hidden-size {args.hidden * 11 // 4}
        --seq-length {args.seq_length}
        --max-position-embeddings {args.seq_length}
        --normalization RMSNorm
        --eval-iters 0
        --position-embedding-type rope
        --disable-bias-linear
        --untie-embeddings-and-output-weights
        --hidden-dropout 0
        --attention-dropout 0
        --micro-batch-size 1
        --global-batch-size {args.ranks}
        --use-distributed-optimizer
        --lr 1e-4
        --train-iters 100000
        --exit-duration-in-mins {args.minutes}
        --log-interval 1
        --num-threads 1
        --mock-data
        --tokenizer-type NullTokenizer
        --vocab-size {args.vocab - 1}
        --lr-decay-style constant
        --save {root / "run"}
        --async-save
        --keep-last-n 1
        --save-interval {interval}
        --save-hf {target}
        --save-hf-interval {2 * interval}
        --save-hf-keep-last 1
        --save-hf-dtype bf16
    """.split()
    if not args.fp32:
        flags.append("--bf16")
    return flags


def train(root: Path, target: str, args: argparse.Namespace) -> list[list[Mark]]:
    """Run the training and return the marks of each rank."""
    command = [sys.executable, "-m", "torch.distributed.run"]
    command += ["--nproc-per-node", str(args.ranks)]
    command += [__file__, RANK_PROGRAM, str(root)]
    command += build_flags(root, target, args)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)

    marks = []
    for rank in range(args.ranks):
        path = root / f"marks-{rank}.json"
        marks.append(json.loads(path.read_text()))
    return marks


# The results


@dataclass
class Results:
    """Lost time per save interval, in seconds."""

    lost: dict[str, dict[str, list[float]]]  # kind of interval -> clock -> values
    parts_without_save: list[float]
    num_intervals: int
    num_late: int = 0


def measure_parts(ranks: list[list[Mark]], first: int, length: int) -> list[Mark]:
    """Return the time by each clock in three parts of `length` iterations that follow `first`."""
    parts = []
    for start in range(first, first + 3 * length, length):
        part = {}
        for clock in CLOCKS:
            seconds = []
            for marks in ranks:
                # The mark after iteration n has the index n - 1.
                begin = marks[start - 1]
                end = marks[start + length - 1]
                seconds.append(end[clock] - begin[clock])
            # Ranks share the wall clock and the machine, but not their processor time.
            part[clock] = sum(seconds) if clock == "ranks" else max(seconds)
        parts.append(part)
    return parts


def find_commit_time(launch: RecordedLaunch, iteration: int) -> float:
    """Return the time at which the checkpoint of `iteration` was committed."""
    (committed,) = [row["time"] for row in launch.points if row["iteration"] == iteration]
    return committed


def compute_results(ranks: list[list[Mark]], launch: RecordedLaunch, length: int) -> Results:
    """Compare the first part of each save interval, of `length` iterations, with the others."""
    interval = 3 * length
    # The interval that follows the last save is incomplete.
    num_saves = len(ranks[0]) // interval - 1
    lost: dict[str, dict[str, list[float]]] = {}
    for way in (NO_SAVE, SAVE, SAVE_AND_EXPORT):
        lost[way] = {clock: [] for clock in CLOCKS}
    results = Results(
        lost=lost,
        parts_without_save=[],
        num_intervals=num_saves - FIRST_SAVE + 1,
    )

    for number in range(FIRST_SAVE, num_saves + 1):
        # A save begins after the mark of its iteration, except for time at the end of that
        # iteration.
        iteration = number * interval
        first, second, third = measure_parts(ranks, iteration, length)
        results.parts_without_save.append(second["wall"])

        end_of_first = ranks[0][iteration + length - 1]
        if find_commit_time(launch, iteration) > end_of_first["time"]:
            results.num_late += 1

        # --save-hf-interval is twice --save-interval.
        way = SAVE if number % 2 else SAVE_AND_EXPORT
        for clock in CLOCKS:
            expected = (second[clock] + third[clock]) / 2
            lost[way][clock].append(first[clock] - expected)
            lost[NO_SAVE][clock].append(second[clock] - third[clock])
    return results


def print_results(results: Results, length: int) -> None:
    """Print the medians of each kind of interval, and the wall time of each interval."""
    seconds = statistics.median(results.parts_without_save)
    print(f"{length} iterations without a save: {seconds:.2f} s")

    # Late saves slow down the other parts: the results are too low.
    if results.num_late:
        print(
            f"{results.num_late} of {results.num_intervals} saves were not committed within them: "
            "increase --part"
        )

    for way, clocks in results.lost.items():
        medians = []
        for clock in CLOCKS:
            median = statistics.median(clocks[clock])
            medians.append(f"{clock} {median * 1e3:.0f} ms")
        each = " ".join(f"{seconds * 1e3:.0f}" for seconds in clocks["wall"])
        print(f"{way}: lost per save: {', '.join(medians)}; wall of each: {each}")


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
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
    parser.add_argument("--directory", type=Path, help=DIRECTORY_HELP)
    return parser.parse_args()


def main() -> None:
    """Run the training, and print the time lost; or run one rank of the training."""
    if sys.argv[1:2] == [RANK_PROGRAM]:
        run_rank(Path(sys.argv[2]), sys.argv[3:])
        return

    args = parse_args()
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(create_scratch_directory("exports", args.directory))
        target = str(root / "models")
        if args.store:
            stack.enter_context(object_server())
            target = "s3://bucket/models"
        ranks = train(root, target, args)
        (launch,) = read_record(root / "run")

    results = compute_results(ranks, launch, args.part)
    print_results(results, args.part)


if __name__ == "__main__":
    main()

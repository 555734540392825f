"""Training time lost to models that are exported next to checkpoints (--save-hf-interval).

Three runs of `pretrain_gpt.py` on two processes take turns: without saves, with asynchronous saves,
and with an export in every save. "lost" is the time of a save interval beyond that of the run
without saves, per save; medians over all intervals after the first. The last save is not counted:
training waits for it.

    python benchmarks/exports.py                          # 1.0 GB of state: a Llama of 56M parameters
    python benchmarks/exports.py --hidden 256 --turns 1   # small, to try it out
    python benchmarks/exports.py --store                  # models in object storage, with a server here
"""

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from megatron.training.reporting.run_record import read_record  # noqa: E402
from tests.support.object_server import object_server  # noqa: E402

WAYS = ("no save", "save", "save and export")


def train(root: Path, way: str, args: argparse.Namespace) -> list[float]:
    """Return the seconds of each save interval but the first and the last."""
    heads = max(1, args.hidden // 64)
    iterations = args.interval * (args.saves + 1)
    flags = f"""--num-layers {args.layers} --hidden-size {args.hidden} --num-attention-heads {heads}
        --swiglu --ffn-hidden-size {args.hidden * 11 // 4} --seq-length {args.seq_length} --bf16
        --max-position-embeddings {args.seq_length} --normalization RMSNorm --eval-iters 0
        --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights
        --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 1 --global-batch-size 2
        --use-distributed-optimizer --lr 1e-4 --train-iters {iterations} --log-interval 1
        --num-threads 1 --mock-data --tokenizer-type NullTokenizer --vocab-size {args.vocab - 1}
        --save {root / "run"} --async-save --keep-last-n 1"""
    saving = f"--save-interval {args.interval}"
    if way == "no save":
        saving = f"--save-interval {iterations}"
    elif way == "save and export":
        target = args.target or root / "models"
        saving += f" --save-hf {target} --save-hf-interval {args.interval} --save-hf-keep-last 1"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["pretrain_gpt.py", *flags.split(), *saving.split()]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    (launch,) = read_record(root / "run")
    times = {row["iteration"]: row["time"] for row in launch.intervals}
    shutil.rmtree(root)

    # A save begins after the last iteration of an interval and is written during the next one.
    measured = []
    for number in range(1, args.saves):
        first = number * args.interval
        measured.append(times[first + args.interval] - times[first])
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=16000)
    parser.add_argument("--seq-length", type=int, default=64)
    parser.add_argument("--interval", type=int, default=10)
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--store", action="store_true", help="export to object storage")
    parser.add_argument("--directory", type=Path, default=Path("/tmp/benchmark_exports"))
    args = parser.parse_args()
    args.target = None
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    with contextlib.ExitStack() as stack:
        if args.store:
            stack.enter_context(object_server())
            args.target = "s3://bucket/models"
        for _ in range(args.turns):
            for way in WAYS:
                times[way] += train(args.directory, way, args)

    bare = statistics.median(times["no save"])
    print(f"{args.interval} iterations without a save: {bare:.2f} s")
    for way in WAYS[1:]:
        lost = statistics.median(times[way]) - bare
        listed = ", ".join(f"{seconds:.2f}" for seconds in times[way])
        print(f"{way}: lost {lost * 1e3:.0f} ms per save; intervals {listed}")


if __name__ == "__main__":
    main()

"""Training speed compared with peers in one run.

`pretrain_gpt.py` (the complete step: data, loss, clipping, optimizer, logging) against plain loops
of transformers (SDPA, fused AdamW) and megatron-core (local layers, fused AdamW) on the same model.
Contestants take turns; results are medians, GFLOP/s by one formula, the ratio to the best peer, and
the machine's GEMM ceiling.

    python benchmarks/training.py                    # fp32 and bf16 against transformers
    python benchmarks/training.py --megatron-core-python PATH  # also megatron-core, from its own environment
    python benchmarks/training.py --layouts          # also TP2, PP2, DP2 on 2 processes against 2 threads of one
    python benchmarks/training.py --moe              # 8 experts, top 2; also EP2 on 2 processes
    python benchmarks/training.py --context 4096     # only CP2, one sequence of this length on 2 processes
    python benchmarks/training.py --processor-time   # for machines that are shared with other work
"""

import argparse
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from megatron.core.progress import ProgressBar  # noqa: E402

LAYERS = 8
HIDDEN = 512
FFN = 1408
HEADS = 8
GROUPS = 4
VOCAB = 32000
SEQ = 512
BATCH = 4
# of --moe: two experts of this width cost as much as the dense MLP
EXPERTS = 8
EXPERT_FFN = FFN // 2
SKIP = 2  # first steps of every run: allocation and warm-up

Program = Callable[[int], list[float]]
"""(number of steps) -> the milliseconds of each of them"""

LAYOUTS = {
    "TP2": ["--tensor-model-parallel-size", "2"],
    "TP2+SP": ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
    "PP2": ["--pipeline-model-parallel-size", "2"],
    "DP2": ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"],
}

MOE = f"""--num-experts {EXPERTS} --moe-ffn-hidden-size {EXPERT_FFN} --moe-router-topk 2 --moe-aux-loss-coeff 0.01
    --moe-token-dispatcher-type alltoall""".split()
EVEN = "--moe-router-force-load-balancing"
EP2 = ["--expert-model-parallel-size", "2", *LAYOUTS["DP2"]]


def count_flops_per_step() -> float:
    """Return the model FLOPs of a step: 6 per matrix parameter and token, and half of the attention
    (causal).
    """
    head = HIDDEN // HEADS
    attention = HIDDEN * head * (HEADS + 2 * GROUPS) + HEADS * head * HIDDEN
    matrices = LAYERS * (attention + 3 * HIDDEN * FFN) + HIDDEN * VOCAB
    tokens = SEQ * BATCH
    return 6.0 * matrices * tokens + 6.0 * LAYERS * tokens * SEQ * HEADS * head


def train_ours(
    dtype: str,
    steps: int,
    threads: int,
    processes: int = 1,
    micro_batch: int = BATCH,
    extra: tuple[str, ...] = (),
    sequence: int = SEQ,
    batch: int = BATCH,
) -> list[float]:
    """Return the milliseconds of every step of `pretrain_gpt.py`."""
    flags = f"""--num-layers {LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size {FFN} --num-attention-heads {HEADS}
        --group-query-attention --num-query-groups {GROUPS} --seq-length {sequence} --max-position-embeddings {sequence}
        --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
        --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
        --micro-batch-size {micro_batch} --global-batch-size {batch} --train-iters {steps} --lr 1e-4 --weight-decay 0.1
        --adam-beta2 0.95 --clip-grad 1.0 --mock-data --tokenizer-type NullTokenizer --vocab-size {VOCAB - 1}
        --log-interval 1 --eval-iters 0 --eval-interval 1000000""".split()
    if dtype == "bf16":
        flags.append("--bf16")
    command = [sys.executable]
    if processes > 1:
        command += f"-m torch.distributed.run --standalone --nproc-per-node {processes}".split()
    command += ["pretrain_gpt.py", *flags, *extra]
    output = run(command, threads)
    milliseconds = re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", output)
    return list(map(float, milliseconds))


def train_peer(
    name: str, python: str, dtype: str, steps: int, threads: int, extra: Sequence[str] = ()
) -> list[float]:
    """Return the milliseconds of every step of a peer, which prints them one per line."""
    script = str(ROOT / f"benchmarks/peers/{name}_training.py")
    options = f"--dtype {dtype} --steps {steps} --threads {threads}".split()
    output = run([python, script, *options, *extra], threads)
    milliseconds = re.findall(r"^[\d.]+$", output, re.MULTILINE)
    return list(map(float, milliseconds))


def run(command: list[str], threads: int) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    environment.pop("PYTHONPATH", None)  # it could bring this project's `megatron` into a peer
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(
            f"{' '.join(command)} failed:\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
        )
    return result.stdout


def measure_wall_clock(program: Program, steps: int) -> list[float]:
    """Return the milliseconds of the measured steps."""
    return program(steps)[SKIP:]


def measure_processor_time(program: Program, steps: int) -> list[float]:
    """Return processor milliseconds per step over all processes: the cost of additional steps.

    Other programs hardly affect it. It does not include waiting, and counts spinning threads as
    busy, so each process has one thread.
    """
    before = read_children_time()
    program(SKIP)
    between = read_children_time()
    program(steps)
    after = read_children_time()

    # The difference of a long and a short run does not contain their start-up.
    short_run = between - before
    long_run = after - between
    return [(long_run - short_run) / (steps - SKIP) * 1e3]


def read_children_time() -> float:
    """Return the processor seconds of all finished child processes."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def compare_context_parallelism(dtype: str, args: argparse.Namespace) -> None:
    """Compare one sequence on two processes, for every `--cp-comm-type`, with one process and two
    threads.
    """
    sequence = args.context
    threads = args.threads
    train = partial(train_ours, dtype, micro_batch=1, sequence=sequence, batch=1)
    programs: dict[str, Program] = {"one process": partial(train, threads=threads)}
    for comm_type in ("p2p", "all_gather", "a2a"):
        flags = ("--context-parallel-size", "2", "--cp-comm-type", comm_type)
        programs[f"CP2 {comm_type}"] = partial(
            train, threads=max(1, threads // 2), processes=2, extra=flags
        )
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(args.rounds):
        for name, program in programs.items():
            times[name] += args.measure(program, args.steps)
    alone = statistics.median(times["one process"])
    print(f"\n{dtype}, one sequence of {sequence} tokens on {threads} threads{describe_unit(args)}")
    for name, values in times.items():
        median = statistics.median(values)
        print(f"  {name:14s} {median:8.0f} ms/step  {median / alone:5.2f}x the time of one process")


def describe_unit(args: argparse.Namespace) -> str:
    return "; processor time of all processes" if args.processor_time else ""


def measure_gemm_ceiling(dtype: torch.dtype, threads: int) -> float:
    """Return the best GFLOP/s of this model's MLP shapes over several tries."""
    torch.set_num_threads(threads)
    a = torch.randn(SEQ * BATCH, HIDDEN).to(dtype)
    b = torch.randn(2 * FFN, HIDDEN).to(dtype)
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        torch.nn.functional.linear(a, b)
        best = min(best, time.perf_counter() - start)
    return 2.0 * SEQ * BATCH * HIDDEN * 2 * FFN / best / 1e9


def make_programs(
    args: argparse.Namespace, dtype: str, pythons: dict[str, str]
) -> dict[str, Program]:
    """Return the contestants."""
    threads = args.threads
    peer_flags: list[str] = []
    model_flags: list[str] = []
    if args.moe:
        peer_flags = f"--experts {EXPERTS} --ffn {EXPERT_FFN}".split()
        model_flags = MOE

    def make_program(*flags: str) -> Program:
        return partial(train_ours, dtype, threads=threads, extra=(*model_flags, *flags))

    def make_program_of_two(micro_batch: int, *flags: str) -> Program:
        return partial(
            train_ours,
            dtype,
            threads=max(1, threads // 2),
            processes=2,
            micro_batch=micro_batch,
            extra=(*model_flags, *flags),
        )

    programs: dict[str, Program] = {}
    for name, python in pythons.items():
        programs[name] = partial(train_peer, name, python, dtype, threads=threads, extra=peer_flags)
    programs["ours"] = make_program()
    if args.also:
        programs[f"ours {args.also}"] = make_program(*args.also.split())
    if args.moe:
        # New weights use some experts far more than others, so that a rank waits for the other.
        programs["ours EP2"] = make_program_of_two(BATCH // 2, *EP2)
        programs["ours, even load"] = make_program(EVEN)
        programs["ours EP2, even load"] = make_program_of_two(BATCH // 2, *EP2, EVEN)
    if args.layouts:
        for name, flags in LAYOUTS.items():
            # Two replicas or stages have two micro-batches of half the size.
            micro_batch = BATCH // 2 if name in ("DP2", "PP2") else BATCH
            programs[f"ours {name}"] = make_program_of_two(micro_batch, *flags)
    return programs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument(
        "--steps", type=int, default=8, help=f"steps of every run; the first {SKIP} are not counted"
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often the programs take turns")
    parser.add_argument("--threads", type=int, help="2; 1 with --processor-time")
    parser.add_argument(
        "--layouts", action="store_true", help="also 2 processes with 1 thread each"
    )
    parser.add_argument("--moe", action="store_true", help="a model with experts, also at EP2")
    parser.add_argument(
        "--also", metavar="FLAGS", help='also measure ours with these flags, e.g. "--compile"'
    )
    parser.add_argument(
        "--megatron-core-python", metavar="PATH", help="Python of an environment with megatron-core"
    )
    parser.add_argument(
        "--context",
        metavar="LENGTH",
        type=int,
        help="CP2 against one process at this length, alone",
    )
    parser.add_argument(
        "--processor-time", action="store_true", help="of all processes instead of wall-clock time"
    )
    args = parser.parse_args()
    default_threads = 2
    args.measure = measure_wall_clock
    if args.processor_time:
        default_threads = 1
        args.measure = measure_processor_time
    args.threads = args.threads or default_threads

    if args.context:
        for dtype in args.dtypes:
            compare_context_parallelism(dtype, args)
        return
    work = count_flops_per_step()
    print(
        f"{work / 1e9:.0f} GFLOP per step of {BATCH * SEQ} tokens; {args.threads} threads; torch "
        f"{torch.__version__}"
    )
    for dtype in args.dtypes:
        torch_dtype = torch.float32 if dtype == "fp32" else torch.bfloat16
        ceiling = measure_gemm_ceiling(torch_dtype, args.threads)
        pythons = {"transformers": sys.executable}
        if args.megatron_core_python:
            pythons["megatron_core"] = args.megatron_core_python
        programs = make_programs(args, dtype, pythons)
        times: dict[str, list[float]] = {name: [] for name in programs}
        with ProgressBar(dtype, args.rounds * len(programs), "runs") as progress:
            for _ in range(args.rounds):
                for name, program in programs.items():
                    times[name] += args.measure(program, args.steps)
                    progress.add(1)
        best_peer = min(statistics.median(times[name]) for name in pythons)
        print(f"\n{dtype}: GEMM ceiling {ceiling:.0f} GFLOP/s{describe_unit(args)}")
        for name, values in times.items():
            median = statistics.median(values)
            speed = work / median / 1e6
            print(
                f"  {name:20s} {median:8.0f} ms/step  {speed:6.0f} GFLOP/s  "
                f"{best_peer / median:5.2f}x the best peer"
            )


if __name__ == "__main__":
    main()

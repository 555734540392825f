"""Training speed compared with peers in one run.

`pretrain_gpt.py` (the complete step: data, loss, clipping, optimizer, logging) against plain loops
of transformers (SDPA, fused AdamW) and megatron-core (local layers, fused AdamW) on the same model.
Contestants take turns; results are medians, GFLOP/s by one formula, the ratio to the best peer, and
the machine's GEMM ceiling.

    python benchmarks/training.py                    # fp32 and bf16 against transformers
    python benchmarks/training.py --megatron-core-python PATH
                                                     # also megatron-core, from its own environment
    python benchmarks/training.py --layouts          # also TP2, PP2, DP2 on 2 processes
                                                     # against 2 threads of one
    python benchmarks/training.py --moe              # 8 experts, top 2; also EP2 on 2 processes
    python benchmarks/training.py --context 4096     # only CP2, one sequence of this length
                                                     # on 2 processes
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
# Of --moe: two experts of this width cost as much as the dense MLP.
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

MOE = f"""
    --num-experts {EXPERTS} --moe-ffn-hidden-size {EXPERT_FFN} --moe-router-topk 2
    --moe-aux-loss-coeff 0.01 --moe-token-dispatcher-type alltoall
""".split()
# All experts receive the same number of tokens.
EVEN = "--moe-router-force-load-balancing"
EP2 = ["--expert-model-parallel-size", "2", *LAYOUTS["DP2"]]


def count_flops_per_step() -> float:
    """Return the model FLOPs of a step: 6 per matrix parameter and token, and half of the attention
    (causal).
    """
    head = HIDDEN // HEADS
    tokens = SEQ * BATCH

    # Parameters of all matrices. The embedding is a lookup, not a product.
    query_key_value = HIDDEN * head * (HEADS + 2 * GROUPS)
    output = HEADS * head * HIDDEN
    mlp = 3 * HIDDEN * FFN  # SwiGLU has three matrices.
    layer = query_key_value + output + mlp
    matrices = LAYERS * layer + HIDDEN * VOCAB

    # Forward pass 2 and backward pass 4 per parameter and token.
    matrix_flops = 6.0 * matrices * tokens
    # Scores and values: 12 without the causal mask, which leaves half of them.
    attention_flops = 6.0 * LAYERS * tokens * SEQ * HEADS * head
    return matrix_flops + attention_flops


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
    # The tokenizer adds one token to its vocabulary.
    flags = f"""
        --num-layers {LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size {FFN}
        --num-attention-heads {HEADS} --group-query-attention --num-query-groups {GROUPS}
        --seq-length {sequence} --max-position-embeddings {sequence}
        --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
        --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
        --micro-batch-size {micro_batch} --global-batch-size {batch} --train-iters {steps}
        --lr 1e-4 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
        --mock-data --tokenizer-type NullTokenizer --vocab-size {VOCAB - 1}
        --log-interval 1 --eval-iters 0 --eval-interval 1000000
    """.split()
    if dtype == "bf16":
        flags.append("--bf16")

    command = [sys.executable]
    if processes > 1:
        launcher = f"-m torch.distributed.run --standalone --nproc-per-node {processes}"
        command += launcher.split()
    command += ["pretrain_gpt.py", *flags, *extra]
    output = run(command, threads)
    milliseconds = re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", output)
    return [float(text) for text in milliseconds]


def train_peer(
    name: str,
    python: str,
    dtype: str,
    steps: int,
    threads: int,
    extra: Sequence[str] = (),
) -> list[float]:
    """Return the milliseconds of every step of a peer, which prints them one per line."""
    script = str(ROOT / f"benchmarks/peers/{name}_training.py")
    options = f"--dtype {dtype} --steps {steps} --threads {threads}"
    command = [python, script, *options.split(), *extra]
    output = run(command, threads)
    milliseconds = re.findall(r"^[\d.]+$", output, re.MULTILINE)
    return [float(text) for text in milliseconds]


def run(command: list[str], threads: int) -> str:
    """Return the output of a process."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    # It could bring this project's `megatron` into a peer.
    environment.pop("PYTHONPATH", None)
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    if result.returncode != 0:
        output = f"{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
        raise RuntimeError(f"{' '.join(command)} failed:\n{output}")
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
    seconds = (long_run - short_run) / (steps - SKIP)
    return [seconds * 1e3]


def take_turns(
    programs: dict[str, Program],
    args: argparse.Namespace,
    on_run: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Return the median milliseconds per step of each program over `--rounds` turns."""
    # Programs take turns: a slow phase of the machine affects all of them.
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(args.rounds):
        for name, program in programs.items():
            times[name] += args.measure(program, args.steps)
            on_run()

    # Unlike the mean, the median ignores steps that another program delayed.
    medians: dict[str, float] = {}
    for name, values in times.items():
        medians[name] = statistics.median(values)
    return medians


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
        # Both contestants use the same number of cores.
        programs[f"CP2 {comm_type}"] = partial(
            train,
            threads=max(1, threads // 2),
            processes=2,
            extra=("--context-parallel-size", "2", "--cp-comm-type", comm_type),
        )
    medians = take_turns(programs, args)
    alone = medians["one process"]
    print(f"\n{dtype}, one sequence of {sequence} tokens on {threads} threads{describe_unit(args)}")
    for name, median in medians.items():
        ratio = median / alone
        print(f"  {name:14s} {median:8.0f} ms/step  {ratio:5.2f}x the time of one process")


def describe_unit(args: argparse.Namespace) -> str:
    """Return a note about the unit for headers, which is empty for wall-clock time."""
    if args.processor_time:
        return "; processor time of all processes"
    return ""


def measure_gemm_ceiling(dtype: torch.dtype, threads: int) -> float:
    """Return the best GFLOP/s of this model's MLP shapes over several tries."""
    torch.set_num_threads(threads)
    tokens = SEQ * BATCH
    rows = 2 * FFN  # gate and up projection of SwiGLU in one matrix
    hidden = torch.randn(tokens, HIDDEN).to(dtype)
    weight = torch.randn(rows, HIDDEN).to(dtype)
    # The best of several, not the median: it is an upper limit.
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        torch.nn.functional.linear(hidden, weight)
        elapsed = time.perf_counter() - start
        best = min(best, elapsed)
    flops = 2.0 * tokens * HIDDEN * rows
    return flops / best / 1e9


def make_peers(args: argparse.Namespace, dtype: str, pythons: dict[str, str]) -> dict[str, Program]:
    """Return the contestants of other projects."""
    flags: list[str] = []
    if args.moe:
        flags = ["--experts", str(EXPERTS), "--ffn", str(EXPERT_FFN)]
    programs: dict[str, Program] = {}
    for name, python in pythons.items():
        programs[name] = partial(
            train_peer,
            name,
            python,
            dtype,
            threads=args.threads,
            extra=flags,
        )
    return programs


def make_programs(
    args: argparse.Namespace, dtype: str, pythons: dict[str, str]
) -> dict[str, Program]:
    """Return the contestants: peers (name -> their Python), then ours."""
    threads = args.threads
    model_flags: list[str] = []
    if args.moe:
        model_flags = MOE

    def make_program(*flags: str) -> Program:
        return partial(train_ours, dtype, threads=threads, extra=(*model_flags, *flags))

    def make_program_of_two(micro_batch: int, *flags: str) -> Program:
        # Two processes share the threads, so that all contestants use the same number of cores.
        return partial(
            train_ours,
            dtype,
            threads=max(1, threads // 2),
            processes=2,
            micro_batch=micro_batch,
            extra=(*model_flags, *flags),
        )

    programs = make_peers(args, dtype, pythons)
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
            micro_batch = BATCH
            if name in ("DP2", "PP2"):
                micro_batch = BATCH // 2
            programs[f"ours {name}"] = make_program_of_two(micro_batch, *flags)
    return programs


def compare_with_peers(dtype: str, args: argparse.Namespace) -> None:
    """Compare ours with all peers on the same model, and with the fastest GEMM of the machine."""
    torch_dtype = torch.float32
    if dtype == "bf16":
        torch_dtype = torch.bfloat16
    ceiling = measure_gemm_ceiling(torch_dtype, args.threads)

    pythons = {"transformers": sys.executable}
    if args.megatron_core_python:
        pythons["megatron_core"] = args.megatron_core_python
    programs = make_programs(args, dtype, pythons)
    with ProgressBar(dtype, args.rounds * len(programs), "runs") as progress:
        medians = take_turns(programs, args, lambda: progress.add(1))

    best_peer = min(medians[name] for name in pythons)
    work = count_flops_per_step()
    print(f"\n{dtype}: GEMM ceiling {ceiling:.0f} GFLOP/s{describe_unit(args)}")
    for name, median in medians.items():
        speed = work / median / 1e6
        ratio = best_peer / median
        print(
            f"  {name:20s} {median:8.0f} ms/step  {speed:6.0f} GFLOP/s  {ratio:5.2f}x the best peer"
        )


def parse_arguments() -> argparse.Namespace:
    """Return the flags of the command line, and how to measure a program as `measure`."""
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
        "--layouts",
        action="store_true",
        help="also 2 processes with 1 thread each",
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
        "--processor-time",
        action="store_true",
        help="of all processes instead of wall-clock time",
    )
    args = parser.parse_args()
    default_threads = 2
    args.measure = measure_wall_clock
    if args.processor_time:
        # A second thread spins while it waits, and would count as busy.
        default_threads = 1
        args.measure = measure_processor_time
    args.threads = args.threads or default_threads
    return args


def main() -> None:
    args = parse_arguments()
    if args.context:
        for dtype in args.dtypes:
            compare_context_parallelism(dtype, args)
        return
    gigaflops = count_flops_per_step() / 1e9
    print(
        f"{gigaflops:.0f} GFLOP per step of {BATCH * SEQ} tokens; {args.threads} threads; torch "
        f"{torch.__version__}"
    )
    for dtype in args.dtypes:
        compare_with_peers(dtype, args)


if __name__ == "__main__":
    main()

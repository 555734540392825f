"""GPU benchmarks: doubtful kernels, tests, training speed, asynchronous saves, experts.

    python benchmarks/gpu.py                          # everything, on one GPU with 80 GB
    python benchmarks/gpu.py training --models 1b
    python benchmarks/gpu.py --smoke                  # a tiny model on the CPU, to try it out
    python benchmarks/gpu.py --call 1 --output FILE   # 1 to 4: within 30 minutes

MFU is relative to the matmul ceiling measured in the same run and to the data sheet. Every result
is printed, and with --output stored, as soon as it is known; after a measurement that fails, the
next one runs, and the program ends with status 1. With --call and --time-limit, it ends in time:
each part, and each measurement in it, is stopped at a limit of its own, so that one that takes too
long does not keep others from running. What did not run is reported. Add the results to docs/gpu.md
with date, GPU, torch version and commit.
"""

import argparse
import faulthandler
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from megatron.core.parallel_state import Axis  # noqa: E402
from megatron.core.progress import ProgressBar  # noqa: E402
from megatron.core.tensor_parallel import TensorParallelRng, linear_cross_entropy  # noqa: E402
from megatron.core.transformer.attention.core import CoreAttention  # noqa: E402
from megatron.core.transformer.grouped_linear import (  # noqa: E402
    compute_grouped_product,
    has_grouped_kernel,
)
from megatron.core.transformer.placement import Placement  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.planning.run_plan import RunPlan, plan_run  # noqa: E402
from megatron.training.config.parsing import parse_args  # noqa: E402
from megatron.training.reporting.measurements import compute_flops_per_token  # noqa: E402
from pretrain_gpt import model_provider  # noqa: E402

PEER = "benchmarks/peers/transformers_training.py"


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama-like model and of its batch, named like the flags of the peer."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    vocab: int
    seq: int
    batch: int

    def list_flags(self, iterations: int) -> list[str]:
        """Return the flags of `pretrain_gpt.py`."""
        return f"""
            --num-layers {self.layers}
            --hidden-size {self.hidden}
            --ffn-hidden-size {self.ffn}
            --num-attention-heads {self.heads}
            --group-query-attention
            --num-query-groups {self.groups}
            --seq-length {self.seq}
            --max-position-embeddings {self.seq}
            --position-embedding-type rope
            --normalization RMSNorm
            --swiglu
            --disable-bias-linear
            --untie-embeddings-and-output-weights
            --hidden-dropout 0
            --attention-dropout 0
            --micro-batch-size {self.batch}
            --global-batch-size {self.batch}
            --train-iters {iterations}
            --lr 1e-4
            --weight-decay 0.1
            --adam-beta2 0.95
            --clip-grad 1.0
            --mock-data
            --tokenizer-type NullTokenizer
            --vocab-size {self.vocab - 1}
            --bf16
            --eval-iters 0
            --log-interval {max(1, iterations // 4)}
            --log-memory-interval {iterations}
        """.split()

    def build_command(self, iterations: int, device: str) -> list[str]:
        """Return the arguments of Python that train with `pretrain_gpt.py`."""
        flags = self.list_flags(iterations)
        return ["pretrain_gpt.py", *flags, "--device", device]

    def build_peer_command(self, iterations: int, device: str) -> list[str]:
        """Return the arguments of Python that train the same model with the peer."""
        sizes = []
        for name, value in vars(self).items():
            sizes += [f"--{name}", str(value)]
        return [
            PEER,
            *sizes,
            "--dtype",
            "bf16",
            "--steps",
            str(iterations),
            "--device",
            device,
        ]


MODELS = {
    # 1.26B parameters
    "1b": Shape(
        layers=22,
        hidden=2048,
        ffn=5632,
        heads=16,
        groups=16,
        vocab=32000,
        seq=4096,
        batch=4,
    ),
    # 3.0B parameters
    "3b": Shape(
        layers=28,
        hidden=3072,
        ffn=8192,
        heads=24,
        groups=8,
        vocab=32000,
        seq=4096,
        batch=2,
    ),
}
SMALL = {
    "small": Shape(
        layers=2,
        hidden=128,
        ffn=384,
        heads=4,
        groups=2,
        vocab=1000,
        seq=128,
        batch=2,
    ),
}


_TE = ["--transformer-impl", "transformer_engine"]
_FP8 = [*_TE, "--fp8-format", "hybrid", "--use-distributed-optimizer"]
_FUSED = ["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "te"]
_TORCH_KERNELS = ["--no-triton-kernels", "--no-gradient-accumulation-fusion"]
# Additional flags of `pretrain_gpt.py`.
VARIANTS = {
    "eager": [],
    "eager, torch kernels": _TORCH_KERNELS,
    "eager, no SwiGLU kernel": ["--no-bias-swiglu-fusion"],
    "eager, no rotation kernel": ["--no-rope-fusion"],
    "eager, no norm kernel": ["--no-bias-dropout-fusion"],
    "compile": ["--compile"],
    "apex": ["--optimizer-impl", "apex", "--norm-impl", "apex"],
    "te": _TE,
    "te torch kernels": [*_TE, *_TORCH_KERNELS],
    "te fused": [*_TE, *_FUSED],
    "fp8": _FP8,
    "fp8 weights": [*_FP8, "--fp8-param-gather"],
}
# Optional modules that variants import, by the first word of the variant.
NEEDS = {
    "apex": "amp_C",
    "te": "transformer_engine_torch",
    "fp8": "transformer_engine_torch",
}
GRACE = 20.0  # seconds from the time limit to the end of the program
# Largest share of the remaining time that one of several measurements may take.
MEASUREMENT_SHARE = 0.6
DATA_SHEET = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # dense bf16 FLOP/s


class TimeLimitError(Exception):
    """A time limit was reached."""


@dataclass(frozen=True)
class TimeLimit:
    """Length of a limit in seconds, and its end on the monotonic clock."""

    seconds: float
    end: float

    @property
    def remaining(self) -> float:
        """Return the seconds until the end; negative after it."""
        return self.end - time.monotonic()


class Report:
    """Lines of results, each printed and stored at once, and optional time limits.

    Limits are nested: of the program, of a part, of a measurement. At the first of them, a signal
    raises TimeLimitError in the measurement that is running.
    """

    def __init__(self, output: Path | None, seconds: float | None = None) -> None:
        self.output = output
        self.num_failures = 0
        self._limits: list[TimeLimit] = []  # the innermost one last
        if seconds is not None:
            self._limits.append(TimeLimit(seconds, time.monotonic() + seconds))
            signal.signal(signal.SIGALRM, self._stop)
            self._set_timer()
            # Ends the program while it waits for the device, which signals do not interrupt.
            faulthandler.dump_traceback_later(seconds + GRACE, exit=True)

    def _set_timer(self) -> None:
        """Let the signal arrive at the next limit, unless that is over, see `check_time`."""
        remaining = min(limit.remaining for limit in self._limits)
        signal.setitimer(signal.ITIMER_REAL, max(0.0, remaining))

    def _stop(self, number: int, frame: FrameType | None) -> None:
        reached = min(self._limits, key=lambda limit: limit.end)
        raise TimeLimitError(f"stopped by the time limit of {reached.seconds:.0f} s")

    def check_time(self) -> None:
        """Raise an error if a time limit was reached."""
        for limit in self._limits:
            if limit.remaining <= 0:
                raise TimeLimitError(
                    f"not run: the time limit of {limit.seconds:.0f} s was reached"
                )

    @contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        """Stop the processes of this block after `seconds`, if the program has a time limit."""
        if not self._limits:
            yield
            return
        self._limits.append(TimeLimit(seconds, time.monotonic() + seconds))
        self._set_timer()
        try:
            yield
        finally:
            # The signal may arrive here, too.
            try:
                signal.setitimer(signal.ITIMER_REAL, 0)
            finally:
                self._limits.pop()
                self._set_timer()

    def add(self, line: str) -> None:
        """Print one line, and append it to the output file."""
        print(line, flush=True)
        if self.output is not None:
            with self.output.open("a") as file:
                file.write(f"{line}\n")

    @contextmanager
    def measuring(self, subject: str, share: float = MEASUREMENT_SHARE) -> Iterator[None]:
        """Report an error in this block as the result of `subject`, and go on.

        The block gets at most `share` of the time that is left.
        """
        remaining = min((limit.remaining for limit in self._limits), default=0.0)
        try:
            with self.limit(share * remaining):
                yield
        except TimeLimitError as error:
            self.num_failures += 1
            self.add(f"  {subject}: {error}")
        except Exception as error:  # of any kind: the other measurements do not depend on it
            self.num_failures += 1
            traceback.print_exc()
            lines = str(error).strip().splitlines() or [type(error).__name__]
            self.add(f"  {subject}: FAILED: {lines[-1]}")


def exit_on_termination() -> None:
    """Let SIGTERM end the program like an error, which stops its child processes."""

    def stop(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, stop)


def list_available_variants() -> list[str]:
    """Return the variants whose optional modules are installed."""
    variants = []
    for name in VARIANTS:
        first_word = name.split()[0]
        module = NEEDS.get(first_word)
        if module is None or importlib.util.find_spec(module) is not None:
            variants.append(name)
    return variants


# Programs that are measured, and their output


def run(report: Report, command: list[str], environment: dict[str, str] | None = None) -> str:
    """Run a Python program until the time limit of `report`, and return its output."""
    lines: list[str] = []
    # The first argument is the program; the last ones distinguish its runs.
    label = " ".join(command[:1] + command[-4:])
    with ProgressBar(label):
        status, errors = follow(report, command, lines.append, environment)
    output = "".join(lines)
    if status != 0:
        whole_command = " ".join(command)
        text = f"{whole_command} failed:\n{output[-2000:]}\n{errors[-4000:]}"
        # The last line is reported as the result.
        raise RuntimeError(f"{text.rstrip()} (exit status {status})")
    return output


def follow(
    report: Report,
    command: list[str],
    use_line: Callable[[str], object],
    environment: dict[str, str] | None = None,
) -> tuple[int, str]:
    """Run a Python program, pass its lines to `use_line`, and return its status and errors.

    At the time limit, it is killed with all processes that it has started.
    """
    report.check_time()
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        assert process.stdout is not None
        # Stop the process on any error, also on the time limit, Ctrl-C or SIGTERM.
        try:
            for line in process.stdout:
                use_line(line)
            status = process.wait()
        except BaseException:
            with suppress(ProcessLookupError):  # it may have ended just now
                os.killpg(process.pid, signal.SIGKILL)
            raise

        errors.seek(0)
        return status, errors.read()


def read_iteration_times(output: str) -> list[float]:
    """Return ms per iteration for each logged interval of `pretrain_gpt.py` except the first."""
    found = re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", output)
    if len(found) < 2:
        raise RuntimeError(f"the log has {len(found)} lines with iteration times, not 2 or more")
    # The first interval includes compilation.
    return [float(value) for value in found[1:]]


def read_step_times(output: str) -> list[float]:
    """Return ms of every step of the peer."""
    lines = re.findall(r"^[\d.]+$", output, re.MULTILINE)
    return [float(line) for line in lines]


def list_profile_flags(first: int, end: int, directory: Path) -> list[str]:
    """Return the flags that profile iterations `first` to `end` - 1."""
    return [
        "--profile",
        "--profile-step-start",
        str(first),
        "--profile-step-end",
        str(end),
        "--profile-dir",
        str(directory),
    ]


def plan_training(shape: Shape, iterations: int) -> RunPlan:
    """Plan the memory and checkpoints of a run on one GPU."""
    config = parse_args(shape.list_flags(iterations), 1)
    config.set_vocab_size(shape.vocab)
    return plan_run(config, 1, model_provider)


# Measurements in this process


def measure_matmul_ceiling(device: str, size: int) -> float:
    """Return the best FLOP/s of a square bf16 product."""
    a = torch.randn(size, size, device=device).bfloat16()
    b = torch.randn(size, size, device=device).bfloat16()
    seconds = measure_best_time(lambda: a @ b, device)
    return 2.0 * size**3 / seconds


def measure_best_time(function: Callable[[], object], device: str) -> float:
    """Return the minimum seconds of 20 calls."""
    synchronize: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    best = float("inf")
    for _ in range(20):
        # Kernels run asynchronously: without waiting for them, only their launches are measured.
        synchronize()
        start = time.perf_counter()
        function()
        synchronize()
        seconds = time.perf_counter() - start
        best = min(best, seconds)
    return best


def measure_peak_memory(function: Callable[[], object], device: str) -> int:
    """Return the bytes of tensors on the device that a call needs at most; on a CPU 0."""
    if device != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return torch.cuda.max_memory_allocated() - before


def count_launches(function: Callable[[], object], device: str) -> Counter[str]:
    """Count launches of each kernel (on a CPU: of each operator)."""
    function()  # warm up: compilation and the selection of kernels launch others
    with torch.profiler.profile() as trace:
        function()
    device_type = torch.autograd.DeviceType.CPU
    if device == "cuda":
        device_type = torch.autograd.DeviceType.CUDA
    launches = Counter[str]()
    for event in trace.events():
        if event.device_type == device_type:
            launches[event.name] += 1
    return launches


# Part "tests"

# Files of tests/gpu in the order of their value; the others follow.
TEST_FILES = ("kernels", "training", "staging", "waits")


def run_test_files(models: dict[str, Shape], options: argparse.Namespace, report: Report) -> None:
    """Run `pytest -m gpu` file by file, and report tests that fail or are skipped."""
    report.add("tests:")
    names = [f"test_device_{name}.py" for name in TEST_FILES]
    directory = ROOT / "tests" / "gpu"
    for path in sorted(directory.glob("test_*.py")):
        if path.name not in names:
            names.append(path.name)
    for name in names:
        with report.measuring(name):
            run_tests(name, options.smoke, report)


def run_tests(name: str, only_collect: bool, report: Report) -> None:
    """Run the tests of one file, and report failures at once and their reasons in the end."""
    command = ["-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider"]
    if only_collect:
        command += ["-q", "--collect-only"]
    else:
        command += ["-v", "-rfEs"]
    command.append(f"tests/gpu/{name}")

    # A failure is reported at once: the time limit may end the program before the summary.
    last = ""  # line of output that is not empty

    def report_line(line: str) -> None:
        nonlocal last
        line = line.strip().strip("= ")
        last = line or last
        is_failure = re.search(r" (FAILED|ERROR) +\[", line)
        if is_failure or line.startswith(("FAILED", "ERROR", "SKIPPED")):
            report.add(f"  {line}")

    try:
        status, errors = follow(report, command, report_line)
    except TimeLimitError as error:
        if not last:
            raise TimeLimitError(error) from error
        raise TimeLimitError(f"{error}; last line: {last}") from error
    if status != 0:
        raise RuntimeError(f"{errors}\n{last}")
    report.add(f"  {name}: {last}")


# Part "experts"


def measure_experts(models: dict[str, Shape], options: argparse.Namespace, report: Report) -> None:
    """Measure the products of 8 experts with one grouped kernel and with a loop."""
    num_experts = 8
    tokens = 16384
    hidden = 4096
    ffn = 14336
    if options.is_small:
        tokens = 64
        hidden = 32
        ffn = 48

    # Inputs: the same number of tokens for each expert, sorted by expert
    device = options.device
    x = torch.randn(tokens, hidden, device=device).bfloat16()
    matrices = torch.randn(num_experts, hidden, ffn, device=device).bfloat16()
    counts = torch.full((num_experts,), tokens // num_experts, device=device)
    parts = counts.tolist()

    def multiply_grouped() -> torch.Tensor:
        return compute_grouped_product(x, matrices, counts)

    def multiply_in_loop() -> torch.Tensor:
        pairs = zip(x.split(parts), matrices, strict=True)
        return torch.cat([rows @ matrix for rows, matrix in pairs])

    report.add(
        f"experts: {tokens} tokens, {num_experts} experts {hidden} x {ffn}, bf16, kernel: "
        f"{has_grouped_kernel(x)}"
    )

    # Speed
    work = 2.0 * tokens * hidden * ffn / 1e12  # TFLOP
    functions = {
        "grouped": multiply_grouped,
        "loop": multiply_in_loop,
    }
    for name, multiply in functions.items():
        with report.measuring(name):
            report.check_time()
            seconds = measure_best_time(multiply, device)
            report.add(f"  {name:8s} {1e3 * seconds:8.3f} ms {work / seconds:8.3g} TFLOP/s")

    # The two may add products in different orders and round differently.
    with report.measuring("equal results of both"):
        torch.testing.assert_close(multiply_grouped(), multiply_in_loop(), rtol=2e-2, atol=2e-1)


# Part "training"


@dataclass(frozen=True)
class PeakSpeed:
    """FLOP/s of the device: of a matrix product here, if it could be measured, and of the data
    sheet, if it is known.
    """

    matmul: float | None
    data_sheet: float | None


def measure_peak_speed(models: dict[str, Shape], device: str, report: Report) -> PeakSpeed:
    """Measure a product that is as wide as the largest model, and look up the data sheet."""
    widest = max(shape.hidden for shape in models.values())
    # The usual width of an MLP, limited to bound time and memory.
    size = min(8192, 4 * widest)
    matmul: float | None = None
    with report.measuring("matmul ceiling"):
        report.check_time()
        matmul = measure_matmul_ceiling(device, size)
        report.add(f"training: matmul ceiling {matmul / 1e12:.3g} TFLOP/s")

    card = "CPU"
    if device == "cuda":
        card = torch.cuda.get_device_name()
        # The processes that are measured need the memory.
        torch.cuda.empty_cache()
    for name, flops in DATA_SHEET.items():
        if name in card:
            return PeakSpeed(matmul, flops)
    return PeakSpeed(matmul, None)


def measure_training(models: dict[str, Shape], options: argparse.Namespace, report: Report) -> None:
    """Measure speed and memory of each model, ours and the peer's, eager and compiled."""
    peak = measure_peak_speed(models, options.device, report)
    # The peer is either eager or compiled.
    peer_variants = set()
    for variant in options.variants:
        peer_variants.add("eager" if variant == "eager" else "compile")

    for name, shape in models.items():
        for variant in options.variants:
            with report.measuring(f"{name} ours {variant}"):
                measure_our_training(name, shape, variant, peak, options, report)
        for variant in sorted(peer_variants):
            with report.measuring(f"{name} transformers {variant}"):
                measure_peer_training(name, shape, variant, peak, options, report)


def measure_our_training(
    name: str,
    shape: Shape,
    variant: str,
    peak: PeakSpeed,
    options: argparse.Namespace,
    report: Report,
) -> None:
    """Report speed and peak memory of `pretrain_gpt.py`."""
    command = shape.build_command(options.iterations, options.device)
    output = run(report, [*command, *VARIANTS[variant]])
    times = read_iteration_times(output)
    report.add(describe_speed(name, "ours", variant, shape, times, peak))

    memory = re.search(r"max (?:allocated|resident) ([\d.]+) GB", output)
    assert memory is not None, "the log has no line with the peak memory"
    plan = plan_training(shape, options.iterations)
    planned = plan.stages[0].memory.total / 1e9
    report.add(f"  {name} peak memory {memory[1]} GB, of tensors as planned {planned:.3f} GB")


def measure_peer_training(
    name: str,
    shape: Shape,
    variant: str,
    peak: PeakSpeed,
    options: argparse.Namespace,
    report: Report,
) -> None:
    """Report the speed of the peer."""
    command = shape.build_peer_command(options.iterations, options.device)
    if variant == "compile":
        command.append("--compile")
    output = run(report, command)
    times = read_step_times(output)
    # The first quarter includes compilation, like the first logged interval of ours.
    warm = times[options.iterations // 4 :]
    report.add(describe_speed(name, "transformers", variant, shape, warm, peak))


def describe_speed(
    name: str,
    who: str,
    variant: str,
    shape: Shape,
    times: list[float],
    peak: PeakSpeed,
) -> str:
    """Return the line with speed and MFU for `times` in ms per step."""
    seconds = statistics.median(times) / 1e3
    tokens = shape.seq * shape.batch
    # The model does not depend on the number of iterations.
    config = parse_args(shape.list_flags(iterations=1), 1)
    flops_per_token = compute_flops_per_token(config.model, shape.seq, shape.vocab)
    work = flops_per_token * tokens
    speed = work / seconds
    line = (
        f"  {name} {who:12s} {variant:8s} {1e3 * seconds:8.1f} ms/step "
        f"{tokens / seconds:9.0f} tokens/s {speed / 1e12:8.3g} TFLOP/s"
    )
    if peak.matmul is not None:
        line += f"  MFU {100 * speed / peak.matmul:5.1f} %"
    if peak.data_sheet is not None:
        line += f", {100 * speed / peak.data_sheet:.1f} % of the data sheet"
    return line


# Part "checkpoint"

SAVED_ITERATIONS = 40
WARM_UP_STEPS = 10  # of the peer


def measure_checkpoint(
    models: dict[str, Shape], options: argparse.Namespace, report: Report
) -> None:
    """Measure iterations with asynchronous saves and without.

    The results are the blocking time and the total cost. The peer is transformers with
    `async_save` of torch.distributed.checkpoint and as many bytes.
    """
    name, shape = next(iter(models.items()))
    report.add(f"checkpoint: {name}")
    with open_checkpoint_directory(options.disk) as directory:
        # One checkpoint is removed after the next is written.
        needed = 2 * plan_training(shape, SAVED_ITERATIONS).checkpoint_bytes
        free = shutil.disk_usage(directory).free
        if free < needed:
            report.add(
                f"  not run: two checkpoints take {needed / 1e9:.1f} GB, {directory} has "
                f"{free / 1e9:.1f} GB free; name another directory with --disk"
            )
            return

        with report.measuring("ours"):
            measure_our_saves(shape, directory, options.device, report)
        clear(directory)
        measure_peer_saves(shape, directory, options.device, report)


@contextmanager
def open_checkpoint_directory(name: str | None) -> Iterator[Path]:
    """Return the directory of that name, or a temporary one; its files are removed at the end."""
    if name is None:
        with tempfile.TemporaryDirectory(prefix="gpu_benchmark_") as temporary:
            yield Path(temporary)
        return
    directory = Path(name)
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise ValueError(f"--disk {name}: not empty, and its files would be lost; name another one")
    try:
        yield directory
    finally:
        clear(directory)


def measure_our_saves(shape: Shape, directory: Path, device: str, report: Report) -> None:
    """Report the cost of asynchronous saves of `pretrain_gpt.py`."""
    flags = shape.list_flags(SAVED_ITERATIONS)
    command = ["benchmarks/save_cost.py", *flags, "--device", device, "--save", str(directory)]
    result = json.loads(run(report, command).splitlines()[-1])
    report.add(
        f"  ours: iteration {result['iteration_ms']:.1f} ms without saves, "
        f"{result['iteration_with_saves_ms']:.1f} ms with them"
    )
    report.add(
        f"  ours: {result['num_saves']} saves of {result['gigabytes']:.3f} GB at "
        f"{result['gigabytes_per_second']:.2f} GB/s"
    )
    report.add(
        f"  ours: cost per save: {result['cost_ms']:.1f} ms with a standard error of "
        f"{result['cost_error_ms']:.1f} ms, {result['logged_ms']:.1f} ms by the log, of which {result['waited_ms']:.1f} ms waiting for the end of a save"
    )


def measure_peer_saves(shape: Shape, directory: Path, device: str, report: Report) -> None:
    """Report the cost of asynchronous saves of the peer with both stagers of DCP."""
    command = shape.build_peer_command(SAVED_ITERATIONS, device)
    plain: float | None = None
    with report.measuring("transformers without saves"):
        output = run(report, command)
        times = read_step_times(output)
        plain = statistics.mean(times[WARM_UP_STEPS:])
        report.add(f"  transformers: iteration {plain:.1f} ms without saves")
    for who, flags in {"DCP": [], "DCP, its own stager": ["--stager"]}.items():
        if flags and torch.__version__ < "2.13":
            report.add(
                f"  {who}: not run, fails with torch before 2.13 (this is {torch.__version__})"
            )
            continue
        with report.measuring(who):
            output = run(report, [*command, "--save", str(directory), *flags])
            found = re.findall(r"^blocking ([\d.]+) ms", output, re.MULTILINE)
            blocking = [float(value) for value in found]
            times = read_step_times(output)
            with_saves = statistics.mean(times[WARM_UP_STEPS:])
            report_saving(report, who, plain, with_saves, blocking)
        clear(directory)


def clear(directory: Path) -> None:
    """Remove everything in a directory, also the files of a measurement that failed."""
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def report_saving(
    report: Report, who: str, plain: float | None, with_saves: float, blocking: list[float]
) -> None:
    """Report the ms per iteration with saves, and without them if that could be measured."""
    blocked = statistics.median(blocking)
    if plain is None:
        report.add(f"  {who}: iteration {with_saves:.1f} ms with saves")
        report.add(f"  {who}: blocking per save: {blocked:.1f} ms")
        return
    cost = 100 * (with_saves / plain - 1)
    report.add(
        f"  {who}: iteration {plain:.1f} ms without saves, {with_saves:.1f} ms with them "
        f"({cost:+.1f} %)"
    )
    share = 100 * blocked / plain
    report.add(f"  {who}: blocking per save: {blocked:.1f} ms, {share:.1f} % of an iteration")


# Part "profile"


def profile_step(models: dict[str, Shape], options: argparse.Namespace, report: Report) -> None:
    """List the operations of one step that take the most time."""
    name, shape = next(iter(models.items()))
    report.add(f"profile: {name}, one step")
    with report.measuring(name, share=1.0), tempfile.TemporaryDirectory() as directory:
        command = shape.build_command(8, options.device)
        command += list_profile_flags(6, 7, Path(directory))
        run(report, command)
        # Rows are sorted by time.
        (table,) = Path(directory).glob("*.txt")
        rows = table.read_text().splitlines()
        for row in rows[:20]:
            report.add(f"  {row}")


# Part "suspicions"

NO_KERNELS = "kernels not known: the profiler reports none (CUPTI is missing)"


def check_suspicions(models: dict[str, Shape], options: argparse.Namespace, report: Report) -> None:
    """Check doubts from reading the code.

    They concern selected kernels, waits for the device, and selected devices.
    """
    report.add("suspicions:")
    name, shape = next(iter(models.items()))
    checks: dict[str, Callable[[], Iterator[str]]] = {
        "windowed attention": lambda: check_windowed_attention(options),
        "loss of a large vocabulary": lambda: check_large_vocabulary(options),
        "waits of a save": lambda: count_waits_of_save(name, shape, options, report),
        "devices of a node": lambda: check_devices_of_node(options, report),
    }
    for subject, check in checks.items():
        with report.measuring(subject):
            report.check_time()
            for line in check():
                report.add(f"  {line}")


def check_windowed_attention(options: argparse.Namespace) -> Iterator[str]:
    """Check that grouped windowed attention does not fall back to products that store all
    scores.
    """
    heads = 32
    length = 4096
    if options.is_small:
        heads = 4
        length = 64
    head_dim = 128
    groups = heads // 4
    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads * head_dim,
        num_attention_heads=heads,
        group_query_attention=True,
        num_query_groups=groups,
        attention_dropout=0.0,
        window_size=(length // 4, 0),
        bf16=True,
    )
    placement = Placement(Axis(), TensorParallelRng(0, 0))
    core = CoreAttention(config, placement, window=config.window_size)

    # [s, b, groups, heads / groups, head_dim]; keys and values have one head per group.
    query_shape = (length, 1, groups, 4, head_dim)
    key_shape = (length, 1, groups, 1, head_dim)
    inputs = []
    for shape in (query_shape, key_shape, key_shape):
        inputs.append(torch.randn(shape, device=options.device).bfloat16())

    peak = measure_peak_memory(lambda: core(*inputs, None), options.device)
    kernels = count_launches(lambda: core(*inputs, None), options.device)

    scores = heads * length**2 * 2  # bytes in bf16
    names = [name[:60] for name, _ in kernels.most_common(4)]
    yield (
        f"windowed attention: {peak / 1e6:.0f} MB at most (all scores: {scores / 1e6:.0f} MB); "
        f"{', '.join(names) or NO_KERNELS}"
    )


def check_large_vocabulary(options: argparse.Namespace) -> Iterator[str]:
    """Count kernels of the fused loss: chunk sizes for a CPU would need hundreds."""
    tokens = 4096
    hidden = 4096
    vocab = 128_000
    if options.is_small:
        tokens = 64
        hidden = 32
        vocab = 1000

    device = options.device
    weight = torch.randn(vocab, hidden, device=device).bfloat16()
    weight.requires_grad_()
    states = torch.randn(tokens, 1, hidden, device=device).bfloat16()  # [s, b, hidden]
    states.requires_grad_()
    labels = torch.zeros(tokens, 1, dtype=torch.long, device=device)

    def step() -> None:
        losses = linear_cross_entropy(states, weight, labels, vocab_size=vocab, tp=Axis())
        losses.mean().backward()

    count = count_launches(step, device).total()
    kernels = f"{count} kernels" if count else NO_KERNELS
    seconds = measure_best_time(step, device)
    yield (
        f"loss over {vocab} words, {tokens} tokens: {kernels}, "
        f"{1e3 * seconds:.2f} ms forward and backward"
    )


def count_waits_of_save(
    name: str, shape: Shape, options: argparse.Namespace, report: Report
) -> Iterator[str]:
    """Count calls that wait for the device, in two iterations during an asynchronous save and in
    two without.
    """
    command = shape.build_command(8, options.device)
    with tempfile.TemporaryDirectory(dir=options.disk) as directory:
        saving = ["--save", f"{directory}/s", "--save-interval", "4", "--async-save"]
        for label, flags in {"a save": saving, "none": []}.items():
            traces = Path(directory) / label.replace(" ", "_")
            # The trace of iterations 4 and 5 includes the save after iteration 4.
            profiling = list_profile_flags(4, 6, traces)
            run(report, [*command, *flags, *profiling])
            trace = next(traces.glob("*.json"))
            events = json.loads(trace.read_text())["traceEvents"]
            waits: object = dict(count_waits(events)) or "none"
            if options.device == "cuda" and not has_cuda_calls(events):
                waits = "not known: the profiler reports no calls of CUDA (CUPTI is missing)"
            yield f"{name}, two iterations with {label}: waits for the device: {waits}"


def count_waits(events: list[dict[str, Any]]) -> Counter[str]:
    """Count the calls in a trace that wait for the device, by name."""
    waits = Counter[str]()
    for event in events:
        if "Synchronize" in event.get("name", ""):
            waits[event["name"]] += 1
    return waits


def has_cuda_calls(events: list[dict[str, Any]]) -> bool:
    """Return whether a trace contains calls of the CUDA runtime, e.g. launches of kernels."""
    return any(event.get("cat") == "cuda_runtime" for event in events)


def check_devices_of_node(options: argparse.Namespace, report: Report) -> Iterator[str]:
    """Return the device of local rank 1 if it sees one device (`srun --gpus-per-task=1`)."""
    code = (
        "from megatron.training import initialize; "
        "from megatron.training.config.run_options import DistributedConfig; "
        f"print(initialize.choose_device(DistributedConfig(device={options.device!r})))"
    )
    # An existing search path is kept: it may contain torch.
    search_path = [str(ROOT)]
    if os.environ.get("PYTHONPATH"):
        search_path.append(os.environ["PYTHONPATH"])
    environment = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "0",
        "LOCAL_RANK": "1",
        "PYTHONPATH": os.pathsep.join(search_path),
    }
    output = run(report, ["-c", code], environment)
    yield f"local rank 1 that sees one device: {output.strip()}"
    if torch.cuda.device_count() < 2:
        yield "contexts of background threads on the first device: needs two GPUs, not run"
        return
    yield from count_contexts(options, report)


def count_contexts(options: argparse.Namespace, report: Report) -> Iterator[str]:
    """Count processes on each GPU while two ranks save in the background: one unless a thread
    opened another context.
    """
    query = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader"]
    most = Counter[str]()  # processes by GPU
    is_done = threading.Event()

    def count_processes() -> None:
        nonlocal most
        while not is_done.wait(0.5):
            result = subprocess.run(query, capture_output=True, text=True, check=True)
            # Each row is "GPU, process"; a process may be listed more than once.
            rows = set(result.stdout.splitlines())
            running = Counter[str]()
            for row in rows:
                if row:
                    gpu = row.split(",")[0]
                    running[gpu] += 1
            most |= running  # the maximum of each count

    counter = threading.Thread(target=count_processes)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with tempfile.TemporaryDirectory(dir=options.disk) as directory:
        saving = ["--save", directory, "--save-interval", "5", "--async-save"]
        flags = [*SMALL["small"].list_flags(200), *saving, "--global-batch-size", "4"]
        counter.start()
        try:
            run(report, [*launcher, "pretrain_gpt.py", *flags])
        finally:
            is_done.set()
            counter.join()
    yield (
        "processes on a GPU while two ranks train and save: at most "
        f"{max(most.values(), default=0)} (1 is right)"
    )


# The program

PARTS = {
    "suspicions": check_suspicions,
    "tests": run_test_files,
    "training": measure_training,
    "checkpoint": measure_checkpoint,
    "experts": measure_experts,
    "profile": profile_step,
}


@dataclass(frozen=True)
class Call:
    """Measurements of one command, the most valuable first.

    Each part has a limit in seconds, after which the next one begins; one that ends earlier leaves
    its time to the others.
    """

    parts: dict[str, float]
    models: tuple[str, ...] = ("1b",)
    variants: tuple[str, ...] = ("compile", "eager")

    @property
    def seconds(self) -> float:
        """Return the limit of the command."""
        return sum(self.parts.values())


# A GPU may be available for 30 minutes, of which its start and copies take some, and for at most 10
# minutes a command. The calls measure correctness, speed, the cost of saves, and larger models.
CALLS = {
    1: Call({"tests": 240, "suspicions": 110}),
    2: Call(
        {"training": 340, "profile": 80}, variants=("compile", "eager", "eager, torch kernels")
    ),
    3: Call({"checkpoint": 450}),
    4: Call({"training": 290, "experts": 40}, models=("3b",)),
}


def apply_call(options: argparse.Namespace) -> None:
    """Set the options that --call selects, unless they are given."""
    call = CALLS[options.call]
    options.parts = options.parts or list(call.parts)
    options.models = options.models or list(call.models)
    options.variants = options.variants or list(call.variants)
    options.time_limit = options.time_limit or call.seconds
    scale = options.time_limit / call.seconds
    for part, seconds in call.parts.items():
        options.part_seconds[part] = scale * seconds


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all"
    )
    parser.add_argument(
        "--call",
        type=int,
        choices=list(CALLS),
        help="measure one of four groups, which take 26 minutes in all",
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        metavar="SECONDS",
        help="stop after this time; default with --call: 330 to 450",
    )
    parser.add_argument("--models", nargs="+", choices=[*MODELS, *SMALL], help="default: 1b and 3b")
    parser.add_argument(
        "--variants", nargs="+", choices=list(VARIANTS), help="default: those that can run here"
    )
    parser.add_argument("--iterations", type=int, default=20, help="of every training run")
    parser.add_argument(
        "--disk", help="an empty directory for checkpoints; default: a temporary one"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="append every result to this file, too"
    )
    parser.add_argument("--smoke", action="store_true", help="run a tiny model on the CPU instead")
    return parser


def parse_options() -> argparse.Namespace:
    """Parse the command line, and complete it with defaults."""
    parser = build_parser()
    options = parser.parse_args()
    options.device = "cpu" if options.smoke else "cuda"
    options.part_seconds = {}  # limits of parts
    if options.smoke:
        options.iterations = 8
        options.variants = options.variants or ["eager"]
    if options.call is not None:
        apply_call(options)
    options.variants = options.variants or list_available_variants()

    for part in options.parts:
        if part not in PARTS:
            parser.error(f"{part}: the parts are {', '.join(PARTS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this PyTorch sees no CUDA device; --smoke tries the program without one")
    return options


def select_models(options: argparse.Namespace) -> dict[str, Shape]:
    """Return the models of --models by name; with --smoke, only the small one."""
    if options.smoke:
        return SMALL
    shapes = MODELS | SMALL
    names = options.models or list(MODELS)
    return {name: shapes[name] for name in names}


def describe_environment(device: str) -> str:
    """Return the first line of the results."""
    card = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    describe = ["git", "describe", "--always"]
    result = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True)
    commit = result.stdout.strip() or "unknown"
    date = time.strftime("%Y-%m-%d")
    return f"{date}, {card}, torch {torch.__version__}, commit {commit}"


def main() -> None:
    """Run the selected parts."""
    exit_on_termination()
    options = parse_options()
    models = select_models(options)
    # With the small model only, all parts use small tensors.
    options.is_small = models.keys() <= SMALL.keys()

    environment = describe_environment(options.device)
    report = Report(options.output, options.time_limit)
    report.add(environment)

    # A fresh checkout, as on a rented GPU, does not contain the compiled module.
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        with report.measuring("compilation of the dataset index builders"):
            run(report, ["setup.py", "build_ext", "--inplace"])

    end = time.monotonic()  # of the limit of a part
    for part in options.parts or PARTS:
        end += options.part_seconds.get(part, math.inf)
        with report.limit(end - time.monotonic()), report.measuring(part, share=1.0):
            report.check_time()
            PARTS[part](models, options, report)

    # The program ends before the time limit.
    faulthandler.cancel_dump_traceback_later()
    if report.num_failures:
        sys.exit(f"{report.num_failures} measurements failed")


if __name__ == "__main__":
    main()

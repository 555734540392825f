"""GPU benchmarks: doubtful kernels, tests, training speed, asynchronous saves, experts.

    python benchmarks/gpu.py                          # everything, on one GPU with 80 GB
    python benchmarks/gpu.py training --models 1b
    python benchmarks/gpu.py --smoke                  # the same program with a tiny model on the CPU
    python benchmarks/gpu.py --call 1 --output FILE   # 1 to 4: within 30 minutes of a lent GPU

MFU is relative to the matmul ceiling measured in the same run and to the data sheet. Every result
is printed, and with --output stored, as soon as it is known; after a measurement that fails, the
next one runs, and the program ends with status 1. With --call and --time-limit, it ends in time:
what is running is stopped, the rest is reported as not run. Add the results to docs/gpu.md with
date, GPU, torch version and commit.
"""

import argparse
import faulthandler
import importlib.util
import json
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

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from megatron.core.parallel_state import Axis  # noqa: E402
from megatron.core.progress import ProgressBar  # noqa: E402
from megatron.core.tensor_parallel import TensorParallelRng, linear_cross_entropy  # noqa: E402
from megatron.core.transformer.attention.core import CoreAttention  # noqa: E402
from megatron.core.transformer.grouped_linear import compute_grouped_product, has_grouped_kernel  # noqa: E402
from megatron.core.transformer.placement import Placement  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402
from megatron.training.config.parsing import parse_args  # noqa: E402
from megatron.training.planning.run_plan import plan_run  # noqa: E402
from megatron.training.reporting.measurements import compute_flops_per_token  # noqa: E402
from pretrain_gpt import model_provider  # noqa: E402


@dataclass(frozen=True)
class Shape:
    """A Llama-like model and its batch."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    vocab: int
    seq: int
    batch: int

    def ours(self, iterations: int) -> list[str]:
        return f"""--num-layers {self.layers} --hidden-size {self.hidden} --ffn-hidden-size {self.ffn}
            --num-attention-heads {self.heads} --group-query-attention --num-query-groups {self.groups}
            --seq-length {self.seq} --max-position-embeddings {self.seq} --position-embedding-type rope
            --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
            --hidden-dropout 0 --attention-dropout 0 --micro-batch-size {self.batch} --global-batch-size {self.batch}
            --train-iters {iterations} --lr 1e-4 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --mock-data
            --tokenizer-type NullTokenizer --vocab-size {self.vocab - 1} --bf16 --eval-iters 0
            --log-interval {max(1, iterations // 4)} --log-memory-interval {iterations}""".split()

    def peer(self, iterations: int) -> list[str]:
        sizes = " ".join(f"--{name} {value}" for name, value in vars(self).items())
        return f"{sizes} --dtype bf16 --steps {iterations}".split()


MODELS = {
    "1b": Shape(22, 2048, 5632, 16, 16, 32000, 4096, 4),  # 1.26B parameters
    "3b": Shape(28, 3072, 8192, 24, 8, 32000, 4096, 2),  # 3.0B
}
SMALL = {"small": Shape(2, 128, 384, 4, 2, 1000, 128, 2)}


_TE = ["--transformer-impl", "transformer_engine"]
_FP8 = [*_TE, "--fp8-format", "hybrid", "--use-distributed-optimizer"]
_FUSED = ["--apply-rope-fusion", "--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "te"]
VARIANTS = {
    "eager": [],
    "compile": ["--compile"],
    "apex": ["--optimizer-impl", "apex", "--norm-impl", "apex"],
    "te": _TE,
    "te fused": [*_TE, *_FUSED],
    "fp8": _FP8,
    "fp8 weights": [*_FP8, "--fp8-param-gather"],
}
NEEDS = {
    "apex": "amp_C",
    "te": "transformer_engine_torch",
    "fp8": "transformer_engine_torch",
}  # by the first word
PEER = ["benchmarks/peers/transformers_training.py"]
GRACE = 20.0  # seconds from the time limit to the end of the program
DATA_SHEET = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # dense bf16 FLOP/s


class TimeLimitError(Exception):
    """The time limit of the program was reached."""


class Report:
    """Lines of results, each printed and stored at once, until an optional time limit.

    At the limit, a signal raises TimeLimitError in the measurement that is running.
    """

    def __init__(self, output: Path | None, seconds: float | None = None) -> None:
        self.output = output
        self.num_failures = 0
        self._seconds = seconds
        self._begin = time.monotonic()
        if seconds is not None:
            signal.signal(signal.SIGALRM, self._stop)
            signal.setitimer(signal.ITIMER_REAL, seconds)
            # Ends the program while it waits for the device, which signals do not interrupt.
            faulthandler.dump_traceback_later(seconds + GRACE, exit=True)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        raise TimeLimitError(f"stopped by the time limit of {self._seconds:g} s")

    def check_time(self) -> None:
        """Raise an error if the time limit was reached."""
        if self._seconds is not None and time.monotonic() - self._begin >= self._seconds:
            raise TimeLimitError(f"not run: the time limit of {self._seconds:g} s was reached")

    def add(self, line: str) -> None:
        print(line, flush=True)
        if self.output is not None:
            with self.output.open("a") as file:
                file.write(f"{line}\n")

    @contextmanager
    def measuring(self, subject: str) -> Iterator[None]:
        """Report an error in this block as the result of `subject`, and go on."""
        try:
            yield
        except TimeLimitError as error:
            self.num_failures += 1
            self.add(f"  {subject}: {error}")
        except Exception as error:  # of any kind: the other measurements do not depend on it
            self.num_failures += 1
            traceback.print_exc()
            lines = str(error).strip().splitlines() or [type(error).__name__]
            self.add(f"  {subject}: FAILED: {lines[-1]}")


def available_variants() -> list[str]:
    needs = {name: NEEDS.get(name.split()[0], "torch") for name in VARIANTS}
    return [name for name, module in needs.items() if importlib.util.find_spec(module) is not None]


def run(report: Report, command: list[str], environment: dict[str, str] | None = None) -> str:
    """Run a Python program until the time limit of `report`, and return its output."""
    lines: list[str] = []
    with ProgressBar(" ".join(command[:1] + command[-4:])):
        status, errors = follow(report, command, lines.append, environment)
    output = "".join(lines)
    if status != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{output[-2000:]}\n{errors[-4000:]}")
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


def iteration_times(output: str) -> list[float]:
    """Return ms per iteration for each logged interval except the first, which includes
    compilation.
    """
    return [
        float(value) for value in re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", output)
    ][1:]


def matmul_ceiling(device: str, size: int) -> float:
    """Return the best FLOP/s of a square bf16 product."""
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return 2.0 * size**3 / best_time(lambda: a @ b, device)


def best_time(way: Callable[[], object], device: str) -> float:
    """Return the minimum seconds of 20 calls."""
    synchronize: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    best = float("inf")
    for _ in range(20):
        synchronize()
        start = time.perf_counter()
        way()
        synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def planned_checkpoint(shape: Shape, iterations: int) -> int:
    """Return the bytes of a checkpoint."""
    config = parse_args(shape.ours(iterations), 1)
    config.set_vocab_size(shape.vocab)
    return plan_run(config, 1, model_provider).checkpoint_bytes


def planned_memory(shape: Shape, iterations: int) -> float:
    config = parse_args(shape.ours(iterations), 1)
    config.set_vocab_size(shape.vocab)
    return plan_run(config, 1, model_provider).stages[0].memory.total / 1e9


# Files of tests/gpu in the order of their value; the others follow.
TEST_FILES = ("kernels", "training", "staging", "waits")


def tests(models: dict[str, Shape], options: argparse.Namespace, report: Report) -> None:
    """Run `pytest -m gpu` file by file, and report tests that fail or are skipped."""
    report.add("tests:")
    found = sorted(path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    first = [f"test_device_{name}.py" for name in TEST_FILES]
    for name in [*first, *[name for name in found if name not in first]]:
        with report.measuring(name):
            run_tests(name, options.smoke, report)


def run_tests(name: str, only_collect: bool, report: Report) -> None:
    """Run the tests of one file. Each failure is reported at once, the reasons in the end."""
    how = ["-q", "--collect-only"] if only_collect else ["-v", "-rfEs"]
    command = ["-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", *how]
    last = ""

    def report_line(line: str) -> None:
        nonlocal last
        line = line.strip().strip("= ")
        last = line or last
        is_failure = re.search(r" (FAILED|ERROR) +\[", line)
        if is_failure or line.startswith(("FAILED", "ERROR", "SKIPPED")):
            report.add(f"  {line}")

    try:
        status, errors = follow(report, [*command, f"tests/gpu/{name}"], report_line)
    except TimeLimitError as error:
        raise TimeLimitError(f"{error}; last line: {last}" if last else error) from error
    if status != 0:
        raise RuntimeError(f"{errors}\n{last}")
    report.add(f"  {name}: {last}")


def experts(models: dict[str, Shape], options: argparse.Namespace, report: Report) -> None:
    """Measure the products of 8 experts, forward and backward: one grouped kernel against a
    loop.
    """
    tokens, hidden, ffn = (64, 32, 48) if options.is_small else (16384, 4096, 14336)
    x = torch.randn(tokens, hidden, device=options.device).bfloat16()
    matrices = torch.randn(8, hidden, ffn, device=options.device).bfloat16()
    counts = torch.full((8,), tokens // 8, device=options.device)
    parts = counts.tolist()
    ways: dict[str, Callable[[], object]] = {
        "grouped": lambda: compute_grouped_product(x, matrices, counts),
        "loop": lambda: torch.cat(
            [rows @ matrix for rows, matrix in zip(x.split(parts), matrices, strict=True)]
        ),
    }
    report.add(
        f"experts: {tokens} tokens, 8 experts {hidden} x {ffn}, bf16, kernel: "
        f"{has_grouped_kernel(x)}"
    )
    work = 2.0 * tokens * hidden * ffn / 1e12
    for name, way in ways.items():
        with report.measuring(name):
            report.check_time()
            seconds = best_time(way, options.device)
            report.add(f"  {name:8s} {1e3 * seconds:8.3f} ms {work / seconds:8.3g} TFLOP/s")
    with report.measuring("equal results of both"):
        torch.testing.assert_close(ways["grouped"](), ways["loop"](), rtol=2e-2, atol=2e-1)


def training(models: dict[str, Shape], options: argparse.Namespace, report: Report) -> None:
    """Measure speed and memory of each model, ours and the peer's, eager and compiled."""
    widest = max(shape.hidden for shape in models.values())
    ceiling = matmul_ceiling(options.device, min(8192, 4 * widest))
    card = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    sheet = next((flops for name, flops in DATA_SHEET.items() if name in card), None)
    report.add(f"training: matmul ceiling {ceiling / 1e12:.3g} TFLOP/s")
    iterations = options.iterations
    device = ["--device", options.device]

    def report_speed(name: str, who: str, variant: str, times: list[float]) -> None:
        shape = models[name]
        config = parse_args(shape.ours(iterations), 1).model
        tokens = shape.seq * shape.batch
        work = compute_flops_per_token(config, shape.seq, shape.vocab) * tokens
        seconds = statistics.median(times) / 1e3
        speed = work / seconds
        line = (
            f"  {name} {who:12s} {variant:8s} {1e3 * seconds:8.1f} ms/step "
            f"{tokens / seconds:9.0f} tokens/s {speed / 1e12:8.3g} TFLOP/s  "
            f"MFU {100 * speed / ceiling:5.1f} %"
        )
        if sheet is not None:
            line += f", {100 * speed / sheet:.1f} % of the data sheet"
        report.add(line)

    for name, shape in models.items():
        for variant in options.variants:
            with report.measuring(f"{name} ours {variant}"):
                program = ["pretrain_gpt.py", *shape.ours(iterations), *device]
                output = run(report, [*program, *VARIANTS[variant]])
                report_speed(name, "ours", variant, iteration_times(output))
                memory = re.search(r"max (?:allocated|resident) ([\d.]+) GB", output)
                assert memory is not None, "the log has no line with the peak memory"
                planned = planned_memory(shape, iterations)
                report.add(
                    f"  {name} peak memory {memory[1]} GB, of tensors as planned {planned:.3f} GB"
                )
        # The peer is either eager or compiled.
        for variant in sorted({"eager" if v == "eager" else "compile" for v in options.variants}):
            with report.measuring(f"{name} transformers {variant}"):
                compiled = ["--compile"] if variant == "compile" else []
                peer = [*PEER, *shape.peer(iterations), *device, *compiled]
                report_speed(
                    name, "transformers", variant, step_times(run(report, peer))[iterations // 4 :]
                )


def checkpoint(models: dict[str, Shape], options: argparse.Namespace, report: Report) -> None:
    """Measure iterations with an asynchronous save every 10 against none: blocking time and total
    cost.

    The peer is transformers with `async_save` of torch.distributed.checkpoint and as many bytes.
    """
    name, shape = next(iter(models.items()))
    iterations = 40
    directory = Path(options.disk or tempfile.mkdtemp(prefix="gpu_benchmark_"))
    directory.mkdir(exist_ok=True)
    needed = 2 * planned_checkpoint(shape, iterations)  # one is removed after the next is written
    free = shutil.disk_usage(directory).free
    report.add(f"checkpoint: {name}, every 10 of {iterations} iterations")
    if free < needed:
        report.add(
            f"  not run: two checkpoints take {needed / 1e9:.1f} GB, {directory} has "
            f"{free / 1e9:.1f} GB free; name another directory with --disk"
        )
        return

    device = ["--device", options.device]
    with report.measuring("ours"):
        program = ["pretrain_gpt.py", *shape.ours(iterations), *device]
        plain = statistics.mean(iteration_times(run(report, program)))
        report.add(f"  ours: iteration {plain:.1f} ms without saves")
        saving = ["--save", str(directory), "--save-interval", "10", "--async-save"]
        began = time.perf_counter()
        output = run(report, [*program, *saving, "--keep-last-n", "1"])
        whole = time.perf_counter() - began
        saves = re.findall(
            r"> saved .* \(training blocked ([\d.]+) ms\): ([\d.]+) (\w?B) at", output
        )
        blocking = [float(milliseconds) for milliseconds, _, _ in saves]
        report.add(f"  ours: {len(saves)} saves of {' '.join(saves[0][1:])} in {whole:.0f} s")
        # Asynchronous saves are part of the logged intervals.
        report_saving(report, "ours", plain, statistics.mean(iteration_times(output)), blocking)
    empty(directory)

    peer = [*PEER, *shape.peer(iterations), *device]
    alone: float | None = None
    with report.measuring("transformers without saves"):
        alone = statistics.mean(step_times(run(report, peer))[10:])
        report.add(f"  transformers: iteration {alone:.1f} ms without saves")
    for who, more in {"DCP": [], "DCP, its own stager": ["--stager"]}.items():
        if alone is None:
            continue
        if more and torch.__version__ < "2.13":
            report.add(
                f"  {who}: not run, fails with torch before 2.13 (this is {torch.__version__})"
            )
            continue
        with report.measuring(who):
            output = run(report, [*peer, "--save", str(directory), *more])
            found = re.findall(r"^blocking ([\d.]+) ms", output, re.MULTILINE)
            with_saves = statistics.mean(step_times(output)[10:])
            report_saving(report, who, alone, with_saves, [float(value) for value in found])
        empty(directory)
    if options.disk is None:
        directory.rmdir()


def empty(directory: Path) -> None:
    """Remove everything in a directory, also what a failed measurement left there."""
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def report_saving(
    report: Report, who: str, plain: float, with_saves: float, blocking: list[float]
) -> None:
    """Report the ms per iteration without and with saves."""
    cost = 100 * (with_saves / plain - 1)
    held = statistics.median(blocking)
    report.add(
        f"  {who}: iteration {plain:.1f} ms without saves, {with_saves:.1f} ms with them "
        f"({cost:+.1f} %)"
    )
    report.add(
        f"  {who}: blocking per save: {held:.0f} ms, {100 * held / plain:.1f} % of an iteration"
    )


def step_times(output: str) -> list[float]:
    """Return ms of every step of a peer."""
    return [float(line) for line in re.findall(r"^[\d.]+$", output, re.MULTILINE)]


def profile(models: dict[str, Shape], options: argparse.Namespace, report: Report) -> None:
    """List the operations of one step that take the most time."""
    name, shape = next(iter(models.items()))
    report.add(f"profile: {name}, one step")
    with report.measuring(name), tempfile.TemporaryDirectory() as directory:
        program = ["pretrain_gpt.py", *shape.ours(8), "--device", options.device]
        run(report, [*program, *profiling(6, 7, Path(directory))])
        (table,) = Path(directory).glob("*.txt")
        for row in table.read_text().splitlines()[:20]:
            report.add(f"  {row}")


def profiling(first: int, end: int, directory: Path) -> list[str]:
    """Return the flags that profile iterations `first` to `end` - 1."""
    window = ["--profile-step-start", str(first), "--profile-step-end", str(end)]
    return ["--profile", *window, "--profile-dir", str(directory)]


def suspicions(models: dict[str, Shape], options: argparse.Namespace, report: Report) -> None:
    """Check doubts from reading the code: selected kernels, waits for the device, selected
    devices.
    """
    report.add("suspicions:")
    name, shape = next(iter(models.items()))
    checks: dict[str, Callable[[], Iterator[str]]] = {
        "windowed attention": lambda: _masked_attention(options),
        "loss of a large vocabulary": lambda: _loss_of_a_large_vocabulary(options),
        "waits of a save": lambda: _waits_of_a_save(name, shape, options, report),
        "devices of a node": lambda: _devices_of_a_node(options, report),
    }
    for subject, check in checks.items():
        with report.measuring(subject):
            report.check_time()
            for line in check():
                report.add(f"  {line}")


def _launched(function: Callable[[], object], device: str) -> Counter[str]:
    """Count launches of each kernel (on a CPU: of each operator)."""
    function()
    with torch.profiler.profile() as trace:
        function()
    on_device = (
        torch.autograd.DeviceType.CUDA if device == "cuda" else torch.autograd.DeviceType.CPU
    )
    return Counter(event.name for event in trace.events() if event.device_type == on_device)


def _masked_attention(options: argparse.Namespace) -> Iterator[str]:
    """Check that grouped windowed attention does not fall back to products that store all
    scores.
    """
    heads, length = (4, 64) if options.is_small else (32, 4096)
    config = TransformerConfig(
        1, 128 * heads, heads, group_query_attention=True, num_query_groups=heads // 4, attention_dropout=0.0,
        window_size=(length // 4, 0), bf16=True,
    )  # fmt: skip
    core = CoreAttention(
        config, Placement(Axis(), TensorParallelRng(0, 0)), window=config.window_size
    )
    shapes = ((length, 1, heads // 4, 4, 128), *[(length, 1, heads // 4, 1, 128)] * 2)
    inputs = [torch.randn(shape, device=options.device).bfloat16() for shape in shapes]
    before = torch.cuda.memory_allocated() if options.device == "cuda" else 0
    kernels = _launched(lambda: core(*inputs, None), options.device)
    peak = torch.cuda.max_memory_allocated() - before if options.device == "cuda" else 0
    scores = heads * length**2 * 2
    most = ", ".join(name[:60] for name, _ in kernels.most_common(4))
    yield (
        f"windowed attention: {peak / 1e6:.0f} MB at most (all scores: {scores / 1e6:.0f} MB); {most}"
    )


def _loss_of_a_large_vocabulary(options: argparse.Namespace) -> Iterator[str]:
    """Count kernels of the fused loss: chunk sizes for a CPU would need hundreds."""
    tokens, hidden, vocab = (64, 32, 1000) if options.is_small else (4096, 4096, 128_000)
    weight, states = (
        torch.randn(shape, device=options.device).bfloat16().requires_grad_()
        for shape in ((vocab, hidden), (tokens, 1, hidden))
    )
    labels = torch.zeros(tokens, 1, dtype=torch.long, device=options.device)

    def step() -> None:
        linear_cross_entropy(states, weight, labels, vocab_size=vocab, tp=Axis()).mean().backward()

    count = _launched(step, options.device).total()
    time_ms = 1e3 * best_time(step, options.device)
    yield (
        f"loss over {vocab} words, {tokens} tokens: {count} kernels, {time_ms:.2f} ms forward "
        "and backward"
    )


def _waits_of_a_save(
    name: str, shape: Shape, options: argparse.Namespace, report: Report
) -> Iterator[str]:
    """Count calls that wait for the device, in two iterations during an asynchronous save and in
    two without.
    """
    program = ["pretrain_gpt.py", *shape.ours(8), "--device", options.device]
    with tempfile.TemporaryDirectory(dir=options.disk) as directory:
        saving = ["--save", f"{directory}/s", "--save-interval", "4", "--async-save"]
        for label, flags in {"a save": saving, "none": []}.items():
            traces = Path(directory) / label.replace(" ", "_")
            run(report, [*program, *flags, *profiling(4, 6, traces)])
            events = json.loads(next(traces.glob("*.json")).read_text())["traceEvents"]
            waits = Counter(
                event["name"] for event in events if "Synchronize" in event.get("name", "")
            )
            yield (
                f"{name}, two iterations with {label}: waits for the device: "
                f"{dict(waits) or 'none'}"
            )


def _devices_of_a_node(options: argparse.Namespace, report: Report) -> Iterator[str]:
    """Return the device of local rank 1 if it sees one device (`srun --gpus-per-task=1`)."""
    code = (
        "from megatron.training import initialize; "
        "from megatron.training.config.options import DistributedConfig; "
        f"print(initialize.choose_device(DistributedConfig(device={options.device!r})))"
    )
    search_path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
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
    yield from _contexts(options, report)


def _contexts(options: argparse.Namespace, report: Report) -> Iterator[str]:
    """Count processes on each GPU while two ranks save in the background: one unless a thread
    opened another context.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    asked = ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader"]
    most = Counter[str]()
    is_done = threading.Event()

    def count_processes() -> None:
        nonlocal most
        while not is_done.wait(0.5):
            result = subprocess.run(asked, capture_output=True, text=True, check=True)
            rows = {row for row in result.stdout.splitlines() if row}
            most |= Counter(row.split(",")[0] for row in rows)

    counter = threading.Thread(target=count_processes)
    with tempfile.TemporaryDirectory(dir=options.disk) as directory:
        saving = ["--save", directory, "--save-interval", "5", "--async-save"]
        flags = [*SMALL["small"].ours(200), *saving, "--global-batch-size", "4"]
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


PARTS = {
    "suspicions": suspicions,
    "tests": tests,
    "training": training,
    "checkpoint": checkpoint,
    "experts": experts,
    "profile": profile,
}


@dataclass(frozen=True)
class Call:
    """What one command measures, the most valuable first, and its time limit in seconds."""

    parts: tuple[str, ...]
    seconds: float
    models: tuple[str, ...] = ("1b",)
    variants: tuple[str, ...] = ("compile", "eager")


# A GPU is lent for 30 minutes, of which its start and copies take some, and for at most 10 minutes
# a command. Is it correct? How fast is it? What do saves cost? Larger models.
CALLS = {
    1: Call(("tests", "suspicions"), 330),
    2: Call(("training", "profile"), 420),
    3: Call(("checkpoint",), 450),
    4: Call(("training", "experts"), 330, models=("3b",)),
}


def apply_call(options: argparse.Namespace) -> None:
    """Set what --call selects, unless it is given."""
    call = CALLS[options.call]
    options.parts = options.parts or list(call.parts)
    options.models = options.models or list(call.models)
    options.variants = options.variants or list(call.variants)
    options.time_limit = options.time_limit or call.seconds


def main() -> None:
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
    options = parser.parse_args()
    options.device = "cpu" if options.smoke else "cuda"
    if options.smoke:
        options.iterations = 8
        options.variants = options.variants or ["eager"]
    if options.call is not None:
        apply_call(options)
    options.variants = options.variants or available_variants()
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"{unknown[0]}: the parts are {', '.join(PARTS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this PyTorch sees no CUDA device; --smoke tries the program without one")

    names = options.models or list(MODELS)
    models = SMALL if options.smoke else {name: (MODELS | SMALL)[name] for name in names}
    options.is_small = models.keys() <= SMALL.keys()
    where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    commit = subprocess.run(
        ["git", "describe", "--always"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    report = Report(options.output, options.time_limit)
    report.add(f"{time.strftime('%Y-%m-%d')}, {where}, torch {torch.__version__}, commit {commit}")
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        with report.measuring("compilation of the dataset index builders"):
            run(report, ["setup.py", "build_ext", "--inplace"])
    for part in options.parts or PARTS:
        with report.measuring(part):
            report.check_time()
            PARTS[part](models, options, report)
    faulthandler.cancel_dump_traceback_later()
    if report.num_failures:
        sys.exit(f"{report.num_failures} measurements failed")


if __name__ == "__main__":
    main()

"""Conversion of a checkpoint of more than 4 GB with its optimizer: memory, speed and disk usage.

The checkpoint is written by one step of `pretrain_gpt.py`. Each conversion is a process of the tool
whose peak memory must stay below 600 MB + 3 times the largest tensor. Speed is relative to `cp` and
fsync of the output. Both read from the page cache or, with --cold, from disk. They take turns after
one warm-up turn, because the first touch of memory on a virtual machine can cost more than the
copy; the best of each counts.

A checkpoint of DeepSpeed's engine with ZeRO-3 of the same model on 8 ranks follows: the peak memory
of its conversions must stay below twice the file of one rank.

    python benchmarks/conversion.py                          # 5.2 GB: a Llama of 373M parameters,
                                                             # bf16
    python benchmarks/conversion.py --layers 2 --hidden 256  # small, to try it out
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from scratch import DIRECTORY_HELP, create_scratch_directory

ROOT = Path(__file__).parents[1]
SAVERS = {  # output -> flags of the tool
    "torch_dist": ["--saver", "torch_dist"],
    "legacy": ["--saver", "legacy"],
    "hf": ["--saver", "hf"],
    "hf+optimizer": ["--saver", "hf", "--save-optim-sidecar"],
    "universal": ["--saver", "universal"],
    "hf fp8": ["--saver", "hf", "--quantize", "fp8-block"],
    "gguf q8_0": ["--saver", "gguf", "--quantize", "q8_0"],
}
# The first conversion to a format creates the source of the conversion back.
PAIRS = (
    ("torch_dist", "hf"),
    ("hf", "torch_dist"),
    ("torch_dist", "legacy"),
    ("legacy", "torch_dist"),
    ("torch_dist", "universal"),
    ("universal", "torch_dist"),
    ("torch_dist", "hf+optimizer"),
    ("hf+optimizer", "torch_dist"),
    ("torch_dist", "hf fp8"),
    ("hf fp8", "torch_dist"),
    ("torch_dist", "gguf q8_0"),
    ("gguf q8_0", "torch_dist"),
)
ZERO3_RANKS = 8


def train_one_step(directory: Path, args: argparse.Namespace) -> None:
    """Save a Llama-like model with its optimizer; the step creates the optimizer state."""
    heads = max(1, args.hidden // 64)
    ffn = args.hidden * 11 // 4
    # The sequence is short because only the size of the parameters matters.
    flags = f"""
        --num-layers {args.layers} --hidden-size {args.hidden} --num-attention-heads {heads}
        --swiglu --ffn-hidden-size {ffn} --seq-length 64 --max-position-embeddings 64
        --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
        --untie-embeddings-and-output-weights --bf16 --hidden-dropout 0 --attention-dropout 0
        --micro-batch-size 1 --train-iters 1 --lr 1e-4 --eval-iters 0
        --mock-data --tokenizer-type NullTokenizer --vocab-size {args.vocab - 1}
        --save {directory}
    """
    run([sys.executable, "pretrain_gpt.py", *flags.split()])


def run(command: list[str], root: Path | None = None) -> tuple[float, int, int]:
    """Return seconds, peak resident bytes of a process, and its peak disk usage below `root`."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    disk = DiskUse(root)
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
    ) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        # wait4 reports the resource usage of this child alone, which `Popen.wait` does not.
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    peak_disk = disk.stop()
    if process.returncode:
        text = output.decode(errors="replace")
        raise SystemExit(f"{' '.join(command)} failed:\n{text[-4000:]}")
    seconds = time.perf_counter() - began
    resident = usage.ru_maxrss << 10  # is in KiB
    return seconds, resident, peak_disk


class DiskUse:
    """Background watcher of the bytes allocated below a directory."""

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self._peak = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        """Record the peak until `stop`; return at once without a directory."""
        while self._root is not None and not self._done.wait(0.1):
            allocated = count_allocated_bytes(self._root)
            self._peak = max(self._peak, allocated)

    def stop(self) -> int:
        """Return the peak."""
        self._done.set()
        self._thread.join()
        return self._peak


def count_allocated_bytes(root: Path) -> int:
    """Return the disk space that all files occupy."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.join(folder, name)
            # The process that is measured may rename a file in the meantime.
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(path).st_blocks * 512
    return total


def list_files(directory: Path) -> list[Path]:
    """Return all files below a directory."""
    files: list[Path] = []
    for path in directory.rglob("*"):
        if path.is_file():
            files.append(path)
    return files


def prepare_page_cache(directory: Path, cold: bool) -> None:
    """Bring the files into the page cache, or drop them from it (they must be clean).

    Otherwise the state of the cache would depend on the previous turn.
    """
    for path in list_files(directory):
        with path.open("rb", buffering=0) as file:
            if cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                # Read to the end.
                while file.read(16 << 20):
                    pass


def copy(source: Path, target: Path, durable: bool = True) -> float:
    """Return the seconds of `cp -r` and, if `durable`, an fsync of every file."""
    began = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    if durable:
        # A conversion flushes its output, too.
        for path in list_files(target):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    return time.perf_counter() - began


def make_command(source: Path, target: Path, result: str, args: argparse.Namespace) -> list[str]:
    """Return the command of a conversion to one of the outputs."""
    return [
        sys.executable,
        "tools/checkpoint/convert.py",
        "--load-dir",
        str(source),
        "--save-dir",
        str(target),
        *SAVERS[result],
        "--workers",
        str(args.workers),
    ]


def warm_up(root: Path, args: argparse.Namespace) -> None:
    """Run a turn that does not count: the first touch of memory on a virtual machine is slow."""
    converted = root / "unused"
    copied = root / "copy"
    command = make_command(root / "torch_dist", converted, "legacy", args)
    run(command)
    copy(converted, copied)
    shutil.rmtree(converted)
    shutil.rmtree(copied)


def format_times(times: list[float]) -> str:
    """Return the seconds of all turns, separated by commas."""
    texts = [f"{seconds:.1f}" for seconds in times]
    return ", ".join(texts)


def count_bytes(directory: Path) -> int:
    """Return the sum of the sizes of all files."""
    total = 0
    for path in list_files(directory):
        total += path.stat().st_size
    return total


@dataclass
class Turns:
    """Measurements of the turns of one conversion, and of the copies that alternate with it."""

    times: list[float] = field(default_factory=list)
    copy_times: list[float] = field(default_factory=list)
    peak_memory: int = 0  # bytes
    extra_disk: int = 0  # bytes in use during a conversion, in addition to those after it


def convert(
    root: Path,
    source: str,
    result: str,
    args: argparse.Namespace,
    start_up: float,
) -> None:
    """Measure a conversion, print a line, and keep the output if a later pair needs it."""
    target = root / f"{source}_to_{result}"
    turns = measure_turns(root, source, target, result, args)
    nbytes = count_bytes(target)
    print_turns(f"{source} -> {result}", turns, nbytes, start_up)
    if (root / result).exists():
        shutil.rmtree(target)
    else:
        target.rename(root / result)


def measure_turns(
    root: Path,
    source: str,
    target: Path,
    result: str,
    args: argparse.Namespace,
) -> Turns:
    """Alternate a conversion with a copy of its output; the last output remains."""
    copied = root / "copy"
    command = make_command(root / source, target, result, args)
    turns = Turns()
    # Conversion and copy take turns: a slow phase of the machine affects both.
    for _ in range(args.turns):
        shutil.rmtree(target, ignore_errors=True)
        prepare_page_cache(root / source, args.cold)
        seconds, resident, disk = run(command, root)
        turns.times.append(seconds)
        turns.peak_memory = max(turns.peak_memory, resident)
        extra = disk - count_allocated_bytes(root)
        turns.extra_disk = max(turns.extra_disk, extra)

        prepare_page_cache(target, args.cold)
        seconds = copy(target, copied)
        turns.copy_times.append(seconds)
        shutil.rmtree(copied)
    return turns


def print_turns(name: str, turns: Turns, nbytes: int, start_up: float) -> None:
    """Print the speed of a conversion, relative to that of the copy."""
    # The best of each: other programs can only slow down a turn.
    seconds = min(turns.times)
    copying = min(turns.copy_times)
    speed = nbytes / seconds / 1e9
    copy_speed = nbytes / copying / 1e9
    ratio = copying / seconds
    ratio_without_start_up = copying / (seconds - start_up)
    print(
        f"{name:28}{nbytes / 1e9:6.2f} GB {seconds:6.2f} s {speed:6.2f} GB/s   "
        f"cp {copying:5.2f} s {copy_speed:6.2f} GB/s   {ratio:5.2f}x cp, "
        f"{ratio_without_start_up:5.2f}x without start-up   "
        f"peak {turns.peak_memory / 1e6:6.0f} MB   "
        f"extra disk {turns.extra_disk / 1e6:4.0f} MB   "
        f"all turns: {format_times(turns.times)}; cp {format_times(turns.copy_times)}",
        flush=True,
    )


def measure_zero3(root: Path, args: argparse.Namespace) -> None:
    """Print the peak memory of conversions from ZeRO-3, relative to the file of one rank."""
    source = root / "zero3"
    sizes = (ZERO3_RANKS, args.layers, args.hidden, args.vocab)
    # A process of its own: the peak of a new process includes that of its parent.
    module = [sys.executable, "-m", "tests.support.zero3_files"]
    run([*module, str(source), *map(str, sizes)])
    shard = max(path.stat().st_size for path in list_files(source))
    for result in SAVERS:
        target = root / f"zero3_to_{result}"
        seconds, resident, _ = run(make_command(source, target, result, args))
        shutil.rmtree(target)
        print(
            f"{f'zero3 -> {result}':28}{seconds:6.2f} s   peak {resident / 1e6:6.0f} MB, "
            f"{resident / shard:.2f}x the {shard / 1e6:.0f} MB of a rank (at most 2.0)",
            flush=True,
        )


def measure_start_up() -> float:
    """Return the seconds of a process that only imports torch, which every conversion does."""
    command = [sys.executable, "-c", "import torch"]
    times: list[float] = []
    for _ in range(3):
        seconds, _, _ = run(command)
        times.append(seconds)
    return min(times)


def parse_arguments() -> argparse.Namespace:
    """Return the flags of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--cold",
        action="store_true",
        help="read from disk instead of the page cache",
    )
    parser.add_argument("--directory", type=Path, help=DIRECTORY_HELP)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    with create_scratch_directory("conversion", args.directory) as root:
        train_one_step(root / "torch_dist", args)
        nbytes = count_bytes(root / "torch_dist")
        # The fp32 main parameters of an embedding.
        largest = args.vocab * args.hidden * 4
        bound = 600 + 3 * largest / 1e6
        start_up = measure_start_up()
        print(f"{nbytes / 1e9:.2f} GB; largest tensor {largest / 1e6:.0f} MB: bound {bound:.0f} MB")
        print(f"start-up: import torch takes {start_up:.2f} s; {args.workers} workers", flush=True)
        warm_up(root, args)
        for source, result in PAIRS:
            convert(root, source, result, args, start_up)
        measure_zero3(root, args)


if __name__ == "__main__":
    main()

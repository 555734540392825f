"""Conversion of a checkpoint of more than 4 GB with its optimizer: memory, speed and disk usage.

The checkpoint is written by one step of `pretrain_gpt.py`. Each conversion is a process of the tool
whose peak memory must stay below 600 MB + 3 times the largest tensor. Speed is relative to `cp` and
fsync of the output. Both read from the page cache or, with --cold, from disk. They take turns after
one warm-up turn, because the first touch of memory on a virtual machine can cost more than the
copy; the best of each counts.

    python benchmarks/conversion.py                          # 5.2 GB: a Llama of 373M parameters, bf16
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
from pathlib import Path

ROOT = Path(__file__).parents[1]
SAVERS = {  # output -> flags of the tool
    "torch_dist": ["--saver", "torch_dist"],
    "legacy": ["--saver", "legacy"],
    "hf": ["--saver", "hf"],
    "hf+optimizer": ["--saver", "hf", "--save-optim-sidecar"],
    "universal": ["--saver", "universal"],
}
PAIRS = (
    ("torch_dist", "hf"),
    ("hf", "torch_dist"),
    ("torch_dist", "legacy"),
    ("legacy", "torch_dist"),
    ("torch_dist", "universal"),
    ("universal", "torch_dist"),
    ("torch_dist", "hf+optimizer"),
    ("hf+optimizer", "torch_dist"),
)


def train_one_step(directory: Path, args: argparse.Namespace) -> None:
    heads = max(1, args.hidden // 64)
    flags = f"""--num-layers {args.layers} --hidden-size {args.hidden} --num-attention-heads {heads} --swiglu
        --ffn-hidden-size {args.hidden * 11 // 4} --seq-length 64 --max-position-embeddings 64 --normalization RMSNorm
        --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --bf16
        --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 1 --train-iters 1 --lr 1e-4 --eval-iters 0
        --mock-data --tokenizer-type NullTokenizer --vocab-size {args.vocab - 1} --save {directory}"""
    run([sys.executable, "pretrain_gpt.py", *flags.split()])


def run(command: list[str], root: Path | None = None) -> tuple[float, int, int]:
    """Return seconds, peak resident bytes of a process, and its peak disk usage below `root`."""
    began = time.perf_counter()
    disk = DiskUse(root)
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    peak = disk.stop()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{output.decode(errors='replace')[-4000:]}")
    return time.perf_counter() - began, usage.ru_maxrss << 10, peak


class DiskUse:
    """Background watcher of the bytes allocated below a directory."""

    def __init__(self, root: Path | None) -> None:
        self._root = root
        self._peak = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while self._root is not None and not self._done.wait(0.1):
            self._peak = max(self._peak, count_allocated_bytes(self._root))

    def stop(self) -> int:
        self._done.set()
        self._thread.join()
        return self._peak


def count_allocated_bytes(root: Path) -> int:
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # renamed in the meantime
                total += os.stat(os.path.join(folder, name)).st_blocks * 512
    return total


def list_files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def prepare_page_cache(directory: Path, cold: bool) -> None:
    """Bring the files into the page cache, or drop them from it (they must be clean)."""
    for path in list_files(directory):
        with path.open("rb", buffering=0) as file:
            if cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(16 << 20):
                    pass


def copy(source: Path, target: Path, durable: bool = True) -> float:
    """Return the seconds of `cp -r` and, if `durable`, an fsync of every file."""
    began = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    for path in list_files(target) if durable else []:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return time.perf_counter() - began


def make_command(source: Path, target: Path, result: str, args: argparse.Namespace) -> list[str]:
    command = [sys.executable, "tools/checkpoint/convert.py"]
    command += ["--load-dir", str(source), "--save-dir", str(target)]
    return [*command, *SAVERS[result], "--workers", str(args.workers)]


def warm_up(root: Path, args: argparse.Namespace) -> None:
    run(make_command(root / "torch_dist", root / "unused", "legacy", args))
    copy(root / "unused", root / "copy")
    shutil.rmtree(root / "unused")
    shutil.rmtree(root / "copy")


def format_times(times: list[float]) -> str:
    return ", ".join(f"{seconds:.1f}" for seconds in times)


def count_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in list_files(directory))


def convert(
    root: Path, source: str, result: str, args: argparse.Namespace, start_up: float
) -> None:
    target = root / f"{source}_to_{result}"
    copied = root / "copy"
    command = make_command(root / source, target, result, args)
    times = []
    copies = []
    memory = 0
    extra = 0
    for _ in range(args.turns):
        shutil.rmtree(target, ignore_errors=True)
        prepare_page_cache(root / source, args.cold)
        seconds, resident, disk = run(command, root)
        times.append(seconds)
        memory = max(memory, resident)
        extra = max(extra, disk - count_allocated_bytes(root))
        prepare_page_cache(target, args.cold)
        copies.append(copy(target, copied))
        shutil.rmtree(copied)
    seconds = min(times)
    copying = min(copies)
    nbytes = count_bytes(target)
    print(
        f"{f'{source} -> {result}':28}{nbytes / 1e9:6.2f} GB {seconds:6.2f} s "
        f"{nbytes / seconds / 1e9:6.2f} GB/s   "
        f"cp {copying:5.2f} s {nbytes / copying / 1e9:6.2f} GB/s   {copying / seconds:5.2f}x cp, "
        f"{copying / (seconds - start_up):5.2f}x without start-up   peak {memory / 1e6:6.0f} MB   "
        f"extra disk {extra / 1e6:4.0f} MB   all turns: {format_times(times)}; "
        f"cp {format_times(copies)}",
        flush=True,
    )
    if (root / result).exists():
        shutil.rmtree(target)
    else:
        target.rename(root / result)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--cold", action="store_true", help="read from disk instead of the page cache"
    )
    parser.add_argument("--directory", type=Path, default=Path("/tmp/benchmark_conversion"))
    args = parser.parse_args()
    root: Path = args.directory
    root.mkdir(parents=True, exist_ok=True)
    try:
        train_one_step(root / "torch_dist", args)
        nbytes = count_bytes(root / "torch_dist")
        largest = args.vocab * args.hidden * 4
        bare = min(run([sys.executable, "-c", "import torch"])[0] for _ in range(3))
        print(
            f"{nbytes / 1e9:.2f} GB; largest tensor {largest / 1e6:.0f} MB: bound "
            f"{600 + 3 * largest / 1e6:.0f} MB"
        )
        print(f"start-up: import torch takes {bare:.2f} s; {args.workers} workers", flush=True)
        warm_up(root, args)
        for source, result in PAIRS:
            convert(root, source, result, args, bare)
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()

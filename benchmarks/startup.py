"""Time from the command line to the first training iteration, from scratch and from a checkpoint.

Start-up: a model of 35,000 parameters under torchrun, up to the log line of its first iteration.
The limit is `import torch`, a process group and one all-reduce in as many processes. Tools are
compared with `import torch` in processor time (minimum of all turns). Resume: a run of TP2
continues at DP2 with the distributed optimizer. Peers that do the same on the same shapes: a
transformers model under FSDP with torch.distributed.checkpoint, whose files are sharded along the
other dimension, and megatron-core, which reads our files. Contestants take turns; results are
medians. Files are in the page cache and modules are compiled.

With --checkpoints, only the choice of the checkpoint is measured: rank 0 reads a directory with
that many checkpoints in a simulated object store, each of whose requests takes --request-ms, while
all other ranks wait in a collective with a timeout of 10 minutes.

    python benchmarks/startup.py                       # start-up, tools and resume
    python benchmarks/startup.py --size-gb 0.2 --turns 3
    python benchmarks/startup.py --megatron-core-python PATH   # also megatron-core
    python benchmarks/startup.py --checkpoints 3000 --request-ms 50
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from scratch import create_scratch_directory

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron.core import object_storage  # noqa: E402
from megatron.core.dist_checkpointing import Lineage, Segment, take_generation  # noqa: E402
from megatron.core.dist_checkpointing.choice import choose  # noqa: E402
from megatron.core.dist_checkpointing.format.checksums import compute_checksums  # noqa: E402
from megatron.core.dist_checkpointing.local_checkpoints import LocalInventory  # noqa: E402
from megatron.core.dist_checkpointing.ownership.takeover import Job  # noqa: E402
from megatron.core.dist_checkpointing.saving.object_commit import encode_commit  # noqa: E402
from megatron.core.object_path import path_of
from megatron.training.checkpoint.launch import TrainingDirectory  # noqa: E402
from megatron.training.config.run_options import CheckpointConfig  # noqa: E402

ROOT = Path(__file__).parents[1]
TWO_PROCESSES = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TORCHRUN = [sys.executable, *TWO_PROCESSES]
MODEL = """
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --disable-bias-linear
    --mock-data
    --seed 1
    --tokenizer-type NullTokenizer
    --hidden-dropout 0
    --attention-dropout 0
    --num-workers 0
    --num-threads 1
    --lr 1e-3
    --lr-decay-style constant
    --log-interval 1
    --eval-iters 0
    --micro-batch-size 1
    --global-batch-size 2
"""
TINY = f"""
    {MODEL}
    --num-layers 4
    --hidden-size 32
    --num-attention-heads 4
    --seq-length 16
    --vocab-size 60
"""
# The minimum of any run of two processes.
LIMIT = """
import datetime, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=5))
dist.all_reduce(torch.ones(1))
print("iteration", flush=True)
"""


Measure = Callable[[], float]  # returns seconds


# ---- One program ----


def make_environment(command: list[str]) -> dict[str, str]:
    """Return the environment for an interpreter."""
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    # The environment of another Python has its own `megatron`.
    is_ours = command[0] == sys.executable
    variables["PYTHONPATH"] = str(ROOT) if is_ours else ""
    # Without bytecode, every start would compile our modules, but not torch's.
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    return variables


def reports_iteration(line: str) -> bool:
    """Return whether a line is the one of `pretrain_gpt.py`, or of the other programs."""
    if line.startswith("iteration"):
        return True
    return "iteration" in line and "lm loss" in line


def measure_until_iteration(command: list[str]) -> float:
    """Return the seconds until the command prints a line with an iteration, then let it finish."""
    began = time.perf_counter()
    seconds = None
    with subprocess.Popen(
        command,
        env=make_environment(command),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as run:
        assert run.stdout is not None
        lines = []
        for line in run.stdout:
            lines.append(line)
            if seconds is None and reports_iteration(line):
                seconds = time.perf_counter() - began
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
    user = after.ru_utime - before.ru_utime
    system = after.ru_stime - before.ru_stime
    return user + system


def make_training_command(flags: str) -> list[str]:
    return [*TORCHRUN, str(ROOT / "pretrain_gpt.py"), *flags.split()]


# ---- Comparison ----


def compare(contestants: dict[str, Measure], turns: int) -> dict[str, list[float]]:
    """Return the seconds of each contestant in each turn after a warm-up turn."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(turns + 1):
        for name, measure in contestants.items():
            value = measure()
            if turn > 0:
                seconds[name].append(value)
    return seconds


def print_rows(title: str, results: dict[str, float], limit: str) -> None:
    """Print the seconds of each contestant, and their ratio to those of `limit`."""
    print(f"\n| {title} | s | against {limit} |\n|---|---|---|")
    for name, seconds in results.items():
        ratio = ""
        if name != limit:
            ratio = f"{seconds / results[limit]:.2f}x"
        print(f"| {name} | {seconds:.2f} | {ratio} |")


def compute_medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in seconds.items()}


# ---- Start-up and tools ----


def measure_start_up(directory: Path, turns: int) -> None:
    """Compare a run of one iteration with the minimum of any run."""
    limit_script = directory / "limit.py"
    limit_script.write_text(LIMIT)
    limit_command = [*TORCHRUN, str(limit_script)]
    command = make_training_command(f"{TINY} --train-iters 1")

    limit = "import torch, process group, all-reduce"
    contestants: dict[str, Measure] = {
        limit: partial(measure_until_iteration, limit_command),
        "pretrain_gpt.py, first iteration": partial(measure_until_iteration, command),
    }
    seconds = compare(contestants, turns)
    print_rows("start-up, torchrun with two processes", compute_medians(seconds), limit)


def measure_tools(directory: Path, turns: int) -> None:
    """Compare the processor time of the tools with that of `import torch`."""
    # Checkpoints of both formats.
    checkpoint = str(directory / "tiny")
    legacy = str(directory / "legacy")
    saving = f"{TINY} --train-iters 1 --save-interval 1 --save"
    measure_until_iteration(make_training_command(f"{saving} {checkpoint}"))
    measure_until_iteration(make_training_command(f"{saving} {legacy} --ckpt-format torch"))

    convert = str(ROOT / "tools/checkpoint/convert.py")
    inspect = str(ROOT / "tools/checkpoint/inspect_checkpoint.py")
    conversion = [convert, "--saver", "hf", "--overwrite"]
    conversion += ["--load-dir", checkpoint, "--save-dir", str(directory / "hf")]
    commands = {
        "import torch": ["-c", "import torch"],
        "convert.py --help": [convert, "--help"],
        "inspect_checkpoint.py --help": [inspect, "--help"],
        "inspect_checkpoint.py show": [inspect, "show", checkpoint],
        "inspect_checkpoint.py verify": [inspect, "verify", checkpoint],
        "inspect_checkpoint.py diff, torch_dist and legacy": [inspect, "diff", checkpoint, legacy],
        "convert.py, torch_dist to hf": conversion,
        "pretrain_gpt.py --help": [str(ROOT / "pretrain_gpt.py"), "--help"],
    }
    contestants: dict[str, Measure] = {}
    for name, command in commands.items():
        contestants[name] = partial(measure_processor_time, [sys.executable, *command])
    seconds = compare(contestants, turns)
    best = {name: min(values) for name, values in seconds.items()}
    print_rows("tools, processor time", best, "import torch")


# ---- Resume ----


@dataclass
class ResumedModel:
    """A Llama-like model whose checkpoint has a given size."""

    layers: int
    hidden: int = 1024
    ffn: int = 2560
    heads: int = 16
    vocab: int = 16000
    length: int = 32

    @classmethod
    def of_size(cls, size_gb: float) -> "ResumedModel":
        """Choose the number of layers for an fp32 checkpoint, of 12 bytes per parameter."""
        model = cls(layers=1)
        parameters = size_gb * 1e9 / 12
        embeddings = 2 * model.vocab * model.hidden
        parameters_per_layer = 11 * model.hidden**2
        model.layers = max(1, round((parameters - embeddings) / parameters_per_layer))
        return model

    def make_flags(self) -> str:
        """Return the flags of `pretrain_gpt.py`."""
        return f"""
            {MODEL}
            --num-layers {self.layers}
            --hidden-size {self.hidden}
            --ffn-hidden-size {self.ffn}
            --num-attention-heads {self.heads}
            --vocab-size {self.vocab}
            --seq-length {self.length}
            --untie-embeddings-and-output-weights
        """

    def make_dcp_command(self, directory: Path) -> list[str]:
        """Return the command of the peer that reads `directory` with DCP."""
        sizes = (self.layers, self.hidden, self.ffn, self.heads, self.vocab, self.length)
        program = ROOT / "benchmarks/peers/dcp_resume.py"
        return [*TORCHRUN, str(program), str(directory), *map(str, sizes)]

    def make_megatron_core_command(self, python: str, directory: Path) -> list[str]:
        """Return the command of megatron-core, which reads our checkpoint in `directory`."""
        program = ROOT / "benchmarks/peers/megatron_core_resume.py"
        return [python, *TWO_PROCESSES, str(program), str(directory), str(self.length)]


def count_bytes(directory: Path) -> int:
    """Return the sum of the sizes of all files."""
    total = 0
    for path in directory.rglob("*"):
        if path.is_file():
            total += path.stat().st_size
    return total


def measure_resume(directory: Path, size_gb: float, turns: int, megatron_core: str | None) -> None:
    """Compare resumes with those of peers."""
    model = ResumedModel.of_size(size_gb)
    flags = model.make_flags()

    # Write our checkpoint at TP2, and that of DCP.
    ours = directory / "ours"
    saving = f"--tensor-model-parallel-size 2 --train-iters 1 --save {ours} --save-interval 1"
    measure_until_iteration(make_training_command(f"{flags} {saving}"))
    print(f"\n{count_bytes(ours) / 1e9:.2f} GB written at TP2")
    dcp = model.make_dcp_command(directory / "dcp")
    measure_until_iteration([*dcp, "--write"])

    peers: dict[str, Measure] = {}
    peers["transformers, FSDP, DCP: load and one step"] = partial(measure_until_iteration, dcp)
    if megatron_core is not None:
        command = model.make_megatron_core_command(megatron_core, ours)
        name = "megatron-core, distributed optimizer: load and one step"
        peers[name] = partial(measure_until_iteration, command)

    at_dp2 = f"{flags} --use-distributed-optimizer"
    resume = make_training_command(f"{at_dp2} --train-iters 2 --load {ours}")
    start = make_training_command(f"{at_dp2} --train-iters 1")
    own: dict[str, Measure] = {
        "pretrain_gpt.py at DP2, first iteration": partial(measure_until_iteration, resume),
        "the same from random weights": partial(measure_until_iteration, start),
    }
    medians = compute_medians(compare(peers | own, turns))
    fastest_peer = min(peers, key=medians.__getitem__)
    print_rows("resume", medians, fastest_peer)


class DelayedStore:
    """Objects in memory; every request takes `delay` seconds and is counted."""

    def __init__(self, delay: float) -> None:
        self._delay = delay
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self.requests = 0

    def add(self, key: str, content: bytes) -> None:
        """Add an object without a request."""
        self._objects[key] = content

    def _request(self) -> None:
        with self._lock:
            self.requests += 1
        time.sleep(self._delay)

    def _get(self, key: str) -> bytes:
        if key not in self._objects:
            raise FileNotFoundError(key)
        return self._objects[key]

    def size(self, key: str) -> int:
        self._request()
        return len(self._get(key))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self._request()
        return self._get(key)[start : start + length]

    def version(self, key: str) -> str | None:
        self._request()
        return str(hash(self._objects[key])) if key in self._objects else None

    def create(self, key: str, content: bytes) -> str:
        self._request()
        self._objects[key] = content
        return str(hash(content))

    def delete(self, keys: list[str]) -> None:
        self._request()
        for key in keys:
            self._objects.pop(key, None)

    def sizes(self, prefix: str) -> dict[str, int]:
        self._request()
        below = [key for key in self._objects if key.startswith(f"{prefix}/")]
        return {key: len(self._objects[key]) for key in below}

    def children(self, prefix: str) -> tuple[list[str], list[str]]:
        self._request()
        directories: dict[str, None] = {}
        objects = []
        for key in list(self._objects):
            if not key.startswith(f"{prefix}/"):
                continue
            name, separator, _ = key.removeprefix(f"{prefix}/").partition("/")
            if separator:
                directories[f"{prefix}/{name}"] = None
            else:
                objects.append(key)
        return list(directories), objects


def add_checkpoint(store: DelayedStore, iteration: int) -> None:
    """Add the small files of a committed checkpoint."""
    contents = {
        "lineage.json": Lineage((Segment(1, iteration, "a"),)).encode(None),
        ".metadata": b"metadata",
        "common.pt": b"common",
        "checksums.bin": b"checksums",
    }
    sums = {name: compute_checksums(content) for name, content in contents.items()}
    contents["metadata.json"] = encode_commit("save", sums)
    contents[".claim"] = b"{}"
    for name, content in contents.items():
        store.add(f"run/iter_{iteration:07d}/{name}", content)


def measure_choice(num_checkpoints: int, delay: float) -> None:
    """Print requests and seconds of the steps of a launch that read the directory."""
    store = DelayedStore(delay)
    object_storage._open_store = lambda root, pid: store
    root = path_of("s3://bucket/run")
    for iteration in range(1, num_checkpoints + 1):
        add_checkpoint(store, iteration)
    directory = TrainingDirectory(CheckpointConfig(load=str(root), save=str(root)), root)

    def choose_start() -> None:
        description = directory.describe(Job(), LocalInventory(), frozenset())
        choice = choose(description.launch, description.inventory)
        assert choice.candidate is not None
        assert choice.candidate.lineage.iteration == num_checkpoints

    steps = {
        "identify the newest": directory.find_newest,
        "choose": choose_start,
        "take ownership": lambda: take_generation(root, {}),
        "identify the newest again": directory.find_newest,
    }
    print(f"\n{num_checkpoints} checkpoints, {delay * 1e3:g} ms per request")
    total = 0.0
    for name, step in steps.items():
        before = store.requests
        began = time.perf_counter()
        step()
        seconds = time.perf_counter() - began
        total += seconds
        print(f"{name:28} {store.requests - before:7} requests {seconds:8.1f} s")
    print(f"{'all':28} {store.requests:7} requests {total:8.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size-gb", type=float, default=1.6, help="of the checkpoint that is resumed from"
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--checkpoints", type=int, help="only measure the choice among so many")
    parser.add_argument("--request-ms", type=float, default=50.0, help="of the simulated store")
    parser.add_argument(
        "--megatron-core-python", metavar="PATH", help="Python of an environment with megatron-core"
    )
    args = parser.parse_args()
    if args.checkpoints is not None:
        measure_choice(args.checkpoints, args.request_ms / 1e3)
        return
    with create_scratch_directory("startup", Path.cwd()) as directory:
        measure_start_up(directory, args.turns)
        measure_tools(directory, args.turns)
        measure_resume(directory, args.size_gb, args.turns, args.megatron_core_python)


if __name__ == "__main__":
    main()

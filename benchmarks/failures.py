"""Total time of a run with failures, relative to an undisturbed run.

The protocol of Clockwork's benchmark of fault tolerance (2026), with times divided by 100: 3,000
steps of 8 s, a checkpoint every 100 steps, and failures at random intervals. There, live migration
to spare GPUs took 405 minutes, restarts from checkpoints 818, and torchft 930. A step waits for
80 ms here, as for a device, so that other programs on the machine hardly matter. Restarts are not
scaled: their share is larger than in the original.

Two ranks on one machine; a failure is SIGKILL for one of them. Local checkpoints are written every
10 steps.

    python benchmarks/failures.py                       # 15 minutes on an idle machine
    python benchmarks/failures.py --steps 1000 --failures 3 --only in-process
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from scratch import create_scratch_directory

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import pretrain_gpt  # noqa: E402
from megatron.core.module import MegatronModule  # noqa: E402
from megatron.training.reporting.run_record import RECORDS  # noqa: E402
from megatron.training.run import Batch, Loss  # noqa: E402
from tests.support.crash_harness import ONE_THREAD  # noqa: E402
from tests.support.processes import children_of, is_leader  # noqa: E402

PROCESSES = 2
STEP = 0.08  # seconds
GOAL = 1.05
TAIL = 2048  # bytes of a record that contain its last lines
FLAGS = """
    --num-layers 2
    --hidden-size 64
    --num-attention-heads 4
    --seq-length 32
    --max-position-embeddings 32
    --micro-batch-size 1
    --global-batch-size 2
    --mock-data
    --tokenizer-type NullTokenizer
    --vocab-size 1000
    --lr 1e-4
    --num-workers 0
    --eval-iters 0
    --use-distributed-optimizer
    --log-interval 1
    --async-save
    --save-interval 100
    --non-persistent-ckpt-type local
    --non-persistent-save-interval 10
"""
RUNS = {  # name -> (flags, with failures)
    "undisturbed": ("", False),
    "in-process": ("--inprocess-restart", True),
    "torchrun": ("", True),
}

forward = pretrain_gpt.forward_step


def forward_step(chunk: MegatronModule, batch: Batch, activation: object) -> Loss | object:
    """Run a micro-batch, in the time of a step on a device."""
    time.sleep(STEP)
    return forward(chunk, batch, activation)


def find_ranks(agent: int, in_process: bool) -> list[int]:
    """Return the processes that train."""
    processes = children_of(agent)
    if not in_process:
        return processes
    workers = []
    for monitor in processes:
        workers += filter(is_leader, children_of(monitor))
    return workers


def measure_run(root: Path, steps: int, failures: int, flags: str) -> float:
    """Return the seconds of a launch with `failures`, from its first iteration to its end."""
    save = root / "run"
    command = (
        "-m torch.distributed.run --standalone --max-restarts 100 --monitor-interval 0.1 "
        f"--nproc-per-node {PROCESSES} {__file__} {FLAGS} {flags} --train-iters {steps} "
        f"--save {save} --load {save} --non-persistent-local-ckpt-dir {root}/disk"
    )
    in_process = "--inprocess-restart" in flags
    rng = random.Random(1)
    with (root / "log").open("w") as log:
        agent = subprocess.Popen(
            [sys.executable, *command.split()],
            stdout=log, stderr=log, env=os.environ | ONE_THREAD,
        )  # fmt: skip
        try:
            wait_until(lambda: read_last_iteration(save) >= 1, agent)
            began = time.monotonic()
            # One failure in each of equal intervals of steps
            for index in range(failures):
                step = int(steps * (index + rng.uniform(0.1, 0.9)) / failures)
                wait_until(lambda step=step: read_last_iteration(save) >= step, agent)
                ranks = find_ranks(agent.pid, in_process)
                os.kill(rng.choice(ranks), signal.SIGKILL)
            code = agent.wait()
        finally:
            agent.kill()
    if code != 0:
        sys.exit(f"exit code {code}:\n{(root / 'log').read_text()[-4000:]}")
    return time.monotonic() - began


def read_last_iteration(save: Path) -> int:
    """Return the last iteration of the newest launch.

    Only the end of its record is read. Parsing a record of 3,000 steps five times per second would
    use a third of a core, in the runs with failures only.
    """
    records = sorted((save / RECORDS).glob("*.jsonl"))
    if not records:
        return 0
    with records[-1].open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
        tail = file.read().decode(errors="replace")
    return max(map(int, re.findall(r'"iteration": (\d+)', tail)), default=0)


def wait_until(happens: Callable[[], bool], agent: subprocess.Popen) -> None:
    while not happens():
        if agent.poll() is not None:
            sys.exit(f"the run has ended early, with exit code {agent.returncode}")
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3000, help="steps of each run")
    parser.add_argument("--failures", type=int, default=10, help="failures of each run")
    parser.add_argument("--only", choices=[name for name in RUNS if RUNS[name][1]])
    options = parser.parse_args()
    print(f"{options.steps} steps of {1000 * STEP:.0f} ms, {options.failures} failures\n")
    print("| run | seconds | relative to undisturbed | seconds per failure | goal |")
    print("|---|---|---|---|---|")
    undisturbed = 0.0
    for name, (flags, fails) in RUNS.items():
        if fails and options.only not in (None, name):
            continue
        with create_scratch_directory("failures") as root:
            failures = options.failures if fails else 0
            seconds = measure_run(root, options.steps, failures, flags)
        if not fails:
            undisturbed = seconds
            print(f"| {name} | {seconds:.1f} | | | |", flush=True)
            continue
        ratio = seconds / undisturbed
        lost = (seconds - undisturbed) / failures
        goal = f"{GOAL}x" if ratio <= GOAL else f"{GOAL}x, missed"
        print(f"| {name} | {seconds:.1f} | {ratio:.3f}x | {lost:.2f} | {goal} |", flush=True)


if __name__ == "__main__":
    if "RANK" in os.environ:
        pretrain_gpt.forward_step = forward_step  # type: ignore[assignment]
        pretrain_gpt.main()
    else:
        main()

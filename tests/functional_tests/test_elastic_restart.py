"""`torchrun --max-restarts`: the job goes on by itself when a rank dies."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from training_harness import COMMON, LAYOUTS, LLAMA, train

from megatron.core.dist_checkpointing import Reader, read_tracker

ROOT = Path(__file__).parents[2]
ITERATIONS = 60
SAVING = "--async-save --save-interval 1 --keep-last-n 3 --log-interval 50 --distributed-timeout-minutes 0.5"
RUN = f"--mock-data {LLAMA} {LAYOUTS['dp2_distributed_optimizer'][1]} --train-iters {ITERATIONS} {SAVING} "


def stored(root: Path) -> dict[str, torch.Tensor]:
    reader = Reader(root / f"iter_{ITERATIONS:07d}", verify=True)
    return {key: reader.read(key, (0,) * len(t.shape), t.shape) for key, t in reader.metadata.tensors.items()}


def test_a_killed_rank_ends_the_others_and_all_start_again(pool, tmp_path):
    root = tmp_path / "elastic"
    flags = f"{COMMON} {RUN} --save {root} --load {root}".split()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "2", "--monitor-interval", "0.1", "pretrain_gpt.py", *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as torchrun:
        deadline = time.monotonic() + 120
        while int(read_tracker(root) or 0) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        workers = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
        victims = [int(pid) for pid in workers if b"pretrain_gpt.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(victims) == 2
        os.kill(victims[1], signal.SIGKILL)
        output, _ = torchrun.communicate(timeout=180)
    assert torchrun.returncode == 0, output[-3000:]
    assert output.count(" > loaded ") == 1
    pool.run(train, 2, f"{RUN} --save {tmp_path / 'straight'}")
    ours, straight = stored(root), stored(tmp_path / "straight")
    assert ours.keys() == straight.keys()
    assert all(torch.equal(ours[key], straight[key]) for key in straight)

"""Program: train on a GPU and print where the host waits for it in the middle of the run.

    python -m tests.support.find_waits FLAGS OF pretrain_gpt.py

torch's sync debug mode reports the waits, from the second iteration to the beginning of the last
one. Waits for events, e.g. for the votes of an earlier iteration, are not reported. The last line
of the output is a JSON object with the number of waits by their places in the product.
"""

import json
import os
import shlex
import sys
import traceback
import warnings
from collections import Counter

import torch

from megatron.training.config.parsing import parse_args
from megatron.training.training import pretrain
from pretrain_gpt import datasets_provider, forward_step, model_provider
from tests import ROOT

PRODUCT = str(ROOT / "megatron")


def find_waits(rank: int, world_size: int, flags: str) -> dict[str, int]:
    """Train with the flags of pretrain_gpt.py, and return the number of waits by their places."""
    config = parse_args(shlex.split(flags), world_size)
    schedule = config.batch_schedule(world_size // config.parallel.replica_size)
    num_passes = schedule.num_microbatches * config.parallel.vpp_size  # of an iteration
    iterations = config.training.train_iters
    assert iterations is not None
    waits = Counter[str]()
    passes = 0

    def report(message, category, filename, lineno, file=None, line=None) -> None:
        if "synchronizing CUDA operation" not in str(message):
            return
        frames = [f for f in traceback.extract_stack() if f.filename.startswith(PRODUCT)]
        waits[f"{frames[-1].filename.removeprefix(PRODUCT + '/')}: {frames[-1].name}"] += 1

    def count_passes(chunk, batch, activation):
        nonlocal passes
        if passes == num_passes:
            torch.cuda.set_sync_debug_mode("warn")
        if passes == (iterations - 1) * num_passes:
            torch.cuda.set_sync_debug_mode("default")
        passes += 1
        return forward_step(chunk, batch, activation)

    warnings.showwarning = report
    warnings.simplefilter("always")
    pretrain(config, model_provider, datasets_provider, count_passes)
    return dict(waits)


def main() -> None:
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    print(json.dumps(find_waits(rank, world_size, shlex.join(sys.argv[1:]))))


if __name__ == "__main__":
    main()

"""Train with Ray Train: every worker of a Ray cluster runs one rank of pretrain_gpt.py.

    python examples/ray/train.py --workers 16 --max-failures 10 -- FLAGS OF pretrain_gpt.py

Give `--save D --load D` on storage that all nodes share. If a worker fails, Ray starts all workers
again, and the run continues from the newest complete checkpoint. Tested with Ray 2.60.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

PROGRAM = Path(__file__).resolve().parents[2] / "pretrain_gpt.py"


def run_rank(config: dict[str, Any]) -> None:
    """Run one rank, with the addresses and numbers that Ray has assigned to this worker."""
    variables = dict(os.environ)
    # Ray's own process group listens on the port; the ranks meet at the next one.
    variables["MASTER_PORT"] = str(int(variables["MASTER_PORT"]) + 1)
    # A process of its own: it can end with the error message and the exit code of the program.
    subprocess.run([sys.executable, str(PROGRAM), *config["flags"]], env=variables, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, required=True, help="number of ranks")
    parser.add_argument("--max-failures", type=int, default=10, help="restarts after failures")
    parser.add_argument("--cpu", action="store_true", help="run without GPUs")
    parser.add_argument("flags", nargs="+", help="flags of pretrain_gpt.py, after --")
    options = parser.parse_args()

    trainer = TorchTrainer(
        run_rank,
        train_loop_config={"flags": options.flags},
        # gloo uses no GPU memory; the ranks have their own process group.
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=not options.cpu),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=options.max_failures)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()

"""Start programs with several fake devices."""

import os
import subprocess
import sys
import tempfile

from tests import ROOT


def launch(
    program: list[str], num_devices: int, timeout: float = 120.0, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run a program with torchrun, one rank per fake device, and return its outcome.

    `settings` are environment variables, e.g. FAKE_CUDA_COPY_US.
    """
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(num_devices),
        *program,
    ]
    # Files in memory: the fake NCCL creates and removes one or two for every message.
    with tempfile.TemporaryDirectory(prefix="fake_nccl_", dir="/dev/shm") as directory:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "FAKE_CUDA_DEVICES": str(num_devices),
            "FAKE_NCCL_DIR": directory,
            **settings,
        }
        return subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )


def run_code(code: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, with settings of the fake runtime."""
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", **settings}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )

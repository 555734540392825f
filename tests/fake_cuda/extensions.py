"""Train short runs with compiled packages, e.g. Transformer Engine, whose kernels do nothing here.

The packages are in the folder `extensions` of the environment, see README.md.

    python -m torch.distributed.run ... -m tests.fake_cuda.extensions FLAGS...

Every argument contains the flags of one run, for which each rank prints a line of JSON: the losses
that it reports, or the error.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.fake_cuda.launch import launch
from tests.gpu.test_device_transformer_engine import MODEL, WIDER
from tests.support.training_harness import train

EXTENSIONS = Path(sys.prefix) / "extensions"
BASE = (
    f"{MODEL}--device cuda --bf16 --mock-data --train-iters 3 --num-layers 2 "
    "--no-check-for-nan-in-loss-and-grad "
)


def needs_extension(module: str) -> pytest.MarkDecorator:
    """Return a marker that skips a test without a compiled module."""
    is_missing = not any(EXTENSIONS.glob(f"{module}*.so"))
    return pytest.mark.skipif(is_missing, reason=f"no {module} in {EXTENSIONS}")


def train_with_extensions(runs: Sequence[str], num_devices: int = 1, **settings: str) -> str:
    """Train each run, assert that it has three losses, and return the output.

    Their values are arbitrary, because kernels leave memory as it is.
    """
    libraries = str(Path(torch.__file__).parent / "lib")
    search_path = [str(EXTENSIONS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        "PYTHONPATH": os.pathsep.join(search_path),
        "LD_LIBRARY_PATH": libraries,
        **dict.fromkeys(("CUDNN_HOME", "NVRTC_HOME", "CURAND_HOME"), libraries),
        "TRITON_LIBCUDA_PATH": libraries,
        "NVTE_FUSED_ATTN": "0",  # no cuDNN
        **settings,
    }
    program = ["-m", "tests.fake_cuda.extensions", *runs]
    result = launch(program, num_devices, timeout=300, **environment)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == num_devices * len(runs)
    assert [line for line in lines if line["error"]] == []
    reported = [line for line in lines if line["losses"]]  # one rank of each run
    assert Counter(line["flags"] for line in reported) == Counter(runs)
    assert all(len(line["losses"]) == 3 for line in reported)
    return result.stdout


def main() -> None:
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    for flags in sys.argv[1:]:
        result: dict[str, object] = {"rank": rank, "flags": flags, "losses": [], "error": ""}
        with tempfile.TemporaryDirectory() as directory:
            saves = f"--async-save --save {directory} --save-interval 2 " if world_size == 1 else ""
            try:
                outcome = train(rank, world_size, BASE + saves + flags, WIDER)
                result["losses"] = outcome.measured.losses
            except Exception as error:  # the other runs do not depend on this one
                traceback.print_exc()
                result["error"] = f"{type(error).__name__}: {error}"
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

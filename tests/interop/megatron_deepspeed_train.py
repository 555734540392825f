"""Train with Megatron-DeepSpeed's own `pretrain_gpt.py` on a CPU, and record its steps.

    torchrun --nproc-per-node N megatron_deepspeed_train.py SOURCE DIRECTORY [flags of pretrain_gpt.py]

Runs in a virtual environment with torch and deepspeed, without this project. SOURCE is a checkout
of Megatron-DeepSpeed. The program trains for 6 iterations with `--save DIRECTORY`, and saves after
3; `oracle.json` in DIRECTORY gets the tokens `batches` [iteration, b, s + 1] of the last 3
iterations and their `losses`. The data-parallel size is 1.

The sources are not modified. At run time, modules that it does not need are replaced (gloo
communicates), and the dataset's helpers are compiled for the Python of the environment.
"""

import importlib
import json
import os
import runpy
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": os.environ["WORLD_SIZE"]}
import torch
import torch.distributed as dist

UNUSED_MODULES = ("megatron.model.vision.knn_monitor", "deepspeed.compression.compress")
SAVED_ITERATION = 3
NUM_ITERATIONS = 6


def leave_out_modules() -> None:
    """Skip DeepSpeed's operators, models of images, and what DeepSpeed 0.19 lacks."""
    for name in UNUSED_MODULES:
        sys.modules[name] = MagicMock()
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    importlib.import_module("deepspeed.env_report").main = lambda: None


def compile_helpers() -> None:
    """Compile the dataset's helpers with the headers of this Python."""
    folder = Path(importlib.import_module("megatron.data").__file__).parent
    includes = subprocess.check_output([sys.executable, "-m", "pybind11", "--includes"], text=True)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    make = ("make", "-C", str(folder), f"LIBEXT={suffix}", f"CPPFLAGS={includes.strip()}")
    subprocess.run(make, check=True)


def copy_views() -> None:
    """Pass contiguous q, k and v to the attention without kernels, which cannot view others."""
    attention = importlib.import_module("megatron.model.transformer").CoreAttention
    forward = attention.forward

    def forward_contiguous(self: Any, query: Any, key: Any, value: Any, *rest: Any) -> torch.Tensor:
        return forward(self, query.contiguous(), key.contiguous(), value.contiguous(), *rest)

    attention.forward = forward_contiguous


def record_steps(path: Path) -> None:
    """Record the tokens and the loss of every iteration."""
    training = importlib.import_module("megatron.training")
    tensor_parallel = importlib.import_module("megatron.core.tensor_parallel")
    broadcast_data = tensor_parallel.broadcast_data
    train_step = training.train_step
    micro_batches: list[torch.Tensor] = []
    batches: list[list] = []
    losses: list[float] = []

    def broadcast_and_keep(*arguments: Any) -> dict[str, torch.Tensor]:
        data = broadcast_data(*arguments)
        micro_batches.append(data["text"])
        return data

    def step_and_record(*arguments: Any, **options: Any) -> tuple:
        micro_batches.clear()
        result = train_step(*arguments, **options)
        batches.append(torch.cat(micro_batches).tolist() if micro_batches else [])
        losses.append(float(result[0]["lm loss"]))
        if dist.get_rank() == 0 and len(losses) == NUM_ITERATIONS:
            oracle = {"batches": batches[SAVED_ITERATION:], "losses": losses[SAVED_ITERATION:]}
            path.write_text(json.dumps(oracle))
        return result

    tensor_parallel.broadcast_data = broadcast_and_keep
    training.train_step = step_and_record


def main() -> None:
    source, directory, *flags = sys.argv[1:]
    sys.path.insert(0, source)
    leave_out_modules()
    importlib.import_module("megatron.data.dataset_utils").compile_helper = compile_helpers
    # Instead of apex's FusedAdam, whose weight decay is decoupled, too
    importlib.import_module("megatron.optimizer").Adam = torch.optim.AdamW
    copy_views()
    record_steps(Path(directory) / "oracle.json")
    schedule = f"--train-iters {NUM_ITERATIONS} --save-interval {SAVED_ITERATION}"
    sys.argv = [f"{source}/pretrain_gpt.py", *flags, *schedule.split(), "--save", directory]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()

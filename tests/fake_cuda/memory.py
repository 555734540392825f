"""Program with one rank per fake device: train, and print the memory of rank 0 as a JSON object.

    FAKE_CUDA_MAX_ELEMENTS=500000 torchrun --nproc-per-node 2 -m tests.fake_cuda.memory FLAGS

Kernels of large tensors do nothing, so that models of hundreds of megabytes take seconds.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.module import MegatronModule
from megatron.planning.run_plan import plan_run
from megatron.training.config.parsing import parse_args
from megatron.training.run import Batch, Loss
from megatron.training.training import pretrain
from pretrain_gpt import datasets_provider, forward_step, model_provider

WARM_UP = 3  # iterations until all sizes of tensors have occurred

runtime = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libcudart.so.13"))
for name in ("fake_cuda_device_allocations", "fake_cuda_peak_pinned_bytes"):
    getattr(runtime, name).restype = ctypes.c_long


def measure_host_memory() -> dict[str, int]:
    """Return counters of the fake runtime in this process."""
    return {
        "device_allocations": runtime.fake_cuda_device_allocations(),
        "peak_pinned_bytes": runtime.fake_cuda_peak_pinned_bytes(),
    }


def main() -> None:
    world_size = int(os.environ["WORLD_SIZE"])
    config = parse_args(sys.argv[1:], world_size)
    schedule = config.batch_schedule(world_size // config.parallel.replica_size)
    passes_per_iteration = schedule.num_microbatches * config.parallel.vpp_size
    passes = 0
    after_warm_up: dict[str, int] = {}

    def count_passes(
        chunk: MegatronModule, batch: Batch, activation: Tensor | None
    ) -> Tensor | Loss:
        nonlocal passes
        if passes == 0:  # memory of building the model is free
            torch.cuda.reset_peak_memory_stats()
        if passes == WARM_UP * passes_per_iteration:
            after_warm_up.update(measure_host_memory())
        passes += 1
        return forward_step(chunk, batch, activation)

    run = pretrain(config, model_provider, datasets_provider, count_passes)
    plan = plan_run(config, world_size, model_provider)
    stage = plan.stages[run.ps.pp.rank]
    result = {
        "rank": run.ps.rank,
        "used_devices": runtime.fake_cuda_used_devices(),
        "peak": torch.cuda.max_memory_allocated(),
        "planned": stage.memory.total,
        "checkpoint": stage.checkpoint_bytes,
        "after_warm_up": after_warm_up,
        "at_the_end": measure_host_memory(),
    }
    # One write of an empty buffer, so that lines of several ranks do not mix.
    sys.stdout.flush()
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

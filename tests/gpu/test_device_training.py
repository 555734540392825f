"""Training on a device gives the CPU's loss curve in every precision and layout."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from megatron.planning.run_plan import plan_run
from tests import ROOT
from tests.support.compare import assert_same
from tests.support.distributed import DistributedPool
from tests.support.fake_cuda import is_fake_cuda, needs_gpu
from tests.support.torch_versions import of_current_torch
from tests.support.training_harness import (
    COMMON,
    LAYOUTS,
    LLAMA,
    datasets_provider,
    forward_step,
    model_provider,
    parse_args,
    pretrain,
    train,
    whole,
)

FLAGS = "--mock-data --distributed-backend gloo "  # two processes share the one device


def outcome(rank, world_size, flags, iterations=4):
    result = train(
        rank, world_size, f"{FLAGS}{LLAMA}--train-iters 4 --exit-interval {iterations} {flags}"
    )
    return replace(result, boxes=[(*row, values.cpu()) for *row, values in result.boxes])


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("", 1e-4), ("--bf16", 2e-2), ("--fp16", 2e-2)]
)
def test_same_curve_as_fp32_on_the_cpu(pool, device, precision, tolerance):
    (expected,) = pool.run(outcome, 1, "--device cpu")
    (result,) = pool.run(outcome, 1, f"--device {device} {precision} --initial-loss-scale 1024")
    assert result.measured.losses == pytest.approx(expected.measured.losses, rel=tolerance)
    assert not any(result.measured.skipped)


@pytest.mark.parametrize(
    "layout", ["tp2_sp", "pp2_interleaved", "cp2", "dp2_distributed_optimizer"]
)
def test_layouts(pool, device, layout):
    world_size, flags = LAYOUTS[layout]
    (expected,) = pool.run(outcome, 1, f"--device {device}")
    result = pool.run(outcome, world_size, f"--device {device} {flags}")[0]
    assert result.measured.losses == pytest.approx(expected.measured.losses, rel=1e-4)


@pytest.mark.parametrize("save", ["", "--async-save"])
def test_resuming_is_bitwise(pool, device, save, tmp_path):
    """The checkpoint of iteration 2 is unaffected by training during its asynchronous save."""
    flags = f"--device {device} --bf16 --deterministic-mode "
    saving = f"{flags}--save {tmp_path} --save-interval 2 {save} "
    uninterrupted = pool.run(outcome, 1, saving)
    resumed = pool.run(outcome, 1, f"{flags}--load {tmp_path} --ckpt-step 2")
    assert resumed[0].measured.losses == uninterrupted[0].measured.losses[2:]
    assert_same(whole(resumed), whole(uninterrupted))


@pytest.mark.gpu
@needs_gpu("does not compute what compiled kernels compute")
def test_compiled_layers(pool):
    """See `test_compile.py` for the CPU."""
    (eager,) = pool.run(outcome, 1, "--device cuda")
    (compiled,) = pool.run(outcome, 1, "--device cuda --compile", timeout=300)
    assert compiled.measured.losses == pytest.approx(eager.measured.losses, rel=1e-4)


@pytest.fixture
def small_workspaces(monkeypatch):
    """Pool of one process with the smallest workspaces of cuBLAS, which plans do not include.

    A new process, because torch reads the settings once; torch 2.15 allocates a workspace for each
    product.
    """
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "1")
    pool = DistributedPool(max_workers=1)
    yield pool
    pool.close()


def peak_of_a_run(rank, world_size, flags):
    """Return the peak bytes of tensors on the device, from its allocator."""
    forward_passes = []

    def step(chunk, batch, activation):
        if not forward_passes:  # memory of building the model is free
            torch.cuda.reset_peak_memory_stats()
        forward_passes.append(True)
        return forward_step(chunk, batch, activation)

    config = parse_args((COMMON + flags).split(), world_size)
    before = torch.cuda.memory_allocated()
    pretrain(config, model_provider, datasets_provider, step)
    return torch.cuda.max_memory_allocated() - before


@of_current_torch
@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["", "--bf16"])
def test_memory_is_as_planned(small_workspaces, precision):
    """See `test_run_plan.py` for the CPU."""
    flags = (
        f"{FLAGS}{LLAMA}--device cuda {precision} --train-iters 4 --seq-length 256 "
        "--hidden-size 256"
    )
    config = parse_args((COMMON + flags).split(), 1)
    config.set_vocab_size(61)
    planned = plan_run(config, 1, model_provider).stages[0].memory.total
    (peak,) = small_workspaces.run(peak_of_a_run, 1, flags)
    assert planned == pytest.approx(peak, rel=0.1)


def test_the_trace_shows_the_device(pool, device, tmp_path):
    if device == "cuda" and is_fake_cuda():
        pytest.skip("the fake CUDA runtime has no CUPTI, which reports kernels")
    profiling = f"--profile --profile-step-start 2 --profile-step-end 3 --profile-dir {tmp_path}"
    pool.run(outcome, 1, f"--device {device} {profiling}")
    (trace,) = tmp_path.glob("*.json")
    kinds = {event.get("cat") for event in json.loads(trace.read_text())["traceEvents"]}
    assert "cpu_op" in kinds
    assert device == "cpu" or "kernel" in kinds


def test_a_plain_process_with_the_default_backend(device):
    """NCCL on CUDA: groups with a device and a timeout are created and destroyed."""
    flags = (
        f"{COMMON}{LLAMA}--mock-data --train-iters 4 --bf16 --device {device} "
        "--log-memory-interval 4"
    )
    environment = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    command = [sys.executable, "pretrain_gpt.py", *flags.split()]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert len(re.findall(r"lm loss: \d\.\d+E\+00", result.stdout)) == 4
    assert ("max allocated" if device == "cuda" else "max resident") in result.stdout

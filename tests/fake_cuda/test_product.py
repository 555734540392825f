"""The product on fake devices: process groups, waits of the host, snapshots of delayed copies."""

import json

import pytest

from tests.fake_cuda.launch import launch, run_code
from tests.support.training_harness import COMMON, LLAMA


def test_groups_of_different_pipeline_stages():
    """Replication groups of the node-local tier may contain an end and a middle stage."""
    result = launch(["-m", "tests.fake_cuda.collectives", "groups_after_axes"], 4)
    assert result.returncode == 0, result.stderr[-4000:]


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_experts_wait_once_per_layer_and_micro_batch(dispatcher):
    """The host needs the number of tokens of its experts, which it copies once."""
    flags = (
        f"{COMMON}{LLAMA}--mock-data --bf16 --device cuda --train-iters 3 --log-interval 100 --num-layers 2 "
        "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --add-bias-linear "
        f"--expert-model-parallel-size 2 --moe-token-dispatcher-type {dispatcher}"
    )
    result = launch(["-m", "tests.support.find_waits", *flags.split()], 2)
    assert result.returncode == 0, result.stderr[-4000:]
    waits = json.loads(result.stdout.splitlines()[-1])
    microbatches = 2
    assert sum(waits.values()) == 2 * microbatches, waits


def test_an_asynchronous_save_is_a_snapshot():
    """With copies of 3 ms each, an update that does not wait for them changes the checkpoint."""
    result = launch(["-m", "tests.fake_cuda.staging"], 1, FAKE_CUDA_COPY_US="3000")
    assert result.returncode == 0, result.stderr[-4000:]
    lines = result.stdout.splitlines()
    assert lines[:2] == ["unlimited True", "limited True"]
    assert lines[2:] == ["unlimited False", "limited False"]


def test_late_copies_are_waited_for():
    """Copies to the host of which only the event tells when they are complete."""
    code = """
import torch
from megatron.core.deferred import start_copy
wait = start_copy(torch.ones(4, device="cuda"))
print(wait().sum().item())
"""
    result = run_code(code, FAKE_CUDA_COPY_US="200000")
    assert result.stdout.split() == ["4.0"], result.stderr


def test_background_saves_do_not_wait_for_training(tmp_path):
    """The only wait is for an all-reduce on a stream of its own: a flag to the device, and back."""
    flags = (
        f"{COMMON}{LLAMA}--mock-data --bf16 --device cuda --train-iters 6 --log-interval 100 --num-layers 2 "
        f"--use-distributed-optimizer --async-save --save {tmp_path} --save-interval 3"
    )
    result = launch(["-m", "tests.support.find_waits", *flags.split()], 2)
    assert result.returncode == 0, result.stderr[-4000:]
    waits = json.loads(result.stdout.splitlines()[-1])
    assert waits == {"core/dist_checkpointing/planning/coordination.py: all_true": 2}

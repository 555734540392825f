"""Delays of copies, kernels or messages do not change losses, weights, checkpoints or operations.

A missing wait gives other results if what it should wait for is late.
"""

import functools

import pytest

from tests.fake_cuda.operations import OPERATIONS, run_operation
from tests.fake_cuda.trainings import train_ranks
from tests.support.training_harness import DISTRIBUTED_OPTIMIZER, LLAMA

EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 "
# Only the log lines of the first and the last iteration wait for the device.
BASE = (
    f"{LLAMA}--mock-data --train-iters 3 --num-layers 2 --deterministic-mode --device cuda "
    "--log-interval 100 "
)
SAVES = "--async-save --save-interval 1 "
LOCAL_SAVES = (
    "--non-persistent-ckpt-type local --non-persistent-save-interval 1 --replication "
    "--replication-factor 2 --replication-jump 1 --save-interval 3 --async-save "
)

RUNS = {  # name -> (devices, flags)
    "saves": (1, SAVES),
    "dp2": (2, "--overlap-grad-reduce --ddp-bucket-size 3000 "),
    "dp2_distributed_optimizer": (2, f"{DISTRIBUTED_OPTIMIZER}{SAVES}"),
    "dp2_bf16": (2, f"{DISTRIBUTED_OPTIMIZER}{SAVES}--bf16 "),
    "dp2_fp16": (2, f"{DISTRIBUTED_OPTIMIZER}--fp16 --initial-loss-scale 1048576 --hysteresis 1 "),
    # The votes of iteration 1 end the run after iteration 2.
    "votes": (2, "--exit-duration-in-mins 0.0000001 "),
    "tp2": (2, "--tensor-model-parallel-size 2 "),
    "tp2_sp": (2, f"--tensor-model-parallel-size 2 --sequence-parallel {SAVES}"),
    "pp2": (2, "--pipeline-model-parallel-size 2 "),
    "pp2_interleaved": (
        2,
        "--pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2 --num-layers 4 ",
    ),
    "cp2_p2p": (2, f"--context-parallel-size 2 {DISTRIBUTED_OPTIMIZER}"),
    "cp2_all_gather": (2, "--context-parallel-size 2 --cp-comm-type all_gather "),
    "cp2_a2a": (2, "--context-parallel-size 2 --cp-comm-type a2a "),
    "cp2_multi_token_prediction": (2, "--context-parallel-size 2 --mtp-num-layers 1 "),
    "ep2_allgather": (2, f"{EXPERTS}--expert-model-parallel-size 2 "),
    "ep2_alltoall": (
        2,
        f"{EXPERTS}--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall ",
    ),
    "local_replicas": (2, f"{DISTRIBUTED_OPTIMIZER}{LOCAL_SAVES}"),
    # Of the local checkpoints of iterations 1 to 4, the first and the third are replicated.
    "local_replicas_interval": (
        2,
        f"{DISTRIBUTED_OPTIMIZER}{LOCAL_SAVES}--replication-interval 2 --train-iters 4 ",
    ),
}

DELAYS = {
    "messages": {"FAKE_CUDA_MESSAGE_US": "5000"},
    "kernels": {"FAKE_CUDA_KERNEL_US": "300"},
    "copies": {"FAKE_CUDA_COPY_US": "2000"},
    "random_1": {"FAKE_CUDA_RANDOM_US": "2000", "FAKE_CUDA_SEED": "1"},
    "random_2": {"FAKE_CUDA_RANDOM_US": "2000", "FAKE_CUDA_SEED": "2"},
}


def run(name: str, **delays: str):
    """Return the outcomes of all ranks, and the hashes of their checkpoints."""
    num_devices, flags = RUNS[name]
    return train_ranks(num_devices, BASE + flags, **delays)


run_without_delays = functools.cache(run)
run_operation_without_delays = functools.cache(run_operation)


@pytest.mark.parametrize("delays", DELAYS)
@pytest.mark.parametrize("name", RUNS)
def test_same_bits_with_delays(name, delays):
    assert run(name, **DELAYS[delays]) == run_without_delays(name)


@pytest.mark.parametrize("delays", DELAYS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_same_values_with_delays(name, delays):
    assert run_operation(name, **DELAYS[delays]) == run_operation_without_delays(name)

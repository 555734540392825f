"""The product on fake devices: process groups, waits of the host, snapshots of delayed copies."""

import pytest

from tests.fake_cuda.forks import run_ranks
from tests.fake_cuda.launch import launch, run_code
from tests.fake_cuda.trainings import count_attention_kernels
from tests.support.find_waits import find_waits
from tests.support.training_harness import COMMON, DISTRIBUTED_OPTIMIZER, LLAMA

RUN = f"{COMMON}{LLAMA}--mock-data --device cuda --log-interval 100 "

DENSE_RUNS = {  # name -> (devices, flags)
    "tp2_sp": (2, "--bf16 --tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2_interleaved": (
        2,
        "--bf16 --pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2",
    ),
    "dp2_distributed_optimizer": (2, f"--bf16 {DISTRIBUTED_OPTIMIZER}"),
    "cp2_p2p": (2, "--bf16 --context-parallel-size 2"),
    "cp2_all_gather": (2, "--bf16 --context-parallel-size 2 --cp-comm-type all_gather"),
    "cp2_a2a": (2, "--bf16 --context-parallel-size 2 --cp-comm-type a2a"),
    "ademamix": (1, "--bf16 --optimizer ademamix --ademamix-beta3 0.99 --ademamix-alpha 5"),
    "muon": (1, "--bf16 --optimizer muon"),
    "recompute": (
        1,
        "--bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
}


def test_groups_of_different_pipeline_stages():
    """Replication groups of the node-local tier may contain an end and a middle stage."""
    result = launch(["-m", "tests.fake_cuda.collectives", "groups_after_axes"], 4)
    assert result.returncode == 0, result.stderr[-4000:]


def test_ranks_agree_while_training_communicates():
    """Operations of a communicator run one after another, those of training can take long."""
    program = ["-m", "tests.fake_cuda.collectives", "agree_during_training"]
    result = launch(program, 2, FAKE_CUDA_COPY_US="2000000")
    assert result.returncode == 0, result.stderr[-4000:]


def find_waits_of_rank_0(num_devices, flags):
    """Return the waits by their places, from the second iteration to the last one."""
    return run_ranks(find_waits, num_devices, flags)[0]


@pytest.mark.parametrize("name", DENSE_RUNS)
def test_dense_runs_do_not_wait(name):
    num_devices, flags = DENSE_RUNS[name]
    assert find_waits_of_rank_0(num_devices, f"{RUN}--train-iters 4 {flags}") == {}


def test_dynamic_loss_scaling_waits_once_per_iteration():
    """The loss scale of the next iteration depends on whether this one overflowed."""
    waits = find_waits_of_rank_0(1, f"{RUN}--train-iters 4 --fp16 --initial-loss-scale 1024")
    assert waits == {"core/optimizer/optimizer.py: step": 2}


def test_a_log_line_waits_twice():
    """Once for the losses, and once for all other values."""
    waits = find_waits_of_rank_0(
        1, f"{RUN}--train-iters 4 --bf16 --log-interval 1 --log-params-norm"
    )
    module = "training/reporting/intervals.py"
    assert waits == {f"{module}: reduce_losses": 2, f"{module}: _read_scalars": 2}


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
def test_experts_wait_once_per_layer_and_micro_batch(dispatcher):
    """The host needs the number of tokens of its experts, which it copies once."""
    flags = (
        f"{RUN}--bf16 --train-iters 3 --num-layers 2 "
        "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --add-bias-linear "
        f"--expert-model-parallel-size 2 --moe-token-dispatcher-type {dispatcher}"
    )
    waits = find_waits_of_rank_0(2, flags)
    microbatches = 2
    assert sum(waits.values()) == 2 * microbatches, waits


@pytest.mark.parametrize("comm_type", ["p2p", "all_gather"])
def test_windows_and_documents_over_ranks_have_no_mask(comm_type):
    """Masks need the memory-efficient kernel; without them all blocks are of flash attention."""
    flags = (
        f"{RUN}--bf16 --train-iters 3 --num-layers 2 --context-parallel-size 2 "
        f"--cp-comm-type {comm_type} --window-size 5,0 --reset-attention-mask "
    )
    for kernels in run_ranks(count_attention_kernels, 2, flags):
        assert kernels.keys() == {"_flash_attention_forward", "_flash_attention_backward"}


def test_two_processes_on_one_gpu_are_explained():
    program = ["pretrain_gpt.py", *RUN.split(), "--train-iters", "3"]
    result = launch(program, 2, FAKE_CUDA_DEVICES="1", FAKE_NCCL_TIMEOUT="5")
    assert result.returncode != 0
    assert "another process of this node have the same GPU (cuda:0, 1 visible)" in result.stderr


def test_memory_is_logged_after_the_first_iteration():
    result = launch(["pretrain_gpt.py", *RUN.split(), "--train-iters", "3"], 1)
    (line,) = [line for line in result.stdout.splitlines() if "memory after iteration" in line]
    assert "memory after iteration 1," in line
    assert "max reserved" in line


def test_programs_on_the_cpu_do_not_initialize_cuda():
    """A context takes some 500 MB of a GPU."""
    code = """
import torch
from megatron.core.dist_checkpointing.generators import get_generator_states
print(get_generator_states()["cuda_rng_state"], torch.cuda.is_initialized())
torch.ones(1, device="cuda")
print(len(get_generator_states()["cuda_rng_state"]))
"""
    assert run_code(code).stdout.split() == ["None", "False", "16"]


def test_an_asynchronous_save_is_a_snapshot():
    """With copies of 3 ms each, an update that does not wait for them changes the checkpoint."""
    result = launch(["-m", "tests.fake_cuda.staging"], 1, FAKE_CUDA_COPY_US="3000")
    assert result.returncode == 0, result.stderr[-4000:]
    lines = result.stdout.splitlines()
    assert lines[:2] == ["unlimited True", "limited True"]
    assert lines[2:] == ["unlimited False", "limited False"]


def test_background_saves_do_not_wait_for_training(tmp_path):
    """Nor do they wait for the device when ranks agree on the plan."""
    flags = (
        f"{RUN}--bf16 --train-iters 6 --num-layers 2 "
        f"--use-distributed-optimizer --async-save --save {tmp_path} --save-interval 3"
    )
    assert find_waits_of_rank_0(2, flags) == {}

"""Layouts on 1, 2 and 4 fake devices with NCCL train with the losses of one CPU process."""

import functools
import re
import shlex

import pytest

from tests.fake_cuda.launch import launch
from tests.support.training_harness import COMMON, DISTRIBUTED_OPTIMIZER, LLAMA

EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 "
RESTRICTED = "--window-size 5,0 --reset-attention-mask --eod-mask-loss "
MODELS = (EXPERTS, RESTRICTED)
SAVES = "--async-save --save-interval 1 --keep-last-n 1 "

LAYOUTS = {  # name -> (devices, flags)
    "plain": (1, SAVES),
    "bf16": (1, "--bf16 "),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "tp2_sp": (2, f"--tensor-model-parallel-size 2 --sequence-parallel {SAVES}"),
    "pp2_interleaved": (
        2,
        "--pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2",
    ),
    "dp2": (2, ""),
    "dp2_distributed_optimizer": (2, f"{DISTRIBUTED_OPTIMIZER}{SAVES}"),
    "cp2_p2p": (2, f"--context-parallel-size 2 {DISTRIBUTED_OPTIMIZER}"),
    "cp2_all_gather": (2, "--context-parallel-size 2 --cp-comm-type all_gather"),
    "cp2_a2a": (2, "--context-parallel-size 2 --cp-comm-type a2a"),
    "cp2_window_documents": (2, f"{RESTRICTED}--context-parallel-size 2 --bf16"),
    "cp4_window_documents": (
        4,
        f"{RESTRICTED}--context-parallel-size 4 --cp-comm-type all_gather --bf16",
    ),
    "ep2_allgather": (2, f"{EXPERTS}--expert-model-parallel-size 2"),
    "ep2_alltoall": (
        2,
        f"{EXPERTS}--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
    ),
    "tp2_pp2_sp": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2",
    ),
    "tp2_dp2": (4, f"--tensor-model-parallel-size 2 {DISTRIBUTED_OPTIMIZER}{SAVES}"),
    "pp2_dp2": (4, f"--pipeline-model-parallel-size 2 {DISTRIBUTED_OPTIMIZER}"),
    "pp4": (4, "--pipeline-model-parallel-size 4"),
    "tp2_ep2": (
        4,
        f"{EXPERTS}--tensor-model-parallel-size 2 --sequence-parallel "
        "--expert-model-parallel-size 2",
    ),
}


def train(flags: str, num_devices: int, **settings: str) -> list[float]:
    """Run the training program and return the logged losses."""
    program = [
        "pretrain_gpt.py",
        *shlex.split(f"{COMMON}{LLAMA}--mock-data --train-iters 3 {flags}"),
    ]
    result = launch(program, num_devices, **settings)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", result.stdout)]


@functools.cache
def train_on_cpu(model: str) -> tuple[float, ...]:
    return tuple(train(f"{model}--device cpu", 1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_losses_as_one_cpu_process(layout, tmp_path):
    num_devices, flags = LAYOUTS[layout]
    model = "".join(model for model in MODELS if model in flags)
    expected = train_on_cpu(model)
    save = f"--save {tmp_path} " if SAVES in flags else ""
    # Delayed copies: an operation that does not wait for its input gives other losses.
    losses = train(f"{flags} {save}--device cuda", num_devices, FAKE_CUDA_COPY_US="300")
    assert len(losses) == 3
    assert losses == pytest.approx(expected, rel=2e-3 if "--bf16" in flags else 2e-6)

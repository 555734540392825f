"""The first micro-batch overwrites gradients: the same bits as zeroing them and adding."""

from unittest import mock

import pytest
import torch

from megatron.core.distributed import DistributedDataParallel
from tests.support.training_harness import COMMON, DISTRIBUTED_OPTIMIZER, LLAMA, train

EXPERTS = f"{LLAMA} --num-experts 4 --moe-router-topk 2 --moe-layer-freq 2 "
TIED = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --ffn-hidden-size 48 "
    "--num-layers 4 "
)
RECOMPUTED = (
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --bf16 "
)
RUNS = {  # name -> (processes, flags)
    "one process, bf16, tied": (1, f"{TIED} --bf16 --global-batch-size 6"),
    "one process, gradients in bf16": (1, f"{LLAMA} --bf16 --grad-reduce-in-bf16"),
    "one micro-batch, recomputed": (1, f"{LLAMA} {RECOMPUTED} --global-batch-size 2"),
    "experts": (1, f"{EXPERTS} --global-batch-size 6"),
    "experts, bf16": (1, f"{EXPERTS} --bf16 --global-batch-size 2"),
    "multi-token prediction": (1, f"{LLAMA} --mtp-num-layers 1 --global-batch-size 6"),
    "TP 2 with SP": (
        2,
        f"{TIED} --tensor-model-parallel-size 2 --sequence-parallel --global-batch-size 6",
    ),
    "PP 2, tied": (2, f"{TIED} --pipeline-model-parallel-size 2 --global-batch-size 6"),
    "PP 2, one micro-batch": (
        2,
        f"{LLAMA} --bf16 --pipeline-model-parallel-size 2 --global-batch-size 2",
    ),
    "ZeRO": (2, f"{LLAMA} {DISTRIBUTED_OPTIMIZER} --global-batch-size 12"),
    "EP 2, ZeRO": (
        2,
        f"{EXPERTS} {DISTRIBUTED_OPTIMIZER} --bf16 --expert-model-parallel-size 2 --global-batch-size 4",
    ),
}


def train_with_nan(rank, world_size, flags):
    """Train with gradients that are NaN at the start of each iteration."""
    zero_gradients = DistributedDataParallel.zero_grad_buffer

    def poison(chunk):
        for param in chunk.parameters():
            if param.requires_grad:
                param.main_grad.fill_(torch.nan)
        zero_gradients(chunk)

    with mock.patch.object(DistributedDataParallel, "zero_grad_buffer", poison):
        return train(rank, world_size, flags, COMMON + "--mock-data --train-iters 3 ")


@pytest.mark.parametrize("name", RUNS)
def test_stale_gradients_do_not_change_a_bit(pool, name):
    processes, flags = RUNS[name]
    overwritten = pool.run(train_with_nan, processes, flags)
    added = pool.run(train_with_nan, processes, f"{flags} --no-gradient-accumulation-fusion")
    for outcome, expected in zip(overwritten, added, strict=True):
        assert outcome.measured.losses == expected.measured.losses
        assert outcome.measured.grad_norms == expected.measured.grad_norms
        for row, expected_row in zip(outcome.boxes, expected.boxes, strict=True):
            assert torch.equal(row[-1], expected_row[-1]), row[0]

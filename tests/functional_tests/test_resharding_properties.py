"""The boxes of all ranks of any layout tile the same global tensors, so every layout can load the
checkpoints of every other one.

All ranks of a layout are built one after the other in this process, without process groups.
"""

import shlex

import pytest
import torch

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.parallel_state import ParallelState
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.training.config.parsing import parse_args
from megatron.training.run import build_chunks
from pretrain_gpt import model_provider
from tests.support.compare import assert_same
from tests.support.training_harness import (
    COMMON,
    DISTRIBUTED_OPTIMIZER,
    MODELS,
    Measurements,
    Outcome,
    whole,
)

LAYOUTS = {  # name -> (processes, flags)
    "tp4_sp": (4, "--tensor-model-parallel-size 4 --sequence-parallel"),
    "tp2_pp2": (4, "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"),
    "pp4_dp2": (8, "--pipeline-model-parallel-size 4"),
    "pp2_interleaved_4_chunks": (
        2,
        "--pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 4",
    ),
    "pp3_uneven": (
        3,
        "--pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 1 "
        "--decoder-last-pipeline-num-layers 3",
    ),
    "dp2_distributed_optimizer": (2, "--use-distributed-optimizer"),
    "dp3_buckets": (3, DISTRIBUTED_OPTIMIZER),
    "dp16_more_ranks_than_rows": (16, DISTRIBUTED_OPTIMIZER),
    "tp2_dp5_buckets": (
        10,
        f"--tensor-model-parallel-size 2 --sequence-parallel {DISTRIBUTED_OPTIMIZER}",
    ),
    "tp2_pp2_dp3_interleaved": (
        12,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--virtual-pipeline-model-parallel-size 2 "
        f"{DISTRIBUTED_OPTIMIZER}",
    ),
}


def held_by(rank, world_size, flags):
    """The boxes of one rank: initial weights, main parameters, and moments that are made functions
    of them.
    """
    batch = (
        "--num-layers 8 --num-query-groups 4 --micro-batch-size 1 --global-batch-size "
        f"{4 * world_size} "
    )
    config = parse_args(
        shlex.split(f"{COMMON} --mock-data --train-iters 9 {flags} {batch}"), world_size
    )
    config.set_vocab_size(61)
    ps = ParallelState.for_rank(config.parallel, world_size, rank)
    chunks = build_chunks(
        config, ps, TensorParallelRng(0, ps.tp.rank), model_provider, config.training.seed
    )
    optimizer = MegatronOptimizer(chunks, config.optimizer, ps)
    for shard in optimizer.shards:
        shard.state["exp_avg"].copy_(shard.param + 1)
        shard.state["exp_avg_sq"].copy_(shard.param**2)
    state = {key: entry for chunk in chunks for key, entry in chunk.sharded_state_dict().items()}
    state |= optimizer.sharded_state_dict(state)
    boxes = [
        (key, entry.global_shape, box.offset, box.tensor)
        for key, entry in state.items()
        for box in entry.boxes
    ]
    return Outcome(Measurements(), 0, 0, 0.0, boxes)


def all_tensors(world_size, flags):
    return whole([held_by(rank, world_size, flags) for rank in range(world_size)])


@pytest.fixture(scope="module")
def single():
    return {name: all_tensors(1, f"{flags} --bf16") for name, flags in MODELS.items()}


def test_optimizer_tensors_match_their_weights(single):
    for tensors in single.values():
        weights = {
            key: tensor for key, tensor in tensors.items() if not key.startswith("optimizer.")
        }
        assert len(tensors) == 4 * len(weights)
        for key, weight in weights.items():
            param = tensors[f"optimizer.state.param.{key}"]
            assert torch.equal(param, weight.float())
            assert torch.equal(tensors[f"optimizer.state.exp_avg.{key}"], param + 1)
            assert torch.equal(tensors[f"optimizer.state.exp_avg_sq.{key}"], param**2)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_covers_the_same_tensors(single, model, layout):
    world_size, flags = LAYOUTS[layout]
    assert_same(all_tensors(world_size, f"{MODELS[model]} --bf16 {flags}"), single[model])

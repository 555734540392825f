"""The entries of a run's checkpoints, which are described once for all saves."""

import shlex

import pytest

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.saving.live_items import bind_items
from megatron.training.checkpoint.contents import get_state_to_save
from megatron.training.config.parsing import parse_args
from megatron.training.training import pretrain
from pretrain_gpt import datasets_provider, forward_step, model_provider
from tests.support.training_harness import COMMON, DISTRIBUTED_OPTIMIZER, LLAMA


def describe_twice(rank, size, flags):
    """Return whether entries and the tensors to stage are those of the last save: at once, and
    after a tensor of the optimizer has moved.
    """
    config = parse_args(shlex.split(COMMON + LLAMA + flags), size)
    run = pretrain(config, model_provider, datasets_provider, forward_step)

    def get_tensors():
        state = get_state_to_save(run)
        plan = run.saver._get_saver()._planner.plan_for(state)
        bound = [live.tensor for live in bind_items(plan.items, state)]
        entries = [entry for entry in state.values() if isinstance(entry, ShardedTensor)]
        return entries, bound

    def are_same(first, second):
        pairs = [
            (a, b)
            for one, other in zip(first, second, strict=True)
            for a, b in zip(one, other, strict=True)
        ]
        return all(a is b for a, b in pairs)

    before = get_tensors()
    again = get_tensors()
    shard = run.optimizer.shards[0]
    name = next(iter(shard.state))
    shard.state[name] = shard.state[name].clone()
    after = get_tensors()
    return are_same(before, again), are_same(before, after)


@pytest.mark.parametrize("flags", ["", DISTRIBUTED_OPTIMIZER + "--bf16 "], ids=["plain", "zero"])
def test_entries_are_described_once(pool, flags, tmp_path):
    run = f"--mock-data --train-iters 3 --async-save --save {tmp_path} {flags}"
    assert pool.run(describe_twice, 1, run) == [(True, False)]

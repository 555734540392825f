"""Context parallelism: the losses, samples and checkpoints of runs with whole sequences."""

import shlex

import torch

from megatron.core.transformer.placement import compute_local_positions
from megatron.training.config.parsing import parse_args
from megatron.training.training import pretrain
from pretrain_gpt import datasets_provider, forward_step, model_provider
from tests.support.compare import assert_same
from tests.support.training_harness import (
    COMMON,
    LAYOUTS,
    MODELS,
    train,
    whole,
)


def train_and_record(rank, world_size, flags):
    """Return DP rank, CP rank, and the tokens and positions of this rank, `[2, samples, s/cp]`."""
    seen = []

    def recording_forward_step(chunk, batch, activation):
        seen.append(torch.stack((batch["tokens"], batch["position_ids"])))
        return forward_step(chunk, batch, activation)

    config = parse_args(shlex.split(COMMON + flags), world_size)
    ps = pretrain(config, model_provider, datasets_provider, recording_forward_step).ps
    return ps.dp.rank, ps.cp.rank, torch.cat(seen, 1)


def test_ranks_of_a_replica_read_the_same_samples(pool):
    flags = f"--mock-data --train-iters 3 {MODELS['llama']}"
    replicas = {dp: seen for dp, _, seen in pool.run(train_and_record, 2, flags)}
    for dp, cp, seen in pool.run(train_and_record, 4, f"{flags} --context-parallel-size 2"):
        assert torch.equal(seen, replicas[dp][..., compute_local_positions(16, cp, 2)])


def test_random_numbers_continue_bitwise(pool, tmp_path):
    """The random numbers of dropout differ between ranks, and continue after a load."""
    flags = (
        f"--mock-data --train-iters 4 {MODELS['llama']} --hidden-dropout 0.2 {LAYOUTS['cp2'][1]}"
    )
    straight = pool.run(train, 2, flags)
    first = pool.run(train, 2, f"{flags} --save {tmp_path} --exit-interval 2")
    second = pool.run(train, 2, f"{flags} --load {tmp_path}")
    assert first[0].measured.losses + second[0].measured.losses == straight[0].measured.losses
    assert_same(whole(second), whole(straight))

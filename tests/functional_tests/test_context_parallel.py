"""Context parallelism: the losses, samples and checkpoints of runs with whole sequences."""

import functools
import shlex

import pytest
import torch

from megatron.core.transformer.placement import compute_local_positions
from megatron.training.config.parsing import parse_args
from megatron.training.training import pretrain
from pretrain_gpt import datasets_provider, forward_step, model_provider
from tests.support.compare import assert_same
from tests.support.training_harness import (
    COMMON,
    DISTRIBUTED_OPTIMIZER,
    LAYOUTS,
    MODELS,
    Measurements,
    train,
    whole,
)

DOCUMENTS = (
    "--mock-data --train-iters 4 --reset-attention-mask --reset-position-ids --eod-mask-loss "
)
WAYS = {
    "p2p": (2, f"--context-parallel-size 2 {DISTRIBUTED_OPTIMIZER}"),
    "all_gather": (
        4,
        "--context-parallel-size 2 --cp-comm-type all_gather --tensor-model-parallel-size 2 "
        "--sequence-parallel",
    ),
    "one for each layer": (2, "--context-parallel-size 2 --cp-comm-type a2a p2p a2a all_gather"),
    "a2a": (4, f"--context-parallel-size 2 --cp-comm-type a2a {DISTRIBUTED_OPTIMIZER}"),
    "p2p and pipeline": (4, f"{LAYOUTS['pp2'][1]} --context-parallel-size 2"),
}


def numbers(measured):
    points = [
        value
        for (name, _), value in sorted(measured.points.items())
        if name == "lm loss validation"
    ]
    return torch.tensor(measured.losses + measured.grad_norms + points, dtype=torch.float64)


LOSSES = {"mean_of_means": "", "per_token": "--calculate-per-token-loss"}


@functools.cache
def run_one_process(pool, flags):
    return numbers(pool.run(train, 1, flags)[0].measured)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("way", WAYS)
def test_losses_are_exact_with_documents_and_masks(pool, way, loss):
    """Ranks have different numbers of unmasked tokens, which must not affect any loss."""
    flags = f"{DOCUMENTS} {MODELS['gpt2']} {LOSSES[loss]} --eval-iters 1 --eval-interval 2"
    expected = run_one_process(pool, flags)
    world_size, layout = WAYS[way]
    got = numbers(pool.run(train, world_size, f"{flags} {layout}")[0].measured)
    assert len(expected) == 4 + 4 + 2
    torch.testing.assert_close(got, expected, atol=0, rtol=1e-5)


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

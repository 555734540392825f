"""Context parallelism: the losses, samples and checkpoints of runs with whole sequences."""

import shlex

import pytest
import torch

from megatron.core.transformer.placement import compute_local_positions
from megatron.training.config.parsing import parse_args
from megatron.training.run import Loss
from megatron.training.training import pretrain
from pretrain_gpt import datasets_provider, forward_step, loss_func, model_provider
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


@pytest.fixture(scope="module")
def of_one_process(pool):
    flags = (
        f"{DOCUMENTS} {MODELS['gpt2']} --calculate-per-token-loss --eval-iters 1 --eval-interval 2"
    )
    return flags, numbers(pool.run(train, 1, flags)[0].measured)


@pytest.mark.parametrize("way", WAYS)
def test_per_token_loss_is_exact_with_documents_and_masks(pool, of_one_process, way):
    """Ranks have different numbers of unmasked tokens, which must not affect any loss."""
    flags, expected = of_one_process
    world_size, layout = WAYS[way]
    got = numbers(pool.run(train, world_size, f"{flags} {layout}")[0].measured)
    assert len(expected) == 4 + 4 + 2
    torch.testing.assert_close(got, expected, atol=0, rtol=1e-5)


def mean_of_both_parts(chunk, batch, activation):
    """Return the mean of the mean losses over the positions of two ranks."""
    losses = chunk(
        batch["tokens"], batch["position_ids"], labels=batch["labels"], documents=batch["documents"]
    )
    mask = batch["loss_mask"]
    means = []
    for rank in range(2):
        part = compute_local_positions(losses.shape[1], rank, 2)
        loss = loss_func(losses[:, part], mask[:, part])
        means.append(loss.total / loss.num_tokens.clamp(min=1))
    return Loss(sum(means) / 2, torch.tensor(1.0))


def train_on_both_parts(rank, world_size, flags):
    measured = Measurements()
    config = parse_args(shlex.split(COMMON + flags), world_size)
    pretrain(config, model_provider, datasets_provider, mean_of_both_parts, writers=[measured])
    return measured


def test_default_loss_averages_the_means_of_ranks(pool):
    """Tokens have more weight on a rank with fewer of them, as in Megatron-LM.

    The log contains the mean over all tokens.
    """
    flags = f"{DOCUMENTS} {MODELS['llama']} "
    (expected,) = pool.run(train_on_both_parts, 1, flags)
    measured = pool.run(train, 2, f"{flags} --context-parallel-size 2")[0].measured
    assert measured.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)
    per_token = pool.run(train, 1, f"{flags} --calculate-per-token-loss")[0].measured
    assert measured.losses[0] == pytest.approx(per_token.losses[0], rel=1e-6)
    assert measured.grad_norms[0] != pytest.approx(per_token.grad_norms[0], rel=1e-4)


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

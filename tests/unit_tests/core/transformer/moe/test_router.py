"""Selection of experts, capacity, load balancing and its losses."""

import pytest
import torch
import torch.nn.functional as F

from megatron.core.parallel_config import ParallelConfig
from megatron.core.parallel_state import ExpertAxes, ParallelState
from megatron.core.transformer.moe import TopKRouter
from megatron.core.transformer.moe.router import (
    choose,
    choose_by_sinkhorn,
    finish_step,
    run_sinkhorn,
)
from tests.unit_tests.core.transformer.tiny_moe import make_config

MICROBATCHES = 3
TOKENS = 24


def test_groups_limit_the_selection():
    """Two of four groups are selected by the sum of their best scores.

    The expert bias affects the selection but not the weights.
    """
    options = {
        "num_experts": 8,
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": 2.5,
    }
    logits = torch.tensor([[3.0, -9.0, 2.0, 1.9, -1.0, -1.0, 2.5, -9.0]])
    bias = torch.zeros(8)
    config = make_config(**options)
    experts, probs = choose(logits, config, bias)

    assert set(experts[0].tolist()) == {0, 6}
    assert probs.sum().item() == pytest.approx(2.5)

    bias[4] = 10.0  # expert 4 and its group are selected; its weight is that of its score
    experts, probs = choose(logits, config, bias)
    assert set(experts[0].tolist()) == {4, 0}

    scores = torch.sigmoid(logits[0, experts[0]])
    torch.testing.assert_close(probs[0], 2.5 * scores / scores.sum())


def test_bias_of_a_softmax_affects_the_selection_only():
    """The bias is added to the probabilities of all experts."""
    logits = torch.tensor([[3.0, 1.0, 0.0, -1.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 0.2])
    for before in (False, True):
        config = make_config(moe_router_enable_expert_bias=True, moe_router_pre_softmax=before)
        experts, probs = choose(logits, config, bias)
        assert experts[0].tolist() == [0, 3]  # without the bias 0 and 1
        expected = logits.softmax(1)[0, experts[0]]
        if not before:
            expected = expected / expected.sum()
        torch.testing.assert_close(probs[0], expected)


def test_run_sinkhorn_scales_rows_and_columns_to_equal_sums():
    logits = make_unbalanced_logits()
    balanced = run_sinkhorn(logits)
    torch.testing.assert_close(balanced.sum(1), torch.full((64,), 1 / 64), rtol=2e-2, atol=0)
    torch.testing.assert_close(balanced.sum(0), torch.full((4,), 1 / 4), rtol=1e-4, atol=0)
    # The change of the logits is a term per row plus a term per column.
    change = balanced.log() - logits
    torch.testing.assert_close(change, change[:1] + change[:, :1] - change[:1, :1])


def make_unbalanced_logits():
    """Return logits of 64 tokens that prefer the first of 4 experts."""
    noise = torch.randn(64, 4, generator=torch.Generator().manual_seed(2))
    return noise + torch.tensor([3.0, 0.0, 0.0, 0.0])


@pytest.mark.parametrize("k", [1, 2])
def test_sinkhorn_balances_training_only(k):
    """The selection is balanced in training; the weights are always those of plain scores."""
    config = make_config(
        moe_router_load_balancing_type="sinkhorn",
        moe_aux_loss_coeff=0.0,
        moe_router_topk=k,
    )
    assert config.load_balancing == {}

    logits = make_unbalanced_logits()
    scores = logits.sigmoid() if k == 1 else logits.softmax(1)
    max_loads = {}
    for training, candidates in ((True, run_sinkhorn(logits)), (False, scores)):
        experts, probs = choose_by_sinkhorn(logits, config, (), training)
        assert torch.equal(experts, candidates.topk(k, 1).indices)
        assert torch.equal(probs, scores.gather(1, experts))
        max_loads[training] = experts.flatten().bincount(minlength=4).max()

    assert max_loads[True] < max_loads[False] * 0.6


def test_expert_bias_balances_loads():
    config = make_config(
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_topk=1,
    )
    router = TopKRouter(config, layer_number=0, axes=ExpertAxes())
    torch.nn.init.zeros_(router.weight)
    router.expert_bias.copy_(torch.tensor([0.3, 0.2, 0.1, 0.0]))
    router.start_step(1.0, per_token_loss=False)
    router(torch.ones(8, 16), 2).probs.sum().backward()
    finish_step([router])  # all tokens used the first expert
    torch.testing.assert_close(router.expert_bias, torch.tensor([0.299, 0.201, 0.101, 0.001]))


def test_forced_load_balancing_uses_all_experts():
    """The selection is random, independent of the weights, but the weights have gradients."""
    config = make_config(
        moe_router_topk=2,
        moe_router_force_load_balancing=True,
        moe_aux_loss_coeff=0.0,
    )
    router = TopKRouter(config, layer_number=0, axes=ExpertAxes())
    router.initialize(seed=1)
    router.weight.data[0].fill_(10.0)
    routing = router(torch.ones(2000, 16), 2)
    loads = routing.experts.flatten().bincount(minlength=4) / 1000
    assert (loads - 1).abs().max() < 0.15

    routing.probs[:, 0].sum().backward()
    assert (router.weight.grad.abs() > 0).all()


def test_capacity_drops_the_lowest_weights():
    config = make_config(
        moe_expert_capacity_factor=1.0,
        moe_router_topk=1,
        moe_router_pre_softmax=True,
    )
    router = TopKRouter(config, layer_number=0, axes=ExpertAxes())
    torch.nn.init.zeros_(router.weight)
    with torch.no_grad():
        router.weight[0] = 0.05
    # All tokens prefer the first expert, with increasing weights.
    kept = router(torch.linspace(1, 2, 8).unsqueeze(1).expand(8, 16), 1).kept

    assert kept.sum() == 2
    assert kept[-2:].all()


def compute_global_loss(rank, world_size):
    """Return the recorded loss of a step, its gradient, the weight, and the tokens of all ranks."""
    config = make_config(
        moe_router_load_balancing_type="global_aux_loss",
        moe_aux_loss_coeff=0.5,
        moe_router_topk=2,
    )
    axes = ExpertAxes()
    if world_size > 1:
        axes = ParallelState.create(ParallelConfig()).expert_axes
    router = TopKRouter(config, layer_number=0, axes=axes)
    router.initialize(seed=4)
    router.start_step(1.0, per_token_loss=False)
    all_tokens = torch.randn(MICROBATCHES, TOKENS, 16, generator=torch.Generator().manual_seed(9))
    for tokens in all_tokens.chunk(world_size, 1)[rank]:
        router(tokens, 1).probs.sum().mul(0.0).backward()
    recorded = router.recorded["global_load_balancing_loss"]
    return recorded, router.weight.grad, router.weight.detach(), all_tokens


def test_loss_over_the_global_batch(pool):
    """The loss is E / (k T) * sum(p * counts / T), with the mean of the counts so far.

    Two replicas with half of the tokens each have the same loss and gradient in total.
    """
    recorded, gradient, weight, all_tokens = compute_global_loss(0, 1)
    weight.requires_grad_()
    scores = torch.softmax(all_tokens @ weight.t(), -1)
    counts = F.one_hot(scores.topk(2, -1).indices, 4).sum((1, 2)).float()
    mean_counts = counts.cumsum(0) / torch.arange(1, 4).view(3, 1)
    expected = (scores.sum(1) * mean_counts).sum() * 4 / (2 * TOKENS**2)

    torch.testing.assert_close(recorded, expected.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(0.5 * expected, weight)[0])

    replicas = pool.run(compute_global_loss, 2)
    torch.testing.assert_close(sum(replica[0] for replica in replicas) / 2, recorded)
    torch.testing.assert_close(sum(replica[1] for replica in replicas) / 2, gradient)

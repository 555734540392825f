"""Permutation of rows, and token dispatch to the ranks of experts."""

from functools import partial

import pytest
import torch

from megatron.core.parallel_config import ParallelConfig
from megatron.core.parallel_state import Axis, ParallelState
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.core.transformer.moe.dispatch import Permutation
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.placement import Placement
from tests.unit_tests.core.transformer.tiny_moe import make_config


@pytest.mark.parametrize("complete", [True, False])
def test_permutation_sorts_by_key_and_is_transposed(complete):
    """Rows are sorted by key, in their order; gather and combine are transposes of each other."""
    generator = torch.Generator().manual_seed(1)
    keys = torch.randint(0, 5 if complete else 6, (7, 3), generator=generator)
    permutation = Permutation(keys, 5, complete)
    rows = torch.randn(7, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    row_of_output = []
    counts = []
    for key in range(5):
        counts.append(int((keys == key).sum()))
        for row in range(7):
            row_of_output += [row] * int((keys[row] == key).sum())

    gathered = permutation.gather(rows)
    assert torch.equal(gathered, rows[row_of_output])
    assert permutation.counts.tolist() == counts

    zeros = torch.zeros(7, 4, dtype=torch.float64)
    combined = zeros.index_add(0, torch.tensor(row_of_output), gathered)
    torch.testing.assert_close(permutation.combine(gathered, 7), combined)

    def gather_and_combine(x):
        return permutation.combine(permutation.gather(x).sin(), 7)

    torch.autograd.gradcheck(gather_and_combine, rows)


def run_with_two_used_experts(rank, world_size, options):
    """Return output and gradients of a layer in which all tokens use experts 0 and 1.

    With EP 2 both are on the first rank.
    """
    parallel = ParallelConfig(expert_model_parallel_size=world_size)
    ps = ParallelState.create(parallel) if world_size > 1 else ParallelState.for_rank(parallel)
    place = Placement(Axis(), TensorParallelRng(0, 0), experts=ps.expert_axes)
    config = make_config(moe_router_topk=2, moe_aux_loss_coeff=0.0, **options)
    layer = MoELayer(config, place, layer_number=0)
    layer.initialize(seed=3)
    layer.router.weight.data[:2].fill_(1.0)
    layer.router.weight.data[2:].fill_(-1.0)

    generator = torch.Generator().manual_seed(0)
    tokens = torch.rand(6, 2, 16, generator=generator).requires_grad_()
    output = layer(tokens)
    output.square().sum().backward()
    gradients = {}
    for name, param in layer.experts.named_parameters():
        if param.grad is not None:
            gradients[name] = param.grad
    return output.detach(), tokens.grad, gradients


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize("biases", [False, True])
def test_rank_without_tokens(pool, dispatcher, biases):
    options = {"add_bias_linear": biases, "moe_token_dispatcher_type": dispatcher}
    run = partial(run_with_two_used_experts, options=options)
    expected_output, expected_token_grad, expected_gradients = run(0, 1)
    results = pool.run(run, 2)
    for rank, (output, token_grad, gradients) in enumerate(results):
        torch.testing.assert_close(output, expected_output)
        torch.testing.assert_close(token_grad, expected_token_grad)
        for name, gradient in gradients.items():
            # Both ranks have the same tokens, so each expert sees them twice.
            expected = 2 * expected_gradients[name].chunk(2)[rank]
            torch.testing.assert_close(gradient, expected)

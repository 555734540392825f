"""`--compile`: all layers of a model share their compiled functions."""

from unittest import mock

import pytest
import torch

from megatron.core import fused_kernels
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.mlp import get_activation
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.compilation import compile_layers
from tests.support.torch_versions import of_current_torch


def run_model(num_layers, compiler=None, **options):
    """Run the passes of a model, compiled by `compiler` if there is one, and return its gradients.

    `compiler` gets a graph and its inputs, and returns a function.
    """
    config = TransformerConfig(
        num_layers=num_layers,
        hidden_size=32,
        num_attention_heads=4,
        vocab_size=40,
        max_position_embeddings=16,
        position_embedding_type="rope",
        swiglu=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **{"normalization": "RMSNorm", "add_bias_linear": False, **options},
    )
    model = GPTModel(config, make_vocab_size_divisible_by=8)
    model.initialize(1)
    for param in model.parameters():
        param.main_grad = torch.zeros_like(param)
    torch.compiler.reset()
    if compiler is not None:
        compiled = torch.compile
        with mock.patch.object(
            torch, "compile", lambda forward, **_: compiled(forward, backend=compiler)
        ):
            compile_layers(model, 16)
    tokens = torch.arange(32).view(2, 16)
    model(tokens, torch.arange(16).expand(2, 16), labels=tokens).mean().backward()
    torch.compiler.reset()
    return {
        name: param.main_grad if param.grad is None else param.grad
        for name, param in model.named_parameters()
    }


def count_graphs(num_layers):
    """Return the number of graphs that a forward and backward pass compiles."""
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    run_model(num_layers, count)
    return len(graphs)


@of_current_torch
def test_number_of_compilations_does_not_grow_with_layers():
    assert 0 < count_graphs(12) == count_graphs(1)


@of_current_torch
def test_graphs_of_experts_end_at_the_experts_and_the_losses():
    """They are attention, norm, reshaped input, router, shared expert, and residual sum."""
    options = {"num_experts": 4, "moe_router_topk": 2, "moe_shared_expert_intermediate_size": 16}
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    gradients = run_model(2, count, **options)
    assert len(graphs) == 6
    torch.testing.assert_close(gradients, run_model(2, **options))


def list_operators(graph):
    """Return the names of this project's operators in a graph."""
    targets = [str(node.target) for node in graph.graph.nodes]
    return [target.split(".")[1] for target in targets if target.startswith("megatron.")]


@pytest.mark.parametrize(
    "options", [{}, {"normalization": "LayerNorm", "add_bias_linear": True, "num_query_groups": 2}]
)
def test_graphs_contain_the_kernels(options):
    """Their references, on a CPU; a layer is one graph for each direction."""
    pytest.importorskip("triton", reason="Triton is not in the environment: pip install triton")
    # Imported here, since it takes seconds.
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    def trace(graph, inputs):
        graphs.append(list_operators(graph))
        return make_boxed_func(graph.forward)

    compiler = aot_autograd(fw_compiler=trace, partition_fn=min_cut_rematerialization_partition)
    with mock.patch.object(fused_kernels, "supports", lambda x: True):
        expected = run_model(2, **options)
        gradients = run_model(2, compiler, **options)
    forward, backward = graphs
    assert sorted(forward) == [
        *["linear"] * 4,
        *["residual_norm"] * 2,
        "split_and_rotate",
        "swiglu",
    ]
    assert sorted(backward) == sorted(f"{name}_backward" for name in forward)
    torch.testing.assert_close(gradients, expected)


@pytest.mark.parametrize(
    "options", [{"swiglu": True}, {"quick_geglu": True, "activation_func_clamp_value": 7.0}]
)
def test_layers_share_one_activation_function(options):
    """Older torch compiles again for every new function object."""
    configs = [
        TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, **options)
        for _ in range(2)
    ]
    assert get_activation(configs[0]) is get_activation(configs[1])

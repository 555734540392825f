"""`--compile`: all layers of a model share their compiled functions."""

import pytest
import torch

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.mlp import get_activation
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.compilation import compile_layers
from tests.support.torch_versions import of_current_torch


def count_graphs(num_layers, monkeypatch):
    """Return the number of graphs that a forward and backward pass compiles.

    The compiler of torch.compile is replaced by one that counts.
    """
    torch.compiler.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", lambda forward, **options: compiled(forward, backend=count))
        config = TransformerConfig(
            num_layers=num_layers,
            hidden_size=32,
            num_attention_heads=4,
            vocab_size=40,
            max_position_embeddings=16,
            position_embedding_type="rope",
            normalization="RMSNorm",
            swiglu=True,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        )
        model = GPTModel(config, make_vocab_size_divisible_by=8)
        model.initialize(1)
        compile_layers(model, 16)
    tokens = torch.arange(32).view(2, 16)
    model(tokens, torch.arange(16).expand(2, 16), labels=tokens).mean().backward()
    torch.compiler.reset()
    return len(graphs)


@of_current_torch
def test_number_of_compilations_does_not_grow_with_layers(monkeypatch):
    assert 0 < count_graphs(12, monkeypatch) == count_graphs(1, monkeypatch)


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

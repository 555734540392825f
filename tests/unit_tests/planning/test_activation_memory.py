"""Activations counted from shapes compared with the tensors that autograd keeps, and with the
published formula.
"""

import itertools

import pytest
import torch

from megatron.core.parallel_config import ParallelConfig
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.core.transformer.placement import Placement
from megatron.core.transformer.transformer_block import TransformerLayer
from megatron.core.transformer.transformer_config import LayerKind, TransformerConfig
from megatron.planning.activation_memory import ActivationMemory
from tests.support.torch_versions import of_current_torch

SIZES = {"num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 160, "num_attention_heads": 4}
PLAIN = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "max_position_embeddings": 32}
GATED = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
}
GROUPED = {"group_query_attention": True, "num_query_groups": 2}
LATENT = GATED | {
    "multi_latent_attention": True, "q_lora_rank": 48, "kv_lora_rank": 24, "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
GPT_OSS = {
    "swiglu": False,
    "quick_geglu": True,
    "activation_func_clamp_value": 7.0,
    "softmax_type": "learnable",
}
UP_AGAIN = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
WHOLE_QUERIES = {"q_lora_rank": None, "v_head_dim": 24}
SEQ = 32
BATCH = 2
DENSE = LayerKind()
EXPERTS = LayerKind(experts=True)


def config(**changes):
    return TransformerConfig(**(SIZES | PLAIN | changes))


def memory(model, tp_size=1, sequence_parallel=False, vocab_rows=128):
    parallel = ParallelConfig(
        tensor_model_parallel_size=tp_size, sequence_parallel=sequence_parallel
    )
    return ActivationMemory(model, parallel, SEQ, BATCH, vocab_rows, device_type="cpu")


def saved_bytes(model):
    """Return the bytes of the storages that a layer keeps in the graph, with its input and without
    parameters and tables.
    """
    layer = TransformerLayer(model, Placement(Axis(), TensorParallelRng(0, 0)))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(SEQ, BATCH, model.hidden_size, dtype=model.params_dtype, requires_grad=True)
    layer(x)  # the tables exist from now on
    lasting = {t.untyped_storage().data_ptr() for t in layer.parameters()}
    if layer.self_attention.rotary is not None:
        rotary = layer.self_attention.rotary(SEQ, model.params_dtype, x.device)
        lasting |= {t.untyped_storage().data_ptr() for t in rotary if isinstance(t, torch.Tensor)}
    kept = {x.untyped_storage().data_ptr(): x.untyped_storage()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in lasting:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    return sum(storage.nbytes() for storage in kept.values())


@of_current_torch
@pytest.mark.parametrize(
    "changes",
    [
        {},
        GATED,
        GATED | GROUPED,
        GATED | {"qk_layernorm": True},
        LATENT,
        LATENT | {"qk_layernorm": True},
        LATENT | WHOLE_QUERIES,
        LATENT | UP_AGAIN,
        GATED | {"swiglu": False, "geglu": True, "norm_placement": "both"},
        GATED | {"norm_placement": "post"},
        GATED | GROUPED | GPT_OSS,
        GATED | GROUPED | {"attention_output_gate": True},
        GATED | GROUPED | {"clip_qkv": 1.0},
        GATED | {"norm_weights": False},
        {"norm_weights": False, "relu": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("bf16", [False, True])
def test_layer_bytes_match_autograd(changes, bf16):
    model = config(**changes, bf16=bf16)
    assert memory(model).count_layer(DENSE) == pytest.approx(saved_bytes(model), rel=0.01)


@of_current_torch
@pytest.mark.parametrize(
    "changes",
    [
        {},
        GATED | GROUPED,
        GATED | {"qk_layernorm": True},
        LATENT,
        LATENT | WHOLE_QUERIES,
        {"recompute_granularity": "selective"},
        {"hidden_dropout": 0.1},
        {"hidden_dropout": 0.1, "attention_dropout": 0.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("bf16", [False, True])
def test_layer_bytes_with_dropout_on_a_cpu_match_autograd(changes, bf16):
    model = config(**({"attention_dropout": 0.1, "bf16": bf16} | changes))
    assert memory(model).count_layer(DENSE) == pytest.approx(saved_bytes(model), rel=0.01)


@of_current_torch
def test_windows_with_dropout_on_a_cpu_keep_no_mask():
    model = config(**GATED, attention_dropout=0.1, window_size=(8, 0))
    counted = memory(model).count_layer(LayerKind(window=True))
    assert counted == pytest.approx(saved_bytes(model), rel=0.01)


def test_sequence_parallelism_halves_all_activations():
    """Korthikanti et al. 2022: with it all of a layer's activations are divided by the number of
    ranks.
    """
    model = config()
    one_rank = memory(model).count_layer(DENSE)
    two_ranks = memory(model, 2).count_layer(DENSE)
    assert memory(model, 2, True).count_layer(DENSE) * 2 == one_rank
    assert one_rank / 2 < two_ranks < one_rank


@pytest.mark.parametrize("bf16", [False, True])
def test_recomputation_reduces_kept_bytes(bf16):
    full = {"recompute_granularity": "full", "recompute_num_layers": 2, "bf16": bf16}
    nothing = memory(config(bf16=bf16))
    selective = memory(config(recompute_granularity="selective", bf16=bf16))
    uniform = memory(config(recompute_method="uniform", **full))
    block = memory(config(recompute_method="block", **full))
    assert uniform.count_chunk([DENSE] * 4) == 2 * uniform.residual  # the inputs of two groups
    assert block.count_chunk([DENSE] * 4) == 2 * block.residual + 2 * nothing.count_layer(DENSE)
    order = [m.count_chunk([DENSE] * 4) for m in (uniform, block, selective, nothing)]
    assert all(less < more for less, more in itertools.pairwise(order))
    # Backward runs a whole group again.
    layers = [DENSE] * 4
    backward = nothing.count_chunk_backward(layers, post_process=False)
    assert uniform.count_chunk_backward(layers, post_process=False) > backward


def test_layers_of_two_kinds_are_counted_separately():
    experts = {"num_experts": 4, "moe_ffn_hidden_size": 32, "moe_layer_freq": [0, 1, 1, 1]}
    counted = memory(config(**GATED, **experts))
    dense = counted.count_layer(DENSE)
    mixed = counted.count_layer(EXPERTS)
    assert dense == memory(config(**GATED)).count_layer(DENSE) != mixed
    assert counted.count_chunk([DENSE, EXPERTS, EXPERTS]) == dense + 2 * mixed


def test_logits_are_kept_once_and_split():
    whole = memory(config(bf16=True))
    split = memory(config(bf16=True), 2)
    assert whole.logits == SEQ * BATCH * 128 * 2
    assert whole.head - 2 * whole.residual - whole.logits == SEQ * BATCH * (4 + 8 + 1 + 3 * 4 + 8)
    assert memory(config(bf16=True), 2, vocab_rows=64).logits * 2 == split.logits

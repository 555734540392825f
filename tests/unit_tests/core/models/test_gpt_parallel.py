"""A seed defines the same model in every layout: equal weights, and losses and gradients up to
rounding.
"""

import functools

import pytest
import torch

from megatron.core.models import GPTModel
from megatron.core.module import param_info
from megatron.core.parallel_config import ParallelConfig
from megatron.core.parallel_state import ParallelState
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.boxes import index_box

SEQ = 16
BATCH = 2
LLAMA = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 48,
    "group_query_attention": True,
    "num_query_groups": 2,
    "vocab_size": 53,
    "max_position_embeddings": 32,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "qk_layernorm": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
GPT2 = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 53,
    "max_position_embeddings": 32,
    "embedding_layernorm": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
NEMOTRON = {
    **LLAMA,
    "normalization": "LayerNorm",
    "apply_layernorm_1p": True,
    "swiglu": False,
    "squared_relu": True,
    "rotary_interleaved": True,
    "rotary_percent": 0.5,
}
GEGLU = {**LLAMA, "swiglu": False, "quick_geglu": True, "apply_layernorm_1p": True}
GEMMA = {
    **LLAMA,
    **{
        "swiglu": False,
        "geglu": True,
        "apply_layernorm_1p": True,
        "norm_placement": "both",
        "scale_embeddings": True,
    },
    **{
        "window_size": (5, 0),
        "window_attn_skip_freq": 2,
        "rotary_base_local": 100.0,
        "softmax_scale": 0.3,
    },
    **{
        "attn_logit_softcapping": 0.1,
        "final_logit_softcapping": 0.2,
        "untie_embeddings_and_output_weights": False,
    },
}
OLMO2 = {**LLAMA, "norm_placement": "post", "qk_layernorm_across_heads": True}
EXPERTS = {
    **LLAMA,
    "num_experts": 4,
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_shared_expert_intermediate_size": 16,
}
LATENT = {
    **LLAMA,
    "group_query_attention": False,
    "multi_latent_attention": True,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
}
GRANITE = {
    **LLAMA,
    "no_rope_freq": 2,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
MODELS = {
    "granite": GRANITE,
    "hunyuan": {**LLAMA, "qk_layernorm_after_rope": True},
    "falcon_rw": {**GPT2, "position_embedding_type": "alibi", "scale_alibi": True},
    "gpt_neox": {**LLAMA, "parallel_residual": True},
    "cohere": {**LLAMA, "parallel_residual": True, "share_parallel_norm": True},
    "command_r_plus": {
        **LLAMA,
        "normalization": "LayerNorm",
        "qk_layernorm_per_head": True,
        "apply_layernorm_1p": True,
    },
    "gptj": {
        **GPT2,
        "output_layer_bias": True,
        "parallel_residual": True,
        "share_parallel_norm": True,
    },
    "gptj_untied": {
        **LLAMA,
        "output_layer_bias": True,
        "rotary_interleaved": True,
        "final_logit_softcapping": 0.2,
    },
    "apertus": {**LLAMA, "swiglu": False, "xielu": True},
    "opt": {**GPT2, "relu": True},
    "olmo": {
        **LLAMA,
        "normalization": "LayerNorm",
        "norm_weights": False,
        "qk_layernorm": False,
        "clip_qkv": 0.05,
    },
    "nanochat": {
        **LLAMA,
        "norm_weights": False,
        "qk_layernorm_across_heads": True,
        "embedding_layernorm": True,
    },
    "gated_attention": {**LLAMA, "attention_output_gate": True},
    "afmoe": {**EXPERTS, "attention_output_gate": True, "norm_placement": "both"},
    "flex_olmo": {**EXPERTS, "norm_placement": "post"},
    "cohere2_moe": {
        **EXPERTS,
        "parallel_residual": True,
        "share_parallel_norm": True,
        "moe_average_shared_expert": True,
    },
    "mistral4": {
        **LATENT,
        "norm_placement": "both",
        "query_length_scaling": 0.5,
        "original_max_position_embeddings": 4,
    },
    "longrope": {
        **LLAMA,
        "rope_type": "longrope",
        "longrope_short_factor": [1.0, 1.1, 1.2, 1.3],
        "longrope_long_factor": [1.0, 2.0, 3.0, 4.0],
        "original_max_position_embeddings": 8,
        "rotary_scaling_factor": 4.0,
    },
    "llama": LLAMA,
    "gpt2": GPT2,
    "nemotron": NEMOTRON,
    "geglu": GEGLU,
    "gemma": GEMMA,
    "olmo2": OLMO2,
}


def build(
    name, ps, layers=None, pre=True, post=True, sequence_parallel=False, multiple=4, **changes
):
    config = TransformerConfig(**{**MODELS[name], **changes})
    model = GPTModel(
        config,
        layers=layers,
        pre_process=pre,
        post_process=post,
        tp=ps.tp,
        sequence_parallel=sequence_parallel,
        experts=ps.expert_axes,
        make_vocab_size_divisible_by=multiple,
        rng=TensorParallelRng(11, ps.tp.rank),
    )
    model.initialize(seed=3)
    return model


def batch():
    tokens = torch.randint(53, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], torch.arange(SEQ).expand(BATCH, SEQ), tokens[:, 1:]


def get_slices(box):
    return index_box(box.offset, box.shape)


def list_boxes(model, of_gradients=False):
    """Return (key, global shape, slices, values) of all boxes, or of their gradients."""
    rows = []
    for key, entry in model.sharded_state_dict().items():
        tensor = entry.local
        if of_gradients:
            if not tensor.requires_grad:  # a constant of the model
                continue
            entry = entry.flat_range(key, 0, tensor.grad.reshape(-1))
        for box in entry.boxes:
            rows.append((key, entry.global_shape, get_slices(box), box.tensor.clone()))
    return rows


def assemble(rows):
    """Return the global tensors; where boxes overlap they must be equal up to rounding."""
    whole = {}
    for key, shape, slices, values in rows:
        target = whole.setdefault(key, torch.full(shape, float("nan")))
        known = target[slices]
        replica = ~known.isnan()
        torch.testing.assert_close(
            values[replica], known[replica], msg=lambda m, key=key: f"{key}: {m}"
        )
        target[slices] = values
    assert not any(tensor.isnan().any() for tensor in whole.values())
    return whole


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tp,pp", [(2, 1), (1, 2), (2, 2)])
def test_initial_weights_do_not_depend_on_the_layout(name, tp, pp):
    expected = assemble(list_boxes(build(name, ParallelState.for_rank(ParallelConfig()))))
    rows = []
    for rank in range(tp * pp):
        ps = ParallelState.for_rank(ParallelConfig(tp, pp), tp * pp, rank)
        layers = range(ps.pp.rank * 4 // pp, (ps.pp.rank + 1) * 4 // pp)
        rows += list_boxes(build(name, ps, layers, ps.pp.is_first, ps.pp.is_last))
    got = assemble(rows)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[key], expected[key]) for key in expected)


def compute_loss_and_gradients(rank, world_size, name, tp, sequence_parallel, multiple=4):
    ps = ParallelState.for_rank(ParallelConfig())
    if world_size > 1:
        ps = ParallelState.create(ParallelConfig(tp, 1))
    model = build(name, ps, sequence_parallel=sequence_parallel, multiple=multiple)
    tokens, positions, labels = batch()
    logits = model(tokens, positions).detach()
    loss = model(tokens, positions, labels=labels)
    (loss * torch.linspace(0.5, 2.0, SEQ)).mean().backward()
    for param in model.parameters():
        if param_info(param).partial_grad and world_size > 1:
            torch.distributed.all_reduce(param.grad, group=ps.tp.group)
    return loss.detach(), logits, list_boxes(model, of_gradients=True)


def list_tensor_parallel_cases():
    """Return model, sequence parallelism and the multiple of the vocabulary size.

    Experts require sequence parallelism. With the multiple 64 the second rank has padding only.
    Other models have both values of both options, but only half of the combinations by default.
    """
    cases = []
    for index, name in enumerate(MODELS):
        has_experts = "num_experts" in MODELS[name]
        for multiple in (4, 64):
            cases.append((name, True, multiple))
            if not has_experts:
                cases.append((name, False, multiple))
            # Of the two cases of this multiple, one is slow.
            slow = -1 if (index + multiple // 64) % 2 else -2
            if not has_experts:
                cases[slow] = pytest.param(*cases[slow], marks=pytest.mark.slow)
    return cases


@functools.cache
def compute_dense(name):
    """Return loss, logits and gradients of one process."""
    loss, logits, boxes = compute_loss_and_gradients(0, 1, name, 1, False)
    return loss, logits, assemble(boxes)


@pytest.mark.parametrize(("name", "sequence_parallel", "multiple"), list_tensor_parallel_cases())
def test_tensor_parallel_equals_dense(pool, name, sequence_parallel, multiple):
    expected_loss, expected_logits, expected = compute_dense(name)
    results = pool.run(compute_loss_and_gradients, 2, name, 2, sequence_parallel, multiple)
    for loss, logits, _ in results:
        torch.testing.assert_close(loss, expected_loss, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(logits, expected_logits, atol=1e-6, rtol=1e-6)
    got = assemble([row for result in results for row in result[2]])
    for key in expected:
        torch.testing.assert_close(
            got[key], expected[key], atol=1e-6, rtol=1e-5, msg=lambda m, key=key: f"{key}: {m}"
        )


def test_vocabulary_padding_does_not_change_the_loss():
    config = TransformerConfig(**LLAMA)
    losses = []
    for multiple in (1, 8, 128):
        model = GPTModel(config, make_vocab_size_divisible_by=multiple)
        model.initialize(seed=3)
        tokens, positions, labels = batch()
        losses.append(model(tokens, positions, labels=labels).mean())
    torch.testing.assert_close(losses[1], losses[0], atol=1e-7, rtol=1e-7)
    torch.testing.assert_close(losses[2], losses[0], atol=1e-7, rtol=1e-7)


RECOMPUTE = [
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 3},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
    {"recompute_granularity": "selective"},
    {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
    {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "layernorm", "mlp", "moe"],
    },
]


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize(
    "experts",
    [{}, {"num_experts": 4, "moe_router_topk": 2, "moe_layer_freq": 2, "add_bias_linear": False}],
)
def test_recomputation_is_bitwise_equal_with_dropout(recompute, experts):
    def compute_gradients(**changes):
        ps = ParallelState.for_rank(ParallelConfig())
        model = build("gpt2", ps, hidden_dropout=0.2, attention_dropout=0.1, **experts, **changes)
        torch.manual_seed(9)
        tokens, positions, labels = batch()
        model(tokens, positions, labels=labels).mean().backward()
        return [param.grad for param in model.parameters()], torch.rand(3)

    expected, expected_random = compute_gradients()
    got, got_random = compute_gradients(**recompute)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    # Recomputation does not advance the generator.
    assert torch.equal(expected_random, got_random)


def apply_dropout(rank, world_size, sequence_parallel):
    ps = ParallelState.create(ParallelConfig(2, 1))
    model = build("gpt2", ps, sequence_parallel=sequence_parallel, hidden_dropout=0.5)
    layer = model.decoder.layers[0]
    torch.manual_seed(4)
    return layer._scale_and_drop(torch.ones(8, 2, 32))


def test_dropout_differs_between_tp_ranks_only_under_sequence_parallelism(pool):
    first, second = pool.run(apply_dropout, 2, False)
    assert torch.equal(first, second)
    first, second = pool.run(apply_dropout, 2, True)
    assert not torch.equal(first, second)


def test_gradients_are_added_to_main_grad():
    model = build("llama", ParallelState.for_rank(ParallelConfig()))
    tokens, positions, labels = batch()
    model(tokens, positions, labels=labels).mean().backward()
    expected = {name: param.grad.clone() for name, param in model.named_parameters()}
    for param in model.parameters():
        param.grad = None
        param.main_grad = torch.ones_like(param)
    model(tokens, positions, labels=labels).mean().backward()
    for name, param in model.named_parameters():
        added = param.main_grad - 1.0 if param.grad is None else param.grad
        torch.testing.assert_close(added, expected[name], atol=1e-6, rtol=1e-5)
        assert (param.grad is None) == (param.dim() == 2), name

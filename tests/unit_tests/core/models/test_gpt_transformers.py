"""Logits and gradients equal those of `transformers` for small random models of several
families.
"""

import pytest
import torch
import transformers

from megatron.core.models import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.boxes import index_box

VOCAB = 67
SEQ = 24
BATCH = 2

COMMON = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {
    **COMMON,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "head_dim": 8,
}
OURS = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
OURS_LLAMA = {
    **OURS,
    "ffn_hidden_size": 48,
    "group_query_attention": True,
    "num_query_groups": 2,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def make_rope_settings(**parameters):
    """Return the rope settings in the format of the installed version of transformers."""
    if int(transformers.__version__.split(".")[0]) >= 5:
        return {"rope_parameters": parameters}
    settings = {"rope_theta": parameters.pop("rope_theta")}
    if parameters["rope_type"] != "default":
        settings["rope_scaling"] = parameters
    return settings


HALF_ROTATED = make_rope_settings(
    rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5
)

CASES = {
    "llama": (transformers.LlamaConfig(**LLAMA), OURS_LLAMA),
    "llama3_rope": (
        transformers.LlamaConfig(**LLAMA, **make_rope_settings(**LLAMA3_ROPE)),
        {
            **OURS_LLAMA,
            "use_rope_scaling": True,
            "rope_scaling_factor": 4.0,
            "rope_original_max_position_embeddings": 16,
        },
    ),
    "llama_tied_biased": (
        transformers.LlamaConfig(
            **LLAMA, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
        ),
        {**OURS_LLAMA, "add_bias_linear": True, "untie_embeddings_and_output_weights": False},
    ),
    "mistral_window": (
        transformers.MistralConfig(**LLAMA, sliding_window=7),
        {**OURS_LLAMA, "window_size": (6, 0)},
    ),
    "phi3": (
        transformers.Phi3Config(**LLAMA, **HALF_ROTATED, sliding_window=7, pad_token_id=0),
        {**OURS_LLAMA, "rotary_percent": 0.5, "window_size": (6, 0), "norm_epsilon": 1e-5},
    ),
    "qwen2": (
        transformers.Qwen2Config(**{k: v for k, v in LLAMA.items() if k != "head_dim"}),
        {**OURS_LLAMA, "add_qkv_bias": True},
    ),
    "qwen3": (
        transformers.Qwen3Config(**{**LLAMA, "head_dim": 16}),
        {**OURS_LLAMA, "kv_channels": 16, "qk_layernorm": True},
    ),
    "llama_quick_geglu": (
        transformers.LlamaConfig(**LLAMA, hidden_act="quick_gelu"),
        {**OURS_LLAMA, "swiglu": False, "quick_geglu": True},
    ),
    "glm_interleaved": (
        transformers.GlmConfig(**LLAMA, **HALF_ROTATED, attention_bias=False, pad_token_id=0),
        {**OURS_LLAMA, "rotary_percent": 0.5, "rotary_interleaved": True},
    ),
    "nemotron": (
        transformers.NemotronConfig(**LLAMA, **HALF_ROTATED, norm_eps=1e-6, hidden_act="relu2"),
        {
            **OURS_LLAMA,
            "rotary_percent": 0.5,
            "swiglu": False,
            "squared_relu": True,
            "normalization": "LayerNorm",
            "apply_layernorm_1p": True,
        },
    ),
    "gpt2": (
        transformers.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64),
        {**OURS, "position_embedding_type": "learned_absolute"},
    ),
    "gpt2_erf": (
        transformers.GPT2Config(
            vocab_size=VOCAB,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=64,
            activation_function="gelu",
        ),
        {**OURS, "position_embedding_type": "learned_absolute", "bias_gelu_fusion": False},
    ),
    "bloom": (
        transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4),
        {**OURS, "position_embedding_type": "alibi", "embedding_layernorm": True},
    ),
    "bloom_six_heads": (
        transformers.BloomConfig(vocab_size=VOCAB, hidden_size=48, n_layer=2, n_head=6),
        {
            **OURS,
            "hidden_size": 48,
            "num_attention_heads": 6,
            "position_embedding_type": "alibi",
            "embedding_layernorm": True,
        },
    ),
}


def interleave_qkv(q, k, v, groups, head_dim):
    """Return the rows of q, k and v in our order: per group its query heads, key, value."""
    parts = [x.view(groups, -1, head_dim, *x.shape[1:]) for x in (q, k, v)]
    return torch.cat(parts, 1).flatten(0, 2)


def convert_llama_weights(hf, config):
    """Return tensors by our keys from a state dict like that of Llama."""
    groups = config.query_groups
    d = config.head_dim
    weights = {
        "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
    }
    if "model.norm.bias" in hf:
        weights["decoder.final_layernorm.bias"] = hf["model.norm.bias"]
    if config.untie_embeddings_and_output_weights:
        weights["output_layer.weight"] = hf["lm_head.weight"]
    for layer in range(config.num_layers):
        theirs = f"model.layers.{layer}."
        ours = f"decoder.layers.{layer}."
        attention = theirs + "self_attn."
        mlp = theirs + "mlp."
        for suffix in ("weight", "bias"):
            if theirs + f"input_layernorm.{suffix}" in hf:
                norms = (
                    hf[theirs + f"{name}_layernorm.{suffix}"]
                    for name in ("input", "post_attention")
                )
                for name, norm in zip(
                    ("self_attention.linear_qkv", "mlp.linear_fc1"), norms, strict=True
                ):
                    weights[f"{ours}{name}.layer_norm_{suffix}"] = norm
            if attention + f"q_proj.{suffix}" in hf:
                q, k, v = (hf[attention + f"{name}_proj.{suffix}"] for name in "qkv")
                weights[ours + f"self_attention.linear_qkv.{suffix}"] = interleave_qkv(
                    q, k, v, groups, d
                )
            if attention + f"qkv_proj.{suffix}" in hf:
                rows = (config.num_attention_heads * d, groups * d, groups * d)
                qkv = interleave_qkv(*hf[attention + f"qkv_proj.{suffix}"].split(rows), groups, d)
                weights[ours + f"self_attention.linear_qkv.{suffix}"] = qkv
            if attention + f"o_proj.{suffix}" in hf:
                weights[ours + f"self_attention.linear_proj.{suffix}"] = hf[
                    attention + f"o_proj.{suffix}"
                ]
            if mlp + f"gate_proj.{suffix}" in hf:
                gate_up = [hf[mlp + f"{name}_proj.{suffix}"] for name in ("gate", "up")]
                weights[ours + f"mlp.linear_fc1.{suffix}"] = torch.cat(gate_up)
            for name in ("gate_up_proj", "up_proj"):  # stacked already, or not gated
                if mlp + f"{name}.{suffix}" in hf:
                    weights.setdefault(
                        ours + f"mlp.linear_fc1.{suffix}", hf[mlp + f"{name}.{suffix}"]
                    )
            if mlp + f"down_proj.{suffix}" in hf:
                weights[ours + f"mlp.linear_fc2.{suffix}"] = hf[mlp + f"down_proj.{suffix}"]
        for name in "qk":
            if attention + f"{name}_norm.weight" in hf:
                weights[ours + f"self_attention.{name}_layernorm.weight"] = hf[
                    attention + f"{name}_norm.weight"
                ]
    return weights


def convert_gpt2_weights(hf, config):
    names = {
        "ln_1": "self_attention.linear_qkv.layer_norm_",
        "ln_2": "mlp.linear_fc1.layer_norm_",
        "attn.c_attn": "self_attention.linear_qkv.",
        "attn.c_proj": "self_attention.linear_proj.",
        "mlp.c_fc": "mlp.linear_fc1.",
        "mlp.c_proj": "mlp.linear_fc2.",
    }
    weights = {
        "embedding.word_embeddings.weight": hf["transformer.wte.weight"],
        "embedding.position_embeddings.weight": hf["transformer.wpe.weight"],
        "decoder.final_layernorm.weight": hf["transformer.ln_f.weight"],
        "decoder.final_layernorm.bias": hf["transformer.ln_f.bias"],
    }
    for layer in range(config.num_layers):
        for theirs, ours in names.items():
            for suffix in ("weight", "bias"):
                tensor = hf[f"transformer.h.{layer}.{theirs}.{suffix}"].t()  # Conv1D is [in, out]
                if theirs == "attn.c_attn":
                    tensor = interleave_qkv(
                        *tensor.chunk(3), config.num_attention_heads, config.head_dim
                    )
                weights[f"decoder.layers.{layer}.{ours}{suffix}"] = tensor
    return weights


def convert_bloom_weights(hf, config):
    names = {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "post_attention_layernorm.": "mlp.linear_fc1.layer_norm_",
        "self_attention.query_key_value.": "self_attention.linear_qkv.",
        "self_attention.dense.": "self_attention.linear_proj.",
        "mlp.dense_h_to_4h.": "mlp.linear_fc1.",
        "mlp.dense_4h_to_h.": "mlp.linear_fc2.",
    }
    weights = {"embedding.word_embeddings.weight": hf["transformer.word_embeddings.weight"]}
    for suffix in ("weight", "bias"):
        weights[f"embedding.word_embeddings_layernorm.{suffix}"] = hf[
            f"transformer.word_embeddings_layernorm.{suffix}"
        ]
        weights[f"decoder.final_layernorm.{suffix}"] = hf[f"transformer.ln_f.{suffix}"]
        for layer in range(config.num_layers):
            for theirs, ours in names.items():
                weights[f"decoder.layers.{layer}.{ours}{suffix}"] = hf[
                    f"transformer.h.{layer}.{theirs}{suffix}"
                ]
    return weights


@pytest.mark.parametrize("name", CASES)
def test_logits_and_gradients_equal_transformers(name):
    hf_config, ours = CASES[name]
    torch.manual_seed(5)
    hf = transformers.AutoModelForCausalLM.from_config(
        hf_config, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for param in hf.parameters():
            param.normal_(
                0.0, 0.2
            )  # including norms and biases, so that each of them has an effect

    config = TransformerConfig(**ours)
    model = GPTModel(config, make_vocab_size_divisible_by=16)
    model.initialize(seed=0)
    convert = convert_llama_weights
    if "gpt2" in name:
        convert = convert_gpt2_weights
    elif "bloom" in name:
        convert = convert_bloom_weights
    weights = convert(hf.state_dict(), config)
    state = model.sharded_state_dict()
    assert state.keys() == weights.keys()
    for key, entry in state.items():
        assert entry.global_shape == tuple(weights[key].shape), key
        for box in entry.boxes:
            slices = index_box(box.offset, box.shape)
            box.tensor.copy_(weights[key][slices])

    tokens = torch.randint(VOCAB, (BATCH, SEQ + 1))
    inputs = tokens[:, :-1]
    labels = tokens[:, 1:].contiguous()
    positions = torch.arange(SEQ).expand(BATCH, SEQ)
    expected = hf(inputs).logits
    torch.testing.assert_close(model(inputs, positions), expected, atol=1e-5, rtol=0)

    loss = model(inputs, positions, labels=labels)
    expected_loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(loss.mean(), expected_loss, atol=1e-5, rtol=1e-5)

    loss.mean().backward()
    expected_loss.backward()
    gradients = {n: p.grad for n, p in hf.named_parameters()}
    if hf_config.tie_word_embeddings:
        gradients.setdefault("lm_head.weight", None)
    for key, expected_gradient in convert(gradients, config).items():
        entry = state[key]
        got = entry.local.grad[: entry.global_shape[0]]
        torch.testing.assert_close(
            got, expected_gradient, atol=1e-5, rtol=1e-4, msg=lambda m, key=key: f"{key}: {m}"
        )
        assert (entry.local.grad[entry.global_shape[0] :] == 0).all(), "padding has no gradient"

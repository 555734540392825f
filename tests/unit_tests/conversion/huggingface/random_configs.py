"""Random config.json files, drawn from the fields that a family declares.

`SAMPLERS` has an entry for every field of every family. A value is drawn given those drawn before;
`OMITTED` leaves the field out, so that the default of transformers applies.
"""

import random
from collections.abc import Callable
from typing import Any

from megatron.conversion.huggingface.config_process import config_class
from megatron.conversion.huggingface.family import Family
from megatron.conversion.huggingface.rules import Rule

OMITTED = object()
Drawn = dict[str, Any]
Sampler = Callable[[random.Random, Drawn], Any]


def choose(*values: Any) -> Sampler:
    """Draw one of the values."""
    return lambda rng, drawn: rng.choice(values)


def choose_optional(*values: Any) -> Sampler:
    """Draw one of the values, or leave the field out."""
    return choose(*values, OMITTED)


def get_size(drawn: Drawn, *names: str) -> int:
    """Return the first of the fields that was drawn: families name sizes differently."""
    return next(drawn[name] for name in names if name in drawn)


def count_layers(drawn: Drawn) -> int:
    return get_size(drawn, "num_hidden_layers", "n_layer", "num_layers")


def draw_groups(rng: random.Random, drawn: Drawn) -> Any:
    heads = get_size(drawn, "num_attention_heads", "n_head")
    return rng.choice([1, 2, heads, None])


def draw_layer_types(rng: random.Random, drawn: Drawn) -> Any:
    layers = count_layers(drawn)
    patterns = [
        ["full_attention"] * layers,
        ["sliding_attention"] * layers,
        [rng.choice(["full_attention", "sliding_attention"]) for _ in range(layers)],
    ]
    return rng.choice([*patterns, OMITTED, OMITTED])


def draw_dense_layers(rng: random.Random, drawn: Drawn) -> Any:
    return rng.choice([[], [rng.randrange(count_layers(drawn))], OMITTED])


def draw_dense_prefix(rng: random.Random, drawn: Drawn) -> Any:
    return rng.randint(0, count_layers(drawn))


def draw_mlp_layer_types(rng: random.Random, drawn: Drawn) -> Any:
    kinds = [rng.choice(["dense", "sparse"]) for _ in range(count_layers(drawn))]
    return rng.choice([kinds, OMITTED])


def draw_no_rope_layers(rng: random.Random, drawn: Drawn) -> Any:
    pattern = [rng.choice([0, 1]) for _ in range(count_layers(drawn))]
    return rng.choice([pattern, OMITTED])


def draw_attention_types(rng: random.Random, drawn: Drawn) -> Any:
    layers = count_layers(drawn)
    kinds = [rng.choice(["global", "local"]) for _ in range(layers)]
    patterns = [[[kinds, 1]], [[["global"], layers - 1], [["local"], 1]], [[["local"], layers]]]
    return rng.choice(patterns)


def draw_layer_bases(rng: random.Random, drawn: Drawn) -> Any:
    kinds = drawn.get("layer_types", OMITTED)
    if kinds is OMITTED:
        kinds = ["sliding_attention"] * count_layers(drawn)
        kinds[::4] = ["full_attention"] * len(kinds[::4])
    bases = {layer_type: rng.choice([0, 500.0, 1000.0]) for layer_type in ("full", "sliding")}
    return rng.choice([[bases[layer_type.partition("_")[0]] for layer_type in kinds], OMITTED])


def draw_attention_layers(rng: random.Random, drawn: Drawn) -> Any:
    kinds = rng.choice([["attention"], ["full_attention"], ["full_attention", "mamba"]])
    return [rng.choice(kinds) for _ in range(count_layers(drawn))]


def draw_indexer_types(rng: random.Random, drawn: Drawn) -> Any:
    kinds = [rng.choice(["full", "shared"]) for _ in range(count_layers(drawn))]
    return rng.choice([["full", *kinds[1:]], OMITTED])


def draw_mpt_attention(rng: random.Random, drawn: Drawn) -> Any:
    return rng.choice([{"softmax_scale": 0.3}, {"clip_qkv": 0.3}, {"alibi": True}, OMITTED])


def draw_scaling(rng: random.Random) -> Drawn:
    """Return the fields of a scaled or unscaled rope."""
    scaling_type = rng.choice(["default", "linear", "llama3", "yarn"])
    fields: Drawn = {rng.choice(["rope_type", "rope_type", "type"]): scaling_type}
    if scaling_type != "default":
        fields["factor"] = rng.choice([2.0, 4.0])
    if scaling_type == "llama3":
        fields |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        fields["original_max_position_embeddings"] = 16
    if scaling_type == "yarn":
        fields |= {"beta_fast": 1.5, "beta_slow": 0.25}
        fields["original_max_position_embeddings"] = 8
        if rng.random() < 0.4:
            fields |= rng.choice(
                [
                    {"truncate": False},
                    {"mscale": 0.7, "mscale_all_dim": 0.5},
                    {"mscale": 1.0, "mscale_all_dim": 1.0},
                    {"attention_factor": 1.2},
                ]
            )
    return fields


def draw_rope(rng: random.Random, fields: tuple[str, ...], base: float) -> Drawn:
    """Return the rope of a config.json, of the `fields` that a family declares."""
    drawn = draw_any_rope(rng, fields, base)
    return {name: value for name, value in drawn.items() if name in fields}


def draw_any_rope(rng: random.Random, fields: tuple[str, ...], stated_base: float) -> Drawn:
    """Return a rope: missing, or in the form of transformers 4.x or 5.x."""
    base = rng.choice([{}, {"rope_theta": stated_base}])
    form = rng.choice(["missing", "4.x", "5.x"])
    if form == "missing":
        return base | rng.choice([{}, {"rope_scaling": None}])
    local_base = rng.choice([{}, {"rope_theta": 300.0}])
    if form == "4.x":
        result = base | {"rope_scaling": draw_scaling(rng)}
        if "rope_local_base_freq" in fields and local_base:
            result["rope_local_base_freq"] = 300.0
        return result
    whole = draw_scaling(rng) | base
    if {"partial_rotary_factor", "rotary_pct"} & set(fields):  # one rope for all layers
        return {"rope_parameters": whole}
    whole.setdefault("rope_theta", 1000.0)
    local = {"rope_type": "default", "rope_theta": 10000.0} | local_base
    return {"rope_parameters": {"full_attention": whole, "sliding_attention": local}}


def draw_longrope(rng: random.Random, drawn: Drawn) -> Drawn:
    """Return a LongRoPE with factors for the drawn sizes, in the form of transformers 4.x."""
    head_dim = drawn["hidden_size"] // drawn["num_attention_heads"]
    pairs = int(head_dim * drawn.get("partial_rotary_factor", 1.0)) // 2
    scaling: Drawn = {rng.choice(["rope_type", "type"]): "longrope"}
    for name in ("short_factor", "long_factor"):
        scaling[name] = [rng.uniform(1.0, 4.0) for _ in range(pairs)]
    # The sequences of these tests have 20 tokens: longer than one of these lengths.
    return {"rope_scaling": scaling, _ORIGINAL_LENGTH: rng.choice([8, 32])}


# Drawn together by `draw_rope`, and with a probability of its own.
ROPE_FIELDS = {"rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq"}

_ORIGINAL_LENGTH = "original_max_position_embeddings"

# Fields whose only accepted value is the default.
CONSTANTS: Drawn = {
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
    "per_layer_config": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "use_bidirectional_attention": False,
    "use_mrope": False,
    "router_jitter_noise": 0.0,
    "qkv_bias": True,
    "_remove_final_layer_norm": False,
    "learned_embeddings": True,
    "scale_embeddings": False,
    "moe_layer_freq": 1,
    "swiglu_alpha": 1.702,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "apply_residual_connection_post_layernorm": False,
    "num_nextn_predict_layers": 0,
    "use_routing_bias": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
    "qk_norm": True,
    "post_norm": False,
    "attention_layers": OMITTED,  # follows from attention_types
    "expansion_ratio": 4,
    "moe_norm_min": 1e-12,
    "no_bias": True,
}


def draw_convolutions(rng: random.Random, drawn: Drawn) -> Any:
    layers = count_layers(drawn)
    mixed = [rng.choice(["conv", "full_attention"]) for _ in range(layers)]
    return rng.choice([["full_attention"] * layers, mixed, OMITTED])


# Shorter than the 20 tokens of these tests, as long, and longer.
WINDOWS = (3, 7, 19, 20, 50)

SAMPLERS: dict[str, Sampler] = {name: choose_optional(value) for name, value in CONSTANTS.items()}
SAMPLERS |= {
    "vocab_size": choose(67, 71, 96),
    "num_hidden_layers": choose(1, 2, 3, 4),
    "n_layer": choose(1, 2),
    "num_layers": choose(1, 2, 3),
    "full_attn_idxs": choose_optional([0], [0, 1]),
    "block_ff_dim": choose(20, 24),
    "block_auto_adjust_ff_dim": choose_optional(False, True),
    "block_ffn_dim_multiplier": choose_optional(1.0, 0.7, None),
    "block_multiple_of": choose(4, 16),
    "tie_embedding": choose_optional(False, True),
    "hidden_size": choose(24, 32),
    "n_embd": choose(24, 32),
    "num_attention_heads": choose(4),
    "n_head": choose(4),
    "num_heads": choose(4),
    "intermediate_size": choose(20, 24, 33),
    "n_inner": choose_optional(40, 37, None),
    "max_position_embeddings": choose(32, 64),
    "n_positions": choose(32, 64),
    "seq_length": choose_optional(32, 64),
    "pretraining_tp": choose_optional(1, 2),
    "slow_but_exact": choose_optional(False, True),
    "torch_dtype": choose_optional("float32"),
    "dtype": choose_optional("float32"),
    "initializer_range": choose(0.2),
    "rope_theta": choose(1000.0, 10000),
    "original_max_position_embeddings": choose_optional(8, 32),
    "attention_dropout": choose_optional(0.0),
    "attn_pdrop": choose_optional(0.0, 0.2),
    "resid_pdrop": choose_optional(0.0, 0.1),
    "embd_pdrop": choose_optional(0.0, 0.3),
    "hidden_dropout": choose_optional(0.0, 0.1),
    "resid_dropout": choose_optional(0.0, 0.1),
    "embed_dropout": choose_optional(0.0, 0.1),
    "residual_dropout": choose_optional(0.0, 0.1),
    "embedding_dropout": choose_optional(0.0, 0.3),
    "hidden_act": choose_optional("silu", "silu"),
    "activation_function": choose_optional("gelu_new", "gelu", "gelu_pytorch_tanh"),
    "tie_word_embeddings": choose_optional(True, False),
    "rms_norm_eps": choose_optional(1e-6, 1e-6, 1e-3),
    "layer_norm_epsilon": choose_optional(1e-5, 1e-3),
    "layer_norm_eps": choose_optional(1e-5, 1e-3),
    "norm_epsilon": choose_optional(1e-5, 1e-3),
    "norm_eps": choose_optional(1e-5, 1e-3),
    "partial_rotary_factor": choose_optional(1.0, 0.5),
    "num_key_value_heads": draw_groups,
    "head_dim": choose_optional(8, 12, None),
    "attention_bias": choose_optional(True, False),
    "attention_out_bias": choose_optional(True, False),
    "mlp_bias": choose_optional(True, False),
    "use_bias": choose_optional(True, False),
    "use_parallel_residual": choose_optional(True, False),
    "rotary_emb_base": choose_optional(1000.0),
    "rotary_pct": choose_optional(0.5, 1.0),
    "logit_scale": choose_optional(0.0625, 0.7),
    "use_qkv_bias": choose_optional(True, False),
    "qk_layernorm": choose_optional(True, False),
    "use_qk_norm": choose_optional(True, False),
    "multi_query": choose_optional(True, False),
    "new_decoder_architecture": choose_optional(True, False),
    "parallel_attn": choose_optional(True, True, False),
    "num_ln_in_parallel_attn": choose_optional(1, 2, None),
    "num_kv_heads": draw_groups,
    "ffn_hidden_size": choose_optional(40, 37, None),
    "activation": choose_optional("gelu", "gelu_new"),
    "bias": choose_optional(True, False),
    "alibi": choose_optional(False, False, True),
    "rotary_dim": choose_optional(4, 8),
    "attention_types": draw_attention_types,
    "window_size": choose_optional(*WINDOWS),
    "no_rope_layers": draw_no_rope_layers,
    "no_rope_layer_interval": choose_optional(2, 3),
    "embedding_multiplier": choose_optional(12.0, 1.0),
    "residual_multiplier": choose_optional(0.22, 1.0),
    "logits_scaling": choose_optional(8.0, 1.0),
    "attention_multiplier": choose(0.3, 0.125),
    "layer_types": draw_layer_types,
    "sliding_window": choose_optional(*WINDOWS, None),
    "sliding_window_pattern": choose_optional(2, 2, 3),
    "use_sliding_window": choose_optional(True, True, False),
    "max_window_layers": choose_optional(0, 1, 2),
    "query_pre_attn_scalar": choose_optional(8, 24),
    "attn_logit_softcapping": choose_optional(0.7, None),
    "final_logit_softcapping": choose_optional(2.0, None),
    "num_experts": choose(4),
    "num_local_experts": choose(4),
    "n_routed_experts": choose(8),
    "num_experts_per_tok": choose(1, 2, 2, 3),
    "router_aux_loss_coef": choose_optional(0.0, 0.01),
    "moe_intermediate_size": choose(12, 20, 27),
    "shared_expert_intermediate_size": choose(12, 20, 27),
    "norm_topk_prob": choose_optional(True, False),
    "decoder_sparse_step": choose_optional(1, 2),
    "mlp_only_layers": draw_dense_layers,
    "mlp_layer_types": draw_mlp_layer_types,
    "swiglu_limit": choose_optional(0.5, 7.0),
    "q_lora_rank": choose(None, 12),
    "kv_lora_rank": choose(8),
    "qk_nope_head_dim": choose(8),
    "qk_rope_head_dim": choose(4, 8),
    "v_head_dim": choose(8, 12),
    "n_group": choose(1, 2, 4),
    "topk_group": choose(1, 2),
    "topk_method": choose_optional("greedy", "group_limited_greedy", "noaux_tc"),
    "n_shared_experts": choose(0, 1, 2),
    "first_k_dense_replace": draw_dense_prefix,
    "routed_scaling_factor": choose_optional(1.0, 2.5),
    "rope_interleave": choose_optional(True, True, False, None),
    "scoring_func": choose(OMITTED),
    "n_layers": choose(1, 2),
    "d_model": choose(24, 32),
    "n_heads": choose(4),
    "max_seq_len": choose(32, 64),
    "attn_config": draw_mpt_attention,
    "emb_pdrop": choose_optional(0.0),
    "use_post_norm": choose_optional(True, False),
    "layer_rope_theta": draw_layer_bases,
    "shared_intermediate_size": choose_optional(0, 12, 20),
    "layers_block_type": choose(OMITTED),
    "mamba_n_heads": choose(4),
    "position_embedding_type": choose_optional("rope", "nope", None),
    "num_shared_experts": choose(1, 2),
    "router_scaling_factor": choose_optional(1.0, 2.5),
    "moe_num_experts": choose(4),
    "moe_topk": choose(2, 3, 1),
    "moe_num_shared_experts": choose(1, 2),
    "moe_k": choose(2, 3, 1),
    "moe_layer_start_index": choose_optional(0, 1),
    "moe_layer_end_index": choose_optional(-1, 2),
    "moe_layer_interval": choose_optional(1, 2),
    # At least as many as the sequences of these tests have tokens.
    "index_topk": choose(20, 32),
    "index_head_dim": choose(8, 12),
    "index_n_heads": choose(2),
    "indexer_types": draw_indexer_types,
    "index_topk_pattern": choose(OMITTED),
    "index_topk_freq": choose_optional(2),
    "index_skip_topk_offset": choose_optional(1, 2),
    "clip_qkv": choose_optional(0.3, 2.0, None),
    "rope_interleaved": choose_optional(False),
    "ffn_dim": choose(20, 24),
    "word_embed_proj_dim": choose_optional(32, None),
    "do_layer_norm_before": choose_optional(True, True, False),
    "enable_bias": choose_optional(True, False),
    "layer_norm_elementwise_affine": choose_optional(True, False),
    "dropout": choose_optional(0.0, 0.1),
    "init_std": choose(0.2),
    "hidden_dropout_prob": choose_optional(0.0, 0.1),
    "attention_probs_dropout_prob": choose_optional(0.0, 0.1),
    "scale_embedding": choose_optional(True, False),
    "mup_enabled": choose_optional(True, False),
    "global_attn_every_n_layers": choose_optional(2, 3),
    "num_dense_layers": draw_dense_prefix,
    "route_scale": choose_optional(1.0, 2.5),
    "score_func": choose(OMITTED),
    "route_norm": choose(OMITTED),
    "num_expert_groups": choose(OMITTED),
    "num_limited_groups": choose(OMITTED),
    "prefix_dense_intermediate_size": choose_optional(24, None),
    "prefix_dense_sliding_window_pattern": choose_optional(1, 2),
    "expert_selection_fn": choose_optional("softmax", "sigmoid", "sigmoid"),
    "shared_expert_combination_strategy": choose_optional("average", "sum"),
}


# Samplers of single families, in which most values of the general ones are refused.
_FALSE = choose_optional(False, False, False, True)
_NO_HEAD_GROUPS = {
    "num_key_value_heads": choose(4, 4, None, 2),
    "head_dim": lambda rng, drawn: rng.choice([drawn["qk_rope_head_dim"], OMITTED]),
}
_SQUARED_RELU = {"hidden_act": choose_optional("relu2", "relu2", "silu")}
_SIGMOID_EXPERTS: dict[str, Sampler] = {
    "topk_method": choose_optional("noaux_tc", "noaux_tc", "greedy"),
    "norm_topk_prob": choose(True, True, True, False),
    "num_experts_per_tok": choose(2, 2, 3, 1),
    "attention_bias": _FALSE,
}
_GLM_MOE = _SIGMOID_EXPERTS | {"attention_bias": choose_optional(True, False)}
_HEADS = {"head_dim": choose(8, 12), "num_key_value_heads": choose(1, 2, 4)}
_INDEXED = (
    _SIGMOID_EXPERTS
    | _NO_HEAD_GROUPS
    | {
        "q_lora_rank": choose(12),
        "layer_types": choose(OMITTED),
        "mlp_bias": choose_optional(False),
        "rope_interleave": choose(OMITTED),
    }
)
OF_FAMILIES: dict[str, dict[str, Sampler]] = {
    "gemma": {"hidden_act": choose_optional("gelu_pytorch_tanh", "gelu")},
    "apertus": {
        "hidden_act": choose_optional("xielu"),
        "head_dim": choose(OMITTED),
        "mlp_bias": choose_optional(False),
    },
    "arcee": _SQUARED_RELU,
    "jais2": _SQUARED_RELU,
    "nemotron": _SQUARED_RELU,
    "persimmon": _SQUARED_RELU,
    "stablelm": {"hidden_size": choose(32)},
    "starcoder2": {"hidden_act": choose_optional("gelu_pytorch_tanh", "gelu", "silu")},
    "gpt_neox": {
        "hidden_act": choose_optional("gelu", "gelu_new"),
        "hidden_size": choose(32),
        "attention_bias": choose_optional(True),
    },
    "phi": {"hidden_act": choose_optional("gelu_new", "gelu")},
    "cohere": {"head_dim": choose(OMITTED)},
    "cohere2": {"head_dim": choose(OMITTED), "sliding_window": choose(*WINDOWS)},
    "helium": {"head_dim": choose(8), "hidden_size": choose(32)},
    "smollm3": {"use_sliding_window": _FALSE},
    # Layers with a window have the default base unless their own parameters state another.
    "olmo3": {"attention_bias": _FALSE, "rope_theta": choose(500000.0)},
    "cwm": {"mlp_bias": _FALSE, "rms_norm_eps": choose_optional(1e-5)},
    "deepseek_v2": _NO_HEAD_GROUPS
    | {
        "topk_method": choose_optional("greedy", "group_limited_greedy", "noaux_tc"),
        "norm_topk_prob": choose_optional(False, False, True),
        "attention_bias": choose_optional(False, False, True),
        "mlp_bias": choose_optional(False, False, True),
    },
    "deepseek_v3": _NO_HEAD_GROUPS
    | {
        "topk_method": choose_optional("noaux_tc", "noaux_tc", "greedy"),
        "attention_bias": choose_optional(False, False, True),
    },
    "glm4_moe_lite": _SIGMOID_EXPERTS
    | _NO_HEAD_GROUPS
    | {"first_k_dense_replace": choose_optional(1)},
    "glm4_moe": _GLM_MOE | _HEADS,
    "solar_open": _GLM_MOE
    | _HEADS
    | {"first_k_dense_replace": choose_optional(0, 0, 1), "use_qk_norm": _FALSE},
    "dots1": _SIGMOID_EXPERTS,
    "minimax_m2": _SIGMOID_EXPERTS
    | _HEADS
    | {"use_qk_norm": choose_optional(True), "rms_norm_eps": choose_optional(1e-6, 1e-3)},
    "internlm3": {
        "qkv_bias": choose_optional(True, False),
        "attention_bias": choose(OMITTED),
        "mlp_bias": choose_optional(True, False),
        "bias": choose(OMITTED),
    },
    "iquestcoder": {"use_sliding_window": choose_optional(False), "clip_qkv": choose(None)},
    "flex_olmo": {"attention_bias": _FALSE},
    "olmo": {"head_dim": choose(OMITTED)},
    "opt": {
        "activation_function": choose_optional("relu", "relu", "gelu"),
        "hidden_size": choose(32),
    },
    "biogpt": {"hidden_act": choose_optional("gelu", "gelu_new", "relu")},
    "nanochat": _SQUARED_RELU | {"final_logit_softcapping": choose_optional(2.0, 0.5, None)},
    "afmoe": _SIGMOID_EXPERTS
    | {
        "sliding_window": choose(*WINDOWS),
        "n_group": choose(OMITTED),
        "topk_group": choose(OMITTED),
    },
    "cohere2_moe": {
        "attention_bias": _FALSE,
        "intermediate_size": choose(12, 20),
        "rms_norm_eps": choose_optional(1e-6, 1e-3, None),
        "sliding_window": choose(*WINDOWS),
        "first_k_dense_replace": choose_optional(0, 1),
        "norm_topk_prob": choose_optional(True, True, False),
        "num_shared_experts": choose_optional(0, 1, 2),
    },
    "flint": {
        "attention_bias": _FALSE,
        "norm_topk_prob": choose(True, True, False),
        "num_hidden_layers": choose(3, 4, 5),
        "mlp_only_layers": choose_optional([0], [1, 2], None),
        "sliding_window": choose(*WINDOWS),
    },
    "mistral4": _NO_HEAD_GROUPS
    | {
        "attention_bias": _FALSE,
        "head_dim": choose(OMITTED),
        "n_group": choose(1, 1, 2),
        "topk_group": choose(1),
    },
    "hyperclovax": {"attention_multiplier": choose_optional(0.3, 0.125)},
    "mpt": {"logit_scale": choose(OMITTED), "n_inner": choose(OMITTED)},
    "youtu": _NO_HEAD_GROUPS | {"attention_bias": _FALSE, "initializer_range": choose(0.2)},
    "hy_v3": {
        "attention_bias": _FALSE,
        "mlp_bias": choose_optional(False),
        "first_k_dense_replace": choose(OMITTED),
    },
    "exaone_moe": _SIGMOID_EXPERTS
    | {"first_k_dense_replace": choose_optional(0, 1, 2), "num_experts": choose(8)},
    "ernie4_5_moe": {"use_bias": _FALSE},
    "hunyuan_v1_moe": {
        "attention_bias": _FALSE,
        "moe_topk": choose(2, 3, 1, [2] * 4, [3, 2, 2, 2]),
        "num_experts_per_tok": choose(OMITTED),
    },
    "deepseek_v32": _INDEXED,
    "glm_moe_dsa": _INDEXED,
    "aria_text": {"attention_bias": _FALSE, "mlp_bias": choose_optional(False)},
    "granitemoehybrid": {
        "layer_types": draw_attention_layers,
        "num_local_experts": choose(0, 0, 4),
        "shared_intermediate_size": choose(12, 20),
    },
    "lfm2": {
        "layer_types": draw_convolutions,
        "intermediate_size": choose(OMITTED),
        "tie_word_embeddings": choose(OMITTED),
    },
    "granite_swa": {"sliding_window_pattern": choose(OMITTED), "sliding_window": choose(*WINDOWS)},
    "granitemoe_swa": {
        "sliding_window_pattern": choose(OMITTED),
        "sliding_window": choose(*WINDOWS),
    },
    "mellum": {
        "first_k_dense_replace": choose(OMITTED),
        "sliding_window_pattern": choose(OMITTED),
        "sliding_window": choose(*WINDOWS),
    },
}


def is_alias_group(rule: Rule) -> bool:
    """Return whether the fields of a rule are names of one value."""
    arguments = set(map(str, rule.fields.values()))
    return len(rule.fields) > 1 and len(arguments) == 1 and not rule.repeated


def undeclared_fields(family: Family) -> set[str]:
    """Return the fields of a family that have no sampler."""
    missing = set()
    for rule in family.all_rules:
        first, *aliases = rule.fields or [None]
        names = {first} if is_alias_group(rule) else {first, *aliases}
        missing |= names - {None} - SAMPLERS.keys() - ROPE_FIELDS
    return missing


def draw_config(family: Family, rng: random.Random) -> Drawn:
    """Return the fields of a config.json; transformers may refuse it."""
    known_aliases = config_class(family.model_type).attribute_map
    samplers = SAMPLERS | OF_FAMILIES.get(family.model_type, {})
    drawn: Drawn = {}
    for rule in family.all_rules:
        fields = tuple(rule.fields)
        if is_alias_group(rule):
            aliases = [name for name in fields[1:] if name in known_aliases]
            name = rng.choice([fields[0], *aliases])
            value = samplers[fields[0]](rng, drawn)
            drawn |= {} if value is OMITTED else {name: value}
            continue
        if ROPE_FIELDS & set(fields):
            drawn |= draw_rope(rng, fields, samplers["rope_theta"](rng, drawn))
        for name in fields:
            if name in ROPE_FIELDS:
                continue
            value = samplers[name](rng, drawn)
            drawn |= {} if value is OMITTED else {name: value}
    if family.model_type == "phi3" and rng.random() < 0.6:
        drawn.pop("rope_parameters", None)
        drawn |= draw_longrope(rng, drawn)
    if family.model_type.startswith("hunyuan") and rng.random() < 0.4:
        drawn.pop("rope_scaling", None)
        drawn["rope_parameters"] = {"rope_type": "dynamic", "alpha": 50.0, "rope_theta": 1000.0}
        drawn.pop("rope_theta", None)
    if family.model_type in ("ministral3", "mistral4"):
        for name in ("rope_scaling", "rope_parameters"):
            if drawn.get(name):
                drawn[name] |= {"llama_4_scaling_beta": rng.choice([0.1, 0.5])}
    drawn |= {"model_type": family.model_type, "architectures": [family.architecture]}
    # Special tokens of the defaults are not in these small vocabularies.
    return drawn | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}

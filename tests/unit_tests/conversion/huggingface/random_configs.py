"""Random config.json files, drawn from the fields that a family declares.

`SAMPLERS` has an entry for every field of every family. A value is drawn given those drawn before;
`OMITTED` leaves the field out, so that the default of transformers applies.
"""

import random
from collections.abc import Callable
from typing import Any

from megatron.conversion.huggingface.config_fields import config_class
from megatron.conversion.huggingface.families import Family
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
    return get_size(drawn, "num_hidden_layers", "n_layer")


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


def draw_scaling(rng: random.Random) -> Drawn:
    """Return the fields of a scaled or unscaled rope."""
    kind = rng.choice(["default", "linear", "llama3", "yarn"])
    fields: Drawn = {rng.choice(["rope_type", "rope_type", "type"]): kind}
    if kind != "default":
        fields["factor"] = rng.choice([2.0, 4.0])
    if kind == "llama3":
        fields |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        fields["original_max_position_embeddings"] = 16
    if kind == "yarn":
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


def draw_rope(rng: random.Random, fields: tuple[str, ...]) -> Drawn:
    """Return the rope of a config.json: missing, or in the form of transformers 4.x or 5.x."""
    base = rng.choice([{}, {"rope_theta": 1000.0}, {"rope_theta": 10000}])
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
    if "rope_local_base_freq" not in fields:
        return {"rope_parameters": whole}
    local = {"rope_type": "default"} | local_base
    return {"rope_parameters": {"full_attention": whole, "sliding_attention": local}}


# Drawn together by `draw_rope`, and with a probability of its own.
ROPE_FIELDS = {"rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq"}

# Fields whose only accepted value is the default: stating it changes nothing.
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
    "clip_qkv": None,
    "moe_layer_freq": 1,
    "swiglu_alpha": 1.702,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "apply_residual_connection_post_layernorm": False,
    "num_nextn_predict_layers": 0,
}
SAMPLERS: dict[str, Sampler] = {name: choose_optional(value) for name, value in CONSTANTS.items()}
SAMPLERS |= {
    "vocab_size": choose(67, 96),
    "num_hidden_layers": choose(1, 2, 3, 4),
    "n_layer": choose(1, 2),
    "hidden_size": choose(24, 32),
    "n_embd": choose(24, 32),
    "num_attention_heads": choose(4),
    "n_head": choose(4),
    "intermediate_size": choose(20, 24),
    "n_inner": choose_optional(40, None),
    "max_position_embeddings": choose(32, 64),
    "n_positions": choose(32, 64),
    "seq_length": choose_optional(32, 64),
    "torch_dtype": choose_optional("float32"),
    "dtype": choose_optional("float32"),
    "initializer_range": choose(0.2),
    "attention_dropout": choose_optional(0.0),
    "attn_pdrop": choose_optional(0.0, 0.2),
    "resid_pdrop": choose_optional(0.0, 0.1),
    "embd_pdrop": choose_optional(0.0, 0.3),
    "hidden_dropout": choose_optional(0.0, 0.1),
    "hidden_act": choose_optional("silu", "silu"),
    "activation_function": choose_optional("gelu_new", "gelu", "gelu_pytorch_tanh"),
    "tie_word_embeddings": choose_optional(True, False),
    "rms_norm_eps": choose_optional(1e-6, 1e-6, 1e-3),
    "layer_norm_epsilon": choose_optional(1e-5, 1e-3),
    "partial_rotary_factor": choose_optional(1.0, 0.5),
    "num_key_value_heads": draw_groups,
    "head_dim": choose_optional(8, 12, None),
    "attention_bias": choose_optional(True, False),
    "mlp_bias": choose_optional(True, False),
    "layer_types": draw_layer_types,
    "sliding_window": choose_optional(3, 7, None),
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
    "moe_intermediate_size": choose(12, 20),
    "shared_expert_intermediate_size": choose(12, 20),
    "norm_topk_prob": choose_optional(True, False),
    "decoder_sparse_step": choose_optional(1, 2),
    "mlp_only_layers": draw_dense_layers,
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
    "rope_interleave": choose_optional(True, True, None),
    "scoring_func": choose(OMITTED),
}


# Samplers of single families, in which most values of the general ones are refused.
_DEEPSEEK: dict[str, Sampler] = {
    "num_key_value_heads": choose(4, 4, None, 2),
    "rms_norm_eps": choose_optional(1e-6, 1e-6, 1e-6, 1e-3),
}
OF_FAMILIES: dict[str, dict[str, Sampler]] = {
    "gemma": {"hidden_act": choose_optional("gelu_pytorch_tanh", "gelu")},
    "arcee": {"hidden_act": choose_optional("relu2", "relu2", "silu")},
    "deepseek_v2": _DEEPSEEK
    | {
        "topk_method": choose_optional("greedy", "group_limited_greedy", "noaux_tc"),
        "norm_topk_prob": choose_optional(False, False, True),
        "attention_bias": choose_optional(False, False, True),
        "mlp_bias": choose_optional(False, False, True),
    },
    "deepseek_v3": _DEEPSEEK
    | {
        "topk_method": choose_optional("noaux_tc", "noaux_tc", "greedy"),
        "attention_bias": choose_optional(False, False, True),
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
            drawn |= draw_rope(rng, fields)
        for name in fields:
            if name in ROPE_FIELDS:
                continue
            value = samplers[name](rng, drawn)
            drawn |= {} if value is OMITTED else {name: value}
    drawn |= {"model_type": family.model_type, "architectures": [family.architecture]}
    # Special tokens of the defaults are not in these small vocabularies.
    return drawn | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}

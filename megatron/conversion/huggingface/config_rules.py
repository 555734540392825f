"""Rules between fields of `config.json` and model arguments, each with its inverse.

Both generations are read: transformers 4.x (`rope_theta`, `rope_scaling`, `torch_dtype`) and 5.x (`rope_parameters`,
`dtype`). The 4.x form is written, because both generations load it. A field that no rule knows is refused unless it is
in `HARMLESS`: an ignored field may be a different model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.conversion.model_space.source import MODEL_ARGUMENTS, SIZE, flag_name
from megatron.core.dist_checkpointing.format.schema import (
    Check,
    anything,
    boolean,
    number,
    optional,
    printable,
    read_json,
    record,
    sequence,
    shown,
    text,
)
from megatron.core.transformer.transformer_config import TransformerConfig

Json = dict[str, Any]
REQUIRED = object()  # a field without a default: it defines the model
_TEXT = text(256)


def is_huggingface(directory: Path) -> bool:
    """Whether `directory` holds a model of transformers."""
    path = directory / "config.json"
    hf = read_json(path) if path.is_file() else None
    return isinstance(hf, dict) and ("model_type" in hf or "architectures" in hf)


class Rule(NamedTuple):
    """Some fields of config.json, and the arguments that say the same.

    `read(hf, args)` gives the arguments; those in `args`, from the user or from rules before, win over them.
    `write(config)` gives the fields.
    """

    fields: Mapping[str, Check]  # what they may be; null is as good as missing for all of them
    read: Callable[[Json, Json], Json]
    write: Callable[[TransformerConfig], Json] = lambda config: {}


def _unsupported(field: str, value: Any, wanted: str) -> ValueError:
    return ValueError(f"config.json: {field} = {shown(value)} is not supported, only {wanted}")


def copied(argument: str, *fields: str, default: Any = REQUIRED, write_all: bool = False) -> Rule:
    """The value of an argument: of several names all are read, and the first one is written (or all of them)."""

    def read(hf: Json, args: Json) -> Json:
        value = next((hf[field] for field in fields if hf.get(field) is not None), default)
        if value is REQUIRED and argument not in args:
            raise ValueError(f"config.json has no {fields[0]!r}: give {flag_name(argument)}")
        return {argument: value}

    def write(config: TransformerConfig) -> Json:
        value = getattr(config, argument)
        return {} if value is None else dict.fromkeys(fields if write_all else fields[:1], value)

    return Rule(dict.fromkeys(fields, MODEL_ARGUMENTS[argument]), read, write)


def opposite(argument: str, field: str, default: bool) -> Rule:
    """A switch that is on where the argument is off; `default` is what the field means when it is missing."""

    def read(hf: Json, args: Json) -> Json:
        value = hf.get(field)
        return {argument: not (default if value is None else value)}

    return Rule({field: boolean}, read, lambda config: {field: not getattr(config, argument)})


def fixed(field: str, *values: Any, written: bool = False) -> Rule:
    """A field with one meaning (the first value is the one that is written): with any other it is another model."""

    def read(hf: Json, args: Json) -> Json:
        if hf.get(field) is not None and hf[field] not in values:
            raise _unsupported(field, hf[field], f"{values[0]!r} is")
        return {}

    return Rule({field: anything}, read, lambda config: {field: values[0]} if written else {})


def implied(**arguments: Any) -> Rule:
    """Arguments that the family implies; there is no field for them."""
    return Rule({}, lambda hf, args: arguments)


def feed_forward(field: str, free: bool) -> Rule:
    """`n_inner` of GPT-2, null for 4h; BLOOM has 4h always."""

    def read(hf: Json, args: Json) -> Json:
        size, inner = 4 * args["hidden_size"], hf.get(field)
        if inner not in (None, size) and not free:
            raise _unsupported(field, inner, f"4 * hidden_size = {size} is")
        return {"ffn_hidden_size": inner or size}

    return Rule({field: SIZE}, read, lambda config: {field: config.ffn_size} if free else {})


def query_groups(default: int | None) -> Rule:
    """Null means one key/value head per query head; `default` is what a missing field means."""

    def read(hf: Json, args: Json) -> Json:
        heads = args["num_attention_heads"]
        groups = args.get("num_query_groups") or hf.get("num_key_value_heads", default) or heads
        return {"num_query_groups": groups, "group_query_attention": groups != heads}

    return Rule({"num_key_value_heads": SIZE}, read, lambda config: {"num_key_value_heads": config.query_groups})


def _read_no_groups(hf: Json, args: Json) -> Json:
    groups, heads = hf.get("num_key_value_heads"), args["num_attention_heads"]
    if groups not in (None, heads):
        raise _unsupported("num_key_value_heads", groups, f"num_attention_heads = {heads} is")
    return {"group_query_attention": False}


NO_GROUPS = Rule(
    {"num_key_value_heads": SIZE}, _read_no_groups, lambda config: {"num_key_value_heads": config.num_attention_heads}
)


def head_dim(default: int | None = None, always: bool = True) -> Rule:
    """Null means hidden_size / heads, a missing field `default`; `always` writes the implied value too."""

    def read(hf: Json, args: Json) -> Json:
        value = hf.get("head_dim", default)
        return {} if value is None else {"kv_channels": value}

    def write(config: TransformerConfig) -> Json:
        is_implied = config.head_dim * config.num_attention_heads == config.hidden_size
        return {} if is_implied and not always else {"head_dim": config.head_dim}

    return Rule({"head_dim": SIZE}, read, write)


def biases(*fields: str) -> Rule:
    """Biases of attention and MLP are one argument in the model: one alone is read as both, the other being zero."""
    return Rule(
        dict.fromkeys(fields, boolean),
        lambda hf, args: {"add_bias_linear": any(hf.get(field) for field in fields), "add_qkv_bias": False},
        lambda config: dict.fromkeys(fields, config.add_bias_linear),
    )


def _read_gelu(hf: Json, args: Json) -> Json:
    name = hf.get("activation_function") or "gelu_new"
    tanh = name in ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate")
    if not tanh and name not in ("gelu", "gelu_python"):
        raise _unsupported("activation_function", name, "gelu_new (the tanh approximation) and gelu (exact) are")
    return {"swiglu": False, "bias_gelu_fusion": tanh}


GELU = Rule(
    {"activation_function": _TEXT},
    _read_gelu,
    lambda config: {"activation_function": "gelu_new" if config.tanh_gelu else "gelu"},
)


_LLAMA3 = {  # field of the scaling dictionary -> argument
    "factor": "rope_scaling_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_max_position_embeddings",
}
_YARN = {
    "factor": "rotary_scaling_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "yarn_correction_range_round_to_int",
}
_LINEAR = {"factor": "rotary_seq_len_interpolation_factor"}
_SCALINGS = {
    "default": {},
    "linear": _LINEAR,
    "llama3": _LLAMA3,
    "yarn": _YARN,
}  # rope type -> its fields and their arguments
_ROPE_NUMBERS = dict.fromkeys(("rope_theta", "partial_rotary_factor"), number())
_ROPE = record(
    {f"{name}?": optional(_TEXT) for name in ("rope_type", "type")}
    | {f"{name}?": optional(number()) for name in (*_ROPE_NUMBERS, *_LLAMA3, *_YARN) if name != "truncate"}
    | {"truncate?": optional(boolean)}
)


def rope(partial: bool = False) -> Rule:
    """Base and scaling (linear, llama3, yarn). `partial`: only a part of each head may be rotated."""

    def read(hf: Json, args: Json) -> Json:
        told = {k: v for k, v in (hf.get("rope_scaling") or hf.get("rope_parameters") or {}).items() if v is not None}
        kind = told.get("rope_type") or told.get("type") or "default"
        theta = told.get("rope_theta") or hf.get("rope_theta") or 10000.0
        fraction = told.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
        scaling = {name: told[name] for name in told if name not in ("rope_type", "type", *_ROPE_NUMBERS)}
        if hf.get("rope_theta") not in (None, theta):  # 4.x would take the one, 5.x the other
            raise ValueError(f"config.json has rope_theta = {hf['rope_theta']} and {theta}: remove the wrong one")
        if kind not in _SCALINGS:
            raise ValueError(f"config.json: rope type {kind!r} is not supported, only {', '.join(_SCALINGS)} are")
        if not set(scaling) <= set(_SCALINGS[kind]) or ("mscale" in scaling) != ("mscale_all_dim" in scaling):
            raise ValueError(f"config.json: rope type {kind!r} with {shown(sorted(scaling))} is not understood")
        if fraction != 1.0 and not partial:
            raise _unsupported("partial_rotary_factor", fraction, "1.0 is")
        base = {"rotary_base": float(theta), "use_rope_scaling": kind == "llama3"}
        base |= {"rotary_percent": float(fraction), "rope_type": "yarn" if kind == "yarn" else "rope"}
        return base | _read_scaling(kind, hf, scaling, args)

    def write(config: TransformerConfig) -> Json:
        part = {"partial_rotary_factor": config.rotary_percent} if partial else {}
        return {"rope_theta": config.rotary_base, "rope_scaling": _write_scaling(config), **part}

    return Rule({**_ROPE_NUMBERS, "rope_scaling": _ROPE, "rope_parameters": _ROPE}, read, write)


def _read_scaling(kind: str, hf: Json, scaling: Json, args: Json) -> Json:
    # Without the original length transformers takes the one that the model is for.
    known = {"original_max_position_embeddings": hf.get("max_position_embeddings")} | scaling
    asked = {"llama3": _LLAMA3, "yarn": ("factor", "original_max_position_embeddings"), "linear": _LINEAR}
    for field in asked.get(kind, ()):
        argument = _SCALINGS[kind][field]
        if known.get(field) is None and argument not in args:
            raise ValueError(f"config.json: rope scaling {kind} has no {field!r}: give {flag_name(argument)}")
    return {argument: known[field] for field, argument in _SCALINGS[kind].items() if known.get(field) is not None}


def _write_scaling(config: TransformerConfig) -> Json | None:
    stretched = "linear" if config.rotary_stretch != 1.0 else "rope"
    kind = "llama3" if config.use_rope_scaling else "yarn" if config.rope_type == "yarn" else stretched
    if kind == "rope":
        return None
    scaling = {"rope_type": kind} | {field: getattr(config, name) for field, name in _SCALINGS[kind].items()}
    if not scaling.get("mscale_all_dim"):  # transformers takes both or none
        scaling = {field: value for field, value in scaling.items() if not field.startswith("mscale")}
    return scaling


_ROPES = record({f"{name}?": optional(_ROPE) for name in ("full_attention", "sliding_attention")})


def _read_two_ropes(hf: Json, args: Json) -> Json:
    """5.x has the parameters of both kinds of layers by their names; layers with a window are never scaled."""
    both = {kind: dict(found) for kind, found in (hf.get("rope_parameters") or {}).items() if found is not None}
    whole, local = both.get("full_attention", {}), both.get("sliding_attention", {})
    kind = local.get("rope_type") or local.get("type") or "default"
    if kind != "default":
        raise _unsupported("rope_parameters.sliding_attention.rope_type", kind, "default is")
    base = whole.get("rope_theta") or hf.get("rope_theta") or 1e6
    scaling = whole or hf.get("rope_scaling")
    found = rope().read({**hf, "rope_theta": base, "rope_parameters": None, "rope_scaling": scaling}, args)
    window = hf.get("sliding_window", 4096)
    return found | {
        "rotary_base_local": float(local.get("rope_theta") or hf.get("rope_local_base_freq") or 1e4) if window else None
    }


TWO_ROPES = Rule(
    {"rope_theta": number(), "rope_local_base_freq": number(), "rope_scaling": _ROPE, "rope_parameters": _ROPES},
    _read_two_ropes,
    lambda config: {
        "rope_theta": config.rotary_base,
        "rope_local_base_freq": config.rotary_base_local,
        "rope_scaling": _write_scaling(config),
    },
)

_LAYER_TYPES = {"layer_types": sequence(_TEXT, 10**5)}
_KINDS = ("full_attention", "sliding_attention")


def _windows(window: int | None, kinds: Sequence[str]) -> Json:
    """`kinds`: of every layer. transformers counts the token itself, `window_size` does not."""
    if not set(kinds) <= set(_KINDS):
        raise ValueError(f"config.json: layer_types {sorted(set(kinds) - set(_KINDS))} is not supported")
    if "sliding_attention" not in kinds:
        return {"window_size": None, "window_attn_skip_freq": None}
    if not window:
        raise ValueError(f"config.json: layer_types sliding_attention with sliding_window = {window}")
    pattern = [_KINDS.index(kind) for kind in kinds]
    return {"window_size": (window - 1, 0), "window_attn_skip_freq": None if all(pattern) else pattern}


def alternating_windows(every: int) -> Rule:
    """Layers have the window but for every N-th, `sliding_window_pattern`, by default `every`; or as listed."""

    def read(hf: Json, args: Json) -> Json:
        skip = hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or every
        usual = [_KINDS[(layer + 1) % skip > 0] for layer in range(args["num_layers"])]
        return _windows(hf.get("sliding_window", 4096), hf.get("layer_types") or usual)

    def write(config: TransformerConfig) -> Json:
        window = config.window_size[0] + 1 if config.window_size else None
        return {"sliding_window": window, "layer_types": [_KINDS[has_window] for has_window in config.window_pattern]}

    sizes = dict.fromkeys(("sliding_window", "sliding_window_pattern", "_sliding_window_pattern"), SIZE)
    return Rule(_LAYER_TYPES | sizes, read, write)


def softcap(argument: str, default: float | None) -> Rule:
    """Null is no cap, a missing field `default`."""
    return Rule(
        {argument: number()},
        lambda hf, args: {argument: hf.get(argument, default)},
        lambda config: {argument: getattr(config, argument)},
    )


# The scale of the scores is its square root's inverse; it must be a whole number.
QUERY_SCALAR = Rule(
    {"query_pre_attn_scalar": number()},
    lambda hf, args: {"softmax_scale": (hf.get("query_pre_attn_scalar") or 256) ** -0.5},
    lambda config: {"query_pre_attn_scalar": round(config.score_scale**-2)},
)


def _read_window(hf: Json, window: int | None) -> Json:
    """Every layer has the window or none has; transformers counts the token itself, `window_size` does not."""
    others = set(hf.get("layer_types") or ()) - {"sliding_attention" if window else "full_attention"}
    if others:
        raise ValueError(f"config.json: layer_types {sorted(others)} is not supported with sliding_window = {window}")
    return {"window_size": (window - 1, 0) if window else None}


FULL_ATTENTION = Rule(_LAYER_TYPES, lambda hf, args: _read_window(hf, None))


def sliding_window(default: int | None) -> Rule:
    """`default` is what a missing field means to transformers."""
    return Rule(
        _LAYER_TYPES | {"sliding_window": SIZE},
        lambda hf, args: _read_window(hf, hf.get("sliding_window", default)),
        lambda config: {"sliding_window": config.window_size[0] + 1 if config.window_size else None},
    )


def _read_qwen_window(hf: Json, args: Json) -> Json:
    """Layers from `max_window_layers` on have the window, if `use_sliding_window`, or those in `layer_types`."""
    layers = args["num_layers"]
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    first = hf.get("max_window_layers", 28) if window else layers
    return _windows(window, hf.get("layer_types") or [_KINDS[layer >= first] for layer in range(layers)])


def _write_qwen_window(config: TransformerConfig) -> Json:
    if config.window_size is None:
        return {"use_sliding_window": False, "sliding_window": None, "max_window_layers": config.num_layers}
    pattern = config.window_pattern
    written = {"use_sliding_window": True, "sliding_window": config.window_size[0] + 1}
    if pattern == sorted(pattern):
        return written | {"max_window_layers": pattern.index(1)}
    return written | {"layer_types": [_KINDS[has_window] for has_window in pattern]}


QWEN_WINDOW = Rule(
    _LAYER_TYPES | {"use_sliding_window": boolean, "sliding_window": SIZE, "max_window_layers": SIZE},
    _read_qwen_window,
    _write_qwen_window,
)


# The load-balancing loss over a micro batch.
AUXILIARY_LOSS = Rule(
    {"router_aux_loss_coef": number()},
    lambda hf, args: {
        "moe_aux_loss_coeff": [float(hf.get("router_aux_loss_coef") or 0.0)],
        "moe_router_load_balancing_type": ["aux_loss"],
    },
    lambda config: {"router_aux_loss_coef": config.load_balancing.get("aux_loss", 0.0)},
)


def _read_expert_layers(hf: Json, args: Json) -> Json:
    """Every `decoder_sparse_step`-th layer has experts, counted from 1, but for those in `mlp_only_layers`."""
    step, dense = hf.get("decoder_sparse_step") or 1, set(hf.get("mlp_only_layers") or ())
    pattern = [int((i + 1) % step == 0 and i not in dense) for i in range(args["num_layers"])]
    return {"moe_layer_freq": 1 if all(pattern) else pattern}


def _write_expert_layers(config: TransformerConfig) -> Json:
    dense = [number for number, has_experts in enumerate(config.moe_layer_pattern) if not has_experts]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


EXPERT_LAYERS = Rule(
    {"decoder_sparse_step": SIZE, "mlp_only_layers": sequence(SIZE, 10_000)}, _read_expert_layers, _write_expert_layers
)


def _read_deepseek_experts(hf: Json, args: Json) -> Json:
    """Dense layers come first; groups are ranked by their two best scores; experts are shared in multiples of one."""
    dense, groups = hf.get("first_k_dense_replace", 3), hf.get("n_group", 8)
    return {
        "moe_layer_freq": [0] * dense + [1] * (args["num_layers"] - dense) if dense else 1,
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": hf.get("topk_group", 4) if groups > 1 else None,
        "moe_router_group_score_topk": 2 if groups > 1 else None,
        "moe_shared_expert_intermediate_size": hf.get("n_shared_experts", 1) * args["moe_ffn_hidden_size"],
        "moe_router_topk_scaling_factor": float(hf.get("routed_scaling_factor", 2.5)),
    }


def _write_deepseek_experts(config: TransformerConfig) -> Json:
    return {
        "first_k_dense_replace": config.num_layers - sum(config.moe_layer_pattern),
        "n_group": config.moe_router_num_groups or 1,
        "topk_group": config.moe_router_group_topk or 1,
        "n_shared_experts": (config.moe_shared_expert_intermediate_size or 0) // (config.moe_ffn_hidden_size or 1),
        "routed_scaling_factor": config.topk_scaling_factor,
    }


# Null is no default: queries come from the residual stream then.
QUERY_RANK = Rule(
    {"q_lora_rank": SIZE},
    lambda hf, args: {"q_lora_rank": hf.get("q_lora_rank", 1536)},
    lambda config: {"q_lora_rank": config.q_lora_rank},
)
DEEPSEEK_EXPERTS = Rule(
    dict.fromkeys(("first_k_dense_replace", "n_group", "topk_group", "n_shared_experts"), SIZE)
    | {"routed_scaling_factor": number()},
    _read_deepseek_experts,
    _write_deepseek_experts,
)


def _read_precision(hf: Json, args: Json) -> Json:
    """`dtype` (5.x) or `torch_dtype` (4.x); where both are missing the tensors tell."""
    name = str(hf.get("dtype") or hf.get("torch_dtype") or "auto").removeprefix("torch.")
    if name not in ("auto", "float32", "bfloat16", "float16"):
        raise ValueError(f"config.json: dtype {name!r} is not supported, only float32, bfloat16 and float16 are")
    return {} if name == "auto" else {"bf16": name == "bfloat16", "fp16": name == "float16"}


PRECISION = Rule(
    {"torch_dtype": _TEXT, "dtype": _TEXT},
    _read_precision,
    lambda config: {"torch_dtype": str(config.params_dtype).removeprefix("torch.")},
)
COMMON_RULES = (
    copied("vocab_size", "vocab_size"),
    copied("init_method_std", "initializer_range", default=0.02),
    PRECISION,
    fixed("is_encoder_decoder", False),
    fixed("add_cross_attention", False),
    fixed("tie_encoder_decoder", False),
    fixed("pruned_heads", {}),
    fixed("per_layer_config", {}),
)

# Fields that describe files, tokens, generation or speed; none of them changes the logits.
_HARMLESS = """
    _name_or_path name_or_path _commit_hash architectures model_type transformers_version use_cache return_dict
    output_attentions output_hidden_states output_scores torchscript use_bfloat16 gradient_checkpointing is_decoder
    attn_implementation _attn_implementation _attn_implementation_internal _attn_implementation_autoset
    experts_implementation output_router_logits chunk_size_feed_forward tie_last_hidden_states return_dict_in_generate
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id tokenizer_class prefix
    id2label label2id num_labels problem_type finetuning_task task_specific_params classifier_dropout
    pretraining_tp summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout
    max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p min_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens tf_legacy_loss"""
HARMLESS = frozenset(_HARMLESS.split())


def read_config(hf: Json, rules: Collection[Rule], harmless: Collection[str], args: Mapping[str, Any]) -> Json:
    """Arguments of the model in `hf`; `args` were given by the user and win.

    Raises ValueError for a field that is not known, missing or of an unsupported value.
    """
    # A field that nobody reads may still change the model, so all must be known before any is used.
    checks = {field: check for rule in rules for field, check in rule.fields.items()}
    known = HARMLESS.union(harmless, checks)
    unknown = sorted(name for name, value in hf.items() if value is not None and name not in known)
    if unknown:
        listed = ", ".join(f"{printable(name)} = {shown(hf[name])}" for name in unknown)
        raise ValueError(
            f"config.json has fields that are not supported and may change what the model computes: {listed}. "
            f"If they do not, convert it with --hf-ignore-fields {printable(' '.join(unknown))}"
        )
    record({f"{field}?": optional(check) for field, check in checks.items()})(hf, "config.json")
    result = dict(args)
    for rule in rules:
        result = {**rule.read(hf, result), **result}
    return result


def write_config(config: TransformerConfig, rules: Collection[Rule]) -> Json:
    return {field: value for rule in rules for field, value in rule.write(config).items()}

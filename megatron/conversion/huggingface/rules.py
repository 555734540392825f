"""Rules between fields of `config.json` and model arguments, each with its inverse. A family lists
those it has.

Both generations are read: transformers 4.x (`rope_theta`, `rope_scaling`, `torch_dtype`) and 5.x
(`rope_parameters`, `dtype`). The 4.x form is written, because both generations load it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from megatron.core.dist_checkpointing.format import schema
from megatron.core.dist_checkpointing.format.schema import (
    COUNT,
    Check,
    boolean,
    number,
    optional,
    record,
    text,
)
from megatron.core.transformer.transformer_config import TransformerConfig, flag_name

Json = dict[str, Any]


class Rule(NamedTuple):
    """Some fields of config.json, and the arguments that say the same.

    `read(hf, args)` gives the arguments; those in `args`, from the user or from rules before, win over them.
    `write(config)` gives the fields.
    """

    # What they may be: a check, or the argument whose check it is. Null is as good as missing for
    # all of them.
    fields: Mapping[str, Check | str]
    read: Callable[[Json, Json], Json]
    write: Callable[[TransformerConfig], Json] = lambda config: {}
    biases: tuple[
        str, ...
    ] = ()  # fields that say which parts have biases: those of the others are zero


def unsupported(field: str, value: Any, wanted: str) -> ValueError:
    return ValueError(
        f"config.json: {field} = {schema.format_value(value)} is not supported, only {wanted}"
    )


REQUIRED = object()  # a field without a default: it defines the model
_TEXT = text(256)


def copied(argument: str, *fields: str, default: Any = REQUIRED, write_all: bool = False) -> Rule:
    """The value of an argument: of several names all are read, and the first one is written (or all
    of them).
    """

    def read(hf: Json, args: Json) -> Json:
        value = next((hf[field] for field in fields if hf.get(field) is not None), default)
        if value is REQUIRED and argument not in args:
            raise ValueError(f"config.json has no {fields[0]!r}: give {flag_name(argument)}")
        return {argument: value}

    def write(config: TransformerConfig) -> Json:
        value = getattr(config, argument)
        return {} if value is None else dict.fromkeys(fields if write_all else fields[:1], value)

    return Rule(dict.fromkeys(fields, argument), read, write)


def opposite(argument: str, field: str, default: bool) -> Rule:
    """A switch that is on where the argument is off; `default` is what the field means when it is
    missing.
    """

    def read(hf: Json, args: Json) -> Json:
        value = hf.get(field)
        return {argument: not (default if value is None else value)}

    return Rule({field: boolean}, read, lambda config: {field: not getattr(config, argument)})


def fixed(field: str, *values: Any, written: bool = False) -> Rule:
    """A field with one meaning (the first value is the one that is written): with any other it is
    another model.
    """

    def read(hf: Json, args: Json) -> Json:
        if hf.get(field) is not None and hf[field] not in values:
            raise unsupported(field, hf[field], f"{values[0]!r} is")
        return {}

    return Rule(
        {field: schema.anything}, read, lambda config: {field: values[0]} if written else {}
    )


def always(**fields: Any) -> list[Rule]:
    """Fields of one meaning that are written."""
    return [fixed(field, value, written=True) for field, value in fields.items()]


def implied(**arguments: Any) -> Rule:
    """Arguments that the family implies; there is no field for them."""
    return Rule({}, lambda hf, args: arguments)


def feed_forward(field: str, free: bool) -> Rule:
    """`n_inner` of GPT-2, null for 4h; BLOOM has 4h always."""

    def read(hf: Json, args: Json) -> Json:
        size = 4 * args["hidden_size"]
        inner = hf.get(field)
        if inner not in (None, size) and not free:
            raise unsupported(field, inner, f"4 * hidden_size = {size} is")
        return {"ffn_hidden_size": inner or size}

    return Rule(
        {field: "ffn_hidden_size"}, read, lambda config: {field: config.ffn_size} if free else {}
    )


def biases(*fields: str) -> Rule:
    """Biases of attention and MLP are one argument in the model: one alone is read as both, the
    other being zero.
    """
    return Rule(
        dict.fromkeys(fields, boolean),
        lambda hf, args: {
            "add_bias_linear": any(hf.get(field) for field in fields),
            "add_qkv_bias": False,
        },
        lambda config: dict.fromkeys(fields, config.add_bias_linear),
        fields,
    )


def _read_gelu(hf: Json, args: Json) -> Json:
    name = hf.get("activation_function") or "gelu_new"
    tanh = name in ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate")
    if not tanh and name not in ("gelu", "gelu_python"):
        raise unsupported(
            "activation_function", name, "gelu_new (the tanh approximation) and gelu (exact) are"
        )
    return {"swiglu": False, "bias_gelu_fusion": tanh}


GELU = Rule(
    {"activation_function": _TEXT},
    _read_gelu,
    lambda config: {"activation_function": "gelu_new" if config.tanh_gelu else "gelu"},
)


# The load-balancing loss over a micro-batch.
AUXILIARY_LOSS = Rule(
    {"router_aux_loss_coef": number()},
    lambda hf, args: {
        "moe_aux_loss_coeff": [float(hf.get("router_aux_loss_coef") or 0.0)],
        "moe_router_load_balancing_type": ["aux_loss"],
    },
    lambda config: {"router_aux_loss_coef": config.load_balancing.get("aux_loss", 0.0)},
)


def _read_expert_layers(hf: Json, args: Json) -> Json:
    """Every `decoder_sparse_step`-th layer has experts, counted from 1, but for those in
    `mlp_only_layers`.
    """
    step = hf.get("decoder_sparse_step") or 1
    dense = set(hf.get("mlp_only_layers") or ())
    pattern = [int((i + 1) % step == 0 and i not in dense) for i in range(args["num_layers"])]
    return {"moe_layer_freq": 1 if all(pattern) else pattern}


def _write_expert_layers(config: TransformerConfig) -> Json:
    dense = [
        number for number, has_experts in enumerate(config.moe_layer_pattern) if not has_experts
    ]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


EXPERT_LAYERS = Rule(
    {"decoder_sparse_step": COUNT, "mlp_only_layers": schema.sequence(COUNT, 10_000)},
    _read_expert_layers,
    _write_expert_layers,
)


_USUAL = (
    "first_k_dense_replace",
    "n_group",
    "topk_group",
    "n_shared_experts",
    "routed_scaling_factor",
)


def _deepseek_experts(methods: Sequence[str], best: int, *usual: Any) -> Rule:
    """Dense layers come first; groups are ranked by their `best` best scores; experts are shared in
    multiples of one.

    The last of `methods` takes the experts from few of the groups; the first is what a missing
    `topk_method` means, as `usual` says for the other fields. Null is none.
    """
    fields = dict(zip(_USUAL, usual, strict=True))

    def read(hf: Json, args: Json) -> Json:
        told = fields | hf
        layers = args["num_layers"]
        width = args["moe_ffn_hidden_size"]
        method = hf.get("topk_method") or methods[0]
        first = told["first_k_dense_replace"] or 0
        if method not in methods:
            raise unsupported(
                "topk_method", method, f"{' and '.join(methods)} {'are' if methods[1:] else 'is'}"
            )
        if first > layers:
            raise unsupported(
                "first_k_dense_replace", first, f"at most num_hidden_layers = {layers} is"
            )
        # The method decides, whatever the number of groups.
        grouped = method == methods[-1] and (told["n_group"] or 1) > 1
        return {
            "moe_layer_freq": [0] * first + [1] * (layers - first) if first else 1,
            "moe_router_num_groups": told["n_group"] if grouped else None,
            "moe_router_group_topk": told["topk_group"] if grouped else None,
            "moe_router_group_score_topk": best if grouped else None,
            "moe_shared_expert_intermediate_size": (told["n_shared_experts"] or 0) * width,
            "moe_router_topk_scaling_factor": float(told["routed_scaling_factor"] or 1.0),
        }

    def write(config: TransformerConfig) -> Json:
        return {
            "topk_method": methods[-1] if config.moe_router_num_groups else methods[0],
            "first_k_dense_replace": config.num_layers - sum(config.moe_layer_pattern),
            "n_group": config.moe_router_num_groups or 1,
            "topk_group": config.moe_router_group_topk or 1,
            "n_shared_experts": (config.moe_shared_expert_intermediate_size or 0)
            // (config.moe_ffn_hidden_size or 1),
            "routed_scaling_factor": config.topk_scaling_factor,
        }

    checks: dict[str, Check | str] = {
        **dict.fromkeys(fields, COUNT),
        "routed_scaling_factor": number(),
    }
    return Rule(checks | {"topk_method": _TEXT}, read, write)


DEEPSEEK_V2_EXPERTS = _deepseek_experts(
    ("greedy", "group_limited_greedy"), 1, 0, None, None, 2, 1.0
)
DEEPSEEK_V3_EXPERTS = _deepseek_experts(("noaux_tc",), 2, 3, 8, 4, 1, 2.5)


def _read_precision(hf: Json, args: Json) -> Json:
    """`dtype` (5.x) or `torch_dtype` (4.x); where both are missing the tensors tell."""
    name = str(hf.get("dtype") or hf.get("torch_dtype") or "auto").removeprefix("torch.")
    if name not in ("auto", "float32", "bfloat16", "float16"):
        raise ValueError(
            f"config.json: dtype {name!r} is not supported, only float32, bfloat16 and float16 are"
        )
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


# Attention: heads, rotary positions, windows, and the scores.


def heads(groups: int | None, width: int | None = None, always: bool = True) -> Rule:
    """Null means a key/value head per query head, and hidden_size / heads as their width; a missing
    field `groups` and `width`. `always` writes the implied width, too.
    """

    def read(hf: Json, args: Json) -> Json:
        count = args["num_attention_heads"]
        found = hf.get("head_dim", width)
        shared = args.get("num_query_groups") or hf.get("num_key_value_heads", groups) or count
        result = {"num_query_groups": shared, "group_query_attention": shared != count}
        return result if found is None else result | {"kv_channels": found}

    def write(config: TransformerConfig) -> Json:
        is_implied = config.head_dim * config.num_attention_heads == config.hidden_size
        own = {} if is_implied and not always else {"head_dim": config.head_dim}
        return {"num_key_value_heads": config.query_groups} | own

    return Rule({"num_key_value_heads": "num_query_groups", "head_dim": "kv_channels"}, read, write)


def _read_no_groups(hf: Json, args: Json) -> Json:
    groups = hf.get("num_key_value_heads")
    heads = args["num_attention_heads"]
    if groups not in (None, heads):
        raise unsupported("num_key_value_heads", groups, f"num_attention_heads = {heads} is")
    return {"group_query_attention": False}


NO_GROUPS = Rule(
    {"num_key_value_heads": "num_query_groups"},
    _read_no_groups,
    lambda config: {"num_key_value_heads": config.num_attention_heads},
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
# Rope type -> its fields and their arguments.
_SCALINGS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": _LINEAR,
    "llama3": _LLAMA3,
    "yarn": _YARN,
}
_ROPE_NUMBERS = dict.fromkeys(("rope_theta", "partial_rotary_factor"), number())
_ROPE = record(
    {f"{name}?": optional(_TEXT) for name in ("rope_type", "type")}
    | {
        f"{name}?": optional(number())
        for name in (*_ROPE_NUMBERS, *_LLAMA3, *_YARN)
        if name != "truncate"
    }
    | {"truncate?": optional(boolean)}
)


def rope(base: float = 10000.0, usual: Json | None = None, partial: bool = False) -> Rule:
    """Base and scaling (linear, llama3, yarn). `base` and `usual` are what missing fields mean.

    `partial`: only a part of each head may be rotated.
    """

    def read(hf: Json, args: Json) -> Json:
        found = hf.get("rope_scaling") or hf.get("rope_parameters") or usual or {}
        told = {k: v for k, v in found.items() if v is not None}
        kind = told.get("rope_type") or told.get("type") or "default"
        theta = told.get("rope_theta") or hf.get("rope_theta") or base
        fraction = told.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
        scaling = {
            name: told[name] for name in told if name not in ("rope_type", "type", *_ROPE_NUMBERS)
        }
        if hf.get("rope_theta") not in (None, theta):  # 4.x would take the one, 5.x the other
            raise ValueError(
                f"config.json has rope_theta = {hf['rope_theta']} and {theta}: remove the wrong one"
            )
        if kind not in _SCALINGS:
            raise ValueError(
                f"config.json: rope type {kind!r} is not supported, only {', '.join(_SCALINGS)} are"
            )
        # Of mscale alone, without the other, readers make different things, but for the default.
        partly = not scaling.get("mscale_all_dim") and scaling.get("mscale", 1.0) != 1.0
        partly = (
            partly
            or ("mscale" in scaling) != ("mscale_all_dim" in scaling)
            or scaling.get("mscale") == 0
        )
        if partly or not set(scaling) <= set(_SCALINGS[kind]):
            raise ValueError(
                f"config.json: rope type {kind!r} with {schema.format_value(sorted(scaling))} is not understood"
            )
        if fraction != 1.0 and not partial:
            raise unsupported("partial_rotary_factor", fraction, "1.0 is")
        result = {"rotary_base": float(theta), "use_rope_scaling": kind == "llama3"}
        result |= {
            "rotary_percent": float(fraction),
            "rope_type": "yarn" if kind == "yarn" else "rope",
        }
        return result | _read_scaling(kind, hf, scaling, args)

    def write(config: TransformerConfig) -> Json:
        part = {"partial_rotary_factor": config.rotary_percent} if partial else {}
        return {"rope_theta": config.rotary_base, "rope_scaling": _write_scaling(config), **part}

    return Rule({**_ROPE_NUMBERS, "rope_scaling": _ROPE, "rope_parameters": _ROPE}, read, write)


def _read_scaling(kind: str, hf: Json, scaling: Json, args: Json) -> Json:
    # Without the original length transformers takes the one that the model is for.
    known = {"original_max_position_embeddings": hf.get("max_position_embeddings")} | scaling
    asked = {
        "llama3": _LLAMA3,
        "yarn": ("factor", "original_max_position_embeddings"),
        "linear": _LINEAR,
    }
    for field in asked.get(kind, ()):
        argument = _SCALINGS[kind][field]
        if known.get(field) is None and argument not in args:
            raise ValueError(
                f"config.json: rope scaling {kind} has no {field!r}: give {flag_name(argument)}"
            )
    return {
        argument: known[field]
        for field, argument in _SCALINGS[kind].items()
        if known.get(field) is not None
    }


def _write_scaling(config: TransformerConfig) -> Json | None:
    stretched = "linear" if config.rotary_stretch != 1.0 else "rope"
    kind = (
        "llama3" if config.use_rope_scaling else "yarn" if config.rope_type == "yarn" else stretched
    )
    if kind == "rope":
        return None
    scaling = {"rope_type": kind} | {
        field: getattr(config, name) for field, name in _SCALINGS[kind].items()
    }
    if not scaling.get("mscale_all_dim"):  # transformers takes both or none
        scaling = {
            field: value for field, value in scaling.items() if not field.startswith("mscale")
        }
    return scaling


_ROPES = record(
    {f"{name}?": optional(_ROPE) for name in ("full_attention", "sliding_attention")}, closed=True
)


def _read_two_ropes(hf: Json, args: Json) -> Json:
    """5.x has the parameters of both kinds of layers by their names; layers with a window are never scaled."""
    both = {
        kind: dict(found)
        for kind, found in (hf.get("rope_parameters") or {}).items()
        if found is not None
    }
    whole = both.get("full_attention", {})
    local = both.get("sliding_attention", {})
    kind = local.get("rope_type") or local.get("type") or "default"
    if kind != "default":
        raise unsupported("rope_parameters.sliding_attention.rope_type", kind, "default is")
    base = whole.get("rope_theta") or hf.get("rope_theta") or 1e6
    scaling = whole or hf.get("rope_scaling")
    found = rope().read(
        {**hf, "rope_theta": base, "rope_parameters": None, "rope_scaling": scaling}, args
    )
    window = hf.get("sliding_window", 4096)
    return found | {
        "rotary_base_local": float(local.get("rope_theta") or hf.get("rope_local_base_freq") or 1e4)
        if window
        else None
    }


TWO_ROPES = Rule(
    {
        "rope_theta": number(),
        "rope_local_base_freq": number(),
        "rope_scaling": _ROPE,
        "rope_parameters": _ROPES,
    },
    _read_two_ropes,
    lambda config: {
        "rope_theta": config.rotary_base,
        "rope_local_base_freq": config.rotary_base_local,
        "rope_scaling": _write_scaling(config),
    },
)

_LAYER_TYPES = {"layer_types": schema.sequence(_TEXT, 10**5)}
_KINDS = ("full_attention", "sliding_attention")


def _windows(window: int | None, kinds: Sequence[str]) -> Json:
    """`kinds`: of every layer. transformers counts the token itself, `window_size` does not."""
    if not set(kinds) <= set(_KINDS):
        raise ValueError(
            f"config.json: layer_types {sorted(set(kinds) - set(_KINDS))} is not supported"
        )
    if "sliding_attention" not in kinds:
        return {"window_size": None, "window_attn_skip_freq": None}
    if not window:
        raise ValueError(
            f"config.json: layer_types sliding_attention with sliding_window = {window}"
        )
    pattern = [_KINDS.index(kind) for kind in kinds]
    return {
        "window_size": (window - 1, 0),
        "window_attn_skip_freq": None if all(pattern) else pattern,
    }


def alternating_windows(every: int, window: int = 4096) -> Rule:
    """Layers have the window but for every N-th, `sliding_window_pattern`, by default `every`; or
    as listed.

    `window` is what a missing `sliding_window` means.
    """

    def read(hf: Json, args: Json) -> Json:
        skip = hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or every
        usual = [_KINDS[(layer + 1) % skip > 0] for layer in range(args["num_layers"])]
        return _windows(hf.get("sliding_window", window), hf.get("layer_types") or usual)

    def write(config: TransformerConfig) -> Json:
        written = config.window_size[0] + 1 if config.window_size else None
        return {
            "sliding_window": written,
            "layer_types": [_KINDS[has_window] for has_window in config.window_pattern],
        }

    sizes = dict.fromkeys(
        ("sliding_window", "sliding_window_pattern", "_sliding_window_pattern"), COUNT
    )
    return Rule(_LAYER_TYPES | sizes, read, write)


def nullable(argument: str, default: Any) -> Rule:
    """Null is none, a missing field `default`."""
    return Rule(
        {argument: argument},
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
    """Every layer has the window or none has; transformers counts the token itself, `window_size`
    does not.
    """
    others = set(hf.get("layer_types") or ()) - {
        "sliding_attention" if window else "full_attention"
    }
    if others:
        raise ValueError(
            f"config.json: layer_types {sorted(others)} is not supported with sliding_window = {window}"
        )
    return {"window_size": (window - 1, 0) if window else None}


FULL_ATTENTION = Rule(_LAYER_TYPES, lambda hf, args: _read_window(hf, None))


def sliding_window(default: int | None) -> Rule:
    """`default` is what a missing field means to transformers."""
    return Rule(
        _LAYER_TYPES | {"sliding_window": COUNT},
        lambda hf, args: _read_window(hf, hf.get("sliding_window", default)),
        lambda config: {
            "sliding_window": config.window_size[0] + 1 if config.window_size else None
        },
    )


def _read_qwen_window(hf: Json, args: Json) -> Json:
    """Layers from `max_window_layers` on have the window, if `use_sliding_window`, or those in
    `layer_types`.
    """
    layers = args["num_layers"]
    window = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    first = hf.get("max_window_layers") if window else layers
    first = 28 if first is None else first
    return _windows(
        window, hf.get("layer_types") or [_KINDS[layer >= first] for layer in range(layers)]
    )


def _write_qwen_window(config: TransformerConfig) -> Json:
    if config.window_size is None:
        return {
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": config.num_layers,
        }
    pattern = config.window_pattern
    written = {"use_sliding_window": True, "sliding_window": config.window_size[0] + 1}
    if pattern == sorted(pattern):
        return written | {"max_window_layers": pattern.index(1)}
    return written | {"layer_types": [_KINDS[has_window] for has_window in pattern]}


QWEN_WINDOW = Rule(
    _LAYER_TYPES
    | {"use_sliding_window": boolean, "sliding_window": COUNT, "max_window_layers": COUNT},
    _read_qwen_window,
    _write_qwen_window,
)

"""Rules of `config.json` for attention: heads, rotary positions, windows, and the scores."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.conversion.huggingface.config_json import Json, Rule, unsupported
from megatron.conversion.model_space.source import SIZE, flag_name
from megatron.core.dist_checkpointing.format.schema import boolean, number, optional, record, sequence, shown, text
from megatron.core.transformer.transformer_config import TransformerConfig

_TEXT = text(256)


def heads(groups: int | None, width: int | None = None, always: bool = True) -> Rule:
    """Null means a key/value head per query head, and hidden_size / heads as their width; a missing field `groups` and
    `width`. `always` writes the implied width, too.
    """

    def read(hf: Json, args: Json) -> Json:
        count, found = args["num_attention_heads"], hf.get("head_dim", width)
        shared = args.get("num_query_groups") or hf.get("num_key_value_heads", groups) or count
        result = {"num_query_groups": shared, "group_query_attention": shared != count}
        return result if found is None else result | {"kv_channels": found}

    def write(config: TransformerConfig) -> Json:
        is_implied = config.head_dim * config.num_attention_heads == config.hidden_size
        own = {} if is_implied and not always else {"head_dim": config.head_dim}
        return {"num_key_value_heads": config.query_groups} | own

    return Rule({"num_key_value_heads": SIZE, "head_dim": SIZE}, read, write)


def _read_no_groups(hf: Json, args: Json) -> Json:
    groups, heads = hf.get("num_key_value_heads"), args["num_attention_heads"]
    if groups not in (None, heads):
        raise unsupported("num_key_value_heads", groups, f"num_attention_heads = {heads} is")
    return {"group_query_attention": False}


NO_GROUPS = Rule(
    {"num_key_value_heads": SIZE}, _read_no_groups, lambda config: {"num_key_value_heads": config.num_attention_heads}
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
        scaling = {name: told[name] for name in told if name not in ("rope_type", "type", *_ROPE_NUMBERS)}
        if hf.get("rope_theta") not in (None, theta):  # 4.x would take the one, 5.x the other
            raise ValueError(f"config.json has rope_theta = {hf['rope_theta']} and {theta}: remove the wrong one")
        if kind not in _SCALINGS:
            raise ValueError(f"config.json: rope type {kind!r} is not supported, only {', '.join(_SCALINGS)} are")
        # Of mscale alone, without the other, readers make different things, but for the default.
        partly = not scaling.get("mscale_all_dim") and scaling.get("mscale", 1.0) != 1.0
        partly = partly or ("mscale" in scaling) != ("mscale_all_dim" in scaling) or scaling.get("mscale") == 0
        if partly or not set(scaling) <= set(_SCALINGS[kind]):
            raise ValueError(f"config.json: rope type {kind!r} with {shown(sorted(scaling))} is not understood")
        if fraction != 1.0 and not partial:
            raise unsupported("partial_rotary_factor", fraction, "1.0 is")
        result = {"rotary_base": float(theta), "use_rope_scaling": kind == "llama3"}
        result |= {"rotary_percent": float(fraction), "rope_type": "yarn" if kind == "yarn" else "rope"}
        return result | _read_scaling(kind, hf, scaling, args)

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


_ROPES = record({f"{name}?": optional(_ROPE) for name in ("full_attention", "sliding_attention")}, closed=True)


def _read_two_ropes(hf: Json, args: Json) -> Json:
    """5.x has the parameters of both kinds of layers by their names; layers with a window are never scaled."""
    both = {kind: dict(found) for kind, found in (hf.get("rope_parameters") or {}).items() if found is not None}
    whole, local = both.get("full_attention", {}), both.get("sliding_attention", {})
    kind = local.get("rope_type") or local.get("type") or "default"
    if kind != "default":
        raise unsupported("rope_parameters.sliding_attention.rope_type", kind, "default is")
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


def alternating_windows(every: int, window: int = 4096) -> Rule:
    """Layers have the window but for every N-th, `sliding_window_pattern`, by default `every`; or as listed.

    `window` is what a missing `sliding_window` means.
    """

    def read(hf: Json, args: Json) -> Json:
        skip = hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or every
        usual = [_KINDS[(layer + 1) % skip > 0] for layer in range(args["num_layers"])]
        return _windows(hf.get("sliding_window", window), hf.get("layer_types") or usual)

    def write(config: TransformerConfig) -> Json:
        written = config.window_size[0] + 1 if config.window_size else None
        return {"sliding_window": written, "layer_types": [_KINDS[has_window] for has_window in config.window_pattern]}

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
    first = hf.get("max_window_layers") if window else layers
    first = 28 if first is None else first
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


# Null is no default: queries come from the residual stream then.
QUERY_RANK = Rule(
    {"q_lora_rank": SIZE},
    lambda hf, args: {"q_lora_rank": hf.get("q_lora_rank", 1536)},
    lambda config: {"q_lora_rank": config.q_lora_rank},
)

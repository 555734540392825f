"""Rules for rotary position embeddings: base, rotated fraction and scaling."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any

from megatron.conversion.huggingface.config_fields import ConfigFields, Json
from megatron.conversion.huggingface.rules import SHORT_TEXT, Rule, unsupported
from megatron.core.safe_files import schema
from megatron.core.safe_files.schema import boolean, number, optional, record
from megatron.core.transformer.transformer_config import TransformerConfig, flag_name

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
_LONGROPE = {
    "short_factor": "longrope_short_factor",
    "long_factor": "longrope_long_factor",
}
_LINEAR = {"factor": "rotary_seq_len_interpolation_factor"}
# Type of scaling -> its fields and their arguments.
SCALINGS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": _LINEAR,
    "llama3": _LLAMA3,
    "yarn": _YARN,
    "longrope": _LONGROPE,
}
COMMON_SCALINGS = ("default", "linear", "llama3", "yarn")  # of all families
# Fields that a scaling cannot do without; all others have defaults.
_REQUIRED: dict[str, Sequence[str]] = {
    "default": (),
    "linear": tuple(_LINEAR),
    "llama3": tuple(_LLAMA3),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": tuple(_LONGROPE),
}
_ORIGINAL_LENGTH = "original_max_position_embeddings"
_QUERY_SCALING = "llama_4_scaling_beta"
_ALPHA = "alpha"
_TYPE_FIELDS = ("rope_type", "type")
_NUMBERS = {"rope_theta": number(1), "partial_rotary_factor": number(0)}
_ATTENTION_FACTOR = "attention_factor"
# Values that null and 0 select in transformers; a missing field has the default of the argument.
_DISABLED = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}


def _make_scaling_check() -> schema.Check:
    """Return the check of a dictionary with the parameters of a rope; its keys are optional."""
    fields: dict[str, schema.Check] = {}
    for name in _TYPE_FIELDS:
        fields[f"{name}?"] = optional(SHORT_TEXT)
    for name in (*_NUMBERS, *_LLAMA3, *_YARN):
        fields[f"{name}?"] = optional(number())
    for name in _LONGROPE:
        fields[f"{name}?"] = optional(schema.sequence(number(0), 10**5))
    fields[f"{_QUERY_SCALING}?"] = optional(number(0))
    fields[f"{_ALPHA}?"] = optional(number(0))
    fields[f"{_ATTENTION_FACTOR}?"] = optional(number(0))
    fields["truncate?"] = optional(boolean)
    return record(fields)


SCALING = _make_scaling_check()


def _get_stated_rope(hf_config: ConfigFields) -> Json:
    """Return the parameters of a rope in config.json, of either generation; {} without any."""
    stated = hf_config.stated
    return stated.get("rope_scaling") or stated.get("rope_parameters") or {}


def rope(
    scalings: Sequence[str] = COMMON_SCALINGS,
    partial: bool = False,
    spelled_out: bool = False,
    whole_default: bool = False,
    width: str | None = None,
    names: tuple[str, str] = ("rope_theta", "partial_rotary_factor"),
    is_nested: bool = False,
) -> Rule:
    """Map base, rotated fraction (if `partial`) and scaling, one of `scalings`.

    With `spelled_out` an unscaled rope is written as such, because null means another one; with
    `whole_default` null means another base, too. `width` is a field for the number of rotated
    elements of a head, instead of the fraction. `names` are the fields of base and fraction. With
    `is_nested`, a base among `rope_parameters` replaces that of the model: only transformers 5 has
    the family.
    """
    base_name, fraction_name = names

    def read(hf_config: ConfigFields, args: Json) -> Json:
        default = (
            hf_config.defaults.get("rope_scaling")
            or hf_config.defaults.get("rope_parameters")
            or {}
        )
        base = hf_config.defaults.get("rope_theta")
        parameters = _get_stated_rope(hf_config)
        if not parameters:
            base = default.get("rope_theta") or base
            # The default scaling; base and fraction have fields of their own.
            parameters = default if whole_default else leave_out(default, _NUMBERS)
        if is_nested and parameters.get("rope_theta") is not None:
            hf_config = ConfigFields(leave_out(hf_config.stated, (base_name,)), hf_config.defaults)
        if width is not None and not hf_config.states("partial_rotary_factor"):
            parameters = _read_rotated_width(hf_config.first(width), args) | dict(parameters)
        return read_rope(hf_config, parameters, base, scalings, partial, args, names)

    def write(config: TransformerConfig) -> Json:
        scaling = write_scaling(config)
        if scaling is None and spelled_out:
            scaling = {"rope_type": "default"}
        fields = {base_name: config.rotary_base, "rope_scaling": scaling}
        if config.rope_type == "longrope":
            fields[_ORIGINAL_LENGTH] = config.original_max_position_embeddings
        if partial:
            fields[fraction_name] = config.rotary_percent
        if width is not None:
            fields[width] = round(config.head_dim * config.rotary_percent)
        return fields

    fields: dict[str, schema.Check | str] = {base_name: number(1), fraction_name: number(0)}
    fields |= {"rope_scaling": SCALING, "rope_parameters": SCALING}
    if width is not None:
        fields[width] = schema.COUNT
    fields[_ORIGINAL_LENGTH] = schema.COUNT
    return Rule(fields, read, write)


def _read_ministral3_rope(hf_config: ConfigFields, args: Json) -> Json:
    rope_parameters = _get_stated_rope(hf_config) or hf_config.defaults["rope_parameters"]
    base = rope_parameters.get("rope_theta") or hf_config.defaults["rope_theta"]
    # transformers reads the length from the model's own field.
    parameters = leave_out(rope_parameters, (_QUERY_SCALING, "max_position_embeddings"))
    rate = rope_parameters.get(_QUERY_SCALING)
    if rate is None:
        raise unsupported(f"rope_parameters.{_QUERY_SCALING}", rate, "a number is")
    result = read_rope(hf_config, parameters, base, ("yarn",), False, args)
    return result | {"query_length_scaling": float(rate)}


def _write_ministral3_rope(config: TransformerConfig) -> Json:
    scaling = write_scaling(config) or {"rope_type": "default"}
    scaling[_QUERY_SCALING] = config.query_length_scaling
    return {"rope_parameters": scaling | {"rope_theta": config.rotary_base}}


def _read_mistral4_rope(hf_config: ConfigFields, args: Json) -> Json:
    stated = hf_config.stated.get("rope_parameters") or {}
    fraction = stated.get("partial_rotary_factor")
    rotated = hf_config.first("qk_rope_head_dim")
    rotary_fraction = rotated / (hf_config.first("qk_nope_head_dim") + rotated)
    if fraction not in (None, rotary_fraction):
        wanted_text = f"the rotated part of a head, {rotary_fraction}, is"
        raise unsupported("rope_parameters.partial_rotary_factor", fraction, wanted_text)
    # The part is a head of its own for the rope, which rotates all of it.
    fraction_name = ("partial_rotary_factor",)
    fields = dict(hf_config.stated)
    if stated:
        fields["rope_parameters"] = leave_out(stated, fraction_name)
    defaults = leave_out(hf_config.defaults, fraction_name)
    defaults["rope_parameters"] = leave_out(defaults["rope_parameters"], fraction_name)
    return _read_ministral3_rope(ConfigFields(fields, defaults), args)


# Ministral 3 also scales queries, by a number among the rope parameters. Only transformers 5 has
# this family.
MINISTRAL3_ROPE = Rule(
    {
        "rope_theta": number(1),
        "rope_scaling": SCALING,
        "rope_parameters": SCALING,
        _ORIGINAL_LENGTH: schema.COUNT,
    },
    _read_ministral3_rope,
    _write_ministral3_rope,
)


# Mistral 4 has latent attention, of which the rotated part is a fraction of a head.
MISTRAL4_ROPE = Rule(MINISTRAL3_ROPE.fields, _read_mistral4_rope, _write_ministral3_rope)


def _read_interleaved(hf_config: ConfigFields, args: Json) -> Json:
    return {"latent_rotary_interleaved": bool(hf_config.get("rope_interleave"))}


def _write_interleaved(config: TransformerConfig) -> Json:
    return {"rope_interleave": config.latent_rotary_interleaved}


# Latent attention rotates neighboring elements, or element i of the first half with that of the
# second.
ROPE_INTERLEAVE = Rule({"rope_interleave": boolean}, _read_interleaved, _write_interleaved)


def _read_gptj_rope(hf_config: ConfigFields, args: Json) -> Json:
    width = hf_config.get("rotary_dim")
    if not width:
        raise unsupported("rotary_dim", width, "a number of elements of a head is")
    fraction = width / _get_head_dim(args)
    if fraction > 1.0:
        raise unsupported("rotary_dim", width, f"at most {_get_head_dim(args)} is")
    _check_fraction(fraction, True, args)
    return {
        "position_embedding_type": "rope",
        "rotary_base": 1e4,
        "rotary_percent": fraction,
        "rotary_interleaved": True,
        "use_rope_scaling": False,
        "rope_type": "rope",
    }


def _write_gptj_rope(config: TransformerConfig) -> Json:
    return {"rotary_dim": round(config.head_dim * config.rotary_percent)}


# GPT-J and CodeGen state only how many elements of a head are rotated.
GPTJ_ROPE = Rule({"rotary_dim": schema.COUNT}, _read_gptj_rope, _write_gptj_rope)


def _read_rotated_width(width: int | None, args: Json) -> Json:
    """Return the fraction of a head that `width` elements are, if that is stated."""
    if width is None:
        return {}
    return {"partial_rotary_factor": width / _get_head_dim(args)}


def _get_head_dim(args: Json) -> int:
    hidden_size = args["hidden_size"]
    num_heads = args["num_attention_heads"]
    head_dim = args.get("kv_channels") or hidden_size // num_heads
    assert isinstance(head_dim, int)
    if head_dim == 0:
        supported = f"num_attention_heads = {num_heads} or more is"
        raise unsupported("hidden_size", hidden_size, supported)
    return head_dim


def _check_fraction(fraction: float, partial: bool, args: Json) -> None:
    """Refuse a partly rotated head if the family has none, or if an odd number is rotated."""
    if not partial:
        raise unsupported("partial_rotary_factor", fraction, "1.0 is")
    head_dim = _get_head_dim(args)
    if int(head_dim * fraction) % 2:
        supported = f"an even number of the {head_dim} elements of a head is"
        raise unsupported("partial_rotary_factor", fraction, supported)


def leave_out(values: Mapping[str, Any], names: Container[str]) -> Json:
    """Return `values` without those called `names`."""
    return {name: value for name, value in values.items() if name not in names}


def _replace_disabled(parameters: Mapping[str, Any]) -> Json:
    """Return the parameters of a rope with the values that null and 0 mean in transformers."""
    result = {}
    for name, value in parameters.items():
        if not value and name in _DISABLED:
            value = _DISABLED[name]
        if value is not None:
            result[name] = value
    return result


def read_rope(
    hf_config: ConfigFields,
    parameters: Mapping[str, Any],
    default_base: float | None,
    scalings: Sequence[str],
    partial: bool,
    args: Json,
    names: tuple[str, str] = ("rope_theta", "partial_rotary_factor"),
) -> Json:
    """Return the arguments of one set of rope parameters."""
    base_name, fraction_name = names
    parameters = _replace_disabled(parameters)

    # Base.
    stated_base = hf_config.stated.get(base_name)
    base = parameters.get("rope_theta") or stated_base or default_base or 1e4
    if stated_base not in (None, base):
        # transformers 4.x would use the one, 5.x the other.
        raise ValueError(
            f"config.json has {base_name} = {stated_base} and {base}: remove the wrong one"
        )

    # Rotated fraction.
    fraction = parameters.get("partial_rotary_factor")
    if fraction is None:
        fraction = hf_config.first(fraction_name, "partial_rotary_factor")
    if fraction is None:
        fraction = 1.0
    if fraction == 0.0:
        raise unsupported(fraction_name, fraction, "a positive fraction of a head is")
    if fraction != 1.0:
        _check_fraction(fraction, partial, args)

    # Scaling.
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    if rope_type not in scalings:
        verb = "is" if len(scalings) == 1 else "are"
        raise ValueError(
            f"config.json: rope type {rope_type!r} is not supported, only {', '.join(scalings)} "
            f"{verb}"
        )
    if rope_type == "yarn" and base == 1.0:  # it divides by the logarithm
        raise unsupported(base_name, base, "more than 1 is with rope type yarn")
    scaling = leave_out(parameters, (*_TYPE_FIELDS, *_NUMBERS))
    arguments = {
        "position_embedding_type": "rope",
        "rotary_base": float(base),
        "rotary_percent": float(fraction),
        "use_rope_scaling": rope_type == "llama3",
        "rope_type": rope_type if rope_type in ("yarn", "longrope") else "rope",
    }
    if rope_type == "longrope":
        pairs = int(_get_head_dim(args) * fraction) // 2
        for field in _LONGROPE:
            factors = scaling.get(field)
            if factors is not None and len(factors) != pairs:
                raise unsupported(f"rope_scaling.{field}", factors, f"a list of {pairs} is")
        arguments |= _read_context_lengths(hf_config, scaling)
    elif rope_type in ("llama3", "yarn"):
        scaling |= _read_original_length(hf_config, scaling)
    return arguments | _read_scaling(rope_type, scaling, hf_config, args)


def _read_context_lengths(hf_config: ConfigFields, scaling: Json) -> Json:
    """Return LongRoPE's arguments for the lengths of the context, and remove them from `scaling`.

    transformers has the original length in a field of its own, which takes precedence.
    """
    original = hf_config.first(_ORIGINAL_LENGTH)
    nested = scaling.pop(_ORIGINAL_LENGTH, None)
    if original is None:
        original = nested
    _check_nested_length(nested, original)
    if original is None:
        raise ValueError(f"config.json: rope scaling longrope needs {_ORIGINAL_LENGTH!r}")

    # The ratio only determines the factor of queries and keys, which may be stated instead.
    factor = scaling.pop("factor", None)
    attention_factor = scaling.pop(_ATTENTION_FACTOR, None)
    if attention_factor is not None:
        if attention_factor < 1.0:
            raise unsupported(f"rope_scaling.{_ATTENTION_FACTOR}", attention_factor, "1 or more is")
        factor = round(original ** (attention_factor**2 - 1.0), _RATIO_DECIMALS)
    elif factor is None:
        factor = hf_config.first("max_position_embeddings") / original
    elif factor != hf_config.first("max_position_embeddings") / original:
        # transformers 4 would use the quotient.
        raise unsupported("rope_scaling.factor", factor, f"{_ATTENTION_FACTOR} is, if it differs")
    return {_ORIGINAL_LENGTH: original, "rotary_scaling_factor": factor}


def _write_context_lengths(config: TransformerConfig) -> Json:
    """Return the field for LongRoPE's factor of queries and keys; none if the lengths imply it."""
    original = config.original_max_position_embeddings
    ratio = config.rotary_scaling_factor
    if ratio == (config.max_position_embeddings or original) / original:
        return {}
    value = math.sqrt(1.0 + math.log(max(ratio, 1.0)) / math.log(original))
    return {_ATTENTION_FACTOR: round(value, _DECIMALS)}


def _read_original_length(hf_config: ConfigFields, scaling: Json) -> Json:
    """Return the original length among the fields of the model, which takes precedence."""
    original = hf_config.first(_ORIGINAL_LENGTH)
    if original is None:
        return {}
    _check_nested_length(scaling.get(_ORIGINAL_LENGTH), original)
    return {_ORIGINAL_LENGTH: original}


def _check_nested_length(nested: Any, original: Any) -> None:
    """Refuse another original length among the parameters, which transformers 4 may use."""
    if nested not in (None, original):
        supported = f"that of the model, {original}, is"
        raise unsupported(f"rope_scaling.{_ORIGINAL_LENGTH}", nested, supported)


def _read_scaling(rope_type: str, scaling: Json, hf_config: ConfigFields, args: Json) -> Json:
    """Return the arguments of a scaling. Raises ValueError for missing or unknown fields."""
    if rope_type == "yarn" and _ATTENTION_FACTOR in scaling:
        scaling = _replace_attention_factor(scaling)
    else:
        _check_mscale(scaling)
    strange = sorted(set(scaling) - set(SCALINGS[rope_type]))
    if strange:
        raise ValueError(
            f"config.json: rope type {rope_type!r} with {schema.format_value(strange)} is not "
            f"supported: its fields are {', '.join(SCALINGS[rope_type]) or 'none'}"
        )
    # Without an original length transformers takes the one that the model is made for.
    length = hf_config.stated.get("max_position_embeddings")
    all_fields = {"original_max_position_embeddings": length} | scaling
    for field in _REQUIRED[rope_type]:
        argument = SCALINGS[rope_type][field]
        if all_fields.get(field) is None and argument not in args:
            raise ValueError(
                f"config.json: rope scaling {rope_type} has no {field!r}: give "
                f"{flag_name(argument)}"
            )
    low = all_fields.get("low_freq_factor")
    high = all_fields.get("high_freq_factor")
    if rope_type == "llama3" and low is not None and high is not None and high <= low:
        # transformers warns, and computes frequencies without a meaning.
        supported = f"more than low_freq_factor = {low} is"
        raise unsupported("rope_scaling.high_freq_factor", high, supported)
    arguments = {}
    for field, argument in SCALINGS[rope_type].items():
        if all_fields.get(field) is not None:
            arguments[argument] = all_fields[field]
    return arguments


# Decimals of `attention_factor`, and of YaRN's `mscale` or LongRoPE's ratio of lengths: each is
# computed from the other.
_DECIMALS = 12
_RATIO_DECIMALS = 6


def _replace_attention_factor(scaling: Json) -> Json:
    """Return YaRN's fields with the `mscale` that multiplies queries and keys by
    `attention_factor`.
    """
    name = f"rope_scaling.{_ATTENTION_FACTOR}"
    value = scaling[_ATTENTION_FACTOR]
    if scaling.get("mscale") or scaling.get("mscale_all_dim"):
        raise unsupported(name, value, "a rope without mscale and mscale_all_dim is")
    factor = scaling.get("factor") or 1.0
    mscale = 1.0
    if factor > 1.0:
        mscale = round((value - 1.0) / (0.1 * math.log(factor)), _DECIMALS)
    if mscale < 0.0 or (factor <= 1.0 and value != 1.0):
        raise unsupported(name, value, "1.0 or more (with factor <= 1: 1.0) is")
    return leave_out(scaling, (_ATTENTION_FACTOR,)) | {"mscale": mscale, "mscale_all_dim": 0.0}


def _check_mscale(scaling: Json) -> None:
    """Refuse values that readers interpret differently: one of the two alone, or zeros."""
    mscale = scaling.get("mscale")
    all_dim = scaling.get("mscale_all_dim")
    is_default = not all_dim and mscale in (None, 1.0)
    both_or_none = (mscale is None) == (all_dim is None)
    if mscale == 0 or not both_or_none or not (all_dim or is_default):
        raise ValueError(
            f"config.json: rope scaling with mscale = {mscale} and mscale_all_dim = {all_dim} is "
            "not supported: transformers needs both, and neither may be 0"
        )


def write_scaling(config: TransformerConfig) -> Json | None:
    """Return the field `rope_scaling`; None without scaling."""
    if config.use_rope_scaling:
        rope_type = "llama3"
    elif config.rope_type in ("yarn", "longrope"):
        rope_type = config.rope_type
    elif config.rotary_stretch != 1.0:
        rope_type = "linear"
    else:
        return None
    scaling: Json = {"rope_type": rope_type}
    for field, argument in SCALINGS[rope_type].items():
        scaling[field] = getattr(config, argument)
    if rope_type == "longrope":
        return scaling | _write_context_lengths(config)
    if not scaling.get("mscale_all_dim"):  # transformers takes both or none
        mscale = scaling.pop("mscale", 1.0)
        scaling.pop("mscale_all_dim", None)
        if mscale != 1.0 and config.rotary_scaling_factor > 1.0:
            value = 0.1 * mscale * math.log(config.rotary_scaling_factor) + 1.0
            scaling[_ATTENTION_FACTOR] = round(value, _DECIMALS)
    return scaling


COMMON_ROPE = rope()


# Hunyuan's scaling "dynamic" with `alpha` replaces the base, for sequences of any length.


def _read_hunyuan_rope(hf_config: ConfigFields, args: Json) -> Json:
    parameters = _get_stated_rope(hf_config)
    alpha = parameters.get(_ALPHA)
    rope_type = parameters.get("rope_type") or parameters.get("type")
    if rope_type != "dynamic" or not alpha:
        return COMMON_ROPE.read(hf_config, args)
    # The rope without scaling; all other parameters have no effect.
    bases = {name: value for name, value in parameters.items() if name == "rope_theta"}
    stated = leave_out(hf_config.stated, ("rope_scaling", "rope_parameters"))
    stated["rope_parameters"] = bases | {"rope_type": "default"}
    result = COMMON_ROPE.read(ConfigFields(stated, hf_config.defaults), args)
    head_dim = _get_head_dim(args)
    result["rotary_base"] *= float(alpha) ** (head_dim / (head_dim - 2))
    return result


HUNYUAN_ROPE = Rule(COMMON_ROPE.fields, _read_hunyuan_rope, COMMON_ROPE.write)


# Multimodal models rotate sections of a head by different positions, which are equal for text.
_SECTIONS = ("mrope_section", "mrope_interleaved", "xdrope_section")
_SECTIONED_TYPES = {"mrope": "default", "xdrope": "dynamic"}  # name of a type with sections -> type
_SCALING_FIELDS = ("rope_scaling", "rope_parameters")


def with_sections(rule: Rule) -> Rule:
    """Return the rule of a rope for the language model of a wrapper, which may have sections."""

    def read(hf_config: ConfigFields, args: Json) -> Json:
        stated = dict(hf_config.stated)
        for field in _SCALING_FIELDS:
            if stated.get(field):
                parameters = leave_out(stated[field], _SECTIONS)
                for name in _TYPE_FIELDS:
                    if name in parameters:
                        rope_type = parameters[name]
                        parameters[name] = _SECTIONED_TYPES.get(rope_type, rope_type)
                stated[field] = parameters
        return rule.read(ConfigFields(stated, hf_config.defaults), args)

    def update(imported: Json, config: TransformerConfig) -> Json:
        sections = {}
        for field in _SCALING_FIELDS:
            for name, value in (imported.get(field) or {}).items():
                if name in _SECTIONS:
                    sections[name] = value
        fields = rule.write(config)
        scaling = fields.get("rope_scaling") or {"rope_type": "default"}
        return fields | {"rope_scaling": scaling | sections}

    return rule._replace(read=read, update=update)

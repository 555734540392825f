"""Rules for rotary position embeddings: base, rotated fraction and scaling."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from megatron.conversion.huggingface.config_fields import ConfigFields, Json
from megatron.conversion.huggingface.rules import SHORT_TEXT, Rule, unsupported
from megatron.core.dist_checkpointing.format import schema
from megatron.core.dist_checkpointing.format.schema import boolean, number, optional, record
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
_LINEAR = {"factor": "rotary_seq_len_interpolation_factor"}
# Type of scaling -> its fields and their arguments.
SCALINGS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": _LINEAR,
    "llama3": _LLAMA3,
    "yarn": _YARN,
}
# Fields that a scaling cannot do without; all others have defaults.
_REQUIRED: dict[str, Sequence[str]] = {
    "default": (),
    "linear": tuple(_LINEAR),
    "llama3": tuple(_LLAMA3),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_TYPE_FIELDS = ("rope_type", "type")
_NUMBERS = {"rope_theta": number(1), "partial_rotary_factor": number(0)}


def _make_scaling_check() -> schema.Check:
    """Return the check of a dictionary with the parameters of a rope; its keys are optional."""
    fields: dict[str, schema.Check] = {}
    for name in _TYPE_FIELDS:
        fields[f"{name}?"] = optional(SHORT_TEXT)
    for name in (*_NUMBERS, *_LLAMA3, *_YARN):
        fields[f"{name}?"] = optional(number())
    fields["truncate?"] = optional(boolean)
    return record(fields)


_SCALING = _make_scaling_check()


def rope(
    scalings: Sequence[str] = tuple(SCALINGS), partial: bool = False, spelled_out: bool = False
) -> Rule:
    """Map base, rotated fraction (if `partial`) and scaling, one of `scalings`.

    With `spelled_out` an unscaled rope is written as such, because null means another one.
    """

    def read(found: ConfigFields, args: Json) -> Json:
        default = found.defaults.get("rope_scaling") or found.defaults.get("rope_parameters") or {}
        base = default.get("rope_theta") or found.defaults.get("rope_theta")
        parameters = found.stated.get("rope_scaling") or found.stated.get("rope_parameters")
        if not parameters:
            # The default scaling; base and fraction have fields of their own.
            parameters = _leave_out(default, _NUMBERS)
        return _read_rope(found, parameters, base, scalings, partial, args)

    def write(config: TransformerConfig) -> Json:
        scaling = _write_scaling(config)
        if scaling is None and spelled_out:
            scaling = {"rope_type": "default"}
        fields = {"rope_theta": config.rotary_base, "rope_scaling": scaling}
        if partial:
            fields["partial_rotary_factor"] = config.rotary_percent
        return fields

    return Rule({**_NUMBERS, "rope_scaling": _SCALING, "rope_parameters": _SCALING}, read, write)


def _leave_out(values: Mapping[str, Any], names: Container[str]) -> Json:
    """Return `values` without those called `names`."""
    return {name: value for name, value in values.items() if name not in names}


def _read_rope(
    found: ConfigFields,
    parameters: Mapping[str, Any],
    default_base: float | None,
    scalings: Sequence[str],
    partial: bool,
    args: Json,
) -> Json:
    """Return the arguments of one set of rope parameters."""
    parameters = {name: value for name, value in parameters.items() if value is not None}

    # Base.
    stated_base = found.stated.get("rope_theta")
    base = parameters.get("rope_theta") or stated_base or default_base or 1e4
    if stated_base not in (None, base):
        # transformers 4.x would use the one, 5.x the other.
        raise ValueError(
            f"config.json has rope_theta = {stated_base} and {base}: remove the wrong one"
        )

    # Rotated fraction.
    fraction = parameters.get("partial_rotary_factor")
    fraction = fraction or found.first("partial_rotary_factor") or 1.0
    if fraction != 1.0 and not partial:
        raise unsupported("partial_rotary_factor", fraction, "1.0 is")

    # Scaling.
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in scalings:
        verb = "is" if len(scalings) == 1 else "are"
        raise ValueError(
            f"config.json: rope type {kind!r} is not supported, only {', '.join(scalings)} {verb}"
        )
    scaling = _leave_out(parameters, (*_TYPE_FIELDS, *_NUMBERS))
    arguments = {
        "rotary_base": float(base),
        "rotary_percent": float(fraction),
        "use_rope_scaling": kind == "llama3",
        "rope_type": "yarn" if kind == "yarn" else "rope",
    }
    return arguments | _read_scaling(kind, scaling, found, args)


def _read_scaling(kind: str, scaling: Json, found: ConfigFields, args: Json) -> Json:
    """Return the arguments of a scaling. Raises ValueError for fields it lacks or does not have."""
    strange = sorted(set(scaling) - set(SCALINGS[kind]))
    if strange:
        raise ValueError(
            f"config.json: rope type {kind!r} with {schema.format_value(strange)} is not "
            f"supported: its fields are {', '.join(SCALINGS[kind]) or 'none'}"
        )
    _check_mscale(scaling)
    # Without an original length transformers takes the one that the model is made for.
    length = found.stated.get("max_position_embeddings")
    known = {"original_max_position_embeddings": length} | scaling
    for field in _REQUIRED[kind]:
        argument = SCALINGS[kind][field]
        if known.get(field) is None and argument not in args:
            raise ValueError(
                f"config.json: rope scaling {kind} has no {field!r}: give {flag_name(argument)}"
            )
    arguments = {}
    for field, argument in SCALINGS[kind].items():
        if known.get(field) is not None:
            arguments[argument] = known[field]
    return arguments


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


def _write_scaling(config: TransformerConfig) -> Json | None:
    """Return the field `rope_scaling`; None without scaling."""
    if config.use_rope_scaling:
        kind = "llama3"
    elif config.rope_type == "yarn":
        kind = "yarn"
    elif config.rotary_stretch != 1.0:
        kind = "linear"
    else:
        return None
    scaling: Json = {"rope_type": kind}
    for field, argument in SCALINGS[kind].items():
        scaling[field] = getattr(config, argument)
    if not scaling.get("mscale_all_dim"):  # transformers takes both or none
        scaling.pop("mscale", None)
        scaling.pop("mscale_all_dim", None)
    return scaling


# Gemma 3: layers with a window have a base of their own and are never scaled.

_LAYER_ROPES = record(
    {"full_attention?": optional(_SCALING), "sliding_attention?": optional(_SCALING)}, closed=True
)


def _read_two_ropes(found: ConfigFields, args: Json) -> Json:
    """Read both generations: 5.x nests the parameters of each kind of layer by its name."""
    # Layers with a window.
    nested = found.stated.get("rope_parameters") or {}
    local = nested.get("sliding_attention") or {}
    local_kind = local.get("rope_type") or local.get("type") or "default"
    if local_kind != "default":
        raise unsupported("rope_parameters.sliding_attention.rope_type", local_kind, "default is")

    # Layers without a window.
    scaling = found.stated.get("rope_scaling") or {}
    if scaling.get("type", "default") != "default" and not scaling.get("rope_type"):
        # transformers 5 ignores this name here, transformers 4 does not.
        raise ValueError(
            f"config.json: rope_scaling has type {schema.format_value(scaling['type'])}, which "
            "releases of transformers read differently in this family: rename it to rope_type"
        )
    parameters = (nested.get("full_attention") or {}) | scaling
    if parameters.get("truncate") is False:
        # transformers looks for this field outside the parameters of a kind of layers.
        raise unsupported("rope_scaling.truncate", False, "True is in this family")
    default = found.defaults.get("rope_parameters") or {}
    base = default.get("full_attention", {}).get("rope_theta") or found.defaults.get("rope_theta")
    result = _read_rope(found, parameters, base, tuple(SCALINGS), False, args)

    # The second base, if any layer has a window.
    result["rotary_base_local"] = None
    if found.get("sliding_window"):
        local_base = (
            local.get("rope_theta")
            or found.first("rope_local_base_freq")
            or default.get("sliding_attention", {}).get("rope_theta")
        )
        result["rotary_base_local"] = float(local_base)
    return result


def _write_two_ropes(config: TransformerConfig) -> Json:
    fields = {"rope_theta": config.rotary_base, "rope_scaling": _write_scaling(config)}
    if config.rotary_base_local is not None:
        fields["rope_local_base_freq"] = config.rotary_base_local
    return fields


TWO_ROPES = Rule(
    {
        "rope_theta": number(1),
        "rope_local_base_freq": number(1),
        "rope_scaling": _SCALING,
        "rope_parameters": _LAYER_ROPES,
    },
    _read_two_ropes,
    _write_two_ropes,
)

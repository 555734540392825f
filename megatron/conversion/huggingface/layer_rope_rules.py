"""Rules of rotary embeddings that differ between the layers of a model."""

from __future__ import annotations

from megatron.conversion.huggingface.config_fields import ConfigFields, Json
from megatron.conversion.huggingface.rope_rules import (
    COMMON_ROPE,
    COMMON_SCALINGS,
    SCALING,
    leave_out,
    read_rope,
    write_scaling,
)
from megatron.conversion.huggingface.rules import SHORT_TEXT, Rule, unsupported
from megatron.core.safe_files import schema
from megatron.core.safe_files.schema import number, optional, record
from megatron.core.transformer.transformer_config import TransformerConfig

# Families in which layers with a window have a base of their own and are never scaled.
_LAYER_ROPES = record(
    {"full_attention?": optional(SCALING), "sliding_attention?": optional(SCALING)}, closed=True
)


_LOCAL_BASE = "rope_local_base_freq"
_FLAT_FIELDS: dict[str, schema.Check] = {
    "rope_theta": number(1),
    "rope_scaling": SCALING,
    _LOCAL_BASE: number(1),
}


def two_ropes(*flat: str) -> Rule:
    """Map the ropes of layers with and without a window.

    transformers 5.x nests the parameters of each kind of layer by its name. `flat` are the fields
    of 4.x that the family reads; if the local base is one of them, that form is written.
    """

    def read(hf_config: ConfigFields, args: Json) -> Json:
        nested = hf_config.stated.get("rope_parameters") or {}
        default = hf_config.defaults.get("rope_parameters") or {}
        parameters = _read_global_rope(hf_config, nested.get("full_attention") or {})
        base = default.get("full_attention", {}).get("rope_theta")
        base = base or hf_config.defaults.get("rope_theta")
        result = read_rope(hf_config, parameters, base, COMMON_SCALINGS, False, args)

        # The second base, if any layer has a window.
        local = _check_local_rope(nested.get("sliding_attention") or {})
        default_base = default.get("sliding_attention", {}).get("rope_theta")
        local_base = local.get("rope_theta") or hf_config.first(_LOCAL_BASE) or default_base
        stated_base = hf_config.stated.get("rope_theta")
        if _LOCAL_BASE not in flat and stated_base not in (None, local_base):
            raise unsupported("rope_theta", stated_base, f"{local_base} is, in every layer")
        result["rotary_base_local"] = None
        if hf_config.get("sliding_window"):
            result["rotary_base_local"] = float(local_base)
        return result

    def write(config: TransformerConfig) -> Json:
        base = config.rotary_base
        local_base = config.rotary_base_local
        scaling = write_scaling(config)
        if _LOCAL_BASE in flat:
            local = {} if local_base is None else {_LOCAL_BASE: local_base}
            return {"rope_theta": base, "rope_scaling": scaling, **local}
        unscaled = {"rope_type": "default"}
        parameters = {
            "full_attention": {"rope_theta": base, **(scaling or unscaled)},
            "sliding_attention": {"rope_theta": local_base or base, **unscaled},
        }
        return {"rope_parameters": parameters}

    fields: dict[str, schema.Check | str] = {name: _FLAT_FIELDS[name] for name in flat}
    fields["rope_parameters"] = _LAYER_ROPES
    return Rule(fields, read, write)


def _read_global_rope(hf_config: ConfigFields, nested: Json) -> Json:
    """Return the parameters of layers without a window, from both generations of config.json."""
    scaling = hf_config.stated.get("rope_scaling") or {}
    if scaling.get("type", "default") != "default" and not scaling.get("rope_type"):
        # transformers 5 ignores this name here, transformers 4 does not.
        raise ValueError(
            f"config.json: rope_scaling has type {schema.format_value(scaling['type'])}, which "
            "releases of transformers read differently in this family: rename it to rope_type"
        )
    parameters = nested | scaling
    if parameters.get("truncate") is False:
        # transformers looks for this field outside the parameters of a kind of layers.
        raise unsupported("rope_scaling.truncate", False, "True is in this family")
    return leave_out(parameters, ("truncate",))


def _check_local_rope(parameters: Json) -> Json:
    """Return the parameters of layers with a window. Raises ValueError if they are scaled."""
    field = "rope_parameters.sliding_attention"
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    if rope_type != "default":
        supported = "default is: layers with a window have unscaled frequencies"
        raise unsupported(f"{field}.rope_type", rope_type, supported)
    fraction = parameters.get("partial_rotary_factor") or 1.0
    if fraction != 1.0:
        raise unsupported(f"{field}.partial_rotary_factor", fraction, "1.0 is")
    return parameters


# Granite with windows states the base of each layer instead of a common one; 0 means no RoPE.
_LAYER_BASES = "layer_rope_theta"
_SCALING_ARGUMENTS = ("use_rope_scaling", "rotary_seq_len_interpolation_factor")


def _read_layer_bases(hf_config: ConfigFields, args: Json) -> Json:
    """Return the arguments of a rope with bases by layer; those of the windows are in `args`."""
    result = COMMON_ROPE.read(hf_config, args) | {"no_rope_freq": None, "rotary_base_local": None}
    bases = hf_config.first(_LAYER_BASES)
    if bases is None:
        return result
    if len(bases) != args["num_layers"]:
        raise unsupported(_LAYER_BASES, bases, f"a list of {args['num_layers']} is")

    # Bases of layers without and with a window.
    global_bases: set[float] = set()
    local_bases: set[float] = set()
    for has_window, base in zip(_list_windows(args), bases, strict=True):
        if base:
            (local_bases if has_window else global_bases).add(float(base))
    if len(global_bases) > 1 or len(local_bases) > 1:
        supported = "one base for layers with a window and one for the others are"
        raise unsupported(_LAYER_BASES, bases, supported)
    if len(global_bases | local_bases) > 1:
        is_scaled = any(result.get(name) for name in _SCALING_ARGUMENTS)
        if is_scaled or result["rope_type"] != "rope":
            raise unsupported(_LAYER_BASES, bases, "one base is where RoPE is scaled")
        result["rotary_base_local"] = min(local_bases)

    if global_bases or local_bases:
        result["rotary_base"] = min(global_bases or local_bases)
    if not all(bases):
        result["no_rope_freq"] = [int(not base) for base in bases]
    return result


def _list_windows(args: Json) -> list[bool]:
    """Return whether each layer has a window."""
    if args["window_size"] is None:
        return [False] * args["num_layers"]
    pattern = args["window_attn_skip_freq"] or [1] * args["num_layers"]
    return [bool(has_window) for has_window in pattern]


def _write_layer_bases(config: TransformerConfig) -> Json:
    bases = []
    for has_window, has_no_rope in zip(config.window_pattern, config.no_rope_pattern, strict=True):
        base = config.rotary_base
        if has_window and config.separate_rotary_base_local is not None:
            base = config.separate_rotary_base_local
        bases.append(0.0 if has_no_rope else base)
    return COMMON_ROPE.write(config) | {_LAYER_BASES: bases}


LAYER_BASES = Rule(
    {**COMMON_ROPE.fields, _LAYER_BASES: schema.sequence(number(0), 10**5)},
    _read_layer_bases,
    _write_layer_bases,
)


# Granite 4 has RoPE if this field states it, and otherwise no position embeddings.
def _read_switched_rope(hf_config: ConfigFields, args: Json) -> Json:
    embedding_type = hf_config.get("position_embedding_type")
    if embedding_type not in ("rope", "nope", None):
        raise unsupported("position_embedding_type", embedding_type, "rope and nope are")
    return {"position_embedding_type": "rope" if embedding_type == "rope" else "none"}


def _write_switched_rope(config: TransformerConfig) -> Json:
    has_rope = config.position_embedding_type == "rope"
    return {"position_embedding_type": "rope" if has_rope else None}


# It precedes the rule of the rope itself.
SWITCHED_ROPE = Rule(
    {"position_embedding_type": SHORT_TEXT}, _read_switched_rope, _write_switched_rope
)

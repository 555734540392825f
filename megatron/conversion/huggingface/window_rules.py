"""Rules of layers with windows of attention, and of layers without positions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from megatron.conversion.huggingface.config_fields import ConfigFields, Json
from megatron.conversion.huggingface.rules import SHORT_TEXT, Rule, unsupported
from megatron.core.safe_files import schema
from megatron.core.safe_files.schema import COUNT, boolean
from megatron.core.transformer.transformer_config import TransformerConfig

# Windows: transformers counts the token itself, `window_size` does not.
LAYER_TYPES = {"layer_types": schema.sequence(SHORT_TEXT, 10**5)}
_KINDS = ("full_attention", "sliding_attention")  # without and with a window


def _list_kinds(pattern: Iterable[bool | int]) -> list[str]:
    """Return `layer_types`; the pattern has an entry for each layer: whether it has a window."""
    return [_KINDS[bool(has_window)] for has_window in pattern]


def _make_uniform_window(window: int | None) -> Json:
    """Return the arguments of a model whose layers all have this window, or none.

    transformers takes 0 for a window without tokens, and not for no window.
    """
    if window == 0:
        raise unsupported("sliding_window", window, "null, or 1 or more, is")
    size = None
    if window:
        size = (window - 1, 0)
    return {"window_size": size, "window_attn_skip_freq": None}


def _make_windows(window: int | None, layer_types: Sequence[str]) -> Json:
    """Return the arguments of a model with these kinds of layers."""
    strange = set(layer_types) - set(_KINDS)
    if strange:
        raise ValueError(f"config.json: layer_types {sorted(strange)} is not supported")
    if "sliding_attention" not in layer_types:
        return _make_uniform_window(None)
    if not window:
        raise ValueError(
            f"config.json: layer_types sliding_attention with sliding_window = {window}"
        )
    arguments = _make_uniform_window(window)
    if "full_attention" in layer_types:
        # 1 for each layer that has a window, as in `window_pattern`.
        arguments["window_attn_skip_freq"] = [
            _KINDS.index(layer_type) for layer_type in layer_types
        ]
    return arguments


def _get_written_window(config: TransformerConfig) -> int | None:
    """Return `sliding_window`; None where no layer has a window."""
    if config.window_size is None or not any(config.window_pattern):
        return None
    return config.window_size[0] + 1


def _write_listed_windows(config: TransformerConfig) -> Json:
    # transformers builds the mask of windows even where no layer has one, and needs a size.
    window = _get_written_window(config) or max(config.max_position_embeddings or 0, 1)
    return {"sliding_window": window, "layer_types": _list_kinds(config.window_pattern)}


def alternating_windows(every: int, free: bool = False, full_first: bool = False) -> Rule:
    """Map windows of families in which by default all layers but every N-th have one.

    That one is the last of N layers, or with `full_first` the first. With `free` the field
    `sliding_window_pattern` is N; other families do not read it.
    """
    field = "sliding_window_pattern"

    def read(hf_config: ConfigFields, args: Json) -> Json:
        skip = hf_config.first(field) or every
        if skip != every and not free:
            raise unsupported(field, skip, f"{every} is")
        layer_types = hf_config.first("layer_types")
        if layer_types is None:
            # Derive the kinds from the position of the layer.
            shift = 0 if full_first else 1
            pattern = [(layer + shift) % skip > 0 for layer in range(args["num_layers"])]
            layer_types = _list_kinds(pattern)
        return _make_windows(hf_config.get("sliding_window"), layer_types)

    fields = LAYER_TYPES | {"sliding_window": COUNT, field: COUNT}
    return Rule(fields, read, _write_listed_windows)


def _read_uniform_window(hf_config: ConfigFields, window: int | None) -> Json:
    """Return the arguments of one window for all layers; check that `layer_types` agrees."""
    (layer_type,) = _list_kinds([bool(window)])
    unsupported_types = set(hf_config.first("layer_types") or ()) - {layer_type}
    if unsupported_types:
        raise ValueError(
            f"config.json: layer_types {sorted(unsupported_types)} is not supported with "
            f"sliding_window = {window}"
        )
    return _make_uniform_window(window)


def _read_no_window(hf_config: ConfigFields, args: Json) -> Json:
    return _read_uniform_window(hf_config, None)


def _read_common_window(hf_config: ConfigFields, args: Json) -> Json:
    return _read_uniform_window(hf_config, hf_config.get("sliding_window"))


def _write_common_window(config: TransformerConfig) -> Json:
    return {"sliding_window": _get_written_window(config)}


FULL_ATTENTION = Rule(LAYER_TYPES, _read_no_window)
COMMON_WINDOW = Rule(
    LAYER_TYPES | {"sliding_window": COUNT}, _read_common_window, _write_common_window
)


def _read_listed_windows(hf_config: ConfigFields, args: Json) -> Json:
    window = hf_config.get("sliding_window")
    layer_types = hf_config.first("layer_types")
    if layer_types is None:
        return _make_uniform_window(window)
    return _make_windows(window, layer_types)


# Windows in the layers that `layer_types` lists; without that field in all.
LISTED_WINDOWS = Rule(
    LAYER_TYPES | {"sliding_window": COUNT}, _read_listed_windows, _write_listed_windows
)


def _read_switched_window(hf_config: ConfigFields) -> int | None:
    """Return the window of a Qwen model, which has one only with `use_sliding_window`."""
    if not hf_config.first("use_sliding_window"):
        return None
    return hf_config.get("sliding_window")


def _write_switched_window(config: TransformerConfig) -> Json:
    window = _get_written_window(config)
    return {"use_sliding_window": window is not None, "sliding_window": window}


_SWITCHED_WINDOW = {"use_sliding_window": boolean, "sliding_window": COUNT}


def qwen_windows(in_first_layers: bool = False, switched: bool = True) -> Rule:
    """Map windows of Qwen 2 and 3: those of `layer_types`.

    Without that field layers from `max_window_layers` on have one, or, with `in_first_layers`
    (Qwen2-MoE), every second layer before it, starting with the first. If not `switched`, windows
    do not depend on `use_sliding_window`.
    """
    window_fields = _SWITCHED_WINDOW if switched else {"sliding_window": COUNT}

    def has_window(layer: int, limit: int) -> bool:
        if in_first_layers:
            return layer % 2 == 0 and layer < limit
        return layer >= limit

    def read(hf_config: ConfigFields, args: Json) -> Json:
        window = _read_switched_window(hf_config) if switched else hf_config.get("sliding_window")
        layer_types = hf_config.first("layer_types")
        if layer_types is None:
            limit = hf_config.first("max_window_layers")
            pattern = []
            for layer in range(args["num_layers"]):
                pattern.append(window is not None and has_window(layer, limit))
            layer_types = _list_kinds(pattern)
        return _make_windows(window, layer_types)

    def write(config: TransformerConfig) -> Json:
        layer_types = _list_kinds(config.window_pattern)
        limit = config.num_layers
        if not in_first_layers and "sliding_attention" in layer_types:
            limit = layer_types.index("sliding_attention")
        # `layer_types` takes precedence; readers that do not know it use `max_window_layers`.
        fields = {"max_window_layers": limit, "layer_types": layer_types}
        written = _write_switched_window(config)
        if not switched:
            del written["use_sliding_window"]
        return written | fields

    return Rule(LAYER_TYPES | window_fields | {"max_window_layers": COUNT}, read, write)


def _read_qwen3_moe_window(hf_config: ConfigFields, args: Json) -> Json:
    return _make_uniform_window(_read_switched_window(hf_config))


# transformers applies the window of a Qwen3-MoE to every layer and reads neither `layer_types` nor
# `max_window_layers`.
QWEN3_MOE_WINDOW = Rule(
    LAYER_TYPES | _SWITCHED_WINDOW | {"max_window_layers": COUNT},
    _read_qwen3_moe_window,
    _write_switched_window,
)


# GPT-Neo repeats lists of kinds, e.g. [[["global", "local"], 12]] for 24 layers.
_NEO_KINDS = ("global", "local")  # without and with a window
_NEO_KIND_LIST = schema.sequence(SHORT_TEXT, 10**5)


def _check_repeated_kinds(value: Any, location: str) -> Any:
    """Check a pair of a list of kinds and the number of its repetitions."""
    layer_types, count = schema.sequence(schema.anything, 2, least=2)(value, location)
    return _NEO_KIND_LIST(layer_types, location), COUNT(count, location)


def _read_attention_types(hf_config: ConfigFields, args: Json) -> Json:
    groups = hf_config.first("attention_types") or [[_NEO_KINDS, 12]]
    layer_types: list[str] = []
    for names, count in groups:
        if len(layer_types) <= args["num_layers"]:  # a bound of memory
            layer_types += list(names) * min(count, args["num_layers"])
    if len(layer_types) != args["num_layers"] or not set(layer_types) <= set(_NEO_KINDS):
        supported = f"{args['num_layers']} layers of {' and '.join(_NEO_KINDS)} are"
        raise unsupported("attention_types", hf_config.first("attention_types"), supported)
    if hf_config.stated.get("attention_layers") not in (None, layer_types):
        raise unsupported(
            "attention_layers", hf_config.stated["attention_layers"], f"{layer_types} is"
        )
    pattern = [layer_type == "local" for layer_type in layer_types]
    return _make_windows(hf_config.first("window_size"), _list_kinds(pattern))


def _write_attention_types(config: TransformerConfig) -> Json:
    layer_types = [_NEO_KINDS[has_window] for has_window in config.window_pattern]
    fields: Json = {"attention_types": [[layer_types, 1]]}
    window = _get_written_window(config)
    if window is not None:
        fields["window_size"] = window
    return fields


ATTENTION_TYPES = Rule(
    {
        "attention_types": schema.sequence(_check_repeated_kinds, 10**5),
        "attention_layers": _NEO_KIND_LIST,
        "window_size": COUNT,
    },
    _read_attention_types,
    _write_attention_types,
)


# Layers without RoPE.
def _make_no_rope(pattern: Sequence[bool | int]) -> Json:
    """Return the arguments of a model whose layers have no RoPE where the pattern is true."""
    return {"no_rope_freq": [int(value) for value in pattern] if any(pattern) else None}


_MAX_PATTERN = 10**5


def _read_no_rope_layers(hf_config: ConfigFields, args: Json) -> Json:
    """Read SmolLM3's list, which has a 1 for each layer with RoPE."""
    has_rope = hf_config.first("no_rope_layers")
    if has_rope is None:
        interval = hf_config.first("no_rope_layer_interval") or 1
        has_rope = [(layer + 1) % interval for layer in range(args["num_layers"])]
    if len(has_rope) != args["num_layers"]:
        raise unsupported("no_rope_layers", has_rope, f"a list of {args['num_layers']} is")
    return _make_no_rope([not value for value in has_rope])


def _write_no_rope_layers(config: TransformerConfig) -> Json:
    return {"no_rope_layers": [1 - value for value in config.no_rope_pattern]}


NO_ROPE_LAYERS = Rule(
    {"no_rope_layers": schema.sequence(COUNT, _MAX_PATTERN), "no_rope_layer_interval": COUNT},
    _read_no_rope_layers,
    _write_no_rope_layers,
)


def hybrid_windows(always: bool, period_field: str = "sliding_window_pattern") -> Rule:
    """Map windows of families in which layers without one have no RoPE.

    That is so `always` (Cohere 2), or only if the model has a window at all (EXAONE 4). Without
    `layer_types`, every N-th layer has no window, where N is `period_field`.
    """

    def read(hf_config: ConfigFields, args: Json) -> Json:
        window = hf_config.get("sliding_window")
        layer_types = hf_config.first("layer_types")
        if layer_types is None and window is None and not always:
            return _make_uniform_window(None) | _make_no_rope([])
        # By default every `period`-th layer has full attention.
        if layer_types is None:
            period = hf_config.first(period_field) or 4
            if not isinstance(period, int):
                raise unsupported(period_field, period, "a number, or layer_types, is")
            layer_types = _list_kinds(
                [(layer + 1) % period > 0 for layer in range(args["num_layers"])]
            )
        has_no_rope = always or window is not None
        pattern = [has_no_rope and layer_type == _KINDS[0] for layer_type in layer_types]
        return _make_windows(window, layer_types) | _make_no_rope(pattern)

    def write(config: TransformerConfig) -> Json:
        if always or any(config.no_rope_pattern):
            return _write_listed_windows(config)
        window = _get_written_window(config)
        return {"sliding_window": window, "layer_types": _list_kinds(config.window_pattern)}

    fields = {"sliding_window": COUNT, period_field: schema.anything}
    return Rule(LAYER_TYPES | fields, read, write)


# Cohere 2 with experts: dense layers, by default the first ones, have windows at a period of their
# own. Layers without a window have no RoPE, except dense layers with the period 1.
_DENSE_PERIOD = "prefix_dense_sliding_window_pattern"


def _list_expert_layers(args: Json) -> list[int]:
    """Return 1 for each layer with experts, from the arguments of the rule of these layers."""
    freq = args["moe_layer_freq"]
    if isinstance(freq, list):
        return freq
    return [int(layer % freq == 0) for layer in range(args["num_layers"])]


def _read_cohere_windows(hf_config: ConfigFields, args: Json) -> Json:
    num_layers = args["num_layers"]
    dense_period = hf_config.first(_DENSE_PERIOD)
    layer_types = hf_config.first("layer_types")
    if layer_types is None:
        period = hf_config.first("sliding_window_pattern")
        num_dense = min(hf_config.first("first_k_dense_replace") or 0, num_layers)
        pattern = [(layer + 1) % dense_period > 0 for layer in range(num_dense)]
        pattern += [(layer + 1) % period > 0 for layer in range(num_layers - num_dense)]
        layer_types = _list_kinds(pattern)
    if len(layer_types) != num_layers:
        raise unsupported("layer_types", layer_types, f"a list of {num_layers} is")

    has_no_rope = []
    # A list of the user of another length is refused with the other rules of the model.
    for layer_type, has_experts in zip(layer_types, _list_expert_layers(args), strict=False):
        is_rotated = layer_type == _KINDS[1] or (not has_experts and dense_period == 1)
        has_no_rope.append(not is_rotated)
    return _make_windows(hf_config.get("sliding_window"), layer_types) | _make_no_rope(has_no_rope)


def _write_cohere_windows(config: TransformerConfig) -> Json:
    dense_period = 1
    for has_experts, has_no_rope in zip(
        config.moe_layer_pattern, config.no_rope_pattern, strict=True
    ):
        if has_no_rope and not has_experts:
            dense_period = 2
    return _write_listed_windows(config) | {_DENSE_PERIOD: dense_period}


# It follows the rule of the layers with experts.
COHERE_WINDOWS = Rule(
    LAYER_TYPES
    | {
        "sliding_window": COUNT,
        "sliding_window_pattern": schema.integer(1),
        _DENSE_PERIOD: schema.integer(1),
    },
    _read_cohere_windows,
    _write_cohere_windows,
)


def _read_flint_windows(hf_config: ConfigFields, args: Json) -> Json:
    layer_types = hf_config.first("layer_types")
    if layer_types is None:
        # Full attention in the first two layers, every fourth one and the last one.
        last = args["num_layers"] - 1
        pattern = [2 <= layer < last and layer % 4 != 1 for layer in range(args["num_layers"])]
        layer_types = _list_kinds(pattern)
    has_no_rope = [layer_type == _KINDS[0] for layer_type in layer_types]
    return _make_windows(hf_config.get("sliding_window"), layer_types) | _make_no_rope(has_no_rope)


# Layers without a window have no RoPE.
FLINT_WINDOWS = Rule(
    LAYER_TYPES | {"sliding_window": COUNT}, _read_flint_windows, _write_listed_windows
)

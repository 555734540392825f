"""Rules for attention: heads, windows and the scale of the scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from megatron.conversion.huggingface.config_fields import HARMLESS, ConfigFields, Json
from megatron.conversion.huggingface.rules import SHORT_TEXT, Rule, unsupported
from megatron.conversion.huggingface.stored_parameters import CODEGEN_BLOCKS
from megatron.core.safe_files import schema
from megatron.core.safe_files.schema import COUNT, Check, boolean, number, optional, record
from megatron.core.transformer.transformer_config import TransformerConfig


def heads(always_written: bool = True, free_width: bool = True) -> Rule:
    """Map the number of key/value heads and the width of a head.

    Null means one key/value head per query head, and hidden_size / heads as the width. That width
    is written only if `always_written`. Without `free_width` no other width is accepted.
    """

    def read(hf_config: ConfigFields, args: Json) -> Json:
        # Without key/value heads every query head has its own.
        count = args["num_attention_heads"]
        groups = args.get("num_query_groups") or hf_config.get("num_key_value_heads") or count
        result = {"num_query_groups": groups, "group_query_attention": groups != count}
        width = hf_config.get("head_dim")
        if width is not None:
            if not free_width and width * count != args["hidden_size"]:
                supported = (
                    f"hidden_size / num_attention_heads = {args['hidden_size']} / {count} is"
                )
                raise unsupported("head_dim", width, supported)
            result["kv_channels"] = width
        return result

    def write(config: TransformerConfig) -> Json:
        result = {"num_key_value_heads": config.query_groups}
        is_implied = config.head_dim * config.num_attention_heads == config.hidden_size
        if always_written or (free_width and not is_implied):
            result["head_dim"] = config.head_dim
        return result

    return Rule({"num_key_value_heads": "num_query_groups", "head_dim": "kv_channels"}, read, write)


def _read_no_groups(hf_config: ConfigFields, args: Json) -> Json:
    groups = hf_config.stated.get("num_key_value_heads")
    count = args["num_attention_heads"]
    if groups not in (None, count):
        raise unsupported("num_key_value_heads", groups, f"num_attention_heads = {count} is")
    return {"group_query_attention": False}


def _write_no_groups(config: TransformerConfig) -> Json:
    return {"num_key_value_heads": config.num_attention_heads}


def _check_codegen_heads(hf_config: ConfigFields, args: Json) -> Json:
    count = args["num_attention_heads"]
    if count % CODEGEN_BLOCKS:
        raise unsupported("n_head", count, f"a multiple of {CODEGEN_BLOCKS} is")
    return {}


CODEGEN_HEADS = Rule({}, _check_codegen_heads)
NO_GROUPS = Rule({"num_key_value_heads": "num_query_groups"}, _read_no_groups, _write_no_groups)


def _check_rotated_width(hf_config: ConfigFields, args: Json) -> Json:
    width = hf_config.stated.get("head_dim")
    rotary_width = hf_config.first("qk_rope_head_dim")
    if width not in (None, rotary_width):
        # transformers takes the rotary frequencies of this width.
        raise unsupported("head_dim", width, f"qk_rope_head_dim = {rotary_width} is")
    return {}


LATENT_HEAD_DIM = Rule({"head_dim": COUNT}, _check_rotated_width)


def _check_rotated_fraction(hf_config: ConfigFields, args: Json) -> Json:
    width = hf_config.stated.get("head_dim")
    head_width = hf_config.first("qk_nope_head_dim") + hf_config.first("qk_rope_head_dim")
    if width not in (None, head_width):
        raise unsupported(
            "head_dim", width, f"qk_nope_head_dim + qk_rope_head_dim = {head_width} is"
        )
    return {}


# Mistral 4 states the width of a whole head, and the rotated fraction of it.
WHOLE_HEAD_DIM = Rule({"head_dim": COUNT}, _check_rotated_fraction)


def _read_query_scalar(hf_config: ConfigFields, args: Json) -> Json:
    return {"softmax_scale": hf_config.first("query_pre_attn_scalar") ** -0.5}


def _write_query_scalar(config: TransformerConfig) -> Json:
    # transformers accepts whole numbers only.
    return {"query_pre_attn_scalar": round(config.score_scale**-2)}


QUERY_SCALAR = Rule({"query_pre_attn_scalar": number(1)}, _read_query_scalar, _write_query_scalar)


def _read_attention_multiplier(hf_config: ConfigFields, args: Json) -> Json:
    factor = hf_config.first("attention_multiplier")
    if factor is None:
        head_dim = args.get("kv_channels") or args["hidden_size"] // args["num_attention_heads"]
        factor = head_dim**-0.5
    return {"softmax_scale": factor}


def _write_attention_multiplier(config: TransformerConfig) -> Json:
    return {"attention_multiplier": config.score_scale}


ATTENTION_MULTIPLIER = Rule(
    {"attention_multiplier": number(0)}, _read_attention_multiplier, _write_attention_multiplier
)


# Windows: transformers counts the token itself, `window_size` does not.

_LAYER_TYPES = {"layer_types": schema.sequence(SHORT_TEXT, 10**5)}
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

    def write(config: TransformerConfig) -> Json:
        return _write_listed_windows(config)

    return Rule(_LAYER_TYPES | {"sliding_window": COUNT, field: COUNT}, read, write)


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


FULL_ATTENTION = Rule(_LAYER_TYPES, _read_no_window)
COMMON_WINDOW = Rule(
    _LAYER_TYPES | {"sliding_window": COUNT}, _read_common_window, _write_common_window
)


def _read_listed_windows(hf_config: ConfigFields, args: Json) -> Json:
    window = hf_config.get("sliding_window")
    layer_types = hf_config.first("layer_types")
    if layer_types is None:
        return _make_uniform_window(window)
    return _make_windows(window, layer_types)


# Windows in the layers that `layer_types` lists; without that field in all.
LISTED_WINDOWS = Rule(
    _LAYER_TYPES | {"sliding_window": COUNT}, _read_listed_windows, _write_listed_windows
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

    return Rule(_LAYER_TYPES | window_fields | {"max_window_layers": COUNT}, read, write)


def _read_qwen3_moe_window(hf_config: ConfigFields, args: Json) -> Json:
    return _make_uniform_window(_read_switched_window(hf_config))


# transformers applies the window of a Qwen3-MoE to every layer and reads neither `layer_types` nor
# `max_window_layers`.
QWEN3_MOE_WINDOW = Rule(
    _LAYER_TYPES | _SWITCHED_WINDOW | {"max_window_layers": COUNT},
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


def _read_multi_query(hf_config: ConfigFields, args: Json) -> Json:
    count = args["num_attention_heads"]
    groups = 1 if hf_config.first("multi_query") else count
    return {"num_query_groups": groups, "group_query_attention": groups != count}


def _write_multi_query(config: TransformerConfig) -> Json:
    return {"multi_query": config.query_groups == 1}


# One key/value head for all query heads, or one for each.
MULTI_QUERY = Rule({"multi_query": boolean}, _read_multi_query, _write_multi_query)


# Layers of Falcon. Its old architecture has one norm if attention and MLP are parallel, and one
# key/value head or one per query head.


def _read_falcon_layers(hf_config: ConfigFields, args: Json) -> Json:
    count = args["num_attention_heads"]
    norms = hf_config.get("num_ln_in_parallel_attn")
    is_new = bool(hf_config.first("new_decoder_architecture"))
    is_parallel = bool(hf_config.first("parallel_attn"))
    # Falcon 40B and later have query groups and up to two norms, Falcon 7B and 1B neither.
    if is_new:
        if not is_parallel:
            raise unsupported("parallel_attn", False, "True is with new_decoder_architecture")
        groups = hf_config.get("num_kv_heads") or count
        norms = 2 if norms is None else norms
        accepted: tuple[int, ...] = (1, 2)
    else:
        groups = 1 if hf_config.first("multi_query") else count
        norms = 1 if norms is None else norms
        accepted = (1,)
        stated = hf_config.stated.get("num_kv_heads")
        if groups != 1 and stated not in (None, groups):
            raise unsupported("num_kv_heads", stated, f"num_attention_heads = {count} is")
    if norms not in accepted:
        raise unsupported("num_ln_in_parallel_attn", norms, f"{accepted[-1]} is")
    return {
        "num_query_groups": groups,
        "group_query_attention": groups != count,
        "parallel_residual": is_parallel,
        "share_parallel_norm": is_parallel and norms == 1,
    }


def _write_falcon_layers(config: TransformerConfig) -> Json:
    if not config.parallel_residual:
        return {
            "new_decoder_architecture": False,
            "parallel_attn": False,
            "multi_query": config.query_groups == 1,
        }
    return {
        "new_decoder_architecture": True,
        "parallel_attn": True,
        "num_kv_heads": config.query_groups,
        "num_ln_in_parallel_attn": 1 if config.share_parallel_norm else 2,
    }


FALCON_LAYERS = Rule(
    {
        "new_decoder_architecture": boolean,
        "parallel_attn": boolean,
        "multi_query": boolean,
        "num_kv_heads": "num_query_groups",
        "num_ln_in_parallel_attn": COUNT,
    },
    _read_falcon_layers,
    _write_falcon_layers,
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
    return Rule(_LAYER_TYPES | fields, read, write)


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
    _LAYER_TYPES
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
    _LAYER_TYPES | {"sliding_window": COUNT}, _read_flint_windows, _write_listed_windows
)


def _read_alibi(hf_config: ConfigFields, args: Json) -> Json:
    if not hf_config.first("alibi"):
        return {}
    return {"position_embedding_type": "alibi", "scale_alibi": True}


def _write_alibi(config: TransformerConfig) -> Json:
    return {"alibi": config.position_embedding_type == "alibi"}


# ALiBi instead of RoPE, whose rule follows. Its biases are scaled like the scores.
SWITCHED_ALIBI = Rule({"alibi": boolean}, _read_alibi, _write_alibi)


_INDEXED_KINDS = ("indexed_attention", "deepseek_sparse_attention")


def _read_indexed_layers(hf_config: ConfigFields, args: Json) -> Json:
    unsupported_types = set(hf_config.first("layer_types") or ()) - set(_INDEXED_KINDS)
    if unsupported_types:
        raise unsupported("layer_types", sorted(unsupported_types), f"{_INDEXED_KINDS[0]} is")
    return {}


# Layers whose indexer chooses the tokens to attend to.
INDEXED_LAYERS = Rule(_LAYER_TYPES, _read_indexed_layers)


# Layers without attention, which have a mixer that our model does not have.

STATE_SPACE = "state space mixer"
CONVOLUTION = "short convolution"


def _make_foreign_mixers(mixer: str, has_attention: Sequence[bool]) -> Json:
    """Return the arguments of a model whose layers without attention have mixers of this kind."""
    if all(has_attention):
        return {"foreign_mixers": None}
    return {"foreign_mixers": ["" if value else mixer for value in has_attention]}


def _find_attention(
    field: str, layer_types: Sequence[str], mixer_types: Sequence[str]
) -> list[bool]:
    """Return which layers have attention. `mixer_types` are the names of the other layers."""
    strange = set(layer_types) - set(_ATTENTION_KINDS) - set(mixer_types)
    if strange:
        supported = f"{', '.join([*_ATTENTION_KINDS, *mixer_types])} are"
        raise unsupported(field, sorted(strange), supported)
    return [layer_type in _ATTENTION_KINDS for layer_type in layer_types]


# Granite 4: attention or state space layers, under their names in transformers 4.x or 5.x.

_ATTENTION_KINDS = ("attention", "full_attention")
_LAYER_KINDS = ("layer_types", "layers_block_type")


def _read_attention_layers(hf_config: ConfigFields, args: Json) -> Json:
    layer_types = hf_config.first(*_LAYER_KINDS)
    if layer_types is None:
        layer_types = ["linear_attention"] * args["num_layers"]
    has_attention = _find_attention(_LAYER_KINDS[0], layer_types, ("mamba", "linear_attention"))
    return _make_foreign_mixers(STATE_SPACE, has_attention)


def _write_attention_layers(config: TransformerConfig) -> Json:
    # The name in transformers 4.x, which 5.x knows as well. It checks sizes of state space layers
    # even if there are none, and one head fits any width.
    return {"layer_types": [_ATTENTION_KINDS[0]] * config.num_layers, "mamba_n_heads": 1}


ATTENTION_LAYERS = Rule(
    dict.fromkeys(_LAYER_KINDS, _LAYER_TYPES["layer_types"]) | {"mamba_n_heads": COUNT},
    _read_attention_layers,
    _write_attention_layers,
)


# LFM2: attention or short convolutions.


def _read_convolutions(hf_config: ConfigFields, args: Json) -> Json:
    layer_types = hf_config.first("layer_types")
    if layer_types is not None:
        has_attention = _find_attention("layer_types", layer_types, ("conv",))
        return _make_foreign_mixers(CONVOLUTION, has_attention)
    layers = range(args["num_layers"])
    attention_layers = hf_config.first("full_attn_idxs")
    if attention_layers is None:
        attention_layers = layers
    return _make_foreign_mixers(CONVOLUTION, [layer in attention_layers for layer in layers])


def _write_convolutions(config: TransformerConfig) -> Json:
    return {"layer_types": [_ATTENTION_KINDS[1]] * config.num_layers}


CONVOLUTIONS = Rule(
    _LAYER_TYPES | {"full_attn_idxs": schema.sequence(COUNT, 10**5)},
    _read_convolutions,
    _write_convolutions,
)


def foreign_layers(
    mixer: str,
    fields: Mapping[str, Check],
    find_attention: Callable[[ConfigFields, int], Sequence[bool]],
) -> Rule:
    """Map layers of which some have mixers of this foreign kind, as all models of a family have.

    `find_attention` returns which layers have attention, from the fields and the number of layers.
    """

    def read(hf_config: ConfigFields, args: Json) -> Json:
        has_attention = find_attention(hf_config, args["num_layers"])
        if all(has_attention):
            first = next(iter(fields))
            raise unsupported(first, hf_config.first(first), f"a model with a {mixer} is")
        return _make_foreign_mixers(mixer, has_attention)

    return Rule(fields, read)


def _find_listed_attention(hf_config: ConfigFields, num_layers: int) -> list[bool]:
    attention_layers = hf_config.first("attn_layer_indices") or ()
    return [layer in attention_layers for layer in range(num_layers)]


# Bamba.
LISTED_ATTENTION = foreign_layers(
    STATE_SPACE, {"attn_layer_indices": schema.sequence(COUNT, 10**5)}, _find_listed_attention
)


def _find_periodic_attention(hf_config: ConfigFields, num_layers: int) -> list[bool]:
    period = hf_config.first("attn_layer_period")
    offset = hf_config.first("attn_layer_offset")
    return [layer % period == offset for layer in range(num_layers)]


# Jamba.
PERIODIC_ATTENTION = foreign_layers(
    STATE_SPACE,
    {"attn_layer_period": schema.integer(1, 10**5), "attn_layer_offset": COUNT},
    _find_periodic_attention,
)


def _find_layers_of_attention(hf_config: ConfigFields, num_layers: int) -> list[bool]:
    layer_types = hf_config.first("layer_types") or _ATTENTION_KINDS[1:] * num_layers
    return _find_attention("layer_types", layer_types, ("conv",))


# LFM2 with experts.
CONVOLUTION_LAYERS = foreign_layers(CONVOLUTION, _LAYER_TYPES, _find_layers_of_attention)


# Attention of MPT, which config.json describes in a dictionary.

# The only values that transformers computes.
_MPT_CONSTANTS = {
    "alibi": True,
    "alibi_bias_max": 8,
    "attn_type": "multihead_attention",
    "attn_uses_sequence_id": False,
    "prefix_lm": False,
    "qk_ln": False,
}
_MPT_FIELDS = record(
    {
        "attn_pdrop?": optional(number(0, 1)),
        "softmax_scale?": optional(number(1e-9)),
        "clip_qkv?": optional(number(0)),
    }
)
_MPT_NAMES = {"attn_pdrop", "softmax_scale", "clip_qkv", *_MPT_CONSTANTS}
# The choice of a kernel, and fields that transformers adds to every configuration.
_MPT_HARMLESS = {"attn_impl", "dtype", "is_encoder_decoder", *HARMLESS.split()}


def _read_mpt_attention(hf_config: ConfigFields, args: Json) -> Json:
    stated = hf_config.stated.get("attn_config") or {}
    for name, value in stated.items():
        if name not in _MPT_NAMES | _MPT_HARMLESS and value is not None:
            raise unsupported(f"attn_config.{name}", value, f"{', '.join(sorted(_MPT_NAMES))} are")
        if name in _MPT_CONSTANTS and value != _MPT_CONSTANTS[name]:
            raise unsupported(f"attn_config.{name}", value, f"{_MPT_CONSTANTS[name]} is")
    return {
        "attention_dropout": float(stated.get("attn_pdrop") or 0.0),
        "softmax_scale": stated.get("softmax_scale"),
        "clip_qkv": stated.get("clip_qkv") or None,  # 0 means no limit
    }


def _write_mpt_attention(config: TransformerConfig) -> Json:
    fields: Json = {"alibi": True, "softmax_scale": config.score_scale}
    if config.clip_qkv is not None:
        fields["clip_qkv"] = config.clip_qkv
    return {"attn_config": fields}


MPT_ATTENTION = Rule({"attn_config": _MPT_FIELDS}, _read_mpt_attention, _write_mpt_attention)

"""Rules for mixture of experts: which layers have experts, how tokens choose them, their widths."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.conversion.huggingface.config_fields import ConfigFields, Json, refuse_conflicts
from megatron.conversion.huggingface.rules import (
    SHORT_TEXT,
    Rule,
    copied,
    fixed,
    implied,
    unsupported,
)
from megatron.core.safe_files import schema
from megatron.core.safe_files.schema import (
    COUNT,
    Check,
    boolean,
    number,
)
from megatron.core.transformer.transformer_config import TransformerConfig

EXPERTS_PER_TOKEN = copied("moe_router_topk", "num_experts_per_tok", required=True)


def _read_auxiliary_loss(hf_config: ConfigFields, args: Json) -> Json:
    return {
        "moe_aux_loss_coeff": [float(hf_config.first("router_aux_loss_coef") or 0.0)],
        "moe_router_load_balancing_type": ["aux_loss"],
    }


def _write_auxiliary_loss(config: TransformerConfig) -> Json:
    return {"router_aux_loss_coef": config.load_balancing.get("aux_loss", 0.0)}


# The load-balancing loss over a micro-batch.
AUXILIARY_LOSS = Rule(
    {"router_aux_loss_coef": number()}, _read_auxiliary_loss, _write_auxiliary_loss
)


# Weights of the chosen experts that sum to 1 are those of a softmax over the chosen ones alone.
# With one expert per token that weight is 1 for every token.


_TOPK = "num_experts_per_tok"


def _normalize_one_expert(topk: int, is_normalized: bool = True) -> Json:
    return {"moe_router_normalize_top1": is_normalized and topk == 1}


def _read_always_normalized(hf_config: ConfigFields, args: Json) -> Json:
    return _normalize_one_expert(args["moe_router_topk"])


NORMALIZED_SIGMOID = Rule({}, _read_always_normalized)


def _read_normalized_weights(hf_config: ConfigFields, args: Json) -> Json:
    return {"moe_router_pre_softmax": False, **_read_always_normalized(hf_config, args)}


NORMALIZED_WEIGHTS = Rule({}, _read_normalized_weights)


def _read_layer_topk(hf_config: ConfigFields, args: Json) -> Json:
    stated = {}
    for name in _TOPK_BY_LAYER:
        topk = hf_config.stated.get(name)
        # One number, or one for each layer.
        if isinstance(topk, list):
            if len(topk) < args["num_layers"] or any(value != topk[0] for value in topk):
                raise unsupported(name, topk, "the same number in every layer is")
            topk = topk[0]
        if topk is not None:
            stated[name] = COUNT(topk, f"config.json: {name}")
    refuse_conflicts(stated)
    if not stated:
        return {"moe_router_topk": hf_config.first(_TOPK_BY_LAYER[0])}
    return {"moe_router_topk": next(iter(stated.values()))}


def _write_layer_topk(config: TransformerConfig) -> Json:
    return {_TOPK_BY_LAYER[0]: config.moe_router_topk}


_TOPK_BY_LAYER = ("moe_topk", _TOPK)
LAYER_TOPK = Rule(
    {_TOPK_BY_LAYER[0]: schema.anything, _TOPK: "moe_router_topk"},
    _read_layer_topk,
    _write_layer_topk,
)


def _read_normalization(hf_config: ConfigFields, args: Json) -> Json:
    is_normalized = bool(hf_config.get("norm_topk_prob"))
    return {
        "moe_router_pre_softmax": not is_normalized,
        **_normalize_one_expert(args["moe_router_topk"], is_normalized),
    }


def _write_normalization(config: TransformerConfig) -> Json:
    return {"norm_topk_prob": not config.moe_router_pre_softmax}


SWITCHED_NORMALIZATION = Rule(
    {"norm_topk_prob": boolean}, _read_normalization, _write_normalization
)


def _read_sigmoid_normalization(hf_config: ConfigFields, args: Json) -> Json:
    is_normalized = bool(hf_config.get("norm_topk_prob"))
    return {
        "moe_router_normalize_sigmoid": is_normalized,
        **_normalize_one_expert(args["moe_router_topk"], is_normalized),
    }


def _write_sigmoid_normalization(config: TransformerConfig) -> Json:
    return {"norm_topk_prob": config.normalizes_sigmoid}


SIGMOID_NORMALIZATION = Rule(
    {"norm_topk_prob": boolean}, _read_sigmoid_normalization, _write_sigmoid_normalization
)


def _make_pattern(pattern: list[int]) -> Json:
    """Return the arguments for a list with 1 for each layer that has experts."""
    return {"moe_layer_freq": 1 if all(pattern) else pattern}


def _expert_layers(default_dense: tuple[int, ...]) -> Rule:
    """Give experts to every `decoder_sparse_step`-th layer, except those in `mlp_only_layers`.

    Without the latter field they are the layers of `default_dense`.
    """

    def read(hf_config: ConfigFields, args: Json) -> Json:
        step = hf_config.first("decoder_sparse_step") or 1
        dense = hf_config.first("mlp_only_layers")
        if dense is None:
            dense = default_dense
        pattern = []
        for layer in range(args["num_layers"]):
            has_experts = (layer + 1) % step == 0 and layer not in dense
            pattern.append(int(has_experts))
        return _make_pattern(pattern)

    fields = {"decoder_sparse_step": COUNT, "mlp_only_layers": schema.sequence(COUNT, 10_000)}
    return Rule(fields, read, _write_expert_layers)


def _write_expert_layers(config: TransformerConfig) -> Json:
    dense = []
    for layer, has_experts in enumerate(config.moe_layer_pattern):
        if not has_experts:
            dense.append(layer)
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


EXPERT_LAYERS = _expert_layers(())
FLINT_EXPERT_LAYERS = _expert_layers((0, 1))
_DENSE_PREFIX = "first_k_dense_replace"


def _make_layer_pattern(num_dense: int, args: Json, field: str = _DENSE_PREFIX) -> Json:
    """Return the arguments of a model whose first `num_dense` layers have no experts."""
    num_layers = args["num_layers"]
    if num_dense > num_layers:
        supported = f"at most num_hidden_layers = {num_layers} is"
        raise unsupported(field, num_dense, supported)
    return _make_pattern([0] * num_dense + [1] * (num_layers - num_dense))


def dense_prefix(field: str = _DENSE_PREFIX) -> Rule:
    """Map the number of layers without experts, which are the first ones."""

    def read(hf_config: ConfigFields, args: Json) -> Json:
        return _make_layer_pattern(hf_config.get(field) or 0, args, field)

    def write(config: TransformerConfig) -> Json:
        return {field: config.num_layers - sum(config.moe_layer_pattern)}

    return Rule({field: COUNT}, read, write)


DENSE_PREFIX = dense_prefix()


def _read_periodic_experts(hf_config: ConfigFields, args: Json) -> Json:
    period = hf_config.first("expert_layer_period")
    offset = hf_config.first("expert_layer_offset")
    pattern = [int(layer % period == offset) for layer in range(args["num_layers"])]
    return {"moe_layer_freq": pattern if any(pattern) else 1}


# Jamba.
PERIODIC_EXPERTS = Rule(
    {"expert_layer_period": schema.integer(1, 10**5), "expert_layer_offset": COUNT},
    _read_periodic_experts,
)

_INTERVAL = ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval")


def _make_interval_pattern(num_layers: int, first: int, last: int, interval: int) -> list[int]:
    """Return 1 for each layer with experts: every `interval`-th of a range of layers."""
    pattern = []
    for layer in range(num_layers):
        pattern.append(int(first <= layer <= last and (layer + 1) % interval == 0))
    return pattern


def _read_expert_interval(hf_config: ConfigFields, args: Json) -> Json:
    first, last, interval = (hf_config.first(field) for field in _INTERVAL)
    if last == -1:
        last = args["num_layers"] - 1
    pattern = _make_interval_pattern(args["num_layers"], first, last, interval)
    if not any(pattern):
        raise ValueError(
            f"config.json: no layer has experts with {_INTERVAL[0]} = {first}, {_INTERVAL[1]} = "
            f"{last}, {_INTERVAL[2]} = {interval} and num_hidden_layers = {args['num_layers']}, "
            "which is not supported"
        )
    return _make_pattern(pattern)


def _write_expert_interval(config: TransformerConfig) -> Json:
    pattern = config.moe_layer_pattern
    layers = [layer for layer, has_experts in enumerate(pattern) if has_experts]
    first = min(layers, default=0)
    last = max(layers, default=0)
    interval = 1
    for candidate in range(1, len(pattern) + 1):
        if _make_interval_pattern(len(pattern), first, last, candidate) == pattern:
            interval = candidate
            break
    return dict(zip(_INTERVAL, (first, last, interval), strict=True))


EXPERT_INTERVAL = Rule(
    {
        _INTERVAL[0]: COUNT,
        _INTERVAL[1]: schema.integer(-1),
        _INTERVAL[2]: schema.integer(1),
    },
    _read_expert_interval,
    _write_expert_interval,
)

_LAYER_KINDS = ("dense", "sparse")


def listed_expert_layers(num_dense: int | None) -> Rule:
    """Map `mlp_layer_types`; without that field the first `num_dense` layers are dense.

    None: `first_k_dense_replace` is that number.
    """

    def read(hf_config: ConfigFields, args: Json) -> Json:
        layer_types = hf_config.first("mlp_layer_types")
        prefix = hf_config.first(_DENSE_PREFIX) if num_dense is None else num_dense
        arguments = _make_layer_pattern(min(prefix or 0, args["num_layers"]), args)
        if layer_types is not None:
            if len(layer_types) != args["num_layers"] or not set(layer_types) <= set(_LAYER_KINDS):
                supported = f"{args['num_layers']} layers of {' and '.join(_LAYER_KINDS)} are"
                raise unsupported("mlp_layer_types", layer_types, supported)
            arguments = _make_pattern(list(map(_LAYER_KINDS.index, layer_types)))
        # Other models of transformers do not read this field.
        stated = None if num_dense is None else hf_config.stated.get(_DENSE_PREFIX)
        if stated is not None and _make_layer_pattern(stated, args) != arguments:
            raise unsupported(_DENSE_PREFIX, stated, "the number that mlp_layer_types implies is")
        return arguments

    def write(config: TransformerConfig) -> Json:
        pattern = config.moe_layer_pattern
        fields: Json = {"mlp_layer_types": [_LAYER_KINDS[has_experts] for has_experts in pattern]}
        if num_dense is None and pattern == sorted(pattern):
            # For readers that do not know the list.
            fields |= DENSE_PREFIX.write(config)
        return fields

    check = schema.sequence(SHORT_TEXT, 10**5)
    return Rule({"mlp_layer_types": check, _DENSE_PREFIX: COUNT}, read, write)


# Granite: one shared expert; 0 means none.

_SHARED_WIDTH = "shared_intermediate_size"
_EXPERT_WIDTH = "intermediate_size"
_NUM_EXPERTS = "num_local_experts"


def _read_shared_width(hf_config: ConfigFields, args: Json) -> Json:
    width = hf_config.first(_SHARED_WIDTH)
    if width and args["add_bias_linear"]:  # which the rule of biases has read
        raise unsupported("attention_bias", True, f"False is with {_SHARED_WIDTH} = {width}")
    return {"moe_shared_expert_intermediate_size": width or None}


def _write_shared_width(config: TransformerConfig) -> Json:
    return {_SHARED_WIDTH: config.moe_shared_expert_intermediate_size or 0}


SHARED_WIDTH = Rule(
    {_SHARED_WIDTH: "moe_shared_expert_intermediate_size"}, _read_shared_width, _write_shared_width
)


# Granite 4 may have no experts: its MLP is the shared expert then.


def _read_width_without_experts(hf_config: ConfigFields, args: Json) -> Json:
    if hf_config.get(_NUM_EXPERTS):
        return {}
    return {"ffn_hidden_size": hf_config.first(_SHARED_WIDTH)}


WIDTH_WITHOUT_EXPERTS = Rule({_SHARED_WIDTH: "ffn_hidden_size"}, _read_width_without_experts)


def _read_optional_experts(hf_config: ConfigFields, args: Json) -> Json:
    num_experts = hf_config.get(_NUM_EXPERTS)
    if not num_experts:
        return {"num_experts": None}
    topk = hf_config.first("num_experts_per_tok")
    return {
        "num_experts": num_experts,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": hf_config.first(_EXPERT_WIDTH),
        "moe_router_pre_softmax": False,
        **_normalize_one_expert(topk),
        **_read_shared_width(hf_config, args),
    }


def _write_optional_experts(config: TransformerConfig) -> Json:
    if not config.has_experts:
        return {_NUM_EXPERTS: 0, _SHARED_WIDTH: config.ffn_size}
    return {
        _NUM_EXPERTS: config.experts,
        "num_experts_per_tok": config.moe_router_topk,
        _EXPERT_WIDTH: config.moe_ffn_size,
        **_write_shared_width(config),
    }


OPTIONAL_EXPERTS = Rule(
    {_NUM_EXPERTS: "num_experts", "num_experts_per_tok": "moe_router_topk"},
    _read_optional_experts,
    _write_optional_experts,
)
# With 0, the experts of transformers return zeros. Our router would not scale their weights.
_WEIGHT_FACTOR = number(1e-9)


def scaled_weights(field: str) -> Rule:
    """Map the factor of the weights of the chosen experts."""

    def read(hf_config: ConfigFields, args: Json) -> Json:
        return {"moe_router_topk_scaling_factor": float(hf_config.first(field))}

    def write(config: TransformerConfig) -> Json:
        return {field: config.topk_scaling_factor}

    return Rule({field: _WEIGHT_FACTOR}, read, write)


def _read_selection(hf_config: ConfigFields, args: Json) -> Json:
    function = hf_config.first("expert_selection_fn")
    if function == "softmax":
        return {
            "moe_router_score_function": "softmax",
            **_read_normalized_weights(hf_config, args),
        }
    if function == "sigmoid":
        return {
            "moe_router_score_function": "sigmoid",
            **_read_sigmoid_normalization(hf_config, args),
        }
    raise unsupported("expert_selection_fn", function, "softmax and sigmoid are")


def _write_selection(config: TransformerConfig) -> Json:
    function = config.moe_router_score_function
    return {"expert_selection_fn": function, **_write_sigmoid_normalization(config)}


# Softmax over the chosen experts, or their sigmoid scores.
SELECTION_FUNCTION = Rule(
    {"expert_selection_fn": SHORT_TEXT, "norm_topk_prob": boolean},
    _read_selection,
    _write_selection,
)

_COMBINATION = "shared_expert_combination_strategy"


def _read_combination(hf_config: ConfigFields, args: Json) -> Json:
    strategy = hf_config.first(_COMBINATION)
    if strategy not in ("sum", "average"):
        raise unsupported(_COMBINATION, strategy, "sum and average are")
    has_shared = bool(args["moe_shared_expert_intermediate_size"])
    return {"moe_average_shared_expert": has_shared and strategy == "average"}


def _write_combination(config: TransformerConfig) -> Json:
    return {_COMBINATION: "average" if config.moe_average_shared_expert else "sum"}


# It follows the rule of the shared experts.
SHARED_COMBINATION = Rule({_COMBINATION: SHORT_TEXT}, _read_combination, _write_combination)
_PREFIX_WIDTH = "prefix_dense_intermediate_size"


def _read_widths(hf_config: ConfigFields, args: Json) -> Json:
    width = hf_config.first("intermediate_size")
    return {
        "moe_ffn_hidden_size": width,
        "ffn_hidden_size": hf_config.first(_PREFIX_WIDTH) or width,
    }


def _write_widths(config: TransformerConfig) -> Json:
    width = config.moe_ffn_hidden_size or config.ffn_size
    return {"intermediate_size": width, _PREFIX_WIDTH: config.ffn_size}


# Cohere 2 with experts: width of an expert, and of dense layers, by default the same.
EXPERT_AND_DENSE_WIDTH = Rule(
    {"intermediate_size": "moe_ffn_hidden_size", _PREFIX_WIDTH: "ffn_hidden_size"},
    _read_widths,
    _write_widths,
)


def counted_shared_experts(field: str, least: int = 0) -> Rule:
    """Map the number of shared experts, which have the width of a routed one each."""

    def read(hf_config: ConfigFields, args: Json) -> Json:
        if hf_config.get(field) == 0 and least:
            raise unsupported(field, 0, f"{least} or more is")
        width = (hf_config.get(field) or 0) * args["moe_ffn_hidden_size"]
        return {"moe_shared_expert_intermediate_size": width}

    def write(config: TransformerConfig) -> Json:
        width = config.moe_shared_expert_intermediate_size or 0
        return {field: width // (config.moe_ffn_hidden_size or 1)}

    return Rule({field: COUNT}, read, write)


_DEEPSEEK_FIELDS: dict[str, Check | str] = {
    "n_group": COUNT,
    "topk_group": COUNT,
    "routed_scaling_factor": _WEIGHT_FACTOR,
    "topk_method": SHORT_TEXT,
}


def deepseek_experts(methods: Sequence[str], best: int) -> Rule:
    """Map the groups of experts of DeepSeek. Null means none.

    Groups are ranked by their `best` highest scores. The last of `methods` limits the groups per
    token; the first is the default.
    """

    def read(hf_config: ConfigFields, args: Json) -> Json:
        method = hf_config.first("topk_method") or methods[0]
        if method not in methods:
            verb = "are" if len(methods) > 1 else "is"
            raise unsupported("topk_method", method, f"{' and '.join(methods)} {verb}")

        # Groups. The method decides, not the number of groups.
        num_groups = hf_config.get("n_group") or 1
        grouping: Json = dict.fromkeys(
            ("moe_router_num_groups", "moe_router_group_topk", "moe_router_group_score_topk")
        )
        if method == methods[-1] and hf_config.get("topk_group") == 0:
            # transformers masks all experts then, even of a single group.
            raise unsupported("topk_group", 0, "1 or more is")
        if method == methods[-1] and num_groups > 1:
            grouping["moe_router_num_groups"] = num_groups
            grouping["moe_router_group_topk"] = hf_config.get("topk_group")
            grouping["moe_router_group_score_topk"] = best

        scaling_factor = hf_config.get("routed_scaling_factor") or 1.0
        return grouping | {
            "moe_router_topk_scaling_factor": float(scaling_factor),
        }

    def write(config: TransformerConfig) -> Json:
        # Only the last method limits the groups of experts per token.
        method = methods[0]
        if config.moe_router_num_groups:
            method = methods[-1]
        return {
            "topk_method": method,
            "n_group": config.moe_router_num_groups or 1,
            "topk_group": config.moe_router_group_topk or 1,
            "routed_scaling_factor": config.topk_scaling_factor,
        }

    return Rule(_DEEPSEEK_FIELDS, read, write)


_PREDICTION_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")  # the first one is written


def _read_prediction_layers(hf_config: ConfigFields, args: Json) -> Json:
    # transformers ignores the layers, so the weight files decide whether there are any.
    return {"mtp_num_layers": hf_config.first(*_PREDICTION_LAYERS) or None}


def _write_prediction_layers(config: TransformerConfig) -> Json:
    return {_PREDICTION_LAYERS[0]: config.num_mtp_layers}


PREDICTION_LAYERS = Rule(
    dict.fromkeys(_PREDICTION_LAYERS, "mtp_num_layers"),
    _read_prediction_layers,
    _write_prediction_layers,
)
"""Number of layers for multi-token prediction."""


SHARED_EXPERTS = counted_shared_experts("n_shared_experts")
SIGMOID_SCORES = implied(
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_dtype="fp32",
)
# Experts of DeepSeek-V3: chosen by sigmoid scores with a bias, in groups.
SIGMOID_CHOICE = (
    copied("moe_router_topk", "num_experts_per_tok"),
    copied("moe_ffn_hidden_size", "moe_intermediate_size"),
    deepseek_experts(("noaux_tc",), best=2),
    SIGMOID_NORMALIZATION,
    fixed("scoring_func", "sigmoid"),
    SIGMOID_SCORES,
)
SIGMOID_EXPERTS = (
    *SIGMOID_CHOICE,
    copied("num_experts", "n_routed_experts", "num_local_experts"),
    SHARED_EXPERTS,
)
# Widths that follow from others, layers that predict later tokens (in families whose layers are not
# known), and options of training.
DEEPSEEK_HARMLESS = """
    qk_head_dim num_nextn_predict_layers num_mtp_layers aux_loss_alpha seq_aux ep_size auto_map"""

"""Rules between fields of `config.json` and model arguments, each with its inverse; those of attention are apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.conversion.huggingface.config_json import Json, Rule, unsupported
from megatron.conversion.model_space.source import MODEL_ARGUMENTS, SIZE, flag_name
from megatron.core.dist_checkpointing.format.schema import anything, boolean, number, sequence, text
from megatron.core.transformer.transformer_config import TransformerConfig

REQUIRED = object()  # a field without a default: it defines the model
_TEXT = text(256)


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
            raise unsupported(field, hf[field], f"{values[0]!r} is")
        return {}

    return Rule({field: anything}, read, lambda config: {field: values[0]} if written else {})


def always(**fields: Any) -> list[Rule]:
    """Fields of one meaning that are written."""
    return [fixed(field, value, written=True) for field, value in fields.items()]


def implied(**arguments: Any) -> Rule:
    """Arguments that the family implies; there is no field for them."""
    return Rule({}, lambda hf, args: arguments)


def feed_forward(field: str, free: bool) -> Rule:
    """`n_inner` of GPT-2, null for 4h; BLOOM has 4h always."""

    def read(hf: Json, args: Json) -> Json:
        size, inner = 4 * args["hidden_size"], hf.get(field)
        if inner not in (None, size) and not free:
            raise unsupported(field, inner, f"4 * hidden_size = {size} is")
        return {"ffn_hidden_size": inner or size}

    return Rule({field: SIZE}, read, lambda config: {field: config.ffn_size} if free else {})


def biases(*fields: str) -> Rule:
    """Biases of attention and MLP are one argument in the model: one alone is read as both, the other being zero."""
    return Rule(
        dict.fromkeys(fields, boolean),
        lambda hf, args: {"add_bias_linear": any(hf.get(field) for field in fields), "add_qkv_bias": False},
        lambda config: dict.fromkeys(fields, config.add_bias_linear),
        fields,
    )


def _read_gelu(hf: Json, args: Json) -> Json:
    name = hf.get("activation_function") or "gelu_new"
    tanh = name in ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate")
    if not tanh and name not in ("gelu", "gelu_python"):
        raise unsupported("activation_function", name, "gelu_new (the tanh approximation) and gelu (exact) are")
    return {"swiglu": False, "bias_gelu_fusion": tanh}


GELU = Rule(
    {"activation_function": _TEXT},
    _read_gelu,
    lambda config: {"activation_function": "gelu_new" if config.tanh_gelu else "gelu"},
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


def _deepseek_experts(usual: Json, best: int, grouped: Callable[[Json], bool]) -> Rule:
    """Dense layers come first; groups are ranked by their `best` best scores; experts are shared in multiples of one.

    `usual` is what missing fields mean; null is none. `grouped` says whether the experts come from few of the groups.
    """

    def read(hf: Json, args: Json) -> Json:
        told, layers, width = usual | hf, args["num_layers"], args["moe_ffn_hidden_size"]
        first = told["first_k_dense_replace"] or 0
        if first > layers:
            raise unsupported("first_k_dense_replace", first, f"at most num_hidden_layers = {layers} is")
        groups, taken = (told["n_group"], told["topk_group"]) if grouped(told) else (None, None)
        return {
            "moe_layer_freq": [0] * first + [1] * (layers - first) if first else 1,
            "moe_router_num_groups": groups,
            "moe_router_group_topk": taken,
            "moe_router_group_score_topk": best if groups else None,
            "moe_shared_expert_intermediate_size": (told["n_shared_experts"] or 0) * width,
            "moe_router_topk_scaling_factor": float(told["routed_scaling_factor"] or 1.0),
        }

    return Rule(dict.fromkeys(usual, SIZE) | {"routed_scaling_factor": number()}, read, _write_deepseek_experts)


def _write_deepseek_experts(config: TransformerConfig) -> Json:
    return {
        "first_k_dense_replace": config.num_layers - sum(config.moe_layer_pattern),
        "n_group": config.moe_router_num_groups or 1,
        "topk_group": config.moe_router_group_topk or 1,
        "n_shared_experts": (config.moe_shared_expert_intermediate_size or 0) // (config.moe_ffn_hidden_size or 1),
        "routed_scaling_factor": config.topk_scaling_factor,
    }


_METHODS = ("greedy", "group_limited_greedy")  # of DeepSeek-V2


def _has_groups(hf: Json) -> bool:
    return (hf["n_group"] or 1) > 1


def _read_method(hf: Json, args: Json) -> Json:
    if hf.get("topk_method") not in (None, *_METHODS):
        raise unsupported("topk_method", hf["topk_method"], f"{' and '.join(_METHODS)} are")
    return {}


_USUAL = ("first_k_dense_replace", "n_group", "topk_group", "n_shared_experts", "routed_scaling_factor")
DEEPSEEK_V2_EXPERTS = (
    Rule({"topk_method": _TEXT}, _read_method, lambda c: {"topk_method": _METHODS[bool(c.moe_router_num_groups)]}),
    # The method decides, whatever the number of groups.
    _deepseek_experts(
        dict(zip(_USUAL, (0, None, None, 2, 1.0), strict=True)),
        1,
        lambda hf: hf.get("topk_method") == _METHODS[1] and _has_groups(hf),
    ),
)
DEEPSEEK_V3_EXPERTS = (_deepseek_experts(dict(zip(_USUAL, (3, 8, 4, 1, 2.5), strict=True)), 2, _has_groups),)


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

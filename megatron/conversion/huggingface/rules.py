"""Rules between fields of `config.json` and model arguments, each with its inverse.

A family lists the rules that apply to it. Both generations of config.json are read: transformers
4.x (`rope_theta`, `rope_scaling`, `torch_dtype`) and 5.x (`rope_parameters`, `dtype`). The 4.x form
is written, because both generations load it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron.conversion.huggingface.config_fields import LOST_TRAINING, ConfigFields, Json
from megatron.core.safe_files import schema
from megatron.core.safe_files.schema import Check, boolean, text
from megatron.core.transformer.transformer_config import TransformerConfig, flag_name

SHORT_TEXT = text(256)


class Rule(NamedTuple):
    """Fields of config.json and the model arguments that they determine.

    `read(fields, args)` returns arguments; `args` contains those of the user and of earlier rules,
    which take precedence. `write(config)` returns fields.
    """

    # Field -> check of its value, or the model argument whose check applies. Null is always
    # accepted.
    fields: Mapping[str, Check | str]
    read: Callable[[ConfigFields, Json], Json]
    write: Callable[[TransformerConfig], Json] = lambda config: {}
    # Fields that the model's arguments do not determine completely: an export repeats the values
    # that were imported, as long as they still describe the model.
    repeated: tuple[str, ...] = ()
    # Switches of biases -> the part of a layer that has them.
    biased_parts: Mapping[str, str] = MappingProxyType({})
    # `update(fields, config)` returns the fields of a changed model that was imported with
    # `fields`, if that differs from `write(config)`.
    update: Callable[[Json, TransformerConfig], Json] | None = None
    # `list_unused(fields, args)` returns fields that change the training in transformers, not here.
    list_unused: Callable[[ConfigFields, Json], Json] = lambda fields, args: {}


def unsupported(field: str, value: Any, supported: str) -> ValueError:
    """Return the error for a value that no model of ours has; `supported` ends with its verb."""
    return ValueError(
        f"config.json: {field} = {schema.format_value(value)} is not supported, only {supported}"
    )


def copied(argument: str, *fields: str, required: bool = False) -> Rule:
    """Copy the value of an argument; of several names all are read and the first is written.

    A `required` field defines the model, so its default is not used, and is not 0.
    """

    def read(hf_config: ConfigFields, args: Json) -> Json:
        if required and not hf_config.states(*fields) and argument not in args:
            raise ValueError(f"config.json has no {fields[0]!r}: give {flag_name(argument)}")
        value = hf_config.first(*fields)
        if required and value == 0:
            raise unsupported(fields[0], 0, "1 or more is")
        return {argument: value}

    def write(config: TransformerConfig) -> Json:
        value = getattr(config, argument)
        if value is None:
            return {}
        return {fields[0]: value}

    return Rule(dict.fromkeys(fields, argument), read, write)


def nullable(argument: str) -> Rule:
    """Copy the value of an argument of the same name; null means None, not the default."""

    def read(hf_config: ConfigFields, args: Json) -> Json:
        return {argument: hf_config.get(argument)}

    def write(config: TransformerConfig) -> Json:
        return {argument: getattr(config, argument)}

    return Rule({argument: argument}, read, write)


def opposite(argument: str, *fields: str) -> Rule:
    """Map a switch to an argument with the opposite value. Of several names the last is written."""

    def read(hf_config: ConfigFields, args: Json) -> Json:
        return {argument: not hf_config.first(*fields)}

    def write(config: TransformerConfig) -> Json:
        return {fields[-1]: not getattr(config, argument)}

    return Rule(dict.fromkeys(fields, boolean), read, write)


def reciprocal(argument: str, field: str) -> Rule:
    """Map a factor to an argument that divides."""

    def read(hf_config: ConfigFields, args: Json) -> Json:
        return {argument: 1.0 / hf_config.first(field)}

    def write(config: TransformerConfig) -> Json:
        return {field: 1.0 / getattr(config, argument)}

    return Rule({field: schema.number(1e-9)}, read, write, repeated=(field,))


def root_scale(field: str) -> Rule:
    """Map the switch of a factor sqrt(hidden_size) of word embeddings."""

    def read(hf_config: ConfigFields, args: Json) -> Json:
        factor = math.sqrt(args["hidden_size"]) if hf_config.first(field) else 1.0
        return {"embedding_multiplier": factor}

    def write(config: TransformerConfig) -> Json:
        return {field: config.embedding_factor != 1.0}

    return Rule({field: boolean}, read, write)


def fixed(field: str, *values: Any, written: bool = False, reason: str = "") -> Rule:
    """Accept only `values` of a field; any other value, null included, is another model.

    The first value is the default where transformers declares none, and the one that is written.
    """
    supported = f"{values[0]!r} is"
    if reason:
        supported += f": {reason}"

    def read(hf_config: ConfigFields, args: Json) -> Json:
        value = hf_config.get(field)
        is_missing = value is None and hf_config.defaults.get(field) is None
        if not is_missing and value not in values:
            raise unsupported(field, value, supported)
        return {}

    def write(config: TransformerConfig) -> Json:
        return {field: values[0]} if written else {}

    return Rule({field: schema.anything}, read, write)


def always(**fields: Any) -> list[Rule]:
    """Accept one value of each field, and write it."""
    return [fixed(field, value, written=True) for field, value in fields.items()]


def implied(**arguments: Any) -> Rule:
    """Set arguments that all models of the family have. config.json has no field for them."""
    return Rule({}, lambda hf_config, args: arguments)


def repeated(**fields: Check) -> Rule:
    """Repeat fields that our model does not have. They describe tensors that it does not have."""
    return Rule(fields, lambda hf_config, args: {}, repeated=tuple(fields))


def feed_forward(field: str, free: bool) -> Rule:
    """Map `n_inner` of GPT-2, for which null means 4h; BLOOM always has 4h."""

    def read(hf_config: ConfigFields, args: Json) -> Json:
        size = 4 * args["hidden_size"]
        inner = hf_config.get(field)
        if inner not in (None, size) and not free:
            raise unsupported(field, inner, f"4 * hidden_size = {size} is")
        return {"ffn_hidden_size": inner or size}

    def write(config: TransformerConfig) -> Json:
        return {field: config.ffn_size} if free else {}

    return Rule({field: "ffn_hidden_size"}, read, write)


def _check_embedding_width(hf_config: ConfigFields, args: Json) -> Json:
    width = hf_config.get("word_embed_proj_dim")
    if width not in (None, args["hidden_size"]):
        raise unsupported("word_embed_proj_dim", width, f"hidden_size = {args['hidden_size']} is")
    return {}


# OPT 350M has embeddings of another width, and projections from and to it.
EMBEDDING_WIDTH = Rule({"word_embed_proj_dim": "hidden_size"}, _check_embedding_width)


def _check_projections(hf_config: ConfigFields, args: Json) -> Json:
    num_parts = hf_config.first("pretraining_tp") or 1
    if hf_config.first("slow_but_exact") and num_parts > 1:
        supported = f"False is with pretraining_tp = {num_parts}"
        raise unsupported("slow_but_exact", True, supported)
    return {}


# BLOOM's output projections in parts, as in its training, which have no biases in transformers.
INEXACT_PROJECTIONS = Rule(
    {"slow_but_exact": boolean, "pretraining_tp": schema.COUNT}, _check_projections
)


_LFM2_WIDTH = ("block_ff_dim", "intermediate_size")


def _read_adjusted_width(hf_config: ConfigFields, args: Json) -> Json:
    size = hf_config.first(*_LFM2_WIDTH)
    if hf_config.first("block_auto_adjust_ff_dim"):
        size = int(2 * size / 3)
        factor = hf_config.get("block_ffn_dim_multiplier")
        if factor is not None:
            multiple = hf_config.first("block_multiple_of")
            size = -(-int(factor * size) // multiple) * multiple
    return {"ffn_hidden_size": size}


def _write_adjusted_width(config: TransformerConfig) -> Json:
    return {"intermediate_size": config.ffn_size, "block_auto_adjust_ff_dim": False}


# LFM2: two thirds of a field, rounded up to a multiple.
ADJUSTED_WIDTH = Rule(
    {
        **dict.fromkeys(_LFM2_WIDTH, "ffn_hidden_size"),
        "block_auto_adjust_ff_dim": boolean,
        "block_ffn_dim_multiplier": schema.number(1e-3, 1e3),
        "block_multiple_of": schema.integer(1, 2**20),
    },
    _read_adjusted_width,
    _write_adjusted_width,
)


def dropout(residual: str, embedding: str) -> Rule:
    """Map the dropout of the residual branches.

    The model has no second argument for that of the embedding, so a different value is repeated by
    an export, reported and otherwise without effect.
    """

    def read(hf_config: ConfigFields, args: Json) -> Json:
        return {"hidden_dropout": hf_config.first(residual)}

    def write(config: TransformerConfig) -> Json:
        return dict.fromkeys((residual, embedding), config.hidden_dropout)

    def list_unused(hf_config: ConfigFields, args: Json) -> Json:
        probability = hf_config.first(embedding) or 0.0
        return {} if probability == args["hidden_dropout"] else {embedding: probability}

    fields = (residual, embedding)
    checks = dict.fromkeys(fields, "hidden_dropout")
    return Rule(checks, read, write, repeated=fields, list_unused=list_unused)


def _list_lost_training(hf_config: ConfigFields, args: Json) -> Json:
    return {
        name: hf_config.stated[name] for name in LOST_TRAINING.split() if hf_config.stated.get(name)
    }


# Layers that are skipped at random, other dropouts, and losses of experts.
_LOST_TRAINING = Rule({}, lambda hf_config, args: {}, list_unused=_list_lost_training)


QKV = ".self_attention.linear_qkv."
ATTENTION = ".self_attention."
MLP = ".mlp."


def biases(**modules: str) -> Rule:
    """Map switches of biases; each field is the part of a layer that has them.

    The model has one argument for q, k and v alone, and one for all linear layers. A model that has
    only some of them is read as if it had all, the others being zero.
    """

    def read(hf_config: ConfigFields, args: Json) -> Json:
        # A missing field has the default of transformers.
        enabled = {module for field, module in modules.items() if hf_config.first(field)}
        return {"add_bias_linear": bool(enabled - {QKV}), "add_qkv_bias": enabled == {QKV}}

    def write(config: TransformerConfig) -> Json:
        fields = {}
        for field, module in modules.items():
            fields[field] = config.has_qkv_bias if module == QKV else config.add_bias_linear
        return fields

    fields = tuple(modules)
    return Rule(dict.fromkeys(fields, boolean), read, write, repeated=fields, biased_parts=modules)


def _read_common_biases(hf_config: ConfigFields, args: Json) -> Json:
    attention = hf_config.first("attention_bias", "qkv_bias")
    mlp = hf_config.first("mlp_bias", "bias")
    for name in _BIAS_NAMES:
        stated = hf_config.stated.get(name)
        if attention != mlp or stated not in (None, attention):
            raise unsupported(name, stated, f"the same value as of {', '.join(_BIAS_NAMES)} is")
    return {"add_bias_linear": attention, "add_qkv_bias": False}


def _write_common_biases(config: TransformerConfig) -> Json:
    return dict.fromkeys(("attention_bias", "mlp_bias"), config.add_bias_linear)


_BIAS_NAMES = ("attention_bias", "mlp_bias", "qkv_bias", "bias")
# All linear layers of InternLM 3 have biases or none has.
COMMON_BIASES = Rule(dict.fromkeys(_BIAS_NAMES, boolean), _read_common_biases, _write_common_biases)


def _read_post_norm(hf_config: ConfigFields, args: Json) -> Json:
    return {"norm_placement": "both" if hf_config.first("use_post_norm") else "pre"}


def _write_post_norm(config: TransformerConfig) -> Json:
    return {"use_post_norm": config.norm_placement == "both"}


# Additional norms on the outputs of attention and MLP.
POST_NORM = Rule({"use_post_norm": boolean}, _read_post_norm, _write_post_norm)


TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate")
_EXACT_GELU = ("gelu", "gelu_python")


def gelu(field: str, relu: bool = False) -> Rule:
    """Map the name of a GELU: the tanh approximation or the exact function.

    With `relu` the field may also name ReLU.
    """

    def read(hf_config: ConfigFields, args: Json) -> Json:
        name = hf_config.first(field)
        if relu and name == "relu":
            return {"swiglu": False, "relu": True}
        if name not in TANH_GELU + _EXACT_GELU:
            supported = "gelu_new (the tanh approximation) and gelu (exact) are"
            raise unsupported(field, name, supported)
        is_tanh = name in TANH_GELU
        # The first is enough in a model with biases, the second in any.
        return {"swiglu": False, "bias_gelu_fusion": is_tanh, "openai_gelu": is_tanh}

    def write(config: TransformerConfig) -> Json:
        if relu and config.relu:
            return {field: "relu"}
        return {field: "gelu_new" if config.tanh_gelu else "gelu"}

    return Rule({field: SHORT_TEXT}, read, write, repeated=(field,))


_DTYPES = ("float32", "bfloat16", "float16")


def _read_precision(hf_config: ConfigFields, args: Json) -> Json:
    """Read `dtype` (5.x) or `torch_dtype` (4.x); without them the stored tensors decide."""
    stated = hf_config.stated.get("dtype") or hf_config.stated.get("torch_dtype") or "auto"
    name = str(stated).removeprefix("torch.")
    if name == "auto":
        return {}
    if name not in _DTYPES:
        raise ValueError(
            f"config.json: dtype {name!r} is not supported, only float32, bfloat16 and float16 are"
        )
    return {"bf16": name == "bfloat16", "fp16": name == "float16"}


def _write_precision(config: TransformerConfig) -> Json:
    return {"torch_dtype": str(config.params_dtype).removeprefix("torch.")}


def _read_initialization(hf_config: ConfigFields, args: Json) -> Json:
    """Read the standard deviation of initial weights, which some families compute if it is null."""
    value = hf_config.first("initializer_range")
    return {} if value is None else {"init_method_std": value}


def _write_initialization(config: TransformerConfig) -> Json:
    return {"initializer_range": config.init_method_std}


COMMON_RULES = (
    copied("vocab_size", "vocab_size", required=True),
    Rule({"initializer_range": "init_method_std"}, _read_initialization, _write_initialization),
    Rule({"torch_dtype": SHORT_TEXT, "dtype": SHORT_TEXT}, _read_precision, _write_precision),
    fixed("is_encoder_decoder", False),
    fixed("add_cross_attention", False),
    fixed("tie_encoder_decoder", False),
    fixed("pruned_heads", {}),
    fixed("per_layer_config", {}),
    _LOST_TRAINING,
)

"""Groups of rules that many families share: sizes, norms, activation functions."""

from __future__ import annotations

from megatron.conversion.huggingface.config_fields import ConfigFields, Json
from megatron.conversion.huggingface.rope_rules import rope
from megatron.conversion.huggingface.rules import (
    SHORT_TEXT,
    TANH_GELU,
    Rule,
    copied,
    fixed,
    implied,
    opposite,
    unsupported,
)
from megatron.core.transformer.transformer_config import TransformerConfig

SIZES_WITHOUT_MLP: tuple[Rule, ...] = (
    copied("num_layers", "num_hidden_layers", required=True),
    copied("hidden_size", "hidden_size", required=True),
    copied("num_attention_heads", "num_attention_heads", required=True),
    copied("max_position_embeddings", "max_position_embeddings"),
    copied("attention_dropout", "attention_dropout"),
)
SIZES = (*SIZES_WITHOUT_MLP, copied("ffn_hidden_size", "intermediate_size", required=True))
UNTIED = opposite("untie_embeddings_and_output_weights", "tie_word_embeddings")
NO_BIAS = implied(add_bias_linear=False)
NO_DROPOUT = implied(hidden_dropout=0.0)
RMS_NORM = (implied(normalization="RMSNorm"), copied("norm_epsilon", "rms_norm_eps"))


def layer_norm(epsilon: str) -> tuple[Rule, ...]:
    """Return the rules of a LayerNorm with this field for its epsilon."""
    return implied(normalization="LayerNorm"), copied("norm_epsilon", epsilon)


_RMS_EPSILON = "rms_norm_eps"
_LAYER_NORM_EPSILON = "layer_norm_eps"


def _read_kind_of_norm(hf_config: ConfigFields, args: Json) -> Json:
    epsilon = hf_config.get(_RMS_EPSILON)
    if epsilon is not None:
        return {"normalization": "RMSNorm", "norm_epsilon": epsilon}
    return {"normalization": "LayerNorm", "norm_epsilon": hf_config.first(_LAYER_NORM_EPSILON)}


def _write_kind_of_norm(config: TransformerConfig) -> Json:
    if config.normalization == "RMSNorm":
        return {_RMS_EPSILON: config.norm_epsilon}
    return {_LAYER_NORM_EPSILON: config.norm_epsilon}


# An RMSNorm if its epsilon is stated, else a LayerNorm.
RMS_OR_LAYER_NORM = Rule(
    dict.fromkeys((_RMS_EPSILON, _LAYER_NORM_EPSILON), "norm_epsilon"),
    _read_kind_of_norm,
    _write_kind_of_norm,
)


SILU = fixed("hidden_act", "silu", "swish", written=True)


def _read_gate(hf_config: ConfigFields, args: Json) -> Json:
    name = hf_config.get("hidden_act")
    if name is None and hf_config.defaults.get("hidden_act") is None:
        name = "silu"
    if name not in ("silu", "swish", *TANH_GELU):
        raise unsupported("hidden_act", name, "silu and gelu_pytorch_tanh are")
    is_gelu = name in TANH_GELU
    return {"swiglu": not is_gelu, "geglu": is_gelu}


def _write_gate(config: TransformerConfig) -> Json:
    return {"hidden_act": "gelu_pytorch_tanh" if config.geglu else "silu"}


# The function of the gate of a gated MLP.
GATE = Rule({"hidden_act": SHORT_TEXT}, _read_gate, _write_gate, repeated=("hidden_act",))
SQUARED_RELU = (
    fixed("hidden_act", "relu2", written=True),
    implied(swiglu=False, squared_relu=True),
)
# Sizes, a gated MLP, and a head.
GATED_RULES: tuple[Rule, ...] = (*SIZES, GATE, UNTIED, NO_DROPOUT)
LLAMA_RULES = (*GATED_RULES, *RMS_NORM, rope())

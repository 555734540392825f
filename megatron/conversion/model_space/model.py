"""The model that a checkpoint's arguments describe: its configuration, its mathematics and its tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron.conversion.model_space.schemas import ARGUMENTS
from megatron.conversion.model_space.source import Shape
from megatron.core.transformer.transformer_config import TransformerConfig

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
_FIELDS = {field.name: field for field in dataclasses.fields(TransformerConfig)}
_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads")


def flag_name(argument: str) -> str:
    """The command-line spelling of an argument, for messages."""
    names = _FIELDS[argument].metadata["flags"] if argument in _FIELDS else ()
    return names[0] if names else "--" + argument.replace("_", "-")


def plain_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are plain data, as files of other programs can hold them."""
    return {name: value for name, value in args.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(type(name) is str and _is_plain(item) for name, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def model_config(args: Mapping[str, Any], vocab_size: int, description: str) -> TransformerConfig:
    """The configuration in a checkpoint's arguments, with `vocab_size` tokens (the rows of its word embedding).

    Raises ValueError, naming the flag, where an argument that defines the model is missing.
    """
    for name in _REQUIRED:
        if not args.get(name):
            raise ValueError(f"{description} does not tell {name}: give {flag_name(name)}")
    known = {name: args[name] for name in _FIELDS if name in args}
    ARGUMENTS(known, description)
    return TransformerConfig(**{**known, "vocab_size": vocab_size})


def resolved(config: TransformerConfig) -> dict[str, Any]:
    """The arguments whose defaults follow from others, as the model has them."""
    return {
        "ffn_hidden_size": config.ffn_size,
        "kv_channels": config.head_dim,
        "num_query_groups": config.query_groups,
        "group_query_attention": config.query_groups != config.num_attention_heads,
    }


def mathematics(config: TransformerConfig) -> dict[str, Any]:
    """What the model computes, without the spelling: two configurations that compute the same are equal here."""
    rope = config.position_embedding_type == "rope"
    scaling = (
        config.rope_scaling_factor,
        config.rope_low_freq_factor,
        config.rope_high_freq_factor,
        config.rope_original_max_position_embeddings,
    )
    return {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.query_groups,
        "kv_channels": config.head_dim,
        "ffn_hidden_size": config.ffn_size,
        "vocab_size": config.vocab_size,
        "position_embedding_type": config.position_embedding_type,
        "max_position_embeddings": config.max_position_embeddings if has_positions(config) else None,
        "rotary_base": float(config.rotary_base) if rope else None,
        "rotary_percent": config.rotary_percent if rope else None,
        "rotary_interleaved": config.rotary_interleaved if rope else None,
        "rope_scaling": scaling if rope and config.use_rope_scaling else None,
        "normalization": config.normalization,
        "norm_epsilon": config.norm_epsilon,
        "apply_layernorm_1p": config.apply_layernorm_1p,
        "activation": config.activation,
        "add_bias_linear": config.add_bias_linear,
        "add_qkv_bias": config.has_qkv_bias,
        "qk_layernorm": config.qk_layernorm,
        "window_size": config.window_size and tuple(config.window_size),
        "embedding_layernorm": config.embedding_layernorm,
        "untie_embeddings_and_output_weights": config.untie_embeddings_and_output_weights,
    }


def has_positions(config: TransformerConfig) -> bool:
    return config.position_embedding_type == "learned_absolute"


def model_tensors(config: TransformerConfig) -> dict[str, Shape]:
    """Key and global shape of every parameter, in the order of the model."""
    hidden = config.hidden_size
    assert config.vocab_size is not None
    tensors: dict[str, Shape] = {WORD_EMBEDDINGS: (config.vocab_size, hidden)}
    if has_positions(config):
        if not config.max_position_embeddings:
            raise ValueError(f"learned positions need {flag_name('max_position_embeddings')}")
        tensors["embedding.position_embeddings.weight"] = (config.max_position_embeddings, hidden)
    if config.embedding_layernorm:
        tensors |= _norm("embedding.word_embeddings_layernorm.", config, hidden)
    for layer in range(config.num_layers):
        tensors |= {f"decoder.layers.{layer}.{name}": shape for name, shape in _layer_tensors(config).items()}
    tensors |= _norm("decoder.final_layernorm.", config, hidden)
    if config.untie_embeddings_and_output_weights:
        tensors["output_layer.weight"] = (config.vocab_size, hidden)
    return tensors


def _layer_tensors(config: TransformerConfig) -> dict[str, Shape]:
    hidden, heads, head_dim = config.hidden_size, config.num_attention_heads, config.head_dim
    qkv = (heads + 2 * config.query_groups) * head_dim
    fc1 = config.ffn_size * (2 if config.gated else 1)
    tensors = _norm("self_attention.linear_qkv.layer_norm_", config, hidden)
    tensors |= _linear("self_attention.linear_qkv.", qkv, hidden, config.has_qkv_bias)
    if config.qk_layernorm:
        tensors |= _norm("self_attention.q_layernorm.", config, head_dim)
        tensors |= _norm("self_attention.k_layernorm.", config, head_dim)
    tensors |= _linear("self_attention.linear_proj.", hidden, heads * head_dim, config.add_bias_linear)
    tensors |= _norm("mlp.linear_fc1.layer_norm_", config, hidden)
    tensors |= _linear("mlp.linear_fc1.", fc1, hidden, config.add_bias_linear)
    tensors |= _linear("mlp.linear_fc2.", hidden, config.ffn_size, config.add_bias_linear)
    return tensors


def _norm(prefix: str, config: TransformerConfig, size: int) -> dict[str, Shape]:
    names = ("weight", "bias") if config.normalization == "LayerNorm" else ("weight",)
    return {prefix + name: (size,) for name in names}


def _linear(prefix: str, rows: int, columns: int, bias: bool) -> dict[str, Shape]:
    tensors: dict[str, Shape] = {prefix + "weight": (rows, columns)}
    if bias:
        tensors[prefix + "bias"] = (rows,)
    return tensors

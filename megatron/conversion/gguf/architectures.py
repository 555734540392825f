"""Architectures of GGUF files: metadata and names of tensors in terms of transformers.

To add an architecture, add a row to `ARCHITECTURES`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.core.safe_files import schema
from megatron.core.terminal import escape_control_chars

# End of the name of a metadata entry -> field of config.json.
_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_EXPERT_FIELDS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_weights_norm": "norm_topk_prob",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_GEMMA_FIELDS = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}

# Module of the model, or of a layer -> its name in transformers.
MODEL_MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LAYER = {**_ATTENTION, "ffn_norm": "post_attention_layernorm", **_MLP}
_GEMMA_LAYER = {
    **_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Experts are a stack in GGUF, and one module each in transformers.
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}


@dataclass(frozen=True)
class Architecture:
    """One `general.architecture`, and the family of transformers that computes the same."""

    model_type: str
    fields: Mapping[str, str] = field(default_factory=lambda: _FIELDS)
    layer: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    constants: Mapping[str, Any] = field(default_factory=dict)  # fields that the files imply
    pairs_neighbors: bool = False  # RoPE rotates neighboring rows of q and k, not halves of a head
    norm_offset: int = 0  # of the weights of norms in GGUF


_LLAMA = Architecture("llama", pairs_neighbors=True)
_MIXTRAL = Architecture(
    "mixtral",
    fields={
        **_FIELDS,
        "expert_count": "num_local_experts",
        "expert_used_count": "num_experts_per_tok",
    },
    layer={**_LAYER, **_MIXTRAL_EXPERTS},
    pairs_neighbors=True,
)
ARCHITECTURES = {
    "llama": _LLAMA,
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture(
        "qwen2_moe",
        fields={
            **_FIELDS,
            **_EXPERT_FIELDS,
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        layer={**_LAYER, **_EXPERTS, **_SHARED_EXPERT},
    ),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture(
        "qwen3_moe",
        fields={**_FIELDS, **_EXPERT_FIELDS},
        layer={**_LAYER, **_EXPERTS},
        constants={"norm_topk_prob": True},
    ),
    "gemma": Architecture("gemma", norm_offset=1),
    "gemma2": Architecture(
        "gemma2", fields={**_FIELDS, **_GEMMA_FIELDS}, layer=_GEMMA_LAYER, norm_offset=1
    ),
    "gemma3": Architecture(
        "gemma3_text",
        fields={
            **_FIELDS,
            **_GEMMA_FIELDS,
            "rope.freq_base_swa": "rope_local_base_freq",
            "attention.sliding_window_pattern": "sliding_window_pattern",
        },
        layer=_GEMMA_LAYER,
        norm_offset=1,
    ),
}

# Models of Gemma whose query scale is not that of a head, by their number of layers. llama.cpp
# recognizes them by it, too.
_LARGE_GEMMA = {"gemma2": 46, "gemma3": 62}

# Metadata that does not change the model with these values, or (None) with any.
_ACCEPTED: dict[str, tuple[Any, ...] | None] = {
    "vocab_size": None,  # the number of rows of the embedding
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": None,
    "expert_gating_func": (0, 1),  # softmax
    "expert_weights_scale": (0.0, 1.0),
    "rope.scaling.finetuned": None,
    "rope.scaling.attn_factor": (1.0,),
}

ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_YARN = {
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}

# Metadata that llama.cpp reads as fp32 only, while config.json may contain whole numbers.
_FLOAT_ENTRIES = (
    *("attention.layer_norm_rms_epsilon", "attn_logit_softcapping", "final_logit_softcapping"),
    *("rope.freq_base", "rope.freq_base_swa", "rope.scaling.factor"),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
)


def find_architecture(metadata: Mapping[str, Any]) -> tuple[str, Architecture]:
    """Return the name of the architecture, and its row. Raises ValueError for an unknown one."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ValueError(
            f"general.architecture = {schema.format_value(name)} is not supported, only "
            f"{', '.join(ARCHITECTURES)} are: use the original model of transformers"
        )
    if name == "llama" and metadata.get("llama.expert_count"):
        return name, _MIXTRAL
    return name, ARCHITECTURES[name]


def choose_architecture(model_type: str) -> tuple[str, Architecture]:
    """Return the name and the row of a family. Raises ValueError if there is none."""
    # Files do not state windows of Mistral, which is a Llama model without them.
    equivalent = "llama" if model_type == "mistral" else model_type
    for name, architecture in [*ARCHITECTURES.items(), ("llama", _MIXTRAL)]:
        if architecture.model_type == equivalent:
            return name, architecture
    supported = ", ".join(row.model_type for row in ARCHITECTURES.values())
    raise ValueError(
        f"--saver gguf: models of type {model_type} are not supported, only mistral, mixtral, "
        f"{supported}: give --saver hf, and use llama.cpp's converter"
    )


def read_config(
    metadata: Mapping[str, Any], names: Collection[str], factors: torch.Tensor | None
) -> dict[str, Any]:
    """Return the config.json of a model without dtype and vocabulary size.

    `names` are those of its tensors, and `factors` the contents of `ROPE_FACTORS`, if any. Raises
    ValueError for metadata that is missing, unknown or not supported.
    """
    name, architecture = find_architecture(metadata)
    entries = {}
    for key, value in metadata.items():
        if key.startswith(f"{name}."):
            entries[key.removeprefix(f"{name}.")] = _join_layers(value)

    # Fields that are copied
    config: dict[str, Any] = {"model_type": architecture.model_type, **architecture.constants}
    for entry, config_field in architecture.fields.items():
        if entry in entries:
            config[config_field] = entries.pop(entry)
    for required in ("embedding_length", "block_count", "attention.head_count"):
        if architecture.fields[required] not in config:
            raise ValueError(f"the metadata lack {name}.{required}")
    for token in ("bos", "eos", "padding"):
        token_id = metadata.get(f"tokenizer.ggml.{token}_token_id")
        if token_id is not None:
            config[f"{token[:3]}_token_id"] = token_id

    # Fields that follow from others, or from the tensors
    _add_head_dim(config, entries, name)
    schema.number(1)(config.setdefault("rope_theta", 10000.0), f"{name}.rope.freq_base")
    config["tie_word_embeddings"] = "output.weight" not in names
    if architecture.model_type == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in names
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in names
    elif name in _LARGE_GEMMA:
        is_large = config["num_hidden_layers"] == _LARGE_GEMMA[name]
        width = config["hidden_size"] // config["num_attention_heads"]
        config["query_pre_attn_scalar"] = width if is_large else config["head_dim"]
    scaling = _read_scaling(entries, config, factors)
    if scaling is not None:
        config["rope_scaling"] = scaling
    _check_leftovers(entries, name)
    return config


def make_metadata(
    name: str, architecture: Architecture, config: Mapping[str, Any]
) -> dict[str, str | bool | int | float]:
    """Return the metadata of a model with this config.json."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    entries: dict[str, Any] = {"vocab_size": config["vocab_size"]}
    for entry, config_field in architecture.fields.items():
        if config.get(config_field) is not None:
            entries[entry] = config[config_field]
    entries["attention.key_length"] = entries["attention.value_length"] = head_dim
    if architecture.pairs_neighbors:
        entries["rope.dimension_count"] = head_dim

    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") in ("linear", "yarn"):
        entries["rope.scaling.type"] = scaling["rope_type"]
        entries["rope.scaling.factor"] = scaling["factor"]
        for entry, config_field in _YARN.items():
            if scaling.get(config_field) is not None:
                entries[entry] = scaling[config_field]
    metadata: dict[str, Any] = {"general.architecture": name, "tokenizer.ggml.model": "none"}
    for entry, value in entries.items():
        metadata[f"{name}.{entry}"] = float(value) if entry in _FLOAT_ENTRIES else value
    return metadata


def _join_layers(value: Any) -> Any:
    """Return the value of all layers if the entries of a list are equal."""
    if isinstance(value, list) and value and all(entry == value[0] for entry in value):
        return value[0]
    return value


def _add_head_dim(config: dict[str, Any], entries: dict[str, Any], name: str) -> None:
    """Add the width of a head. Raises ValueError if not all of it is rotated, or values differ."""
    heads = schema.integer(1)(config["num_attention_heads"], f"{name}.attention.head_count")
    hidden_size = schema.integer(1)(config["hidden_size"], f"{name}.embedding_length")
    head_dim = config.setdefault("head_dim", hidden_size // heads)
    schema.integer(1)(head_dim, f"{name}.attention.key_length")
    for entry in ("attention.value_length", "rope.dimension_count"):
        value = entries.pop(entry, head_dim)
        if value != head_dim:
            raise ValueError(
                f"{name}.{entry} = {schema.format_value(value)} is not supported: it must be the "
                f"width of a head, {head_dim}"
            )


def _read_scaling(
    entries: dict[str, Any], config: Mapping[str, Any], factors: torch.Tensor | None
) -> dict[str, Any] | None:
    """Return the field `rope_scaling`, None for a RoPE that is not scaled."""
    if factors is not None:
        return _find_llama3_scaling(config, factors)
    # As in llama.cpp, a factor without a type is linear.
    factor = entries.pop("rope.scaling.factor", None)
    scaling_type = entries.get("rope.scaling.type", "none" if factor is None else "linear")
    if scaling_type in ("linear", "yarn") and factor is not None:
        scaling = {"rope_type": scaling_type, "factor": factor}
        if scaling_type == "yarn":
            for entry, config_field in _YARN.items():
                if entry in entries:
                    scaling[config_field] = entries.pop(entry)
        entries.pop("rope.scaling.type", None)
        return scaling
    if scaling_type == "none":
        entries.pop("rope.scaling.type", None)
    return None


def _find_llama3_scaling(config: Mapping[str, Any], factors: torch.Tensor) -> dict[str, Any]:
    """Return the scaling of Llama 3 that has these factors of wavelengths.

    Files have the factors, but not the parameters that they were computed from.
    """
    factor = float(factors.max())
    half = config["head_dim"] // 2
    scaling = {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    expected = compute_llama3_factors(config["rope_theta"], config["head_dim"], factor)
    is_equal = factors.shape == (half,) and torch.allclose(factors.double(), expected, rtol=1e-5)
    if not is_equal:
        raise ValueError(
            f"{ROPE_FACTORS} is not a scaling of Llama 3 (low_freq_factor 1, high_freq_factor 4, "
            "original_max_position_embeddings 8192), which other scalings are not read from: use "
            "the original model of transformers"
        )
    return scaling


def compute_llama3_factors(base: float, head_dim: int, factor: float) -> torch.Tensor:
    """Return the factors of wavelengths of the pairs of a head."""
    low = _LLAMA3["low_freq_factor"]
    high = _LLAMA3["high_freq_factor"]
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    wavelengths = 2 * math.pi * base**exponents
    turns = _LLAMA3["original_max_position_embeddings"] / wavelengths
    smooth = (turns - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    scaled = torch.where(turns < low, torch.full_like(turns, factor), between)
    return torch.where(turns > high, torch.ones_like(turns), scaled)


def _check_leftovers(entries: Mapping[str, Any], name: str) -> None:
    """Raise ValueError for metadata that may change the model."""
    unknown = []
    for entry, value in entries.items():
        accepted = _ACCEPTED.get(entry, ())
        if accepted is not None and value not in accepted:
            key = escape_control_chars(f"{name}.{entry}")
            unknown.append(f"{key} = {schema.format_value(value)}")
    if unknown:
        raise ValueError(
            "the metadata have entries that are not supported and may change the results of the "
            f"model: {', '.join(sorted(unknown))}. Use the original model of transformers"
        )

"""`model_config.yaml` of NeMo 1's GPT models as arguments of Megatron-LM.

(Source: NeMo 2.0.0, `MegatronGPTModel.build_transformer_config` and `model_provider_func`.)
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.conversion.model_space.foreign_arguments import plain_args, refuse_other_models
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.safe_files.reading import read_regular
from megatron.core.safe_files.schema import anything, format_value, mapping

NEMO_CONFIG = "model_config.yaml"
_MAX_BYTES = 1 << 20

# Fields with the name and the meaning of an argument
_SAME = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels",
    "num_query_groups", "layernorm_epsilon", "position_embedding_type", "rotary_base",
    "rotary_interleaved", "init_method_std", "hidden_dropout", "attention_dropout",
    "apply_query_key_layer_scaling", "qk_layernorm", "window_size", "openai_gelu",
    "moe_router_topk", "moe_grouped_gemm", "moe_aux_loss_coeff", "moe_z_loss_coeff",
    "moe_router_load_balancing_type", "moe_ffn_hidden_size",
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
    "micro_batch_size", "global_batch_size", "seed",
)  # fmt: skip
_RENAMED = {
    "encoder_seq_length": "seq_length",
    "rotary_percentage": "rotary_percent",
    "num_moe_experts": "num_experts",
    "bias": "add_bias_linear",
    "qkv_bias": "add_qkv_bias",
    "scale_positional_embedding": "use_rope_scaling",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
}
# NeMo's defaults of fields that a file may lack
_DEFAULTS: dict[str, Any] = {
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "position_embedding_type": "learned_absolute",
    "rotary_percent": 1.0,
    "rotary_base": 10000,
    "layernorm_epsilon": 1e-5,
    "moe_router_topk": 2,
}
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "mcore_gpt": (True,),
    "transformer_block_type": ("pre_ln",),
    "normalize_attention_scores": (True,),
    "attention_type": ("multihead",),
    "headscale": (False,),
    "apply_embedding_scaling": (False, None),
    "mcore_customization_config": (None, {}),
    "position_embedding_type": ("learned_absolute", "rope"),
    "fp32_residual_connection": (False, None),
    "ffn_dropout": (0, None),
    "megatron_legacy": (False, None),
    "spec_name": ("", "megatron_gpt", "te_gpt", None),
}
_NORMALIZATIONS = {"layernorm": "LayerNorm", "layernorm1p": "LayerNorm", "rmsnorm": "RMSNorm"}
_ACTIVATIONS: dict[str, dict[str, bool]] = {
    "gelu": {},
    "swiglu": {"swiglu": True},
    "fast-swiglu": {"swiglu": True},
    "squared-relu": {"squared_relu": True},
}


def read_nemo_config(directory: Path) -> dict[str, Any]:
    """Return the model configuration in the directory of an archive.

    Raises CheckpointError for a file that is not plain YAML.
    """
    # Imported here, because other checkpoints do not need PyYAML.
    from megatron.conversion.megatron_lm.plain_yaml import PlainYamlError, parse_yaml

    path = directory / NEMO_CONFIG
    try:
        config = parse_yaml(read_regular(path, _MAX_BYTES).decode())
    except (PlainYamlError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    fields: dict[str, Any] = mapping(anything)(config, str(path))
    return fields


def read_archive_common(directory: Path, common: Mapping[str, Any]) -> dict[str, Any]:
    """Return `common` with the arguments that Megatron-LM would have stored in it.

    Raises ValueError for another model than GPT of Megatron-core.
    """
    config = read_nemo_config(directory)
    location = str(directory / NEMO_CONFIG)
    refuse_other_models({"mcore_gpt": False} | config, _SUPPORTED, location)

    # Fields that are copied. Null means the default.
    fields = {}
    for name in (*_SAME, *_RENAMED):
        if config.get(name) is not None:
            fields[_RENAMED.get(name, name)] = config[name]
    args = _DEFAULTS | plain_args(fields)

    # Fields that are stored in another form
    normalization = str(config.get("normalization", "layernorm")).lower()
    activation = config.get("activation", "gelu")
    if normalization not in _NORMALIZATIONS or activation not in _ACTIVATIONS:
        raise ValueError(
            f"{location}: normalization {format_value(normalization)} with activation "
            f"{format_value(activation)} is not supported: only {', '.join(_NORMALIZATIONS)} and "
            f"{', '.join(_ACTIVATIONS)}"
        )
    is_gelu = activation == "gelu"
    groups = args.get("num_query_groups")
    args |= {
        **_ACTIVATIONS[activation],
        # Megatron-core's fused GELU is the tanh approximation.
        "bias_gelu_fusion": is_gelu and bool(config.get("bias_activation_fusion", True)),
        "normalization": _NORMALIZATIONS[normalization],
        "apply_layernorm_1p": normalization == "layernorm1p"
        or bool(config.get("layernorm_zero_centered_gamma")),
        "group_query_attention": groups not in (None, args.get("num_attention_heads")),
        "untie_embeddings_and_output_weights": not config.get(
            "share_embeddings_and_output_weights", True
        ),
        "max_position_embeddings": config.get("encoder_seq_length", 512),
    }
    return {**common, "args": argparse.Namespace(**args)}

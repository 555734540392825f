"""Arguments of Megatron-LM for a model that we do not have: refused by name, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Argument -> the values with which a run is the model that we know. A missing argument is fine: that version had none.
# Comparing with == makes 0, 0.0 and False one; `None` stands for "not given".
_MODEL: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("learned_absolute", "rope", "alibi", "none"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "num_experts": (None, 1),
    "multi_latent_attention": (False, None),
    "apply_residual_connection_post_layernorm": (False, None),
    "glu_linear_offset": (0.0, None),
    "activation_func_clamp_value": (None,),
    "rotary_seq_len_interpolation_factor": (None, 1),
    "rope_type": (None, "rope"),
    "no_rope_freq": (None,),
    "qk_l2_norm": (False, None),
    "softmax_type": ("vanilla", None),
    "attention_output_gate": (False, None),
    "window_attn_skip_freq": (None,),
    "experimental_attention_variant": (None,),
    "linear_attention_freq": (None,),
    "is_hybrid_model": (False, None),
    "hybrid_override_pattern": (None,),
    "hybrid_layer_pattern": (None,),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,),
    "mtp_num_layers": (None, 0),
}


def refuse_unsupported_model(args: Mapping[str, Any], where: str) -> None:
    """Raises ValueError that names every argument with which the run was another kind of model."""
    wrong = [name for name, values in _MODEL.items() if name in args and args[name] not in values]
    if wrong:
        listed = ", ".join(f"--{name.replace('_', '-')} {args[name]}" for name in wrong)
        raise ValueError(f"{where} is of a model that is not supported here: {listed}")

"""Arguments of a checkpoint, normalized to the flags of this project."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

# Megatron-LM stores the data types of its optimizer as torch's, and fp8 as the bytes that hold it.
_DTYPE_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.uint8: "fp8",
}


def normalize_stored_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a checkpoint with the values that the flags would have here.

    Some stored arguments of Megatron-LM are ignored or interpreted differently by its own code.
    """
    normalized = dict(args)
    uses_groups = normalized.get("group_query_attention", True)
    if not uses_groups and "num_attention_heads" in normalized:
        normalized["num_query_groups"] = normalized["num_attention_heads"]  # stored is an unused 1
    if normalized.get("num_experts") in (0, 1):
        normalized["num_experts"] = None  # these are other spellings of a model without experts
    if normalized.get("add_bias_linear"):
        normalized["add_qkv_bias"] = False  # implied; stored is True
    if normalized.get("rope_type", "") is None:  # Megatron-LM stores the default as None
        is_latent = normalized.get("multi_latent_attention")
        normalized["rope_type"] = "yarn" if is_latent else "rope"
    for name in ("main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        if isinstance(normalized.get(name), torch.dtype):
            normalized[name] = _DTYPE_NAMES.get(normalized[name], str(normalized[name]))
    if normalized.get("bf16") and normalized.get("grad_reduce_in_bf16"):
        normalized["main_grads_dtype"] = "bf16"  # another spelling
    is_null_tokenizer = normalized.get("tokenizer_type") == "NullTokenizer"
    if is_null_tokenizer and normalized.get("null_tokenizer_eod_id", 0) is None:
        # Megatron-LM since 0.19: None selects the last token.
        normalized["null_tokenizer_eod_id"] = (normalized.get("vocab_size") or 1) - 1
    return normalized


def unpack_single(value: Any) -> Any:
    """Return the only element of a sequence of one, any other value unchanged."""
    if isinstance(value, (list, tuple)) and len(value) == 1:
        return value[0]
    return value

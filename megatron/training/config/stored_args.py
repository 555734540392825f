"""Arguments of a checkpoint: normalized to the flags of this project, and merged into a command
line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron.core.terminal import escape_control_chars
from megatron.core.transformer.transformer_config import select_architecture_fields

# Arguments that --use-checkpoint-args reads in addition to the fields that define the model.
TOKENIZER_FIELDS = (
    "group_query_attention",
    "make_vocab_size_divisible_by",
    "tokenizer_type",
    "tokenizer_model",
    "vocab_file",
    "merge_file",
    "special_tokens",
    "legacy_tokenizer",
    "tiktoken_pattern",
    "tiktoken_num_special_tokens",
    "vocab_size",
    "null_tokenizer_eod_id",
)

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
    known = dict(args)
    uses_groups = known.get("group_query_attention", True)
    if not uses_groups and "num_attention_heads" in known:
        known["num_query_groups"] = known["num_attention_heads"]  # stored is an unused 1
    if known.get("num_experts") in (0, 1):
        known["num_experts"] = None  # these are other spellings of a model without experts
    if known.get("add_bias_linear"):
        known["add_qkv_bias"] = False  # implied; stored is True
    if known.get("rope_type", "") is None:  # Megatron-LM stores the default as None
        is_latent = known.get("multi_latent_attention")
        known["rope_type"] = "yarn" if is_latent else "rope"
    for name in ("main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        if isinstance(known.get(name), torch.dtype):
            known[name] = _DTYPE_NAMES.get(known[name], str(known[name]))
    if known.get("bf16") and known.get("grad_reduce_in_bf16"):
        known["main_grads_dtype"] = "bf16"  # another spelling
    is_null_tokenizer = known.get("tokenizer_type") == "NullTokenizer"
    if is_null_tokenizer and known.get("null_tokenizer_eod_id", 0) is None:
        # Megatron-LM since 0.19: None selects the last token.
        known["null_tokenizer_eod_id"] = (known.get("vocab_size") or 1) - 1
    return known


def merge_stored_args(
    given: Mapping[str, Any], stored: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return `given` with the model and tokenizer of a checkpoint, and a note for each flag that
    the checkpoint overrides.
    """
    merged = dict(given)
    notes = []
    names = [field.name for field in select_architecture_fields()]
    for name in [*names, *TOKENIZER_FIELDS]:
        if name not in stored:
            continue
        # The checkpoint takes precedence, as in Megatron-LM, but not silently.
        if name in given and given[name] != stored[name]:
            value = escape_control_chars(str(stored[name]))
            notes.append(
                f"--use-checkpoint-args: {name} is {value} as in the checkpoint, not {given[name]}"
            )
        merged[name] = stored[name]
    # Of the data, only the sequence length has a default from the checkpoint.
    if "seq_length" in stored:
        merged.setdefault("seq_length", stored["seq_length"])
    kind = merged.get("tokenizer_type")
    if kind == "NullTokenizer" and stored.get("tokenizer_type") != kind and "vocab_size" in stored:
        # The vocabulary of a checkpoint with another tokenizer, or none (config.json), includes the
        # end-of-document token.
        last = stored["vocab_size"] - 1
        merged.setdefault("null_tokenizer_eod_id", min(given.get("vocab_size", last), last))
    return merged, notes

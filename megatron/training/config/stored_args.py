"""Arguments of a checkpoint: normalized to the flags of this project, and merged into a command
line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron.core.flags import find_value_problems
from megatron.core.terminal import escape_control_chars
from megatron.core.transformer.transformer_config import (
    TransformerConfig,
    flag_name,
    select_architecture_fields,
)

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

# Arguments of training that --use-checkpoint-args reads, too; those of one group belong together.
# In Megatron-LM, the stored dropout overrides the flags. Here, a flag takes precedence over its
# group: nothing else can change the dropout of a model that was trained elsewhere.
_TRAINING_FIELDS = (
    ("hidden_dropout",),
    ("attention_dropout",),
    ("init_method_std",),
    ("moe_router_load_balancing_type", "moe_aux_loss_coeff"),
    ("moe_z_loss_coeff",),
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


def merge_stored_args(
    flag_values: Mapping[str, Any], stored_args: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return `flag_values` with the model, the tokenizer and the dropout of a checkpoint, and a
    note for each value of one of them that the other overrides.
    """
    merged = dict(flag_values)
    notes = []
    names = [field.name for field in select_architecture_fields()]
    for name in [*names, *TOKENIZER_FIELDS]:
        if name not in stored_args:
            continue
        # The checkpoint takes precedence, as in Megatron-LM, but not silently.
        if name in flag_values and flag_values[name] != stored_args[name]:
            value = escape_control_chars(str(stored_args[name]))
            notes.append(
                f"--use-checkpoint-args: {name} is {value} as in the checkpoint, "
                f"not {flag_values[name]}"
            )
        merged[name] = stored_args[name]
    for group in _TRAINING_FIELDS:
        notes += _merge_training_fields(group, merged, stored_args)
    notes += _compare_precision(flag_values, stored_args)
    # Of the data, only the sequence length has a default from the checkpoint.
    if "seq_length" in stored_args:
        merged.setdefault("seq_length", stored_args["seq_length"])
    tokenizer_type = merged.get("tokenizer_type")
    if (
        tokenizer_type == "NullTokenizer"
        and stored_args.get("tokenizer_type") != tokenizer_type
        and "vocab_size" in stored_args
    ):
        # The vocabulary of a checkpoint with another tokenizer, or none (config.json), includes the
        # end-of-document token.
        last = stored_args["vocab_size"] - 1
        merged.setdefault("null_tokenizer_eod_id", min(flag_values.get("vocab_size", last), last))
    return merged, notes


def _merge_training_fields(
    names: tuple[str, ...], merged: dict[str, Any], stored_args: Mapping[str, Any]
) -> list[str]:
    """Add the stored values of these fields to `merged` unless it has one of them; return a note
    for each one that is not used.
    """
    is_on_command_line = any(name in merged for name in names)
    notes = []
    for name in names:
        value = stored_args.get(name)
        if value is None:
            continue
        field = TransformerConfig.__dataclass_fields__[name]
        is_supported = not any(find_value_problems(flag_name(name), value, field.metadata))
        if not is_on_command_line and is_supported:
            merged[name] = value
            continue
        # Megatron-LM stores a list of one value as the value.
        current = merged.get(name, field.default)
        if unpack_single(current) != unpack_single(value):
            text = escape_control_chars(str(value))
            notes.append(
                f"--use-checkpoint-args: {name} is {current} as "
                f"{'on the command line' if name in merged else 'by default'}, not {text} as in "
                "the checkpoint"
            )
    return notes


def unpack_single(value: Any) -> Any:
    """Return the only element of a sequence of one, any other value unchanged."""
    if isinstance(value, (list, tuple)) and len(value) == 1:
        return value[0]
    return value


def _compare_precision(flag_values: Mapping[str, Any], stored_args: Mapping[str, Any]) -> list[str]:
    """Return a note if the run has another precision than the checkpoint: it has that of its flags,
    as in Megatron-LM.
    """
    names = [_name_precision(args) for args in (flag_values, stored_args)]
    if names[0] == names[1] or not {"bf16", "fp16"} & stored_args.keys():
        return []
    return [
        f"--use-checkpoint-args: the run trains in {names[0]}, and the checkpoint is in "
        f"{names[1]}: the flags --bf16 and --fp16 decide"
    ]


def _name_precision(args: Mapping[str, Any]) -> str:
    for name in ("bf16", "fp16"):
        if args.get(name):
            return name
    return "fp32"

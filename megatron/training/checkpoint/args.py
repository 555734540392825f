"""The arguments in a checkpoint: written by every save, compared or taken over by a load.

They are an `argparse.Namespace` with Megatron-LM's attribute names, so its tools and other readers find what they know.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from megatron.conversion.convert import open_found
from megatron.conversion.formats import Hints, find_checkpoint
from megatron.conversion.megatron_lm.args import with_asked_for
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.transformer.transformer_config import deciding_fields, is_used

# What --use-checkpoint-args takes over besides the fields that decide the model.
ALSO_TAKEN = (
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

# Ours -> what else Megatron-LM calls it.
MEGATRON_NAMES = {"norm_epsilon": "layernorm_epsilon"}


def make_namespace(flags: Mapping[str, Any], derived: Mapping[str, Any]) -> argparse.Namespace:
    """All options and what follows from them, as they are stored."""
    namespace = argparse.Namespace(**with_asked_for(flags))
    for name, megatron_name in MEGATRON_NAMES.items():
        setattr(namespace, megatron_name, flags[name])
    for name, value in derived.items():
        setattr(namespace, name, value)
    if flags["null_tokenizer_eod_id"] is None:
        del namespace.null_tokenizer_eod_id  # None would be the last token of --vocab-size: see `stored_args`
    return namespace


def stored_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a checkpoint under our names."""
    known = dict(args)
    if not known.get("group_query_attention", True) and "num_attention_heads" in known:
        known["num_query_groups"] = known["num_attention_heads"]  # Megatron-LM stores an unused 1
    if known.get("add_bias_linear"):
        known["add_qkv_bias"] = False  # implied; Megatron-LM stores True
    if known.get("tokenizer_type") == "NullTokenizer" and known.get("null_tokenizer_eod_id", 0) is None:
        known["null_tokenizer_eod_id"] = (known.get("vocab_size") or 1) - 1  # Megatron-LM since 0.19
    for name, megatron_name in MEGATRON_NAMES.items():
        if name not in known and megatron_name in known:
            known[name] = known[megatron_name]
    return known


def read_stored_args(root: str | None, step: int | None) -> dict[str, Any]:
    """The arguments of the checkpoint that `--load` and `--ckpt-step` name, for --use-checkpoint-args. Collective."""
    if root is None:
        raise ValueError("--use-checkpoint-args needs --load, the checkpoint to take them from")

    def read() -> dict[str, Any]:
        found = find_checkpoint(root, step)
        if found is None:
            raise ValueError(f"--use-checkpoint-args: --load {root} holds no checkpoint")
        return stored_args(open_found(found, Hints(optimizer=False, as_saved=True)).args)

    return Coordination.of(None).at_coordinator(read)


def with_stored_args(given: Mapping[str, Any], stored: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """`given` with the model and the tokenizer of a checkpoint, and a note for every flag that was overruled."""
    merged, notes = dict(given), []
    for name in (*(field.name for field in deciding_fields()), *ALSO_TAKEN):
        if name not in stored:
            continue
        if name in given and given[name] != stored[name]:
            notes.append(f"--use-checkpoint-args: {name} is {stored[name]} as in the checkpoint, not {given[name]}")
        merged[name] = stored[name]
    if "seq_length" in stored:
        merged.setdefault("seq_length", stored["seq_length"])
    return merged, notes


def check_same_model(flags: Mapping[str, Any], stored: Mapping[str, Any], source: str) -> list[str]:
    """Warnings about other mathematics; ValueError that names every argument by which the shape differs."""
    flags = stored_args(flags)

    def differing(what: str) -> list[str]:
        names = [field.name for field in deciding_fields(what) if field.name in stored and is_used(field, flags)]
        pairs = {name: (stored[name], flags[name]) for name in names}
        return [f"{name}: {old} in the checkpoint, {new} now" for name, (old, new) in pairs.items() if old != new]

    wrong = differing("shapes")
    if wrong:
        lines = "\n  ".join(wrong)
        raise ValueError(
            f"{source} holds another model:\n  {lines}\nchange these flags, or take them from the checkpoint with "
            "--use-checkpoint-args"
        )
    return [f"{source} was trained with other mathematics: {line}" for line in differing("mathematics")]

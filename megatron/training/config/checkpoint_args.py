"""`--use-checkpoint-args`: read the arguments of a checkpoint, and merge them into the flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.flags import find_value_problems, raise_problems
from megatron.core.object_path import path_of
from megatron.core.run_checkpoint.formats import find_checkpoint, open_in_any_form
from megatron.core.terminal import escape_control_chars
from megatron.core.transformer.transformer_config import (
    TransformerConfig,
    flag_name,
    select_architecture_fields,
)
from megatron.training.config.arguments import FlagValues, build
from megatron.training.config.parsing import make_flag_parser
from megatron.training.config.run_options import DistributedConfig
from megatron.training.config.stored_args import normalize_stored_args, unpack_single
from megatron.training.initialize import join


def read_checkpoint_args(argv: Sequence[str], world_size: int = 1) -> dict[str, Any] | None:
    """Return the arguments of the checkpoint that --load and --ckpt-step select, for `parse_args`.

    None without --use-checkpoint-args, and empty if --load is the same directory as --save and
    contains no checkpoint yet. Raises ValueError for any other missing or damaged checkpoint.

    Collective if `world_size` > 1: the ranks join the process group and rank 0 reads for all.
    With a `world_size` of 1 the process reads the checkpoint itself and no group is started.
    """
    command_line = make_flag_parser().parse(argv)
    flag_values = command_line.flag_values
    if not flag_values.get("use_checkpoint_args"):
        return None
    try:
        if flag_values.get("load") is None:
            raise ValueError("--use-checkpoint-args requires --load, the checkpoint to read")
        if world_size == 1:
            return _read(flag_values)
        join(build(DistributedConfig, flag_values))
        return Coordination.of(None).run_on_rank0(lambda: _read(flag_values))
    except ValueError as error:
        raise_problems([*command_line.problems, str(error)])
        raise


def _read(flag_values: FlagValues) -> dict[str, Any]:
    load = flag_values["load"]
    checkpoint = find_checkpoint(load, flag_values.get("ckpt_step"))
    if checkpoint is not None:
        # The general reader compares the arguments with the stored tensors: arguments of a foreign
        # checkpoint may describe a model of any size, which must not be allocated.
        source = open_in_any_form(checkpoint, optimizer=False)
        return normalize_stored_args(source.args)
    save = flag_values.get("save")
    is_first_start = save is not None and path_of(save).resolve() == path_of(load).resolve()
    if is_first_start and not flag_values.get("exit_on_missing_checkpoint"):
        return {}
    raise ValueError(f"--use-checkpoint-args: --load {load} contains no checkpoint")


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

"""Options of Megatron-LM and its forks that abbreviate other flags."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from megatron.training.config.arguments import CommandLine, Spelling


@dataclass(frozen=True)
class OtherName:
    """An alias for other flags.

    If `wins`, it overrides them; otherwise explicit flags take precedence.
    """

    values: dict[str, Any]
    takes: str | None = None  # the field that gets the value of the alias
    wins: bool = True
    note: str = ""  # the difference, if it is more than a name
    # The only values that are supported, and the values of fields for each of them.
    by_value: dict[str, dict[str, Any]] | None = None
    # Fields that get the value of another field, unless they are given.
    copies: dict[str, str] = field(default_factory=dict)


_RECOMPUTE_ALL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}

_FSDP = OtherName(
    {"use_distributed_optimizer": True},
    note="replaced by --use-distributed-optimizer, with the same results but more memory: "
    "every rank keeps all parameters and gradients of its stage (plan_run.py reports how much)",
)

_PATCHED_TOKENIZERS = (
    "LLamaTokenizer",
    "LLama2Tokenizer",
    "LLama3Tokenizer",
    "MistralTokenizer",
    "MixtralTokenizer",
    "Qwen2Tokenizer",
    "Qwen3Tokenizer",
    "DeepSeekV2Tokenizer",
)
"""Values of Pai-Megatron-Patch that load the directory --load with transformers' AutoTokenizer."""

OTHER_NAMES: dict[str, OtherName] = {
    "--use-torch-fsdp2": _FSDP,
    "--use-megatron-fsdp": _FSDP,
    "--use-custom-fsdp": _FSDP,
    "--use-rotary-position-embeddings": OtherName({"position_embedding_type": "rope"}),
    "--recompute-activations": OtherName({"recompute_granularity": "selective"}),
    "--fp8-e4m3": OtherName({"fp8": "e4m3"}),
    "--fp8-hybrid": OtherName({"fp8": "hybrid"}),
    "--use-dist-ckpt": OtherName({"ckpt_format": "torch_dist"}, wins=False),
    "--verify-integrity": OtherName({"ckpt_verify": True}),
    "--embed-layernorm": OtherName({"embedding_layernorm": True}),
    "--checkpoint-activations": OtherName(_RECOMPUTE_ALL, wins=False),
    "--activations-checkpoint-method": OtherName(
        _RECOMPUTE_ALL, takes="recompute_method", wins=False
    ),
    "--activations-checkpoint-num-layers": OtherName({}, takes="recompute_num_layers"),
    "--checkpoint-num-layers": OtherName({}, takes="recompute_num_layers"),
    "--encoder-num-layers": OtherName({}, takes="num_layers"),
    "--encoder-seq-length": OtherName({}, takes="seq_length"),
    "--padded-vocab-size": OtherName({}, takes="vocab_size"),
    "--tp": OtherName({}, takes="tensor_model_parallel_size"),
    "--pp": OtherName({}, takes="pipeline_model_parallel_size"),
    "--cp": OtherName({}, takes="context_parallel_size"),
    "--ep": OtherName({}, takes="expert_model_parallel_size"),
    "--mbs": OtherName({}, takes="micro_batch_size"),
    "--gbs": OtherName({}, takes="global_batch_size"),
    # Options of forks: BigCode's, and Pai-Megatron-Patch's.
    "--attention-head-type": OtherName(
        {},
        by_value={
            "multihead": {"group_query_attention": False},
            "multiquery": {"group_query_attention": True, "num_query_groups": 1},
        },
    ),
    "--patch-tokenizer-type": OtherName(
        {},
        wins=False,
        by_value=dict.fromkeys(_PATCHED_TOKENIZERS, {"tokenizer_type": "HuggingFaceTokenizer"}),
        copies={"tokenizer_model": "load"},
        note="replaced by --tokenizer-type HuggingFaceTokenizer with the directory --load as "
        "--tokenizer-model, unless these are given",
    ),
    "--use-packed-seq-params": OtherName(
        {"reset_attention_mask": True, "create_attention_mask_in_dataloader": True},
        note="replaced by --reset-attention-mask: documents of a sequence do not see each other",
    ),
    "--no-pad-vocab-size": OtherName({"make_vocab_size_divisible_by": 1}),
    "--disable-pad-vocab-size": OtherName({"make_vocab_size_divisible_by": 1}),
}


def add_aliases(spellings: dict[str, Spelling]) -> Callable[[Iterable[str], CommandLine], None]:
    """Add the aliases for the flags in `spellings` to them.

    Returns a function that replaces the aliases among the names of a command line by these flags.
    """
    # Any spelling of a field; those of a field that takes values are equal.
    spelling_of_field = {spelling.dest: spelling for spelling in spellings.values()}
    aliases = {}
    for name, alias in OTHER_NAMES.items():
        fields = {*alias.values, *alias.copies, *alias.copies.values()}
        spelling = Spelling(name, "0", const=True)
        if alias.by_value is not None:
            for values in alias.by_value.values():
                fields.update(values)
            metadata = {"parse": None, "choices": tuple(alias.by_value)}
            spelling = Spelling(name, "1", str, metadata)
        if alias.takes is not None:
            # The alias of a flag with a value parses it like that flag.
            fields.add(alias.takes)
            spelling = spelling_of_field.get(alias.takes, spelling)
        # Programs have parsers of some sections: skip aliases of fields that they lack.
        if fields <= spelling_of_field.keys():
            aliases[name] = alias
            spellings[name] = spelling
    return partial(_replace_aliases, aliases)


def _replace_aliases(
    aliases: Mapping[str, OtherName], names: Iterable[str], command_line: CommandLine
) -> None:
    """Replace aliases in `command_line.flag_values` by the flags that they abbreviate."""
    for name in names:
        alias = aliases.get(name)
        if alias is None:
            continue
        values = alias.values
        word = command_line.flag_values.pop(name, None)
        if alias.by_value is not None:
            if word is None:
                continue  # its value is a problem that is already listed
            values = alias.by_value[word]
        if alias.note:
            command_line.notes.append(f"{name}: {alias.note}")
        # The right operand of `|` takes precedence.
        if alias.wins:
            command_line.flag_values = command_line.flag_values | values
        else:
            command_line.flag_values = values | command_line.flag_values
        for target, source in alias.copies.items():
            if source in command_line.flag_values:
                command_line.flag_values.setdefault(target, command_line.flag_values[source])

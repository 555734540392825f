"""Options of Megatron-LM and its forks that are not flags here, and how each is handled."""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

FlagValues = dict[str, Any]
"""Field name -> value, for the flags on the command line."""


@dataclass
class CommandLine:
    """A parsed command line."""

    flag_values: FlagValues = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)  # accepted without effect
    # Accepted, although the memory that they save elsewhere is needed here.
    unsaved_memory: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # flags that something equivalent replaces
    # Flags with their values that --ignore-unknown-flags drops.
    dropped: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # one line each
    # Fields whose value is unknown because of a problem.
    malformed: set[str] = field(default_factory=set)


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

# Field -> values of older releases, forks and other libraries -> the value here.
OLD_VALUES: dict[str, dict[str, str]] = {
    "optimizer": {"dist_muon": "muon"},
    "moe_token_dispatcher_type": {"flex": "alltoall"},  # via DeepEP or HybridEP
    "cp_comm_type": {"a2a+p2p": "p2p"},
    "ckpt_format": {"fsdp_dtensor": "torch_dist"},
    "normalization": {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"},
    "lr_wsd_decay_style": {"1-sqrt": "minus_sqrt"},
    "position_embedding_type": {"rotary": "rope", "absolute": "learned_absolute"},
}

NOTES_OF_OLD_VALUES = {
    ("cp_comm_type", "a2a+p2p"): "p2p is used: other messages, the same results",
    ("ckpt_format", "fsdp_dtensor"): "torch_dist is written, which every layout reads",
}
"""(field, value of OLD_VALUES) -> the difference, if it is more than a name."""


@dataclass(frozen=True)
class MegatronOption:
    """A row of `megatron_lm_options.tsv`: an option of Megatron-LM since 2023 or of a fork.

    For options that are not flags here, `here` specifies how they are handled:
        no effect   the mathematics and the files are the same with and without it
        turns on    enables a feature that is not implemented here: an error that names it
        saves memory  reduces memory elsewhere but not here; results are the same: a note
        part of     belongs to such a feature: ignored unless the feature is enabled
        called      an old name of an option that Megatron-LM has renamed
        (empty)     a flag here, or not implemented
    """

    words: str  # number of values: "0", "1", "2", "3", "+" (one or more), "*" (any number)
    defaults: tuple[str, ...]  # the newest release first
    group: str  # of options in Megatron-LM; "fork: NAME" for those that it never had
    here: str = ""  # one of the words above
    why: str = ""  # the reason, the feature, or the new name
    # Values for which the option has no effect; for "no effect", the only supported ones.
    harmless: tuple[str, ...] = ()

    @property
    def fork(self) -> str | None:
        """The fork that has this option, or None for Megatron-LM's own."""
        if not self.group.startswith("fork: "):
            return None
        return self.group.removeprefix("fork: ")


def _read_table() -> dict[str, MegatronOption]:
    path = resources.files(__package__).joinpath("megatron_lm_options.tsv")
    table = {}
    for row in path.read_text(encoding="utf-8").splitlines():
        if row.startswith("#"):
            continue
        # Trailing columns are optional.
        columns = (row.split("\t") + [""] * 3)[:7]
        name, words, defaults, group, here, why, harmless = columns
        harmless_values = harmless.split(" | ") if harmless else []
        table[name] = MegatronOption(
            words, tuple(defaults.split(" | ")), group, here, why, tuple(harmless_values)
        )
    return table


def base_name(name: str) -> str:
    """Return the common part of the spellings of a switch: --x, --no-x and --disable-x."""
    return re.sub("^--(no-|disable-)?", "", name)


MEGATRON_OPTIONS = _read_table()
_SWITCHES = set()
for _name, _option in MEGATRON_OPTIONS.items():
    if _option.words == "0":
        _SWITCHES.add(base_name(_name))


def arity_of(name: str) -> str:
    """Return how many words follow an option of Megatron-LM; "*" if it is unknown."""
    if name in MEGATRON_OPTIONS:
        return MEGATRON_OPTIONS[name].words
    return "0" if base_name(name) in _SWITCHES else "*"


def judge_options(options: Iterable[tuple[str, list[str]]], command_line: CommandLine) -> list[str]:
    """Sort options that are not flags here into those without effect and those not implemented.

    `options` are names and their words. Adds a problem for each feature and fork to `command_line`.
    Returns the unknown options. With --ignore-unknown-flags, unknown options and those of forks are
    dropped.
    """
    unknown: list[str] = []
    drops_unknown = command_line.flag_values.get("ignore_unknown_flags", False)
    # Features and forks have several options each, but get one message.
    features: dict[str, list[tuple[str, MegatronOption]]] = collections.defaultdict(list)
    forks: dict[str, list[str]] = collections.defaultdict(list)
    for name, words in options:
        option = MEGATRON_OPTIONS.get(name)
        spelled = " ".join([name, *words])
        if option is None and base_name(name) in _SWITCHES:
            # A spelling that Megatron-LM lacks (--no-x where it has only --x) has no effect.
            command_line.ignored.append(name)
        elif option is not None and _has_no_effect(option, words):
            command_line.ignored.append(name)
        elif drops_unknown and (option is None or option.fork is not None):
            command_line.dropped.append(spelled)
        elif option is None:
            unknown.append(name)
        elif option.fork is not None:
            forks[option.fork].append(name)
        elif option.here == "saves memory":
            command_line.unsaved_memory.append(f"{spelled} ({option.why})")
        elif option.here in ("turns on", "part of"):
            features[option.why].append((spelled, option))
        else:
            command_line.problems.append(f"{spelled}: {_explain(option)}")

    for feature, feature_options in features.items():
        switches = [spelled for spelled, option in feature_options if option.here == "turns on"]
        # Options that tune a feature have no effect while the feature is off.
        if not switches:
            command_line.ignored += [spelled.split()[0] for spelled, _ in feature_options]
            continue
        listed = ", ".join(switches)
        num_others = len(feature_options) - len(switches)
        if num_others:
            listed += f" (and {num_others} more flags of it)"
        command_line.problems.append(f"{listed}: Megatron-LM's {feature} is not implemented here")
    for fork, names in forks.items():
        listed = ", ".join(dict.fromkeys(names))
        command_line.problems.append(
            f"{listed}: not a flag of Megatron-LM but of a fork of it ({fork})"
        )
    return unknown


def _explain(option: MegatronOption) -> str:
    """Return why an option of Megatron-LM is not supported."""
    if option.here == "no effect":
        return f"not supported, only {' or '.join(option.harmless)} ({option.why})"
    if option.here == "called":
        return f"Megatron-LM has renamed this flag to {option.why}"
    return "this option of Megatron-LM is not implemented here"


def _has_no_effect(option: MegatronOption, words: list[str]) -> bool:
    """Return whether an option has no effect: by its row, or because its value is Megatron-LM's
    default.
    """
    if option.here == "no effect" and not option.harmless:
        return True
    if len(words) != 1:
        return False
    if words[0] in option.harmless:
        return True
    if option.fork is not None:
        return False  # the defaults of a fork are not Megatron-LM's
    # A script may state the default of any release.
    return any(_is_same(words[0], default) for default in option.defaults)


def _is_same(word: str, default: str) -> bool:
    try:
        # 1e-5 and 0.00001 are the same value.
        return float(word) == float(default)
    except ValueError:
        return word == default and word != "None"

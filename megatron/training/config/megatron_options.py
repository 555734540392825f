"""All options of Megatron-LM since 2023 (and some of its forks'), and what becomes of those that are no flags of ours.

`megatron_lm_options.tsv` has a row for each: the number of its values, its defaults, its group in Megatron-LM, and
    no effect   the mathematics and the files are the same with and without it
    turns on    a feature that is not implemented here: an error that names it
    part of     such a feature: means nothing unless the feature is turned on
    called      today's name of an option that Megatron-LM has renamed
    (nothing)   a flag of ours, or not implemented
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class OtherName:
    """A flag that says what other flags say; `wins` over them, or yields where they are given, too."""

    values: dict[str, Any]
    takes: str | None = None  # the field that its own value goes to
    wins: bool = True


_RECOMPUTE_ALL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

OTHER_NAMES: dict[str, OtherName] = {
    "--use-rotary-position-embeddings": OtherName({"position_embedding_type": "rope"}),
    "--recompute-activations": OtherName({"recompute_granularity": "selective"}),
    "--fp8-e4m3": OtherName({"fp8": "e4m3"}),
    "--fp8-hybrid": OtherName({"fp8": "hybrid"}),
    "--use-dist-ckpt": OtherName({"ckpt_format": "torch_dist"}, wins=False),
    "--verify-integrity": OtherName({"ckpt_verify": True}),
    "--embed-layernorm": OtherName({"embedding_layernorm": True}),
    "--checkpoint-activations": OtherName(_RECOMPUTE_ALL, wins=False),
    "--activations-checkpoint-method": OtherName(_RECOMPUTE_ALL, takes="recompute_method", wins=False),
    "--activations-checkpoint-num-layers": OtherName({}, takes="recompute_num_layers"),
    "--checkpoint-num-layers": OtherName({}, takes="recompute_num_layers"),
    "--encoder-num-layers": OtherName({}, takes="num_layers"),
    "--encoder-seq-length": OtherName({}, takes="seq_length"),
    "--padded-vocab-size": OtherName({}, takes="vocab_size"),
    "--no-pad-vocab-size": OtherName({"make_vocab_size_divisible_by": 1}),
    "--disable-pad-vocab-size": OtherName({"make_vocab_size_divisible_by": 1}),
}

# Field -> values of older releases, of forks and of other libraries for the same, and what they are called here.
OLD_VALUES: dict[str, dict[str, str]] = {
    "optimizer": {"dist_muon": "muon"},
    "moe_token_dispatcher_type": {"flex": "alltoall"},  # over DeepEP or HybridEP
    "normalization": {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"},
    "lr_wsd_decay_style": {"1-sqrt": "minus_sqrt"},
    "position_embedding_type": {"rotary": "rope", "absolute": "learned_absolute"},
}


@dataclass(frozen=True)
class MegatronOption:
    """A row of the table: one spelling in Megatron-LM."""

    words: str  # values that it takes: "0", "1", "2", "3", "+" (one or more), "*" (any number)
    defaults: tuple[str, ...]  # of the newest release first
    group: str  # of options in Megatron-LM; "fork: NAME" for those that it never had
    here: str = ""  # "no effect", "turns on", "part of" or "called"
    why: str = ""  # the reason, the feature, or today's name
    harmless: tuple[str, ...] = ()  # with these values it has no effect; of "no effect": with these alone


def _read_table() -> dict[str, MegatronOption]:
    text = resources.files(__package__).joinpath("megatron_lm_options.tsv").read_text(encoding="utf-8")
    table = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, words, defaults, group, here, why, harmless = (line.split("\t") + [""] * 3)[:7]
            values = tuple(harmless.split(" | ")) if harmless else ()
            table[name] = MegatronOption(words, tuple(defaults.split(" | ")), group, here, why, values)
    return table


def base_name(name: str) -> str:
    """What the spellings of a switch have in common: --x, --no-x and --disable-x."""
    return re.sub("^--(no-|disable-)?", "", name)


MEGATRON_OPTIONS = _read_table()
_SWITCHES = {base_name(name) for name, option in MEGATRON_OPTIONS.items() if option.words == "0"}


def arity_of(name: str) -> str:
    """How many words follow an option of Megatron-LM; "*" where it is not known."""
    if name in MEGATRON_OPTIONS:
        return MEGATRON_OPTIONS[name].words
    return "0" if base_name(name) in _SWITCHES else "*"


@dataclass
class Verdict:
    """What becomes of the options that are no flags of ours."""

    ignored: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # one line each
    unknown: list[str] = field(default_factory=list)


def judge(options: Iterable[tuple[str, list[str]]]) -> Verdict:
    """Options and their words: without effect, not implemented (one line for each feature and fork), or unknown."""
    verdict = Verdict()
    features: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)  # -> what is said, "turns on" or "part of"
    forks: defaultdict[str, list[str]] = defaultdict(list)
    for name, words in options:
        option, said = MEGATRON_OPTIONS.get(name), " ".join([name, *words])
        if option is None:
            # A spelling of a switch that Megatron-LM lacks (--no-x where it has --x alone) leaves things as they are.
            (verdict.ignored if base_name(name) in _SWITCHES else verdict.unknown).append(name)
        elif _has_no_effect(option, words):
            verdict.ignored.append(name)
        elif option.group.startswith("fork: "):
            forks[option.group.removeprefix("fork: ")].append(name)
        elif option.here in ("turns on", "part of"):
            features[option.why].append((said, option.here))
        elif option.here == "no effect":
            only = " or ".join(option.harmless)
            verdict.problems.append(f"{said}: not supported, only {only} ({option.why})")
        elif option.here == "called":
            verdict.problems.append(f"{said}: Megatron-LM has renamed this flag to {option.why}")
        else:
            verdict.problems.append(f"{said}: this option of Megatron-LM is not implemented here")
    for feature, given in features.items():
        switches = [said for said, here in given if here == "turns on"]
        if not switches:
            verdict.ignored += [said.split()[0] for said, _ in given]
            continue
        more = f" (and {len(given) - len(switches)} more flags of it)" if len(given) > len(switches) else ""
        verdict.problems.append(f"{', '.join(switches)}{more}: Megatron-LM's {feature} is not implemented here")
    for fork, names in forks.items():
        listed = ", ".join(dict.fromkeys(names))
        verdict.problems.append(f"{listed}: not a flag of Megatron-LM but of a fork of it ({fork})")
    return verdict


def _has_no_effect(option: MegatronOption, words: list[str]) -> bool:
    """By its row, or because it asks for what Megatron-LM, and so we, do without it."""
    if option.here == "no effect" and not option.harmless:
        return True
    if len(words) != 1:
        return False
    of_fork = option.group.startswith("fork: ")  # its defaults are not Megatron-LM's
    return words[0] in option.harmless or (not of_fork and any(_same(words[0], value) for value in option.defaults))


def _same(word: str, default: str) -> bool:
    try:
        return float(word) == float(default)
    except ValueError:
        return word == default and word != "None"

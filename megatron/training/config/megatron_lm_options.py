"""Options of Megatron-LM that are not flags here: without effect, or not implemented."""

from __future__ import annotations

import collections
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from importlib import resources

from megatron.core.wings import resolve
from megatron.training.config.arguments import CommandLine

# Imported for options of Megatron-DeepSpeed
_TRANSLATE = "megatron.training.config.deepspeed_flags:translate"


@dataclass(frozen=True)
class MegatronOption:
    """A row of `megatron_lm_options.tsv`: an option of Megatron-LM since 2023 or of a fork.

    For options that are not flags here, `here` specifies how they are handled:
        no effect   the mathematics and the files are the same with and without it
        turns on    enables a feature that is not implemented here: an error that names it
        saves memory  reduces memory elsewhere but not here; results are the same: a note
        part of     belongs to such a feature: ignored unless the feature is enabled
        translated  of Megatron-DeepSpeed: flags here replace it
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


def get_option_names() -> Collection[str]:
    """Return all options of Megatron-LM and its forks, flags of this project included."""
    return MEGATRON_OPTIONS.keys()


def arity_of(name: str) -> str:
    """Return how many words follow an option of Megatron-LM; "*" if it is unknown."""
    if name in MEGATRON_OPTIONS:
        return MEGATRON_OPTIONS[name].words
    return "0" if base_name(name) in _SWITCHES else "*"


def may_be_empty(name: str) -> bool:
    """Return whether a list of Megatron-LM needs no value, which means that it is not given."""
    return name in MEGATRON_OPTIONS and MEGATRON_OPTIONS[name].words == "*"


def is_translated(name: str) -> bool:
    """Return whether flags here replace an option of Megatron-DeepSpeed."""
    return name in MEGATRON_OPTIONS and MEGATRON_OPTIONS[name].here == "translated"


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
    translated: dict[str, list[str]] = {}
    for name, words in options:
        option = MEGATRON_OPTIONS.get(name)
        spelled = " ".join([name, *words])
        if option is None and base_name(name) in _SWITCHES:
            # A spelling that Megatron-LM lacks (--no-x where it has only --x) has no effect.
            command_line.ignored.append(name)
        elif option is not None and _has_no_effect(option, words):
            command_line.ignored.append(name)
        elif option is not None and option.here == "translated":
            translated[name] = words
        elif drops_unknown and (option is None or option.fork is not None):
            command_line.dropped.append(spelled)
        elif option is None:
            unknown.append(name)
        elif option.here == "saves memory":
            command_line.unsaved_memory.append(f"{spelled} ({option.why})")
        elif option.fork is not None:
            forks[option.fork].append(name)
        elif option.here in ("turns on", "part of"):
            features[option.why].append((spelled, option))
        else:
            command_line.problems.append(f"{spelled}: {_explain(option)}")

    if translated:
        command_line.replacements += resolve(_TRANSLATE)(translated, command_line)
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

"""Dataclass fields to command-line flags, the command line back to values, and what becomes of
Megatron-LM's others.

One field is one flag: its spelling is in the field's metadata (`megatron.core.flags.flag`), its
help is the docstring under the field, its type is the annotation. Values that the user gave are
kept apart from defaults, so that arguments of a checkpoint can stand between the two.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import difflib
import functools
import inspect
import itertools
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from megatron.core.flags import find_violated_bounds, raise_problems

Given = dict[str, Any]  # field name -> value, for the flags that were on the command line


# Megatron-LM's options.


@dataclass(frozen=True)
class OtherName:
    """A flag that says what other flags say; `wins` over them, or yields where they are given, too."""

    values: dict[str, Any]
    takes: str | None = None  # the field that its own value goes to
    wins: bool = True


_RECOMPUTE_ALL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}

OTHER_NAMES: dict[str, OtherName] = {
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
    "--no-pad-vocab-size": OtherName({"make_vocab_size_divisible_by": 1}),
    "--disable-pad-vocab-size": OtherName({"make_vocab_size_divisible_by": 1}),
}

# Field -> values of older releases, of forks and of other libraries for the same, and what they are
# called here.
OLD_VALUES: dict[str, dict[str, str]] = {
    "optimizer": {"dist_muon": "muon"},
    "moe_token_dispatcher_type": {"flex": "alltoall"},  # over DeepEP or HybridEP
    "normalization": {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"},
    "lr_wsd_decay_style": {"1-sqrt": "minus_sqrt"},
    "position_embedding_type": {"rotary": "rope", "absolute": "learned_absolute"},
}


@dataclass(frozen=True)
class MegatronOption:
    """A row of `megatron_lm_options.tsv`, which has all options of Megatron-LM since 2023 and some
    of its forks'.

    Of those that are no flags of ours it says what becomes of them:
        no effect   the mathematics and the files are the same with and without it
        turns on    a feature that is not implemented here: an error that names it
        part of     such a feature: means nothing unless the feature is turned on
        called      today's name of an option that Megatron-LM has renamed
        (nothing)   a flag of ours, or not implemented
    """

    words: str  # values that it takes: "0", "1", "2", "3", "+" (one or more), "*" (any number)
    defaults: tuple[str, ...]  # of the newest release first
    group: str  # of options in Megatron-LM; "fork: NAME" for those that it never had
    here: str = ""  # "no effect", "turns on", "part of" or "called"
    why: str = ""  # the reason, the feature, or today's name
    harmless: tuple[
        str, ...
    ] = ()  # with these values it has no effect; of "no effect": with these alone


def _read_table() -> dict[str, MegatronOption]:
    text = (
        resources.files(__package__).joinpath("megatron_lm_options.tsv").read_text(encoding="utf-8")
    )
    table = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, words, defaults, group, here, why, harmless = (line.split("\t") + [""] * 3)[:7]
            values = tuple(harmless.split(" | ")) if harmless else ()
            table[name] = MegatronOption(
                words, tuple(defaults.split(" | ")), group, here, why, values
            )
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


# Ours.


@dataclass(frozen=True)
class Spelling:
    """What one spelling of a flag means."""

    dest: str
    words: str  # how many it takes: "0", "1", or "*" for all up to the next flag
    convert: Callable[[str], Any] = str  # of one word
    metadata: Mapping[str, Any] = field(default_factory=dict)  # of the field: choices and bounds
    const: Any = None  # the value, where no word is taken

    def value(self, name: str, words: Sequence[str]) -> Any:
        """The field's value; ValueError says what is wrong with the words after flag `name`."""
        if self.words == "0":
            return self.const
        values = [self._converted(name, word) for word in words]
        return values if self.words == "*" else values[0]

    def _converted(self, name: str, word: str) -> Any:
        if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"":
            word = word[1:-1]  # quotes that a script kept from its shell
        if not word:
            raise ValueError(
                f"{name}: its value is empty, as an unset variable would be: give one, or leave out {name}"
            )
        word = OLD_VALUES.get(self.dest, {}).get(word, word)
        try:
            value = self.convert(word)
        except ValueError:
            kind = {int: "an integer", float: "a number"}.get(self.convert, self.convert.__name__)  # type: ignore[call-overload]
            raise ValueError(f"{name}: {word!r} is not {kind}") from None
        choices = self.metadata["choices"]
        if choices is not None and value not in choices:
            raise ValueError(f"{name}: {word!r} is not one of {', '.join(choices)}")
        for wanted in find_violated_bounds(value, self.metadata):
            raise ValueError(f"{name} must be {wanted}, got {word}")
        return value


@dataclass
class CommandLine:
    """A command line taken apart."""

    given: Given = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)  # accepted, and without effect
    problems: list[str] = field(default_factory=list)  # one line each
    malformed: set[str] = field(
        default_factory=set
    )  # fields whose value is not known because of a problem


class FlagParser:
    """The flags of some dataclasses, with every spelling that Megatron-LM has had for them."""

    def __init__(self, sections: dict[str, type]) -> None:
        self.sections = sections
        self.spellings: dict[str, Spelling] = {}
        for section in sections.values():
            for flag_field in flag_fields(section):
                self.spellings |= _spellings(flag_field, flag_type(flag_field, section))
        fields = {
            spelling.dest: spelling for spelling in self.spellings.values() if spelling.words != "0"
        }
        dests = {spelling.dest for spelling in self.spellings.values()}
        self.other_names = {
            name: other
            for name, other in OTHER_NAMES.items()
            if dests.issuperset(other.values) and (other.takes is None or other.takes in dests)
        }
        for name, other in self.other_names.items():
            self.spellings[name] = (
                fields[other.takes] if other.takes else Spelling(name, "0", const=True)
            )

    def parse(self, argv: Sequence[str]) -> CommandLine:
        """Values by field name, and all problems at once; --help prints all flags and ends the
        program.
        """
        if "-h" in argv or "--help" in argv:
            print(self.format_help())
            sys.exit(0)
        line = CommandLine()
        foreign = []
        words = collections.deque(argv)
        while words:
            name, equals, attached = words.popleft().partition("=")
            if not name.startswith("--"):
                line.problems.append(
                    f"unexpected value {name + equals + attached!r}: it belongs to no flag"
                )
                continue
            spelling = self.spellings.get(name)
            arity = spelling.words if spelling else arity_of(name)
            values = [attached] if equals else _take(words, arity)
            if arity in ("1", "+") and not values:
                line.problems.append(f"{name} needs a value")
                line.malformed.add(spelling.dest if spelling else name)
            elif arity == "0" and equals:
                line.problems.append(f"{name} takes no value, got {attached!r}")
            elif spelling is None:
                foreign.append((name, values))
            else:
                _store(line, name, spelling, values)
        for name in dict.fromkeys(word.partition("=")[0] for word in argv):
            if name in self.other_names:
                other = self.other_names[name]
                line.given.pop(name, None)
                line.given = line.given | other.values if other.wins else other.values | line.given
        line.problems += [self._unknown(name) for name in judge(foreign, line)]
        return line

    def format_help(self) -> str:
        """All flags by section; one that several sections share is shown in the first."""
        parser = argparse.ArgumentParser(
            add_help=False,
            formatter_class=lambda prog: argparse.HelpFormatter(
                prog, max_help_position=44, width=118
            ),
            usage="%(prog)s [flags]    (under torchrun for more than one process)",
        )
        seen: set[str] = set()
        for title, section in self.sections.items():
            group = parser.add_argument_group(
                title, inspect.cleandoc(section.__doc__ or "").split("\n")[0]
            )
            for flag_field in flag_fields(section):
                if flag_field.name not in seen:
                    _add_help(group, section, flag_field)
                    seen.add(flag_field.name)
        return parser.format_help()

    def _unknown(self, name: str) -> str:
        known = dict.fromkeys([*self.spellings, *MEGATRON_OPTIONS])
        near = difflib.get_close_matches(name.replace("_", "-"), known, n=3, cutoff=0.75)
        hint = f"did you mean {' or '.join(near)}?" if near else "--help lists all flags"
        return f"unknown flag {name}: {hint}"


def parse_flags(parser: FlagParser, argv: Sequence[str]) -> tuple[Given, list[str]]:
    """Values by field name, and the accepted flags that have no effect; ValueError with all
    problems, one a line.
    """
    line = parser.parse(argv)
    raise_problems(line.problems)
    return line.given, line.ignored


def build(section: type, given: Given) -> Any:
    """The dataclass `section` from the values that were given; fields that are no flags keep their
    defaults.
    """
    return section(
        **{field.name: given[field.name] for field in flag_fields(section) if field.name in given}
    )


def flag_fields(section: type) -> list[dataclasses.Field[Any]]:
    """The fields of a dataclass that are flags."""
    return [field for field in dataclasses.fields(section) if "flags" in field.metadata]


def option_names(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    """The spellings of a field on the command line that --help shows; for a bool those that change
    its default.
    """
    dashed = field.name.replace("_", "-")
    default = f"--no-{dashed}" if field.default is True else f"--{dashed}"
    return field.metadata["flags"] or (default,)


def both_spellings(field: dataclasses.Field[Any]) -> tuple[list[str], list[str]]:
    """All spellings that turn a bool on, and all that turn it off.

    Megatron-LM's releases spell the same switch --x, --no-x or --disable-x, whichever changes its
    default of that time.
    """
    dashed = field.name.replace("_", "-")
    base = dashed.removeprefix("no-")
    on = [f"--{base}"]
    off = [f"--no-{base}", f"--disable-{base}"]
    if dashed != base:
        on, off = off, on
    (off if field.default else on).extend(
        name for name in option_names(field) if name not in on + off
    )
    return on, off


@functools.cache
def field_docs(section: type) -> dict[str, str]:
    """Field name -> the docstring under it, read from the source of the class and of those it
    extends.
    """
    docs = {}
    for part in filter(dataclasses.is_dataclass, section.__mro__):
        for statement, following in itertools.pairwise(
            _classes(part.__module__)[part.__qualname__].body
        ):
            if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
                assert isinstance(statement.target, ast.Name)
                docs[statement.target.id] = " ".join(ast.literal_eval(following.value).split())
    return docs


@functools.cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """Of a whole module at once: `inspect.getsource` would parse it again for each."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {
        statement.name: statement for statement in tree.body if isinstance(statement, ast.ClassDef)
    }


def _spellings(field: dataclasses.Field[Any], hint: Any) -> dict[str, Spelling]:
    """Every spelling of a field: `--name VALUE`, both switches of a bool; a list takes several
    words.
    """
    if hint is bool:
        pairs = zip((True, False), both_spellings(field), strict=True)
        return {
            name: Spelling(field.name, "0", const=value) for value, names in pairs for name in names
        }
    metadata = field.metadata
    convert = metadata["parse"] or _word(hint)[0]
    words = "*" if typing.get_origin(hint) is list else "1"
    return dict.fromkeys(option_names(field), Spelling(field.name, words, convert, metadata))


def _take(words: collections.deque[str], arity: str) -> list[str]:
    """The words that belong to a flag."""
    limit = {"0": 0, "1": 1}.get(arity, len(words))
    taken: list[str] = []
    while words and len(taken) < limit and not words[0].startswith("--"):
        taken.append(words.popleft())
    return taken


def _store(line: CommandLine, name: str, spelling: Spelling, words: list[str]) -> None:
    if spelling.words == "*" and not words:
        if (
            name not in MEGATRON_OPTIONS or arity_of(name) != "*"
        ):  # its lists may be empty: "not given"
            line.problems.append(f"{name} needs at least one value")
            line.malformed.add(spelling.dest)
        return
    try:
        line.given[spelling.dest] = spelling.value(name, words)
    except ValueError as error:
        line.problems.append(str(error))
        line.malformed.add(spelling.dest)


def judge(options: Iterable[tuple[str, list[str]]], line: CommandLine) -> list[str]:
    """Sort options that are no flags of ours, with their words, into those without effect and those
    not implemented (a problem for each feature and fork). Returns the unknown ones.
    """
    unknown: list[str] = []
    features: dict[str, list[tuple[str, str]]] = collections.defaultdict(
        list
    )  # -> (words, "turns on" or "part of")
    forks: dict[str, list[str]] = collections.defaultdict(list)
    for name, words in options:
        option = MEGATRON_OPTIONS.get(name)
        said = " ".join([name, *words])
        if option is None:
            # A spelling of a switch that Megatron-LM lacks (--no-x where it has --x alone) leaves
            # things as they are.
            (line.ignored if base_name(name) in _SWITCHES else unknown).append(name)
        elif _has_no_effect(option, words):
            line.ignored.append(name)
        elif option.group.startswith("fork: "):
            forks[option.group.removeprefix("fork: ")].append(name)
        elif option.here in ("turns on", "part of"):
            features[option.why].append((said, option.here))
        elif option.here == "no effect":
            only = " or ".join(option.harmless)
            line.problems.append(f"{said}: not supported, only {only} ({option.why})")
        elif option.here == "called":
            line.problems.append(f"{said}: Megatron-LM has renamed this flag to {option.why}")
        else:
            line.problems.append(f"{said}: this option of Megatron-LM is not implemented here")
    for feature, given in features.items():
        switches = [said for said, here in given if here == "turns on"]
        if not switches:
            line.ignored += [said.split()[0] for said, _ in given]
            continue
        more = (
            f" (and {len(given) - len(switches)} more flags of it)"
            if len(given) > len(switches)
            else ""
        )
        line.problems.append(
            f"{', '.join(switches)}{more}: Megatron-LM's {feature} is not implemented here"
        )
    for fork, names in forks.items():
        listed = ", ".join(dict.fromkeys(names))
        line.problems.append(f"{listed}: not a flag of Megatron-LM but of a fork of it ({fork})")
    return unknown


def _has_no_effect(option: MegatronOption, words: list[str]) -> bool:
    """By its row, or because it asks for what Megatron-LM, and so we, do without it."""
    if option.here == "no effect" and not option.harmless:
        return True
    if len(words) != 1:
        return False
    of_fork = option.group.startswith("fork: ")  # its defaults are not Megatron-LM's
    return words[0] in option.harmless or (
        not of_fork and any(_same(words[0], value) for value in option.defaults)
    )


def _same(word: str, default: str) -> bool:
    try:
        return float(word) == float(default)
    except ValueError:
        return word == default and word != "None"


def _add_help(group: argparse._ArgumentGroup, section: type, field: dataclasses.Field[Any]) -> None:
    text = field_docs(section)[field.name].replace("%", "%%")
    hint = flag_type(field, section)
    name, *others = option_names(field)
    options: dict[str, Any] = {"dest": field.name}
    if hint is bool:
        options |= {"action": "store_const", "const": not field.default}
    else:
        options["metavar"] = _word(hint)[1]
        if field.metadata["choices"]:
            text += f" One of {', '.join(field.metadata['choices'])}."
        default: Any = field.default
        if typing.get_origin(hint) is list:
            options["nargs"] = "+"
            default = " ".join(map(str, default)) if isinstance(default, tuple) else default
        if default is not None:
            text += f" (default: {default})"
    group.add_argument(name, help=text + "".join(f" Also {other}." for other in others), **options)


def flag_type(field: dataclasses.Field[Any], section: type) -> Any:
    """The type of a field's value when the flag is given; text where the field parses it itself."""
    hint = _hints(section)[field.name]
    if field.metadata["parse"]:
        return str
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        (hint,) = [arm for arm in typing.get_args(hint) if arm is not types.NoneType]
    return hint


@functools.cache
def _hints(section: type) -> dict[str, Any]:
    return typing.get_type_hints(section)


def _word(hint: Any) -> tuple[Callable[[str], Any], str]:
    """From a word of the command line to a value, and what --help calls it.

    int, float, str, an element of a list, or a tuple written `a,b`.
    """
    if typing.get_origin(hint) is list:
        return _word(typing.get_args(hint)[0])
    if typing.get_origin(hint) is not tuple:
        return hint, {int: "N", float: "X", str: "STR"}[hint]
    converters, names = zip(*map(_word, typing.get_args(hint)), strict=True)

    def tuple_of(text: str) -> tuple[Any, ...]:
        words = text.strip("() ").split(",")
        return tuple(convert(word.strip()) for convert, word in zip(converters, words, strict=True))

    tuple_of.__name__ = f"{len(converters)} numbers joined by commas"  # the type's name in errors
    return tuple_of, ",".join(names)

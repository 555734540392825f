"""Command-line flags from dataclass fields, and the command line back to values of fields.

Each field is one flag: its spelling is in the field's metadata (`megatron.core.flags.flag`), its
help is the docstring under the field, its type is the annotation. Given values are kept apart from
defaults, so that arguments of a checkpoint can be merged between them.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import functools
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.core.flags import (
    describe_type,
    find_value_problems,
    get_field_types,
    raise_problems,
    spell_flag,
)
from megatron.core.terminal import print_text
from megatron.core.wings import resolve

FlagField = dataclasses.Field[Any]
FlagValues = dict[str, Any]
"""Field name -> value, for the flags on the command line."""

# Imported for words that are not flags here
_GET_OPTION_NAMES = "megatron.training.config.megatron_lm_options:get_option_names"
_ARITY_OF = "megatron.training.config.megatron_lm_options:arity_of"
_MAY_BE_EMPTY = "megatron.training.config.megatron_lm_options:may_be_empty"
_JUDGE_OPTIONS = "megatron.training.config.megatron_lm_options:judge_options"
_ADD_ALIASES = "megatron.training.config.megatron_options:add_aliases"
_FORMAT_HELP = "megatron.training.config.flag_help:format_help"


# Fields.


def flag_fields(section: type) -> list[FlagField]:
    """Return the fields of a dataclass that are flags."""
    return [field for field in dataclasses.fields(section) if "flags" in field.metadata]


def option_names(field: FlagField) -> tuple[str, ...]:
    """Return the spellings that --help shows; for a bool, those that change its default."""
    return field.metadata["flags"] or (spell_flag(field),)


def both_spellings(field: FlagField) -> tuple[list[str], list[str]]:
    """Return all spellings that turn a bool on, and all that turn it off.

    Megatron-LM's releases spell the same switch --x, --no-x or --disable-x, depending on its
    default at the time.
    """
    dashed = field.name.replace("_", "-")
    base = dashed.removeprefix("no-")
    on = [f"--{base}"]
    off = [f"--no-{base}", f"--disable-{base}"]
    # Other spellings change the default.
    standard_names = [*on, *off]
    custom_names = [name for name in option_names(field) if name not in standard_names]
    if dashed != base:  # the field itself is a negation, so that --x turns it off
        on, off = [*off], [*on]
    if field.default:
        off += custom_names
    else:
        on += custom_names
    return on, off


def flag_type(field: FlagField, section: type) -> Any:
    """Return the type of a given value; str for words that the field parses itself."""
    hint = get_field_types(section)[field.name]
    if field.metadata["parse"]:
        return list[str] if typing.get_origin(hint) is list else str
    return hint


def may_lack_word(field: FlagField, section: type) -> bool:
    """Return whether the flag is a switch that can also have a value."""
    arms = typing.get_args(get_field_types(section)[field.name])
    return bool in arms


def get_word_type(hint: Any) -> Any:
    """Return the type of one word of a flag: of an element of a list, otherwise `hint` itself."""
    if typing.get_origin(hint) is list:
        return typing.get_args(hint)[0]
    return hint


def convert_word(word: str, hint: Any) -> Any:
    """Return the value of a word. `hint` is int, float, str, or a tuple of them, written `a,b`.

    Raises ValueError if the word does not have this type.
    """
    if typing.get_origin(hint) is not tuple:
        return hint(word)
    element_types = typing.get_args(hint)
    elements = word.strip("() ").split(",")
    pairs = zip(elements, element_types, strict=True)
    return tuple(convert_word(element.strip(), element_type) for element, element_type in pairs)


# Spellings.


@dataclass(frozen=True)
class Spelling:
    """The meaning of one spelling of a flag."""

    dest: str
    words: str  # number of values: "0", "1", "?" for at most 1, "*" for all up to the next flag
    word_type: Any = str
    # Of the field: `parse`, choices and bounds.
    metadata: Mapping[str, Any] = field(default_factory=dict)
    const: Any = None  # the value of a flag without words

    def parse(self, name: str, words: Sequence[str]) -> Any:
        """Return the value for the words after flag `name`; ValueError if they are invalid."""
        if self.words == "0" or (self.words == "?" and not words):
            return self.const
        values = [self._parse_word(name, word) for word in words]
        return values if self.words == "*" else values[0]

    def _parse_word(self, name: str, word: str) -> Any:
        if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"":
            word = word[1:-1]  # quotes that a script protected from its shell
        if not word:
            raise ValueError(
                f"{name}: its value is empty, as an unset variable would be: give a value, "
                f"or leave out {name}"
            )
        # Aliases are renamed before they are checked, so that `choices` has only the new values.
        word = self.metadata.get("aliases", {}).get(word, word)
        value = self._convert(name, word)
        for problem in find_value_problems(name, value, self.metadata, word):
            raise ValueError(problem)
        return value

    def _convert(self, name: str, word: str) -> Any:
        parse = self.metadata["parse"]
        if parse is not None:
            try:
                return parse(word)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        try:
            return convert_word(word, self.word_type)
        except ValueError:
            expected_type = describe_type(self.word_type)
            raise ValueError(f"{name}: {word!r} is not {expected_type}") from None


@functools.cache
def _make_spellings(field: FlagField, section: type) -> dict[str, Spelling]:
    """Return every spelling of a field: `--name VALUE`, or both switches of a bool."""
    hint = flag_type(field, section)
    if hint is bool:
        on, off = both_spellings(field)
        switches = dict.fromkeys(on, Spelling(field.name, "0", const=True))
        return switches | dict.fromkeys(off, Spelling(field.name, "0", const=False))
    words = "*" if typing.get_origin(hint) is list else "1"
    if may_lack_word(field, section):
        words = "?"
    spelling = Spelling(field.name, words, get_word_type(hint), field.metadata, const=True)
    return dict.fromkeys(option_names(field), spelling)


# Parser.


@dataclass
class CommandLine:
    """A parsed command line."""

    flag_values: FlagValues = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)  # accepted without effect
    # Accepted, although the memory that they save elsewhere is needed here.
    unsaved_memory: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # flags that something equivalent replaces
    replacements: list[str] = field(default_factory=list)  # flags that win over the given ones
    # Flags with their values that --ignore-unknown-flags drops.
    dropped: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # one line each
    # Fields whose value is unknown because of a problem.
    malformed: set[str] = field(default_factory=set)


class FlagParser:
    """Parser for the flags of some dataclasses, with every spelling that Megatron-LM has had.

    Unlike argparse, which exits at the first error, it reports all problems at once. It accepts
    Megatron-LM's options without effect, which may take values, and explains the others.
    `sections` are the dataclasses by their title in --help.
    """

    def __init__(self, sections: dict[str, type]) -> None:
        self.sections = sections
        self.spellings: dict[str, Spelling] = {}
        for section in sections.values():
            for flag_field in flag_fields(section):
                self.spellings |= _make_spellings(flag_field, section)
        # Replaces aliases by the flags that they abbreviate: see `megatron_options.add_aliases`.
        self._replace_aliases: Callable[[Iterable[str], CommandLine], None] | None = None

    def parse(self, argv: Sequence[str]) -> CommandLine:
        """Return values by field name, and all problems; --help prints all flags and exits."""
        if "-h" in argv or "--help" in argv:
            print_text(resolve(_FORMAT_HELP)(self.sections))
            sys.exit(0)
        command_line = CommandLine()
        foreign = []
        words = collections.deque(argv)
        while words:
            word = words.popleft()
            name, equals, attached = word.partition("=")
            if not name.startswith("--"):
                command_line.problems.append(f"unexpected value {word!r}: it belongs to no flag")
                continue

            name = self._find_spelling(name)

            # Take the values of the flag.
            spelling = self.spellings.get(name)
            if spelling is not None:
                dest = spelling.dest
                arity = spelling.words
            else:
                dest = name
                arity = resolve(_ARITY_OF)(name)
            values = [attached] if equals else _take_values(words, arity)

            # Store them.
            if arity in ("1", "+") and not values:
                command_line.problems.append(f"{name} needs a value")
                command_line.malformed.add(dest)
            elif arity == "0" and equals:
                command_line.problems.append(f"{name} takes no value, got {attached!r}")
            elif spelling is None:
                foreign.append((name, values))
            else:
                _store_value(command_line, name, spelling, values)
        if self._replace_aliases is not None:
            names = [self._find_spelling(word.partition("=")[0]) for word in argv]
            self._replace_aliases(dict.fromkeys(names), command_line)
        # Judged together: an option may be harmless unless another one enables its feature.
        if foreign:
            unknown = resolve(_JUDGE_OPTIONS)(foreign, command_line)
            command_line.problems += [self._explain_unknown(name) for name in unknown]
        if command_line.replacements:
            replaced = self.parse(command_line.replacements)
            command_line.flag_values |= replaced.flag_values
            command_line.problems += replaced.problems
            command_line.malformed |= replaced.malformed
        return command_line

    def _find_spelling(self, name: str) -> str:
        """Return a flag in the spelling of Megatron-LM: e.g. --num_layers in some forks."""
        if name in self.spellings:
            return name
        if self._replace_aliases is None:
            self._replace_aliases = resolve(_ADD_ALIASES)(self.spellings)
        hyphenated = name.replace("_", "-")
        names = {*self.spellings, *resolve(_GET_OPTION_NAMES)()}
        if name in names or hyphenated not in names:
            return name
        return hyphenated

    def _explain_unknown(self, name: str) -> str:
        candidates = dict.fromkeys([*self.spellings, *resolve(_GET_OPTION_NAMES)()])
        # A flag of a fork may resemble one that changes the model: suggest misspellings only.
        near = difflib.get_close_matches(name.replace("_", "-"), candidates, n=3, cutoff=0.9)
        if not near:
            return (
                f"unknown flag {name}: --help lists all flags, and --ignore-unknown-flags drops "
                "those of a fork"
            )
        return f"unknown flag {name}: did you mean {' or '.join(near)}?"


def parse_flags(parser: FlagParser, argv: Sequence[str]) -> tuple[FlagValues, list[str]]:
    """Return values by field name, and the accepted flags without effect. Raises ValueError that
    lists all problems, one per line.
    """
    command_line = parser.parse(argv)
    raise_problems(command_line.problems)
    return command_line.flag_values, command_line.ignored


def build(section: type, flag_values: FlagValues) -> Any:
    """Return an instance of the dataclass `section` with the given values and its defaults."""
    values = {}
    for flag_field in flag_fields(section):
        if flag_field.name in flag_values:
            values[flag_field.name] = flag_values[flag_field.name]
    return section(**values)


def _take_values(words: collections.deque[str], arity: str) -> list[str]:
    """Remove the words of a flag from the front of `words`, and return them."""
    # Values of other options of Megatron-LM end at the next flag, e.g. "+" and "*".
    limit = {"0": 0, "1": 1, "?": 1}.get(arity, len(words))
    taken: list[str] = []
    while words and len(taken) < limit and not words[0].startswith("--"):
        taken.append(words.popleft())
    return taken


def _store_value(
    command_line: CommandLine, name: str, spelling: Spelling, words: list[str]
) -> None:
    if spelling.words == "*" and not words:
        if not resolve(_MAY_BE_EMPTY)(name):
            command_line.problems.append(f"{name} needs at least one value")
            command_line.malformed.add(spelling.dest)
        return
    note = spelling.metadata.get("alias_note")
    for word in words:
        if note and word in spelling.metadata["aliases"]:
            command_line.notes.append(f"{name} {word}: {note}")
    try:
        value = spelling.parse(name, words)
        if spelling.metadata.get("repeatable"):
            value = command_line.flag_values.get(spelling.dest, []) + value
        command_line.flag_values[spelling.dest] = value
    except ValueError as error:
        command_line.problems.append(str(error))
        command_line.malformed.add(spelling.dest)

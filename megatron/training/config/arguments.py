"""Dataclass fields to command-line flags, and the command line back to dataclasses.

One field is one flag: its spelling is in the field's metadata (`megatron.core.utils.flag`), its help is the docstring
under the field, its type is the annotation. Values that the user gave are kept apart from defaults, so that arguments
of a checkpoint can stand between the two.
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
import textwrap
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from megatron.training.config.accepted_flags import ACCEPTED_WITHOUT_EFFECT, OTHER_NAMES, check_value

Given = dict[str, Any]  # field name -> value, for the flags that were on the command line


class FlagParser(argparse.ArgumentParser):
    """An ArgumentParser that raises ValueError instead of printing its usage and ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def make_parser(sections: dict[str, type]) -> FlagParser:
    """A parser with one group of flags per dataclass; a field that several share is shown in the first."""
    parser = FlagParser(
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=44, width=118),
        usage="%(prog)s [flags]    (under torchrun for more than one process)",
    )
    seen: set[str] = set()
    for title, section in sections.items():
        group = parser.add_argument_group(title, inspect.cleandoc(section.__doc__ or "").split("\n")[0])
        for field in flag_fields(section):
            if field.name not in seen:
                _add_flag(group, section, field)
        seen |= {field.name for field in flag_fields(section)}
    for name, (field_name, value) in OTHER_NAMES.items():
        parser.add_argument(name, dest=field_name, action="store_const", const=value, help=argparse.SUPPRESS)
    return parser


def parse_flags(parser: FlagParser, argv: Sequence[str]) -> tuple[Given, list[str]]:
    """Values by field name, and the accepted flags that have no effect.

    Raises ValueError for unknown flags (with the nearest names) and malformed values.
    """
    argv, ignored = _take_accepted(argv)
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        raise ValueError("\n".join(_explain_unknown(word, parser) for word in unknown))
    return vars(namespace), ignored


def build(section: type, given: Given) -> Any:
    """The dataclass `section` from the values that were given; fields that are no flags keep their defaults."""
    return section(**{field.name: given[field.name] for field in flag_fields(section) if field.name in given})


def flag_fields(section: type) -> list[dataclasses.Field[Any]]:
    """The fields of a dataclass that are flags."""
    return [field for field in dataclasses.fields(section) if "flags" in field.metadata]


def option_names(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    """The spellings of a field on the command line."""
    dashed = field.name.replace("_", "-")
    default = f"--no-{dashed}" if field.default is True else f"--{dashed}"
    return field.metadata["flags"] or (default,)


@functools.cache
def field_docs(section: type) -> dict[str, str]:
    """Field name -> the docstring under it, read from the source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(section)))
    assert isinstance(tree.body[0], ast.ClassDef)
    docs = {}
    for statement, following in itertools.pairwise(tree.body[0].body):
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
            assert isinstance(statement.target, ast.Name)
            docs[statement.target.id] = ast.literal_eval(following.value)
    return docs


def _add_flag(group: argparse._ArgumentGroup, section: type, field: dataclasses.Field[Any]) -> None:
    """`--name VALUE`; a bool is a switch to the opposite of its default; a list takes several words."""
    text = field_docs(section)[field.name].replace("%", "%%")
    hint = _without_none(typing.get_type_hints(section)[field.name])
    name, *others = option_names(field)
    options: dict[str, Any] = {"dest": field.name}
    if hint is bool:
        options |= {"action": "store_const", "const": not field.default}
    else:
        options |= {"type": _converter(hint), "choices": field.metadata["choices"], "metavar": _metavar(hint)}
        if options["choices"]:
            text += f" One of {', '.join(options['choices'])}."
        if typing.get_origin(hint) is list:
            options["nargs"] = "+"
        if field.default is not None:
            text += f" (default: {field.default})"
    group.add_argument(name, help=text + "".join(f" Also {other}." for other in others), **options)
    for other in others:
        group.add_argument(other, help=argparse.SUPPRESS, **options)


def _without_none(hint: Any) -> Any:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        (hint,) = [arm for arm in typing.get_args(hint) if arm is not types.NoneType]
    return hint


def _metavar(hint: Any) -> str:
    names = {int: "N", float: "X", str: "STR"}
    if typing.get_origin(hint) is tuple:
        return ",".join(names[arm] for arm in typing.get_args(hint))
    return names[typing.get_args(hint)[0] if typing.get_origin(hint) is list else hint]


def _converter(hint: Any) -> Callable[[str], Any]:
    """From a word of the command line to a value: int, float, str, an element of a list, or a tuple written `a,b`."""
    if typing.get_origin(hint) is list:
        return _converter(typing.get_args(hint)[0])
    if typing.get_origin(hint) is not tuple:
        assert hint in (int, float, str), hint
        return hint  # type: ignore[no-any-return]
    converters = [_converter(arm) for arm in typing.get_args(hint)]

    def tuple_of(text: str) -> tuple[Any, ...]:
        words = text.strip("() ").split(",")
        return tuple(convert(word.strip()) for convert, word in zip(converters, words, strict=True))

    tuple_of.__name__ = f"{len(converters)} numbers joined by commas"  # argparse's name for the type in its errors
    return tuple_of


def _take_accepted(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words into those for the parser and the flags of `ACCEPTED_WITHOUT_EFFECT`."""
    kept: list[str] = []
    ignored: list[str] = []
    words = collections.deque(argv)
    while words:
        name, equals, value = words[0].partition("=")
        if name not in ACCEPTED_WITHOUT_EFFECT:
            kept.append(words.popleft())
            continue
        words.popleft()
        ignored.append(name)
        if ACCEPTED_WITHOUT_EFFECT[name].values and not equals:
            if not words or words[0].startswith("--"):
                raise ValueError(f"{name} expects a value")
            value = words.popleft()
        check_value(name, value)
    return kept, ignored


def _explain_unknown(word: str, parser: FlagParser) -> str:
    if not word.startswith("--"):
        return f"unexpected value {word!r}: it belongs to no flag"
    name = word.partition("=")[0]
    known = [option for action in parser._actions for option in action.option_strings]
    near = difflib.get_close_matches(name.replace("_", "-"), known, n=3, cutoff=0.7)
    hint = f"did you mean {' or '.join(near)}?" if near else "--help lists all flags"
    return f"unknown flag {name}: {hint}"

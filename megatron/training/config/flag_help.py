"""The text of --help, from the fields of the flags and their docstrings."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect
import itertools
import sys
import typing
from typing import Any

from megatron.training.config.arguments import (
    FlagField,
    flag_fields,
    flag_type,
    get_word_type,
    may_lack_word,
    option_names,
)


def format_help(sections: dict[str, type]) -> str:
    """Return the help of all flags by section; a flag of several sections is in the first."""
    parser = argparse.ArgumentParser(
        add_help=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=44, width=118),
        usage="%(prog)s [flags]",
    )
    seen: set[str] = set()
    # The docstring of a section's class is its description.
    for title, section in sections.items():
        doc = inspect.cleandoc(section.__doc__ or "")
        summary = doc.split("\n")[0]
        group = parser.add_argument_group(title, summary)
        for flag_field in flag_fields(section):
            if flag_field.name not in seen:
                _add_help(group, section, flag_field)
                seen.add(flag_field.name)
    return parser.format_help()


@functools.cache
def field_docs(section: type) -> dict[str, str]:
    """Return the docstring under each field, from the source of the class and its bases."""
    docs = {}
    for base in filter(dataclasses.is_dataclass, section.__mro__):
        classes = _parse_classes(base.__module__)
        body = classes[base.__qualname__].body
        for statement, following in itertools.pairwise(body):
            if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr):
                name = ast.unparse(statement.target)
                text = ast.literal_eval(following.value)
                docs[name] = " ".join(text.split())
    return docs


@functools.cache
def _parse_classes(module: str) -> dict[str, ast.ClassDef]:
    # A whole module at once: `inspect.getsource` would parse it again for each class.
    source = inspect.getsource(sys.modules[module])
    tree = ast.parse(source)
    classes = {}
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef):
            classes[statement.name] = statement
    return classes


def get_metavariable(hint: Any) -> str:
    """Return the name of a word of this type in --help."""
    if typing.get_origin(hint) is tuple:
        names = map(get_metavariable, typing.get_args(hint))
        return ",".join(names)
    return {int: "N", float: "X"}.get(hint, "STR")


def _add_help(group: argparse._ArgumentGroup, section: type, field: FlagField) -> None:
    """Add a flag to the help. Its text describes the flag as spelled, e.g. --no-x."""
    hint = flag_type(field, section)
    options: dict[str, Any] = {"dest": field.name}
    if hint is bool:
        # argparse formats the help only; it never parses.
        options["action"] = "store_const"
        options["const"] = not field.default
    else:
        options["metavar"] = get_metavariable(get_word_type(hint))
        if typing.get_origin(hint) is list:
            options["nargs"] = "+"
        elif may_lack_word(field, section):
            options["nargs"] = "?"
    text = _make_help_text(section, field)
    options["help"] = text.replace("%", "%%")
    name = option_names(field)[0]
    group.add_argument(name, **options)


def _format_default(default: Any) -> str:
    """Return the words of a default; empty for a flag without a word or a default."""
    if default is None or isinstance(default, bool):
        return ""
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    return str(default)


def _make_help_text(section: type, field: FlagField) -> str:
    text = field_docs(section)[field.name]
    if field.default is True:
        first_word = text.split()[0]
        if first_word.istitle():  # not a name such as YaRN
            text = text[0].lower() + text[1:]
        text = f"Disable this default: {text}"
    choices = field.metadata["choices"]
    if choices:
        listed = ", ".join(choices)
        text += f" One of {listed}."
    default = _format_default(field.default)
    if default:
        text += f" (default: {default})"
    # The values of another flag that the flag requires: one word, or several
    for name, expected in field.metadata["when"].items():
        if isinstance(expected, tuple):
            expected = " or ".join(expected)
        if isinstance(expected, str):
            dashed = name.replace("_", "-")
            text += f" Only with --{dashed} {expected}."
    for other_name in option_names(field)[1:]:
        text += f" Also {other_name}."
    return text

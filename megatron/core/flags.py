"""Dataclass fields that are command-line flags, and the validation of their values."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple


class _Changed:
    """Condition that a flag is given and differs from its default."""


CHANGED = _Changed()


class FlagRule(NamedTuple):
    """Relation between flags: if they have the values of `when`, what they require or exclude.

    `when`, `requires` and `excludes` map fields of the sections, or their properties, to values.
    A tuple lists alternatives, and a field that is a list contains the value. For a field that is
    not a switch, True means that it is set (not None, zero or empty), and False that it is not.

    `divides` maps a size to another one that must be a multiple of it. `reason` ends the message,
    with the fix if there is another one than to change one of the flags.
    """

    when: Mapping[str, Any]
    requires: Mapping[str, Any] = types.MappingProxyType({})
    excludes: Mapping[str, Any] = types.MappingProxyType({})
    divides: Mapping[str, str] = types.MappingProxyType({})
    reason: str = ""

    @property
    def names(self) -> set[str]:
        """Fields and properties that the rule reads."""
        return {
            *self.when,
            *self.requires,
            *self.excludes,
            *self.divides,
            *self.divides.values(),
        }


def flag(
    default: Any,
    *names: str,
    choices: tuple[str, ...] | None = None,
    aliases: Mapping[str, str] | None = None,
    alias_note: str = "",
    parse: Callable[[str], Any] | None = None,
    repeatable: bool = False,
    required: bool = False,
    positive: bool = False,
    at_least: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    decides: str | None = None,
    when: Mapping[str, Any] | None = None,
    meaning: str | None = None,
    requires: Mapping[str, Any] | None = None,
    excludes: Mapping[str, Any] | None = None,
    divides: str | None = None,
    reason: str = "",
) -> Any:
    """Return a dataclass field that is also a command-line flag.

    The docstring below the field is the flag's help text.

    Spelling: without `names` the flag is the field's name with dashes, `--field-name VALUE`. A bool
    that defaults to False is `--field-name`; one that defaults to True is `--no-field-name`.
    `names` overrides these spellings; a bool then takes the opposite of its default.

    Values: `parse` converts a word when the type alone does not define the conversion. `aliases`
    are words of older releases, forks and other libraries for choices, and `alias_note` is their
    difference, if it is more than a name. A `repeatable` list has the values of all its
    occurrences on a command line; the last occurrence of any other flag wins. The type,
    the `choices`, and the bounds `positive`, `at_least`, `at_most` (inclusive) and `below`
    (exclusive) are checked by the command line parser and by every instance of a `FlagSection`,
    whether its values come from the command line, from Python or from a checkpoint. The default 0
    of a `required` number means that it is missing.

    Fields of the model specify their effect (`decides`): "shapes" (keys and shapes of the
    weights) or "mathematics" (the function that the same weights compute). The field matters only
    `when` other fields have the given values. `meaning` names the property to compare instead of
    the field, if the same model has more than one spelling.

    Rules: a value other than the default `requires` and `excludes` the given values of other
    fields, and a size `divides` another one, for this `reason`: see `FlagRule`. Its conditions
    within a section are checked by each instance, those between sections by the program.
    """
    metadata = {
        "flags": names,
        "choices": choices,
        "aliases": aliases or {},
        "alias_note": alias_note,
        "parse": parse,
        "repeatable": repeatable,
        "required": required,
        "positive": positive,
        "at_least": at_least,
        "at_most": at_most,
        "below": below,
        "decides": decides,
        "when": when or {},
        "meaning": meaning,
        "requires": requires or {},
        "excludes": excludes or {},
        "divides": divides,
        "reason": reason,
    }
    return dataclasses.field(default=default, metadata=metadata)


class InvalidFlagsError(ValueError):
    """All problems of a command line or of some flags, one per line of the message.

    `section` contains the flags if each value is valid by itself.
    """

    section: FlagSection | None = None

    @property
    def problems(self) -> list[str]:
        return str(self).split("\n")


def raise_problems(problems: Iterable[str]) -> None:
    """Raise one InvalidFlagsError with all `problems`, if there are any."""
    messages = list(problems)
    if messages:
        raise InvalidFlagsError("\n".join(messages))


def explain_error(error: BaseException) -> str:
    """Return the message of an error, with a bullet for each of several problems."""
    if isinstance(error, InvalidFlagsError) and len(error.problems) > 1:
        bullets = "\n".join(f"  - {problem}" for problem in error.problems)
        return f"{len(error.problems)} problems\n{bullets}"
    return str(error)


class FlagSection:
    """Base class of dataclasses of flags: checks the fields whenever an instance is created.

    The metadata and the type of a field are the only statement of its accepted values. `RULES` are
    rules that depend on values of more than one field; subclasses define `find_problems` for
    everything that is not a `FlagRule`.
    """

    RULES: ClassVar[tuple[FlagRule, ...]] = ()

    def __post_init__(self) -> None:
        raise_problems(find_field_problems(self))
        section: type = self.__class__
        contradictions = list(find_rule_problems(list_rules(section), self))
        problems = list(self.find_problems())
        try:
            raise_problems(contradictions + problems)
        except InvalidFlagsError as error:
            if not problems:
                error.section = self
            raise

    def find_problems(self) -> Iterator[str]:
        """Yield an error message for each other violated rule between fields."""
        yield from ()


def spell_flag(field: dataclasses.Field[Any]) -> str:
    """Return the spelling of a field's flag that --help shows; for a bool, one that changes its
    default.
    """
    names = field.metadata["flags"]
    if names:
        return str(names[0])
    # A switch is spelled as the change that it makes.
    prefix = "--no-" if field.default is True else "--"
    return prefix + field.name.replace("_", "-")


@functools.cache
def get_field_types(section: type) -> dict[str, Any]:
    """Return the type of each field of a dataclass if it is given: X for `X | None`."""
    field_types = typing.get_type_hints(section)
    for name, hint in field_types.items():
        arms = [arm for arm in _get_arms(hint) if arm is not types.NoneType]
        if len(arms) == 1:
            field_types[name] = arms[0]
    return field_types


def _get_arms(hint: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union; other types are their only alternative."""
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if is_union else (hint,)


def describe_type(hint: Any) -> str:
    """Return a type as an error message names it, e.g. "an integer"."""
    if typing.get_origin(hint) is tuple:
        if typing.get_args(hint)[-1] is Ellipsis:
            return "a tuple"
        return f"{len(typing.get_args(hint))} numbers joined by commas"
    if typing.get_origin(hint) is list:
        return "a list"
    names = {int: "an integer", float: "a number", str: "a string", bool: "a boolean"}
    descriptions = []
    for arm in _get_arms(hint):
        if typing.get_origin(arm) is not None:
            descriptions.append(describe_type(arm))
        elif arm is not types.NoneType:
            descriptions.append(names.get(arm) or f"a {arm.__name__}")
    return " or ".join(descriptions)


def _has_type(value: Any, hint: Any) -> bool:
    """Return whether `value` is an instance of `hint`.

    A field of floats accepts integers, and a list or tuple the other one.
    """
    if typing.get_origin(hint) is list:
        (item_type,) = typing.get_args(hint)
        return isinstance(value, list | tuple) and all(_has_type(item, item_type) for item in value)
    if typing.get_origin(hint) is tuple:
        item_types = typing.get_args(hint)
        if item_types[-1] is Ellipsis and isinstance(value, list | tuple):
            item_types = item_types[:1] * len(value)
        is_sequence = isinstance(value, list | tuple) and len(value) == len(item_types)
        return is_sequence and all(map(_has_type, value, item_types))
    # A bool is an int in Python, but not for a flag.
    if isinstance(value, bool):
        return bool in _get_arms(hint)
    # E.g., --lr 1 or a value from JSON
    if isinstance(value, int) and hint is float:
        return True
    return any(
        _has_type(value, arm) if typing.get_args(arm) else isinstance(value, arm)
        for arm in _get_arms(hint)
    )


def _find_type_problems(name: str, value: Any, hint: Any) -> Iterator[str]:
    if typing.get_origin(hint) is list and isinstance(value, list | tuple):
        for element in value:
            yield from _find_type_problems(name, element, typing.get_args(hint)[0])
    elif not _has_type(value, hint):
        yield f"{name}: {value!r} is not {describe_type(hint)}"


def find_value_problems(
    name: str, value: Any, metadata: Mapping[str, Any], word: str | None = None
) -> Iterator[str]:
    """Yield an error message for each choice and bound in a field's `metadata` that `value`
    violates; each element of a list is checked.

    `name` is the flag, and `word` the value as it was typed.
    """
    if isinstance(value, list | tuple):
        for element in value:
            yield from find_value_problems(name, element, metadata)
        return
    choices = metadata["choices"]
    if choices is not None and value not in choices:
        yield f"{name}: {value!r} is not one of {', '.join(choices)}"
    if isinstance(value, int | float):
        for requirement in _find_violated_bounds(value, metadata):
            yield f"{name} must be {requirement}, got {word or value}"


def _find_violated_bounds(value: float, metadata: Mapping[str, Any]) -> Iterator[str]:
    at_least = metadata["at_least"]
    at_most = metadata["at_most"]
    below = metadata["below"]
    # NaN is neither below nor above a bound, so finiteness is checked for every number.
    if not math.isfinite(value):
        yield "a finite number"
    if metadata["required"] and value < 1:
        yield "given and positive"
    if metadata["positive"] and value <= 0:
        yield "positive"
    if at_least is not None and value < at_least:
        yield f"at least {at_least}"
    if at_most is not None and value > at_most:
        yield f"at most {at_most}"
    if below is not None and value >= below:
        yield f"less than {below}"


def find_field_problems(section: Any) -> Iterator[str]:
    """Yield an error message for each field of a dataclass of flags whose value has the wrong type,
    is not one of the choices, or is out of bounds.
    """
    for field, flag_name, field_type in _list_flags(section.__class__):
        value = getattr(section, field.name)
        if value is None:
            continue  # None means that the value is not given
        problems = []
        if type(value) is not field_type:
            problems = list(_find_type_problems(flag_name, value, field_type))
        if not problems:
            problems = list(find_value_problems(flag_name, value, field.metadata))
        yield from problems


@functools.cache
def _list_flags(section: type) -> list[tuple[dataclasses.Field[Any], str, Any]]:
    """Return the field, the flag and the type of each flag of a dataclass."""
    field_types = get_field_types(section)
    return [
        (field, spell_flag(field), field_types[field.name])
        for field in dataclasses.fields(section)
        if "flags" in field.metadata
    ]


@functools.cache
def list_rules(section: Any) -> tuple[FlagRule, ...]:
    """Return the rules of the flags of a section, including those that read other sections."""
    rules = []
    for field, _, _ in _list_flags(section):
        metadata = field.metadata
        if metadata["divides"]:
            rules.append(FlagRule({}, divides={field.name: metadata["divides"]}))
        if metadata["requires"] or metadata["excludes"]:
            when = {field.name: CHANGED}
            reason = metadata["reason"]
            rules.append(FlagRule(when, metadata["requires"], metadata["excludes"], reason=reason))
    return (*rules, *section.RULES)


def list_shared_rules(sections: Iterable[type]) -> list[FlagRule]:
    """Return the conditions of rules on other sections, which no section checks itself."""
    rules = []
    for section in sections:
        for rule in list_rules(section):
            shared = rule._replace(
                requires=_drop_fields(rule.requires, section),
                excludes=_drop_fields(rule.excludes, section),
                divides={a: b for a, b in rule.divides.items() if not hasattr(section, b)},
            )
            if shared.requires or shared.excludes or shared.divides:
                rules.append(shared)
    return rules


def _drop_fields(conditions: Mapping[str, Any], section: type) -> dict[str, Any]:
    return {name: value for name, value in conditions.items() if not hasattr(section, name)}


def find_rule_problems(rules: Iterable[FlagRule], *sections: Any) -> Iterator[str]:
    """Yield an error message for each violated rule; conditions on other sections are skipped."""
    for rule in rules:
        settings = {}
        for name in rule.names:
            for section in sections:
                if hasattr(section.__class__, name):
                    settings[name] = _Setting(section, name)
                    break
        yield from _check_rule(rule, settings)


class _Setting:
    """Value of a field, or of a property derived from one, and its spelling in messages."""

    def __init__(self, section: Any, name: str) -> None:
        self.value = getattr(section, name)
        # A property that is the meaning of a field is spelled like it; others have no spelling.
        field = _map_properties(section.__class__).get(name)
        self.flag_name = "" if field is None else spell_flag(field)
        self.default = None if field is None else field.default

    @property
    def is_changed(self) -> bool:
        return self.value is not None and self.value != self.default

    def meets(self, expected: Any) -> bool:
        """Return whether the value fulfills a condition of a rule."""
        if expected is CHANGED:
            return self.is_changed
        if isinstance(expected, tuple):
            return self.value in expected
        if isinstance(expected, bool):
            return bool(self.value) is expected
        if isinstance(self.value, list):
            return expected in self.value
        return bool(self.value == expected)

    def spell(self) -> str:
        """Return the flag with its value."""
        if self.value is None or isinstance(self.value, bool):
            return self.flag_name if self.is_changed else f"no {self.flag_name}"
        return f"{self.flag_name} {_format_value(self.value)}"

    def spell_required(self, expected: Any) -> str:
        """Return the flag with the value that a rule requires, and the current value."""
        if expected is CHANGED or isinstance(expected, bool):
            is_given = expected is not (self.default is True)
            return self.flag_name if is_given else f"no {self.flag_name}"
        if isinstance(expected, tuple):
            expected = " or ".join(expected)
        current = "" if self.value is None else f" (now {_format_value(self.value)})"
        return f"{self.flag_name} {expected}{current}"


def _format_value(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(element, str) for element in value):
        return " ".join(value)
    return str(value)


@functools.cache
def _map_properties(section: type) -> dict[str, dataclasses.Field[Any]]:
    """Return the flags of a section by their fields and by the properties that they mean."""
    fields = {field.name: field for field, _, _ in _list_flags(section)}
    meanings = {field.metadata["meaning"]: field for field in fields.values()}
    return meanings | fields


def _check_rule(rule: FlagRule, settings: Mapping[str, _Setting]) -> Iterator[str]:
    """Yield the problems of the conditions on `settings`."""
    conditions = []
    for name, expected in rule.when.items():
        setting = settings.get(name)
        if setting is None or not setting.meets(expected):
            return
        if setting.flag_name:
            conditions.append(setting.spell())
    subject = " with ".join(conditions)
    reason = f": {rule.reason}" if rule.reason else ""

    missing = []
    for name, expected in rule.requires.items():
        if name in settings and not settings[name].meets(expected):
            missing.append(settings[name].spell_required(expected))
    if missing:
        yield f"{subject} requires {' and '.join(missing)}{reason}"

    for name, expected in rule.excludes.items():
        if name in settings and settings[name].meets(expected):
            yield f"{subject} and {settings[name].spell()} are mutually exclusive{reason}"

    for name, multiple in rule.divides.items():
        if name not in settings or multiple not in settings:
            continue
        divisor = settings[name].value
        size = settings[multiple].value
        if divisor is not None and size is not None and (divisor < 1 or size % divisor):
            context = f" with {subject}" if subject else ""
            yield (
                f"{settings[multiple].spell()}{context} is not a multiple of "
                f"{settings[name].spell()}: change one of them"
            )

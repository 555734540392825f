"""A reader for YAML files from untrusted sources: plain data only.

YAML is far more than plain data. Aliases and merge keys let a few hundred bytes expand to
gigabytes, and tags construct objects. `parse_yaml` therefore works on the parser's events, and
refuses every feature that a file written by `yaml.safe_dump` from a configuration does not contain.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

_MAX_DEPTH = 20  # of nested lists and mappings

# Plain (unquoted) scalars as PyYAML writes them; anything else is text.
_CONSTANTS: dict[str, Any] = {
    "": None,
    "~": None,
    "null": None,
    "true": True,
    "yes": True,
    "on": True,
    "false": False,
    "no": False,
    "off": False,
    ".inf": float("inf"),
    "-.inf": float("-inf"),
    ".nan": float("nan"),
}
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,30})")
_FLOAT = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+][0-9]{1,3})?")


class PlainYamlError(ValueError):
    """A text is not valid YAML, or uses a feature of YAML beyond plain data."""


def parse_yaml(text: str) -> Any:
    """Return the value of the only document in `text`; raise PlainYamlError if there is none.

    Lists, mappings with text keys, and scalars without explicit tags are supported. The processor
    time is proportional to the length of `text`, which the caller limits.
    """
    # libyaml needs about 1 us of processor time per byte, the pure Python parser 10 us.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        events = yaml.parse(text, Loader=loader)
        _expect(events, yaml.StreamStartEvent)
        _expect(events, yaml.DocumentStartEvent)
        value = _build(next(events), events, depth=0)
        _expect(events, yaml.DocumentEndEvent)
        _expect(events, yaml.StreamEndEvent)
    except yaml.YAMLError as error:
        raise PlainYamlError(f"invalid YAML: {error}") from error
    return value


def _expect(events: Iterator[yaml.Event], event_type: type[yaml.Event]) -> None:
    """Consume one event; raise PlainYamlError unless it is of this kind."""
    event = next(events)
    if not isinstance(event, event_type):
        raise PlainYamlError("the file must contain exactly one YAML document")


def _build(event: yaml.Event, events: Iterator[yaml.Event], depth: int) -> Any:
    """Return the value that begins with `event`, and consume the rest of its events."""
    line_number = event.start_mark.line + 1
    if depth > _MAX_DEPTH:
        raise PlainYamlError(f"line {line_number}: more than {_MAX_DEPTH} levels of nesting")
    # An alias has the name of its anchor here, too.
    if event.anchor is not None:
        raise PlainYamlError(f"line {line_number}: anchors and aliases are not supported")
    if event.tag is not None:
        raise PlainYamlError(f"line {line_number}: tags are not supported")

    if isinstance(event, yaml.SequenceStartEvent):
        return _build_list(events, depth)
    if isinstance(event, yaml.MappingStartEvent):
        return _build_mapping(events, depth)
    is_quoted = not event.implicit[0]
    if is_quoted:
        return event.value
    return _resolve(event.value)


def _build_list(events: Iterator[yaml.Event], depth: int) -> list[Any]:
    """Return the list whose start event was just consumed."""
    items = []
    while not isinstance(event := next(events), yaml.SequenceEndEvent):
        item = _build(event, events, depth + 1)
        items.append(item)
    return items


def _build_mapping(events: Iterator[yaml.Event], depth: int) -> dict[str, Any]:
    """Return the mapping whose start event was just consumed."""
    entries: dict[str, Any] = {}
    while not isinstance(key_event := next(events), yaml.MappingEndEvent):
        key = _build(key_event, events, depth + 1)
        line_number = key_event.start_mark.line + 1
        if not isinstance(key, str):
            raise PlainYamlError(f"line {line_number}: a key is not text")
        if key == "<<":
            raise PlainYamlError(f"line {line_number}: merge keys are not supported")
        if key in entries:
            raise PlainYamlError(f"line {line_number}: the key {key[:60]!r} is repeated")
        value_event = next(events)
        entries[key] = _build(value_event, events, depth + 1)
    return entries


def _resolve(text: str) -> Any:
    """Return the value of a plain scalar: None, a boolean, a number, or the text itself."""
    # YAML 1.1 knows null, Null and NULL, but not nULL.
    is_known_case = text in (text.lower(), text.upper(), text.capitalize())
    if is_known_case and text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text

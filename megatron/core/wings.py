"""Wings: optional parts of the project, which the core names in tables and imports on demand."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def resolve(entry: str) -> Any:
    """Import the object that an entry "module:name" of a table of wings refers to."""
    module, _, name = entry.partition(":")
    return getattr(import_module(module), name)

"""Lazy imports, so that tools start quickly when they do not need torch.

A module that needs torch only in some functions binds it like this::

    if TYPE_CHECKING:
        import torch
    else:
        torch = lazy_module("torch")
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any


class _LazyModule:
    """Proxy of a module, which it imports on the first access to an attribute."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._module: ModuleType | None = None

    def __getattr__(self, attribute: str) -> Any:
        if self._module is None:
            self._module = importlib.import_module(self._name)
        return getattr(self._module, attribute)


def lazy_module(name: str) -> Any:
    """Return a proxy of the module `name` that imports it on first use."""
    return _LazyModule(name)


def lazy_names(package: str, file: str) -> tuple[Any, list[str]]:
    """Return `__getattr__` and `__all__` of a package whose names are imported on first use.

    The names are those that `file`, the package's `__init__.py`, imports for type checkers in its
    first `if` statement.
    """
    # The file is parsed, because executing the block would import the modules.
    statements = ast.parse(Path(file).read_bytes()).body
    type_checking_block = next(node for node in statements if isinstance(node, ast.If))
    home: dict[str, str] = {}  # name -> module that defines it
    for node in type_checking_block.body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                home[alias.name] = str(node.module)

    def import_name(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home[name]), name)

    return import_name, list(home)

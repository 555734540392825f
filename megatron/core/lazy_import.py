"""Modules that are imported late: what a program can do without torch starts in a tenth of the
time.

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
    def __init__(self, name: str) -> None:
        self._name = name
        self._module: ModuleType | None = None

    def __getattr__(self, attribute: str) -> Any:
        if self._module is None:
            self._module = importlib.import_module(self._name)
        return getattr(self._module, attribute)


def lazy_module(name: str) -> Any:
    """The module `name`, imported when something in it is first asked for."""
    return _LazyModule(name)


def lazy_names(package: str, file: str) -> tuple[Any, list[str]]:
    """`__getattr__` and `__all__` of a package: what its `file` imports for type checkers, in the first `if`."""
    block = next(
        node for node in ast.parse(Path(file).read_bytes()).body if isinstance(node, ast.If)
    )
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    home = {alias.name: str(node.module) for node in imports for alias in node.names}

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home[name]), name)

    return get, list(home)

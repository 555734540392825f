"""Modules that are imported late: what a program can do without torch starts in a tenth of the time.

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_module("torch")
"""

from __future__ import annotations

import importlib
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


def lazy_names(package: str, homes: dict[str, str]) -> tuple[Any, list[str]]:
    """`__getattr__` and `__all__` of a package whose names lie in its modules: `homes` has those of each, by module."""
    home = {name: f"{package}.{module}" for module, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home[name]), name)

    return get, list(home)

"""Files that one process sees late, as with a network file system that remembers missing names."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def late_files(names: Collection[str], looks: int) -> Iterator[Counter[str]]:
    """Hide files and directories from this process for the first `looks` looks at each.

    Yields the number of looks at each name.
    """
    seen: Counter[str] = Counter()

    def hide(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(path, int):
                parts = os.fsdecode(path).split("/")
                for name in names:
                    if name in parts:
                        seen[name] += 1
                        if seen[name] <= looks:
                            raise FileNotFoundError(2, os.strerror(2), path)
            return function(path, *args, **kwargs)

        return call

    with contextlib.ExitStack() as patches:
        for function in ("open", "stat", "lstat", "scandir", "listdir"):
            patches.enter_context(mock.patch.object(os, function, hide(getattr(os, function))))
        yield seen

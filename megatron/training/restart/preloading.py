"""Imports in the monitor what its workers import, so that the next worker inherits it.

A worker imports wings (local checkpoints, the start summary) when its flags request them. Repeated
by each worker, that is a tenth of the time of a restart.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

_PROJECT = "megatron"
# Packages that start no thread and use no device when they are imported: the monitor must not.
_HARMLESS_PACKAGES = {_PROJECT, "torch", "numpy", *sys.stdlib_module_names}


class ModulePipe:
    """Names of modules, from a worker to the monitor that has forked it. Create it there."""

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        self._inherited: set[str] = set()

    def enter_worker(self) -> None:
        """Take the modules that exist now as inherited from the monitor."""
        self._inherited = set(sys.modules)

    def report(self) -> None:
        """Send the names of the modules of the project that this worker has imported.

        None are sent if the worker has also imported other packages, whose effects are unknown.
        """
        imported_names = [name for name in sys.modules if name not in self._inherited]
        self._inherited.update(imported_names)
        packages = {name.partition(".")[0] for name in imported_names}
        if packages <= _HARMLESS_PACKAGES:
            project_names = [name for name in imported_names if name.startswith(f"{_PROJECT}.")]
            # In one piece: the pipe is empty, and a few hundred names fit.
            os.write(self._write_end, "".join(f"{name}\n" for name in project_names).encode())

    def import_reported(self) -> None:
        """Import the reported modules in the monitor."""
        try:
            content = os.read(self._read_end, 1 << 16)
        except BlockingIOError:  # the pipe is empty
            return
        for name in content.decode().splitlines():
            import_module(name)

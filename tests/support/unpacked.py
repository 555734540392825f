"""Golden archives, each unpacked once per session."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from tests import GOLDEN


def unpacked(tmp_path_factory: pytest.TempPathFactory, archive: str) -> Path:
    """Return the single directory in `tests/golden/<archive>.tar.xz`."""
    directory = tmp_path_factory.getbasetemp() / archive
    if not directory.exists():
        with tarfile.open(GOLDEN / f"{archive}.tar.xz") as content:
            content.extractall(directory, filter="data")
    (only,) = directory.iterdir()
    return only

"""Benchmarks are not run by the tests, but they must not use names that are gone."""

import ast
from pathlib import Path

import pytest

from tests import ROOT

BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))


def list_names(path: Path) -> set[str]:
    """Return the names that a module defines or imports at its top level."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
    return names


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_names_of_other_benchmarks_exist(path: Path) -> None:
    siblings = {other.stem: other for other in BENCHMARKS}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module in siblings:
            imported = {alias.name for alias in node.names}
            assert imported <= list_names(siblings[node.module]), node.module

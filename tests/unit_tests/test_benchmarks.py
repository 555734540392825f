"""Benchmarks are not run by the tests, but they must not use names that are gone."""

import ast
from pathlib import Path

import pytest

from tests import ROOT

BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.py"))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def list_names(path: Path) -> set[str]:
    """Return the names that a module defines or imports at its top level."""
    names = set()
    for statement in parse(path).body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                names.add(alias.asname or alias.name)
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                names.add(ast.unparse(target))
    return names


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_names_of_other_benchmarks_exist(path: Path) -> None:
    siblings = {}
    for benchmark in BENCHMARKS:
        siblings[benchmark.stem] = benchmark
    for node in ast.walk(parse(path)):
        if not isinstance(node, ast.ImportFrom) or node.module not in siblings:
            continue
        names = list_names(siblings[node.module])
        for alias in node.names:
            assert alias.name in names, node.module

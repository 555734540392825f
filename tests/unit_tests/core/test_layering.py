"""Layers never import upwards, and packages of one layer do not import each other."""

import ast
import re
from pathlib import Path

import pytest

from tests import ROOT

LAYERS = [
    {
        "megatron.core.parallel_state",
        "megatron.core.apex",
        "megatron.core.arithmetic",
        "megatron.core.flags",
        "megatron.core.progress",
        "megatron.core.durable_files",
        "megatron.core.lazy_import",
        "megatron.core.object_storage",
        "megatron.core.terminal",
    },
    {"megatron.core.dist_checkpointing"},
    {"megatron.core.sharding"},
    {"megatron.core.module"},
    {"megatron.core.tensor_parallel", "megatron.core.pipeline_parallel", "megatron.core.datasets"},
    {"megatron.core.transformer", "megatron.core.distributed"},
    {"megatron.core.models", "megatron.core.optimizer"},
    {"megatron.conversion"},
    {"megatron.training"},
]
LAYER_OF = {package: level for level, packages in enumerate(LAYERS) for package in packages}


def package_of(module: str) -> str | None:
    return next((p for p in LAYER_OF if module == p or module.startswith(p + ".")), None)


def imports_of(path: Path) -> set[str]:
    """Every module named in an import statement, also `from package import module`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_imports_go_down():
    wrong = []
    seen = set()
    for path in sorted((ROOT / "megatron").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        importer = package_of(module)
        if importer is None:
            assert module in ("megatron", "megatron.core"), f"{module} is in no layer"
            continue
        seen.add(importer)
        for name in imports_of(path):
            imported = package_of(name)
            if imported and imported != importer and LAYER_OF[imported] >= LAYER_OF[importer]:
                if LAYER_OF[importer] == 0:  # the leaves of the bottom layer may use each other
                    continue
                wrong.append(f"{module} imports {name}")
    assert not wrong, "\n".join(wrong)
    assert "megatron.core.dist_checkpointing" in seen


# Import floors of a package: a module stands one floor above the highest module of the package that
# it imports when it is imported itself (not in a function, and not for annotations alone).
FLOORS = {"megatron.conversion": 8, "megatron.core.dist_checkpointing": 7, "megatron.training": 10}


def imported_at_once(path: Path) -> set[str]:
    """Every module named in an import statement that runs with the module."""
    names = set()
    statements = list(ast.parse(path.read_text()).body)
    while statements:
        node = statements.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.If) and ast.unparse(node.test) != "TYPE_CHECKING":
            statements += node.body + node.orelse
    return names


@pytest.mark.parametrize("package", FLOORS)
def test_packages_have_few_import_floors(package: str) -> None:
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in (ROOT / package.replace(".", "/")).rglob("*.py")
        if path.name != "__init__.py"
    }
    floors: dict[str, int] = {}

    def floor(module: str) -> int:
        if module not in floors:
            floors[module] = 10**6  # while it is open: a cycle has no floor
            names = {
                name if name in paths else name.rpartition(".")[0]
                for name in imported_at_once(paths[module])
            }
            floors[module] = 1 + max(
                (floor(name) for name in names & paths.keys() - {module}), default=0
            )
        return floors[module]

    highest = max(paths, key=floor)
    assert floors[highest] <= FLOORS[package], f"{highest} stands on floor {floors[highest]}"


def test_dist_checkpointing_knows_no_model_flags_or_topology():
    names = ("dist_checkpointing", "durable_files", "lazy_import", "object_storage", "terminal")
    allowed = {f"megatron.core.{name}" for name in names}
    for path in (ROOT / "megatron/core/dist_checkpointing").rglob("*.py"):
        outside = {n for n in imports_of(path) if n.startswith("megatron")}
        outside = {n for n in outside if package_of(n) not in allowed}
        assert not outside, f"{path.name} imports {outside}"


def test_library_code_does_not_import_scripts():
    for path in (ROOT / "megatron").rglob("*.py"):
        assert not {
            n for n in imports_of(path) if n.split(".")[0] in ("tools", "pretrain_gpt", "tests")
        }, path


def test_the_walks_name_files_that_exist():
    """Each of the walks of docs/architecture.md is at most a dozen files, in their places."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    walks = page.partition("## Three walks")[2].partition("\n## ")[0].split("\n\n**")[1:]
    assert len(walks) == 3
    for walk in walks:
        files = re.findall(r"^\d+\. `([^`]+)`", walk, re.MULTILINE)
        assert 2 <= len(files) <= 12
        for name in files:
            assert (ROOT / name).exists() or (ROOT / "megatron" / name).exists(), name

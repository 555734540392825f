"""Layers never import upwards, packages of one layer do not import each other, no cycles."""

import ast
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests import ROOT

LAYERS = [
    {
        "megatron.core.parallel_state",
        "megatron.core.apex",
        "megatron.core.arithmetic",
        "megatron.core.deferred",
        "megatron.core.flags",
        "megatron.core.fused_kernels",
        "megatron.core.progress",
        "megatron.core.durable_files",
        "megatron.core.encoded_elements",
        "megatron.core.object_files",
        "megatron.core.object_path",
        "megatron.core.object_storage",
        "megatron.core.parallel_config",
        "megatron.core.private_operators",
        "megatron.core.safe_files",
        "megatron.core.terminal",
        "megatron.core.triton_kernels",
        "megatron.core.triton_norms",
        "megatron.core.triton_rotary",
        "megatron.core.wings",
    },
    {"megatron.core.dist_checkpointing", "megatron.core.imports"},
    {"megatron.core.sharding"},
    {"megatron.core.module"},
    {"megatron.core.tensor_parallel", "megatron.core.pipeline_parallel", "megatron.core.datasets"},
    {"megatron.core.transformer", "megatron.core.distributed"},
    {"megatron.core.models", "megatron.core.optimizer"},
    {"megatron.core.run_checkpoint"},
    {"megatron.conversion"},
    {"megatron.training", "megatron.checkpointer"},
    {"megatron.planning", "megatron.transfer"},
    {"megatron.api"},
    {"megatron.commands"},
]
LAYER_OF = {package: level for level, packages in enumerate(LAYERS) for package in packages}


def package_of(module: str) -> str | None:
    return next((p for p in LAYER_OF if module == p or module.startswith(p + ".")), None)


@dataclass(frozen=True)
class SourceFile:
    """Contents of a file of which tests make statements."""

    imports: frozenset[str]
    """Every module named in an import statement, also `from package import module`."""
    type_imports: frozenset[str]
    """The modules that are imported for annotations only."""
    num_nodes: int
    """Nodes of the syntax tree."""


@functools.cache
def read_source(path: Path) -> SourceFile:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    type_imports: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            type_imports |= list_imports(ast.walk(node), path)
    return SourceFile(frozenset(list_imports(nodes, path)), frozenset(type_imports), len(nodes))


def list_imports(nodes: Iterable[ast.AST], path: Path) -> set[str]:
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imports_of(path: Path) -> frozenset[str]:
    return read_source(path).imports


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


def test_private_operators_are_called_in_one_module():
    """Kernels trust the layouts of their arguments, which `private_operators` checks."""
    pattern = re.compile(
        r"torch\.ops\.(?!megatron)|torch\._(foreach|fused|scaled|grouped|flash|cudnn|efficient)_"
    )
    calls = []
    for path in sorted((ROOT / "megatron").rglob("*.py")):
        if path.name != "private_operators.py":
            calls += [f"{path}: {call.group()}" for call in pattern.finditer(path.read_text())]
    assert not calls, "\n".join(calls)


# Packages that the left side does not need, although the layers would permit the imports.
FORBIDDEN = {
    "megatron.training": ["megatron.conversion", "megatron.planning"],
    "megatron.checkpointer": ["megatron.conversion"],
    "megatron.conversion.deepspeed": ["megatron.conversion.editing"],
    "megatron.conversion.huggingface": ["megatron.conversion.editing"],
    "megatron.conversion.megatron_lm": ["megatron.conversion.editing"],
    "megatron.conversion.model_space": ["megatron.conversion.editing"],
    "pretrain_gpt": [
        "megatron.conversion",
        "megatron.planning",
        "megatron.training.adapters",
        "megatron.training.restart",
        "megatron.training.sft",
    ],
}


def test_training_does_not_import_wings():
    """Deferred imports and imports for annotations count; entries of wings are strings."""
    wrong = []
    for path in [*sorted((ROOT / "megatron").rglob("*.py")), ROOT / "pretrain_gpt.py"]:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for importer, wings in FORBIDDEN.items():
            if is_inside(module, importer):
                for name in imports_of(path):
                    if any(is_inside(name, wing) for wing in wings):
                        wrong.append(f"{module} imports {name}")
    assert not wrong, "\n".join(wrong)


def is_inside(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def import_graph() -> dict[str, set[str]]:
    """Return module -> modules of the package that it imports, also lazily or for types only."""
    paths = {}
    for path in (ROOT / "megatron").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        paths[module] = path
    compiled = {
        "megatron.core.datasets.helpers_cpp",
        "megatron.core.dist_checkpointing.format.hashed_copy_cpp",
    }
    modules = paths.keys() | compiled

    def containing_module(name: str) -> str | None:
        while name and name not in modules:
            name = name.rpartition(".")[0]
        return name or None

    graph: dict[str, set[str]] = {module: set() for module in modules}
    for module, path in paths.items():
        imported = {containing_module(name) for name in imports_of(path)}
        graph[module] = {name for name in imported if name is not None and name != module}
    return graph


def find_core() -> set[str]:
    """Return the modules that `python pretrain_gpt.py` imports at its start."""
    paths = {"pretrain_gpt": ROOT / "pretrain_gpt.py"}
    for path in (ROOT / "megatron").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        paths[module] = path
    core: set[str] = set()
    to_visit = ["pretrain_gpt"]
    while to_visit:
        module = to_visit.pop()
        if module in core or module not in paths:
            continue
        core.add(module)
        # An imported name may be that of a module, or of an object in it.
        imported = imports_of(paths[module]) - read_source(paths[module]).type_imports
        for name in {module, *imported}:
            to_visit += [name, *(name[:end] for end, letter in enumerate(name) if letter == ".")]
    return core


def test_core_is_small():
    """Training a dense GPT needs about 150 files; other parts are wings (`core/wings.py`).

    Its content is measured in nodes of the syntax tree, which formatting does not change. A commit
    that raises a limit states the reason.
    """
    core = find_core()
    nodes = 0
    for module in core:
        path = ROOT / f"{module.replace('.', '/')}.py"
        if not path.exists():
            path = ROOT / module.replace(".", "/") / "__init__.py"
        nodes += read_source(path).num_nodes
    assert "megatron.training.training" in core
    assert len(core) <= 150
    assert nodes <= 190_000


def test_files_are_short_and_readable():
    """A file answers one question, and a line has one thought: about 6 nodes of the syntax tree."""
    long = []
    dense = []
    for path in sorted((ROOT / "megatron").rglob("*.py")):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        nodes = read_source(path).num_nodes
        if lines > 600:
            long.append(path.name)
        if lines > 30 and nodes > 7 * lines:
            dense.append(path.name)
    assert long == []
    assert dense == []


def find_cycle(graph: dict[str, set[str]]) -> list[str] | None:
    """Return the modules of one import cycle, or None."""
    finished: set[str] = set()
    path: list[str] = []

    def visit(module: str) -> list[str] | None:
        if module in path:
            return path[path.index(module) :]
        if module in finished:
            return None
        path.append(module)
        for imported in sorted(graph[module]):
            if cycle := visit(imported):
                return cycle
        finished.add(path.pop())
        return None

    for module in sorted(graph):
        if cycle := visit(module):
            return cycle
    return None


def test_find_cycle_sees_cycles():
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None


def test_modules_do_not_import_each_other_in_a_cycle():
    """Lazy imports in functions and imports for annotations count, too."""
    assert find_cycle(import_graph()) is None


def test_dist_checkpointing_is_independent_of_models_flags_and_topology():
    names = (
        "deferred",
        "dist_checkpointing",
        "durable_files",
        "object_files",
        "object_path",
        "object_storage",
        "private_operators",
        "safe_files",
        "terminal",
        "wings",
    )
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


def test_walks_of_the_architecture_page_name_existing_files():
    """Each of the three walks has 2 to 12 files."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    walks = page.partition("## Three walks")[2].partition("\n## ")[0].split("\n\n**")[1:]
    assert len(walks) == 3
    for walk in walks:
        files = re.findall(r"^\d+\. `([^`]+)`", walk, re.MULTILINE)
        assert 2 <= len(files) <= 12
        for name in files:
            assert (ROOT / name).exists() or (ROOT / "megatron" / name).exists(), name

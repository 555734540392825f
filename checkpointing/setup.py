"""Distribution `megatron-checkpoint`: the checkpoint engine under an import name of its own.

The package is generated from megatron/checkpointer, megatron/core/dist_checkpointing and the
modules of megatron/core that these import, with `megatron` and `megatron.core` replaced by
`megatron_checkpoint`.
"""

import ast
import re
import shutil
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "megatron"
NAME = "megatron_checkpoint"
ENGINE = "dist_checkpointing"
LIBRARY = "checkpointer"
WING = re.compile(r"megatron\.[\w.]+:\w+")  # see megatron/core/wings.py
EXTENSION = Path(ENGINE, "format", "hashed_copy.cpp")


def main() -> None:
    if not (SOURCE / "core" / ENGINE).is_dir():
        raise SystemExit(
            f"{SOURCE}/core/{ENGINE} does not exist: install megatron-checkpoint from a checkout "
            "of the whole repository"
        )
    generated = HERE / "build" / "generated"
    shutil.rmtree(generated, ignore_errors=True)
    package = generated / NAME
    for module in find_modules():
        copy_module(module, package)
    shutil.copy(SOURCE / "core" / EXTENSION, package / EXTENSION)
    # The library and the engine are the public part of the package.
    (package / "__init__.py").write_text(
        f'"""Distributed checkpoints for PyTorch programs; see {NAME}.{LIBRARY}."""\n\n'
        f"from {NAME}.{LIBRARY} import *  # noqa: F403\n"
        f"from {NAME}.{ENGINE} import *  # noqa: F403\n",
        encoding="utf-8",
    )
    setup(
        name="megatron-checkpoint",
        version=read_version(),
        description="Distributed checkpoints for PyTorch programs: asynchronous, crash-safe, "
        "resumable at any layout",
        license="Apache-2.0",
        packages=find_packages(str(generated)),
        package_dir={"": str(generated.relative_to(HERE))},
        ext_modules=[
            Pybind11Extension(
                f"{NAME}.{ENGINE}.format.hashed_copy_cpp",
                [str((package / EXTENSION).relative_to(HERE))],
                cxx_std=17,
                extra_compile_args=["-O3"],
                optional=True,  # without a compiler, saves take more processor time
            )
        ],
        cmdclass={"build_ext": build_ext},
        python_requires=">=3.10",
        install_requires=["torch>=2.6", "numpy>=1.26,<3", "xxhash>=4,<5"],
        extras_require={
            "object-storage": ["obstore>=0.8,<0.13"],
            "safetensors": ["safetensors>=0.4.5,<1"],
        },
    )


def read_version() -> str:
    text = (SOURCE / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'__version__ = "(.+)"', text)
    assert match is not None, "megatron/__init__.py must define __version__"
    return match[1]


def find_modules() -> list[str]:
    """Return the library, the engine, and the entries of megatron/core that they import."""
    needed: list[str] = []
    pending = [LIBRARY]
    while pending:
        module = pending.pop()
        if module in needed:
            continue
        needed.append(module)
        for path in list_files(module):
            pending += sorted(find_imports(path))
    return needed


def list_files(module: str) -> list[Path]:
    """Return the Python files of the library, or of a module or package below megatron/core."""
    path = find_root(module) / module
    if path.is_dir():
        return sorted(path.rglob("*.py"))
    return [path.with_suffix(".py")]


def find_root(module: str) -> Path:
    """Return the directory that contains a module or package."""
    return SOURCE if module == LIBRARY else SOURCE / "core"


def find_imports(path: Path) -> set[str]:
    """Return the modules or packages of the distribution that a file imports, also on demand."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and WING.fullmatch(str(node.value)):
            names = [node.value]
        else:
            continue
        for name in names:
            parts = re.split("[.:]", name)
            if parts[:2] == ["megatron", "core"] and len(parts) > 2:
                found.add(parts[2])
            elif parts[:2] == ["megatron", LIBRARY]:
                found.add(LIBRARY)
            elif parts[0] == "megatron":
                raise SystemExit(
                    f"{path} imports {name}, which is not part of megatron.core or "
                    f"megatron.{LIBRARY}"
                )
    return found


def copy_module(module: str, package: Path) -> None:
    """Copy a module into `package`, with the import name replaced."""
    for path in list_files(module):
        target = package / path.relative_to(find_root(module))
        target.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8")
        text = re.sub(r"\bmegatron\.core\b", NAME, text)
        text = re.sub(rf"\bmegatron\.{LIBRARY}\b", f"{NAME}.{LIBRARY}", text)
        target.write_text(text, encoding="utf-8")


main()

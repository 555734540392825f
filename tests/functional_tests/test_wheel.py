"""The wheel has console scripts that run without the source tree."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

SCRIPTS = re.findall(
    r'"(megatron-\w+) = ([\w.]+):(\w+)"', (ROOT / "setup.py").read_text(encoding="utf-8")
)


@pytest.mark.parametrize(("name", "module", "function"), SCRIPTS)
def test_console_script_names_a_function_without_required_arguments(name, module, function):
    path = ROOT / (module.removeprefix("megatron.").replace(".", "/") + ".py")
    functions = {
        node.name: node
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    arguments = functions[function].args
    assert len(arguments.args) == len(arguments.defaults)


def test_every_tool_has_a_console_script():
    tools = {path.stem for path in (ROOT / "tools").rglob("*.py")} - {"__init__"}
    assert tools == {module.split(".")[-1] for _, module, _ in SCRIPTS} - {"pretrain_gpt"}


@pytest.mark.slow
def test_console_scripts_run_from_an_installed_wheel(tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    build = ["--no-deps", "--no-build-isolation", "-w", str(tmp_path / "wheel"), str(ROOT)]
    subprocess.run([*pip, "wheel", *build], check=True)
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    for name, module, _ in SCRIPTS:
        result = subprocess.run(
            [sys.executable, str(site / "bin" / name), "--help"],
            cwd=tmp_path,
            env={"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, f"{name}: {result.stderr}"
        assert "usage" in result.stdout.lower(), name
        installed = site / Path(module.replace(".", "/") + ".py")
        assert installed.exists()

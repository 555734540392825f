"""Programs print text of files via `megatron.core.terminal`, which escapes it."""

import ast
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import ShardedTensor, save
from megatron.core.terminal import escape_control_chars, format_error
from tests import ROOT
from tools.checkpoint.inspect_checkpoint import main as show

PRINTERS = {"terminal.py", "progress.py"}  # progress.py rewrites a line of numbers
SOURCES = [
    path
    for package in ("tools", "megatron")
    for path in sorted((ROOT / package).rglob("*.py"))
    if path.name not in PRINTERS
]
ATTACKS = ("\x1b]0;pwn\x07\x1b[2Jfake", "a\nintact", "\u202eevil", "\x9b2J", "\r DONE")


OUTPUT_NAMES = ("print", "pprint", "write", "exit", "SystemExit")


def name_of(function: ast.expr) -> str:
    """Return the last part of a dotted name."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def find_direct_output(source: str) -> list[int]:
    """Return the lines that print other than via `megatron.core.terminal`."""
    calls = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or name_of(node.func) not in OUTPUT_NAMES:
            continue
        function = ast.unparse(node.func)
        is_print = function in ("print", "pprint") or function.endswith(
            ("stdout.write", "stderr.write", "stdout.buffer.write")
        )
        argument = ast.unparse(node.args[0]) if node.args else ""
        is_raw_exit = (
            function in ("sys.exit", "exit", "SystemExit")
            and "{" in argument
            and "format_error(" not in argument
        )
        if is_print or is_raw_exit:
            calls.append(node.lineno)
    return calls


def test_programs_print_only_via_terminal_module() -> None:
    for path in SOURCES:
        assert find_direct_output(path.read_text()) == [], path


def test_direct_output_is_found() -> None:
    assert find_direct_output("import sys\nprint(x)\nsys.stderr.write(x)\nsys.exit(f'{x}')") == [
        2, 3, 4,
    ]  # fmt: skip
    assert not find_direct_output("print_line(x)\nsys.exit(main())")


@pytest.mark.parametrize("text", ATTACKS)
def test_control_characters_are_escaped(text: str) -> None:
    assert escape_control_chars(text).isprintable()
    assert escape_control_chars("plain text, \u4e2d\u6587") == "plain text, \u4e2d\u6587"
    lines = format_error(ValueError(f"first\n{text}")).split("\n")
    assert all(line.isprintable() for line in lines)
    assert lines[0] == "first"


@pytest.mark.parametrize("text", ATTACKS)
@pytest.mark.parametrize(
    "field", ["iteration", "world_size", "tensor_model_parallel_size", "context_parallel_size"]
)
def test_show_escapes_text_of_common(
    field: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = {"tensor_model_parallel_size": 1, field: text}
    common = {"iteration": text if field == "iteration" else 1, "args": args}
    save({"w": ShardedTensor.replicated("w", torch.zeros(2))}, tmp_path / "c", common=common)
    assert show(["show", str(tmp_path / "c")]) == 0
    lines = capsys.readouterr().out.split("\n")
    assert all(line.isprintable() for line in lines), lines
    assert sum("intact" in line and "'" not in line for line in lines) == 0

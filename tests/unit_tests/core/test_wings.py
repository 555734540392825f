"""Entries "megatron.module:name" of the tables of wings."""

import ast
import re
from importlib.util import find_spec

import pytest

from megatron.core.wings import resolve
from tests import ROOT

ENTRY = re.compile(r"megatron(\.\w+)+:\w+")


def list_entries() -> list[str]:
    """Return every string of the product that is an entry of a wing."""
    entries = set()
    for path in [*(ROOT / "megatron").rglob("*.py"), ROOT / "pretrain_gpt.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                entries |= {node.value} if ENTRY.fullmatch(node.value) else set()
    return sorted(entries)


def test_every_entry_of_the_product_resolves():
    entries = list_entries()
    assert entries
    for entry in entries:
        module, _, name = entry.partition(":")
        if module.startswith("megatron.core.triton_") and find_spec("triton") is None:
            source = ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text()
            assert f"\n{name} = make_operator(" in source, entry
        else:
            assert callable(resolve(entry)), entry


def test_resolve_imports_the_named_object():
    assert resolve("megatron.core.wings:resolve") is resolve


def test_resolve_refuses_an_entry_that_does_not_exist():
    with pytest.raises(ModuleNotFoundError, match=r"megatron\.core\.no_such_module"):
        resolve("megatron.core.no_such_module:name")
    with pytest.raises(AttributeError, match="no_such_name"):
        resolve("megatron.core.wings:no_such_name")

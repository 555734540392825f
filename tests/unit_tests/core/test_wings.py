"""Entries "megatron.module:name" of the tables of wings."""

import ast
import re
from importlib.util import find_spec

import pytest

from megatron.core.transformer.layer_spec import LayerSpec
from megatron.core.wings import resolve
from tests import ROOT

# Prefix of modules that import a package without which the project works -> the package.
OPTIONAL = {
    "megatron.core.triton_": "triton",
    "megatron.core.transformer.transformer_engine.": "transformer_engine",
    "megatron.training.operations.first_scales": "transformer_engine",
    "megatron.training.evaluation.tasks": "lm_eval",
}
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
        required = {p for prefix, p in OPTIONAL.items() if module.startswith(prefix)}
        if all(map(find_spec, required)):
            value = resolve(entry)
            assert callable(value) or isinstance(value, LayerSpec), entry
        else:
            source = ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text()
            assert re.search(rf"\n({name} = (make_operator|LayerSpec)\(|def {name}\()", source), (
                entry
            )


def test_resolve_imports_the_named_object():
    assert resolve("megatron.core.wings:resolve") is resolve


def test_resolve_refuses_an_entry_that_does_not_exist():
    with pytest.raises(ModuleNotFoundError, match=r"megatron\.core\.no_such_module"):
        resolve("megatron.core.no_such_module:name")
    with pytest.raises(AttributeError, match="no_such_name"):
        resolve("megatron.core.wings:no_such_name")

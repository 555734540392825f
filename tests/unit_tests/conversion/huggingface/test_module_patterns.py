"""Patterns of module names, compared with `re`, which PEFT matches them with."""

from __future__ import annotations

import random
import re

import pytest

from megatron.conversion.huggingface.module_patterns import ModulePatterns
from megatron.core.dist_checkpointing import CheckpointError

MODULES = [
    f"base.layers.{layer}.{module}"
    for layer in (0, 1, 11)
    for module in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj", "mlp.experts.10.w1")
]


def match_as_peft(pattern: str, module: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", module) is not None


@pytest.mark.parametrize(
    "pattern",
    [
        "q_proj",
        "mlp.down_proj",
        "^base.layers.1.mlp.down_proj",
        r"^layers\.1\..*",
        r"layers\.(0|11)\..*\.[qv]_proj$",
        "1.mlp.*",
        ".*",
        r"layers\.\d+\.(?:mlp|self_attn)\.\w+_proj",
        r"experts\.[0-9]+\.w\d?",
        "q_proj|v_proj",
        "^layers|.*self_attn.q_proj$|w1",
        "(down|up|)_proj",
        "x?1.mlp.down_proj",
    ],
)
def test_patterns_match_as_in_peft(pattern: str) -> None:
    patterns = ModulePatterns({pattern: 1}, "config")
    for module in MODULES:
        assert (patterns.find(module) is not None) == match_as_peft(pattern, module), module


def test_random_patterns_match_as_in_re() -> None:
    """2,000 patterns over a small alphabet on 20 names each."""
    generator = random.Random(1)
    atoms = ["a", "b", "1", ".", r"\.", r"\d", r"\w", "[ab]", "[0-9a]"]

    def make_sequence() -> str:
        items = []
        for _ in range(generator.randrange(5)):
            items.append(generator.choice(atoms) + generator.choice(["", "", "*", "+", "?"]))
        return "".join(items)

    matches = 0
    for _ in range(2000):
        alternatives = "|".join(make_sequence() for _ in range(generator.randint(1, 3)))
        pattern = generator.choice(["", "^"]) + make_sequence() + f"({alternatives})"
        pattern += generator.choice(["", "$", "|" + make_sequence()])
        patterns = ModulePatterns({pattern: 1}, "config")
        for _ in range(20):
            name = "".join(generator.choices("ab1.", k=generator.randrange(8)))
            expected = match_as_peft(pattern, name)
            matches += expected
            assert (patterns.find(name) is not None) == expected, (pattern, name)
    assert 4000 < matches < 36000  # both outcomes are tested


def test_the_first_matching_pattern_applies() -> None:
    values = {"1.q_proj": 1, "q_proj": 2, ".*1.v_proj": 3, "v_proj": 4, "layers.1.v_proj": 5}
    patterns = ModulePatterns(values, "config")
    expected = {"layers.1.q_proj": 1, "layers.2.q_proj": 2, "layers.1.v_proj": 3, "v_proj": 4}
    assert {name: patterns.find(name) for name in expected} == expected
    assert patterns.find("k_proj") is None


@pytest.mark.parametrize(
    "pattern",
    ["(|.)" * 200 + "x", "(|a|b|l|.)" * 90 + "x", ".*" * 500 + "x", "l?" * 512],
)
def test_patterns_that_are_exponential_in_re_take_linear_time(pattern: str) -> None:
    patterns = ModulePatterns({pattern: 1}, "config")
    assert patterns.find("l" * 1000 + "y") is None


@pytest.mark.parametrize(
    "pattern", ["(a", "a)", "((a))", "(a)*", "a**", "[b-a]", "a{2}", "a\\", "é"]
)
def test_other_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(CheckpointError, match="not supported. Supported are names of modules"):
        ModulePatterns({pattern: 1}, "config")

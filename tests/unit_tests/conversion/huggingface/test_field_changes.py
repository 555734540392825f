"""Fields of config.json, dropped, null or changed one at a time: the import is refused, or computes
what transformers computes from the same directory.
"""

import copy
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatron.conversion.huggingface.family import Family
from megatron.conversion.opening import open_checkpoint
from megatron.conversion.options import ReadOptions
from tests.unit_tests.conversion.huggingface.random_configs import OMITTED, SAMPLERS, Drawn
from tests.unit_tests.conversion.huggingface.test_random_configs import (
    BY_NAME,
    TOKENS,
    choose_attention,
    compute_logits,
    draw_model,
)

MODELS = 2  # per family with --run-slow
SAMPLED_FAMILIES = 6  # in the default suite
SAMPLED_CHANGES = 6  # per family
MAX_ERROR = 1e-4  # of a logit, relative to the largest one
# Fields that select the program, not the model; transformers zeroes the row of a padding token.
FIXED = {"model_type", "architectures", "transformers_version", "pad_token_id"}


def list_changes(value: Any) -> list[Any]:
    """Return other values of the type of a field; a dictionary is changed field by field."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [0, 1, value + 1, 2 * value]
    if isinstance(value, float):
        return [0.0, 2.0 * value, 0.5]
    if isinstance(value, str):
        return ["gelu", "gelu_new", "default"]
    if isinstance(value, list):
        return [value[:1] * len(value), value[::-1]]
    if value is None:
        return [0, 1, 0.5, True]
    return []


def change_fields(fields: Drawn) -> Iterator[tuple[str, Drawn]]:
    """Yield a description and a copy of `fields` for each change of one of them."""
    for name, value in fields.items():
        if name in FIXED:
            continue
        remaining = {other: fields[other] for other in fields if other != name}
        yield f"{name} dropped", remaining
        yield f"{name} = null", remaining | {name: None}
        for other in list_changes(value):
            if other != value or type(other) is not type(value):
                yield f"{name} = {other!r}", remaining | {name: other}
        if isinstance(value, dict):
            for description, nested in change_fields(value):
                yield f"{name}: {description}", remaining | {name: nested}


def add_fields(family: Family, fields: Drawn, rng: random.Random) -> Iterator[tuple[str, Drawn]]:
    """Yield a copy of `fields` for each further field that the family reads."""
    for rule in family.all_rules:
        for name in rule.fields:
            value = SAMPLERS[name](rng, fields) if name in SAMPLERS else OMITTED
            if name not in fields and value is not OMITTED:
                yield f"{name} = {value!r} added", fields | {name: value}


def run_stated_model(directory: Path, fields: Drawn) -> torch.Tensor | None:
    """Return the logits of transformers; None if it refuses the model or cannot run it."""
    try:
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            directory, attn_implementation=choose_attention(fields), output_loading_info=True
        )
        empty = {name for name, parameter in model.named_parameters() if not parameter.numel()}
        if set(report["missing_keys"]) - empty or report["mismatched_keys"]:
            return None  # initialized at random
        with torch.no_grad():
            logits: torch.Tensor = model.eval()(TOKENS).logits
    except Exception:  # it raises errors of many types
        return None
    return logits


def compare_change(family: Family, directory: Path, fields: Drawn) -> tuple[str, float]:
    """Return the outcome of an import with these fields, and the error of its logits."""
    (directory / "config.json").write_text(json.dumps(fields))
    try:
        keep_foreign = family.indexer is not None or bool(family.foreign_mixers)
        source = open_checkpoint(directory, read_options=ReadOptions(keep_foreign=keep_foreign))
        if source.args.get("foreign_mixers"):
            return "carried", 0.0
        logits = compute_logits(source)
    except ValueError:
        return "refused", 0.0
    expected = run_stated_model(directory, fields)
    if expected is None or not expected.isfinite().all():
        return "refused by transformers", 0.0
    error = float((logits - expected).abs().max() / expected.abs().max())
    return ("equal" if error < MAX_ERROR else "different"), error


def check_changes(
    family: Family, rng: random.Random, directory: Path, sample: int | None
) -> Counter:
    """Change the fields of a random model; return the number of changes by outcome."""
    outcome = ""
    while outcome != "equal":  # a model that is neither refused nor carried with foreign layers
        drawn, model, _ = draw_model(family, rng)
        model.save_pretrained(directory)
        fields = json.loads((directory / "config.json").read_text())
        outcome, _ = compare_change(family, directory, fields)
    changes = list(change_fields(fields)) + list(add_fields(family, fields, rng))
    if sample is not None:
        changes = rng.sample(changes, sample)
    outcomes: Counter = Counter()
    differences = []
    for description, changed in changes:
        outcome, error = compare_change(family, directory, copy.deepcopy(changed))
        outcomes[outcome] += 1
        if outcome == "different":
            differences.append(f"{description}: {error:.2g}")
    assert not differences, (family.model_type, differences, drawn)
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(MODELS))
@pytest.mark.parametrize("name", BY_NAME)
def test_every_changed_field_is_read_as_by_transformers(
    name: str, seed: int, tmp_path: Path, record_property: Any
) -> None:
    rng = random.Random(f"{name} {seed}")
    outcomes = check_changes(BY_NAME[name], rng, tmp_path, sample=None)
    assert outcomes["equal"]
    record_property("outcomes", dict(outcomes))


def test_some_changed_fields_are_read_as_by_transformers(tmp_path: Path) -> None:
    rng = random.Random(45)
    outcomes: Counter = Counter()
    for name in rng.sample(sorted(BY_NAME), SAMPLED_FAMILIES):
        outcomes += check_changes(BY_NAME[name], rng, tmp_path / name, SAMPLED_CHANGES)
    assert outcomes["equal"] >= SAMPLED_FAMILIES

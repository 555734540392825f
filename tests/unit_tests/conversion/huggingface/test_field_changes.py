"""Fields of config.json, dropped, null or changed one at a time: the import is refused, or gives
the results of transformers from the same directory.
"""

import contextlib
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedConfig

from megatron.conversion.huggingface.config_fields import HARMLESS
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
MAX_DRAWS = 200
MAX_ERROR = 1e-4  # of a logit, relative to the largest one
# Fields that limit the sequences of a model, or of its import: not below those of the tests.
LENGTHS = {"max_seq_len", "index_topk"}
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
            if name in LENGTHS and isinstance(other, int) and other < TOKENS.shape[1]:
                continue
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


@contextlib.contextmanager
def record_reads() -> Iterator[set[str]]:
    """Collect the names of the attributes that are read of configurations of transformers."""
    names: set[str] = set()
    original = PreTrainedConfig.__getattribute__

    def read(config: PreTrainedConfig, name: str) -> Any:
        aliases = original(config, "attribute_map")
        names.add(aliases.get(name, name))
        return original(config, name)

    PreTrainedConfig.__getattribute__ = read
    try:
        yield names
    finally:
        PreTrainedConfig.__getattribute__ = original


def format_values(values: Drawn, names: set[str]) -> str:
    """Return a text of the values of these names, in which 1, 1.0 and true differ."""
    selected = {name: values[name] for name in names if name in values}
    return json.dumps(selected, sort_keys=True, default=repr)


class ChangedModel:
    """A model in a directory, with the logits of transformers for changes of its config.json.

    Logits are computed once per configuration, and are those of the unchanged model if a change
    affects no attribute that transformers has read to build and to run it.
    """

    def __init__(self, family: Family, directory: Path, drawn: Drawn) -> None:
        self.family = family
        self.directory = directory
        self.drawn = drawn
        self.fields: Drawn = json.loads((directory / "config.json").read_text())
        fields_of_rules = {name for rule in family.all_rules for name in rule.fields}
        self.unread_fields = {*HARMLESS.split(), *family.harmless.split()} - fields_of_rules
        self.logits: dict[str, torch.Tensor | None] = {}
        config = transformers.AutoConfig.from_pretrained(directory)
        with record_reads() as self.read_names:
            self.unchanged_logits = self.run_config(config, self.fields)
        self.unchanged_values = format_values(config.to_dict(), self.read_names)

    def run_config(self, config: PreTrainedConfig, fields: Drawn) -> torch.Tensor | None:
        """Return the logits of transformers; None if it refuses the model or cannot run it."""
        try:
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                self.directory,
                config=config,
                attn_implementation=choose_attention(fields),
                output_loading_info=True,
            )
            empty = {name for name, parameter in model.named_parameters() if not parameter.numel()}
            if set(report["missing_keys"]) - empty or report["mismatched_keys"]:
                return None  # initialized at random
            with torch.no_grad():
                logits: torch.Tensor = model.eval()(TOKENS).logits
        except Exception:  # it raises errors of many types
            return None
        return logits if logits.isfinite().all() else None

    def run_transformers(self, fields: Drawn) -> torch.Tensor | None:
        """Return the logits of transformers with these fields, which config.json contains."""
        try:
            config = transformers.AutoConfig.from_pretrained(self.directory)
            values = config.to_dict()
        except Exception:  # it raises errors of many types
            return None

        attention = choose_attention(fields)
        key = attention + format_values(values, set(values))
        if key not in self.logits:
            is_unchanged = (
                attention == choose_attention(self.fields)
                and format_values(values, self.read_names) == self.unchanged_values
            )
            self.logits[key] = (
                self.unchanged_logits if is_unchanged else self.run_config(config, fields)
            )
        return self.logits[key]

    def is_read(self, fields: Drawn) -> bool:
        """Return whether the import reads a field that has been changed."""
        names = (self.fields.keys() | fields.keys()) - self.unread_fields
        return format_values(fields, names) != format_values(self.fields, names)

    def compare(self, fields: Drawn) -> tuple[str, float]:
        """Return the outcome of an import with these fields, and the error of its logits."""
        (self.directory / "config.json").write_text(json.dumps(fields))
        is_read = self.is_read(fields)
        if not is_read and self.run_transformers(fields) is self.unchanged_logits:
            return "unread", 0.0

        try:
            keep_foreign = self.family.indexer is not None or bool(self.family.foreign_mixers)
            read_options = ReadOptions(keep_foreign=keep_foreign)
            source = open_checkpoint(self.directory, read_options=read_options)
            if source.args.get("foreign_mixers"):
                return "carried", 0.0
            logits = compute_logits(source)
        except ValueError:
            return "refused", 0.0

        expected = self.run_transformers(fields)
        if expected is None:
            return "refused by transformers", 0.0
        error = float((logits - expected).abs().max() / expected.abs().max())
        return ("equal" if error < MAX_ERROR else "different"), error


def draw_changed_model(family: Family, rng: random.Random, directory: Path) -> ChangedModel:
    """Return a random model that is neither refused nor carried with foreign layers."""
    for _ in range(MAX_DRAWS):
        drawn, model, _ = draw_model(family, rng)
        model.save_pretrained(directory)
        changed_model = ChangedModel(family, directory, drawn)
        outcome, error = changed_model.compare(changed_model.fields | {"unread": None})
        assert outcome != "different", (family.model_type, error, drawn)
        if outcome == "equal":
            return changed_model

    raise AssertionError(f"none of {MAX_DRAWS} models of {family.model_type} is imported")


def check_changes(
    family: Family, rng: random.Random, directory: Path, sample: int | None
) -> Counter:
    """Change the fields of a random model; return the number of changes by outcome."""
    model = draw_changed_model(family, rng, directory)
    changes = list(change_fields(model.fields)) + list(add_fields(family, model.fields, rng))
    if sample is not None:
        changes = rng.sample(changes, sample)
    outcomes: Counter = Counter()
    differences = []
    for description, fields in changes:
        outcome, error = model.compare(fields)
        outcomes[outcome] += 1
        if outcome == "different":
            differences.append(f"{description}: {error:.2g}")

    assert not differences, (family.model_type, differences, model.drawn)
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

"""Checkpoints of Megatron-Bridge, whose arguments are in `run_config.yaml`."""

import contextlib
import itertools
import shutil
import time
from pathlib import Path

import pytest
import torch
import yaml

from megatron.conversion.checkpoint_conversion import compare, convert
from megatron.conversion.megatron_lm.plain_yaml import PlainYamlError, parse_yaml
from megatron.conversion.opening import open_checkpoint
from megatron.core.dist_checkpointing import CheckpointError
from tests import ROOT
from tests.support.compare import read_whole

GOLDEN = ROOT / "tests/golden" / "bridge_0.6.2/llama_fp32"
CONFIG = "iter_0000000/run_config.yaml"


def changed(tmp_path: Path, **model: object) -> Path:
    """Return a copy of the golden checkpoint with other settings of its model."""
    root = tmp_path / "bridge"
    shutil.copytree(GOLDEN / "checkpoint", root)
    config = yaml.safe_load((root / CONFIG).read_text())
    config["model"] |= model
    (root / CONFIG).write_text(yaml.safe_dump(config))
    return root


def test_bridge_checkpoint_equals_the_imported_hugging_face_model(tmp_path: Path) -> None:
    source = open_checkpoint(GOLDEN / "checkpoint")
    model = open_checkpoint(GOLDEN / "hf")
    assert source.tensors == model.tensors
    assert source.unused == []
    assert all(
        torch.equal(read_whole(source, key), read_whole(model, key)) for key in model.tensors
    )
    convert(GOLDEN / "checkpoint", tmp_path / "hf", "hf", verify=True)
    assert compare(source, open_checkpoint(tmp_path / "hf")) == len(model.tensors) == 27
    # transformers opens the export, tokenizer included
    assert (tmp_path / "hf/tokenizer.json").read_bytes() == (
        GOLDEN / "hf/tokenizer.json"
    ).read_bytes()


def test_counters_come_from_train_state(tmp_path: Path) -> None:
    root = changed(tmp_path)
    counters = {"step": 7, "consumed_train_samples": 56, "consumed_valid_samples": 8}
    torch.save(
        {name: torch.tensor(value) for name, value in counters.items()},
        root / "iter_0000000/train_state.pt",
    )
    training = open_checkpoint(root).training
    assert training is not None
    assert (
        training.iteration,
        training.consumed_train_samples,
        training.consumed_valid_samples,
    ) == (7, 56, 8)


def test_layer_patterns_are_lists(tmp_path: Path) -> None:
    """Patterns that describe the golden model are accepted, others are refused."""
    windows = {"window_size": [3, 0], "window_attn_skip_freq": [0, 1, 0, 1]}
    source = open_checkpoint(changed(tmp_path, moe_layer_freq=[0, 0, 0, 0], **windows))
    assert source.args["moe_layer_freq"] == [0, 0, 0, 0]
    assert source.args["window_size"] == (3, 0)
    assert source.config.window_attn_skip_freq == [0, 1, 0, 1]  # type: ignore[attr-defined]
    experts = {"num_moe_experts": 4, "moe_ffn_hidden_size": 16, "moe_router_topk": 2}
    with pytest.raises(ValueError, match="lacks decoder.layers.1.*, which its arguments call for"):
        open_checkpoint(changed(tmp_path / "moe", moe_layer_freq=[0, 1, 0, 1], **experts))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "num_moe_experts",
            8,
            r"lacks decoder.layers.0.pre_mlp_layernorm.weight, which its arguments call for",
        ),
        ("fp32_residual_connection", True, "fp32_residual_connection = True"),
        ("gated_linear_unit", False, "its activation is torch.nn.functional.silu"),
        (
            "activation_func",
            {"_target_": "megatron.core.activations.squared_relu"},
            "gated megatron.core.activations",
        ),
        (
            "params_dtype",
            {"_target_": "torch.float8_e4m3fn"},
            "weights of float8_e4m3fn are not supported",
        ),
    ],
)
def test_unsupported_models_are_refused(
    tmp_path: Path, name: str, value: object, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        open_checkpoint(changed(tmp_path, **{name: value}))


# Eight lists of eight lists, nine levels deep: 8**9 texts if expanded.
ALIASES = "a: &a [x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 8)}]\n"
    for before, name in itertools.pairwise("abcdefghi")
)
# Each level doubles the number of entries.
MERGE_KEYS = "a0: &a0 {x: 1}\n" + "".join(
    f"a{level}: &a{level} {{<<: [*a{level - 1}, *a{level - 1}]}}\n" for level in range(1, 27)
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "must contain exactly one YAML document"),
        ("model: {}\n---\nmodel: {}", "must contain exactly one YAML document"),
        ("[1]", "must be a dictionary"),
        ("{}", "model is None, but must be a dictionary"),
        ("model: [1]", "model is .*, but must be a dictionary"),
        ("model: {1: 2}", "a key is not text"),
        ("model: {a: 1, a: 2}", "the key 'a' is repeated"),
        ("\x00", "invalid YAML"),
        ("a: {", "invalid YAML"),
        ("model: " + "[" * 5000, "more than 20 levels of nesting"),
        (ALIASES + "model: *i", "anchors and aliases are not supported"),
        (MERGE_KEYS + "model: *a26", "anchors and aliases are not supported"),
        ("model: {<<: {a: 1}}", "merge keys are not supported"),
        ("model: {a: !!python/object/apply:os.getcwd []}", "tags are not supported"),
        ("model: {a: !!timestamp foo}", "tags are not supported"),
        ("model: {a: !!int ''}", "tags are not supported"),
        ("model: {a: !!float ''}", "tags are not supported"),
        ("model: {a: " + "x" * (256 << 10) + "}", "more than the 262144 that it may have"),
    ],
    ids=lambda value: value[:24],
)
def test_configuration_beyond_plain_data_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    root = changed(tmp_path)
    (root / CONFIG).write_text(text)
    with pytest.raises(CheckpointError, match=rf"run_config\.yaml.*{reason}"):
        open_checkpoint(root)


@pytest.mark.parametrize(
    "text",
    [
        "model: [" + "a," * 131_000 + "]",
        "model: [" + "[]," * 87_000 + "]",
        "model: " + "[" * 262_000,
        "model: " + "1:" * 131_000,
        "? " * 131_000,
    ],
    ids=["list", "lists", "nested", "sexagesimal", "keys"],
)
def test_processor_time_is_proportional_to_the_size(text: str) -> None:
    """At most 1.3 us per byte were measured; 5 us are allowed for a slower machine."""
    began = time.process_time()
    with contextlib.suppress(PlainYamlError):
        parse_yaml(text)
    assert time.process_time() - began < 5e-6 * 262_144


def test_plain_yaml_matches_pyyaml() -> None:
    """Values that `yaml.safe_dump` writes are read back, and the real file as PyYAML reads it."""
    values = [None, True, False, 0, -1, 10**20, 1e-5, 0.1, 1e300, float("inf"), -float("inf")]
    texts = ["", "null", "No", "1", "1.5", "1e5", "0x10", "0o7", "1_000", "1:20", "2001-01-01"]
    texts += ["<<", "=", "~", "- a", "a: b", "#", "*a", "&a", "!a", "\u00e9\n\t\x07", "'\""]
    data = {"values": values, "texts": texts, "empty": [[], {}]}
    assert parse_yaml(yaml.safe_dump(data)) == data
    assert parse_yaml(yaml.safe_dump(data, default_flow_style=True, allow_unicode=True)) == data
    text = (GOLDEN / "checkpoint" / CONFIG).read_text()
    assert parse_yaml(text) == yaml.safe_load(text)

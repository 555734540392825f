"""Checkpoints of Megatron-Bridge: the arguments are found in its configuration, and nothing else is
taken for one.
"""

import contextlib
import itertools
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from megatron.conversion.convert import compare, convert, open_checkpoint
from megatron.conversion.model_space.source import read_whole
from megatron.core.dist_checkpointing import CheckpointError
from tests import ROOT

GOLDEN = ROOT / "tests/golden" / "bridge_0.6.2/llama_fp32"
CONFIG = "iter_0000000/run_config.yaml"


def changed(tmp_path: Path, **model: object) -> Path:
    """The golden checkpoint with other settings of its model."""
    root = tmp_path / "bridge"
    shutil.copytree(GOLDEN / "checkpoint", root)
    config = yaml.safe_load((root / CONFIG).read_text())
    config["model"] |= model
    (root / CONFIG).write_text(yaml.safe_dump(config))
    return root


def test_it_is_the_hugging_face_model_that_bridge_began_with(tmp_path: Path) -> None:
    source = open_checkpoint(GOLDEN / "checkpoint")
    model = open_checkpoint(GOLDEN / "hf")
    assert source.tensors == model.tensors and source.unused == []
    assert all(
        torch.equal(read_whole(source, key), read_whole(model, key)) for key in model.tensors
    )
    convert(GOLDEN / "checkpoint", tmp_path / "hf", "hf", verify=True)
    assert compare(source, open_checkpoint(tmp_path / "hf")) == len(model.tensors) == 27
    # transformers opens the export, tokenizer included
    assert (tmp_path / "hf/tokenizer.json").read_bytes() == (
        GOLDEN / "hf/tokenizer.json"
    ).read_bytes()


def test_counters_are_those_of_the_train_state(tmp_path: Path) -> None:
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


def test_patterns_of_layers_are_lists(tmp_path: Path) -> None:
    """In the configuration they are lists; the patterns that are known to be the golden model are."""
    windows = {"window_size": [3, 0], "window_attn_skip_freq": [0, 1, 0, 1]}
    source = open_checkpoint(changed(tmp_path, moe_layer_freq=[0, 0, 0, 0], **windows))
    assert source.args["moe_layer_freq"] == [0, 0, 0, 0] and source.args["window_size"] == (3, 0)
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
def test_other_models_are_refused_by_name(
    tmp_path: Path, name: str, value: object, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        open_checkpoint(changed(tmp_path, **{name: value}))


@pytest.mark.parametrize(
    "text", ["", "model: [1]", "model: {a: !!python/object/apply:os.getcwd []}", "\x00", "a: {"]
)
def test_a_damaged_configuration_is_named(tmp_path: Path, text: str) -> None:
    root = changed(tmp_path)
    (root / CONFIG).write_text(text)
    with pytest.raises(
        CheckpointError, match="run_config.yaml is not the configuration of a model"
    ):
        open_checkpoint(root)


BOMB = "a: &a [x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 8)}]\n"
    for before, name in itertools.pairwise("abcdefghi")
)


@pytest.mark.parametrize(
    "line", ["use_mup: *i", "activation_func: *i", "transformer_layer_spec: *i", "window_size: *i"]
)
def test_aliases_of_aliases_are_not_unfolded(tmp_path: Path, line: str) -> None:
    """Eight to the ninth texts, were they."""
    root = changed(tmp_path)
    config = yaml.safe_load((root / CONFIG).read_text())
    del config["model"][line.partition(":")[0]]
    text = yaml.safe_dump(config, default_flow_style=False).replace(
        "model:\n", f"model:\n  {line}\n", 1
    )
    (root / CONFIG).write_text(BOMB + text)
    with contextlib.suppress(ValueError):
        assert len(str(open_checkpoint(root).args)) < 10**5


@pytest.mark.parametrize(
    "text", ["model: {1: 2}", "model: " + "[" * 5000, "model: {a: " + "x" * (4 << 20) + "}"]
)
def test_a_configuration_beyond_reason_is_named(tmp_path: Path, text: str) -> None:
    root = changed(tmp_path)
    (root / CONFIG).write_text(text)
    with pytest.raises(CheckpointError, match="run_config.yaml"):
        open_checkpoint(root)

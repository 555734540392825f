"""Random models of every family: transformers and this project compute the same logits, both ways.

Every import is compared with transformers, and every export is loaded and run by transformers.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megatron.conversion.huggingface.config_process import config_class
from megatron.conversion.huggingface.directory_writer import write_huggingface
from megatron.conversion.huggingface.families import FAMILIES
from megatron.conversion.huggingface.family import Family
from megatron.conversion.model_space.model import model_config
from megatron.conversion.opening import open_checkpoint
from megatron.conversion.options import ReadOptions
from megatron.core.models import GPTModel
from megatron.core.run_checkpoint.source import Source
from tests.support.compare import read_whole
from tests.support.memory_source import random_source
from tests.unit_tests.conversion.huggingface.random_configs import (
    draw_config,
    undeclared_fields,
)

DRAWS = 1  # accepted models per family in the default suite
MANY_DRAWS = 10  # with --run-slow
TOKENS = torch.randint(0, 67, (1, 20), generator=torch.Generator().manual_seed(5))
# Families of which we can run models; others are in test_foreign_mixers.py.
MIXED = ("granitemoehybrid", "lfm2")
BY_NAME = {}
for each in FAMILIES:
    if not each.foreign_mixers or each.model_type in MIXED:
        BY_NAME[each.model_type] = each

# transformers loads this one only as a part of Mistral3ForConditionalGeneration.
transformers.AutoModelForCausalLM.register(
    transformers.Mistral4Config,
    transformers.Mistral4ForCausalLM,
    exist_ok=True,
)
# Changes to a model of ours, of which many have no counterpart in transformers.
MUTATIONS: tuple[dict[str, Any], ...] = (
    {"window_size": (3, 0), "window_attn_skip_freq": None},
    {"window_size": (3, 0), "window_attn_skip_freq": 2},
    {"window_size": (3, 0), "window_attn_skip_freq": 1},
    {"window_size": None, "window_attn_skip_freq": None},
    {"kv_channels": 16},
    {"rotary_percent": 0.5},
    {"rotary_percent": 0.5, "rotary_seq_len_interpolation_factor": 2.0},
    {"rotary_percent": 0.5, "rope_type": "yarn", "rotary_scaling_factor": 4.0},
    {"rope_type": "rope", "use_rope_scaling": False, "rotary_seq_len_interpolation_factor": None},
    {"rope_type": "yarn", "rotary_scaling_factor": 4.0, "original_max_position_embeddings": 8},
    {"rotary_base": 500.0},
    {"qk_layernorm": True},
    {"norm_epsilon": 1e-4},
    {"add_bias_linear": True},
    {"add_bias_linear": False, "add_qkv_bias": True},
    {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    {"moe_router_topk": 1},
    {"moe_layer_freq": 2},
    {"untie_embeddings_and_output_weights": True},
    {"attn_logit_softcapping": 0.7, "attention_dropout": 0.0},
    {"softmax_scale": 0.3},
)


def load_model(source: Source) -> GPTModel:
    vocab_size = source.tensors["embedding.word_embeddings.weight"].shape[0]
    config = model_config(source.args, vocab_size, source.description)
    model = GPTModel(config, make_vocab_size_divisible_by=1)
    with torch.no_grad():
        for key, entry in model.sharded_state_dict().items():
            entry.local.copy_(read_whole(source, key))
    return model.eval()


def compute_logits(source: Source) -> torch.Tensor:
    with torch.no_grad():
        return load_model(source)(TOKENS, torch.arange(TOKENS.shape[1])[None])


def choose_attention(fields: dict[str, Any]) -> str:
    """Return the attention of transformers that computes what config.json describes.

    Eager attention of Falcon adds ALiBi twice, and SDPA leaves softcaps out in some releases.
    """
    return "sdpa" if fields.get("alibi") else "eager"


def run_transformers(directory: Path) -> torch.Tensor:
    """Load a directory with transformers; every tensor must be in its files."""
    fields = json.loads((directory / "config.json").read_text())
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        directory,
        attn_implementation=choose_attention(fields),
        output_loading_info=True,
    )
    # DeepSeek without shared experts has matrices of shape [0, h] for them.
    empty = {name for name, parameter in model.named_parameters() if not parameter.numel()}

    assert set(report["missing_keys"]) <= empty, report
    assert not report["unexpected_keys"], report

    with torch.no_grad():
        return model.eval()(TOKENS).logits


def load_tensors(directory: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(directory / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if tensor.numel()}


def draw_model(family: Family, rng: random.Random) -> tuple[dict, Any, torch.Tensor]:
    """Return a config.json, the model that transformers makes of it, and its logits.

    Configurations that transformers itself refuses, or cannot run, are drawn again.
    """
    for _ in range(100):
        drawn = draw_config(family, rng)
        torch.manual_seed(rng.randrange(10**6))

        try:
            config = config_class(family.model_type)(**drawn)
            model = transformers.AutoModelForCausalLM.from_config(
                config,
                attn_implementation=choose_attention(drawn),
            ).eval()
            with torch.no_grad():
                for parameter in model.parameters():  # norms and biases, too
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
                for name, parameter in model.named_parameters():
                    if name.endswith("embed_positions.weight"):
                        parameter[:2] = 0.0  # before the first position
                for name, buffer in model.named_buffers():
                    if name.endswith("e_score_correction_bias"):
                        buffer.add_(torch.randn_like(buffer), alpha=0.1)
                logits = model(TOKENS).logits
        except Exception:  # noqa: S112 (transformers raises errors of many types)
            continue

        if logits.isfinite().all():
            return drawn, model, logits

    raise AssertionError(f"transformers runs none of 100 configurations of {family.model_type}")


def assert_logits_equal(found: torch.Tensor, wanted: torch.Tensor, drawn: object) -> None:
    torch.testing.assert_close(
        found,
        wanted,
        rtol=1e-4,
        atol=5e-5,
        msg=lambda text: f"{text}\n{drawn}",
    )


def assert_refusal_names_a_field(error: ValueError, drawn: dict[str, Any]) -> None:
    """A refused import names the field of config.json that is not supported."""
    assert "config.json" in str(error), (error, drawn)
    nested = {name for value in drawn.values() if isinstance(value, dict) for name in value}
    aliases = config_class(drawn["model_type"]).attribute_map
    declared = {aliases[name] for name in drawn if name in aliases}
    names = drawn.keys() | declared | nested | {"rope", "dtype"}
    assert any(name in str(error) for name in names), (error, drawn)


@pytest.mark.parametrize("name", BY_NAME)
def test_every_declared_field_is_drawn(name: str) -> None:
    assert not undeclared_fields(BY_NAME[name])


@pytest.mark.parametrize("draws", [DRAWS, pytest.param(MANY_DRAWS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", BY_NAME)
def test_random_models_compute_the_same(name: str, draws: int, tmp_path: Path) -> None:
    rng = random.Random(f"{name} {draws}")
    accepted = 0
    for index in range(30 + 10 * draws):
        if accepted == draws:
            break
        drawn, model, expected = draw_model(BY_NAME[name], rng)
        directory = tmp_path / str(index)
        model.save_pretrained(directory)
        if rng.random() < 0.7:  # as drawn, not as transformers spells it out
            (directory / "config.json").write_text(json.dumps(drawn))

        try:
            keep_foreign = BY_NAME[name].indexer is not None or bool(BY_NAME[name].foreign_mixers)
            source = open_checkpoint(directory, read_options=ReadOptions(keep_foreign=keep_foreign))
        except ValueError as error:
            assert_refusal_names_a_field(error, drawn)
            continue

        accepted += 1
        is_runnable = not source.args.get("foreign_mixers")
        if is_runnable:
            assert_logits_equal(compute_logits(source), expected, drawn)

        write_huggingface(source, tmp_path / f"{index}-back")
        assert_logits_equal(run_transformers(tmp_path / f"{index}-back"), expected, drawn)

        before = load_tensors(directory)
        after = load_tensors(tmp_path / f"{index}-back")
        assert before.keys() == after.keys(), (before.keys() ^ after.keys(), drawn)
        assert all(torch.equal(before[key], after[key]) for key in before), drawn

        if is_runnable:
            check_mutated_export(source, rng, tmp_path / f"{index}-changed")

    assert accepted == draws


def check_mutated_export(source: Source, rng: random.Random, directory: Path) -> None:
    """Export a changed model: it is refused with a reason, or transformers computes the same."""
    change = rng.choice(MUTATIONS)
    args = {**source.args, **change}
    rows = source.tensors["embedding.word_embeddings.weight"].shape[0]
    try:
        changed = random_source(args, rows, optimizer=False, seed=rng.randrange(10**6))
    except ValueError:  # no model of ours
        return

    try:
        write_huggingface(changed, directory)
    except ValueError as error:
        assert "none of the supported models" in str(error) or "not zero" in str(error), error
        return

    actual = run_transformers(directory)
    assert_logits_equal(actual, compute_logits(changed), (source.args["hf_model_type"], change))

"""Fields of config.json whose meaning in transformers is easy to get wrong, one test each."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.huggingface.config_fields import ConfigFields, transformers_defaults
from megatron.conversion.huggingface.config_process import config_class
from megatron.conversion.huggingface.directory_writer import write_huggingface
from megatron.conversion.huggingface.families import FAMILIES, find_family
from megatron.conversion.huggingface.latent_families import DEEPSEEK_V3
from megatron.conversion.model_space.model import model_config
from megatron.conversion.opening import open_checkpoint
from megatron.training.config.checkpoint_args import merge_stored_args
from megatron.training.config.parsing import parse_args
from megatron.training.config.stored_args import normalize_stored_args
from tests.support.memory_source import GPT_ARGS, LLAMA_ARGS, random_source
from tests.unit_tests.conversion.huggingface.test_random_configs import (
    TOKENS,
    assert_logits_equal,
    compute_logits,
    run_transformers,
)

SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
EXPERTS = SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
WINDOW = {"use_sliding_window": True, "sliding_window": 4}
DEEPSEEK = SIZES | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}
YARN = {"rope_type": "yarn", "rotary_scaling_factor": 4.0, "original_max_position_embeddings": 8}
MOE_ARGS = LLAMA_ARGS | {
    "num_layers": 4,
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 12,
    "qk_layernorm": True,
    "moe_router_pre_softmax": True,
    "add_bias_linear": False,
}
OLMOE_ARGS = MOE_ARGS | {"qk_layernorm_across_heads": True, "num_query_groups": 4}


def save_model(directory: Path, model_type: str, drop: tuple[str, ...] = (), **fields: Any) -> Any:
    """Save a random model of transformers; return its logits. config.json is as stated here."""
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(model_type, **fields)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(directory)
    stated = {"model_type": model_type} | fields
    stated = {name: value for name, value in stated.items() if name not in drop}
    (directory / "config.json").write_text(json.dumps(stated))
    return run_transformers(directory)


def read_config(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def assert_same_both_ways(directory: Path, expected: torch.Tensor) -> None:
    """Compare the logits of an import, and those of transformers after an export."""
    source = open_checkpoint(directory)
    assert_logits_equal(compute_logits(source), expected, read_config(directory))
    back = directory.with_name("back")
    write_huggingface(source, back)
    assert_logits_equal(run_transformers(back), expected, read_config(back))


@pytest.mark.parametrize("layer_types", [None, ["full_attention", "sliding_attention"] * 2])
def test_qwen3_moe_windows_are_in_every_layer(layer_types: Any, tmp_path: Path) -> None:
    fields = EXPERTS | WINDOW | {"head_dim": 8}
    if layer_types is not None:
        fields |= {"layer_types": layer_types}
    expected = save_model(tmp_path / "in", "qwen3_moe", **fields)
    assert_same_both_ways(tmp_path / "in", expected)


def test_qwen3_moe_has_no_windows_in_some_layers(tmp_path: Path) -> None:
    args = MOE_ARGS | {"window_size": (3, 0), "window_attn_skip_freq": 2}
    source = random_source(args | {"hf_model_type": "qwen3_moe"}, optimizer=False)
    write_huggingface(source, tmp_path / "out")
    assert read_config(tmp_path / "out")["model_type"] == "mellum"


@pytest.mark.parametrize("limit", [0, 2, 4])
def test_qwen2_moe_windows_are_in_every_second_of_the_first_layers(
    limit: int, tmp_path: Path
) -> None:
    fields = EXPERTS | WINDOW | {"shared_expert_intermediate_size": 12, "max_window_layers": limit}
    expected = save_model(tmp_path / "in", "qwen2_moe", **fields)
    assert_same_both_ways(tmp_path / "in", expected)
    assert "layer_types" in read_config(tmp_path / "back")


@pytest.mark.parametrize("pattern", [[1, 1, 1, 1], [0, 0, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]])
def test_qwen2_moe_export_keeps_windows(pattern: list[int], tmp_path: Path) -> None:
    args = MOE_ARGS | {
        "qk_layernorm": False,
        "add_qkv_bias": True,
        "moe_shared_expert_intermediate_size": 12,
        "moe_shared_expert_gate": True,
        "window_size": (3, 0),
        "window_attn_skip_freq": pattern,
    }
    source = random_source(args, optimizer=False)
    write_huggingface(source, tmp_path / "out")

    assert read_config(tmp_path / "out")["model_type"] == "qwen2_moe"
    assert_logits_equal(run_transformers(tmp_path / "out"), compute_logits(source), pattern)


@pytest.mark.parametrize("normalized", [True, False])
def test_deepseek_v3_with_one_expert_per_token(normalized: bool, tmp_path: Path) -> None:
    """Its weight is 1 with norm_topk_prob, and the sigmoid without."""
    fields = DEEPSEEK | {"num_experts_per_tok": 1, "norm_topk_prob": normalized}
    expected = save_model(tmp_path / "in", "deepseek_v3", **fields)
    assert_same_both_ways(tmp_path / "in", expected)
    assert read_config(tmp_path / "back")["norm_topk_prob"] == normalized


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_one_normalized_expert_per_token(model_type: str, tmp_path: Path) -> None:
    count = "num_experts" if model_type == "qwen3_moe" else "num_local_experts"
    fields = SIZES | {count: 4, "num_experts_per_tok": 1}
    if model_type == "qwen3_moe":
        fields |= {"moe_intermediate_size": 12, "norm_topk_prob": True}
    expected = save_model(tmp_path / "in", model_type, **fields)
    assert_same_both_ways(tmp_path / "in", expected)
    assert read_config(tmp_path / "back")["model_type"] == model_type


@pytest.mark.parametrize("interleaved", [False, None])
def test_deepseek_v3_rotates_halves_without_rope_interleave(
    interleaved: bool | None, tmp_path: Path
) -> None:
    fields = DEEPSEEK | {"rope_interleave": interleaved}
    expected = save_model(tmp_path / "in", "deepseek_v3", **fields)
    assert_same_both_ways(tmp_path / "in", expected)
    assert read_config(tmp_path / "back")["rope_interleave"] is False


# Fields whose defaults fit other sizes only.
NECESSARY: dict[str, dict[str, Any]] = {
    "helium": {"head_dim": 8},
    "opt": {"ffn_dim": 24},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "bamba": {"mamba_n_heads": 4},
    "lfm2_moe": {"layer_types": ["conv"] * 4},
    "granitemoehybrid": {"layer_types": ["attention"] * 4, "mamba_n_heads": 4},
}


@pytest.mark.parametrize("name", [family.model_type for family in FAMILIES])
def test_missing_fields_have_the_defaults_of_transformers(name: str) -> None:
    """A config.json with sizes alone means the same as one that transformers has spelled out."""
    family = find_family({"model_type": name})
    known = {field for rule in family.all_rules for field in rule.fields}
    sizes = EXPERTS | {"num_key_value_heads": 4}
    sizes = {field: value for field, value in sizes.items() if field in known}
    stated = sizes | NECESSARY.get(name, {}) | {"model_type": name}
    spelled_out = config_class(name)(**stated).to_dict()
    spelled_out = {k: v for k, v in spelled_out.items() if v is not None}
    actual = family.read_config(stated, {})
    expected = family.read_config(spelled_out, {})
    assert model_config(actual, 67, name) == model_config(expected | {"bf16": False}, 67, name)


_YARN_WITHOUT_BASE = {
    "rope_type": "yarn",
    "rope_theta": 1.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
}


@pytest.mark.parametrize(
    ("model_type", "fields", "message"),
    [
        ("phi3", {"sliding_window": 0}, "sliding_window = 0 is not supported, only null, or 1"),
        ("ministral3", {"sliding_window": 0}, "sliding_window = 0 is not supported"),
        ("qwen3_moe", {"sliding_window": 0, "use_sliding_window": True}, "sliding_window = 0"),
        ("aria_text", {"hidden_act": "gelu_new"}, "hidden_act = 'gelu_new' is not supported"),
        ("dots1", {}, "config.json has no 'num_experts_per_tok': give --moe-router-topk"),
        ("gptj", {"n_embd": 1, "rotary_dim": 2}, "hidden_size = 1 is not supported, only num_atte"),
        ("llama", {"rope_scaling": _YARN_WITHOUT_BASE}, "rope_theta = 1.0 is not supported, only"),
    ],
)
def test_values_that_select_another_computation_are_refused(
    model_type: str, fields: dict[str, Any], message: str
) -> None:
    sizes = SIZES if model_type != "gptj" else {"vocab_size": 67, "n_layer": 1, "n_head": 4}
    hf = sizes | fields | {"model_type": model_type}
    with pytest.raises(ValueError, match=re.escape(message)):
        find_family(hf).read_config(hf, {})


def test_no_group_of_experts_is_refused() -> None:
    hf = DEEPSEEK | {"model_type": "deepseek_v3", "n_group": 1, "topk_group": 0}
    with pytest.raises(ValueError, match="topk_group = 0 is not supported, only 1 or more is"):
        find_family(hf).read_config(hf, {})
    find_family(hf).read_config(hf | {"topk_group": 1}, {})


CONFLICTS: dict[str, tuple[str, dict[str, Any]]] = {
    "topk": ("hunyuan_v1_moe", {"moe_topk": 3, "num_experts_per_tok": 2}),
    "topk by layer": ("hunyuan_v1_moe", {"moe_topk": [3] * 4, "num_experts_per_tok": 2}),
    "experts": ("mixtral", {"num_local_experts": 4, "num_experts": 8}),
    "kinds": (
        "granitemoehybrid",
        {"layer_types": ["attention"] * 2, "layers_block_type": ["attention", "mamba"]},
    ),
    "prediction": ("glm4_moe", {"num_nextn_predict_layers": 1, "num_mtp_layers": 2}),
    "width": ("lfm2", {"block_ff_dim": 48, "intermediate_size": 24}),
    "head": ("lfm2", {"tie_embedding": True, "tie_word_embeddings": False}),
}


@pytest.mark.parametrize("case", CONFLICTS)
def test_different_values_of_two_names_are_refused(case: str) -> None:
    model_type, conflict = CONFLICTS[case]
    family = find_family({"model_type": model_type})
    known = {field for rule in family.all_rules for field in rule.fields}
    sizes = {field: value for field, value in EXPERTS.items() if field in known}
    hf = sizes | {"model_type": model_type} | NECESSARY.get(model_type, {}) | conflict
    listed = " and ".join(f"{name} = {value!r}" for name, value in conflict.items())
    if case == "topk by layer":
        listed = "moe_topk = 3 and num_experts_per_tok = 2"
    message = re.escape(f"config.json has {listed}, which are names of one value")

    with pytest.raises(ValueError, match=message):
        family.read_config(hf, {})

    # Equal values, and null for one of them, are accepted.
    (first, value), (second, _) = conflict.items()
    for other in (value, None):
        family.read_config(hf | {second: other if case != "topk by layer" else other and 3}, {})


@pytest.mark.parametrize("dropped", ["rope_theta", "rms_norm_eps"])
def test_mixtral_defaults(dropped: str, tmp_path: Path) -> None:
    default = {"rope_theta": 1e6, "rms_norm_eps": 1e-5}[dropped]
    fields = SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, dropped: default}
    expected = save_model(tmp_path / "in", "mixtral", drop=(dropped,), **fields)
    assert_same_both_ways(tmp_path / "in", expected)


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "youtu"])
def test_width_of_rotated_parts_of_latent_attention(model_type: str) -> None:
    """transformers takes the rotary frequencies of `head_dim`, for any `qk_rope_head_dim`."""
    hf = DEEPSEEK | {"model_type": model_type}
    if model_type == "youtu":
        hf = {"model_type": model_type, "qk_rope_head_dim": 8} | SIZES | {"num_key_value_heads": 4}
    find_family(hf).read_config(hf | {"head_dim": hf["qk_rope_head_dim"]}, {})
    with pytest.raises(ValueError, match="head_dim = 12 is not supported, only qk_rope_head_dim ="):
        find_family(hf).read_config(hf | {"head_dim": 12}, {})


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("gpt_neox", {"rotary_pct": 0.0}),
        ("phi", {"partial_rotary_factor": 0}),
        ("glm", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.0}}),
    ],
)
def test_rope_of_no_element_is_refused(model_type: str, fields: dict[str, Any]) -> None:
    """transformers does not rotate at all then, and 0 is not a missing value."""
    hf = SIZES | {"model_type": model_type, "num_key_value_heads": 4} | fields
    if model_type == "gpt_neox":
        del hf["num_key_value_heads"]
    with pytest.raises(ValueError, match="only a positive fraction of a head is"):
        find_family(hf).read_config(hf, {})


@pytest.mark.parametrize(("model_type", "name"), [("gptj", "n_head"), ("mpt", "n_heads")])
def test_different_names_of_a_size_must_agree(model_type: str, name: str) -> None:
    """transformers takes the one that it sets last."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 67, "rotary_dim": 4}
    hf = sizes | {"model_type": model_type, "num_attention_heads": 4, name: 4}
    if model_type != "gptj":
        del hf["rotary_dim"]

    assert find_family(hf).read_config(hf, {})["num_attention_heads"] == 4
    with pytest.raises(ValueError, match=f"{name} = 2 and num_attention_heads = 4, which"):
        find_family(hf).read_config(hf | {name: 2}, {})


@pytest.mark.parametrize("stated", [4, None])
def test_original_length_of_longrope_is_that_of_the_model(stated: int | None) -> None:
    """transformers takes it, or its default of 4096, instead of the one in the rope."""
    factors = [1.0, 2.0, 3.0, 4.0]
    scaling = {"type": "longrope", "short_factor": factors, "long_factor": factors}
    hf = SIZES | {"model_type": "phi3", "original_max_position_embeddings": stated}
    nested = {"original_max_position_embeddings": 8}
    message = f"= 8 is not supported, only that of the model, {stated or 4096}, is"

    with pytest.raises(ValueError, match=message):
        find_family(hf).read_config(hf | {"rope_scaling": scaling | nested}, {})


def test_null_is_false_in_deepseek_v3() -> None:
    hf = DEEPSEEK | {"model_type": "deepseek_v3"}
    family = find_family(hf)
    assert not family.read_config(hf | {"norm_topk_prob": None}, {})["moe_router_normalize_sigmoid"]
    assert not family.read_config(hf | {"rope_interleave": None}, {})["latent_rotary_interleaved"]


def test_type_of_a_scaling_of_gemma3_is_refused() -> None:
    """transformers 5 ignores the name `type` here, transformers 4 does not."""
    scaling = {"type": "linear", "factor": 8.0}
    hf = SIZES | {"model_type": "gemma3_text", "rope_scaling": scaling}
    with pytest.raises(ValueError, match="rope_scaling has type 'linear'.*rename it"):
        find_family(hf).read_config(hf, {})
    hf["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    assert find_family(hf).read_config(hf, {})["rotary_seq_len_interpolation_factor"] == 8.0


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "gpt_oss"])
def test_models_without_windows_run_after_export(model_type: str, tmp_path: Path) -> None:
    fields = SIZES | {"layer_types": ["full_attention"] * 4, "head_dim": 8}
    if model_type == "gpt_oss":
        fields |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    expected = save_model(tmp_path / "in", model_type, **fields)
    assert_same_both_ways(tmp_path / "in", expected)


def test_gpt_oss_without_scaling(tmp_path: Path) -> None:
    fields = SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    expected = save_model(tmp_path / "in", "gpt_oss", **fields, rope_parameters=rope)
    assert_same_both_ways(tmp_path / "in", expected)
    assert read_config(tmp_path / "back")["rope_scaling"] == {"rope_type": "default"}


@pytest.mark.parametrize(
    "scaling",
    [YARN, {"rotary_seq_len_interpolation_factor": 2.0}, {"use_rope_scaling": True}],
    ids=["yarn", "linear", "llama3"],
)
def test_partly_rotated_scaled_rope_has_no_family(scaling: dict, tmp_path: Path) -> None:
    args = LLAMA_ARGS | scaling | {"rotary_percent": 0.5}
    with pytest.raises(ValueError, match="none of the supported models"):
        write_huggingface(random_source(args, optimizer=False), tmp_path / "out")
    unscaled = LLAMA_ARGS | {"rotary_percent": 0.5}
    write_huggingface(random_source(unscaled, optimizer=False), tmp_path / "out")
    assert read_config(tmp_path / "out")["model_type"] == "phi3"


def test_olmoe_has_no_width_of_heads_of_its_own(tmp_path: Path) -> None:
    wide = random_source(OLMOE_ARGS | {"kv_channels": 16}, optimizer=False)
    with pytest.raises(ValueError, match="none of the supported models"):
        write_huggingface(wide, tmp_path / "out")

    source = random_source(OLMOE_ARGS, optimizer=False)
    write_huggingface(source, tmp_path / "out")
    assert_logits_equal(run_transformers(tmp_path / "out"), compute_logits(source), "olmoe")

    hf = read_config(tmp_path / "out") | {"head_dim": 16}
    with pytest.raises(ValueError, match="head_dim = 16 is not supported, only hidden_size /"):
        find_family(hf).read_config(hf, {})


@pytest.mark.parametrize("skip", [1, [0, 0]])
def test_windows_in_no_layer_are_exported_as_none(skip: Any, tmp_path: Path) -> None:
    args = LLAMA_ARGS | {"window_size": (3, 0), "window_attn_skip_freq": skip}
    source = random_source(args, optimizer=False)
    write_huggingface(source, tmp_path / "out")
    assert read_config(tmp_path / "out")["model_type"] == "llama"
    assert_logits_equal(run_transformers(tmp_path / "out"), compute_logits(source), skip)


def test_deepseek_v3_export_has_no_prediction_layers(tmp_path: Path) -> None:
    save_model(tmp_path / "in", "deepseek_v3", **DEEPSEEK)
    write_huggingface(open_checkpoint(tmp_path / "in"), tmp_path / "out")
    assert read_config(tmp_path / "out")["num_nextn_predict_layers"] == 0
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").num_mtp_layers == 0


def test_kimi_k2_is_read_as_deepseek_v3() -> None:
    hf = DEEPSEEK | {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    assert find_family(hf) is DEEPSEEK_V3


def test_dropouts_of_gpt2_are_repeated(tmp_path: Path) -> None:
    write_huggingface(random_source(GPT_ARGS, optimizer=False), tmp_path / "in")
    hf = read_config(tmp_path / "in") | {"embd_pdrop": 0.3, "resid_pdrop": 0.2}
    (tmp_path / "in" / "config.json").write_text(json.dumps(hf))
    convert(tmp_path / "in", tmp_path / "run", "torch_dist")
    convert(tmp_path / "run", tmp_path / "out", "hf")
    actual = read_config(tmp_path / "out")
    assert (actual["embd_pdrop"], actual["resid_pdrop"]) == (0.3, 0.2)

    source = open_checkpoint(tmp_path / "run")
    source.args["hidden_dropout"] = 0.0  # a later run: the fields no longer describe it
    write_huggingface(source, tmp_path / "later")
    actual = read_config(tmp_path / "later")
    assert (actual["embd_pdrop"], actual["resid_pdrop"]) == (0.0, 0.0)


@pytest.mark.parametrize(("attention", "mlp"), [(True, False), (False, True), (True, True)])
def test_one_kind_of_bias_comes_back_alone(attention: bool, mlp: bool, tmp_path: Path) -> None:
    switches = {"attention_bias": attention, "mlp_bias": mlp}
    expected = save_model(tmp_path / "in", "llama", **SIZES, **switches)
    convert(tmp_path / "in", tmp_path / "run", "torch_dist")
    convert(tmp_path / "run", tmp_path / "out", "hf")
    assert {name: read_config(tmp_path / "out")[name] for name in switches} == switches

    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    assert before.keys() == after.keys()
    assert_logits_equal(run_transformers(tmp_path / "out"), expected, switches)


def test_biases_that_were_trained_are_exported(tmp_path: Path) -> None:
    """Imported without biases in the MLP, trained with them."""
    save_model(tmp_path / "in", "llama", **SIZES, attention_bias=True, mlp_bias=False)
    imported = open_checkpoint(tmp_path / "in")
    trained = random_source(imported.args, optimizer=False)
    write_huggingface(trained, tmp_path / "out")
    assert read_config(tmp_path / "out")["mlp_bias"]
    assert_logits_equal(run_transformers(tmp_path / "out"), compute_logits(trained), "trained")


def test_rope_fields_that_are_not_supported_are_named() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    hf = SIZES | {"model_type": "llama", "rope_scaling": scaling | {"mscale": 0.7}}
    with pytest.raises(ValueError, match="mscale = 0.7 and mscale_all_dim = None"):
        find_family(hf).read_config(hf, {})

    factors = {"low_freq_factor": 2.0, "high_freq_factor": 2.0}
    hf["rope_scaling"] = scaling | {"rope_type": "llama3"} | factors
    with pytest.raises(ValueError, match="high_freq_factor = 2.0 is not supported, only more than"):
        find_family(hf).read_config(hf, {})
    with pytest.raises(ValueError, match="num_attention_heads = 0 is not supported"):
        find_family(hf).read_config(hf | {"num_attention_heads": 0}, {})


def test_truncate_is_refused_where_transformers_does_not_read_it() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "truncate": False}
    scaling["original_max_position_embeddings"] = 8
    hf = SIZES | {"rope_scaling": scaling}
    assert find_family(hf | {"model_type": "gemma2"}).read_config(hf, {})["rope_type"] == "yarn"
    with pytest.raises(ValueError, match="rope_scaling.truncate = False is not supported"):
        find_family(hf | {"model_type": "gemma3_text"}).read_config(hf, {})


@pytest.mark.parametrize("model_type", ["gemma2", "gpt_oss"])
def test_pattern_of_windows_that_transformers_does_not_read_is_refused(model_type: str) -> None:
    hf = SIZES | {"model_type": model_type, "sliding_window_pattern": 3, "num_experts_per_tok": 2}
    hf |= {} if model_type == "gpt_oss" else {"num_experts_per_tok": None}
    with pytest.raises(ValueError, match="sliding_window_pattern = 3 is not supported, only 2 is"):
        find_family(hf).read_config(hf, {})


# Fields that only training reads -> another value than any default, and the argument.
TRAINING_FIELDS = {
    "attention_dropout": (0.25, "attention_dropout"),
    "attn_pdrop": (0.25, "attention_dropout"),
    "attention_probs_dropout_prob": (0.25, "attention_dropout"),
    "dropout": (0.35, "hidden_dropout"),
    "hidden_dropout": (0.35, "hidden_dropout"),
    "hidden_dropout_prob": (0.35, "hidden_dropout"),
    "resid_dropout": (0.35, "hidden_dropout"),
    "resid_pdrop": (0.35, "hidden_dropout"),
    "residual_dropout": (0.35, "hidden_dropout"),
    "init_std": (0.45, "init_method_std"),
    "initializer_range": (0.45, "init_method_std"),
    "router_aux_loss_coef": (0.55, "moe_aux_loss_coeff"),
}


@pytest.mark.parametrize("name", [family.model_type for family in FAMILIES])
def test_training_fields_of_every_family_reach_a_run(name: str) -> None:
    """Every field of transformers' class is read; without a field its default is not ours."""
    family = next(family for family in FAMILIES if family.model_type == name)
    defaults = transformers_defaults(name)
    aliases = config_class(name).attribute_map
    for field, (value, argument) in TRAINING_FIELDS.items():
        if field not in defaults or field in family.harmless.split():
            continue
        rules = [
            rule for rule in family.all_rules if {field, aliases.get(field)} & set(rule.fields)
        ]
        assert rules, field

        for fields in ({field: value}, {}):
            config_fields = ConfigFields(fields, defaults)
            args: dict[str, Any] = {}
            for rule in rules:
                args |= rule.read(config_fields, args)
            merged, notes = merge_stored_args({}, args)
            expected = fields.get(field, defaults[field])
            assert merged.get(argument) in (expected, [expected])
            assert not notes


def test_training_fields_without_counterpart_are_reported(tmp_path: Path) -> None:
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 32, "vocab_size": 67}
    tokens = {"bos_token_id": 1, "eos_token_id": 2}
    save_model(tmp_path / "gpt2", "gpt2", **sizes, **tokens, resid_pdrop=0.2, embd_pdrop=0.4)
    assert "config.json: embd_pdrop = 0.4" in open_checkpoint(tmp_path / "gpt2").unused
    save_model(tmp_path / "equal", "gpt2", **sizes, **tokens, resid_pdrop=0.2, embd_pdrop=0.2)
    assert open_checkpoint(tmp_path / "equal").unused == []


def test_run_with_sinks_takes_its_dropout_from_config_json(tmp_path: Path) -> None:
    """Attention with sinks needs --attention-dropout 0, which config.json states."""
    fields = SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    save_model(tmp_path / "model", "gpt_oss", **fields)
    args = normalize_stored_args(open_checkpoint(tmp_path / "model").args)
    argv = "--use-checkpoint-args --mock-data --tokenizer-type NullTokenizer --seq-length 8"
    argv += f" --load {tmp_path / 'model'} --finetune --micro-batch-size 1 --train-iters 1 --lr 1"
    model = parse_args(argv.split(), 1, args).model
    assert (model.attention_dropout, model.hidden_dropout) == (0.0, 0.0)


def edit_tensors(directory: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("model_type", "head", "embedding"),
    [
        ("llama", "lm_head.weight", "model.embed_tokens.weight"),
        ("gpt_neox", "embed_out.weight", "gpt_neox.embed_in.weight"),
        ("biogpt", "output_projection.weight", "biogpt.embed_tokens.weight"),
    ],
)
def test_tied_head_in_the_files(model_type: str, head: str, embedding: str, tmp_path: Path) -> None:
    """A head that differs from its embedding is refused, and a head alone is the embedding."""
    sizes = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    expected = save_model(tmp_path / "in", model_type, **sizes, tie_word_embeddings=True)

    def keep_head_alone(tensors: dict[str, torch.Tensor]) -> None:
        tensors[head] = tensors.pop(embedding)

    edit_tensors(tmp_path / "in", keep_head_alone)
    assert_same_both_ways(tmp_path / "in", expected)

    def add_embedding(tensors: dict[str, torch.Tensor]) -> None:
        tensors[embedding] = tensors[head] + 1

    edit_tensors(tmp_path / "in", add_embedding)
    with pytest.raises(ValueError, match=f"ties the head to the embedding, but {head} differs"):
        open_checkpoint(tmp_path / "in")


@pytest.mark.parametrize("model_type", ["llama", "seed_oss", "iquestcoder"])
@pytest.mark.parametrize("switches", [(True, False), (False, True)])
def test_biases_that_are_switched_off_are_ignored(
    model_type: str, switches: tuple[bool, bool], tmp_path: Path
) -> None:
    fields = SIZES | {"head_dim": 8, "attention_out_bias": True}
    if model_type != "seed_oss":
        del fields["attention_out_bias"]
    on = {"attention_bias": True, "mlp_bias": True}
    save_model(tmp_path / "in", model_type, **fields, **on)
    off = dict(zip(on, switches, strict=True))
    stated = read_config(tmp_path / "in") | off
    (tmp_path / "in/config.json").write_text(json.dumps(stated))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "in")
    with torch.no_grad():
        expected = model(TOKENS).logits
    source = open_checkpoint(tmp_path / "in")

    assert_logits_equal(compute_logits(source), expected, off)
    assert any(name.endswith("bias") for name in source.unused)

    write_huggingface(source, tmp_path / "back")
    assert_logits_equal(run_transformers(tmp_path / "back"), expected, off)


YARN_FIELDS = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_scaling": YARN_FIELDS | {"attention_factor": 1.25}},
        {"rope_scaling": YARN_FIELDS | {"attention_factor": 1.0}},
        {"rope_scaling": YARN_FIELDS | {"truncate": None, "beta_fast": 3.0, "beta_slow": 0.4}},
        {"rope_scaling": YARN_FIELDS | {"beta_fast": 0, "beta_slow": 0}},
        {
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1.5},
            "original_max_position_embeddings": 8,
        },
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
            "original_max_position_embeddings": 16,
        },
    ],
    ids=["attention_factor", "factor_1", "null", "zero", "yarn_length", "llama3_length"],
)
def test_scaled_ropes_as_transformers_reads_them(fields: dict[str, Any], tmp_path: Path) -> None:
    assert_same_both_ways(tmp_path / "in", save_model(tmp_path / "in", "llama", **SIZES | fields))


@pytest.mark.parametrize("value", [0.9, 1.3])
def test_attention_factors_without_a_counterpart_are_refused(value: float) -> None:
    scaling = YARN_FIELDS | {"attention_factor": value}
    if value > 1.0:
        scaling |= {"mscale": 1.0, "mscale_all_dim": 0.5}
    hf = SIZES | {"model_type": "llama", "rope_scaling": scaling}
    with pytest.raises(ValueError, match=f"attention_factor = {value} is not supported"):
        find_family(hf).read_config(hf, {})


def test_ministral3_without_rope_theta(tmp_path: Path) -> None:
    """The default is the class's, not the base among its default parameters."""
    rope = YARN_FIELDS | {"llama_4_scaling_beta": 0.2, "max_position_embeddings": 32}
    expected = save_model(tmp_path / "in", "ministral3", **SIZES, rope_parameters=rope)
    assert_same_both_ways(tmp_path / "in", expected)


def test_falcon_with_null_for_parallel_attention(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    fields = sizes | {"vocab_size": 67, "ffn_hidden_size": 40, "parallel_attn": None}
    expected = save_model(tmp_path / "in", "falcon", **fields, bos_token_id=1, eos_token_id=2)
    assert_same_both_ways(tmp_path / "in", expected)


REFUSED_ZEROS = {
    "hy_v3": {"num_shared_experts": 0},
    "deepseek_v3": {"routed_scaling_factor": 0.0},
    "afmoe": {"route_scale": 0.0},
    "bloom": {"slow_but_exact": True, "pretraining_tp": 2},
}


@pytest.mark.parametrize("name", REFUSED_ZEROS)
def test_values_that_transformers_computes_differently_are_refused(name: str) -> None:
    family = next(family for family in FAMILIES if family.model_type == name)
    fields = REFUSED_ZEROS[name]
    config_fields = ConfigFields(fields, transformers_defaults(name))
    rules = [rule for rule in family.all_rules if fields.keys() & rule.fields.keys()]

    with pytest.raises(ValueError, match=f"{next(iter(fields))}"):
        family.check_fields(fields)
        for rule in rules:
            rule.read(config_fields, {"moe_ffn_hidden_size": 12})


def test_opt_without_parts_of_projections_is_read() -> None:
    family = next(family for family in FAMILIES if family.model_type == "opt")
    fields = ConfigFields({"slow_but_exact": True}, transformers_defaults("opt"))
    (rule,) = (rule for rule in family.all_rules if "slow_but_exact" in rule.fields)
    assert rule.read(fields, {}) == {}


def test_cwm_is_exported_as_cwm(tmp_path: Path) -> None:
    fields = SIZES | {"head_dim": 8, "sliding_window": 8}
    expected = save_model(tmp_path / "in", "cwm", **fields, drop=("bos_token_id", "pad_token_id"))
    assert_same_both_ways(tmp_path / "in", expected)
    assert read_config(tmp_path / "back")["model_type"] == "cwm"


@pytest.mark.parametrize("name", ["gelu_new", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_gate_with_the_tanh_approximation(model_type: str, name: str, tmp_path: Path) -> None:
    fields = (SIZES if model_type == "llama" else EXPERTS) | {"hidden_act": name, "head_dim": 8}
    assert_same_both_ways(tmp_path / "in", save_model(tmp_path / "in", model_type, **fields))
    assert read_config(tmp_path / "back")["hidden_act"] == name


def test_mixers_of_another_number_of_layers_are_refused() -> None:
    family = next(family for family in FAMILIES if family.model_type == "lfm2")
    args = {"num_layers": 3, "foreign_mixers": ["short convolution", ""]}
    with pytest.raises(ValueError, match="lists 2 layers, but num_hidden_layers is 3"):
        family.find_foreign_mixers((), args)


def test_solar_open_as_transformers_saves_it(tmp_path: Path) -> None:
    """Without a width of dense layers, of which it has none."""
    fields = {name: value for name, value in DEEPSEEK.items() if not name.startswith(("q", "kv_"))}
    fields |= {"first_k_dense_replace": 0, "head_dim": 8}
    del fields["intermediate_size"], fields["v_head_dim"]
    expected = save_model(tmp_path / "in", "solar_open", **fields)
    assert_same_both_ways(tmp_path / "in", expected)


def test_cohere2_moe_as_transformers_saves_it(tmp_path: Path) -> None:
    """Return the default base of the model, and the one that it reads from rope_parameters."""
    rope = {"rope_type": "default", "rope_theta": 500.0}
    fields = SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1}
    fields |= {"head_dim": 8, "rope_theta": 10000.0, "rope_parameters": rope, "rms_norm_eps": None}
    fields |= {"sliding_window": 8, "logit_scale": 0.5}
    assert_same_both_ways(tmp_path / "in", save_model(tmp_path / "in", "cohere2_moe", **fields))


def assert_same_through_a_checkpoint(directory: Path, expected: torch.Tensor) -> None:
    """Compare logits both ways, and those of transformers after torch_dist; the tensors too."""
    assert_same_both_ways(directory, expected)

    convert(directory, directory.with_name("run"), "torch_dist")
    out = directory.with_name("out")
    convert(directory.with_name("run"), out, "hf")
    assert_logits_equal(run_transformers(out), expected, read_config(out))

    tensors = load_file(out / "model.safetensors")
    for name, tensor in load_file(directory / "model.safetensors").items():
        assert torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "cohere", "use_qk_norm": True},
        {"model_type": "stablelm", "qk_layernorm": True, "use_parallel_residual": True},
        {"model_type": "stablelm", "qk_layernorm": True, "use_qkv_bias": True},
    ],
)
def test_norms_with_weights_of_each_head(fields: dict[str, Any], tmp_path: Path) -> None:
    """Command R+ and StableLM 2 12B."""
    directory = tmp_path / "in"
    assert_same_through_a_checkpoint(directory, save_model(directory, **SIZES, **fields))


NORTH_MINI = SIZES | {
    "model_type": "cohere2_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_shared_experts": 0,
    "first_k_dense_replace": 1,
    "prefix_dense_intermediate_size": 40,
    "expert_selection_fn": "sigmoid",
    "sliding_window": 4,
}
PLAIN_SCORES = {
    "cohere2_moe": NORTH_MINI,
    "deepseek_v3": DEEPSEEK | {"model_type": "deepseek_v3", "routed_scaling_factor": 1.5},
    "glm4_moe": SIZES
    | {
        "model_type": "glm4_moe",
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
}


@pytest.mark.parametrize("name", PLAIN_SCORES)
def test_sigmoid_scores_without_normalization(name: str, tmp_path: Path) -> None:
    """Cohere's North Mini."""
    fields = PLAIN_SCORES[name] | {"norm_topk_prob": False}
    expected = save_model(tmp_path / "in", **fields)
    assert_same_through_a_checkpoint(tmp_path / "in", expected)
    assert read_config(tmp_path / "out")["norm_topk_prob"] is False


@pytest.mark.parametrize("value", [1.0, 1.3])
def test_attention_factor_of_longrope(value: float, tmp_path: Path) -> None:
    scaling = {"type": "longrope", "attention_factor": value}
    scaling |= {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}
    fields = SIZES | {"rope_scaling": scaling, "original_max_position_embeddings": 8}
    expected = save_model(tmp_path / "in", "phi3", **fields)
    assert_same_through_a_checkpoint(tmp_path / "in", expected)


def test_original_length_of_ministral3_is_that_of_the_model(tmp_path: Path) -> None:
    rope = YARN_FIELDS | {"llama_4_scaling_beta": 0.2, "rope_theta": 1e4}
    del rope["original_max_position_embeddings"]
    fields = SIZES | {"original_max_position_embeddings": 4, "rope_parameters": rope}
    expected = save_model(tmp_path / "in", "ministral3", **fields)
    assert_same_through_a_checkpoint(tmp_path / "in", expected)


@pytest.mark.parametrize("model_type", ["olmoe", "flex_olmo", "olmo2"])
def test_biases_of_attention_alone(model_type: str, tmp_path: Path) -> None:
    fields = SIZES | {"attention_bias": True}
    if model_type != "olmo2":
        fields |= {"num_experts": 4, "num_experts_per_tok": 2}
    expected = save_model(tmp_path / "in", model_type, **fields)
    assert_same_through_a_checkpoint(tmp_path / "in", expected)

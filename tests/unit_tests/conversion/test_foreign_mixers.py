"""Models with layers that the trainer cannot run: gated delta nets, state spaces, convolutions.

Random models of transformers return from every format and layout with equal tensors, config.json
and logits.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.model_space.foreign import describe_foreign_mixers
from megatron.conversion.opening import open_checkpoint
from megatron.conversion.options import ReadOptions, WriteOptions
from tests import ROOT
from tests.support.programs import run_program
from tests.unit_tests.conversion.convert_tool import run_convert, run_merge
from tools.checkpoint import inspect_checkpoint

KEEP = ReadOptions(keep_foreign=True)
TOKENS = torch.randint(0, 64, (1, 20), generator=torch.Generator().manual_seed(5))
DRAWS = 1  # models per family in the default suite
MANY_DRAWS = 12  # with --run-slow


def draw_sizes(rng: random.Random) -> dict[str, Any]:
    return {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": rng.choice([24, 48]),
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": rng.choice([2, 4]),
        "tie_word_embeddings": rng.choice([False, True]),
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": rng.choice([2, [2, 3]]),
        "use_cache": rng.choice([False, True]),
    }


def draw_delta_net(rng: random.Random) -> dict[str, Any]:
    full, linear = "full_attention", "linear_attention"
    kinds = rng.choice([[linear, linear, linear, full], [full, linear, full, linear]])
    return draw_sizes(rng) | {
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": rng.choice([2, 4]),
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": rng.choice([2, 4]),
        "layer_types": kinds,
    }


def draw_delta_net_experts(rng: random.Random) -> dict[str, Any]:
    return draw_delta_net(rng) | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 16,
    }


def draw_next(rng: random.Random) -> dict[str, Any]:
    fields = draw_delta_net_experts(rng) | {"mlp_only_layers": rng.choice([[], [1]])}
    return fields | {"norm_topk_prob": rng.choice([False, True])}


def draw_state_spaces(rng: random.Random) -> dict[str, Any]:
    return draw_sizes(rng) | {
        "layer_types": rng.choice([["mamba", "attention"] * 2, ["mamba"] * 4]),
        "shared_intermediate_size": 24,
        "num_local_experts": rng.choice([0, 4]),
        "num_experts_per_tok": 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.7,
        "position_embedding_type": rng.choice(["rope", None]),
    }


def draw_convolutions(rng: random.Random) -> dict[str, Any]:
    return draw_sizes(rng) | {
        "layer_types": rng.choice([["conv", "full_attention"] * 2, ["conv"] * 3 + ["conv"]]),
        "block_auto_adjust_ff_dim": rng.choice([False, True]),
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": rng.choice([0.7, 1.0]),
        "conv_bias": rng.choice([False, True]),
    }


def draw_convolution_experts(rng: random.Random) -> dict[str, Any]:
    return draw_sizes(rng) | {
        "layer_types": rng.choice([["conv", "full_attention"] * 2, ["conv"] * 4]),
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "num_dense_layers": rng.choice([0, 1, 3]),
        "use_expert_bias": rng.choice([False, True]),
        "routed_scaling_factor": rng.choice([1.0, 2.5]),
    }


def draw_bamba(rng: random.Random) -> dict[str, Any]:
    return draw_sizes(rng) | {
        "attn_layer_indices": rng.choice([[], [2], [0, 3]]),
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
    }


def draw_jamba(rng: random.Random) -> dict[str, Any]:
    return draw_sizes(rng) | {
        "attn_layer_period": rng.choice([2, 4]),
        "attn_layer_offset": 1,
        "num_experts": rng.choice([1, 4]),
        "num_experts_per_tok": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": rng.choice([0, 1]),
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    }


FAMILIES: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "qwen3_next": draw_next,
    "qwen3_5_text": draw_delta_net,
    "qwen3_5_moe_text": draw_delta_net_experts,
    "granitemoehybrid": draw_state_spaces,
    "lfm2": draw_convolutions,
    "lfm2_moe": draw_convolution_experts,
    "bamba": draw_bamba,
    "jamba": draw_jamba,
}


def save_model(model_type: str, directory: Path, seed: int = 0, **changed: Any) -> Path:
    """Save a random model of transformers. All of its parameters have random values."""
    rng = random.Random(f"{model_type} {seed}")
    fields = FAMILIES[model_type](rng) | changed
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(model_type, **fields)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(directory)
    return directory


def compute_logits(directory: Path) -> torch.Tensor:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        directory,
        output_loading_info=True,
    )
    assert not report["missing_keys"], report
    assert not report["unexpected_keys"], report

    with torch.no_grad():
        return model.eval()(TOKENS, use_cache=False).logits


def read_config(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def assert_same_files(found: Path, wanted: Path) -> None:
    """All tensors are equal bitwise, and all fields of config.json."""
    before = load_file(wanted / "model.safetensors")
    after = load_file(found / "model.safetensors")

    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        assert torch.equal(after[name], tensor), name
    assert read_config(found) == read_config(wanted)


def follow_chain(source: Path, folder: Path, *formats: str, **layout: int) -> Path:
    for index, saver in enumerate(formats):
        options = WriteOptions(**layout) if saver == "legacy" else WriteOptions()
        target = folder / f"{index}-{saver}"
        report = convert(source, target, saver, read_options=KEEP, options=options, verify=True)
        assert not [line for line in report.not_carried if "unused" in line]
        source = target
    return source


@pytest.mark.parametrize("draws", [DRAWS, pytest.param(MANY_DRAWS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_models_return_from_every_layout(model_type: str, draws: int, tmp_path: Path) -> None:
    rng = random.Random(f"{model_type} {draws}")
    for seed in range(draws):
        model = save_model(model_type, tmp_path / f"{seed}", seed)
        config = read_config(model)
        layout = {"tensor_parallel": 2, "pipeline_parallel": rng.choice([2, 4])}
        formats = ["torch_dist", "legacy"]
        if "num_experts" in config or config.get("num_local_experts"):
            layout["expert_parallel"] = rng.choice([1, 2, 4])
        elif model_type != "granitemoehybrid":  # multipliers have no form in universal
            formats.append("universal")
        rng.shuffle(formats)
        result = follow_chain(model, tmp_path / f"{seed}-chain", *formats, "hf", **layout)
        assert_same_files(result, model)
        assert torch.equal(compute_logits(result), compute_logits(model))


@pytest.mark.parametrize("saver", ["hf", "torch_dist", "legacy"])
def test_layers_are_refused_by_number_without_the_flag(saver: str, tmp_path: Path) -> None:
    model = save_model("lfm2", tmp_path / "model", layer_types=["conv", "full_attention"] * 2)
    kept = follow_chain(model, tmp_path / "kept", saver)
    message = "short convolution in layers 0, 2, which the trainer does not have.* --keep-foreign"

    with pytest.raises(ValueError, match=message):
        open_checkpoint(kept)

    source = open_checkpoint(kept, read_options=KEEP)
    assert "decoder.layers.1.self_attention.linear_qkv.weight" in source.tensors
    assert "foreign.model.layers.2.conv.conv.weight" in source.tensors
    assert "decoder.layers.2.input_layernorm.weight" in source.tensors


def test_both_kinds_are_named(tmp_path: Path) -> None:
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    model = save_model("qwen3_next", tmp_path / "model", layer_types=kinds)
    message = (
        "gated delta net in layers 0-2 and attention with a gate of its output in layers 3, which"
    )
    with pytest.raises(ValueError, match=message):
        open_checkpoint(model)


def test_training_is_refused(tmp_path: Path) -> None:
    model = save_model("lfm2", tmp_path / "model")
    kept = follow_chain(model, tmp_path / "kept", "torch_dist")
    words = "--use-checkpoint-args --finetune --micro-batch-size 1 --global-batch-size 1 --lr 1e-3"
    words += " --train-iters 1 --seq-length 8 --mock-data --tokenizer-type NullTokenizer"
    done = run_program(ROOT / "pretrain_gpt.py", "--load", kept, *words.split())
    assert done.returncode != 0
    assert "which the trainer does not have: this model cannot be trained here" in done.stderr


def test_all_fields_return_and_changed_ones_follow(tmp_path: Path) -> None:
    """Fields that no rule knows are kept; those of the dtype and the vocabulary follow edits."""
    model = save_model("qwen3_next", tmp_path / "model")
    config = read_config(model) | {"dtype": "float32", "new_field": {"a": [1, None]}}
    (model / "config.json").write_text(json.dumps(config))
    kept = follow_chain(model, tmp_path / "kept", "legacy", "hf")
    assert read_config(kept) == config

    edits = ("--dtype", "bf16", "--target-vocab-size", 70, "--keep-foreign", "--saver", "hf")
    done = run_convert("--load-dir", kept, "--save-dir", tmp_path / "edited", *edits)
    assert done.returncode == 0, done.stderr

    edited = read_config(tmp_path / "edited")
    assert edited.pop("torch_dtype") == "bfloat16"
    assert edited.pop("vocab_size") == 70
    assert edited == {name: config[name] for name in config if name not in ("dtype", "vocab_size")}


def test_published_granite_fields_return(tmp_path: Path) -> None:
    """These are fields of Granite 4, not only those of its config class."""
    model = save_model("granitemoehybrid", tmp_path / "model")
    config = read_config(model) | {"normalization_function": "rmsnorm", "init_method": "mup"}
    (model / "config.json").write_text(json.dumps(config))
    assert_same_files(follow_chain(model, tmp_path / "kept", "torch_dist", "hf"), model)


def test_weights_of_mixers_are_cast_unless_their_dtype_differs(tmp_path: Path) -> None:
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    model = save_model("qwen3_next", tmp_path / "model", dtype="bfloat16", layer_types=kinds)
    tensors = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        tensors[name] = tensor.float() if name.endswith("A_log") else tensor.bfloat16()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    assert_same_files(follow_chain(model, tmp_path / "kept", "torch_dist", "hf"), model)

    flags = ("--keep-foreign", "--dtype", "fp16", "--saver", "hf", "--verify-target")
    done = run_convert("--load-dir", model, "--save-dir", tmp_path / "cast", *flags)
    assert done.returncode == 0, done.stderr
    assert "foreign, cast to float16: model.layers.0.linear_attn.in_proj_ba.weight" in done.stdout
    assert "foreign, copied as it is: model.layers.0.linear_attn.A_log" in done.stdout

    for name, tensor in load_file(tmp_path / "cast" / "model.safetensors").items():
        expected = tensors[name] if name.endswith("A_log") else tensors[name].half()
        assert torch.equal(tensor, expected), name
        assert tensor.dtype == expected.dtype, name


def test_quantized_export_lists_the_mixers_as_unquantized(tmp_path: Path) -> None:
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    model = save_model("qwen3_5_text", tmp_path / "model", layer_types=kinds)
    flags = ("--keep-foreign", "--quantize", "fp8-block", "--saver", "hf")
    done = run_convert("--load-dir", model, "--save-dir", tmp_path / "fp8", *flags)
    assert done.returncode == 0, done.stderr

    kept = read_config(tmp_path / "fp8")["quantization_config"]["modules_to_not_convert"]
    before = load_file(model / "model.safetensors")
    for name, tensor in load_file(tmp_path / "fp8" / "model.safetensors").items():
        module, _, suffix = name.rpartition(".")
        is_matrix = suffix == "weight" and tensor.dim() > 1
        assert not is_matrix or (tensor.dtype == torch.float8_e4m3fn) == (module not in kept), name
        if ".linear_attn." in name or ".self_attn." in name:
            assert torch.equal(tensor, before[name]), name


def test_merged_mixers_are_weighted_sums(tmp_path: Path) -> None:
    inputs = [save_model("lfm2", tmp_path / "a"), save_model("lfm2", tmp_path / "b")]
    rng = torch.Generator().manual_seed(1)
    changed = {}
    for name, tensor in load_file(inputs[0] / "model.safetensors").items():
        changed[name] = tensor + torch.randn(tensor.shape, generator=rng)
    save_file(changed, inputs[1] / "model.safetensors", metadata={"format": "pt"})
    second = follow_chain(inputs[1], tmp_path / "kept", "torch_dist")
    arguments = ("--input", f"{inputs[0]}:0.25", f"{second}:0.75", "--output", tmp_path / "out")
    done = run_merge(*arguments, "--saver", "hf", "--keep-foreign")

    assert done.returncode == 0, done.stderr
    assert "foreign, merged: model.layers.0.conv.in_proj.weight" in done.stdout

    merged = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in load_file(inputs[0] / "model.safetensors").items():
        expected = 0.25 * tensor.double() + 0.75 * changed[name].double()
        torch.testing.assert_close(merged[name].double(), expected, rtol=1e-6, atol=1e-6)
    assert read_config(tmp_path / "out") == read_config(inputs[0])

    without = run_merge(*arguments, "--saver", "hf", "--overwrite")
    assert "short convolution in layers" in without.stderr


@pytest.mark.parametrize("flags", [("--layers", "0,1"), ("--upcycle-experts", 2)])
def test_edits_of_layers_are_refused(flags: tuple[object, ...], tmp_path: Path) -> None:
    model = save_model("lfm2", tmp_path / "model")
    target = ("--save-dir", tmp_path / "out", "--saver", "torch_dist", "--keep-foreign")
    done = run_convert("--load-dir", model, *target, *flags)
    assert f"{flags[0]} and --keep-foreign are mutually exclusive" in done.stderr


def test_show_names_the_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_model("lfm2", tmp_path / "model", layer_types=["full_attention"] + ["conv"] * 3)
    for saver in ("hf", "torch_dist"):
        kept = follow_chain(model, tmp_path / saver, saver)
        assert inspect_checkpoint.main(["show", str(kept), "--all"]) == 0
        shown = capsys.readouterr().out
        assert "foreign    short convolution in layers 1-3: can be converted, not trained" in shown
        assert "model.layers.1.conv.in_proj.weight" in shown


def test_base_model_alone_gets_the_names_of_the_whole_model(tmp_path: Path) -> None:
    model = save_model("lfm2", tmp_path / "model", tie_word_embeddings=True)
    whole = load_file(model / "model.safetensors")
    base = transformers.AutoModel.from_pretrained(model)
    base.save_pretrained(tmp_path / "base")
    assert "layers.0.conv.in_proj.weight" in load_file(tmp_path / "base" / "model.safetensors")

    result = follow_chain(tmp_path / "base", tmp_path / "kept", "torch_dist", "hf")
    actual = load_file(result / "model.safetensors")
    assert actual.keys() == whole.keys()
    assert all(torch.equal(actual[name], tensor) for name, tensor in whole.items())


def test_unchecked_arguments_are_described() -> None:
    for value, text in ((3, ""), (None, ""), ([[], {"a": 1}, "\x1b"], "{'a': 1} in layers 1 and ")):
        assert describe_foreign_mixers({"foreign_mixers": value}).startswith(text)
    assert "\x1b" not in describe_foreign_mixers({"foreign_mixers": ["\x1b"]})


def test_missing_mixers_are_refused(tmp_path: Path) -> None:
    model = save_model("qwen3_next", tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if ".layers.1.linear_attn" not in name}
    save_file(kept, model / "model.safetensors", metadata={"format": "pt"})
    message = "layer 1 has no foreign mixer in the weights, but gated delta net or attention with"
    with pytest.raises(ValueError, match=message):
        open_checkpoint(model, read_options=KEEP)


def test_config_of_other_layers_is_refused(tmp_path: Path) -> None:
    model = save_model("lfm2", tmp_path / "model", layer_types=["full_attention"] + ["conv"] * 3)
    config = read_config(model) | {"layer_types": ["conv"] * 3 + ["full_attention"]}
    (model / "config.json").write_text(json.dumps(config))
    message = "layer 0 has no foreign mixer in the weights, but short convolution in config.json"
    with pytest.raises(ValueError, match=message):
        open_checkpoint(model, read_options=KEEP)

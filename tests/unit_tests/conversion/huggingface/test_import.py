"""Imports of directories as found on the hub, and of directories that must be refused."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from megatron.conversion.huggingface.directory import HuggingFaceSource
from megatron.conversion.huggingface.directory_writer import write_huggingface
from megatron.conversion.options import ReadOptions, WriteOptions, parse_rename
from megatron.core.run_checkpoint.formats import is_huggingface
from megatron.core.run_checkpoint.keys import WORD_EMBEDDINGS
from megatron.core.transformer.transformer_config import select_architecture_fields
from megatron.training.checkpoint.launch import TrainingDirectory
from megatron.training.checkpoint.resume import check_same_model
from megatron.training.config.run_options import CheckpointConfig
from megatron.training.config.stored_args import normalize_stored_args
from tests.support.compare import read_whole
from tests.support.memory_source import GPT_ARGS, LLAMA_ARGS, random_source
from tests.unit_tests.conversion.reference_forward import reference_logits

TOKENS = torch.arange(20).view(2, 10)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    write_huggingface(random_source(LLAMA_ARGS, optimizer=False), tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    write_huggingface(random_source(GPT_ARGS, optimizer=False), tmp_path / "gpt2")
    return tmp_path / "gpt2"


def edit_config(directory: Path, **changes: Any) -> None:
    """Change fields of config.json; None removes a field."""
    config = json.loads((directory / "config.json").read_text()) | changes
    (directory / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if v is not None})
    )


def edit_weights(directory: Path, rename: Any = None, **changes: torch.Tensor) -> None:
    tensors = load_file(directory / "model.safetensors") | changes
    if rename is not None:
        tensors = {rename(name): value for name, value in tensors.items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def test_names_without_prefix_and_buffers(gpt2: Path) -> None:
    """Read the original GPT-2: names without prefix, masks as buffers, a copy of the tied head."""
    whole = read_whole(HuggingFaceSource(gpt2), "decoder.layers.1.mlp.linear_fc1.weight")
    embedding = load_file(gpt2 / "model.safetensors")["transformer.wte.weight"]
    extra = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4),
        "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
    }
    edit_weights(
        gpt2,
        lambda name: name.removeprefix("transformer."),
        **extra,
        **{"lm_head.weight": embedding.clone()},
    )
    edit_config(
        gpt2,
        n_ctx=40,
        task_specific_params={"text-generation": {"do_sample": True}},
        summary_type="cls_index",
    )
    source = HuggingFaceSource(gpt2)
    assert source.unused == ["h.0.attn.bias", "h.0.attn.masked_bias", "lm_head.weight"]
    assert torch.equal(read_whole(source, "decoder.layers.1.mlp.linear_fc1.weight"), whole)

    edit_weights(gpt2, **{"lm_head.weight": embedding + 1})
    with pytest.raises(
        ValueError, match=r"ties the head to the embedding, but lm_head\.weight differs"
    ):
        HuggingFaceSource(gpt2)


def test_pytorch_model_bin_is_read(gpt2: Path) -> None:
    source = HuggingFaceSource(gpt2)
    expected = {key: read_whole(source, key) for key in source.tensors}
    torch.save(load_file(gpt2 / "model.safetensors"), gpt2 / "pytorch_model.bin")
    (gpt2 / "model.safetensors").unlink()
    old = HuggingFaceSource(gpt2)
    for key, value in expected.items():
        assert torch.equal(read_whole(old, key), value), key


def test_a_pickle_that_runs_code_is_refused(gpt2: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple:
            return print, ("executed",)

    (gpt2 / "model.safetensors").unlink()
    torch.save({"transformer.wte.weight": Evil()}, gpt2 / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin.*builtins\.print"):
        HuggingFaceSource(gpt2)


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_attention_bias_without_mlp_bias(family: str, tmp_path: Path) -> None:
    """The model has both biases or none: missing biases are zero."""
    fields = {
        "vocab_size": 67,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "head_dim": 8,
    }
    fields |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "attention_bias": True,
        "initializer_range": 0.3,
    }
    model = AutoModelForCausalLM.from_config(
        getattr(transformers, f"{family}Config")(**fields)
    ).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "in")
    source = HuggingFaceSource(tmp_path / "in")
    assert source.args["add_bias_linear"]
    assert not read_whole(source, "decoder.layers.0.mlp.linear_fc1.bias").any()
    with torch.no_grad():
        expected = model(TOKENS).logits
        assert_close(reference_logits(source, TOKENS).float(), expected, atol=1e-4, rtol=0)
        write_huggingface(source, tmp_path / "out")
        assert_close(
            AutoModelForCausalLM.from_pretrained(tmp_path / "out")(TOKENS).logits,
            expected,
            atol=1e-5,
            rtol=0,
        )


def test_different_dtypes_of_q_k_v_are_promoted(llama: Path) -> None:
    name = "model.layers.0.self_attn.v_proj.weight"
    edit_weights(llama, **{name: load_file(llama / "model.safetensors")[name].bfloat16()})
    source = HuggingFaceSource(llama)
    key = "decoder.layers.0.self_attention.linear_qkv.weight"
    assert source.tensors[key].dtype == torch.float32 == read_whole(source, key).dtype


def test_dtype_of_config_or_weights(llama: Path, tmp_path: Path) -> None:
    assert not HuggingFaceSource(llama).args["bf16"]
    write_huggingface(HuggingFaceSource(llama), tmp_path / "bf16", WriteOptions(dtype="bf16"))
    source = HuggingFaceSource(tmp_path / "bf16")
    assert source.args["bf16"]
    assert source.tensors[WORD_EMBEDDINGS].dtype == torch.bfloat16
    edit_config(tmp_path / "bf16", torch_dtype=None)
    assert HuggingFaceSource(tmp_path / "bf16").args["bf16"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
            "rope type 'longrope' is not supported",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "beta_fast": 4.0}},
            "no 'factor': give --rotary-scaling-factor",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "attention_factor": 2.0}},
            "rope_scaling.attention_factor = 2.0 is not supported",
        ),
        (
            {"rope_scaling": {"type": "linear"}},
            "no 'factor': give --rotary-seq-len-interpolation-factor",
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope type 'dynamic'",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
            "no 'low_freq_factor': give --rope-low-freq-factor",
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5}},
            r"has rope_theta = 10000\.0 and 500000\.0: remove the wrong one",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            r"with \['full_attention'\] is not supported",
        ),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            r"layer_types \['sliding_attention'\]",
        ),
        ({"quantization_config": {"bits": 4}}, "quantization_config has no 'quant_method'"),
        (
            {"logit_scale": 0.1, "no_rope_layers": [1]},
            "--hf-ignore-fields logit_scale no_rope_layers",
        ),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported"),
        (
            {"model_type": "bitnet"},
            r"model_type 'bitnet' is not supported \(it has ternary weights, and norms before ",
        ),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "LlamaForSequenceClassification is not LlamaForCausalLM",
        ),
        ({"is_encoder_decoder": True}, "is_encoder_decoder = True is not supported, only False is"),
        ({"hidden_size": None}, "no 'hidden_size': give --hidden-size"),
        ({"num_hidden_layers": None}, "no 'num_hidden_layers': give --num-layers"),
        ({"num_hidden_layers": 3}, r"lack model\.layers\.2\..*config\.json calls for"),
        (
            {"intermediate_size": 40},
            r"gate_proj\.weight has shape \[48, 32\], but config\.json makes it \[40, 32\]",
        ),
        (
            {"vocab_size": 68},
            r"embed_tokens\.weight has shape \[67, 32\], but config\.json makes it \[68, 32\]",
        ),
        (
            {"num_key_value_heads": 3},
            "--num-attention-heads 4 is not a multiple of --num-query-groups 3",
        ),
    ],
)
def test_llama_configs_that_are_refused(fields: dict[str, Any], reason: str, llama: Path) -> None:
    edit_config(llama, **fields)
    with pytest.raises(ValueError, match=reason):
        HuggingFaceSource(llama)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx = True is not supported",
        ),
        ({"scale_attn_weights": False}, "scale_attn_weights = False is not supported"),
        ({"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn = True is not supported"),
        ({"activation_function": "relu"}, "activation_function = 'relu' is not supported"),
        ({"add_cross_attention": True}, "add_cross_attention = True is not supported"),
    ],
)
def test_gpt2_configs_that_are_refused(fields: dict[str, Any], reason: str, gpt2: Path) -> None:
    edit_config(gpt2, **fields)
    with pytest.raises(ValueError, match=reason):
        HuggingFaceSource(gpt2)


def test_windows_round_trip(tmp_path: Path) -> None:
    qwen = LLAMA_ARGS | {"add_qkv_bias": True, "window_size": (7, 0)}
    write_huggingface(random_source(qwen, optimizer=False), tmp_path / "qwen2")
    config = json.loads((tmp_path / "qwen2" / "config.json").read_text())
    assert config["model_type"] == "qwen2"
    assert config["sliding_window"] == 8
    assert HuggingFaceSource(tmp_path / "qwen2").args["window_size"] == (7, 0)
    edit_config(tmp_path / "qwen2", max_window_layers=1, layer_types=None)
    assert HuggingFaceSource(tmp_path / "qwen2").args["window_attn_skip_freq"] == [0, 1]
    edit_config(tmp_path / "qwen2", max_window_layers=2)
    assert HuggingFaceSource(tmp_path / "qwen2").args["window_size"] is None
    edit_config(tmp_path / "qwen2", max_window_layers=0, use_sliding_window=False)
    assert HuggingFaceSource(tmp_path / "qwen2").args["window_size"] is None
    edit_config(tmp_path / "qwen2", layer_types=["sliding_attention"] * 2)
    with pytest.raises(ValueError, match="sliding_window = None"):
        HuggingFaceSource(tmp_path / "qwen2")


def test_arguments_of_the_user_take_precedence(llama: Path) -> None:
    edit_config(llama, num_hidden_layers=None, logit_scale=1.0)
    source = HuggingFaceSource(llama, ReadOptions({"num_layers": 1}, ("logit_scale",)))
    assert source.args["num_layers"] == 1
    assert "model.layers.1.mlp.up_proj.weight" in source.unused


def test_tensors_that_the_index_does_not_list_are_refused(llama: Path, tmp_path: Path) -> None:
    options = WriteOptions(max_shard_size=10_000)
    write_huggingface(HuggingFaceSource(llama), tmp_path / "shards", options)
    path = tmp_path / "shards/model.safetensors.index.json"
    index = json.loads(path.read_text())
    shards = list(index["weight_map"].values())
    # A tensor whose shard has others, too.
    name = next(name for name, shard in index["weight_map"].items() if shards.count(shard) > 1)
    del index["weight_map"][name]
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"does not list 1 tensors of its shards, e.g. {name}"):
        HuggingFaceSource(tmp_path / "shards")


def test_model_without_weights_of_a_zero_3_run(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    (llama / "zero_to_fp32.py").touch()
    with pytest.raises(ValueError, match=r"has neither model\.safetensors.*run zero_to_fp32\.py"):
        HuggingFaceSource(llama)


def test_tensor_with_two_values_is_refused(llama: Path, tmp_path: Path) -> None:
    """transformers takes the value of the last shard and ignores the index."""
    tensors = load_file(llama / "model.safetensors")
    shards = {f"model-0000{number}-of-00002.safetensors": dict(tensors) for number in (1, 2)}
    first, second = shards
    repeated = "model.norm.weight"
    weight_map = dict.fromkeys(tensors, second) | {repeated: first}
    shutil.copytree(llama, tmp_path / "shards")
    (tmp_path / "shards/model.safetensors").unlink()
    index = tmp_path / "shards/model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    for name, shard in shards.items():
        save_file(shard, tmp_path / "shards" / name, {"format": "pt"})
    HuggingFaceSource(tmp_path / "shards")  # equal values

    shards[second][repeated] = -tensors[repeated]
    save_file(shards[second], tmp_path / "shards" / second, {"format": "pt"})
    with pytest.raises(ValueError, match=f"places {repeated} in {first}, and {second} has another"):
        HuggingFaceSource(tmp_path / "shards")


def test_prefix_of_a_wrapper_is_removed_with_rename(llama: Path) -> None:
    expected = read_whole(HuggingFaceSource(llama), "output_layer.weight")
    edit_weights(llama, rename=lambda name: f"module.{name}")
    message = r"lack embed_tokens\.weight.*module\.model\.embed_tokens\.weight is in them: "
    with pytest.raises(ValueError, match=message + r"add --rename 'module\.\*=\*'"):
        HuggingFaceSource(llama)
    renamed = HuggingFaceSource(llama, ReadOptions(renames=(parse_rename("module.*=*"),)))
    assert torch.equal(read_whole(renamed, "output_layer.weight"), expected)


def test_unused_tensors_are_reported_to_a_run(
    llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = CheckpointConfig(load=str(llama))
    with caplog.at_level("WARNING"):
        TrainingDirectory(config).choose()
        assert not caplog.records
        edit_weights(llama, **{"vision.patch.weight": torch.ones(2)})
        TrainingDirectory(config).choose()
    assert "1 unused parts: vision.patch.weight" in caplog.text


def test_index_next_to_a_whole_model_is_refused(llama: Path, tmp_path: Path) -> None:
    """transformers reads the whole model, and ignores the index."""
    shards = tmp_path / "shards"
    write_huggingface(HuggingFaceSource(llama), shards, WriteOptions(max_shard_size=10_000))
    shutil.copy(llama / "model.safetensors", shards)
    with pytest.raises(ValueError, match="contains two models, model.safetensors and the shards"):
        HuggingFaceSource(shards)
    # Other programs write an index of one file.
    names = json.loads((shards / "model.safetensors.index.json").read_text())["weight_map"]
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index))
    assert HuggingFaceSource(shards).tensors == HuggingFaceSource(llama).tensors


def test_damaged_directories(llama: Path, tmp_path: Path) -> None:
    options = WriteOptions(max_shard_size=10_000)
    write_huggingface(HuggingFaceSource(llama), tmp_path / "shards", options)
    shards = sorted((tmp_path / "shards").glob("model-*.safetensors"))
    shards[1].rename(tmp_path / "away")
    with pytest.raises(ValueError, match=rf"lacks 1 of {len(shards)} shards: {shards[1].name}"):
        HuggingFaceSource(tmp_path / "shards")
    data = (tmp_path / "away").read_bytes()
    for size, reason in (
        (len(data) - 5, "truncated or damaged"),
        (20, "truncated or no"),
        (3, "truncated or no"),
    ):
        shards[1].write_bytes(data[:size])
        with pytest.raises(ValueError, match=rf"{shards[1].name}.*{reason}"):
            HuggingFaceSource(tmp_path / "shards")
    shards[1].write_bytes(data.replace(b'"F32"', b'"X99"'))
    with pytest.raises(ValueError, match="dtype is 'X99', but must be one of"):
        HuggingFaceSource(tmp_path / "shards")
    shards[1].write_bytes(shards[0].read_bytes())
    with pytest.raises(ValueError, match=r"index\.json places .* which does not have it"):
        HuggingFaceSource(tmp_path / "shards")

    (llama / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has neither model\.safetensors nor"):
        HuggingFaceSource(llama)
    (llama / "config.json").write_text('{"model_type": ')
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        HuggingFaceSource(llama)
    assert not is_huggingface(tmp_path)


def test_fp8_matrices_are_dequantized(tmp_path: Path) -> None:
    """Read any box of matrices like DeepSeek-V3's; blocks at the edges are smaller."""
    write_huggingface(
        random_source(LLAMA_ARGS | {"bf16": True, "ffn_hidden_size": 40}, optimizer=False), tmp_path
    )
    plain = load_file(tmp_path / "model.safetensors")
    stored = dict(plain)
    for name in [name for name in plain if name.endswith("_proj.weight")]:
        rows, columns = plain[name].shape
        scales = 0.01 + torch.rand(-(-rows // 16), -(-columns // 12))
        spread = scales.repeat_interleave(16, 0).repeat_interleave(12, 1)[:rows, :columns]
        stored[name] = (plain[name].float() / spread).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scales
        plain[name] = (stored[name].float() * spread).bfloat16()
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    quantized = {
        "quant_method": "fp8",
        "weight_block_size": [16, 12],
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
    }
    edit_config(tmp_path, quantization_config=quantized)
    source = HuggingFaceSource(tmp_path)
    assert source.unused == []
    assert {info.dtype for info in source.tensors.values()} == {torch.bfloat16}
    key = "decoder.layers.1.mlp.linear_fc2.weight"
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(read_whole(source, key), plain[name])
    assert torch.equal(source.tensors[key].read((7, 5), (20, 17)), plain[name][7:27, 5:22])


@pytest.mark.parametrize(
    ("change", "ignored", "reason"),
    [
        ({"quant_method": "quanto"}, (), "of 'quanto' is not supported, only fp8, "),
        ({"quant_method": "fp8"}, (), r"shape \[3, 2\], which must be \[1, 1\] or \[48, 1\]:"),
        ({"quant_method": "mxfp4"}, (), r"has dtype torch\.float8_e4m3fn: weights must be"),
        (
            {"quant_method": "awq", "bits": "4", "group_size": 128},
            (),
            "quantization_config: bits is '4'",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [0, 16]},
            (),
            r"weight_block_size\[0\] is 0, but must be",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [8, 16]},
            (),
            r"_scale_inv of shape \[3, 2\], which must be .* or \[6, 2\]",
        ),
        ("x", (), "quantization_config is 'x', but must be a dictionary"),
        (
            {"quant_method": "fp8"},
            ("quantization_config",),
            r"has dtype torch\.float8_e4m3fn: weights must be",
        ),
    ],
)
def test_other_quantization_is_refused(
    change: Any, ignored: tuple[str, ...], reason: str, llama: Path
) -> None:
    """Without their scales the weights would be another model."""
    name = "model.layers.1.mlp.up_proj.weight"
    edit_weights(
        llama,
        **{name: torch.ones(48, 32).to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(3, 2)},
    )
    edit_config(llama, quantization_config=change)
    with pytest.raises(ValueError, match=reason):
        HuggingFaceSource(llama, ReadOptions(ignored_fields=ignored))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e5m2])
def test_other_matrices_with_block_scales_are_refused(dtype: torch.dtype, llama: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    scales = {f"{name}_scale_inv": torch.ones(3, 2)}
    edit_weights(llama, **{name: torch.ones(48, 32).to(dtype)}, **scales)
    edit_config(llama, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]})
    with pytest.raises(ValueError, match=rf"stored with {name} in {dtype}, which must be"):
        HuggingFaceSource(llama)


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -0.5])
def test_scales_that_are_not_finite_or_negative_are_refused(scale: float, llama: Path) -> None:
    """A loss of NaN would not name the file."""
    name = "model.layers.1.mlp.up_proj.weight"
    scales = torch.ones(3, 2)
    scales[2, 1] = scale
    matrix = torch.ones(48, 32).to(torch.float8_e4m3fn)
    edit_weights(llama, **{name: matrix, f"{name}_scale_inv": scales})
    edit_config(llama, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]})
    source = HuggingFaceSource(llama)
    reason = re.escape(f"{llama}: {name}_scale_inv[2, 1] is {scale}, ")
    with pytest.raises(ValueError, match=f"{reason}.* download the file that contains it again"):
        read_whole(source, "decoder.layers.1.mlp.linear_fc1.weight")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("hf_quant_config.json", {}, "hf_quant_config.json has no 'quantization'"),
        (
            "hf_quant_config.json",
            {"quantization": {"quant_algo": "W4A8_AWQ"}},
            "hf_quant_config.json: quant_algo is 'W4A8_AWQ', but must be",
        ),
        ("quantize_config.json", {}, "quantize_config.json has no 'bits'"),
        ("quant_config.json", {"w_bit": 4}, "quant_config.json has no 'q_group_size'"),
    ],
)
def test_file_that_describes_quantized_weights_is_checked(
    name: str, content: Any, reason: str, llama: Path
) -> None:
    (llama / name).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=reason):
        HuggingFaceSource(llama)
    HuggingFaceSource(llama, ReadOptions(ignored_fields=("quantization_config",)))


def test_all_architecture_fields_of_a_run_are_compared(llama: Path) -> None:
    """Fields that config.json does not have are compared, too, e.g. softcapping."""
    source = HuggingFaceSource(llama)
    assert {field.name for field in select_architecture_fields()} <= source.args.keys()
    flags = source.args | {"attn_logit_softcapping": 30.0}
    (warning,) = check_same_model(flags, normalize_stored_args(source.args), source.description)
    assert "attn_logit_softcapping: None in the checkpoint, 30.0 now" in warning

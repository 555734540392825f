"""Weights of Meta, torchtitan and torchtune equal those of transformers, whose logits are known.

The golden models of transformers are stored here under the names of the other programs, with rows in
the order of their rotary embeddings.
"""

import json
import re
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from megatron.conversion.checkpoint_conversion import compare, convert
from megatron.conversion.huggingface.weight_files import open_weights
from megatron.conversion.opening import open_checkpoint
from megatron.core.dist_checkpointing import CheckpointError
from tests import GOLDEN
from tests.support.compare import assert_same, read_all

TITAN = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "model.layers": "layers",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn": "attention",
    "q_proj": "wq",
    "k_proj": "wk",
    "v_proj": "wv",
    "o_proj": "wo",
    "mlp": "feed_forward",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}
NEW_TITAN = TITAN | {
    "lm_head": "lm_head",
    "q_proj": "qkv_linear.wq",
    "k_proj": "qkv_linear.wk",
    "v_proj": "qkv_linear.wv",
}
TUNE = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm.weight": "norm.scale",
    "lm_head": "output",
    "model.layers": "layers",
    "input_layernorm.weight": "sa_norm.scale",
    "post_attention_layernorm.weight": "mlp_norm.scale",
    "self_attn": "attn",
    "o_proj": "output_proj",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}

VOCABULARY = {
    "tok_embeddings.weight": "embedding.word_embeddings.weight",
    "output.weight": "output_layer.weight",
}


def load_golden(model, names):
    """Return the config and the weights of a golden model under other names."""
    directory = GOLDEN / "hf" / model
    config = json.loads((directory / "config.json").read_text())
    heads = config["num_attention_heads"]
    weights = {}
    for name, tensor in open_weights(directory).items():
        value = tensor.read((0,) * len(tensor.shape), tensor.shape)
        if config["model_type"] == "llama" and re.search(r"[qk]_proj", name):
            count = heads if "q_proj" in name else config["num_key_value_heads"]
            rows, columns = value.shape
            halves = value.view(count, 2, rows // count // 2, columns)
            value = halves.transpose(1, 2).reshape(rows, columns)
        for old, new in names.items():
            name = name.replace(old, new)
        weights[name] = value
    return config, weights


def assert_equals_golden(directory, model):
    golden = open_checkpoint(GOLDEN / "hf" / model)
    source = open_checkpoint(directory)
    assert source.tensors.keys() == golden.tensors.keys()
    assert compare(golden, source) == len(golden.tensors)
    assert source.unused == []
    return source


@pytest.mark.parametrize(
    ("model", "names", "prefix"),
    [
        ("llama", TITAN, ""),
        ("llama", TITAN, "model."),
        ("llama", NEW_TITAN, ""),
        ("qwen2", NEW_TITAN, ""),
        ("llama", TUNE, ""),
        ("qwen2", TITAN, ""),
        ("qwen2", TUNE, ""),
    ],
)
def test_dcp_directory_with_config(tmp_path, model, names, prefix):
    _, weights = load_golden(model, names)
    state = {prefix + name: value for name, value in weights.items()}
    state["optimizer"] = {"state": {"norm.weight": {"exp_avg": torch.ones(4)}}}
    state["train_state"] = {"step": 5}
    dcp.save(state, checkpoint_id=tmp_path / "step-5")
    shutil.copyfile(GOLDEN / "hf" / model / "config.json", tmp_path / "step-5/config.json")
    assert_equals_golden(tmp_path / "step-5", model)

    convert(tmp_path / "step-5", tmp_path / "ours", "torch_dist", verify=True)


@pytest.mark.parametrize("model", ["llama", "qwen2"])
def test_fused_queries_keys_and_values_of_torchtitan(tmp_path, model):
    """Return the rows of each query group: its queries, its key, its value."""
    config, weights = load_golden(model, NEW_TITAN)
    heads = config["num_attention_heads"]
    groups = config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    state = {name: value for name, value in weights.items() if "qkv_linear" not in name}
    for name, queries in weights.items():
        if ".wq." not in name:
            continue
        rest = queries.shape[1:]
        parts = [queries.view(groups, heads // groups, head_dim, *rest)]
        for other in (".wk.", ".wv."):
            parts.append(weights[name.replace(".wq.", other)].view(groups, 1, head_dim, *rest))
        state[name.replace(".wq.", ".wqkv.")] = torch.cat(parts, 1).reshape(-1, *rest)

    dcp.save(state, checkpoint_id=tmp_path / "step-5")
    shutil.copyfile(GOLDEN / "hf" / model / "config.json", tmp_path / "step-5/config.json")
    assert_equals_golden(tmp_path / "step-5", model)


QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 40,
    "num_hidden_layers": 2,
    "vocab_size": 131,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": 24,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "output_router_logits": False,
}
EXPERTS = {
    "0.3": "moe.routed_experts.inner_experts.{}_E{}",
    "0.2": "moe.experts.{}",
}


def make_experts():
    """Return a random model with experts under the names of transformers."""
    torch.manual_seed(3)
    attention = {"q_proj": (64, 40), "k_proj": (32, 40), "v_proj": (32, 40), "o_proj": (40, 64)}
    weights = {name: torch.randn(131, 40) for name in ("model.embed_tokens", "lm_head")}
    weights["model.norm"] = torch.randn(40)
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{name}"] = torch.randn(40)
        for name, shape in attention.items():
            weights[f"{prefix}.self_attn.{name}"] = torch.randn(shape)
        for name in ("q_norm", "k_norm"):
            weights[f"{prefix}.self_attn.{name}"] = torch.randn(16)
        weights[f"{prefix}.mlp.gate"] = torch.randn(3, 40)
        for expert in range(3):
            for name, shape in (("gate", (24, 40)), ("up", (24, 40)), ("down", (40, 24))):
                weights[f"{prefix}.mlp.experts.{expert}.{name}_proj"] = torch.randn(shape)
    return {f"{name}.weight": value for name, value in weights.items()}


@pytest.mark.parametrize("version", EXPERTS)
def test_experts_of_torchtitan(tmp_path, version):
    """Experts are stacked; a bias that balances them must be zero."""
    weights = make_experts()
    hugging_face = tmp_path / "hugging_face"
    hugging_face.mkdir()
    save_file(weights, hugging_face / "model.safetensors")

    # Rename tensors and stack those of experts, as torchtitan does.
    state = {}
    for name, value in weights.items():
        if "experts" in name:
            continue
        for old, new in NEW_TITAN.items():
            name = name.replace(old, new)
        state[name.replace("feed_forward.gate", "moe.router.gate")] = value

    for layer in range(2):
        for titan_name, name, axes in (
            ("w1", "gate", "FD"),
            ("w2", "down", "DF"),
            ("w3", "up", "FD"),
        ):
            matrices = []
            for expert in range(3):
                prefix = f"model.layers.{layer}.mlp.experts.{expert}"
                matrices.append(weights[f"{prefix}.{name}_proj.weight"])
            key = EXPERTS[version].format(titan_name, axes)
            state[f"layers.{layer}.{key}"] = torch.stack(matrices)

    bias = "layers.1.moe.expert_bias" + ("_E" if version == "0.3" else "")
    unbiased = tmp_path / "step-5"
    biased = tmp_path / "step-6"
    dcp.save(state | {bias: torch.zeros(3)}, checkpoint_id=unbiased)
    dcp.save(state | {bias: torch.tensor([0.0, 0.5, 0.0])}, checkpoint_id=biased)

    for directory in (hugging_face, unbiased, biased):
        (directory / "config.json").write_text(json.dumps(QWEN3_MOE))
    expected = open_checkpoint(hugging_face)
    actual = open_checkpoint(unbiased)
    assert actual.tensors.keys() == expected.tensors.keys()
    assert compare(expected, actual) == len(expected.tensors)
    assert actual.unused == []
    with pytest.raises(CheckpointError, match=f"{bias} is not zero: .*load_balance_coeff"):
        open_checkpoint(biased)


def test_dcp_directory_without_config_names_it(tmp_path):
    _, weights = load_golden("llama", TITAN)
    dcp.save(weights, checkpoint_id=tmp_path / "step-5")
    with pytest.raises(CheckpointError, match=r"torchtitan or torchtune: copy .*config.json"):
        open_checkpoint(tmp_path / "step-5")


@pytest.mark.parametrize("vocabulary_axis", [0, 1], ids=["llama3", "llama2"])
@pytest.mark.parametrize("files", [1, 2])
def test_consolidated_files_of_meta(tmp_path, files, vocabulary_axis):
    config, weights = load_golden("llama", TITAN)
    expected = read_all(open_checkpoint(GOLDEN / "hf/llama"))
    for name, key in VOCABULARY.items():  # an even number of tokens, which two files can split
        weights[name] = weights[name][:258]
        expected[key] = expected[key][:258]
    weights["rope.freqs"] = torch.ones(4)
    for index in range(files):
        shard = {}
        for name, value in weights.items():
            if re.search(r"\.w[qkv13]\.|output", name):
                value = value.chunk(files, 0)[index].clone()
            elif re.search(r"\.w[o2]\.", name):
                value = value.chunk(files, 1)[index].clone()
            elif "tok_embeddings" in name:
                value = value.chunk(files, vocabulary_axis)[index].clone()
            shard[name] = value
        torch.save(shard, tmp_path / f"consolidated.{index:02d}.pth")

    params = {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "norm_eps": config["rms_norm_eps"],
        "rope_theta": 10000.0,
        "vocab_size": -1,
    }
    (tmp_path / "params.json").write_text(json.dumps(params))
    actual = open_checkpoint(tmp_path)

    assert_same(read_all(actual), expected)
    assert actual.unused == []

    golden = open_checkpoint(GOLDEN / "hf/llama")
    for name in ("rotary_base", "norm_epsilon", "num_query_groups", "ffn_hidden_size", "swiglu"):
        assert actual.args[name] == golden.args[name], name

    params["use_scaled_rope"] = True
    (tmp_path / "params.json").write_text(json.dumps(params))
    with pytest.raises(CheckpointError, match=r"use_scaled_rope .*\n?.*config.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("tok_embeddings.weight", torch.ones(()), "lacks the matrix tok_embeddings.weight"),
        ("layers.0.feed_forward.w1.weight", None, "lacks the matrix layers.0.feed_forward.w1"),
        ("layers.0.attention.wq.weight", torch.ones(6, 64), "6 rows, which are not 4 heads"),
        ("layers.0.attention.wq.weight", torch.ones(()), r"has shape \[\]"),
    ],
)
def test_damaged_consolidated_file_is_rejected(tmp_path, name, value, problem):
    config, weights = load_golden("llama", TITAN)
    del weights[name]
    if value is not None:
        weights[name] = value
    torch.save(weights, tmp_path / "consolidated.00.pth")
    params = {"dim": config["hidden_size"], "n_layers": 2, "n_heads": 4, "norm_eps": 1e-5}
    (tmp_path / "params.json").write_text(json.dumps(params))

    with pytest.raises(ValueError, match=problem):
        open_checkpoint(tmp_path)


def test_consolidated_files_of_different_shapes_are_rejected(tmp_path):
    _, weights = load_golden("llama", TITAN)
    torch.save(weights, tmp_path / "consolidated.00.pth")
    weights["layers.0.attention.wo.weight"] = torch.ones(64, 32)
    torch.save(weights, tmp_path / "consolidated.01.pth")
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"attention.wo.weight has the shapes \[\(64, 32\)"):
        open_checkpoint(tmp_path)

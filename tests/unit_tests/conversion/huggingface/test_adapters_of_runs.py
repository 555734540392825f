"""Adapters of runs as files of PEFT, in families that compute several projections in one module."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.conversion.editing.edits import apply_edits
from megatron.conversion.huggingface.adapter_reader import read_adapter
from megatron.conversion.huggingface.adapter_writer import write_adapter
from megatron.conversion.huggingface.directory_writer import write_huggingface
from megatron.conversion.model_space.model import make_export_config, model_config
from megatron.conversion.opening import open_checkpoint
from megatron.conversion.options import EditOptions, WriteOptions
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.module import initialize_parameters
from megatron.core.run_checkpoint.keys import WORD_EMBEDDINGS
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.training.adapters.adapted_layers import reset_magnitudes
from megatron.training.adapters.base_model import separate_adapters
from megatron.training.adapters.targets import add_adapters
from megatron.training.config.lora_options import LoraConfig
from tests import GOLDEN
from tests.support.memory_source import (
    BLOOM_ARGS,
    GPT_ARGS,
    LLAMA_ARGS,
    MemorySource,
    random_source,
)
from tests.unit_tests.conversion.filled_model import chunk, model_logits

TOKENS = torch.arange(20).view(1, 20)
EXPERTS_ARGS = LLAMA_ARGS | {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "qk_layernorm": True,
}
FAMILIES = {  # model_type -> (arguments, rank of each fused module)
    "llama": (LLAMA_ARGS, {}),
    "phi3": (LLAMA_ARGS, {"self_attn.qkv_proj": 9, "mlp.gate_up_proj": 6}),
    "gpt2": (GPT_ARGS, {"attn.c_attn": 9}),
    "bloom": (BLOOM_ARGS, {"self_attention.query_key_value": 9}),
    "qwen3_moe": (EXPERTS_ARGS, {"mlp.experts.gate_up_proj": 6}),
}
LORA = LoraConfig(lora_rank=3, lora_alpha=6.0)


def adapt(source, lora, model_type):
    """Return the model with random adapters, and a checkpoint of them."""
    model = chunk(source)
    add_adapters(model, lora, TensorParallelRng(0, 0))
    entries, _ = separate_adapters(model.sharded_state_dict())
    initialize_parameters(entries, 1)
    reset_magnitudes(model)
    generator = torch.Generator().manual_seed(3)
    values = {}
    for key, entry in entries.items():
        values[key] = entry.local.data
        values[key].add_(torch.randn(entry.local.shape, generator=generator), alpha=0.1)
    args = source.args | vars(lora) | {"model_vocab_size": 67}
    args["lora_base_model"] = ("models/base", "float32:0", model_type)
    return model, MemorySource(args, values)


@pytest.mark.parametrize(
    "model_type,dora",
    [
        *((name, False) for name in FAMILIES),
        *((name, True) for name in FAMILIES if "moe" not in name),
    ],
)
def test_merged_files_compute_the_same_as_the_adapters(tmp_path, model_type, dora):
    args, fused_ranks = FAMILIES[model_type]
    source = random_source(args | {"hf_model_type": model_type}, optimizer=False)
    write_huggingface(source, tmp_path / "base")
    assert json.loads((tmp_path / "base/config.json").read_text())["model_type"] == model_type

    lora = LoraConfig(**vars(LORA) | {"lora_dora": dora})
    model, adapters = adapt(source, lora, model_type)
    (tmp_path / "adapter").mkdir()
    write_adapter(adapters, tmp_path / "adapter")
    fields = json.loads((tmp_path / "adapter/adapter_config.json").read_text())

    assert fields["base_model_name_or_path"] == "models/base"
    assert fields["rank_pattern"] == fused_ranks

    options = WriteOptions(edits=EditOptions(adapters=(tmp_path / "adapter",)))
    merged = apply_edits(open_checkpoint(tmp_path / "base"), options)
    with torch.no_grad():
        expected = model(TOKENS, TOKENS)
    torch.testing.assert_close(model_logits(merged, TOKENS), expected, atol=1e-5, rtol=1e-4)

    config = make_export_config(source, None)
    keys = sorted(adapters.values, reverse=True)  # in any order
    values = read_adapter(tmp_path / "adapter", config, model_type, keys, 3, 2.0)

    assert values.keys() == adapters.values.keys()
    assert all(torch.equal(values[key], adapters.values[key]) for key in values)


def test_files_of_peft_with_experts_are_read():
    """Merged into the base model, which is compared with PEFT elsewhere, they compute the same."""
    directory = GOLDEN / "peft/gpt_oss_experts"
    base = open_checkpoint(GOLDEN / "hf/gpt_oss")
    targets = ["layers.0.self_attention.linear_proj", "linear_fc1", "linear_fc2"]
    lora = LoraConfig(lora_rank=2, lora_alpha=5.0, lora_targets=targets)
    model = chunk(base)
    add_adapters(model, lora, TensorParallelRng(0, 0))
    entries, _ = separate_adapters(model.sharded_state_dict())
    config = model_config(base.args, base.tensors[WORD_EMBEDDINGS].shape[0], "")
    values = read_adapter(directory, config, "gpt_oss", entries.keys(), 2, 2.5)
    for key, entry in entries.items():
        entry.local.data.copy_(values[key])
    options = WriteOptions(edits=EditOptions(adapters=(directory,)), dtype="fp32")
    expected = model_logits(apply_edits(base, options), TOKENS)
    with torch.no_grad():
        logits = model(TOKENS, TOKENS)

    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(logits, model_logits(base, TOKENS), atol=1e-2)

    del entries["decoder.layers.1.mlp.experts.experts.linear_fc2.down_proj.lora_A"]
    with pytest.raises(CheckpointError, match=r"it also adapts model\.layers\.1\.mlp\.experts:"):
        read_adapter(directory, config, "gpt_oss", entries.keys(), 2, 2.5)


def test_layers_per_expert_are_read(tmp_path):
    """Files written with transformers 4 have a linear layer per expert."""
    source = random_source(EXPERTS_ARGS | {"hf_model_type": "qwen3_moe"}, optimizer=False)
    lora = LoraConfig(lora_rank=3, lora_alpha=6.0, lora_targets=["gate_proj", "down_proj"])
    _, adapters = adapt(source, lora, "qwen3_moe")
    tensors = {}
    for key, value in adapters.values.items():
        _, _, layer, _, _, _, _, projection, matrix = key.split(".")
        for expert in range(4):
            module = f"model.layers.{layer}.mlp.experts.{expert}.{projection}"
            tensors[f"base_model.model.{module}.{matrix}.weight"] = value[expert].clone()

    save_file(tensors, tmp_path / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["gate_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    config = make_export_config(source, None)
    values = read_adapter(tmp_path, config, "qwen3_moe", adapters.values.keys(), 3, 2.0)

    assert values.keys() == adapters.values.keys()
    assert all(torch.equal(values[key], adapters.values[key]) for key in values)


def test_targets_name_parameters_of_experts(tmp_path):
    source = random_source(EXPERTS_ARGS | {"hf_model_type": "qwen3_moe"}, optimizer=False)
    targets = ["q_proj", "layers.1.mlp.experts.linear_fc2"]
    lora = LoraConfig(lora_rank=3, lora_alpha=6.0, lora_targets=targets)
    _, adapters = adapt(source, lora, "qwen3_moe")
    write_adapter(adapters, tmp_path)
    fields = json.loads((tmp_path / "adapter_config.json").read_text())

    assert fields["target_modules"] == ["q_proj"]
    # Not the experts of layer 0
    assert fields["target_parameters"] == ["model.layers.1.mlp.experts.down_proj"]

    names = load_file(tmp_path / "adapter_model.safetensors")
    assert "base_model.model.model.layers.1.mlp.experts.lora_A.weight" in names


def test_magnitudes_of_experts_are_refused(tmp_path):
    source = random_source(EXPERTS_ARGS | {"hf_model_type": "qwen3_moe"}, optimizer=False)
    lora = LoraConfig(lora_rank=3, lora_dora=True, lora_targets=["linear_fc2"])
    _, adapters = adapt(source, lora, "qwen3_moe")
    with pytest.raises(ValueError, match=r"experts\.down_proj contains all experts, and PEFT"):
        write_adapter(adapters, tmp_path)


def test_a_shared_matrix_of_a_fused_module_is_copied(tmp_path):
    """An adapter that PEFT has made of a fused module has the rank of one projection."""
    source = random_source(LLAMA_ARGS | {"hf_model_type": "phi3"}, optimizer=False)
    lora = LoraConfig(lora_rank=3, lora_alpha=6.0, lora_targets=["linear_qkv"])
    _, adapters = adapt(source, lora, "phi3")
    write_adapter(adapters, tmp_path)
    config = make_export_config(source, None)
    options = (config, "phi3", adapters.values.keys())
    # Rank 9 of one matrix is not in blocks of 3 ...
    values = read_adapter(tmp_path, *options, 9, 2.0)
    layer = "decoder.layers.0.self_attention.linear_qkv"
    shared = values[f"{layer}.q_proj.lora_A"]

    assert shared.shape == (9, 32)
    assert torch.equal(shared, values[f"{layer}.v_proj.lora_A"])

    # ... but is the same change.
    for name in ("q_proj", "k_proj", "v_proj"):
        product = values[f"{layer}.{name}.lora_B"] @ shared
        expected = (
            adapters.values[f"{layer}.{name}.lora_B"] @ adapters.values[f"{layer}.{name}.lora_A"]
        )
        torch.testing.assert_close(product, expected)

    with pytest.raises(CheckpointError, match="has rank 9, not 4: give --lora-rank 9"):
        read_adapter(tmp_path, *options, 4, 2.0)


def test_magnitudes_of_a_part_of_a_fused_module_are_refused(tmp_path):
    source = random_source(LLAMA_ARGS | {"hf_model_type": "phi3"}, optimizer=False)
    lora = LoraConfig(lora_rank=3, lora_dora=True, lora_targets=["q_proj", "v_proj"])
    _, adapters = adapt(source, lora, "phi3")
    with pytest.raises(ValueError, match=r"qkv_proj needs the magnitudes of all of its rows"):
        write_adapter(adapters, tmp_path)

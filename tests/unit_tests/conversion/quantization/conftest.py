"""A model of transformers in an encoding of a published one."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM


@pytest.fixture(scope="package")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with experts in mxfp4, and other weights in bf16, as gpt-oss is published."""
    torch.manual_seed(5)
    config = GptOssConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,  # square matrices: nothing but the encoding tells their orientation
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        max_position_embeddings=64,
        pad_token_id=0,
        dtype="bfloat16",
    )
    model = GptOssForCausalLM(config).bfloat16()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    directory = tmp_path_factory.mktemp("gpt_oss")
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(256, (*blocks, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(122, 126, blocks, dtype=torch.uint8)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    fields = json.loads((directory / "config.json").read_text())
    fields["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (directory / "config.json").write_text(json.dumps(fields))
    return directory

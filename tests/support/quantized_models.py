"""Models of transformers whose linear layers are in the encodings of releases."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Generator, Tensor
from transformers import GptOssConfig, GptOssForCausalLM

GROUP = 64
_BITS = 4
_INTEGERS = {"num_bits": _BITS, "type": "int", "symmetric": True, "group_size": GROUP}
SETTINGS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": _BITS, "group_size": GROUP, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": _BITS, "group_size": GROUP, "desc_act": True},
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": _INTEGERS}},
    },
}


def write_packed_model(source: Path, directory: Path, method: str) -> None:
    """Copy a model with random 4-bit integers instead of the matrices of its linear layers."""
    shutil.copytree(source, directory)
    fields = json.loads((directory / "config.json").read_text())
    fields["quantization_config"] = SETTINGS[method]
    (directory / "config.json").write_text(json.dumps(fields))
    generator = torch.Generator().manual_seed(1)
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        outputs, inputs = tensors.pop(name).shape
        stem = name.removesuffix("weight")
        for suffix, tensor in _WRITERS[method](outputs, inputs, generator).items():
            tensors[stem + suffix] = tensor
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def _draw_words(rows: int, columns: int, generator: Generator) -> Tensor:
    """Return random words, of 8 integers each."""
    bounds = (-(2**31), 2**31)
    return torch.randint(*bounds, (rows, columns), generator=generator, dtype=torch.int32)


def _draw_scales(rows: int, columns: int, generator: Generator) -> Tensor:
    """Return random scales of integers."""
    return 0.002 + 0.01 * torch.rand(rows, columns, generator=generator)


def _make_awq(outputs: int, inputs: int, generator: Generator) -> dict[str, Tensor]:
    groups = inputs // GROUP
    return {
        "qweight": _draw_words(inputs, outputs // 8, generator),
        "qzeros": _draw_words(groups, outputs // 8, generator),
        "scales": _draw_scales(groups, outputs, generator).half(),
    }


def _make_gptq(outputs: int, inputs: int, generator: Generator) -> dict[str, Tensor]:
    """Groups are not ranges of columns (act order); q, k and v have the same, gate and up not."""
    groups = inputs // GROUP
    shared = Generator().manual_seed(inputs)
    order = torch.randperm(inputs, generator=generator if outputs > inputs else shared)
    return {
        "qweight": _draw_words(inputs // 8, outputs, generator),
        "qzeros": _draw_words(groups, outputs // 8, generator),
        "scales": _draw_scales(groups, outputs, generator).half(),
        "g_idx": (order // GROUP).int(),
    }


def _make_int4(outputs: int, inputs: int, generator: Generator) -> dict[str, Tensor]:
    return {
        "weight_packed": _draw_words(outputs, inputs // 8, generator),
        "weight_scale": _draw_scales(outputs, inputs // GROUP, generator).bfloat16(),
        "weight_shape": torch.tensor([outputs, inputs]),
    }


_WRITERS: dict[str, Callable[[int, int, Generator], dict[str, Tensor]]] = {
    "awq": _make_awq,
    "gptq": _make_gptq,
    "int4": _make_int4,
}


def write_gpt_oss(directory: Path) -> None:
    """Write a model with experts in mxfp4, and other weights in bf16, as gpt-oss is published."""
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

"""Encodings that exports can have: the table of `--quantize`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from megatron.conversion.quantization.fp4_writing import encode_experts, encode_nvfp4
from megatron.conversion.quantization.fp8_writing import BLOCK_SIZE, encode_blocks, encode_rows
from megatron.core.dist_checkpointing.mapping import LazyTensor


class Target(NamedTuple):
    """An encoding of matrices, and the `quantization_config` that describes it."""

    # Matrices by name, which programs fuse into one, -> stored tensors
    encode: Callable[[Mapping[str, LazyTensor]], dict[str, LazyTensor]]
    make_settings: Callable[[Sequence[str]], dict[str, Any]]  # from modules that are not quantized
    of_packed_experts: bool = False  # the matrices are stacks of transposed experts


def _describe_blocks(unquantized: Sequence[str]) -> dict[str, Any]:
    """Describe fp8 blocks; transformers and vLLM expect fp8 in all other linear layers."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK_SIZE, BLOCK_SIZE],
        "modules_to_not_convert": list(unquantized),
    }


def _describe_experts(unquantized: Sequence[str]) -> dict[str, Any]:
    """Describe mxfp4 of gpt-oss, which quantizes experts only."""
    return {"quant_method": "mxfp4", "modules_to_not_convert": list(unquantized)}


def _describe_rows(unquantized: Sequence[str]) -> dict[str, Any]:
    """Describe fp8 with a scale per row; inputs are quantized with a scale per token."""
    weights = {"num_bits": 8, "strategy": "channel", "dynamic": False}
    inputs = {"num_bits": 8, "strategy": "token", "dynamic": True}
    return _describe_compressed("float-quantized", weights, inputs, unquantized)


def _describe_nvfp4(unquantized: Sequence[str]) -> dict[str, Any]:
    """Describe nvfp4 weights; inputs are not quantized."""
    weights = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "dynamic": False}
    return _describe_compressed("nvfp4-pack-quantized", weights, None, unquantized)


def _describe_compressed(
    layout: str,
    weights: dict[str, Any],
    inputs: dict[str, Any] | None,
    unquantized: Sequence[str],
) -> dict[str, Any]:
    """Return the settings of compressed-tensors for floating-point numbers."""
    common = {"type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": weights | common,
        "input_activations": None if inputs is None else inputs | common,
        "output_activations": None,
        "format": layout,
    }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": list(unquantized),
    }


def _encode_each(
    encode: Callable[[LazyTensor, str], dict[str, LazyTensor]], matrices: Mapping[str, LazyTensor]
) -> dict[str, LazyTensor]:
    """Encode each matrix separately."""
    tensors = {}
    for name, matrix in matrices.items():
        tensors.update(encode(matrix, name))
    return tensors


TARGETS = {
    "fp8-block": Target(partial(_encode_each, encode_blocks), _describe_blocks),
    "fp8-channel": Target(partial(_encode_each, encode_rows), _describe_rows),
    "mxfp4": Target(
        partial(_encode_each, encode_experts), _describe_experts, of_packed_experts=True
    ),
    "nvfp4": Target(encode_nvfp4, _describe_nvfp4),
}

# Modules that vLLM fuses with another one: it decodes all of them with one scale per matrix.
_FUSED_MODULES = {
    "k_proj": "q_proj",
    "v_proj": "q_proj",
    "kv_a_proj_with_mqa": "q_a_proj",
    "up_proj": "gate_proj",
    "w3": "w1",
}


def group_fused(matrices: Mapping[str, LazyTensor]) -> list[dict[str, LazyTensor]]:
    """Return matrices by name in groups that programs fuse into one matrix."""
    groups: dict[tuple[str, str], dict[str, LazyTensor]] = defaultdict(dict)
    for name, matrix in matrices.items():
        parent, _, module = name.removesuffix(".weight").rpartition(".")
        first_module = _FUSED_MODULES.get(module, module)
        groups[parent, first_module][name] = matrix
    return list(groups.values())

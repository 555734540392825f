"""Matrices in the encodings of quantized releases, each with the values that its library decodes.

    python quantized_write.py DIRECTORY ROWS COLUMNS SEED PACKAGES

Each case is a directory with `model.safetensors` (the encoded tensors of matrix.weight, and of
experts), `expected.safetensors` (the decoded ones) and `quantization_config.json`. PACKAGES is a directory with
autoawq and auto-gptq.
"""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]


class Case(NamedTuple):
    """Encoded tensors, the decoded tensor and the `quantization_config`."""

    name: str
    tensors: Tensors
    expected: Tensors
    settings: dict[str, Any]


def write_transformers(rows: int, columns: int) -> Iterator[Case]:
    """fp8 in blocks, per tensor, with e8m0 scales, of experts; mxfp4 of gpt-oss."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    fp8 = Fp8Dequantize(None)
    blocks = (rows // 16, columns // 32)
    exponents = torch.randint(118, 131, blocks, dtype=torch.uint8)
    scales = {
        "block": torch.rand(blocks) / 100,
        "block_bf16": (torch.rand(blocks) / 100).bfloat16(),
        "block_e8m0": exponents.view(torch.float8_e8m0fnu),
        "block_u8": exponents,
        "tensor": torch.tensor(0.0173),
    }
    for name, scale in scales.items():
        values = (torch.randn(rows, columns) * 100).to(torch.float8_e4m3fn)
        expected = fp8._dequantize_one(values, scale, torch.bfloat16)
        size = [16, 32] if name.startswith("block") else None
        yield Case(
            f"fp8_{name}",
            {"matrix.weight": values, "matrix.weight_scale_inv": scale},
            {"matrix.weight": expected},
            {"quant_method": "fp8", "weight_block_size": size},
        )

    values = (torch.randn(2, rows, columns) * 100).to(torch.float8_e4m3fn)
    scale = torch.rand(2, *blocks) / 100
    yield Case(
        "fp8_experts",
        {"experts.down_proj": values, "experts.down_proj_scale_inv": scale},
        {"experts.down_proj": fp8._dequantize_one(values, scale, torch.bfloat16)},
        {"quant_method": "fp8", "weight_block_size": [16, 32]},
    )

    blocks = torch.randint(256, (3, rows, columns // 32, 16), dtype=torch.uint8)
    exponents = torch.randint(110, 134, (3, rows, columns // 32), dtype=torch.uint8)
    yield Case(
        "mxfp4",
        {"experts.down_proj_blocks": blocks, "experts.down_proj_scales": exponents},
        {"experts.down_proj": convert_moe_packed_tensors(blocks, exponents)},
        {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    )


INT = {"type": "int", "symmetric": True}
FLOAT = {"type": "float", "symmetric": True}
# name -> format, arguments of the weights, dtype of the model
COMPRESSED: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    "int4_group": (
        "pack-quantized",
        INT | {"num_bits": 4, "strategy": "group", "group_size": 32},
        torch.bfloat16,
    ),
    "int4_zeros": (
        "pack-quantized",
        INT | {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
        torch.float16,
    ),
    "int3_zeros": (
        "pack-quantized",
        INT | {"num_bits": 3, "strategy": "channel", "symmetric": False},
        torch.bfloat16,
    ),
    "int8_packed": (
        "pack-quantized",
        INT | {"num_bits": 8, "strategy": "channel"},
        torch.float32,
    ),
    "int8_channel": (
        "int-quantized",
        INT | {"num_bits": 8, "strategy": "channel"},
        torch.bfloat16,
    ),
    "int8_zeros": (
        "naive-quantized",
        INT | {"num_bits": 8, "strategy": "channel", "symmetric": False},
        torch.bfloat16,
    ),
    "fp8_channel": (
        "float-quantized",
        FLOAT | {"num_bits": 8, "strategy": "channel"},
        torch.bfloat16,
    ),
    "fp8_tensor": ("naive-quantized", FLOAT | {"num_bits": 8, "strategy": "tensor"}, torch.float32),
    "fp8_block": (
        "float-quantized",
        FLOAT | {"num_bits": 8, "strategy": "block", "block_structure": [24, 24]},
        torch.bfloat16,
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        FLOAT | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16},
        torch.bfloat16,
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        FLOAT | {"num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
        torch.bfloat16,
    ),
    "mxfp8": (
        "mxfp8-quantized",
        FLOAT | {"num_bits": 8, "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
        torch.bfloat16,
    ),
}


def write_compressed(rows: int, columns: int) -> Iterator[Case]:
    """The formats of compressed-tensors."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    for name, (layout, fields, dtype) in COMPRESSED.items():
        args = QuantizationArgs(**fields)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        matrix = torch.randn(rows, columns, dtype=dtype)
        if fields["strategy"] == "block":
            height, width = fields["block_structure"]
            padding = (0, -columns % width, 0, -rows % height)
            padded = torch.nn.functional.pad(matrix, padding)
            blocks = padded.unflatten(0, (-1, height)).unflatten(2, (-1, width))
            low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
        elif fields["strategy"] == "tensor":
            low, high = matrix.amin().view(1), matrix.amax().view(1)
        else:
            width = fields.get("group_size") or columns
            groups = matrix.unflatten(1, (-1, width))
            low, high = groups.amin(2), groups.amax(2)

        whole = None
        if fields["strategy"] == "tensor_group":
            whole = generate_gparam(low.min(), high.max())
        scale, zero = calculate_qparams(low, high, args, global_scale=whole)
        state = {"weight": matrix, "weight_scale": scale, "weight_zero_point": zero}
        if whole is not None:
            state["weight_global_scale"] = whole
        compressor = BaseCompressor.load_from_registry(layout)
        compressed = compressor.compress(state, scheme)
        decoded = compressor.decompress(dict(compressed), scheme)["weight"]
        weights = {key: value for key, value in fields.items() if key != "scale_dtype"}
        group = {"weights": weights, "targets": ["Linear"]}
        yield Case(
            f"compressed_{name}",
            {f"matrix.{key}": value for key, value in compressed.items()},
            {"matrix.weight": decoded},
            {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"0": group}},
        )


def write_bitsandbytes(rows: int, columns: int) -> Iterator[Case]:
    """nf4 and fp4, also with double quantization, and int8."""
    from bitsandbytes import functional

    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            matrix = torch.randn(rows, columns, dtype=torch.bfloat16)
            packed, state = functional.quantize_4bit(
                matrix,
                compress_statistics=nested,
                quant_type=kind,
            )
            tensors = {"matrix.weight": packed}
            for key, value in state.as_dict(packed=True).items():
                tensors[f"matrix.weight.{key}"] = value
            yield Case(
                f"bitsandbytes_{kind}{'_nested' if nested else ''}",
                tensors,
                {"matrix.weight": functional.dequantize_4bit(packed, state)},
                {"quant_method": "bitsandbytes", "load_in_4bit": True},
            )

    codes, scales, _ = functional.int8_vectorwise_quant(torch.randn(rows, columns).half())
    yield Case(
        "bitsandbytes_int8",
        {
            "matrix.weight": codes,
            "matrix.SCB": scales,
            "matrix.weight_format": torch.tensor(0, dtype=torch.uint8),
        },
        {"matrix.weight": functional.int8_vectorwise_dequant(codes, scales)},
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
    )


def write_modelopt(rows: int, columns: int) -> Iterator[Case]:
    """fp8 per tensor, and nvfp4."""
    from modelopt.torch.quantization.qtensor.fp8_tensor import FP8QTensor
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    matrix = torch.randn(rows, columns, dtype=torch.bfloat16)
    values, scale = FP8QTensor.quantize(matrix.float())
    yield Case(
        "modelopt_fp8",
        {
            "matrix.weight": values._quantized_data,
            "matrix.weight_scale": scale.flatten()[0].clone(),
            "matrix.input_scale": torch.tensor(0.5),
        },
        {"matrix.weight": values.dequantize(torch.float32, scale=scale)},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
    )
    codes, scale, whole = NVFP4QTensor.quantize(matrix, 16)
    expected = codes.dequantize(
        torch.bfloat16,
        scale=scale,
        double_scale=whole,
        block_sizes={-1: 16},
    )
    yield Case(
        "modelopt_nvfp4",
        {
            "matrix.weight": codes._quantized_data,
            "matrix.weight_scale": scale,
            "matrix.weight_scale_2": whole,
        },
        {"matrix.weight": expected},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    )


def load_file_of(path: str) -> ModuleType:
    """Import one file of a package in PACKAGES, whose others need more packages."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, Path(sys.argv[5]) / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_awq(rows: int, columns: int) -> Iterator[Case]:
    """The gemm layout of AutoAWQ."""
    utils = load_file_of("awq/utils/packing_utils.py")

    def make_words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, shape).int()

    groups = columns // 32
    words, zeros = make_words(columns, rows // 8), make_words(groups, rows // 8)
    scales = (torch.rand(groups, rows) / 10).half()
    yield Case(
        "awq",
        {"matrix.qweight": words, "matrix.qzeros": zeros, "matrix.scales": scales},
        {"matrix.weight": utils.dequantize_gemm(words, zeros, scales, 4, 32).t()},
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
    )


def write_gptq(rows: int, columns: int) -> Iterator[Case]:
    """Versions 1 and 2 of the layout of AutoGPTQ, also with act order."""
    module = load_file_of("auto_gptq/nn_modules/qlinear/qlinear_cuda.py")
    groups = columns // 32
    for name, bits, is_ordered in (
        *(("4", 4, True), ("4_act_order", 4, False), ("v2", 4, True)),
        *(("2", 2, True), ("3", 3, True), ("8_act_order", 8, False)),
    ):
        linear = torch.nn.Linear(columns, rows, bias=False).half()
        scales = (torch.rand(rows, groups) / 2**bits).half() + 0.01
        zeros = torch.randint(1, 2**bits, (rows, groups)).float()
        order = torch.arange(columns) // 32
        if not is_ordered:
            order = order[torch.randperm(columns)]
        layer = module.QuantLinear(bits, 32, columns, rows, bias=False)
        # Values in the range of the integers
        codes = torch.randint(2**bits, (rows, columns))
        factors = scales[:, order].float()
        linear.weight.data = (codes - zeros[:, order]).half() * factors.half()
        layer.pack(linear, scales, zeros.clone(), order.int())
        tensors = {
            "matrix.qweight": layer.qweight,
            "matrix.qzeros": layer.qzeros,
            "matrix.scales": layer.scales,
            "matrix.g_idx": layer.g_idx.int(),
        }
        settings = {"quant_method": "gptq", "bits": bits, "group_size": 32}
        if name == "v2":  # zero points as they are: 1 more in each of 8 fields
            tensors["matrix.qzeros"] = layer.qzeros + 0x11111111
            settings["checkpoint_format"] = "gptq_v2"
        # The product with the identity: sums of one value and zeros.
        expected = layer(torch.eye(columns, dtype=torch.float16)).t()
        yield Case(f"gptq_{name}", tensors, {"matrix.weight": expected}, settings)


WRITERS = (
    *(write_transformers, write_compressed, write_bitsandbytes),
    *(write_modelopt, write_awq, write_gptq),
)


def main() -> None:
    directory, rows, columns, seed = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    torch.manual_seed(seed)

    for write in WRITERS:
        for case in write(rows, columns):
            folder = directory / case.name
            folder.mkdir(parents=True)
            tensors = {name: tensor.contiguous() for name, tensor in case.tensors.items()}
            save_file(tensors, folder / "model.safetensors")
            expected = {name: tensor.contiguous() for name, tensor in case.expected.items()}
            save_file(expected, folder / "expected.safetensors")
            settings = json.dumps(case.settings, indent=1) + "\n"
            (folder / "quantization_config.json").write_text(settings)


if __name__ == "__main__":
    main()

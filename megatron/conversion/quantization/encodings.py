"""Encodings of quantized weights: one table of stored tensors and readers.

To add an encoding, add a row to `ENCODINGS` and name it in `METHODS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.conversion.quantization.encoded_matrix import EncodedMatrix, MatrixElements
from megatron.core.dist_checkpointing.mapping import LazyTensor
from megatron.core.safe_files import schema
from megatron.core.safe_files.reading import read_json
from megatron.core.wings import resolve

_PACKAGE = "megatron.conversion.quantization"
WITHOUT_QUANTIZATION = "if no weight is quantized, give --hf-ignore-fields quantization_config"


class Encoding(NamedTuple):
    """The stored tensors of a matrix, by role, and the function that reads them."""

    reader: str  # "module:function" of this package: EncodedMatrix -> MatrixElements
    suffixes: Mapping[str, str]  # role -> end of the name
    marker: str  # role of the tensor by which a matrix is recognized
    optional: tuple[str, ...] = ()  # roles
    target: str = "weight"  # end of the name of the decoded matrix


ENCODINGS: dict[str, Encoding] = {
    # Values keep the name of the matrix, also of packed experts (gate_up_proj).
    "fp8": Encoding(
        "scaled_values:read_fp8", {"values": "", "scales": "_scale_inv"}, "scales", target=""
    ),
    "mxfp4 of gpt-oss": Encoding(
        "fp4_values:read_experts", {"values": "_blocks", "scales": "_scales"}, "values", target=""
    ),
    "compressed-tensors, packed": Encoding(
        "packed_integers:read_compressed",
        {
            "values": "weight_packed",
            "scales": "weight_scale",
            "shape": "weight_shape",
            "zero_points": "weight_zero_point",
            "groups": "weight_g_idx",
            "global_scale": "weight_global_scale",
        },
        "values",
        optional=("shape", "zero_points", "groups", "global_scale"),
    ),
    "compressed-tensors": Encoding(
        "scaled_values:read_compressed",
        {"values": "weight", "scales": "weight_scale", "zero_points": "weight_zero_point"},
        "scales",
        optional=("zero_points",),
    ),
    "nvfp4 of modelopt": Encoding(
        "fp4_values:read_nvfp4",
        {"values": "weight", "scales": "weight_scale", "global_scale": "weight_scale_2"},
        "global_scale",
    ),
    "fp8 of modelopt": Encoding(
        "scaled_values:read_modelopt", {"values": "weight", "scales": "weight_scale"}, "scales"
    ),
    "awq": Encoding(
        "packed_integers:read_awq",
        {"values": "qweight", "zero_points": "qzeros", "scales": "scales"},
        "values",
    ),
    "gptq": Encoding(
        "packed_integers:read_gptq",
        {"values": "qweight", "zero_points": "qzeros", "scales": "scales", "groups": "g_idx"},
        "values",
        optional=("groups",),
    ),
    "4-bit of bitsandbytes": Encoding(
        "codebook_values:read_4bit",
        {
            "values": "weight",
            "scales": "weight.absmax",
            "codebook": "weight.quant_map",
            "nested_scales": "weight.nested_absmax",
            "nested_codebook": "weight.nested_quant_map",
            "nf4": "weight.quant_state.bitsandbytes__nf4",
            "fp4": "weight.quant_state.bitsandbytes__fp4",
        },
        "scales",
        optional=("nested_scales", "nested_codebook", "nf4", "fp4"),
    ),
    "int8 of bitsandbytes": Encoding(
        "scaled_values:read_int8",
        {"values": "weight", "scales": "SCB", "format": "weight_format"},
        "scales",
        optional=("format",),
    ),
}

_SIZES = schema.optional(schema.sequence(schema.integer(1), 2, least=2))
_WEIGHTS = schema.record(
    {
        "num_bits": schema.integer(1, 8),
        "type?": schema.one_of("int", "float"),
        "symmetric?": schema.boolean,
        "group_size?": schema.optional(schema.integer(-1)),
        "block_structure?": _SIZES,
    }
)
_COMPRESSED = schema.record(
    {
        "format?": schema.optional(schema.text(256)),
        "config_groups": schema.mapping(schema.record({"weights": schema.optional(_WEIGHTS)})),
    }
)
_ALGORITHM = schema.one_of(
    "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "MIXED_PRECISION"
)
_GROUP_SIZE = schema.integer(-1, 1 << 20)


class Method(NamedTuple):
    """A `quant_method` of config.json."""

    check: schema.Check
    encodings: tuple[str, ...]  # in the order in which matrices are recognized


METHODS: dict[str, Method] = {
    "fp8": Method(schema.record({"weight_block_size?": _SIZES}), ("fp8",)),
    "fbgemm_fp8": Method(schema.anything, ("fp8 of modelopt",)),
    "mxfp4": Method(schema.anything, ("mxfp4 of gpt-oss",)),
    "compressed-tensors": Method(_COMPRESSED, ("compressed-tensors, packed", "compressed-tensors")),
    "modelopt": Method(
        schema.record({"quant_algo": schema.optional(_ALGORITHM)}),
        ("nvfp4 of modelopt", "fp8 of modelopt"),
    ),
    "awq": Method(
        schema.record(
            {
                "bits": schema.integer(1, 8),
                "group_size": _GROUP_SIZE,
                "version?": schema.text(256),
            }
        ),
        ("awq",),
    ),
    "gptq": Method(
        schema.record(
            {
                "bits": schema.one_of(2, 3, 4, 8),
                "group_size": _GROUP_SIZE,
                "checkpoint_format?": schema.optional(schema.one_of("gptq", "gptq_v2")),
            }
        ),
        ("gptq",),
    ),
    "bitsandbytes": Method(schema.anything, ("4-bit of bitsandbytes", "int8 of bitsandbytes")),
}

# Scales of inputs and of the key-value cache, which no weight depends on.
UNUSED = (
    *(".input_scale", ".input_zero_point", ".input_global_scale", ".activation_scale"),
    *(".output_scale", ".k_scale", ".v_scale", ".q_scale"),
)
# Ends of names of tensors without which the weights would be others -> reason.
_CHANGES = {
    ".pre_quant_scale": "scales inputs of a quantized layer",
    ".act_scale": "scales inputs of a quantized layer",
}
_METHOD = schema.record({"quant_method": schema.text(256)})


def check_settings(settings: Any, location: str = "config.json: quantization_config") -> None:
    """Check a `quantization_config`. Raises ValueError for a method that is not supported."""
    _METHOD(settings, location)
    method = settings["quant_method"]
    if method not in METHODS:
        raise ValueError(
            f"{location} of {schema.format_value(method)} is not supported, only "
            f"{', '.join(METHODS)} are: convert the unquantized original of the model; or, "
            f"{WITHOUT_QUANTIZATION}"
        )
    METHODS[method].check(settings, location)
    for name in ("transform_config", "sparsity_config"):
        value = settings.get(name)
        is_empty = not value or (isinstance(value, dict) and value.get("format") == "dense")
        if method == "compressed-tensors" and not is_empty:
            raise ValueError(
                f"{location}: {name} = {schema.format_value(value)} is not supported: its weights "
                "are not those of the model's layers. Convert the unquantized original"
            )


def read_other_settings(directory: Path) -> Any:
    """Return the `quantization_config` in a file next to config.json; None if there is none.

    Raises ValueError for settings that are not supported.
    """
    for name, convert in _OTHER_SETTINGS.items():
        path = directory / name
        if path.exists():
            settings = convert(schema.record({})(read_json(path), str(path)), str(path))
            check_settings(settings, str(path))
            return settings
    return None


def _convert_modelopt(content: Mapping[str, Any], location: str) -> dict[str, Any]:
    fields = schema.record({"quantization": schema.record({})})(content, location)
    return {"quant_method": "modelopt", **fields["quantization"]}


def _convert_gptq(content: Mapping[str, Any], location: str) -> dict[str, Any]:
    return {"quant_method": "gptq", **content}


def _convert_awq(content: Mapping[str, Any], location: str) -> dict[str, Any]:
    schema.record({"w_bit": schema.COUNT, "q_group_size": _GROUP_SIZE})(content, location)
    sizes = {"bits": content["w_bit"], "group_size": content["q_group_size"]}
    return {"quant_method": "awq", **content, **sizes}


# Files that describe the quantization if config.json does not, of NVIDIA's Model Optimizer,
# AutoGPTQ and AutoAWQ -> function that returns the fields of `quantization_config`.
_OTHER_SETTINGS = {
    "hf_quant_config.json": _convert_modelopt,
    "quantize_config.json": _convert_gptq,
    "quant_config.json": _convert_awq,
}


def dequantize(
    tensors: Mapping[str, LazyTensor],
    settings: Mapping[str, Any],
    dtype: torch.dtype,
    directory: Path,
) -> dict[str, LazyTensor]:
    """Return `tensors` with decoded matrices in `dtype` instead of those that encode them.

    `settings` are a checked `quantization_config`. Raises ValueError if tensors are missing or
    of the wrong shape; a read raises it for scales that are not finite or negative.
    """
    result = {name: tensor for name, tensor in tensors.items() if not name.endswith(UNUSED)}
    for elements in list_matrices(result, settings, dtype, directory):
        result[elements.matrix.name] = elements.decode(dtype)
    return result


def list_matrices(
    tensors: dict[str, LazyTensor],
    settings: Mapping[str, Any],
    dtype: torch.dtype,
    directory: Path,
) -> list[MatrixElements]:
    """Remove the tensors of encoded matrices, and return the matrices.

    Raises ValueError as `dequantize`.
    """
    encodings = [ENCODINGS[name] for name in METHODS[settings["quant_method"]].encodings]
    matrices = []
    for encoding in encodings:
        marker = encoding.suffixes[encoding.marker]
        for name in [name for name in tensors if name.endswith(marker)]:
            stem = name.removesuffix(marker)
            matrix_tensors, names = _take_tensors(tensors, encoding, stem, directory)
            target = stem + encoding.target
            matrix = EncodedMatrix(target, matrix_tensors, names, settings, dtype, directory)
            matrices.append((matrix, encoding.reader))
    _check_leftovers(tensors, encodings, directory)
    return [resolve(f"{_PACKAGE}.{reader}")(matrix) for matrix, reader in matrices]


def _take_tensors(
    tensors: dict[str, LazyTensor], encoding: Encoding, stem: str, directory: Path
) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """Remove the tensors of a matrix, and return them and their names by role."""
    matrix_tensors: dict[str, LazyTensor] = {}
    names: dict[str, str] = {}
    for role, suffix in encoding.suffixes.items():
        name = stem + suffix
        if name in tensors:
            matrix_tensors[role] = tensors.pop(name)
            names[role] = name
        elif role not in encoding.optional:
            marker = stem + encoding.suffixes[encoding.marker]
            raise ValueError(
                f"{directory}: the weights have {marker}, but lack {name}, which is needed to "
                "decode it: the download is incomplete, or config.json is of another model"
            )
    return matrix_tensors, names


def _check_leftovers(
    tensors: Mapping[str, LazyTensor], encodings: Sequence[Encoding], directory: Path
) -> None:
    """Raise ValueError for tensors of encoded matrices that were not decoded."""
    suffixes: set[str] = set()
    for encoding in encodings:
        suffixes.update(encoding.suffixes.values())
    # Matrices that are not quantized have these suffixes, too.
    suffixes -= {"", "weight"}
    for name in tensors:
        if name.endswith(tuple(suffixes)):
            raise ValueError(
                f"{directory}: the weights have {name}, but lack the other tensors of this matrix: "
                "the download is incomplete, or config.json is of another model"
            )
        for suffix, reason in _CHANGES.items():
            if name.endswith(suffix):
                raise ValueError(
                    f"{directory}: {name} {reason}, which is not supported: convert the "
                    "unquantized original of the model"
                )

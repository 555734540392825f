"""Elements and scales of quantized matrices, under the keys of the model.

The layouts of a family move elements between matrices (q, k and v become one) without changing
them. Two sources of the same model therefore have the elements without scales and the scales alone:
their matrices are decoded with scales of 1, and with elements of 1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from megatron.conversion.huggingface.directory import CONFIG, QUANTIZATION, HuggingFaceSource
from megatron.conversion.huggingface.weight_files import open_weights
from megatron.conversion.options import ReadOptions
from megatron.conversion.quantization.encoded_matrix import EncodedMatrix
from megatron.conversion.quantization.encodings import UNUSED, check_settings, list_matrices
from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape
from megatron.core.safe_files import schema
from megatron.core.safe_files.reading import parse_json, read_json

Tensors = Mapping[str, LazyTensor]

_BLOCK_SIZE = 64  # of nf4
_NOT_ENCODED = -1.0  # scale of the elements of other matrices


def open_components(directory: Path, encoding: str) -> tuple[Tensors, Tensors] | None:
    """Return elements and scales of the matrices of a model of transformers in nf4 or fp8.

    Elements of nf4 are indices. Matrices in another encoding have scales of -1. None if the
    directory contains no quantized model.
    """
    path = directory / CONFIG
    if not path.exists():
        return None
    hf = read_json(path)
    settings = hf.pop(QUANTIZATION, None)
    if settings is None:
        return None
    check_settings(settings)
    elements: dict[str, LazyTensor] = {}
    for name, tensor in open_weights(directory).items():
        if not name.endswith(UNUSED):
            elements[name] = tensor
    matrices = list_matrices(elements, settings, torch.float32, directory)
    scales: dict[str, LazyTensor] = {}
    for name, tensor in elements.items():
        scales[name] = _fill(tensor.shape, _NOT_ENCODED)

    # Decode each matrix twice.
    separate = _separate_nf4 if encoding == "nf4" else _separate_fp8
    for matrix, decoder in matrices:
        name = matrix.name
        pair = separate(matrix)
        if pair is None:
            elements[name] = decoder(matrix)
            scales[name] = _fill(elements[name].shape, _NOT_ENCODED)
            continue
        with_elements, with_scales = pair
        elements[name] = decoder(with_elements)
        scales[name] = decoder(with_scales)

    # The matrices are no longer quantized.
    options = ReadOptions(ignored_fields=[QUANTIZATION], no_optim=True)
    elements_source = HuggingFaceSource(directory, options, elements, hf)
    scales_source = HuggingFaceSource(directory, options, scales, hf)
    return elements_source.tensors, scales_source.tensors


def _separate_fp8(matrix: EncodedMatrix) -> tuple[EncodedMatrix, EncodedMatrix] | None:
    """Return the matrix with scales of 1, and with elements of 1; None if it is not in fp8."""
    values = matrix.tensors["values"]
    scales = matrix.tensors["scales"]
    if values.dtype != torch.float8_e4m3fn:
        return None
    # Scales of 1
    with_elements = dict(matrix.tensors)
    with_elements["scales"] = _fill(scales.shape, 1.0)
    # Elements of 1
    with_scales = dict(matrix.tensors)
    with_scales["values"] = _fill(values.shape, 1.0, values.dtype)
    return replace(matrix, tensors=with_elements), replace(matrix, tensors=with_scales)


def _separate_nf4(matrix: EncodedMatrix) -> tuple[EncodedMatrix, EncodedMatrix] | None:
    """Return the matrix with scales of 1, and with elements of 1; None if it is not in nf4."""
    state = matrix.tensors.get("nf4")
    if state is None:
        return None
    # The description of the matrix states the dtype to which products are rounded.
    location = matrix.names["nf4"]
    content = bytes(state.read_all().tolist())
    fields = schema.record({})(parse_json(content, location), location)
    if fields.get("blocksize") != _BLOCK_SIZE:
        return None
    fields = {**fields, "dtype": "float32"}
    unrounded = torch.tensor(list(json.dumps(fields).encode()), dtype=torch.uint8)

    # Indices and scales of 1
    with_elements = dict(matrix.tensors)
    with_elements.pop("nested_scales", None)
    with_elements.pop("nested_codebook", None)
    with_elements["nf4"] = _wrap(unrounded)
    with_elements["scales"] = _fill(matrix.tensors["scales"].shape, 1.0)
    with_elements["codebook"] = _wrap(torch.arange(16.0))
    # Elements of 1
    with_scales = dict(matrix.tensors)
    with_scales["nf4"] = _wrap(unrounded)
    with_scales["codebook"] = _wrap(torch.ones(16))
    return replace(matrix, tensors=with_elements), replace(matrix, tensors=with_scales)


def _fill(shape: Shape, value: float, dtype: torch.dtype = torch.float32) -> LazyTensor:
    """Return a tensor with one value."""

    def read(offset: Shape, shape: Shape) -> torch.Tensor:
        values = torch.full(shape, value)
        return values.to(dtype)

    return LazyTensor(shape, dtype, read)


def _wrap(values: torch.Tensor) -> LazyTensor:
    """Return a vector in memory."""

    def read(offset: Shape, shape: Shape) -> torch.Tensor:
        start = offset[0]
        stop = start + shape[0]
        return values[start:stop]

    return LazyTensor(tuple(values.shape), values.dtype, read)

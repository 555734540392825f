"""Components of quantized matrices (codes, scales, zero points) under the keys of the model.

The layouts of a family move elements between matrices (q, k and v become one) without changing
them. So there is a source of the same model for each component, whose elements are the components
of the elements of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.huggingface.directory import CONFIG, HuggingFaceSource
from megatron.conversion.options import ReadOptions
from megatron.conversion.quantization.encoded_matrix import MatrixElements
from megatron.conversion.quantization.encodings import UNUSED, list_matrices
from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape
from megatron.core.encoded_elements import ElementFormat, Elements

Tensors = Mapping[str, LazyTensor]

# Components next to the fields of `Elements`
_FORMATS = "formats"  # index of the format plus 1; 0 is not encoded
_GROUPS = "groups"
COMPONENTS = (_FORMATS, _GROUPS, *Elements._fields)


@dataclass(frozen=True)
class ModelComponents:
    """Components of all elements of a model, which are read as matrices in fp32."""

    formats: Sequence[ElementFormat]
    tensors: Mapping[str, Tensors]  # by component and key

    def find_format(self, key: str, offset: Shape, shape: Shape) -> ElementFormat | None:
        """Return the format of a box, None if it has several ones or is not encoded."""
        indices = self._read(_FORMATS, key, offset, shape)
        first = int(indices[0, 0])
        if first == 0 or not (indices == first).all():
            return None
        return self.formats[first - 1]

    def read_groups(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        """Return indices, which are the same for elements of a box with one scale."""
        return self._read(_GROUPS, key, offset, shape)

    def read_elements(
        self, key: str, offset: Shape, shape: Shape, element_format: ElementFormat
    ) -> Elements:
        """Return the components of a box in a format."""
        codes = self._read("codes", key, offset, shape).to(torch.uint8)
        scales = self._read("scales", key, offset, shape)
        zero_points: torch.Tensor | None = None
        if element_format.zero_point_dtype is not None:
            zero_points = self._read("zero_points", key, offset, shape)
        matrix_scales: torch.Tensor | None = None
        if element_format.matrix_scale is not None:
            matrix_scales = self._read("matrix_scales", key, offset, shape)
        return Elements(codes, scales, zero_points, matrix_scales)

    def _read(self, name: str, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        """Return a component of a box: [rows, columns]."""
        return self.tensors[name][key].read(offset, shape).flatten(0, -2)


def open_components(directory: Path) -> ModelComponents | None:
    """Return the components of a model of transformers, None if no matrix is encoded."""
    if not (directory / CONFIG).exists():
        return None
    formats: list[ElementFormat] = []
    tensors: dict[str, Tensors] = {}
    options = ReadOptions(no_optim=True)
    for component in COMPONENTS:
        view = partial(view_matrices, component, formats)
        tensors[component] = HuggingFaceSource(directory, options, dequantize=view).tensors
        if not formats:
            return None
    return ModelComponents(formats, tensors)


def view_matrices(
    component: str,
    formats: list[ElementFormat],
    tensors: Tensors,
    settings: Mapping[str, Any],
    dtype: torch.dtype,
    directory: Path,
) -> dict[str, LazyTensor]:
    """Return a component of all matrices, zeros for those that are not encoded.

    `formats` gets the formats of the matrices.
    """
    result = {name: tensor for name, tensor in tensors.items() if not name.endswith(UNUSED)}
    matrices = list_matrices(result, settings, dtype, directory)
    for name, tensor in result.items():
        result[name] = _fill(tensor.shape, 0.0)
    for elements in matrices:
        result[elements.matrix.name] = _view_component(component, elements, formats)
    return result


def _view_component(
    component: str, elements: MatrixElements, formats: list[ElementFormat]
) -> LazyTensor:
    """Return a component of a matrix, zeros if the matrix does not have it."""
    element_format = elements.element_format
    dtype = elements.matrix.dtype  # of the model
    if dtype != torch.float32:
        roundings = (*element_format.roundings, dtype)
        element_format = element_format._replace(roundings=roundings)
    codes = elements.view_component("codes")
    if elements.column_groups is None:
        return _fill(codes.shape, 0.0)
    if component == _FORMATS:
        if element_format not in formats:
            formats.append(element_format)
        return _fill(codes.shape, float(formats.index(element_format) + 1))
    if component == _GROUPS:
        return elements.view_groups()
    is_absent = {
        "zero_points": element_format.zero_point_dtype is None,
        "matrix_scales": element_format.matrix_scale is None,
    }
    if is_absent.get(component, False):
        return _fill(codes.shape, 0.0)
    return elements.view_component(component)


def _fill(shape: Shape, value: float) -> LazyTensor:
    """Return a tensor with one value, fp32."""
    return LazyTensor(shape, torch.float32, partial(_read_filled, value))


def _read_filled(value: float, offset: Shape, shape: Shape) -> torch.Tensor:
    """Return a box of one value."""
    return torch.full(shape, value)

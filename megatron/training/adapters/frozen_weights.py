"""Frozen weights of a base model, which are encoded while they are loaded or keep their encoding.

A weight of a layer may consist of several matrices of the base model (q, k and v; gate and up; all
experts). It keeps their encoding if they have the same one, with the same groups of columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.dist_checkpointing.mapping import Shape, ShardedStateDict, ShardedTensor
from megatron.core.encoded_elements import ElementFormat, Elements
from megatron.core.module import MegatronModule
from megatron.core.object_path import path_of
from megatron.core.run_checkpoint.source import Source
from megatron.core.wings import resolve
from megatron.training.adapters.encoded_layers import (
    KEEP,
    EncodedLayer,
    count_frozen_bytes,
    index_encoded_layers,
)
from megatron.training.adapters.encoded_weight import ColumnGroups, EncodedWeight
from megatron.training.config.run_config import Config

_OPEN_COMPONENTS = "megatron.conversion.quantization.components:open_components"


class Components(Protocol):
    """Components of all elements of a base model, by key. Boxes are read as [rows, columns]."""

    def find_format(self, key: str, offset: Shape, shape: Shape) -> ElementFormat | None:
        """Return the format of a box, None if it has several ones or is not encoded."""
        ...

    def read_groups(self, key: str, offset: Shape, shape: Shape) -> Tensor:
        """Return indices, which are the same for elements of a box with one scale."""
        ...

    def read_elements(
        self, key: str, offset: Shape, shape: Shape, element_format: ElementFormat
    ) -> Elements:
        """Return the components of a box in a format."""
        ...


class _Rows(NamedTuple):
    """Rows of a weight that this rank has, of one matrix."""

    start: int  # first row, counted in the stack of matrices
    offset: Shape  # in the global tensor
    shape: Shape  # [rows, columns], or [1, rows, columns] of a stack


def open_stored_components(directory: str, encoding: str) -> Components | None:
    """Return the components of a base model, None if it has no encoded matrices.

    Raises ValueError if `encoding` is to keep them.
    """
    components: Components | None = resolve(_OPEN_COMPONENTS)(path_of(directory))
    if components is None and encoding == KEEP:
        raise ValueError(
            f"--lora-base-encoding {KEEP}: {directory} is not a quantized model of transformers, "
            "so its matrices have no encoding. Give that of the release as "
            "--pretrained-checkpoint, choose nf4 or fp8, or leave out --lora-base-encoding"
        )
    return components


def load_frozen_weights(
    state: ShardedStateDict,
    layers: Mapping[Tensor, EncodedLayer],
    source: Source,
    components: Components | None,
) -> None:
    """Fill the layers whose weights are in `state`, reading a matrix at a time.

    `components` are those of a base model with encoded matrices. Raises CheckpointError if a weight
    is missing or has another shape.
    """
    for key, entry in state.items():
        assert isinstance(entry, ShardedTensor) and entry.local is not None
        tensor = source.tensors.get(key)
        if tensor is None:
            raise CheckpointError(f"{source.description}: {key} is not in the checkpoint")
        if tensor.shape != entry.global_shape:
            raise CheckpointError(
                f"{source.description}: does not fit this model:\n  {key}: {tensor.shape} in the "
                f"checkpoint, {entry.global_shape} here"
            )
        layer = layers[entry.local]
        if allocate_weight(layer, entry, components):
            assert components is not None
            store_elements(layer, entry, components)
            continue
        for rows in _list_rows(entry):
            values = tensor.read(rows.offset, rows.shape)
            layer.store_rows(rows.start, values.flatten(0, -2))


def allocate_weight(
    layer: EncodedLayer, entry: ShardedTensor, components: Components | None, all_rows: bool = True
) -> bool:
    """Allocate the weight of a layer, and return whether it keeps the encoding of the base model.

    `all_rows` False looks at the first row of each matrix only.
    """
    assert entry.local is not None
    shape = tuple(entry.local.shape)
    device = layer.frozen.device
    encoding = None
    if components is not None:
        encoding = _find_encoding(layer, entry, components, all_rows)
    if encoding is not None:
        element_format, groups = encoding
        layer.frozen = EncodedWeight.allocate(element_format, shape, groups, device)
    elif layer.encoding is None:
        layer.frozen = torch.empty(shape, dtype=layer.weight.dtype, device=device)
    return encoding is not None


def store_elements(layer: EncodedLayer, entry: ShardedTensor, components: Components) -> None:
    """Fill a weight that keeps the encoding of the base model."""
    weight = layer.frozen
    assert isinstance(weight, EncodedWeight)
    for rows in _list_rows(entry):
        elements = components.read_elements(
            entry.key, rows.offset, rows.shape, weight.element_format
        )
        weight.store_rows(rows.start, elements)


def _find_encoding(
    layer: EncodedLayer, entry: ShardedTensor, components: Components, all_rows: bool
) -> tuple[ElementFormat, ColumnGroups] | None:
    """Return the encoding that all rows of a weight have and that the layer keeps, if any."""
    encoding: tuple[ElementFormat, ColumnGroups] | None = None
    for rows in _list_rows(entry):
        shape = rows.shape if all_rows else (*(1,) * (len(rows.shape) - 1), rows.shape[-1])
        element_format = components.find_format(entry.key, rows.offset, shape)
        if element_format is None:
            return None
        # Matrices in another encoding are encoded again.
        if layer.encoding is not None and element_format.values != layer.encoding.values:
            return None
        indices = components.read_groups(entry.key, rows.offset, shape)
        if encoding is None:
            encoding = (element_format, ColumnGroups.from_indices(indices[0]))
        expected_format, groups = encoding
        if element_format != expected_format or not groups.fit(indices):
            return None
    return encoding


def _list_rows(entry: ShardedTensor) -> Iterator[_Rows]:
    """Yield the rows of each matrix in the boxes of a weight."""
    for box in entry.boxes:
        assert box.tensor.is_contiguous()
        *lead, num_rows, columns = box.tensor.shape
        start = box.tensor.storage_offset() // columns
        *lead_offset, row, column = box.offset
        for index in range(math.prod(lead)):
            offset = (*(first + index for first in lead_offset), row, column)
            yield _Rows(start + index * num_rows, offset, (*(1 for _ in lead), num_rows, columns))


def plan_frozen_bytes(model: MegatronModule, config: Config) -> int:
    """Return the bytes of the frozen parameters of a chunk on the meta device.

    Weights that keep their encoding are counted as decoded if the base model is not there.
    """
    directory = config.checkpoint.pretrained_checkpoint or config.checkpoint.load
    if config.lora.lora_base_encoding == KEEP:
        assert directory is not None  # checked with the flags
        components: Components | None = resolve(_OPEN_COMPONENTS)(path_of(directory))
        layers = index_encoded_layers([model])
        for entry in model.sharded_state_dict().values():
            if isinstance(entry, ShardedTensor) and entry.local in layers:
                allocate_weight(layers[entry.local], entry, components, all_rows=False)
    return count_frozen_bytes(model)

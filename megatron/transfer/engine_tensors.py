"""Tensors of an inference engine, under Hugging Face names, as boxes of the model's tensors.

Rows of a stored tensor are rows of a parameter, possibly in another order, transposed or of one
expert. Each run of them is a strided view of memory with the shape of a box of the parameter, so
that an engine is a layout like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron.conversion.huggingface.export_plan import describe_model, locate_elements
from megatron.core.dist_checkpointing import Box, ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.mapping import TensorInfo
from megatron.core.safe_files.schema import abbreviate


def list_engine_tensors(
    args: Mapping[str, Any], dtype: torch.dtype | None = None
) -> dict[str, TensorInfo]:
    """Return shape and dtype of the tensors of a model by Hugging Face name.

    `args` are those of a checkpoint of the run (`open_checkpoint(path).args`), with
    `model_vocab_size`. `dtype` is that of weights, by default the run's. Raises ValueError for a
    model that transformers cannot express.
    """
    return describe_model(args, dtype).list_tensors()


def view_engine_tensors(
    tensors: Mapping[str, torch.Tensor], args: Mapping[str, Any]
) -> ShardedStateDict:
    """Return the target of a transfer that fills an engine's tensors in place.

    `tensors` are some or all of `list_engine_tensors(args)`: contiguous, zero at first (some models
    have rows without a parameter), and of one dtype per parameter of the model. Raises ValueError
    for another name or shape.
    """
    model = describe_model(args, None)
    _check_tensors(tensors, model.list_tensors())
    boxes: dict[str, list[Box]] = {}
    for parameter in model.parameters:
        # Each tensor is a file whose positions and strides count elements.
        starts = [(index, 0) for index in range(len(parameter.names))]
        for (offset, shape), (index, position), strides in locate_elements(parameter, starts, 1):
            tensor = tensors.get(parameter.names[index])
            if tensor is None:
                continue
            view = tensor.detach().as_strided(shape, strides, tensor.storage_offset() + position)
            boxes.setdefault(parameter.key, []).append(Box(offset, view))

    state: ShardedStateDict = {}
    for key, key_boxes in boxes.items():
        dtype = key_boxes[0].tensor.dtype
        state[key] = ShardedTensor(key, model.shapes[key], dtype, tuple(key_boxes))
    return state


def _check_tensors(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, TensorInfo]) -> None:
    """Raise ValueError for tensors that the model does not have, or in another shape."""
    faults = []
    for name, tensor in tensors.items():
        if name not in expected:
            faults.append(f"{name}: the model does not have it")
        elif tuple(tensor.shape) != expected[name].shape:
            faults.append(f"{name}: shape {tuple(tensor.shape)}, expected {expected[name].shape}")
        elif not tensor.is_contiguous():
            faults.append(f"{name}: strides {tensor.stride()}, expected a contiguous tensor")
    if faults:
        raise ValueError(
            "tensors of an engine must be some of list_engine_tensors(args):\n  "
            + abbreviate(faults, 20)
        )

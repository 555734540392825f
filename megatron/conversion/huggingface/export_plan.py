"""Where the elements of a training run's weights are stored in a Hugging Face model.

The plan lets the ranks of a run write the model from the tensors that they save anyway
(`dist_checkpointing.saving.model_export`). Its files are those of `write_huggingface`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.conversion.huggingface.directory_writer import (
    get_imported_fields,
    has_none,
    write_small_files,
)
from megatron.conversion.huggingface.families import choose_family
from megatron.conversion.huggingface.safetensors_files import lay_out_safetensors
from megatron.conversion.huggingface.stored_parameters import (
    StoredParameter,
    copied_parameters,
    stored_parameters,
)
from megatron.conversion.huggingface.weight_files import lay_out_weight_files, write_index
from megatron.conversion.model_space.model import model_config, model_tensors
from megatron.conversion.options import WriteOptions
from megatron.core.dist_checkpointing.mapping import Extent, Shape, TensorInfo
from megatron.core.dist_checkpointing.saving.model_export import (
    ExportFile,
    ExportPlan,
    locate_boxes,
)
from megatron.core.run_checkpoint.keys import is_trained

_STEM = "model"


FilePosition = tuple[int, int]  # number of a file, and a byte in it
# Offset and shape of a box, its first byte, and the bytes between neighbors along each axis.
LocatedBox = tuple[Extent, FilePosition, Shape]


class StoredModel(NamedTuple):
    """The Hugging Face model of a run."""

    fields: dict[str, Any]  # of config.json
    parameters: list[StoredParameter]
    shapes: dict[str, Shape]  # global shape by key
    dtypes: dict[str, torch.dtype]  # by key

    def list_tensors(self) -> dict[str, TensorInfo]:
        """Return shape and dtype of the stored tensors by name."""
        infos: dict[str, TensorInfo] = {}
        for parameter in self.parameters:
            dtype = self.dtypes[parameter.key]
            for name, shape in zip(parameter.names, parameter.stored_shapes(), strict=True):
                infos[name] = TensorInfo(shape, dtype)
        return infos


def describe_model(args: Mapping[str, Any], dtype: torch.dtype | None) -> StoredModel:
    """Return the Hugging Face model of a run with these arguments, in `dtype` or the run's.

    Raises ValueError for a model that transformers cannot express.
    """
    config = model_config(args, args["model_vocab_size"], "this run")
    if dtype is not None:
        is_bf16 = dtype == torch.bfloat16
        is_fp16 = dtype == torch.float16
        config = dataclasses.replace(config, bf16=is_bf16, fp16=is_fp16)
    family = choose_family(config, args.get("hf_model_type"))
    fields = family.write_config(config, get_imported_fields(family, config, args))
    shapes = model_tensors(config)
    parameters = list(
        stored_parameters(shapes, family.select_rows(config), family.layers, config, has_none)
    )
    parameters += copied_parameters(shapes, family.layers, config)

    # The values of biases are not known: each must have a place.
    missing = sorted(set(shapes) - {parameter.key for parameter in parameters})
    if missing:
        raise ValueError(
            f"models of type {family.model_type} have no place for {', '.join(missing[:3])}: leave "
            "out the flag that adds it (--disable-bias-linear)"
        )
    for field, name in family.switched_biases():
        if any(parameter.is_bias and name in parameter.key for parameter in parameters):
            fields[field] = True
    dtypes = {}
    for parameter in parameters:
        is_rounded = is_trained(parameter.key)
        dtypes[parameter.key] = config.params_dtype if is_rounded else torch.float32
    return StoredModel(fields, parameters, shapes, dtypes)


def plan_export(
    args: Mapping[str, Any],
    trusted: Sequence[Path] = (),
    max_shard_size: int = WriteOptions.max_shard_size,
    dtype: torch.dtype | None = None,
) -> ExportPlan:
    """Return the plan of the Hugging Face model of a run with these arguments.

    `args` are those that a checkpoint of the run has. The tokenizer that they name is copied if it
    is one of the files in `trusted`. Weights are cast to `dtype`; None keeps theirs. Raises
    ValueError for a model that transformers cannot express.
    """
    options = WriteOptions(trusted=tuple(trusted), max_shard_size=max_shard_size)
    model = describe_model(args, dtype)

    # Assign the tensors to files.
    weight_files = lay_out_weight_files(_STEM, model.list_tensors(), options.max_shard_size)
    files: dict[str, ExportFile] = {}
    starts: dict[str, FilePosition] = {}  # tensor -> file and position of its first byte
    for index, (file, tensors) in enumerate(weight_files.items()):
        layout = lay_out_safetensors(tensors)
        files[file] = ExportFile(layout.header, layout.size)
        for name, start in layout.starts.items():
            starts[name] = (index, start)

    # Locate every element.
    boxes_by_key: dict[str, list[LocatedBox]] = {}
    for parameter in model.parameters:
        tensor_starts = [starts[name] for name in parameter.names]
        boxes = locate_elements(parameter, tensor_starts, model.dtypes[parameter.key].itemsize)
        boxes_by_key.setdefault(parameter.key, []).extend(boxes)

    # Write the boxes of each tensor as a table.
    tables = {}
    for key, located in boxes_by_key.items():
        extents, box_starts, strides = zip(*located, strict=True)
        tables[key] = locate_boxes(extents, box_starts, strides, list(files))

    def add_small_files(directory: Path) -> None:
        write_index(directory, _STEM, weight_files)
        write_small_files(directory, args, model.fields, options)

    return ExportPlan(model.dtypes, tables, files, add_small_files)


def locate_elements(
    parameter: StoredParameter, starts: Sequence[FilePosition], itemsize: int
) -> Iterator[LocatedBox]:
    """Yield the boxes of the runs of rows of a parameter. The stored tensors begin at `starts`."""
    shape = parameter.shape
    stored_shapes = parameter.stored_shapes()
    row_shape = shape[1:]
    row_offset = (0,) * len(row_shape)
    # A box has one expert.
    one_expert = (1,) * len(parameter.lead)
    no_stride = (0,) * len(parameter.lead)

    first = 0  # row of the model
    for run in parameter.row_map:
        stored_shape = stored_shapes[run.source]
        file, position = starts[run.source]
        if parameter.packed is not None:
            (expert,) = parameter.lead
            matrix_bytes = math.prod(stored_shape[1:]) * itemsize
            position += expert * matrix_bytes

        # Bytes between neighbors along each axis of the model's parameter
        strides = _compute_strides(shape, itemsize)
        if parameter.transposed:
            strides = [itemsize, stored_shape[-1] * itemsize]
        row_stride = strides[0]

        num_rows = len(run.rows)
        box_offset = (*parameter.lead, first, *row_offset)
        box_shape = (*one_expert, num_rows, *row_shape)
        start = (file, position + run.rows.start * row_stride)
        box_strides = (*no_stride, run.rows.step * row_stride, *strides[1:])
        yield (box_offset, box_shape), start, box_strides
        first += num_rows


def _compute_strides(shape: Shape, itemsize: int) -> list[int]:
    """Return the bytes between neighbors along each axis of a row-major tensor."""
    strides = []
    stride = itemsize
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    strides.reverse()
    return strides

"""Where the elements of a training run's weights are stored in a Hugging Face model.

The plan lets the ranks of a run write the model from the tensors that they save anyway
(`dist_checkpointing.saving.model_export`). Its files are those of `write_huggingface`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.huggingface.directory import (
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
from megatron.core.dist_checkpointing.saving.model_export import (
    ExportedTensor,
    ExportFile,
    ExportPlan,
    TensorPlace,
)
from megatron.core.dist_checkpointing.source import TensorInfo
from megatron.core.run_checkpoint.keys import is_trained

_STEM = "model"


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
    config = model_config(args, args["model_vocab_size"], "this run")
    if dtype is not None:
        is_bf16 = dtype == torch.bfloat16
        is_fp16 = dtype == torch.float16
        config = dataclasses.replace(config, bf16=is_bf16, fp16=is_fp16)
    family = choose_family(config, args.get("hf_model_type"))
    fields = family.write_config(config, get_imported_fields(family, config, args))
    shapes = model_tensors(config)
    parts = list(
        stored_parameters(shapes, family.select_rows(config), family.layers, config, has_none)
    )
    parts += copied_parameters(shapes, family.layers, config)

    # The values of biases are not known: each must have a place.
    missing = sorted(set(shapes) - {part.key for part in parts})
    if missing:
        raise ValueError(
            f"models of type {family.model_type} have no place for {', '.join(missing[:3])}: leave "
            "out the flag that adds it (--disable-bias-linear)"
        )
    for field, name in family.switched_biases():
        if any(part.is_bias and name in part.key for part in parts):
            fields[field] = True

    # Lay out the files.
    dtypes = {}
    infos: dict[str, TensorInfo] = {}
    for part in parts:
        dtype = config.params_dtype if is_trained(part.key) else torch.float32
        dtypes[part.key] = dtype
        for name, shape in zip(part.names, part.stored_shapes(), strict=True):
            infos[name] = TensorInfo(shape, dtype)
    weight_files = lay_out_weight_files(_STEM, infos, options.max_shard_size)
    files: dict[str, ExportFile] = {}
    starts: dict[str, tuple[str, int]] = {}  # tensor -> file and position of its first byte
    for file, tensors in weight_files.items():
        layout = lay_out_safetensors(tensors)
        files[file] = ExportFile(layout.header, layout.size)
        for name, start in layout.starts.items():
            starts[name] = (file, start)

    # Locate every element.
    places: dict[str, list[TensorPlace]] = {}
    for part in parts:
        places.setdefault(part.key, []).extend(_locate(part, dtypes[part.key], starts))
    exported = {}
    for key, found in places.items():
        exported[key] = ExportedTensor(dtypes[key], tuple(found))

    def add_small_files(directory: Path) -> None:
        write_index(directory, _STEM, weight_files)
        write_small_files(directory, args, fields, options)

    return ExportPlan(exported, files, add_small_files)


def _locate(
    part: StoredParameter, dtype: torch.dtype, starts: Mapping[str, tuple[str, int]]
) -> Iterator[TensorPlace]:
    """Yield the places of the runs of rows of a parameter, or of the matrix of one expert."""
    itemsize = dtype.itemsize
    rest = part.shape[1:]
    first = 0  # row of the model
    for run in part.row_map:
        stored = part.stored_shapes()[run.source]
        file, position = starts[part.names[run.source]]
        if part.packed is not None:
            (expert,) = part.lead
            position += expert * math.prod(stored[1:]) * itemsize
        # Bytes between neighbors along each axis of the model's parameter.
        if part.transposed:
            row_stride = itemsize
            strides = [stored[-1] * itemsize]
        else:
            row_stride = math.prod(rest) * itemsize
            strides = [math.prod(rest[axis + 1 :]) * itemsize for axis in range(len(rest))]
        lead = len(part.lead)
        yield TensorPlace(
            offset=(*part.lead, first, *(0,) * len(rest)),
            shape=(*(1,) * lead, run.rows, *rest),
            file=file,
            position=position + run.start * row_stride,
            strides=(*(0,) * lead, run.step * row_stride, *strides),
        )
        first += run.rows

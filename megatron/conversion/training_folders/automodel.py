"""Checkpoints of NeMo Automodel.

<directory>/model/shard-*.safetensors: the weights, under the names of transformers. Each file has
    parts of tensors, with their offsets in its metadata (DCP_SHARDING_INFO), as torch's
    HuggingFaceStorageWriter writes them
<directory>/model/.metadata: a DCP directory instead (`model_save_format: torch_save`)
<directory>/model/.hf_metadata/config.json, model/consolidated/config.json: the model
<directory>/optim: the optimizer, a DCP directory

(Source: nemo-automodel 0.7.0, `components/checkpoint/checkpointing.py`, `stateful_wrappers.py`,
`_backports/filesystem.py`.)
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import partial
from pathlib import Path

from megatron.conversion.huggingface.directory import find_config
from megatron.conversion.huggingface.safetensors_files import open_safetensors, read_text_metadata
from megatron.conversion.model_space.lazy_tensors import join_boxes
from megatron.conversion.options import ReadOptions
from megatron.conversion.training_folders.dcp_files import read_optimizer, read_tensors
from megatron.conversion.training_folders.folder_source import FolderContents, FolderSource
from megatron.core.dist_checkpointing import CheckpointError, Reader
from megatron.core.dist_checkpointing.box_table import BoxTable
from megatron.core.dist_checkpointing.files import METADATA
from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape, to_absolute
from megatron.core.safe_files import schema
from megatron.core.safe_files.reading import parse_json

_MODEL_KEY = "model."
_OPTIMIZER_KEY = "optim."
_SHARDING = "DCP_SHARDING_INFO"
_STEP = re.compile(r"epoch_\d{1,15}_step_(\d{1,15})")
_OFFSETS = schema.mapping(
    schema.record({"saved_offsets": schema.sequence(schema.COUNT)}), keys=schema.key
)


def open_automodel(directory: Path, read_options: ReadOptions | None = None) -> FolderSource:
    """Open a checkpoint. Raises ValueError without weights or the config.json of the model."""
    read_options = read_options or ReadOptions()
    description = f"NeMo Automodel checkpoint {directory}"
    model = directory / "model"
    candidates = (model / ".hf_metadata", model / "consolidated", directory)
    config_dir = find_config(description, candidates, read_options.hf_config)
    if (model / METADATA).is_file():
        weights = read_tensors(Reader(model), _MODEL_KEY)
    else:
        weights = _join_safetensors(sorted(model.glob("shard-*.safetensors")), str(model))
    contents = FolderContents(description, config_dir, weights)
    match = _STEP.fullmatch(directory.name)
    if match is not None:
        contents.iteration = int(match[1])
    if (directory / "optim" / METADATA).is_file():
        reader = Reader(directory / "optim")
        contents.read_optimizer = partial(read_optimizer, reader, _OPTIMIZER_KEY, str)
    return FolderSource(contents, read_options)


def _join_safetensors(paths: list[Path], location: str) -> dict[str, LazyTensor]:
    """Return the tensors whose parts are in the files, by name.

    Raises CheckpointError if the parts do not cover a tensor exactly.
    """
    boxes: dict[str, dict[Shape, LazyTensor]] = defaultdict(dict)
    for path in paths:
        description = f"{path}: {_SHARDING}"
        text = read_text_metadata(path).get(_SHARDING, "{}")
        offsets = _OFFSETS(parse_json(text.encode(), description), description)
        for name, tensor in open_safetensors(path).items():
            origin = (0,) * len(tensor.shape)
            if name in offsets:
                origin = tuple(offsets[name]["saved_offsets"])
            if len(origin) != len(tensor.shape):
                schema.refuse(
                    f"{path}: the offset of {name}", origin, f"{len(tensor.shape)} numbers"
                )
            boxes[name].setdefault(origin, tensor)
    tensors = {}
    for name, parts in boxes.items():
        stops = [to_absolute(offset, tensor.shape) for offset, tensor in parts.items()]
        shape = tuple(map(max, zip(*stops, strict=True)))
        extents = [(offset, tensor.shape) for offset, tensor in parts.items()]
        problem = BoxTable.of(extents, len(shape)).find_gap_or_overlap(shape)
        if problem is not None:
            raise CheckpointError(
                f"{location}: the parts of {name} do not cover its shape {shape}: {problem}. A "
                "file is missing, or the files are of different saves"
            )
        tensors[name] = join_boxes(list(parts.items()), shape)
    return tensors

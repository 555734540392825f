"""Folders of accelerate's FSDP plugin, and of the trainer of transformers with it.

SHARDED_STATE_DICT:
<directory>/pytorch_model_fsdp_0: the weights, a DCP directory with the names of transformers
<directory>/optimizer_0: the optimizer, a DCP directory: `state` by parameter, and its groups
FULL_STATE_DICT:
<directory>/pytorch_model_fsdp.bin, optimizer.bin: the same as dictionaries of torch.save
Both:
<directory>/config.json: the model, which accelerate does not store: copy it there
<directory>/trainer_state.json: the step, from the trainer of transformers

FSDP 1 and 2 write the same files. (Source: accelerate 1.15.0, `utils/fsdp_utils.py`.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from megatron.conversion.huggingface.directory import find_config
from megatron.conversion.model_space.foreign import check_stored_tensor
from megatron.conversion.model_space.lazy_tensors import view_stored
from megatron.conversion.options import ReadOptions
from megatron.conversion.training_folders.dcp_files import read_optimizer, read_tensors
from megatron.conversion.training_folders.folder_source import (
    FolderContents,
    FolderSource,
    OptimizerContents,
    check_named_groups,
)
from megatron.core.dist_checkpointing import Reader
from megatron.core.dist_checkpointing.mapping import LazyTensor
from megatron.core.safe_files import safe_open, schema
from megatron.core.safe_files.reading import read_json

_MODEL = "pytorch_model_fsdp_0"
_WHOLE_MODEL = "pytorch_model_fsdp.bin"
_OPTIMIZER = "optimizer_0"
_WHOLE_OPTIMIZER = "optimizer.bin"
_TRAINER_STATE = "trainer_state.json"
_MODEL_KEY = "model."
_OPTIMIZER_KEY = "optimizer."
_TRAINER = schema.record({"global_step": schema.COUNT})
_TENSORS = schema.mapping(check_stored_tensor, keys=schema.key)
_WHOLE_STATE = schema.record(
    {"state": schema.mapping(_TENSORS, keys=schema.key), "param_groups": check_named_groups}
)


def open_accelerate(directory: Path, read_options: ReadOptions | None = None) -> FolderSource:
    """Open a folder. Raises ValueError without the config.json of the model."""
    read_options = read_options or ReadOptions()
    description = f"FSDP folder {directory}"
    contents = FolderContents(
        description,
        find_config(description, (directory,), read_options.hf_config),
        _read_weights(directory),
        iteration=_read_iteration(directory),
    )
    if (directory / _OPTIMIZER).is_dir():
        contents.read_optimizer = partial(
            read_optimizer, Reader(directory / _OPTIMIZER), _OPTIMIZER_KEY, str
        )
    elif (directory / _WHOLE_OPTIMIZER).is_file():
        contents.read_optimizer = partial(_read_whole_optimizer, directory / _WHOLE_OPTIMIZER)
    return FolderSource(contents, read_options)


def _read_weights(directory: Path) -> dict[str, LazyTensor]:
    if (directory / _MODEL).is_dir():
        return read_tensors(Reader(directory / _MODEL), _MODEL_KEY)
    path = directory / _WHOLE_MODEL
    content = _TENSORS(safe_open(path), str(path))
    return {name: view_stored(tensor) for name, tensor in content.items()}


def _read_whole_optimizer(path: Path, _: Sequence[str]) -> OptimizerContents:
    """Return the optimizer in a dictionary of torch.save."""
    content = _WHOLE_STATE(safe_open(path), str(path))
    states: dict[str, Mapping[str, LazyTensor]] = {}
    for parameter, tensors in content["state"].items():
        states[parameter] = {state: view_stored(tensor) for state, tensor in tensors.items()}
    groups = content["param_groups"]
    return OptimizerContents(states, groups, [group["params"] for group in groups])


def _read_iteration(directory: Path) -> int | None:
    """Return the trainer's step, None without one."""
    path = directory / _TRAINER_STATE
    if not path.is_file():
        return None
    iteration: int = _TRAINER(read_json(path), str(path))["global_step"]
    return iteration

"""Foreign tensors, which the model does not have: their layers, and their form in torch.save.

Such a file has them byte for byte in a dictionary by name, so that a tensor of any shape and dtype
has a place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.model_space.lazy_tensors import view_stored
from megatron.conversion.model_space.pieces import (
    run_jobs,
    write_archive,
    write_to_places,
)
from megatron.conversion.model_space.views import SourceView
from megatron.core.dist_checkpointing.box_table import Location, StoredChunk
from megatron.core.dist_checkpointing.mapping import LazyTensor
from megatron.core.dist_checkpointing.saving.commit import Progress
from megatron.core.durable_files import committed
from megatron.core.run_checkpoint.keys import FOREIGN_PREFIX, is_foreign
from megatron.core.run_checkpoint.source import Source
from megatron.core.safe_files import FileTensor, safe_open, schema
from megatron.core.safe_files.torch_zip import TensorSlot
from megatron.core.terminal import escape_control_chars

StoredTensor = FileTensor | torch.Tensor


def foreign_key(name: str) -> str:
    """Return the key of a tensor that the model does not have, called `name` in the files."""
    return f"{FOREIGN_PREFIX}{name}"


def foreign_name(key: str) -> str:
    """Return the name in the files of a foreign tensor. Other keys are returned unchanged."""
    return key.removeprefix(FOREIGN_PREFIX)


def format_layers(layers: Sequence[int]) -> str:
    """Return sorted numbers of layers for a message, e.g. "0-3, 7"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(texts)


def describe_foreign_mixers(args: Mapping[str, Any]) -> str:
    """Return the kinds of foreign token mixers in the arguments with their layers; "" if none.

    The arguments may be those of a file that was not checked.
    """
    mixers = args.get("foreign_mixers")
    if not isinstance(mixers, list | tuple):
        return ""
    layers_by_kind: dict[str, list[int]] = {}
    for layer, mixer in enumerate(mixers):
        if mixer:
            layers_by_kind.setdefault(str(mixer), []).append(layer)
    listed = []
    for mixer, layers in layers_by_kind.items():
        listed.append(f"{escape_control_chars(mixer)} in layers {format_layers(layers)}")
    return " and ".join(listed)


def check_stored_tensor(value: Any, location: str) -> StoredTensor:
    """Return `value`; raise CheckpointError unless it is a tensor."""
    if isinstance(value, StoredTensor):
        return value
    schema.refuse(location, value, "a tensor")


_FOREIGN = schema.mapping(check_stored_tensor, keys=schema.key)


def open_foreign(content: Any, location: str) -> dict[str, LazyTensor]:
    """Return the foreign tensors in a dictionary of torch.save by name."""
    stored_tensors = _FOREIGN(content, location)
    return {name: view_stored(tensor) for name, tensor in stored_tensors.items()}


def open_foreign_file(path: Path) -> dict[str, LazyTensor]:
    """Return the foreign tensors in a file of their own by name; none if it is missing."""
    if not path.exists():
        return {}
    return open_foreign(safe_open(path), str(path))


def list_foreign(keys: Iterable[str]) -> list[str]:
    """Return the keys of foreign tensors."""
    return [key for key in keys if is_foreign(key)]


def write_foreign_file(source: Source, path: Path, workers: int, progress: Progress) -> None:
    """Write the foreign tensors of `source`, a few rows at a time; no file if there are none."""
    tensors = {foreign_name(key): source.tensors[key] for key in list_foreign(source.tensors)}
    if not tensors:
        return
    slots = {name: TensorSlot(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    with committed(path) as temporary:
        # Write the archive with empty slots, then fill them.
        positions = dict(write_archive(temporary, slots))
        jobs = []
        for name, tensor in tensors.items():
            location = Location(str(temporary), positions[slots[name]], tensor.nbytes)
            chunk = StoredChunk((0,) * len(tensor.shape), tensor.shape, location)
            jobs.append(partial(write_to_places, tensor, [chunk], progress))
        run_jobs(jobs, workers)


_SIZES = ("num_layers", "hidden_size")  # which foreign tensors depend on


class WithForeignTensors(SourceView):
    """A model with the foreign tensors of `original`, the checkpoint that it was trained from.

    Raises ValueError if `original` has none, or is a model of another size.
    """

    def __init__(self, source: Source, original: Source) -> None:
        super().__init__(source)
        keys = list_foreign(original.tensors)
        if not keys:
            raise ValueError(
                f"--keep-foreign: {original.description} has no tensors that the model does not "
                "have: leave the flag out"
            )
        for name in _SIZES:
            if source.args[name] != original.args[name]:
                raise ValueError(
                    f"--keep-foreign: {original.description} has {name} = {original.args[name]}, "
                    f"but {source.description} {source.args[name]}: they are different models"
                )
        for key in keys:
            self.tensors[key] = original.tensors[key]
        # The fields of config.json that belong to them. Tokens are those of the model.
        for name, value in original.args.items():
            if name.startswith("hf_") and name != "hf_token_ids":
                self.args[name] = value

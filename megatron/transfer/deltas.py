"""Deltas between two exports of a model: files with the elements that have changed.

A delta is a directory of safetensors with an index like a model's, and `delta.json`, written last.
A changed tensor is stored whole under its name, or as units that have changed: `NAME.delta_index`
has their positions (sorted), `NAME.delta_values` their values, [units, elements of a unit]. A unit
is a row or an element. Positions of elements are those of vLLM's `CheckpointWeightPatch`.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from megatron.conversion.huggingface.directory import CONFIG
from megatron.conversion.huggingface.weight_files import open_weights, write_weight_files
from megatron.conversion.model_space.lazy_tensors import cut_blocks, view_tensor
from megatron.conversion.model_space.pieces import make_empty_directory
from megatron.conversion.options import WriteOptions
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.dist_checkpointing.mapping import Extent, LazyTensor, Shape
from megatron.core.dist_checkpointing.saving.commit import no_progress
from megatron.core.durable_files import fsync_tree, write_json
from megatron.core.safe_files import schema
from megatron.core.safe_files.reading import read_json
from megatron.core.safe_files.torch_zip import view_bytes

DELTA = "delta.json"
GRANULARITIES = ("tensor", "row", "element", "smallest")
_INDEX_SUFFIX = ".delta_index"
_VALUES_SUFFIX = ".delta_values"
_STEM = "model"
_BLOCK_ELEMENTS = 4 << 20
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by itemsize

Weights = Mapping[str, torch.Tensor] | str | PathLike[str]
_Tensors = dict[str, LazyTensor]

_ENTRY = schema.record(
    {
        "unit": schema.optional(schema.integer(1)),  # elements; None: the whole tensor
        "digest": schema.text(),
    }
)
_METADATA = schema.record(
    {
        "version": schema.one_of(1),
        "iteration": schema.optional(schema.integer()),
        "base_digest": schema.text(),
        "digest": schema.text(),
        "tensors": schema.mapping(_ENTRY, keys=schema.key),
    }
)


@dataclass(frozen=True)
class DeltaReport:
    """Size of a delta in comparison with the whole model."""

    changed_tensors: int
    changed_elements: int
    delta_bytes: int
    """Bytes of the tensors in the files of the delta."""
    model_bytes: int


class Patch(NamedTuple):
    """New values of a tensor: fields of vLLM's `CheckpointWeightPatch`."""

    name: str
    shape: Shape
    dtype: torch.dtype
    values: torch.Tensor  # flat
    indices: torch.Tensor | None  # of the values in the flat tensor; None: all


# ---- Writing ----


def write_delta(
    base: Weights,
    new: Weights,
    directory: str | PathLike[str],
    *,
    granularity: str = "smallest",
    iteration: int | None = None,
    max_shard_size: int = WriteOptions.max_shard_size,
) -> DeltaReport:
    """Write what has changed from `base` to `new` to the empty `directory`.

    Both are Hugging Face models, or tensors by name. `granularity` is that of the stored values:
    whole tensors (then the files are ordinary ones, which `load_weights` takes), rows, elements, or
    for each tensor the one with the fewest bytes. Raises ValueError if the models have other names,
    shapes or dtypes.
    """
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity {granularity!r} is none of {', '.join(GRANULARITIES)}")
    base_tensors = _open(base)
    new_tensors = _open(new)
    _check_same_model(base_tensors, new_tensors)

    # Phase 1: compare, one tensor at a time.
    stored: _Tensors = {}
    entries: dict[str, Any] = {}
    base_digest = xxhash.xxh3_128()
    new_digest = xxhash.xxh3_128()
    changed_elements = 0
    for name, tensor in sorted(new_tensors.items()):
        changes = _compare(base_tensors[name], tensor)
        base_digest.update(_describe(name, tensor, changes.base_digest))
        new_digest.update(_describe(name, tensor, changes.digest))
        if len(changes.elements) == 0:
            continue
        changed_elements += len(changes.elements)
        unit = _choose_unit(tensor, changes, granularity)
        entries[name] = {"unit": unit, "digest": changes.digest}
        stored |= _store(name, tensor, changes, unit)

    # Phase 2: write the values that differ.
    directory = Path(directory)
    make_empty_directory(directory)
    write_weight_files(directory, _STEM, stored, max_shard_size, 1, no_progress)
    metadata = {
        "version": 1,
        "iteration": iteration,
        "base_digest": base_digest.hexdigest(),
        "digest": new_digest.hexdigest(),
        "tensors": entries,
    }
    write_json(directory / DELTA, metadata)
    fsync_tree(directory)
    return DeltaReport(
        changed_tensors=len(entries),
        changed_elements=changed_elements,
        delta_bytes=sum(tensor.nbytes for tensor in stored.values()),
        model_bytes=sum(tensor.nbytes for tensor in new_tensors.values()),
    )


def _open(weights: Weights) -> _Tensors:
    """Return the tensors of a model by name."""
    if isinstance(weights, str | PathLike):
        return open_weights(Path(weights))
    return {name: view_tensor(tensor.detach().cpu()) for name, tensor in weights.items()}


def _check_same_model(base: _Tensors, new: _Tensors) -> None:
    """Raise ValueError if names, shapes or dtypes differ."""
    faults = []
    for name in sorted(base.keys() | new.keys()):
        if base.get(name) == new.get(name):
            continue
        in_base = _format(base.get(name))
        in_new = _format(new.get(name))
        faults.append(f"{name}: {in_base} in the base, {in_new} in the new model")
    if faults:
        raise ValueError(
            "a delta is between two states of the same model, export both with the same options:\n"
            "  " + schema.abbreviate(faults)
        )


def _format(tensor: LazyTensor | None) -> str:
    """Return shape and dtype for a message."""
    if tensor is None:
        return "absent"
    return f"{tensor.shape} {tensor.dtype_name}"


class _Changes(NamedTuple):
    """Differences of a tensor from its base."""

    base_digest: str
    digest: str
    elements: torch.Tensor  # positions of those that differ, sorted


def _compare(base: LazyTensor, new: LazyTensor) -> _Changes:
    """Compare two tensors bitwise, some rows at a time."""
    base_digest = xxhash.xxh3_128()
    digest = xxhash.xxh3_128()
    elements = []
    start = 0
    for box in cut_blocks(new, _BLOCK_ELEMENTS):
        base_block = _read_flat(base, box)
        block = _read_flat(new, box)

        # Digests of both, and the positions that differ
        base_digest.update(view_bytes(base_block))
        digest.update(view_bytes(block))
        bits = _BITS[block.dtype.itemsize]
        is_changed = block.view(bits) != base_block.view(bits)
        changed = is_changed.nonzero().view(-1)
        elements.append(changed + start)
        start += len(block)
    if not elements:  # the tensor is empty
        elements.append(torch.empty(0, dtype=torch.int64))
    return _Changes(base_digest.hexdigest(), digest.hexdigest(), torch.cat(elements))


def _read_flat(tensor: LazyTensor, box: Extent) -> torch.Tensor:
    """Return the elements of a box as one axis."""
    return tensor.read(*box).contiguous().view(-1)


def _describe(name: str, tensor: LazyTensor, digest: str) -> bytes:
    """Return the line of a tensor in the digest of a model."""
    return f"{name} {tensor.dtype_name} {tensor.shape} {digest}\n".encode()


def _choose_unit(tensor: LazyTensor, changes: _Changes, granularity: str) -> int | None:
    """Return the elements of a unit, or None for the whole tensor."""
    row = max(1, math.prod(tensor.shape[1:]))
    units = {"tensor": None, "row": row, "element": 1}
    if granularity != "smallest":
        return units[granularity]
    best = None
    fewest_bytes = tensor.nbytes
    for unit in (row, 1):
        num_units = len(torch.unique_consecutive(changes.elements // unit))
        index_bytes = _choose_index_dtype(tensor, unit).itemsize
        nbytes = num_units * (index_bytes + unit * tensor.dtype.itemsize)
        if nbytes < fewest_bytes:
            best = unit
            fewest_bytes = nbytes
    return best


def _choose_index_dtype(tensor: LazyTensor, unit: int) -> torch.dtype:
    """Return the dtype of positions of units."""
    num_units = math.prod(tensor.shape) // unit
    return torch.int32 if num_units < 1 << 31 else torch.int64


def _store(name: str, tensor: LazyTensor, changes: _Changes, unit: int | None) -> _Tensors:
    """Return the tensors of the delta for a changed tensor."""
    if unit is None:
        return {name: tensor}
    index = torch.unique_consecutive(changes.elements // unit)
    index = index.to(_choose_index_dtype(tensor, unit))
    read = partial(_read_units, tensor, index, unit)
    values = LazyTensor((len(index), unit), tensor.dtype, read)
    return {name + _INDEX_SUFFIX: view_tensor(index), name + _VALUES_SUFFIX: values}


def _read_units(
    tensor: LazyTensor, index: torch.Tensor, unit: int, offset: Shape, shape: Shape
) -> torch.Tensor:
    """Return units `[offset[0], offset[0] + shape[0])` of the changed ones."""
    selected = index[offset[0] : offset[0] + shape[0]].long()
    result = torch.empty(shape, dtype=tensor.dtype)
    # Read blocks of whole rows that contain changed units.
    first_element = 0
    for block_offset, block_shape in cut_blocks(tensor, _BLOCK_ELEMENTS):
        num_elements = math.prod(block_shape)
        first, last = _find_units(selected, unit, first_element, num_elements)
        if first < last:
            block = tensor.read(block_offset, block_shape).reshape(-1, unit)
            result[first:last] = block[selected[first:last] - first_element // unit]
        first_element += num_elements
    return result


def _find_units(
    index: torch.Tensor, unit: int, first_element: int, num_elements: int
) -> tuple[int, int]:
    """Return the range of a sorted index with the units inside of a range of elements."""
    bounds = torch.tensor([first_element // unit, (first_element + num_elements) // unit])
    first, last = torch.searchsorted(index, bounds.to(index.dtype)).tolist()
    return first, last


# ---- Reading ----


class _Delta(NamedTuple):
    """An opened delta."""

    directory: Path
    metadata: dict[str, Any]
    stored: _Tensors

    def read_patch(self, name: str, tensor: LazyTensor) -> Patch:
        """Return the new values of a tensor, whose shape and dtype are those of the base."""
        unit = self.metadata["tensors"][name]["unit"]
        if unit is None:
            values = self._get(name).read_all()
            indices = None
        else:
            values = self._get(name + _VALUES_SUFFIX).read_all()
            index = self._get(name + _INDEX_SUFFIX).read_all().long()
            indices = (index.view(-1, 1) * unit + torch.arange(unit)).view(-1)
        if not _fits(values, indices, tensor):
            raise CheckpointError(
                f"{self.directory}: the values of {name} do not fit its shape {tensor.shape} "
                f"{tensor.dtype_name}: the delta is damaged, copy it again"
            )
        return Patch(name, tensor.shape, tensor.dtype, values.view(-1), indices)

    def _get(self, name: str) -> LazyTensor:
        if name not in self.stored:
            raise CheckpointError(f"{self.directory} lacks {name}: the delta is damaged")
        return self.stored[name]


def _fits(values: torch.Tensor, indices: torch.Tensor | None, tensor: LazyTensor) -> bool:
    """Return whether values can be those of a tensor at these indices."""
    if values.dtype != tensor.dtype:
        return False
    num_elements = math.prod(tensor.shape)
    if indices is None:
        return values.shape == tensor.shape
    if values.numel() != len(indices):
        return False
    is_inside = (indices >= 0) & (indices < num_elements)
    return bool(is_inside.all())


def _open_delta(delta: str | PathLike[str]) -> _Delta:
    """Open a delta. Raises ValueError if there is none."""
    directory = Path(delta)
    path = directory / DELTA
    if not path.is_file():
        raise ValueError(f"{directory} has no {DELTA}: it is not a complete delta")
    return _Delta(directory, _METADATA(read_json(path), str(path)), open_weights(directory))


def read_patches(base: Weights, delta: str | PathLike[str]) -> Iterator[Patch]:
    """Yield the new values of each changed tensor, for engines that patch live weights.

    `base` is the model that the engine has; its values are not read or compared.
    """
    opened = _open_delta(delta)
    tensors = _open(base)
    for name in opened.metadata["tensors"]:
        if name not in tensors:
            raise ValueError(f"{opened.directory} changes {name}, which the base does not have")
        yield opened.read_patch(name, tensors[name])


def apply_delta(
    base: str | PathLike[str],
    delta: str | PathLike[str],
    directory: str | PathLike[str],
    *,
    max_shard_size: int = WriteOptions.max_shard_size,
) -> None:
    """Write the model that a delta makes of `base` to the empty `directory`.

    The files are those of a full export. Raises ValueError if `base` is not the model that the
    delta was made from, before anything is written, or if the delta is damaged.
    """
    opened = _open_delta(delta)
    tensors = _open(base)
    patched = _patch_all(tensors, opened, str(base))
    directory = Path(directory)
    make_empty_directory(directory)
    write_weight_files(directory, _STEM, patched, max_shard_size, 1, no_progress)
    _copy_small_files(Path(base), directory)
    fsync_tree(directory)


def _patch_all(tensors: _Tensors, delta: _Delta, location: str) -> _Tensors:
    """Return the tensors of the new model. Raises ValueError for a wrong base or damaged delta."""
    entries = delta.metadata["tensors"]
    # Phase 1: verify the base.
    base_digest = xxhash.xxh3_128()
    for name, tensor in sorted(tensors.items()):
        digest = _compute_digest(tensor)
        base_digest.update(_describe(name, tensor, digest))
    if base_digest.hexdigest() != delta.metadata["base_digest"]:
        raise ValueError(
            f"{location} has the digest {base_digest.hexdigest()}, and {delta.directory} was made "
            f"from a model with {delta.metadata['base_digest']}: apply the deltas before it, in "
            "order, or start from the right base"
        )

    # Phase 2: patch the tensors, and verify the result.
    patched = {}
    for name, tensor in tensors.items():
        patched[name] = tensor
        if name not in entries:
            continue
        patch = delta.read_patch(name, tensor)
        if patch.indices is None:
            patched[name] = delta.stored[name]
        else:
            read = partial(_read_patched, tensor, patch.indices, patch.values)
            patched[name] = LazyTensor(tensor.shape, tensor.dtype, read)
        if _compute_digest(patched[name]) != entries[name]["digest"]:
            raise CheckpointError(
                f"{delta.directory}: {name} has another digest after the delta than "
                f"{entries[name]['digest']}: the delta is damaged, copy it again"
            )
    return patched


def _compute_digest(tensor: LazyTensor) -> str:
    """Return the digest of a tensor's bytes."""
    digest = xxhash.xxh3_128()
    for box in cut_blocks(tensor, _BLOCK_ELEMENTS):
        elements = _read_flat(tensor, box)
        digest.update(view_bytes(elements))
    return digest.hexdigest()


def _read_patched(
    tensor: LazyTensor, indices: torch.Tensor, values: torch.Tensor, offset: Shape, shape: Shape
) -> torch.Tensor:
    """Return whole rows of a tensor with other values at these indices of the flat tensor."""
    start = offset[0] * math.prod(tensor.shape[1:]) if offset else 0
    elements = tensor.read(offset, shape).contiguous().view(-1)
    first, last = _find_units(indices, 1, start, len(elements))
    elements[indices[first:last] - start] = values[first:last]
    return elements.view(shape)


def _copy_small_files(base: Path, directory: Path) -> None:
    """Copy all files but weights; config.json last, which makes the directory a model."""
    paths = [path for path in sorted(base.iterdir()) if path.is_file()]
    for path in sorted(paths, key=lambda path: path.name == CONFIG):
        is_weights = path.suffix in (".safetensors", ".bin") or path.name.endswith(".index.json")
        if not is_weights:
            shutil.copyfile(path, directory / path.name)

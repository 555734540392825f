"""Deltas between two exports of a model: files with the elements that have changed.

A delta is a directory of safetensors with an index like a model's, and `delta.json`. A changed
tensor is stored whole under its name, or as units that have changed: `NAME.delta_index` has their
positions (sorted), `NAME.delta_values` their values, [units, elements of a unit]. A unit is a row
or an element. Positions of elements are those of vLLM's `CheckpointWeightPatch`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import xxhash

from megatron.conversion.huggingface.weight_files import open_weights, write_weight_files
from megatron.conversion.model_space.lazy_tensors import cut_blocks, view_tensor
from megatron.conversion.options import WriteOptions
from megatron.conversion.output_directory import new_directory
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape
from megatron.core.dist_checkpointing.saving.commit import no_progress
from megatron.core.durable_files import write_json
from megatron.core.safe_files import schema
from megatron.core.safe_files.reading import read_json
from megatron.core.safe_files.torch_zip import view_bytes
from megatron.transfer.models import (
    BLOCK_ELEMENTS,
    DeltaReport,
    Tensors,
    Weights,
    check_same_model,
    compute_digest,
    copy_small_files,
    format_tensor,
    open_model,
    read_flat,
    to_local,
)
from megatron.transfer.slime_deltas import is_slime_delta, open_slime_delta

DELTA = "delta.json"
GRANULARITIES = ("tensor", "row", "element", "smallest")
_INDEX_SUFFIX = ".delta_index"
_VALUES_SUFFIX = ".delta_values"
_STEM = "model"
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by itemsize

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
    """Write the changes from `base` to `new` to a new directory.

    Both are Hugging Face models, or tensors by name. `granularity` is that of the stored values:
    whole tensors (then the files are ordinary ones, which `load_weights` takes), rows, elements, or
    for each tensor the one with the fewest bytes. The directory appears complete or not at all.
    Memory contains a few rows at a time, and the positions of all stored rows and elements. Raises
    ValueError if the models differ in names, shapes or dtypes, or if the directory is not empty.
    """
    if granularity not in GRANULARITIES:
        raise ValueError(f"granularity {granularity!r} is none of {', '.join(GRANULARITIES)}")
    base_tensors = open_model(base)
    new_tensors = open_model(new)
    check_same_model(base_tensors, new_tensors)

    with new_directory(to_local(directory)) as pending:
        # Phase 1: compare, one tensor at a time.
        stored: Tensors = {}
        entries: dict[str, Any] = {}
        base_digest = xxhash.xxh3_128()
        new_digest = xxhash.xxh3_128()
        changed_elements = 0
        for name, tensor in sorted(new_tensors.items()):
            changes = _compare(base_tensors[name], tensor, granularity)
            base_digest.update(_describe(name, tensor, changes.base_digest))
            new_digest.update(_describe(name, tensor, changes.digest))
            if changes.num_elements == 0:
                continue
            changed_elements += changes.num_elements
            unit = _choose_unit(tensor, changes, granularity)
            entries[name] = {"unit": unit, "digest": changes.digest}
            stored |= _store(name, tensor, changes, unit)

        # Phase 2: write the values that differ.
        write_weight_files(pending, _STEM, stored, max_shard_size, 1, no_progress)
        metadata = {
            "version": 1,
            "iteration": iteration,
            "base_digest": base_digest.hexdigest(),
            "digest": new_digest.hexdigest(),
            "tensors": entries,
        }
        write_json(pending / DELTA, metadata)
    return DeltaReport(
        changed_tensors=len(entries),
        changed_elements=changed_elements,
        delta_bytes=sum(tensor.nbytes for tensor in stored.values()),
        model_bytes=sum(tensor.nbytes for tensor in new_tensors.values()),
    )


class _Changes(NamedTuple):
    """Differences of a tensor from its base."""

    base_digest: str
    digest: str
    num_elements: int
    rows: torch.Tensor  # positions of rows that differ, sorted
    elements: (
        torch.Tensor
    )  # positions of elements that differ, or none if they are not to be stored


def _compare(base: LazyTensor, new: LazyTensor, granularity: str) -> _Changes:
    """Compare two tensors bitwise, some rows at a time."""
    base_digest = xxhash.xxh3_128()
    digest = xxhash.xxh3_128()
    num_elements = 0
    empty = torch.empty(0, dtype=_choose_index_dtype(new))
    rows = [empty]
    elements = [empty]
    max_elements = _count_storable_elements(new, granularity)
    row = _count_row_elements(new)
    start = 0
    for box in cut_blocks(new, BLOCK_ELEMENTS):
        base_block = read_flat(base, box)
        block = read_flat(new, box)

        # Digests of both, and the positions that differ
        base_digest.update(view_bytes(base_block))
        digest.update(view_bytes(block))
        bits = _BITS[block.dtype.itemsize]
        is_changed = block.view(bits) != base_block.view(bits)
        changed = is_changed.nonzero().view(-1) + start
        num_elements += len(changed)
        rows.append(torch.unique_consecutive(changed // row).to(empty.dtype))
        if num_elements <= max_elements:
            elements.append(changed.to(empty.dtype))
        else:
            elements = [empty]
        start += len(block)
    return _Changes(
        base_digest.hexdigest(),
        digest.hexdigest(),
        num_elements,
        torch.cat(rows),
        torch.cat(elements),
    )


def _count_storable_elements(tensor: LazyTensor, granularity: str) -> int:
    """Return the largest number of changed elements whose positions are stored."""
    if granularity == "element":
        return math.prod(tensor.shape)
    if granularity == "smallest":
        return tensor.nbytes // (_choose_index_dtype(tensor).itemsize + tensor.dtype.itemsize)
    return 0


def _describe(name: str, tensor: LazyTensor, digest: str) -> bytes:
    """Return the line of a tensor in the digest of a model."""
    return f"{name} {tensor.dtype_name} {tensor.shape} {digest}\n".encode()


def _choose_unit(tensor: LazyTensor, changes: _Changes, granularity: str) -> int | None:
    """Return the elements of a unit, or None for the whole tensor."""
    row = _count_row_elements(tensor)
    units = {"tensor": None, "row": row, "element": 1}
    if granularity != "smallest":
        return units[granularity]
    best = None
    fewest_bytes = tensor.nbytes
    index_bytes = _choose_index_dtype(tensor).itemsize
    for unit, num_units in ((row, len(changes.rows)), (1, changes.num_elements)):
        nbytes = num_units * (index_bytes + unit * tensor.dtype.itemsize)
        if nbytes < fewest_bytes:
            best = unit
            fewest_bytes = nbytes
    return best


def _count_row_elements(tensor: LazyTensor) -> int:
    """Return the elements of a row."""
    return max(1, math.prod(tensor.shape[1:]))


def _choose_index_dtype(tensor: LazyTensor) -> torch.dtype:
    """Return the dtype of positions."""
    return torch.int32 if math.prod(tensor.shape) < 1 << 31 else torch.int64


def _store(name: str, tensor: LazyTensor, changes: _Changes, unit: int | None) -> Tensors:
    """Return the tensors of the delta for a changed tensor."""
    if unit is None:
        return {name: tensor}
    index = changes.rows if unit == _count_row_elements(tensor) else changes.elements
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
    for block_offset, block_shape in cut_blocks(tensor, BLOCK_ELEMENTS):
        num_elements = math.prod(block_shape)
        first, last = _find_units(selected, unit, first_element, num_elements)
        if first < last:
            block = tensor.read(block_offset, block_shape).reshape(-1, unit)
            rows = selected[first:last] - first_element // unit
            # As bytes, because torch 2.6 does not index fp8
            result.view(torch.uint8)[first:last] = block.view(torch.uint8)[rows]
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


class _Units(NamedTuple):
    """The changed units of a tensor."""

    unit: int  # elements of each
    positions: torch.Tensor  # sorted
    values: LazyTensor  # [units, elements of a unit]


class _Delta(NamedTuple):
    """An opened delta."""

    directory: Path
    metadata: dict[str, Any]
    stored: Tensors

    def open_changes(self, name: str, tensor: LazyTensor) -> _Units | LazyTensor:
        """Return the changed units of a tensor, or the whole new tensor.

        `tensor` has the shape and dtype of the base. Raises CheckpointError for a damaged delta.
        """
        unit = self.metadata["tensors"][name]["unit"]
        if unit is None:
            values = self._get(name)
            if values != tensor:
                self._refuse(name, tensor)
            return values
        index = self._get(name + _INDEX_SUFFIX)
        values = self._get(name + _VALUES_SUFFIX)
        # The sizes are checked before anything is allocated.
        is_plausible = (
            unit in (1, _count_row_elements(tensor))
            and index.dtype == _choose_index_dtype(tensor)
            and index.shape == values.shape[:1]
            and values.shape[1:] == (unit,)
            and values.dtype == tensor.dtype
        )
        if not is_plausible:
            self._refuse(name, tensor)
        positions = index.read_all()
        is_sorted = bool((positions[1:] > positions[:-1]).all())
        num_units = math.prod(tensor.shape) // unit
        if not is_sorted or (positions < 0).any() or (positions >= num_units).any():
            self._refuse(name, tensor)
        return _Units(unit, positions, values)

    def _get(self, name: str) -> LazyTensor:
        if name not in self.stored:
            raise CheckpointError(f"{self.directory} lacks {name}: the delta is damaged")
        return self.stored[name]

    def _refuse(self, name: str, tensor: LazyTensor) -> NoReturn:
        raise CheckpointError(
            f"{self.directory}: the values of {name} do not fit its shape "
            f"{format_tensor(tensor)}: the delta is damaged, copy it again"
        )


def _open_delta(delta: str | PathLike[str]) -> _Delta:
    """Open a delta. Raises ValueError if there is none."""
    directory = to_local(delta)
    path = directory / DELTA
    if not path.is_file():
        raise ValueError(f"{directory} has no {DELTA}: it is not a complete delta")
    return _Delta(directory, _METADATA(read_json(path), str(path)), open_weights(directory))


def read_patches(base: Weights, delta: str | PathLike[str]) -> Iterator[Patch]:
    """Yield the new values of each changed tensor, for engines that patch live weights.

    `base` is the model that the engine has: only names, shapes and dtypes are compared. Raises
    ValueError for a delta that does not fit them; values are not verified.
    """
    opened = _open_delta(delta)
    tensors = open_model(base)
    for name in opened.metadata["tensors"]:
        if name not in tensors:
            raise ValueError(f"{opened.directory} changes {name}, which the base does not have")
        tensor = tensors[name]
        changes = opened.open_changes(name, tensor)
        indices = None
        if isinstance(changes, _Units):
            # Positions of elements, [units, elements of a unit]
            first_elements = changes.positions.long().view(-1, 1) * changes.unit
            indices = (first_elements + torch.arange(changes.unit)).view(-1)
            changes = changes.values
        values = changes.read_all().reshape(-1)
        yield Patch(name, tensor.shape, tensor.dtype, values, indices)


def apply_delta(
    base: str | PathLike[str],
    delta: str | PathLike[str],
    directory: str | PathLike[str],
    *,
    max_shard_size: int = WriteOptions.max_shard_size,
) -> None:
    """Write the model that a delta makes of `base` to a new directory.

    The files are those of a full export. `delta` was written by `write_delta`, `write_slime_delta`
    or slime. The directory appears complete or not at all. Raises ValueError if `base` is not the
    model that the delta was made from, if the delta is damaged, or if the directory is not empty.
    """
    base = to_local(base)
    tensors = open_model(base)
    delta = to_local(delta)
    if is_slime_delta(delta):
        patched = open_slime_delta(tensors, delta)
    else:
        patched = _patch_all(tensors, _open_delta(delta), str(base))
    with new_directory(to_local(directory)) as pending:
        write_weight_files(pending, _STEM, patched, max_shard_size, 1, no_progress)
        copy_small_files(base, pending)


def _patch_all(tensors: Tensors, delta: _Delta, location: str) -> Tensors:
    """Return the tensors of the new model. Raises ValueError for a wrong base or damaged delta."""
    entries = delta.metadata["tensors"]
    # Phase 1: verify the base, and that the delta has all changes.
    base_digest = xxhash.xxh3_128()
    new_digest = xxhash.xxh3_128()
    for name, tensor in sorted(tensors.items()):
        digest = compute_digest(tensor)
        base_digest.update(_describe(name, tensor, digest))
        if name in entries:
            digest = entries[name]["digest"]
        new_digest.update(_describe(name, tensor, digest))
    if base_digest.hexdigest() != delta.metadata["base_digest"]:
        raise ValueError(
            f"{location} has the digest {base_digest.hexdigest()}, and {delta.directory} was made "
            f"from a model with {delta.metadata['base_digest']}: apply the deltas before it, in "
            "order, or start from the right base"
        )
    if new_digest.hexdigest() != delta.metadata["digest"] or entries.keys() - tensors.keys():
        raise CheckpointError(
            f"{delta.directory / DELTA}: the changed tensors are not those of the new model: the "
            "delta is damaged, copy it again"
        )

    # Phase 2: patch the tensors, and verify the result.
    patched = dict(tensors)
    for name in entries:
        changes = delta.open_changes(name, tensors[name])
        if isinstance(changes, _Units):
            changes = _patch(tensors[name], changes)
        if compute_digest(changes) != entries[name]["digest"]:
            raise CheckpointError(
                f"{delta.directory}: {name} has another digest after the delta than "
                f"{entries[name]['digest']}: the delta is damaged, copy it again"
            )
        patched[name] = changes
    return patched


def _patch(tensor: LazyTensor, changes: _Units) -> LazyTensor:
    """Return a tensor with new values of the changed units."""
    return LazyTensor(tensor.shape, tensor.dtype, partial(_read_patched, tensor, changes))


def _read_patched(tensor: LazyTensor, changes: _Units, offset: Shape, shape: Shape) -> torch.Tensor:
    """Return whole rows of a tensor with new values of the changed units."""
    unit = changes.unit
    start = offset[0] * _count_row_elements(tensor) if offset else 0
    units = tensor.read(offset, shape).contiguous().view(-1, unit)
    first, last = _find_units(changes.positions, unit, start, units.numel())
    if first < last:
        positions = changes.positions[first:last].long() - start // unit
        units[positions] = changes.values.read((first, 0), (last - first, unit))
    return units.view(shape)

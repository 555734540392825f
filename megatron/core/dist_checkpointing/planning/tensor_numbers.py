"""Numbers of the distinct tensors of all ranks, which must agree about each key."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron.core.dist_checkpointing.planning.structure import PackedSpec, TensorType
from megatron.core.safe_files.errors import CheckpointError
from megatron.core.safe_files.schema import abbreviate


def number_tensors(specs: Sequence[PackedSpec]) -> tuple[list[TensorType], np.ndarray]:
    """Return the distinct tensors of all ranks, and the number of each tensor of each rank.

    The numbers are concatenated by rank. Raises CheckpointError if shape, dtype or kind of a key
    differs between ranks.
    """
    # Tensors with the same key but another shape or dtype get different numbers.
    number_of_tensor: dict[TensorType, int] = {}
    numbers_of_types: dict[bytes, np.ndarray] = {}  # by `PackedSpec.types`
    numbers_of_ranks: list[np.ndarray] = []
    object_keys: set[str] = set()
    for spec in specs:
        # Ranks with equal types are numbered once.
        numbers = numbers_of_types.get(spec.types)
        if numbers is None:
            numbers = _number_types(spec.read_types(), number_of_tensor)
            numbers_of_types[spec.types] = numbers
        numbers_of_ranks.append(numbers)
        object_keys.update(spec.objects)

    # Every key must have one shape and dtype, or be an object.
    tensors = list(number_of_tensor)
    tensor_keys = {key for key, _, _ in tensors}
    has_different_tensors = len(tensor_keys) < len(tensors)
    has_different_kinds = not tensor_keys.isdisjoint(object_keys)
    if has_different_tensors or has_different_kinds:
        raise CheckpointError(_describe_conflicts(specs))
    return tensors, np.concatenate(numbers_of_ranks)


def _number_types(
    types: Sequence[TensorType], number_of_tensor: dict[TensorType, int]
) -> np.ndarray:
    """Return the number of each tensor of a rank, and add new tensors to `number_of_tensor`."""
    numbers = []
    for tensor in types:
        next_number = len(number_of_tensor)
        number = number_of_tensor.setdefault(tensor, next_number)
        numbers.append(number)
    return np.array(numbers, dtype=np.int64)


def _describe_conflicts(specs: Sequence[PackedSpec]) -> str:
    """Return a message about keys whose shape, dtype or kind differs between ranks."""
    conflicts = _find_different_tensors(specs)
    conflicts |= _find_different_kinds(specs)
    lines = list(conflicts.values())
    return "ranks disagree about\n  " + abbreviate(lines)


def _find_different_tensors(specs: Sequence[PackedSpec]) -> dict[str, str]:
    """Return a message for each key whose shape or dtype differs between ranks."""
    first_seen: dict[str, tuple[TensorType, int]] = {}  # (tensor, rank) by key
    conflicts: dict[str, str] = {}
    for rank, spec in enumerate(specs):
        for tensor in spec.read_types():
            key, shape, dtype = tensor
            first_tensor, first_rank = first_seen.setdefault(key, (tensor, rank))
            # Name the first rank that differs; thousands more may do so.
            if tensor == first_tensor or key in conflicts:
                continue
            _, first_shape, first_dtype = first_tensor
            first_version = f"{first_shape} {first_dtype} on rank {first_rank}"
            conflicts[key] = f"{key}: {first_version}, {shape} {dtype} on rank {rank}"
    return conflicts


def _find_different_kinds(specs: Sequence[PackedSpec]) -> dict[str, str]:
    """Return a message for each key that is a tensor on one rank and an object on another one."""
    # The lowest rank that has each key as a tensor, and as an object
    rank_of_tensor: dict[str, int] = {}
    rank_of_object: dict[str, int] = {}
    for rank, spec in enumerate(specs):
        for key, _, _ in spec.read_types():
            rank_of_tensor.setdefault(key, rank)
        for key in spec.objects:
            rank_of_object.setdefault(key, rank)

    conflicts = {}
    for key in rank_of_object.keys() & rank_of_tensor.keys():
        object_rank = rank_of_object[key]
        tensor_rank = rank_of_tensor[key]
        conflicts[key] = f"{key}: an object on rank {object_rank}, a tensor on rank {tensor_rank}"
    return conflicts

"""Adapters of PEFT loaded into a run (`--lora-load`), the inverse of `adapter_writer`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch

from megatron.conversion.huggingface.adapter_writer import (
    MATRIX_KEY,
    choose_adapter_family,
    find_projection_rows,
    list_stored_rows,
)
from megatron.conversion.huggingface.family import Family
from megatron.conversion.huggingface.lora_adapter import LoraAdapter
from megatron.conversion.huggingface.stored_parameters import StoredParameter, stored_parameters
from megatron.conversion.model_space.model import model_tensors
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.safe_files.schema import abbreviate
from megatron.core.transformer.transformer_config import TransformerConfig

_MAGNITUDE = "lora_magnitude_vector"


def read_adapter(
    directory: Path,
    config: TransformerConfig,
    model_type: str,
    keys: Collection[str],
    rank: int,
    scale: float,
) -> dict[str, torch.Tensor]:
    """Return the adapters in a directory of PEFT under the `keys` of the run, which it must match.

    Raises CheckpointError for an adapter of other modules, or with another rank or scale.
    """
    family = choose_adapter_family(config, model_type)
    adapter = LoraAdapter(directory, family)
    _check_magnitudes(adapter, keys)
    projections = _list_projections(keys)
    values: dict[str, torch.Tensor] = {}
    unused = set(adapter.matrices)
    missing = []
    for parameter in _list_adapted(projections, family, config):
        layer = parameter.key.removesuffix(".weight")
        all_rows = find_projection_rows(layer, config, parameter.shape[0])
        projection_rows = {name: all_rows[name] for name in projections[layer]}
        for name, stored_rows in zip(parameter.names, list_stored_rows(parameter), strict=True):
            module = name.removesuffix(".weight")
            positions = _find_positions(parameter, projection_rows, stored_rows)
            if not positions:
                continue
            if module not in unused:
                missing.append(module)
                continue
            unused.remove(module)
            _check_scale(adapter, module, len(positions) * rank, rank, scale)
            location = f"{directory}: {module}"
            matrices = _read_matrices(adapter, module)
            for projection, tensors in _split(matrices, positions, rank, location):
                for matrix, tensor in tensors.items():
                    values[f"{layer}.{projection}.{matrix}"] = tensor
    _check_modules(directory, missing, unused)
    return values


def _check_magnitudes(adapter: LoraAdapter, keys: Collection[str]) -> None:
    """Raise CheckpointError unless both the adapter and the run have magnitudes, or neither."""
    run_has_magnitudes = any(key.endswith(_MAGNITUDE) for key in keys)
    if adapter.config.has_magnitudes != run_has_magnitudes:
        fix = "add --lora-dora" if adapter.config.has_magnitudes else "leave out --lora-dora"
        raise CheckpointError(f"--lora-load {adapter.directory}: use_dora differs: {fix}")


def _list_projections(keys: Iterable[str]) -> dict[str, list[str]]:
    """Return the adapted projections of each layer of the run."""
    projections: dict[str, list[str]] = {}
    for key in keys:
        match = MATRIX_KEY.fullmatch(key)
        assert match is not None, key
        layer, projection, matrix = match.groups()
        if matrix == "lora_A":
            projections.setdefault(layer, []).append(projection)
    return projections


def _list_adapted(
    layers: Iterable[str], family: Family, config: TransformerConfig
) -> Iterable[StoredParameter]:
    """Return the weights of layers as the family stores them."""
    shapes = model_tensors(config)
    weights = {f"{layer}.weight": shapes[f"{layer}.weight"] for layer in layers}
    rows = family.select_rows(config)
    return stored_parameters(weights, rows, family.layers, config, lambda name: False)


def _read_matrices(adapter: LoraAdapter, module: str) -> dict[str, torch.Tensor]:
    """Return the matrices of a module of transformers, e.g. "lora_A"."""
    matrices = {}
    for name, tensor in adapter.matrices[module].items():
        matrices[name] = tensor.read_all()
    return matrices


def _check_modules(directory: Path, missing: Collection[str], unused: Collection[str]) -> None:
    """Raise CheckpointError if the adapter lacks modules of the run, or has others."""
    differences = []
    if missing:
        differences.append(f"it has no {abbreviate(sorted(missing), 3, ', ')}")
    if unused:
        differences.append(f"it also adapts {abbreviate(sorted(unused), 3, ', ')}")
    if differences:
        raise CheckpointError(
            f"--lora-load {directory}: {' and '.join(differences)}: make --lora-targets name the "
            "modules that it adapts"
        )


def _find_positions(
    parameter: StoredParameter,
    projection_rows: Mapping[str, torch.Tensor],
    stored_rows: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Return the positions of the rows of each projection in a stored tensor.

    Projections that the tensor does not contain are left out.

    Args:
        parameter: the weight of a layer.
        projection_rows: rows of the weight by projection.
        stored_rows: row of the weight that each row of the stored tensor is.
    """
    # Row of the weight -> position in the stored tensor, -1 if the tensor does not contain it.
    all_positions = torch.full((parameter.shape[0],), -1)
    all_positions[stored_rows] = torch.arange(len(stored_rows))
    positions = {}
    for projection, rows in projection_rows.items():
        row_positions = all_positions[rows]
        if (row_positions >= 0).all():
            positions[projection] = row_positions
    return positions


def _check_scale(
    adapter: LoraAdapter, module: str, total_rank: int, rank: int, scale: float
) -> None:
    """Raise CheckpointError unless rank and scale of a module are those of the run.

    `total_rank` is the sum of the ranks of the projections that the module computes.
    """
    stored_rank = adapter.config.get_rank(module)
    stored_scale = adapter.config.get_scaling(module)
    if stored_rank not in (rank, total_rank):
        raise CheckpointError(
            f"--lora-load {adapter.directory}: {module} has rank {stored_rank}, not {rank}: give "
            f"--lora-rank {stored_rank}"
        )
    if abs(stored_scale - scale) > 1e-9 * abs(scale):
        raise CheckpointError(
            f"--lora-load {adapter.directory}: the scale of {module} is {stored_scale:g}, not "
            f"{scale:g}: give --lora-alpha {stored_scale * rank:g}"
        )


def _split(
    matrices: Mapping[str, torch.Tensor],
    positions: Mapping[str, torch.Tensor],
    rank: int,
    location: str,
) -> list[tuple[str, dict[str, torch.Tensor]]]:
    """Return the matrices of each projection that a module of transformers computes.

    A module of several projections with the rank of one has a matrix A that they share: each gets
    a copy. With the sum of their ranks, B must consist of blocks as `adapter_writer` writes them.
    """
    unknown = matrices.keys() - {"lora_A", "lora_B", _MAGNITUDE}
    if unknown:
        names = ", ".join(sorted(unknown))
        raise CheckpointError(f"{location} has {names}, which cannot be trained")
    a = matrices["lora_A"]  # [ranks, in]
    b = matrices["lora_B"]  # [out, ranks]
    is_shared = a.shape[0] == rank
    result = []
    for index, (projection, rows) in enumerate(positions.items()):
        first = 0 if is_shared else index * rank
        ranks = slice(first, first + rank)
        tensors = {"lora_A": a[ranks], "lora_B": b[rows, ranks]}
        if _MAGNITUDE in matrices:
            tensors[_MAGNITUDE] = matrices[_MAGNITUDE][rows]

        # The rows of a projection must not use the ranks of another one.
        outside = b[rows]
        outside[:, ranks] = 0
        if outside.any():
            raise CheckpointError(
                f"{location} has rank {a.shape[0]} for {len(positions)} projections of rank "
                f"{rank}, but its matrix B is not in blocks: give --lora-rank {a.shape[0]}"
            )
        result.append((projection, tensors))
    return result

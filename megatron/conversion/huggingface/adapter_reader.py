"""Adapters of PEFT read into those of a run (`--lora-load`), the inverse of `adapter_writer`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from megatron.conversion.huggingface.adapter_writer import (
    MATRIX_KEY,
    choose_adapter_family,
    find_projection_rows,
    list_stored_rows,
)
from megatron.conversion.huggingface.lora_adapter import LoraAdapter
from megatron.conversion.huggingface.stored_parameters import StoredParameter, stored_parameters
from megatron.conversion.model_space.model import model_tensors
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.safe_files.schema import abbreviate
from megatron.core.transformer.transformer_config import TransformerConfig


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
    wants_magnitudes = any(key.endswith("lora_magnitude_vector") for key in keys)
    if adapter.config.has_magnitudes != wants_magnitudes:
        fix = "add --lora-dora" if adapter.config.has_magnitudes else "leave out --lora-dora"
        raise CheckpointError(f"--lora-load {directory}: use_dora differs: {fix}")
    projections: dict[str, list[str]] = {}
    for key in keys:
        match = MATRIX_KEY.fullmatch(key)
        assert match is not None, key
        layer, projection, matrix = match.groups()
        if matrix == "lora_A":
            projections.setdefault(layer, []).append(projection)

    shapes = model_tensors(config)
    weights = {f"{layer}.weight": shapes[f"{layer}.weight"] for layer in projections}
    rows = family.select_rows(config)
    values: dict[str, torch.Tensor] = {}
    unused = set(adapter.matrices)
    missing = []
    for parameter in stored_parameters(weights, rows, family.layers, config, lambda name: False):
        layer = parameter.key.removesuffix(".weight")
        row_ids = find_projection_rows(layer, config, parameter.shape[0])
        wanted_rows = {name: row_ids[name] for name in projections[layer]}
        for name, stored_rows in zip(parameter.names, list_stored_rows(parameter), strict=True):
            module = name.removesuffix(".weight")
            positions = _find_positions(parameter, wanted_rows, stored_rows)
            if not positions:
                continue
            if module not in unused:
                missing.append(module)
                continue
            unused.remove(module)
            _check_scale(adapter, module, len(positions) * rank, rank, scale)
            matrices = {
                kind: tensor.read_all() for kind, tensor in adapter.matrices[module].items()
            }
            for projection, parts in _split(matrices, positions, rank, f"{directory}: {module}"):
                for kind, value in parts.items():
                    values[f"{layer}.{projection}.{kind}"] = value
    if missing or unused:
        lines = []
        if missing:
            lines.append(f"it has no {abbreviate(sorted(missing), 3, ', ')}")
        if unused:
            lines.append(f"it also adapts {abbreviate(sorted(unused), 3, ', ')}")
        raise CheckpointError(
            f"--lora-load {directory}: {' and '.join(lines)}: make --lora-targets name the modules "
            "that it adapts"
        )
    return values


def _find_positions(
    parameter: StoredParameter, wanted_rows: Mapping[str, torch.Tensor], stored_rows: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the stored position of each row of the projections that a stored tensor contains."""
    position_of = torch.full((parameter.shape[0],), -1)
    position_of[stored_rows] = torch.arange(len(stored_rows))
    positions = {}
    for projection, rows in wanted_rows.items():
        if (position_of[rows] >= 0).all():
            positions[projection] = position_of[rows]
    return positions


def _check_scale(
    adapter: LoraAdapter, module: str, total_rank: int, rank: int, scale: float
) -> None:
    """Raise CheckpointError unless rank and scale of a module are those of the run."""
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
    name: str,
) -> list[tuple[str, dict[str, torch.Tensor]]]:
    """Return the matrices of each projection that a module of transformers computes.

    A module of several projections with the rank of one has a matrix A that they share: each gets
    a copy. With the sum of their ranks, B must consist of blocks as `adapter_writer` writes them.
    """
    unknown = matrices.keys() - {"lora_A", "lora_B", "lora_magnitude_vector"}
    if unknown:
        raise CheckpointError(f"{name} has {', '.join(sorted(unknown))}, which cannot be trained")
    a = matrices["lora_A"]
    b = matrices["lora_B"]
    is_shared = a.shape[0] == rank
    result = []
    for index, (projection, rows) in enumerate(positions.items()):
        first = 0 if is_shared else index * rank
        parts = {"lora_A": a[first : first + rank], "lora_B": b[rows, first : first + rank]}
        if "lora_magnitude_vector" in matrices:
            parts["lora_magnitude_vector"] = matrices["lora_magnitude_vector"][rows]
        outside = b[rows].clone()
        outside[:, first : first + rank] = 0
        if outside.any():
            raise CheckpointError(
                f"{name} has rank {a.shape[0]} for {len(positions)} projections of rank {rank}, "
                f"but its matrix B is not in blocks: give --lora-rank {a.shape[0]}"
            )
        result.append((projection, parts))
    return result

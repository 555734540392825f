"""Adapters of PEFT loaded into a run (`--lora-load`), the inverse of `adapter_writer`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.conversion.huggingface.adapter_changes import LowRankProduct
from megatron.conversion.huggingface.adapter_writer import (
    MATRIX_KEY,
    choose_adapter_family,
    find_projection_rows,
    list_matrices,
    list_stored_rows,
)
from megatron.conversion.huggingface.lora_adapter import LoraAdapter
from megatron.conversion.huggingface.stored_parameters import StoredParameter
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.dist_checkpointing.mapping import Shape
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
    parameters = list(list_matrices(family, config, adapter.changes))
    reader = _MatrixReader(adapter, parameters, rank, scale)
    values: dict[str, torch.Tensor] = {}
    experts: dict[str, list[torch.Tensor]] = {}  # by key, one tensor per expert
    for parameter in parameters:
        layer = parameter.key.removesuffix(".weight")
        if layer not in projections:
            continue
        all_rows = find_projection_rows(layer, config, parameter.shape[0])
        names = sorted(projections[layer], key=lambda name: int(all_rows[name][0]))
        projection_rows = {name: all_rows[name] for name in names}
        stored_rows = list_stored_rows(parameter)
        for name, row_ids in zip(parameter.names, stored_rows, strict=True):
            positions = _find_positions(parameter, projection_rows, row_ids)
            for matrix, tensor in reader.read(parameter, name, positions).items():
                if parameter.lead:
                    experts.setdefault(f"{layer}.{matrix}", []).append(tensor)
                else:
                    values[f"{layer}.{matrix}"] = tensor
    reader.check_modules()
    for key, tensors in experts.items():
        values[key] = torch.stack(tensors)
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


def _find_positions(
    parameter: StoredParameter,
    projection_rows: Mapping[str, torch.Tensor],
    stored_rows: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Return the positions of the rows of each projection in a stored tensor.

    Projections that the tensor does not contain are left out.

    Args:
        parameter: the weight of a layer.
        projection_rows: rows of the weight by projection, in ascending order.
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


@dataclass(frozen=True)
class _StoredMatrices:
    """The matrices of a module of PEFT: those of all experts if it wraps their parameter."""

    a: torch.Tensor  # [experts, ranks, in]
    b: torch.Tensor  # [experts, out, ranks]
    magnitude: torch.Tensor | None  # [out]


class _MatrixReader:
    """Reader of the matrices of an adapter, which must be exactly those of the run."""

    def __init__(
        self,
        adapter: LoraAdapter,
        parameters: Sequence[StoredParameter],
        rank: int,
        scale: float,
    ) -> None:
        """`parameters` are the matrices of the model; rank and scale are those of the run."""
        self._adapter = adapter
        self._rank = rank
        self._scale = scale
        self._unused = set(adapter.matrices)
        self._missing: set[str] = set()
        shapes: dict[str, Shape] = {}
        transposed: set[str] = set()
        for parameter in parameters:
            shapes.update(zip(parameter.names, parameter.stored_shapes(), strict=True))
            if parameter.transposed:
                transposed.update(parameter.names)
        self._products = adapter.find_products(shapes, transposed)
        self._last_matrices: tuple[str, _StoredMatrices] | None = None

    def read(
        self, parameter: StoredParameter, name: str, positions: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the matrices of the projections in a stored tensor, e.g. "q_proj.lora_A".

        `positions` are the rows of each projection in it. A module of several projections with the
        rank of one has a matrix A that they share: each gets a copy. With the sum of their ranks,
        B must consist of blocks as `adapter_writer` writes them.
        """
        if not positions:
            return {}
        if name not in self._products:
            self._missing.add(name.removesuffix(".weight"))
            return {}
        module, product = self._products[name]
        matrices = self._get_matrices(module, product, parameter.packed or 1, len(positions))
        expert = parameter.lead[0] if parameter.packed is not None else 0
        a = matrices.a[expert]
        b = matrices.b[expert]
        is_shared = a.shape[0] == self._rank
        values = {}
        for index, (projection, rows) in enumerate(positions.items()):
            first = 0 if is_shared else index * self._rank
            ranks = slice(first, first + self._rank)
            values[f"{projection}.lora_A"] = a[ranks]
            values[f"{projection}.lora_B"] = b[rows, ranks]
            if matrices.magnitude is not None:
                values[f"{projection}.{_MAGNITUDE}"] = matrices.magnitude[rows]

            # The rows of a projection must not use the ranks of another one.
            outside = b[rows]
            outside[:, ranks] = 0
            if outside.any():
                raise CheckpointError(
                    f"{self._adapter.directory}: {module} has rank {a.shape[0]} for "
                    f"{len(positions)} projections of rank {self._rank}, but its matrix B is not "
                    f"in blocks: give --lora-rank {a.shape[0]}"
                )
        return values

    def _get_matrices(
        self, module: str, product: LowRankProduct, num_experts: int, num_projections: int
    ) -> _StoredMatrices:
        """Return the matrices of a module, which are read once for all of its experts.

        Raises CheckpointError unless rank and scale are those of the run.
        """
        if self._last_matrices is not None and self._last_matrices[0] == module:
            return self._last_matrices[1]
        self._unused.remove(module)
        location = f"--lora-load {self._adapter.directory}"
        if self._adapter.has_bias(module):
            raise CheckpointError(f"{location}: {module} has lora_bias, which cannot be trained")
        rank = product.a.shape[0] // num_experts
        # A matrix A that the projections share, or one of each
        accepted_ranks = (self._rank, num_projections * self._rank)
        if rank not in accepted_ranks:
            raise CheckpointError(
                f"{location}: {module} has rank {rank}, not {self._rank}: give --lora-rank {rank}"
            )
        if abs(product.scaling - self._scale) > 1e-9 * abs(self._scale):
            raise CheckpointError(
                f"{location}: the scale of {module} is {product.scaling:g}, not {self._scale:g}: "
                f"give --lora-alpha {product.scaling * self._rank:g}"
            )
        # Without experts, these views have one expert.
        a = product.a.read_all()
        b = product.b.read_all()
        magnitude = None
        if product.magnitude is not None:
            magnitude = product.magnitude.read_all()
        matrices = _StoredMatrices(
            a=a.unflatten(0, (num_experts, rank)),
            b=b.unflatten(1, (rank, num_experts)).permute(2, 0, 1),
            magnitude=magnitude,
        )
        self._last_matrices = (module, matrices)
        return matrices

    def check_modules(self) -> None:
        """Raise CheckpointError if the adapter lacks modules of the run, or has others."""
        differences = []
        if self._missing:
            names = abbreviate(sorted(self._missing), 3, ", ")
            differences.append(f"it has no {names}")
        if self._unused:
            names = abbreviate(sorted(self._unused), 3, ", ")
            differences.append(f"it also adapts {names}")
        if differences:
            raise CheckpointError(
                f"--lora-load {self._adapter.directory}: {' and '.join(differences)}: make "
                "--lora-targets name the modules that it adapts"
            )

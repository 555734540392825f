"""Adapters of a run (`--lora-rank`) written as files of PEFT.

A run has matrices for q, k and v, and for gate and up. If a family of transformers computes several
of these projections in one module, the module has one pair of matrices whose rank is the sum of
their ranks: A contains the matrices A of the projections, and B is zero where the row and the rank
belong to different projections.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.huggingface.adapters import ADAPTER_CONFIG
from megatron.conversion.huggingface.families import choose_family
from megatron.conversion.huggingface.family import Family
from megatron.conversion.huggingface.stored_parameters import StoredParameter, stored_parameters
from megatron.conversion.huggingface.weight_files import write_weight_files
from megatron.conversion.model_space.lazy_tensors import view_tensor
from megatron.conversion.model_space.model import model_config, model_tensors
from megatron.core.dist_checkpointing.mapping import LazyTensor
from megatron.core.dist_checkpointing.saving.commit import Progress, no_progress
from megatron.core.durable_files import write_json
from megatron.core.run_checkpoint.source import Source
from megatron.core.transformer.transformer_config import TransformerConfig

MATRIX_KEY = re.compile(r"(.+)\.(\w+)\.(lora_A|lora_B|lora_magnitude_vector)")
_LAYER_PREFIX = re.compile(r"^.*?\.\d+\.")  # up to the number of the layer
_MODULE_PREFIX = "base_model.model."
_MAX_FILE_SIZE = 1 << 62  # bytes: one file


@dataclass(frozen=True)
class ProjectionMatrices:
    """The matrices of one projection, and the rows of the layer's weight that it computes."""

    a: torch.Tensor  # [rank, in]
    b: torch.Tensor  # [rows, rank]
    rows: torch.Tensor  # [rows], ascending
    magnitude: torch.Tensor | None = None  # [rows], of DoRA


def write_adapter(source: Source, directory: Path, progress: Progress = no_progress) -> None:
    """Write the adapters of a run's checkpoint into the empty `directory`, the configuration last.

    Raises ValueError if the base model is not one of transformers.
    """
    base, _, model_type = source.args["lora_base_model"]
    config = model_config(source.args, source.args["model_vocab_size"], source.description)
    family = choose_adapter_family(config, model_type)
    tensors: dict[str, LazyTensor] = {}
    ranks: dict[str, int] = {}  # by module of transformers
    for parameter, matrices in _match_layers(source, family, config):
        for module, module_matrices in split_matrices(parameter, matrices):
            name = f"{_MODULE_PREFIX}{module}"
            tensors[f"{name}.lora_A.weight"] = view_tensor(module_matrices.a)
            tensors[f"{name}.lora_B.weight"] = view_tensor(module_matrices.b)
            magnitude = module_matrices.magnitude
            if magnitude is not None:
                tensors[f"{name}.lora_magnitude_vector"] = view_tensor(magnitude)
            ranks[module] = module_matrices.a.shape[0]
    write_weight_files(directory, "adapter_model", tensors, _MAX_FILE_SIZE, 1, progress)
    fields = _make_fields(source.args, ranks, _list_modules(family, config))
    fields["base_model_name_or_path"] = base
    write_json(directory / ADAPTER_CONFIG, fields)


def choose_adapter_family(config: TransformerConfig, model_type: str | None) -> Family:
    """Return the family whose modules adapters of the model name.

    Raises ValueError if there is none, or if the adapters cannot be those of PEFT.
    """
    try:
        family = choose_family(config, model_type)
    except ValueError as error:
        raise ValueError(f"PEFT adapts models of transformers: {error}") from error
    if config.has_experts:
        raise ValueError(
            f"adapters of {family.model_type}, a model with experts, cannot be written as files of "
            "PEFT: leave out --save-hf, and keep the checkpoints of the run"
        )
    return family


def _match_layers(
    source: Source, family: Family, config: TransformerConfig
) -> Iterator[tuple[StoredParameter, dict[str, ProjectionMatrices]]]:
    """Yield each adapted weight as the family stores it, and the matrices of its projections."""
    # Layer -> projection -> "lora_A", "lora_B" and "lora_magnitude_vector"
    layers: dict[str, dict[str, dict[str, LazyTensor]]] = {}
    for key, tensor in source.tensors.items():
        match = MATRIX_KEY.fullmatch(key)
        if match is not None and not key.startswith("optimizer."):
            layer, projection, matrix = match.groups()
            projections = layers.setdefault(layer, {})
            projections.setdefault(projection, {})[matrix] = tensor

    shapes = model_tensors(config)
    adapted = {f"{layer}.weight": shapes[f"{layer}.weight"] for layer in layers}
    rows = family.select_rows(config)
    for parameter in stored_parameters(adapted, rows, family.layers, config, lambda name: False):
        layer = parameter.key.removesuffix(".weight")
        row_ids = find_projection_rows(layer, config, parameter.shape[0])
        matrices = {}
        for projection, tensors in layers[layer].items():
            magnitude = tensors.get("lora_magnitude_vector")
            matrices[projection] = ProjectionMatrices(
                a=tensors["lora_A"].read_all(),
                b=tensors["lora_B"].read_all(),
                rows=row_ids[projection],
                magnitude=None if magnitude is None else magnitude.read_all(),
            )
        yield parameter, matrices


def find_projection_rows(
    layer: str, config: TransformerConfig, num_rows: int
) -> dict[str, torch.Tensor]:
    """Return the rows of a layer's weight that each projection computes."""
    rows = torch.arange(num_rows)
    name = layer.rpartition(".")[2]
    if name == "linear_qkv":
        # Each query group has its queries, with a gate the gates, its key and its value.
        heads = [config.num_attention_heads // config.query_groups, 1, 1]
        names = ["q_proj", "k_proj", "v_proj"]
        if config.attention_output_gate:
            heads.insert(1, heads[0])
            names.insert(1, "q_gate_proj")
        groups = rows.view(config.query_groups, sum(heads), config.head_dim)
        rows_by_projection = {}
        for projection, projection_rows in zip(names, groups.split(heads, 1), strict=True):
            rows_by_projection[projection] = projection_rows.flatten()
        return rows_by_projection
    if name == "linear_fc1" and config.gated:
        gate, up = rows.chunk(2)
        return {"gate_proj": gate, "up_proj": up}
    # The only projection, which may have any name
    return _AnyProjection(rows)


class _AnyProjection(dict[str, torch.Tensor]):
    """All rows, for a layer with a single projection of any name."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self._rows = rows

    def __missing__(self, projection: str) -> torch.Tensor:
        return self._rows


def split_matrices(
    parameter: StoredParameter, matrices: Mapping[str, ProjectionMatrices]
) -> Iterator[tuple[str, ProjectionMatrices]]:
    """Yield the modules of transformers that have adapters, with their matrices.

    `matrices` are those of the projections of the layer. Raises ValueError if only some rows of a
    module have magnitudes: the others would need norms that only the base model has.
    """
    for name, row_ids in zip(parameter.names, list_stored_rows(parameter), strict=True):
        module = name.removesuffix(".weight")
        a_blocks = []
        b_blocks = []
        magnitudes = []
        is_adapted = torch.zeros(len(row_ids), dtype=torch.bool)
        for projection in matrices.values():
            # Position of each stored row in the projection, -1 if it computes another row.
            positions = torch.full((parameter.shape[0],), -1)
            positions[projection.rows] = torch.arange(len(projection.rows))
            stored_positions = positions[row_ids]
            is_outside = stored_positions < 0
            if is_outside.all():
                continue
            is_adapted |= ~is_outside

            # Rows that the projection does not compute are zero.
            stored_positions = stored_positions.clamp(min=0)
            b = projection.b[stored_positions]
            a_blocks.append(projection.a)
            b_blocks.append(b.masked_fill(is_outside.unsqueeze(1), 0.0))
            if projection.magnitude is not None:
                magnitude = projection.magnitude[stored_positions]
                magnitudes.append(magnitude.masked_fill(is_outside, 0.0))
        if not a_blocks:
            continue
        if magnitudes and not is_adapted.all():
            raise ValueError(
                f"{module} needs the magnitudes of all of its rows, but only "
                f"{', '.join(matrices)} were trained: add its other projections to --lora-targets"
            )
        yield (
            module,
            ProjectionMatrices(
                a=torch.cat(a_blocks),
                b=torch.cat(b_blocks, 1),
                rows=row_ids,
                magnitude=sum(magnitudes[1:], magnitudes[0]) if magnitudes else None,
            ),
        )


def list_stored_rows(parameter: StoredParameter) -> list[torch.Tensor]:
    """Return the row of the model that each row of the stored tensors is."""
    # One element per row, split like the rows of the weight.
    vector = replace(parameter, shape=parameter.shape[:1], transposed=False, lead=(), packed=None)
    row_ids = view_tensor(torch.arange(parameter.shape[0]))
    return [tensor.read_all() for tensor in vector.split(row_ids)]


def _list_modules(family: Family, config: TransformerConfig) -> list[str]:
    """Return the names of all modules of the model that have a matrix."""
    shapes = {key: shape for key, shape in model_tensors(config).items() if len(shape) > 1}
    rows = family.select_rows(config)
    modules = []
    for parameter in stored_parameters(shapes, rows, family.layers, config, lambda name: False):
        modules += [name.removesuffix(".weight") for name in parameter.names]
    return modules


def _make_fields(
    args: Mapping[str, Any], ranks: Mapping[str, int], modules: Sequence[str]
) -> dict[str, Any]:
    """Return the fields of adapter_config.json."""
    rank = args["lora_rank"]
    alpha = args["lora_alpha"]
    if alpha is None:
        alpha = rank
    rank_pattern = {}
    alpha_pattern = {}
    for module, module_rank in ranks.items():
        if module_rank != rank:
            name = _LAYER_PREFIX.sub("", module)
            rank_pattern[name] = module_rank
            alpha_pattern[name] = alpha * module_rank / rank  # the same scale
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": args["lora_dropout"],
        "use_dora": args["lora_dora"],
        "target_modules": _name_targets(ranks, modules),
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
        "bias": "none",
        "inference_mode": True,
    }


def _name_targets(adapted: Mapping[str, int], modules: Sequence[str]) -> list[str]:
    """Return the shortest names, e.g. q_proj, that match the adapted modules and no other one."""
    ambiguous_names = set()  # of modules that are not adapted
    for module in modules:
        if module not in adapted:
            ambiguous_names.add(module.rpartition(".")[2])
    targets = set()
    for module in adapted:
        name = module.rpartition(".")[2]
        targets.add(module if name in ambiguous_names else name)
    return sorted(targets)

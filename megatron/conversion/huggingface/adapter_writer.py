"""Adapters of a run (`--lora-rank`) written as files of PEFT.

A run has matrices for q, k and v, and for gate and up. If a family of transformers computes several
of these projections in one module, the module has one pair of matrices whose rank is the sum of
their ranks: A contains the matrices A of the projections, and B is zero where the row and the rank
belong to different projections.

Experts are written as transformers 5 has them: one parameter for all experts of a projection
(`target_parameters` of PEFT). The matrices of expert e are `A[e]` of `[experts, rank, in]` and
`B[..., e]` of `[out, rank, experts]`, both stored with two dimensions. PEFT wraps the module of the
experts once for each parameter: names of all but the last one get ".base_layer".
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from megatron.conversion.model_space.pieces import map_unchanged
from megatron.core.dist_checkpointing.mapping import LazyTensor
from megatron.core.dist_checkpointing.saving.commit import Progress, no_progress
from megatron.core.durable_files import write_json
from megatron.core.run_checkpoint.source import Source
from megatron.core.transformer.transformer_config import TransformerConfig

logger = logging.getLogger(__name__)

WRAPPER = ".base_layer"
MATRIX_KEY = re.compile(r"(.+)\.(\w+)\.(lora_A|lora_B|lora_magnitude_vector)")
_LAYER_PREFIX = re.compile(r"^.*?\.\d+\.")  # up to the number of the layer
_EXPERT_NAMES = (".gate_proj", ".up_proj", ".down_proj")
_MODULE_PREFIX = "base_model.model."
_MAX_FILE_SIZE = 1 << 62  # bytes: one file


@dataclass(frozen=True)
class ProjectionMatrices:
    """The matrices of one projection, and the rows of the layer's weight that it computes."""

    a: torch.Tensor  # [rank, in]
    b: torch.Tensor  # [rows, rank]
    rows: torch.Tensor  # [rows], ascending
    magnitude: torch.Tensor | None = None  # [rows], of DoRA


@dataclass
class AdaptedTensor:
    """A weight of transformers, or a parameter of all experts, with the matrices that change it."""

    name: str
    is_parameter: bool  # of all experts
    experts: list[ProjectionMatrices] = field(default_factory=list)  # one without experts

    @property
    def target(self) -> str:
        """Return the name that PEFT has for it: that of a module or of a parameter."""
        return self.name if self.is_parameter else self.name.removesuffix(".weight")

    def join(self) -> ProjectionMatrices:
        """Return the matrices of all experts as PEFT stores them."""
        first = self.experts[0]
        if not self.is_parameter:
            return first
        a = torch.cat([matrices.a for matrices in self.experts])
        b = torch.stack([matrices.b for matrices in self.experts], -1)
        return replace(first, a=a, b=b.flatten(1))


def write_adapter(source: Source, directory: Path, progress: Progress = no_progress) -> None:
    """Write the adapters of a run's checkpoint into the empty `directory`, the configuration last.

    Raises ValueError if the base model is not one of transformers.
    """
    base, _, model_type = source.args["lora_base_model"]
    config = model_config(source.args, source.args["model_vocab_size"], source.description)
    family = choose_adapter_family(config, model_type)
    adapted: dict[str, AdaptedTensor] = {}
    for parameter, matrices in _match_layers(source, family, config):
        for name, tensor_matrices in split_matrices(parameter, matrices):
            entry = adapted.setdefault(name, AdaptedTensor(name, parameter.packed is not None))
            entry.experts.append(tensor_matrices)
    tensors: dict[str, LazyTensor] = {}
    for module, entry in _name_modules(adapted.values()).items():
        name = f"{_MODULE_PREFIX}{module}"
        joined = entry.join()
        tensors[f"{name}.lora_A.weight"] = view_tensor(joined.a)
        tensors[f"{name}.lora_B.weight"] = view_tensor(joined.b)
        if joined.magnitude is not None:
            tensors[f"{name}.lora_magnitude_vector"] = view_tensor(joined.magnitude)
    _warn_about_shared_experts(config, adapted.values())
    write_weight_files(directory, "adapter_model", tensors, _MAX_FILE_SIZE, 1, progress)
    fields = _make_fields(source.args, adapted, _list_weights(family, config))
    fields["base_model_name_or_path"] = base
    write_json(directory / ADAPTER_CONFIG, fields)


def _warn_about_shared_experts(config: TransformerConfig, adapted: Iterable[AdaptedTensor]) -> None:
    """Warn about modules that peft 0.21 mistakes for experts because of their last name."""
    if not config.has_experts:
        return
    for entry in adapted:
        if not entry.is_parameter and entry.target.endswith(_EXPERT_NAMES):
            logger.warning(
                f"the adapters include {entry.target}, which is not a routed expert: peft 0.21 "
                "with transformers 5 does not load such adapters in some families (DeepSeek, "
                "Qwen2-MoE, ...), without an error. Merge them with convert.py --lora, or use "
                "--lora-targets linear_qkv linear_proj experts.linear_fc1 experts.linear_fc2"
            )
            return


def choose_adapter_family(config: TransformerConfig, model_type: str | None) -> Family:
    """Return the family whose modules adapters of the model name.

    Raises ValueError if there is none, or if the adapters cannot be those of PEFT.
    """
    try:
        family = choose_family(config, model_type)
    except ValueError as error:
        raise ValueError(f"PEFT adapts models of transformers: {error}") from error
    return family


def list_matrices(
    family: Family, config: TransformerConfig, has: Callable[[str], bool]
) -> Iterator[StoredParameter]:
    """Yield the weights of a model that are matrices as the family stores them, one per expert.

    `has(name)` reports whether a tensor of all experts exists instead of one per expert.
    """
    shapes = {}
    for key, shape in model_tensors(config).items():
        if len(shape) > 1 and key.endswith(".weight"):
            shapes[key] = shape
    rows = family.select_rows(config)
    for parameter in stored_parameters(shapes, rows, family.layers, config, has):
        if len(parameter.shape) < 3:
            yield parameter
            continue
        num_experts, *matrix_shape = parameter.shape
        row_map = map_unchanged(matrix_shape[0])
        for expert in range(num_experts):
            yield replace(
                parameter,
                lead=(expert,),
                shape=tuple(matrix_shape),
                row_map=row_map,
                packed=num_experts,
            )


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

    layer_values: dict[str, dict[str, torch.Tensor]] = {}
    last_layer = ""
    for parameter in list_matrices(family, config, lambda name: True):
        layer = parameter.key.removesuffix(".weight")
        if layer not in layers:
            continue
        if layer != last_layer:
            layer_values = _read_layer(layers[layer])
            last_layer = layer
        row_ids = find_projection_rows(layer, config, parameter.shape[0])
        matrices = {}
        for projection, values in layer_values.items():
            if parameter.lead:
                (expert,) = parameter.lead
                values = {name: value[expert] for name, value in values.items()}
            matrices[projection] = ProjectionMatrices(
                a=values["lora_A"],
                b=values["lora_B"],
                rows=row_ids[projection],
                magnitude=values.get("lora_magnitude_vector"),
            )
        yield parameter, matrices


def _read_layer(
    projections: Mapping[str, Mapping[str, LazyTensor]],
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the matrices of each projection of a layer, of all of its experts."""
    values = {}
    for projection, tensors in projections.items():
        values[projection] = {name: tensor.read_all() for name, tensor in tensors.items()}
    return values


def _name_modules(adapted: Iterable[AdaptedTensor]) -> dict[str, AdaptedTensor]:
    """Return the adapted tensors by the module of PEFT that has their matrices."""
    modules: dict[str, AdaptedTensor] = {}
    parameters: dict[str, list[AdaptedTensor]] = {}  # of each module of experts
    for entry in adapted:
        if entry.is_parameter:
            parameters.setdefault(entry.name.rpartition(".")[0], []).append(entry)
        else:
            modules[entry.target] = entry
    for module, entries in parameters.items():
        for depth, entry in enumerate(reversed(entries)):
            modules[module + depth * WRAPPER] = entry
    return modules


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
    """Yield the tensors of transformers that have adapters, with their matrices.

    `matrices` are those of the projections of the layer. Raises ValueError if only some rows of a
    module have magnitudes: the others would need norms that only the base model has.
    """
    for name, row_ids in zip(parameter.names, list_stored_rows(parameter), strict=True):
        a_blocks = []
        b_blocks = []
        magnitudes = []
        is_adapted = torch.zeros(len(row_ids), dtype=torch.bool)
        # In the order of their rows, as `adapter_reader` expects them.
        for projection in sorted(matrices.values(), key=lambda pair: int(pair.rows[0])):
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
        if magnitudes and parameter.packed is not None:
            raise ValueError(
                f"{name} contains all experts, and PEFT has no magnitudes for such parameters: "
                "leave out --lora-dora, or the experts in --lora-targets"
            )
        if magnitudes and not is_adapted.all():
            raise ValueError(
                f"{name.removesuffix('.weight')} needs the magnitudes of all of its rows, but only "
                f"{', '.join(matrices)} were trained: add its other projections to --lora-targets"
            )
        yield (
            name,
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


def _list_weights(family: Family, config: TransformerConfig) -> list[AdaptedTensor]:
    """Return all weights of the model that could have adapters, and parameters of experts."""
    weights = {}
    for parameter in list_matrices(family, config, lambda name: True):
        for name in parameter.names:
            weights[name] = AdaptedTensor(name, parameter.packed is not None)
    return list(weights.values())


def _make_fields(
    args: Mapping[str, Any], adapted: Mapping[str, AdaptedTensor], weights: Sequence[AdaptedTensor]
) -> dict[str, Any]:
    """Return the fields of adapter_config.json; `weights` are all those of the model."""
    rank = args["lora_rank"]
    alpha = args["lora_alpha"]
    if alpha is None:
        alpha = rank
    rank_pattern = {}
    alpha_pattern = {}
    for entry in adapted.values():
        tensor_rank = entry.experts[0].a.shape[0]
        if tensor_rank != rank:
            name = _LAYER_PREFIX.sub("", entry.target)
            rank_pattern[name] = tensor_rank
            alpha_pattern[name] = alpha * tensor_rank / rank  # the same scale
    parameters = _name_targets(adapted, [entry for entry in weights if entry.is_parameter], 2)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": args["lora_dropout"],
        "use_dora": args["lora_dora"],
        "target_modules": _name_targets(
            adapted, [entry for entry in weights if not entry.is_parameter], 1
        ),
        "target_parameters": parameters or None,
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
        "bias": "none",
        "inference_mode": True,
    }


def _name_targets(
    adapted: Mapping[str, AdaptedTensor], weights: Sequence[AdaptedTensor], length: int
) -> list[str]:
    """Return short names that match the adapted ones of the `weights` and no other one.

    They are the last `length` components, e.g. q_proj or experts.down_proj, or complete names.
    """

    def shorten(entry: AdaptedTensor) -> str:
        return ".".join(entry.target.split(".")[-length:])

    ambiguous_names = {shorten(entry) for entry in weights if entry.name not in adapted}
    targets = set()
    for entry in weights:
        if entry.name in adapted:
            name = shorten(entry)
            targets.add(entry.target if name in ambiguous_names else name)
    return sorted(targets)

"""Location of each parameter of one model in the files of transformers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron.conversion.huggingface.parameters import Row
from megatron.conversion.model_space.lazy_tensors import (
    gather_rows,
    reshape,
    scatter_rows,
    select,
    stack,
    transpose,
)
from megatron.conversion.model_space.pieces import (
    RowMap,
    count_stored_rows,
    map_alternating,
    map_fused_qkv,
    map_separate_qkv,
    map_skipped,
    map_stacked,
    map_unchanged,
    swap_halves,
)
from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape
from megatron.core.run_checkpoint.keys import WORD_EMBEDDINGS
from megatron.core.transformer.transformer_config import TransformerConfig

OUTPUT = "output_layer.weight"
CODEGEN_BLOCKS = 4  # of query groups in the fused projection
# Layer (if it is in one), module, and kind of parameter of a key.
_KEY = re.compile(
    r"(?:decoder\.layers\.(\d+)\.)?(.*?)(weight|bias|softmax_offset|alpha_[np]|beta|eps)"
)
_PREDICTION = re.compile(r"mtp\.layers\.(\d+)\.(?:transformer_layer\.)?(.+)")


@dataclass(frozen=True)
class StoredParameter:
    """The stored tensors of one parameter of the model, or of the matrix of one expert."""

    key: str
    lead: Shape  # (number of the expert,) or ()
    shape: Shape  # without the dimension of experts
    names: tuple[str, ...]
    row_map: RowMap
    transposed: bool = False
    packed: int | None = None  # number of experts in each stored tensor, if they are packed
    is_scalar: bool = False  # one element, which the files have without an axis
    matrix_rows: int = 0  # of a vector that the files have as a matrix

    @property
    def is_bias(self) -> bool:
        return self.key.endswith(".bias")

    def stored_shapes(self) -> list[Shape]:
        """Return the shapes of the tensors called `names`."""
        if self.is_scalar:
            return [()]
        if self.matrix_rows:
            return [(self.matrix_rows, self.shape[0] // self.matrix_rows)]
        shapes: list[Shape] = []
        for rows in count_stored_rows(self.row_map):
            shape: Shape = (rows, *self.shape[1:])
            if self.transposed:
                shape = shape[::-1]
            if self.packed is not None:
                shape = (self.packed, *shape)
            shapes.append(shape)
        return shapes

    def select_in(self, tensor: LazyTensor) -> LazyTensor:
        """Return this part of a tensor, without rows that pad the vocabulary."""
        for expert in self.lead:
            tensor = select(tensor, expert)
        return replace(tensor, shape=self.shape)

    def join(self, stored_tensors: Sequence[LazyTensor]) -> LazyTensor:
        """Return the parameter that the tensors called `names` contain."""
        tensors = []
        for tensor in stored_tensors:
            if self.is_scalar:
                tensor = stack([tensor])
            if self.matrix_rows:
                tensor = reshape(tensor, self.shape)
            if self.packed is not None:
                (expert,) = self.lead
                tensor = select(tensor, expert)
            if self.transposed:
                tensor = transpose(tensor)
            tensors.append(tensor)
        return gather_rows(tensors, self.row_map)

    def split(self, parameter: LazyTensor) -> list[LazyTensor]:
        """Return the tensors called `names`, the inverse of `join`.

        Those of packed experts lack the axis of experts.
        """
        tensors = []
        for index in range(len(self.names)):
            tensor = scatter_rows(parameter, self.row_map, index)
            if self.transposed:
                tensor = transpose(tensor)
            if self.matrix_rows:
                tensor = reshape(tensor, self.stored_shapes()[index])
            if self.is_scalar:
                tensor = select(tensor, 0)
            tensors.append(tensor)
        return tensors


def store_parameters(
    parameters: Iterable[StoredParameter], get_value: Callable[[StoredParameter], LazyTensor]
) -> dict[str, LazyTensor]:
    """Return the stored tensors of `parameters`, which have these values, by name."""
    tensors: dict[str, LazyTensor] = {}
    experts: dict[str, list[LazyTensor]] = {}  # of tensors that contain all experts
    for parameter in parameters:
        stored_tensors = parameter.split(get_value(parameter))
        for name, tensor in zip(parameter.names, stored_tensors, strict=True):
            if parameter.packed is not None:
                experts.setdefault(name, []).append(tensor)
                tensor = stack(experts[name])
            tensors[name] = tensor
    return tensors


def stored_parameters(
    shapes: Mapping[str, Shape],
    rows: Mapping[str, Row],
    layers: str,
    config: TransformerConfig,
    has: Callable[[str], bool],
) -> Iterator[StoredParameter]:
    """Yield every parameter in `shapes` that has a row, one per expert where experts are separate.

    Names of layer N start with `layers` and N. `has(name)` reports whether the files contain a
    tensor; the fused form of experts is used where it exists. A generator, because config.json may
    name 1e5 experts in each of 1e4 layers: callers stop at the first tensor that is missing.
    """
    for key, shape in shapes.items():
        match = _KEY.fullmatch(_number_prediction_layer(key, config))
        if match is None or match[2] not in rows:
            continue
        layer, module, suffix_key = match.groups()
        row = rows[module]
        if suffix_key == "bias" and not row.biased:
            continue
        prefix = ""
        if layer is not None:
            prefix = f"{layers}{layer}."
        suffix = row.suffixes.get(suffix_key, suffix_key)

        # One tensor for all experts, with the rows of the model.
        if row.fused is not None and has(prefix + row.fused):
            yield StoredParameter(key, (), shape, (prefix + row.fused,), map_unchanged(shape[0]))
            continue

        # A parameter without experts.
        if not row.packed and len(shape) < 3:
            if "{h}" in row.names[0]:
                heads = range(shape[0] // config.head_dim)
                head_names = tuple(row.names[0].replace("{h}", str(head)) for head in heads)
                row = replace(row, names=head_names)
            names = tuple(f"{prefix}{name}{suffix}" for name in row.names)
            row_map = _make_row_map(row, shape[0], config)
            is_transposed = row.transposed and len(shape) == 2
            yield StoredParameter(
                key,
                (),
                shape,
                names,
                row_map,
                is_transposed,
                is_scalar=suffix_key in row.scalars,
                matrix_rows=_count_matrix_rows(row, shape[0], config),
            )
            continue

        # Experts: the first dimension of the model's parameter counts them.
        num_experts, *matrix_shape = shape
        row_map = _make_row_map(row, matrix_shape[0], config)
        is_transposed = row.transposed and len(matrix_shape) == 2
        packed = num_experts if row.packed else None
        for expert in range(num_experts):
            templates = (f"{prefix}{name}{suffix}" for name in row.names)
            names = tuple(name.replace("{e}", str(expert)) for name in templates)
            yield StoredParameter(
                key, (expert,), tuple(matrix_shape), names, row_map, is_transposed, packed
            )


def copied_parameters(
    shapes: Mapping[str, Shape], layers: str, config: TransformerConfig
) -> Iterator[StoredParameter]:
    """Yield the copies of embedding and output matrix in layers for multi-token prediction."""
    head = WORD_EMBEDDINGS
    if config.untie_embeddings_and_output_weights:
        head = OUTPUT
    for depth in range(config.num_mtp_layers):
        prefix = f"{layers}{config.num_layers + depth}."
        copies = {"embed_tokens.weight": WORD_EMBEDDINGS, "shared_head.head.weight": head}
        for name, key in copies.items():
            shape = shapes[key]
            yield StoredParameter(key, (), shape, (prefix + name,), map_unchanged(shape[0]))


def _number_prediction_layer(key: str, config: TransformerConfig) -> str:
    """Return the key that a parameter for multi-token prediction would have in a further layer."""
    match = _PREDICTION.fullmatch(key)
    if match is None:
        return key
    depth, module = match.groups()
    return f"decoder.layers.{config.num_layers + int(depth)}.{module}"


def _count_matrix_rows(row: Row, elements: int, config: TransformerConfig) -> int:
    """Return the rows of the matrix that the files have for a vector; 0 if they have a vector."""
    if row.head_rows:
        return elements // config.head_dim
    return int(row.single_rows)


def _make_row_map(row: Row, rows: int, config: TransformerConfig) -> RowMap:
    """Return how `rows` rows of the model are distributed over the stored tensors of a row."""
    sizes = (config.num_attention_heads, config.query_groups, config.head_dim)
    if row.codegen_qkv:
        return map_fused_qkv(*sizes, blocks=CODEGEN_BLOCKS, order="qvk")
    if row.qkv:
        if len(row.names) == 1:
            return map_fused_qkv(*sizes, blocks=1)
        separate = map_separate_qkv(*sizes, gated=config.attention_output_gate)
        if row.swapped_halves:
            return swap_halves(separate, config.head_dim, sources=(0, 1))
        return separate
    if row.skipped_rows:
        return map_skipped(rows, row.skipped_rows)
    if row.alternating:
        return map_alternating(rows // 2, 2)
    return map_stacked(rows // len(row.names), len(row.names))

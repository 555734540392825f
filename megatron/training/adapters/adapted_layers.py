"""Linear layers with low-rank adapters, whose weight W is frozen.

    LoRA    W' = W + scale B A                                  Hu et al. 2021
    DoRA    W' = m (W + scale B A) / ||W + scale B A||          Liu et al. 2024, norms of rows

A layer that computes several projections (q, k and v; gate and up) has matrices A and B for each,
as PEFT has. They are split so that only `[s, b, rank]` is exchanged between ranks:

    layer             A [rank, in]             B [out, rank]       exchange of X A^T over TP
    column-parallel   replicated               rows are split      copy, or gather of the sequence
    row-parallel      columns are split        replicated          sum, or reduce-scatter
    experts (fc1)     per expert, replicated   rows are split      none: dA is summed over ETP
    experts (fc2)     per expert, columns      replicated          none: dB is summed over ETP

The magnitudes m `[out]` are split like the rows of B. The input and output of experts are whole and
partial as those of the frozen product: the token dispatcher sums both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.module import (
    Constant,
    Init,
    MegatronModule,
    Normal,
    ParamInfo,
    make_parameter,
    param_info,
)
from megatron.core.sharding import Sharding
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallelRng,
    apply_linear,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_parallel,
    gather_input,
    reduce_output,
    start_all_reduce,
)
from megatron.core.transformer.grouped_linear import (
    GroupedLinear,
    apply_grouped_product,
    repeat_rows,
)
from megatron.training.adapters.encoded_layers import EncodedDenseLayer, EncodedLayer

Linear = ColumnParallelLinear | RowParallelLinear | GroupedLinear


@dataclass(frozen=True)
class AdapterOptions:
    """Properties that all adapters of a model have in common."""

    rank: int
    scale: float
    dropout: float
    has_magnitudes: bool  # DoRA
    rng: TensorParallelRng
    device: torch.device


@dataclass(frozen=True)
class RowLayout:
    """The rows of a weight: `repeats` groups, each with `widths[i]` rows of projection i."""

    repeats: int
    widths: tuple[int, ...]

    def join(self, outputs: Sequence[Tensor | None], like: Tensor, default: float = 0.0) -> Tensor:
        """Return `[..., rows]` from the outputs `[..., repeats * width]` of the projections.

        Those without an adapter (None) have the `default`. `like` has the shape of the result.
        """
        if len(outputs) == 1 and outputs[0] is not None:
            return outputs[0]
        blocks = []
        for width, output in zip(self.widths, outputs, strict=True):
            shape = (*like.shape[:-1], self.repeats, width)
            if output is None:
                output = like.new_full(shape, default)
            blocks.append(output.reshape(shape))
        return torch.cat(blocks, -1).flatten(-2)

    def split(self, weight: Tensor) -> list[Tensor]:
        """Return the rows of each projection of a weight `[..., rows, in]`."""
        groups = weight.unflatten(-2, (self.repeats, sum(self.widths)))
        return [rows.flatten(-3, -2) for rows in groups.split(self.widths, -2)]


class LowRankMatrices(MegatronModule):
    """The matrices A and B of one projection, of each expert for experts; magnitudes for DoRA."""

    def __init__(
        self,
        weight: torch.nn.Parameter,
        num_rows: int,
        options: AdapterOptions,
        sequence_parallel: bool,
    ) -> None:
        """`weight` is that of the layer, and `num_rows` the rows of the projection on all ranks."""
        super().__init__()
        info = param_info(weight)
        *lead, _, num_columns = info.sharding.global_shape(tuple(weight.shape))
        row_dim = weight.dim() - 2
        # The standard deviation of PEFT's initial values, which are uniform.
        init = Normal(1 / math.sqrt(3 * num_columns))
        a_info = _describe_matrix(info, init, row_dim + 1, sequence_parallel)
        b_info = _describe_matrix(info, Constant(0.0), row_dim, sequence_parallel)
        a_shape = (*lead, options.rank, num_columns)
        b_shape = (*lead, num_rows, options.rank)
        self.lora_A = make_parameter(a_shape, weight.dtype, options.device, a_info)
        self.lora_B = make_parameter(b_shape, weight.dtype, options.device, b_info)
        self.lora_magnitude_vector = None
        if options.has_magnitudes:
            shape = (*lead, num_rows)
            magnitude = make_parameter(shape, weight.dtype, options.device, b_info)
            self.lora_magnitude_vector = magnitude


def _describe_matrix(info: ParamInfo, init: Init, dim: int, sequence_parallel: bool) -> ParamInfo:
    """Return the properties of a matrix whose dimension `dim` is split if it is in the weight."""
    weight = info.sharding
    sharding = Sharding(axis=weight.axis, ep=weight.ep)
    if weight.dim == dim:
        sharding = replace(sharding, dim=dim)
    # A replicated matrix is multiplied by a part of the sequence on each TP rank.
    partial = info.partial_grad or (sequence_parallel and not sharding.is_split)
    return replace(info, init=init, sharding=sharding, partial_grad=partial, trained=True)


class AdaptedLayer(MegatronModule):
    """Base of the classes that a linear layer gets with its adapters."""

    weight: torch.nn.Parameter
    adapter: AdapterOptions
    rows: RowLayout
    projections: tuple[str | None, ...]

    def list_matrices(self) -> list[LowRankMatrices | None]:
        """Return the matrices of each projection, None for one without adapter."""
        return [None if name is None else getattr(self, name) for name in self.projections]

    def list_magnitudes(self) -> list[torch.nn.Parameter | None]:
        """Return the magnitudes of each projection, None for one without adapter."""
        matrices = self.list_matrices()
        return [None if pair is None else pair.lora_magnitude_vector for pair in matrices]

    def drop(self, x: Tensor, is_split: bool) -> Tensor:
        """Apply the dropout; TP ranks draw different numbers if x `is_split` between them."""
        if not (self.adapter.dropout and self.training):
            return x
        with self.adapter.rng.fork_if(is_split):
            return F.dropout(x, self.adapter.dropout)

    @torch.no_grad()
    def compute_norms(self) -> list[Tensor | None]:
        """Return the norms `[..., rows]` of the rows of each projection, fp32.

        Collective over TP where columns are split. DoRA does not differentiate them.
        """
        sharding = param_info(self.weight).sharding
        norms: list[Tensor | None] = []
        weight = self.decode_weight() if isinstance(self, EncodedLayer) else self.weight
        for rows, pair in zip(self.rows.split(weight), self.list_matrices(), strict=True):
            if pair is None:
                norms.append(None)
                continue
            product = pair.lora_B.float() @ pair.lora_A.float()
            squares = rows.float().add(product, alpha=self.adapter.scale).square().sum(-1)
            if sharding.dim == self.weight.dim() - 1:
                squares = start_all_reduce(squares, sharding.axis).wait()
            norms.append(squares.sqrt())
        return norms

    def compute_factors(self, magnitudes: Sequence[Tensor | None]) -> Tensor:
        """Return the factor of each row of W + scale B A, `[..., rows]`; 1 without adapter."""
        factors: list[Tensor | None] = []
        for magnitude, norm in zip(magnitudes, self.compute_norms(), strict=True):
            factor = None
            if magnitude is not None and norm is not None:
                factor = (magnitude / norm).to(magnitude.dtype)
            factors.append(factor)
        # The weight of an encoded layer has no memory.
        like = next(factor for factor in factors if factor is not None)
        like = like[..., :1].expand(self.weight.shape[:-1])
        return self.rows.join(factors, like, default=1.0)

    @torch.no_grad()
    def reset_magnitudes(self) -> None:
        """Set the magnitudes to the norms, so that the adapters do not change the layer."""
        for pair, norm in zip(self.list_matrices(), self.compute_norms(), strict=True):
            if pair is not None and norm is not None:
                assert pair.lora_magnitude_vector is not None
                pair.lora_magnitude_vector.copy_(norm)


class AdaptedDenseLayer(AdaptedLayer):
    """Layer whose product is split over TP."""

    def compute_change(self, x: Tensor) -> Tensor:
        """Return `scale B A x`, in the shape of the output."""
        raise NotImplementedError

    def project(self, x: Tensor) -> Tensor:
        layer: Any = self
        if not self.adapter.has_magnitudes:
            y: Tensor = super().project(x)  # type: ignore[misc]
            if getattr(layer, "normalizes_in_project", False):
                x = layer.normalize(x, layer.layer_norm_weight, layer.layer_norm_bias)
            return y + self.compute_change(x)
        if isinstance(self, EncodedDenseLayer):
            y = self.multiply(x, None)
        else:
            y = apply_linear(x, self.weight, None, layer.layout)
        y = y + self.compute_change(x)
        y = y * self.compute_factors(self.list_magnitudes())
        return y if layer.bias is None else y + layer.bias


class AdaptedColumn(AdaptedDenseLayer):
    """Column-parallel layer: B is split by rows. With sequence parallelism x is `[s/tp, b, in]`."""

    def compute_change(self, x: Tensor) -> Tensor:
        layer: Any = self
        matrices = self.list_matrices()
        all_a = torch.cat([pair.lora_A for pair in matrices if pair is not None])
        # The part of the sequence of this rank suffices for A, whose output is small.
        hidden = F.linear(self.drop(x, layer.sequence_parallel), all_a) * self.adapter.scale
        hidden = gather_input(hidden, layer.tp, layer.sequence_parallel)  # [s, b, n * rank]
        parts = iter(hidden.split(self.adapter.rank, -1))
        outputs: list[Tensor | None] = []
        for pair in matrices:
            outputs.append(None if pair is None else F.linear(next(parts), pair.lora_B))
        like = hidden[..., :1].expand(*hidden.shape[:-1], self.weight.shape[0])
        return self.rows.join(outputs, like)


class AdaptedRow(AdaptedDenseLayer):
    """Row-parallel layer: A is split by columns, like the input `[s, b, in/tp]`."""

    def compute_change(self, x: Tensor) -> Tensor:
        layer: Any = self
        (pair,) = self.list_matrices()
        assert pair is not None
        hidden = F.linear(self.drop(x, layer.tp.size > 1), pair.lora_A) * self.adapter.scale
        hidden = reduce_output(hidden, layer.tp, layer.sequence_parallel)
        return F.linear(hidden, pair.lora_B)


class AdaptedExperts(AdaptedLayer):
    """Experts, with a matrix A `[experts, rank, in]` and B `[experts, out, rank]` per projection.

    Inputs of fc1 are whole and its outputs split over ETP; inputs of fc2 are split and its outputs
    summands. The change has the state of the frozen product in both, so it is not exchanged. The
    gradient of a replicated parameter is a summand on each ETP rank.
    """

    def project(self, x: Tensor, counts: Tensor) -> Tensor:
        y: Tensor = super().project(x, counts)  # type: ignore[misc]
        matrices = self.list_matrices()
        all_a = torch.cat([_sum_gradient(pair.lora_A) for pair in matrices if pair is not None], 1)
        hidden = apply_grouped_product(x, all_a, counts) * self.adapter.scale
        parts = iter(hidden.split(self.adapter.rank, -1))
        outputs: list[Tensor | None] = []
        for pair in matrices:
            output = None
            if pair is not None:
                b = _sum_gradient(pair.lora_B)
                output = apply_grouped_product(next(parts).contiguous(), b, counts)
            outputs.append(output)
        y = y + self.rows.join(outputs, y)
        if not self.adapter.has_magnitudes:
            return y
        magnitudes: list[Tensor | None] = []
        for magnitude in self.list_magnitudes():
            magnitudes.append(None if magnitude is None else _sum_gradient(magnitude))
        return y * repeat_rows(self.compute_factors(magnitudes), counts, len(y))


def _sum_gradient(param: torch.nn.Parameter) -> Tensor:
    """Return a parameter of experts whose gradient is summed over ETP if it is replicated."""
    sharding = param_info(param).sharding
    if sharding.is_split:
        return param
    return copy_to_tensor_parallel(param, sharding.axis)


@cache
def _make_class(layer_class: Any) -> Any:
    """Return the class of a layer with adapters."""
    for base, adapted in (
        (ColumnParallelLinear, AdaptedColumn),
        (RowParallelLinear, AdaptedRow),
        (GroupedLinear, AdaptedExperts),
    ):
        if issubclass(layer_class, base):
            return type(f"Adapted{layer_class.__name__}", (adapted, layer_class), {})
    raise AssertionError(f"{layer_class.__name__} is not a linear layer")


def adapt_layer(
    layer: Linear, names: Sequence[str | None], rows: RowLayout, options: AdapterOptions
) -> None:
    """Add adapters to the projections `names` of a layer, in the order of its rows.

    None is a projection without adapter.
    """
    sharding = param_info(layer.weight).sharding
    splits_rows = sharding.dim == layer.weight.dim() - 2
    num_ranks = sharding.axis.size if splits_rows else 1
    sequence_parallel = getattr(layer, "sequence_parallel", False)
    for name, width in zip(names, rows.widths, strict=True):
        if name is not None:
            num_rows = rows.repeats * width * num_ranks
            matrices = LowRankMatrices(layer.weight, num_rows, options, sequence_parallel)
            layer.add_module(name, matrices)
    # A subclass of its class: the norm, checkpoints and callers of the layer stay as they are.
    adapted: Any = layer
    adapted.__class__ = _make_class(adapted.__class__)
    adapted.adapter = options
    adapted.rows = rows
    adapted.projections = tuple(names)


def reset_magnitudes(model: MegatronModule) -> None:
    """Set the magnitudes of DoRA to the norms of the loaded weights. Collective over TP."""
    for module in model.modules():
        if isinstance(module, AdaptedLayer) and module.adapter.has_magnitudes:
            module.reset_magnitudes()

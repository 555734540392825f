"""Linear layers whose frozen weight stays encoded in memory (`--lora-base-encoding`).

A weight is decoded for each product and released after it, once in the forward pass and once in the
backward pass, which computes only the gradient of the input. `weight` remains a parameter without
memory, on the meta device, with the shape and the sharding of the decoded matrix. Blocks of
elements with one scale are within the columns of a rank, so the values do not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.module import MegatronModule, param_info, set_param_info
from megatron.core.private_operators import multiply_by_weight
from megatron.core.run_checkpoint.source import Source
from megatron.core.tensor_parallel.layers import LinearLayout, compute_linear
from megatron.core.tensor_parallel.mappings import start_input_gather, start_output_sum
from megatron.core.transformer.grouped_linear import GroupedLinear, compute_grouped_product
from megatron.training.adapters import nf4


class EncodedLayer(MegatronModule):
    """Base of the classes that a linear layer gets with an encoded weight."""

    weight: nn.Parameter
    packed: Tensor  # indices of the weight, [..., rows, columns / 2]
    scales: Tensor  # [..., rows, columns / 64]
    table: Tensor  # values of the indices

    def decode_weight(self) -> Tensor:
        """Return the weight in its dtype."""
        return nf4.decode(self.packed, self.scales, self.table, self.weight.dtype)

    def encode_box(self, box: Tensor, values: Tensor) -> None:
        """Encode the values of `box`, which is a contiguous view of `weight`."""
        assert box.is_contiguous()
        start = box.storage_offset()
        stop = start + box.numel()
        packed, scales = nf4.encode(values.to(self.packed.device, self.weight.dtype))
        self.packed.view(-1)[start // 2 : stop // 2] = packed.view(-1)
        first_block = start // nf4.BLOCK_SIZE
        end_block = stop // nf4.BLOCK_SIZE
        self.scales.view(-1)[first_block:end_block] = scales.view(-1)

    def compute_output(self, x: Tensor, weight: Tensor, counts: Tensor | None) -> Tensor:
        """Return the product of x and the decoded weight."""
        raise NotImplementedError

    def compute_input_grad(self, dy: Tensor, weight: Tensor, counts: Tensor | None) -> Tensor:
        """Return the gradient of x."""
        raise NotImplementedError


class _FrozenProduct(torch.autograd.Function):
    """The product of a layer with its weight, which is decoded again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: EncodedLayer, counts: Tensor | None) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(counts)
        return layer.compute_output(x, layer.decode_weight(), counts)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (counts,) = ctx.saved_tensors
        dx = ctx.layer.compute_input_grad(dy, ctx.layer.decode_weight(), counts)
        return dx, None, None


class EncodedDenseLayer(EncodedLayer):
    """Column- or row-parallel layer."""

    bias: nn.Parameter | None
    layout: LinearLayout

    def project(self, x: Tensor) -> Tensor:
        y: Tensor = _FrozenProduct.apply(x, self, None)
        return y

    def compute_output(self, x: Tensor, weight: Tensor, counts: Tensor | None) -> Tensor:
        return compute_linear(x, weight, self.bias, self.layout)

    def compute_input_grad(self, dy: Tensor, weight: Tensor, counts: Tensor | None) -> Tensor:
        tp, column, sequence_parallel = self.layout
        if column:
            partial_dx = multiply_by_weight(dy, weight.t())
            return start_output_sum(partial_dx, tp, sequence_parallel).wait()
        whole_dy = start_input_gather(dy, tp, sequence_parallel).wait()
        return multiply_by_weight(whole_dy, weight.t())


class EncodedExperts(EncodedLayer):
    """Experts of a rank, which are decoded together."""

    def project(self, x: Tensor, counts: Tensor) -> Tensor:
        y: Tensor = _FrozenProduct.apply(x, self, counts)
        return y

    def compute_output(self, x: Tensor, weight: Tensor, counts: Tensor | None) -> Tensor:
        assert counts is not None
        return compute_grouped_product(x, weight.mT, counts)

    def compute_input_grad(self, dy: Tensor, weight: Tensor, counts: Tensor | None) -> Tensor:
        assert counts is not None
        return compute_grouped_product(dy, weight, counts)


@cache
def _make_class(layer_class: Any) -> Any:
    """Return the class of a layer with an encoded weight."""
    base = EncodedExperts if issubclass(layer_class, GroupedLinear) else EncodedDenseLayer
    return type(f"Encoded{layer_class.__name__}", (base, layer_class), {})


def encode_layer(layer: Any, path: str, table: Tensor) -> None:
    """Replace the weight of a linear layer by an encoded one of zeros, on the device of `table`."""
    weight = layer.weight
    num_columns = weight.shape[-1]
    if num_columns % nf4.BLOCK_SIZE:
        raise ValueError(
            f"--lora-base-encoding nf4: {path} has {num_columns} columns on a rank, which is not a "
            f"multiple of {nf4.BLOCK_SIZE}, the elements of a block with one scale. Use a smaller "
            "--tensor-model-parallel-size, or leave out --lora-base-encoding"
        )
    meta_weight = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
    set_param_info(meta_weight, replace(param_info(weight), trained=False))
    layer.weight = meta_weight

    lead = weight.shape[:-1]
    packed = torch.zeros(*lead, num_columns // 2, dtype=torch.uint8, device=table.device)
    scales = torch.zeros(*lead, num_columns // nf4.BLOCK_SIZE, device=table.device)
    for name, tensor in (("packed", packed), ("scales", scales), ("table", table)):
        layer.register_buffer(name, tensor, persistent=False)
    layer.__class__ = _make_class(layer.__class__)


def index_encoded_layers(models: Iterable[nn.Module]) -> dict[Tensor, EncodedLayer]:
    """Return the layers with encoded weights, by their parameter without memory."""
    layers: dict[Tensor, EncodedLayer] = {}
    for model in models:
        for module in model.modules():
            if isinstance(module, EncodedLayer):
                layers[module.weight] = module
    return layers


def load_encoded_weights(
    state: ShardedStateDict, layers: Mapping[Tensor, EncodedLayer], source: Source
) -> None:
    """Encode the weights in `state`, which are read one box at a time.

    Raises CheckpointError if a weight is missing or has another shape.
    """
    for key, entry in state.items():
        assert isinstance(entry, ShardedTensor) and entry.local is not None
        tensor = source.tensors.get(key)
        if tensor is None:
            raise CheckpointError(f"{source.description}: {key} is not in the checkpoint")
        if tensor.shape != entry.global_shape:
            raise CheckpointError(
                f"{source.description}: does not fit this model:\n  {key}: {tensor.shape} in the "
                f"checkpoint, {entry.global_shape} here"
            )
        for box in entry.boxes:
            values = tensor.read(box.offset, box.shape)
            layers[entry.local].encode_box(box.tensor, values)


def count_frozen_bytes(model: nn.Module) -> int:
    """Return the bytes of the frozen parameters of a model."""
    layers = index_encoded_layers([model])
    total = sum(layer.packed.nbytes + layer.scales.nbytes for layer in layers.values())
    for param in model.parameters():
        if param not in layers and not param_info(param).trained:
            total += param.nbytes
    return total

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
from megatron.core.dist_checkpointing.mapping import LazyTensor, ShardedStateDict, ShardedTensor
from megatron.core.module import MegatronModule, param_info, set_param_info
from megatron.core.private_operators import multiply_by_weight
from megatron.core.run_checkpoint.source import Source
from megatron.core.tensor_parallel.layers import LinearLayout, compute_linear
from megatron.core.tensor_parallel.mappings import start_input_gather, start_output_sum
from megatron.core.transformer.grouped_linear import GroupedLinear, compute_grouped_product
from megatron.training.adapters.base_encodings import BLOCK_SIZE, ENCODINGS, BaseEncoding, decode

Tensors = Mapping[str, LazyTensor]


class EncodedLayer(MegatronModule):
    """Base of the classes that a linear layer gets with an encoded weight."""

    weight: nn.Parameter
    encoding: BaseEncoding
    packed: Tensor  # bytes of the weight, [..., rows, bytes]
    scales: Tensor  # [..., rows, columns / 64]
    table: Tensor  # values of a byte

    def decode_weight(self) -> Tensor:
        """Return the weight in its dtype."""
        return decode(self.packed, self.scales, self.table, self.weight.dtype)

    def encode_box(self, box: Tensor, values: Tensor) -> None:
        """Encode the values of `box`, which is a contiguous view of `weight`."""
        packed, scales = self.encoding.encode(values.to(self.packed.device, self.weight.dtype))
        packed_box, scales_box = self._locate(box)
        packed_box.copy_(packed.view(-1))
        scales_box.copy_(scales.view(-1))

    def keep_box(self, box: Tensor, elements: Tensor, scales: Tensor) -> None:
        """Store rows of `box` that have the encoding in the checkpoint: those with scales.

        `elements` are not multiplied by their scales. Both have the shape of the box.
        """
        scales = scales[..., ::BLOCK_SIZE].to(self.packed.device)
        is_kept = (scales >= 0).all(-1, keepdim=True)
        codes = self.encoding.read_codes(elements.to(self.packed.device))
        packed = self.encoding.pack(codes)
        packed_box, scales_box = self._locate(box)
        packed_box = packed_box.view(packed.shape)
        scales_box = scales_box.view(scales.shape)
        packed_box.copy_(torch.where(is_kept, packed, packed_box))
        scales_box.copy_(torch.where(is_kept, scales, scales_box))

    def _locate(self, box: Tensor) -> tuple[Tensor, Tensor]:
        """Return bytes and scales of a box, as vectors."""
        assert box.is_contiguous()
        start = box.storage_offset()
        stop = start + box.numel()
        per_byte = self.encoding.codes_per_byte
        packed = self.packed.view(-1)[start // per_byte : stop // per_byte]
        scales = self.scales.view(-1)[start // BLOCK_SIZE : stop // BLOCK_SIZE]
        return packed, scales


class _FrozenProduct(torch.autograd.Function):
    """The product of a layer with its weight, which is decoded again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        layer: EncodedDenseLayer | EncodedExperts,
        counts: Tensor | None,
    ) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(counts)
        weight = layer.decode_weight()
        return layer.compute_output(x, weight, counts)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (counts,) = ctx.saved_tensors
        weight = ctx.layer.decode_weight()
        dx = ctx.layer.compute_input_grad(dy, weight, counts)
        return dx, None, None


class EncodedDenseLayer(EncodedLayer):
    """Column- or row-parallel layer."""

    bias: nn.Parameter | None
    layout: LinearLayout

    def project(self, x: Tensor) -> Tensor:
        y: Tensor = _FrozenProduct.apply(x, self, None)
        return y

    def compute_output(self, x: Tensor, weight: Tensor, counts: Tensor | None) -> Tensor:
        """Return the product of x and the decoded weight."""
        return compute_linear(x, weight, self.bias, self.layout)

    def compute_input_grad(self, dy: Tensor, weight: Tensor, counts: Tensor | None) -> Tensor:
        """Return the gradient of x."""
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
        """Return the product of x and the decoded weight."""
        assert counts is not None
        return compute_grouped_product(x, weight.mT, counts)

    def compute_input_grad(self, dy: Tensor, weight: Tensor, counts: Tensor | None) -> Tensor:
        """Return the gradient of x."""
        assert counts is not None
        return compute_grouped_product(dy, weight, counts)


@cache
def _make_class(layer_class: Any) -> Any:
    """Return the class of a layer with an encoded weight."""
    base = EncodedExperts if issubclass(layer_class, GroupedLinear) else EncodedDenseLayer
    return type(f"Encoded{layer_class.__name__}", (base, layer_class), {})


def encode_layer(layer: Any, path: str, encoding_name: str, device: torch.device) -> None:
    """Replace the weight of a linear layer by an encoded one of zeros."""
    encoding = ENCODINGS[encoding_name]
    weight = layer.weight
    num_columns = weight.shape[-1]
    if num_columns % BLOCK_SIZE:
        raise ValueError(
            f"--lora-base-encoding {encoding_name}: {path} has {num_columns} columns on a rank, "
            f"which is not a multiple of {BLOCK_SIZE}, the elements of a block with one scale. Use "
            "a smaller --tensor-model-parallel-size, or leave out --lora-base-encoding"
        )
    meta_weight = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
    set_param_info(meta_weight, replace(param_info(weight), trained=False))
    layer.weight = meta_weight

    lead = weight.shape[:-1]
    num_bytes = num_columns // encoding.codes_per_byte
    packed = torch.zeros(*lead, num_bytes, dtype=torch.uint8, device=device)
    scales = torch.zeros(*lead, num_columns // BLOCK_SIZE, device=device)
    table = encoding.make_table().to(device)
    for name, tensor in (("packed", packed), ("scales", scales), ("table", table)):
        layer.register_buffer(name, tensor, persistent=False)
    layer.__class__ = _make_class(layer.__class__)
    layer.encoding = encoding


def index_encoded_layers(models: Iterable[nn.Module]) -> dict[Tensor, EncodedLayer]:
    """Return the layers with encoded weights, by their parameter without memory."""
    layers: dict[Tensor, EncodedLayer] = {}
    for model in models:
        for module in model.modules():
            if isinstance(module, EncodedLayer):
                layers[module.weight] = module
    return layers


def load_encoded_weights(
    state: ShardedStateDict,
    layers: Mapping[Tensor, EncodedLayer],
    source: Source,
    components: tuple[Tensors, Tensors] | None,
) -> None:
    """Encode the weights in `state`, which are read one box at a time.

    `components` are the elements and scales of a base model that has the encoding; these are kept.
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
        layer = layers[entry.local]
        for box in entry.boxes:
            values = tensor.read(box.offset, box.shape)
            layer.encode_box(box.tensor, values)
            if components is None:
                continue
            elements, scales = components
            layer.keep_box(
                box.tensor,
                elements[key].read(box.offset, box.shape),
                scales[key].read(box.offset, box.shape),
            )


def count_frozen_bytes(model: nn.Module) -> int:
    """Return the bytes of the frozen parameters of a model."""
    layers = index_encoded_layers([model])
    total = sum(layer.packed.nbytes + layer.scales.nbytes for layer in layers.values())
    for param in model.parameters():
        if param not in layers and not param_info(param).trained:
            total += param.nbytes
    return total

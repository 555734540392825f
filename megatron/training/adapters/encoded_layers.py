"""Linear layers whose frozen weight stays encoded in memory (`--lora-base-encoding`).

A weight is decoded for each product and released after it, once in the forward pass and once in the
backward pass, which computes only the gradient of the input. `weight` remains a parameter without
memory, on the meta device, with the shape and the sharding of the decoded matrix.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.module import MegatronModule, param_info, set_param_info
from megatron.core.private_operators import multiply_by_weight
from megatron.core.tensor_parallel.layers import LinearLayout, compute_linear
from megatron.core.tensor_parallel.mappings import start_input_gather, start_output_sum
from megatron.core.transformer.grouped_linear import GroupedLinear, compute_grouped_product
from megatron.core.transformer.layer_spec import FP8StateMixin
from megatron.training.adapters.base_encodings import BLOCK_SIZE, ENCODINGS, BaseEncoding
from megatron.training.adapters.encoded_weight import EncodedWeight

# Value of --lora-base-encoding: each matrix keeps the encoding that it has in the base model.
KEEP = "keep"


class EncodedLayer(MegatronModule):
    """Base of the classes that a linear layer gets with an encoded weight."""

    weight: nn.Parameter
    # Encoding of a weight that is not encoded in the base model; None leaves it decoded.
    encoding: BaseEncoding | None
    frozen: EncodedWeight | Tensor  # the values of the weight

    def decode_weight(self) -> Tensor:
        """Return the weight in its dtype."""
        if isinstance(self.frozen, Tensor):
            return self.frozen
        return self.frozen.decode(self.weight.dtype)

    def store_rows(self, start: int, values: Tensor) -> None:
        """Store rows of the weight, counted in the stack of matrices: [rows, columns]."""
        values = values.to(self.frozen.device, self.weight.dtype)
        if isinstance(self.frozen, Tensor):
            rows = self.frozen.view(-1, values.shape[1])
            rows[start : start + len(values)] = values
        else:
            assert self.encoding is not None
            self.encoding.encode_rows(self.frozen, start, values)


class _FrozenProduct(torch.autograd.Function):
    """The product of a layer with its weight, which is decoded again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        layer: EncodedDenseLayer | EncodedExperts,
        bias: Tensor | None,
        counts: Tensor | None,
    ) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(counts)
        weight = layer.decode_weight()
        return layer.compute_output(x, weight, bias, counts)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (counts,) = ctx.saved_tensors
        weight = ctx.layer.decode_weight()
        dx = ctx.layer.compute_input_grad(dy, weight, counts)
        return dx, None, None, None


class EncodedDenseLayer(EncodedLayer):
    """Column- or row-parallel layer."""

    bias: nn.Parameter | None
    layout: LinearLayout

    def project(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.bias)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product of x and the weight, plus a bias."""
        y: Tensor = _FrozenProduct.apply(x, self, bias, None)
        return y

    def compute_output(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor | None
    ) -> Tensor:
        """Return the product of x and the decoded weight, plus the bias."""
        return compute_linear(x, weight, bias, self.layout)

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
        y: Tensor = _FrozenProduct.apply(x, self, None, counts)
        return y

    def compute_output(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor | None
    ) -> Tensor:
        """Return the product of x and the decoded weight."""
        assert counts is not None
        return compute_grouped_product(x, weight.mT, counts)

    def compute_input_grad(self, dy: Tensor, weight: Tensor, counts: Tensor | None) -> Tensor:
        """Return the gradient of x."""
        assert counts is not None
        return compute_grouped_product(dy, weight, counts)


@cache
def _make_class(layer_class: Any) -> Any:
    """Return the class of a layer with an encoded weight, which is a local layer.

    Layers of Transformer Engine keep their weight until the backward pass.
    """
    local_class = layer_class
    while issubclass(local_class, FP8StateMixin):
        local_class = local_class.__bases__[0]
    base = EncodedExperts if issubclass(local_class, GroupedLinear) else EncodedDenseLayer
    return type(f"Encoded{local_class.__name__}", (base, local_class), {})


def encode_layer(layer: Any, path: str, encoding_name: str, device: torch.device) -> None:
    """Replace the weight of a linear layer by one that can be encoded, with values of zero."""
    weight = layer.weight
    shape = tuple(weight.shape)
    encoding = ENCODINGS.get(encoding_name)
    if encoding is not None and shape[-1] % BLOCK_SIZE:
        raise ValueError(
            f"--lora-base-encoding {encoding_name}: {path} has {shape[-1]} columns on a rank, "
            f"which is not a multiple of {BLOCK_SIZE}, the elements of a block with one scale. Use "
            "a smaller --tensor-model-parallel-size, or leave out --lora-base-encoding"
        )
    meta_weight = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=False)
    set_param_info(meta_weight, replace(param_info(weight), trained=False))
    layer.weight = meta_weight
    vars(layer).pop("engine", None)  # the module of Transformer Engine, which has the weight
    layer.__class__ = _make_class(layer.__class__)
    layer.encoding = encoding
    if encoding is None:
        # The encoding is known when the base model is loaded. Until then, one element is repeated.
        layer.frozen = torch.zeros((), dtype=weight.dtype, device=device).expand(shape)
    else:
        layer.frozen = encoding.allocate(shape, device)


def index_encoded_layers(models: Iterable[nn.Module]) -> dict[Tensor, EncodedLayer]:
    """Return the layers with encoded weights, by their parameter without memory."""
    layers: dict[Tensor, EncodedLayer] = {}
    for model in models:
        for module in model.modules():
            if isinstance(module, EncodedLayer):
                layers[module.weight] = module
    return layers


def count_frozen_bytes(model: nn.Module) -> int:
    """Return the bytes of the frozen parameters of a model."""
    layers = index_encoded_layers([model])
    total = sum(layer.frozen.nbytes for layer in layers.values())
    for param in model.parameters():
        if param not in layers and not param_info(param).trained:
            total += param.nbytes
    return total

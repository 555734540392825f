"""Grouped matrix products and the linear layers of experts."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.module import Normal
from megatron.core.parallel_state import ExpertAxes
from megatron.core.transformer.grouped_linear import GroupedLinear, compute_grouped_product
from megatron.core.transformer.transformer_config import TransformerConfig


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="torch does not have a grouped product")
def test_grouped_product_equals_torch():
    x = torch.randn(9, 8)
    matrices = torch.randn(4, 8, 16)
    counts = torch.tensor([2, 0, 3, 4])
    expected = F.grouped_mm(x, matrices, offs=counts.cumsum(0).int())
    torch.testing.assert_close(compute_grouped_product(x, matrices, counts), expected)


class ShapeRecorder(TorchDispatchMode):
    """Records the shapes of all matrix products."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket is torch.ops.aten.mm:
            self.shapes.add((tuple(args[0].shape), tuple(args[1].shape)))
        return function(*args, **(kwargs or {}))


def assert_close(got, expected, atol=5e-2):
    torch.testing.assert_close(got.float(), expected, rtol=2e-2, atol=atol)


def test_bf16_products_have_few_shapes():
    """A CPU compiles a kernel for each shape; the rows added as padding do not change results."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        num_experts=2,
        bf16=True,
    )
    linear = GroupedLinear(config, 16, 24, init=Normal(0.5), split_dim=1, axes=ExpertAxes())
    linear.initialize(1)
    recorder = ShapeRecorder()
    for first in range(64, 256):  # the number of rows differs in every step
        counts = torch.tensor([first, 300 - first])
        x = torch.randn(300, 16, dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn(300, 24, dtype=torch.bfloat16)
        linear.weight.grad = None
        with recorder:
            linear(x, counts).backward(dy)
        if first not in (64, 67, 211):
            continue
        weight = linear.weight.detach().float()
        for expert, rows in enumerate((slice(first), slice(first, None))):
            x_rows = x.detach()[rows].float()
            dy_rows = dy[rows].float()
            assert_close(linear(x, counts)[rows], x_rows @ weight[expert].T)
            assert_close(x.grad[rows], dy_rows @ weight[expert])
            assert_close(linear.weight.grad[expert], dy_rows.T @ x_rows, atol=0.5)

    # Three kinds of products; multiples of 16 from 48 to 256
    assert len(recorder.shapes) <= 3 * 14

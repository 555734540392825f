"""Products of inputs and weights compared with numpy in double precision."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron.core.private_operators import multiply_by_weight

SMALL = (2, 3, 8, 16)
LARGE = (64, 4, 512, 1024)  # as many multiplications as the limit of small products


def make_operands(
    shape: tuple[int, int, int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return an input, a weight and a bias with random values."""
    length, batch, inputs, outputs = shape
    torch.manual_seed(0)
    x = torch.randn(length, batch, inputs).to(dtype)
    weight = torch.randn(outputs, inputs).to(dtype)
    bias = torch.randn(outputs).to(dtype)
    return x, weight, bias


def list_operators(x: torch.Tensor, weight: torch.Tensor) -> set[str]:
    """Return the names of the operators that a product runs."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        multiply_by_weight(x, weight)
    return {event.key for event in recorded.key_averages()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_product_equals_numpy(
    shape: tuple[int, int, int, int], has_bias: bool, dtype: torch.dtype
) -> None:
    x, weight, bias = make_operands(shape, dtype)
    expected = x.double().numpy() @ weight.double().numpy().T
    if has_bias:
        expected = expected + bias.double().numpy()
    product = multiply_by_weight(x, weight, bias if has_bias else None)
    assert product.dtype == dtype
    # The order of the sums decides the errors: those of oneDNN are up to twice those of MKL.
    error = np.abs(product.double().numpy() - expected).max()
    assert error < 16 * torch.finfo(dtype).eps * np.abs(expected).max()


@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_gradient_of_input_equals_numpy(shape: tuple[int, int, int, int]) -> None:
    x, weight, _ = make_operands(shape, torch.float32)
    dy = x @ weight.t()
    expected = dy.double().numpy() @ weight.double().numpy()
    error = np.abs(multiply_by_weight(dy, weight.t()).double().numpy() - expected).max()
    assert error < 16 * torch.finfo(torch.float32).eps * np.abs(expected).max()


@pytest.mark.parametrize("kind", ["transposed", "sliced", "expanded"])
def test_strides_of_the_input_do_not_matter(kind: str) -> None:
    length, batch, inputs, outputs = LARGE
    torch.manual_seed(0)
    weight = torch.randn(outputs, inputs)
    views = {
        "transposed": torch.randn(batch, length, inputs).transpose(0, 1),
        "sliced": torch.randn(length, batch, 2 * inputs)[..., :inputs],
        "expanded": torch.randn(1).expand(length, batch, inputs),  # the gradient of a sum
    }
    x = views[kind]
    expected = multiply_by_weight(x.contiguous(), weight)
    # MKL adds in another order for other strides; oneDNN does not.
    error = (multiply_by_weight(x, weight) - expected).abs().max()
    assert error < 16 * torch.finfo(torch.float32).eps * expected.abs().max()


def test_product_is_reproducible() -> None:
    x, weight, bias = make_operands(LARGE, torch.float32)
    first = multiply_by_weight(x, weight, bias)
    assert torch.equal(first, multiply_by_weight(x, weight, bias))


@pytest.mark.skipif(
    not Path("/proc/cpuinfo").exists() or not torch.backends.mkldnn.is_available(),
    reason="requires Linux and oneDNN",
)
def test_onednn_multiplies_large_fp32_matrices_on_amd() -> None:
    is_amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    onednn = "mkldnn::_linear_pointwise"
    x, weight, _ = make_operands(LARGE, torch.float32)
    assert (onednn in list_operators(x, weight)) == is_amd
    x, weight, _ = make_operands(SMALL, torch.float32)
    assert onednn not in list_operators(x, weight)

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


def to_double(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().numpy()


def assert_close(product: torch.Tensor, expected: np.ndarray) -> None:
    """Compare with an exact product.

    The order of the sums decides the errors: those of oneDNN are up to twice those of MKL.
    """
    tolerance = 16 * torch.finfo(product.dtype).eps
    error = np.abs(to_double(product) - expected).max()
    largest = np.abs(expected).max()
    assert error < tolerance * largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_product_equals_numpy(
    shape: tuple[int, int, int, int], has_bias: bool, dtype: torch.dtype
) -> None:
    x, weight, bias = make_operands(shape, dtype)
    expected = to_double(x) @ to_double(weight).T
    if has_bias:
        expected = expected + to_double(bias)
        product = multiply_by_weight(x, weight, bias)
    else:
        product = multiply_by_weight(x, weight)

    assert product.dtype == dtype
    assert_close(product, expected)


@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_gradient_of_input_equals_numpy(shape: tuple[int, int, int, int]) -> None:
    x, weight, _ = make_operands(shape, torch.float32)
    dy = x @ weight.t()
    expected = to_double(dy) @ to_double(weight)
    dx = multiply_by_weight(dy, weight.t())
    assert_close(dx, expected)


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
    product = multiply_by_weight(x, weight)
    assert_close(product, to_double(expected))


def test_product_is_reproducible() -> None:
    x, weight, bias = make_operands(LARGE, torch.float32)
    first = multiply_by_weight(x, weight, bias)
    second = multiply_by_weight(x, weight, bias)
    assert torch.equal(first, second)


@pytest.mark.skipif(
    not Path("/proc/cpuinfo").exists() or not torch.backends.mkldnn.is_available(),
    reason="requires Linux and oneDNN",
)
def test_onednn_multiplies_large_fp32_matrices_on_amd() -> None:
    processor = Path("/proc/cpuinfo").read_text()
    is_amd = "AuthenticAMD" in processor
    onednn = "mkldnn::_linear_pointwise"

    x, weight, _ = make_operands(LARGE, torch.float32)
    uses_onednn = onednn in list_operators(x, weight)
    assert uses_onednn == is_amd

    x, weight, _ = make_operands(SMALL, torch.float32)
    assert onednn not in list_operators(x, weight)

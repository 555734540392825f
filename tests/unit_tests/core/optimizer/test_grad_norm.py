"""Precision of the gradient norm, and the clipping coefficient."""

import pytest
import torch

from megatron.core.optimizer.grad_norm import (
    compute_clip_coefficient,
    count_zeros,
    sum_of_squares,
)

CPU = torch.device("cpu")


def test_sum_of_squares_has_fp64_precision():
    sizes = (1 << 22, 1024, 64, 1000 * 64)
    grads = [torch.randn(size) * 1e-3 for size in sizes]
    exact = 0.0
    for grad in grads:
        exact += grad.double().square().sum().item()
    result = sum_of_squares(grads, CPU)
    assert result.dtype == torch.float64
    assert result.item() == pytest.approx(exact, rel=1e-6)
    assert sum_of_squares([], CPU).item() == 0.0


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), -float("inf")])
@pytest.mark.parametrize("position", [0, 1023, 1024, 1087])
def test_nonfinite_element_makes_the_sum_nonfinite(bad, position):
    grad = torch.zeros(1088)
    grad[position] = bad
    assert not torch.isfinite(sum_of_squares([grad], CPU))


def test_negative_zeros_are_counted():
    grads = [torch.tensor([0.0, 1.0, 0.0]), torch.tensor([-0.0, 2.0])]
    assert count_zeros(grads, CPU).item() == 3


@pytest.mark.parametrize(
    ("norm", "clip_grad", "expected"),
    [
        (4.0, 1.0, 1.0 / (4.0 + 1e-6)),
        (0.5, 1.0, 1.0),
        (100.0, 0.0, 1.0),  # clipping is disabled
    ],
)
def test_clip_coefficient(norm, clip_grad, expected):
    norm = torch.tensor(norm, dtype=torch.float64)
    assert compute_clip_coefficient(norm, clip_grad).item() == expected

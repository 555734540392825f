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
    grads = [torch.randn(n) * 1e-3 for n in (1 << 22, 1024, 64, 1000 * 64)]
    exact = sum(grad.double().square().sum() for grad in grads)
    assert sum_of_squares(grads, CPU).dtype == torch.float64
    assert sum_of_squares(grads, CPU).item() == pytest.approx(exact.item(), rel=1e-6)
    assert sum_of_squares([], CPU).item() == 0.0


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), -float("inf")])
@pytest.mark.parametrize("position", [0, 1023, 1024, 1087])
def test_nonfinite_element_makes_the_sum_nonfinite(bad, position):
    grad = torch.zeros(1088)
    grad[position] = bad
    assert not torch.isfinite(sum_of_squares([grad], CPU))


def test_count_zeros():
    grads = [torch.tensor([0.0, 1.0, 0.0]), torch.tensor([-0.0, 2.0])]
    assert count_zeros(grads, CPU).item() == 3


def test_clip_coefficient():
    norm = torch.tensor(4.0, dtype=torch.float64)
    assert compute_clip_coefficient(norm, 1.0).item() == 1.0 / (4.0 + 1e-6)
    assert compute_clip_coefficient(torch.tensor(0.5), 1.0).item() == 1.0
    assert compute_clip_coefficient(torch.tensor(100.0), 0.0).item() == 1.0

"""Differences of repeated results."""

import math

import pytest

from megatron.training.operations.rerun import compute_difference, format_differences


def test_differences_of_repeated_losses():
    assert compute_difference(2.0, 2.0) == compute_difference(math.nan, math.nan) == 0.0
    assert compute_difference(1.0, math.inf) == math.inf
    assert compute_difference(1.0, 1.5) == pytest.approx(0.4)
    assert format_differences([0.0] * 3).endswith("3 samples, all identical")
    assert "4/3 total/identical samples" in format_differences([0.0, 0.0, 0.5, 0.0])

"""Compare apex's kernels with torch's."""

import importlib.util

import pytest

from tests.support import apex_checks
from tests.support.training_harness import LLAMA, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("amp_C") is None, reason="no apex"),
]


def test_kernels():
    apex_checks.check_adam("cuda", 1e-5)
    apex_checks.check_sum_of_squares("cuda")
    apex_checks.check_norms("cuda", 1e-5)


def losses(rank, world_size, flags):
    common = f"{LLAMA} --device cuda --distributed-backend gloo --mock-data --train-iters 20 "
    return train(rank, world_size, common + flags).measured.losses


@pytest.mark.parametrize(("precision", "tolerance"), [("", 1e-4), ("--bf16", 1e-2)])
def test_curves(pool, precision, tolerance):
    (expected,) = pool.run(losses, 1, precision, timeout=300)
    (measured,) = pool.run(
        losses, 1, f"{precision} --optimizer-impl apex --norm-impl apex", timeout=300
    )
    assert measured == pytest.approx(expected, rel=tolerance)

"""Training with the real apex, whose kernels do nothing here: its bindings and their checks run."""

import pytest

from tests.fake_cuda.extensions import needs_extension, train_with_extensions

APEX = "--optimizer-impl apex --norm-impl apex "
LAYER_NORM = "--normalization LayerNorm --add-bias-linear "

pytestmark = [needs_extension("amp_C"), needs_extension("fused_layer_norm_cuda")]


@pytest.mark.parametrize("num_devices", [1, 2])
def test_optimizer_and_norms(num_devices):
    sharded = "--use-distributed-optimizer " if num_devices == 2 else ""
    train_with_extensions([APEX + sharded, APEX + sharded + LAYER_NORM], num_devices)

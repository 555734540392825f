"""Training with the real apex, whose kernels do nothing here: its bindings and their checks run."""

import pytest

from tests.fake_cuda.extensions import needs_extension, train_with_extensions

NORMS = "--norm-impl apex "
LAYER_NORM = f"{NORMS}--normalization LayerNorm --add-bias-linear "
OPTIMIZER = "--optimizer-impl apex "
SHARDED = f"{OPTIMIZER}--use-distributed-optimizer "


@needs_extension("fused_layer_norm_cuda")
def test_norms():
    train_with_extensions([NORMS, LAYER_NORM])


@needs_extension("amp_C")
@pytest.mark.parametrize(("num_devices", "flags"), [(1, OPTIMIZER), (2, SHARDED)])
def test_optimizer(num_devices, flags):
    train_with_extensions([flags], num_devices)

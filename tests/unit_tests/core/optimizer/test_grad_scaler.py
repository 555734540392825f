"""The dynamic loss scale against a sequence worked out by hand."""

import pytest
import torch

from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import GradScaler


def dynamic(initial_scale, min_scale=1.0):
    options = {"initial_loss_scale": initial_scale, "min_loss_scale": min_scale}
    return GradScaler(OptimizerConfig(**options, loss_scale_window=3, hysteresis=2), fp16=True)


def test_sequence():
    scaler = dynamic(64.0, min_scale=16.0)
    expected = [
        (True, 64.0),  # the first overflow is tolerated
        (False, 64.0),
        (True, 32.0),  # the second is not, although a good step was between
        (True, 16.0),
        (True, 16.0),  # not below the minimum
        (False, 16.0),
        (False, 16.0),
        (False, 32.0),  # three good steps in a row: doubled, tolerance restored
        (False, 32.0),
        (False, 32.0),
        (True, 32.0),  # tolerated; the good steps are forgotten
        (False, 32.0),
        (False, 32.0),
        (False, 64.0),
    ]
    for step, (found_inf, scale) in enumerate(expected):
        scaler.update(found_inf)
        assert scaler.scale == scale, step


def test_state_continues_the_sequence():
    first = dynamic(64.0)
    for found_inf in (True, False, False):
        first.update(found_inf)
    state = first.state_dict()
    assert set(state) == {"scale", "growth_tracker", "hysteresis_tracker"} and isinstance(
        state["scale"], torch.Tensor
    )
    second = dynamic(2.0**32)
    second.load_state_dict(state)
    for found_inf in (True, False, False, False, True, True):
        first.update(found_inf)
        second.update(found_inf)
        assert first.scale == second.scale
    assert first.scale == 32.0


@pytest.mark.parametrize(
    ("options", "fp16", "is_dynamic", "scale"),
    [
        ({}, False, False, 1.0),
        ({}, True, True, 2.0**32),
        ({"loss_scale": 128.0}, True, False, 128.0),
        ({"loss_scale": 128.0}, False, False, 128.0),
        ({"initial_loss_scale": 2.0**16}, True, True, 2.0**16),
    ],
)
def test_which_scaler(options, fp16, is_dynamic, scale):
    scaler = GradScaler(OptimizerConfig(**options), fp16)
    assert scaler.dynamic is is_dynamic and scaler.scale == scale
    if not is_dynamic:
        scaler.update(True)
        scaler.load_state_dict({"scale": torch.tensor([2.0])})
        assert scaler.scale == scale and scaler.state_dict() == {}

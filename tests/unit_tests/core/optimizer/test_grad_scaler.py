"""Loss scaling against a sequence computed by hand."""

import pytest
import torch

from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.grad_scaler import GradScaler


def make_dynamic_scaler(initial_scale, min_scale=1.0):
    options = {"initial_loss_scale": initial_scale, "min_loss_scale": min_scale}
    return GradScaler(OptimizerConfig(**options, loss_scale_window=3, hysteresis=2), fp16=True)


def test_dynamic_scale_sequence():
    scaler = make_dynamic_scaler(64.0, min_scale=16.0)
    expected = [
        (True, 64.0),  # the first overflow is tolerated
        (False, 64.0),
        (True, 32.0),  # the second is not, despite the good step between them
        (True, 16.0),
        (True, 16.0),  # not below the minimum
        (False, 16.0),
        (False, 16.0),
        (False, 32.0),  # three good steps in a row: doubled, tolerance restored
        (False, 32.0),
        (False, 32.0),
        (True, 32.0),  # tolerated; restarts the count of good steps
        (False, 32.0),
        (False, 32.0),
        (False, 64.0),
    ]
    for step, (found_inf, scale) in enumerate(expected):
        scaler.update(found_inf)
        assert scaler.scale == scale, step


def test_state_dict_resumes_the_sequence():
    first = make_dynamic_scaler(64.0)
    for found_inf in (True, False, False):
        first.update(found_inf)
    state = first.state_dict()
    assert set(state) == {"scale", "growth_tracker", "hysteresis_tracker"}
    assert isinstance(state["scale"], torch.Tensor)
    second = make_dynamic_scaler(2.0**32)
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
def test_grad_scaler_choice(options, fp16, is_dynamic, scale):
    scaler = GradScaler(OptimizerConfig(**options), fp16)
    assert scaler.dynamic is is_dynamic
    assert scaler.scale == scale
    if not is_dynamic:
        scaler.update(True)
        scaler.load_state_dict({"scale": torch.tensor([2.0])})
        assert scaler.scale == scale
        assert scaler.state_dict() == {}

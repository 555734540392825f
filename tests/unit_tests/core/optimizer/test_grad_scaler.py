"""The dynamic loss scale against a sequence worked out by hand."""

import pytest
import torch

from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler, make_grad_scaler


def test_sequence():
    scaler = DynamicGradScaler(initial_scale=64.0, min_scale=16.0, growth_interval=3, hysteresis=2)
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
    first = DynamicGradScaler(64.0, 1.0, 3, 2)
    for found_inf in (True, False, False):
        first.update(found_inf)
    state = first.state_dict()
    assert set(state) == {"scale", "growth_tracker", "hysteresis_tracker"} and isinstance(state["scale"], torch.Tensor)
    second = DynamicGradScaler(2.0**32, 1.0, 3, 2)
    second.load_state_dict(state)
    for found_inf in (True, False, False, False, True, True):
        first.update(found_inf)
        second.update(found_inf)
        assert first.scale == second.scale
    assert first.scale == 32.0


@pytest.mark.parametrize(
    ("options", "fp16", "kind", "scale"),
    [
        ({}, False, ConstantGradScaler, 1.0),
        ({}, True, DynamicGradScaler, 2.0**32),
        ({"loss_scale": 128.0}, True, ConstantGradScaler, 128.0),
        ({"loss_scale": 128.0}, False, ConstantGradScaler, 128.0),
        ({"initial_loss_scale": 2.0**16}, True, DynamicGradScaler, 2.0**16),
    ],
)
def test_which_scaler(options, fp16, kind, scale):
    scaler = make_grad_scaler(OptimizerConfig(**options), fp16)
    assert type(scaler) is kind and scaler.scale == scale
    if kind is ConstantGradScaler:
        scaler.update(True)
        scaler.load_state_dict({"scale": torch.tensor([2.0])})
        assert scaler.scale == scale and scaler.state_dict() == {}

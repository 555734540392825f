"""Muon and Lion by Megatron-LM itself: the state is read, and Lion continues from it."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.model_space.optimizer_states import list_parameter_states, optimizer_key
from megatron.conversion.opening import open_checkpoint
from megatron.conversion.options import WriteOptions
from megatron.core.optimizer.rules.lion import Lion
from megatron.core.run_checkpoint.keys import is_weight
from tests import ROOT
from tests.support.compare import read_whole

GOLDEN = ROOT / "tests/golden/megatron_optimizers"
FORMS = ["lion", "muon_replicated", "muon_layer_wise", "muon_layer_wise_buckets"]
RENAMED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def read_next_weights(form: str) -> dict[str, torch.Tensor]:
    """Return the weights after the third step by our keys, in the order of the parameters."""
    weights = {}
    for name, value in np.load(GOLDEN / form / "expected.npz").items():
        key = name.removeprefix("next/")
        for old, new in RENAMED.items():
            key = key.replace(old, new)
        weights[key] = torch.from_numpy(value)
    return weights


def make_gradients(weights: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    """Return the gradients of a step, as the script that wrote the files made them."""
    generator = torch.Generator().manual_seed(step)
    return {
        key: torch.randn(value.shape, generator=generator) * 0.1 for key, value in weights.items()
    }


@pytest.mark.parametrize("form", FORMS)
def test_moments_are_those_of_the_gradients(form: str) -> None:
    """Two steps of running means, computed in float64 from the gradients."""
    source = open_checkpoint(GOLDEN / form)
    weights = read_next_weights(form)
    first = make_gradients(weights, 1)
    second = make_gradients(weights, 2)

    assert source.unused == []
    assert sorted(filter(is_weight, source.tensors)) == sorted(weights)

    num_matrices = 0
    for key in weights:
        states = list_parameter_states(key, source.tensors)
        is_matrix = weights[key].dim() == 2 and key.startswith("decoder.")
        if is_matrix:
            num_matrices += 1
            assert states == ("param", "exp_avg" if form == "lion" else "momentum_buffer")
        else:
            assert states == ("param", "exp_avg", "exp_avg_sq")

        # Decays: of Adam's moments, of Muon's momentum, and of Lion's mean.
        decays = {"exp_avg": 0.9, "exp_avg_sq": 0.999, "momentum_buffer": 0.95}
        if is_matrix and form == "lion":
            decays = {"exp_avg": 0.999}

        for state in states[1:]:
            decay = decays[state]
            power = 2 if state == "exp_avg_sq" else 1
            expected = (1 - decay) * (
                decay * first[key].double() ** power + second[key].double() ** power
            )
            moment = read_whole(source, optimizer_key(state, key)).double()
            torch.testing.assert_close(moment, expected, rtol=1e-4, atol=1e-9)

    assert num_matrices == 8


def test_lion_continues_with_the_same_step() -> None:
    source = open_checkpoint(GOLDEN / "lion")
    weights = read_next_weights("lion")
    gradients = make_gradients(weights, 3)
    compared = 0
    for key, expected in weights.items():
        if "exp_avg_sq" in list_parameter_states(key, source.tensors):
            continue
        param = read_whole(source, key)
        param.grad = gradients[key]
        group = {"params": [param], "lr": 0.01, "weight_decay": 0.1, "use_lion": True}
        rule = Lion([group], {"betas": (0.9, 0.999), "eps": 1e-8})
        rule.state[param] = {"exp_avg": read_whole(source, optimizer_key("exp_avg", key))}
        rule.grad_scale = torch.ones(())
        rule.found_inf = torch.zeros(())
        rule.step()
        torch.testing.assert_close(param, expected, rtol=1e-6, atol=1e-8)
        compared += 1

    assert compared == 8


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("saver", ["torch_dist", "hf"])
def test_state_survives_conversion(tmp_path: Path, form: str, saver: str) -> None:
    """--verify compares every tensor of the result with the source."""
    options = WriteOptions(optim_sidecar=True)
    report = convert(GOLDEN / form, tmp_path / "out", saver, options=options, verify=True)
    assert report.verified == len(open_checkpoint(GOLDEN / form).tensors)


@pytest.mark.parametrize("saver", ["legacy", "universal"])
def test_formats_with_equal_states_refuse_it_by_name(tmp_path: Path, saver: str) -> None:
    with pytest.raises(ValueError, match=f"the optimizer is lion, whose state {saver} files"):
        convert(GOLDEN / "lion", tmp_path / "out", saver)
    assert not (tmp_path / "out").exists()

    convert(
        GOLDEN / "lion",
        tmp_path / "out",
        saver,
        options=WriteOptions(optimizer=False),
        verify=True,
    )

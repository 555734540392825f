"""Losses, gradients and updates of a seed do not depend on the layout.

Every feature of the trainer at every layout, compared with one process: see
`tests/support/layout_cases.py` for the features and docs/correctness.md for the promise.
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from megatron.training.checkpoint.contents import get_model_state
from megatron.training.config.parsing import parse_args
from megatron.training.data.loaders import build_data
from megatron.training.data.tokenizer import build_tokenizer
from megatron.training.initialize import initialize
from megatron.training.run import build_run
from megatron.training.training import train
from pretrain_gpt import datasets_provider, forward_step, model_provider
from tests.support.layout_cases import (
    LAYOUTS,
    ONE_AXIS,
    PUBLISHED,
    RARE,
    TWO_AXES,
    Model,
    Models,
    flags_of,
    has_experts,
    make_model,
)
from tests.support.tiny_ddp_model import copy_values
from tests.support.training_harness import Measurements, whole

LOSS_TOLERANCE = 1e-6  # relative, of losses and of the norm of the gradient
STATE_TOLERANCE = 1e-5  # of an element, relative to the largest one of its tensor
STATE_FLOOR = 1e-6  # the same, relative to the largest element of all tensors of a kind


@dataclass
class State:
    """Weights and state of the optimizer on one rank, as boxes of global tensors."""

    boxes: list[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]


@dataclass
class Curve:
    """Measurements of one rank, and its state after the first and after the last step."""

    measured: Measurements
    states: list[State]
    validated: tuple[int, float] | None  # iteration and loss of the last evaluation


def train_case(rank: int, world_size: int, flags: str) -> Curve:
    """Train as `pretrain_gpt.py FLAGS` does, as one rank of the existing group."""
    config = parse_args(shlex.split(flags), world_size)
    tokenizer = build_tokenizer(config.tokenizer)
    ps, device = initialize(config.distributed, config.parallel)
    config.set_vocab_size(tokenizer.vocab_size, None)
    run = build_run(config, ps, device, model_provider, forward_step)
    run.end_of_document = tokenizer.eod
    measured = Measurements()
    run.writers = [measured] if rank == 0 else []
    data = build_data(run, tokenizer, datasets_provider)
    states: list[State] = []

    def record_first_step() -> None:
        if run.state.iteration == 1:
            states.append(copy_state(run))

    run.on_iteration = record_first_step
    train(run, data)
    data.close()
    return Curve(measured, [*states, copy_state(run)], run.validated)


def copy_state(run) -> State:
    """Copy the weights and the optimizer's state.

    The first moment after the first step is the clipped gradient times a constant.
    """
    model = get_model_state(run)
    state = run.optimizer.weights(model) | run.optimizer.sharded_state_dict(model)
    state |= run.optimizer.average_state(model)
    return State(
        [
            (key, entry.global_shape, box.offset, copy_values(entry, box))
            for key, entry in state.items()
            for box in entry.boxes
        ]
    )


@dataclass
class Difference:
    """The largest difference between two runs of each kind, in units of its tolerance."""

    curves: float
    states: float
    worst: str


def compare(curves: Sequence[Curve], expected: Sequence[Curve]) -> Difference:
    """Compare all ranks of two runs.

    Also asserts that replicas of a tensor and the loss of the evaluation are the same on all ranks.
    """
    assert len({curve.validated for curve in curves}) == 1
    pairs = list(zip(values_of(curves), values_of(expected), strict=True))
    relative = max(abs(a - b) / max(abs(b), 1e-3) for a, b in pairs)
    worst = (0.0, "")
    for step, ours, theirs in zip(
        ("first", "last"), zip(*(c.states for c in curves), strict=True),
        zip(*(c.states for c in expected), strict=True), strict=True,
    ):  # fmt: skip
        got, reference = whole(ours), whole(theirs)
        assert got.keys() == reference.keys()
        largest: dict[str, float] = {}
        for key, tensor in reference.items():
            kind = kind_of(key)
            largest[kind] = max(largest.get(kind, 0.0), float(tensor.abs().max()))
        for key, tensor in reference.items():
            scale = STATE_TOLERANCE * float(tensor.abs().max())
            scale += STATE_FLOOR * largest[kind_of(key)]
            error = float((got[key] - tensor).abs().max()) / max(scale, 1e-30)
            worst = max(worst, (error, f"{key} after the {step} step"))
    return Difference(relative / LOSS_TOLERANCE, *worst)


def kind_of(key: str) -> str:
    """Return the kind of a tensor: a weight, or a state of the optimizer."""
    return key.split("state.")[1].split(".")[0] if key.startswith("optimizer.") else "weight"


def values_of(curves: Sequence[Curve]) -> list[float]:
    """Return losses, norms of gradients, losses of experts and further tokens, and evaluations."""
    measured = curves[0].measured
    values = [*measured.losses, *measured.grad_norms]
    values += [loss for losses in measured.metrics for loss in losses]
    for metrics in measured.experts:
        for name in sorted(metrics):
            values += metrics[name]
    values += [measured.points[key] for key in sorted(measured.points)]
    return values


@functools.cache
def find_refusal(flags: str, processes: int) -> str | None:
    """Return why the program refuses flags, or None."""
    try:
        parse_args(shlex.split(flags), processes)
    except ValueError as error:
        return str(error)
    return None


@functools.cache
def get_seeds() -> list[Model]:
    """Return models that together contain every value of every group."""
    models = iter(Models(find_refusal))
    return [next(models) for _ in range(Models.num_seeds)]


@functools.cache
def train_one_process(pool, flags: str) -> list[Curve]:
    return pool.run(train_case, 1, flags)


def is_applicable(model: Model, name: str) -> bool:
    """Return whether a layout exists for a model, and promises the same curve."""
    layout = LAYOUTS[name]
    if layout.needs_experts and not has_experts(model):
        return False
    flags = f"{flags_of(model)} {layout.flags}"
    if find_refusal(flags, layout.processes) is not None:
        return False
    if "global_balance" not in model:
        return True
    # With data parallelism, fewer micro-batches precede one in its step.
    parallel = parse_args(shlex.split(flags), layout.processes).parallel
    return parallel.dp_size(layout.processes) == 1


def assert_same_curve(pool, model: Model, name: str) -> None:
    layout = LAYOUTS[name]
    flags = flags_of(model, layout.min_layers)
    curves = pool.run(train_case, layout.processes, f"{flags} {layout.flags}")
    difference = compare(curves, train_one_process(pool, flags))
    assert difference.curves < 1, (model, difference)
    assert difference.states < 1, (model, difference)


def select_models(name: str, number: int) -> list[Model]:
    """Return some of the models that contain every value, others at each layout."""
    models = [model for model in get_seeds() if is_applicable(model, name)]
    start = list(LAYOUTS).index(name)
    distance = max(1, len(models) // number)
    return [models[(start + i * distance) % len(models)] for i in range(min(number, len(models)))]


@pytest.mark.parametrize("name", ONE_AXIS)
def test_some_features_at_every_axis(pool, name):
    """Two of the models at each axis; `make proof` runs all of them."""
    for model in select_models(name, 2):
        assert_same_curve(pool, model, name)


def test_every_feature_is_selected():
    """Each model, and with it each value of a group, runs at a layout of the default suite."""
    selected = {model for name in ONE_AXIS for model in select_models(name, 2)}
    selected |= {model for name in TWO_AXES for model in select_models(name, 1)}
    assert selected == set(get_seeds())


@pytest.mark.parametrize("name", TWO_AXES)
def test_every_pair_of_axes(pool, name):
    for model in select_models(name, 1):
        assert_same_curve(pool, model, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_AXIS)
def test_every_feature_at_every_axis(pool, name):
    for model in get_seeds():
        if is_applicable(model, name):
            assert_same_curve(pool, model, name)


@pytest.mark.parametrize("name", RARE)
def test_other_assignments_of_layers(pool, name):
    assert_same_curve(pool, make_model({"loss": "documents"}), name)


@pytest.mark.parametrize("case", PUBLISHED)
def test_published_bugs_of_other_programs(pool, case):
    """Silent errors of losses, gradients, or clipping that users found elsewhere."""
    _, changes, name = PUBLISHED[case]
    assert_same_curve(pool, make_model(changes), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_pair_of_features(pool, name):
    models = Models(find_refusal)
    for model in models:
        if is_applicable(model, name):
            assert_same_curve(pool, model, name)
    # A new refusal is a decision, not an accident.
    assert len(models.refused) <= 12, models.refused


BF16 = "--bf16 "
FP16 = "--fp16 --initial-loss-scale 1024 "


@pytest.mark.parametrize("name", ["sp2", "vpp2", "tp2_pp2", "zero2"])
def test_bf16_curves_agree_within_its_rounding(pool, name):
    layout = LAYOUTS[name]
    flags = flags_of(make_model({}), layout.min_layers) + f" {BF16}"
    curves = pool.run(train_case, layout.processes, f"{flags} {layout.flags}")
    expected = values_of(train_one_process(pool, flags))
    assert values_of(curves) == pytest.approx(expected, rel=2**-8)


def test_bf16_and_fp16_follow_fp32(pool):
    flags = flags_of(make_model({}), num_layers=2)
    exact = train_one_process(pool, flags)[0].measured.losses
    for precision in (BF16, FP16):
        rounded = train_one_process(pool, f"{flags} {precision}")[0].measured.losses
        assert rounded == pytest.approx(exact, abs=0.02)

"""Runs with --optimizer-impl apex and --norm-impl apex (a stand-in) equal runs with torch."""

import sys

import pytest

from megatron.core import apex
from megatron.core.apex import import_apex
from megatron.core.optimizer.rules.apex_adam import apex_sum_of_squares
from megatron.training.config.parsing import parse_args
from tests import ROOT
from tests.support import apex_checks
from tests.support.training_harness import COMMON, LAYOUTS, MODELS, train

STAND_IN = [str(ROOT / "tests/apex_stand_in" / part) for part in ("kernels", "python")]
APEX = "--optimizer-impl apex --norm-impl apex "


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(sys, "path", STAND_IN + sys.path)


@pytest.mark.usefixtures("stand_in")
def test_kernels_match_torch():
    apex_checks.check_adam("cpu", 1e-6)
    apex_checks.check_sum_of_squares("cpu")
    apex_checks.check_norms("cpu", 1e-5)


@pytest.mark.usefixtures("stand_in")
def test_large_tensors_are_split_for_32_bit_kernels(monkeypatch):
    """A bucket without a size limit may have more elements than 32 bits can index."""
    monkeypatch.setattr(apex, "MAX_ELEMENTS", 30_000)
    import_apex("amp_C", "").LARGEST_SEEN = 0
    apex_checks.check_adam("cpu", 1e-6)
    apex_checks.check_sum_of_squares("cpu")
    assert import_apex("amp_C", "").LARGEST_SEEN == 30_000


def train_with_stand_in(rank, world_size, flags):
    sys.path[:0] = [path for path in STAND_IN if path not in sys.path]
    return train(rank, world_size, flags)


def test_run_continues_with_torch_kernels(pool, tmp_path):
    """Half of a run with apex, the rest with torch at another layout: the curve of a torch run."""
    flags = f"--mock-data --train-iters 4 {MODELS['llama']} "
    expected = pool.run(train, 1, flags)[0].measured
    common = f"{flags} --save {tmp_path} --load {tmp_path} "
    first = pool.run(
        train_with_stand_in,
        2,
        f"{common} {APEX} {LAYOUTS['dp2_distributed_optimizer'][1]} --exit-interval 2",
    )
    second = pool.run(train, 1, common)
    for name in ("losses", "grad_norms"):
        measured = getattr(first[0].measured, name) + getattr(second[0].measured, name)
        assert measured == pytest.approx(getattr(expected, name), rel=2e-5), name


def test_error_without_apex_explains_the_installation(monkeypatch):
    monkeypatch.setitem(sys.modules, "amp_C", None)
    with pytest.raises(
        ValueError, match=r"amp_C cannot be imported.*Build apex.*--optimizer-impl torch"
    ):
        apex_sum_of_squares([apex_checks.torch.ones(3)], apex_checks.torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "fused_layer_norm_cuda", None)
    with pytest.raises(ValueError, match=r"Build apex.*--norm-impl torch"):
        apex_checks.check_norms("cpu", 0.0)
    with pytest.raises(ValueError, match="apex requires --optimizer adam"):
        parse_args(f"{COMMON} --mock-data --train-iters 1 --optimizer sgd {APEX}".split(), 1)

"""Runs with multi-token prediction: the same losses in every layout, and any change of layout."""

import functools

import pytest

from tests.support.compare import assert_same
from tests.support.training_harness import DISTRIBUTED_OPTIMIZER, LAYOUTS, MODELS, train, whole

DATA = "--mock-data --train-iters 5 "
MTP = "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.3 "
TIED = MODELS["llama"].replace("--untie-embeddings-and-output-weights", "")
KINDS = {"llama": MODELS["llama"], "tied": TIED}
PIPELINE = "--pipeline-model-parallel-size 2"
WAYS = {
    **LAYOUTS,
    "pp2_layout": (2, f"{PIPELINE} --pipeline-model-parallel-layout Et*3|tmmL"),
    "pp3_without_layers_at_the_end": (
        3,
        "--pipeline-model-parallel-size 3 --pipeline-model-parallel-layout Et*2|t*2|mmL "
        f"{DISTRIBUTED_OPTIMIZER} --global-batch-size 8",
    ),
    "cp2_tp2": (
        4,
        "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel "
        f"{DISTRIBUTED_OPTIMIZER}",
    ),
}


def train_kind(pool, kind, way, more=""):
    world_size, flags = {"single": (1, ""), **WAYS}[way]
    return pool.run(train, world_size, f"{DATA} {MTP} {KINDS[kind]} {flags} {more}")


@functools.cache
def train_reference(pool, kind, more=""):
    return train_kind(pool, kind, "single", more)[0].measured


def collect(measured):
    """Return all losses and gradient norms of a run."""
    values = [*measured.losses, *measured.grad_norms]
    for losses in measured.metrics:
        values += losses
    return values


def assert_close(measured, expected):
    got = collect(measured)
    assert len(measured.metrics[0]) == 2
    assert got == pytest.approx(collect(expected), rel=1e-5)


@pytest.mark.parametrize("way", ["pp2_layout", "pp3_without_layers_at_the_end"])
def test_losses_do_not_depend_on_where_the_layers_are(pool, way):
    expected = train_reference(pool, "tied")
    assert_close(train_kind(pool, "tied", way)[0].measured, expected)


def test_factor_zero_does_not_change_the_run(pool):
    # Clipping would depend on the norm, which is summed in another order.
    flags = f"{DATA} {MODELS['llama']} --clip-grad 0"
    plain = pool.run(train, 1, flags)[0].measured
    with_mtp = pool.run(train, 1, f"{flags} --mtp-num-layers 1 --mtp-loss-scaling-factor 0")
    assert with_mtp[0].measured.losses == plain.losses
    assert with_mtp[0].measured.grad_norms == pytest.approx(plain.grad_norms, rel=1e-6)


@pytest.mark.parametrize("kind", ["llama", "tied"])
def test_checkpoint_resumes_at_another_layout(pool, tmp_path, kind):
    batch = "--global-batch-size 4"
    save = f"--save {tmp_path} --exit-interval 3 {batch}"
    load = f"--load {tmp_path} {batch}"
    saved = train_kind(pool, kind, "tp2_pp2", f"{DISTRIBUTED_OPTIMIZER} {save}")
    expected = train_reference(pool, kind, batch)
    for way in ("single", "cp2_tp2"):
        loaded = train_kind(pool, kind, way, f"{load} --skip-train")
        assert_same(whole(loaded), whole(saved))
    resumed = train_kind(pool, kind, "pp2_interleaved", load)[0].measured
    assert resumed.losses == pytest.approx(expected.losses[3:], rel=1e-5)
    assert resumed.metrics[-1] == pytest.approx(expected.metrics[-1], rel=1e-5)

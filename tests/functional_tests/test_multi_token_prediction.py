"""Runs with multi-token prediction: the same losses in every layout, and any change of layout."""

import functools

import pytest

from tests.functional_tests.test_moe_runs import mark_slow
from tests.support.compare import assert_same
from tests.support.training_harness import DISTRIBUTED_OPTIMIZER, LAYOUTS, MODELS, train, whole

DATA = "--mock-data --train-iters 5 "
MTP = "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.3 "
TIED = MODELS["llama"].replace("--untie-embeddings-and-output-weights", "")
EXPERTS = MODELS["llama"] + (
    "--num-experts 4 --moe-router-topk 2 --moe-layer-freq ([0,1]*2) --moe-ffn-hidden-size 32 "
    "--moe-aux-loss-coeff 1e-2 --moe-router-load-balancing-type seq_aux_loss "
    "--moe-token-dispatcher-type alltoall "
)
KINDS = {"llama": MODELS["llama"], "tied": TIED, "experts": EXPERTS}
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
EXPERT_PARALLEL = "--expert-model-parallel-size 2"
PIPELINE = "--pipeline-model-parallel-size 2"
WAYS = {
    **LAYOUTS,
    "recompute": (1, RECOMPUTE),
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
    "ep2": (2, f"{EXPERT_PARALLEL} {DISTRIBUTED_OPTIMIZER}"),
    "pp2_ep2": (4, f"{PIPELINE} {EXPERT_PARALLEL} {DISTRIBUTED_OPTIMIZER}"),
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
    for losses in measured.mtp_losses:
        values += losses
    return values


def assert_close(measured, expected):
    got = collect(measured)
    assert len(measured.mtp_losses[0]) == 2
    assert got == pytest.approx(collect(expected), rel=1e-5)


DENSE = [way for way in WAYS if "ep2" not in way]
CASES = [("llama", way) for way in DENSE] + [("tied", way) for way in DENSE]
CASES += [("experts", way) for way in ("ep2", "pp2_ep2")]
ALWAYS = [
    ("llama", "tp2_sp"),
    ("llama", "cp2"),
    ("llama", "pp2_interleaved"),
    ("llama", "recompute"),
    ("tied", "tp2_pp2"),
    ("tied", "pp3_without_layers_at_the_end"),
    ("experts", "pp2_ep2"),
]


@pytest.mark.parametrize(("kind", "way"), mark_slow(CASES, ALWAYS))
def test_losses_do_not_depend_on_the_layout(pool, kind, way):
    expected = train_reference(pool, kind)
    assert_close(train_kind(pool, kind, way)[0].measured, expected)


@pytest.mark.parametrize("way", mark_slow(["cp2", "pp2_dp2", "tp2_sp"], ["cp2"]))
def test_losses_per_token_do_not_depend_on_the_layout(pool, way):
    more = "--calculate-per-token-loss --eod-mask-loss"
    assert_close(
        train_kind(pool, "llama", way, more)[0].measured, train_reference(pool, "llama", more)
    )


def test_factor_zero_does_not_change_the_run(pool):
    # Clipping would depend on the norm, which is summed in another order.
    flags = f"{DATA} {MODELS['llama']} --clip-grad 0"
    plain = pool.run(train, 1, flags)[0].measured
    with_mtp = pool.run(train, 1, f"{flags} --mtp-num-layers 1 --mtp-loss-scaling-factor 0")
    assert with_mtp[0].measured.losses == plain.losses
    assert with_mtp[0].measured.grad_norms == pytest.approx(plain.grad_norms, rel=1e-6)


@pytest.mark.parametrize("kind", ["llama", "tied"])
def test_checkpoint_resumes_at_another_layout(pool, tmp_path, kind):
    save = f"--save {tmp_path} --exit-interval 3"
    saved = train_kind(pool, kind, "tp2_pp2", f"{DISTRIBUTED_OPTIMIZER} {save}")
    expected = train_reference(pool, kind)
    for way in ("single", "cp2_tp2"):
        loaded = train_kind(pool, kind, way, f"--load {tmp_path} --skip-train")
        assert_same(whole(loaded), whole(saved))
    resumed = train_kind(pool, kind, "pp2_interleaved", f"--load {tmp_path}")[0].measured
    assert resumed.losses == pytest.approx(expected.losses[3:], rel=1e-5)
    assert resumed.mtp_losses[-1] == pytest.approx(expected.mtp_losses[-1], rel=1e-5)

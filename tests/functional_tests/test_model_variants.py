"""Losses and gradient norms of the rarer options of a model do not depend on the layout."""

import pytest

from tests.support.training_harness import COMMON, LAYOUTS, train

SIZES = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --disable-bias-linear "
VARIANTS = {
    # Sequences have 16 tokens: the long factors are in use.
    "longrope": "--position-embedding-type rope --rope-type longrope --rotary-scaling-factor 4 "
    "--original-max-position-embeddings 8 --longrope-short-factor 1 1 1 1 "
    "--longrope-long-factor 1 1.5 2.5 4 --xielu --output-layer-bias "
    "--untie-embeddings-and-output-weights",
    "query_scaling": "--position-embedding-type rope --rope-type yarn --rotary-scaling-factor 4 "
    "--original-max-position-embeddings 4 --query-length-scaling 0.3",
}
WAYS = ("tp2_sp", "pp2", "cp2", "pp2_cp2")


@pytest.mark.parametrize("variant", VARIANTS)
def test_fp32_curves_of_variants_agree(pool, variant):
    flags = f"{COMMON} --mock-data --train-iters 4 {SIZES} {VARIANTS[variant]} "
    expected = pool.run(train, 1, flags)[0].measured
    assert expected.losses[-1] < expected.losses[0]
    for way in WAYS:
        world_size, layout = LAYOUTS[way]
        measured = pool.run(train, world_size, flags + layout)[0].measured
        assert measured.losses == pytest.approx(expected.losses, rel=1e-5), way
        assert measured.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5), way

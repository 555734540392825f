"""Losses and gradient norms of a seed do not depend on the layout."""

import functools

import pytest

from tests.support.training_harness import DISTRIBUTED_OPTIMIZER, LAYOUTS, MODELS, train

DATA = "--mock-data --train-iters 6 "
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
OTHER_WAYS = {  # the same mathematics by other means, on (processes, flags)
    "recompute": (1, RECOMPUTE),
    "recompute_selective": (1, "--recompute-granularity selective"),
    "recompute_tp2_pp2": (4, f"{LAYOUTS['tp2_pp2'][1]} {RECOMPUTE}"),
    "micro_batch": (1, "--micro-batch-size 4"),
    "per_token_loss": (2, "--calculate-per-token-loss"),
    "dp2_distributed_optimizer_without_overlap": (2, "--use-distributed-optimizer"),
}


@functools.cache
def reference(pool, flags):
    return pool.run(train, 1, flags)[0].measured


def relative_differences(measured, expected):
    pairs = zip(
        measured.losses + measured.grad_norms, expected.losses + expected.grad_norms, strict=True
    )
    return [abs(a - b) / abs(b) for a, b in pairs]


CASES = [(model, way) for model in MODELS for way in LAYOUTS] + [
    ("llama", way) for way in OTHER_WAYS
]


@pytest.mark.parametrize(("model", "way"), CASES)
def test_fp32_curves_agree(pool, model, way):
    world_size, flags = {**LAYOUTS, **OTHER_WAYS}[way]
    expected = reference(pool, DATA + MODELS[model])
    measured = pool.run(train, world_size, f"{DATA} {MODELS[model]} {flags}")[0].measured
    assert len(measured.losses) == 6 and expected.losses[-1] < expected.losses[0] - 0.2
    assert max(relative_differences(measured, expected)) < 1e-5


@pytest.mark.parametrize(
    "way", ["tp2_sp", "pp2_interleaved", "tp2_pp2", "dp2_distributed_optimizer"]
)
def test_bf16_curves_agree_within_its_rounding(pool, way):
    world_size, flags = LAYOUTS[way]
    expected = reference(pool, DATA + MODELS["llama"] + "--bf16")
    measured = pool.run(train, world_size, f"{DATA} {MODELS['llama']} --bf16 {flags}")[0].measured
    assert max(relative_differences(measured, expected)) < 2**-8


def test_bf16_and_fp16_follow_fp32(pool):
    exact = reference(pool, DATA + MODELS["llama"])
    for precision in ("--bf16", "--fp16 --initial-loss-scale 1024"):
        rounded = reference(pool, f"{DATA} {MODELS['llama']} {precision}")
        assert max(abs(a - b) for a, b in zip(rounded.losses, exact.losses, strict=True)) < 0.02


def test_masked_tokens_count_per_token(pool):
    """With masked tokens, micro-batches have different numbers of tokens, which must not affect a
    loss per token.
    """
    flags = f"{DATA} {MODELS['llama']} --eod-mask-loss --calculate-per-token-loss "
    expected = reference(pool, flags)
    for world_size, more in [
        (1, "--micro-batch-size 1"),
        (2, DISTRIBUTED_OPTIMIZER),
        (2, LAYOUTS["pp2"][1]),
    ]:
        measured = pool.run(train, world_size, flags + more)[0].measured
        assert max(relative_differences(measured, expected)) < 1e-5

"""Training with the operators of Triton kernels, on a CPU by their references, equals that without."""

import sys
from unittest import mock

import pytest
import torch

from megatron.core import fused_kernels
from tests import ROOT
from tests.support.training_harness import COMMON, LLAMA, train

pytest.importorskip("triton", reason="Triton is not in the environment: pip install triton")

STAND_IN = str(ROOT / "tests/te_stand_in")
LATENT = (
    "--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 8 --normalization RMSNorm --swiglu --ffn-hidden-size 48 --disable-bias-linear "
    "--position-embedding-type rope "
)
RUNS = {  # name -> (processes, flags)
    "grouped queries": (1, LLAMA),
    "one query per group": (1, f"{LLAMA} --num-query-groups 4 --rotary-percent 0.5"),
    "norms of queries": (1, f"{LLAMA} --qk-layernorm --rotary-interleaved"),
    "softcap, documents": (
        1,
        f"{LLAMA} --num-query-groups 4 --final-logit-softcapping 5 --reset-attention-mask --reset-position-ids",
    ),
    "clipped, recomputed": (
        1,
        f"{LLAMA} --num-query-groups 4 --clip-qkv 0.5 --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1",
    ),
    "latent attention": (1, LATENT),
    "experts": (1, f"{LLAMA} --num-experts 4 --moe-router-topk 2"),
    # 60 tokens of 128 rows: the second rank has padding only
    "TP 2 with SP": (
        2,
        f"{LLAMA} --tensor-model-parallel-size 2 --sequence-parallel --make-vocab-size-divisible-by 64",
    ),
    "ZeRO": (2, f"{LLAMA} --use-distributed-optimizer --overlap-param-gather --clip-grad 0.1"),
    "CP 2": (2, f"{LLAMA} --context-parallel-size 2"),
    "layer norm, dropout": (
        1,
        f"{LLAMA} --normalization LayerNorm --apply-layernorm-1p --hidden-dropout 0.1",
    ),
    "no norm weights": (1, f"{LLAMA} --no-norm-weights"),
    "recomputed norms": (
        1,
        f"{LLAMA} --recompute-granularity selective --recompute-modules layernorm",
    ),
    "residual sums by torch": (1, f"{LLAMA} --no-bias-dropout-fusion"),
}
# Rotates in place.
_IN_PLACE = {"split_and_rotate"}
# Rotates tensors that were split before.
_SEPARATE = {"split_and_rotate", "split_and_rotate_backward"}
# Rotates into new tensors, whose gradient the operator itself computes.
_SPLIT = {"rotate", "split_and_rotate_backward"}
_NORM_KERNELS = {"residual_norm"}
WITHOUT_KERNELS = {
    "norms of queries": _SEPARATE,
    "latent attention": _SEPARATE,
    "CP 2": _SPLIT,
    "recomputed norms": _IN_PLACE | _NORM_KERNELS,
    "residual sums by torch": _IN_PLACE | _NORM_KERNELS,
}


def train_with_operators(rank, world_size, flags):
    if "transformer_engine" in flags and STAND_IN not in sys.path:
        sys.path.insert(0, STAND_IN)
    names = set()
    load = fused_kernels._load

    def load_operator(name):
        names.add(name)
        return load(name)

    with (
        mock.patch.object(fused_kernels, "supports", lambda x: x.dtype in fused_kernels._DTYPES),
        mock.patch.object(fused_kernels, "_load", load_operator),
    ):
        return train(rank, world_size, flags, COMMON + "--mock-data --train-iters 3 "), names


@pytest.mark.parametrize("name", RUNS)
def test_operators_change_results_by_rounding_only(pool, name):
    processes, flags = RUNS[name]
    outcomes = pool.run(train_with_operators, processes, flags)
    expected = pool.run(train, processes, flags, COMMON + "--mock-data --train-iters 3 ")

    for (outcome, names), plain in zip(outcomes, expected, strict=True):
        assert names == set(fused_kernels._KERNELS) - WITHOUT_KERNELS.get(name, _IN_PLACE)
        assert outcome.measured.losses == pytest.approx(plain.measured.losses, rel=1e-6)
        assert outcome.measured.grad_norms == pytest.approx(plain.measured.grad_norms, rel=1e-5)
        for row, plain_row in zip(outcome.boxes, plain.boxes, strict=True):
            torch.testing.assert_close(row[-1], plain_row[-1], rtol=1e-3, atol=1e-5, msg=row[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one query per group", "clipped, recomputed", "TP 2 with SP"])
def test_compiled_layers_contain_the_operators(pool, name):
    processes, flags = RUNS[name]
    outcomes = pool.run(train_with_operators, processes, f"{flags} --compile", timeout=300)
    expected = pool.run(train, processes, flags, COMMON + "--mock-data --train-iters 3 ")
    for (outcome, names), plain in zip(outcomes, expected, strict=True):
        assert names == set(fused_kernels._KERNELS) - {"rotate", "split_and_rotate_backward"}
        assert outcome.measured.losses == pytest.approx(plain.measured.losses, rel=1e-6)
        assert outcome.measured.grad_norms == pytest.approx(plain.measured.grad_norms, rel=1e-5)


def test_separate_norms_of_transformer_engine_use_the_kernel(pool):
    """The norms are those of experts: the backend fuses others with the dense projections."""
    experts = f"{LLAMA} --num-experts 4 --moe-router-topk 2 "
    te = "--transformer-impl transformer_engine"
    ((outcome, names),) = pool.run(train_with_operators, 1, experts + te)
    assert names >= _NORM_KERNELS

    (expected,) = pool.run(train, 1, experts, COMMON + "--mock-data --train-iters 3 ")
    assert outcome.measured.losses == pytest.approx(expected.measured.losses, rel=1e-6)
    assert outcome.measured.grad_norms == pytest.approx(expected.measured.grad_norms, rel=1e-5)

    ((_, names),) = pool.run(train_with_operators, 1, f"{LLAMA} {te}")
    assert not names & _NORM_KERNELS
    assert not names & _SPLIT


def test_bf16_weights_are_the_rounded_main_parameters(pool):
    ((outcome, names),) = pool.run(train_with_operators, 1, f"{LLAMA} --bf16")
    assert "adamw" in names

    values = {(key, offset): value for key, _, offset, value in outcome.boxes}
    compared = 0
    for (key, offset), weight in values.items():
        main = values.get((f"optimizer.state.param.{key}", offset))
        if main is not None:
            assert torch.equal(weight, main.to(torch.bfloat16)), key
            compared += 1

    assert compared > 10


def test_disabled_kernels_are_not_found():
    x = torch.ones(2)
    with mock.patch.object(fused_kernels, "supports", lambda x: True):
        assert fused_kernels.find_kernel("swiglu", x) is not None
        fused_kernels.enable_kernels(False)
        try:
            assert fused_kernels.find_kernel("swiglu", x) is None
        finally:
            fused_kernels.enable_kernels(True)

    assert fused_kernels.find_kernel("swiglu", x) is None

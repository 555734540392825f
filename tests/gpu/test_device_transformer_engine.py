"""Transformer Engine's kernels against torch's: losses, recipes of fp8, and resumes between them."""

import importlib.util

import pytest

from tests.training_harness import COMMON, LLAMA, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="no Transformer Engine"),
]
WIDER = COMMON.replace("--hidden-size 32", "--hidden-size 256").replace("--seq-length 16", "--seq-length 64")
MODEL = LLAMA.replace("--ffn-hidden-size 48", "--ffn-hidden-size 512")
TE = "--transformer-impl transformer_engine "
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 256 "


def losses(rank, world_size, flags, iterations=50):
    flags = f"{MODEL} --device cuda --distributed-backend gloo --bf16 --mock-data --train-iters {iterations} {flags}"
    return train(rank, world_size, flags, WIDER).measured.losses


@pytest.mark.parametrize("more", ["", "--qk-layernorm", "--window-size 20,0", "--reset-attention-mask", EXPERTS])
def test_bf16_curves_agree(pool, more):
    (expected,), (measured,) = (pool.run(losses, 1, flags + more, timeout=300) for flags in ("", TE))
    assert measured == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_fp8_follows_bf16(pool, recipe):
    te = pytest.importorskip("transformer_engine.pytorch")
    available = {"blockwise": "check_fp8_block_scaling_support", "mxfp8": "check_mxfp8_support"}
    checks = getattr(te, "quantization", None) or te.fp8
    if recipe in available and not getattr(checks, available[recipe])()[0]:
        pytest.skip(f"this GPU has no {recipe}")
    (expected,) = pool.run(losses, 1, "", timeout=300)
    fp8 = (
        f"{TE} --fp8-format {'e4m3' if recipe == 'mxfp8' else 'hybrid'} --fp8-recipe {recipe} --first-last-layers-bf16"
    )
    (measured,) = pool.run(losses, 1, fp8, timeout=300)
    assert measured == pytest.approx(expected, rel=5e-2)


def test_fp8_resumes_bitwise_and_goes_on_in_bf16(pool, tmp_path):
    fp8 = f"{TE} --fp8-format hybrid --fp8-amax-history-len 16 --fp8-amax-compute-algo max --deterministic-mode "
    saving = f"{fp8} --save {tmp_path} --save-interval 5"
    (straight,) = pool.run(losses, 1, saving, 10, timeout=300)
    for flags, tolerance in ((fp8, 0.0), ("", 2e-2), (TE, 2e-2)):
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
        (again,) = pool.run(losses, 1, f"{flags} --load {tmp_path}", 10, timeout=300)
        assert again == pytest.approx(straight[5:], rel=tolerance, abs=0.0)

"""Training with the real Transformer Engine, whose kernels do nothing here.

Its Python code, its bindings and their checks of arguments run, with the communication of each
layout.
"""

import pytest

from tests.fake_cuda.extensions import needs_extension, train_with_extensions
from tests.gpu.test_device_transformer_engine import EXPERTS, FUSED, TE, WEIGHTS

pytestmark = needs_extension("transformer_engine_torch")

HYBRID = "--fp8-format hybrid "
BLOCKWISE = "--fp8-format e4m3 --fp8-recipe blockwise "
TENSORWISE = f"{HYBRID}--fp8-recipe tensorwise "
LATENT = (
    "--num-query-groups 4 --multi-latent-attention --kv-lora-rank 64 --qk-head-dim 32 "
    "--qk-pos-emb-head-dim 16 --v-head-dim 32 --q-lora-rank 48 "
)
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel "

LAYERS = {
    "plain": "",
    "query_key_norm": "--qk-layernorm ",
    "window": "--window-size 20,0 ",
    "documents": "--reset-attention-mask ",
    "sink": "--softmax-type learnable ",
    "latent_attention": LATENT,
    "layer_norm_and_biases": "--normalization LayerNorm --add-bias-linear ",
    "recompute": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 ",
    "experts": EXPERTS,
    "fused": FUSED,
}
FP8 = {
    "delayed": HYBRID,
    "delayed_weights": HYBRID + WEIGHTS,
    "delayed_experts": HYBRID + EXPERTS,
    "tensorwise": TENSORWISE,
    "tensorwise_weights": TENSORWISE + WEIGHTS,
    "blockwise": BLOCKWISE,
    "blockwise_weights": BLOCKWISE + WEIGHTS,
    "blockwise_experts": BLOCKWISE + EXPERTS,
}
BLACKWELL = {
    "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8 ",
    "nvfp4": "--fp4-format e2m1 --fp4-recipe nvfp4 ",
}
LAYOUTS = {
    "tp2_sp": TP2,
    "pp2": "--pipeline-model-parallel-size 2 ",
    "dp2": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather ",
    "cp2_a2a": "--context-parallel-size 2 --cp-comm-type a2a ",
}
DISTRIBUTED = {
    **{name: [flags, flags + HYBRID] for name, flags in LAYOUTS.items()},
    "dp2_weights": [HYBRID + WEIGHTS, BLOCKWISE + WEIGHTS],
    "ep2": [f"{EXPERTS}--expert-model-parallel-size 2 "],
    "overlap": [f"{TP2}--tp-comm-overlap "],
    "overlap_fp8": [f"{TP2}--tp-comm-overlap {HYBRID}"],
}


@pytest.mark.parametrize("runs", [LAYERS, FP8], ids=["layers", "fp8"])
def test_one_device(runs):
    train_with_extensions([TE + flags for flags in runs.values()])


def test_formats_of_blackwell():
    runs = [TE + flags for flags in BLACKWELL.values()]
    train_with_extensions(runs, FAKE_CUDA_CAPABILITY="100")


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_layouts(name):
    # User buffers without multicast, which has no replacement.
    settings = {"UB_SKIPMC": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    output = train_with_extensions([TE + flags for flags in DISTRIBUTED[name]], 2, **settings)
    assert ("Register UBuf" in output) == name.startswith("overlap")

"""Runs that train adapters on the golden Llama model, for tests and interop."""

from __future__ import annotations

from tests import ROOT

MODEL = ROOT / "tests/golden/hf/llama"
SHAPE = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 112 --num-attention-heads 4 "
    "--group-query-attention --num-query-groups 2 --swiglu --position-embedding-type rope "
    "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
    "--max-position-embeddings 64 --tokenizer-type NullTokenizer --vocab-size 258 "
    "--make-vocab-size-divisible-by 1 "
)
TRAINING = (
    "--mock-data --seq-length 32 --micro-batch-size 1 --global-batch-size 4 --train-iters 4 "
    "--lr 1e-2 --lr-decay-style constant --weight-decay 0.1 --clip-grad 1.0 --hidden-dropout 0 "
    "--attention-dropout 0 --num-workers 0 --num-threads 1 --log-interval 1 --eval-iters 0 "
)
LORA = "--lora-rank 4 --lora-alpha 8 "
FLAGS = f"{SHAPE} {TRAINING} {LORA} "


def widen_shape(hidden: int, ffn: int) -> str:
    """Return the flags of the golden model with other sizes."""
    shape = SHAPE.replace("--hidden-size 64", f"--hidden-size {hidden}")
    return shape.replace("--ffn-hidden-size 112", f"--ffn-hidden-size {ffn}")

"""Runs that train adapters on the golden Llama model, for tests and interop."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

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

# A model of which two TP ranks have whole blocks of 64 columns
_WIDE_SIZES = {64: 128, 112: 256, 32: 64}
WIDE_SHAPE = SHAPE.replace("--hidden-size 64", "--hidden-size 128").replace(" 112 ", " 256 ")


def write_wide_model(directory: Path, change: Callable[[Tensor], Tensor] | None = None) -> None:
    """Write a model of transformers with random weights; `change` applies to its linear layers."""
    directory.mkdir(parents=True)
    fields = json.loads((MODEL / "config.json").read_text())
    fields["hidden_size"] = 128
    fields["intermediate_size"] = 256
    fields["head_dim"] = 32
    (directory / "config.json").write_text(json.dumps(fields))
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, tensor in load_file(MODEL / "model.safetensors").items():
        shape = [_WIDE_SIZES.get(size, size) for size in tensor.shape]
        values = torch.randn(shape, generator=generator) * 0.05
        if name.endswith("norm.weight"):
            values += 1
        if change is not None and name.endswith("_proj.weight"):
            values = change(values)
        tensors[name] = values
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})

"""Tensor and sequence parallelism: collectives, split layers, the loss, and random numbers."""

from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    column_parallel,
    linear_cross_entropy,
    loss_chunk_elements,
    padded_vocab_size,
)
from megatron.core.tensor_parallel.random import TensorParallelRng, checkpoint, without_intermediate

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "TensorParallelRng",
    "VocabParallelEmbedding",
    "checkpoint",
    "column_parallel",
    "linear_cross_entropy",
    "loss_chunk_elements",
    "padded_vocab_size",
    "without_intermediate",
]

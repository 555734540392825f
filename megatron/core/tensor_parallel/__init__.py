"""Tensor and sequence parallelism: collectives, split layers, the loss, and random numbers."""

from megatron.core.tensor_parallel.cross_entropy import (
    get_loss_chunk_elements,
    linear_cross_entropy,
)
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    apply_linear,
    compute_padded_vocab_size,
)
from megatron.core.tensor_parallel.random import (
    TensorParallelRng,
    checkpoint,
    recompute_intermediate,
)

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "TensorParallelRng",
    "VocabParallelEmbedding",
    "apply_linear",
    "checkpoint",
    "compute_padded_vocab_size",
    "get_loss_chunk_elements",
    "linear_cross_entropy",
    "recompute_intermediate",
]

"""Models of any layout without process groups, whose elements have known values."""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.dist_checkpointing import ShardedStateDict, ShardedTensor
from megatron.core.models import GPTModel
from megatron.core.parallel_config import ParallelConfig
from megatron.core.parallel_state import ParallelState
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.support.tiny_ddp_model import region

LLAMA: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "ffn_hidden_size": 48,
    "group_query_attention": True,
    "num_query_groups": 2,
    "vocab_size": 53,
    "max_position_embeddings": 32,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
EXPERTS = LLAMA | {"num_experts": 4}
MODELS = {"llama": LLAMA, "experts": EXPERTS}


def build_state(model: str, parallel: ParallelConfig, size: int, rank: int) -> ShardedStateDict:
    """Return the weights, zero, of one rank of a layout with `size` ranks."""
    ps = ParallelState.for_rank(parallel, size, rank)
    config = TransformerConfig(**MODELS[model])
    num_layers = config.num_layers // ps.pp.size
    chunk = GPTModel(
        config,
        layers=range(ps.pp.rank * num_layers, (ps.pp.rank + 1) * num_layers),
        pre_process=ps.pp.is_first,
        post_process=ps.pp.is_last,
        tp=ps.tp,
        sequence_parallel=ps.tp.size > 1,
        experts=ps.expert_axes,
        make_vocab_size_divisible_by=4,
        rng=TensorParallelRng(11, ps.tp.rank),
    )
    for parameter in chunk.parameters():
        parameter.data.zero_()
    return chunk.sharded_state_dict()


def compute_values(entry: ShardedTensor, step: int) -> torch.Tensor:
    """Return the values of a global tensor at a step: different ones for each element."""
    generator = torch.Generator().manual_seed(sum(entry.key.encode()) + 1000 * step)
    return torch.randn(entry.global_shape, generator=generator).to(entry.dtype)


def set_values(state: ShardedStateDict, step: int) -> None:
    for entry in state.values():
        assert isinstance(entry, ShardedTensor)
        values = compute_values(entry, step)
        for box in entry.boxes:
            box.tensor.data.copy_(values[region(box)])


def check_values(state: ShardedStateDict, step: int) -> None:
    """Assert that all boxes contain the values of a step, bitwise."""
    assert state
    for entry in state.values():
        assert isinstance(entry, ShardedTensor)
        values = compute_values(entry, step)
        for box in entry.boxes:
            assert torch.equal(box.tensor, values[region(box)]), (entry.key, box.offset)


def count_missing_bytes(source: ShardedStateDict, target: ShardedStateDict) -> int:
    """Return the bytes of the target that this rank does not have, element by element."""
    missing = 0
    for key, entry in target.items():
        assert isinstance(entry, ShardedTensor)
        is_present = torch.zeros(entry.global_shape, dtype=torch.bool)
        if key in source:
            for box in source[key].boxes:
                is_present[region(box)] = True
        for box in entry.boxes:
            missing += int((~is_present[region(box)]).sum()) * entry.dtype.itemsize
    return missing

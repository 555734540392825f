"""Measurements besides the loss: memory in use, the norm of the parameters, operations per
token.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.core.distributed import DistributedDataParallel
from megatron.core.module import param_info
from megatron.core.optimizer import counts_for_model
from megatron.core.parallel_state import ParallelState
from megatron.core.transformer.transformer_config import TransformerConfig

_STATM = Path("/proc/self/statm")  # Linux


def measure_memory(device: torch.device) -> dict[str, float]:
    """Return metrics of the memory of this process, which trains on `device`, by name."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        return {
            "mem-allocated-bytes": stats.get("allocated_bytes.all.current", 0),
            "mem-max-allocated-bytes": stats.get("allocated_bytes.all.peak", 0),
            "mem-reserved-bytes": stats.get("reserved_bytes.all.current", 0),
            "mem-max-reserved-bytes": stats.get("reserved_bytes.all.peak", 0),
            "mem-alloc-retries": stats.get("num_alloc_retries", 0),
        }
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    values: dict[str, float] = {"mem-max-resident-bytes": peak}
    if _STATM.exists():
        resident_pages = int(_STATM.read_text().split()[1])
        values["mem-resident-bytes"] = resident_pages * os.sysconf("SC_PAGE_SIZE")
    return values


def format_memory_line(iteration: int, device: torch.device) -> str:
    """Return a log line with the maximum of each metric over all ranks, and its rank.
    Collective.
    """
    gathered: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(gathered, measure_memory(device))
    parts = []
    for name in gathered[0]:
        largest = max(range(len(gathered)), key=lambda rank: gathered[rank][name])
        value = gathered[largest][name]
        label = name.removeprefix("mem-").removesuffix("-bytes").replace("-", " ")
        amount = f"{value / 1e9:.3f} GB" if name.endswith("-bytes") else f"{value:.0f}"
        parts.append(f"{label} {amount} (rank {largest})")
    return f"memory after iteration {iteration}, maximum over ranks: {', '.join(parts)}"


@torch.no_grad()
def compute_params_norm(
    chunks: Sequence[DistributedDataParallel], ps: ParallelState
) -> torch.Tensor:
    """Return the Euclidean norm of the whole model as a scalar on the device; each parameter counts
    once. Collective.
    """
    total = torch.zeros((), dtype=torch.float64, device=chunks[0].flat_buffers[0].param_data.device)
    for chunk in chunks:
        chunk.finish_param_sync()
        for param in chunk.parameters():
            info = param_info(param)
            if counts_for_model(info, ps, sharded=False):
                tensors = (param,) if info.fp8 is None else info.fp8.tensors
                for values in tensors:
                    total += torch.linalg.vector_norm(values.float()).double().square()
    if ps.config.splits_experts:
        dist.all_reduce(total)
    elif ps.model.size > 1:
        dist.all_reduce(total, group=ps.model.group)
    return total.sqrt()


def model_flops_per_token(config: TransformerConfig, seq_length: int, vocab_size: int) -> float:
    """Return the operations of forward and backward per token: 2 per multiply-add, backward twice
    the forward.

    Counts the matrix products that the mathematics needs: projections, MLP, attention over the keys
    that the causal mask and the window leave, logits. Recomputed activations and element-wise
    operations do not count (Chowdhery et al. 2022, "PaLM", appendix B; the convention of
    Megatron-LM's TFLOP/s).
    """
    num_heads = config.num_attention_heads
    hidden_size = config.hidden_size

    # Attention: projections of queries, keys and values, scores and weighted sum, output.
    if config.multi_latent_attention:
        qkv = hidden_size * (config.kv_lora_rank + config.qk_pos_emb_head_dim)
        qkv += config.kv_lora_rank * num_heads * (config.qk_head_dim + config.v_head_dim)
        query_rank = config.q_lora_rank or 0
        qkv += (query_rank or hidden_size) * num_heads * config.qk_width + hidden_size * query_rank
    else:
        qkv = hidden_size * (num_heads + 2 * config.query_groups) * config.head_dim
    share_with_window = sum(config.window_pattern) / config.num_layers
    num_keys = share_with_window * count_attended_keys(config, seq_length)
    num_keys += (1 - share_with_window) * seq_length / 2
    scores_and_values = num_heads * (config.qk_width + config.v_width) * num_keys
    projection = num_heads * config.v_width * hidden_size

    # MLPs: dense layers, and for layers with experts those that a token is routed to.
    per_width = (3 if config.gated else 2) * hidden_size
    num_moe_layers = sum(config.moe_layer_pattern)
    mlps = per_width * config.ffn_size * (config.num_layers - num_moe_layers)
    if config.has_experts:
        widths = config.moe_router_topk * config.moe_ffn_size
        widths += config.moe_shared_expert_intermediate_size or 0
        mlps += num_moe_layers * (per_width * widths + hidden_size * config.experts)

    logits = hidden_size * vocab_size
    return 6 * (config.num_layers * (qkv + scores_and_values + projection) + mlps + logits)


def count_attended_keys(config: TransformerConfig, seq_length: int) -> float:
    """Return the mean number of keys per token in a layer with a window; without one, half the
    sequence.
    """
    window = seq_length
    if config.window_size is not None and config.window_size[0] >= 0:
        window = min(config.window_size[0], seq_length)
    return window - window * window / (2 * seq_length)

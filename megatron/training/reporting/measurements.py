"""Measurements besides the loss: time of phases, memory, parameter norm, operations per token."""

from __future__ import annotations

import os
import resource
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.core.distributed import DistributedDataParallel
from megatron.core.module import param_info
from megatron.core.optimizer import counts_for_model
from megatron.core.parallel_state import ParallelState, gather_objects
from megatron.core.transformer.transformer_config import TransformerConfig

_STATM = Path("/proc/self/statm")  # Linux


def measure_memory(device: torch.device) -> dict[str, float]:
    """Return metrics of the memory of this process, which trains on `device`, by name."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        # torch's allocator keeps freed memory: reserved minus allocated bytes are cached.
        return {
            "mem-allocated-bytes": stats.get("allocated_bytes.all.current", 0),
            "mem-max-allocated-bytes": stats.get("allocated_bytes.all.peak", 0),
            "mem-reserved-bytes": stats.get("reserved_bytes.all.current", 0),
            "mem-max-reserved-bytes": stats.get("reserved_bytes.all.peak", 0),
            "mem-alloc-retries": stats.get("num_alloc_retries", 0),
        }
    values = {"mem-max-resident-bytes": measure_max_memory(device)}
    if _STATM.exists():
        _, resident, *_ = _STATM.read_text().split()  # numbers of pages
        resident_pages = int(resident)
        values["mem-resident-bytes"] = resident_pages * os.sysconf("SC_PAGE_SIZE")
    return values


def measure_max_memory(device: torch.device) -> float:
    """Return the peak memory of this process, which trains on `device`, in bytes.

    On a GPU: of the allocator's tensors; on the CPU: of the whole process.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return 1024.0 * usage.ru_maxrss  # Linux counts in KiB


def format_memory_line(iteration: int, device: torch.device) -> str:
    """Return a log line with the maximum of each metric over all ranks. Collective."""
    gathered = gather_objects(measure_memory(device))

    # All ranks have the same kind of device, hence the same metrics.
    texts = []
    for name in gathered[0]:
        values = [metrics[name] for metrics in gathered]
        largest = max(values)
        rank = values.index(largest)
        amount = f"{largest:.0f}"
        if name.endswith("-bytes"):
            amount = f"{largest / 1e9:.3f} GB"
        label = name.removeprefix("mem-").removesuffix("-bytes")
        label = label.replace("-", " ")
        texts.append(f"{label} {amount} (rank {rank})")
    return f"memory after iteration {iteration}, maximum over ranks: {', '.join(texts)}"


@torch.no_grad()
def compute_params_norm(
    chunks: Sequence[DistributedDataParallel], ps: ParallelState
) -> torch.Tensor:
    """Return the Euclidean norm of the whole model as a scalar on the device. Collective.

    Each parameter counts once, although several ranks may have it.
    """
    # Sum the squares in fp64: the norms of large models exceed the precision of fp32.
    device = chunks[0].flat_buffers[0].param_data.device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for chunk in chunks:
        # With overlapped gathering, parameters may still be on their way.
        chunk.finish_param_sync()
        for param in chunk.parameters():
            info = param_info(param)
            if not counts_for_model(info, ps, sharded=False):
                continue
            tensors = (param,) if info.fp8 is None else info.fp8.tensors
            for values in tensors:
                norm = torch.linalg.vector_norm(values.float())
                total += norm.double().square()

    # Ranks of another replica have the same parameters, unless experts are split over them.
    if ps.config.splits_experts:
        dist.all_reduce(total)
    elif ps.model.size > 1:
        dist.all_reduce(total, group=ps.model.group)
    return total.sqrt()


def compute_flops_per_token(config: TransformerConfig, seq_length: int, vocab_size: int) -> float:
    """Return the operations of forward and backward per token.

    A multiply-add is 2 operations, and backward has twice those of forward.

    Counts the matrix products that the mathematics needs: projections, MLP, attention over the keys
    that the causal mask and the window leave, logits. Recomputed activations and element-wise
    operations do not count (Chowdhery et al. 2022, "PaLM", appendix B; the convention of
    Megatron-LM's TFLOP/s).
    """
    # Multiply-adds of forward. Layers for multi-token prediction also have a projection of their
    # inputs, and logits.
    num_mtp_layers = config.num_mtp_layers
    num_layers = config.num_layers + num_mtp_layers
    attention = num_layers * _count_attention_products(config, seq_length)
    mlps = _count_mlp_products(config)
    inputs = num_mtp_layers * 2 * config.hidden_size**2
    logits = (1 + num_mtp_layers) * config.hidden_size * vocab_size

    # 2 operations per multiply-add, 3 products (forward, gradients of input and of weight)
    return 6 * (attention + mlps + inputs + logits)


def _count_attention_products(config: TransformerConfig, seq_length: int) -> float:
    """Return the multiply-adds per token of attention, as a mean over layers."""
    num_heads = config.num_attention_heads
    hidden_size = config.hidden_size

    # Projections of queries, keys and values
    if config.multi_latent_attention:
        # Down-projections to the latent vectors, then up-projections for every head.
        latent_width = config.kv_lora_rank + config.qk_pos_emb_head_dim
        qkv = hidden_size * latent_width
        key_and_value_width = config.qk_head_dim + config.v_head_dim
        qkv += config.kv_lora_rank * num_heads * key_and_value_width
        query_input = hidden_size
        if config.q_lora_rank is not None:
            qkv += hidden_size * config.q_lora_rank
            query_input = config.q_lora_rank
        qkv += query_input * num_heads * config.qk_width
    else:
        num_rows = num_heads + 2 * config.query_groups  # queries, keys and values
        if config.attention_output_gate:
            num_rows += num_heads
        qkv = hidden_size * num_rows * config.head_dim

    # Scores and weighted sum. Without a window, a token attends to half of the sequence on average.
    window_fraction = sum(config.window_pattern) / config.num_layers
    num_keys = window_fraction * count_attended_keys(config, seq_length)
    num_keys += (1 - window_fraction) * seq_length / 2
    scores_and_values = num_heads * (config.qk_width + config.v_width) * num_keys

    output = num_heads * config.v_width * hidden_size
    return qkv + scores_and_values + output


def _count_mlp_products(config: TransformerConfig) -> float:
    """Return the multiply-adds per token of all MLPs, including the chosen experts."""
    hidden_size = config.hidden_size
    # Up, down, and the gate if there is one
    num_matrices = 3 if config.gated else 2
    per_width = num_matrices * hidden_size

    # Dense layers
    pattern = config.moe_layer_pattern_with_mtp
    num_moe_layers = sum(pattern)
    num_dense_layers = len(pattern) - num_moe_layers
    mlps = per_width * config.ffn_size * num_dense_layers

    # Layers with experts
    if config.has_experts:
        width = config.moe_router_topk * config.moe_ffn_size
        width += config.moe_shared_expert_intermediate_size or 0
        router = hidden_size * config.experts
        mlps += num_moe_layers * (per_width * width + router)
    return mlps


def count_attended_keys(config: TransformerConfig, seq_length: int) -> float:
    """Return the mean number of keys per token in a layer with a window.

    Without a window, it is half of the sequence.
    """
    # Position i attends to min(i, window) keys: a ramp of length window, then a constant.
    window = seq_length
    if config.window_size is not None and config.window_size[0] >= 0:
        window = min(config.window_size[0], seq_length)
    return window - window * window / (2 * seq_length)


# ---- Timers of the phases of an iteration ----

TITLES = {  # by --timing-log-option
    "max": "max time across ranks",
    "minmax": "(min, max) time across ranks",
    "all": "times across ranks",
}


class Timers:
    """Timers that accumulate seconds by name; a timer above `level` is free.

    On CUDA an active timer synchronizes the device at both ends, so that only level 0 lets Python
    run ahead of the device. While `traced`, the blocks of all levels are ranges in the profiler's
    trace.
    """

    def __init__(self, level: int, option: str, device: torch.device) -> None:
        self.level = level
        self._option = option
        self._device = device
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self.traced = False

    @contextmanager
    def __call__(self, name: str, level: int = 1) -> Iterator[None]:
        """Time the block under `name`."""
        # Ranges cost microseconds, so they exist only while a trace is recorded.
        trace = torch.profiler.record_function(name) if self.traced else nullcontext()
        with trace:
            if level > self.level:
                yield
                return
            start = self._now()
            yield
            self._seconds[name] += self._now() - start

    def _now(self) -> float:
        """Return the time, after the kernels that are queued on the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()  # kernels are asynchronous
        return time.perf_counter()

    def take(self) -> dict[str, list[float]]:
        """Return the seconds of every rank by name, and reset the timers.

        Collective if the level is above 0.
        """
        if self.level == 0:
            return {}
        gathered = gather_objects(dict(self._seconds))
        self._seconds.clear()

        # Stages have different timers: the others' are 0.
        num_ranks = len(gathered)
        result: dict[str, list[float]] = {}
        for rank, seconds_by_name in enumerate(gathered):
            for name, seconds in seconds_by_name.items():
                times = result.setdefault(name, [0.0] * num_ranks)
                times[rank] = seconds
        return result

    def report(self, taken: dict[str, list[float]], iterations: int) -> str:
        """Return log lines for the result of `take`, in milliseconds per iteration."""
        if not taken:
            return ""
        rows = [f"{TITLES[self._option]} (ms):"]
        for name, seconds in taken.items():
            milliseconds = [1000 * total / iterations for total in seconds]
            label = f"{name} "
            times = _format_times(milliseconds, self._option)
            rows.append(f"    {label:.<46}: {times}")
        return "\n".join(rows)


def _format_times(times: Sequence[float], option: str) -> str:
    """Format the times of all ranks as --timing-log-option specifies."""
    if option == "max":
        return f"{max(times):.2f}"
    if option == "minmax":
        return f"({min(times):.2f}, {max(times):.2f})"
    texts = [f"rank {rank}: {time:.2f}" for rank, time in enumerate(times)]
    return "  ".join(texts)

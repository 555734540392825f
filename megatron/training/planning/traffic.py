"""Bytes that a rank communicates per step, counted from the messages of the layers.

Per micro-batch and layer there are two all-reduces over TP in forward and two in backward (Shoeybi
et al. 2019). With sequence parallelism, each becomes an all-gather and a reduce-scatter, and the
inputs of column-parallel layers are gathered once more in backward (Korthikanti et al. 2022).
Embedding and loss add theirs. Per step, DP reduces gradients and gathers parameters. Not counted
are scalars, the two numbers per token of the loss, and gradients of norms.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from megatron.core.parallel_state import ParallelState
from megatron.core.pipeline_parallel.schedules import schedule
from megatron.core.transformer.moe import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.run_config import Config
from megatron.training.planning.activation_memory import ActivationMemory
from megatron.training.planning.meta_model import MetaChunk

AXES = ("tp", "cp", "pp", "dp", "ep", "edp", "embedding")


@dataclass(frozen=True)
class Traffic:
    """Bytes of the whole tensors that a rank passes to the collectives of an axis of `size`
    ranks.
    """

    size: int
    all_reduce: int = 0
    all_gather: int = 0
    reduce_scatter: int = 0
    send: int = 0
    all_to_all: int = 0

    @property
    def wire(self) -> float:
        """Bytes that leave the rank with ring algorithms: (n - 1) / n of a gather or scatter, twice
        that for an all-reduce.
        """
        once = self.all_gather + self.reduce_scatter + self.all_to_all
        return (self.size - 1) / self.size * (2 * self.all_reduce + once) + self.send


def plan_traffic(
    config: Config,
    ps: ParallelState,
    chunks: list[MetaChunk],
    activations: ActivationMemory,
    num_microbatches: int,
) -> dict[str, Traffic]:
    """Return the traffic of a step by axis, on the rank of `ps` with these chunks.

    `ep` is tokens to their experts and back, `edp` gradients and parameters of experts that are
    sharded over other ranks than the rest, `embedding` the gradient of the tied word embedding
    between the first and the last stage.
    """
    group_size = config.parallel.microbatch_group_size_per_vp_stage
    ticks = schedule(ps.pp.rank, ps.pp.size, len(chunks), num_microbatches, group_size=group_size)
    num_sends = sum(tick.send is not None for tick in ticks)
    return {
        "tp": _count_tensor_parallel(config, chunks, activations, num_microbatches),
        "cp": _count_context_parallel(config, chunks, activations, num_microbatches),
        "pp": Traffic(ps.pp.size, send=num_sends * activations.residual),
        "dp": _count_data_parallel(config, chunks, ps.dp_cp.size, is_expert=False),
        "embedding": _count_tied_embedding(config, chunks, ps.dp_cp.size),
        "ep": _count_expert_parallel(config, ps, chunks, activations, num_microbatches),
        "edp": _count_data_parallel(config, chunks, ps.edp.size, is_expert=True),
    }


def _count_tensor_parallel(
    config: Config, chunks: list[MetaChunk], activations: ActivationMemory, num_microbatches: int
) -> Traffic:
    size = config.parallel.tp_size
    if size == 1:
        return Traffic(1)
    model = config.model
    # In units of `[s/cp, b, h]`; the input of latent attention is narrower.
    whole = activations.whole * num_microbatches
    attention_input = (_latent_width(model) or model.hidden_size) / model.hidden_size
    num_last = sum(chunk.post_process for chunk in chunks)
    num_ends = sum(chunk.pre_process for chunk in chunks) + num_last
    reductions = float(num_ends)
    gathers = float(num_ends + num_last)  # the loss has another one
    for chunk in chunks:
        num_recomputed = activations.count_recomputed_layers(chunk.num_layers)
        for number, kind in enumerate(chunk.kinds):
            # Experts themselves are not split over TP like other layers.
            mlp = not kind.experts or model.has_shared_experts
            twice = number < num_recomputed
            mlp_again = mlp and activations.recomputes_mlp(kind)
            heads_again = attention_input if model.recomputes("mla_up_proj") else 0.0
            reductions += (1 + twice) * (1 + mlp) + attention_input + mlp + mlp_again
            gathers += (2 + twice) * (attention_input + mlp) + 1 + mlp + mlp_again + heads_again
    if not config.parallel.sequence_parallel:
        return Traffic(size, all_reduce=round(reductions * whole))
    return Traffic(
        size, all_gather=round(gathers * whole), reduce_scatter=round(reductions * whole)
    )


def _latent_width(config: TransformerConfig) -> int:
    """Return the width of the compressed queries and keys of latent attention; 0 without it."""
    if not config.multi_latent_attention:
        return 0
    query = config.hidden_size if config.q_lora_rank is None else config.q_lora_rank
    return query + config.kv_lora_rank + config.qk_pos_emb_head_dim


def _count_context_parallel(
    config: Config, chunks: list[MetaChunk], activations: ActivationMemory, num_microbatches: int
) -> Traffic:
    """Count keys and values, which are exchanged again in backward, when their gradients return;
    or, for a2a, all heads in both directions.
    """
    size = config.parallel.cp_size
    if size == 1:
        return Traffic(1)
    # By --cp-comm-type.
    exchanges = Counter[str]()
    layers = Counter[str]()
    for chunk in chunks:
        num_recomputed = activations.count_recomputed_layers(chunk.num_layers)
        for number, kind in enumerate(chunk.kinds):
            comm_type = kind.cp_comm_type
            recomputes_core = comm_type != "a2a" and config.model.recomputes("core_attn")
            twice = number < num_recomputed or recomputes_core
            layers[comm_type] += num_microbatches
            exchanges[comm_type] += (2 + twice) * num_microbatches
    key_values = activations.key_values
    all_heads = key_values + 2 * activations.per_head * config.model.num_attention_heads
    return Traffic(
        size,
        all_to_all=exchanges["a2a"] * all_heads,
        send=(exchanges["p2p"] * (size - 1) + layers["p2p"] * size) * key_values,
        all_gather=exchanges["all_gather"] * size * key_values,
        reduce_scatter=layers["all_gather"] * size * key_values,
    )


def _count_expert_parallel(
    config: Config,
    ps: ParallelState,
    chunks: list[MetaChunk],
    activations: ActivationMemory,
    num_microbatches: int,
) -> Traffic:
    """Count tokens to k experts and back, in forward and backward; or all tokens to all ranks."""
    model = config.model
    size = ps.experts.size
    if not model.has_experts or size == 1:
        return Traffic(1)
    num_layers = 0
    num_recomputed = 0
    for chunk in chunks:
        num_layers += sum(isinstance(module, MoELayer) for module in chunk.module.modules())
        num_recomputed += activations.count_recomputed_layers(chunk.num_layers)
    passes = num_microbatches * (2 * num_layers + min(num_recomputed, num_layers))
    if model.moe_token_dispatcher_type == "alltoall":
        rows = passes * 2 * model.moe_router_topk * ps.etp.size * activations.residual
        return Traffic(size, all_to_all=rows)
    whole = passes * size * activations.residual
    return Traffic(size, all_gather=whole, reduce_scatter=whole)


def _count_data_parallel(
    config: Config, chunks: list[MetaChunk], size: int, is_expert: bool
) -> Traffic:
    if size == 1:
        return Traffic(1)
    gradients = 0
    weights = 0
    grad_itemsize = config.ddp.grad_dtype(config.model.params_dtype).itemsize
    for chunk in chunks:
        for buffer in chunk.buffers:
            if buffer.is_expert is is_expert:
                gradients += grad_itemsize * buffer.numel
                weights += buffer.itemsize * buffer.numel
    if not config.ddp.use_distributed_optimizer:
        return Traffic(size, all_reduce=gradients)
    return Traffic(size, all_gather=weights, reduce_scatter=gradients)


def _count_tied_embedding(config: Config, chunks: list[MetaChunk], dp_size: int) -> Traffic:
    numel = 0
    for chunk in chunks:
        for bucket in chunk.buckets:
            if any(span.spec.info.shared_embedding for span in bucket.spans):
                numel += bucket.numel
    if numel == 0:
        return Traffic(1)
    num_shards = dp_size if config.ddp.use_distributed_optimizer else 1
    return Traffic(2, all_reduce=4 * numel // num_shards)

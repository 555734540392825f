"""What one training step costs: floating-point operations, and bytes that one rank exchanges by axis.

Bytes are counted from what the layers send.
Per micro batch and layer, two sums over TP forward and two backward (Shoeybi et al. 2019); under sequence parallelism
each becomes a gather and a scatter, and the inputs of the column-parallel layers are gathered once more in backward
(Korthikanti et al. 2022). Embedding and loss add theirs. Per step, DP reduces gradients and gathers parameters.
Left out are scalars, the loss's two numbers per token, and gradients of norms.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from megatron.core.parallel_state import ParallelState
from megatron.core.pipeline_parallel.schedules import schedule
from megatron.core.transformer.moe import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.run_config import Config
from megatron.training.planning.activation_memory import ActivationMemory
from megatron.training.planning.empty_model import EmptyChunk


def model_flops_per_token(config: TransformerConfig, seq_length: int, vocab_size: int) -> float:
    """Operations of forward and backward per token: 2 per multiply-add, backward twice the forward.

    Counts the matrix products that the mathematics needs: projections, MLP, attention over the keys that the causal
    mask (and the window) leaves, logits. Neither recomputed activations nor element-wise work count
    (Chowdhery et al. 2022, "PaLM", appendix B; the convention of Megatron-LM's TFLOP/s).
    """
    heads = config.num_attention_heads
    qkv = config.hidden_size * (heads + 2 * config.query_groups) * config.head_dim
    if config.multi_latent_attention:
        query, latent = config.q_lora_rank, config.kv_lora_rank
        qkv = config.hidden_size * (latent + config.qk_pos_emb_head_dim)
        qkv += latent * heads * (config.qk_head_dim + config.v_head_dim)
        qkv += (query or config.hidden_size) * heads * config.qk_width + config.hidden_size * (query or 0)
    windows = sum(config.window_pattern) / config.num_layers
    keys = windows * attended_keys(config, seq_length) + (1 - windows) * seq_length / 2
    scores_and_values = heads * (config.qk_width + config.v_width) * keys
    projection = heads * config.v_width * config.hidden_size
    per_width = (3 if config.gated else 2) * config.hidden_size
    mlps = per_width * config.ffn_size * (config.num_layers - sum(config.moe_layer_pattern))
    if config.has_experts:  # those that a token goes to
        widths = config.moe_router_topk * config.moe_ffn_size + (config.moe_shared_expert_intermediate_size or 0)
        mlps += sum(config.moe_layer_pattern) * (per_width * widths + config.hidden_size * config.experts)
    logits = config.hidden_size * vocab_size
    return 6 * (config.num_layers * (qkv + scores_and_values + projection) + mlps + logits)


def attended_keys(config: TransformerConfig, seq_length: int) -> float:
    """Keys that a token sees on average in a layer with the window, if the model has one: at most half the sequence."""
    left = seq_length if config.window_size is None or config.window_size[0] < 0 else config.window_size[0]
    left = min(left, seq_length)
    return left - left * left / (2 * seq_length)


@dataclass(frozen=True)
class Traffic:
    """Bytes of the whole tensors that a rank hands to the operations of one axis of `size` ranks."""

    size: int
    all_reduce: int = 0
    all_gather: int = 0
    reduce_scatter: int = 0
    send: int = 0
    all_to_all: int = 0

    @property
    def wire(self) -> float:
        """Bytes that leave the rank, with ring algorithms: (n - 1) / n of a gather or scatter, twice that of a sum."""
        once = self.all_gather + self.reduce_scatter + self.all_to_all
        return (self.size - 1) / self.size * (2 * self.all_reduce + once) + self.send


def plan_traffic(
    config: Config, ps: ParallelState, chunks: list[EmptyChunk], activations: ActivationMemory, num_microbatches: int
) -> dict[str, Traffic]:
    """A step's traffic by axis on the rank of `ps`, whose model is `chunks`.

    `embedding` is the tied word embedding's gradient, between the first and the last stage; `ep` are tokens to their
    experts and back; `edp` gradients and parameters of experts that are split in another way than the rest.
    """
    group_size = config.parallel.microbatch_group_size_per_vp_stage
    ticks = schedule(ps.pp.rank, ps.pp.size, len(chunks), num_microbatches, group_size=group_size)
    sends = sum(tick.send is not None for tick in ticks)
    return {
        "tp": _tensor_parallel(config, chunks, activations, num_microbatches),
        "cp": _context_parallel(config, chunks, activations, num_microbatches),
        "pp": Traffic(ps.pp.size, send=sends * activations.residual),
        "dp": _data_parallel(config, chunks, ps.dp_cp.size, expert=False),
        "embedding": _tied_embedding(config, chunks, ps.dp_cp.size),
        "ep": _expert_parallel(config, ps, chunks, activations, num_microbatches),
        "edp": _data_parallel(config, chunks, ps.edp.size, expert=True),
    }


def _tensor_parallel(
    config: Config, chunks: list[EmptyChunk], activations: ActivationMemory, microbatches: int
) -> Traffic:
    size = config.parallel.tp_size
    if size == 1:
        return Traffic(1)
    ends = sum(chunk.pre_process + chunk.post_process for chunk in chunks)
    # In units of `[s/cp, b, h]`; what enters latent attention is narrower.
    whole = activations.whole * microbatches
    entering = (_latent_width(config.model) or config.model.hidden_size) / config.model.hidden_size
    sums = float(ends)
    gathers = float(ends + sum(chunk.post_process for chunk in chunks))  # the loss's among them
    for chunk in chunks:
        again = activations.recomputed_layers(chunk.num_layers)
        for number, kind in enumerate(chunk.kinds):
            # Experts themselves are not split over TP as others are.
            mlp = not kind.experts or config.model.has_shared_experts
            twice, mlp_again = number < again, mlp and activations.mlp_again(kind)
            heads_again = entering if config.model.recomputes("mla_up_proj") else 0.0
            sums += (1 + twice) * (1 + mlp) + entering + mlp + mlp_again
            gathers += (2 + twice) * (entering + mlp) + 1 + mlp + mlp_again + heads_again
    if not config.parallel.sequence_parallel:
        return Traffic(size, all_reduce=round(sums * whole))
    return Traffic(size, all_gather=round(gathers * whole), reduce_scatter=round(sums * whole))


def _latent_width(config: TransformerConfig) -> int:
    """Width of what latent attention's heads come from; 0 for other attention."""
    if not config.multi_latent_attention:
        return 0
    query = config.hidden_size if config.q_lora_rank is None else config.q_lora_rank
    return query + config.kv_lora_rank + config.qk_pos_emb_head_dim


def _context_parallel(
    config: Config, chunks: list[EmptyChunk], activations: ActivationMemory, microbatches: int
) -> Traffic:
    """Keys and values, exchanged again in backward, where their gradients return; or all heads there and back."""
    size, own = config.parallel.cp_size, activations.key_values
    if size == 1:
        return Traffic(1)
    fetched, layers = Counter[str](), Counter[str]()  # by --cp-comm-type
    for chunk in chunks:
        again = activations.recomputed_layers(chunk.num_layers)
        for number, kind in enumerate(chunk.kinds):
            way = kind.cp_comm_type
            twice = number < again or (way != "a2a" and config.model.recomputes("core_attn"))
            layers[way] += microbatches
            fetched[way] += (2 + twice) * microbatches
    there_and_back = own + 2 * activations.per_head * config.model.num_attention_heads
    return Traffic(
        size,
        all_to_all=fetched["a2a"] * there_and_back,
        send=(fetched["p2p"] * (size - 1) + layers["p2p"] * size) * own,
        all_gather=fetched["all_gather"] * size * own,
        reduce_scatter=layers["all_gather"] * size * own,
    )


def _expert_parallel(
    config: Config, ps: ParallelState, chunks: list[EmptyChunk], activations: ActivationMemory, microbatches: int
) -> Traffic:
    """Every token goes to k experts and comes back, forward and backward; or all tokens go to all ranks."""
    model, size = config.model, ps.experts.size
    if not model.has_experts or size == 1:
        return Traffic(1)
    layers = sum(isinstance(module, MoELayer) for chunk in chunks for module in chunk.module.modules())
    again = sum(activations.recomputed_layers(chunk.num_layers) for chunk in chunks)
    passes = microbatches * (2 * layers + min(again, layers))
    if model.moe_token_dispatcher_type == "alltoall":
        rows = passes * 2 * model.moe_router_topk * ps.etp.size * activations.residual
        return Traffic(size, all_to_all=rows)
    whole = passes * size * activations.residual
    return Traffic(size, all_gather=whole, reduce_scatter=whole)


def _data_parallel(config: Config, chunks: list[EmptyChunk], size: int, expert: bool) -> Traffic:
    if size == 1:
        return Traffic(1)
    buffers = [buffer for chunk in chunks for buffer in chunk.buffers if buffer.expert is expert]
    gradients = config.ddp.grad_dtype(config.model.params_dtype).itemsize * sum(buffer.numel for buffer in buffers)
    if not config.ddp.use_distributed_optimizer:
        return Traffic(size, all_reduce=gradients)
    weights = sum(buffer.numel * buffer.itemsize for buffer in buffers)
    return Traffic(size, all_gather=weights, reduce_scatter=gradients)


def _tied_embedding(config: Config, chunks: list[EmptyChunk], dp_size: int) -> Traffic:
    tied = [
        bucket.numel
        for chunk in chunks
        for bucket in chunk.buckets
        if any(span.spec.info.shared_embedding for span in bucket.spans)
    ]
    if not tied:
        return Traffic(1)
    return Traffic(2, all_reduce=4 * sum(tied) // (dp_size if config.ddp.use_distributed_optimizer else 1))


def save_interval(cost: float, mtbf: float) -> float:
    """Seconds of training between saves that lose least, if a save costs `cost` seconds and the mean time between
    failures is `mtbf` seconds (J. T. Daly, A higher order estimate of the optimum checkpoint interval, 2006)."""
    if cost >= 2 * mtbf:
        return mtbf
    ratio = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost

"""Bytes that a rank communicates per step, counted from the messages of the layers.

Per micro-batch and layer there are two all-reduces over TP in forward and two in backward (Shoeybi
et al. 2019). With sequence parallelism, each becomes an all-gather and a reduce-scatter, and the
inputs of column-parallel layers are gathered once more in backward (Korthikanti et al. 2022).
Embedding and loss have collectives of their own. Per step, DP reduces gradients and gathers
parameters. Scalars, the two numbers per token of the loss, and gradients of norms are not counted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from megatron.core.parallel_state import ParallelState
from megatron.core.transformer.moe import MoELayer
from megatron.core.transformer.transformer_config import LayerKind, TransformerConfig
from megatron.planning.activation_memory import FP32, ActivationMemory
from megatron.planning.meta_model import MetaChunk
from megatron.training.config.run_config import Config

AXES = ("tp", "cp", "pp", "dp", "ep", "edp", "embedding")


@dataclass(frozen=True)
class Traffic:
    """Bytes of the unsharded tensors in the collectives of an axis of `size` ranks."""

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
        passed_once = self.all_gather + self.reduce_scatter + self.all_to_all
        passed_twice = self.all_reduce  # a reduce-scatter and an all-gather
        leaving_fraction = (self.size - 1) / self.size
        collectives = leaving_fraction * (passed_once + 2 * passed_twice)
        return collectives + self.send


def plan_traffic(
    config: Config,
    ps: ParallelState,
    chunks: list[MetaChunk],
    activations: ActivationMemory,
    num_microbatches: int,
) -> dict[str, Traffic]:
    """Return the traffic of a step by axis, on the rank of `ps` with these chunks.

    `ep` moves tokens to their experts and back. `edp` reduces gradients and gathers parameters of
    experts, which are sharded over other ranks than the rest. `embedding` reduces the gradient of
    the tied word embedding between the first and the last stage.
    """
    # Every message between stages is one tensor of the residual stream, or its gradient.
    num_sends = count_sends(ps.pp.rank, ps.pp.size, len(chunks), num_microbatches)
    # Bytes and group size of each axis.
    return {
        "tp": _count_tensor_parallel(config, chunks, activations, num_microbatches),
        "cp": _count_context_parallel(config, chunks, activations, num_microbatches),
        "pp": Traffic(ps.pp.size, send=num_sends * activations.residual),
        "dp": _count_data_parallel(config, chunks, ps.dp_cp.size, is_expert=False),
        "embedding": _count_tied_embedding(config, chunks, ps.dp_cp.size),
        "ep": _count_expert_parallel(config, ps, chunks, activations, num_microbatches),
        "edp": _count_data_parallel(config, chunks, ps.edp.size, is_expert=True),
    }


def count_sends(pp_rank: int, pp_size: int, vpp_size: int, num_microbatches: int) -> int:
    """Return the number of messages that a stage sends to its neighbors in a step.

    Every pass of a micro-batch through a chunk sends its result, except forward of the last chunk
    of the model and backward of the first one.
    """
    num_passes = 2 * vpp_size
    num_ends = (pp_rank == 0) + (pp_rank == pp_size - 1)
    return num_microbatches * (num_passes - num_ends)


@dataclass
class _Messages:
    """Messages of a tensor-parallel group for one micro-batch, in units of `[s/cp, b, h]`.

    A layer gathers its input in forward, and again in backward; in backward the gradient of the
    input is reduced. It reduces its output in forward, and gathers the gradient of the output.
    """

    reductions: float = 0.0
    gathers: float = 0.0
    exchanges: int = 0  # of the columns of one projection, or gathers of them

    def add_ends(self, config: Config, chunk: MetaChunk) -> None:
        """Add the embeddings and losses of a chunk, and projections for multi-token prediction."""
        # Embedding and loss have one of each, and the loss gathers its input again. Layers for
        # multi-token prediction have an embedding and a loss each.
        num_mtp_layers = len(chunk.mtp_kinds)
        num_embeddings = chunk.pre_process + num_mtp_layers
        num_losses = chunk.post_process + num_mtp_layers
        self.reductions += num_embeddings + num_losses
        self.gathers += num_embeddings + 2 * num_losses

        # The projection for multi-token prediction gathers two inputs in each pass, and reduces
        # their gradients.
        num_mtp_forwards = num_mtp_layers * (1 + config.model.recomputes_mtp)
        self.reductions += 2 * num_mtp_layers
        self.gathers += 2 * (num_mtp_forwards + num_mtp_layers)
        self.exchanges += num_mtp_forwards
        if config.parallel.sequence_parallel:
            self.exchanges += num_mtp_layers

    def add_attention(self, model: TransformerConfig, num_forwards: int) -> None:
        """Add the attention of a layer whose forward runs `num_forwards` times."""
        # The input is narrower if it is latent.
        input_width = _get_attention_input_width(model) / model.hidden_size
        num_gathered_inputs = num_forwards + 1
        self.reductions += num_forwards + input_width
        self.gathers += num_gathered_inputs * input_width + 1
        if model.recomputes("mla_up_proj"):
            self.gathers += input_width

    def add_mlp(self, num_forwards: int) -> None:
        """Add the MLP of a layer whose forward runs `num_forwards` times."""
        self.reductions += num_forwards + 1
        self.gathers += num_forwards + 2


def _count_tensor_parallel(
    config: Config,
    chunks: list[MetaChunk],
    activations: ActivationMemory,
    num_microbatches: int,
) -> Traffic:
    """Return the traffic of a rank's tensor-parallel group in a step."""
    size = config.parallel.tp_size
    if size == 1:
        return Traffic(1)
    model = config.model

    # Count the messages of one micro-batch.
    messages = _Messages()
    for chunk in chunks:
        messages.add_ends(config, chunk)
        for kind, num_forwards in _list_layers(chunk, activations):
            # Recomputed layers run forward again as a part of backward.
            messages.add_attention(model, num_forwards)
            # Experts themselves are not split over TP like other layers.
            has_split_mlp = not kind.experts or model.has_shared_experts
            if has_split_mlp:
                num_mlp_forwards = num_forwards + activations.recomputes_mlp(kind)
                messages.add_mlp(num_mlp_forwards)

    # Convert them to bytes of the collectives that send them.
    whole = activations.whole * num_microbatches
    reduced_bytes = round(messages.reductions * whole)
    gathered_bytes = round(messages.gathers * whole)
    exchanged_bytes = messages.exchanges * whole
    if not config.parallel.sequence_parallel:
        # Every rank has the whole sequence, so only columns are gathered.
        return Traffic(size, all_reduce=reduced_bytes, all_gather=exchanged_bytes)
    return Traffic(
        size,
        all_gather=gathered_bytes,
        reduce_scatter=reduced_bytes,
        all_to_all=exchanged_bytes // size,
    )


def _list_layers(chunk: MetaChunk, activations: ActivationMemory) -> list[tuple[LayerKind, int]]:
    """Return the kind of each layer of a chunk, and how often its forward runs."""
    layers = []
    num_recomputed = activations.count_recomputed_layers(chunk.num_layers)
    for number, kind in enumerate(chunk.kinds):
        layers.append((kind, 2 if number < num_recomputed else 1))
    for kind in chunk.mtp_kinds:
        layers.append((kind, 1 + activations.config.recomputes_mtp))
    return layers


def _get_attention_input_width(config: TransformerConfig) -> int:
    """Return the width of the input of attention that is communicated over TP.

    Latent attention communicates the compressed queries and keys.
    """
    if not config.multi_latent_attention:
        return config.hidden_size
    query_width = config.q_lora_rank
    if query_width is None:
        query_width = config.hidden_size
    return query_width + config.kv_lora_rank + config.qk_pos_emb_head_dim


def _count_context_parallel(
    config: Config,
    chunks: list[MetaChunk],
    activations: ActivationMemory,
    num_microbatches: int,
) -> Traffic:
    """Count keys and values, which are exchanged in forward and again in backward, and their
    gradients; for a2a, all heads in both directions.
    """
    size = config.parallel.cp_size
    if size == 1:
        return Traffic(1)

    # Forward exchanges and backward passes, by --cp-comm-type.
    exchanges = Counter[str]()
    layers = Counter[str]()
    for chunk in chunks:
        for kind, num_forwards in _list_layers(chunk, activations):
            comm_type = kind.cp_comm_type
            recomputes_core = comm_type != "a2a" and config.model.recomputes("core_attn")
            runs_forward_twice = num_forwards > 1 or recomputes_core
            num_passes = 2 + runs_forward_twice
            layers[comm_type] += num_microbatches
            exchanges[comm_type] += num_passes * num_microbatches

    # a2a: queries, keys, values and output.
    key_values = activations.key_values
    queries_and_output = 2 * activations.per_head * config.model.num_attention_heads
    all_heads = key_values + queries_and_output
    # p2p: keys and values visit all other ranks; their gradients also return.
    num_hops = exchanges["p2p"] * (size - 1) + layers["p2p"] * size
    # all_gather: of the keys and values of all ranks.
    all_key_values = size * key_values
    return Traffic(
        size,
        all_to_all=exchanges["a2a"] * all_heads,
        send=num_hops * key_values,
        all_gather=exchanges["all_gather"] * all_key_values,
        reduce_scatter=layers["all_gather"] * all_key_values,
    )


def _count_expert_parallel(
    config: Config,
    ps: ParallelState,
    chunks: list[MetaChunk],
    activations: ActivationMemory,
    num_microbatches: int,
) -> Traffic:
    """Count tokens to their k experts and back, in forward and backward; or, with the allgather
    dispatcher, all tokens to all ranks.
    """
    model = config.model
    size = ps.experts.size
    if not model.has_experts or size == 1:
        return Traffic(1)
    # Count from the modules: dense layers do not exchange tokens.
    num_layers = 0
    num_recomputed = 0
    for chunk in chunks:
        for module in chunk.module.modules():
            num_layers += isinstance(module, MoELayer)
        for _, num_forwards in _list_layers(chunk, activations):
            num_recomputed += num_forwards - 1
    num_recomputed = min(num_recomputed, num_layers)
    passes = num_microbatches * (2 * num_layers + num_recomputed)
    if model.moe_token_dispatcher_type == "alltoall":
        # Each token goes to all ETP ranks of each of its experts, and the results return.
        num_copies = 2 * model.moe_router_topk * ps.etp.size
        rows = passes * num_copies * activations.residual
        return Traffic(size, all_to_all=rows)
    whole = passes * size * activations.residual
    return Traffic(size, all_gather=whole, reduce_scatter=whole)


def _count_data_parallel(
    config: Config,
    chunks: list[MetaChunk],
    size: int,
    is_expert: bool,
) -> Traffic:
    """Count the reduction of gradients, and the gathering of weights from optimizer shards."""
    if size == 1:
        return Traffic(1)
    # The buffers include the padding of buckets, which is communicated, too.
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
    """Count the fp32 gradients of buckets with the tied embedding, which two stages reduce."""
    numel = 0
    for chunk in chunks:
        for bucket in chunk.buckets:
            if any(span.spec.info.shared_embedding for span in bucket.spans):
                numel += bucket.numel
    if numel == 0:
        return Traffic(1)
    if config.ddp.use_distributed_optimizer:
        # Gradients have been reduced over DP before, so that a rank has only its shard.
        numel //= dp_size
    return Traffic(2, all_reduce=FP32 * numel)

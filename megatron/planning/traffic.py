"""Bytes that a rank communicates per step.

`pass_costs` measures the collectives of the passes of a micro-batch. Per step, DP reduces gradients
and gathers parameters, and TP sums gradients that are partial. Scalars are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.core.parallel_state import ParallelState
from megatron.planning.meta_model import FP32, MetaChunk
from megatron.planning.pass_costs import PassCosts, list_parts
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
    costs: PassCosts,
    num_microbatches: int,
) -> dict[str, Traffic]:
    """Return the traffic of a step by axis, on the rank of `ps` with these chunks.

    `ep` moves tokens to their experts and back. `edp` reduces gradients and gathers parameters of
    experts, which are sharded over other ranks than the rest. `embedding` reduces the gradient of
    the tied word embedding between the first and the last stage.
    """
    # Every message between stages is one tensor of the residual stream, or its gradient.
    num_sends = count_sends(ps.pp.rank, ps.pp.size, len(chunks), num_microbatches)
    traffic = {
        "tp": Traffic(ps.tp.size, all_reduce=_count_partial_gradients(chunks, ps.tp.size)),
        "cp": Traffic(ps.cp.size),
        "pp": Traffic(ps.pp.size, send=num_sends * costs.message_bytes),
        "dp": _count_data_parallel(config, chunks, ps.dp_cp.size, is_expert=False),
        "embedding": _count_tied_embedding(config, chunks, ps.dp_cp.size),
        "ep": Traffic(ps.experts.size if config.model.has_experts else 1),
        "edp": _count_data_parallel(config, chunks, ps.edp.size, is_expert=True),
    }
    # Collectives of the passes
    for chunk in chunks:
        for part in list_parts(config.model, chunk):
            for (axis, operation), sent in costs.measure(part).sent.items():
                total = getattr(traffic[axis], operation) + num_microbatches * sent
                traffic[axis] = replace(traffic[axis], **{operation: total})
    return traffic


def _count_partial_gradients(chunks: list[MetaChunk], tp_size: int) -> int:
    """Count the bytes of fp32 gradients that are summed over TP.

    They are those of parameters that all ranks have, but use for a part of a sequence or of the
    heads: norms, learned positions, and matrices of adapters that TP does not split.
    """
    if tp_size == 1:
        return 0
    numel = 0
    for chunk in chunks:
        for buffer in chunk.buffers:
            for bucket in buffer.buckets:
                for span in bucket.spans:
                    if span.spec.info.partial_grad:
                        numel += span.spec.numel // buffer.num_shards
    return FP32 * numel


def count_sends(pp_rank: int, pp_size: int, vpp_size: int, num_microbatches: int) -> int:
    """Return the number of messages that a stage sends to its neighbors in a step.

    Every pass of a micro-batch through a chunk sends its result, except forward of the last chunk
    of the model and backward of the first one.
    """
    num_passes = 2 * vpp_size
    num_ends = (pp_rank == 0) + (pp_rank == pp_size - 1)
    return num_microbatches * (num_passes - num_ends)


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

"""What one rank holds: its model, built without memory, and the bytes of activations that a pass
through it keeps.

The model is on torch's meta device, its buffers planned by the code that plans them in training.
Activations are counted from what the layers keep for backward and hold while they compute it. The
method is that of Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer
Models"); the terms are those of this code, which keeps fewer: a norm its input, a linear layer its
input, attention query, key, value, output and one number per row, the gated MLP one input, the loss
its logits once. Assumed is a fused attention kernel, and dropout with a byte per element, as on
CUDA.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed.param_and_grad_buffer import (
    BucketPlan,
    ParamGroup,
    ParamSpec,
    plan_buffer,
)
from megatron.core.models import make_chunk_specs
from megatron.core.module import MegatronModule, param_info
from megatron.core.parallel_state import ParallelConfig, ParallelState
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallelRng,
    compute_padded_vocab_size,
    get_loss_chunk_elements,
)
from megatron.core.transformer.attention.core import supports_grouped_heads
from megatron.core.transformer.attention.kernels import SCORES_AT_ONCE
from megatron.core.transformer.grouped_linear import GroupedLinear
from megatron.core.transformer.transformer_config import (
    LOCAL_BACKEND_FIELDS,
    LayerKind,
    TransformerConfig,
)
from megatron.training.config.run_config import Config, ModelProvider

_LINEAR = (ColumnParallelLinear, RowParallelLinear, GroupedLinear)


@dataclass(frozen=True)
class EmptyBuffer:
    """The parameters of a chunk that the same ranks hold."""

    buckets: tuple[BucketPlan, ...]
    num_shards: int
    """Parts of equal size that gradients and optimizer are cut into; 1 without the distributed
    optimizer.
    """
    expert: bool
    """It holds experts alone, which are split in another way than the rest of the model."""
    itemsize: int
    """Bytes of a weight: 1 in fp8 (--fp8-param-gather)."""
    scale_bytes: int = 0
    """Of the scales of weights in fp8."""

    @property
    def weight_bytes(self) -> int:
        return self.numel * self.itemsize + self.scale_bytes

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.buckets[-1].stop


@dataclass(frozen=True)
class EmptyChunk:
    """A pipeline chunk of a rank, without memory."""

    module: MegatronModule
    kinds: tuple[LayerKind, ...]
    """Of its layers."""
    pre_process: bool
    post_process: bool
    buffers: tuple[EmptyBuffer, ...]

    @property
    def num_layers(self) -> int:
        return len(self.kinds)

    @property
    def buckets(self) -> list[BucketPlan]:
        return [bucket for buffer in self.buffers for bucket in buffer.buckets]


def empty_chunks(
    config: Config, ps: ParallelState, model_provider: ModelProvider
) -> Iterator[EmptyChunk]:
    """The chunks of one rank on the meta device, with the layout of their buffers.

    They have the local layers: shapes are the same, and no other backend need be installed.
    """
    run = config
    config = replace(config, model=replace(config.model, **LOCAL_BACKEND_FIELDS))
    meta = torch.device("meta")
    for place in make_chunk_specs(
        config.layer_ranges(), ps, TensorParallelRng(0, ps.tp.rank), meta
    ):
        module = model_provider(config, place)
        specs = [
            ParamSpec(name, tuple(p.shape), param_info(p)) for name, p in module.named_parameters()
        ]
        specs = [spec for spec in specs if spec.info.trained]
        in_fp8 = _weights_in_fp8(run.model, module, place.layers)
        buffers = []
        for expert, fp8 in itertools.product((False, True), repeat=2):
            own = [
                spec
                for spec in specs
                if (
                    spec.info.sharding.is_expert and config.parallel.splits_experts,
                    spec.name in in_fp8,
                )
                == (expert, fp8)
            ]
            if own:
                replicas = ps.edp if expert else ps.dp_cp
                bucket_size = config.ddp.bucket_size(sum(spec.numel for spec in own), replicas.size)
                shards = replicas.size if config.ddp.use_distributed_optimizer else 1
                sizes = (
                    (1, _scale_bytes(run.model, own))
                    if fp8
                    else (run.model.params_dtype.itemsize, 0)
                )
                buffers.append(
                    EmptyBuffer(plan_buffer(own, bucket_size, shards), shards, expert, *sizes)
                )
        kinds = tuple(
            LayerKind.from_model(config.model, number, config.parallel.cp_comm_type_of(number))
            for number in place.layers
        )
        yield EmptyChunk(module, kinds, place.pre_process, place.post_process, tuple(buffers))


def _weights_in_fp8(
    config: TransformerConfig, chunk: MegatronModule, layers: Sequence[int]
) -> set[str]:
    """The names of the weights that --fp8-param-gather keeps in fp8: of all linear layers of the
    layers in fp8.
    """
    names = {name: module for name, module in chunk.named_modules() if isinstance(module, _LINEAR)}
    numbers = {f"decoder.layers.{local}.": number for local, number in enumerate(layers)}
    return {
        f"{name}.weight"
        for prefix, number in numbers.items()
        if config.fp8_param_gather and config.quantizes(number)
        for name in names
        if name.startswith(prefix)
    }


def _scale_bytes(config: TransformerConfig, specs: Sequence[ParamSpec]) -> int:
    """A scale in fp32 for each matrix, or for each of its blocks of 128 x 128."""
    block = 128 if config.fp8_recipe == "blockwise" else sys.maxsize
    return 4 * sum(
        math.prod(spec.shape[:-2]) * math.prod(-(-size // block) for size in spec.shape[-2:])
        for spec in specs
    )


class ParameterInFile(NamedTuple):
    """A parameter in a checkpoint: its key, the optimizer group that it belongs to, whether it
    holds experts.
    """

    key: str
    group: ParamGroup
    expert: bool


def stored_sizes(chunks: Iterable[EmptyChunk], whole: bool = True) -> Counter[ParameterInFile]:
    """Elements of every stored tensor, each once: of the whole model, or of these chunks' boxes."""
    sizes: Counter[ParameterInFile] = Counter()
    for chunk in chunks:
        for key, entry in chunk.module.sharded_state_dict().items():
            assert isinstance(entry, ShardedTensor) and isinstance(entry.local, nn.Parameter)
            spec = ParamSpec(key, entry.global_shape, param_info(entry.local))
            boxes = sum(box.tensor.numel() for box in entry.boxes)
            sizes[ParameterInFile(key, spec.group, spec.info.sharding.is_expert)] = (
                spec.numel if whole else boxes
            )
    return sizes


class ActivationMemory:
    """One micro-batch of `[s, b]` tokens on one tensor- and context-parallel rank; all sizes in
    bytes.

    `vocab_rows` are those of the output matrix on this rank, padding included; with `documents` attention stays within
    them (--reset-attention-mask).
    """

    def __init__(
        self,
        model: TransformerConfig,
        parallel: ParallelConfig,
        seq_length: int,
        micro_batch_size: int,
        vocab_rows: int,
        documents: bool = False,
        device_type: str = "cuda",
    ) -> None:
        self.config = model
        self.parallel = parallel
        self.seq_length = seq_length
        self.vocab_rows = vocab_rows
        self.documents = documents
        self.device_type = device_type
        self.tp_size = parallel.tp_size
        self.cp_size = parallel.cp_size
        self.sequence_parallel = parallel.sequence_parallel
        # A rank sees all of the sequence that its context-parallel rank has inside tensor-parallel
        # regions; outside of them only a part of it under sequence parallelism.
        self.tokens = seq_length * micro_batch_size // parallel.cp_size
        self.local_tokens = self.tokens // self.tp_size if self.sequence_parallel else self.tokens
        self.itemsize = model.params_dtype.itemsize
        self.whole = self.tokens * model.hidden_size * self.itemsize  # [s/cp, b, h]
        self.residual = (
            self.local_tokens * model.hidden_size * self.itemsize
        )  # between layers and stages
        self.inner = (
            self.tokens * model.ffn_size // self.tp_size * self.itemsize
        )  # [s/cp, b, ffn/tp]
        self.logits = self.tokens * vocab_rows * self.itemsize  # [s/cp, b, v/tp]
        # [s/cp, b, d] of every head, divided by TP; kernels take queries, keys and values of one
        # width.
        self.per_head = (
            self.tokens * max(model.qk_width, model.v_width) // self.tp_size * self.itemsize
        )
        self.key_values = 2 * self.per_head * model.query_groups  # of all groups on this rank
        self.context = (
            self.tokens * model.v_width * model.num_attention_heads // self.tp_size * self.itemsize
        )
        self.normalizer = 4 if model.normalization == "RMSNorm" else 8  # of a norm, per row, fp32
        self.blocks = 2 if model.gated else 1  # widths of the MLP's first matrix

    @classmethod
    def of_run(cls, config: Config, device_type: str) -> ActivationMemory:
        """That of the micro-batches of a run."""
        model = config.model
        parallel = config.parallel
        data = config.data
        assert model.vocab_size is not None
        rows = compute_padded_vocab_size(
            model.vocab_size, config.tokenizer.make_vocab_size_divisible_by, parallel.tp_size
        )
        size = config.training.micro_batch_size
        rows //= parallel.tp_size
        return cls(
            model, parallel, data.seq_length, size, rows, data.reset_attention_mask, device_type
        )

    def _exchanges_heads(self, kind: LayerKind) -> bool:
        """Attention over CP: positions are exchanged for heads, or one rank's keys are attended to
        at a time.
        """
        return self.cp_size > 1 and kind.cp_comm_type == "a2a"

    def _blockwise(self, kind: LayerKind) -> bool:
        documents = self.documents and not self.config.attention_dropout
        over_ranks = self.cp_size > 1 and not self._exchanges_heads(kind)
        return self.config.attends_in_blocks or over_ranks or documents

    def layer(self, kind: LayerKind) -> int:
        """What a layer keeps from forward to backward, its input included."""
        c = self.config
        norms = self._norms(kind)
        total = 2 * self.residual + norms * self.local_tokens * self.normalizer
        total += (
            0 if c.recomputes("layernorm") else norms * self.residual
        )  # the input of the linear layers
        if c.norm_placement == "both":
            total += 2 * (self.residual + self.local_tokens * self.normalizer)
        total += self._latents if c.multi_latent_attention else self._qk_norms
        total += self.context if c.recomputes("mla_up_proj") else self._core(kind)
        total += 0 if self.mlp_again(kind) else self._mlp(kind)
        if c.hidden_dropout:
            total += 2 * self.local_tokens * c.hidden_size
        return total

    def _core(self, kind: LayerKind) -> int:
        """What attention keeps from its queries, keys and values on, the input of its output
        projection at the end.
        """
        c = self.config
        per_head = self.per_head
        takes = self._blockwise(kind) or supports_grouped_heads(
            self.device_type, c.params_dtype, self._masked(kind)
        )
        groups = c.query_groups if takes else c.num_attention_heads
        total = per_head * (c.num_attention_heads + 2 * groups) + self.context
        if c.recomputes("core_attn"):
            return total
        if self._exchanges_heads(kind) or c.v_width < c.qk_width:
            total += (
                per_head * c.num_attention_heads
            )  # as the kernel gave it, besides as the projection takes it
        return (
            total + self.tokens * c.num_attention_heads // self.tp_size * 4 + self._layer_mask(kind)
        )  # log-sum-exp

    @property
    def _qk_norms(self) -> int:
        """The heads before and after their norm."""
        heads = (
            self.config.num_attention_heads + self.config.query_groups
            if self.config.qk_layernorm
            else 0
        )
        return self.per_head * heads + self.tokens * heads // self.tp_size * self.normalizer

    @property
    def _latents(self) -> int:
        """What latent attention's heads come from, before and after the norm; the shared part of
        the keys.
        """
        c = self.config
        widths = [width for width in (c.q_lora_rank, c.kv_lora_rank) if width is not None]
        total = self.local_tokens * (sum(widths) + c.qk_pos_emb_head_dim) * self.itemsize
        if c.recomputes("mla_up_proj"):
            return total + self.tokens * c.qk_pos_emb_head_dim * self.itemsize
        if c.qk_layernorm:
            normed = 0 if c.recomputes("layernorm") else sum(widths) * self.itemsize
            total += self.local_tokens * (normed + len(widths) * self.normalizer)
        return total

    def _mlp(self, kind: LayerKind) -> int:
        """What the MLP keeps. Experts are taken for evenly used: of each chosen expert's rows their
        input, the inner values around the activation and its product, and places.
        """
        c = self.config
        etp_size = self.parallel.etp_size
        if not kind.experts:
            return (self.blocks + 1) * self.inner
        rows = self.local_tokens * c.moe_router_topk * etp_size
        inner = rows * c.moe_ffn_size // etp_size * self.itemsize
        shared = (
            self.tokens
            * (c.moe_shared_expert_intermediate_size or 0)
            // self.tp_size
            * self.itemsize
        )
        scores = 3 * self.local_tokens * c.experts * 4
        around = self.blocks + (0 if c.recomputes("moe_act") else 2)
        return (
            rows * c.hidden_size * self.itemsize + around * inner + (self.blocks + 1) * shared
            + scores + 4 * 8 * rows
        )  # fmt: skip

    def _norms(self, kind: LayerKind) -> int:
        """Of the layer's two norms those whose results are kept: the MLP's belongs to it."""
        return 1 if self.mlp_again(kind) and not kind.experts else 2

    def mlp_again(self, kind: LayerKind) -> bool:
        """Backward computes the MLP again."""
        return self.config.recomputes("moe" if kind.experts else "mlp")

    def _masked(self, kind: LayerKind) -> bool:
        return self.documents or kind.window or self.config.position_embedding_type == "alibi"

    def _layer_mask(self, kind: LayerKind) -> int:
        """The additive form of a mask of booleans; causal order alone needs none, blocks make
        theirs again.
        """
        if self._blockwise(kind):
            return 0
        if self.documents:
            return self.tokens * self.cp_size * self.seq_length * (1 + self.itemsize)
        return self.seq_length**2 * self.itemsize if kind.window else 0

    def tables(self, kinds: Sequence[LayerKind]) -> int:
        """What the layers of a chunk keep together between iterations: rotary tables, fixed masks."""
        return sum(
            self._tables(kind)
            for kind in {self._exchanges_heads(kind): kind for kind in kinds}.values()
        )

    def _tables(self, kind: LayerKind) -> int:
        c = self.config
        total = 0
        blockwise = self._blockwise(kind)
        scores = self.seq_length**2 // self.cp_size
        if c.position_embedding_type == "rope" or c.multi_latent_attention:
            own = blockwise or c.multi_latent_attention
            width = c.qk_pos_emb_head_dim if c.multi_latent_attention else c.head_dim
            positions = self.seq_length // self.cp_size if own else self.seq_length
            total += positions * int(width * c.rotary_percent) * self.itemsize
        if c.position_embedding_type == "alibi":
            total += scores * c.num_attention_heads // self.tp_size * self.itemsize
        elif c.window_size is not None or (self.documents and (self.cp_size > 1 or not blockwise)):
            total += scores * self.itemsize if blockwise else self.seq_length**2
        return total

    def _attention_backward(self, kind: LayerKind) -> int:
        """Held by the backward pass of attention that is computed in blocks, or exchanged:
        gradients, scores.
        """
        # of the output; of queries, keys and values, before and after their exchange
        context = self.per_head * self.config.num_attention_heads
        exchange = context + 3 * (context + self.key_values) if self._exchanges_heads(kind) else 0
        if not self._blockwise(kind):
            return exchange
        queries = (
            context + context * 4 // self.itemsize + self._scores
        )  # of the output, of queries in fp32
        if self.cp_size == 1 or self._exchanges_heads(kind):
            parts = context + 2 * self.key_values  # of a block, and all together
        elif kind.cp_comm_type == "p2p":
            parts = (
                context + 5 * self.key_values
            )  # two parts on their way, two gradients, those of a block
        else:
            parts = (
                3 * self.cp_size * self.key_values
            )  # all parts, their gradients, and these in one piece
        return max(exchange, queries + parts)

    @property
    def _scores(self) -> int:
        """Of the plain kernel, which caps them, in fp32: scores, their tanh, the gradient and a
        factor of it.
        """
        if self.config.attn_logit_softcapping is None:
            return 0
        heads = self.config.num_attention_heads // self.tp_size
        of_row = (
            self.tokens
            // (self.seq_length // self.cp_size)
            * heads
            * self.seq_length
            // self.cp_size
        )
        rows = max(1, min(self.seq_length // self.cp_size, SCORES_AT_ONCE // of_row))
        return rows * of_row * (4 * 4 + (self.itemsize if self.itemsize < 4 else 0))

    def layer_backward(self, kind: LayerKind) -> int:
        """The most that the backward pass of a layer holds beyond what the layer has kept."""
        c = self.config
        normed = (
            self.residual if c.recomputes("layernorm") else 0
        )  # the norm's output and the inside of the MLP are
        mlp = 0
        if self.mlp_again(kind):
            mlp = (
                self._mlp(kind) + (2 - self._norms(kind)) * self.residual
            )  # there again for a while
        heads = (
            self._core(kind) - self.context if c.recomputes("mla_up_proj") else 0
        )  # likewise, when the MLP is gone
        weight_grad = (
            0  # a gradient that is not fp32 exists on its own before it is added to the fp32 buffer
        )
        if self.itemsize < 4:
            weight_grad = c.hidden_size * c.ffn_size // self.tp_size * self.itemsize
        gathered = self.whole if self.sequence_parallel else 0
        points = {
            # the MLP and its input are gone by then
            "attention": self._attention_backward(kind) + heads - self._mlp(kind) - self.residual,
            "second linear layer": gathered + self.inner + weight_grad,
            # gradient, its product and, in place of the input of the second linear layer, a
            # temporary
            "activation": (3 if c.gated else 1) * self.inner,
            "first linear layer": self.whole
            + (self.whole + self.residual if self.sequence_parallel else 0)
            + self.blocks * weight_grad
            - self.inner,
            # three temporaries in fp32, and the gradient in the model's type; the MLP and its input
            # are gone
            "norm": 3 * self.residual * 4 // self.itemsize - self._mlp(kind),
        }
        # the gradient of the residual stream is there throughout
        return self.residual + normed + mlp + max(points.values())

    @property
    def head(self) -> int:
        """What final norm and loss keep."""
        per_token = (
            4 + 8 + 1 + 3 * 4
        )  # sum of exponentials, column, whether it is ours; losses and mask
        return 2 * self.residual + self.logits + self.tokens * per_token + self.local_tokens * 8

    @property
    def head_backward(self) -> int:
        """What the backward pass of the loss holds beyond that: the gradient of the logits takes
        their place.
        """
        extra = self.whole
        if self.sequence_parallel:
            extra += self.whole + self.residual
        if self.itemsize < 4:
            extra += self.vocab_rows * self.config.hidden_size * self.itemsize
        if self.itemsize == 4:
            return extra
        return max(
            extra, 4 * min(get_loss_chunk_elements(self.device_type), self.logits // self.itemsize)
        )

    def kept(self, kinds: Sequence[LayerKind]) -> int:
        """What the layers of a chunk, of these kinds, keep from the forward to the backward pass of
        a micro-batch.
        """
        inputs, stored = self._recomputed(len(kinds))
        return inputs * self.residual + self._layers(kinds[len(kinds) - stored :])

    def recomputed_layers(self, num_layers: int) -> int:
        """Layers of a chunk, the first ones, whose whole forward pass runs twice."""
        _, stored = self._recomputed(num_layers)
        return num_layers - stored

    def backward(self, kinds: Sequence[LayerKind], post_process: bool) -> int:
        """The most that the backward pass of a chunk holds beyond what it has kept."""
        c = self.config
        num_layers = len(kinds)
        inputs, stored = self._recomputed(num_layers)
        head = self.head if post_process else 0
        points = [self.head_backward] if post_process else []
        points += [self.layer_backward(kind) - head for kind in set(kinds[num_layers - stored :])]
        if inputs:
            assert c.recompute_num_layers is not None
            size = min(c.recompute_num_layers, num_layers) if c.recompute_method == "uniform" else 1
            for start in range(0, num_layers - stored, size):
                group = kinds[start : start + size]
                again = self._layers(group) - self.residual  # the group's input is there
                kept = self._layers(kinds[num_layers - stored :])
                points.append(
                    again + max(self.layer_backward(kind) for kind in group) - kept - head
                )
        return max(points, default=0)  # a chunk can have the embedding alone

    def _layers(self, kinds: Sequence[LayerKind]) -> int:
        return sum(kinds.count(kind) * self.layer(kind) for kind in set(kinds))

    def _recomputed(self, num_layers: int) -> tuple[int, int]:
        """(groups of layers of which only the input is kept, layers that keep everything)."""
        c = self.config
        if c.recompute_granularity != "full":
            return 0, num_layers
        assert c.recompute_num_layers is not None
        if c.recompute_method == "uniform":
            return -(-num_layers // c.recompute_num_layers), 0
        groups = min(c.recompute_num_layers, num_layers)
        return groups, num_layers - groups

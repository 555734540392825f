"""Building blocks from Transformer Engine (`transformer_engine.pytorch` 2.8 to 2.20).

Each class derives from the local class, which defines the mathematics and creates the parameters
with their sharding and initial values. A module of Transformer Engine computes with these
parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
import yaml
from torch import Tensor, nn

from megatron.core import tensor_parallel
from megatron.core.module import param_info
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallelRng,
    apply_linear,
)
from megatron.core.tensor_parallel.layers import LinearLayout
from megatron.core.transformer.attention.core import CoreAttention
from megatron.core.transformer.grouped_linear import GroupedLinear
from megatron.core.transformer.layer_spec import LOCAL, LayerSpec
from megatron.core.transformer.norm import Norm, NormColumnParallelLinear
from megatron.core.transformer.placement import Placement
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_engine.modules import (
    STEP,
    Engine,
    EngineLinearMixin,
    TEPrecision,
)


def _get_linear_options(
    layer: ColumnParallelLinear | RowParallelLinear, mode: str
) -> dict[str, Any]:
    """Return the options of a linear layer of Transformer Engine that correspond to `layer`."""
    return {
        "bias": layer.bias is not None,
        "params_dtype": layer.weight.dtype,
        "parallel_mode": mode,
        "tp_group": layer.tp.group,
        "tp_size": layer.tp.size,
        "sequence_parallel": layer.sequence_parallel,
    }


class TEColumnParallelLinear(ColumnParallelLinear, EngineLinearMixin):
    """`te.Linear` with split rows."""

    def __init__(self, input_size: int, output_size: int, **options: Any) -> None:
        super().__init__(input_size, output_size, **options)
        te_options = _get_linear_options(self, "column")
        self.engine = Engine(self, te.Linear, input_size, output_size, **te_options)

    def project(self, x: Tensor) -> Tensor:
        return self.engine(self, x)


class TENormColumnParallelLinear(NormColumnParallelLinear, EngineLinearMixin):
    """`te.LayerNormLinear`."""

    normalizes_in_project = True

    def __init__(
        self, config: TransformerConfig, input_size: int, output_size: int, **options: Any
    ) -> None:
        super().__init__(config, input_size, output_size, **options)
        self.engine = Engine(
            self,
            te.LayerNormLinear,
            input_size,
            output_size,
            eps=config.norm_epsilon,
            normalization=config.normalization,
            zero_centered_gamma=config.apply_layernorm_1p,
            **_get_linear_options(self, "column"),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x)

    def add_and_normalize(self, hidden: Tensor, branch: Tensor | None) -> None:
        """Return None: the module computes norm and projection together."""

    def project(self, x: Tensor) -> Tensor:
        """Apply norm and projection to the input, which is not normalized."""
        return self.engine(self, x)


class TERowParallelLinear(RowParallelLinear, EngineLinearMixin):
    """`te.Linear` with split columns."""

    adds_bias_to_own_sequence = True

    def __init__(self, input_size: int, output_size: int, **options: Any) -> None:
        super().__init__(input_size, output_size, **options)
        te_options = _get_linear_options(self, "row")
        self.engine = Engine(self, te.Linear, input_size, output_size, **te_options)

    def project(self, x: Tensor) -> Tensor:
        return self.engine(self, x)


class TENorm(Norm):
    """`te.RMSNorm` or `te.LayerNorm`."""

    def __init__(self, config: TransformerConfig, size: int, **options: Any) -> None:
        super().__init__(config, size, **options)
        assert self.weight is not None, "--no-norm-weights needs --transformer-impl local"
        make = te.RMSNorm if self.normalize.rms else te.LayerNorm
        self.engine = Engine(
            self,
            make,
            size,
            params_dtype=self.weight.dtype,
            eps=self.normalize.epsilon,
            zero_centered_gamma=self.normalize.zero_centered,
        )

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.engine.module(x)
        return normed


def te_checkpoint(function: Callable[..., Any], rng: TensorParallelRng | None, *args: Any) -> Any:
    """Checkpoint activations, including the fp8 state that Transformer Engine must restore."""
    return tensor_parallel.checkpoint(function, rng, *args, by=te.checkpoint)


class TECoreAttention(CoreAttention):
    """`te.DotProductAttention`, which gets the start positions of documents instead of a mask.

    The local class computes if scores have a softcap or a sink.
    """

    def __init__(self, config: TransformerConfig, placement: Placement, **options: Any) -> None:
        super().__init__(config, placement, **options)
        attention_axis = self.cp.attention_axis
        # The module gets the heads of this rank only.
        head_ranks = placement.tp.size * self.cp.head_axis.size
        self.common_options: dict[str, Any] = {"window_size": self.mask.window}
        if self.mask.slopes is not None:
            # On the device: a copy in every call would wait for it.
            slopes = self.mask.slopes.to(device=placement.device)
            self.common_options |= {"core_attention_bias_type": "alibi", "alibi_slopes": slopes}
        if config.attends_in_blocks:
            # The local class computes.
            return
        # The ring of context parallelism alternates between two streams.
        cp_stream = None
        if attention_axis.group is not None and torch.cuda.is_available():
            cp_stream = _get_cp_stream()
        self.module = te.DotProductAttention(
            config.num_attention_heads // head_ranks,
            config.core_head_dim,
            num_gqa_groups=config.query_groups // head_ranks,
            attention_dropout=config.attention_dropout,
            attn_mask_type="causal",
            softmax_scale=self.scale,
            cp_group=attention_axis.group,
            cp_global_ranks=list(attention_axis.ranks),
            cp_stream=cp_stream,
            cp_comm_type=self.cp.comm_type,
        )

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None
    ) -> Tensor:
        if self.config.attends_in_blocks:
            return super()._attend(query, key, value, documents)
        # [s, b, heads/tp, d]
        q = query.flatten(2, 3)
        k = key.flatten(2, 3)
        v = value.flatten(2, 3)
        has_dropout = self.config.attention_dropout > 0 and self.training
        with self.rng.fork_if(has_dropout):
            if documents is not None:
                return self._attend_to_documents(q, k, v, documents)
            context: Tensor = self.module(
                q, k, v, qkv_format="sbhd", attn_mask_type="causal", **self.common_options
            )
        return context

    def _attend_to_documents(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
        """Return the context `[s, b, heads/tp * d]` of one concatenated sequence ("thd")."""
        length, batch = q.shape[:2]
        starts = find_document_starts(documents).to(q.device, non_blocking=True)
        context = self.module(
            # [b * s, heads/tp, d]
            q.transpose(0, 1).flatten(0, 1),
            k.transpose(0, 1).flatten(0, 1),
            v.transpose(0, 1).flatten(0, 1),
            qkv_format="thd",
            attn_mask_type="padding_causal",
            cu_seqlens_q=starts,
            cu_seqlens_kv=starts,
            max_seqlen_q=length,
            max_seqlen_kv=length,
            **self.common_options,
        )
        return context.view(batch, length, -1).transpose(0, 1)


@functools.cache
def _get_cp_stream() -> torch.cuda.Stream:
    """Return the stream of every other step of a ring, which all layers share."""
    return torch.cuda.Stream()


def find_document_starts(documents: Tensor) -> Tensor:
    """Return the first position of each document in the concatenated sequences, and the end, int32.

    `documents` are `[b, s]`.
    """
    # The first token of a sequence starts a document even if its number is the previous one's.
    is_start = torch.ones_like(documents, dtype=torch.bool)
    is_start[:, 1:] = documents.diff() != 0
    starts = is_start.flatten().nonzero().flatten()
    end = starts.new_tensor([documents.numel()])
    return torch.cat((starts, end)).int()


_MIN_ROWS = 32
"""Rows of zeros that replace an input without rows; a multiple that every fp8 kernel accepts."""


class TEGroupedLinear(GroupedLinear, EngineLinearMixin):
    """`te.GroupedLinear`, whose parameters (one per expert) are views of our single parameter."""

    def __init__(
        self, config: TransformerConfig, input_size: int, output_size: int, **options: Any
    ) -> None:
        super().__init__(config, input_size, output_size, **options)
        # [experts / ep, rows, columns]; the module counts inputs (columns) first
        num_experts, rows, columns = self.weight.shape
        self.engine = Engine(
            self,
            te.GroupedLinear,
            num_experts,
            columns,
            rows,
            bias=False,
            params_dtype=self.weight.dtype,
        )
        self._padding: tuple[Any, Any] | None = None
        if config.fp8 is not None:
            self._padding = (te.Fp8Padding(num_experts), te.Fp8Unpadding(num_experts))

    def project(self, x: Tensor, counts: Tensor) -> Tensor:
        self._bind_views()
        splits = counts.tolist()
        num_rows = len(x)
        if num_rows == 0:
            # Without any rows cuBLAS' grouped product may crash or hang. Rows of zeros change no
            # gradient, and with fp8 all ranks keep reducing the maxima of the same modules.
            splits[0] = _MIN_ROWS
            x = F.pad(x, (0, 0, 0, _MIN_ROWS))
        return self._multiply(x, splits)[:num_rows]

    def _multiply(self, x: Tensor, splits: list[int]) -> Tensor:
        """Return the products of `splits` rows with each matrix."""
        if STEP.calibration is not None:
            STEP.calibration.record_experts(self, x, splits)
            with te.fp8_autocast(enabled=False):
                return self.engine(self, x, splits)
        if self._padding is None:
            return self.engine(self, x, splits)
        # The fp8 kernels require multiples of 16 or 32 rows per expert.
        pad, unpad = self._padding
        padded, padded_splits = pad(x, splits)
        y = self.engine(self, padded, padded_splits)
        unpadded: Tensor = unpad(y, splits)
        return unpadded

    def _bind_views(self) -> None:
        """Make the module's parameters views of ours, and their gradients views of `main_grad`.

        A buffer may have moved the values since the last call.
        """
        fp8 = param_info(self.weight).fp8
        if fp8 is not None and fp8.tensors:
            # `Fp8Weight.quantize` has given the module tensors of its own.
            return
        gradient = getattr(self.weight, "main_grad", None)
        module = self.engine.module
        assert gradient is not None or not torch.is_grad_enabled(), (
            "experts can be trained under data parallelism only"
        )
        for expert, matrix in enumerate(self.weight.detach()):
            name = f"weight{expert}"
            view = getattr(module, name)
            if view.is_meta:
                # The first call after the module was built
                view = nn.Parameter(matrix)
                setattr(module, name, view)
            elif view.data_ptr() != matrix.data_ptr():
                view.data = matrix
            if gradient is not None:
                view.main_grad = gradient[expert]


def te_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    tp: Axis,
    sequence_parallel: bool = False,
    softcap: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute `linear_cross_entropy` using a kernel on the logits, which exist twice for a
    while.
    """
    layout = LinearLayout(tp, column=True, sequence_parallel=sequence_parallel)
    logits = apply_linear(hidden, weight, bias, layout)  # [s, b, v/tp]
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    num_rows = weight.shape[0]
    # The kernel does not know which rows of the vocabulary are padding.
    first_row = tp.rank * num_rows
    padding_start = max(0, vocab_size - first_row)
    if padding_start < num_rows:
        # Not -inf: a rank may have padding only, and would then compute NaN.
        logits[..., padding_start:] = torch.finfo(logits.dtype).min
    losses = te.parallel_cross_entropy(logits, labels.contiguous(), 0.0, False, tp.group)
    # Kernels of older releases expect a gradient in the order of the memory, which the gradient of
    # a flat view has.
    flat: Tensor = losses.flatten()
    return flat.view(labels.shape)


def initialize_user_buffers(config: TransformerConfig, tokens: int, tp_size: int) -> None:
    """Create the buffers of --tp-comm-overlap for activations `[tokens, hidden]`. Collective."""
    if not config.tp_comm_overlap or tp_size == 1:
        return
    in_fp8 = []
    for layer_number in range(config.num_layers):
        in_fp8.append(config.fp8 is not None and config.quantizes(layer_number))
    # One set of buffers per precision of the layers. They are a list instead of a set, since all
    # ranks must create the buffers in the same order.
    modes = []
    if not all(in_fp8):
        modes.append(te.UserBufferQuantizationMode.NONE)
    if any(in_fp8):
        modes.append(te.UserBufferQuantizationMode.FP8)
    # Default settings of Transformer Engine
    buffer_options = None
    if config.tp_comm_overlap_cfg is not None:
        text = Path(config.tp_comm_overlap_cfg).read_text(encoding="utf-8")
        buffer_options = yaml.safe_load(text)
    te.initialize_ub(
        shape=[tokens, config.hidden_size],
        tp_size=tp_size,
        quantization_modes=modes,
        dtype=config.params_dtype,
        ub_cfgs=buffer_options,
        bootstrap_backend=config.tp_comm_bootstrap_backend,
    )


TRANSFORMER_ENGINE = LayerSpec(
    norm=TENorm,
    column=TEColumnParallelLinear,
    norm_column=TENormColumnParallelLinear,
    row=TERowParallelLinear,
    core_attention=TECoreAttention,
    grouped=TEGroupedLinear,
    precision=TEPrecision,
    checkpoint=te_checkpoint,
    cross_entropies={**LOCAL.cross_entropies, "te": te_cross_entropy},
    set_up=initialize_user_buffers,
    start_step=STEP.start,
)

"""The building blocks from Transformer Engine (`transformer_engine.pytorch` 2.8 to 2.20).

Each class is its local class, which makes the parameters with their boxes and initial values, and
the mathematics of which it keeps; a module of Transformer Engine that lies over these parameters
computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformer_engine.pytorch as te
import yaml
from torch import Tensor, nn
from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

from megatron.core import tensor_parallel
from megatron.core.module import param_info
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallelRng,
    apply_column_parallel,
)
from megatron.core.transformer.attention.core import CoreAttention
from megatron.core.transformer.grouped_linear import GroupedLinear
from megatron.core.transformer.layer_spec import LOCAL, LayerSpec
from megatron.core.transformer.norm import Norm, NormColumnParallelLinear
from megatron.core.transformer.placement import Placement
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_engine.engine import (
    STEP,
    Engine,
    EngineLinearMixin,
    TEPrecision,
)


def _place(layer: ColumnParallelLinear | RowParallelLinear, mode: str) -> dict[str, Any]:
    """What a linear layer is, and where it stands."""
    return {
        "bias": layer.bias is not None,
        "params_dtype": layer.weight.dtype,
        "parallel_mode": mode,
        "tp_group": layer.tp.group,
        "tp_size": layer.tp.size,
        "sequence_parallel": layer.sequence_parallel,
    }


class TEColumnParallelLinear(ColumnParallelLinear, EngineLinearMixin):
    """`te.Linear` with its rows split."""

    def __init__(self, input_size: int, output_size: int, **options: Any) -> None:
        super().__init__(input_size, output_size, **options)
        self.engine = Engine(self, te.Linear, input_size, output_size, **_place(self, "column"))

    def project(self, x: Tensor) -> Tensor:
        return self.engine(self, x)


class TENormColumnParallelLinear(NormColumnParallelLinear, EngineLinearMixin):
    """`te.LayerNormLinear`."""

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
            **_place(self, "column"),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x)

    def project(self, x: Tensor) -> Tensor:
        """Of the input as it is: the norm is in it."""
        return self.engine(self, x)


class TERowParallelLinear(RowParallelLinear, EngineLinearMixin):
    """`te.Linear` with its columns split."""

    adds_bias_to_own_sequence = True

    def __init__(self, input_size: int, output_size: int, **options: Any) -> None:
        super().__init__(input_size, output_size, **options)
        self.engine = Engine(self, te.Linear, input_size, output_size, **_place(self, "row"))

    def project(self, x: Tensor) -> Tensor:
        return self.engine(self, x)


class TENorm(Norm):
    """`te.RMSNorm` or `te.LayerNorm`."""

    def __init__(self, config: TransformerConfig, size: int, **options: Any) -> None:
        super().__init__(config, size, **options)
        kind = te.RMSNorm if self.normalize.rms else te.LayerNorm
        how = {"eps": self.normalize.epsilon, "zero_centered_gamma": self.normalize.from_one}
        self.engine = Engine(self, kind, size, params_dtype=self.weight.dtype, **how)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.engine.module(x)
        return normed


def te_checkpoint(function: Callable[..., Any], rng: TensorParallelRng, *args: Any) -> Any:
    """`tensor_parallel.checkpoint` with what Transformer Engine must repeat of fp8, scales among it."""
    return tensor_parallel.checkpoint(function, rng, *args, by=te.checkpoint)


class TECoreAttention(CoreAttention):
    """`te.DotProductAttention`. What documents there are it is told by their first positions, in place of a mask.

    Where scores are capped or have a sink the local class computes.
    """

    def __init__(self, config: TransformerConfig, place: Placement, **options: Any) -> None:
        super().__init__(config, place, **options)
        split_over = self.cp.attention_axis
        heads_over = place.tp.size * self.cp.head_axis.size
        self.always: dict[str, Any] = {"window_size": self.mask.window}
        if self.mask.slopes is not None:  # on the device: a copy in every call would wait for it
            slopes = self.mask.slopes.to(device=place.device)
            self.always |= {"core_attention_bias_type": "alibi", "alibi_slopes": slopes}
        if config.attends_in_blocks:
            return
        self.module = te.DotProductAttention(
            config.num_attention_heads // heads_over,
            config.core_head_dim,
            num_gqa_groups=config.query_groups // heads_over,
            attention_dropout=config.attention_dropout,
            attn_mask_type="causal",
            softmax_scale=self.scale,
            cp_group=split_over.group,
            cp_global_ranks=list(split_over.ranks),
            cp_stream=_cp_stream()
            if split_over.group is not None and torch.cuda.is_available()
            else None,
            cp_comm_type=self.cp.comm_type,
        )

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None
    ) -> Tensor:
        if self.config.attends_in_blocks:
            return super()._attend(query, key, value, documents)
        length, batch = query.shape[:2]
        q, k, v = (x.flatten(2, 3) for x in (query, key, value))  # [s, b, heads/tp, d]
        with self.rng.fork() if self.config.attention_dropout and self.training else nullcontext():
            if documents is None:
                whole: Tensor = self.module(
                    q, k, v, qkv_format="sbhd", attn_mask_type="causal", **self.always
                )
                return whole
            starts = document_starts(documents).to(q.device, non_blocking=True)
            lengths = {
                "cu_seqlens_q": starts,
                "cu_seqlens_kv": starts,
                "max_seqlen_q": length,
                "max_seqlen_kv": length,
            }
            q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))  # [b s, heads/tp, d]
            how = self.always | lengths
            context = self.module(q, k, v, qkv_format="thd", attn_mask_type="padding_causal", **how)
        return context.view(batch, length, -1).transpose(0, 1)


@functools.cache
def _cp_stream() -> torch.cuda.Stream:
    """Every other step of a ring runs here; one for all layers."""
    return torch.cuda.Stream()


def document_starts(documents: Tensor) -> Tensor:
    """Where documents `[b, s]` begin in the sequences `[b s]` one after the other, and the end:
    int32.
    """
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents.diff() != 0
    first = begins.flatten().nonzero().flatten()
    return torch.cat((first, first.new_tensor([documents.numel()]))).int()


class TEGroupedLinear(GroupedLinear, EngineLinearMixin):
    """`te.GroupedLinear`, whose parameters, one for each expert, are views of the one that there is here."""

    def __init__(
        self, config: TransformerConfig, input_size: int, output_size: int, **options: Any
    ) -> None:
        super().__init__(config, input_size, output_size, **options)
        num_experts, rows, columns = self.weight.shape
        sizes = num_experts, columns, rows
        self.engine = Engine(
            self, te.GroupedLinear, *sizes, bias=False, params_dtype=self.weight.dtype
        )
        self._padding = (
            (te.Fp8Padding(num_experts), te.Fp8Unpadding(num_experts))
            if config.fp8 is not None
            else None
        )

    def project(self, x: Tensor, counts: Tensor) -> Tensor:
        self._bind()
        splits = counts.tolist()
        if self._padding is None:
            return self.engine(self, x, splits)
        pad, unpad = self._padding  # the kernels of fp8 take rows in multiples of 16 or 32
        padded, padded_splits = pad(x, splits)
        unpadded: Tensor = unpad(self.engine(self, padded, padded_splits), splits)
        return unpadded

    def _bind(self) -> None:
        """Let the module's parameters be views of ours and of its gradient, which a buffer may have
        moved.
        """
        fp8 = param_info(self.weight).fp8
        if fp8 is not None and fp8.tensors:
            return
        gradient = getattr(self.weight, "main_grad", None)
        module = self.engine.module
        assert gradient is not None or not torch.is_grad_enabled(), (
            "experts train under data parallelism alone"
        )
        for expert, matrix in enumerate(self.weight.detach()):
            view = getattr(module, f"weight{expert}")
            if view.is_meta:
                view = nn.Parameter(matrix)
                setattr(module, f"weight{expert}", view)
            elif view.data_ptr() != matrix.data_ptr():
                view.data = matrix
            if gradient is not None:
                view.main_grad = gradient[expert]


def te_rope(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Of `[s, b, g, heads, d]` by `[s, 1, 1, pairs]`, one for each pair; the kernel wants one for
    each element.
    """
    each = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    rotated: Tensor = apply_rotary_pos_emb(
        x.flatten(2, 3), each, interleaved=interleaved, fused=True
    )
    return rotated.view(x.shape)


def te_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    tp: Axis,
    sequence_parallel: bool = False,
    softcap: float | None = None,
) -> Tensor:
    """`linear_cross_entropy` with a kernel for the logits, which are there twice for a while."""
    logits = apply_column_parallel(hidden, weight, None, tp, sequence_parallel)  # [s, b, v/tp]
    logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
    padding = max(0, vocab_size - tp.rank * weight.shape[0])
    if padding < weight.shape[0]:
        logits[..., padding:] = torch.finfo(
            logits.dtype
        ).min  # a rank may have nothing else: -inf would be NaN
    losses = te.parallel_cross_entropy(logits, labels.contiguous(), 0.0, False, tp.group)
    # Through a flat view, since kernels of older releases take a gradient in the order of the
    # memory.
    flat: Tensor = losses.flatten()
    return flat.view(labels.shape)


def set_up(config: TransformerConfig, tokens: int, tp_size: int) -> None:
    """The user buffers of --tp-comm-overlap, for the activations of a micro-batch `[tokens,
    hidden]`.
    """
    if not config.tp_comm_overlap or tp_size == 1:
        return
    kinds = te.UserBufferQuantizationMode
    in_fp8 = [
        config.fp8 is not None and config.quantizes(number) for number in range(config.num_layers)
    ]
    path = config.tp_comm_overlap_cfg
    te.initialize_ub(
        shape=[tokens, config.hidden_size],
        tp_size=tp_size,
        # In one order on all ranks, as buffers are made together; that of a set would be another in
        # every process.
        quantization_modes=[
            kind for kind, used in ((kinds.NONE, not all(in_fp8)), (kinds.FP8, any(in_fp8))) if used
        ],
        dtype=config.params_dtype,
        ub_cfgs=yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        if path is not None
        else None,
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
    rope=te_rope,
    cross_entropies={**LOCAL.cross_entropies, "te": te_cross_entropy},
    set_up=set_up,
    start_step=STEP.start,
)

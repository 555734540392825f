"""The building blocks from Transformer Engine (`transformer_engine.pytorch` 2.8 to 2.20).

Each class is its local class, which makes the parameters with their boxes and initial values, and the mathematics of
which it keeps; a module of Transformer Engine that lies over these parameters computes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformer_engine.pytorch as te
from torch import Tensor, nn
from transformer_engine.common import recipe

from megatron.core import tensor_parallel
from megatron.core.module import param_info, set_param_info
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, TensorParallelRng
from megatron.core.transformer.core_attention import CoreAttention
from megatron.core.transformer.grouped_linear import GroupedLinear
from megatron.core.transformer.layer_spec import LayerSpec, Precision, Quantized
from megatron.core.transformer.norm import Norm, NormColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class _Step:
    """The optimizer step under way: weights that are quantized for its first micro batch serve all of them."""

    number: int = 0

    def start(self) -> None:
        self.number += 1


_STEP = _Step()


class _Engine:
    """A module of Transformer Engine, made on the meta device, over the parameters of `owner`.

    It is no child of its owner: the parameters would be there twice.
    """

    def __init__(self, module: Any, owner: nn.Module) -> None:
        self.module, self._step = module, 0
        for name, param in owner.named_parameters(recurse=False):
            shape = tuple(getattr(module, name).shape)
            assert shape == tuple(param.shape), f"{type(module).__name__}.{name} {shape}, here {tuple(param.shape)}"
            setattr(module, name, param)

    def __call__(self, owner: nn.Module, *inputs: Any) -> Tensor:
        """A linear layer of some kind."""
        self.module.training = owner.training
        self.module.fuse_wgrad_accumulation = hasattr(owner.weight, "main_grad")
        first = None if _STEP.number == 0 else self._step != _STEP.number
        self._step = _STEP.number
        output: Tensor = self.module(*inputs, is_first_microbatch=first)
        return output


class _WithScales(Quantized):
    """A linear layer over `engine`. Delayed scaling alone has a state: a scale and a history for every tensor."""

    engine: _Engine

    def scales(self) -> dict[str, Any] | None:
        meta = self.engine.module.fp8_meta
        if "scaling_fwd" not in meta or not meta["recipe"].delayed():
            return None
        tensors = {f"{name}_{way}": getattr(meta[f"scaling_{way}"], name) for way in _WAYS for name in _KEPT}
        return {"recipe": "delayed"} | {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def restore_scales(self, state: dict[str, Any], config: TransformerConfig) -> bool:
        module, count = self.engine.module, sum(name.startswith("weight") for name in self.engine.module._parameters)
        if config.fp8 is None or state.get("recipe") != config.fp8_recipe:
            return False
        if len(state["amax_history_fwd"]) != config.fp8_amax_history_len or len(state["scale_fwd"]) != 3 * count:
            return False
        made = make_recipe(config)
        module.fp8_meta |= {"recipe": made, "num_gemms": count}
        module.init_fp8_meta_tensors(made)
        for way in _WAYS:
            for name in _KEPT:
                getattr(module.fp8_meta[f"scaling_{way}"], name).copy_(state[f"{name}_{way}"])
        return True


_WAYS, _KEPT = ("fwd", "bwd"), ("scale", "amax_history")


def _parallel(tp: Axis, sequence_parallel: bool, mode: str) -> dict[str, Any]:
    place = {"tp_group": tp.group, "tp_size": tp.size, "sequence_parallel": sequence_parallel}
    return place | {"parallel_mode": mode, "device": "meta"}


class TEColumnParallelLinear(ColumnParallelLinear, _WithScales):
    """`te.Linear` with its rows split."""

    def __init__(self, input_size: int, output_size: int, **options: Any) -> None:
        super().__init__(input_size, output_size, **options)
        module = te.Linear(
            input_size,
            output_size,
            bias=self.bias is not None,
            params_dtype=self.weight.dtype,
            **_parallel(self.tp, self.sequence_parallel, "column"),
        )
        self.engine = _Engine(module, self)

    def project(self, x: Tensor) -> Tensor:
        return self.engine(self, x)


class TENormColumnParallelLinear(NormColumnParallelLinear, _WithScales):
    """`te.LayerNormLinear`."""

    def __init__(self, config: TransformerConfig, input_size: int, output_size: int, **options: Any) -> None:
        super().__init__(config, input_size, output_size, **options)
        module = te.LayerNormLinear(
            input_size,
            output_size,
            eps=config.norm_epsilon,
            normalization=config.normalization,
            zero_centered_gamma=config.apply_layernorm_1p,
            bias=self.bias is not None,
            params_dtype=self.weight.dtype,
            **_parallel(self.tp, self.sequence_parallel, "column"),
        )
        self.engine = _Engine(module, self)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x)

    def project(self, x: Tensor) -> Tensor:
        """Of the input as it is: the norm is in it."""
        return self.engine(self, x)


class TERowParallelLinear(RowParallelLinear, _WithScales):
    """`te.Linear` with its columns split. The bias is added to this rank's part of the sequence."""

    def __init__(self, input_size: int, output_size: int, **options: Any) -> None:
        super().__init__(input_size, output_size, **options)
        if self.bias is not None:
            set_param_info(self.bias, replace(param_info(self.bias), partial_grad=self.sequence_parallel))
        module = te.Linear(
            input_size,
            output_size,
            bias=self.bias is not None,
            params_dtype=self.weight.dtype,
            **_parallel(self.tp, self.sequence_parallel, "row"),
        )
        self.engine = _Engine(module, self)

    def project(self, x: Tensor) -> Tensor:
        return self.engine(self, x)


class TENorm(Norm):
    """`te.RMSNorm` or `te.LayerNorm`."""

    def __init__(self, config: TransformerConfig, size: int, **options: Any) -> None:
        super().__init__(config, size, **options)
        kind = te.RMSNorm if self.normalize.rms else te.LayerNorm
        how = {"eps": self.normalize.epsilon, "zero_centered_gamma": self.normalize.from_one}
        self.engine = _Engine(kind(size, params_dtype=self.weight.dtype, device="meta", **how), self)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.engine.module(x)
        return normed


def te_checkpoint(function: Callable[..., Any], rng: TensorParallelRng, *args: Any) -> Any:
    """`tensor_parallel.checkpoint` with what Transformer Engine must repeat of fp8, scales among it."""
    return tensor_parallel.checkpoint(function, rng, *args, by=te.checkpoint)


class TECoreAttention(CoreAttention):
    """`te.DotProductAttention`. What documents there are it is told by their first positions, in place of a mask."""

    checkpoint = staticmethod(te_checkpoint)

    def __init__(self, config: TransformerConfig, *, tp: Axis, rng: TensorParallelRng, **options: Any) -> None:
        super().__init__(config, tp=tp, rng=rng, **options)
        split_over, heads_over = self.cp.attention_axis, tp.size * self.cp.head_axis.size
        self.window = self.mask.window
        self.module = te.DotProductAttention(
            config.num_attention_heads // heads_over,
            config.core_head_dim,
            num_gqa_groups=config.query_groups // heads_over,
            attention_dropout=config.attention_dropout,
            attn_mask_type="causal",
            softmax_scale=self.scale,
            cp_group=split_over.group,
            cp_global_ranks=list(split_over.ranks),
            cp_stream=torch.cuda.Stream() if split_over.group is not None and torch.cuda.is_available() else None,
            cp_comm_type=self.cp.comm_type,
        )

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None) -> Tensor:
        length, batch = query.shape[:2]
        q, k, v = (x.flatten(2, 3) for x in (query, key, value))  # [s, b, heads/tp, d]
        options: dict[str, Any] = {"window_size": self.window}
        if self.mask.slopes is not None:
            options |= {"core_attention_bias_type": "alibi", "alibi_slopes": self.mask.slopes.to(q.device)}
        with self.rng.fork() if self.config.attention_dropout and self.training else nullcontext():
            if attention_mask is None:
                whole: Tensor = self.module(q, k, v, qkv_format="sbhd", attn_mask_type="causal", **options)
                return whole
            starts = document_starts(attention_mask)
            options |= {
                "cu_seqlens_q": starts,
                "cu_seqlens_kv": starts,
                "max_seqlen_q": length,
                "max_seqlen_kv": length,
            }
            q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))  # [b s, heads/tp, d]
            context = self.module(q, k, v, qkv_format="thd", attn_mask_type="padding_causal", **options)
        return context.view(batch, length, -1).transpose(0, 1)


def document_starts(attention_mask: Tensor) -> Tensor:
    """Where documents begin in the sequences `[b s]` one after the other, and the end: int32.

    `attention_mask` `[b, 1, s, s]` is True where attention is forbidden, between documents and to what comes later.
    """
    batch, _, length, _ = attention_mask.shape
    begins = attention_mask.new_ones(batch, length)
    begins[:, 1:] = attention_mask[:, 0].diagonal(-1, 1, 2)  # the token before is of another document
    first = begins.flatten().nonzero().flatten()
    return torch.cat((first, first.new_tensor([batch * length]))).int()


class TEGroupedLinear(GroupedLinear, _WithScales):
    """`te.GroupedLinear`, whose parameters, one for each expert, are views of the one that there is here."""

    def __init__(self, config: TransformerConfig, input_size: int, output_size: int, **options: Any) -> None:
        super().__init__(config, input_size, output_size, **options)
        num_experts, rows, columns = self.weight.shape
        dtype = self.weight.dtype
        module = te.GroupedLinear(num_experts, columns, rows, bias=False, params_dtype=dtype, device="meta")
        self.engine = _Engine(module, nn.Module())
        self._padding = (te.Fp8Padding(num_experts), te.Fp8Unpadding(num_experts)) if config.fp8 is not None else None

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        self._bind()
        x, splits = _TellParameter.apply(x, self.weight), counts.tolist()
        if self._padding is None:
            return self.engine(self, x, splits)
        pad, unpad = self._padding  # the kernels of fp8 take rows in multiples of 16 or 32
        padded, padded_splits = pad(x, splits)
        unpadded: Tensor = unpad(self.engine(self, padded, padded_splits), splits)
        return unpadded

    def _bind(self) -> None:
        """Let the module's parameters be views of ours and of its gradient, which a buffer may have moved."""
        gradient, module = getattr(self.weight, "main_grad", None), self.engine.module
        assert gradient is not None or not torch.is_grad_enabled(), "experts train under data parallelism alone"
        for expert, matrix in enumerate(self.weight.detach()):
            view = getattr(module, f"weight{expert}")
            if view.is_meta:
                view = nn.Parameter(matrix)
                setattr(module, f"weight{expert}", view)
            elif view.data_ptr() != matrix.data_ptr():
                view.data = matrix
            if gradient is not None:
                view.main_grad = gradient[expert]


class _TellParameter(torch.autograd.Function):
    """The identity; in the backward pass, when the gradient is in `main_grad`, the parameter's hooks run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return dx, None


_FORMATS = {"e4m3": recipe.Format.E4M3, "hybrid": recipe.Format.HYBRID}


def _delayed(config: TransformerConfig, fp8_format: recipe.Format) -> recipe.Recipe:
    return recipe.DelayedScaling(
        margin=config.fp8_margin,
        fp8_format=fp8_format,
        amax_history_len=config.fp8_amax_history_len,
        amax_compute_algo=config.fp8_amax_compute_algo,
    )


RECIPES: dict[str, Callable[[TransformerConfig, recipe.Format], recipe.Recipe]] = {
    "delayed": _delayed,
    "tensorwise": lambda config, fp8_format: recipe.Float8CurrentScaling(fp8_format=fp8_format),
    "blockwise": lambda config, fp8_format: recipe.Float8BlockScaling(fp8_format=fp8_format),
    "mxfp8": lambda config, fp8_format: recipe.MXFP8BlockScaling(fp8_format=fp8_format),
}


def make_recipe(config: TransformerConfig) -> recipe.Recipe:
    assert config.fp8 is not None
    return RECIPES[config.fp8_recipe](config, _FORMATS[config.fp8])


class TEPrecision(Precision):
    """fp8 inside, but for the first and the last layers where the flags say so."""

    def __init__(self, config: TransformerConfig, group: Any) -> None:
        super().__init__(config, group)
        self._recipe = make_recipe(config) if config.fp8 is not None else None

    def chunk(self) -> AbstractContextManager[None]:
        if self._recipe is None:
            return nullcontext()
        context: AbstractContextManager[None] = te.fp8_autocast(
            enabled=True, fp8_recipe=self._recipe, fp8_group=self.group
        )
        return context

    def layer(self, number: int) -> AbstractContextManager[None]:
        if self._recipe is None or self.config.in_fp8(number):
            return nullcontext()
        context: AbstractContextManager[None] = te.fp8_autocast(enabled=False)
        return context


TRANSFORMER_ENGINE = LayerSpec(
    norm=TENorm,
    column=TEColumnParallelLinear,
    norm_column=TENormColumnParallelLinear,
    row=TERowParallelLinear,
    core_attention=TECoreAttention,
    grouped=TEGroupedLinear,
    precision=TEPrecision,
    checkpoint=te_checkpoint,
    start_step=_STEP.start,
)

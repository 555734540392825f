"""Modules of Transformer Engine over parameters that are ours, and the precision that they compute
in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import transformer_engine.pytorch as te
from torch import Tensor, nn
from transformer_engine.common import recipe
from transformer_engine.pytorch.tensor import cast_master_weights_to_fp8, replace_raw_data

from megatron.core.module import param_info, set_param_info
from megatron.core.parallel_state import group_of
from megatron.core.transformer.layer_spec import FP8StateMixin, Precision
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class _Step:
    """The optimizer step under way: weights that are quantized for its first micro-batch serve all
    of them.
    """

    number: int = 0

    def start(self) -> None:
        self.number += 1


STEP = _Step()


class Engine:
    """A module of Transformer Engine, made on the meta device, over the parameters of `owner`.

    It is no child of its owner: the parameters would be there twice. Where its weights are tensors
    of their own (one for each expert, or in fp8), the owner's parameter has the gradient and the
    hooks alone.
    """

    def __init__(
        self, owner: nn.Module, make: Callable[..., Any], *sizes: int, **options: Any
    ) -> None:
        self._make = partial(make, *sizes, device="meta", **options)
        self.rebuild(owner)

    def rebuild(self, owner: nn.Module, **more: Any) -> None:
        """With more options than it was made with."""
        self.module = self._make(**more)
        self._step = 0
        self.parameter_metadata = dict(
            vars(self.module).get("param_init_meta", {})
        )  # to be lost where they are replaced
        self.has_own_weights = "weight" not in self.module._parameters
        for name, param in owner.named_parameters(recurse=False):
            if name in self.module._parameters:
                shape = tuple(getattr(self.module, name).shape)
                assert shape == tuple(param.shape), (
                    f"{type(self.module).__name__}.{name} {shape}, {tuple(param.shape)}"
                )
                setattr(self.module, name, param)

    def __call__(self, owner: nn.Module, x: Tensor, *rest: Any) -> Tensor:
        """A linear layer of some kind."""
        self.module.training = owner.training
        self.module.fuse_wgrad_accumulation = hasattr(owner.weight, "main_grad")
        first = None if STEP.number == 0 else self._step != STEP.number
        self._step = STEP.number
        if self.has_own_weights:
            x = _TellParameter.apply(x, owner.weight)
        output: Tensor = self.module(x, *rest, is_first_microbatch=first)
        return output


class _TellParameter(torch.autograd.Function):
    """The identity; in the backward pass, when the gradient is in `main_grad`, the parameter's
    hooks run.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return dx, None


class EngineLinearMixin(FP8StateMixin):
    """A linear layer over `engine`. Delayed scaling alone has a state: a scale and a history for
    every tensor.
    """

    engine: Engine

    def get_fp8_state(self) -> dict[str, Any] | None:
        meta = self.engine.module.fp8_meta
        if "scaling_fwd" not in meta or not meta["recipe"].delayed():
            return None
        tensors = {
            f"{name}_{way}": getattr(meta[f"scaling_{way}"], name)
            for way in _WAYS
            for name in _KEPT
        }
        return {"recipe": "delayed"} | {
            name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()
        }

    def restore_fp8_state(self, state: dict[str, Any], config: TransformerConfig) -> bool:
        module = self.engine.module
        count = sum(name.startswith("weight") for name in self.engine.module._parameters)
        if config.fp8 is None or state.get("recipe") != config.fp8_recipe:
            return False
        if (
            len(state["amax_history_fwd"]) != config.fp8_amax_history_len
            or len(state["scale_fwd"]) != 3 * count
        ):
            return False
        made = make_recipe(config)
        module.fp8_meta |= {"recipe": made, "num_gemms": count}
        module.init_fp8_meta_tensors(made)
        for way in _WAYS:
            for name in _KEPT:
                getattr(module.fp8_meta[f"scaling_{way}"], name).copy_(state[f"{name}_{way}"])
        return True


_WAYS = ("fwd", "bwd")
_KEPT = ("scale", "amax_history")
_E4M3_MAX = 448.0


class Fp8Weight:
    """The weight of `owner` in fp8 (--fp8-param-gather): a tensor of Transformer Engine for each of
    its matrices.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self.tensors: Sequence[Tensor] = ()

    def quantize(self, memory: Tensor) -> None:
        engine = self._owner.engine
        weight = self._owner.weight
        module = engine.module
        tensors = []
        names = [name for name in module._parameters if name.startswith("weight")]
        parts = (
            each.view(len(names), *weight.shape[-2:])
            for each in (weight.detach(), weight.main_grad, memory)
        )
        for name, values, gradient, raw in zip(names, *parts, strict=True):
            quantizer = module.quantizers["scaling_fwd"][
                engine.parameter_metadata[name].fp8_meta_index
            ]
            quantizer.set_usage(rowwise=True, columnwise=True)
            quantizer.internal = False
            tensor: Any = nn.Parameter(quantizer(values))
            replace_raw_data(tensor, raw)
            tensor.main_grad = gradient
            setattr(module, name, tensor)
            tensors.append(tensor)
        self.tensors = tensors
        engine.has_own_weights = True
        weight.data = weight.new_empty(()).expand(weight.shape)  # no memory

    def cast(
        self,
        tensors: Sequence[Any],
        main: Sequence[Tensor | None],
        starts: Sequence[int | None],
        group: dist.ProcessGroup,
        rescale: bool,
    ) -> None:
        """Where delayed scaling knows no maxima of these values yet, a first cast finds them."""
        used = self._owner.engine.module.fp8_meta["recipe"]
        find_scales = rescale and used.delayed()
        quantizers = [tensor._get_quantizer() for tensor in tensors] if find_scales else []
        for quantizer in quantizers:
            quantizer.amax.zero_()  # of the values before: a cast only lets it grow
        cast_master_weights_to_fp8(tensors, main, starts, group)
        if not find_scales:
            return
        for quantizer in quantizers:
            scale = _E4M3_MAX / quantizer.amax / 2**used.margin
            quantizer.scale.copy_(torch.where(quantizer.amax > 0, scale, quantizer.scale))
        cast_master_weights_to_fp8(tensors, main, starts, group)


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
    "nvfp4": lambda config, fp8_format: recipe.NVFP4BlockScaling(),
}


def make_recipe(config: TransformerConfig) -> recipe.Recipe:
    assert config.low_precision is not None
    return RECIPES[config.low_precision](config, _FORMATS[config.fp8 or "e4m3"])


# Layers whose collectives user buffers overlap, and what their buffers are called.
_BUFFERS = {"self_attention.linear_qkv": "qkv", "self_attention.linear_proj": "proj"}
_BUFFERS |= {"mlp.linear_fc1": "fc1", "mlp.linear_fc2": "fc2"}


class TEPrecision(Precision):
    """fp8 or fp4 inside, but for the first and the last layers where the flags say so."""

    def __init__(
        self,
        config: TransformerConfig,
        group: dist.ProcessGroup | None,
        layers: Mapping[int, nn.Module] | None = None,
    ) -> None:
        super().__init__(config, group)
        self._recipe = make_recipe(config) if config.low_precision is not None else None
        if config.fp8_param_gather and dist.is_initialized():
            # What casts weights that are not sharded wants a group of this rank alone. All ranks
            # make theirs now: NCCL splits it off the world, which ranks without such weights would
            # never join.
            group_of((dist.get_rank(),))
        for number, layer in (layers or {}).items():
            for name, module in layer.named_modules():
                if isinstance(module, EngineLinearMixin):
                    self._prepare(
                        module, name, config.fp8_param_gather and config.quantizes(number)
                    )

    def _prepare(self, owner: Any, name: str, in_fp8: bool) -> None:
        """What a linear layer cannot know when it is made: its place in the model."""
        overlaps = _overlaps(self.config, name)
        if not overlaps and not in_fp8:
            return
        with te.fp8_model_init(enabled=in_fp8, recipe=self._recipe):
            owner.engine.rebuild(owner, **overlaps)
        if in_fp8:
            set_param_info(owner.weight, replace(param_info(owner.weight), fp8=Fp8Weight(owner)))

    def chunk(self) -> AbstractContextManager[None]:
        if self._recipe is None:
            return nullcontext()
        context: AbstractContextManager[None] = te.fp8_autocast(
            enabled=True, fp8_recipe=self._recipe, fp8_group=self.group
        )
        return context

    def layer(self, number: int) -> AbstractContextManager[None]:
        if self._recipe is None or self.config.quantizes(number):
            return nullcontext()
        context: AbstractContextManager[None] = te.fp8_autocast(enabled=False)
        return context


def _overlaps(config: TransformerConfig, name: str) -> dict[str, Any]:
    """What a linear layer is told of --tp-comm-overlap; it leaves out what its kind does not have."""
    if not config.tp_comm_overlap or name not in _BUFFERS:
        return {}
    return {
        "ub_name": _BUFFERS[name],
        "ub_overlap_ag": config.tp_comm_overlap_ag,
        "ub_overlap_rs": config.tp_comm_overlap_rs,
        "ub_overlap_rs_dgrad": config.tp_comm_overlap_rs_dgrad,
        "ub_bulk_dgrad": config.tp_comm_bulk_dgrad,
        "ub_bulk_wgrad": config.tp_comm_bulk_wgrad,
    }

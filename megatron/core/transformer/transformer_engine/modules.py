"""Modules of Transformer Engine that use parameters of our layers, and low-precision contexts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from megatron.core.tensor_parallel.layers import open_main_grad, take_stale_mark
from megatron.core.transformer.layer_spec import FP8StateMixin, Precision
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class _Step:
    """The current optimizer step: weights are quantized in its first micro-batch only."""

    index: int = 0
    calibration: Any = None
    """`Calibration` that records maxima; while it is set, layers in fp8 compute in bf16."""

    def start(self) -> None:
        self.index += 1


STEP = _Step()


class Engine:
    """A module of Transformer Engine that computes with the parameters of its owner.

    It is built on the meta device. It is not a child module of the owner, which would then contain
    the parameters twice. If its weights are separate tensors (one per expert, or in fp8), the
    owner's parameter only provides the gradient and the hooks.
    """

    def __init__(
        self, owner: nn.Module, make: Callable[..., Any], *sizes: int, **options: Any
    ) -> None:
        self._make = partial(make, *sizes, device="meta", **options)
        self.rebuild(owner)

    def rebuild(self, owner: nn.Module, **more: Any) -> None:
        """Build the module again with additional options."""
        self.module = self._make(**more)
        self._step = 0
        # The module deletes these entries when its parameters are replaced.
        metadata = vars(self.module).get("param_init_meta", {})
        self.parameter_metadata = dict(metadata)
        self.has_own_weights = "weight" not in self.module._parameters
        # Replace the module's parameters by those of the owner that have the same name.
        for name, param in owner.named_parameters(recurse=False):
            if name not in self.module._parameters:
                continue
            expected_shape = tuple(getattr(self.module, name).shape)
            shape = tuple(param.shape)
            assert expected_shape == shape, (
                f"{type(self.module).__name__}.{name} {expected_shape}, {shape}"
            )
            setattr(self.module, name, param)

    def __call__(self, owner: nn.Module, x: Tensor, *inputs: Any) -> Tensor:
        """Apply a linear layer of any kind."""
        self.module.training = owner.training
        weight = owner.weight
        assert isinstance(weight, Tensor)
        # Quantized weights are kept for the micro-batches of a step. None means that they are
        # quantized in every call, as outside of training.
        is_first_microbatch = None
        if STEP.index > 0:
            is_first_microbatch = self._step != STEP.index
        self._step = STEP.index
        has_main_grad = hasattr(weight, "main_grad")
        self.module.fuse_wgrad_accumulation = has_main_grad
        # The first micro-batch of a step overwrites the gradient, the others add to it.
        # An expert may have no rows that overwrite it.
        overwrites = is_first_microbatch and not self.has_own_weights
        if has_main_grad and not overwrites:
            open_main_grad(weight)
        if self.has_own_weights:
            x = _RunGradHooks.apply(x, owner.weight)
            # In bf16 the module computes with copies of weights in fp8, which have no `main_grad`;
            # a calibration does not need their gradients.
            for name in _find_weight_names(self.module):
                getattr(self.module, name).requires_grad_(STEP.calibration is None)
        output: Tensor = self.module(x, *inputs, is_first_microbatch=is_first_microbatch)
        if has_main_grad and overwrites and output.requires_grad:
            output.register_hook(partial(_announce_overwriting, weight))
        if STEP.calibration is not None:
            STEP.calibration.record(owner, output)
        return output


def _announce_overwriting(weight: Tensor, gradient: Tensor) -> None:
    """Take the mark in the backward pass: without one, the gradient stays stale."""
    take_stale_mark(weight)


class _RunGradHooks(torch.autograd.Function):
    """Identity that lets autograd run the hooks of a parameter in the backward pass.

    At that time the gradient is in `main_grad`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return dx, None


_DIRECTIONS = ("fwd", "bwd")
_STATE_NAMES = ("scale", "amax_history")


class EngineLinearMixin(FP8StateMixin):
    """A linear layer computed by `engine`.

    Only delayed scaling has a state: a scale and a history of maxima per tensor.
    """

    engine: Engine

    def get_fp8_state(self) -> dict[str, Any] | None:
        meta = self.engine.module.fp8_meta
        if "scaling_fwd" not in meta or not meta["recipe"].delayed():
            return None
        state: dict[str, Any] = {"recipe": "delayed"}
        for direction in _DIRECTIONS:
            for name in _STATE_NAMES:
                tensor = getattr(meta[f"scaling_{direction}"], name)
                state[f"{name}_{direction}"] = tensor.detach().to("cpu", copy=True)
        return state

    def restore_fp8_state(self, state: dict[str, Any], config: TransformerConfig) -> bool:
        module = self.engine.module
        num_weights = len(_find_weight_names(module))
        if config.fp8 is None or state.get("recipe") != config.fp8_recipe:
            return False
        history_length = len(state["amax_history_fwd"])
        if history_length != config.fp8_amax_history_len:
            return False
        # A matrix product has three tensors in the forward pass: input, weight and output.
        if len(state["scale_fwd"]) != 3 * num_weights:
            return False
        meta = self.prepare_fp8_state(config)
        for direction in _DIRECTIONS:
            for name in _STATE_NAMES:
                target = getattr(meta[f"scaling_{direction}"], name)
                target.copy_(state[f"{name}_{direction}"])
        return True

    def prepare_fp8_state(self, config: TransformerConfig) -> dict[str, Any]:
        """Create scales and histories unless they exist, and return the module's `fp8_meta`."""
        module = self.engine.module
        fp8_recipe = make_recipe(config)
        num_weights = len(_find_weight_names(module))
        module.fp8_meta |= {"recipe": fp8_recipe, "num_gemms": num_weights}
        module.init_fp8_meta_tensors(fp8_recipe)
        meta: dict[str, Any] = module.fp8_meta
        return meta

    def has_fp8_scales(self) -> bool:
        """Return whether a step, a checkpoint or a calibration has set scales of gradients."""
        meta = self.engine.module.fp8_meta
        if "scaling_bwd" not in meta:
            return False
        return bool((meta["scaling_bwd"].scale != 1).any())


def _find_weight_names(module: nn.Module) -> list[str]:
    """Return the names of the weights: one, or one per expert."""
    names = []
    for name in module._parameters:
        if name.startswith("weight"):
            names.append(name)
    return names


_E4M3_MAX = 448.0
"""The largest value of fp8 in the format E4M3."""


class Fp8Weight:
    """The weight of a linear layer in fp8 (--fp8-param-gather), one tensor per matrix."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self.tensors: Sequence[Tensor] = ()

    def quantize(self, memory: Tensor) -> None:
        engine = self._owner.engine
        weight = self._owner.weight
        module = engine.module
        names = _find_weight_names(module)
        # [matrices, rows, columns]: one matrix, or one per expert
        shape = (len(names), *weight.shape[-2:])
        values = weight.detach().view(shape)
        gradients = weight.main_grad.view(shape)
        raw_data = memory.view(shape)
        tensors = []
        for index, name in enumerate(names):
            meta_index = engine.parameter_metadata[name].fp8_meta_index
            quantizer = module.quantizers["scaling_fwd"][meta_index]
            # Row-wise for the forward pass, column-wise for the gradient of the input.
            quantizer.set_usage(rowwise=True, columnwise=True)
            quantizer.internal = False
            tensor: Any = nn.Parameter(quantizer(values[index]))
            replace_raw_data(tensor, raw_data[index])
            tensor.main_grad = gradients[index]
            setattr(module, name, tensor)
            tensors.append(tensor)
        self.tensors = tensors
        engine.has_own_weights = True
        # Free the memory of the original values.
        weight.data = weight.new_empty(()).expand(weight.shape)

    def cast(
        self,
        tensors: Sequence[Any],
        main: Sequence[Tensor | None],
        starts: Sequence[int | None],
        group: dist.ProcessGroup,
        rescale: bool,
    ) -> None:
        """Fill fp8 tensors; if delayed scaling has no maxima yet, an additional cast finds them."""
        fp8_recipe = self._owner.engine.module.fp8_meta["recipe"]
        if not fp8_recipe.delayed():
            cast_master_weights_to_fp8(tensors, main, starts, group)
            return
        quantizers = [tensor._get_quantizer() for tensor in tensors]
        for quantizer in quantizers:
            # A part is cast as a single row, which is slow to transpose.
            quantizer.set_usage(rowwise=True, columnwise=False)
            if rescale:
                # Discard the maximum of earlier values: a cast can only increase it.
                quantizer.amax.zero_()

        cast_master_weights_to_fp8(tensors, main, starts, group)
        if rescale:
            # The first cast has found the maxima, the second one uses the scales from them.
            for quantizer in quantizers:
                amax = quantizer.amax.view_as(quantizer.scale)  # [] from [1]
                scale = _E4M3_MAX / amax / 2**fp8_recipe.margin
                # A weight of zeros keeps its scale.
                quantizer.scale.copy_(torch.where(amax > 0, scale, quantizer.scale))
            cast_master_weights_to_fp8(tensors, main, starts, group)
        for quantizer in quantizers:
            quantizer.set_usage(rowwise=True, columnwise=True)


_FORMATS = {"e4m3": recipe.Format.E4M3, "hybrid": recipe.Format.HYBRID}


def _make_delayed_recipe(config: TransformerConfig, fp8_format: recipe.Format) -> recipe.Recipe:
    return recipe.DelayedScaling(
        margin=config.fp8_margin,
        fp8_format=fp8_format,
        amax_history_len=config.fp8_amax_history_len,
        amax_compute_algo=config.fp8_amax_compute_algo,
    )


RECIPES: dict[str, Callable[[TransformerConfig, recipe.Format], recipe.Recipe]] = {
    "delayed": _make_delayed_recipe,
    "tensorwise": lambda config, fp8_format: recipe.Float8CurrentScaling(fp8_format=fp8_format),
    "blockwise": lambda config, fp8_format: recipe.Float8BlockScaling(fp8_format=fp8_format),
    "mxfp8": lambda config, fp8_format: recipe.MXFP8BlockScaling(fp8_format=fp8_format),
    "nvfp4": lambda config, fp8_format: recipe.NVFP4BlockScaling(),
}


def make_recipe(config: TransformerConfig) -> recipe.Recipe:
    """Return Transformer Engine's recipe for --fp8-recipe or --fp4-recipe."""
    assert config.low_precision is not None
    make = RECIPES[config.low_precision]
    fp8_format = _FORMATS[config.fp8 or "e4m3"]
    return make(config, fp8_format)


_USER_BUFFERS = {
    "self_attention.linear_qkv": "qkv",
    "self_attention.linear_proj": "proj",
    "mlp.linear_fc1": "fc1",
    "mlp.linear_fc2": "fc2",
}
"""Names of the user buffers of layers whose collectives --tp-comm-overlap overlaps."""


class TEPrecision(Precision):
    """fp8 or fp4 contexts, except for layers that are configured to stay in bf16."""

    def __init__(
        self,
        config: TransformerConfig,
        group: dist.ProcessGroup | None,
        layers: Mapping[int, nn.Module] | None = None,
    ) -> None:
        super().__init__(config, group)
        self._recipe = None
        if config.low_precision is not None:
            self._recipe = make_recipe(config)
        if config.fp8_param_gather and dist.is_initialized():
            # The cast of weights that are not sharded requires a group of this rank alone. All
            # ranks create theirs here: NCCL splits it off the world, in which ranks without such
            # weights would never participate later.
            group_of((dist.get_rank(),))
        for layer_number, layer in (layers or {}).items():
            in_fp8 = config.fp8_param_gather and config.quantizes(layer_number)
            for name, module in layer.named_modules():
                if isinstance(module, EngineLinearMixin):
                    self._configure_linear(module, name, in_fp8)

    def _configure_linear(self, owner: Any, name: str, in_fp8: bool) -> None:
        """Apply the options of a linear layer that depend on its position in the model."""
        overlap_options = _get_overlap_options(self.config, name)
        if not overlap_options and not in_fp8:
            return
        with te.fp8_model_init(enabled=in_fp8, recipe=self._recipe):
            owner.engine.rebuild(owner, **overlap_options)
        if in_fp8:
            info = replace(param_info(owner.weight), fp8=Fp8Weight(owner))
            set_param_info(owner.weight, info)

    def chunk(self) -> AbstractContextManager[None]:
        if self._recipe is None:
            return nullcontext()
        # All layers compute in low precision, except for those that `layer` excludes.
        calibrates = STEP.calibration is not None
        context: AbstractContextManager[None] = te.fp8_autocast(
            enabled=not calibrates,
            calibrating=calibrates,
            fp8_recipe=self._recipe,
            fp8_group=self.group,
        )
        return context

    def layer(self, layer_number: int) -> AbstractContextManager[None]:
        if self._recipe is None or self.config.quantizes(layer_number):
            return nullcontext()
        return _compute_in_bf16()


@contextmanager
def _compute_in_bf16() -> Iterator[None]:
    """Leave fp8, and calibration, inside."""
    calibration = STEP.calibration
    STEP.calibration = None
    try:
        with te.fp8_autocast(enabled=False):
            yield
    finally:
        STEP.calibration = calibration


def _get_overlap_options(config: TransformerConfig, name: str) -> dict[str, Any]:
    """Return the user-buffer options of a linear layer; TE ignores those that do not apply."""
    if not config.tp_comm_overlap or name not in _USER_BUFFERS:
        return {}
    return {
        "ub_name": _USER_BUFFERS[name],
        "ub_overlap_ag": config.tp_comm_overlap_ag,
        "ub_overlap_rs": config.tp_comm_overlap_rs,
        "ub_overlap_rs_dgrad": config.tp_comm_overlap_rs_dgrad,
        "ub_bulk_dgrad": config.tp_comm_bulk_dgrad,
        "ub_bulk_wgrad": config.tp_comm_bulk_wgrad,
    }

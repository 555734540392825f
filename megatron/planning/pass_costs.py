"""Memory and traffic of the passes of a micro-batch, measured by running layers without memory.

One layer of each kind, the embedding, and the output layer with the loss run forward and backward
on torch's meta device, whose tensors have shapes but no data. The model is not restated: a
dispatch mode follows the bytes of all tensors, and stand-ins for process groups record the
collectives. `meta_device` contains both, and stand-ins for kernels without shapes of their own.
"""

from __future__ import annotations

import math
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor

from megatron.core.models import ChunkSpec, TokenLosses
from megatron.core.module import MegatronModule
from megatron.core.parallel_state import Axis, ParallelState
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.core.transformer.transformer_block import list_layer_groups
from megatron.core.transformer.transformer_config import (
    LOCAL_BACKEND_FIELDS,
    TransformerConfig,
)
from megatron.planning.meta_device import (
    LiveBytes,
    PlannedDevice,
    RecordingGroup,
    compiler_absent,
    groups_known,
    run_backward,
    shapes_compared,
)
from megatron.planning.meta_model import MetaChunk
from megatron.training.config.run_config import Config, ModelProvider

_LABELS = {  # axis of `ParallelState` -> name in tables
    "tp": "tp",
    "cp": "cp",
    "dp_cp": "dp",
    "ep": "ep",
    "etp": "ep",
    "experts": "ep",
}


class LayerKind(NamedTuple):
    """Properties in which the layers of a model differ."""

    experts: bool = False
    window: bool = False
    cp_comm_type: str = "p2p"


class PassCost(NamedTuple):
    """Bytes of a part of a model for one micro-batch."""

    kept: int
    """Kept from forward to backward, with the input."""
    temporary: int
    """Maximum held during backward in addition to `kept`."""
    tables: int
    """Kept between iterations: rotary tables and fixed masks."""
    sent: Counter[tuple[str, str]]
    """Bytes of the unsharded tensors in collectives, by axis and operation."""


class Part(NamedTuple):
    """A part of a chunk that runs on its own: consecutive layers, or one end of the model."""

    layers: range = range(0)
    """Global layer numbers."""
    pre_process: bool = False
    post_process: bool = False
    recompute: bool = False
    """Whether only the input of the layers is kept (--recompute-granularity full)."""
    is_after_frozen: bool = False
    """Whether the input has no gradient, since the embedding is frozen (--lora-rank)."""


class PassCosts:
    """Costs of the parts of a run's model; a process measures equal parts once."""

    _measured: ClassVar[dict[str, PassCost]] = {}

    def __init__(
        self, config: Config, ps: ParallelState, model_provider: ModelProvider, device_type: str
    ) -> None:
        """Initialize for one rank; those of other stages have the same costs."""
        self._config = config
        self._ps = ps
        self._model_provider = model_provider
        self._device = torch.device(device_type)
        self._kind_of_layer: dict[int, LayerKind] = {}
        self._cost_of_kind: dict[tuple[Any, ...], PassCost] = {}

    @property
    def message_bytes(self) -> int:
        """Bytes of the residual stream of a rank, which pipeline stages exchange."""
        itemsize = self._config.model.params_dtype.itemsize
        return math.prod(compute_message_shape(self._config)) * itemsize

    def measure(self, part: Part) -> PassCost:
        """Return the cost of a part."""
        kinds = [self.get_layer_kind(layer) for layer in part.layers]
        options = part[1:]  # all fields except the layers
        key = (*kinds, *options)
        if key not in self._cost_of_kind:
            self._cost_of_kind[key] = self._measure_kind(part, key)
        return self._cost_of_kind[key]

    def get_layer_kind(self, layer: int) -> LayerKind:
        """Return the kind of a layer by its global number."""
        if layer not in self._kind_of_layer:
            # Kept, because the model computes the pattern of its layers for each call.
            model = self._config.model
            self._kind_of_layer[layer] = LayerKind(
                experts=bool(model.moe_layer_pattern[layer]),
                window=bool(model.window_pattern[layer]),
                cp_comm_type=self._config.parallel.cp_comm_type_of(layer),
            )
        return self._kind_of_layer[layer]

    def _measure_kind(self, part: Part, kind: tuple[Any, ...]) -> PassCost:
        """Return the cost of a part unless an equal one was measured for another layout."""
        config = self._select_options(part)
        parallel = config.parallel
        key = repr(
            (
                self._model_provider,
                self._device,
                kind,
                config.model,
                config.lora,
                config.training.micro_batch_size,
                config.distributed.compile,
                config.distributed.triton_kernels,
                config.data.seq_length,
                config.data.reset_attention_mask,
                config.ddp.grad_dtype(config.model.params_dtype),
                parallel.tp_size,
                parallel.cp_size,
                parallel.etp_size,
                parallel.ep_size,
                parallel.sequence_parallel,
            )
        )
        if key not in self._measured:
            measurement = _Measurement(config, self._ps, self._device)
            self._measured[key] = measurement.run(self._model_provider, part)
        return self._measured[key]

    def _select_options(self, part: Part) -> Config:
        """Return the options with those of recomputation that concern a part."""
        model = replace(self._config.model, **LOCAL_BACKEND_FIELDS)
        if part.recompute:
            # One group of all layers
            model = replace(
                model, recompute_method="uniform", recompute_num_layers=len(part.layers)
            )
        elif not (model.num_mtp_layers and part.post_process):
            is_full = model.recompute_granularity == "full"
            if is_full or not part.layers:
                model = replace(model, **_NO_RECOMPUTATION)
        return replace(self._config, model=model)


_NO_RECOMPUTATION: dict[str, Any] = {
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "recompute_modules": None,
}


def list_parts(model: TransformerConfig, chunk: MetaChunk) -> list[Part]:
    """Return the parts of a chunk in the order of forward."""
    parts = []
    if chunk.pre_process:
        parts.append(Part(pre_process=True))
    for start, stop, recompute in list_layer_groups(model, len(chunk.layers)):
        layers = chunk.layers[start:stop]
        if recompute:
            parts.append(Part(layers, recompute=True))
        else:
            parts += [Part(layers[index : index + 1]) for index in range(len(layers))]
    if chunk.pre_process and not chunk.saves_frozen and len(parts) > 1:
        parts[1] = parts[1]._replace(is_after_frozen=True)
    if chunk.post_process:
        parts.append(Part(post_process=True))
    return parts


def compute_message_shape(config: Config) -> tuple[int, int, int]:
    """Return the shape of the residual stream of a rank."""
    length = config.data.seq_length // config.parallel.cp_size
    if config.parallel.sequence_parallel:
        length //= config.parallel.tp_size
    return length, config.training.micro_batch_size, config.model.hidden_size


class _Measurement:
    """Forward and backward of one micro-batch through a part of a model."""

    def __init__(self, config: Config, ps: ParallelState, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._sent: Counter[tuple[str, str]] = Counter()
        self._ps = self._add_groups(ps)

    def run(self, model_provider: ModelProvider, part: Part) -> PassCost:
        """Return the cost of a part."""
        rng = TensorParallelRng(0, self._ps.tp.rank)
        spec = ChunkSpec(
            part.layers, part.pre_process, part.post_process, self._ps, rng, torch.device("meta")
        )
        inputs = self._make_inputs()
        planned_device = PlannedDevice(self._device, self._count_rows())
        with ExitStack() as stack:
            stack.enter_context(groups_known(self._ps))
            stack.enter_context(shapes_compared())
            if self._config.model.recompute_granularity is None:
                stack.enter_context(compiler_absent())
            live = stack.enter_context(LiveBytes())
            stack.enter_context(planned_device)
            chunk = model_provider(self._config, spec)
            self._add_main_grads(chunk)
            seed = torch.zeros((), requires_grad=True)
            at_start = live.count()
            # The first pass makes tables, for which it needs more memory than any other. The peak
            # of the loss may be in forward, that of layers is in backward.
            num_passes = 1 + part.post_process
            for _ in range(num_passes):
                self._sent.clear()
                live.reset()
                root = self._run_forward(chunk, part, inputs, seed)
                after_forward = live.count() - root.nbytes
                if not part.post_process:
                    live.reset()
                if root.requires_grad:  # not the embedding of a frozen model
                    run_backward(root)
                del root
            at_end = live.count()
        kept = after_forward - at_end
        if not part.recompute:
            kept += len(part.layers) * self._count_compiled()
        return PassCost(kept, live.peak - after_forward, at_end - at_start, self._sent)

    def _count_compiled(self) -> int:
        """Return the bytes that a compiled layer keeps besides those of a layer that is not.

        Without the kernel of the rotation, the values are a view of the output of `linear_qkv`,
        which is then kept next to the rotated queries and keys. Measured on an H100: 51.5 GB
        instead of 48.5 GB with 22 layers.
        """
        model = self._config.model
        has_kernels = self._device.type == "cuda" and self._config.distributed.triton_kernels
        if has_kernels and model.rope_fusion:
            return 0
        copies_heads = model.position_embedding_type == "rope" and not model.qk_layernorm
        if not self._config.distributed.compile or model.multi_latent_attention or not copies_heads:
            return 0
        num_tokens = self._config.data.seq_length * self._config.training.micro_batch_size
        num_heads = model.num_attention_heads + model.query_groups
        width = num_heads * model.head_dim // self._config.parallel.tp_size
        itemsize = model.params_dtype.itemsize
        return num_tokens // self._config.parallel.cp_size * width * itemsize

    def _run_forward(
        self, chunk: MegatronModule, part: Part, inputs: dict[str, Tensor], seed: Tensor
    ) -> Tensor:
        """Return the root of the graph of a pass, whose gradient is a scalar."""
        config = self._config
        hidden_states = None
        if not part.pre_process:
            shape = compute_message_shape(config)
            if part.is_after_frozen:
                seed = seed.detach()
            hidden_states = _Receive.apply(seed, shape, config.model.params_dtype)
        output = chunk(input_tensor=hidden_states, **inputs)
        if not part.post_process:
            return _Send.apply(output)
        if isinstance(output, TokenLosses):
            return (output.next_token * inputs["loss_mask"]).sum() + output.mtp_totals.sum()
        return (output * inputs["loss_mask"]).sum()

    def _make_inputs(self) -> dict[str, Tensor]:
        """Return the data of a micro-batch, with one document per sample."""
        config = self._config
        batch_size = config.training.micro_batch_size
        shape = (batch_size, config.data.seq_length // config.parallel.cp_size)
        tokens = torch.empty(shape, dtype=torch.int64, device="meta")
        inputs = {
            "tokens": tokens,
            "position_ids": tokens,
            "labels": tokens,
            "loss_mask": torch.empty(shape, device="meta"),
        }
        if config.data.reset_attention_mask:
            # In host memory, as in training: their lengths decide which blocks are computed.
            inputs["documents"] = torch.zeros(batch_size, config.data.seq_length, dtype=torch.int64)
        return inputs

    def _add_main_grads(self, chunk: MegatronModule) -> None:
        """Give the parameters gradient buffers, as data parallelism does."""
        dtype = self._config.ddp.grad_dtype(self._config.model.params_dtype)
        for parameter in chunk.parameters():
            if parameter.requires_grad:
                parameter.main_grad = torch.empty(  # type: ignore[attr-defined]
                    parameter.shape, dtype=dtype
                )
                parameter.register_post_accumulate_grad_hook(_release_gradient)

    def _add_groups(self, ps: ParallelState) -> ParallelState:
        """Return the position of a rank with stand-ins for its process groups."""
        axes: dict[str, Axis] = {}
        for name, label in _LABELS.items():
            axis: Axis = getattr(ps, name)
            if axis.size > 1:
                axes[name] = replace(axis, group=RecordingGroup(axis, label, self._sent))
        return replace(ps, **axes)  # type: ignore[arg-type]

    def _count_rows(self) -> int:
        """Return the number of rows that the experts of a rank process, if their load is equal."""
        length, batch_size, _ = compute_message_shape(self._config)
        return length * batch_size * self._config.model.moe_router_topk * self._ps.etp.size


def _release_gradient(parameter: Tensor) -> None:
    """Release the gradient of a parameter, which data parallelism adds to its buffer."""
    parameter.grad = None


class _Receive(torch.autograd.Function):
    """The input of a part: memory that only those keep who need it for backward."""

    @staticmethod
    def forward(ctx: Any, seed: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return seed.new_empty(shape, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        return None, None, None


class _Send(torch.autograd.Function):
    """Release the output of a part; its gradient exists from the start of backward."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        ctx.shape = output.shape
        ctx.dtype = output.dtype
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.new_empty(ctx.shape, dtype=ctx.dtype)

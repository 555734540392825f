"""Memory and traffic of the passes of a micro-batch, measured by running layers without memory.

One layer of each kind, the embedding, and the output layer with the loss run forward and backward
on torch's meta device, whose tensors have shapes but no data. Nothing about the model is restated
here: a dispatch mode follows the bytes of all tensors, and stand-ins for process groups record the
collectives. What does not follow from shapes is in `_PlannedDevice`.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron.core.models import ChunkSpec, TokenLosses
from megatron.core.module import MegatronModule
from megatron.core.parallel_state import Axis, ParallelState
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.core.transformer.attention.kernels import supports_flash
from megatron.core.transformer.transformer_block import list_layer_groups
from megatron.core.transformer.transformer_config import (
    LOCAL_BACKEND_FIELDS,
    LayerKind,
    TransformerConfig,
)
from megatron.planning.meta_model import MetaChunk
from megatron.training.config.run_config import Config, ModelProvider

META = torch.device("meta")
_ATEN = torch.ops.aten
_LABELS = {  # axis of `ParallelState` -> name in tables
    "tp": "tp",
    "cp": "cp",
    "dp_cp": "dp",
    "ep": "ep",
    "etp": "ep",
    "experts": "ep",
}


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
        self._cost_of_kind: dict[tuple[Any, ...], PassCost] = {}

    @property
    def message_bytes(self) -> int:
        """Bytes of the residual stream of a rank, which pipeline stages exchange."""
        itemsize = self._config.model.params_dtype.itemsize
        return math.prod(compute_message_shape(self._config)) * itemsize

    def measure(self, part: Part) -> PassCost:
        """Return the cost of a part."""
        kinds = [self.get_layer_kind(layer) for layer in part.layers]
        key = (*kinds, part.pre_process, part.post_process, part.recompute)
        if key not in self._cost_of_kind:
            self._cost_of_kind[key] = self._measure_kind(part, key)
        return self._cost_of_kind[key]

    def get_layer_kind(self, layer: int) -> LayerKind:
        """Return the kind of a layer by its global number."""
        comm_type = self._config.parallel.cp_comm_type_of(layer)
        return LayerKind.from_model(self._config.model, layer, comm_type)

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
                config.training.micro_batch_size,
                config.distributed.compile,
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
        planned_device = _PlannedDevice(self._device, self._count_rows())
        with ExitStack() as stack:
            stack.enter_context(_groups_known(self._ps))
            stack.enter_context(_shapes_compared())
            if self._config.model.recompute_granularity is None:
                stack.enter_context(_compiler_absent())
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
                _run_backward(root)
                del root
            at_end = live.count()
        kept = after_forward - at_end
        if not part.recompute:
            kept += len(part.layers) * self._count_compiled()
        return PassCost(kept, live.peak - after_forward, at_end - at_start, self._sent)

    def _count_compiled(self) -> int:
        """Return the bytes that a compiled layer keeps besides those of a layer that is not.

        The values are a view of the output of `linear_qkv`, which is then kept next to the rotated
        queries and keys. Measured on an H100: 51.5 GB instead of 48.5 GB with 22 layers.
        """
        model = self._config.model
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
                axes[name] = replace(axis, group=_RecordingGroup(axis, label, self._sent))
        return replace(ps, **axes)  # type: ignore[arg-type]

    def _count_rows(self) -> int:
        """Return the number of rows that the experts of a rank process, if their load is equal."""
        length, batch_size, _ = compute_message_shape(self._config)
        return length * batch_size * self._config.model.moe_router_topk * self._ps.etp.size


@contextmanager
def _groups_known(ps: ParallelState) -> Iterator[None]:
    """Let torch know the group of CP: for messages it looks up the backend and the ranks."""
    if ps.cp.group is None:
        yield
        return
    world = dist.distributed_c10d._world
    world.pg_map[ps.cp.group] = ("fake", None)  # type: ignore[assignment]
    world.pg_group_ranks[ps.cp.group] = {rank: index for index, rank in enumerate(ps.cp.ranks)}
    try:
        yield
    finally:
        del world.pg_map[ps.cp.group]
        del world.pg_group_ranks[ps.cp.group]


@contextmanager
def _compiler_absent() -> Iterator[None]:
    """Keep torch from importing its compiler, which takes two seconds.

    It computes shapes in Python functions that it excludes from compilation at their first call.
    Recomputation needs the compiler's options.
    """
    name = "torch._dynamo"
    if name in sys.modules:
        yield
        return
    stand_in = ModuleType(name)
    stand_in.disable = lambda function, *options, **names: function  # type: ignore[attr-defined]
    sys.modules[name] = stand_in
    torch._dynamo = stand_in
    try:
        yield
    finally:
        del sys.modules[name]
        del torch._dynamo


@contextmanager
def _shapes_compared() -> Iterator[None]:
    """Let torch compare shapes and dtypes, but not devices, of recomputed tensors.

    Inside torch's functions `_PlannedDevice` does not apply.
    """
    checks = torch.utils.checkpoint._allowed_determinism_checks_to_fns
    default = checks["default"]
    checks["default"] = lambda tensor: (tensor.shape, tensor.dtype)
    try:
        yield
    finally:
        checks["default"] = default


def _run_backward(root: Tensor) -> None:
    """Compute the gradients of a scalar, as `torch.autograd.backward` does.

    That function would disable `_PlannedDevice` inside.
    """
    gradients = (torch.ones_like(root),)
    _engine_run_backward(
        (root,), gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


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


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages of the meta device that were created inside.

    `peak` is their maximum since `reset`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._total = 0
        self.peak = 0

    def count(self) -> int:
        """Return the bytes of the storages that still exist."""
        expired = [key for key, (storage, _) in self._storages.items() if storage.expired()]
        for key in expired:
            _, size = self._storages.pop(key)
            self._total -= size
        return self._total

    def reset(self) -> None:
        """Start to measure the peak from what exists now."""
        self.peak = self.count()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                self._add(tensor.untyped_storage())
        # Counting is slow, and only necessary if the bytes could be a new peak.
        if self._total > self.peak:
            self.peak = max(self.peak, self.count())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        reference, size = self._storages.get(key, (None, 0))
        # Another storage may have had the same address.
        if reference is None or reference.expired():
            self._storages[key] = (StorageWeakRef(storage), storage.nbytes())
            self._total += storage.nbytes() - size


class _Done(dist.Work):
    """A finished operation."""

    def wait(self, *timeout: Any) -> bool:
        return True


class _RecordingGroup(dist.ProcessGroup):
    """Stand-in for the process group of an axis, which counts bytes and moves none."""

    def __init__(self, axis: Axis, label: str, sent: Counter[tuple[str, str]]) -> None:
        super().__init__(axis.rank, axis.size)  # type: ignore[call-arg]
        self._label = label
        self._sent = sent

    def record(self, operation: str, payload: Tensor | list[Tensor]) -> _Done:
        """Count the bytes of one tensor."""
        tensor = payload if isinstance(payload, Tensor) else payload[0]
        self._sent[self._label, operation] += tensor.nbytes
        return _Done()


def _make_operation(operation: str, argument: int) -> Callable[..., _Done]:
    """Make the method of an operation whose unsharded tensor is argument number `argument`."""

    def run(group: _RecordingGroup, *args: Any) -> _Done:
        return group.record(operation, args[argument])

    return run


for _method, _operation, _argument in (
    ("allreduce", "all_reduce", 0),
    ("_allgather_base", "all_gather", 0),
    ("_reduce_scatter_base", "reduce_scatter", 1),
    ("alltoall_base", "all_to_all", 1),
    # The same in torch from 2.13 on
    ("all_gather_single", "all_gather", 0),
    ("reduce_scatter_single", "reduce_scatter", 1),
    ("all_to_all_single", "all_to_all", 1),
    ("send", "send", 0),
):
    setattr(_RecordingGroup, _method, _make_operation(_operation, _argument))
_RecordingGroup.recv = lambda *args: _Done()  # type: ignore[method-assign]


class _FusedNorm(torch.autograd.Function):
    """Norm of one kernel in each direction, which keeps its input and fp32 numbers of each row.

    On the meta device torch would run a dozen operations, and import its compiler.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, num_statistics: int
    ) -> Tensor:
        statistics = x.new_empty(num_statistics, *x.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(x, weight, bias, statistics)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *inputs, _ = ctx.saved_tensors
        gradients = [None if tensor is None else torch.empty_like(tensor) for tensor in inputs]
        return *gradients, None


class _PlannedDevice(TorchFunctionMode):
    """Lets tensors without memory pass for tensors of the planned device.

    Code that selects a kernel by device takes the branch of that device. `num_rows` is the number
    of rows that the experts of a rank process: where code reads such counts, all experts get the
    same.
    """

    def __init__(self, device: torch.device, num_rows: int) -> None:
        super().__init__()
        self._device = device
        self._num_rows = num_rows

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        replacement = _REPLACEMENTS.get(func)
        if replacement is not None and args[0].is_meta:
            return replacement(self, *args, **kwargs)
        if func in _device_constructors():
            kwargs.setdefault("device", META)
            kwargs.pop("pin_memory", None)
        args, kwargs = tree_map_only(torch.device, self._replace_device, (args, kwargs))
        return func(*args, **kwargs)

    def _replace_device(self, device: torch.device) -> torch.device:
        return META if device.type == self._device.type else device

    def get_device(self, tensor: Tensor) -> torch.device:
        return self._device

    def is_cuda(self, tensor: Tensor) -> bool:
        return self._device.type == "cuda"

    def read_scalar(self, counts: Tensor) -> int:
        """Return the number of rows of all experts, or 0 for a difference."""
        return 0 if counts.is_floating_point() else self._num_rows

    def read_list(self, counts: Tensor) -> list[Any]:
        """Return equal numbers of rows for the entries of the last dimension."""
        if counts.dim() > 1:
            return [self.read_list(row) for row in counts]
        quotient, remainder = divmod(self._num_rows, len(counts))
        return [quotient + (index < remainder) for index in range(len(counts))]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Run the kernel that torch's SDPA selects on the planned device."""
        is_cpu = self._device.type == "cpu"
        if is_cpu and dropout_p:
            # Plain products, which keep all scores
            out, _ = _ATEN._scaled_dot_product_attention_math(
                query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
            return out
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
        if is_cpu:
            return _ATEN._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
            )[0]
        # cuDNN's kernel, which torch prefers on some GPUs, keeps the same as flash attention.
        if mask is None and supports_flash("cuda", query.dtype, query.shape[-1]):
            return _ATEN._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, scale=scale
            )[0]
        return _ATEN._scaled_dot_product_efficient_attention(
            query, key, value, mask, True, dropout_p, is_causal, scale=scale
        )[0]

    def drop(
        self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """Drop elements; CUDA keeps a mask of booleans, the CPU one in the dtype of `x`."""
        if self._device.type == "cuda":
            return torch.native_dropout(x, p, training)[0]
        return F.dropout(x, p, training)

    def normalize_rms(
        self, x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float = 1e-5
    ) -> Tensor:
        """Run a fused RMSNorm, which keeps the scale of each row."""
        return _FusedNorm.apply(x, weight, None, 1)

    def normalize(
        self,
        x: Tensor,
        shape: Sequence[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        """Run a fused LayerNorm, which keeps the scale and the mean of each row."""
        return _FusedNorm.apply(x, weight, bias, 2)

    def add_product(self, total: Tensor, *matrices: Tensor, **options: Any) -> Tensor:
        """Add a product to an fp32 matrix in one kernel, which exists on CUDA only."""
        if "out_dtype" in options:
            return total
        return torch.addmm(total, *matrices, **options)


_REPLACEMENTS: dict[Callable[..., Any], Callable[..., Any]] = {
    Tensor.device.__get__: _PlannedDevice.get_device,
    Tensor.is_cuda.__get__: _PlannedDevice.is_cuda,  # type: ignore[attr-defined]
    Tensor.item: _PlannedDevice.read_scalar,
    Tensor.__int__: _PlannedDevice.read_scalar,
    Tensor.tolist: _PlannedDevice.read_list,
    F.scaled_dot_product_attention: _PlannedDevice.attend,
    F.dropout: _PlannedDevice.drop,
    F.layer_norm: _PlannedDevice.normalize,
    F.rms_norm: _PlannedDevice.normalize_rms,
    torch.addmm: _PlannedDevice.add_product,
}

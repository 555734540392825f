"""`--compile`: compile the transformer layers of a chunk with torch.compile."""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.distributed.distributed_data_parallel import iterate_outermost_layers
from megatron.core.fused_kernels import prepare_tracing
from megatron.core.module import MegatronModule
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import placement
from megatron.core.transformer.attention import core as core_attention
from megatron.core.transformer.attention.multi_head import Attention
from megatron.core.wings import resolve

# Functions that exchange data between ranks and overlap that with the kernels of attention, or that
# call kernels directly.
_UNCOMPILED = (
    (core_attention, "attend_over_ranks"),
    (core_attention, "local_attention"),
    (placement, "exchange_sequence_for_heads"),
    (placement, "exchange_heads_for_sequence"),
)

_NUMBER_LAYER = "megatron.core.tensor_parallel.opaque_linear:number_layer"
_RUN_OPAQUE_LINEAR = "megatron.core.tensor_parallel.opaque_linear:run_opaque_linear"
# Products of local layers, and the methods that replace them
_LOCAL_PROJECTIONS = (ColumnParallelLinear.project, RowParallelLinear.project)
_opaque_projections: list[Any] = []


def compile_layers(chunk: MegatronModule, seq_length: int) -> None:
    """Compile norms, rotation, attention, activation and residual sums of every layer.

    Layers of the same shape share one compilation. A dense local layer is one graph, in which the
    product of a linear layer is an operator (`opaque_linear`): a library call in any case, which
    adds to gradient buffers and overlaps with collectives. A graph ends before experts and before
    losses of their router. Modules, hooks and keys stay the same.
    Rotary tables of `seq_length` positions are computed before: in a graph, the first layer would
    differ from all others.
    """
    first_param = next(chunk.parameters(), None)
    if first_param is not None:
        prepare_tracing(first_param)
        _prepare_rotary_tables(chunk, seq_length, first_param)
    for owner, name in _UNCOMPILED:
        _leave_uncompiled(owner, name)
    number_layer = resolve(_NUMBER_LAYER)
    for outermost in iterate_outermost_layers(chunk):
        # Those of multi-token prediction contain a transformer layer.
        layer = getattr(outermost, "transformer_layer", outermost)
        if layer.has_experts:
            experts: Any = layer.mlp
            _leave_uncompiled(type(experts), "run_experts")
            _leave_uncompiled(type(experts.router), "attach_losses")
        for module in layer.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                # Replace the method of the class: torch before 2.8 compiles again for every module
                # that has its own function.
                _make_opaque(type(module))
                number_layer(module)
        # `fallback_random`: dropout draws the same numbers as without compilation.
        compiled = torch.compile(layer.forward, options={"fallback_random": True})
        layer.forward = compiled  # type: ignore[method-assign]


def _prepare_rotary_tables(chunk: MegatronModule, seq_length: int, param: torch.Tensor) -> None:
    for module in chunk.modules():
        if isinstance(module, Attention) and module.rotary is not None:
            module.rotary.prepare(seq_length, param.dtype, param.device)


def _leave_uncompiled(owner: Any, name: str) -> None:
    """Exclude a function from compilation.

    This is not a decorator of the function, because `torch.compiler.disable` imports the compiler,
    which takes as long as importing torch itself.
    """
    function = getattr(owner, name)
    if not hasattr(function, "_torchdynamo_disable"):
        setattr(owner, name, torch.compiler.disable(function))


def _make_opaque(linear_type: Any) -> None:
    """Let graphs contain the products of a class of linear layers, as operators."""
    if linear_type.project in _opaque_projections:
        return
    if linear_type.project not in _LOCAL_PROJECTIONS:
        # Products of other backends and of adapters
        _leave_uncompiled(linear_type, "project")
        return
    uncompiled = torch.compiler.disable(linear_type.project)
    run_opaque_linear = resolve(_RUN_OPAQUE_LINEAR)

    def project(layer: Any, x: torch.Tensor) -> torch.Tensor:
        # Frozen weights do not have a gradient buffer.
        if torch.compiler.is_compiling() and hasattr(layer.weight, "main_grad"):
            output: torch.Tensor = run_opaque_linear(layer, x)
            return output
        return uncompiled(layer, x)  # type: ignore[no-any-return]

    linear_type.project = project
    _opaque_projections.append(project)


def check_compiler(device: torch.device) -> None:
    """Compile a trivial function, and discard earlier compilations.

    Raises ValueError with the reason if torch.compile does not work on this machine.
    """
    try:
        torch.compiler.reset()
        torch.compile(lambda x: x.sin() + 1)(torch.ones(2, device=device))
    except Exception as error:  # of a backend, a compiler or a system library
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(
            f"--compile: torch.compile does not work here ({type(error).__name__}: {reason}); it "
            "needs a C++ compiler on the CPU ($CXX or g++) and Triton on CUDA: install them, or "
            "leave out --compile"
        ) from error

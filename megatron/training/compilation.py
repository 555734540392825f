"""`--compile`: compile the operations between the linear layers of a chunk with torch.compile."""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.distributed.distributed_data_parallel import iterate_outermost_layers
from megatron.core.module import MegatronModule
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import placement
from megatron.core.transformer.attention import core as core_attention
from megatron.core.transformer.attention.multi_head import Attention

# Functions that exchange data between ranks and overlap that with the kernels of attention, or that
# call kernels directly.
_UNCOMPILED = (
    (core_attention, "attend_over_ranks"),
    (core_attention, "local_attention"),
    (placement, "exchange_sequence_for_heads"),
    (placement, "exchange_heads_for_sequence"),
)


def compile_layers(chunk: MegatronModule, seq_length: int) -> None:
    """Compile norms, rotation, attention, activation and residual sums of every layer.

    Layers of the same shape share one compilation. The matrix products of linear layers are not
    compiled: they are library calls in any case, and they add to gradient buffers and overlap with
    collectives. Modules, hooks and keys stay the same. Rotary tables of `seq_length` positions are
    computed before: in a graph, the first layer would differ from all others.
    """
    _prepare_rotary_tables(chunk, seq_length)
    for owner, name in _UNCOMPILED:
        _leave_uncompiled(owner, name)
    for outermost in iterate_outermost_layers(chunk):
        # Those of multi-token prediction contain a transformer layer.
        layer = getattr(outermost, "transformer_layer", outermost)
        for module in layer.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                # Replace the method of the class: torch before 2.8 compiles again for every module
                # that has its own function.
                _leave_uncompiled(type(module), "project")
        # `fallback_random`: dropout draws the same numbers as without compilation.
        compiled = torch.compile(layer.forward, options={"fallback_random": True})
        layer.forward = compiled  # type: ignore[method-assign]


def _prepare_rotary_tables(chunk: MegatronModule, seq_length: int) -> None:
    first_param = next(chunk.parameters(), None)
    for module in chunk.modules():
        if isinstance(module, Attention) and module.rotary is not None:
            assert first_param is not None
            module.rotary.prepare(seq_length, first_param.dtype, first_param.device)


def _leave_uncompiled(owner: Any, name: str) -> None:
    """Exclude a function from compilation.

    This is not a decorator of the function, because `torch.compiler.disable` imports the compiler,
    which takes as long as importing torch itself.
    """
    function = getattr(owner, name)
    if not hasattr(function, "_torchdynamo_disable"):
        setattr(owner, name, torch.compiler.disable(function))


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

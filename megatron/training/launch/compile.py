"""`--compile`: torch.compile for every transformer layer."""

from __future__ import annotations

import torch

from megatron.core.distributed.distributed_data_parallel import outermost_layers
from megatron.core.module import MegatronModule
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear


def compile_layers(chunk: MegatronModule) -> None:
    """Compile what lies between the linear layers: norms, rotation, attention, activation, residual sums.

    One compilation serves all layers of one shape. The linear layers are left as they are: their matrix products are
    library calls in any case, and they add to gradient buffers and overlap with collectives. Modules, hooks and keys
    stay the same, only `forward` is replaced.
    """
    for layer in outermost_layers(chunk):
        for module in layer.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
        # dropout draws the numbers that it draws without compilation
        layer.forward = torch.compile(layer.forward, options={"fallback_random": True})  # type: ignore[method-assign]


def check_compiler(device: torch.device) -> None:
    """ValueError with the reason when torch.compile does not work here; forgets what was compiled before."""
    try:
        torch.compiler.reset()
        torch.compile(lambda x: x.sin() + 1)(torch.ones(2, device=device))
    except Exception as error:  # whatever backend, compiler or system library it is that fails
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"--compile: torch.compile does not work here ({type(error).__name__}: {reason[0]}); it needs a C++ "
            "compiler on the CPU ($CXX or g++) and Triton on CUDA: install them, or leave out --compile"
        ) from error

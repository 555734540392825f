"""Run Megatron-LM's own `pretrain_gpt.py` on CPU, continuing from a checkpoint of ours.

    torchrun --nproc-per-node N megatron_lm_train.py SOURCE LOSSES [flags of pretrain_gpt.py]

Runs in a virtual environment with torch and megatron-core, without this project. SOURCE is a
checkout of Megatron-LM of the same release: `pretrain_gpt.py` and what the package lacks of the
trainer come from there, `megatron.core` from the package. LOSSES gets a JSON object: iteration ->
loss of the language model, of the last stage.

Sources are unmodified. At run time CUDA's devices, streams and generators are replaced by those of
the CPU or by nothing, compiled and Triton kernels are left out, and Adam is `FusedAdam` of this
file, in the form of Apex's.
"""

import contextlib
import importlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from megatron_core_load import CpuForCuda, FusedAdam, stand_in_for_cuda


class CpuTrainer(CpuForCuda):
    """Redirect CUDA devices in the trainer to the CPU, like `CpuForCuda` in megatron-core."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is torch.Tensor.pin_memory:
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)


class Nothing:
    """A stream or an event of a synchronous device."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class TrainingAdam(FusedAdam):
    """AdamW with decoupled weight decay (Loshchilov and Hutter), in fp32."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            group["step"] = step = group.get("step", 0) + 1
            for param in (p for p in group["params"] if p.grad is not None):
                state = self.state[param]
                state["exp_avg"].lerp_(param.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
                denominator = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
                update = (
                    state["exp_avg"] / (1 - beta1**step) / denominator
                    + group["weight_decay"] * param
                )
                param.sub_(update, alpha=group["lr"])


def replace_cuda() -> None:
    stand_in_for_cuda(CpuTrainer, TrainingAdam)
    cuda = torch.cuda
    cuda.is_available = lambda: True  # the trainer refuses to start without
    cuda.device_count = lambda: 8
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.Stream = cuda.Event = cuda.current_stream = cuda.default_stream = Nothing
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.get_device_properties = lambda *_: MagicMock(major=9, minor=0)
    cuda.memory_stats = lambda *_: {}
    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(cuda, name, lambda *_: None)
    for name in (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
    ):
        setattr(cuda, name, lambda *_: 0)
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda *_, **__: torch.zeros(16, dtype=torch.uint8)
        for name in ("set_rng_state", "manual_seed", "manual_seed_all"):
            setattr(module, name, lambda *_, **__: None)


def leave_out_kernels() -> None:
    """Skip the compilation of helpers, which the package contains, and of GPU kernels."""
    torch._dynamo.config.disable = True
    triton = MagicMock(is_batch_invariant_mode_enabled=lambda: False)
    sys.modules["megatron.core.transformer.custom_layers.batch_invariant_kernels"] = triton
    importlib.import_module("megatron.core.datasets.utils").compile_helpers = lambda: None
    with contextlib.suppress(ModuleNotFoundError):  # 0.19 has none
        importlib.import_module("megatron.legacy.fused_kernels").load = lambda _: None


def load_without_gradients() -> None:
    """Load legacy files of an fp32 model: the trainer copies into views of parameters."""
    training = importlib.import_module("megatron.training.training")
    training.load_checkpoint = torch.no_grad()(training.load_checkpoint)


def record_losses(path: Path) -> None:
    """Record every loss unrounded; the log's first line also counts into its second."""
    training = importlib.import_module("megatron.training.training")
    training_log = training.training_log
    losses = {}

    def recording(loss_dict: dict, *rest: Any, **named: Any) -> Any:
        if loss_dict:  # of the last stage
            losses[iteration(rest, named)] = loss_dict["lm loss"].item()
            path.write_text(json.dumps(losses))
        return training_log(loss_dict, *rest, **named)

    def iteration(rest: tuple, named: dict) -> int:
        code = training_log.__code__
        names = code.co_varnames[1 : code.co_argcount]
        return (dict(zip(names, rest, strict=False)) | named)["iteration"]

    training.training_log = recording


def main() -> None:
    source, losses, *flags = sys.argv[1:]
    sys.path.append(source)  # after the package: it has megatron.core with its compiled helpers
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    replace_cuda()
    leave_out_kernels()
    load_without_gradients()
    record_losses(Path(losses))
    sys.argv = [str(Path(source) / "pretrain_gpt.py"), *flags]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()

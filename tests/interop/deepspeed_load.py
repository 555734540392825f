"""Load a universal checkpoint with real DeepSpeed on CPU, compare every value, and take one
optimizer step.

    torchrun --nproc-per-node TP deepspeed_load.py DIRECTORY [--bf16]

Runs in a virtual environment with torch and deepspeed, without this project. Every rank is one
tensor-parallel rank: its slices are cut here from the files by the rules of Megatron's layers, and
must be what DeepSpeed's loader made of them: fp32 parameters, both moments, the step. Then one
AdamW step with a known gradient must give what AdamW computes by hand.
"""

import argparse
import math
import os
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

LR = 1e-3
BETAS = (0.9, 0.95)
EPS = 1e-8


class TensorParallelUnit:
    """Model-parallel unit for DeepSpeed: all ranks form one tensor-parallel group."""

    def __init__(self) -> None:
        self.alone = next(
            g
            for r in range(dist.get_world_size())
            if (g := dist.new_group([r])) and r == dist.get_rank()
        )

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank()

    get_tensor_model_parallel_rank = get_slice_parallel_rank = get_model_parallel_rank

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size()

    get_tensor_model_parallel_world_size = get_slice_parallel_world_size = (
        get_model_parallel_world_size
    )

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return dist.group.WORLD

    get_tensor_model_parallel_group = get_slice_parallel_group = get_model_parallel_group

    def get_data_parallel_rank(self) -> int:
        return 0

    def get_data_parallel_world_size(self) -> int:
        return 1

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.alone


def files_of(directory: Path, name: str) -> dict[str, torch.Tensor]:
    """Return the slices of this rank: `fp32`, `exp_avg`, `exp_avg_sq`."""
    folder = directory / "zero" / name
    return {
        state: local_slice(
            name,
            torch.load(folder / f"{state}.pt", weights_only=False)["param"].detach(),
        )
        for state in ("fp32", "exp_avg", "exp_avg_sq")
    }


def is_split(name: str) -> bool:
    columns = (
        "word_embeddings.weight",
        "lm_head.weight",
        "query_key_value.weight",
        "query_key_value.bias",
    )
    return (
        name.endswith((*columns, "dense.weight", "dense_4h_to_h.weight")) or "dense_h_to_4h" in name
    )


def local_slice(name: str, full: torch.Tensor) -> torch.Tensor:
    rank = dist.get_rank()
    size = dist.get_world_size()
    if not is_split(name):
        return full

    if name.endswith(("word_embeddings.weight", "lm_head.weight")):
        rows = (
            math.ceil(len(full) / (4 * size)) * 4 * size
        )  # padded to a multiple of 4 per rank, with zeros
        return torch.cat([full, full.new_zeros(rows - len(full), full.shape[1])]).chunk(size)[rank]

    if name.endswith(("dense.weight", "dense_4h_to_h.weight")):
        return full.chunk(size, dim=1)[rank]
    if "dense_h_to_4h" in name and swiglu:
        return torch.cat([half.chunk(size)[rank] for half in full.chunk(2)])
    return full.chunk(size)[rank]


class Parameters(torch.nn.Module):
    """A model with arbitrary dotted parameter names and a loss with a known gradient."""

    def __init__(self, shapes: dict[str, torch.Size]) -> None:
        super().__init__()

        for name, shape in shapes.items():
            module: torch.nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module._modules[part]
            module.register_parameter(last, torch.nn.Parameter(torch.zeros(shape)))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return sum((p.float() * gradient(p.shape)).sum() for p in self.parameters()) * factor


def gradient(shape: torch.Size) -> torch.Tensor:
    """Return a gradient that is exact in bf16 and too small to be clipped."""
    return (torch.arange(shape.numel()).view(shape) % 7 - 3) / 4096.0


def main() -> None:
    global swiglu
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()
    deepspeed.init_distributed("gloo")
    root = args.directory
    tag = (root / "latest_universal").read_text()
    folder = root / tag
    state = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)
    swiglu = state["args"].swiglu

    names = sorted(path.name for path in (folder / "zero").iterdir() if path.is_dir())
    expected = {name: files_of(folder, name) for name in names}
    step = torch.load(folder / "zero" / names[0] / "step.pt", weights_only=False)
    model = Parameters({name: values["fp32"].shape for name, values in expected.items()})
    for name, parameter in model.named_parameters():
        parameter.tensor_model_parallel = is_split(
            name
        )  # else only rank 0 counts it in the gradient norm

    stored_groups = torch.load(folder / "zero" / "optimizer_state.pt", weights_only=False)[
        "param_groups"
    ]
    engine = make_engine(model, args.bf16, len(stored_groups))
    path, client_state = engine.load_checkpoint(str(root))

    assert path is not None
    assert client_state["iteration"] == state["iteration"]
    assert engine.global_steps == state["global_steps"]

    compare(engine, expected)

    for mine, expected_group in zip(engine.optimizer.param_groups, stored_groups, strict=True):
        assert all(
            mine[key] == value for key, value in expected_group.items() if key != "params"
        ), (
            mine,
            expected_group,
        )

    for group in engine.optimizer.param_groups:
        group["lr"] = LR

    engine.backward(engine(torch.ones(())))
    engine.step()
    compare(
        engine,
        {name: stepped(values, int(step) + 1) for name, values in expected.items()},
        tolerance=1e-6,
    )

    if dist.get_rank() == 0:
        precision = "bf16" if args.bf16 else "fp32"
        print(
            f"deepspeed {deepspeed.__version__}: {len(names)} parameters, "
            f"TP{dist.get_world_size()}, {precision}: ok"
        )


def make_engine(model: torch.nn.Module, bf16: bool, num_groups: int) -> deepspeed.DeepSpeedEngine:
    """Return an engine with two parameter groups, or three as in BigScience's fork."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    half = len(decayed) // 2
    parts = [decayed] if num_groups == 2 else [decayed[:half], decayed[half:]]
    groups = [{"params": part, "weight_decay": 0.1} for part in parts] + [
        {"params": others, "weight_decay": 0.0}
    ]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": True},
    }
    if bf16:
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=config,
        mpu=TensorParallelUnit(),
    )
    return engine


def stepped(values: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    """Return the parameter after a step of AdamW, computed from its definition."""
    param = values["fp32"]
    grad = gradient(values["fp32"].shape)
    exp_avg = BETAS[0] * values["exp_avg"] + (1 - BETAS[0]) * grad
    exp_avg_sq = BETAS[1] * values["exp_avg_sq"] + (1 - BETAS[1]) * grad * grad
    update = exp_avg / (1 - BETAS[0] ** step) / ((exp_avg_sq / (1 - BETAS[1] ** step)).sqrt() + EPS)
    weight_decay = 0.1 if param.dim() > 1 else 0.0
    return {
        "fp32": param * (1 - LR * weight_decay) - LR * update,
        "exp_avg": exp_avg,
        "exp_avg_sq": exp_avg_sq,
    }


def compare(engine: deepspeed.DeepSpeedEngine, expected: dict, tolerance: float = 0.0) -> None:
    for name, parameter in engine.module.named_parameters():
        values = {"fp32": safe_get_full_fp32_param(parameter)}
        values |= {
            state: safe_get_full_optimizer_state(parameter, state)
            for state in ("exp_avg", "exp_avg_sq")
        }
        for state, value in values.items():
            error = (value.view(-1) - expected[name][state].reshape(-1)).abs().max().item()
            assert error <= tolerance, f"{name} {state}: off by {error}"


if __name__ == "__main__":
    main()

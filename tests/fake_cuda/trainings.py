"""Training runs on fake devices, with everything that must not depend on delays."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron.core.module import MegatronModule
from megatron.core.transformer.moe.router import Routing, find_routers
from megatron.training.run import Batch, ForwardStep
from tests.fake_cuda.forks import run_ranks
from tests.support.count_calls import CountCalls
from tests.support.idle_experts import step_with_idle_experts
from tests.support.training_harness import forward_step, train


def hash_tensor(tensor: torch.Tensor) -> str:
    values = tensor.detach().cpu().contiguous()
    return hashlib.sha256(values.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def hash_files(directory: str) -> dict[tuple[str, str, str], str]:
    """Return the hashes of the data files of checkpoints and exports, by folder, iteration and
    name.

    The names of node-local checkpoints also contain random numbers.
    """
    root = Path(directory)
    hashes = {}
    for path in sorted([*root.rglob("*.distcp"), *root.rglob("*.safetensors")]):
        folder = path.relative_to(root).parts[0]
        iteration = path.parent.name[: len("iter_0000000")]
        hashes[folder, iteration, path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashes


def train_and_hash(
    rank: int, world_size: int, flags: str, step: ForwardStep = forward_step
) -> dict[str, Any]:
    """Train, and return all losses, norms and hashes of the final weights and optimizer.

    Norms are texts, because the one of an overflow does not equal itself.
    """
    outcome = train(rank, world_size, flags, forward_step=step)
    points = outcome.measured.points
    evaluations = {key: value for key, value in points.items() if key[0].startswith("lm loss")}
    return {
        "losses": outcome.measured.losses,
        "mtp_losses": outcome.measured.metrics,
        "evaluations": evaluations,
        "grad_norms": repr(outcome.measured.grad_norms),
        "skipped": outcome.measured.skipped,
        "tensors": {(key, offset): hash_tensor(values) for key, _, offset, values in outcome.boxes},
    }


def train_with_idle_experts(rank: int, world_size: int, flags: str) -> dict[str, Any]:
    """Train with biases of the routers that let no token choose the second half of the experts.

    The result also contains the largest number of a chosen expert.
    """
    largest: list[torch.Tensor] = []  # on the device

    def add_largest(router: nn.Module, inputs: Any, routing: Routing) -> None:
        largest.append(routing.experts.amax())

    def step(chunk: MegatronModule, batch: Batch, activation: torch.Tensor | None) -> Any:
        if not largest:
            for router in find_routers([chunk]):
                router.register_forward_hook(add_largest)
        return step_with_idle_experts(chunk, batch, activation)

    result = train_and_hash(rank, world_size, flags, step)
    return {**result, "largest_expert": int(torch.stack(largest).max())}


def count_attention_kernels(rank: int, world_size: int, flags: str) -> dict[str, int]:
    """Train, and return the number of calls of each kernel of attention."""
    with CountCalls() as calls:
        train(rank, world_size, flags)
    return {name: count for name, count in calls.count.items() if "attention" in name}


def train_on_node(
    rank: int, world_size: int, flags: str, directory: str, before: Callable[[], None] | None
) -> dict[str, Any]:
    """Train; each rank is a node with a disk of its own for the node-local tier."""
    os.chdir(directory)
    if before is not None:
        before()
    if "--non-persistent-ckpt-type" in flags:
        disk = f"node{rank}"
        os.makedirs(disk, exist_ok=True)
        flags += f"--non-persistent-local-ckpt-dir {disk} "
    return train_and_hash(rank, world_size, flags)


def train_ranks(
    num_devices: int,
    flags: str,
    timeout: float = 150.0,
    before: Callable[[], None] | None = None,
    **settings: str,
) -> tuple[list[dict[str, Any]], dict[tuple[str, str, str], str]]:
    """Return the outcomes of all ranks, and the hashes of their checkpoints.

    Every rank calls `before` first.
    """
    with tempfile.TemporaryDirectory() as directory:
        if "--save-interval" in flags:
            # Relative to the temporary directory, because checkpoints contain the flags.
            flags += "--save saved "
        outcomes = run_ranks(
            train_on_node, num_devices, flags, directory, before, timeout=timeout, **settings
        )
        return outcomes, hash_files(directory)

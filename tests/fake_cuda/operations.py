"""Operations on fake devices whose waits no training run of these tests depends on.

Each returns the same value for any delays.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.core.deferred import start_copy
from megatron.core.dist_checkpointing import Box, save
from megatron.core.dist_checkpointing.background import SLOT_SIZE
from megatron.core.dist_checkpointing.loading.reader import Reader
from megatron.core.dist_checkpointing.saving import device_staging
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.mappings import gather_from_tensor_parallel
from megatron.training.config.run_options import DataLoaderConfig
from megatron.training.data.loaders import DataIterator
from tests.fake_cuda.forks import run_ranks
from tests.fake_cuda.staging import is_snapshot_intact, make_state


def save_at_once(rank: int, num_devices: int) -> bool:
    """Change tensors after an asynchronous save whose copies are all queued."""
    with tempfile.TemporaryDirectory() as directory:
        return is_snapshot_intact(Path(directory), waits=True, limit=None)


def save_with_few_buffers(rank: int, num_devices: int) -> bool:
    """Change tensors after an asynchronous save of more data than its staging buffers hold."""
    with tempfile.TemporaryDirectory() as directory:
        return is_snapshot_intact(Path(directory), waits=True, limit=2 * SLOT_SIZE)


def _save_slot_by_slot() -> bool:
    """Save more than may be in flight, so that copies are left when the tensors change."""
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(device_staging, "_COPIED_AT_ONCE", 1)
        return is_snapshot_intact(Path(directory), waits=True, limit=None, num_slots=8)


def save_with_snapshot_on_device(rank: int, num_devices: int) -> bool:
    """Change tensors after the copies that are left were made on the device."""
    before = torch.cuda.max_memory_allocated()
    is_intact = _save_slot_by_slot()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)  # the snapshot is freed
    return is_intact


def save_on_full_device(rank: int, num_devices: int) -> bool:
    """Change tensors after a save whose copies find no memory on the device."""
    free, _ = torch.cuda.mem_get_info()
    filling = torch.empty(free - (1 << 30), dtype=torch.uint8, device="cuda")
    is_intact = _save_slot_by_slot()
    del filling
    return is_intact


def copy_to_host(rank: int, num_devices: int) -> list[float]:
    """Read a copy of which only an event reports when it is complete."""
    wait_for_copy = start_copy(torch.ones(4, device="cuda"))
    values: list[float] = wait_for_copy().tolist()
    return values


class _Samples:
    """Sample i consists of arrays of the number i, of two dtypes and odd lengths."""

    fingerprint = "samples"

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {
            "tokens": np.full(33, index),
            "loss_mask": np.full(7, index, dtype=np.float32),
            "documents": np.full(33, index),
        }


def move_batches(rank: int, num_devices: int) -> list[Any]:
    """Copy micro-batches to the device faster than it processes them, and slower."""
    config = DataLoaderConfig(num_workers=0)
    on_host = DataIterator(_Samples(), 0, 2, config)
    on_device = DataIterator(_Samples(), 0, 2, config, device=torch.device("cuda"))
    torch.ones(1).pin_memory()  # the first pinned block initializes the allocator
    torch.cuda.set_sync_debug_mode("error")
    batches = []
    pinned = []  # blocks of pinned memory after each batch
    for step in range(12):
        batches.append(next(on_device))
        if step >= 6:
            torch.cuda.current_stream().record_event().synchronize()
        pinned.append(torch.cuda.host_memory_stats()["allocations.allocated"])

    torch.cuda.set_sync_debug_mode("default")
    # Buffers are used again as soon as their copies have ended.
    assert pinned[6] == pinned[-1] <= pinned[0] + 6, pinned

    sums = []
    for batch in batches:
        expected = next(on_host)
        assert batch["documents"].device.type == "cpu"
        for key, values in expected.items():
            assert torch.equal(batch[key].cpu(), values), key
        sums.append(int(batch["tokens"].sum()))
    return sums


def gather_logits(rank: int, num_devices: int) -> list[float]:
    """Concatenate the last dimension of the tensors of all ranks."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    ranks = tuple(range(num_devices))
    axis = Axis(rank, num_devices, ranks, dist.group.WORLD)
    whole = gather_from_tensor_parallel(torch.full((2, 3), float(rank), device=device), axis)
    values: list[float] = whole.flatten().tolist()
    return values


def load_to_device(rank: int, num_devices: int) -> bool:
    """Load tensors; with pinned memory, no copy to the device waits for the driver."""
    host = {f"t{i}": torch.randn(300, 200 + i) for i in range(4)}
    with tempfile.TemporaryDirectory() as directory:
        save(make_state(list(host.values())), directory, common={})
        targets = {key: torch.zeros_like(values, device="cuda") for key, values in host.items()}
        columns = torch.zeros(300, 10, device="cuda")[:, :5]
        rounded = torch.zeros(300, 200, dtype=torch.bfloat16, device="cuda")
        torch.cuda.set_sync_debug_mode("error")
        reader = Reader(directory)
        reader.read_into([(key, Box((0, 0), target)) for key, target in targets.items()], workers=2)
        reader.read_into([("t0", Box((0, 7), columns)), ("t0", Box((0, 0), rounded))])
        torch.cuda.set_sync_debug_mode("default")

    whole = all(torch.equal(targets[key].cpu(), values) for key, values in host.items())
    are_columns_equal = torch.equal(columns.cpu(), host["t0"][:, 7:12])
    return whole and are_columns_equal and torch.equal(rounded.cpu(), host["t0"].bfloat16())


OPERATIONS: dict[str, tuple[int, Callable[[int, int], Any]]] = {  # name -> (devices, function)
    "save_at_once": (1, save_at_once),
    "save_with_few_buffers": (1, save_with_few_buffers),
    "save_with_snapshot_on_device": (1, save_with_snapshot_on_device),
    "save_on_full_device": (1, save_on_full_device),
    "copy_to_host": (1, copy_to_host),
    "load_to_device": (1, load_to_device),
    "move_batches": (1, move_batches),
    "gather_logits": (2, gather_logits),
}


def run_operation(
    name: str, timeout: float = 120.0, before: Callable[[], None] | None = None, **settings: str
) -> list[Any]:
    """Return the value of an operation on each rank. Every rank calls `before` first."""
    num_devices, _ = OPERATIONS[name]
    return run_ranks(_run, num_devices, name, before, timeout=timeout, **settings)


def _run(rank: int, num_devices: int, name: str, before: Callable[[], None] | None) -> Any:
    if before is not None:
        before()
    _, function = OPERATIONS[name]
    return function(rank, num_devices)

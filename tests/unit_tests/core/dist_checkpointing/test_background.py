"""Background threads work on the device of the rank that starts them, never on device 0 of the
node.
"""

import threading

import pytest
import torch

from megatron.core.dist_checkpointing import load, save
from megatron.core.dist_checkpointing.background import Workers, same_cuda_device
from tests.unit_tests.core.dist_checkpointing.saved_state import state_of


@pytest.fixture
def devices(monkeypatch):
    """torch.cuda as local rank 3 sees it; which threads have chosen which device."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda d: chosen.append((threading.current_thread().name, d))
    )
    return chosen


def test_workers(devices):
    workers = Workers(2, "some")
    workers.submit(lambda: None).result()
    workers.close()
    assert sorted(devices) == [("some-0", 3), ("some-1", 3)]


def test_every_thread_of_a_save_and_a_load(devices, tmp_path):
    weights = {f"w{i}": torch.randn(100, 10) for i in range(4)}
    save(state_of(**weights), tmp_path / "c", common={}, workers=2)
    assert {name.rpartition("-")[0] for name, _ in devices} == {
        "checkpoint-save-thread",
        "checkpoint-writer",
    }
    devices.clear()
    load(state_of(**{name: torch.zeros(100, 10) for name in weights}), tmp_path / "c", workers=2)
    assert devices
    assert all(name.startswith("checkpoint-reader") and device == 3 for name, device in devices)


def test_without_cuda_no_device_is_chosen(monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: pytest.fail("there is no CUDA"))
    same_cuda_device()()

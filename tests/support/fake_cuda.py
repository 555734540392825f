"""Marker for tests that the fake CUDA runtime of `tests/fake_cuda` cannot run."""

import pytest
import torch


def is_fake_cuda() -> bool:
    """Return whether this process runs on the fake CUDA runtime."""
    return torch.cuda.is_available() and torch.cuda.get_device_name().startswith("Fake")


def needs_gpu(reason: str) -> pytest.MarkDecorator:
    """Return a marker that skips a test on the fake CUDA runtime."""
    return pytest.mark.skipif(is_fake_cuda(), reason=f"the fake CUDA runtime {reason}")

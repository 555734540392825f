"""The C allocator keeps freed memory, unless the environment configures it."""

import os

import pytest

from tests.support.programs import run_program

_COUNT_FAULTS = """
import resource, sys
import torch
from megatron.training.initialize import keep_freed_memory
torch.set_num_threads(1)
agreed = keep_freed_memory() if sys.argv[1] == "keep" else False
def allocate(times):
    for _ in range(times):
        torch.ones(10_000_000)  # 40 MB, freed at once
allocate(16)  # until the heap has its holes
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
allocate(4)
print(agreed, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def count_faults(mode: str, **environment: str) -> tuple[bool, int]:
    result = run_program(_COUNT_FAULTS, mode, **environment)
    assert result.returncode == 0, result.stderr
    agreed, faults = result.stdout.split()
    return agreed == "True", int(faults)


@pytest.fixture(autouse=True)
def no_configured_allocator(monkeypatch):
    for name in os.environ:
        if name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD"):
            monkeypatch.delenv(name)


def test_later_steps_reuse_pages():
    _, usual = count_faults("leave")
    agreed, kept = count_faults("keep")
    if not agreed:
        pytest.skip("this C library is not glibc")
    assert kept < usual / 10


def test_configured_allocator_is_left_alone():
    agreed, _ = count_faults("keep", MALLOC_TRIM_THRESHOLD_="1000000")
    assert not agreed

"""The C allocator keeps freed memory, unless the environment configures it."""

import os
import subprocess
import sys

import pytest

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


def count_faults(mode: str, environment: dict[str, str]) -> tuple[bool, int]:
    result = subprocess.run(
        [sys.executable, "-c", _COUNT_FAULTS, mode],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    agreed, faults = result.stdout.split()
    return agreed == "True", int(faults)


@pytest.fixture
def environment():
    configures = ("GLIBC_TUNABLES", "LD_PRELOAD")
    return {
        k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k not in configures
    }


def test_later_steps_reuse_pages(environment):
    _, usual = count_faults("leave", environment)
    agreed, kept = count_faults("keep", environment)
    if not agreed:
        pytest.skip("this C library is not glibc")
    assert kept < usual / 10


def test_configured_allocator_is_left_alone(environment):
    agreed, _ = count_faults("keep", {**environment, "MALLOC_TRIM_THRESHOLD_": "1000000"})
    assert not agreed

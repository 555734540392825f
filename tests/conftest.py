"""Fixtures for every test directory."""

from collections.abc import Iterator

import pytest
from distributed import DistributedPool


@pytest.fixture(scope="module")
def pool() -> Iterator[DistributedPool]:
    """One pool of up to 4 gloo worker processes per test module, started by its first `pool.run`."""
    distributed_pool = DistributedPool(max_workers=4)
    yield distributed_pool
    distributed_pool.close()

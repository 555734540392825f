"""Fixtures for every test directory."""

from collections.abc import Iterator

import pytest
import torch
from distributed import DistributedPool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run tests marked slow (soak and fault injection)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="gpu: this PyTorch sees no CUDA device")
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(skip)
    if not config.getoption("--run-slow"):
        skip = pytest.mark.skip(reason="slow: needs --run-slow")
        for item in items:
            if item.get_closest_marker("slow") is not None:  # not item.keywords: they hold directory names, too
                item.add_marker(skip)


# As in the workers of the pool: results do not depend on how many cores there are, nor do processes compete for them.
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def pool() -> Iterator[DistributedPool]:
    """One pool of up to 4 gloo worker processes per test module, started by its first `pool.run`."""
    distributed_pool = DistributedPool(max_workers=4)
    yield distributed_pool
    distributed_pool.close()

"""Fixtures of tests that run the training program as separate processes."""

import pytest

from tests.support.crash_harness import launching


@pytest.fixture(scope="session")
def launcher(tmp_path_factory):
    with launching(tmp_path_factory.mktemp("logs")) as launcher:
        yield launcher

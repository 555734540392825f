"""Fixtures of tests that run the training program as separate processes."""

import pytest

from tests.support.crash_harness import launching


@pytest.fixture(scope="session")
def launcher(tmp_path_factory):
    with launching(tmp_path_factory.mktemp("logs")) as launcher:
        yield launcher


@pytest.fixture(autouse=True)
def no_programs_left_running(request):
    """Kill programs that a test has started and not ended: they would slow down all later tests."""
    yield
    if "launcher" in request.fixturenames:
        request.getfixturevalue("launcher").kill_running()

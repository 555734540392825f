"""Tests on the fake CUDA runtime, which are only collected in its environment."""

from tests.support.fake_cuda import is_fake_cuda

if not is_fake_cuda():
    collect_ignore_glob = ["test_*.py"]

"""Fixtures of the tests of run checkpoints."""

from tests.unit_tests.conversion.conftest import without_fsync

__all__ = ["without_fsync"]

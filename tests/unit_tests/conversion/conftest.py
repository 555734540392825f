"""Fixtures of the tests of conversions."""

import os

import pytest


@pytest.fixture(autouse=True)
def without_fsync(monkeypatch):
    """Skip fsync: these tests do not crash, and tiny conversions mostly wait for the disk."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)

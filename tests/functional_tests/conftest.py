"""Fixtures of the tests that run the training program as processes of their own."""

import os
import subprocess

import pytest
from crash_harness import launching


@pytest.fixture(scope="session")
def launcher(tmp_path_factory):
    with launching(tmp_path_factory.mktemp("logs")) as launcher:
        yield launcher


class Disk:
    """A small file system of its own."""

    def __init__(self, path):
        self.path = path

    def mount(self, options):
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", self.path], check=True, capture_output=True)

    def remount(self, options):
        """Whether it was possible: not read-only, while files are open for writing."""
        command = ["mount", "-o", f"remount,{options}", self.path]
        return subprocess.run(command, capture_output=True).returncode == 0

    def unmount(self):
        subprocess.run(["umount", "-l", self.path], capture_output=True)

    @property
    def used(self):
        """Bytes."""
        status = os.statvfs(self.path)
        return (status.f_blocks - status.f_bfree) * status.f_frsize


@pytest.fixture
def disk(tmp_path):
    """Not mounted yet."""
    disk = Disk(tmp_path / "disk")
    disk.path.mkdir()
    try:
        disk.mount("size=1m")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs to mount a file system")
    disk.unmount()
    yield disk
    disk.unmount()

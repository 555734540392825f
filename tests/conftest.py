"""Fixtures for every test directory."""

import gc
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron.core.safe_files.reading import FOLLOW_LINKS
from tests.support.config_server import ConfigServer, use_config_server
from tests.support.distributed import DistributedPool, collect_garbage_rarely


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--run-slow",
        action="store_true",
        help="also run tests marked slow (soak and fault injection)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Start the process that all workers share; they inherit its address."""
    if config.getoption("numprocesses", None):
        server = ConfigServer()
        config.add_cleanup(server.close)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="gpu: this PyTorch sees no CUDA device")
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(skip)
    run_slow = config.getoption("--run-slow")
    for item in items:
        # Not item.keywords, which contain directory names, too.
        if item.get_closest_marker("slow") is None:
            continue
        item.add_marker(pytest.mark.timeout(0))
        if not run_slow:
            item.add_marker(pytest.mark.skip(reason="slow: needs --run-slow"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude modules and tests from garbage collection, which would visit them again and again."""
    gc.collect()
    gc.enable()
    collect_garbage_rarely()


gc.disable()  # until all tests are imported
use_config_server()

# As in the workers of the pool: results do not depend on how many cores there are, nor do processes
# compete for them.
torch.set_num_threads(1)
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of numpy, in programs that tests start

# torch looks up the name of ::ffff:127.0.0.1 whenever a process connects to a store. Where this
# asks a name server, a lost answer would delay the process by 5 s, the default of the resolver.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

# Triton decides when it is imported whether kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def has_room(directory: Path, num_bytes: int = 6 << 30) -> bool:
    """Return whether a directory has free bytes and allows to run the programs of tests."""
    if not directory.is_dir():
        return False
    is_executable = not os.statvfs(directory).f_flag & os.ST_NOEXEC
    return is_executable and shutil.disk_usage(directory).free > num_bytes


# A save flushes each of its files, which takes 3 to 20 ms on a disk: the directories of tests are
# in memory if it has room for them. The variable is pytest's.
if has_room(Path("/dev/shm")):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")


@pytest.fixture(scope="session")
def pool() -> Iterator[DistributedPool]:
    """Pool of up to 4 gloo worker processes, started by the first `pool.run` that needs them."""
    distributed_pool = DistributedPool(max_workers=4)
    yield distributed_pool
    distributed_pool.close()


@pytest.fixture(scope="module")
def separate_pool() -> Iterator[DistributedPool]:
    """Pool for tests that lose workers: those of `pool` have imported much of the program."""
    distributed_pool = DistributedPool(max_workers=4)
    yield distributed_pool
    distributed_pool.close()


class Disk:
    """A small separate file system."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def mount(self, options: str) -> None:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "none", str(self.path)],
            check=True,
            capture_output=True,
        )

    def remount(self, options: str) -> bool:
        """Remount if possible: not read-only while files are open for writing; return whether it
        worked.
        """
        command = ["mount", "-o", f"remount,{options}", str(self.path)]
        return subprocess.run(command, capture_output=True).returncode == 0

    def unmount(self) -> None:
        subprocess.run(["umount", "-l", str(self.path)], capture_output=True)

    @property
    def used(self) -> int:
        """Return the used bytes."""
        status = os.statvfs(self.path)
        return (status.f_blocks - status.f_bfree) * status.f_frsize


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Return a `Disk` that is not mounted yet."""
    disk = Disk(tmp_path / "disk")
    disk.path.mkdir()
    try:
        disk.mount("size=1m")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs to mount a file system")
    disk.unmount()
    yield disk
    disk.unmount()


@pytest.fixture(autouse=True)
def links_are_not_followed():
    """Undo `--follow-links` of a tool that a test called: it sets an environment variable."""
    yield
    os.environ.pop(FOLLOW_LINKS, None)

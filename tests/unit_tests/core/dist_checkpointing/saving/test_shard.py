"""Data files: space on the disk is reserved before the first write."""

import os
import resource

import pytest

from megatron.core.dist_checkpointing.saving.shard import ShardFile, reserve_space
from tests.support.processes import list_open_files


def test_space_is_reserved_before_the_first_write(tmp_path):
    size = (3 << 20) + 17
    path = tmp_path / "__0_0.distcp"
    shard = ShardFile(path, size)
    status = os.stat(path)
    shard.close(durable=True)
    if status.st_size == 0:
        pytest.skip("this file system cannot reserve space")
    assert status.st_size == size
    assert status.st_blocks * 512 >= size


def test_a_file_that_is_too_large_is_refused_before_the_first_write(tmp_path):
    """The message has the name of the file, and its descriptor is closed."""
    path = tmp_path / "__0_0.distcp"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError, match=f"File too large: .{path}"):
            ShardFile(path, 2 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list_open_files(tmp_path) == []
    assert os.stat(path).st_blocks == 0


def test_files_without_reservations_are_left_to_their_writes():
    """A pipe is an example of a file that cannot reserve space."""
    reading, writing = os.pipe()
    reserve_space(writing, 1 << 20)
    os.close(reading)
    os.close(writing)

"""Lineage files: which checkpoints are ancestors of which, and files from unknown sources."""

import json
import os

import pytest

from megatron.core.dist_checkpointing import Lineage, Segment, read_lineage
from megatron.core.dist_checkpointing.ownership.lineage import (
    Origin,
    identify_checkpoint,
    on_branch,
    read_parent,
)


def write_lineage(directory, content):
    directory.mkdir(exist_ok=True)
    (directory / "lineage.json").write_bytes(content)
    return directory


def test_lineage_survives_encoding(tmp_path):
    lineage = Lineage(
        (Segment(1, 40), Segment(7, 60, "aa")), Origin("bb@3", True, 3), job="some job"
    )
    directory = write_lineage(tmp_path / "iter_0000060", lineage.encode(50))
    assert read_lineage(directory) == lineage
    assert read_parent(directory) == 50
    assert identify_checkpoint(directory) == "aa@60"


def test_file_without_tokens_is_readable(tmp_path):
    old = {"generation": 7, "parent": 50, "branch": [[3, 40], [7, 60]]}
    directory = write_lineage(tmp_path / "iter_0000060", json.dumps(old).encode())
    assert read_lineage(directory) == Lineage((Segment(3, 40), Segment(7, 60)))
    assert identify_checkpoint(directory) == str(directory)


def test_same_number_with_another_token_is_not_an_ancestor():
    ours = Lineage((Segment(1, 10, "a"), Segment(2, 20, "b")))
    assert ours.includes(Lineage((Segment(1, 5, "a"),)))
    assert not ours.includes(Lineage((Segment(1, 5, "c"),)))
    assert not ours.includes(Lineage((Segment(1, 5),)))


def test_copy_under_another_number_belongs_to_no_branch():
    ours = {iteration: Lineage((Segment(1, iteration, "a"),)) for iteration in (4, 8)}
    assert on_branch(ours | {9999: ours[4]}) == [8, 4]


INVALID = {
    "not JSON": b"{",
    "another type": b"[]",
    "no branch": b"{}",
    "an empty branch": b'{"branch": []}',
    "infinite": b'{"branch": [[Infinity, 1]]}',
    "not a number": b'{"branch": [[NaN, 1]]}',
    "a fraction": b'{"branch": [[1.5, 1]]}',
    "a boolean": b'{"branch": [[true, 1]]}',
    "negative": b'{"branch": [[-1, 1]]}',
    "a huge generation": b'{"branch": [[9007199254740991, 1]]}',
    "more digits than an integer can have": b'{"branch": [[' + b"9" * 5000 + b", 1]]}",
    "triples": b'{"branch": [[1, 2, 3]]}',
    "too few tokens": b'{"branch": [[1, 2], [3, 4]], "tokens": ["a"]}',
    "a token that is a path": b'{"branch": [[1, 2]], "tokens": [["a"]]}',
    "an origin without a checkpoint": b'{"branch": [[1, 2]], "origin": {}}',
    "nested": b"[" * 100_000,
    "nested in a branch": b'{"branch": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "text": b'{"branch": "text"}',
}


@pytest.mark.parametrize("content", INVALID.values(), ids=INVALID)
def test_invalid_file_means_generation_0(tmp_path, content):
    directory = write_lineage(tmp_path / "iter_0000005", content)
    assert read_lineage(directory) == Lineage((Segment(0, 5),))
    assert read_parent(directory) is None


def test_error_of_the_storage_is_not_a_missing_file(tmp_path):
    """A checkpoint that cannot be read at the moment must not look like one of another program."""
    assert read_lineage(tmp_path / "iter_0000005") == Lineage((Segment(0, 5),))
    unreadable = tmp_path / ("x" * 300)  # ENAMETOOLONG represents EIO and ESTALE
    with pytest.raises(OSError, match="too long"):
        read_lineage(unreadable)


@pytest.mark.parametrize("parent", ["true", "1.5", '"5"', "-1", "[1]"])
def test_invalid_parent_is_unknown(tmp_path, parent):
    content = f'{{"branch": [[1, 5]], "parent": {parent}}}'.encode()
    assert read_parent(write_lineage(tmp_path / "iter_0000005", content)) is None


def test_pipe_and_device_are_not_read(tmp_path):
    for index, make in enumerate((os.mkfifo, lambda path: path.symlink_to("/dev/zero"))):
        directory = tmp_path / f"iter_{index:07d}"
        directory.mkdir()
        make(directory / "lineage.json")
        assert read_lineage(directory) == Lineage((Segment(0, index),))
        assert read_parent(directory) is None

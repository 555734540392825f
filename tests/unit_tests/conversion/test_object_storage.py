"""Conversion and checkpoint lookup in object storage."""

from pathlib import Path

import pytest

from megatron.conversion.convert import convert
from megatron.conversion.formats import find_checkpoint
from megatron.core import object_storage
from megatron.core.object_storage import path_of
from tests.support.object_server import object_server
from tests.unit_tests.tools.test_inspect import LLAMA, main

SOURCE = LLAMA / "torch_dist_fully_reshardable"


@pytest.fixture(scope="module")
def converted():
    object_storage._open_store.cache_clear()
    with object_server():
        target = path_of("s3://bucket/model")
        report = convert(SOURCE, target, "torch_dist", verify=True)
        assert report.verified is not None and report.verified > 50
        yield target
    object_storage._open_store.cache_clear()


def test_round_trip_through_object_storage(converted, tmp_path, capsys):
    convert(converted, tmp_path / "back", "legacy")
    assert main(["diff", str(SOURCE), str(tmp_path / "back")]) == 0
    assert main(["verify", str(converted)]) == 0
    assert "s3://bucket/model/iter_" in capsys.readouterr().out


def test_newest_commit_overrides_the_tracker(converted):
    store = converted.store
    found = find_checkpoint(str(converted))
    tracker = f"{converted.key}/latest_checkpointed_iteration.txt"
    named = store.read(tracker).content
    store.put(tracker, b"12345")
    assert find_checkpoint(str(converted)) == found and found.note is None
    store.put(tracker, named)
    unfinished = f"{converted.key}/iter_9999999/.claim"
    store.put(unfinished, b"{}")
    assert find_checkpoint(str(converted)) == found
    store.delete([unfinished])
    assert find_checkpoint("s3://bucket/nothing") is None


@pytest.mark.parametrize(
    ("saver", "overwrite", "message"),
    [
        (
            "hf",
            False,
            "s3://bucket/new: object storage can only contain torch_dist checkpoints; give "
            "--saver torch_dist",
        ),
        ("legacy", False, "object storage can only contain torch_dist checkpoints"),
        ("torch_dist", True, "a target there cannot be replaced"),
    ],
)
def test_unsupported_targets_are_refused(converted, saver, overwrite, message):
    with pytest.raises(ValueError, match=message):
        convert(SOURCE, path_of("s3://bucket/new"), saver, overwrite=overwrite)
    assert not path_of("s3://bucket/new").exists()


def test_existing_target_is_refused(converted):
    with pytest.raises(ValueError, match="s3://bucket/model exists"):
        convert(SOURCE, converted, "torch_dist")


def test_plain_path_is_a_path(tmp_path):
    assert path_of(str(tmp_path)) == tmp_path and type(path_of("a")) is type(Path("a"))

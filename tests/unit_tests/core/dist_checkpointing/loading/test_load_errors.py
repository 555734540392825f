"""Errors explain why a checkpoint cannot be loaded: damaged, missing, misshaped or unexpected."""

import os
import shutil
import stat

import pytest
import torch

from megatron.core.dist_checkpointing import (
    Box,
    CheckpointError,
    Reader,
    is_complete,
    load,
    load_common,
    read_tracker,
    save,
    write_tracker,
)
from tests.unit_tests.core.dist_checkpointing.saved_state import state_of


@pytest.fixture
def saved(tmp_path):
    weights = {"layer.weight": torch.randn(300, 200), "layer.bias": torch.randn(200)}
    directory = tmp_path / "c"
    save(state_of(**weights), directory, common={"iteration": 3}, workers=1)
    return directory


def load_problem(directory, **kwargs):
    with pytest.raises(CheckpointError) as caught:
        load(
            state_of(**{"layer.weight": torch.zeros(300, 200), "layer.bias": torch.zeros(200)}),
            directory,
            **kwargs,
        )
    return str(caught.value)


def test_a_truncated_shard_is_named(saved):
    shard = saved / "__0_0.distcp"
    os.truncate(shard, 100_000)
    assert f"{shard}: truncated: it has 100000 bytes" in load_problem(saved)


def test_a_missing_shard_is_named(saved):
    (saved / "__0_0.distcp").unlink()
    assert f"{saved / '__0_0.distcp'}: the shard file is missing" in load_problem(saved)


def test_an_incomplete_checkpoint_is_named(saved):
    (saved / ".metadata").unlink()
    assert not is_complete(saved)
    assert (
        f"{saved / '.metadata'}: missing, so {saved} is not a complete checkpoint"
        in load_problem(saved)
    )


@pytest.mark.parametrize("damage", ["empty", "half", "other pickle", "text"])
def test_damaged_metadata_is_named(saved, damage):
    path = saved / ".metadata"
    content = {
        "empty": b"",
        "half": path.read_bytes()[:300],
        "other pickle": b"}.",
        "text": b"hello",
    }[damage]
    path.write_bytes(content)
    assert f"{path}: truncated: it has {len(content)} bytes instead of" in load_problem(saved)
    assert f"{path}: not " in load_problem(saved, verify=False)


def test_wrong_shapes_are_listed(saved):
    with pytest.raises(
        CheckpointError, match=r"layer.weight: \(300, 200\) in the checkpoint, \(300, 201\) here"
    ):
        load(state_of(**{"layer.weight": torch.zeros(300, 201)}), saved, strictness="ignore_all")


def test_strictness(saved, caplog):
    """Megatron-LM's eight values on a load with one key too many and one too few."""

    def attempt(strictness, **kwargs):
        state = state_of(**{"layer.weigth": torch.zeros(300, 200), "layer.bias": torch.zeros(200)})
        return load(state, saved, strictness=strictness, **kwargs)

    for strictness in ("assume_ok_unexpected", "raise_unexpected"):
        with pytest.raises(CheckpointError, match=r"layer.weigth \(there is layer.weight\)"):
            attempt(strictness)
    with pytest.raises(
        CheckpointError, match=r"(?s)layer.weigth.*not requested by any rank \(1\):\n  layer.weight"
    ):
        attempt("raise_all")
    report = attempt("return_all")
    assert (report.unexpected, report.missing) == (["layer.weigth"], ["layer.weight"])
    report = attempt("return_unexpected")
    assert (report.unexpected, report.missing) == (["layer.weigth"], [])
    assert not caplog.text
    assert attempt("ignore_all").unexpected == []
    assert not caplog.text
    attempt("log_unexpected")
    assert "layer.weigth" in caplog.text
    assert "any rank" not in caplog.text
    attempt("log_all")
    assert "any rank" in caplog.text
    with pytest.raises(ValueError, match="'strict' is none of assume_ok_unexpected"):
        attempt("strict")


def test_skipped_keys_are_not_missing(saved):
    state = state_of(**{"layer.weight": torch.zeros(300, 200)})
    with pytest.raises(CheckpointError, match="layer.bias"):
        load(state, saved)
    load(state, saved, skip=lambda key: key.endswith(".bias"))


def test_common_is_plain(saved, tmp_path):
    assert load_common(saved) == {"iteration": 3}
    with pytest.raises(CheckpointError, match="common: its pickle names posix.system"):
        save(state_of(w=torch.zeros(3)), tmp_path / "d", common={"hook": os.system})
    (saved / "common.pt").write_bytes(b"PK\3\4 no archive")
    with pytest.raises(CheckpointError, match="common.pt: truncated: it has 15 bytes instead of"):
        load_common(saved)
    with pytest.raises(CheckpointError, match="common.pt: not an intact torch.save archive"):
        load_common(saved, verify=False)
    (saved / "common.pt").unlink()
    assert load_common(saved) == {}


def test_tracker(tmp_path):
    assert read_tracker(tmp_path) is None
    write_tracker(tmp_path, 120)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "120"
    assert read_tracker(tmp_path) == 120
    write_tracker(tmp_path, "release")
    assert read_tracker(tmp_path) == "release"
    for content in (b"12\xff0", b"9" * 5000):
        (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(content)
        with pytest.raises(CheckpointError, match="iteration.txt: .* neither an iteration nor"):
            read_tracker(tmp_path)


def test_an_unwritable_place_is_an_explained_error(tmp_path):
    blocker = tmp_path / "file"
    blocker.touch()
    with pytest.raises(CheckpointError, match="not saved: .*(Not a directory|File exists): .*file"):
        save(state_of(w=torch.zeros(3)), blocker / "c", common={})
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(stat.S_IRUSR | stat.S_IXUSR)
    if os.access(locked, os.W_OK):
        pytest.skip("this user may write anywhere")
    with pytest.raises(CheckpointError, match="Permission denied"):
        save(state_of(w=torch.zeros(3)), locked / "c", common={})


def test_requests_outside_the_tensor_are_refused(saved):
    with pytest.raises(CheckpointError, match="layer.bias"):
        Reader(saved).read_into([("layer.bias", Box((150,), torch.zeros(100)))])


def test_a_copied_checkpoint_is_still_one(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "elsewhere" / "copy")
    state = state_of(**{"layer.weight": torch.zeros(300, 200), "layer.bias": torch.zeros(200)})
    load(state, tmp_path / "elsewhere" / "copy", verify=True)
    assert state["layer.weight"].local.abs().sum() > 0

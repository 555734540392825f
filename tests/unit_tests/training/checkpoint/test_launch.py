"""The start of a run whose --load contains no checkpoint yet."""

import pytest

from megatron.training.checkpoint.launch import TrainingDirectory
from megatron.training.config.run_options import CheckpointConfig


@pytest.mark.parametrize("flag", ["finetune", "exit_on_missing_checkpoint"])
@pytest.mark.parametrize("exists", [False, True])
def test_flag_that_requires_a_checkpoint_is_an_error_in_an_empty_directory(tmp_path, flag, exists):
    root = tmp_path / "run"
    if exists:
        root.mkdir()
    config = CheckpointConfig(load=str(root), save=str(root), **{flag: True})
    spelling = flag.replace("_", "-")
    with pytest.raises(ValueError, match=f"holds no checkpoint.*--{spelling}"):
        TrainingDirectory(config, root).choose()


def test_link_that_leads_nowhere_is_an_error(tmp_path):
    """The disk may not be mounted, so it is not an empty directory."""
    run = tmp_path / "run"
    run.symlink_to(tmp_path / "unmounted")
    save = tmp_path / "other"
    config = CheckpointConfig(load=str(run), save=str(save))
    with pytest.raises(ValueError, match=r"is a link to .*/unmounted, which does not exist"):
        TrainingDirectory(config, save).choose()


def test_first_start_of_a_run_needs_no_checkpoint(tmp_path, caplog):
    config = CheckpointConfig(load=str(tmp_path), save=str(tmp_path), use_checkpoint_args=True)
    with caplog.at_level("INFO"):
        assert TrainingDirectory(config, tmp_path).choose() is None
    assert "starting from scratch" in caplog.text

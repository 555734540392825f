"""Where a run starts: --save and --load before any process group."""

import pytest

from megatron.training.checkpoint.checkpointing import check_writable


def test_a_directory_that_cannot_be_written_is_found_out_early(tmp_path):
    check_writable(tmp_path / "new" / "run")
    assert list((tmp_path / "new" / "run").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file/run"):
        check_writable(tmp_path / "file" / "run")

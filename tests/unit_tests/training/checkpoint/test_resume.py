"""Where a run starts: --save before any model is built."""

import shlex

import pytest

from megatron.training.checkpoint.checkpointing import take_save_directory
from megatron.training.config.parsing import parse_args
from tests.support.training_harness import COMMON


def test_a_directory_that_cannot_be_written_is_found_out_early(tmp_path):
    def config(save):
        return parse_args(shlex.split(f"{COMMON} --mock-data --train-iters 4 --save {save}"), 1)

    generation = take_save_directory(config(tmp_path / "new" / "run"))
    assert generation is not None and generation.is_current()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="checkpoints cannot be saved to .*file/run"):
        take_save_directory(config(tmp_path / "file" / "run"))

"""Ctrl-C and lack of memory: exit codes and messages."""

import re
import signal

import pytest

from tests.support.training_harness import COMMON, LAYOUTS, LLAMA

FLAGS = f"{COMMON} {LLAMA} --num-layers 2 --mock-data --train-iters 1000000 "


@pytest.mark.parametrize("layout", ["single", "dp2"])
@pytest.mark.parametrize("mode", ["", "--async-save"])
def test_ctrl_c_names_the_newest_checkpoint(launcher, tmp_path, layout, mode):
    world_size, layout_flags = {"single": (1, ""), **LAYOUTS}[layout]
    flags = f"{FLAGS} {layout_flags} {mode} --save {tmp_path} --load {tmp_path} --save-interval 2"
    job = launcher.start(world_size, flags)
    job.until(lambda: len(job.saved()) > 2, "three saves")
    for rank in range(world_size):
        job.signal(rank, signal.SIGINT)
    codes = job.wait()
    output = job.output()
    assert codes[0] == 130, output

    last_line = output.strip().splitlines()[-1]
    saved = max(int(path.name[5:]) for path in tmp_path.glob("iter_*"))
    message = (
        r"interrupted after iteration \d+; start the same command again to continue from "
        rf"{tmp_path}/iter_{saved:07d}"
    )

    assert re.fullmatch(message, last_line), output
    assert "Traceback" not in output

    again = launcher.start(world_size, flags)
    again.until(again.iterations, "an iteration")
    assert again.resumed_at() == saved


def test_ctrl_c_without_save_is_explained(launcher):
    job = launcher.start(1, FLAGS)
    job.until(job.iterations, "an iteration")
    job.signal(0, signal.SIGINT)
    assert job.wait() == [130]
    last_words = "without --save no checkpoint is saved"
    assert job.output().strip().endswith(last_words)


def test_model_that_does_not_fit_into_memory_is_one_message(launcher):
    job = launcher.start(1, f"{FLAGS} --vocab-size 100000000000")
    assert job.wait() == [1]
    assert "error: out of memory (" in job.output()
    assert "Traceback" not in job.output()

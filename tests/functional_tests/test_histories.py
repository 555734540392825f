"""Directories of checkpoints that are moved, linked or damaged outside of the program."""

import re

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset_builder import IndexedDatasetBuilder
from megatron.core.dist_checkpointing.verification import verify
from tests.support.training_harness import COMMON, LLAMA

FLAGS = f"{COMMON} {LLAMA} --num-layers 1 --mock-data --lr-decay-iters 40 "


def test_run_goes_on_in_a_directory_that_moves_and_leaves_a_link(launcher, tmp_path):
    root = tmp_path / "run"
    flags = f"{FLAGS} --save {root} --load {root} --save-interval 2 --async-save --keep-last-n 2"
    job = launcher.start(1, f"{flags} --train-iters 1000000")
    job.until(job.saved, "a save")
    job.suspend()
    moved = tmp_path / "moved"
    root.rename(moved)
    root.symlink_to(moved)
    num_saved = len(job.saved())
    job.resume()
    job.until(lambda: len(job.saved()) > num_saved + 3, "further saves")

    assert not job.has_ended()
    assert "WARNING" not in job.output()

    newest = job.saved()[-1]
    assert verify(root / f"iter_{newest:07d}").ok


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damaged", ["common.pt", "__1_0.distcp"])
def test_wrong_checksum_names_an_older_intact_checkpoint(launcher, tmp_path, damaged):
    """Iteration 8 is damaged, too, in a file that the resumed run does not reach."""
    flags = f"{FLAGS} --save {tmp_path} --load {tmp_path} --save-interval 2"
    launcher.run(2, f"{flags} --train-iters 10")
    flip_a_bit(tmp_path / "iter_0000010" / damaged)
    flip_a_bit(tmp_path / "iter_0000008" / "__0_0.distcp")
    job = launcher.start(2, f"{flags} --train-iters 12")
    job.until(job.has_ended, "the error")
    job.kill(1)  # as launchers do

    assert job.wait()[0] == 1
    assert f"iter_0000010/{damaged}: damaged: wrong checksum" in job.output()

    # The command in the message works.
    fix = f"--load {tmp_path} --ckpt-step 6"
    assert f"iter_0000006 is intact: continue from it with {fix}" in job.output()

    again = launcher.run(2, f"{FLAGS} --save {tmp_path} {fix} --train-iters 10")
    assert again.resumed_at() == 6


@pytest.mark.parametrize(
    ("changed", "warning"),
    [
        ("--train-iters 6", None),
        ("--dataloader-type cyclic", "the training data or its order differs"),
        ("--seed 7", "order differs from the checkpoint's (seed: 1234 in the checkpoint, 7 now)"),
        ("--eod-mask-loss", "eod_mask_loss: False in the checkpoint, True now"),
    ],
)
def test_resume_warns_of_other_samples(launcher, tmp_path, changed, warning):
    """Training longer is the only change of these that repeats and skips no samples."""
    flags = f"{FLAGS} --train-iters 4 --save {tmp_path} --save-interval 2"
    launcher.run(1, flags)
    job = launcher.run(1, f"{flags} --load {tmp_path} --ckpt-step 2 {changed}")
    _, chosen, unused, *others = job.output().split("WARNING: ")

    assert chosen.startswith(f"starting from {tmp_path / 'iter_0000002'}: --ckpt-step 2")
    assert unused.startswith(f"{tmp_path / 'iter_0000004'} is not used: --ckpt-step 2")

    if warning is None:
        assert others == []
    else:
        (text,) = others
        assert warning in text


def write_data(prefix, num_sequences, first_token=0):
    with IndexedDatasetBuilder(str(prefix), np.uint16) as builder:
        for _ in range(num_sequences):
            builder.add(np.arange(first_token, first_token + 40))


def test_resume_reports_how_the_data_changed(launcher, tmp_path):
    """A warning names changed weights, order, members of a blend, or files of a member."""
    a = tmp_path / "a"
    b = tmp_path / "b"
    c = tmp_path / "c"
    for prefix in (a, b, c):
        write_data(prefix, 20)
    common = FLAGS.replace("--mock-data", "")
    flags = f"{common} --split 1 --train-iters 3"
    blend = f"3 {a} 1 {b}"
    launcher.run(1, f"{flags} --data-path {blend} --save {tmp_path / 'run'} --exit-interval 2")

    def resume(data_path):
        resume_flags = f"{flags} --load {tmp_path / 'run'} --data-path {data_path}"
        return launcher.run(1, resume_flags).output()

    warning = "the training data or its order differs from the checkpoint's "
    assert warning not in resume(blend)

    # Weights, order and members
    for changed in (f"2 {a} 1 {b}", f"1 {b} 3 {a}", f"3 {a} 1 {c}"):
        values = f"data_path: {blend.split()} in the checkpoint, {changed.split()} now"
        assert f"{warning}({values}): some of the 16 samples" in resume(changed)

    # Another length of a member
    write_data(b, 21)
    assert f"{warning}(its flags are the same: the .idx file of a member has other" in resume(blend)

    # Other tokens of a member
    write_data(b, 20, first_token=1)
    digests = "digest of blocks of the .bin files: [0-9a-f]{32} in the checkpoint, [0-9a-f]{32} now"
    message = rf"the tokens of --data-path differ from the checkpoint's \({digests}\)"
    assert re.search(message, resume(blend))

    # A file that does not fit its index is an error.
    with open(f"{b}.bin", "ab") as file:
        file.write(b"xx")
    job = launcher.start(1, f"{flags} --load {tmp_path / 'run'} --data-path {blend}")
    assert job.wait() == [1]
    assert f"{b}.bin has 1602 bytes, but {b}.idx describes" in job.output()


@pytest.mark.parametrize("masks", ["", "--reset-attention-mask"])
def test_resume_warns_of_another_end_of_documents(launcher, tmp_path, masks):
    """A smaller vocabulary moves the end-of-document token of NullTokenizer.

    The token matters only to flags that depend on documents.
    """
    prefix = tmp_path / "text"
    write_data(prefix, 20)
    flags = f"{FLAGS} {masks} --data-path {prefix} --split 1 --train-iters 4"
    flags = f"{flags} --save {tmp_path / 'run'} --save-interval 2".replace("--mock-data", "")
    launcher.run(1, flags)
    resume = f"{flags} --load {tmp_path / 'run'} --ckpt-step 2"
    for vocab_size, is_other in ((60, False), (50, True)):
        job = launcher.run(1, f"{resume} --vocab-size {vocab_size}")
        is_reported = "end_of_document: 60 in the checkpoint, 50 now" in job.output()
        assert is_reported == (is_other and bool(masks))

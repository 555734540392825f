"""--save-hf writes the model of a complete run for transformers, the same at every layout."""

import pytest
import torch
from safetensors.torch import load_file

from megatron.conversion.checkpoint_conversion import convert
from tests.support.training_harness import LAYOUTS, LLAMA, train

RUN = f"--mock-data {LLAMA} --train-iters 4 --global-batch-size 4 --bf16 "


def list_hidden_files(root):
    return [path.name for path in root.iterdir() if path.name.startswith(".")]


def assert_same_model(directory, expected_directory):
    tensors = load_file(directory / "model.safetensors")
    expected = load_file(expected_directory / "model.safetensors")
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name


def test_export_is_identical_from_every_layout(pool, tmp_path):
    run = tmp_path / "run"
    for name in ("single", "tp2_pp2"):
        world_size, layout = LAYOUTS.get(name, (1, ""))
        # The first call trains; both exports have its weights.
        pool.run(train, 1, f"{RUN} --save {run} --load {run}")
        export = f"--load {run} --save-hf {tmp_path / name}"
        pool.run(train, world_size, f"{RUN} {layout} {export}")
        assert list_hidden_files(tmp_path) == []

    assert_same_model(tmp_path / "single", tmp_path / "tp2_pp2")


def test_export_equals_conversion_of_the_last_checkpoint(pool, tmp_path):
    """The export also replaces an older one, and removes the files of a run that was killed during
    its export.
    """
    world_size, layout = LAYOUTS["pp2_dp2"]
    unfinished = tmp_path / ".saving-hf-0123-1"
    (unfinished / "rewritten").mkdir(parents=True)
    (unfinished / ".metadata").write_text("half of it")
    run = tmp_path / "run"
    export = tmp_path / "hf"
    flags = f"{RUN} {layout} --save {run} --load {run} --save-hf {export} --lr-decay-iters 8"
    for iterations in (4, 6):
        pool.run(train, world_size, f"{flags} --train-iters {iterations}")
        converted = tmp_path / f"converted{iterations}"
        convert(run, converted, "hf")
        assert_same_model(export, converted)

    assert list_hidden_files(tmp_path) == []


def test_full_disk_is_reported(pool, disk):
    """The disk is full before the shards, or between them and the model: every rank reports the
    error, and all files are removed.
    """
    # 0.5 MB of weights
    flags = f"{RUN} --train-iters 3 --vocab-size 4000 --tensor-model-parallel-size 2"
    for size in ("256k", "800k"):
        disk.mount(f"size={size}")
        with pytest.raises(ValueError, match="No space left") as error:
            pool.run(train, 2, f"{flags} --save-hf {disk.path / 'hf'}")
        report = str(error.value.__cause__)  # of both ranks
        message = f"ValueError: --save-hf: {disk.path / 'hf'}: not saved: "
        assert report.count(message) == 2, report
        assert list(disk.path.iterdir()) == []
        disk.unmount()


def test_impossible_export_fails_before_the_first_step(pool, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/data").write_text("")
    with pytest.raises(ValueError, match=r"--save-hf .*precious exists"):
        pool.run(train, 1, f"{RUN} --save-hf {tmp_path / 'precious'}")
    with pytest.raises(ValueError, match="none of the supported models"):
        flags = "--softmax-type off-by-one"
        pool.run(train, 1, f"{RUN} {flags} --save-hf {tmp_path / 'new'}")
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]

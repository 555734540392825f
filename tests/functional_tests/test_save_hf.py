"""--save-hf: the model of a complete run in Hugging Face's form, the same from every layout."""

import pytest
import torch
from safetensors.torch import load_file
from training_harness import LAYOUTS, LLAMA, train

RUN = f"--mock-data {LLAMA} --train-iters 8 --bf16 "


def leftovers(root):
    return [path.name for path in root.iterdir() if path.name.startswith(".")]


def test_the_export_is_the_same_from_every_layout(pool, tmp_path):
    for name in ("single", "tp2_pp2"):
        world_size, flags = LAYOUTS.get(name, (1, ""))
        pool.run(train, 1, f"{RUN} --save {tmp_path / 'run'} --load {tmp_path / 'run'}")  # to share the weights
        flags += f" --load {tmp_path / 'run'} --save-hf {tmp_path / name}"
        pool.run(train, world_size, f"{RUN} {flags}")
        assert leftovers(tmp_path) == []
    single, parallel = (load_file(tmp_path / name / "model.safetensors") for name in ("single", "tp2_pp2"))
    assert single.keys() == parallel.keys()
    assert all(torch.equal(single[key], parallel[key]) for key in single)


def test_an_export_that_must_fail_fails_before_the_first_step(pool, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/data").write_text("")
    with pytest.raises(ValueError, match=r"--save-hf .*precious exists"):
        pool.run(train, 1, f"{RUN} --save-hf {tmp_path / 'precious'}")
    with pytest.raises(ValueError, match="none of the supported models"):
        flags = "--position-embedding-type rope --rotary-percent 0.5 --normalization LayerNorm"
        pool.run(train, 1, f"{RUN} {flags} --save-hf {tmp_path / 'new'}")
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]

"""Folders of accelerate's FSDP plugin (see golden/accelerate/README.md)."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from megatron.conversion.checkpoint_conversion import compare, convert
from megatron.conversion.opening import open_checkpoint
from megatron.conversion.options import ReadOptions
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.run_checkpoint.formats import NoCheckpointError
from tests.support.compare import assert_same, read_all
from tests.support.unpacked import unpacked


@pytest.fixture
def folder(tmp_path, tmp_path_factory):
    """A copy of the golden folder."""
    golden = unpacked(tmp_path_factory, "accelerate/llama")
    return shutil.copytree(golden, tmp_path / "checkpoint-2")


def test_weights_and_moments_are_those_of_the_gathered_state(folder, tmp_path):
    """Each is compared with a directory of transformers that has it as its weights."""
    source = open_checkpoint(folder)
    assert source.unused == []
    expected = torch.load(folder / "expected.pt", weights_only=True)
    tensors = read_all(source)
    for state in ("", "param", "exp_avg", "exp_avg_sq"):
        content = expected["model"]
        prefix = ""
        if state:
            prefix = f"optimizer.state.{state}."
        if state.startswith("exp"):
            content = {name: values[state] for name, values in expected["optimizer"].items()}
        directory = tmp_path / f"hf{state}"
        directory.mkdir()
        shutil.copy(folder / "config.json", directory)
        save_file(content, directory / "model.safetensors")
        for key, value in read_all(open_checkpoint(directory)).items():
            assert_same(tensors.pop(f"{prefix}{key}"), value, key)
    assert not tensors

    decayed, others = source.training.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    for group in (decayed, others):
        assert (group["lr"], group["betas"], group["step"]) == (0.01, (0.9, 0.95), 2)
    assert source.training.iteration == 2


def test_folder_becomes_a_checkpoint_of_a_run(folder, tmp_path):
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 5, "epoch": 0.5}))
    convert(folder, tmp_path / "run", "torch_dist")
    run = open_checkpoint(tmp_path / "run")
    source = open_checkpoint(folder)
    assert compare(source, run) == len(source.tensors) == 4 * 15
    assert run.training.iteration == 5
    weights = open_checkpoint(folder, read_options=ReadOptions(no_optim=True))
    assert len(weights.tensors) == 15 and weights.training.param_groups is None


def test_folder_without_the_model_names_the_missing_file(folder):
    config = (folder / "config.json").read_text()
    (folder / "config.json").unlink()
    for directory in (folder, folder.parent):
        with pytest.raises(NoCheckpointError, match=r"checkpoint-2 has .* but no config\.json"):
            open_checkpoint(directory)
    (folder / "config.json").write_text(config)
    with pytest.raises(NoCheckpointError, match="give one of them, e.g. .*checkpoint-2"):
        open_checkpoint(folder.parent)


def test_other_models_and_optimizers_are_rejected(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 40}))
    with pytest.raises(ValueError, match="config.json and weights are of different models"):
        open_checkpoint(folder)
    (folder / "config.json").write_text(json.dumps(config))
    shutil.rmtree(folder / "optimizer_0")
    shutil.copytree(folder / "pytorch_model_fsdp_0", folder / "optimizer_0")
    with pytest.raises(CheckpointError, match="leave the optimizer out"):
        open_checkpoint(folder)

"""Adapters of PEFT, without which a model is another one."""

import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.conversion.huggingface.adapters import describe_adapter
from megatron.conversion.huggingface.directory_writer import write_huggingface
from megatron.conversion.opening import open_checkpoint
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.run_checkpoint.formats import NoCheckpointError, find_checkpoint
from megatron.training.checkpoint.launch import TrainingDirectory
from megatron.training.config.run_options import CheckpointConfig
from tests.support.memory_source import LLAMA_ARGS, random_source
from tests.unit_tests.conversion.convert_tool import run_convert

PROJECTION = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    write_huggingface(random_source(LLAMA_ARGS, optimizer=False), tmp_path / "llama")
    return tmp_path / "llama"


def add_adapter(directory: Path, **fields: str) -> None:
    """Create the files that `PeftModel.save_pretrained` writes."""
    directory.mkdir(exist_ok=True)
    defaults = {"peft_type": "LORA", "base_model_name_or_path": "org/base"}
    config = {"r": 2, "lora_alpha": 2} | defaults | fields
    (directory / "adapter_config.json").write_text(json.dumps(config))
    module = f"base_model.model.{PROJECTION}"
    lora = {
        f"{module}.lora_A.weight": torch.ones(2, 32),
        f"{module}.lora_B.weight": torch.ones(32, 2),
    }
    save_file(lora, directory / "adapter_model.safetensors")


def test_adapter_next_to_a_model_is_not_ignored(llama: Path) -> None:
    open_checkpoint(llama)
    add_adapter(llama)
    for loader in ("auto", "hf"):
        with pytest.raises(CheckpointError, match="remove adapter_config.json") as caught:
            open_checkpoint(llama, loader)
        moved = llama / "adapter"
        assert f"convert.py --saver hf --load-dir {llama} --lora {moved} " in str(caught.value)
    base = llama.parent
    add_adapter(llama, base_model_name_or_path=str(base))
    with pytest.raises(CheckpointError, match=f"--load-dir {base} --lora {llama} "):
        open_checkpoint(llama)


def test_adapter_alone_is_refused_with_its_base_model(tmp_path: Path) -> None:
    """They are refused also where training would start from random weights."""
    directory = tmp_path / "adapter"
    add_adapter(directory)
    with pytest.raises(NoCheckpointError, match=r"base model 'org/base'.*--load-dir BASE --lora "):
        find_checkpoint(directory)
    flags = CheckpointConfig(load=str(directory), save=str(directory))
    with pytest.raises(CheckpointError, match="adapter of PEFT"):
        TrainingDirectory(flags, directory).choose()


def test_adapter_of_a_local_model_is_refused_with_the_command_that_merges_it(
    llama: Path, tmp_path: Path
) -> None:
    base = llama.rename(tmp_path / "base model")
    add_adapter(tmp_path / "adapter", base_model_name_or_path=str(base))
    with pytest.raises(NoCheckpointError, match="tools/checkpoint") as caught:
        open_checkpoint(tmp_path / "adapter")
    _, _, arguments = str(caught.value).partition("python tools/checkpoint/convert.py ")
    arguments = arguments.replace("MERGED", str(tmp_path / "merged"))
    done = run_convert(*shlex.split(arguments))
    assert done.returncode == 0, done.stderr
    merged = load_file(tmp_path / "merged/model.safetensors")[f"{PROJECTION}.weight"]
    weight = load_file(base / "model.safetensors")[f"{PROJECTION}.weight"]
    assert torch.equal(merged, weight + 2.0)


def test_adapters_without_low_rank_matrices_are_merged_by_peft(tmp_path: Path) -> None:
    add_adapter(tmp_path / "adapter", peft_type="IA3")
    with pytest.raises(NoCheckpointError, match=r"merge_and_unload\(\)"):
        find_checkpoint(tmp_path / "adapter")


@pytest.mark.parametrize(
    "names",
    [
        # peft before 0.6 adds tensors to a layer, and later releases wrap it.
        (f"{PROJECTION}.weight", f"{PROJECTION}.lora_A.default.weight"),
        (f"{PROJECTION}.base_layer.weight", f"{PROJECTION}.lora_magnitude_vector.default.weight"),
        ("lm_head.original_module.weight", "lm_head.modules_to_save.default.weight"),
    ],
)
def test_modules_of_peft_in_the_weights_are_refused(names: tuple[str, str], llama: Path) -> None:
    base, added = names
    tensors = load_file(llama / "model.safetensors")
    original = base.replace(".base_layer", "").replace(".original_module", "")
    tensors[base] = tensors.pop(original)
    tensors[added] = tensors[base].clone()
    save_file(tensors, llama / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"modules of PEFT .*merge_and_unload\(\)"):
        open_checkpoint(llama)


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b", "\udcff"])
def test_base_model_that_cannot_be_a_path(name: str, tmp_path: Path) -> None:
    add_adapter(tmp_path / "adapter", base_model_name_or_path=name)
    message = describe_adapter(tmp_path / "adapter")
    assert message is not None
    assert "Download its base model as BASE" in message
    assert message.isprintable()

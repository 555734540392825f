"""Adapters of PEFT, without which a model is another one."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.conversion.convert import open_checkpoint
from megatron.conversion.formats import NoCheckpointError, find_checkpoint
from megatron.conversion.huggingface.directory import write_huggingface
from megatron.core.dist_checkpointing import CheckpointError
from megatron.training.checkpoint.start import find_start
from megatron.training.config.options import CheckpointConfig
from tests.support.memory_source import LLAMA_ARGS, random_source

PROJECTION = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    write_huggingface(random_source(LLAMA_ARGS, optimizer=False), tmp_path / "llama")
    return tmp_path / "llama"


def add_adapter(directory: Path) -> None:
    """Create the files that `PeftModel.save_pretrained` writes."""
    directory.mkdir(exist_ok=True)
    fields = {"peft_type": "LORA", "base_model_name_or_path": "org/base", "r": 2}
    (directory / "adapter_config.json").write_text(json.dumps(fields))
    lora = {f"base_model.model.{PROJECTION}.lora_A.weight": torch.ones(2, 32)}
    save_file(lora, directory / "adapter_model.safetensors")


def test_adapter_next_to_a_model_is_not_ignored(llama: Path) -> None:
    open_checkpoint(llama)
    add_adapter(llama)
    for loader in ("auto", "hf"):
        with pytest.raises(
            CheckpointError, match=r"org/base.*merge_and_unload\(\).*remove adapter_c"
        ):
            open_checkpoint(llama, loader)


def test_adapter_alone_is_refused_with_its_base_model(tmp_path: Path) -> None:
    """Also where training would start from random weights."""
    add_adapter(tmp_path / "adapter")
    with pytest.raises(NoCheckpointError, match=r"base model 'org/base'.*merge_and_unload\(\)"):
        find_checkpoint(tmp_path / "adapter")
    flags = CheckpointConfig(load=str(tmp_path / "adapter"), save=str(tmp_path / "adapter"))
    with pytest.raises(NoCheckpointError, match="adapter of PEFT"):
        find_start(flags, tmp_path / "adapter")


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

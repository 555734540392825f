"""Checkpoints of other trainers, compared with the state that the programs gather."""

import json
import os
from pathlib import Path

from safetensors.torch import save_file

from megatron.conversion.opening import open_checkpoint
from tests.support.compare import assert_same, read_all

# Archive -> the checkpoint in it
FOLDERS = {
    "accelerate_fsdp2": ".",
    "accelerate_fsdp1": ".",
    "verl_fsdp2": "global_step_2/actor",
    "verl_fsdp1": "global_step_2/actor",
    "olmo_core": "step2",
    "automodel": "epoch_0_step_2",
    "torch_checkpointing": "step-2",
}


# The config.json of transformers of the model of OLMo-core
OLMO2 = {
    "model_type": "olmo2",
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 67,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500_000.0,
}


def assert_is_gathered(folder: Path, expected: dict, work: Path) -> None:
    """Compare a folder with the weights and moments that its program has gathered, bitwise.

    Each state is compared with a directory of transformers that has it as its weights.
    """
    source = open_checkpoint(folder)
    (config,) = folder.rglob("config.json")
    text = config.read_text()
    if "model_and_optim" in os.listdir(folder):  # the configuration there is that of OLMo-core
        text = json.dumps(OLMO2)
    tensors = read_all(source)
    for state in ("param", "exp_avg", "exp_avg_sq"):
        content = expected["model"]
        prefixes = ["", "optimizer.state.param."]  # weights are their own main parameters
        if state != "param":
            content = {name: values[state] for name, values in expected["optimizer"].items()}
            prefixes = [f"optimizer.state.{state}."]
        directory = work / state
        directory.mkdir()
        (directory / "config.json").write_text(text)
        save_file(content, directory / "model.safetensors")
        for key, value in read_all(open_checkpoint(directory)).items():
            for prefix in prefixes:
                assert_same(tensors.pop(f"{prefix}{key}"), value, key)
    assert not tensors
    training = source.training
    assert training is not None
    assert training.param_groups is not None
    for group in training.param_groups:
        assert (group["lr"], group["betas"], group["step"]) == (0.01, (0.9, 0.95), 2)
    decays = [group["weight_decay"] for group in training.param_groups]
    decay_of_norms = 0.1 if folder.name == "actor" else 0.0  # verl decays all parameters
    assert decays == [0.1, decay_of_norms]
    assert training.iteration == 2

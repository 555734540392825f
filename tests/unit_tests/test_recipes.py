"""Recipes of `examples/models`: their flags are those of the published config.json."""

import dataclasses
import json
import os
import subprocess

import pytest

from megatron.conversion.huggingface.families import find_family
from megatron.conversion.model_space.model import model_config
from megatron.training.config.parsing import parse_args
from tests import GOLDEN, ROOT

MODELS = ROOT / "examples/models"
RECIPES = sorted(path.stem for path in MODELS.glob("*.recipe"))
MODES = ("scratch", "continue", "sft", "lora")
# The published files have no data type: gpt-oss is quantized, OLMo 2 is in fp32.
DTYPES = {"bf16", "fp16"}


def read_model_flags(name: str) -> list[str]:
    lines = (MODELS / f"{name}.args").read_text().splitlines()
    return [word for line in lines if not line.startswith("#") for word in line.split()]


def launch(name: str, mode: str, gpus: int) -> subprocess.CompletedProcess[str]:
    """Run the script with a launcher that prints the command."""
    variables = {"MODEL": "/model", "DATA": "/data", "RUN_DIR": "/run", "GPUS": str(gpus)}
    return subprocess.run(
        ["bash", str(MODELS / "run.sh"), name, mode, "--seed", "7"],
        env=os.environ | variables | {"LAUNCH": "printf %s\\n"},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("name", RECIPES)
def test_flags_are_those_of_the_published_config(name):
    hf = json.loads((GOLDEN / f"hf_configs/{name}.json").read_text())
    args = find_family(hf).read_config(hf, {}, ())
    published = dataclasses.asdict(model_config(args, args["vocab_size"], name))
    flags = [*read_model_flags(name), "--seq-length", "2048", "--lr", "1", "--train-iters", "1"]
    flags += ["--mock-data", "--vocab-size", str(hf["vocab_size"])]
    config = parse_args(flags, 1).model

    for field in dataclasses.fields(config):
        if field.name not in DTYPES:
            assert getattr(config, field.name) == published[field.name], field.name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", RECIPES)
def test_every_mode_has_a_valid_command(name, mode):
    flags = read_model_flags(name)
    lines = (MODELS / f"{name}.recipe").read_text().splitlines()
    sizes = [int(line.split()[0][5:]) for line in lines if line.startswith("gpus_")]
    assert sizes[-2:] == [8, 64]

    for gpus in sizes:
        done = launch(name, mode, gpus)
        assert done.returncode == 0, done.stderr
        command = [word for word in done.stdout.splitlines() if word != "--use-checkpoint-args"]
        config = parse_args([*flags, *command[1:]], gpus)
        assert config.training.seed == 7
        assert config.data.sft == (mode in ("sft", "lora"))
        assert (config.lora.lora_rank is None) == (mode != "lora")
        assert (config.checkpoint.save_hf is None) == (mode == "scratch")


def test_errors_name_the_missing_part():
    assert launch("gpt_oss_20b", "scratch", 1).returncode == 2
    assert "gpt_oss_20b.recipe has no line gpus_1" in launch("gpt_oss_20b", "sft", 1).stderr
    assert (
        "the mode rlhf is not scratch, continue, sft or lora"
        in launch("qwen3_8b", "rlhf", 8).stderr
    )

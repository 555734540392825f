"""Every command in docs/converting.md works on a small model."""

import json
import re
import shlex
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.commands.conversion import run
from megatron.conversion.checkpoint_conversion import WRITERS, convert
from megatron.conversion.megatron_lm.torch_dist_writer import write_torch_dist
from megatron.conversion.opening import open_checkpoint
from megatron.core.dist_checkpointing import write_tracker
from tests import ROOT
from tests.support.memory_source import LLAMA_ARGS, random_source
from tests.unit_tests.conversion.convert_tool import run_merge
from tools.checkpoint import merge
from tools.checkpoint.convert import parse

PAGE = (ROOT / "docs/converting.md").read_text(encoding="utf-8")
SOURCES = {
    "run": "torch_dist",
    "Llama-3.2-1B": "hf",
    "old": "legacy",
    "ds_run": "universal",
}


def commands(tool="convert"):
    for block in PAGE.split("```")[1::2]:
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith(f"python tools/checkpoint/{tool}.py"):
                yield " ".join(line.split()[2:])


def write_adapter(directory):
    """Create the files that `PeftModel.save_pretrained` writes."""
    directory.mkdir()
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    (directory / "adapter_config.json").write_text(json.dumps(fields))
    module = "base_model.model.model.layers.0.mlp.down_proj"
    tensors = {
        f"{module}.lora_A.weight": torch.ones(2, LLAMA_ARGS["ffn_hidden_size"]),
        f"{module}.lora_B.weight": torch.ones(LLAMA_ARGS["hidden_size"], 2),
    }
    save_file(tensors, directory / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    write_torch_dist(
        random_source(LLAMA_ARGS | {"num_layers": 8, "bf16": True}),
        root / "torch_dist/iter_0000007",
    )
    write_tracker(root / "torch_dist", 7)
    for form in WRITERS:
        if form != "torch_dist":
            convert(root / "torch_dist", root / form, form)
    return root


@pytest.mark.parametrize("command", list(commands()))
def test_documented_commands_work(command, sources, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options, read_options, write_options = parse(shlex.split(command))
    form = SOURCES[str(options.load_dir)]
    shutil.copytree(sources / form, options.load_dir)
    if write_options.foreign is not None:  # an original with more tensors
        shutil.copytree(sources / "hf", write_options.foreign)
        weights = write_options.foreign / "model.safetensors"
        save_file(load_file(weights) | {"vision.weight": torch.ones(2)}, weights)

    for directory in write_options.edits.adapters:
        write_adapter(directory)
    outcome = run(options, read_options, write_options)
    result = open_checkpoint(outcome.target, options.saver)

    assert outcome.num_tensors
    assert result.tensors
    if options.saver == "legacy":
        assert result.args["tensor_model_parallel_size"] == write_options.tensor_parallel
        assert result.args["pipeline_model_parallel_size"] == write_options.pipeline_parallel


@pytest.fixture(scope="module")
def merge_sources(tmp_path_factory):
    """A run with five checkpoints, and a model of transformers."""
    root = tmp_path_factory.mktemp("merge_sources")
    for iteration in range(7, 12):
        source = random_source(LLAMA_ARGS | {"bf16": True}, seed=iteration)
        source.training.iteration = iteration
        write_torch_dist(source, root / f"run/iter_{iteration:07d}")

    write_tracker(root / "run", 11)
    convert(root / "run", root / "Llama-3.2-1B", "hf")
    return root


@pytest.mark.parametrize("command", list(commands("merge")))
def test_documented_merges_work(command, merge_sources, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(merge_sources, tmp_path, dirs_exist_ok=True)
    done = run_merge(*shlex.split(command))
    assert done.returncode == 0, done.stderr
    output = shlex.split(command)[shlex.split(command).index("--output") + 1]
    assert open_checkpoint(tmp_path / output).tensors


def test_every_format_is_documented_as_source_and_target():
    parsed = [parse(shlex.split(command))[0] for command in commands()]
    assert {args.saver for args in parsed} == set(WRITERS)
    assert {SOURCES[str(args.load_dir)] for args in parsed} == set(WRITERS)


@pytest.mark.parametrize("parse", [parse, merge.parse], ids=["convert", "merge"])
def test_every_option_is_documented(parse, capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    options = set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))
    assert len(options) > 15
    assert [option for option in options if option not in PAGE] == []

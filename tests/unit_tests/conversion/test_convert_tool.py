"""The command line of `tools/checkpoint/convert.py`."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron.conversion.deepspeed.universal_writer import write_universal
from megatron.conversion.huggingface.directory_writer import write_huggingface
from megatron.conversion.opening import open_checkpoint, require_checkpoint
from megatron.conversion.options import WriteOptions
from tests.support.compare import read_whole
from tests.support.memory_source import GPT_ARGS, LLAMA_ARGS, random_source
from tests.unit_tests.conversion.convert_tool import run_convert

QKV = "decoder.layers.1.self_attention.linear_qkv.weight"


def run(*words: object) -> str:
    done = run_convert(*words)
    return done.stdout + done.stderr.split("\r")[-1] if done.returncode else done.stdout


def test_from_universal_to_hugging_face(tmp_path: Path) -> None:
    source = random_source(LLAMA_ARGS | {"bf16": True})
    write_universal(source, tmp_path / "in")
    said = run(
        "--saver",
        "hf",
        "--load-dir",
        tmp_path / "in",
        "--save-dir",
        tmp_path / "hf",
        "--dtype",
        "fp32",
    )
    assert "-> " + str(tmp_path / "hf") in said
    assert "not carried: optimizer state" in said
    embedding = load_file(tmp_path / "hf" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(
        embedding, source.values["optimizer.state.param.embedding.word_embeddings.weight"]
    )


@pytest.mark.parametrize("flags", [[], ["--num-attention-heads", "4"]])
def test_missing_arguments_are_given_as_flags(flags: list[str], tmp_path: Path) -> None:
    write_universal(random_source(GPT_ARGS), tmp_path / "in")
    checkpoint = require_checkpoint(tmp_path / "in").directory
    state = torch.load(checkpoint / "mp_rank_00_model_states.pt", weights_only=False)
    torch.save(
        {name: v for name, v in state.items() if name != "args"},
        checkpoint / "mp_rank_00_model_states.pt",
    )
    said = run(
        "--saver",
        "torch_dist",
        "--load-dir",
        tmp_path / "in",
        "--save-dir",
        tmp_path / "out",
        *flags,
    )
    if flags:
        assert open_checkpoint(tmp_path / "out").training.iteration == 7  # type: ignore[union-attr]
    else:
        assert "error: " in said
        assert "give --num-attention-heads" in said
        assert not (tmp_path / "out").exists()


def test_source_and_target_options(tmp_path: Path) -> None:
    source = random_source(GPT_ARGS, optimizer=False)
    write_huggingface(source, tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"logit_scale": 1.0}))
    to = ["--saver", "universal", "--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "ds"]
    blocks = [
        "--target-qkv-blocks",
        "--target-tensor-parallel-size",
        "2",
        "--universal-style",
        "no-pipeline",
    ]
    assert "--hf-ignore-fields logit_scale" in run(*to, *blocks)
    assert "moments are zero" in run(*to, *blocks, "--hf-ignore-fields", "logit_scale")
    assert (
        require_checkpoint(tmp_path / "ds").directory
        / "zero"
        / "language_model.embedding.word_embeddings.weight"
    ).is_dir()
    assert torch.equal(read_whole(open_checkpoint(tmp_path / "ds"), QKV), source.values[QKV])
    again = [
        "--saver",
        "hf",
        "--load-dir",
        tmp_path / "ds",
        "--save-dir",
        tmp_path / "hf2",
        "--no-optim",
    ]
    run(*again, "--universal-qkv-layout", "groups")
    assert not torch.equal(read_whole(open_checkpoint(tmp_path / "hf2"), QKV), source.values[QKV])


def test_unknown_flags_are_refused(tmp_path: Path) -> None:
    said = run(
        "--saver", "hf", "--load-dir", tmp_path, "--save-dir", tmp_path / "x", "--num-layer", "2"
    )
    assert "--num-layer" in said
    assert "--num-layers" in said


def test_flags_without_effect_are_reported(tmp_path: Path) -> None:
    write_huggingface(random_source(GPT_ARGS, optimizer=False), tmp_path / "hf")
    flags = ["--max-shard-size", "1GB", "--target-pipeline-parallel-size", "2"]
    said = run(
        "--saver",
        "torch_dist",
        "--load-dir",
        tmp_path / "hf",
        "--save-dir",
        tmp_path / "out",
        *flags,
    )
    assert "no effect: --max-shard-size (for hf)" in said
    assert "no effect: --target-pipeline-parallel-size (for legacy)" in said


def test_ckpt_step_selects_a_universal_directory(tmp_path: Path) -> None:
    write_universal(random_source(GPT_ARGS), tmp_path / "in", WriteOptions())
    assert (
        open_checkpoint(tmp_path / "in", step=7).tensors == open_checkpoint(tmp_path / "in").tensors
    )
    with pytest.raises(ValueError, match="--ckpt-step 8"):
        open_checkpoint(tmp_path / "in", step=8)


@pytest.mark.parametrize(
    "flag", ["--target-tensor-parallel-size", "--true-vocab-size", "--workers"]
)
def test_zero_sizes_are_refused(flag: str) -> None:
    done = run_convert("--load-dir", "a", "--save-dir", "b", "--saver", "legacy", flag, "0")
    assert done.returncode
    assert f"{flag} must be at least 1, got 0" in done.stderr

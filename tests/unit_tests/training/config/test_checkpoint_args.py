"""--use-checkpoint-args: selection of the checkpoint, and errors without one."""

import shlex

import pytest
import torch
import torch.distributed as dist

from megatron.conversion.megatron_lm.torch_dist_writer import write_torch_dist
from megatron.training.config.checkpoint_args import read_checkpoint_args
from megatron.training.config.parsing import parse_args
from tests import ROOT
from tests.support.memory_source import LLAMA_ARGS, random_source

CHECKPOINT = (
    ROOT / "tests/golden/megatron_lm/mcore_0.16.1/llama_fp32_tp2pp2/torch_dist_fully_reshardable"
)
BASE = "--train-iters 10 --lr 1e-3 --mock-data --num-layers 2 "


def read(flags):
    return read_checkpoint_args(shlex.split(BASE + flags))


def configure(flags, world_size=1):
    argv = shlex.split(BASE + flags)
    return parse_args(argv, world_size, read_checkpoint_args(argv))


def test_model_and_tokenizer_come_from_the_checkpoint(monkeypatch):
    """The arguments are read without a process group, in any environment of a launcher."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = configure(f"--use-checkpoint-args --load {CHECKPOINT}", world_size=2)
    assert (config.model.num_layers, config.model.query_groups) == (4, 2)
    assert config.tokenizer.tokenizer_type == "NullTokenizer"
    assert "--use-checkpoint-args: num_layers is 4 as in the checkpoint, not 2" in config.notes
    assert not dist.is_initialized()


def test_sizes_are_compared_with_the_stored_tensors(tmp_path):
    """The model that forged arguments describe would have 500 GB."""
    write_torch_dist(random_source(LLAMA_ARGS, optimizer=False), tmp_path)
    common = tmp_path / "common.pt"
    content = torch.load(common, weights_only=False)
    assert content["content_metadata"]["non_homogeneous_layers"]  # as saved by a run
    vars(content["args"])["kv_channels"] = 10**9
    torch.save(content, common)
    common.with_name("checksums.bin").unlink()
    with pytest.raises(ValueError, match=r"has shape \(.*\), its arguments make it \("):
        read(f"--use-checkpoint-args --load {tmp_path}")


def test_nothing_is_read_unless_requested():
    assert read(f"--load {CHECKPOINT}") is None


@pytest.mark.parametrize("exists", [True, False])
def test_first_start_in_the_save_directory_uses_the_flags(tmp_path, exists):
    """Restart scripts for Megatron-LM give the same flags to the first launch."""
    directory = tmp_path / "run"
    if exists:
        directory.mkdir()
    model = "--hidden-size 32 --num-attention-heads 4 --seq-length 16 "
    config = configure(f"--use-checkpoint-args --load {directory} --save {directory} {model}")
    assert config.model.num_layers == 2
    assert any("contains no checkpoint yet" in note for note in config.notes)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "--use-checkpoint-args requires --load"),
        ("--load {path}", "--load {path} contains no checkpoint"),
        ("--load {path} --save {path}/other", "--load {path} contains no checkpoint"),
        ("--load {path} --save {path} --exit-on-missing-checkpoint", "contains no checkpoint"),
        ("--load {path} --save {path} --ckpt-step 3", "--ckpt-step 3"),
    ],
)
def test_missing_checkpoints_are_errors(tmp_path, flags, message):
    with pytest.raises(ValueError) as error:
        read("--use-checkpoint-args --zzz 1 " + flags.format(path=tmp_path))
    assert message.format(path=tmp_path) in str(error.value)
    assert "unknown flag --zzz" in str(error.value)

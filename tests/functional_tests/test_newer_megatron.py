"""Parts of a checkpoint that newer Megatron-LM reads: the common state as an object, which replaces
common.pt, and the tokenizer.
"""

import io
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from megatron.conversion.checkpoint_conversion import compare
from megatron.conversion.megatron_lm.torch_dist_writer import write_torch_dist
from megatron.conversion.opening import open_checkpoint
from tests.support.memory_source import LLAMA_ARGS, random_source
from tests.support.training_harness import COMMON, LLAMA, train

KEY = "common_state/shard_0_1"


def read_common_state(directory: Path) -> Any:
    """Read the object as Megatron-LM 0.19 does."""
    state: dict[str, Any] = {KEY: io.BytesIO()}
    reader = dcp.FileSystemReader(directory)
    dcp.load(state, storage_reader=reader, no_dist=True)
    loaded = state[KEY]
    if isinstance(loaded, io.BytesIO):
        loaded.seek(0)
        loaded = torch.load(loaded, weights_only=False)
    (common,) = loaded
    return common


def test_trained_checkpoints_contain_the_common_state(pool, tmp_path):
    flags = f"{COMMON} {LLAMA} --mock-data --train-iters 4 --save {tmp_path} --save-interval 2"
    pool.run(train, 2, f"{flags} --async-save --tensor-model-parallel-size 2")

    for iteration in (2, 4):
        directory = tmp_path / f"iter_{iteration:07d}"
        common = read_common_state(directory)
        assert common == torch.load(directory / "common.pt", weights_only=False)
        assert common["iteration"] == common["args"].iteration == iteration
        param_groups = common["optimizer"]["optimizer"]["param_groups"]
        assert param_groups[0]["step"] == iteration


def test_converted_checkpoints_contain_the_common_state(tmp_path):
    directory = tmp_path / "iter_0000007"
    write_torch_dist(random_source(LLAMA_ARGS), directory)
    assert read_common_state(directory) == torch.load(directory / "common.pt", weights_only=False)

    # It replaces common.pt.
    expected = open_checkpoint(directory)
    (directory / "common.pt").unlink()
    (directory / "checksums.bin").unlink()
    actual = open_checkpoint(directory)

    assert actual.args == expected.args
    assert actual.training == expected.training
    assert compare(expected, actual) == len(expected.tensors)


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer of 60 words in the format of Hugging Face, and another file."""
    directory.mkdir()
    vocabulary = {str(token): token for token in range(60)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "0"}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": model}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "1"}))
    (directory / "notes.txt").write_text("not a part of the tokenizer")


def test_trained_checkpoints_contain_the_tokenizer(pool, tmp_path):
    original = tmp_path / "words"
    write_tokenizer(original)
    model = COMMON.replace("--tokenizer-type NullTokenizer --vocab-size 60", "")
    tokenizer = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {original}"
    flags = f"{model} {LLAMA} {tokenizer} --mock-data --train-iters 3 --save {tmp_path / 'run'}"
    pool.run(train, 1, flags)
    checkpoint = tmp_path / "run" / "iter_0000003"
    copied = checkpoint / "tokenizer"
    names = ["tokenizer.json", "tokenizer_config.json"]

    assert sorted(path.name for path in copied.iterdir()) == names
    for name in names:
        assert (copied / name).read_bytes() == (original / name).read_bytes()
    assert open_checkpoint(checkpoint).args["tokenizer_model"] == str(copied)

    pool.run(train, 1, f"{flags}-without --no-save-tokenizer-assets")
    assert not (tmp_path / "run-without" / "iter_0000003" / "tokenizer").exists()

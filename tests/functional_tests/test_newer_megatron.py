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
    wanted: dict[str, Any] = {KEY: io.BytesIO()}
    dcp.load(wanted, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
    loaded = wanted[KEY]
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
        assert common["optimizer"]["optimizer"]["param_groups"][0]["step"] == iteration


def test_converted_checkpoints_contain_the_common_state(tmp_path):
    directory = tmp_path / "iter_0000007"
    write_torch_dist(random_source(LLAMA_ARGS), directory)
    assert read_common_state(directory) == torch.load(directory / "common.pt", weights_only=False)

    # It replaces common.pt.
    expected = open_checkpoint(directory)
    (directory / "common.pt").unlink()
    (directory / "checksums.bin").unlink()
    found = open_checkpoint(directory)
    assert found.args == expected.args
    assert found.training == expected.training
    assert compare(expected, found) == len(expected.tensors)


def test_trained_checkpoints_contain_the_tokenizer(pool, tmp_path):
    words = {"type": "WordLevel", "vocab": {str(n): n for n in range(60)}, "unk_token": "0"}
    content = {"version": "1.0", "added_tokens": [], "model": words}
    vocabulary = tmp_path / "words"
    vocabulary.mkdir()
    (vocabulary / "tokenizer.json").write_text(json.dumps(content))
    (vocabulary / "tokenizer_config.json").write_text(json.dumps({"eos_token": "1"}))
    (vocabulary / "notes.txt").write_text("not a part of the tokenizer")
    model = COMMON.replace("--tokenizer-type NullTokenizer --vocab-size 60", "")
    tokenizer = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {vocabulary}"
    flags = f"{model} {LLAMA} {tokenizer} --mock-data --train-iters 3 --save {tmp_path / 'run'}"
    pool.run(train, 1, flags)
    stored = tmp_path / "run" / "iter_0000003" / "tokenizer"
    names = ["tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in stored.iterdir()) == names
    for name in names:
        assert (stored / name).read_bytes() == (vocabulary / name).read_bytes()
    assert open_checkpoint(stored.parent).args["tokenizer_model"] == str(stored)

    pool.run(train, 1, f"{flags}-without --no-save-tokenizer-assets")
    assert not (tmp_path / "run-without" / "iter_0000003" / "tokenizer").exists()

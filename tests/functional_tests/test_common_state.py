"""The common state is stored as an object, too, which replaces common.pt in newer Megatron-LM."""

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from megatron.conversion.convert import compare, open_checkpoint
from megatron.conversion.megatron_lm.torch_dist import write_torch_dist
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
    assert found.args == expected.args and found.training == expected.training
    assert compare(expected, found) == len(expected.tensors)

"""Transfers to tensors under Hugging Face names against exports of the same weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.conversion.huggingface.directory import HuggingFaceSource
from megatron.conversion.huggingface.directory_writer import write_huggingface
from megatron.conversion.huggingface.weight_files import open_weights
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.parallel_config import ParallelConfig
from megatron.core.run_checkpoint.keys import WORD_EMBEDDINGS, is_trained
from megatron.transfer.engine_tensors import list_engine_tensors, view_engine_tensors
from megatron.transfer.routing import plan_transfer
from tests import GOLDEN
from tests.support.compare import read_whole
from tests.support.memory_source import LLAMA_ARGS, MemorySource, random_source
from tests.unit_tests.transfer.layouts import build_state, compute_values, set_values

MODELS = sorted(path.parent for path in (GOLDEN / "hf").glob("*/config.json"))


def allocate(args: dict[str, Any]) -> dict[str, torch.Tensor]:
    infos = list_engine_tensors(args)
    return {name: torch.zeros(info.shape, dtype=info.dtype) for name, info in infos.items()}


def check_export(tensors: dict[str, torch.Tensor], source: MemorySource, directory: Path) -> None:
    """Assert that tensors are those of an export, bitwise and under the same names."""
    write_huggingface(source, directory)
    exported = open_weights(directory)
    assert tensors.keys() == exported.keys()
    for name, tensor in exported.items():
        assert torch.equal(tensors[name], tensor.read_all()), name


@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.name)
def test_tensors_equal_an_export(model: Path, tmp_path: Path) -> None:
    imported = HuggingFaceSource(model)
    values = {}
    for key in imported.tensors:
        value = read_whole(imported, key)
        if not is_trained(key):
            value = value.float()
        elif key.endswith(".bias"):
            value = value + torch.ones(1, dtype=value.dtype)
        values[key] = value

    vocab_size = values[WORD_EMBEDDINGS].shape[0]
    source = MemorySource(imported.args | {"model_vocab_size": vocab_size}, values)
    check_transfer(source, tmp_path / "model")


def check_transfer(source: MemorySource, directory: Path) -> None:
    """Assert that a transfer from a checkpoint equals its export."""
    tensors = allocate(source.args)
    target = view_engine_tensors(tensors, source.args)
    plan_transfer(source, target).run(source, target)
    check_export(tensors, source, directory)


def test_experts_equal_an_export(tmp_path):
    args = LLAMA_ARGS | {"num_experts": 4, "bf16": True, "model_vocab_size": 53}
    check_transfer(random_source(args, vocab_size=53, optimizer=False), tmp_path / "model")


def serve_from_layout(rank: int, _: int, directory: Path) -> int:
    """Replay TP2 x PP2 to an engine on rank 3; returns the bytes that the rank receives."""
    args = LLAMA_ARGS | {"model_vocab_size": 53}
    source = build_state("llama", ParallelConfig(2, 2), 4, rank)
    tensors = allocate(args) if rank == 3 else {}
    target = view_engine_tensors(tensors, args)
    schedule = plan_transfer(source, target, bucket_bytes=4000)
    transfer = schedule.bind(source, target)
    whole = build_state("llama", ParallelConfig(), 1, 0)
    for step in (1, 2):
        set_values(source, step)
        transfer.run()
        if tensors:
            values = {key: compute_values(entry, step) for key, entry in whole.items()}
            check_export(tensors, MemorySource(args, values), directory / str(step))
    return schedule.bytes_received


def test_replays_from_a_layout_equal_exports(pool, tmp_path):
    received = pool.run(serve_from_layout, 4, tmp_path)
    whole = build_state("llama", ParallelConfig(), 1, 0)
    local = build_state("llama", ParallelConfig(2, 2), 4, 3)
    sizes = [
        sum(box.tensor.nbytes for entry in state.values() for box in entry.boxes)
        for state in (whole, local)
    ]
    assert received == [0, 0, 0, sizes[0] - sizes[1]]


def test_some_names_are_filled_alone():
    args = LLAMA_ARGS | {"model_vocab_size": 53}
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors = {name: allocate(args)[name]}
    (entry,) = view_engine_tensors(tensors, args).values()
    assert isinstance(entry, ShardedTensor)
    assert sum(box.tensor.numel() for box in entry.boxes) == tensors[name].numel()


def test_other_tensors_are_refused():
    args = LLAMA_ARGS | {"model_vocab_size": 53}
    tensors = {"lm_head.weight": torch.zeros(54, 32), "head": torch.zeros(1)}
    with pytest.raises(ValueError) as error:
        view_engine_tensors(tensors, args)
    assert "lm_head.weight: shape (54, 32), expected (53, 32)" in str(error.value)
    assert "head: the model does not have it" in str(error.value)

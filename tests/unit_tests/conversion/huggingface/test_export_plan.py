"""The plan of exports next to checkpoints, for every family: the files that a conversion writes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.conversion.huggingface.directory import HuggingFaceSource
from megatron.conversion.huggingface.directory_writer import write_huggingface
from megatron.conversion.huggingface.export_plan import plan_export
from megatron.conversion.options import WriteOptions
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.saving.model_export import StagedTarget
from megatron.core.dist_checkpointing.saving.pending_export import PendingExport
from megatron.core.dist_checkpointing.saving.saver import AsyncSaver
from megatron.core.run_checkpoint.keys import WORD_EMBEDDINGS, is_trained
from tests import GOLDEN
from tests.support.compare import read_whole
from tests.support.memory_source import LLAMA_ARGS, MemorySource, random_source

CONFIGS = sorted((GOLDEN / "hf").glob("*/config.json"))
MODELS = [path.parent for path in CONFIGS]


def export(source: MemorySource, root: Path, **options: Any) -> Path:
    """Save the tensors of `source` with an export, and return its directory."""
    vocab_size = source.tensors[WORD_EMBEDDINGS].shape[0]
    args = source.args | {"model_vocab_size": vocab_size}
    target = StagedTarget(root=root / "exports", plan=plan_export(args, **options))

    def start_export(save_id: str) -> PendingExport:
        return target.start(1, lambda: None, save_id)

    state = {key: ShardedTensor.replicated(key, value) for key, value in source.values.items()}
    with AsyncSaver() as saver:
        saver.save(state, root / "checkpoint", common={}, export=start_export)
        (report,) = saver.finish()
    assert report.error is None
    assert report.warning is None
    directory = report.exported
    assert directory is not None
    return directory


def read_files(directory: Path) -> dict[str, bytes]:
    contents = {}
    for path in directory.iterdir():
        contents[path.name] = path.read_bytes()
    return contents


@pytest.mark.parametrize("model", MODELS, ids=lambda path: path.name)
def test_files_equal_a_conversion(model: Path, tmp_path: Path) -> None:
    imported = HuggingFaceSource(model)
    values = {}
    for key in imported.tensors:
        value = read_whole(imported, key)
        # A run keeps the biases of routers in fp32. Other biases are not zero in a run.
        if not is_trained(key):
            value = value.float()
        elif key.endswith(".bias"):
            value = value + torch.ones(1, dtype=value.dtype)
        values[key] = value
    source = MemorySource(imported.args, values)
    converted = tmp_path / "converted"
    write_huggingface(source, converted)
    expected = read_files(converted)
    exported = read_files(export(source, tmp_path))
    assert exported.keys() == expected.keys()
    for name, content in expected.items():
        assert exported[name] == content, name


def test_shards_have_an_index(tmp_path: Path) -> None:
    source = random_source(LLAMA_ARGS | {"bf16": True}, optimizer=False)
    limit = source.tensors[WORD_EMBEDDINGS].nbytes
    converted = tmp_path / "converted"
    write_huggingface(source, converted, WriteOptions(max_shard_size=limit))
    exported = read_files(export(source, tmp_path, max_shard_size=limit))
    assert "model.safetensors.index.json" in exported
    assert exported == read_files(converted)

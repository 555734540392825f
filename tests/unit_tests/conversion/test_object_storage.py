"""Conversion and checkpoint lookup in object storage."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.conversion.checkpoint_conversion import convert
from megatron.conversion.huggingface import directory_writer
from megatron.conversion.huggingface.safetensors_files import SafetensorsWriter
from megatron.conversion.opening import open_checkpoint
from megatron.conversion.options import EditOptions, ReadOptions, WriteOptions
from megatron.core import object_storage
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.object_path import path_of
from megatron.core.run_checkpoint.formats import find_checkpoint, list_formats
from tests import GOLDEN
from tests.support.object_server import FaultyProxy, object_server
from tests.unit_tests.conversion.convert_tool import run_convert
from tests.unit_tests.tools.test_inspect import LLAMA, main

SOURCE = LLAMA / "torch_dist_fully_reshardable"


@pytest.fixture(scope="module")
def converted():
    object_storage.open_store.cache_clear()

    with object_server():
        target = path_of("s3://bucket/model")
        report = convert(SOURCE, target, "torch_dist", verify=True)
        assert report.verified is not None
        assert report.verified > 50
        yield target

    object_storage.open_store.cache_clear()


def test_round_trip_through_object_storage(converted, tmp_path, capsys):
    convert(converted, tmp_path / "back", "legacy")
    assert main(["diff", str(SOURCE), str(tmp_path / "back")]) == 0
    assert main(["verify", str(converted)]) == 0
    assert "s3://bucket/model/iter_" in capsys.readouterr().out


def test_newest_commit_overrides_the_tracker(converted):
    store = converted.store
    actual = find_checkpoint(str(converted))
    tracker = f"{converted.key}/latest_checkpointed_iteration.txt"
    named = store.read(tracker).content
    store.put(tracker, b"12345")

    assert find_checkpoint(str(converted)) == actual
    assert actual.note is None

    store.put(tracker, named)
    unfinished = f"{converted.key}/iter_9999999/.claim"
    store.put(unfinished, b"{}")
    assert find_checkpoint(str(converted)) == actual

    store.delete([unfinished])
    assert find_checkpoint("s3://bucket/nothing") is None


def test_formats_are_recognized_with_one_list_of_each_directory(converted):
    requests = []

    def record(method, path, headers):
        requests.append(f"{method} {path}")
        return ""

    (directory,) = converted.glob("iter_*")
    with FaultyProxy(os.environ["AWS_ENDPOINT_URL"], record):
        object_storage.open_store.cache_clear()
        assert list_formats(directory) == ["torch_dist"]
    object_storage.open_store.cache_clear()
    lists = [request for request in requests if "list-type=2" in request]
    assert 0 < len(lists) == len(set(lists))

    # Besides lists, only metadata.json is read, which takes two requests.
    remaining = set(requests) - set(lists)
    assert all(request.endswith("/metadata.json") for request in remaining)


@pytest.mark.parametrize(
    ("saver", "overwrite", "message"),
    [
        ("universal", False, "s3://bucket/new: object storage can only contain torch_dist"),
        ("legacy", False, "checkpoints and Hugging Face models; give --saver torch_dist or hf"),
        ("torch_dist", True, "a target in object storage cannot be replaced"),
    ],
)
def test_unsupported_targets_are_refused(converted, saver, overwrite, message):
    with pytest.raises(ValueError, match=message):
        convert(SOURCE, path_of("s3://bucket/new"), saver, overwrite=overwrite)
    assert not path_of("s3://bucket/new").exists()


def test_adapter_in_object_storage(converted, tmp_path):
    """Merge the golden adapter of gpt2, which is a pickle, and that of a safetensors file."""
    for name in ("gpt2_biases", "gpt2_dora"):
        adapter = GOLDEN / "peft" / name
        target = path_of(f"s3://bucket/{name}")
        for path in adapter.iterdir():
            target.store.put(f"{target.key}/{path.name}", path.read_bytes())
        merged = {}
        for location in (adapter, target):
            options = WriteOptions(edits=EditOptions(adapters=(location,)))
            convert(GOLDEN / "hf/gpt2", tmp_path / "merged", "hf", options=options, overwrite=True)
            merged[location] = (tmp_path / "merged/model.safetensors").read_bytes()
        assert merged[adapter] == merged[target]


def test_foreign_tensors_are_taken_from_object_storage(converted, tmp_path):
    """They are copied from the checkpoint that the model was trained from."""
    model = tmp_path / "model"
    convert(converted, model, "hf", options=WriteOptions())
    tower = torch.arange(12.0).view(3, 4)
    weights = load_file(model / "model.safetensors")
    save_file(weights | {"visual.weight": tower}, model / "model.safetensors", {"format": "pt"})
    original = path_of("s3://bucket/with_tower")
    convert(model, original, "hf", read_options=ReadOptions(keep_foreign=True))
    flags = ("--load-dir", SOURCE, "--save-dir", tmp_path / "whole", "--keep-foreign", original)
    done = run_convert("--saver", "hf", *flags)
    assert done.returncode == 0, done.stderr

    actual = load_file(tmp_path / "whole/model.safetensors")
    assert torch.equal(actual.pop("visual.weight"), tower)
    assert actual.keys() == weights.keys()


@pytest.mark.parametrize("max_shard_size", [10**9, 20_000], ids=["one_file", "shards"])
def test_model_in_object_storage_has_the_files_of_a_directory(converted, tmp_path, max_shard_size):
    """It is verified by reading it back from there."""
    options = WriteOptions(max_shard_size=max_shard_size, workers=2)
    target = path_of(f"s3://bucket/hf{max_shard_size}")
    report = convert(converted, target, "hf", options=options, verify=True)
    num_tensors = len(open_checkpoint(target).tensors)
    assert report.verified == num_tensors > 0

    convert(converted, tmp_path / "hf", "hf", options=options)
    expected = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    min_num_files = 3 if max_shard_size > 20_000 else 6
    assert len(expected) >= min_num_files

    content = {path.name: path.read_bytes() for path in target.iterdir()}
    assert content == expected
    with pytest.raises(ValueError, match="s3://bucket/hf.* exists"):
        convert(converted, target, "hf")


def test_failed_export_leaves_no_objects(converted, monkeypatch):
    """The second weight file fails after the first was sent."""
    target = path_of("s3://bucket/failed")
    options = WriteOptions(max_shard_size=20_000)
    write = SafetensorsWriter.write

    def fail_late(self, name, rows, first=0):
        if name == "lm_head.weight":
            raise OSError("no route to host")
        write(self, name, rows, first)

    monkeypatch.setattr(SafetensorsWriter, "write", fail_late)
    with pytest.raises(OSError, match="no route to host"):
        convert(converted, target, "hf", options=options)
    assert not target.exists()


def test_writer_that_lost_its_target_changes_nothing(converted, monkeypatch):
    """Another program removes the claim of a writer that seems to have ended, and writes itself."""
    target = path_of("s3://bucket/contested")
    check = directory_writer.check_weight_files

    def take_over(*args):
        check(*args)
        monkeypatch.setattr(directory_writer, "check_weight_files", check)
        directory_writer.remove_model(target)
        convert(converted, target, "hf", options=WriteOptions(dtype="fp16"))

    monkeypatch.setattr(directory_writer, "check_weight_files", take_over)
    with pytest.raises(CheckpointError, match="another program has taken it over"):
        convert(converted, target, "hf")
    assert (target / "config.json").is_file()
    assert not (target / ".claim").exists()
    assert open_checkpoint(target).args["fp16"]


def test_target_in_use_is_refused(converted, monkeypatch):
    """The claim decides between two programs that have both found an empty target."""
    target = path_of("s3://bucket/busy")

    def claim_first(path):
        path.store.put((path / ".claim").key, b"node3 4711 0123")

    monkeypatch.setattr(directory_writer, "make_empty_directory", claim_first)
    with pytest.raises(ValueError, match="busy is being written by node3 4711"):
        convert(converted, target, "hf")
    assert [path.name for path in target.iterdir()] == [".claim"]


def test_sidecar_is_refused_in_object_storage(converted):
    target = path_of("s3://bucket/sidecar")
    with pytest.raises(ValueError, match="--save-optim-sidecar needs a directory"):
        convert(converted, target, "hf", options=WriteOptions(optim_sidecar=True))
    assert not target.exists()


def test_existing_target_is_refused(converted):
    with pytest.raises(ValueError, match="s3://bucket/model exists"):
        convert(SOURCE, converted, "torch_dist")


def test_plain_path_is_a_path(tmp_path):
    assert path_of(str(tmp_path)) == tmp_path
    assert type(path_of("a")) is type(Path("a"))

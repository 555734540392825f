"""The index cache: shared without waiting, complete or absent, optional."""

import json
import logging
import os
import socket
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from megatron.core.datasets import (
    GPTDataset,
    GPTDatasetConfig,
    IndexedDataset,
    build_datasets,
    gpt_dataset,
    index_cache,
)
from megatron.core.datasets.gpt_dataset import build_gpt_index
from megatron.core.datasets.index_cache import compute_array_digest, load_or_build
from megatron.core.datasets.indexed_dataset_builder import IndexedDatasetBuilder
from megatron.training.data.loaders import build_on_one_rank_per_node_first

NAMES = ["document_index.npy", "index.json", "sample_index.npy", "shuffle_index.npy"]


@pytest.fixture
def corpus(tmp_path):
    with IndexedDatasetBuilder(tmp_path / "corpus", np.uint16) as builder:
        for length in np.random.RandomState(0).randint(1, 80, size=200).tolist():
            builder.add(np.arange(length))
    return tmp_path / "corpus"


def make_dataset(corpus, cache=None, num_samples=300):
    config = GPTDatasetConfig(
        seq_length=16,
        data_path=[str(corpus)],
        data_cache_path=cache and str(cache),
    )
    return GPTDataset(IndexedDataset(corpus), (0, 200), "train", num_samples, config, 0, 100)


def list_arrays(dataset):
    return [dataset.document_index, dataset.sample_index, dataset.shuffle_index]


def assert_equal_indices(dataset, other):
    for array, expected in zip(list_arrays(dataset), list_arrays(other), strict=True):
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)


def is_mapped(array):
    while isinstance(array, np.ndarray) and not isinstance(array, np.memmap):
        array = array.base
    return isinstance(array, np.memmap)


@pytest.fixture
def no_building(monkeypatch):
    """Make building an index fail, so that it must come from the cache."""

    def fail(plan, lengths):
        raise AssertionError("built although the cache is complete")

    monkeypatch.setattr("megatron.core.datasets.gpt_dataset.build_gpt_index", fail)


def test_index_is_built_once(corpus, tmp_path, monkeypatch, request):
    built = make_dataset(corpus, tmp_path / "cache")
    assert sorted(path.name.split("-train-")[1] for path in (tmp_path / "cache").iterdir()) == NAMES
    assert all(map(is_mapped, list_arrays(built)))
    request.getfixturevalue("no_building")
    assert_equal_indices(make_dataset(corpus, tmp_path / "cache"), built)
    with pytest.raises(AssertionError, match="built although"):
        make_dataset(corpus, tmp_path / "cache", num_samples=4000)  # more epochs: another index


def test_default_directory_is_next_to_the_data(corpus):
    make_dataset(corpus)
    assert len(list((corpus.parent / "cache" / "GPTDataset_indices").iterdir())) == 4


def test_changed_data_of_the_same_name_gets_a_new_index(corpus, tmp_path):
    make_dataset(corpus, tmp_path / "cache")

    with IndexedDatasetBuilder(corpus, np.uint16) as builder:
        for length in (
            np.random.RandomState(1)
            .permutation(np.random.RandomState(0).randint(1, 80, size=200))
            .tolist()
        ):
            builder.add(np.arange(length))  # the same sizes in another order

    again = make_dataset(corpus, tmp_path / "cache")
    assert_equal_indices(again, make_dataset(corpus, tmp_path / "fresh"))
    assert len(list((tmp_path / "cache").iterdir())) == 8


def replace_contents(path: Path, contents: bytes) -> None:
    """Replace a file; processes that have mapped the old one keep it."""
    path.with_suffix(".new").write_bytes(contents)
    os.replace(path.with_suffix(".new"), path)


DAMAGE = {
    "truncated": lambda data: data[:-5],
    "empty": lambda data: b"",
    "flipped byte": lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:],
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_rebuilt(corpus, tmp_path, caplog, name, damage):
    expected = make_dataset(corpus, tmp_path / "reference")
    make_dataset(corpus, tmp_path / "cache")
    (path,) = (tmp_path / "cache").glob(f"*{name}")
    replace_contents(path, DAMAGE[damage](path.read_bytes()))

    assert_equal_indices(make_dataset(corpus, tmp_path / "cache"), expected)
    assert "is damaged" in caplog.text
    assert "building it again" in caplog.text

    caplog.clear()
    assert_equal_indices(make_dataset(corpus, tmp_path / "cache"), expected)
    assert caplog.text == ""  # repaired


@pytest.mark.parametrize("name", NAMES)
def test_incomplete_index_is_completed(corpus, tmp_path, caplog, name):
    expected = make_dataset(corpus, tmp_path / "cache")
    (path,) = (tmp_path / "cache").glob(f"*{name}")
    path.unlink()
    assert_equal_indices(make_dataset(corpus, tmp_path / "cache"), expected)
    assert path.exists()


def test_index_stays_in_memory_without_writable_directory(corpus, tmp_path, caplog):
    expected = make_dataset(corpus, tmp_path / "cache")
    (tmp_path / "file").write_text("in the way")
    dataset = make_dataset(corpus, tmp_path / "file" / "cache")
    assert_equal_indices(dataset, expected)
    assert not any(map(is_mapped, list_arrays(dataset)))
    assert "cannot write the index cache" in caplog.text
    assert "Not a directory" in caplog.text


def test_full_disk_leaves_no_partial_files(tmp_path, caplog, monkeypatch):
    def no_space(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", no_space)
    arrays = load_or_build(tmp_path, "x", {"a": 1}, lambda: {"array": np.arange(5)})
    assert arrays["array"].tolist() == [0, 1, 2, 3, 4]
    assert list(tmp_path.iterdir()) == []
    assert "No space left" in caplog.text


def test_record_describes_the_index(corpus, tmp_path):
    make_dataset(corpus, tmp_path / "cache")
    (path,) = (tmp_path / "cache").glob("*index.json")
    record = json.loads(path.read_text())
    assert record["description"]["seq_length"] == 16
    assert record["description"]["num_epochs"] == 1
    assert set(record["arrays"]) == {"document_index", "sample_index", "shuffle_index"}


def build_while_others_damage(rank, world_size, corpus, cache):
    """Open the same index repeatedly on all ranks, while rank 0 damages and deletes files."""
    logging.getLogger(index_cache.__name__).setLevel(logging.ERROR)
    expected = make_dataset(Path(corpus), Path(cache) / f"own_{rank}")
    shared = Path(cache) / "shared"
    kept = []
    for turn in range(15):
        dist.barrier()
        dataset = make_dataset(Path(corpus), shared)
        assert_equal_indices(dataset, expected)
        kept.append(dataset)
        if rank == 0:
            path = sorted(shared.glob("*.npy"))[turn % 3]
            replace_contents(path, path.read_bytes()[: turn * 10]) if turn % 2 else path.unlink()

    for dataset in kept:  # mapped arrays stay valid after the file is replaced
        assert_equal_indices(dataset, expected)
    return True


def test_processes_share_a_directory(corpus, tmp_path, pool):
    assert pool.run(build_while_others_damage, 4, str(corpus), str(tmp_path)) == [True] * 4
    assert not list((tmp_path / "shared").glob("*.tmp*"))


def loaded_by_node(rank, world_size, corpus, cache, hosts, needs_data):
    """Return the indices that this rank built and hashed, and the first tokens of its samples."""
    counts = {"built": 0, "hashed": 0}

    def counted(name, function):
        def call(*args):
            counts[name] += 1
            return function(*args)

        return call

    gpt_dataset.build_gpt_index = counted("built", build_gpt_index)
    index_cache.compute_array_digest = counted("hashed", compute_array_digest)
    gethostname = socket.gethostname
    socket.gethostname = lambda: hosts[rank]

    def build(verify):
        config = GPTDatasetConfig(
            seq_length=16,
            data_path=[corpus],
            split="1",
            data_cache_path=cache,
            verify_index_cache=verify,
        )
        return build_datasets(config, (300, 0, 0), 0, 100)

    try:
        datasets = build_on_one_rank_per_node_first(build, needs_data[rank])
    finally:
        gpt_dataset.build_gpt_index = build_gpt_index
        index_cache.compute_array_digest = compute_array_digest
        socket.gethostname = gethostname

    tokens = None if datasets is None else [int(datasets[0][i]["tokens"][0]) for i in range(50)]
    return counts["built"], counts["hashed"], tokens


def test_one_rank_per_node_builds_and_verifies(corpus, tmp_path, pool):
    """Ranks 0 and 1 are one node, 2 and 3 another, where rank 2 needs no data."""
    args = (str(corpus), str(tmp_path / "cache"), "aabb", [True, True, False, True])
    first, again = (pool.run(loaded_by_node, 4, *args) for _ in range(2))

    for built, hashed, _ in (first[1], again[1], first[2], again[2]):
        assert built == hashed == 0
    assert {first[0][0], first[3][0]} <= {0, 1}
    assert first[0][0] + first[3][0] >= 1
    assert [again[rank][:2] for rank in (0, 3)] == [(0, 3)] * 2
    assert first[2][2] is None
    assert first[0][2] == first[1][2] == first[3][2] == again[1][2]

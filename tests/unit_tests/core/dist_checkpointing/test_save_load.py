"""Saving and loading in one process and in several; torch.distributed.checkpoint is the oracle of
the format.
"""

import json
import os
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megatron.core.dist_checkpointing import (
    Box,
    CheckpointError,
    Reader,
    ShardedObject,
    ShardedTensor,
    is_complete,
    load,
    load_common,
    read_metadata,
    save,
)
from megatron.core.dist_checkpointing.format.checksums import BLOCK_SIZE
from megatron.core.parallel_state import Axis
from megatron.core.sharding import Sharding
from tests.support.boxes import index_box
from tests.unit_tests.core.dist_checkpointing.saved_state import state_of

GLOBAL_SHAPES = {
    "embedding.weight": ((101, 16), torch.float32),
    "layers.0.qkv.weight": ((48, 16), torch.bfloat16),
    "layers.0.qkv.bias": ((48,), torch.bfloat16),
    "layers.0.proj.weight": ((16, 48), torch.bfloat16),
    "layers.0.fc1.weight": ((64, 16), torch.bfloat16),
    "norm.weight": ((16,), torch.float32),
    "experts.weight": ((4, 6, 12), torch.float32),
    "step": ((), torch.int64),
    "empty": ((0, 3), torch.float32),
}


def global_tensor(key):
    """The same content on every rank."""
    shape, dtype = GLOBAL_SHAPES[key]
    generator = torch.Generator().manual_seed(sum(map(ord, key)))
    return torch.randint(-1000, 1000, shape, generator=generator).to(dtype)


def tensor_parallel(key, rank, size, fill):
    """This rank's part of `key` as the layers of a model would split it; `fill` makes the local
    tensor.
    """
    shape, dtype = GLOBAL_SHAPES[key]
    whole = global_tensor(key)

    def local(tensor):
        return tensor.clone() if fill else torch.full_like(tensor, -7)

    if key == "embedding.weight":
        rows = -(-shape[0] // (4 * size)) * 4
        padded = torch.zeros(rows * size, shape[1], dtype=dtype)
        padded[: shape[0]] = whole
        sharding = Sharding(dim=0, axis=Axis(rank, size), num_rows=shape[0])
        return sharding.describe(key, local(padded[rank * rows :][:rows]))
    if key == "layers.0.fc1.weight":
        gate, up = (half.chunk(size)[rank] for half in whole.chunk(2))
        sharding = Sharding(dim=0, axis=Axis(rank, size), blocks=2)
        return sharding.describe(key, local(torch.cat([gate, up])))
    dim = {
        "layers.0.qkv.weight": 0,
        "layers.0.qkv.bias": 0,
        "layers.0.proj.weight": 1,
        "experts.weight": 2,
    }.get(key)
    if dim is None:
        return ShardedTensor.replicated(key, local(whole))
    return ShardedTensor.split(key, local(whole.chunk(size, dim)[rank]), dim, rank, size)


def layout_state(rank, tp, dp, fill=True):
    """Weights tensor-parallel, and a ZeRO-1 shard of a moment for each of them; rank = dp_rank * tp
    + tp_rank.
    """
    tp_rank = rank % tp
    dp_rank = rank // tp
    state = {key: tensor_parallel(key, tp_rank, tp, fill) for key in GLOBAL_SHAPES}
    for key in GLOBAL_SHAPES:
        weight = state[key]
        content = (
            torch.cat([box.tensor.reshape(-1) for box in weight.boxes])
            if weight.boxes
            else torch.empty(0)
        )
        numel = content.numel()
        first = numel * dp_rank // dp
        last = numel * (dp_rank + 1) // dp
        moment = "exp_avg." + key
        data = content[first:last].float() * 0.5 if fill else torch.full((last - first,), -7.0)
        state[moment] = weight.flat_range(moment, first, data.clone())
    state["rng"] = ShardedObject(f"rng/shard_{tp_rank}", {"seed": [rank, tp]} if fill else None)
    state["shared"] = ShardedObject("shared", {"a": torch.arange(3)} if fill else None)
    return state


def assert_equal_to_global(state):
    for entry in state.values():
        if isinstance(entry, ShardedObject):
            continue
        key = entry.key.removeprefix("exp_avg.")
        expected = global_tensor(key).float() * 0.5 if entry.key != key else global_tensor(key)
        for box in entry.boxes:
            part = expected[index_box(box.offset, box.shape)]
            assert torch.equal(box.tensor, part), (entry.key, box.offset)


def save_layout(rank, size, directory, tp, fully_parallel):
    report = save(
        layout_state(rank, tp, size // tp),
        directory,
        common={"tp": tp},
        fully_parallel=fully_parallel,
    )
    assert report.error is None
    assert report.directory == Path(directory)
    return report.bytes


def load_layout(rank, size, directory, tp, verify):
    state = layout_state(rank, tp, size // tp, fill=False)
    if (tp, size) != load_common(directory)["layout"] and rank % tp > 0:
        state.pop("rng")  # objects are keyed by place: the writer may have had fewer
    report = load(state, directory, verify=verify, strictness="raise_unexpected")
    assert_equal_to_global(state)
    return report.objects


LAYOUTS = [(1, 1), (2, 2), (2, 1), (4, 2), (4, 4), (3, 1)]  # processes, tp


@pytest.fixture(scope="module")
def checkpoints(pool, tmp_path_factory):
    """One checkpoint per layout."""
    root = tmp_path_factory.mktemp("layouts")
    for size, tp in LAYOUTS:
        pool.run(_save_with_layout, size, str(root / f"{size}_{tp}"), tp)
    return root


def _save_with_layout(rank, size, directory, tp):
    save(layout_state(rank, tp, size // tp), directory, common={"layout": (tp, size)})


@pytest.mark.parametrize("writer", LAYOUTS, ids=str)
@pytest.mark.parametrize("reader", LAYOUTS, ids=str)
def test_any_layout_reads_what_any_layout_wrote(pool, checkpoints, writer, reader):
    directory = checkpoints / f"{writer[0]}_{writer[1]}"
    objects = pool.run(load_layout, reader[0], str(directory), reader[1], writer[0] % 2 == 0)
    for rank, found in enumerate(objects):
        assert torch.equal(found["shared"]["a"], torch.arange(3))
        if writer == reader:
            tp_rank = rank % reader[1]
            assert found[f"rng/shard_{tp_rank}"] == {"seed": [tp_rank, reader[1]]}


def exchanged_load(rank, size, directory, tp):
    """Data-parallel replicas exchange what they read."""
    groups = [
        dist.new_group([r for r in range(size) if r % tp == tp_rank]) for tp_rank in range(tp)
    ]
    state = layout_state(rank, tp, size // tp, fill=False)
    state.pop("rng")
    state["turned"] = ShardedTensor.replicated(
        "experts.weight", torch.zeros(12, 4, 6).permute(1, 2, 0)
    )
    state.pop("experts.weight")
    report = load(
        state, directory, strictness="raise_unexpected", parallelization_group=groups[rank % tp]
    )
    assert_equal_to_global(state)
    return report.bytes_needed


@pytest.mark.parametrize(("size", "tp"), [(4, 1), (4, 2), (3, 1), (2, 2)])
def test_replicas_read_each_byte_once(pool, checkpoints, size, tp):
    needed = pool.run(exchanged_load, size, str(checkpoints / "2_2"), tp)
    one_copy = sum(stored.nbytes for stored in read_metadata(checkpoints / "2_2").tensors.values())
    replicated_over_tp = {
        "norm.weight",
        "step",
        "experts.weight",
    }  # by name or, for the last one, by this test
    replicas = sum(global_tensor(key).nbytes for key in replicated_over_tp)
    moments = sum(global_tensor(key).numel() * 4 for key in replicated_over_tp - {"experts.weight"})
    assert sum(needed) == one_copy + (tp - 1) * (replicas + moments)
    if tp == 1:
        assert max(needed) < 1.3 * min(needed)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_plain_dcp_reads_every_tensor(checkpoints, layout, tmp_path):
    directory = checkpoints / f"{layout[0]}_{layout[1]}"
    expected = {key: global_tensor(key) for key in GLOBAL_SHAPES}
    expected |= {"exp_avg." + key: global_tensor(key).float() * 0.5 for key in GLOBAL_SHAPES}
    state = {key: torch.full_like(tensor, -7) for key, tensor in expected.items() if tensor.numel()}
    dcp.load(state, checkpoint_id=directory)
    for key, tensor in state.items():
        assert torch.equal(tensor, expected[key]), key
    dcp_to_torch_save(directory, tmp_path / "all.pt")
    converted = torch.load(tmp_path / "all.pt", weights_only=False)
    assert torch.equal(converted["experts.weight"], expected["experts.weight"])
    assert torch.equal(converted["shared"][0]["a"], torch.arange(3)), (
        "bytes entries are lists of length 1"
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_chunks_tile_every_tensor(checkpoints, layout):
    metadata = read_metadata(checkpoints / f"{layout[0]}_{layout[1]}")
    assert set(metadata.tensors) == set(GLOBAL_SHAPES) | {"exp_avg." + key for key in GLOBAL_SHAPES}
    for key, tensor in metadata.tensors.items():
        assert tensor.chunks.find_gap_or_overlap(tensor.shape) is None, key
    for file, size in metadata.file_sizes().items():
        assert (checkpoints / f"{layout[0]}_{layout[1]}" / file).stat().st_size >= size


def test_only_the_committed_files_are_left(checkpoints):
    assert sorted(path.name for path in checkpoints.iterdir()) == sorted(
        f"{size}_{tp}" for size, tp in LAYOUTS
    )
    directory = checkpoints / "2_2"
    names = {path.name for path in directory.iterdir() if not path.name.endswith(".distcp")}
    assert names == {".metadata", "metadata.json", "common.pt", "checksums.bin"}
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    assert json.loads((directory / "metadata.json").read_text()) == backend | {
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    assert is_complete(directory)


def test_replicas_share_the_writing(pool, tmp_path):
    parallel = pool.run(save_layout, 4, str(tmp_path / "parallel"), 1, True)
    assert min(parallel) > 0
    single = pool.run(save_layout, 4, str(tmp_path / "single"), 1, False)
    assert single[0] > 1.5 * single[1], (
        "without it the first replica writes the weights, others their shards only"
    )


def conflicting_save(rank, size, directory, kind):
    tensor = torch.zeros(
        4, 4 + (kind == "shape") * rank, dtype=torch.float64 if kind == "dtype" and rank else None
    )
    state = {"w": ShardedTensor.replicated("w", tensor)}
    if kind == "hole":
        state = {"w": ShardedTensor("w", (8, 4), tensor.dtype, (Box((2 * rank, 0), tensor),))}
    if kind == "local" and rank == 1:
        state = {"w": ShardedTensor("w", (3, 4), tensor.dtype, (Box((0, 0), tensor),))}
    if kind == "object" and rank == 1:
        state["o"] = ShardedObject("o", os.system)
    try:
        save(state, directory, common={}, timeout=20)
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("shape", "w: (4, 4) torch.float32 on rank 0, (4, 5) torch.float32 on rank 1"),
        ("dtype", "torch.float32 on rank 0, (4, 4) torch.float64 on rank 1"),
        ("hole", "w (8, 4): different boxes overlap at (2, 0)"),
        ("local", "rank 1: w: the box at (0, 0) of shape (4, 4) is not inside (3, 4)"),
        ("object", "o: its pickle names posix.system"),
    ],
)
def test_all_ranks_hear_of_a_conflict(pool, tmp_path, kind, message):
    messages = pool.run(conflicting_save, 2, str(tmp_path / "x"), kind)
    assert all(message in text for text in messages), messages
    assert not (tmp_path / "x").exists()
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


# One process


def test_other_dtypes_strides_and_devices_are_converted(tmp_path):
    weight = torch.randn(30, 20)
    save(state_of(w=weight, t=weight.t()), tmp_path / "c", common={})
    target = state_of(
        w=torch.zeros(30, 20, dtype=torch.bfloat16), t=torch.zeros(60, 40)[::3, ::4].t().t()
    )
    target["t"] = ShardedTensor.replicated("t", torch.zeros(30, 40)[:, ::2].t())
    load(target, tmp_path / "c")
    assert torch.equal(target["w"].local, weight.bfloat16())
    assert torch.equal(target["t"].local, weight.t())


def test_a_save_replaces_a_checkpoint_of_the_same_name(tmp_path):
    for value in (1.0, 2.0):
        save(state_of(w=torch.full((10,), value)), tmp_path / "c", common={"value": value})
    state = state_of(w=torch.zeros(10))
    load(state, tmp_path / "c")
    assert state["w"].local[0] == 2
    assert load_common(tmp_path / "c") == {"value": 2.0}
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


@pytest.mark.parametrize("umask", [0o002, 0o027])
def test_all_files_have_the_mode_that_the_umask_allows(tmp_path, umask):
    before = os.umask(umask)
    try:
        save(state_of(w=torch.ones(10)), tmp_path / "c", common={})
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "c").iterdir()}
    assert set(modes.values()) == {0o666 & ~umask}, modes


def test_random_boxes_equal_slices(tmp_path):
    """`Reader.read` of any box, over chunks of any tiling, against slicing; with and
    without conversions.
    """
    rng = random.Random(1)
    whole = torch.arange(23 * 17 * 9, dtype=torch.int32).view(23, 17, 9)
    big = torch.arange(600 * 3000, dtype=torch.float32).view(600, 3000)
    save(state_of(whole=whole, big=big), tmp_path / "c", common={})
    reader = Reader(tmp_path / "c", verify=True)
    for tensor, key in ((whole, "whole"), (big, "big")):
        for _ in range(60):
            start = [rng.randrange(n) for n in tensor.shape]
            extent = tuple(
                rng.randrange(1, n - s + 1) for n, s in zip(tensor.shape, start, strict=True)
            )
            part = tensor[index_box(start, extent)]
            assert torch.equal(reader.read(key, tuple(start), extent), part)


def test_partial_reads_read_little_more_than_they_need(tmp_path):
    weight = torch.randn(512, 16384)
    save(state_of(w=weight), tmp_path / "c", common={})
    for offset, shape in [((100, 0), (50, 16384)), ((0, 8192), (512, 8192)), ((3, 5), (1, 16000))]:
        reader = Reader(tmp_path / "c", verify=False)
        part = weight[index_box(offset, shape)]
        assert torch.equal(reader.read("w", offset, shape), part)
        assert reader.bytes_needed == part.nbytes
        assert reader.bytes_read <= 1.02 * reader.bytes_needed
        verified = Reader(tmp_path / "c")
        assert torch.equal(verified.read("w", offset, shape), part)
        rows = (shape[0] - 1) * weight[0].nbytes + shape[1] * 4  # from the first to the last byte
        edges = 3 * BLOCK_SIZE  # of the header and at both ends of the range
        assert verified.bytes_read <= 1.02 * rows + edges


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "read"])
def test_columns_are_read_with_the_gaps_between_them(tmp_path, monkeypatch, mapped):
    """Where the kernel is too old to say whether a mapping can be read, spans are read."""
    if not mapped:
        monkeypatch.setattr("megatron.core.safe_files.reading._MADV_POPULATE_READ", 9999)
    monkeypatch.setattr(
        "megatron.core.dist_checkpointing.loading.reader._SPAN", 100_000
    )  # several spans
    weight = torch.randn(700, 1030)
    vector = torch.randn(13)
    save(state_of(vector=vector, w=weight), tmp_path / "c", common={})
    for offset, shape in [((0, 515), (700, 515)), ((1, 0), (699, 3)), ((5, 1029), (2, 1))]:
        for verify in (False, True):
            reader = Reader(tmp_path / "c", verify=verify)
            part = weight[index_box(offset, shape)]
            assert torch.equal(reader.read("w", offset, shape), part)
            assert reader.bytes_needed == part.nbytes
            span = shape[0] * 1030 * 4 + 2000
            # The first span of a block reads and verifies all of it, later ones only their part.
            assert reader.bytes_read <= (2 * span + 2 * BLOCK_SIZE if verify else span)
    shard = max((tmp_path / "c").glob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(shard, shard.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=f"{shard.name}: truncated"):
        Reader(tmp_path / "c").read("w", (0, 515), (700, 515))


def test_checkpoints_of_plain_dcp_are_read(tmp_path):
    state = {
        "w": torch.randn(40, 30),
        "t": torch.randn(20, 10).t(),
        "o": {"n": 3},
        "h": torch.randn(7).bfloat16(),
    }
    dcp.save(dict(state), checkpoint_id=tmp_path / "c")
    assert not is_complete(tmp_path / "c"), "metadata.json is what makes it a torch_dist checkpoint"
    reader = Reader(tmp_path / "c")
    for key in ("w", "t", "h"):
        assert torch.equal(
            reader.read(key, (0,) * state[key].dim(), tuple(state[key].shape)), state[key]
        )
    assert torch.equal(reader.read("w", (3, 4), (10, 11)), state["w"][3:13, 4:15])
    assert torch.equal(reader.read("t", (2, 3), (4, 5)), state["t"][2:6, 3:8])
    assert reader.read_object("o.n") == 3

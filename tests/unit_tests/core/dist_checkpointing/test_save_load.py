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
    """Return values that depend on the key only."""
    shape, dtype = GLOBAL_SHAPES[key]
    generator = torch.Generator().manual_seed(sum(map(ord, key)))
    return torch.randint(-1000, 1000, shape, generator=generator).to(dtype)


def global_moment(key):
    return global_tensor(key).float() * 0.5


SPLIT_DIMENSIONS = {
    "layers.0.qkv.weight": 0,
    "layers.0.qkv.bias": 0,
    "layers.0.proj.weight": 1,
    "experts.weight": 2,
}


def shard_weight(key, rank, size):
    """Return the shard of `key` on a rank as the layers of a model would split it."""
    shape, dtype = GLOBAL_SHAPES[key]
    whole = global_tensor(key)
    if key == "embedding.weight":  # padded to a multiple of 4 rows per rank
        rows = -(-shape[0] // (4 * size)) * 4
        padded = torch.zeros(rows * size, shape[1], dtype=dtype)
        padded[: shape[0]] = whole
        local = padded[rank * rows :][:rows].clone()
        sharding = Sharding(dim=0, axis=Axis(rank, size), num_rows=shape[0])
        return sharding.describe(key, local)

    if key == "layers.0.fc1.weight":  # gate and up
        gate, up = whole.chunk(2)
        local = torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]])
        sharding = Sharding(dim=0, axis=Axis(rank, size), blocks=2)
        return sharding.describe(key, local)

    if key in SPLIT_DIMENSIONS:
        dim = SPLIT_DIMENSIONS[key]
        local = whole.chunk(size, dim)[rank].clone()
        return ShardedTensor.split(key, local, dim, rank, size)
    return ShardedTensor.replicated(key, whole.clone())


def make_state(rank, tp, dp):
    """Return the state of a rank: weights split by TP, and a ZeRO-1 shard of a moment of each.

    rank = dp_rank * tp + tp_rank.
    """
    tp_rank = rank % tp
    dp_rank = rank // tp
    state = {}
    for key in GLOBAL_SHAPES:
        weight = shard_weight(key, tp_rank, tp)
        state[key] = weight
        elements = torch.empty(0)
        if weight.boxes:
            elements = torch.cat([box.tensor.reshape(-1) for box in weight.boxes])
        numel = elements.numel()
        first = numel * dp_rank // dp
        last = numel * (dp_rank + 1) // dp
        moment = "exp_avg." + key
        state[moment] = weight.flat_range(moment, first, elements[first:last].float() * 0.5)

    state["rng"] = ShardedObject(f"rng/shard_{tp_rank}", {"seed": [rank, tp]})
    state["shared"] = ShardedObject("shared", {"a": torch.arange(3)})
    return state


def make_empty_state(rank, tp, dp):
    """Return the state of a rank without its values, to be loaded."""
    state = make_state(rank, tp, dp)
    for name, entry in state.items():
        if isinstance(entry, ShardedObject):
            state[name] = ShardedObject(entry.key, None)
        else:
            for box in entry.boxes:
                box.tensor.fill_(-7)
    return state


def assert_equal_to_global(state):
    for entry in state.values():
        if isinstance(entry, ShardedObject):
            continue
        if entry.key.startswith("exp_avg."):
            expected = global_moment(entry.key.removeprefix("exp_avg."))
        else:
            expected = global_tensor(entry.key)
        for box in entry.boxes:
            expected_box = expected[index_box(box.offset, box.shape)]
            assert torch.equal(box.tensor, expected_box), (entry.key, box.offset)


def save_layout(rank, size, directory, tp, fully_parallel):
    report = save(
        make_state(rank, tp, size // tp),
        directory,
        common={"tp": tp},
        fully_parallel=fully_parallel,
    )
    assert report.error is None
    assert report.directory == Path(directory)
    return report.bytes


def load_layout(rank, size, directory, tp, verify):
    state = make_empty_state(rank, tp, size // tp)
    is_same_layout = load_common(directory)["layout"] == (tp, size)
    if not is_same_layout and rank % tp > 0:
        state.pop("rng")  # its key contains the TP rank: the writer may have had fewer
    report = load(state, directory, verify=verify, strictness="raise_unexpected")
    assert_equal_to_global(state)
    return report.objects


LAYOUTS = [(1, 1), (2, 2), (2, 1), (4, 2), (4, 4), (3, 1)]  # processes, tp


@pytest.fixture(scope="module")
def checkpoints(pool, tmp_path_factory):
    """Return a directory with one checkpoint per layout."""
    root = tmp_path_factory.mktemp("layouts")
    for size, tp in LAYOUTS:
        pool.run(_save_with_layout, size, str(root / f"{size}_{tp}"), tp)
    return root


def _save_with_layout(rank, size, directory, tp):
    save(make_state(rank, tp, size // tp), directory, common={"layout": (tp, size)})


@pytest.mark.parametrize("writer", LAYOUTS, ids=str)
@pytest.mark.parametrize("reader", LAYOUTS, ids=str)
def test_any_layout_reads_checkpoints_of_any_layout(pool, checkpoints, writer, reader):
    writer_size, writer_tp = writer
    size, tp = reader
    directory = checkpoints / f"{writer_size}_{writer_tp}"
    verify = writer_size % 2 == 0
    objects_by_rank = pool.run(load_layout, size, str(directory), tp, verify)
    for rank, objects in enumerate(objects_by_rank):
        assert torch.equal(objects["shared"]["a"], torch.arange(3))
        if writer == reader:
            tp_rank = rank % tp
            assert objects[f"rng/shard_{tp_rank}"] == {"seed": [tp_rank, tp]}


def load_with_exchange(rank, size, directory, tp):
    """Load a state whose data-parallel replicas exchange the bytes that they read."""
    groups = []
    for tp_rank in range(tp):
        replicas = range(tp_rank, size, tp)
        groups.append(dist.new_group(list(replicas)))
    state = make_empty_state(rank, tp, size // tp)
    state.pop("rng")
    # A replicated tensor, not contiguous
    transposed = torch.zeros(12, 4, 6).permute(1, 2, 0)
    state["experts.weight"] = ShardedTensor.replicated("experts.weight", transposed)
    report = load(
        state,
        directory,
        strictness="raise_unexpected",
        parallelization_group=groups[rank % tp],
    )
    assert_equal_to_global(state)
    return report.bytes_needed


@pytest.mark.parametrize(("size", "tp"), [(4, 1), (4, 2), (3, 1), (2, 2)])
def test_replicas_read_each_byte_once(pool, checkpoints, size, tp):
    directory = checkpoints / "2_2"
    needed = pool.run(load_with_exchange, size, str(directory), tp)
    tensors = read_metadata(directory).tensors.values()
    one_copy = sum(tensor.nbytes for tensor in tensors)
    # Tensors that every TP rank needs: `load_with_exchange` replicates the weight of experts.
    replicated_over_tp = 0
    for key in ("norm.weight", "step"):
        replicated_over_tp += global_tensor(key).nbytes + global_moment(key).nbytes
    replicated_over_tp += global_tensor("experts.weight").nbytes

    assert sum(needed) == one_copy + (tp - 1) * replicated_over_tp
    if tp == 1:
        assert max(needed) < 1.3 * min(needed)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_plain_dcp_reads_every_tensor(checkpoints, layout, tmp_path):
    size, tp = layout
    directory = checkpoints / f"{size}_{tp}"
    expected = {}
    for key in GLOBAL_SHAPES:
        expected[key] = global_tensor(key)
        expected[f"exp_avg.{key}"] = global_moment(key)
    state = {}
    for key, tensor in expected.items():
        if tensor.numel() > 0:
            state[key] = torch.full_like(tensor, -7)
    dcp.load(state, checkpoint_id=directory)

    for key, tensor in state.items():
        assert torch.equal(tensor, expected[key]), key

    dcp_to_torch_save(directory, tmp_path / "all.pt")
    converted = torch.load(tmp_path / "all.pt", weights_only=False)
    assert torch.equal(converted["experts.weight"], expected["experts.weight"])

    (shared,) = converted["shared"]  # DCP stores objects in lists of length 1
    assert torch.equal(shared["a"], torch.arange(3))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_chunks_tile_every_tensor(checkpoints, layout):
    size, tp = layout
    directory = checkpoints / f"{size}_{tp}"
    metadata = read_metadata(directory)
    moments = {f"exp_avg.{key}" for key in GLOBAL_SHAPES}

    assert metadata.tensors.keys() == GLOBAL_SHAPES.keys() | moments
    for key, tensor in metadata.tensors.items():
        assert tensor.chunks.find_gap_or_overlap(tensor.shape) is None, key
    for file, num_bytes in metadata.file_sizes().items():
        assert (directory / file).stat().st_size >= num_bytes


def test_only_the_committed_files_are_left(checkpoints):
    directories = {path.name for path in checkpoints.iterdir()}
    assert directories == {f"{size}_{tp}" for size, tp in LAYOUTS}

    directory = checkpoints / "2_2"
    assert is_complete(directory)

    names = {path.name for path in directory.iterdir() if path.suffix != ".distcp"}
    assert names == {".metadata", "metadata.json", "common.pt", "checksums.bin"}
    assert json.loads((directory / "metadata.json").read_text()) == {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }


def test_replicas_share_the_writing(pool, tmp_path):
    parallel = pool.run(save_layout, 4, str(tmp_path / "parallel"), 1, True)
    assert min(parallel) > 0
    # Otherwise the first replica writes all weights, and the others only their shards.
    single = pool.run(save_layout, 4, str(tmp_path / "single"), 1, False)
    assert single[0] > 1.5 * single[1]


def save_with_conflict(rank, size, directory, conflict):
    """Save a state that conflicts with that of rank 0; return the error."""
    tensor = torch.zeros(4, 4)
    if rank == 1 and conflict == "shape":
        tensor = torch.zeros(4, 5)
    if rank == 1 and conflict == "dtype":
        tensor = tensor.double()
    state = {"w": ShardedTensor.replicated("w", tensor)}
    if conflict == "hole":
        box = Box((2 * rank, 0), tensor)
        state["w"] = ShardedTensor("w", (8, 4), tensor.dtype, (box,))
    if rank == 1 and conflict == "local":
        box = Box((0, 0), tensor)
        state["w"] = ShardedTensor("w", (3, 4), tensor.dtype, (box,))
    if rank == 1 and conflict == "object":
        state["o"] = ShardedObject("o", os.system)
    try:
        save(state, directory, common={}, timeout=20)
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("conflict", "message"),
    [
        ("shape", "w: (4, 4) torch.float32 on rank 0, (4, 5) torch.float32 on rank 1"),
        ("dtype", "torch.float32 on rank 0, (4, 4) torch.float64 on rank 1"),
        ("hole", "w (8, 4): different boxes overlap at (2, 0)"),
        ("local", "rank 1: w: the box at (0, 0) of shape (4, 4) is not inside (3, 4)"),
        ("object", "o: its pickle names posix.system"),
    ],
)
def test_conflict_is_an_error_of_all_ranks(pool, tmp_path, conflict, message):
    errors = pool.run(save_with_conflict, 2, str(tmp_path / "x"), conflict)
    for error in errors:
        assert message in error
    assert not (tmp_path / "x").exists()
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []


# One process


def test_other_dtypes_strides_and_devices_are_converted(tmp_path):
    weight = torch.randn(30, 20)
    save(state_of(w=weight, t=weight.t()), tmp_path / "c", common={})
    in_bf16 = torch.zeros(30, 20, dtype=torch.bfloat16)
    every_other_column = torch.zeros(30, 40)[:, ::2].t()
    target = state_of(w=in_bf16)
    target["t"] = ShardedTensor.replicated("t", every_other_column)
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
            offset = tuple(rng.randrange(size) for size in tensor.shape)
            shape = []
            for start, size in zip(offset, tensor.shape, strict=True):
                shape.append(rng.randrange(1, size - start + 1))
            box = reader.read(key, offset, tuple(shape))
            assert torch.equal(box, tensor[index_box(offset, shape)])


def test_partial_reads_read_little_more_than_they_need(tmp_path):
    weight = torch.randn(512, 16384)
    save(state_of(w=weight), tmp_path / "c", common={})

    for offset, shape in [((100, 0), (50, 16384)), ((0, 8192), (512, 8192)), ((3, 5), (1, 16000))]:
        reader = Reader(tmp_path / "c", verify=False)
        expected = weight[index_box(offset, shape)]
        assert torch.equal(reader.read("w", offset, shape), expected)
        assert reader.bytes_needed == expected.nbytes
        assert reader.bytes_read <= 1.02 * reader.bytes_needed

        verifying_reader = Reader(tmp_path / "c")
        assert torch.equal(verifying_reader.read("w", offset, shape), expected)
        span = (shape[0] - 1) * weight[0].nbytes + shape[1] * 4  # from the first to the last byte
        edges = 3 * BLOCK_SIZE  # of the header and at both ends of the range
        assert verifying_reader.bytes_read <= 1.02 * span + edges


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "read"])
def test_columns_are_read_with_the_gaps_between_them(tmp_path, monkeypatch, mapped):
    """If the kernel is too old to check whether a mapping can be read, spans are read."""
    if not mapped:
        monkeypatch.setattr("megatron.core.safe_files.reading._MADV_POPULATE_READ", 9999)
    several_spans = 100_000
    monkeypatch.setattr("megatron.core.dist_checkpointing.loading.reader._SPAN", several_spans)
    weight = torch.randn(700, 1030)
    vector = torch.randn(13)
    save(state_of(vector=vector, w=weight), tmp_path / "c", common={})

    for offset, shape in [((0, 515), (700, 515)), ((1, 0), (699, 3)), ((5, 1029), (2, 1))]:
        for verify in (False, True):
            reader = Reader(tmp_path / "c", verify=verify)
            expected = weight[index_box(offset, shape)]
            assert torch.equal(reader.read("w", offset, shape), expected)
            assert reader.bytes_needed == expected.nbytes
            most = shape[0] * 1030 * 4 + 2000
            if verify:
                # The first span of a block reads and verifies all of it, later ones only their part.
                most = 2 * most + 2 * BLOCK_SIZE
            assert reader.bytes_read <= most

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
    assert not is_complete(tmp_path / "c"), "without metadata.json it is no torch_dist checkpoint"

    reader = Reader(tmp_path / "c")
    for key in ("w", "t", "h"):
        expected = state[key]
        origin = (0,) * expected.dim()
        assert torch.equal(reader.read(key, origin, tuple(expected.shape)), expected)

    assert torch.equal(reader.read("w", (3, 4), (10, 11)), state["w"][3:13, 4:15])
    assert torch.equal(reader.read("t", (2, 3), (4, 5)), state["t"][2:6, 3:8])
    assert reader.read_object("o.n") == 3

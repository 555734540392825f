"""The boxes of a sharding tile the global tensor, and contain the values of the parts."""

import itertools
import math

import pytest
import torch

from megatron.core.parallel_state import Axis
from megatron.core.sharding import REPLICATED, Sharding
from tests.support.boxes import index_box


def axis(rank, size):
    return Axis(rank, size, tuple(range(size)))


def assemble(key, parts):
    """Paste the boxes of all ranks into the global tensor; they must cover it and agree."""
    shape = parts[0].global_shape
    whole = torch.full(shape, math.nan)
    for shard in parts:
        assert shard.key == key
        assert shard.global_shape == shape
        for box in shard.boxes:
            index = index_box(box.offset, box.shape)
            current = whole[index]
            is_set = ~current.isnan()
            assert torch.equal(current[is_set], box.tensor[is_set])
            whole[index] = box.tensor

    assert not whole.isnan().any()
    return whole


def describe(sharding, local, global_shape):
    """Return the boxes of a local tensor, whose shape must be that of the sharding."""
    assert sharding.local_shape(tuple(global_shape)) == tuple(local.shape)
    return sharding.describe("w", local)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_split_dimension(dim, size):
    whole = torch.randn(8, 12)
    shards = []
    for rank in range(size):
        sharding = Sharding(dim=dim, axis=axis(rank, size))
        local = whole.chunk(size, dim)[rank].contiguous()
        shard = describe(sharding, local, whole.shape)
        assert len(shard.boxes) == 1
        shards.append(shard)

    assert torch.equal(assemble("w", shards), whole)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_stacked_matrices_are_split_one_by_one(size):
    gate = torch.randn(8, 3)
    up = torch.randn(8, 3)
    whole = torch.cat([gate, up])
    shards = []
    for rank in range(size):
        sharding = Sharding(dim=0, axis=axis(rank, size), blocks=2)
        local_gate = gate.chunk(size)[rank]
        local_up = up.chunk(size)[rank]
        local = torch.cat([local_gate, local_up])
        shard = describe(sharding, local, whole.shape)
        assert len(shard.boxes) == min(size, 2)
        shards.append(shard)

    assert torch.equal(assemble("w", shards), whole)


@pytest.mark.parametrize(("etp_size", "ep_size"), [(1, 1), (1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize(("dim", "blocks"), [(1, 1), (1, 2), (2, 1), (None, 1)])
def test_experts_are_distributed_and_split(dim, blocks, etp_size, ep_size):
    whole = torch.randn(4, 8, 6)
    all_shards = []
    for ep_rank, etp_rank in itertools.product(range(ep_size), range(etp_size)):
        ep = axis(ep_rank, ep_size)
        etp = axis(etp_rank, etp_size)
        local = whole.chunk(ep_size)[ep_rank]
        if dim is not None:
            stacked = local.chunk(blocks, dim)
            shards = [block.chunk(etp_size, dim)[etp_rank] for block in stacked]
            local = torch.cat(shards, dim)
        sharding = Sharding(dim=dim, axis=etp, blocks=blocks, ep=ep)
        shard = describe(sharding, local.contiguous(), whole.shape)
        all_shards.append(shard)

    assert torch.equal(assemble("w", all_shards), whole)


def test_padding_rows_are_in_no_box():
    whole = torch.randn(9, 2)
    padding = torch.zeros(7, 2)
    padded = torch.cat([whole, padding])
    shards = []
    for rank, local in enumerate(padded.chunk(4)):
        sharding = Sharding(dim=0, axis=axis(rank, 4), num_rows=9)
        shard = describe(sharding, local.clone(), padded.shape)
        shards.append(shard)

    num_boxes = [len(shard.boxes) for shard in shards]
    assert num_boxes == [1, 1, 1, 0]
    assert torch.equal(assemble("w", shards), whole)


def test_boxes_are_views_in_row_major_order():
    local = torch.arange(24.0).view(2, 4, 3)
    sharding = Sharding(dim=1, axis=axis(1, 2), blocks=2, ep=axis(0, 2))
    boxes = sharding.describe("w", local).boxes
    values = torch.cat([box.tensor.flatten() for box in boxes])
    assert torch.equal(values, local.flatten())

    storage_offsets = [box.tensor.storage_offset() for box in boxes]
    assert storage_offsets == [0, 6, 12, 18]

    offsets = [box.offset for box in boxes]
    assert offsets == [(0, 2, 0), (0, 6, 0), (1, 2, 0), (1, 6, 0)]


def test_replicated_parameter_is_one_box():
    local = torch.randn(3, 2)
    sharded = describe(REPLICATED, local, local.shape)
    assert not REPLICATED.is_split
    (box,) = sharded.boxes
    assert box.offset == (0, 0)


def test_split_dim_of_matrix():
    two = axis(0, 2)
    rows = Sharding(dim=0, axis=two)
    columns = Sharding(dim=1, axis=two)
    columns_of_experts = Sharding(dim=2, axis=two, ep=two)
    one_rank = Sharding(dim=0)

    assert rows.split_dim_of_matrix(2) == 0
    assert columns.split_dim_of_matrix(2) == 1
    assert columns_of_experts.split_dim_of_matrix(3) == 1
    assert one_rank.split_dim_of_matrix(2) is None
    assert REPLICATED.split_dim_of_matrix(2) is None


def test_uneven_split_is_an_error():
    stacked = Sharding(dim=0, axis=axis(0, 3), blocks=2)
    message = "dimension 0 .* 2 blocks and 3 .*: 16 is not divisible by 6"
    with pytest.raises(ValueError, match=message):
        stacked.local_shape((16, 4))
    experts = Sharding(dim=1, ep=axis(0, 2))
    with pytest.raises(ValueError, match="experts over .*: 5 is not divisible by 2"):
        experts.local_shape((5, 4, 4))

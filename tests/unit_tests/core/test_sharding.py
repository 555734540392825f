"""The boxes of a sharding tile the global tensor, and contain the values of the parts."""

import math

import pytest
import torch

from megatron.core.parallel_state import Axis
from megatron.core.sharding import REPLICATED, Sharding


def axis(rank, size):
    return Axis(rank, size, tuple(range(size)))


def assemble(key, parts):
    """Paste the boxes of all ranks into the global tensor; they must cover it and agree."""
    whole = torch.full(parts[0].global_shape, math.nan)
    for part in parts:
        assert part.key == key and part.global_shape == tuple(whole.shape)
        for box in part.boxes:
            place = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
            seen = whole[place]
            assert torch.equal(seen[~seen.isnan()], box.tensor[~seen.isnan()])
            whole[place] = box.tensor
    assert not whole.isnan().any()
    return whole


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_split_dimension(dim, size):
    whole = torch.randn(8, 12)
    parts = []
    for rank in range(size):
        sharding = Sharding(dim=dim, axis=axis(rank, size))
        local = whole.chunk(size, dim)[rank].contiguous()
        assert sharding.local_shape((8, 12)) == tuple(local.shape)
        parts.append(sharding.describe("w", local))
        assert len(parts[-1].boxes) == 1
    assert torch.equal(assemble("w", parts), whole)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_stacked_matrices_are_split_one_by_one(size):
    gate = torch.randn(8, 3)
    up = torch.randn(8, 3)
    parts = []
    for rank in range(size):
        sharding = Sharding(dim=0, axis=axis(rank, size), blocks=2)
        local = torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]])
        assert sharding.local_shape((16, 3)) == tuple(local.shape)
        parts.append(sharding.describe("w", local))
        assert len(parts[-1].boxes) == (1 if size == 1 else 2)
    assert torch.equal(assemble("w", parts), torch.cat([gate, up]))


@pytest.mark.parametrize(("etp_size", "ep_size"), [(1, 1), (1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize(("dim", "blocks"), [(1, 1), (1, 2), (2, 1), (None, 1)])
def test_experts_are_distributed_and_split(dim, blocks, etp_size, ep_size):
    whole = torch.randn(4, 8, 6)
    parts = []
    for ep_rank in range(ep_size):
        for etp_rank in range(etp_size):
            ep = axis(ep_rank, ep_size)
            sharding = Sharding(dim=dim, axis=axis(etp_rank, etp_size), blocks=blocks, ep=ep)
            local = whole.chunk(ep_size)[ep_rank]
            if dim is not None:
                stacked = local.chunk(blocks, dim)
                local = torch.cat([block.chunk(etp_size, dim)[etp_rank] for block in stacked], dim)
            assert sharding.local_shape((4, 8, 6)) == tuple(local.shape)
            parts.append(sharding.describe("w", local.contiguous()))
    assert torch.equal(assemble("w", parts), whole)


def test_padding_rows_are_in_no_box():
    whole = torch.randn(9, 2)
    padded = torch.cat([whole, torch.zeros(7, 2)])
    parts = []
    for rank in range(4):
        sharding = Sharding(dim=0, axis=axis(rank, 4), num_rows=9)
        assert sharding.local_shape((16, 2)) == (4, 2)
        parts.append(sharding.describe("w", padded.chunk(4)[rank].clone()))
    assert [len(part.boxes) for part in parts] == [1, 1, 1, 0]
    assert torch.equal(assemble("w", parts), whole)


def test_boxes_are_views_in_row_major_order():
    local = torch.arange(24.0).view(2, 4, 3)
    sharding = Sharding(dim=1, axis=axis(1, 2), blocks=2, ep=axis(0, 2))
    boxes = sharding.describe("w", local).boxes
    assert torch.equal(torch.cat([box.tensor.flatten() for box in boxes]), local.flatten())
    assert [box.tensor.storage_offset() for box in boxes] == [0, 6, 12, 18]
    assert [box.offset for box in boxes] == [(0, 2, 0), (0, 6, 0), (1, 2, 0), (1, 6, 0)]


def test_replicated_parameter_is_one_box():
    local = torch.randn(3, 2)
    sharded = REPLICATED.describe("w", local)
    assert REPLICATED.local_shape((3, 2)) == (3, 2) and not REPLICATED.is_split
    assert [box.offset for box in sharded.boxes] == [(0, 0)]


def test_split_dim_of_matrix():
    two = axis(0, 2)
    assert Sharding(dim=0, axis=two).split_dim_of_matrix(2) == 0
    assert Sharding(dim=1, axis=two).split_dim_of_matrix(2) == 1
    assert Sharding(dim=2, axis=two, ep=two).split_dim_of_matrix(3) == 1
    assert Sharding(dim=0).split_dim_of_matrix(2) is None
    assert REPLICATED.split_dim_of_matrix(2) is None


def test_uneven_split_is_an_error():
    with pytest.raises(
        ValueError, match="dimension 0 .* 2 blocks and 3 .*: 16 is not divisible by 6"
    ):
        Sharding(dim=0, axis=axis(0, 3), blocks=2).local_shape((16, 4))
    with pytest.raises(ValueError, match="experts over .*: 5 is not divisible by 2"):
        Sharding(dim=1, ep=axis(0, 2)).local_shape((5, 4, 4))

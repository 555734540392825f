"""Boxes: a flat slice of a row-major tensor is at most 2n - 1 contiguous boxes, and they
are views.
"""

import itertools
import math

import pytest
import torch

from megatron.core.dist_checkpointing.mapping import split_flat_range
from megatron.core.parallel_state import Axis
from megatron.core.sharding import Sharding

SHAPES = [(), (1,), (7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (3, 1, 2), (2, 2, 2, 3)]


@pytest.mark.parametrize("shape", SHAPES)
def test_boxes_of_flat_ranges_tile_them(shape):
    numel = math.prod(shape)
    flat = torch.arange(numel)
    for start, stop in itertools.combinations_with_replacement(range(numel + 1), 2):
        data = flat[start:stop].clone()
        seen = torch.full(shape, -1)
        boxes = list(split_flat_range(shape, start, data))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        for offset, view in boxes:
            assert view.is_contiguous() and view.dim() == len(shape)
            place = tuple(slice(o, o + n) for o, n in zip(offset, view.shape, strict=True))
            assert (seen[place] == -1).all(), "boxes overlap"
            seen[place] = view
        expected = torch.full((numel,), -1)
        expected[start:stop] = data
        assert torch.equal(seen.reshape(-1), expected)
        data += 100  # the boxes are views of the data
        assert all((view >= 100).all() for _, view in boxes)


@pytest.mark.parametrize("shards", [1, 2, 3, 5, 48])
def test_zero_shards_of_fused_parameter_tile_global_tensor(shards):
    """The ZeRO shards of [gate; up] of all TP ranks contain each global element once."""
    tp_size = 2
    reference = torch.arange(16.0 * 3).view(16, 3)
    seen = torch.full((16, 3), -1.0)
    for rank in range(tp_size):
        local = torch.cat([half.chunk(tp_size)[rank] for half in reference.chunk(2)])
        parameter = Sharding(dim=0, axis=Axis(rank, tp_size), blocks=2).describe("w", local)
        bounds = [local.numel() * i // shards for i in range(shards + 1)]
        for start, stop in itertools.pairwise(bounds):
            shard = parameter.flat_range("moment.w", start, local.view(-1)[start:stop])
            assert shard.global_shape == (16, 3) and shard.key == "moment.w"
            for box in shard.boxes:
                place = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
                assert (seen[place] == -1).all()
                seen[place] = box.tensor
    assert torch.equal(seen, reference)


def test_boxes_exclude_vocabulary_padding():
    padded = torch.arange(12.0).view(6, 2)
    tp = Axis(rank=1, size=2)
    last = Sharding(dim=0, axis=tp, num_rows=8).describe("e", padded)
    assert last.global_shape == (8, 2)
    assert [box.offset for box in last.boxes] == [(6, 0)] and last.boxes[0].shape == (2, 2)
    # A flat shard that reaches into the padding keeps only the real rows.
    shard = last.flat_range("m", 2, torch.arange(2.0, 12.0))
    assert [(box.offset, box.tensor.tolist()) for box in shard.boxes] == [((7, 0), [[2.0, 3.0]])]
    assert Sharding(dim=0, axis=tp, num_rows=6).describe("e", padded).boxes == ()

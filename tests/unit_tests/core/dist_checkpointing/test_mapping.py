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
from tests.support.boxes import index_box

EMPTY = -1
SHAPES = [(), (1,), (7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (3, 1, 2), (2, 2, 2, 3)]


def paste(whole, offset, values):
    """Copy a box, which must not overlap another one."""
    box = index_box(offset, values.shape)
    assert (whole[box] == EMPTY).all()
    whole[box] = values


@pytest.mark.parametrize("shape", SHAPES)
def test_boxes_of_flat_ranges_tile_them(shape):
    numel = math.prod(shape)
    for start, stop in itertools.combinations_with_replacement(range(numel + 1), 2):
        data = torch.arange(start, stop)
        boxes = list(split_flat_range(shape, start, data))
        max_boxes = max(1, 2 * len(shape) - 1)
        assert len(boxes) <= max_boxes

        actual = torch.full(shape, EMPTY)
        for offset, view in boxes:
            assert view.is_contiguous()
            assert view.dim() == len(shape)
            paste(actual, offset, view)

        expected = torch.full((numel,), EMPTY)
        expected[start:stop] = data
        assert torch.equal(actual.reshape(-1), expected)

        # The boxes are views of the data.
        data += 100
        for _, view in boxes:
            assert (view >= 100).all()


@pytest.mark.parametrize("shards", [1, 2, 3, 5, 48])
def test_zero_shards_of_fused_parameter_tile_global_tensor(shards):
    """The ZeRO shards of [gate; up] of all TP ranks contain each global element once."""
    tp_size = 2
    shape = (16, 3)
    reference = torch.arange(48.0).view(shape)
    gate, up = reference.chunk(2)
    actual = torch.full(shape, float(EMPTY))
    for rank in range(tp_size):
        local_gate = gate.chunk(tp_size)[rank]
        local_up = up.chunk(tp_size)[rank]
        local = torch.cat([local_gate, local_up])
        sharding = Sharding(dim=0, axis=Axis(rank, tp_size), blocks=2)
        parameter = sharding.describe("w", local)
        flat = local.view(-1)
        bounds = [len(flat) * shard // shards for shard in range(shards + 1)]
        for start, stop in itertools.pairwise(bounds):
            shard = parameter.flat_range("moment.w", start, flat[start:stop])
            assert shard.global_shape == shape
            assert shard.key == "moment.w"
            for box in shard.boxes:
                paste(actual, box.offset, box.tensor)

    assert torch.equal(actual, reference)


def test_boxes_exclude_vocabulary_padding():
    padded = torch.arange(12.0).view(6, 2)
    tp = Axis(rank=1, size=2)
    sharding = Sharding(dim=0, axis=tp, num_rows=8)
    last = sharding.describe("e", padded)
    assert last.global_shape == (8, 2)

    (box,) = last.boxes
    assert box.offset == (6, 0)
    assert box.shape == (2, 2)

    # A flat shard that reaches into the padding keeps only the real rows.
    shard = last.flat_range("m", 2, torch.arange(2.0, 12.0))
    (box,) = shard.boxes
    assert box.offset == (7, 0)
    assert box.tensor.tolist() == [[2.0, 3.0]]

    without_rows = Sharding(dim=0, axis=tp, num_rows=6)
    assert without_rows.describe("e", padded).boxes == ()

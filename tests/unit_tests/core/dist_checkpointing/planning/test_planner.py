"""The plan: every element written once, bytes level, conflicts named."""

import itertools
import math
import random

import pytest
import torch

from megatron.core.dist_checkpointing.box_table import BoxTable
from megatron.core.dist_checkpointing.mapping import (
    Box,
    ShardedObject,
    ShardedTensor,
    split_flat_range,
)
from megatron.core.dist_checkpointing.planning.balancing import level_loads
from megatron.core.dist_checkpointing.planning.collection import (
    LocalSpec,
    describe,
    pack,
)
from megatron.core.dist_checkpointing.planning.save_plan import make_plan as plan_packed
from megatron.core.safe_files.errors import CheckpointError


def spec(*tensors, objects=()):
    return LocalSpec(
        tuple((key, shape, torch.float32) for key, shape, _ in tensors),
        tuple(tuple(boxes) for _, _, boxes in tensors),
        objects,
    )


def find_gap_or_overlap(shape, boxes):
    return BoxTable.of(boxes, len(shape)).find_gap_or_overlap(shape)


def make_plan(specs, fully_parallel=True):
    return plan_packed([pack(spec) for spec in specs], fully_parallel)


def cells(offset, shape):
    return set(itertools.product(*(range(o, o + n) for o, n in zip(offset, shape, strict=True))))


def random_tiling(rng, offset, shape):
    """Cut a box recursively at random places."""
    axis = rng.randrange(len(shape))
    if shape[axis] < 2 or rng.random() < 0.25:
        return [(offset, shape)]
    cut = rng.randrange(1, shape[axis])
    upper = tuple(o + cut * (i == axis) for i, o in enumerate(offset))
    first = tuple(cut if i == axis else n for i, n in enumerate(shape))
    second = tuple(n - cut * (i == axis) for i, n in enumerate(shape))
    return random_tiling(rng, offset, first) + random_tiling(rng, upper, second)


def brute_force_is_tiling(shape, boxes):
    counts = dict.fromkeys(cells((0,) * len(shape), shape), 0)
    for offset, extent in boxes:
        for cell in cells(offset, extent):
            counts[cell] += 1
    return {cell: count for cell, count in counts.items() if count != 1}


def damage(rng, boxes):
    """Drop, double, move or shrink a box."""
    kind = rng.randrange(4)
    index = rng.randrange(len(boxes))
    offset, extent = boxes[index]
    if kind == 0 and len(boxes) > 1:
        boxes.pop(index)
    elif kind == 1:
        boxes.append(boxes[index])
    elif kind == 2 and offset[0] > 0:
        boxes[index] = ((offset[0] - 1, *offset[1:]), extent)
    elif kind == 3 and extent[0] > 1:
        boxes[index] = (offset, (extent[0] - 1, *extent[1:]))


def flat_tiling(rng, shape):
    """Cut a tensor into ranges of elements, as ZeRO-1 does, and these into boxes."""
    elements = torch.arange(math.prod(shape))
    cuts = sorted({0, len(elements), *(rng.randrange(len(elements)) for _ in range(3))})
    boxes = []
    for start, stop in itertools.pairwise(cuts):
        for offset, view in split_flat_range(shape, start, elements[start:stop]):
            boxes.append((offset, tuple(view.shape)))
    return boxes


def test_find_fault_equals_counting_every_element():
    rng = random.Random(0)
    faulty = 0
    for _ in range(400):
        shape = tuple(rng.randrange(1, 6) for _ in range(rng.randrange(1, 4)))
        boxes = random_tiling(rng, (0,) * len(shape), shape)
        for _ in range(rng.randrange(3)):
            damage(rng, boxes)
        wrong = brute_force_is_tiling(shape, boxes)
        fault = find_gap_or_overlap(shape, boxes)
        assert (fault is None) == (not wrong), (shape, boxes, fault)
        if wrong:
            faulty += 1
            first = min(wrong)
            assert str(first) in fault
            assert ("no rank" in fault) == (wrong[first] == 0)
    assert faulty > 100


def test_plan_finds_the_tensors_that_are_not_tiled():
    """Tensors that consist of runs of elements are checked together, the others one by one."""
    rng = random.Random(1)
    faulty = 0
    for _ in range(100):
        ranks = [[] for _ in range(130)]  # each has at most one box of a tensor
        expected = set()
        for number in range(6):
            shape = tuple(rng.randrange(1, 6) for _ in range(rng.randrange(1, 4)))
            if rng.random() < 0.5:
                boxes = flat_tiling(rng, shape)
            else:
                boxes = random_tiling(rng, (0,) * len(shape), shape)
            if rng.random() < 0.3:
                damage(rng, boxes)
            # Equal boxes on several ranks are replicas.
            if brute_force_is_tiling(shape, set(boxes)):
                expected.add(f"t{number}")
            for rank, box in zip(ranks, boxes, strict=False):
                rank.append((f"t{number}", shape, [box]))
        specs = [spec(*tensors) for tensors in ranks]
        if not expected:
            make_plan(specs)
            continue
        faulty += 1
        with pytest.raises(CheckpointError, match="do not tile") as error:
            make_plan(specs)
        lines = str(error.value).splitlines()[1:]
        assert {line.split()[0] for line in lines} == expected
    assert 20 < faulty < 98


def test_scalars_and_empty_tensors_are_tiled():
    assert find_gap_or_overlap((), [((), ())]) is None
    assert "no rank" in find_gap_or_overlap((), [])
    assert find_gap_or_overlap((0, 4), [((0, 0), (0, 4))]) is None


def test_boxes_of_many_dimensions_are_not_compared():
    """The time doubles with each dimension: a few bytes could request 2^64 corners."""
    shape = (2,) * 12
    half = (1, *shape[1:])
    boxes = [((row, *[0] * 11), half) for row in range(2)]
    assert find_gap_or_overlap(shape, [((0,) * 12, shape)]) is None
    assert find_gap_or_overlap(shape, boxes) == "boxes of more than 8 dimensions cannot be compared"


@pytest.mark.parametrize("loads", [[0, 0, 0], [5, 1, 9], [100, 0, 0, 7]])
@pytest.mark.parametrize("total", [0, 1, 10, 1000])
def test_level_is_water_filling(loads, total):
    expected = list(loads)
    for _ in range(total):
        expected[expected.index(min(expected))] += 1
    result = [load + share for load, share in zip(loads, level_loads(loads, total), strict=True)]
    assert sorted(result) == sorted(expected)
    assert all(new >= old for new, old in zip(result, loads, strict=True))


def written(plan):
    """Key -> all boxes that are written."""
    boxes = {}
    items = plan.items
    for index, offset, shape in zip(items.tensor, items.offset, items.shape, strict=True):
        key, global_shape, _ = plan.tensors[index]
        dims = len(global_shape)
        extent = (tuple(offset[:dims].tolist()), tuple(shape[:dims].tolist()))
        boxes.setdefault(key, []).append(extent)
    return boxes


@pytest.mark.parametrize("fully_parallel", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_replicated_tensors_are_written_once_and_evenly(size, fully_parallel):
    shapes = {"w": (1000, 64), "e": (5000, 32), "b": (64,), "n": (1, 333, 32)}
    mine = spec(
        *((key, shape, [((0,) * len(shape), shape)]) for key, shape in shapes.items()),
        objects=("rng",),
    )
    plan = make_plan([mine] * size, fully_parallel)
    assert written(plan).keys() == shapes.keys()
    for key, boxes in written(plan).items():
        assert find_gap_or_overlap(shapes[key], boxes) is None
    loads = plan.loads
    if fully_parallel:
        assert max(loads) <= 1.1 * sum(loads) / size
    else:
        assert loads[1:] == [0] * (size - 1)
    assert [key for objects in plan.objects for key in objects] == ["rng"]


def test_shares_level_out_what_ranks_write_alone():
    """Rank 0 holds a large optimizer shard of its own, so the others take the replicated
    weights.
    """
    weight = ("w", (600, 100), [((0, 0), (600, 100))])
    plan = make_plan(
        [spec(weight, ("o", (30_000,), [((0,), (30_000,))])), spec(weight), spec(weight)]
    )
    loads = plan.loads
    assert max(loads) <= 1.1 * sum(loads) / 3
    assert loads[0] == 120_000
    assert plan.items.tensor[plan.items.rank == 0].tolist() == [1]


def test_split_tensors_stay_with_their_owners():
    halves = [spec(("w", (8, 4), [((4 * rank, 0), (4, 4))])) for rank in range(2)]
    plan = make_plan(halves)
    assert plan.items.rank.tolist() == [0, 1]
    assert plan.items.offset.tolist() == [[0, 0], [4, 0]]


def test_every_conflict_is_named():
    whole = ((0, 0), (8, 4))
    good = spec(("w", (8, 4), [whole]))
    with pytest.raises(
        CheckpointError,
        match=r"w: \(8, 4\) torch.float32 on rank 0, \(8, 5\) torch.float32 on rank 1",
    ):
        make_plan([good, spec(("w", (8, 5), [((0, 0), (8, 5))]))])
    half = LocalSpec((("w", (8, 4), torch.bfloat16),), ((whole,),), ())
    with pytest.raises(CheckpointError, match="torch.float32 on rank 0.*torch.bfloat16 on rank 1"):
        make_plan([good, half])
    with pytest.raises(CheckpointError, match=r"w \(8, 4\): element \(4, 0\) is held by no rank"):
        make_plan([spec(("w", (8, 4), [((0, 0), (4, 4))]))] * 2)
    with pytest.raises(CheckpointError, match=r"different boxes overlap at \(0, 0\)"):
        make_plan([good, spec(("w", (8, 4), [((0, 0), (4, 4))]))])
    with pytest.raises(CheckpointError, match="an object on rank 1, a tensor on rank 0"):
        make_plan([good, spec(objects=("w",))])


def test_describe_checks_the_local_state():
    tensor = torch.zeros(4, 2)
    with pytest.raises(CheckpointError, match="is not inside"):
        describe({"w": ShardedTensor("w", (5, 2), tensor.dtype, (Box((2, 0), tensor),))})
    with pytest.raises(CheckpointError, match="a box is torch.float32, the tensor torch.bfloat16"):
        describe({"w": ShardedTensor("w", (4, 2), torch.bfloat16, (Box((0, 0), tensor),))})
    with pytest.raises(CheckpointError, match="same key: w"):
        describe({"a": ShardedTensor.replicated("w", tensor), "b": ShardedObject("w", 1)})
    with pytest.raises(CheckpointError, match="neither ShardedTensor nor ShardedObject"):
        describe({"w": tensor})

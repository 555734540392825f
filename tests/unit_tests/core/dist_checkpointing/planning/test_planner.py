"""The plan writes every element once, balances the bytes of ranks, and names conflicts."""

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
    """Return the description of fp32 tensors, each (key, global shape, boxes), on one rank."""
    return LocalSpec(
        tuple((key, shape, torch.float32) for key, shape, _ in tensors),
        tuple(tuple(boxes) for _, _, boxes in tensors),
        objects,
    )


def find_gap_or_overlap(shape, boxes):
    return BoxTable.of(boxes, len(shape)).find_gap_or_overlap(shape)


def make_plan(specs, fully_parallel=True):
    return plan_packed([pack(spec) for spec in specs], fully_parallel)


def list_elements(offset, shape):
    """Return the indices of all elements of a box."""
    ranges = [range(start, start + size) for start, size in zip(offset, shape, strict=True)]
    return set(itertools.product(*ranges))


def random_tiling(rng, offset, shape):
    """Cut a box recursively at random places."""
    axis = rng.randrange(len(shape))
    if shape[axis] < 2 or rng.random() < 0.25:
        return [(offset, shape)]
    cut = rng.randrange(1, shape[axis])
    lower_shape = replace_at(shape, axis, cut)
    upper_offset = replace_at(offset, axis, offset[axis] + cut)
    upper_shape = replace_at(shape, axis, shape[axis] - cut)
    lower = random_tiling(rng, offset, lower_shape)
    upper = random_tiling(rng, upper_offset, upper_shape)
    return lower + upper


def replace_at(values, axis, value):
    return (*values[:axis], value, *values[axis + 1 :])


def random_shape(rng):
    dims = rng.randrange(1, 4)
    return tuple(rng.randrange(1, 6) for _ in range(dims))


def count_wrong_elements(shape, boxes):
    """Return how many boxes contain an element, for elements that are not in exactly one."""
    counts = dict.fromkeys(list_elements((0,) * len(shape), shape), 0)
    for offset, extent in boxes:
        for element in list_elements(offset, extent):
            counts[element] += 1
    return {element: count for element, count in counts.items() if count != 1}


def damage(rng, boxes):
    """Drop, double, move or shrink a box."""
    damage_type = rng.choice(["drop", "double", "move", "shrink"])
    index = rng.randrange(len(boxes))
    offset, extent = boxes[index]
    if damage_type == "drop" and len(boxes) > 1:
        boxes.pop(index)
    elif damage_type == "double":
        boxes.append(boxes[index])
    elif damage_type == "move" and offset[0] > 0:
        boxes[index] = (replace_at(offset, 0, offset[0] - 1), extent)
    elif damage_type == "shrink" and extent[0] > 1:
        boxes[index] = (offset, replace_at(extent, 0, extent[0] - 1))


def flat_tiling(rng, shape):
    """Cut a tensor into ranges of elements, as ZeRO-1 does, and these into boxes."""
    elements = torch.arange(math.prod(shape))
    cuts = {rng.randrange(len(elements)) for _ in range(3)}
    bounds = sorted({0, len(elements), *cuts})
    boxes = []
    for start, stop in itertools.pairwise(bounds):
        for offset, view in split_flat_range(shape, start, elements[start:stop]):
            boxes.append((offset, tuple(view.shape)))
    return boxes


def test_find_fault_equals_counting_every_element():
    rng = random.Random(0)
    num_faulty = 0
    for _ in range(400):
        shape = random_shape(rng)
        boxes = random_tiling(rng, (0,) * len(shape), shape)
        for _ in range(rng.randrange(3)):
            damage(rng, boxes)
        wrong_elements = count_wrong_elements(shape, boxes)
        fault = find_gap_or_overlap(shape, boxes)
        if not wrong_elements:
            assert fault is None, (shape, boxes)
            continue
        num_faulty += 1
        assert fault is not None, (shape, boxes)

        first = min(wrong_elements)
        is_gap = wrong_elements[first] == 0
        assert str(first) in fault
        assert ("no rank" in fault) == is_gap

    assert num_faulty > 100


def test_plan_finds_the_tensors_that_are_not_tiled():
    """Tensors that consist of runs of elements are checked together, the others one by one."""
    rng = random.Random(1)
    num_faulty = 0
    for _ in range(100):
        ranks = [[] for _ in range(130)]  # each has at most one box of a tensor
        expected = set()
        for key in ("t0", "t1", "t2", "t3", "t4", "t5"):
            shape = random_shape(rng)
            if rng.random() < 0.5:
                boxes = flat_tiling(rng, shape)
            else:
                boxes = random_tiling(rng, (0,) * len(shape), shape)
            if rng.random() < 0.3:
                damage(rng, boxes)
            # Equal boxes on several ranks are replicas.
            if count_wrong_elements(shape, set(boxes)):
                expected.add(key)
            for rank, box in zip(ranks, boxes, strict=False):
                rank.append((key, shape, [box]))

        specs = [spec(*tensors) for tensors in ranks]
        if not expected:
            make_plan(specs)
            continue
        num_faulty += 1

        with pytest.raises(CheckpointError, match="do not tile") as error:
            make_plan(specs)

        _, *messages = str(error.value).splitlines()
        assert {message.split()[0] for message in messages} == expected

    assert 20 < num_faulty < 98


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
        smallest = expected.index(min(expected))
        expected[smallest] += 1

    shares = level_loads(loads, total)
    result = [load + share for load, share in zip(loads, shares, strict=True)]
    assert sorted(result) == sorted(expected)
    assert min(shares) >= 0


def list_written_boxes(plan):
    """Return all boxes that are written, by key."""
    boxes = {}
    items = plan.items
    for index, offset, shape in zip(items.tensor, items.offset, items.shape, strict=True):
        key, global_shape, _ = plan.tensors[index]
        dims = len(global_shape)
        box = (tuple(offset[:dims].tolist()), tuple(shape[:dims].tolist()))
        boxes.setdefault(key, []).append(box)
    return boxes


@pytest.mark.parametrize("fully_parallel", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_replicated_tensors_are_written_once_and_evenly(size, fully_parallel):
    shapes = {"w": (1000, 64), "e": (5000, 32), "b": (64,), "n": (1, 333, 32)}
    tensors = []
    for key, shape in shapes.items():
        origin = (0,) * len(shape)
        tensors.append((key, shape, [(origin, shape)]))
    plan = make_plan([spec(*tensors, objects=("rng",))] * size, fully_parallel)
    written = list_written_boxes(plan)

    assert written.keys() == shapes.keys()
    for key, boxes in written.items():
        assert find_gap_or_overlap(shapes[key], boxes) is None

    loads = plan.loads
    if fully_parallel:
        assert max(loads) <= 1.1 * sum(loads) / size
    else:
        assert loads[1:] == [0] * (size - 1)

    assert list(itertools.chain.from_iterable(plan.objects)) == ["rng"]


def test_shares_balance_the_shards_of_single_ranks():
    """Rank 0 has a large optimizer shard of its own, so the others take the replicated weights."""
    weight = ("w", (600, 100), [((0, 0), (600, 100))])
    shard = ("o", (30_000,), [((0,), (30_000,))])
    plan = make_plan([spec(weight, shard), spec(weight), spec(weight)])
    loads = plan.loads

    assert max(loads) <= 1.1 * sum(loads) / 3
    assert loads[0] == 120_000

    tensors_of_rank_0 = plan.items.tensor[plan.items.rank == 0]
    assert tensors_of_rank_0.tolist() == [1]


def test_split_tensors_stay_with_their_owners():
    halves = [spec(("w", (8, 4), [((4 * rank, 0), (4, 4))])) for rank in range(2)]
    plan = make_plan(halves)
    assert plan.items.rank.tolist() == [0, 1]
    assert plan.items.offset.tolist() == [[0, 0], [4, 0]]


def test_every_conflict_is_named():
    whole = ((0, 0), (8, 4))
    good = spec(("w", (8, 4), [whole]))

    wider = spec(("w", (8, 5), [((0, 0), (8, 5))]))
    shapes = r"w: \(8, 4\) torch.float32 on rank 0, \(8, 5\) torch.float32 on rank 1"
    with pytest.raises(CheckpointError, match=shapes):
        make_plan([good, wider])

    in_bf16 = LocalSpec((("w", (8, 4), torch.bfloat16),), ((whole,),), ())
    with pytest.raises(CheckpointError, match="torch.float32 on rank 0.*torch.bfloat16 on rank 1"):
        make_plan([good, in_bf16])

    upper_half = spec(("w", (8, 4), [((0, 0), (4, 4))]))
    with pytest.raises(CheckpointError, match=r"w \(8, 4\): element \(4, 0\) is held by no rank"):
        make_plan([upper_half, upper_half])
    with pytest.raises(CheckpointError, match=r"different boxes overlap at \(0, 0\)"):
        make_plan([good, upper_half])

    with pytest.raises(CheckpointError, match="an object on rank 1, a tensor on rank 0"):
        make_plan([good, spec(objects=("w",))])


def test_describe_checks_the_local_state():
    tensor = torch.zeros(4, 2)
    outside = ShardedTensor("w", (5, 2), tensor.dtype, (Box((2, 0), tensor),))
    with pytest.raises(CheckpointError, match="is not inside"):
        describe({"w": outside})

    of_other_dtype = ShardedTensor("w", (4, 2), torch.bfloat16, (Box((0, 0), tensor),))
    with pytest.raises(CheckpointError, match="a box is torch.float32, the tensor torch.bfloat16"):
        describe({"w": of_other_dtype})

    sharded = ShardedTensor.replicated("w", tensor)
    with pytest.raises(CheckpointError, match="same key: w"):
        describe({"a": sharded, "b": ShardedObject("w", 1)})
    with pytest.raises(CheckpointError, match="neither ShardedTensor nor ShardedObject"):
        describe({"w": tensor})

"""The boxes of DTensors are their local shards, for any placement on any mesh."""

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from megatron.checkpointer import Checkpointer
from megatron.checkpointer.tensors import make_sharded_tensor, mark_checkpointable
from megatron.core.dist_checkpointing import CheckpointError, ShardedTensor
from megatron.core.dist_checkpointing.mapping import Box, narrow

SHAPES = [(8,), (7, 3), (2, 5), (1, 9), (3, 4, 6)]


def assert_boxes_contain(sharded, whole):
    assert sharded.global_shape == tuple(whole.shape)
    for box in sharded.boxes:
        assert torch.equal(box.tensor, narrow(whole, box.offset, box.shape))


def distribute(rank, world_size, mesh_shape):
    mesh = init_device_mesh("cpu", mesh_shape)
    count = 0
    for shape in SHAPES:
        whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
        choices = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
        for placements in itertools.product(choices, repeat=len(mesh_shape)):
            tensor = distribute_tensor(whole, mesh, placements)
            sharded = make_sharded_tensor("weight", tensor)
            assert_boxes_contain(sharded, whole)
            num_elements = sum(box.tensor.numel() for box in sharded.boxes)
            assert num_elements == tensor.to_local().numel(), (shape, placements)
            count += 1
    return count


@pytest.mark.parametrize(("mesh_shape", "count"), [((4,), 15), ((2, 2), 47)])
def test_boxes_are_the_shards_of_dtensor(mesh_shape, count, pool):
    assert pool.run(distribute, 4, mesh_shape) == [count] * 4


def shard_by_tp_and_fsdp(rank, world_size):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 5))
    whole = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    extents = {}
    for name, tensor in model.state_dict().items():
        assert isinstance(tensor, DTensor)
        sharded = make_sharded_tensor(name, tensor)
        assert_boxes_contain(sharded, whole[name])
        extents[name] = [(box.offset, box.shape) for box in sharded.boxes]
    return extents


def test_fsdp_splits_the_shards_of_tensor_parallelism(pool):
    by_rank = pool.run(shard_by_tp_and_fsdp, 4)
    # [10, 6], split by TP into rows 0-4 and 5-9, and each part by FSDP into 3 + 2 rows
    rows = [[(offset[0], shape[0]) for offset, shape in extents["0.weight"]] for extents in by_rank]
    assert rows == [[(0, 3)], [(5, 3)], [(3, 2)], [(8, 2)]]


def make_partial(rank, world_size):
    mesh = init_device_mesh("cpu", (2,))
    tensor = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    with pytest.raises(CheckpointError, match=r"weight: .*P\(sum\) cannot be saved"):
        make_sharded_tensor("weight", tensor)


def test_partial_sums_are_refused(pool):
    pool.run(make_partial, 2)


# ---- torch's protocol CheckpointableTensor ----


def mark_halves(tensor):
    """Mark rows 1 to 4 of `[10, 3]` as the last half of `[8, 3]`, and rows 6 to 9 as the first."""
    boxes = (Box((4, 0), tensor[1:5]), Box((0, 0), tensor[6:10]))
    mark_checkpointable(tensor, ShardedTensor("weight", (8, 3), tensor.dtype, boxes))
    return boxes


def test_slices_of_a_checkpointable_tensor_are_boxes():
    tensor = torch.arange(30.0).view(10, 3)
    boxes = mark_halves(tensor)
    assert tensor.global_shape == (8, 3)
    assert tensor.global_offsets == ((4, 0), (0, 0))
    assert tensor.local_offsets == ((1, 0), (6, 0))
    assert tensor.local_sizes == ((4, 3), (4, 3))

    sharded = make_sharded_tensor("weight", tensor)
    assert sharded.global_shape == (8, 3)
    for box, expected in zip(sharded.boxes, boxes, strict=True):
        assert box.offset == expected.offset
        assert box.tensor.data_ptr() == expected.tensor.data_ptr()
        assert torch.equal(box.tensor, expected.tensor)

    columns = tensor[:, 1:].detach()
    box = Box((0, 2), tensor[2:4, 2:3])
    mark_checkpointable(columns, ShardedTensor("weight", (2, 3), tensor.dtype, (box,)))

    assert columns.local_offsets == ((2, 1),)
    assert columns.local_sizes == ((2, 1),)


def test_slices_outside_of_a_tensor_are_rejected():
    tensor = torch.zeros(4, 3)
    for view in (torch.zeros(2, 3), tensor.view(-1)[:6], tensor.view(2, 6), tensor[::2]):
        offset = (0,) * view.dim()
        layout = ShardedTensor("weight", tuple(view.shape), tensor.dtype, (Box(offset, view),))
        with pytest.raises(ValueError, match=r"is not a slice of the tensor of shape \(4, 3\)"):
            mark_checkpointable(tensor, layout)

    mark_checkpointable(
        tensor,
        ShardedTensor("weight", (4, 3), tensor.dtype, (Box((0, 0), tensor),)),
    )
    tensor.global_offsets = ((1, 0),)
    with pytest.raises(CheckpointError, match=r"weight: a slice of shape \(4, 3\) at \(1, 0\)"):
        make_sharded_tensor("weight", tensor)

    tensor.global_offsets = ()
    with pytest.raises(CheckpointError, match="have different lengths"):
        make_sharded_tensor("weight", tensor)


class Halves(nn.Module):
    """A product with the rows of the two slices."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((10, 3), -1.0))
        mark_halves(self.weight)

    def forward(self, x):
        return x @ torch.cat([self.weight[6:10], self.weight[1:5]]).T


def test_checkpointer_stores_the_global_tensor_and_its_optimizer_state(tmp_path):
    """A program with another layout, here a plain parameter, continues from it."""
    x = torch.arange(6.0).view(2, 3)
    plain = nn.Linear(3, 8, bias=False)
    halves = Halves()
    with torch.no_grad():
        for box in make_sharded_tensor("weight", halves.weight).boxes:
            box.tensor.copy_(narrow(plain.weight, box.offset, box.tensor.shape))
    results = []
    for model, next_model in ((halves, nn.Linear(3, 8, bias=False)), (plain, Halves())):
        directory = tmp_path / type(model).__name__
        for current, steps in ((model, 1), (next_model, 2)):
            optimizer = torch.optim.AdamW(current.parameters(), lr=0.1)
            with Checkpointer(directory, current, optimizer, save_interval=1) as checkpointer:
                for step in range(checkpointer.load(), steps):
                    current(x).pow(2).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    checkpointer.step(step)
                checkpointer.finish()
        results.append(next_model(x).detach())

    torch.testing.assert_close(*results)

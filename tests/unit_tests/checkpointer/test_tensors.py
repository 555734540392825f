"""The boxes of DTensors are what DTensor stores, for any placement on any mesh."""

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

from megatron.checkpointer.tensors import make_sharded_tensor
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.dist_checkpointing.mapping import narrow

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
            stored = sum(box.tensor.numel() for box in sharded.boxes)
            assert stored == tensor.to_local().numel(), (shape, placements)
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

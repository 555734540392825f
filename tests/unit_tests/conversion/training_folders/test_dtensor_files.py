"""Files of torch.save with DTensors, which fake ranks of a mesh have written one after another."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.conversion.training_folders.dtensor_files import join_named, read_named
from megatron.core.dist_checkpointing import CheckpointError

RANKS = 4
VALUE = torch.arange(35.0).view(7, 5)


def write_ranks(directory, placements):
    """Return the files of four ranks with the parts of VALUE on a mesh of 2 x 2."""
    files = []
    for rank in range(RANKS):
        dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
        tensor = distribute_tensor(VALUE, mesh, placements, src_data_rank=None)
        torch.save({"weight": tensor, "step": torch.tensor(3.0)}, directory / f"{rank}.pt")
        dist.destroy_process_group()
        files.append(read_named(directory / f"{rank}.pt"))
    return files


@pytest.mark.parametrize(
    "placements",
    [
        [Replicate(), Shard(0)],
        [Shard(0), Shard(1)],
        [Shard(0), Shard(0)],
        [Replicate(), Replicate()],
    ],
    ids=str,
)
def test_parts_of_a_mesh_are_joined(placements, tmp_path):
    tensors = join_named(write_ranks(tmp_path, placements), "here")
    weight = tensors["weight"]
    assert torch.equal(weight.read_all(), VALUE)
    assert torch.equal(weight.read((3, 1), (3, 2)), VALUE[3:6, 1:3])
    assert tensors["step"].read_all().item() == 3.0


def test_missing_and_foreign_parts_are_rejected(tmp_path):
    files = write_ranks(tmp_path, [Shard(0), Shard(1)])
    with pytest.raises(CheckpointError, match=r"rank 0 has shape \(4, 3\) of \(7, 5\) at"):
        join_named(files[:1], "here")
    with pytest.raises(CheckpointError, match="rank 1 lacks weight, which rank 0 has"):
        join_named([*files[:1], {"step": files[1]["step"]}, *files[2:]], "here")
    with pytest.raises(CheckpointError, match="rank 0 lacks bias, which rank 2 has"):
        join_named([*files[:2], files[2] | {"bias": 5}], "here")

    spec = files[0]["weight"].state[1]["_spec"].state
    coordinate = spec["mesh"].state["_coordinate_on_dim"]
    spec["mesh"].state["_coordinate_on_dim"] = [0] * 100_000

    with pytest.raises(CheckpointError, match="coordinate is a list of 100000 entries, but"):
        join_named(files, "here")

    spec["mesh"].state["_coordinate_on_dim"] = coordinate
    placement = spec["placements"][1]
    placement.state["dim"] = 2

    with pytest.raises(CheckpointError, match="a placement is 2, but must be one of 2 axes"):
        join_named(files, "here")
    with pytest.raises(CheckpointError, match="here: weight is 5, but must be a DTensor"):
        join_named([{"weight": 5}], "here")

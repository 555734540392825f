"""Initial values depend on seed and key alone."""

import pytest
import torch

from megatron.core.dist_checkpointing.mapping import Box
from megatron.core.module import (
    Constant,
    MegatronModule,
    Normal,
    ParamInfo,
    make_parameter,
    param_info,
)
from megatron.core.parallel_state import Axis
from megatron.core.sharding import Sharding
from tests.support.boxes import index_box


class Split(MegatronModule):
    """Stacked matrices, columns and a padded table split over `size` ranks, and a
    replicated scale.
    """

    def __init__(self, rank, size, dtype=torch.float32):
        super().__init__()
        tp = Axis(rank, size)
        fused = ParamInfo(Normal(0.1), Sharding(dim=0, axis=tp, blocks=2))
        columns = ParamInfo(Normal(0.1), Sharding(dim=1, axis=tp))
        table = ParamInfo(Normal(1.0), Sharding(dim=0, axis=tp, num_rows=11))
        self.fused = make_parameter((24, 5), dtype, None, fused)
        self.columns = make_parameter((7, 8), dtype, None, columns)
        self.scale = make_parameter((5,), dtype, None, ParamInfo(Constant(1.0)))
        self.table = make_parameter((12, 3), dtype, None, table)


def global_tensors(modules):
    """Paste the boxes of all ranks into whole tensors; every element must be covered."""
    tensors = {}
    for module in modules:
        for key, entry in module.sharded_state_dict().items():
            if key not in tensors:
                tensors[key] = torch.full(entry.global_shape, float("nan"))
            for box in entry.boxes:
                slices = index_box(box.offset, box.shape)
                tensors[key][slices] = box.tensor

    for key, tensor in tensors.items():
        assert not tensor.isnan().any(), key
    return tensors


def make_shards(size):
    """Return the initialized modules of all ranks."""
    shards = [Split(rank, size) for rank in range(size)]
    for shard in shards:
        shard.initialize(seed=7)
    return shards


@pytest.mark.parametrize("size", [2, 4])
def test_initial_values_do_not_depend_on_the_split(size):
    expected = global_tensors(make_shards(1))
    actual = global_tensors(make_shards(size))
    assert actual.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(actual[key], tensor), key


def test_padding_is_zero_and_seed_and_key_matter():
    shards = make_shards(4)
    assert torch.equal(shards[3].table[2], torch.zeros(3))

    other_seed = Split(0, 1)
    other_seed.initialize(seed=8)
    assert not torch.equal(other_seed.fused, global_tensors(shards)["fused"])

    fused_values = other_seed.fused.flatten()[:7]
    column_values = other_seed.columns.flatten()[:7]
    assert not torch.equal(fused_values, column_values)


def test_values_are_drawn_in_fp32_and_rounded():
    full = Split(0, 1)
    half = Split(0, 1, torch.bfloat16)
    full.initialize(seed=1)
    half.initialize(seed=1)
    assert torch.equal(full.fused.bfloat16(), half.fused)


def test_normal_over_several_blocks_equals_its_parts():
    """The tensor is larger than one generator block, and the part crosses the border of a block."""
    init = Normal(0.02)
    shape = (2500, 1000)
    whole = torch.empty(shape)
    init(Box((0, 0), whole), "w", shape, 3)
    box = torch.empty(700, 300)
    init(Box((900, 650), box), "w", shape, 3)

    assert torch.equal(box, whole[900:1600, 650:950])
    assert whole.std().item() == pytest.approx(0.02, rel=0.01)
    assert abs(whole.mean().item()) < 1e-4


def test_param_info_travels_with_the_parameter():
    info = ParamInfo(Constant(0.0), Sharding(dim=0))
    param = make_parameter((2,), torch.float32, None, info)
    assert param_info(param) is info

"""Exchange a checkpoint with torch's DCP through its protocol CheckpointableTensor.

    torchrun --nproc-per-node 2 checkpointable_tensors.py DIRECTORY

Runs in a virtual environment with torch >= 2.14 and the distribution of `checkpointing/`, without
the rest of this project. Each rank has rows of a global matrix between rows of padding: DCP stores
and fills the slices that `mark_checkpointable` names, as our engine does.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron_checkpoint import (
    Box,
    ShardedTensor,
    load,
    make_sharded_tensor,
    mark_checkpointable,
    save,
)

ROWS, COLUMNS = 8, 5
PADDING = -1.0


def make_marked(rank: int, sizes: tuple[int, ...], values: torch.Tensor | None) -> torch.Tensor:
    """Return this rank's rows of `values`, one row of padding before and after them, marked.

    Ranks have `sizes` rows; without values they are zero.
    """
    start = sum(sizes[:rank])
    tensor = torch.full((sizes[rank] + 2, COLUMNS), PADDING)
    rows = tensor[1:-1]
    rows.zero_()
    if values is not None:
        rows.copy_(values[start : start + sizes[rank]])
    box = Box((start, 0), rows)
    layout = ShardedTensor("weight", (ROWS, COLUMNS), tensor.dtype, (box,))
    mark_checkpointable(tensor, layout)
    return tensor


def assert_filled(tensor: torch.Tensor, rank: int, sizes: tuple[int, ...], values: torch.Tensor):
    expected = make_marked(rank, sizes, values)
    assert torch.equal(tensor, expected), f"rank {rank}: {tensor}, {expected} expected"


def main() -> None:
    directory = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    values = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))

    # Saved by DCP from marked tensors
    dcp.save({"weight": make_marked(rank, (4, 4), values)}, checkpoint_id=directory / "dcp")
    target = make_marked(rank, (3, 5), None)
    load({"weight": make_sharded_tensor("weight", target)}, directory / "dcp")
    assert_filled(target, rank, (3, 5), values)

    # Saved by our engine; DCP fills marked tensors of another layout, and a plain one.
    source = make_sharded_tensor("weight", make_marked(rank, (5, 3), values))
    save({"weight": source}, directory / "engine", common={})
    state = {"weight": make_marked(rank, (2, 6), None)}
    dcp.load(state, checkpoint_id=directory / "engine")
    assert_filled(state["weight"], rank, (2, 6), values)
    plain = {"weight": torch.zeros(ROWS, COLUMNS)}
    dcp.load(plain, checkpoint_id=directory / "engine")
    assert torch.equal(plain["weight"], values)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

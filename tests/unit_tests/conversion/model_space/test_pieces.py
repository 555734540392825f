"""Row maps compared with the same operations on views."""

import itertools

import pytest
import torch

from megatron.conversion.model_space.pieces import (
    RowMap,
    count_stored_rows,
    cut_runs,
    map_fused_qkv,
    map_separate_qkv,
    map_stacked,
    map_unchanged,
    pack_rows,
    unpack_rows,
)


def interleaved(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, groups: int) -> torch.Tensor:
    width = q.shape[-1]
    by_group = [rows.reshape(groups, -1, width) for rows in (q, k, v)]
    return torch.cat(by_group, dim=1).reshape(-1, width)


# 8 heads, 4 groups, head_dim 3
Q = torch.randn(24, 5)
K = torch.randn(12, 5)
V = torch.randn(12, 5)
QKV = interleaved(Q, K, V, 4)
THIRDS = torch.cat([Q, K, V])
FIRST_HALVES = torch.cat([Q[:12], K[:6], V[:6]])
SECOND_HALVES = torch.cat([Q[12:], K[6:], V[6:]])
TWO_BLOCKS = torch.cat([FIRST_HALVES, SECOND_HALVES])
# Row map, tensors of the files, tensor of the model
CASES: dict[str, tuple[RowMap, list[torch.Tensor], torch.Tensor]] = {
    "as is": (map_unchanged(24), [Q], Q),
    "stacked": (map_stacked(12, 2), [K, V], torch.cat([K, V])),
    "apart": (map_separate_qkv(8, 4, 3), [Q, K, V], QKV),
    "thirds": (map_fused_qkv(8, 4, 3, 1), [THIRDS], QKV),
    "two blocks": (map_fused_qkv(8, 4, 3, 2), [TWO_BLOCKS], QKV),
}


@pytest.mark.parametrize("name", CASES)
def test_row_maps_invert(name: str) -> None:
    row_map, stored_tensors, model = CASES[name]
    assert count_stored_rows(row_map) == list(map(len, stored_tensors))

    def read(source: int, first: int, count: int) -> torch.Tensor:
        tensor = stored_tensors[source]
        end = first + count
        assert 0 <= first < end <= len(tensor)
        return tensor[first:end]

    for start, stop in itertools.combinations(range(len(model) + 1), 2):
        rows = unpack_rows(row_map, start, stop, read)
        assert torch.equal(rows, model[start:stop]), (start, stop)
    for index, tensor in enumerate(stored_tensors):
        packed = pack_rows(row_map, index, model)
        assert torch.equal(packed, tensor)


@pytest.mark.parametrize("most", [1, 5, 7, 1000])
@pytest.mark.parametrize("name", CASES)
def test_blocks_of_rows_equal_the_whole(name: str, most: int) -> None:
    """Write blocks of the model's rows, cut into runs of stored rows."""
    row_map, stored_tensors, model = CASES[name]
    targets = [torch.full_like(tensor, torch.nan) for tensor in stored_tensors]
    for first in range(0, len(model), most):
        rows = model[first : first + most]
        runs = list(cut_runs(row_map, first, first + len(rows)))
        sizes = [len(run.rows) for run in runs]
        for run, block in zip(runs, rows.split(sizes), strict=True):
            target = targets[run.source][run.stored_slice]
            assert target.isnan().all()
            target.copy_(block)

    for actual, expected in zip(targets, stored_tensors, strict=True):
        assert torch.equal(actual, expected)


def test_blocks_must_divide_groups() -> None:
    with pytest.raises(ValueError, match="4 query groups do not divide into 3 blocks"):
        map_fused_qkv(8, 4, 3, 3)

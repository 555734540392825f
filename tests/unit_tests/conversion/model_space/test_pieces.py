"""Row maps compared with the same operations on views."""

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
    parts = [part.reshape(groups, -1, part.shape[-1]) for part in (q, k, v)]
    return torch.cat(parts, dim=1).reshape(-1, q.shape[-1])


# 8 heads, 4 groups, head_dim 3
Q = torch.randn(24, 5)
K = torch.randn(12, 5)
V = torch.randn(12, 5)
TWO_BLOCKS = torch.cat([part.view(2, -1, 5)[half] for half in (0, 1) for part in (Q, K, V)])
CASES: dict[str, tuple[RowMap, list[torch.Tensor], torch.Tensor]] = {
    "as is": (map_unchanged(24), [Q], Q),
    "stacked": (map_stacked(12, 2), [K, V], torch.cat([K, V])),
    "apart": (map_separate_qkv(8, 4, 3), [Q, K, V], interleaved(Q, K, V, 4)),
    "thirds": (map_fused_qkv(8, 4, 3, 1), [torch.cat([Q, K, V])], interleaved(Q, K, V, 4)),
    "two blocks": (map_fused_qkv(8, 4, 3, 2), [TWO_BLOCKS], interleaved(Q, K, V, 4)),
}


@pytest.mark.parametrize("name", CASES)
def test_row_maps_invert(name: str) -> None:
    row_map, stored, model = CASES[name]
    assert count_stored_rows(row_map) == [len(tensor) for tensor in stored]

    def read(source: int, first: int, count: int) -> torch.Tensor:
        assert first >= 0 and count > 0 and first + count <= len(stored[source])
        return stored[source][first : first + count]

    for start in range(len(model)):
        for stop in range(start + 1, len(model) + 1):
            assert torch.equal(unpack_rows(row_map, start, stop, read), model[start:stop]), (
                start,
                stop,
            )
    for number, tensor in enumerate(stored):
        assert torch.equal(pack_rows(row_map, number, model), tensor)


@pytest.mark.parametrize("most", [1, 5, 7, 1000])
@pytest.mark.parametrize("name", CASES)
def test_blocks_of_rows_equal_the_whole(name: str, most: int) -> None:
    """Write blocks of the model's rows, cut into runs of stored rows."""
    row_map, stored, model = CASES[name]
    written = [torch.full_like(tensor, torch.nan) for tensor in stored]
    for first in range(0, len(model), most):
        rows = model[first : first + most]
        found = list(cut_runs(row_map, first, first + len(rows)))
        for run, part in zip(found, rows.split([len(run.rows) for run in found]), strict=True):
            target = written[run.source][run.stored_slice]
            assert target.isnan().all()
            target.copy_(part)
    assert all(torch.equal(a, b) for a, b in zip(written, stored, strict=True))


def test_blocks_must_divide_groups() -> None:
    with pytest.raises(ValueError, match="4 query groups do not divide into 3 blocks"):
        map_fused_qkv(8, 4, 3, 3)

"""Attention with a softcap of the scores, which torch's fused kernels do not support."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.transformer.attention.kernels import Block, Scoring

SCORES_AT_ONCE = 1 << 24
"""Maximum number of fp32 scores that are computed at once."""


class _CappedScores(NamedTuple):
    """Scores of some consecutive queries."""

    rows: slice
    """The queries."""
    columns: slice
    """The keys that they may see."""
    scores: Tensor
    """`[b, groups, queries per group, rows, columns]` fp32."""
    tanh: Tensor
    """tanh(x / softcap) of the uncapped scores x, in the same shape."""


def _compute_capped_scores(
    query: Tensor,  # [b, heads, rows, d]
    key: Tensor,  # [b, groups, columns, d]
    block: Block,
    scoring: Scoring,
) -> Iterator[_CappedScores]:
    """Yield the scores of all queries, at most SCORES_AT_ONCE (or one row) at a time."""
    assert scoring.softcap is not None
    cap = scoring.softcap
    batch, heads, num_queries, head_dim = query.shape
    num_keys = key.shape[2]
    scale = scoring.get_scale(head_dim)
    scores_per_row = batch * heads * num_keys
    step = max(1, SCORES_AT_ONCE // scores_per_row)
    positions = torch.arange(num_keys, device=key.device)
    for start in range(0, num_queries, step):
        stop = min(start + step, num_queries)
        rows = slice(start, stop)
        # In causal order no query of these rows sees a key at or after `stop`.
        num_columns = num_keys
        if block.causal:
            num_columns = stop
        columns = slice(0, num_columns)

        # The capped scores, [b, g, q/g, rows, columns] for g groups
        group_query = _select_rows(query, rows, key)  # [b, g, q/g, rows, d]
        group_key = key[:, :, None, columns]  # [b, g, 1, columns, d]
        product = group_query @ group_key.mT
        tanh = product.float().mul_(scale / cap).tanh_()
        scores = tanh * cap

        # Masks apply after the cap: the score of an invisible key remains infinite.
        if block.causal:
            row_positions = positions[rows].unsqueeze(1)
            is_future = positions[columns] > row_positions  # [rows, columns]
            scores.masked_fill_(is_future, -torch.inf)
        if block.mask is not None:
            mask = block.mask[..., columns].expand(-1, heads, -1, -1)
            scores += _select_rows(mask, rows, key)
        yield _CappedScores(rows, columns, scores, tanh)


def _select_rows(x: Tensor, rows: slice, key: Tensor) -> Tensor:
    """View rows of `[b, heads, s, ...]` as `[b, groups, queries per group, rows, ...]`."""
    num_groups = key.shape[1]
    selected = x[:, :, rows]
    return selected.unflatten(1, (num_groups, -1))


def attend_with_softcap(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    block: Block,
    scoring: Scoring,
) -> tuple[Tensor, Tensor]:
    """Compute `attend` with a softcap."""
    out = torch.empty_like(query)
    lse_shape = query.shape[:3]  # [b, heads, rows]
    lse = query.new_empty(lse_shape, dtype=torch.float32)
    for rows, columns, scores, _ in _compute_capped_scores(query, key, block, scoring):
        # Softmax in place: scores are the largest tensors here.
        row_lse = scores.logsumexp(-1)  # [b, groups, queries per group, rows]
        scores.sub_(row_lse.unsqueeze(-1)).exp_()
        probabilities = scores.to(value.dtype)

        group_value = value[:, :, None, columns]  # [b, groups, 1, columns, d]
        group_out = probabilities @ group_value  # [b, groups, queries per group, rows, d]
        out[:, :, rows] = group_out.flatten(1, 2)
        lse[:, :, rows] = row_lse.flatten(1, 2)
    return out, lse


def attend_with_softcap_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    block: Block,
    scoring: Scoring,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `attend_backward` with a softcap from recomputed scores.

    The gradient of a softmax is p * (dp - sum(p * dp)), and that of tanh is 1 - tanh^2.
    """
    # In fp32, since the gradients of keys and values are sums over the queries.
    dquery = torch.empty_like(query)
    dkey = torch.zeros_like(key, dtype=torch.float32)
    dvalue = torch.zeros_like(value, dtype=torch.float32)
    scale = scoring.get_scale(query.shape[3])
    # sum(p * dp) of each query, [b, heads, s]
    products = dout.float() * out
    expected = products.sum(-1)
    for rows, columns, scores, tanh in _compute_capped_scores(query, key, block, scoring):
        # Parts of these rows, [b, groups, queries per group, rows, ...]
        row_query = _select_rows(query, rows, key)
        row_dout = _select_rows(dout, rows, key)
        row_lse = _select_rows(lse, rows, key)
        row_expected = _select_rows(expected, rows, key)
        group_key = key[:, :, None, columns]  # [b, groups, 1, columns, d]
        group_value = value[:, :, None, columns]  # [b, groups, 1, columns, d]

        # Through the product of probabilities and values. A key serves all queries of its group:
        # its gradient is their sum (dimension 2).
        probabilities = scores.sub_(row_lse.unsqueeze(-1)).exp_()
        weights = probabilities.to(row_dout.dtype)
        group_dvalue = weights.mT @ row_dout
        dvalue[:, :, columns] += group_dvalue.sum(2)
        dprobabilities = (row_dout @ group_value.mT).float()

        # Through softmax and softcap, in place and without names for temporary tensors, which would
        # stay allocated: these are the largest tensors.
        dscores = dprobabilities.sub_(row_expected.unsqueeze(-1)).mul_(probabilities)
        dcapped = dscores.mul_(1 - tanh.square_())
        dproduct = dcapped.mul_(scale).to(query.dtype)

        # Through the product of queries and keys.
        group_dquery = dproduct @ group_key
        dquery[:, :, rows] = group_dquery.flatten(1, 2)
        group_dkey = dproduct.mT @ row_query
        dkey[:, :, columns] += group_dkey.sum(2)
    return dquery, dkey.to(key.dtype), dvalue.to(value.dtype)

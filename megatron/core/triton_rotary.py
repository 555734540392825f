"""Triton kernel of rotary embeddings: rotated pairs of elements of queries and keys.

As in `triton_kernels.py`, with a reference in plain PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.core.triton_kernels import allocate_nothing, load_float, make_operator

# Heads of a token that a program rotates.
_HEADS_BLOCK = 16
_NUM_WARPS = 4


@triton.jit
def _rotate_kernel(
    x,
    y,
    cos,
    sin,
    batch,
    groups,
    heads,
    x_position,
    x_sample,
    x_group,
    x_head,
    y_position,
    y_sample,
    y_group,
    y_head,
    sign,
    num_pairs,
    num_unchanged,
    IS_INTERLEAVED: tl.constexpr,
    COPIES: tl.constexpr,
    PAIRS: tl.constexpr,
    UNCHANGED: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Some heads of one token: `x` and `y` [s, b, g, heads, d], of any strides but the last one.

    A thread loads both elements of a pair before it stores them, so that `y` may be `x`.
    """
    token = tl.program_id(0).to(tl.int64)
    position = token // batch
    sample = token % batch
    index = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    has_head = index < groups * heads
    group = (index // heads).to(tl.int64)
    head = (index % heads).to(tl.int64)
    # First element of each head, [HEADS, 1]
    x_heads = group * x_group + head * x_head
    y_heads = group * y_group + head * y_head
    x_start = x + position * x_position + sample * x_sample + x_heads[:, None]
    y_start = y + position * y_position + sample * y_sample + y_heads[:, None]
    # The angle of each pair, [1, PAIRS]
    pair = tl.arange(0, PAIRS)
    has_pair = pair < num_pairs
    angle = position * num_pairs + pair
    c = load_float(cos + angle, has_pair)[None, :]
    s = load_float(sin + angle, has_pair)[None, :] * sign

    # Rotate the pairs.
    column = pair[None, :]
    if IS_INTERLEAVED:
        first_column = 2 * column
        second_column = first_column + 1
    else:
        first_column = column
        second_column = column + num_pairs
    mask = has_head[:, None] & has_pair[None, :]
    first = load_float(x_start + first_column, mask)
    second = load_float(x_start + second_column, mask)
    first_out = first * c - second * s
    second_out = second * c + first * s
    tl.store(y_start + first_column, first_out, mask=mask)
    tl.store(y_start + second_column, second_out, mask=mask)
    # Copy the elements after them, unless they are there already.
    if COPIES:
        unchanged = tl.arange(0, UNCHANGED)
        column = 2 * num_pairs + unchanged[None, :]
        copies = has_head[:, None] & (column < 2 * num_pairs + num_unchanged)
        values = tl.load(x_start + column, mask=copies, other=0.0)
        tl.store(y_start + column, values, mask=copies)


def run_rotation(
    x: Tensor, y: Tensor, cos: Tensor, sin: Tensor, inverse: bool, interleaved: bool
) -> None:
    num_positions, batch, groups, heads, width = x.shape
    num_pairs = cos.shape[-1]
    num_unchanged = width - 2 * num_pairs
    assert num_unchanged >= 0 and y.shape == x.shape
    if x.numel() == 0:
        return
    *x_strides, x_step = x.stride()
    *y_strides, y_step = y.stride()
    assert x_step == 1 and y_step == 1
    assert cos.is_contiguous() and sin.is_contiguous() and cos.shape[0] == num_positions
    is_in_place = x.data_ptr() == y.data_ptr()
    assert not is_in_place or x_strides == y_strides

    num_blocks = triton.cdiv(groups * heads, _HEADS_BLOCK)  # of heads
    num_tokens = num_positions * batch
    grid = (num_tokens, num_blocks)
    _rotate_kernel[grid](
        x,
        y,
        cos,
        sin,
        batch,
        groups,
        heads,
        *x_strides,
        *y_strides,
        -1.0 if inverse else 1.0,
        num_pairs,
        num_unchanged,
        IS_INTERLEAVED=interleaved,
        COPIES=num_unchanged > 0 and not is_in_place,
        PAIRS=triton.next_power_of_2(max(1, num_pairs)),
        UNCHANGED=triton.next_power_of_2(max(1, num_unchanged)),
        HEADS=_HEADS_BLOCK,
        num_warps=_NUM_WARPS,
    )


def compute_rotation(
    x: Tensor, y: Tensor, cos: Tensor, sin: Tensor, inverse: bool, interleaved: bool
) -> None:
    num_pairs = cos.shape[-1]
    num_rotated = 2 * num_pairs
    rotated = x[..., :num_rotated].float()
    if interleaved:
        first, second = rotated.unflatten(-1, (-1, 2)).unbind(-1)
    else:
        first, second = rotated.chunk(2, -1)
    c = cos.view(-1, 1, 1, 1, num_pairs).float()
    s = sin.view(-1, 1, 1, 1, num_pairs).float()
    if inverse:
        s = -s
    first_out = first * c - second * s
    second_out = second * c + first * s
    if interleaved:
        result = torch.stack((first_out, second_out), -1).flatten(-2)
    else:
        result = torch.cat((first_out, second_out), -1)
    y[..., num_rotated:] = x[..., num_rotated:]
    y[..., :num_rotated] = result


rotate = make_operator(
    "rotate",
    "(Tensor x, Tensor(a!) y, Tensor cos, Tensor sin, bool inverse, bool interleaved) -> ()",
    ("y",),
    run_rotation,
    compute_rotation,
    allocate_nothing,
)
"""Write `x` [s, b, g, heads, d] to `y`, with the pairs of its first elements rotated.

`cos` and `sin` [s, ..., pairs] are those of each position. `y` may be `x`. Rows of heads are
contiguous, all other strides are arbitrary.
"""


# ---- Split into queries, keys and values, of which the first two are rotated ----


def run_split(
    mixed: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = _view_heads(mixed)
    query_out, key_out, value_out = allocate_split(mixed, cos, sin, interleaved)
    run_rotation(query, query_out, cos, sin, False, interleaved)
    run_rotation(key, key_out, cos, sin, False, interleaved)
    _copy_heads(value, value_out, cos)
    return query_out, key_out, value_out


def run_split_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> Tensor:
    if dq.stride(-1) != 1:
        dq = dq.contiguous()
    if dk.stride(-1) != 1:
        dk = dk.contiguous()
    if dv.stride(-1) != 1:
        dv = dv.contiguous()
    dmixed = allocate_split_gradient(dq, dk, dv, cos, sin, interleaved)
    dquery, dkey, dvalue = _view_heads(dmixed)
    run_rotation(dq, dquery, cos, sin, True, interleaved)
    run_rotation(dk, dkey, cos, sin, True, interleaved)
    _copy_heads(dv, dvalue, cos)
    return dmixed


def _view_heads(mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of the queries, the key and the value of each group."""
    num_query_heads = mixed.shape[3] - 2
    query, key, value = mixed.split((num_query_heads, 1, 1), 3)
    return query, key, value


def _copy_heads(x: Tensor, y: Tensor, table: Tensor) -> None:
    """Copy heads by a rotation of no pairs, since torch copies slices at 1.5 TB/s on an H200."""
    no_pairs = table[..., :0]
    run_rotation(x, y, no_pairs, no_pairs, False, False)


def allocate_split(
    mixed: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    *rows, num_heads, head_dim = mixed.shape
    query = mixed.new_empty(*rows, num_heads - 2, head_dim)
    key = mixed.new_empty(*rows, 1, head_dim)
    return query, key, torch.empty_like(key)


def allocate_split_gradient(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> Tensor:
    *rows, num_query_heads, head_dim = dq.shape
    return dq.new_empty(*rows, num_query_heads + 2, head_dim)


def compute_split(
    mixed: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = _view_heads(mixed)
    query_out, key_out, value_out = allocate_split(mixed, cos, sin, interleaved)
    compute_rotation(query, query_out, cos, sin, False, interleaved)
    compute_rotation(key, key_out, cos, sin, False, interleaved)
    value_out.copy_(value)
    return query_out, key_out, value_out


def compute_split_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> Tensor:
    dmixed = allocate_split_gradient(dq, dk, dv, cos, sin, interleaved)
    dquery, dkey, dvalue = _view_heads(dmixed)
    compute_rotation(dq, dquery, cos, sin, True, interleaved)
    compute_rotation(dk, dkey, cos, sin, True, interleaved)
    dvalue.copy_(dv)
    return dmixed


split_and_rotate = make_operator(
    "split_and_rotate",
    "(Tensor mixed, Tensor cos, Tensor sin, bool interleaved) -> (Tensor, Tensor, Tensor)",
    (),
    run_split,
    compute_split,
    allocate_split,
)
"""Return rotated queries [s, b, g, q, d] and keys, and values, of `mixed` [s, b, g, q + 2, d].

All are contiguous. Differentiable.
"""

split_and_rotate_backward = make_operator(
    "split_and_rotate_backward",
    "(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin, bool interleaved) -> Tensor",
    (),
    run_split_backward,
    compute_split_backward,
    allocate_split_gradient,
)
"""Return the gradient of `split_and_rotate`, contiguous, for gradients of any strides."""


def _save_split(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, cos, sin, interleaved = inputs
    ctx.save_for_backward(cos, sin)
    ctx.interleaved = interleaved


def _differentiate_split(
    ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor
) -> tuple[Tensor, None, None, None]:
    cos, sin = ctx.saved_tensors
    dmixed: Tensor = split_and_rotate_backward(dq, dk, dv, cos, sin, ctx.interleaved)
    return dmixed, None, None, None


torch.library.register_autograd(
    "megatron::split_and_rotate", _differentiate_split, setup_context=_save_split
)

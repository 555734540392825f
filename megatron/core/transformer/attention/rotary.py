"""Rotary position embeddings (Su et al. 2021).

The half-split form rotates element i together with element i + d/2, the interleaved form element 2i
with 2i + 1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.fused_kernels import find_kernel
from megatron.core.parallel_state import Axis
from megatron.core.transformer.placement import compute_local_positions
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.wings import resolve

_SCALE_BY_YARN = "megatron.core.transformer.attention.rope_scaling:scale_by_yarn"
_SCALE_AS_LLAMA3 = "megatron.core.transformer.attention.rope_scaling:scale_as_llama3"
_COMPUTE_YARN_MSCALE = "megatron.core.transformer.attention.rope_scaling:compute_yarn_mscale"
_COMPUTE_LONGROPE_FACTOR = (
    "megatron.core.transformer.attention.rope_scaling:compute_longrope_factor"
)


def compute_rotary_frequencies(
    config: TransformerConfig,
    width: int,
    base: float | None,
    length: int,
) -> Tensor:
    """Return the angle per position of each rotated pair of a head, `[d_rotated / 2]` fp32.

    `width` is the number of elements of the head, and `length` that of positions of a sequence. A
    given `base` overrides the model's, and disables scaling.
    """
    rotated = int(width * config.rotary_percent)
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    if base is not None:
        return 1.0 / base**exponents
    frequencies = 1.0 / config.rotary_base**exponents

    # Scaling to a longer context. Linear interpolation divides the positions by the stretch.
    frequencies = frequencies / config.rotary_stretch
    if config.rope_type == "yarn":
        frequencies = resolve(_SCALE_BY_YARN)(frequencies, rotated, config)
    elif config.rope_type == "longrope":
        is_long = length > config.original_max_position_embeddings
        factors = config.longrope_long_factor if is_long else config.longrope_short_factor
        frequencies = frequencies / torch.tensor(factors)
    elif config.use_rope_scaling:
        frequencies = resolve(_SCALE_AS_LLAMA3)(frequencies, config)
    return frequencies


class Rotary(NamedTuple):
    """The rotation of each position, and the pairing of elements."""

    cos: Tensor
    """`[s, 1, 1, 1, d_rotated / 2]`"""
    sin: Tensor
    """`[s, 1, 1, 1, d_rotated / 2]`"""
    interleaved: bool = False
    fused: bool = True
    """Whether a Triton kernel may compute it."""
    in_place: bool = False
    """Whether that may overwrite the output of the projection. Queries, keys and values then are
    views of it, which attention of the local layers reads without copies.
    """

    def split_pairs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return views `[s, b, g, heads, pairs]` of the first and second elements of all pairs."""
        num_pairs = self.cos.shape[-1]
        num_rotated = 2 * num_pairs
        if self.interleaved:
            first = x[..., 0:num_rotated:2]
            second = x[..., 1:num_rotated:2]
        else:
            first = x[..., :num_pairs]
            second = x[..., num_pairs:num_rotated]
        return first, second


class RotaryTables:
    """cos and sin of the positions of a rank, computed in fp32 and kept per length, dtype, device.

    A rank has a part of each sequence if `cp`, the axis over which attention sees it split, has
    more than one rank.
    """

    def __init__(
        self,
        config: TransformerConfig,
        cp: Axis,
        width: int,
        interleaved: bool,
        base: float | None = None,
        in_place: bool = False,
    ) -> None:
        """Initialize for heads of `width` elements.

        A given `base` overrides the model's, and disables scaling. `in_place`: see `Rotary`.
        """
        self._cp = cp
        self._fused = config.rope_fusion
        self._in_place = in_place
        # Computed on first use: building a model on the meta device does not allocate memory, even
        # if an untrusted config.json has a huge head width.
        self._make_frequencies = partial(compute_rotary_frequencies, config, width, base)
        self._interleaved = interleaved
        # Factor of cos and sin, and thereby of queries and keys
        self._factor = 1.0
        if config.rope_type == "yarn" and base is None:
            compute_mscale = resolve(_COMPUTE_YARN_MSCALE)
            numerator = compute_mscale(config, config.mscale)
            self._factor = numerator / compute_mscale(config, config.mscale_all_dim)
        elif config.rope_type == "longrope" and base is None:
            self._factor = resolve(_COMPUTE_LONGROPE_FACTOR)(config)
        self._tables: dict[tuple[int, torch.dtype, torch.device], Rotary] = {}

    def __call__(self, length: int, dtype: torch.dtype, device: torch.device) -> Rotary:
        """Return the rotation of this rank's `length` positions."""
        key = (length, dtype, device)
        if key not in self._tables:
            self._tables[key] = self._make_rotary(length, dtype, device)
        return self._tables[key]

    def prepare(self, whole_length: int, dtype: torch.dtype, device: torch.device) -> None:
        """Compute the rotation of this rank's part of sequences of `whole_length` positions."""
        self(whole_length // self._cp.size, dtype, device)

    def _make_rotary(self, length: int, dtype: torch.dtype, device: torch.device) -> Rotary:
        """Compute the rotation of this rank's `length` positions."""
        cp = self._cp
        whole_length = length * cp.size
        positions = compute_local_positions(whole_length, cp.rank, cp.size)  # [s]
        frequencies = self._make_frequencies(whole_length)  # [pairs]
        angles = torch.outer(positions.float(), frequencies)
        angles = angles.view(length, 1, 1, 1, -1)  # [s, 1, 1, 1, pairs]

        # In fp32, rounded to `dtype` last: angles of long sequences do not fit into bf16.
        cos = self._factor * angles.cos()
        sin = self._factor * angles.sin()

        return Rotary(
            cos=cos.to(device, dtype),
            sin=sin.to(device, dtype),
            interleaved=self._interleaved,
            fused=self._fused,
            in_place=self._in_place,
        )


def split_qkv(
    mixed: Tensor,  # [s, b, g, q + 2, d]
    num_query_heads: int,
    rotary: Rotary | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the heads of each group, and rotate queries and keys unless `rotary` is None.

    q is `num_query_heads`, the queries per group. Returns queries `[s, b, g, q, d]`, keys and
    values `[s, b, g, 1, d]`. Both passes touch the memory once: the gradients are written directly
    into one tensor.
    """
    is_eager = not torch.compiler.is_compiling()
    if rotary is not None and not (is_eager and rotary.in_place):
        kernel = _find_rotation("split_and_rotate", mixed, rotary)
        if kernel is not None:
            return kernel(mixed, rotary.cos, rotary.sin, rotary.interleaved)
    if is_eager:
        return _SplitQKV.apply(mixed, num_query_heads, rotary)

    # Plain operations, which the compiler fuses
    query, key, value = _split_heads(mixed, num_query_heads)
    if rotary is None:
        return query, key, value
    return rotate(query, rotary), rotate(key, rotary), value


def _split_heads(mixed: Tensor, num_query_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of the queries, the key and the value of each group."""
    key_index = num_query_heads
    value_index = num_query_heads + 1
    query = mixed[..., :key_index, :]
    key = mixed[..., key_index:value_index, :]
    value = mixed[..., value_index:, :]
    return query, key, value


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate `[s, b, g, heads, d]` by its positions."""
    if not torch.compiler.is_compiling():
        return _Rotate.apply(x, rotary)

    # Plain operations, which the compiler fuses
    cos = rotary.cos
    sin = rotary.sin
    first, second = rotary.split_pairs(x)  # [s, b, g, heads, pairs]
    first_out = first * cos - second * sin
    second_out = second * cos + first * sin
    if rotary.interleaved:
        pairs = torch.stack((first_out, second_out), -1)  # [s, b, g, heads, pairs, 2]
        rotated = pairs.flatten(-2)
    else:
        rotated = torch.cat((first_out, second_out), -1)
    num_rotated = 2 * cos.shape[-1]
    unchanged = x[..., num_rotated:]
    return torch.cat((rotated, unchanged), -1)


class _SplitQKV(torch.autograd.Function):
    """Split and rotation with one copy of each element per pass; see `split_qkv`."""

    @staticmethod
    def forward(
        ctx: Any,
        mixed: Tensor,
        num_query_heads: int,
        rotary: Rotary | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.num_query_heads = num_query_heads
        ctx.rotary = rotary
        query, key, value = _split_heads(mixed, num_query_heads)
        has_kernel = _find_rotation("rotate", mixed, rotary) is not None
        if rotary is not None and rotary.in_place and has_kernel:
            return _rotate_in_place(mixed, num_query_heads, rotary)
        query_out = mixed.new_empty(query.shape)
        key_out = mixed.new_empty(key.shape)
        value_out = mixed.new_empty(value.shape)
        _rotate_into(query_out, query, rotary)
        _rotate_into(key_out, key, rotary)
        value_out.copy_(value)
        return query_out, key_out, value_out

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
    ) -> tuple[Tensor, None, None]:
        rotary = ctx.rotary
        kernel = _find_rotation("split_and_rotate_backward", dq, rotary)
        if kernel is not None:
            return kernel(dq, dk, dv, rotary.cos, rotary.sin, rotary.interleaved), None, None
        length, batch, groups, num_query_heads, head_dim = dq.shape
        num_heads = num_query_heads + 2
        dmixed = dq.new_empty(length, batch, groups, num_heads, head_dim)
        # Views of `dmixed`, into which the gradients are written
        dquery, dkey, dvalue = _split_heads(dmixed, num_query_heads)
        _rotate_into(dquery, dq, rotary, inverse=True)
        _rotate_into(dkey, dk, rotary, inverse=True)
        dvalue.copy_(dv)
        return dmixed, None, None


def _rotate_in_place(
    mixed: Tensor, num_query_heads: int, rotary: Rotary
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, as views of `mixed` where attention reads them as such.

    The backward pass of the projection does not need `mixed`.
    """
    query, key, value = _split_heads(mixed, num_query_heads)
    groups = mixed.shape[2]
    if num_query_heads == 1 or groups == 1:
        rotated_heads = mixed[..., : num_query_heads + 1, :]
        _rotate_into(rotated_heads, rotated_heads, rotary)
        return query, key, value
    # Attention would copy queries of several heads per group: heads are at unequal distances.
    query_out = mixed.new_empty(query.shape)
    _rotate_into(query_out, query, rotary)
    _rotate_into(key, key, rotary)
    return query_out, key, value


class _Rotate(torch.autograd.Function):
    """Rotation that does not keep its input for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rotary: Rotary) -> Tensor:
        ctx.rotary = rotary
        y = x.new_empty(x.shape)
        return _rotate_into(y, x, rotary)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        dx = dy.new_empty(dy.shape)
        _rotate_into(dx, dy, ctx.rotary, inverse=True)
        return dx, None


def _find_rotation(name: str, x: Tensor, rotary: Rotary | None) -> Callable[..., Any] | None:
    """Return the kernel `name` for a rotation of `x`, if there is one."""
    if rotary is None or not rotary.fused:
        return None
    return find_kernel(name, x)


def _rotate_into(
    out: Tensor,  # [s, b, g, heads, d]
    x: Tensor,  # [s, b, g, heads, d]
    rotary: Rotary | None,
    inverse: bool = False,
) -> Tensor:
    """Write `x`, with its first d_rotated elements rotated, to `out`.

    A rotation is orthogonal up to its factor, so the backward pass is the rotation by the negative
    angle.
    """
    if rotary is None:
        return out.copy_(x)
    cos = rotary.cos
    sin = rotary.sin
    kernel = _find_rotation("rotate", x, rotary)
    if kernel is not None:
        if x.stride(-1) != 1:
            x = x.contiguous()
        kernel(x, out, cos, sin, inverse, rotary.interleaved)
        return out
    sign = -1 if inverse else 1
    first, second = rotary.split_pairs(x)  # [s, b, g, heads, pairs]
    first_out, second_out = rotary.split_pairs(out)

    # first * cos - second * sin, and second * cos + first * sin, without temporary tensors
    torch.mul(first, cos, out=first_out).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=second_out).addcmul_(first, sin, value=sign)

    # The elements that are not rotated
    num_rotated = 2 * cos.shape[-1]
    if num_rotated < x.shape[-1]:
        out[..., num_rotated:] = x[..., num_rotated:]
    return out

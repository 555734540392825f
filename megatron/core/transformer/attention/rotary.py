"""Rotary position embeddings (Su et al. 2021).

In the half-split form element i is rotated with element i + d/2, in the interleaved one 2i with 2i
+ 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.parallel_state import Axis
from megatron.core.transformer.placement import compute_local_positions
from megatron.core.transformer.transformer_config import TransformerConfig


def rotary_frequencies(config: TransformerConfig, width: int, base: float | None = None) -> Tensor:
    """Angle per position of every rotated pair of a head of `width` elements, `[d_rotated / 2]`
    fp32.

    With a `base` these are unscaled.
    """
    rotated = int(width * config.rotary_percent)
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    if base is not None:
        return 1.0 / base**exponents
    frequencies = 1.0 / config.rotary_base**exponents / config.rotary_stretch
    if config.rope_type == "yarn":
        return _yarn_scaled(frequencies, rotated, config)
    return _llama3_scaled(frequencies, config) if config.use_rope_scaling else frequencies


def _yarn_scaled(frequencies: Tensor, rotated: int, config: TransformerConfig) -> Tensor:
    """YaRN (Peng et al. 2023, "NTK-by-parts"): long wavelengths are stretched, short ones kept,
    between them a ramp.

    The ramp runs over the numbers of the pairs, between those that turn beta_fast and beta_slow
    times in the original context.
    """

    def pair(turns: float) -> float:
        wavelength = config.original_max_position_embeddings / (2 * math.pi * turns)
        return rotated * math.log(wavelength) / (2 * math.log(config.rotary_base))

    low = pair(config.beta_fast)
    high = pair(config.beta_slow)
    if config.yarn_correction_range_round_to_int:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, rotated - 1)
    ramp = (torch.arange(rotated // 2, dtype=torch.float32) - low) / (
        high - low if high != low else 0.001
    )
    kept = 1.0 - ramp.clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / config.rotary_scaling_factor


def yarn_mscale(config: TransformerConfig, mscale: float) -> float:
    """How much larger scores must be in a longer context, to the power of 1/2."""
    factor = config.rotary_scaling_factor
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3_scaled(frequencies: Tensor, config: TransformerConfig) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by the factor, short ones kept, those between
    interpolated.
    """
    low = config.rope_low_freq_factor
    high = config.rope_high_freq_factor
    turns = config.rope_original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / config.rope_scaling_factor


class Rotary(NamedTuple):
    """The rotation of every position: cos and sin `[s, 1, 1, 1, d_rotated / 2]`, and which elements
    go together.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    kernel: Callable[[Tensor], Tensor] | None = None  # computes all of it, in place of what is here

    def pairs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the first and the second elements of all pairs of `[s, b, g, heads, d]`."""
        half = self.cos.shape[-1]
        if self.interleaved:
            return x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        return x[..., :half], x[..., half : 2 * half]


class RotaryTables:
    """cos and sin of the positions that a rank of `cp` holds, computed in fp32 and kept per
    (length, dtype, device).

    `width` is that of the heads that are rotated; `base` replaces that of the model, and its scaling. `kernel` turns
    `[s, b, g, heads, d]` by angles `[s, 1, 1, pairs]`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        cp: Axis,
        width: int,
        interleaved: bool,
        base: float | None = None,
        kernel: Callable[..., Tensor] | None = None,
    ) -> None:
        self._cp = cp
        self._kernel = kernel
        # Computed on first use: a model that is built on the meta device allocates nothing, whatever
        # head width the config.json of a stranger asks for.
        self._make_frequencies = partial(rotary_frequencies, config, width, base)
        self._interleaved = interleaved
        yarn = config.rope_type == "yarn" and base is None
        self._size = (
            yarn_mscale(config, config.mscale) / yarn_mscale(config, config.mscale_all_dim)
            if yarn
            else 1.0
        )
        self._tables: dict[tuple[int, torch.dtype, torch.device], Rotary] = {}

    def __call__(self, length: int, dtype: torch.dtype, device: torch.device) -> Rotary:
        """Of the `length` positions here."""
        key = (length, dtype, device)
        if key not in self._tables:
            positions = compute_local_positions(
                length * self._cp.size, self._cp.rank, self._cp.size
            )
            frequencies = self._make_frequencies()
            angles = torch.outer(positions.float(), frequencies).view(length, 1, 1, 1, -1)
            cos, sin = (
                (self._size * table).to(device, dtype) for table in (angles.cos(), angles.sin())
            )
            kernel = None
            if self._kernel is not None:
                kernel = partial(
                    self._kernel, angles=angles.squeeze(1).to(device), interleaved=self._interleaved
                )
            self._tables[key] = Rotary(cos, sin, self._interleaved, kernel)
        return self._tables[key]


def split_qkv(
    mixed: Tensor, num_query_heads: int, rotary: Rotary | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`[s, b, g, q + 2, d]` -> query `[s, b, g, q, d]`, key and value `[s, b, g, 1, d]`; query and key rotated.

    `rotary` None leaves them as they are. One pass each way: the gradient is written straight into one tensor.
    """
    if torch.compiler.is_compiling() or (rotary is not None and rotary.kernel is not None):
        q = num_query_heads
        query = mixed[..., :q, :]
        key = mixed[..., q : q + 1, :]
        value = mixed[..., q + 1 :, :]
        return (
            (query, key, value)
            if rotary is None
            else (rotate(query, rotary), rotate(key, rotary), value)
        )
    return _SplitQKV.apply(mixed, num_query_heads, rotary)


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotate `[s, b, g, heads, d]` by its position."""
    if rotary.kernel is not None:
        return rotary.kernel(x)
    if not torch.compiler.is_compiling():
        return _Rotate.apply(x, rotary)
    cos = rotary.cos
    sin = rotary.sin
    half = rotary.cos.shape[-1]
    first, second = rotary.pairs(x)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.stack(rotated, -1).flatten(-2) if rotary.interleaved else torch.cat(rotated, -1)
    return torch.cat((joined, x[..., 2 * half :]), -1)


class _SplitQKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, q: int, rotary: Rotary | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.q = q
        ctx.rotary = rotary
        parts = mixed[..., :q, :], mixed[..., q : q + 1, :], mixed[..., q + 1 :, :]
        query, key, value = (mixed.new_empty(part.shape) for part in parts)
        _rotate_into(query, parts[0], rotary)
        _rotate_into(key, parts[1], rotary)
        return query, key, value.copy_(parts[2])

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        q = ctx.q
        dmixed = dq.new_empty(*dq.shape[:3], q + 2, dq.shape[-1])
        _rotate_into(dmixed[..., :q, :], dq, ctx.rotary, inverse=True)
        _rotate_into(dmixed[..., q : q + 1, :], dk, ctx.rotary, inverse=True)
        dmixed[..., q + 1 :, :] = dv
        return dmixed, None, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rotary: Rotary) -> Tensor:
        ctx.rotary = rotary
        return _rotate_into(x.new_empty(x.shape), x, rotary)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _rotate_into(dy.new_empty(dy.shape), dy, ctx.rotary, inverse=True), None


def _rotate_into(out: Tensor, x: Tensor, rotary: Rotary | None, inverse: bool = False) -> Tensor:
    """out = x with its leading 2 * cos.shape[-1] elements rotated."""
    if rotary is None:
        return out.copy_(x)
    cos = rotary.cos
    sin = rotary.sin
    half = rotary.cos.shape[-1]
    sign = -1 if inverse else 1
    (first, second), (first_out, second_out) = rotary.pairs(x), rotary.pairs(out)
    torch.mul(first, cos, out=first_out).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=second_out).addcmul_(first, sin, value=sign)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out

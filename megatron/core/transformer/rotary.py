"""Rotary position embeddings (Su et al. 2021) in the half-split form: element i is rotated with element i + d/2."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron.core.transformer.transformer_config import TransformerConfig


def rotary_frequencies(config: TransformerConfig) -> Tensor:
    """Angle per position of every rotated pair, `[d_rotated / 2]` fp32."""
    rotated = int(config.head_dim * config.rotary_percent)
    frequencies = 1.0 / config.rotary_base ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
    return _llama3_scaled(frequencies, config) if config.use_rope_scaling else frequencies


def _llama3_scaled(frequencies: Tensor, config: TransformerConfig) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by the factor, short ones kept, those between interpolated."""
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    turns = config.rope_original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / config.rope_scaling_factor


class RotaryTables:
    """cos and sin for positions 0, 1, ..., computed in fp32 and kept per (length, dtype, device)."""

    def __init__(self, config: TransformerConfig) -> None:
        self._frequencies = rotary_frequencies(config)
        self._tables: dict[tuple[int, torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    def __call__(self, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """(cos, sin), each `[s, 1, 1, 1, d_rotated / 2]`."""
        key = (length, dtype, device)
        if key not in self._tables:
            angles = torch.outer(torch.arange(length, dtype=torch.float32), self._frequencies).view(length, 1, 1, 1, -1)
            self._tables[key] = (angles.cos().to(device, dtype), angles.sin().to(device, dtype))
        return self._tables[key]


def split_qkv(
    mixed: Tensor, num_query_heads: int, rotary: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`[s, b, g, q + 2, d]` -> query `[s, b, g, q, d]`, key and value `[s, b, g, 1, d]`; query and key rotated.

    `rotary` None leaves them as they are. One pass each way: the gradient is written straight into one tensor.
    """
    if torch.compiler.is_compiling():
        q = num_query_heads
        query, key, value = mixed[..., :q, :], mixed[..., q : q + 1, :], mixed[..., q + 1 :, :]
        return (query, key, value) if rotary is None else (rotate(query, rotary), rotate(key, rotary), value)
    cos, sin = rotary if rotary is not None else (None, None)
    return _SplitQKV.apply(mixed, num_query_heads, cos, sin)


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate `[s, b, g, heads, d]` by its position."""
    if torch.compiler.is_compiling():
        (cos, sin), half = rotary, rotary[0].shape[-1]
        first, second = x[..., :half], x[..., half : 2 * half]
        return torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]), -1)
    return _Rotate.apply(x, *rotary)


class _SplitQKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, q: int, cos: Tensor | None, sin: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.q, ctx.cos, ctx.sin = q, cos, sin
        parts = mixed[..., :q, :], mixed[..., q : q + 1, :], mixed[..., q + 1 :, :]
        query, key, value = (mixed.new_empty(part.shape) for part in parts)
        _rotate_into(query, parts[0], cos, sin)
        _rotate_into(key, parts[1], cos, sin)
        return query, key, value.copy_(parts[2])

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        q = ctx.q
        dmixed = dq.new_empty(*dq.shape[:3], q + 2, dq.shape[-1])
        _rotate_into(dmixed[..., :q, :], dq, ctx.cos, ctx.sin, inverse=True)
        _rotate_into(dmixed[..., q : q + 1, :], dk, ctx.cos, ctx.sin, inverse=True)
        dmixed[..., q + 1 :, :] = dv
        return dmixed, None, None, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.cos, ctx.sin = cos, sin
        return _rotate_into(x.new_empty(x.shape), x, cos, sin)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _rotate_into(dy.new_empty(dy.shape), dy, ctx.cos, ctx.sin, inverse=True), None, None


def _rotate_into(out: Tensor, x: Tensor, cos: Tensor | None, sin: Tensor | None, inverse: bool = False) -> Tensor:
    """out = x with its leading 2 * cos.shape[-1] elements rotated."""
    if cos is None or sin is None:
        return out.copy_(x)
    half, sign = cos.shape[-1], -1 if inverse else 1
    first, second = x[..., :half], x[..., half : 2 * half]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out[..., half : 2 * half]).addcmul_(first, sin, value=sign)
    if 2 * half < x.shape[-1]:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out

"""ALiBi: a slope per head, by which scores decrease with the distance (Press et al. 2022)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron.core.arithmetic import even_range
from megatron.core.transformer.transformer_config import TransformerConfig


def make_slopes(config: TransformerConfig, part_index: int, num_parts: int) -> Tensor:
    """Return the slopes of one of `num_parts` equal parts of the heads."""
    num_heads = config.num_attention_heads
    start, stop = even_range(num_heads, part_index, num_parts)
    all_slopes = compute_slopes(num_heads)
    if config.scale_alibi:
        all_slopes = all_slopes * config.score_scale
    return all_slopes[start:stop]


def compute_slopes(num_heads: int) -> Tensor:
    """Return the slope of each head (Press et al. 2022), fp32.

    They are powers of 2^(-8/n) for n heads. If n is not a power of 2, the slopes of the next
    smaller power are followed by every other slope of the next larger one.
    """
    # Slopes of the largest power of 2 up to n
    power = 2 ** math.floor(math.log2(num_heads))
    exponents = torch.arange(1, power + 1, dtype=torch.float64)
    ratio = -8.0 / power
    slopes = 2.0 ** (ratio * exponents)

    # Every other slope of twice as many heads, for the remaining heads
    num_extra = num_heads - power
    extra_exponents = torch.arange(1, 2 * num_extra + 1, 2, dtype=torch.float64)
    extra_ratio = -4.0 / power
    extra_slopes = 2.0 ** (extra_ratio * extra_exponents)
    return torch.cat((slopes, extra_slopes)).float()

"""Attention in a longer context than that of pretraining: YaRN, LongRoPE, Llama 3.1 and 4."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron.core.parallel_state import Axis
from megatron.core.transformer.placement import compute_local_positions
from megatron.core.transformer.transformer_config import TransformerConfig


def scale_by_yarn(frequencies: Tensor, rotated: int, config: TransformerConfig) -> Tensor:
    """Scale frequencies by YaRN (Peng et al. 2023, "NTK-by-parts").

    Long wavelengths are stretched by the factor, short ones are unchanged, with a linear ramp
    between them. The ramp runs over the indices of the pairs, from the one that turns beta_fast
    times in the original context to the one that turns beta_slow times.
    """

    def find_pair(turns: float) -> float:
        """Return the (fractional) index of the pair with this number of turns."""
        # Positions per radian: base^(2 i / rotated) for pair i
        length = config.original_max_position_embeddings
        wavelength = length / (2 * math.pi * turns)
        return rotated * math.log(wavelength) / (2 * math.log(config.rotary_base))

    # Ends of the ramp
    low = find_pair(config.beta_fast)
    high = find_pair(config.beta_slow)
    if config.yarn_correction_range_round_to_int:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, rotated - 1)
    length = high - low
    if length == 0:
        length = 0.001  # a step instead of a ramp

    # Share of the unchanged frequency of each pair: 1 before the ramp, 0 after it
    pairs = torch.arange(rotated // 2, dtype=torch.float32)
    ramp = (pairs - low) / length
    unchanged = 1.0 - ramp.clamp(0.0, 1.0)
    scaled = (1 - unchanged) * frequencies / config.rotary_scaling_factor
    return unchanged * frequencies + scaled


def compute_yarn_mscale(config: TransformerConfig, mscale: float) -> float:
    """Return YaRN's factor of queries and keys in a longer context."""
    factor = config.rotary_scaling_factor
    if factor <= 1:
        return 1.0
    return 0.1 * mscale * math.log(factor) + 1.0


def compute_longrope_factor(config: TransformerConfig) -> float:
    """Return LongRoPE's factor of queries and keys, for sequences of any length."""
    factor = config.rotary_scaling_factor
    if factor <= 1:
        return 1.0
    original_length = config.original_max_position_embeddings
    ratio = math.log(factor) / math.log(original_length)
    return math.sqrt(1 + ratio)


def scale_as_llama3(frequencies: Tensor, config: TransformerConfig) -> Tensor:
    """Scale frequencies as Llama 3.1 does.

    Long wavelengths are stretched by the factor, short ones are unchanged, those between are
    interpolated.
    """
    low = config.rope_low_freq_factor
    high = config.rope_high_freq_factor
    # Rotations of each pair within the original context
    length = config.rope_original_max_position_embeddings
    turns = length * frequencies / (2 * math.pi)
    ramp = (turns - low) / (high - low)
    unchanged = ramp.clamp(0.0, 1.0)
    scaled = (1 - unchanged) * frequencies / config.rope_scaling_factor
    return unchanged * frequencies + scaled


class QueryScales:
    """Factors of queries by their position (Llama 4), kept per length, dtype and device.

    A rank has a part of each sequence if `cp` has more than one rank.
    """

    def __init__(self, config: TransformerConfig, cp: Axis) -> None:
        self._cp = cp
        self._rate = config.query_length_scaling
        self._original_length = config.original_max_position_embeddings
        self._tables: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

    def __call__(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the factors of this rank's `length` positions, `[s, 1, 1, 1, 1]`."""
        key = (length, dtype, device)
        if key not in self._tables:
            cp = self._cp
            whole_length = length * cp.size
            positions = compute_local_positions(whole_length, cp.rank, cp.size)  # [s]
            # The factor grows with the number of original contexts before a position.
            contexts = torch.floor(positions / self._original_length)
            scales = 1 + self._rate * torch.log1p(contexts)
            scales = scales.view(length, 1, 1, 1, 1)
            self._tables[key] = scales.to(device, dtype)
        return self._tables[key]

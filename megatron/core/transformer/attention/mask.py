"""What each query may see: causal order, a sliding window, documents, and ALiBi's distances."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron.core.parallel_state import Axis
from megatron.core.transformer.attention.kernels import Document
from megatron.core.transformer.placement import local_positions
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import even_range


def alibi_slopes(num_heads: int) -> Tensor:
    """Slope of every head (Press et al. 2022): powers of 2^(-8/n), with every other of 2n's when n is no power of 2."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = 2.0 ** (-8.0 / power * torch.arange(1, power + 1, dtype=torch.float64))
    extra = 2.0 ** (-4.0 / power * torch.arange(1, 2 * (num_heads - power) + 1, 2, dtype=torch.float64))
    return torch.cat((slopes, extra)).float()


class AttentionMask:
    """The `attn_mask` of scaled_dot_product_attention; None means plain causal order, which needs no mask at all."""

    def __init__(self, config: TransformerConfig, heads_over: tuple[int, int], window: tuple[int, int] | None) -> None:
        """`heads_over`: which part of the heads is here, and of how many; `window`: the layer's."""
        self.window = window
        self.slopes = None
        if config.position_embedding_type == "alibi":
            start, stop = even_range(config.num_attention_heads, *heads_over)
            self.slopes = alibi_slopes(config.num_attention_heads)[start:stop]
        self._kept: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}
        self._parts: tuple[Tensor, tuple[Document, ...]] | None = None
        self._kept_blocks: dict[tuple[int, int, torch.dtype, torch.device], Tensor | None] = {}

    @property
    def is_causal(self) -> bool:
        """Whether plain causal order is all that does not depend on the data."""
        return self.window is None and self.slopes is None

    def parts(self, documents: Tensor) -> tuple[Document, ...]:
        """Where the documents of `[b, s]` lie. The layers of a micro batch ask one after the other, for one answer."""
        if self._parts is None or self._parts[0] is not documents:
            found = []
            for sample, row in enumerate(documents.cpu()):  # no copy of what is on the host, as a run has it
                stop = 0
                for length in torch.unique_consecutive(row, return_counts=True)[1].tolist():
                    start, stop = stop, stop + length
                    found.append((slice(sample, sample + 1), slice(None), slice(start, stop)))
            self._parts = documents, tuple(found)
        return self._parts[1]

    def __call__(
        self, length: int, documents: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> Tensor | None:
        """`documents` `[b, s]`, if any: a token sees those of the same number.

        Returns a bool mask (True: visible) or an additive one in `dtype`, broadcastable to `[b, heads, s, s]`.
        """
        if documents is None and self.is_causal:
            return None
        key = (length, dtype, device)
        if key not in self._kept:
            positions = torch.arange(length)
            self._kept[key] = self._fixed(positions, positions, dtype).to(device)
        fixed = self._kept[key]
        if documents is None:
            return fixed
        documents = documents.to(device, non_blocking=True)
        others = _others(documents, documents)
        return fixed & ~others if fixed.dtype == torch.bool else fixed.masked_fill(others, -torch.inf)

    def block(
        self, length: int, cp: Axis, source: int, documents: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> Tensor | None:
        """Additive mask in `dtype` of this rank's queries and the keys of rank `source`, of sequences of `length`.

        `documents` are of whole sequences. None if no query sees any of the keys. What is forbidden is finite: a
        query that sees nothing of a block then has a log-sum-exp there, which weighs nothing against any other.
        """
        forbidden = torch.finfo(dtype).min / 2
        rows, columns = (local_positions(length, rank, cp.size) for rank in (cp.rank, source))
        key = (length, source, dtype, device)
        if key not in self._kept_blocks:
            fixed = self._fixed(rows, columns, dtype)
            if fixed.dtype == torch.bool:
                seen = fixed.any()
                fixed = torch.zeros(1, 1, *fixed.shape, dtype=dtype).masked_fill(~fixed, forbidden)
            else:
                seen = fixed.isfinite().any()
                fixed = fixed.clamp(min=forbidden)
            self._kept_blocks[key] = fixed.to(device) if seen else None
        kept = self._kept_blocks[key]
        if documents is None or kept is None:
            return kept
        parts = (documents[:, positions.to(documents.device)] for positions in (rows, columns))
        return kept.masked_fill(_others(*(part.to(device, non_blocking=True) for part in parts)), forbidden)

    def _fixed(self, queries: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
        """The part that does not depend on the data, for queries and keys at these positions."""
        distance = queries.unsqueeze(1) - keys
        visible = distance >= 0
        if self.window is not None:
            visible &= distance <= self.window[0]
        if self.slopes is None:
            return visible
        # [1, heads/tp, s, s]: with fewer dimensions attention falls back to a kernel that keeps all probabilities
        bias = self.slopes.view(1, -1, 1, 1) * -distance.float()
        return bias.masked_fill(~visible, -torch.inf).to(dtype)


def _others(queries: Tensor, keys: Tensor) -> Tensor:
    """Where the documents of queries and keys are not the same: `[b, 1, queries, keys]`."""
    return (queries.unsqueeze(2) != keys.unsqueeze(1)).unsqueeze(1)

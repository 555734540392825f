"""Attention masks: causal order, sliding windows, documents, and the distances of ALiBi."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.transformer.attention.kernels import Document, Documents
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.wings import resolve

_MAKE_SLOPES = "megatron.core.transformer.attention.alibi:make_slopes"


class AttentionMask:
    """The `attn_mask` of scaled_dot_product_attention for one kind of layer.

    Masks that do not depend on the data are kept, one for each length, dtype and device.
    """

    def __init__(
        self,
        config: TransformerConfig,
        head_part: tuple[int, int],
        window: tuple[int, int] | None,
    ) -> None:
        """Initialize for part (index, number of parts) of the heads and the window of the layer."""
        self.window = window
        self.slopes: Tensor | None = None
        if config.position_embedding_type == "alibi":
            self.slopes = resolve(_MAKE_SLOPES)(config, *head_part)

        # By length, dtype and device; those of chunks also by their distance
        self._static_masks: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}
        self._chunk_masks: dict[tuple[int, int, torch.dtype, torch.device], Tensor] = {}
        # The documents of the last micro-batch, for the layers after the first
        self._last_numbers: Tensor | None = None
        self._last_documents: Documents | None = None

    @property
    def is_causal(self) -> bool:
        """Return whether causal order is the only restriction besides documents."""
        return self.window is None and self.slopes is None

    def find_documents(self, document_ids: Tensor, device: torch.device) -> Documents:
        """Return the documents of a micro-batch from `[b, s]` numbers of documents.

        The result is kept for the next layers, which have the same micro-batch.
        """
        if self._last_documents is None or self._last_numbers is not document_ids:
            self._last_numbers = document_ids
            self._last_documents = find_documents(document_ids, device)
        return self._last_documents

    def __call__(
        self,
        length: int,
        documents: Tensor | None,  # [b, s]
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor | None:
        """Return the mask of whole sequences, broadcastable to `[b, heads, s, s]`.

        It is boolean (True: visible), or in `dtype` and added to the scores. None means plain
        causal order, which does not need a mask. A token attends to tokens with the same number
        in `documents`.
        """
        if documents is None and self.is_causal:
            return None

        # The mask without documents, which is made once per length and kept
        key = (length, dtype, device)
        if key not in self._static_masks:
            positions = torch.arange(length)
            static_mask = self._make_static_mask(positions, positions, dtype)
            self._static_masks[key] = static_mask.to(device)
        mask = self._static_masks[key]
        if documents is None:
            return mask

        # Documents, which differ in every batch: hide the positions of other ones.
        documents = documents.to(device, non_blocking=True)
        is_foreign = _compare_documents(documents, documents)
        if mask.dtype == torch.bool:
            return mask & ~is_foreign
        return mask.masked_fill(is_foreign, -torch.inf)

    def make_chunk_mask(
        self, length: int, num_chunks: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return the additive mask of a chunk of queries and the keys `num_chunks` chunks before.

        A chunk has `length` positions, and a mask with an own chunk is that of a whole sequence.
        """
        key = (length, num_chunks, dtype, device)
        if key not in self._chunk_masks:
            columns = torch.arange(length)
            rows = columns + num_chunks * length
            mask = self._make_static_mask(rows, columns, dtype)
            if mask.dtype == torch.bool:
                visible_scores = torch.zeros(1, 1, *mask.shape, dtype=dtype)
                mask = visible_scores.masked_fill(~mask, -torch.inf)
            # Finite, so that a row without any visible key has no weight instead of NaN.
            smallest = torch.finfo(dtype).min / 2
            self._chunk_masks[key] = mask.clamp(min=smallest).to(device)
        return self._chunk_masks[key]

    def _make_static_mask(self, queries: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the mask without documents of queries and keys at these positions.

        It is boolean (True: visible) `[queries, keys]`, with ALiBi additive in `dtype`.
        """
        distance = queries.unsqueeze(1) - keys  # [queries, keys]
        visible = distance >= 0
        if self.window is not None:
            visible &= distance <= self.window[0]
        if self.slopes is None:
            return visible
        # [1, heads/tp, s, s]: with fewer dimensions SDPA falls back to a kernel that keeps all
        # probabilities.
        slopes = self.slopes.view(1, -1, 1, 1)
        bias = slopes * -distance.float()
        return bias.masked_fill(~visible, -torch.inf).to(dtype)


def find_documents(document_ids: Tensor, device: torch.device) -> Documents:
    """Return all documents of `[b, s]` numbers: consecutive positions with the same number."""
    slices: list[Document] = []
    offsets = [0]
    max_length = 0
    all_heads = slice(None)
    # `cpu()` does not copy in a training run, where the numbers are in host memory.
    for index, row in enumerate(document_ids.cpu()):
        sample = slice(index, index + 1)
        _, lengths = torch.unique_consecutive(row, return_counts=True)
        start = 0  # of the document in its sample
        for length in lengths.tolist():
            stop = start + length
            positions = slice(start, stop)
            slices.append((sample, all_heads, positions))
            offsets.append(offsets[-1] + length)
            max_length = max(max_length, length)
            start = stop

    # Pinned memory, so that the copy does not wait for the device.
    is_cuda = device.type == "cuda"
    host_offsets = torch.tensor(offsets, dtype=torch.int32, pin_memory=is_cuda)
    device_offsets = host_offsets.to(device, non_blocking=True)
    return Documents(tuple(slices), device_offsets, max_length)


def _compare_documents(queries: Tensor, keys: Tensor) -> Tensor:
    """Return whether queries and keys are of different documents: `[b, 1, queries, keys]`."""
    is_foreign = queries.unsqueeze(2) != keys.unsqueeze(1)  # [b, queries, keys]
    return is_foreign.unsqueeze(1)

"""Items of a save: the live tensors whose rows become the shards of a checkpoint."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron.core.dist_checkpointing.background import SLOT_SIZE, Slot
from megatron.core.dist_checkpointing.format.checksums import (
    BLOCK_SIZE,
    hash_blocks,
    split_at_blocks,
)
from megatron.core.dist_checkpointing.format.hashed_copy import copy_and_hash
from megatron.core.dist_checkpointing.mapping import (
    ShardedStateDict,
    ShardedTensor,
    find_row_axis,
    locate_rows,
    narrow,
    to_absolute,
    to_relative,
)
from megatron.core.dist_checkpointing.planning.rank_plan import WriteItem


class LiveItem:
    """The raw data of an item in one save: a contiguous live tensor, or rows that are read.

    The elements are converted to the dtype of the item while they are copied, in the background. A
    `scale`, a tensor of one element, is multiplied with them.
    """

    def __init__(self, item: WriteItem, entry: ShardedTensor) -> None:
        self.item = item
        self.scale = entry.scale
        self._read = entry.read
        self._views: dict[Any, torch.Tensor] = {}
        self.tensor: torch.Tensor | None = None  # kept alive until the copy is done
        if entry.read is None:
            self.tensor, is_view = _select_rows(entry, item)
            self._version = _version_of(self.tensor)
            if is_view:  # views of a temporary copy do not serve for the next save
                self._views = entry.derived

    @property
    def is_on_device(self) -> bool:
        return self.tensor is not None and self.tensor.device.type != "cpu"

    @property
    def is_converted(self) -> bool:
        """Return whether the checkpoint stores another dtype than that of the tensor."""
        return self.tensor is not None and self.tensor.dtype != self.item.dtype

    def was_modified(self) -> bool:
        """Return whether an operation has changed the tensor in place since the save began."""
        return self.tensor is not None and _version_of(self.tensor) != self._version

    def select(self, slot: Slot, at: int, data: range) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the elements of a slot from byte `at` on, and the elements to copy to them.

        `data` is the range of bytes of the item.
        """
        end = at + len(data)
        target = slot.tensor[at:end]
        # Bytes are copied as they are, elements of another dtype are cast.
        if self.is_converted:
            target = target.view(self.item.dtype)
        return target, self._select_elements(data, target.dtype)

    def _select_elements(self, data: range, dtype: torch.dtype) -> torch.Tensor:
        """Return a view of a range of bytes; views are kept for the next save."""
        assert self.tensor is not None
        item = self.item
        key = (item.box, item.offset, item.shape, data)
        view = self._views.get(key)
        if view is None:
            content = self.tensor.detach().reshape(-1)
            if not self.is_converted:
                content = content.view(torch.uint8)
            first = data.start // dtype.itemsize
            last = data.stop // dtype.itemsize
            view = content[first:last]
            self._views[key] = view
        return view

    def copy(self, slot: Slot, at: int, data: range) -> None:
        """Copy a range of bytes from host memory, or read it, to byte `at` of a slot."""
        if self.tensor is None:
            end = at + len(data)
            slot.tensor[at:end] = self._read_bytes(data)
        elif self.is_converted:
            target, content = self.select(slot, at, data)
            target.copy_(content)
            if self.scale is not None:
                target.mul_(self.scale)
        else:
            # memmove on addresses releases the interpreter's lock and starts no threads of torch's
            # own.
            source = self.tensor.data_ptr() + data.start
            ctypes.memmove(slot.address + at, source, len(data))

    def copy_and_hash(self, slot: Slot, at: int, data: range) -> bytes:
        """Copy whole blocks of checksums from host memory and return their digests."""
        assert self.tensor is not None
        if self.is_converted:
            self.copy(slot, at, data)
            end = at + len(data)
            return hash_blocks(slot.view[at:end])
        source = self.tensor.data_ptr() + data.start
        return copy_and_hash(slot.address + at, source, len(data))

    def split_at_blocks(self, at: int, data: range) -> Iterator[tuple[int, range]]:
        """Separate the whole blocks of checksums from the ends of a range of bytes.

        Yields (byte of the slot, bytes of the item). The blocks of a converted tensor are separate,
        so that each is hashed while it is in the processor's second-level cache. Data that is read
        remains whole: it is read in whole rows.
        """
        if self.tensor is None:
            yield at, data
            return
        max_blocks = SLOT_SIZE // BLOCK_SIZE
        if self.is_converted:
            max_blocks = 1
        for start, end in split_at_blocks(at, at + len(data), max_blocks):
            yield start, data[start - at : end - at]

    def _read_bytes(self, data: range) -> torch.Tensor:
        """Read a range of bytes, in whole rows."""
        assert self._read is not None
        item = self.item
        axis = find_row_axis(item.shape)
        row_bytes = item.nbytes
        if axis is not None:
            row_bytes //= item.shape[axis]
        # The range may begin and end in the middle of a row.
        first, skipped = divmod(data.start, row_bytes)
        last = -(-data.stop // row_bytes)
        offset, shape = locate_rows(item.shape, first, last - first)
        values = self._read(to_absolute(item.offset, offset), shape)
        content = values.contiguous().view(-1).view(torch.uint8)
        return content[skipped : skipped + len(data)]


def _version_of(tensor: torch.Tensor) -> int:
    # Views share the counter of their base. Inference tensors have none.
    if tensor.is_inference():
        return 0
    return tensor._version


def bind_items(items: Sequence[WriteItem], state: ShardedStateDict) -> list[LiveItem]:
    """Return the data of all items, over the live tensors of `state`."""
    tensors: dict[str, ShardedTensor] = {}
    for entry in state.values():
        if isinstance(entry, ShardedTensor):
            tensors[entry.key] = entry
    return [LiveItem(item, tensors[item.key]) for item in items]


def _select_rows(entry: ShardedTensor, item: WriteItem) -> tuple[torch.Tensor, bool]:
    """Return a contiguous tensor with the values of an item, and whether it is a view.

    Views are kept with the entry.
    """
    key = (item.box, item.offset, item.shape)
    cached: torch.Tensor | None = entry.derived.get(key)
    if cached is not None:
        return cached, True
    # An empty box may have the same offset as the one after it, so take the last one.
    boxes = [box.tensor for box in entry.boxes if box.offset == item.box]
    # Usually a view: an item is contiguous in a row-major box. Any other box is copied now.
    offset = to_relative(item.offset, item.box)
    view = narrow(boxes[-1], offset, item.shape)
    tensor = view.contiguous()
    is_view = tensor is view
    if is_view:
        entry.derived[key] = tensor
    return tensor, is_view

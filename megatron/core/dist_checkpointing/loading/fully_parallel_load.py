"""Fully parallel loading: what all ranks of a group want is read once by one of them and exchanged.

Data-parallel replicas hold equal boxes of the weights. Each reads an equal share of these, in rows; then the shares are
all-gathered, a bounded number of bytes at a time. What only one rank wants (its optimizer shard) it reads by itself.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import xxhash

from megatron.core.dist_checkpointing.mapping import Box, Shape, ShardedStateDict, ShardedTensor, narrow, relative
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.dist_checkpointing.planning.planner import Item, LocalSpec, share_evenly

_ROUND_BYTES = 256 << 20  # the buffer of one round, all ranks together
_LARGEST_PART = 16 << 20
_DIGEST_SIZE = 16

BoxOf = dict[tuple[str, Shape], Box]


def share_reading(spec: LocalSpec, group: dist.ProcessGroup) -> list[list[Item]]:
    """Which rows of the boxes that every rank of `group` wants each rank reads; the same answer on every rank.

    A collective. Ranks exchange a digest for each box, not the boxes: a replica has tens of thousands of them.
    """
    # Sorted: the ranks must number their boxes alike, and each holds them in the order of its own model.
    boxes = sorted(
        Item(tensor.key, tensor.dtype, offset, offset, shape)
        for tensor in spec.tensors
        for offset, shape in tensor.boxes
    )
    digests = [xxhash.xxh3_128_digest(repr(item).encode()) for item in boxes]
    everywhere = set.intersection(
        *(
            {packed[i : i + _DIGEST_SIZE] for i in range(0, len(packed), _DIGEST_SIZE)}
            for packed in Coordination.of(group).all_gather(b"".join(digests))
        )
    )
    shared = [item for item, digest in zip(boxes, digests, strict=True) if digest in everywhere]
    return share_evenly(shared, dist.get_world_size(group))


def boxes_of(state: ShardedStateDict) -> BoxOf:
    tensors = [entry for entry in state.values() if isinstance(entry, ShardedTensor)]
    return {(entry.key, box.offset): box for entry in tensors for box in entry.boxes}


def view_of(item: Item, boxes: BoxOf) -> torch.Tensor:
    """The rows of the local box that `item` means."""
    return narrow(boxes[item.key, item.box].tensor.detach(), relative(item.offset, item.box), item.shape)


def all_gather_shares(shares: list[list[Item]], boxes: BoxOf, group: dist.ProcessGroup | None) -> None:
    """Every rank has read its share into its boxes; afterwards every rank has all of them. A collective of `group`."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    streams = [_Stream([view_of(item, boxes) for item in share]) for share in shares]
    longest = max(stream.nbytes for stream in streams)
    part = max(1, min(longest, _LARGEST_PART, _ROUND_BYTES // size))
    mine = torch.empty(part, dtype=torch.uint8, device=device)
    received = torch.empty(size, part, dtype=torch.uint8, device=device)
    # Rounds of bounded size: gathering whole shares at once would need the replicas' memory a second time.
    for start in range(0, longest, part):
        streams[rank].read(start, mine)
        dist.all_gather(list(received.unbind()), mine, group=group)
        for other in range(size):
            if other != rank:
                streams[other].write(start, received[other])


class _Stream:
    """The bytes of several tensors as one sequence."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self.nbytes = sum(tensor.nbytes for tensor in tensors)

    def read(self, start: int, buffer: torch.Tensor) -> None:
        """Copy bytes from `start` on into `buffer`, as many as there are."""
        for tensor, inside, outside, count in self._overlaps(start, len(buffer)):
            flat = tensor.reshape(-1).view(torch.uint8)
            buffer[outside : outside + count] = flat[inside : inside + count]

    def write(self, start: int, buffer: torch.Tensor) -> None:
        """Fill the tensors' bytes from `start` on with `buffer`."""
        for tensor, inside, outside, count in self._overlaps(start, len(buffer)):
            flat = tensor.reshape(-1).view(torch.uint8)
            flat[inside : inside + count] = buffer[outside : outside + count]
            if not tensor.is_contiguous():  # then `flat` was a copy
                tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))

    def _overlaps(self, start: int, length: int) -> list[tuple[torch.Tensor, int, int, int]]:
        """(tensor, byte in it, byte of the window, count) for `length` bytes from `start` on."""
        result, position = [], 0
        for tensor in self._tensors:
            first, last = max(start, position), min(start + length, position + tensor.nbytes)
            if first < last:
                result.append((tensor, first - position, first - start, last - first))
            position += tensor.nbytes
        return result

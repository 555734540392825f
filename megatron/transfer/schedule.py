"""Schedule of a rank in a transfer of weights, and its execution.

A `TransferSchedule` lists copies and messages as data: it refers to regions of boxes by key and
index. Binding it to the tensors of a rank resolves the regions to views of memory once; a replay
only copies and sends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing import Box, ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.mapping import Extent, Shape, narrow, to_absolute
from megatron.core.dist_checkpointing.planning.collection import LocalSpec, TensorType, describe
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.transfer.sources import WeightSource, to_state

_ALIGNMENT = 16  # bytes, of the first element of a message

_Structure = Mapping[TensorType, tuple[Extent, ...]]  # boxes of a rank


class Region(NamedTuple):
    """Part of a box that a rank has: `box` is its index among the boxes of the tensor `key`."""

    key: str
    box: int
    offset: Shape  # in the box
    shape: Shape

    def narrow(self, offset: Shape, shape: Shape) -> Region:
        """Return a part of the region, at an offset from its beginning."""
        return Region(self.key, self.box, to_absolute(self.offset, offset), shape)


class Copy(NamedTuple):
    """Elements that a rank has in its source and needs in its target."""

    source: Region
    target: Region


class Item(NamedTuple):
    """Elements of a message, in the dtype in which they are sent."""

    region: Region
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.region.shape) * self.dtype.itemsize


class TransferMessage(NamedTuple):
    """Elements that are sent together: sender and receiver list them in the same order.

    Items with larger elements come first, so that all are aligned without padding.
    """

    peer: int  # rank in the group
    items: tuple[Item, ...]

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)

    @property
    def keys(self) -> list[str]:
        return [item.region.key for item in self.items]


class Round(NamedTuple):
    """Messages of a rank that are in flight at the same time, from and to different ranks."""

    sends: tuple[TransferMessage, ...]
    receives: tuple[TransferMessage, ...]

    @classmethod
    def of(cls, sends: dict[int, list[Item]], receives: dict[int, list[Item]]) -> Round:
        """Make a round of items by peer, which sender and receiver list in the same order."""
        return cls(_make_messages(sends), _make_messages(receives))


def _make_messages(items_by_peer: dict[int, list[Item]]) -> tuple[TransferMessage, ...]:
    """Return a message per peer."""
    messages = []
    for peer in sorted(items_by_peer):
        items = items_by_peer[peer]
        items.sort(key=lambda item: -item.dtype.itemsize)
        messages.append(TransferMessage(peer, tuple(items)))
    return tuple(messages)


@dataclass(frozen=True)
class TransferSchedule:
    """The part of one rank in a transfer. It can be pickled, and replayed any number of times.

    `source` and `target` are the structure of the tensors that the rank must pass.
    """

    rank: int
    copies: tuple[Copy, ...]
    rounds: tuple[Round, ...]
    bytes_by_rank: tuple[int, ...]
    """Bytes that each rank receives from other ranks: exactly those that it needs and lacks."""
    source: _Structure = field(default_factory=dict)
    target: _Structure = field(default_factory=dict)

    @property
    def bytes_moved(self) -> int:
        """Bytes that are sent from one rank to another, all ranks together."""
        return sum(self.bytes_by_rank)

    @property
    def bytes_received(self) -> int:
        """Bytes that this rank receives."""
        return self.bytes_by_rank[self.rank]

    @cached_property
    def bytes_sent(self) -> int:
        """Bytes that this rank sends."""
        return sum(message.nbytes for round in self.rounds for message in round.sends)

    def with_structure(self, has: LocalSpec, needs: LocalSpec) -> TransferSchedule:
        """Return the schedule with the structure of the tensors that it refers to, of this rank."""
        source_keys = set()
        target_keys = set()
        for copied in self.copies:
            source_keys.add(copied.source.key)
            target_keys.add(copied.target.key)
        for round in self.rounds:
            for message in round.sends:
                source_keys.update(message.keys)
            for message in round.receives:
                target_keys.update(message.keys)
        source = _select_tensors(has, source_keys)
        target = _select_tensors(needs, target_keys)
        return replace(self, source=source, target=target)

    def bind(
        self,
        source: WeightSource | None,
        target: ShardedStateDict | None,
        group: dist.ProcessGroup | None = None,
    ) -> Transfer:
        """Return the transfer between these tensors. Not collective; None is a state without any.

        Raises ValueError for a tensor with other boxes than those that the schedule was made for.
        """
        return Transfer(self, to_state(source), target or {}, group)

    def run(
        self,
        source: WeightSource | None,
        target: ShardedStateDict | None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Fill `target` from the current values of `source`. Collective.

        Raises ValueError on all ranks if `bind` does on one of them. Repeated transfers are faster
        with one `bind` and many `Transfer.run`.
        """
        ranks = Coordination.of(group)
        transfer = ranks.run_on_all(lambda: self.bind(source, target, group))
        transfer.run()


def _select_tensors(spec: LocalSpec, keys: Collection[str]) -> _Structure:
    """Return the tensors of a rank with these keys."""
    boxes_of_tensor = zip(spec.tensors, spec.boxes, strict=True)
    return {tensor: boxes for tensor, boxes in boxes_of_tensor if tensor[0] in keys}


class Transfer:
    """A schedule bound to the tensors of this rank, with its buffers.

    It refers to memory, like the state dictionaries: values are those at the time of `run`.
    """

    def __init__(
        self,
        schedule: TransferSchedule,
        source: ShardedStateDict,
        target: ShardedStateDict,
        group: dist.ProcessGroup | None,
    ) -> None:
        ranks = Coordination.of(group)
        size = len(schedule.bytes_by_rank)
        if (ranks.rank, ranks.size) != (schedule.rank, size):
            raise ValueError(
                f"the schedule is that of rank {schedule.rank} of {size}, but this is rank "
                f"{ranks.rank} of {ranks.size}: pass the group of plan_transfer, and the schedule "
                "that it returned on this rank"
            )
        source_boxes = _find_boxes(source, schedule.source, "source")
        target_boxes = _find_boxes(target, schedule.target, "target")

        self._copies: list[_Copy] = []
        for source_region, target_region in schedule.copies:
            values = _SourceValues(source_boxes[source_region.key], source_region)
            self._copies.append(_Copy(values, _view_region(target_boxes, target_region)))

        # Two buffers of each kind: one is filled while the other one is in flight.
        device = _choose_device(ranks)
        sends = _make_buffers([round.sends for round in schedule.rounds], device)
        receives = _make_buffers([round.receives for round in schedule.rounds], device)
        self._rounds: list[_BoundRound] = []
        for index, round in enumerate(schedule.rounds):
            bound = _BoundRound()
            for message, content in _place_messages(round.sends, sends[index % 2]):
                bound.add_operation(dist.isend, content, message.peer, ranks)
                for region, view in _view_items(message, content):
                    values = _SourceValues(source_boxes[region.key], region)
                    bound.packing.append(_Copy(values, view))
            for message, content in _place_messages(round.receives, receives[index % 2]):
                bound.add_operation(dist.irecv, content, message.peer, ranks)
                for region, view in _view_items(message, content):
                    bound.unpacking.append((_view_region(target_boxes, region), view))
            self._rounds.append(bound)

    @torch.no_grad()
    def run(self) -> None:
        """Fill the target from the current values of the source. Collective."""
        previous: _BoundRound | None = None
        for round in self._rounds:
            round.start()
            if previous is not None:
                previous.finish()
            previous = round
        # The copies inside the rank overlap with the last round.
        for values, view in self._copies:
            view.copy_(values.read())
        if previous is not None:
            previous.finish()


_Boxes = tuple[ShardedTensor, list[Box]]


def _find_boxes(state: ShardedStateDict, structure: _Structure, name: str) -> dict[str, _Boxes]:
    """Return the entries that the schedule uses, by key, with their boxes.

    Raises ValueError if one is missing, or has another structure.
    """
    entries = {entry.key: entry for entry in state.values() if isinstance(entry, ShardedTensor)}
    boxes_by_key = {}
    for tensor, extents in structure.items():
        key, _, _ = tensor
        if key not in entries:
            raise ValueError(
                f"{key}: the {name} does not have it, but had it when the transfer was "
                "planned: plan it again"
            )
        entry = entries[key]
        current = describe({key: entry})
        if current.tensors != (tensor,) or current.boxes != (extents,):
            raise ValueError(
                f"{key}: the {name} has {_format(current.tensors[0], current.boxes[0])}, the "
                f"transfer was planned for {_format(tensor, extents)}: plan it again"
            )
        boxes_by_key[key] = (entry, [box for box in entry.boxes if 0 not in box.shape])
    return boxes_by_key


def _format(tensor: TensorType, extents: tuple[Extent, ...]) -> str:
    """Return shape, dtype and boxes of a tensor for a message."""
    _, global_shape, dtype = tensor
    boxes = ", ".join(f"{shape} at {offset}" for offset, shape in extents[:4])
    return f"boxes {boxes} of {global_shape} {dtype}"


def _view_region(boxes_by_key: dict[str, _Boxes], region: Region) -> torch.Tensor:
    """Return the memory of a region of the target."""
    _, boxes = boxes_by_key[region.key]
    return narrow(boxes[region.box].tensor.detach(), region.offset, region.shape)


class _SourceValues:
    """The values of a region of the source, as a checkpoint would contain them."""

    def __init__(self, boxes: _Boxes, region: Region) -> None:
        self._entry, tensor_boxes = boxes
        box = tensor_boxes[region.box]
        self._view = narrow(box.tensor.detach(), region.offset, region.shape)
        self._offset = to_absolute(box.offset, region.offset)

    def read(self) -> torch.Tensor:
        """Return the current values: a view of memory, unless they have to be read or cast."""
        entry = self._entry
        if entry.read is not None:
            return entry.read(self._offset, tuple(self._view.shape))
        values = self._view
        if entry.is_cast:
            values = values.to(entry.dtype)
        if entry.scale is not None:
            values = values * entry.scale
        return values


class _Copy(NamedTuple):
    """Values, and the memory to copy them to."""

    values: _SourceValues
    view: torch.Tensor


def _choose_device(ranks: Coordination) -> torch.device:
    """Return the device of the buffers: the one that the process group sends from."""
    if ranks.size > 1 and dist.get_backend(ranks.group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _make_buffers(
    rounds: list[tuple[TransferMessage, ...]], device: torch.device
) -> list[torch.Tensor]:
    """Return two buffers, each for the messages of any round."""
    sizes = [0]
    for messages in rounds:
        sizes.append(sum(_align(message.nbytes) for message in messages))
    num_buffers = min(2, len(rounds))
    return [torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in range(num_buffers)]


def _place_messages(
    messages: Sequence[TransferMessage], buffer: torch.Tensor
) -> Iterator[tuple[TransferMessage, torch.Tensor]]:
    """Yield each message with its part of the buffer."""
    start = 0
    for message in messages:
        yield message, buffer[start : start + message.nbytes]
        start += _align(message.nbytes)


def _view_items(
    message: TransferMessage, content: torch.Tensor
) -> Iterator[tuple[Region, torch.Tensor]]:
    """Yield each region of a message with its elements in the buffer."""
    start = 0
    for item in message.items:
        elements = content[start : start + item.nbytes].view(item.dtype)
        yield item.region, elements.view(item.region.shape)
        start += item.nbytes


def _align(nbytes: int) -> int:
    """Round up to the alignment of messages."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class _BoundRound:
    """The messages of a round, in buffers."""

    def __init__(self) -> None:
        self.packing: list[_Copy] = []
        self.unpacking: list[tuple[torch.Tensor, torch.Tensor]] = []  # (target, received)
        self._operations: list[dist.P2POp] = []
        self._works: list[dist.Work] = []

    def add_operation(
        self,
        operation: Callable[..., dist.Work | None],
        content: torch.Tensor,
        peer: int,
        ranks: Coordination,
    ) -> None:
        """Add a send or a receive of this part of a buffer."""
        if ranks.group is not None:
            peer = dist.get_global_rank(ranks.group, peer)
        self._operations.append(dist.P2POp(operation, content, peer, ranks.group))

    def start(self) -> None:
        """Pack the messages and begin to transmit them."""
        for values, view in self.packing:
            view.copy_(values.read())
        if self._operations:
            self._works = dist.batch_isend_irecv(self._operations)

    def finish(self) -> None:
        """Wait for the messages, and unpack those that have been received."""
        for work in self._works:
            work.wait()
        self._works = []
        for target, received in self.unpacking:
            target.copy_(received)

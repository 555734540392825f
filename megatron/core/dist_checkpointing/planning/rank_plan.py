"""The plan of a save on one rank: the items that it writes, and its files cut into chunks.

The position of every byte is planned once for all saves of one structure.
"""

from __future__ import annotations

import itertools
import math
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from megatron.core.dist_checkpointing.background import SLOT_SIZE
from megatron.core.dist_checkpointing.box_table import BoxTable
from megatron.core.dist_checkpointing.format.metadata_codec import MetadataEncoder
from megatron.core.dist_checkpointing.mapping import Shape, ShardedStateDict
from megatron.core.dist_checkpointing.planning.collection import (
    LocalSpec,
    PackedSpec,
    describe,
    pack,
)
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.dist_checkpointing.planning.save_plan import file_name, make_plan
from megatron.core.safe_files.errors import CheckpointError
from megatron.core.safe_files.torch_zip import ALIGNMENT, make_tensor_envelope


class WriteItem(NamedTuple):
    """Rows of a box of this rank on their way to a file: prefix, raw data and suffix.

    The suffix includes the padding, so that the next item begins at `end`. Prefix and suffix are
    constant: they are encoded once for all saves.
    """

    key: str
    dtype: torch.dtype
    box: Shape  # offset of the box that this rank has
    offset: Shape  # of the rows in the global tensor
    shape: Shape
    position: int  # byte of the file
    prefix: bytes
    suffix: bytes

    @property
    def nbytes(self) -> int:
        """Bytes of raw data."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        return self.position + len(self.prefix) + self.nbytes + len(self.suffix)


class DataFile(NamedTuple):
    """A file with tensors, and its items in the order of their positions."""

    name: str
    items: list[WriteItem]

    @property
    def size(self) -> int:
        return self.items[-1].end


class FileChunk(NamedTuple):
    """A part of a file that is staged in one slot."""

    file: int  # index in `RankPlan.files`
    offset: int  # byte of the file
    length: int  # bytes
    items: range  # indices in `RankPlan.items` of the items that overlap the chunk

    def list_parts(self, items: Sequence[WriteItem]) -> Iterator[tuple[int, int, bytes | range]]:
        """Yield the contents of the chunk in order: (byte of the slot, index of the item, content).

        The content is a range of bytes of the item's raw data, or constant bytes of its envelope.
        """
        end = self.offset + self.length
        for index in self.items:
            item = items[index]
            position = item.position
            for content in (item.prefix, range(item.nbytes), item.suffix):
                start = max(position, self.offset)
                stop = min(position + len(content), end)
                if start < stop:
                    content_slice = content[start - position : stop - position]
                    yield start - self.offset, index, content_slice
                position += len(content)


@dataclass
class RankPlan:
    """This rank's part of a plan, reused for every save.

    `nonce` is common to all ranks; `total_bytes` counts the tensors of all ranks. A rank has at
    most `files_per_rank` files with tensors; its objects are in a file of that number.
    """

    spec: LocalSpec
    files: list[DataFile]
    objects: list[str]  # keys of the objects that this rank writes
    nonce: str
    total_bytes: int
    files_per_rank: int
    metadata: MetadataEncoder | None  # on rank 0

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)

    @cached_property
    def items(self) -> list[WriteItem]:
        """The items of all files."""
        return list(itertools.chain.from_iterable(file.items for file in self.files))

    @cached_property
    def chunks(self) -> list[FileChunk]:
        """The chunks of all files, in the order of staging and writing."""
        return cut_chunks(self.files)


def make_data_files(spec: LocalSpec, items: BoxTable, rank: int) -> list[DataFile]:
    """Return the files that a rank writes. `items` are its part of a `SavePlan`."""
    # The plan numbers the boxes in the order of the spec.
    boxes = []
    for tensor, boxes_of_tensor in zip(spec.tensors, spec.boxes, strict=True):
        for offset, _ in boxes_of_tensor:
            boxes.append((tensor, offset))

    # Encode the envelope of each item, and collect the items of each file.
    items_of_file: dict[int, list[WriteItem]] = {}
    columns = (items.box, items.offset, items.shape, items.file, items.position)
    # Lists: single elements of an array are slow.
    for box, offset, shape, file, position in zip(*(c.tolist() for c in columns), strict=True):
        (key, global_shape, dtype), box_offset = boxes[box]
        # The arrays have the dimensions of the tensor that has the most.
        dims = len(global_shape)
        item_shape = tuple(shape[:dims])
        prefix, suffix = make_tensor_envelope(dtype, item_shape)
        item = WriteItem(
            key=key,
            dtype=dtype,
            box=box_offset,
            offset=tuple(offset[:dims]),
            shape=item_shape,
            position=position,
            prefix=prefix,
            suffix=suffix,
        )
        padding = bytes(-item.end % ALIGNMENT)
        item = item._replace(suffix=suffix + padding)
        items_of_file.setdefault(file, []).append(item)
    return [DataFile(file_name(rank, file), items_of_file[file]) for file in sorted(items_of_file)]


def cut_chunks(files: Sequence[DataFile]) -> list[FileChunk]:
    """Cut all files into chunks of a slot's size, in the order of staging and writing."""
    # Each file is cut on its own: a slot never contains parts of two files.
    chunks_of_files: list[list[FileChunk]] = []
    first_item = 0
    for index, file in enumerate(files):
        starts = [item.position for item in file.items]
        ends = [item.end for item in file.items]
        chunks = []
        for offset in range(0, file.size, SLOT_SIZE):
            length = min(SLOT_SIZE, file.size - offset)
            first = bisect_right(ends, offset)
            stop = bisect_left(starts, offset + length)
            items = range(first_item + first, first_item + stop)
            chunks.append(FileChunk(index, offset, length, items))
        chunks_of_files.append(chunks)
        first_item += len(file.items)

    # Interleave the files, so that each of them keeps a writer busy.
    interleaved = []
    for chunks_of_round in itertools.zip_longest(*chunks_of_files):
        interleaved += [chunk for chunk in chunks_of_round if chunk is not None]
    return interleaved


# ---- Planning by all ranks together, cached while their state is unchanged ----


class Planner:
    """Plans saves, and caches the plan while the structure of the state is unchanged on all ranks.

    This check is an all-reduce of one number per save; `assume_constant_structure` skips it.
    """

    def __init__(
        self,
        coordination: Coordination,
        fully_parallel: bool,
        workers: int,
        assume_constant_structure: bool,
    ) -> None:
        self._coordination = coordination
        self._fully_parallel = fully_parallel
        self._workers = workers
        self._assume_constant_structure = assume_constant_structure
        self._plan: RankPlan | None = None

    def plan_for(self, state: ShardedStateDict) -> RankPlan:
        """Return the plan for `state`. Collective.

        Raises CheckpointError on every rank if the state of any rank is inconsistent.
        """
        spec = _try_describe(state)
        plan = self._plan
        if plan is not None and self._assume_constant_structure:
            if spec != plan.spec:
                raise _make_structure_error(spec, plan.spec)
            return plan
        is_unchanged = plan is not None and spec == plan.spec
        if not self._coordination.all_true(is_unchanged):
            plan = self._plan_on_rank0(spec)
            self._plan = plan
        assert plan is not None
        return plan

    def _plan_on_rank0(self, spec: LocalSpec | CheckpointError) -> RankPlan:
        """Send the spec to rank 0, which plans for all ranks, and receive this rank's part."""
        metadata: MetadataEncoder | None = None  # on rank 0

        def plan(specs: list[PackedSpec | CheckpointError]) -> list[tuple[Any, ...]]:
            """Return (items, keys of objects, nonce, bytes of all ranks, files per rank) for each
            rank.
            """
            nonlocal metadata
            save_plan = make_plan(_select_valid(specs), self._fully_parallel, self._workers)
            metadata = MetadataEncoder(save_plan.build_metadata())
            nonce = secrets.token_hex(4)
            return [
                (items, objects, nonce, save_plan.nbytes, save_plan.workers)
                for items, objects in zip(save_plan.split_by_rank(), save_plan.objects, strict=True)
            ]

        # An error of this rank is sent like a spec: rank 0 reports those of all ranks together.
        sent = spec if isinstance(spec, CheckpointError) else pack(spec)
        answer = self._coordination.gather_compute_scatter(sent, plan)
        items, objects, nonce, total_bytes, files_per_rank = answer

        # Each rank encodes its own envelopes.
        assert isinstance(spec, LocalSpec)
        files = make_data_files(spec, items, self._coordination.rank)
        return RankPlan(spec, files, objects, nonce, total_bytes, files_per_rank, metadata)


def _select_valid(specs: Sequence[PackedSpec | CheckpointError]) -> list[PackedSpec]:
    """Return the specs. Raises CheckpointError if any rank has sent an error instead."""
    problems = []
    valid = []
    for rank, spec in enumerate(specs):
        if isinstance(spec, CheckpointError):
            problems.append(f"rank {rank}: {spec}")
        else:
            valid.append(spec)
    if problems:
        raise CheckpointError("\n".join(problems))
    return valid


def _try_describe(state: ShardedStateDict) -> LocalSpec | CheckpointError:
    """Return the structure of `state`, or the error if it is inconsistent.

    The error is not raised, because all ranks must take part in the collective.
    """
    try:
        return describe(state)
    except CheckpointError as error:
        return error


def _make_structure_error(spec: LocalSpec | CheckpointError, before: LocalSpec) -> CheckpointError:
    """Return an error that names the keys in which two structures differ."""
    if isinstance(spec, CheckpointError):
        return spec
    # Entries that are in one of the structures only
    tensors = set(zip(spec.tensors, spec.boxes, strict=True))
    tensors_before = set(zip(before.tensors, before.boxes, strict=True))
    changed_keys = set(spec.objects) ^ set(before.objects)
    for (key, _, _), _ in tensors ^ tensors_before:
        changed_keys.add(key)
    keys = ", ".join(sorted(changed_keys)[:10])
    return CheckpointError(
        f"assume_constant_structure: the structure has changed since the last save: {keys}"
    )

"""The position of every byte in all data files, planned once for all saves of one structure.

`__{rank}_{n}.distcp` for n < workers contain the tensors, `__{rank}_{workers}.distcp` the objects,
whose lengths may change from save to save.
"""

from __future__ import annotations

import itertools
import json
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from megatron.core.dist_checkpointing.background import SLOT_SIZE
from megatron.core.dist_checkpointing.format.metadata import (
    CheckpointMetadata,
    ChunkTable,
    Location,
    StoredTensor,
)
from megatron.core.dist_checkpointing.format.metadata_encoder import MetadataEncoder
from megatron.core.dist_checkpointing.format.schema import CheckpointError
from megatron.core.dist_checkpointing.format.torch_zip import (
    ALIGNMENT,
    make_tensor_envelope,
)
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.dist_checkpointing.planning.planner import (
    Item,
    LocalSpec,
    PackedSpec,
    RankPlan,
    SavePlan,
    TensorType,
    describe,
    make_plan,
    number_places,
    pack,
)


class PlacedItem(NamedTuple):
    """An item and its bytes in a file: prefix, raw data and suffix, from `position` on.

    The suffix includes the padding, so that the next item begins at `end`. Prefix and suffix are
    constant: they are encoded once for all saves.
    """

    item: Item
    position: int
    prefix: bytes
    suffix: bytes

    @property
    def data(self) -> int:
        return self.position + len(self.prefix)

    @property
    def data_end(self) -> int:
        return self.data + self.item.nbytes

    @property
    def end(self) -> int:
        return self.data_end + len(self.suffix)


def place_item(item: Item, position: int) -> PlacedItem:
    """Return `item` at `position` of its file."""
    prefix, suffix = make_tensor_envelope(item.dtype, item.shape)
    length = len(prefix) + item.nbytes + len(suffix)
    padding = -length % ALIGNMENT
    return PlacedItem(item, position, prefix, suffix + bytes(padding))


class FileLayout(NamedTuple):
    """A file and its items, in the order of their positions."""

    name: str
    items: list[PlacedItem]

    @property
    def size(self) -> int:
        return self.items[-1].end


@dataclass
class PlacedPlan:
    """A plan with the file (`rank * workers + n`), position and length of each segment."""

    plan: SavePlan
    workers: int
    file: np.ndarray
    position: np.ndarray
    length: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes of all files with tensors."""
        return int(_align(self.length).sum())

    def select_rank(self, rank: int) -> RankPlan:
        """Return the part of the plan for one rank."""
        segments = self.plan.segments
        # Lines are sorted by rank.
        start, stop = np.searchsorted(segments.rank, [rank, rank + 1])
        mine = slice(start, stop)
        first_file = rank * self.workers
        columns = (
            segments.box[mine],
            segments.first[mine],
            segments.count[mine],
            self.file[mine] - first_file,
            self.position[mine],
        )
        items = np.stack(columns, axis=1)
        return RankPlan(items, self.plan.objects[rank])

    def build_metadata(self) -> CheckpointMetadata:
        """Return the metadata of the tensors; objects are added once their lengths are known."""
        segments = self.plan.segments
        tensors = self.plan.tensors
        file_names, file = self._list_used_files()

        # Chunks are sorted by tensor, and row-major in each tensor.
        places = number_places(tensors, segments.tensor, segments.offset)
        order = np.argsort(places, kind="stable")
        tensor = segments.tensor[order]
        ends = np.searchsorted(tensor, np.arange(len(tensors) + 1))

        result = CheckpointMetadata()
        for number, (key, shape, dtype) in enumerate(tensors):
            dims = len(shape)
            start = ends[number]
            stop = ends[number + 1]
            lines = order[start:stop]
            table = ChunkTable(
                segments.offset[lines, :dims],
                segments.shape[lines, :dims],
                file_names,
                file[lines],
                self.position[lines],
                self.length[lines],
            )
            result.tensors[key] = StoredTensor(shape, dtype, table)
        return result

    def _list_used_files(self) -> tuple[tuple[str, ...], np.ndarray]:
        """Return the names of all files with tensors, and the index of each line's file in them."""
        is_used = np.bincount(self.file) > 0
        index_of_file = np.cumsum(is_used) - 1
        names = []
        for number in np.flatnonzero(is_used).tolist():
            rank, number_of_rank = divmod(number, self.workers)
            names.append(file_name(rank, number_of_rank))
        return tuple(names), index_of_file[self.file]


def file_name(rank: int, number: int) -> str:
    """Return the name of a file of a rank, as torch DCP chooses it."""
    return f"__{rank}_{number}.distcp"


def place_items(plan: SavePlan, workers: int) -> PlacedPlan:
    """Spread the items of every rank over at most `workers` files of about equal size."""
    rank = plan.segments.rank
    nbytes = plan.segments.nbytes
    file_of_rank = _spread_over_files(rank, nbytes, workers)
    file = rank * workers + file_of_rank
    length = nbytes + _compute_envelope_sizes(plan)

    # Sort the items by file, and add up their lengths over all files.
    order = np.argsort(file, kind="stable")
    aligned = _align(length)
    ends = np.cumsum(aligned[order])
    begins = np.concatenate([[0], ends[:-1]])

    # A position is that sum minus the sum where the file begins.
    is_first = np.diff(file[order], prepend=-1)
    first_items = np.flatnonzero(is_first)
    num_items = np.diff(first_items, append=len(order))  # of each file
    begin_of_file = np.repeat(begins[first_items], num_items)
    position = np.empty_like(ends)
    position[order] = begins - begin_of_file
    return PlacedPlan(plan, workers, file, position, length)


def _spread_over_files(rank: np.ndarray, nbytes: np.ndarray, workers: int) -> np.ndarray:
    """Return the file of each item: largest items first, each into its rank's smallest file.

    The items are sorted by rank. The loop runs over turns: in each turn every rank places one item,
    so that the number of iterations does not grow with the number of ranks.
    """
    # The turn of an item is its index among the items of its rank, by decreasing size.
    by_size = np.lexsort((-nbytes, rank))
    first_of_rank = np.searchsorted(rank, rank)  # [items]
    turn = np.empty_like(first_of_rank)
    turn[by_size] = np.arange(len(rank)) - first_of_rank[by_size]

    # The items of turn t are `in_turn[ends[t] : ends[t + 1]]`.
    in_turn = np.argsort(turn, kind="stable")
    num_turns = turn.max(initial=-1) + 1
    ends = np.searchsorted(turn[in_turn], np.arange(num_turns + 1))

    num_ranks = rank.max(initial=-1) + 1
    sizes = np.zeros((num_ranks, workers), dtype=np.int64)  # bytes of each file so far
    file = np.zeros_like(rank)
    for start, stop in itertools.pairwise(ends):
        items = in_turn[start:stop]
        ranks = rank[items]
        sizes_of_ranks = sizes[ranks]
        smallest = sizes_of_ranks.argmin(axis=1)
        file[items] = smallest
        # 1024 bytes are about an envelope: many small items fill a file, too.
        sizes[ranks, smallest] += nbytes[items] + 1024
    return file


def _compute_envelope_sizes(plan: SavePlan) -> np.ndarray:
    """Return the bytes around the raw data of each item, which depend on dtype and shape.

    Millions of items have few combinations of dtype and shape: one envelope is made for each.
    """
    # Number the combinations: items with the same `kind` agree in all properties so far.
    tensor = plan.segments.tensor
    kind = _number_tensor_kinds(plan.tensors)[tensor]  # [items]
    for extent in plan.segments.shape.T:
        kind = _combine_numbers(kind, extent)

    # Make one envelope per kind.
    _, examples, kind = np.unique(kind, return_index=True, return_inverse=True)
    sizes = []
    for line in examples.tolist():
        _, global_shape, dtype = plan.tensors[tensor[line]]
        dims = len(global_shape)
        shape = tuple(plan.segments.shape[line, :dims].tolist())
        prefix, suffix = make_tensor_envelope(dtype, shape)
        sizes.append(len(prefix) + len(suffix))
    size_of_kind = np.array(sizes, dtype=np.int64)
    size: np.ndarray = size_of_kind[kind]
    return size


def _number_tensor_kinds(tensors: Sequence[TensorType]) -> np.ndarray:
    """Return a number for each tensor that is the same for equal dtype and dimensions."""
    dtypes: dict[torch.dtype, int] = {}
    numbers = []
    dims = []
    for _, shape, dtype in tensors:
        number = dtypes.setdefault(dtype, len(dtypes))
        numbers.append(number)
        dims.append(len(shape))
    return _combine_numbers(np.array(numbers, dtype=np.int64), np.array(dims, dtype=np.int64))


def _combine_numbers(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return a number for each pair of numbers, the same for equal pairs."""
    # Numbers that could become too large are replaced by smaller ones, which needs a sort.
    if _count_numbers(first) * _count_numbers(second) >= 1 << 63:
        _, first = np.unique(first, return_inverse=True)
        _, second = np.unique(second, return_inverse=True)
    return first * _count_numbers(second) + second


def _count_numbers(numbers: np.ndarray) -> int:
    """Return one more than the largest number."""
    return int(numbers.max(initial=0)) + 1


def _align(length: np.ndarray) -> np.ndarray:
    """Round lengths up to the alignment of items in a file."""
    return -(-length // ALIGNMENT) * ALIGNMENT


def build_file_layouts(spec: LocalSpec, plan: RankPlan, rank: int) -> list[FileLayout]:
    """Return the files that a rank writes."""
    # Boxes by their number in the plan: in the order of the spec
    boxes: list[Item] = []
    for tensor in spec.tensors:
        for offset, shape in tensor.boxes:
            boxes.append(Item(tensor.key, tensor.dtype, offset, offset, shape))

    items_of_file: dict[int, list[PlacedItem]] = {}
    for box, first, count, file, position in plan.items.tolist():
        item = boxes[box].select_rows(first, count)
        items = items_of_file.setdefault(file, [])
        items.append(place_item(item, position))

    layouts = []
    for file, items in sorted(items_of_file.items()):
        name = file_name(rank, file)
        layouts.append(FileLayout(name, items))
    return layouts


class SourceRange(NamedTuple):
    """`length` bytes of source number `source`, from its byte `start`, at byte `at` of the slot."""

    at: int
    source: int
    start: int
    length: int


class FileChunk(NamedTuple):
    """`length` bytes at `offset` of file number `file`: the content of one slot."""

    file: int
    offset: int
    length: int
    parts: list[SourceRange]


class FilePlan:
    """The files of one rank as chunks that are staged and written one by one.

    Source numbers: item number `i` (over all files) has prefix `3 i`, raw data `3 i + 1`, suffix
    `3 i + 2`.
    """

    def __init__(self, files: list[FileLayout]) -> None:
        self.files = files
        self.chunks = cut_chunks(files)
        self.items: list[Item] = []
        for file in files:
            for placed in file.items:
                self.items.append(placed.item)

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)


def cut_chunks(files: Sequence[FileLayout]) -> list[FileChunk]:
    """Cut all files into chunks of a slot's size, in the order of staging and writing."""
    # Each file is cut on its own: a slot never contains parts of two files.
    chunks_of_files: list[list[FileChunk]] = []
    source = 0
    for number, file in enumerate(files):
        chunks = []
        for offset in range(0, file.size, SLOT_SIZE):
            length = min(SLOT_SIZE, file.size - offset)
            chunks.append(FileChunk(number, offset, length, []))
        # An item is three sources: prefix, raw data and suffix.
        for placed in file.items:
            start = placed.position
            for end in (placed.data, placed.data_end, placed.end):
                _add_parts(chunks, source, start, end)
                start = end
                source += 1
        chunks_of_files.append(chunks)

    # Interleave the files, so that each of them keeps a writer busy.
    interleaved = []
    for chunks_of_round in itertools.zip_longest(*chunks_of_files):
        for chunk in chunks_of_round:
            if chunk is not None:
                interleaved.append(chunk)
    return interleaved


def _add_parts(chunks: list[FileChunk], source: int, start: int, end: int) -> None:
    """Add bytes `[start, end)` of a file, which are all of `source`, to their chunks."""
    position = start
    while position < end:
        chunk = chunks[position // SLOT_SIZE]
        chunk_end = chunk.offset + chunk.length
        part = SourceRange(
            at=position - chunk.offset,
            source=source,
            start=position - start,
            length=min(end, chunk_end) - position,
        )
        chunk.parts.append(part)
        position += part.length


class MetadataCache:
    """`.metadata` of a plan, on rank 0.

    The first save encodes the entries of tensors. Later ones only encode changed locations of
    objects and changed names of files.
    """

    def __init__(self, tensors: CheckpointMetadata) -> None:
        # Replaced by the encoder, which needs less memory, when the first save encodes it.
        self._tensors: CheckpointMetadata | None = tensors
        self._encoder: MetadataEncoder | None = None
        self._encoded: tuple[object, Sequence[bytes]] | None = None
        self._lock = threading.Lock()  # another thread may encode for a copy of the checkpoint

    def encode(
        self, objects: list[bytes], name_of: Callable[[str], str] = lambda name: name
    ) -> Sequence[bytes]:
        """Return the content of `.metadata`, in parts.

        `objects` are the lines of all ranks with the locations of their objects
        (`SaveBarrier.collect`). `name_of` renames the files of tensors; those in the lines have
        been renamed.
        """
        # `name_of` is known by its effect on an example.
        made_for = (objects, name_of("a.b"))
        with self._lock:
            if self._encoded is not None:
                encoded_for, encoded = self._encoded
                if encoded_for == made_for:
                    return encoded
            if self._tensors is not None:
                self._encoder = MetadataEncoder(self._tensors)
                self._tensors = None
            assert self._encoder is not None
            files = tuple(map(name_of, self._encoder.files))
            encoded = self._encoder.encode(_read_locations(objects), files)
            self._encoded = (made_for, encoded)
            return encoded


def _read_locations(lines: list[bytes]) -> dict[str, Location]:
    """Return the locations of the objects in the lines of all ranks, by key."""
    locations: dict[str, Location] = {}
    for line in lines:
        _, location_of_key = json.loads(line)
        for key, location in location_of_key.items():
            locations[key] = Location(*location)
    return locations


@dataclass
class PreparedPlan:
    """This rank's part of a plan, reused for every save.

    `nonce` is common to all ranks; `total_bytes` counts the tensors of all ranks.
    """

    spec: LocalSpec
    objects: list[str]  # keys of the objects that this rank writes
    nonce: str
    total_bytes: int
    files: FilePlan
    metadata: MetadataCache | None  # on rank 0


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
        self._plan: PreparedPlan | None = None

    def plan_for(self, state: ShardedStateDict) -> PreparedPlan:
        """Return the plan for `state`. Collective.

        Raises CheckpointError on every rank if the state of any rank is inconsistent.
        """
        spec = _try_describe(state)
        plan = self._plan
        if plan is not None and self._assume_constant_structure:
            if spec != plan.spec:
                raise _structure_error(spec, plan.spec)
            return plan
        is_unchanged = plan is not None and spec == plan.spec
        if not self._coordination.all_true(is_unchanged):
            plan = self._plan_on_rank0(spec)
            self._plan = plan
        assert plan is not None
        return plan

    def _plan_on_rank0(self, spec: LocalSpec | CheckpointError) -> PreparedPlan:
        """Send the spec to rank 0, which plans for all ranks, and receive this rank's part."""
        metadata: MetadataCache | None = None  # on rank 0

        def plan(specs: list[PackedSpec | CheckpointError]) -> list[tuple[RankPlan, str, int]]:
            nonlocal metadata
            save_plan = make_plan(_select_valid(specs), self._fully_parallel)
            placed = place_items(save_plan, self._workers)
            metadata = MetadataCache(placed.build_metadata())
            nonce = secrets.token_hex(4)
            total_bytes = placed.nbytes
            results = []
            for rank in range(len(specs)):
                rank_plan = placed.select_rank(rank)
                results.append((rank_plan, nonce, total_bytes))
            return results

        packed = spec if isinstance(spec, CheckpointError) else pack(spec)
        mine, nonce, total = self._coordination.gather_compute_scatter(packed, plan)
        assert isinstance(spec, LocalSpec)
        layouts = build_file_layouts(spec, mine, self._coordination.rank)
        return PreparedPlan(
            spec=spec,
            objects=mine.objects,
            nonce=nonce,
            total_bytes=total,
            files=FilePlan(layouts),
            metadata=metadata,
        )


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
    """Return an error instead of raising it: all ranks must take part in the collective."""
    try:
        return describe(state)
    except CheckpointError as error:
        return error


def _structure_error(spec: LocalSpec | CheckpointError, before: LocalSpec) -> CheckpointError:
    if isinstance(spec, CheckpointError):
        return spec
    # Entries that are in one of the structures only
    changed_tensors = set(spec.tensors) ^ set(before.tensors)
    changed_keys = set(spec.objects) ^ set(before.objects)
    for tensor in changed_tensors:
        changed_keys.add(tensor.key)
    return CheckpointError(
        f"assume_constant_structure: the structure has changed since the last save: "
        f"{', '.join(sorted(changed_keys)[:10])}"
    )

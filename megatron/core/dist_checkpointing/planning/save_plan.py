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
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.dist_checkpointing.planning.items import Item
from megatron.core.dist_checkpointing.planning.places import number_places
from megatron.core.dist_checkpointing.planning.planner import RankPlan, SavePlan, make_plan
from megatron.core.dist_checkpointing.planning.structure import (
    LocalSpec,
    PackedSpec,
    TensorType,
    describe,
    pack,
)
from megatron.core.safe_files.errors import CheckpointError
from megatron.core.safe_files.torch_zip import ALIGNMENT, make_tensor_envelope

# Bytes of a typical envelope around raw data: many small items fill a file, too.
_TYPICAL_ENVELOPE = 1024


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
    padding = bytes(-length % ALIGNMENT)
    return PlacedItem(item, position, prefix, suffix + padding)


class FileLayout(NamedTuple):
    """A file and its items, in the order of their positions."""

    name: str
    items: list[PlacedItem]

    @property
    def size(self) -> int:
        return self.items[-1].end


@dataclass
class PlacedPlan:
    """A plan with the place of each segment in the data files. The arrays are [segments]."""

    plan: SavePlan
    workers: int  # files with tensors per rank
    file: np.ndarray  # file `n` of rank `r` has the number `r * workers + n`
    position: np.ndarray  # bytes from the beginning of the file
    length: np.ndarray  # bytes of the item: raw data and envelope, without padding

    @property
    def nbytes(self) -> int:
        """Bytes of all files with tensors."""
        padded = _align(self.length)
        return int(padded.sum())

    def select_rank(self, rank: int) -> RankPlan:
        """Return the part of the plan for one rank."""
        segments = self.plan.segments
        # Segments are sorted by rank.
        start, stop = np.searchsorted(segments.rank, [rank, rank + 1])
        lines = slice(start, stop)
        first_file = rank * self.workers
        columns = (
            segments.box[lines],
            segments.first[lines],
            segments.count[lines],
            self.file[lines] - first_file,
            self.position[lines],
        )
        items = np.stack(columns, axis=1)
        return RankPlan(items, self.plan.objects[rank])

    def build_metadata(self) -> CheckpointMetadata:
        """Return the metadata of the tensors; objects are added once their lengths are known."""
        segments = self.plan.segments
        tensors = self.plan.tensors
        file_names, file = self._list_used_files()

        # Sort the segments by tensor, and row-major in each tensor: the lines of tensor number `i`
        # are `order[ends[i] : ends[i + 1]]`.
        places = number_places(tensors, segments.tensor, segments.offset)
        order = np.argsort(places, kind="stable")
        sorted_tensor = segments.tensor[order]
        ends = np.searchsorted(sorted_tensor, np.arange(len(tensors) + 1))

        result = CheckpointMetadata()
        for number, (key, shape, dtype) in enumerate(tensors):
            start = ends[number]
            stop = ends[number + 1]
            lines = order[start:stop]
            dims = len(shape)
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
        """Return the names of all files with tensors, and the index of each segment's file in them.

        A rank may have fewer items than files.
        """
        num_segments = np.bincount(self.file)  # of each file
        is_used = num_segments > 0
        used_files = np.flatnonzero(is_used)
        names = []
        for file in used_files.tolist():
            rank, file_of_rank = divmod(file, self.workers)
            names.append(file_name(rank, file_of_rank))

        # The index of a used file is the number of used files before it.
        index_of_file = np.cumsum(is_used) - 1
        return tuple(names), index_of_file[self.file]


def file_name(rank: int, number: int) -> str:
    """Return the name of a file of a rank, as torch DCP chooses it."""
    return f"__{rank}_{number}.distcp"


def place_items(plan: SavePlan, workers: int) -> PlacedPlan:
    """Spread the items of every rank over at most `workers` files of about equal size."""
    # Choose the file of each item.
    rank = plan.segments.rank
    nbytes = plan.segments.nbytes
    file_of_rank = _spread_over_files(rank, nbytes, workers)
    file = rank * workers + file_of_rank

    # Sort the items by file, and place all files one after the other: `starts` are the positions
    # of the sorted items in the concatenation.
    length = nbytes + _compute_envelope_sizes(plan)
    order = np.argsort(file, kind="stable")
    sorted_file = file[order]
    sorted_length = _align(length)[order]
    ends = np.cumsum(sorted_length)
    starts = np.concatenate([[0], ends[:-1]])

    # The position in a file is that in the concatenation minus the start of the file.
    begins_file = np.diff(sorted_file, prepend=-1)
    first_items = np.flatnonzero(begins_file)
    num_items = np.diff(first_items, append=len(order))  # of each file
    start_of_file = np.repeat(starts[first_items], num_items)
    position = np.empty_like(ends)
    position[order] = starts - start_of_file
    return PlacedPlan(plan, workers, file, position, length)


def _spread_over_files(rank: np.ndarray, nbytes: np.ndarray, workers: int) -> np.ndarray:
    """Return the file of each item: largest items first, each into its rank's smallest file.

    `rank` and `nbytes` are [items], sorted by rank. The loop runs over turns: in each turn every
    rank places one item, so that the number of iterations does not grow with the number of ranks.
    """
    # Group the items by turn: those of turn t are `by_turn[ends[t] : ends[t + 1]]`.
    turn = _compute_turns(rank, nbytes)
    by_turn = np.argsort(turn, kind="stable")
    num_turns = turn.max(initial=-1) + 1
    ends = np.searchsorted(turn[by_turn], np.arange(num_turns + 1))

    # Place the items of one turn at a time.
    num_ranks = rank.max(initial=-1) + 1
    sizes = np.zeros((num_ranks, workers), dtype=np.int64)  # bytes of each file so far
    file = np.zeros_like(rank)
    for start, stop in itertools.pairwise(ends):
        items = by_turn[start:stop]
        ranks = rank[items]
        sizes_of_ranks = sizes[ranks]  # [items of the turn, workers]
        smallest = sizes_of_ranks.argmin(axis=1)
        file[items] = smallest
        sizes[ranks, smallest] += nbytes[items] + _TYPICAL_ENVELOPE
    return file


def _compute_turns(rank: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
    """Return the index of each item among the items of its rank, by decreasing size.

    The items are sorted by rank.
    """
    by_size = np.lexsort((-nbytes, rank))  # by rank, then by decreasing size
    first_of_rank = np.searchsorted(rank, rank)  # [items]
    turn = np.empty_like(first_of_rank)
    turn[by_size] = np.arange(len(rank)) - first_of_rank[by_size]
    return turn


def _compute_envelope_sizes(plan: SavePlan) -> np.ndarray:
    """Return the bytes around the raw data of each item, which depend on dtype and shape.

    Millions of items have few combinations of dtype and shape: one envelope is made for each.
    """
    # Number the combinations: items with the same `kind` agree in all properties so far.
    tensor = plan.segments.tensor  # [items]
    shapes = plan.segments.shape  # [items, dimensions]
    kind_of_tensor = _number_tensor_kinds(plan.tensors)
    kind = kind_of_tensor[tensor]  # [items]
    for extent in shapes.T:
        kind = _combine_numbers(kind, extent)

    # Make one envelope per kind, from the first item of the kind.
    _, examples, kind = np.unique(kind, return_index=True, return_inverse=True)
    sizes = []
    for item in examples.tolist():
        _, global_shape, dtype = plan.tensors[tensor[item]]
        dims = len(global_shape)
        shape = tuple(shapes[item, :dims].tolist())
        prefix, suffix = make_tensor_envelope(dtype, shape)
        sizes.append(len(prefix) + len(suffix))
    size_of_kind = np.array(sizes, dtype=np.int64)
    size: np.ndarray = size_of_kind[kind]
    return size


def _number_tensor_kinds(tensors: Sequence[TensorType]) -> np.ndarray:
    """Return a number for each tensor that is the same for equal dtype and dimensions."""
    number_of_dtype: dict[torch.dtype, int] = {}
    dtype_numbers = []
    dims = []
    for _, shape, dtype in tensors:
        next_number = len(number_of_dtype)
        number = number_of_dtype.setdefault(dtype, next_number)
        dtype_numbers.append(number)
        dims.append(len(shape))
    return _combine_numbers(
        np.array(dtype_numbers, dtype=np.int64),
        np.array(dims, dtype=np.int64),
    )


def _combine_numbers(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return a number for each pair of numbers, the same for equal pairs."""
    num_second = _count_numbers(second)
    num_pairs = _count_numbers(first) * num_second
    if num_pairs >= 1 << 63:
        # Replace the numbers by consecutive ones, so that the result fits. This needs a sort.
        _, first = np.unique(first, return_inverse=True)
        _, second = np.unique(second, return_inverse=True)
        num_second = _count_numbers(second)
    return first * num_second + second


def _count_numbers(numbers: np.ndarray) -> int:
    """Return one more than the largest number, or 1 for an empty array."""
    return int(numbers.max(initial=0)) + 1


def _align(length: np.ndarray) -> np.ndarray:
    """Round lengths up to the alignment of items in a file."""
    return -(-length // ALIGNMENT) * ALIGNMENT


def build_file_layouts(spec: LocalSpec, plan: RankPlan, rank: int) -> list[FileLayout]:
    """Return the files that a rank writes."""
    # The plan numbers the boxes in the order of the spec.
    boxes: list[Item] = []
    for tensor in spec.tensors:
        for offset, shape in tensor.boxes:
            whole = Item(tensor.key, tensor.dtype, box=offset, offset=offset, shape=shape)
            boxes.append(whole)

    # Encode the envelope of each item, and collect the items of each file.
    items_of_file: dict[int, list[PlacedItem]] = {}
    for box, first, count, file, position in plan.items.tolist():
        item = boxes[box].select_rows(first, count)
        placed = place_item(item, position)
        items_of_file.setdefault(file, []).append(placed)

    layouts = []
    for file in sorted(items_of_file):
        name = file_name(rank, file)
        layouts.append(FileLayout(name, items_of_file[file]))
    return layouts


class SourceRange(NamedTuple):
    """A part of a source that is copied to a slot."""

    at: int  # byte of the slot
    source: int  # number of the source, see `FilePlan`
    start: int  # byte of the source
    length: int  # bytes


class FileChunk(NamedTuple):
    """A part of a file that is staged in one slot."""

    file: int  # number of the file in `FilePlan.files`
    offset: int  # byte of the file
    length: int  # bytes
    parts: list[SourceRange]  # cover the chunk


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
        # Functions cannot be compared: `name_of` is identified by its effect on an example.
        inputs = (objects, name_of("a.b"))
        with self._lock:
            if self._encoded is not None:
                last_inputs, encoded = self._encoded
                if inputs == last_inputs:
                    return encoded

            # The first save encodes the entries of tensors.
            if self._tensors is not None:
                self._encoder = MetadataEncoder(self._tensors)
                self._tensors = None

            assert self._encoder is not None
            files = tuple(map(name_of, self._encoder.files))
            locations = _read_locations(objects)
            encoded = self._encoder.encode(locations, files)
            self._encoded = (inputs, encoded)
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
                raise _make_structure_error(spec, plan.spec)
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
            """Return (plan, nonce, bytes of all ranks) for each rank."""
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

        # An error of this rank is sent like a spec: rank 0 reports those of all ranks together.
        sent = spec if isinstance(spec, CheckpointError) else pack(spec)
        rank_plan, nonce, total_bytes = self._coordination.gather_compute_scatter(sent, plan)

        # Each rank encodes its own envelopes.
        assert isinstance(spec, LocalSpec)
        layouts = build_file_layouts(spec, rank_plan, self._coordination.rank)
        return PreparedPlan(
            spec=spec,
            objects=rank_plan.objects,
            nonce=nonce,
            total_bytes=total_bytes,
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
    changed_tensors = set(spec.tensors) ^ set(before.tensors)
    changed_keys = set(spec.objects) ^ set(before.objects)
    for tensor in changed_tensors:
        changed_keys.add(tensor.key)
    keys = ", ".join(sorted(changed_keys)[:10])
    return CheckpointError(
        f"assume_constant_structure: the structure has changed since the last save: {keys}"
    )

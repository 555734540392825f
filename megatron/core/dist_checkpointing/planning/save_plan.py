"""The position of every byte in all data files, planned once for all saves of one structure.

`__{rank}_{n}.distcp` for n < workers contain the tensors, `__{rank}_{workers}.distcp` the objects,
whose lengths may change from save to save.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from megatron.core.dist_checkpointing.background import SLOT_SIZE
from megatron.core.dist_checkpointing.format.metadata import (
    CheckpointMetadata,
    ChunkTable,
    Location,
    StoredTensor,
    rename_files,
)
from megatron.core.dist_checkpointing.format.metadata_index import encode_metadata
from megatron.core.dist_checkpointing.format.schema import CheckpointError
from megatron.core.dist_checkpointing.format.torch_zip import (
    ALIGNMENT,
    Envelope,
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
    describe,
    make_plan,
    number_places,
    pack,
)


class PlacedItem(NamedTuple):
    """An item at `position` of its file.

    Its raw bytes begin at `data`, and the next item may begin at `end`.
    """

    item: Item
    position: int

    @property
    def envelope(self) -> Envelope:
        return make_tensor_envelope(self.item.dtype, self.item.shape)

    @property
    def data(self) -> int:
        return self.position + len(self.envelope.prefix)

    @property
    def length(self) -> int:
        return sum(map(len, self.envelope)) + self.item.nbytes

    @property
    def end(self) -> int:
        return self.position + -(-self.length // ALIGNMENT) * ALIGNMENT


class FileLayout(NamedTuple):
    name: str
    items: list[PlacedItem]

    @property
    def size(self) -> int:
        return self.items[-1].end


@dataclass
class PlacedPlan:
    """A plan with the file (`rank * workers + n`), position and length of each line."""

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
        rows = self.plan.rows
        mine = slice(*np.searchsorted(rows.rank, [rank, rank + 1]))
        file = self.file[mine] - rank * self.workers
        columns = (rows.box[mine], rows.first[mine], rows.count[mine], file, self.position[mine])
        return RankPlan(np.stack(columns, axis=1), self.plan.objects[rank])

    def build_metadata(self) -> CheckpointMetadata:
        """Return the metadata of the tensors; objects are added once their lengths are known."""
        rows = self.plan.rows
        tensors = self.plan.tensors
        used, file = np.unique(self.file, return_inverse=True)
        files = tuple(
            file_name(number // self.workers, number % self.workers) for number in used.tolist()
        )
        # Chunks are sorted by tensor, and row-major in each tensor.
        order = np.argsort(number_places(tensors, rows.tensor, rows.offset), kind="stable")
        ends = np.searchsorted(rows.tensor[order], np.arange(len(tensors) + 1))
        result = CheckpointMetadata()
        for number, (key, shape, dtype) in enumerate(tensors):
            lines = order[ends[number] : ends[number + 1]]
            dims = len(shape)
            table = ChunkTable(
                rows.offset[lines, :dims],
                rows.shape[lines, :dims],
                files,
                file[lines],
                self.position[lines],
                self.length[lines],
            )
            result.tensors[key] = StoredTensor(shape, dtype, table)
        return result


def file_name(rank: int, number: int) -> str:
    return f"__{rank}_{number}.distcp"


def place_items(plan: SavePlan, workers: int) -> PlacedPlan:
    """Spread the items of every rank over at most `workers` files of about equal size."""
    rank = plan.rows.rank
    nbytes = plan.nbytes
    file = rank * workers + _spread_over_files(rank, nbytes, workers)
    length = nbytes + _compute_envelope_sizes(plan)
    # Positions are a running sum over all files, minus the position where each file begins.
    order = np.argsort(file, kind="stable")
    ends = np.cumsum(_align(length)[order])
    begins = np.concatenate([[0], ends[:-1]])
    new = np.flatnonzero(np.diff(file[order], prepend=-1))
    position = np.empty_like(ends)
    position[order] = begins - np.repeat(begins[new], np.diff(new, append=len(order)))
    return PlacedPlan(plan, workers, file, position, length)


def _spread_over_files(rank: np.ndarray, nbytes: np.ndarray, workers: int) -> np.ndarray:
    """Return the file of each item: largest items first, each into its rank's smallest file."""
    by_size = np.lexsort((-nbytes, rank))
    first = np.searchsorted(rank, rank)  # of the same rank
    turn = np.empty_like(first)
    turn[by_size] = np.arange(len(rank)) - first[by_size]
    in_turn = np.argsort(turn, kind="stable")
    ends = np.searchsorted(turn[in_turn], np.arange(turn.max(initial=-1) + 2))
    sizes = np.zeros((rank.max(initial=-1) + 1, workers), dtype=np.int64)
    file = np.zeros_like(rank)
    for start, stop in zip(ends[:-1], ends[1:], strict=True):  # one item of every rank at a time
        items = in_turn[start:stop]
        smallest = sizes[rank[items]].argmin(axis=1)
        file[items] = smallest
        # 1024 bytes are about an envelope: many small items fill a file, too.
        sizes[rank[items], smallest] += nbytes[items] + 1024
    return file


def _compute_envelope_sizes(plan: SavePlan) -> np.ndarray:
    """Return the bytes around the raw data of each item, which depend on dtype and shape."""
    dtypes = list(dict.fromkeys(dtype for _, _, dtype in plan.tensors))
    kinds = np.array(
        [[dtypes.index(dtype), len(shape)] for _, shape, dtype in plan.tensors], dtype=np.int64
    )
    kind = np.zeros(len(plan.rows.rank), dtype=np.int64)
    # Millions of items have few combinations of dtype and shape: one envelope is made for each.
    for column in (*kinds.reshape(-1, 2)[plan.rows.tensor].T, *plan.rows.shape.T):
        values, number = np.unique(column, return_inverse=True)
        kind = np.unique(kind * len(values) + number, return_inverse=True)[1]
    example = np.unique(kind, return_index=True)[1]
    sizes = []
    for line in example.tolist():
        _, shape, dtype = plan.tensors[plan.rows.tensor[line]]
        extent = tuple(plan.rows.shape[line, : len(shape)].tolist())
        sizes.append(sum(map(len, make_tensor_envelope(dtype, extent))))
    return np.array(sizes, dtype=np.int64)[kind]


def _align(length: np.ndarray) -> np.ndarray:
    return -(-length // ALIGNMENT) * ALIGNMENT


def build_file_layouts(spec: LocalSpec, plan: RankPlan, rank: int) -> list[FileLayout]:
    """Return the files that a rank writes."""
    boxes = [(tensor, extent) for tensor in spec.tensors for extent in tensor.boxes]
    files: dict[int, list[PlacedItem]] = {}
    for box, first, count, file, position in plan.items.tolist():
        tensor, (offset, shape) = boxes[box]
        item = Item(tensor.key, tensor.dtype, offset, offset, shape).select_rows(first, count)
        files.setdefault(file, []).append(PlacedItem(item, position))
    return [FileLayout(file_name(rank, file), items) for file, items in sorted(files.items())]


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
        placed = [item for file in files for item in file.items]
        self.items = [item.item for item in placed]
        # Constant bytes before and after the raw data of each item, encoded once for all saves.
        self.envelopes = [
            (
                item.envelope.prefix,
                item.envelope.suffix + bytes(item.end - item.position - item.length),
            )
            for item in placed
        ]

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)


def cut_chunks(files: Sequence[FileLayout]) -> list[FileChunk]:
    """Cut all files into chunks of a slot's size, in the order of staging and writing."""
    per_file: list[list[FileChunk]] = []
    source = 0
    for number, file in enumerate(files):
        chunks = [
            FileChunk(number, offset, min(SLOT_SIZE, file.size - offset), [])
            for offset in range(0, file.size, SLOT_SIZE)
        ]
        for placed in file.items:
            ends = (placed.data, placed.data + placed.item.nbytes, placed.end)
            start = placed.position
            for end in ends:
                _add_parts(chunks, source, start, end)
                start = end
                source = source + 1
        per_file.append(chunks)
    # Interleave the files, so that each of them keeps a writer busy.
    rounds = max(map(len, per_file), default=0)
    return [chunks[i] for i in range(rounds) for chunks in per_file if i < len(chunks)]


def _add_parts(chunks: list[FileChunk], source: int, start: int, end: int) -> None:
    """Add bytes `[start, end)` of a file, which are all of `source`, to their chunks."""
    position = start
    while position < end:
        chunk = chunks[position // SLOT_SIZE]
        length = min(end, chunk.offset + chunk.length) - position
        chunk.parts.append(SourceRange(position - chunk.offset, source, position - start, length))
        position += length


@dataclass
class MetadataCache:
    """`.metadata` of a plan, on rank 0.

    It is encoded again only when the location of an object or the name of a file changes.
    """

    tensors: CheckpointMetadata
    _encoded: tuple[object, Sequence[bytes]] | None = None

    def encode(
        self, objects: list[bytes], name_of: Callable[[str], str] = lambda name: name
    ) -> Sequence[bytes]:
        """Return the content of `.metadata`, in parts.

        `objects` are the lines of all ranks with the locations of their objects
        (`SaveBarrier.collect`). `name_of` renames the files of tensors; those in the lines have
        been renamed.
        """
        made_for = (objects, name_of("a.b"))
        encoded = self._encoded
        if encoded is None or encoded[0] != made_for:
            places = {
                key: Location(*place)
                for line in objects
                for key, place in json.loads(line)[1].items()
            }
            encoded = (
                made_for,
                encode_metadata(replace(rename_files(self.tensors, name_of), objects=places)),
            )
            # Assigned at once: another thread may encode for a copy of the checkpoint.
            self._encoded = encoded
        return encoded[1]


@dataclass
class PreparedPlan:
    """This rank's part of a plan, reused for every save.

    `nonce` is common to all ranks; `total_bytes` counts the tensors of all ranks.
    """

    spec: LocalSpec
    plan: RankPlan
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
        if not self._coordination.all_true(plan is not None and spec == plan.spec):
            self._plan = plan = self._plan_on_rank0(spec)
        assert plan is not None
        return plan

    def _plan_on_rank0(self, spec: LocalSpec | CheckpointError) -> PreparedPlan:
        metadata: MetadataCache | None = None

        def plan(specs: list[PackedSpec | CheckpointError]) -> list[tuple[RankPlan, str, int]]:
            nonlocal metadata
            wrong = []
            valid = []
            for rank, item in enumerate(specs):
                if isinstance(item, CheckpointError):
                    wrong.append(f"rank {rank}: {item}")
                else:
                    valid.append(item)
            if wrong:
                raise CheckpointError("\n".join(wrong))
            placed = place_items(make_plan(valid, self._fully_parallel), self._workers)
            metadata = MetadataCache(placed.build_metadata())
            nonce = secrets.token_hex(4)
            return [(placed.select_rank(rank), nonce, placed.nbytes) for rank in range(len(valid))]

        packed = spec if isinstance(spec, CheckpointError) else pack(spec)
        mine, nonce, total = self._coordination.gather_compute_scatter(packed, plan)
        assert isinstance(spec, LocalSpec)
        files = FilePlan(build_file_layouts(spec, mine, self._coordination.rank))
        return PreparedPlan(spec, mine, nonce, total, files, metadata)


def _try_describe(state: ShardedStateDict) -> LocalSpec | CheckpointError:
    """Return an error instead of raising it: all ranks must take part in the collective."""
    try:
        return describe(state)
    except CheckpointError as error:
        return error


def _structure_error(spec: LocalSpec | CheckpointError, before: LocalSpec) -> CheckpointError:
    if isinstance(spec, CheckpointError):
        return spec
    tensors = {tensor.key for tensor in set(spec.tensors) ^ set(before.tensors)}
    changed = sorted(tensors | (set(spec.objects) ^ set(before.objects)))
    return CheckpointError(
        f"assume_constant_structure: the structure has changed since the last save: "
        f"{', '.join(changed[:10])}"
    )

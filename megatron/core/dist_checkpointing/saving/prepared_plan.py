"""A rank's part of the save plan, worked out once and used for every save of the same structure."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.metadata import CheckpointMetadata, Location
from megatron.core.dist_checkpointing.format.metadata_file import encode_metadata
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.dist_checkpointing.planning.file_layout import FileLayout, files_of, place_items
from megatron.core.dist_checkpointing.planning.planner import LocalSpec, PackedSpec, RankPlan, describe, make_plan, pack
from megatron.core.dist_checkpointing.saving.staging import BytesSource, Chunk, constant_sources, cut_chunks


@dataclass
class MetadataCache:
    """`.metadata` of a plan on rank 0: pickled again only when the place of an object changes."""

    tensors: CheckpointMetadata
    _objects: dict[str, Location] | None = None
    _encoded: bytes = b""

    def encode(self, objects: dict[str, Location]) -> bytes:
        if objects != self._objects:
            self._encoded = encode_metadata(replace(self.tensors, objects=objects))
            self._objects = objects  # only now: what cannot be pickled must not count as pickled the next time
        return self._encoded


@dataclass
class PreparedPlan:
    """What this rank does in every save; `nonce` is common to all ranks, `total_bytes` counts all ranks' tensors."""

    spec: LocalSpec
    plan: RankPlan
    nonce: str
    total_bytes: int
    files: list[FileLayout]
    chunks: list[Chunk]
    constants: list[BytesSource] = field(repr=False)
    metadata: MetadataCache | None  # on rank 0

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)


def prepare_plan(
    state: ShardedStateDict,
    coordination: Coordination,
    fully_parallel: bool,
    workers: int,
    previous: PreparedPlan | None,
    assume_constant_structure: bool,
) -> PreparedPlan:
    """`previous` if the structure is as before on every rank, else a new plan (a collective).

    Whether it is the same everywhere costs an all-reduce of one number, none with `assume_constant_structure`.
    Raises CheckpointError on every rank if the state of any rank is contradictory.
    """
    spec: LocalSpec | CheckpointError
    try:
        spec = describe(state)
    except CheckpointError as error:
        spec = error
    unchanged = previous is not None and spec == previous.spec
    if assume_constant_structure and previous is not None:
        if unchanged:
            return previous
        if isinstance(spec, CheckpointError):
            raise spec
        changed = sorted(
            {t.key for t in set(spec.tensors) ^ set(previous.spec.tensors)}
            | (set(spec.objects) ^ set(previous.spec.objects))
        )
        raise CheckpointError(
            f"the structure was said to be constant, but it has changed since the last save: {', '.join(changed[:10])}"
        )
    if coordination.all_true(unchanged):
        assert previous is not None
        return previous
    return _plan_together(spec, coordination, fully_parallel, workers)


def _plan_together(
    spec: LocalSpec | CheckpointError, coordination: Coordination, fully_parallel: bool, workers: int
) -> PreparedPlan:
    metadata: MetadataCache | None = None

    def plan(specs: list[PackedSpec | CheckpointError]) -> list[tuple[RankPlan, str, int]]:
        nonlocal metadata
        good = [item for item in specs if isinstance(item, PackedSpec)]
        wrong = [f"rank {rank}: {item}" for rank, item in enumerate(specs) if isinstance(item, CheckpointError)]
        if wrong:
            raise CheckpointError("\n".join(wrong))
        placed = place_items(make_plan(good, fully_parallel), workers)
        metadata = MetadataCache(placed.metadata())
        nonce = secrets.token_hex(4)
        return [(placed.of_rank(rank), nonce, placed.nbytes) for rank in range(len(good))]

    packed = spec if isinstance(spec, CheckpointError) else pack(spec)
    mine, nonce, total = coordination.map_at_coordinator(packed, plan)
    assert isinstance(spec, LocalSpec)
    files = files_of(spec, mine, coordination.rank)
    return PreparedPlan(spec, mine, nonce, total, files, cut_chunks(files), constant_sources(files), metadata)

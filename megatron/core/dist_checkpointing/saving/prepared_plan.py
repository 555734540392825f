"""A rank's part of the save plan, worked out once and used for every save of the same structure."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron.core.dist_checkpointing.format.metadata import CheckpointMetadata, Location, renamed
from megatron.core.dist_checkpointing.format.metadata_index import encode_metadata
from megatron.core.dist_checkpointing.format.schema import CheckpointError
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.dist_checkpointing.planning.file_layout import FilePlan, files_of, place_items
from megatron.core.dist_checkpointing.planning.planner import LocalSpec, PackedSpec, RankPlan, describe, make_plan, pack


@dataclass
class MetadataCache:
    """`.metadata` of a plan on rank 0: pickled again only when the place of an object or the name of a file changes."""

    tensors: CheckpointMetadata
    _encoded: tuple[object, Sequence[bytes]] | None = None

    def encode(self, objects: list[bytes], name_of: Callable[[str], str] = lambda name: name) -> Sequence[bytes]:
        """With the lines of all ranks that say where their objects are (`SaveBarrier.collect`).

        `name_of` renames the files of tensors; those of the objects in the lines have been renamed.
        """
        made_for, encoded = (objects, name_of("a.b")), self._encoded
        if encoded is None or encoded[0] != made_for:
            places = {key: Location(*place) for line in objects for key, place in json.loads(line)[1].items()}
            encoded = made_for, encode_metadata(replace(renamed(self.tensors, name_of), objects=places))
            self._encoded = encoded  # of the last save; one may be copied elsewhere at the same time
        return encoded[1]


@dataclass
class PreparedPlan:
    """What this rank does in every save; `nonce` is common to all ranks, `total_bytes` counts all ranks' tensors."""

    spec: LocalSpec
    plan: RankPlan
    nonce: str
    total_bytes: int
    files: FilePlan
    metadata: MetadataCache | None  # on rank 0


class Planner:
    """Makes the plan and keeps it as long as the structure of the state is the same on every rank.

    Whether it is costs an all-reduce of one number for each save, nothing with `assume_constant_structure`.
    """

    def __init__(
        self, coordination: Coordination, fully_parallel: bool, workers: int, assume_constant_structure: bool
    ) -> None:
        self._coordination, self._fully_parallel, self._workers = coordination, fully_parallel, workers
        self._assume_constant_structure = assume_constant_structure
        self._plan: PreparedPlan | None = None

    def plan_for(self, state: ShardedStateDict) -> PreparedPlan:
        """A collective. Raises CheckpointError on every rank if the state of any rank is contradictory."""
        spec, plan = _describe(state), self._plan
        if plan is not None and self._assume_constant_structure:
            if spec != plan.spec:
                raise _structure_error(spec, plan.spec)
            return plan
        if not self._coordination.all_true(plan is not None and spec == plan.spec):
            self._plan = plan = self._plan_together(spec)
        assert plan is not None
        return plan

    def _plan_together(self, spec: LocalSpec | CheckpointError) -> PreparedPlan:
        metadata: MetadataCache | None = None

        def plan(specs: list[PackedSpec | CheckpointError]) -> list[tuple[RankPlan, str, int]]:
            nonlocal metadata
            good = [item for item in specs if isinstance(item, PackedSpec)]
            wrong = [f"rank {rank}: {item}" for rank, item in enumerate(specs) if isinstance(item, CheckpointError)]
            if wrong:
                raise CheckpointError("\n".join(wrong))
            placed = place_items(make_plan(good, self._fully_parallel), self._workers)
            metadata = MetadataCache(placed.metadata())
            nonce = secrets.token_hex(4)
            return [(placed.of_rank(rank), nonce, placed.nbytes) for rank in range(len(good))]

        packed = spec if isinstance(spec, CheckpointError) else pack(spec)
        mine, nonce, total = self._coordination.map_at_coordinator(packed, plan)
        assert isinstance(spec, LocalSpec)
        files = FilePlan(files_of(spec, mine, self._coordination.rank))
        return PreparedPlan(spec, mine, nonce, total, files, metadata)


def _describe(state: ShardedStateDict) -> LocalSpec | CheckpointError:
    """An error is a value here: it is raised on all ranks together."""
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
        f"the structure was said to be constant, but it has changed since the last save: {', '.join(changed[:10])}"
    )

"""The plan of a save, made by all ranks together and cached while their state is unchanged."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from megatron.core.dist_checkpointing.format.metadata_codec import MetadataEncoder
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.dist_checkpointing.planning.rank_plan import RankPlan, make_data_files
from megatron.core.dist_checkpointing.planning.save_plan import make_plan
from megatron.core.dist_checkpointing.planning.structure import (
    LocalSpec,
    PackedSpec,
    describe,
    pack,
)
from megatron.core.safe_files.errors import CheckpointError


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
            """Return (items, keys of objects, nonce, bytes of all ranks) for each rank."""
            nonlocal metadata
            save_plan = make_plan(_select_valid(specs), self._fully_parallel, self._workers)
            metadata = MetadataEncoder(save_plan.build_metadata())
            nonce = secrets.token_hex(4)
            return [
                (items, objects, nonce, save_plan.nbytes)
                for items, objects in zip(save_plan.split_by_rank(), save_plan.objects, strict=True)
            ]

        # An error of this rank is sent like a spec: rank 0 reports those of all ranks together.
        sent = spec if isinstance(spec, CheckpointError) else pack(spec)
        answer = self._coordination.gather_compute_scatter(sent, plan)
        items, objects, nonce, total_bytes = answer

        # Each rank encodes its own envelopes.
        assert isinstance(spec, LocalSpec)
        files = make_data_files(spec, items, self._coordination.rank)
        return RankPlan(spec, files, objects, nonce, total_bytes, metadata)


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

"""The rule that chooses the checkpoint of a launch: a pure function of all checkpoints.

The caller describes the checkpoints of all tiers and formats (`Inventory`) and the request of the
launch (`Launch`). `choose` reads nothing, and states a reason for its choice and for every
checkpoint that it passes over. The rules, in this order:

1. An automatic restart of a job continues from the newest checkpoint that the job has saved.
2. A launch that loads from the directory to which it saves, and names no checkpoint in it,
   continues from the newest checkpoint there.
3. If the newest checkpoint of the run is on a branch that began with the checkpoint that the launch
   names, the launch continues from it.
4. Otherwise the launch starts from the named checkpoint, or from random weights. It must not
   replace another run without permission. Returning to an earlier checkpoint of the same
   directory needs none.

The newest checkpoint of a run is the one with the highest launch, then the highest iteration, in
any tier. A tracker that was edited to name an earlier checkpoint overrides that, unless
--override-existing-run has begun another run since.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron.core.dist_checkpointing.ownership.lineage import Lineage, Origin
from megatron.core.safe_files.errors import CheckpointError

_MAX_NAMES = 5  # checkpoints in a message


class Candidate(NamedTuple):
    """A checkpoint that exists in some tier.

    `name` is its path. `problem` is the reason for which it cannot be loaded. `is_local` means that
    it is on the disks of the nodes.
    """

    name: str
    lineage: Lineage
    problem: str | None = None
    is_local: bool = False

    @property
    def order(self) -> tuple[int, int]:
        return self.lineage.order

    @property
    def description(self) -> str:
        return f"{self.name} on the disks of the nodes" if self.is_local else self.name

    @property
    def step_flag(self) -> str:
        return f"--ckpt-step {self.lineage.iteration}"


class Inventory(NamedTuple):
    """All checkpoints that a launch could start from.

    `shared` are those of the directory to which the launch saves, in the order in which they are
    used: the one that the tracker names, then older ones of its branch. `newer` are complete ones
    of that directory that are newer than the first usable one, because the tracker was edited.
    `local` are those of the same run on the disks of the nodes. `stray` are local ones that have
    the lineage of this run, but belong to another directory: it was moved or copied, or its file
    with the name of the run is lost. `named` is the checkpoint that the launch names, in any
    directory; `weights_only` if only its weights are to be loaded. `names` are those of all
    iterations in the directory, complete or not, for messages.
    """

    shared: tuple[Candidate, ...] = ()
    newer: tuple[Candidate, ...] = ()
    local: tuple[Candidate, ...] = ()
    stray: tuple[Candidate, ...] = ()
    named: Candidate | None = None
    weights_only: bool = False
    names: tuple[str, ...] = ()


class Launch(NamedTuple):
    """The request of a launch that saves to `save`.

    `in_place` means that it loads from the same directory. `names_checkpoint` means that it names a
    checkpoint there (`origin.step`), or loads only weights. `origin` describes the named checkpoint
    for the lineage of a branch that begins with it. `override` permits to replace another run.
    `job` is the id of the job if this is an automatic restart of it, and `first_generation` the
    first launch of that job.
    """

    save: str | None = None
    in_place: bool = False
    names_checkpoint: bool = False
    origin: Origin | None = None
    override: bool = False
    job: str | None = None
    first_generation: int = 0


class PassedOver(NamedTuple):
    """A checkpoint that is not used, and the reason."""

    candidate: Candidate
    reason: str


@dataclass(frozen=True)
class Choice:
    """The result of the rule.

    `candidate` is None for random weights. With `extends_branch`, the run continues the branch of
    the candidate; with `continues`, it does so although the launch names another checkpoint.
    `origin` is recorded in the lineage of a run that begins with the named checkpoint.
    """

    candidate: Candidate | None
    reason: str
    weights_only: bool = False
    extends_branch: bool = False
    continues: bool = False
    origin: Origin | None = None
    passed_over: tuple[PassedOver, ...] = ()

    def explain_passed_over(self) -> list[str]:
        """Return a line for each reason, with the checkpoints to which it applies."""
        names: dict[str, list[str]] = {}
        for candidate, reason in self.passed_over:
            names.setdefault(reason, []).append(candidate.description)
        messages = []
        for reason, descriptions in names.items():
            verb = "is" if len(descriptions) == 1 else "are"
            messages.append(f"{abbreviate(descriptions)} {verb} not used: {reason}")
        return messages


def choose(launch: Launch, inventory: Inventory) -> Choice:
    """Return the checkpoint to start from.

    Raises CheckpointError if the named checkpoint cannot be loaded, if a run has only damaged ones,
    or if the launch would replace another run without permission.
    """
    choice = _apply_rules(launch, inventory)
    passed_over = _explain_passed_over(launch, inventory, choice)
    return replace(choice, passed_over=tuple(passed_over))


def _apply_rules(launch: Launch, inventory: Inventory) -> Choice:
    """Return the choice, without the checkpoints that it passes over."""
    newest = find_newest(inventory)

    # Rule 1: an automatic restart.
    if launch.job is not None:
        saved = _first_usable(inventory.shared)
        if saved is not None and saved.lineage.job != launch.job:
            saved = None
        of_job = [local for local in inventory.local if local.order[0] >= launch.first_generation]
        candidate = _find_latest([*_list_usable(of_job), saved])
        if candidate is not None:
            reason = "an earlier launch of this job has saved it"
            return Choice(candidate, reason, extends_branch=True, continues=True)

    # Rule 2: the newest checkpoint of the directory.
    if launch.in_place and not launch.names_checkpoint:
        if newest is not None:
            reason = f"it is the newest checkpoint of the run in {launch.save}"
            if inventory.newer:
                reason = "the tracker names it"
            return Choice(newest, reason, extends_branch=True)
        if inventory.shared:
            raise CheckpointError(f"{inventory.shared[0].problem}")

    # Rule 3: a branch that began with the named checkpoint.
    named = inventory.named
    head = _find_branch(launch, inventory, newest)
    if named is not None and head is not None and not launch.override:
        reason = (
            f"this run began with {named.name}, which the flags name, and has saved newer "
            "checkpoints since. To begin again from there, add --override-existing-run"
        )
        return Choice(head, reason, extends_branch=True, continues=True)

    # Rule 4: the named checkpoint.
    if named is not None and named.problem is not None:
        raise CheckpointError(named.problem)
    returns = launch.in_place and launch.names_checkpoint and not inventory.weights_only
    if not returns and not launch.override and newest is not None:
        raise CheckpointError(_describe_replaced(launch, inventory, newest))
    if named is None:
        return Choice(None, "there is no checkpoint to load")
    reason = "the flags name it"
    later = [name for name in inventory.names if name > f"iter_{named.lineage.iteration:07d}"]
    if returns and later:
        reason = (
            f"{named.step_flag} returns to it. {abbreviate(later)} are left in place until this "
            "run saves the same iterations; then they are replaced"
        )
    return Choice(
        named,
        reason,
        inventory.weights_only,
        extends_branch=returns,
        origin=launch.origin,
    )


def find_newest(inventory: Inventory) -> Candidate | None:
    """Return the newest usable checkpoint of the run, None if there is none."""
    saved = _first_usable(inventory.shared)
    local = _list_usable(inventory.local)
    # The user has edited the tracker to return to `saved`: only checkpoints that were trained from
    # it since then continue it, or those of a run that has replaced all of them.
    if saved is not None and inventory.newer:
        local = [candidate for candidate in local if _follows_return(candidate, saved, inventory)]
    return _find_latest([*local, saved])


def _find_branch(
    launch: Launch, inventory: Inventory, newest: Candidate | None
) -> Candidate | None:
    """Return the newest checkpoint of the branch that began with the flags of this launch."""
    if newest is None or _began_with(newest.lineage.origin, launch):
        return newest
    # An edited tracker still names a checkpoint of another branch until the first shared save.
    candidates = []
    for local in _list_usable(inventory.local):
        if local.order > newest.order and _began_with(local.lineage.origin, launch):
            candidates.append(local)
    return _find_latest(candidates)


def _follows_return(candidate: Candidate, saved: Candidate, inventory: Inventory) -> bool:
    """Return whether `candidate` was saved after the tracker was edited to return to `saved`."""
    for left_behind in inventory.newer:
        is_earlier = candidate.order < left_behind.order
        if is_earlier or candidate.lineage.includes(left_behind.lineage):
            return False
    return candidate.lineage.includes(saved.lineage) or _replaces(candidate, saved)


def _replaces(candidate: Candidate, saved: Candidate) -> bool:
    """Return whether `candidate` is of a later run, which --override-existing-run has begun.

    The tracker may have been edited after that as well. The later run is continued nevertheless:
    --ckpt-step can name `saved` at any time, but no flag names a checkpoint on the nodes.
    """
    # The launch that began a run
    first = candidate.lineage.branch[0]
    saved_first = saved.lineage.branch[0]
    is_same_run = (first.generation, first.token) == (saved_first.generation, saved_first.token)
    return candidate.order > saved.order and not is_same_run


def _list_usable(candidates: Iterable[Candidate]) -> list[Candidate]:
    return [candidate for candidate in candidates if candidate.problem is None]


def _first_usable(candidates: Iterable[Candidate]) -> Candidate | None:
    return next(iter(_list_usable(candidates)), None)


def _find_latest(candidates: Iterable[Candidate | None]) -> Candidate | None:
    """Return the newest candidate; of equal ones the last, which is the one in shared storage."""
    latest = None
    for candidate in candidates:
        if candidate is not None and (latest is None or candidate.order >= latest.order):
            latest = candidate
    return latest


def _began_with(origin: Origin | None, launch: Launch) -> bool:
    """Return whether a branch with this origin began with the same flags as this launch."""
    # A branch that began with random weights has no origin.
    if origin is None or launch.origin is None:
        return False
    if origin == launch.origin:
        return True
    # With --finetune in the directory of --load, the newest checkpoint is one of the branch.
    is_same_request = origin.weights_only and origin.step == launch.origin.step
    return launch.in_place and launch.origin.weights_only and is_same_request


def _describe_replaced(launch: Launch, inventory: Inventory, newest: Candidate) -> str:
    source = "random weights" if inventory.named is None else inventory.named.name
    name = newest.name.rpartition("/")[2]
    if newest.is_local:
        name = newest.description
    return (
        f"--save {launch.save} contains {name} of a run that this one, which starts from {source}, "
        "does not continue. The tracker would return to an earlier iteration, and checkpoints of "
        f"the same number would be replaced ({abbreviate(inventory.names or [name])}). To continue "
        f"that run, give --load {launch.save}; to keep it, give another --save; to replace it, add "
        "--override-existing-run"
    )


def _explain_passed_over(launch: Launch, inventory: Inventory, choice: Choice) -> list[PassedOver]:
    """Return every checkpoint that is newer than the choice or damaged, with the reason."""
    chosen = choice.candidate
    # Checkpoints of another directory are not ordered with those of the run.
    is_in_run = launch.in_place or choice.extends_branch
    passed_over = []
    for candidate in (*inventory.newer, *inventory.local, *inventory.shared):
        if candidate == chosen:
            continue
        # Those that are older than the choice have no effect.
        if chosen is not None and is_in_run and candidate.order <= chosen.order:
            continue
        reason = candidate.problem or _explain_newer(launch, inventory, choice, candidate)
        passed_over.append(PassedOver(candidate, reason))
    tracked = None
    if inventory.newer and is_in_run:
        tracked = _first_usable(inventory.shared)
    if chosen is not None and tracked is not None and _replaces(chosen, tracked):
        reason = (
            f"the tracker names it, but {chosen.name} is of a run that has replaced it since "
            f"(--override-existing-run). To return to it, add {tracked.step_flag}"
        )
        passed_over.append(PassedOver(tracked, reason))
    for candidate in inventory.stray:
        if chosen is not None and _is_later_in_run(candidate, chosen):
            reason = (
                "it has the lineage of this run, but belongs to another directory than --save "
                f"{launch.save}, which was moved, copied, or has lost its file .run"
            )
            passed_over.append(PassedOver(candidate, reason))
    named = inventory.named
    if choice.continues and launch.job is not None and named not in (None, chosen):
        assert named is not None
        reason = "an automatic restart continues from what its job has saved"
        passed_over.append(PassedOver(named, reason))
    return passed_over


def _is_later_in_run(candidate: Candidate, chosen: Candidate) -> bool:
    return candidate.order > chosen.order and candidate.lineage.includes(chosen.lineage)


def _explain_newer(
    launch: Launch, inventory: Inventory, choice: Choice, candidate: Candidate
) -> str:
    """Return why a usable checkpoint of the run that is newer than the choice is not used."""
    chosen = choice.candidate
    replaced = "Checkpoints are replaced when this run saves the same iteration"
    if candidate.is_local:
        replaced = "Local checkpoints are removed by the first local save of this run"
    if chosen is not None and choice.extends_branch:
        if launch.job is not None and choice.continues:
            return f"it was saved by another job. {replaced}"
        if inventory.newer and chosen == _first_usable(inventory.shared):
            latest = _find_latest(inventory.newer)
            assert latest is not None
            return (
                f"the tracker has been edited to return to {chosen.name}. To continue from "
                f"{latest.name}, add {latest.step_flag}. {replaced}"
            )
        return f"{chosen.step_flag} returns to {chosen.name}. {replaced}"
    source = "random weights" if chosen is None else chosen.name
    return f"--override-existing-run starts again from {source}. {replaced}"


def abbreviate(names: Sequence[str]) -> str:
    """Return the first names of a list, and the number of further ones."""
    text = ", ".join(names[:_MAX_NAMES])
    if len(names) > _MAX_NAMES:
        text += f" and {len(names) - _MAX_NAMES} more"
    return text

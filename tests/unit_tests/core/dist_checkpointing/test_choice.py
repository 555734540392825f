"""The rule that chooses the checkpoint of a launch: a table of cases, and random histories."""

import random
from dataclasses import dataclass, field

import pytest

from megatron.core.dist_checkpointing import CheckpointError, Lineage, Segment
from megatron.core.dist_checkpointing.choice import Candidate, Choice, Inventory, Launch, choose
from megatron.core.dist_checkpointing.ownership.lineage import Origin

A = Origin("a@4", False)  # `--load A`, whose newest checkpoint is iteration 4
TUNED = Origin("a@4", True)  # with --finetune
STEP = Origin("run@10", False, 10)  # --ckpt-step 10 in the directory of the run
NAMED = Candidate("A/iter_0000004", Lineage((Segment(1, 4, "a"),)))


def shared(iteration, launch=1, origin=None, job=None, problem=None):
    lineage = Lineage((Segment(launch, iteration, f"t{launch}"),), origin, job)
    return Candidate(f"run/iter_{iteration:07d}", lineage, problem)


def local(iteration, launch=1, origin=None, job=None, problem=None):
    lineage = Lineage((Segment(launch, iteration, f"t{launch}"),), origin, job)
    return Candidate(f"iter_{iteration:07d}-{launch}.x", lineage, problem, is_local=True)


def after_return(iteration):
    """Return a local checkpoint of launch 2, which has continued from iteration 10."""
    lineage = shared(10).lineage.descend(Segment(2, iteration, "t2"))
    return Candidate(f"iter_{iteration:07d}-2.x", lineage, is_local=True)


IN_PLACE = Launch("run", in_place=True)
BRANCH = Launch("run", names_checkpoint=True, origin=A)
TUNING = Launch("run", names_checkpoint=True, origin=TUNED)
BACK = Launch("run", in_place=True, names_checkpoint=True, origin=STEP)
RESTART = Launch("run", names_checkpoint=True, origin=A, job="job", first_generation=2)

# name: (launch, inventory, chosen candidate or error, words for each candidate that is passed over)
CASES = {
    # ---- Rule 1: automatic restarts
    "a restart continues from what its job has saved": (
        RESTART,
        Inventory((shared(20, 2, job="job"),), named=NAMED),
        shared(20, 2, job="job"),
        {NAMED: "automatic restart"},
    ),
    "a restart prefers a newer local checkpoint of its job": (
        RESTART,
        Inventory((shared(20, 2, job="job"),), local=(local(25, 2),), named=NAMED),
        local(25, 2),
        {NAMED: "automatic restart"},
    ),
    "a restart before the first save of its job follows the flags": (
        RESTART._replace(override=True),
        Inventory((shared(20, 1, job="other"),), named=NAMED),
        NAMED,
        {shared(20, 1, job="other"): "--override-existing-run"},
    ),
    # The newest checkpoint has lost its lineage
    "a restart takes the one before a damaged checkpoint": (
        RESTART,
        Inventory(
            (shared(20, 0, problem="lineage.json has 0 bytes"), shared(16, 2, job="job")),
            named=NAMED,
        ),
        shared(16, 2, job="job"),
        {NAMED: "automatic restart"},
    ),
    # ---- Rule 2: one directory
    "the first launch has no checkpoint": (IN_PLACE, Inventory(), None, {}),
    "the first launch loads a pretrained model": (
        IN_PLACE,
        Inventory(named=NAMED, weights_only=True),
        NAMED,
        {},
    ),
    "the newest checkpoint of the directory": (
        IN_PLACE,
        Inventory((shared(15),), local=(local(14),)),
        shared(15),
        {},
    ),
    "a newer local checkpoint": (
        IN_PLACE,
        Inventory((shared(15),), local=(local(18), local(17))),
        local(18),
        {},
    ),
    "a local checkpoint of a later launch with a lower iteration": (
        IN_PLACE,
        Inventory((shared(15),), local=(local(12, 2),)),
        local(12, 2),
        {},
    ),
    "a damaged local checkpoint": (
        IN_PLACE,
        Inventory((shared(15),), local=(local(18, problem="no node has rank 1"), local(17))),
        local(17),
        {local(18, problem="no node has rank 1"): "no node has rank 1"},
    ),
    "only a local checkpoint is left": (
        IN_PLACE,
        Inventory((shared(15, problem="damaged"),), local=(local(12),)),
        local(12),
        {shared(15, problem="damaged"): "damaged"},
    ),
    "only damaged checkpoints": (
        IN_PLACE,
        Inventory((shared(15, problem="it is damaged"),)),
        "it is damaged",
        {},
    ),
    # The tracker is edited back by one
    "an edited tracker is followed although local checkpoints are newer": (
        IN_PLACE,
        Inventory((shared(10),), newer=(shared(15),), local=(local(18), local(17))),
        shared(10),
        {
            shared(15): "--ckpt-step 15",
            local(18): "removed by the first local save",
            local(17): "the tracker has been edited",
        },
    ),
    "what was trained after the tracker was edited": (
        IN_PLACE,
        Inventory((shared(10),), newer=(shared(15),), local=(after_return(12), local(18))),
        after_return(12),
        {},
    ),
    # --override-existing-run began again after the tracker was edited, and was killed before its
    # first save to the shared directory
    "a run that replaces one with an edited tracker is continued": (
        IN_PLACE,
        Inventory((shared(10),), newer=(shared(15),), local=(local(6, 2, origin=A), local(18))),
        local(6, 2, origin=A),
        {shared(10): "To return to it, add --ckpt-step 10"},
    ),
    "a run that was replaced before the tracker was edited": (
        IN_PLACE,
        Inventory((shared(10, 3),), newer=(shared(15, 3),), local=(local(6, 2, origin=A),)),
        shared(10, 3),
        {shared(15, 3): "the tracker has been edited"},
    ),
    # The directory was moved
    "local checkpoints of a moved directory are reported": (
        IN_PLACE,
        Inventory((shared(15),), stray=(local(18),)),
        shared(15),
        {local(18): "belongs to another directory"},
    ),
    "local checkpoints of another run are not reported": (
        IN_PLACE,
        Inventory((shared(15),), stray=(local(18, 3), local(12))),
        shared(15),
        {},
    ),
    # ---- Rule 3: a branch
    "a branch is continued": (
        BRANCH,
        Inventory((shared(8, origin=A),), named=NAMED),
        shared(8, origin=A),
        {},
    ),
    # Killed before the first save to the shared directory
    "a branch that exists only on the nodes is continued": (
        BRANCH,
        Inventory(local=(local(30, origin=A), local(29, origin=A)), named=NAMED),
        local(30, origin=A),
        {},
    ),
    "a fine-tuned branch that exists only on the nodes": (
        TUNING,
        Inventory(local=(local(30, origin=TUNED),), named=NAMED, weights_only=True),
        local(30, origin=TUNED),
        {},
    ),
    "a rollback that exists only on the nodes": (
        BACK,
        Inventory((shared(20),), local=(local(14, 2, origin=STEP),), named=shared(10)),
        local(14, 2, origin=STEP),
        {},
    ),
    "a branch is begun again on request": (
        BRANCH._replace(override=True),
        Inventory((shared(8, origin=A),), local=(local(9, origin=A),), named=NAMED),
        NAMED,
        {
            shared(8, origin=A): "--override-existing-run",
            local(9, origin=A): "--override-existing-run",
        },
    ),
    "an edited tracker of a branch is followed": (
        BRANCH,
        Inventory(
            (shared(8, origin=A),),
            newer=(shared(12, origin=A),),
            local=(local(13, origin=A),),
            named=NAMED,
        ),
        shared(8, origin=A),
        {
            shared(12, origin=A): "the tracker has been edited",
            local(13, origin=A): "the tracker has been edited",
        },
    ),
    # ---- Rule 4: the named checkpoint
    "a new branch": (BRANCH, Inventory(named=NAMED), NAMED, {}),
    "random weights": (Launch("run", names_checkpoint=True), Inventory(), None, {}),
    "another run is not replaced": (
        BRANCH,
        Inventory((shared(8),), named=NAMED),
        "contains iter_0000008 of a run that this one",
        {},
    ),
    "another run is not replaced by random weights": (
        Launch("run", names_checkpoint=True),
        Inventory((shared(8),)),
        "starts from random weights, does not continue",
        {},
    ),
    "another run that exists only on the nodes is not replaced": (
        BRANCH,
        Inventory(local=(local(30, origin=TUNED),), named=NAMED),
        "contains iter_0000030-1.x on the disks of the nodes of a run",
        {},
    ),
    "a rollback": (
        BACK,
        Inventory((shared(20),), local=(local(22),), named=shared(10)),
        shared(10),
        {
            shared(20): "--ckpt-step 10 returns to run/iter_0000010",
            local(22): "removed by the first local save",
        },
    ),
    "a named checkpoint that cannot be loaded": (
        BRANCH,
        Inventory(named=NAMED._replace(problem="A holds no complete checkpoint")),
        "A holds no complete checkpoint",
        {},
    ),
}


@pytest.mark.parametrize(
    ("launch", "inventory", "expected", "passed_over"), CASES.values(), ids=CASES
)
def test_choice(launch, inventory, expected, passed_over):
    if isinstance(expected, str):
        with pytest.raises(CheckpointError, match=expected):
            choose(launch, inventory)
        return
    choice = choose(launch, inventory)
    assert choice.candidate == expected
    reasons = dict(choice.passed_over)
    assert reasons.keys() == passed_over.keys()
    for candidate, words in passed_over.items():
        assert words in reasons[candidate]


@dataclass
class History:
    """A run in one directory: the saves of its launches, and those that exist now.

    A launch trains from the chosen checkpoint and saves to both tiers, as `RunSaver` does. Saves
    can be damaged, and the user can edit the tracker.
    """

    rng: random.Random
    saved: dict[int, Candidate] = field(default_factory=dict)  # shared, by iteration
    tracker: int | None = None
    on_nodes: list[Candidate] = field(default_factory=list)
    launches: int = 0
    was_edited: bool = False

    def describe(self):
        """Return the inventory as reading the directories yields it."""
        head = self.saved.get(self.tracker)
        in_order = []
        if head is not None:
            branch = [c for c in self.saved.values() if head.lineage.includes(c.lineage)]
            in_order = sorted(branch, key=lambda candidate: -candidate.lineage.iteration)
        usable = next((c for c in in_order if c.problem is None), None)
        newer = []
        if usable is not None:
            in_order = in_order[: in_order.index(usable) + 1]
            newer = [c for c in self.saved.values() if c.problem is None]
            newer = [
                c
                for c in newer
                if c.order > usable.order and c.lineage.iteration > usable.lineage.iteration
            ]
        by_age = sorted(self.on_nodes, key=lambda candidate: candidate.order, reverse=True)
        return Inventory(tuple(in_order), tuple(newer), tuple(by_age))

    def launch(self, choice, iterations):
        """Train `iterations` from the choice; save each locally, every fourth to the directory."""
        self.launches += 1
        self.was_edited = False
        # A new branch has no ancestors.
        base = Lineage((), choice.origin)
        if choice.extends_branch:
            base = choice.candidate.lineage
            base = base._replace(origin=choice.origin or base.origin)
        first = 0 if choice.candidate is None else choice.candidate.lineage.iteration
        for iteration in range(first + 1, first + 1 + iterations):
            segment = Segment(self.launches, iteration, f"t{self.launches}")
            lineage = base.descend(segment, "job")
            newest = Candidate(f"local {self.launches}.{iteration}", lineage, None, True)
            kept = sorted(self.on_nodes, key=lambda candidate: candidate.order)[-1:]
            self.on_nodes = [*(c for c in kept if c.order < newest.order), newest]
            if iteration % 4 == 0:
                name = f"run/iter_{iteration:07d}"
                self.saved[iteration] = Candidate(name, lineage)
                self.tracker = iteration

    def disturb(self):
        """Damage checkpoints, lose the nodes, or edit the tracker."""
        event = self.rng.random()
        if event < 0.2 and self.saved:
            iteration = self.rng.choice(sorted(self.saved))
            damaged = self.saved[iteration]._replace(problem="it is damaged")
            self.saved[iteration] = damaged
        elif event < 0.3 and self.on_nodes:
            self.on_nodes[-1] = self.on_nodes[-1]._replace(problem="no node has the files")
        elif event < 0.4:
            self.on_nodes = []
        elif event < 0.6 and len(self.saved) > 1:
            self.tracker = self.rng.choice(sorted(self.saved))
            self.was_edited = True


@pytest.mark.parametrize("seed", range(300))
def test_no_launch_loses_progress_without_a_reason(seed):
    """A launch starts from the newest usable state, unless the user has requested an older one."""
    rng = random.Random(seed)
    history = History(rng)
    history.launch(Choice(None, "the first launch"), rng.randrange(1, 10))
    for _ in range(8):
        history.disturb()
        inventory = history.describe()
        request = rng.choice(["continue", "continue", "restart", "return", "replace"])
        launch = Launch("run", in_place=True)
        if request == "restart":
            launch = launch._replace(job="job", first_generation=1)
        if request == "return" and inventory.shared:
            target = rng.choice(sorted(history.saved.values()))
            origin = Origin(target.name, False, target.lineage.iteration)
            launch = launch._replace(names_checkpoint=True, origin=origin)
            inventory = inventory._replace(named=target)
        elif request == "replace":
            launch = Launch("run", names_checkpoint=True, origin=A, override=True)
            inventory = inventory._replace(named=NAMED)
        try:
            choice = choose(launch, inventory)
        except CheckpointError:
            usable = [*inventory.shared, *inventory.local]
            is_named_damaged = inventory.named is not None and inventory.named.problem is not None
            assert is_named_damaged or all(c.problem is not None for c in usable)
            return

        # A newer checkpoint is left out only with a reason or on request.
        usable = (*inventory.shared, *inventory.newer, *inventory.local)
        reasons = dict(choice.passed_over)
        is_requested = request in ("return", "replace") or history.was_edited
        for candidate in usable:
            is_newer = choice.candidate is None or candidate.order > choice.candidate.order
            if candidate == choice.candidate or not is_newer:
                continue
            assert reasons[candidate]
            assert candidate.problem is not None or is_requested or inventory.newer
        if choice.candidate is not None:
            assert choice.candidate.problem is None
        # The same command again continues from the saves of this launch.
        history.launch(choice, rng.randrange(1, 10))
        again = choose(
            launch._replace(override=False), history.describe()._replace(named=inventory.named)
        )
        usable = [candidate for candidate in history.on_nodes if candidate.problem is None]
        assert again.candidate is not None
        assert again.candidate.order == max(candidate.order for candidate in usable)
        assert again.candidate.lineage.generation == history.launches

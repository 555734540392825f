"""Simulation of a long run with failures: the share of time that becomes training progress.

The simulated run behaves as the real one. A save blocks training briefly and is usable once it is
durable; the next save waits for it. With a local tier, a persistent checkpoint is a copy of a local
one, for which local saves do not wait. A failure ends all ranks, and the restart continues from the
newest checkpoint that survives it. All times are in seconds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from megatron.planning.save_intervals import find_best_interval

# Llama 3: 419 unexpected interruptions in 54 days on 16,384 GPUs (The Llama 3 Herd of Models, 2024)
DEVICE_HOURS_PER_FAILURE = 16384 * 54 * 24 / 419


@dataclass(frozen=True)
class SaveTier:
    """Checkpoints of one kind."""

    flag: str
    """Flag of the interval."""
    interval: int
    """Iterations between saves."""
    blocking: float
    """Time for which a save blocks training."""
    total: float
    """Time until a save is durable; with a local tier, the persistent one's is that of the copy."""
    loading: float
    """Time to load a checkpoint."""


@dataclass(frozen=True)
class Failure:
    time: float
    loses_node: bool
    """Whether a node is lost together with its replicas."""


@dataclass
class SpentTime:
    """Time of a run by its use."""

    training: float = 0.0
    """Time of iterations that are part of the result."""
    repeated: float = 0.0
    """Time of iterations that were lost in failures."""
    saving: float = 0.0
    restarting: float = 0.0

    @property
    def goodput(self) -> float:
        """Share of the time that became progress."""
        total = self.training + self.repeated + self.saving + self.restarting
        return self.training / total


@dataclass(frozen=True, eq=False)
class _Save:
    """A save of a simulated run, compared by identity: a plan simulates a million of them."""

    tier: SaveTier
    iteration: int
    durable: float  # time at which it is usable


@dataclass
class _SimulatedRun:
    """State of a simulated run."""

    persistent: SaveTier
    local: SaveTier | None
    step: float  # seconds of an iteration
    now: float = 0.0
    iteration: int = 0
    # Time of all iterations, also of those that were lost
    computed: float = 0.0
    # The newest two saves of each tier: the older one is durable.
    saves: list[_Save] = field(default_factory=list)
    spent: SpentTime = field(default_factory=SpentTime)

    def train_until(self, end: float) -> None:
        """Train and save until the time `end`."""
        while True:
            # Train up to the next save.
            due, tier = self._find_next_save()
            reached = self.now + (due - self.iteration) * self.step
            if reached >= end:
                break
            self.computed += reached - self.now
            self.now = reached
            self.iteration = due

            # Training waits for earlier saves, then for the copy to staging buffers.
            begin = self._find_begin(tier)
            resumed = begin + tier.blocking
            if resumed >= end:
                self.spent.saving += end - self.now
                self.now = end
                return
            self.spent.saving += resumed - self.now
            self.now = resumed
            self._save(tier, due, begin)
        # The run ends within an iteration.
        self.iteration += int((end - self.now) / self.step)
        self.computed += end - self.now
        self.now = end

    def fail(self, loses_node: bool) -> None:
        """Continue from the newest checkpoint that survives a failure."""
        # A save in progress is lost with the processes.
        usable = []
        for save in self.saves:
            is_left = save.tier is self.persistent or not loses_node
            if is_left and save.durable <= self.now:
                usable.append(save)
        self.saves = usable
        newest = self._get_newest_save()
        self.iteration = 0
        if newest is not None:
            self.iteration = newest.iteration

    def restart(self, seconds: float, end: float) -> None:
        """Restart and load, until the time `end` at most."""
        newest = self._get_newest_save()
        if newest is not None:
            seconds += newest.tier.loading
        ready = min(self.now + seconds, end)
        self.spent.restarting += ready - self.now
        self.now = ready

    def finish(self) -> SpentTime:
        """Return how the time was spent."""
        self.spent.training = self.iteration * self.step
        self.spent.repeated = self.computed - self.spent.training
        return self.spent

    def _find_next_save(self) -> tuple[int, SaveTier]:
        """Return the iteration of the next save, and its tier.

        If both tiers are due, only a persistent save is made.
        """
        due = _find_multiple_after(self.iteration, self.persistent.interval)
        if self.local is not None:
            locally_due = _find_multiple_after(self.iteration, self.local.interval)
            if locally_due < due:
                return locally_due, self.local
        return due, self.persistent

    def _find_begin(self, tier: SaveTier) -> float:
        """Return the time at which a save of this tier can begin."""
        begin = self.now
        for save in self.saves:
            # A local save waits for local ones only.
            if tier is self.persistent or save.tier is tier:
                begin = max(begin, save.durable)
        return begin

    def _save(self, tier: SaveTier, iteration: int, begin: float) -> None:
        """Save to the local tier, if there is one, and then to the persistent one if it is due."""
        durable = begin
        if self.local is not None:
            durable += self.local.total
            self._add_save(_Save(self.local, iteration, durable))
        if tier is self.persistent:
            durable += tier.total
            self._add_save(_Save(tier, iteration, durable))

    def _get_newest_save(self) -> _Save | None:
        """Return the save of the latest iteration, if any."""
        return max(self.saves, key=lambda save: save.iteration, default=None)

    def _add_save(self, added: _Save) -> None:
        """Add a save, and forget all but one older save of its tier."""
        older = [save for save in self.saves if save.tier is added.tier]
        if len(older) == 2:
            self.saves.remove(older[0])
        self.saves.append(added)


def _find_multiple_after(iteration: int, interval: int) -> int:
    """Return the smallest multiple of `interval` that is larger than `iteration`."""
    return (iteration // interval + 1) * interval


def simulate_run(
    tiers: Sequence[SaveTier],
    step: float,
    restart: float,
    failures: Sequence[Failure],
    duration: float,
) -> SpentTime:
    """Return how a run of `duration` spends its time.

    `tiers` are the persistent one, and optionally a local one. An iteration takes `step`, and a
    restart `restart` without loading. `failures` are sorted by time.
    """
    local = tiers[1] if len(tiers) > 1 else None
    run = _SimulatedRun(tiers[0], local, step)
    for failure in failures:
        run.restart(restart, failure.time)
        run.train_until(failure.time)
        run.fail(failure.loses_node)
    run.restart(restart, duration)
    run.train_until(duration)
    return run.finish()


def draw_failures(
    duration: float, mtbf: float, lost_node_mtbf: float, seed: int = 0
) -> Iterator[Failure]:
    """Yield failures at random times.

    One occurs every `mtbf` on average, and one that loses a node with its replicas every
    `lost_node_mtbf`.
    """
    rng = random.Random(seed)
    time = rng.expovariate(1 / mtbf)
    while time < duration:
        yield Failure(time, rng.random() < mtbf / lost_node_mtbf)
        time += rng.expovariate(1 / mtbf)


def choose_intervals(
    tiers: Sequence[SaveTier],
    step: float,
    restart: float,
    failures: Sequence[Failure],
    duration: float,
) -> Sequence[SaveTier]:
    """Return the tiers with the intervals of the highest goodput.

    The search starts at Daly's intervals and changes one interval at a time, by a factor of 1.25.
    """
    # Mean time between failures for which each tier is needed. A local checkpoint survives all
    # failures but those that lose a node.
    num_lost_nodes = sum(failure.loses_node for failure in failures)
    mtbf = duration / max(1, len(failures))
    lost_node_mtbf = duration / max(1, num_lost_nodes)
    mtbf_of_tiers = [mtbf]
    if len(tiers) > 1:
        mtbf_of_tiers = [lost_node_mtbf, mtbf]

    # Start at intervals that are not shorter than a save takes: the next one would wait.
    best: list[SaveTier] = []
    for tier, mtbf_of_tier in zip(tiers, mtbf_of_tiers, strict=True):
        seconds = find_best_interval(tier.blocking, mtbf_of_tier)
        iterations = max(seconds, tier.total) / step
        best.append(replace(tier, interval=max(1, round(iterations))))

    # Change intervals as long as the goodput grows.
    goodput = simulate_run(best, step, restart, failures, duration).goodput
    improved = True
    while improved:
        improved = False
        for index, tier in enumerate(best):
            for factor in (0.8, 1.25):
                interval = max(1, round(tier.interval * factor))
                changed = list(best)
                changed[index] = replace(tier, interval=interval)
                changed_goodput = simulate_run(changed, step, restart, failures, duration).goodput
                if changed_goodput > goodput:
                    best = changed
                    goodput = changed_goodput
                    improved = True
                    break
    return best

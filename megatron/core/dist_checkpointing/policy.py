"""The policy of a run: which checkpoint it resumes, who owns its directory, and when it saves.

The trainer and `megatron/checkpointer` are clients: they describe their checkpoints in a subclass
of `RunDirectory`, and call `SavePolicy` after every iteration. A run

1. chooses a checkpoint (`choose`) and loads it (`load`),
2. takes the directory over (`take`), and loads again if its former owner has saved meanwhile,
3. saves when the policy requests it, and then ends if a signal or a time limit requires that.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Generic, NamedTuple, TypeVar

import torch

from megatron.core.deferred import start_max_reduce
from megatron.core.dist_checkpointing.choice import Candidate, Choice, Inventory, Launch, choose
from megatron.core.dist_checkpointing.files import run_name
from megatron.core.dist_checkpointing.local_checkpoints import (
    LocalCheckpointInfo,
    LocalInventory,
    OpenLocalCheckpoint,
    Tier,
    create_tier,
    find_local_checkpoints,
    open_local_checkpoint,
)
from megatron.core.dist_checkpointing.ownership.fencing import Generation
from megatron.core.dist_checkpointing.ownership.lineage import (
    Lineage,
    identify_checkpoint,
    read_lineage,
)
from megatron.core.dist_checkpointing.ownership.takeover import (
    Job,
    identify_job,
    prepare_directory,
    take_directory,
)
from megatron.core.dist_checkpointing.planning.coordination import (
    Coordination,
    wait_until_all_ranks_see,
)
from megatron.core.dist_checkpointing.saving.run_saver import RunSaver, SaveOptions
from megatron.core.safe_files.errors import CheckpointError

logger = logging.getLogger(__name__)

SourceT = TypeVar("SourceT")  # an open checkpoint


@dataclass(frozen=True)
class CheckpointOptions(SaveOptions):
    """Options for the checkpoints of a run: how they are saved, when, and on which disks.

    A checkpoint is due every `save_interval` iterations and `save_seconds` seconds. With
    `local_directory`, on a disk of the node, a checkpoint is also saved there every
    `local_interval` iterations, and on `local_replicas` - 1 other nodes, which are
    `local_replica_distance` nodes apart (None: as far as possible).
    """

    save_interval: int | None = None
    save_seconds: float | None = None
    local_directory: str | os.PathLike[str] | None = None
    local_interval: int | None = None
    local_replicas: int = 1
    local_replica_distance: int | None = None


# ---- Resuming ----


class CheckpointRef(NamedTuple):
    """A checkpoint that can be opened."""

    directory: Path
    format: str = "torch_dist"
    note: str | None = None  # why it is not the checkpoint that the tracker names
    damaged: tuple[tuple[Path, str], ...] = ()  # newer ones that cannot be used, and why


class LaunchDescription(NamedTuple):
    """The request of a launch, and the existing checkpoints; `refs` are those in shared storage."""

    launch: Launch
    inventory: Inventory
    refs: Mapping[str, CheckpointRef]  # by name of the candidate


@dataclass(frozen=True)
class ChosenCheckpoint(Generic[SourceT]):
    """The open checkpoint that a run begins with.

    The checkpoints of the run descend from `lineage`; its branch is empty if the run begins
    a new one.
    """

    directory: Path
    source: SourceT
    choice: Choice
    lineage: Lineage
    local: OpenLocalCheckpoint | None = None  # open on the disks of the nodes
    damaged: frozenset[str] = frozenset()  # newer ones there that could not be used

    def close(self) -> None:
        """End reading from the disks of the nodes. Collective."""
        if self.local is not None:
            self.local.close()


class RunDirectory(ABC, Generic[SourceT]):
    """The directory of checkpoints that a run owns, None for a run that is not saved.

    Rank 0 decides, so that a shared file system that lags cannot make the ranks disagree. Errors
    are raised on all ranks. All public methods are collective, except `root` and `generation`.
    """

    def __init__(self, root: Path | None, options: CheckpointOptions) -> None:
        self.root = root
        self.generation: Generation | None = None  # None until `take`
        self._options = options
        self._ranks = Coordination.of(None)
        self._job = Job()
        self._tier: Tier | None = None
        self._newest: tuple[str, str] | None = None  # checkpoint when the last choice was made

    def prepare(self) -> None:
        """Create the directories, and check that they can be written to and are shared."""
        self._job = identify_job()
        if self.root is None:
            return
        root = self.root
        options = self._options
        prepare_directory(root)
        if options.local_directory is not None:
            run = self._ranks.run_on_rank0(lambda: run_name(root))
            self._tier = create_tier(
                Path(os.path.expandvars(options.local_directory)) / run,
                options.local_replicas,
                options.local_replica_distance,
                timedelta(seconds=options.timeout),
            )

    # ---- Formats and rules of the program, for subclasses ----

    @abstractmethod
    def find_saved(self) -> Path | None:
        """Return the newest complete checkpoint in the directory, None if there is none.

        Only rank 0 calls this.
        """

    @abstractmethod
    def describe(
        self, job: Job, local: LocalInventory, damaged: frozenset[str]
    ) -> LaunchDescription:
        """Describe the launch and the checkpoints for `choice.choose`, on rank 0.

        `damaged` are names of local checkpoints that have turned out to be damaged.
        """

    @abstractmethod
    def open(
        self, checkpoint: CheckpointRef, choice: Choice, *, verify: bool, waits_for_shards: bool
    ) -> SourceT:
        """Open a checkpoint on this rank; without `verify` its files are verified in any case.

        With `waits_for_shards`, another rank has seen all shards, which may appear later here.
        """

    def report(
        self, choice: Choice, checkpoint: CheckpointRef | None, damaged: frozenset[str]
    ) -> None:
        """Log the reasons of a choice, on rank 0; raise ValueError if it cannot be used."""
        if choice.candidate is None and damaged:
            raise CheckpointError(
                f"{self.root} contains no checkpoint to use instead of the damaged ones"
            )
        for explanation in choice.explain_passed_over():
            logger.warning(explanation)

    # ---- Steps of a launch ----

    def choose(self, damaged: frozenset[str] = frozenset()) -> ChosenCheckpoint[SourceT] | None:
        """Choose the checkpoint to begin with, and open it; None if there is none.

        A checkpoint on the disks of the nodes is not chosen if it is `damaged`, or cannot be
        opened.
        """
        local = find_local_checkpoints(self._tier)

        def choose_on_rank0() -> tuple[
            tuple[str, str] | None, Choice, CheckpointRef | None, LocalCheckpointInfo | None
        ]:
            # Before the choice: what is committed afterwards is noticed in `take`.
            newest = self._identify_saved()
            description = self.describe(self._job, local, damaged)
            choice = choose(description.launch, description.inventory)
            ref, info = _select(choice.candidate, description, local)
            self.report(choice, ref, damaged)
            return newest, choice, ref, info

        self._newest, choice, ref, info = self._ranks.run_on_rank0(choose_on_rank0)
        if info is not None:
            checkpoint = self._open_local(choice, info, damaged)
            # Without it, the next one may be another local checkpoint or a shared one.
            return checkpoint or self.choose(damaged | {info.name})
        return None if ref is None else self.open_shared(ref, choice)

    def open_shared(self, ref: CheckpointRef, choice: Choice) -> ChosenCheckpoint[SourceT]:
        """Open a checkpoint in shared storage on all ranks."""
        ranks = self._ranks
        wait_until_all_ranks_see(ref.directory, ranks)
        waits = not ranks.is_coordinator  # rank 0 has seen all shards
        source = ranks.run_on_all(
            lambda: self.open(ref, choice, verify=True, waits_for_shards=waits)
        )
        lineage = ranks.run_on_rank0(lambda: _make_base_lineage(choice, ref.directory))
        return ChosenCheckpoint(ref.directory, source, choice, lineage)

    def _open_local(
        self, choice: Choice, info: LocalCheckpointInfo, damaged: frozenset[str]
    ) -> ChosenCheckpoint[SourceT] | None:
        """Open a checkpoint on the disks of the nodes; None if it cannot be used."""
        assert self._tier is not None
        local = open_local_checkpoint(self._tier, info)
        ref = CheckpointRef(local.directory)
        try:
            # Everything that is read from the disks of nodes is verified in any case.
            source = self._ranks.run_on_all(
                lambda: self.open(ref, choice, verify=False, waits_for_shards=False)
            )
        except CheckpointError as refusal:
            local.close()
            logger.warning(f"{refusal}: taking an older checkpoint")
            return None
        lineage = read_lineage(local.directory)
        return ChosenCheckpoint(local.directory, source, choice, lineage, local, damaged)

    def load(
        self,
        checkpoint: ChosenCheckpoint[SourceT] | None,
        load: Callable[[ChosenCheckpoint[SourceT]], None],
    ) -> ChosenCheckpoint[SourceT] | None:
        """Load `checkpoint` with the function `load`, and return the one that was loaded.

        That is an older one if a checkpoint on the disks of the nodes turns out to be damaged.
        """
        # The run itself has chosen a checkpoint on the disks of the nodes, so it may skip damaged
        # ones. Damage of a checkpoint that the user names is an error.
        while checkpoint is not None and checkpoint.local is not None:
            try:
                load(checkpoint)
                return checkpoint
            except CheckpointError as error:
                logger.warning(f"{error}\n   taking an older checkpoint")
                damaged = checkpoint.damaged | {checkpoint.directory.name}
            finally:
                checkpoint.close()
            checkpoint = self.choose(damaged)
        if checkpoint is not None:
            load(checkpoint)
        return checkpoint

    def take(self) -> bool:
        """Take ownership of the directory, so that no earlier launch can change it any more.

        A launch takes the directory as late as possible, because that ends a run that is still
        saving to it. Returns whether that run has committed a checkpoint since the last `choose`.
        """
        assert self.root is not None
        self.generation = take_directory(self.root, self._job, self._tier)
        return self._ranks.run_on_rank0(self._identify_saved) != self._newest

    def find_newest(self) -> Path | None:
        """Return the newest complete checkpoint in the directory, None if there is none."""
        return self._ranks.run_on_rank0(self.find_saved)

    def _identify_saved(self) -> tuple[str, str] | None:
        """Return name and identity of the newest checkpoint, on rank 0.

        Two runs can save checkpoints of the same name.
        """
        saved = None if self.root is None else self.find_saved()
        return None if saved is None else (saved.name, identify_checkpoint(saved))

    def let_save(self, saver: RunSaver, loaded: ChosenCheckpoint[SourceT] | None) -> None:
        """Let `saver` save to the directory, descendants of `loaded`. Not collective."""
        if loaded is None:
            saver.own(self.generation, self._tier)
            return
        local_name = None if loaded.local is None else loaded.directory.name
        saver.own(self.generation, self._tier, loaded.lineage, local_name)


def _select(
    candidate: Candidate | None, description: LaunchDescription, local: LocalInventory
) -> tuple[CheckpointRef | None, LocalCheckpointInfo | None]:
    """Return the chosen checkpoint, in shared storage or on the disks of the nodes."""
    if candidate is None:
        return None, None
    if not candidate.is_local:
        return description.refs[candidate.name], None
    return None, next(info for info in local.checkpoints if info.name == candidate.name)


def _make_base_lineage(choice: Choice, directory: Path) -> Lineage:
    """Return the lineage from which the checkpoints of the run descend."""
    # A new branch has no ancestors; a continued one keeps those of its newest checkpoint.
    if not choice.extends_branch:
        return Lineage((), choice.origin)
    lineage = read_lineage(directory)
    if choice.origin is None:
        return lineage
    return lineage._replace(origin=choice.origin)


# ---- Saving and ending ----


class SignalRecorder:
    """Records the signals that arrive, in order, instead of terminating, until it is closed."""

    def __init__(self, signals: Collection[signal.Signals]) -> None:
        self.enabled = bool(signals)
        self.received: list[signal.Signals] = []
        # Python runs handlers between bytecodes, so that recording needs no lock.
        self._previous = {signum: signal.signal(signum, self._record) for signum in signals}

    def _record(self, signum: int, frame: FrameType | None) -> None:
        self.received.append(signal.Signals(signum))

    def close(self) -> None:
        """Restore the previous handlers."""
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._previous = {}

    def __enter__(self) -> SignalRecorder:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Votes(NamedTuple):
    """The votes of one rank, or their maxima over all ranks."""

    signal: int = 0  # its number
    late: int = 0
    save: int = 0
    failed: int = 0


class Decision(NamedTuple):
    """The decision after an iteration; the same on every rank."""

    save: bool
    save_locally: bool
    signal: signal.Signals | None = None  # has arrived: end after this iteration
    is_late: bool = False  # the time limit ends the run after this iteration

    @property
    def ends(self) -> bool:
        return self.signal is not None or self.is_late


class SavePolicy:
    """Decides after every iteration whether to save and whether to end.

    All ranks must save and end at the same iteration, but a signal may reach only one rank, clocks
    differ, and one rank may be the first to notice that a save has failed. If an option requires
    it, the ranks exchange votes and act on their maximum. The votes of an iteration are counted
    after the next one, so that no rank waits for the exchange.

    Call `after` once per iteration on all ranks, and `finish` after the last. `clock` returns the
    time in seconds; `max_seconds` is the time limit of the run, which began at `started`.
    """

    def __init__(
        self,
        options: CheckpointOptions,
        saver: RunSaver,
        signals: SignalRecorder,
        device: torch.device,
        clock: Callable[[], float] = time.monotonic,
        started: float = 0.0,
        max_seconds: float | None = None,
        votes_on_failure: bool = False,
    ) -> None:
        self._options = options
        self._saver = saver
        self._signals = signals
        self._device = device
        self._clock = clock
        self._started = started
        self._max_seconds = max_seconds
        self._votes_on_failure = votes_on_failure
        self._last_save = clock()
        self._needs_votes = (
            signals.enabled
            or max_seconds is not None
            or options.save_seconds is not None
            or votes_on_failure
        )
        self._exchange: Callable[[], list[int]] | None = None  # in progress

    def after(self, iteration: int, seconds: float = 0.0) -> Decision:
        """Decide whether to save and end after `iteration`, which took `seconds`.

        Signals and timers take effect one iteration later. Raises SaveFailedError on all ranks
        together if a background save has failed and the policy votes on that.
        """
        votes = self.finish()
        if votes.failed:
            self._saver.stop()
        save = bool(votes.save) or is_multiple(iteration, self._options.save_interval)
        if save:
            self.restart_timer()
        decision = Decision(
            save,
            is_multiple(iteration, self._options.local_interval) and not save,
            signal.Signals(votes.signal) if votes.signal else None,
            bool(votes.late),
        )
        if self._needs_votes and not decision.ends:
            self._exchange = start_max_reduce(self._make_votes(seconds), self._device)
        return decision

    def restart_timer(self) -> None:
        """Count `save_seconds` from now on, because a checkpoint is saved."""
        self._last_save = self._clock()

    def finish(self) -> Votes:
        """Complete the last exchange, for which other ranks may be waiting."""
        if self._exchange is None:
            return Votes()
        exchange = self._exchange
        self._exchange = None
        return Votes(*exchange())

    def _make_votes(self, seconds: float) -> Votes:
        """Return this rank's votes; the last iteration took `seconds`."""
        now = self._clock()
        # The number of the signal, so that the maximum over ranks names one that arrived.
        received = int(self._signals.received[0]) if self._signals.received else 0

        # The vote takes effect after the next iteration, and then the last save must still fit in.
        end = now - self._started + 2 * seconds + self._saver.expected_seconds
        is_late = self._max_seconds is not None and end > self._max_seconds

        interval = self._options.save_seconds
        is_save_due = interval is not None and now - self._last_save >= interval
        has_failed = self._votes_on_failure and self._saver.failure is not None
        return Votes(received, is_late, is_save_due, has_failed)


def is_multiple(iteration: int, interval: int | None) -> bool:
    """Return whether something with this interval is due; None and 0 mean never."""
    return bool(interval) and iteration % interval == 0  # type: ignore[operator]

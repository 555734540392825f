"""Checkpoints of a training loop in plain PyTorch: policy, ownership, loading and saving."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypedDict

import torch
from torch import nn
from torch.optim import Optimizer

from megatron.checkpointer.export import export_safetensors
from megatron.checkpointer.state import ProgramState, Stateful
from megatron.core.deferred import start_max_reduce
from megatron.core.dist_checkpointing.checkpoint_directory import CheckpointDirectory
from megatron.core.dist_checkpointing.choice import Candidate, Inventory, Launch, choose
from megatron.core.dist_checkpointing.completeness import find_missing_or_truncated
from megatron.core.dist_checkpointing.files import is_complete, run_name
from megatron.core.dist_checkpointing.format.verified_file import load_common
from megatron.core.dist_checkpointing.generation import Generation
from megatron.core.dist_checkpointing.lineage import Lineage, read_lineage
from megatron.core.dist_checkpointing.loading.reader import Reader
from megatron.core.dist_checkpointing.local_checkpoints import (
    LocalCheckpointInfo,
    OpenLocalCheckpoint,
    Tier,
    create_tier,
    find_local_checkpoints,
    open_local_checkpoint,
)
from megatron.core.dist_checkpointing.ownership import (
    identify_job,
    prepare_directory,
    take_directory,
)
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.dist_checkpointing.saving.retention import RetentionRules
from megatron.core.dist_checkpointing.saving.run_saver import RunSaver, SaveOptions
from megatron.core.dist_checkpointing.saving.save_thread import SaveReport
from megatron.core.dist_checkpointing.visibility import wait_until_all_ranks_see
from megatron.core.object_path import path_of
from megatron.core.safe_files.errors import CheckpointError

logger = logging.getLogger(__name__)

_ITERATION = "iteration"  # in common.pt


class _Votes(NamedTuple):
    """Requests of one rank, or their maxima over all ranks."""

    signal: int = 0  # its number
    save: int = 0


class _Loaded(NamedTuple):
    """Result of a load: the step to continue with, and where the run's checkpoints descend from."""

    step: int = 0
    newest: str | None = None  # complete checkpoint in the directory of the run
    lineage: Lineage | None = None
    local_name: str | None = None  # of the checkpoint on the disks of the nodes


class CheckpointerOptions(TypedDict, total=False):
    """The options of `Checkpointer`, for integrations that pass them on."""

    async_save: bool
    save_interval: int | None
    save_seconds: float | None
    exit_signals: Collection[signal.Signals]
    keep_last: int | None
    keep_every: int | None
    local_directory: str | os.PathLike[str] | None
    local_interval: int | None
    local_replicas: int
    local_replication_interval: int
    workers: int
    staging_mem_limit: int | None
    timeout: float
    must_succeed: bool
    override_existing_run: bool
    on_saved: Callable[[SaveReport], None]
    clock: Callable[[], float]


class Checkpointer:
    """Saves and resumes a training loop. All ranks make the same calls in the same order.

        ckpt = Checkpointer("run", model, optimizer, scheduler=scheduler, save_interval=1000)
        for step in range(ckpt.load(), steps):
            train_step()
            if ckpt.step(step):
                break
        ckpt.close()

    A `with` block closes it as well. If the program ends otherwise, e.g., by an exception, the save
    in progress is finished at exit; with several ranks, if that takes at most a minute.

    `model` is any module: plain, in DistributedDataParallel, sharded by `fully_shard` (FSDP2),
    split by `parallelize_module`, compiled. Create optimizers after wrapping it. `optimizer` is one
    optimizer or a sequence. `scheduler`, `dataloader` and `objects` are anything with `state_dict`
    and `load_state_dict` of plain types: the data loader's state is saved for every rank, the
    others' by rank 0.

    `directory` is a local or shared directory, or an object storage URL such as `s3://bucket/run`.
    Checkpoints are saved by `step` every `save_interval` steps and `save_seconds` seconds, and when
    one of `exit_signals` arrives, and by `save`. With `async_save` they are written in the
    background; the next step of the optimizer waits until its state is copied to host memory, which
    takes up to `staging_mem_limit` bytes (default: the size of a rank's share).

    After a save, older checkpoints are removed unless they are among the last `keep_last` or at a
    multiple of `keep_every` steps; without either, all are kept. With `local_directory` (on a disk
    of the node) a checkpoint is also saved there every `local_interval` steps, and on
    `local_replicas` - 1 other nodes; `load` uses it if it is the newest. Only the first of every
    `local_replication_interval` of them is stored on other nodes, which costs less training time;
    the loss of a node then goes back to that one.

    A save that fails is logged, and training goes on with the previous checkpoint, unless
    `must_succeed`. SaveFailedError is raised if another launch has taken over the directory.
    `on_saved` is called on every rank, by a later method call of this object, with the times and
    sizes of each committed checkpoint.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        *,
        scheduler: Stateful | None = None,
        dataloader: Stateful | None = None,
        objects: Mapping[str, Stateful] | None = None,
        async_save: bool = True,
        save_interval: int | None = None,
        save_seconds: float | None = None,
        exit_signals: Collection[signal.Signals] = (),
        keep_last: int | None = None,
        keep_every: int | None = None,
        local_directory: str | os.PathLike[str] | None = None,
        local_interval: int | None = None,
        local_replicas: int = 1,
        local_replication_interval: int = 1,
        workers: int = 2,
        staging_mem_limit: int | None = None,
        timeout: float = 600.0,
        must_succeed: bool = False,
        override_existing_run: bool = False,
        on_saved: Callable[[SaveReport], None] = lambda report: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        limits = {
            "save_interval": save_interval,
            "save_seconds": save_seconds,
            "keep_last": keep_last,
            "keep_every": keep_every,
            "local_interval": local_interval,
            "local_replicas": local_replicas,
            "local_replication_interval": local_replication_interval,
        }
        for name, limit in limits.items():
            if limit is not None and limit <= 0:
                raise ValueError(f"{name} {limit} must be positive")
        if (local_directory is None) != (local_interval is None):
            raise ValueError("local_directory and local_interval require each other")
        self._root = path_of(directory)
        self._optimizers = _as_sequence(optimizer)
        once = dict(objects or {})
        if scheduler is not None:
            once["scheduler"] = scheduler
        per_rank = {} if dataloader is None else {"dataloader": dataloader}
        self._state = ProgramState(model, self._optimizers, once, per_rank)
        self._device = _find_device(model)
        self._saver = RunSaver(
            SaveOptions(
                async_save=async_save,
                workers=workers,
                staging_mem_limit=staging_mem_limit,
                timeout=timeout,
                must_succeed=must_succeed,
                retention=RetentionRules(keep_last=keep_last, keep_every=keep_every),
                replication_interval=local_replication_interval,
            ),
            lambda report, is_local: on_saved(report),
        )

        # When to save.
        self._save_interval = save_interval
        self._save_seconds = save_seconds
        self._local_interval = local_interval
        self._clock = clock
        self._last_save = clock()
        self._exchange: Callable[[], list[int]] | None = None  # of votes, in progress
        self._signals = _SignalRecorder(exit_signals)

        # Ownership of the directory.
        self._override = override_existing_run
        self._timeout = timeout
        self._local_directory = local_directory
        self._local_replicas = local_replicas
        self._job = identify_job()
        self._generation: Generation | None = None
        self._tier: Tier | None = None
        self._saved_iteration: int | None = None
        prepare_directory(self._root)
        if local_directory is not None:
            self._tier = self._open_tier(Path(local_directory))

        # The optimizer must not change anything that is still being copied.
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._saver.before_update())
            for optimizer in self._optimizers
        ]

    def _open_tier(self, directory: Path) -> Tier:
        run = Coordination.of(None).run_on_rank0(lambda: run_name(self._root))
        expanded = Path(os.path.expandvars(directory))
        timeout = timedelta(seconds=self._timeout)
        return create_tier(expanded / run, self._local_replicas, None, timeout)

    # ---- Loading ----

    def load(
        self,
        initial: str | os.PathLike[str] | None = None,
        *,
        weights_only: bool = False,
        skip: Collection[str] = (),
    ) -> int:
        """Load the newest complete checkpoint of the run, and return the step to continue with.

        The number of ranks and the sharding may differ from those that saved it. Takes ownership of
        the directory: an earlier launch of the run cannot save to it any more.

        If the directory contains no checkpoint, the run begins with the checkpoint `initial`, if
        given (ours, or any other DCP directory with the same names), or with the present state; the
        result is then 0, or the step of `initial`. With `weights_only` only the model is loaded
        from `initial`, and the run begins at step 0. `skip` are names of objects ("scheduler",
        "dataloader", ...), "optimizer" or "rng" to leave as they are.

        Raises CheckpointError on every rank if the checkpoint does not fit the program.
        """
        loaded = self._load_newest(initial, weights_only, skip)
        # Take ownership only after a successful load: a launch that fails must not end another run.
        self._take_directory()
        if self._identify_newest() != loaded.newest:
            # The launch that has lost the directory has committed a checkpoint in the meantime.
            loaded = self._load_newest(initial, weights_only, skip)
        self._saver.own(self._generation, self._tier, loaded.lineage, loaded.local_name)
        return loaded.step

    def _load_newest(
        self, initial: str | os.PathLike[str] | None, weights_only: bool, skip: Collection[str]
    ) -> _Loaded:
        newest = self._identify_newest()
        candidate, local = self._choose()
        if local is not None:
            try:
                step = self._load_from(local.directory, False, skip, verify=False)
                lineage = read_lineage(local.directory)
            finally:
                local.close()
            return _Loaded(step, newest, lineage, local.directory.name)
        if candidate is not None:
            directory = path_of(candidate.name)
            ranks = Coordination.of(None)
            wait_until_all_ranks_see(directory, ranks)
            # Rank 0 has seen all shards.
            waits = not ranks.is_coordinator
            step = self._load_from(directory, False, skip, waits_for_shards=waits)
            return _Loaded(step, newest, candidate.lineage)
        if initial is not None:
            return _Loaded(self._load_from(path_of(initial), weights_only, skip))
        return _Loaded()

    def read_object(self, name: str) -> Any:
        """Return the state of an object in the checkpoint that `load` would load.

        Returns None if the directory contains no checkpoint. Collective. Does not write files.
        """
        candidate, local = self._choose()
        if local is not None:
            try:
                return _read_stored_object(local.directory, name, verify=False)
            finally:
                local.close()
        if candidate is not None:
            return _read_stored_object(path_of(candidate.name), name)
        return None

    def _identify_newest(self) -> str | None:
        """Return the newest complete checkpoint in the directory, None if there is none.

        Collective.
        """

        def identify() -> str | None:
            shared, _ = CheckpointDirectory(self._root).describe(_find_problem)
            return shared[-1].name if shared and shared[-1].problem is None else None

        return Coordination.of(None).run_on_rank0(identify)

    def _choose(self) -> tuple[Candidate | None, OpenLocalCheckpoint | None]:
        """Return the checkpoint to continue from, open if it is on the disks of the nodes.

        Collective.
        """
        local = find_local_checkpoints(self._tier)

        def choose_on_rank0() -> tuple[Candidate | None, LocalCheckpointInfo | None]:
            shared, newer = CheckpointDirectory(self._root).describe(_find_problem)
            candidates = [info.to_candidate() for info in local.checkpoints]
            inventory = Inventory(
                tuple(shared), tuple(newer), tuple(candidates), tuple(local.of_other_runs)
            )
            choice = choose(Launch(save=str(self._root), in_place=True), inventory)
            for explanation in choice.explain_passed_over():
                logger.warning(explanation)
            if choice.candidate not in candidates:
                return choice.candidate, None
            return choice.candidate, local.checkpoints[candidates.index(choice.candidate)]

        # All ranks must open the same checkpoint.
        candidate, info = Coordination.of(None).run_on_rank0(choose_on_rank0)
        if info is None:
            return candidate, None
        assert self._tier is not None
        return candidate, open_local_checkpoint(self._tier, info)

    def _load_from(
        self,
        directory: Path,
        weights_only: bool,
        skip: Collection[str],
        verify: bool = True,
        waits_for_shards: bool = False,
    ) -> int:
        ranks = Coordination.of(None)
        reader = ranks.run_on_all(
            lambda: Reader(directory, verify=verify, waits_for_shards=waits_for_shards)
        )
        # Rank 0 reads the small file for all ranks.
        common = ranks.run_on_rank0(lambda: load_common(directory, verify=verify))
        self._state.load(reader, str(directory), weights_only=weights_only, skip=skip)
        iteration = common.get(_ITERATION, 0)
        if weights_only or not isinstance(iteration, int):
            return 0
        logger.info(f"loaded {directory}")
        return iteration

    def _take_directory(self) -> None:
        self._generation = take_directory(self._root, self._job, self._tier)

    # ---- Saving ----

    def step(self, step: int) -> bool:
        """Save if a checkpoint is due after training step `step`, the first of which is 0.

        Returns whether the program should end because a signal has arrived; its state is then
        saved, and `close` waits for that. Signals and `save_seconds` take effect one step later, so
        that no rank waits for the others.
        """
        iteration = step + 1
        # The exchange was started at the end of the last step: it has usually ended by now.
        self._saver.after_iteration()
        votes = self._count_votes()
        is_due = self._save_interval is not None and iteration % self._save_interval == 0
        if is_due or votes.save or votes.signal:
            self.save(iteration)
        elif self._local_interval is not None and iteration % self._local_interval == 0:
            self._save_locally(iteration)
        if votes.signal:
            logger.info(f"{signal.Signals(votes.signal).name} was received: ending after {step}")
            return True
        self._start_votes()
        return False

    def save(self, iteration: int) -> None:
        """Save the state after `iteration` steps; wait for the commit unless `async_save`.

        If that iteration is already saved, only wait for the commit.
        """
        # E.g., a final save of the program after one that was due at the last step.
        if iteration == self._saved_iteration:
            self._saver.finish()
            if not self._saver.last_save_failed:
                return
        since = time.perf_counter()
        self._ensure_ownership()
        self._saver.save(
            self._state.to_sharded(),
            self._root,
            iteration,
            {_ITERATION: iteration},
            since=since,
            last=False,
        )
        self._saved_iteration = iteration
        self._last_save = self._clock()

    def _save_locally(self, iteration: int) -> None:
        since = time.perf_counter()
        self._ensure_ownership()
        self._saver.save_locally(
            self._state.to_sharded(), iteration, {_ITERATION: iteration}, since
        )

    def _ensure_ownership(self) -> None:
        """Take ownership of the directory if `load` was not called."""
        if self._generation is not None:
            return
        newest = self._identify_newest()
        if newest is not None and not self._override:
            raise CheckpointError(
                f"{self._root} contains {path_of(newest).name} of a run that this program "
                "does not continue: call load() first, use another directory, or replace the run "
                "with override_existing_run=True"
            )
        self._take_directory()
        self._saver.own(self._generation, self._tier)

    def wait_staged(self) -> None:
        """Wait until the state of the last save may change.

        The optimizers do so before every step. Call it before other changes to parameters or
        optimizer state, e.g. before loading weights.
        """
        self._saver.before_update()

    def finish(self) -> None:
        """Wait for the saves in progress.

        Raises SaveFailedError on all ranks if one has failed that `must_succeed`.
        """
        self._saver.finish()

    def close(self) -> None:
        """Wait for the saves in progress, end the threads and restore the signal handlers.

        Raises SaveFailedError if the last save has failed.
        """
        if self._exchange is not None:
            self._exchange()
            self._exchange = None
        self._signals.close()
        for hook in self._hooks:
            hook.remove()
        self._saver.close()
        self._saver.check_last_save()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is None:
            self.close()
        else:
            # The program may go on, and change its state.
            self._saver.before_update()
            self._signals.close()
            for hook in self._hooks:
                hook.remove()
            # Other ranks may not be here: the save in progress ends with the program.
            if Coordination.of(None).size == 1:
                self._saver.end_alone()

    # ---- Other formats ----

    def to_safetensors(
        self, directory: str | os.PathLike[str], *, max_file_size: int = 2 << 30
    ) -> None:
        """Write the weights of the newest checkpoint as safetensors files with an index.

        Names are those of the model. Rank 0 reads the checkpoint and writes; its memory is one file
        of at most `max_file_size` bytes (or one tensor). The directory must not exist yet.
        """
        self.finish()
        newest = self._identify_newest()
        if newest is None:
            raise CheckpointError(f"{self._root} contains no checkpoint to export")
        source = path_of(newest)
        Coordination.of(None).run_on_rank0(
            lambda: export_safetensors(source, Path(directory), max_file_size)
        )

    # ---- Votes ----

    def _start_votes(self) -> None:
        """Begin to exchange the requests of this rank, if there can be any."""
        if self._save_seconds is None and not self._signals.enabled:
            return
        votes = _Votes(
            signal=self._signals.first(),
            save=self._save_seconds is not None
            and self._clock() - self._last_save >= self._save_seconds,
        )
        self._exchange = start_max_reduce(votes, self._device)

    def _count_votes(self) -> _Votes:
        exchange = self._exchange
        self._exchange = None
        # The maximum over ranks: one request suffices, and all ranks act on it.
        return _Votes() if exchange is None else _Votes(*exchange())


def _read_stored_object(directory: Path, name: str, verify: bool = True) -> Any:
    """Read an object on rank 0, and return it on all ranks."""

    def read() -> Any:
        reader = Reader(directory, verify=verify)
        if name not in reader.metadata.objects:
            raise CheckpointError(f"{directory}: contains no object {name}")
        return reader.read_object(name)

    return Coordination.of(None).run_on_rank0(read)


def _find_problem(directory: Path) -> str | None:
    """Return why a checkpoint cannot be loaded, None if it can."""
    if not is_complete(directory):
        return f"{directory} is not complete"
    problems = find_missing_or_truncated(directory)
    return f"{directory} is damaged: {problems[0]}" if problems else None


class _SignalRecorder:
    """Records the signals that arrive, instead of terminating, until it is closed."""

    def __init__(self, signals: Collection[signal.Signals]) -> None:
        self.enabled = bool(signals)
        self._received: list[int] = []
        # Python runs handlers between bytecodes, so that recording needs no lock.
        self._before = {signum: signal.signal(signum, self._record) for signum in signals}

    def _record(self, signum: int, frame: FrameType | None) -> None:
        self._received.append(signum)

    def first(self) -> int:
        """Return the number of the first signal, 0 if none has arrived."""
        return self._received[0] if self._received else 0

    def close(self) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before = {}


def _as_sequence(optimizer: Optimizer | Sequence[Optimizer] | None) -> tuple[Optimizer, ...]:
    if optimizer is None:
        return ()
    if isinstance(optimizer, Optimizer):
        return (optimizer,)
    return tuple(optimizer)


def _find_device(model: nn.Module) -> torch.device:
    """Return the device that an NCCL group of this process communicates from."""
    for parameter in model.parameters():
        return parameter.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")

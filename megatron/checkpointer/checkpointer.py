"""Checkpoints of a training loop in plain PyTorch: policy, ownership, loading and saving."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import nn
from torch.optim import Optimizer

from megatron.checkpointer.safetensors_export import export_safetensors
from megatron.checkpointer.state import ProgramState, Stateful
from megatron.core.dist_checkpointing.checkpoint_directory import (
    CheckpointDirectory,
    find_missing_or_truncated,
)
from megatron.core.dist_checkpointing.choice import Choice, Inventory, Launch
from megatron.core.dist_checkpointing.files import is_complete
from megatron.core.dist_checkpointing.format.verified_file import load_common
from megatron.core.dist_checkpointing.loading.reader import Reader
from megatron.core.dist_checkpointing.local_checkpoints import LocalInventory
from megatron.core.dist_checkpointing.ownership.takeover import Job
from megatron.core.dist_checkpointing.planning.coordination import Coordination
from megatron.core.dist_checkpointing.policy import (
    CheckpointOptions,
    CheckpointRef,
    ChosenCheckpoint,
    LaunchDescription,
    RunDirectory,
    SavePolicy,
    SignalRecorder,
)
from megatron.core.dist_checkpointing.saving.retention import RetentionRules
from megatron.core.dist_checkpointing.saving.run_saver import RunSaver
from megatron.core.dist_checkpointing.saving.save_thread import SaveReport
from megatron.core.object_path import path_of
from megatron.core.safe_files.errors import CheckpointError

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger(__name__)

_ITERATION = "iteration"  # in common.pt
_POSITIVE = (
    "save_interval",
    "save_seconds",
    "keep_last",
    "keep_every",
    "local_interval",
    "local_replicas",
    "local_replication_interval",
)


class CheckpointerOptions(TypedDict, total=False):
    """The options of `Checkpointer`, all of them optional, and of the callbacks built on it."""

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
        **options: Unpack[CheckpointerOptions],
    ) -> None:
        self._root = path_of(directory)
        self._optimizers = _as_sequence(optimizer)
        self._clock = options.pop("clock", time.monotonic)
        self._override = options.pop("override_existing_run", False)
        on_saved = options.pop("on_saved", lambda report: None)
        exit_signals = options.pop("exit_signals", ())
        self._options = _make_checkpoint_options(options)
        once = dict(objects or {})
        if scheduler is not None:
            once["scheduler"] = scheduler
        per_rank = {} if dataloader is None else {"dataloader": dataloader}
        self._state = ProgramState(model, self._optimizers, once, per_rank)
        self._saver = RunSaver(self._options, lambda report, is_local: on_saved(report))
        self._saved_iteration: int | None = None
        self._signals = SignalRecorder(exit_signals)
        self._policy = SavePolicy(
            self._options, self._saver, self._signals, _find_device(model), self._clock
        )
        self._directory = _ProgramDirectory(self._root, self._options)
        self._directory.prepare()

        # The optimizer must not change anything that is still being copied.
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._saver.before_update())
            for optimizer in self._optimizers
        ]

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
        step, checkpoint = self._load_newest(initial, weights_only, skip)
        # Take ownership only after a successful load: a launch that fails must not end another run.
        if self._directory.take():
            step, checkpoint = self._load_newest(initial, weights_only, skip)
        self._directory.let_save(self._saver, checkpoint)
        return step

    def _load_newest(
        self, initial: str | os.PathLike[str] | None, weights_only: bool, skip: Collection[str]
    ) -> tuple[int, ChosenCheckpoint[Reader] | None]:
        """Return the step to continue with, and the checkpoint of the run that was loaded."""
        step = 0

        def load(checkpoint: ChosenCheckpoint[Reader]) -> None:
            nonlocal step
            step = self._load_from(
                checkpoint.source, checkpoint.directory, False, skip, checkpoint.local is None
            )

        checkpoint = self._directory.load(self._directory.choose(), load)
        if checkpoint is None and initial is not None:
            directory = path_of(initial)
            reader = Coordination.of(None).run_on_all(lambda: Reader(directory))
            step = self._load_from(reader, directory, weights_only, skip)
        return step, checkpoint

    def read_object(self, name: str) -> Any:
        """Return the state of an object in the checkpoint that `load` would load.

        Returns None if the directory contains no checkpoint. Collective. Does not write files.
        """
        checkpoint = self._directory.choose()
        if checkpoint is None:
            return None
        reader = checkpoint.source

        def read() -> Any:
            if name not in reader.metadata.objects:
                raise CheckpointError(f"{checkpoint.directory}: contains no object {name}")
            return reader.read_object(name)

        try:
            return Coordination.of(None).run_on_rank0(read)
        finally:
            checkpoint.close()

    def _load_from(
        self,
        reader: Reader,
        directory: Path,
        weights_only: bool,
        skip: Collection[str],
        verify: bool = True,
    ) -> int:
        # Rank 0 reads the small file for all ranks.
        common = Coordination.of(None).run_on_rank0(lambda: load_common(directory, verify=verify))
        self._state.load(reader, str(directory), weights_only=weights_only, skip=skip)
        iteration = common.get(_ITERATION, 0)
        if weights_only or not isinstance(iteration, int):
            return 0
        logger.info(f"loaded {directory}")
        return iteration

    # ---- Saving ----

    def step(self, step: int) -> bool:
        """Save if a checkpoint is due after training step `step`, the first of which is 0.

        Returns whether the program should end because a signal has arrived; its state is then
        saved, and `close` waits for that. Signals and `save_seconds` take effect one step later, so
        that no rank waits for the others.
        """
        iteration = step + 1
        self._saver.after_iteration()
        decision = self._policy.after(iteration)
        if decision.save or decision.signal is not None:
            self.save(iteration)
        elif decision.save_locally:
            self._save_locally(iteration)
        if decision.signal is not None:
            logger.info(f"{decision.signal.name} was received: ending after {step}")
        return decision.ends

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
        self._policy.restart_timer()

    def _save_locally(self, iteration: int) -> None:
        since = time.perf_counter()
        self._ensure_ownership()
        self._saver.save_locally(
            self._state.to_sharded(), iteration, {_ITERATION: iteration}, since
        )

    def _ensure_ownership(self) -> None:
        """Take ownership of the directory if `load` was not called."""
        directory = self._directory
        if directory.generation is not None:
            return
        newest = directory.find_newest()
        if newest is not None and not self._override:
            raise CheckpointError(
                f"{self._root} contains {newest.name} of a run that this program "
                "does not continue: call load() first, use another directory, or replace the run "
                "with override_existing_run=True"
            )
        directory.take()
        directory.let_save(self._saver, None)

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
        self._policy.finish()
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
        source = self._directory.find_newest()
        if source is None:
            raise CheckpointError(f"{self._root} contains no checkpoint to export")
        Coordination.of(None).run_on_rank0(
            lambda: export_safetensors(source, Path(directory), max_file_size)
        )


class _ProgramDirectory(RunDirectory[Reader]):
    """A directory of checkpoints of this library, of which the newest one is continued."""

    def find_saved(self) -> Path | None:
        assert self.root is not None
        shared, _ = CheckpointDirectory(self.root).describe(_find_problem)
        return path_of(shared[-1].name) if shared and shared[-1].problem is None else None

    def describe(
        self, job: Job, local: LocalInventory, damaged: frozenset[str]
    ) -> LaunchDescription:
        assert self.root is not None
        shared, newer = CheckpointDirectory(self.root).describe(_find_problem)
        inventory = Inventory(
            tuple(shared),
            tuple(newer),
            tuple(info.to_candidate(damaged) for info in local.checkpoints),
            tuple(local.of_other_runs),
        )
        refs = {candidate.name: CheckpointRef(path_of(candidate.name)) for candidate in shared}
        return LaunchDescription(Launch(save=str(self.root), in_place=True), inventory, refs)

    def open(
        self, checkpoint: CheckpointRef, choice: Choice, *, verify: bool, waits_for_shards: bool
    ) -> Reader:
        return Reader(checkpoint.directory, verify=verify, waits_for_shards=waits_for_shards)


def _find_problem(directory: Path) -> str | None:
    """Return why a checkpoint cannot be loaded, None if it can."""
    if not is_complete(directory):
        return f"{directory} is not complete"
    problems = find_missing_or_truncated(directory)
    return f"{directory} is damaged: {problems[0]}" if problems else None


def _make_checkpoint_options(options: CheckpointerOptions) -> CheckpointOptions:
    """Return the options of the policy; raises ValueError for values that are out of range."""
    values: dict[str, Any] = {**options}
    for name in _POSITIVE:
        limit = values.get(name)
        if limit is not None and limit <= 0:
            raise ValueError(f"{name} {limit} must be positive")
    if (values.get("local_directory") is None) != (values.get("local_interval") is None):
        raise ValueError("local_directory and local_interval require each other")
    retention = RetentionRules(
        keep_last=values.pop("keep_last", None), keep_every=values.pop("keep_every", None)
    )
    defaults = CheckpointOptions(
        async_save=True,
        retention=retention,
        replication_interval=values.pop("local_replication_interval", 1),
    )
    return dataclasses.replace(defaults, **values)


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

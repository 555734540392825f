"""A rank under --inprocess-restart: it repeats its program until an attempt completes."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.core.parallel_state import forget_groups
from megatron.core.terminal import print_line
from megatron.training.config.run_options import RestartConfig
from megatron.training.fatal_errors import explain_lack_of_memory, is_lost_rank
from megatron.training.rendezvous import environment_rank, environment_world_size
from megatron.training.reporting.console import configure_logging
from megatron.training.restart.attempts import AttemptBoard, Progress, SharedProgress
from megatron.training.restart.interruption import NEW_PROCESS, AttemptEndedError, Interrupter
from megatron.training.restart.preloading import ModulePipe

logger = logging.getLogger(__name__)

STACKS_SIGNAL = signal.SIGQUIT  # prints the stacks of all threads
_LAST_CALL_WAIT = timedelta(seconds=0.5)
_MAX_FRUITLESS = 5  # attempts in a row without a single iteration

Program = Callable[[Callable[[], None]], None]
"""The program of a rank. It calls its argument after every iteration."""


class RanksMissingError(ValueError):
    """Not all ranks take part in an attempt, so that the launcher must restart the job."""


class Worker:
    """Repeats `program` in this process, which a monitor has forked and watches."""

    def __init__(
        self,
        config: RestartConfig,
        prefix: str,
        progress: SharedProgress,
        program: Program,
        modules: ModulePipe,
    ) -> None:
        self._config = config
        self._prefix = prefix
        self._progress = progress
        self._program = program
        self._modules = modules
        self._board = AttemptBoard(prefix)  # of the main thread; attempts cannot close it
        self._interrupter = Interrupter(prefix)
        # After an error of NCCL, torch's watchdog waits for this time four times (60 s by default)
        # with a lock that the main thread needs, before it ends the process.
        os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "250")
        faulthandler.register(STACKS_SIGNAL, all_threads=True)
        self._restarts_before = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))

    def run(self) -> None:
        """Run the program until an attempt completes.

        Raises the error of an attempt that must not be repeated in this process.
        """
        while not self._run_attempt(self._progress.read()):
            self._forget_attempt()
            self._enter_next_attempt()

    def _run_attempt(self, progress: Progress) -> bool:
        """Return whether the attempt has completed, false if this process goes on to the next."""
        attempt = progress.attempt
        if attempt > 0:
            self._announce(progress)
        try:
            with self._interrupter.interruptible(attempt):
                self._await_all_ranks(attempt)
                self._program(self._count_iteration)
        except AttemptEndedError:
            return False
        except Exception as error:
            self._handle_error(attempt, error)
            return False
        return True

    def _count_iteration(self) -> None:
        self._progress.count_iteration()
        if self._progress.read().iterations == 1:
            self._modules.report()

    def _await_all_ranks(self, attempt: int) -> None:
        board = AttemptBoard(self._prefix)  # closed when the attempt ends, which ends the wait
        board.select_store(attempt)
        timeout = self._config.inprocess_barrier_timeout
        try:
            board.arrive(attempt, environment_world_size(), timedelta(seconds=timeout))
        except dist.DistStoreError as error:
            if self._board.has_ended(attempt):
                raise
            raise RanksMissingError(
                f"in-process restart {attempt}: not all {environment_world_size()} ranks have "
                f"arrived within --inprocess-barrier-timeout {timeout:g}"
            ) from error

    def _handle_error(self, attempt: int, error: Exception) -> None:
        """Return if this process can take part in the next attempt; otherwise raise."""
        # The monitor of a lost rank reports a better reason than its peers.
        if self._board.wait_for_end(attempt, _LAST_CALL_WAIT):
            return
        # The same start would end with the same error of the user.
        if isinstance(error, ValueError) or explain_lack_of_memory(error) is not None:
            raise error
        first_line = f"{type(error).__name__}: {error}".partition("\n")[0]
        self._board.end(attempt, f"rank {environment_rank()}: {first_line}")
        if not is_lost_rank(error):
            # The state of this process is unknown.
            traceback.print_exception(error)
            sys.stderr.flush()
            sys.exit(NEW_PROCESS)

    def _forget_attempt(self) -> None:
        """Release the objects of the last attempt: groups, threads, tensors."""
        # Background threads of the attempt may still wait for other ranks.
        self._interrupter.abort_communication()
        if dist.is_initialized():
            # Aborted groups cannot be destroyed in order.
            with contextlib.suppress(RuntimeError, ValueError):
                dist.destroy_process_group()
        if distributed_c10d._world.group_count > 0:
            # The creation of the default group was interrupted. torch has counted it and would
            # give the next one another name than in a new process, so that ranks would wait for
            # each other under different names.
            sys.exit(NEW_PROCESS)
        forget_groups()
        gc.collect()
        if torch.cuda.is_initialized():
            self._finish_work_of_device()
        self._interrupter.release()

    def _finish_work_of_device(self) -> None:
        """Wait until no kernel of the last attempt can write to memory that the next one uses."""
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            # The context of this process cannot be used any more.
            traceback.print_exc()
            sys.stderr.flush()
            sys.exit(NEW_PROCESS)
        if self._config.inprocess_empty_cuda_cache:
            torch.cuda.empty_cache()

    def _enter_next_attempt(self) -> None:
        progress = self._progress.read()
        attempt = self._board.find_current(progress.attempt)
        self._progress.write(progress.enter(attempt))

    def _announce(self, progress: Progress) -> None:
        """Log why the last attempt has ended, and identify this one as a restart of the job."""
        attempt = progress.attempt
        reason = self._board.read_reason(attempt - 1)
        check_limits(self._config, progress, reason)
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(self._restarts_before + attempt)
        os.environ["SLURM_RESTART_COUNT"] = str(attempt)  # without torchrun
        configure_logging(environment_rank())
        logger.warning(f"in-process restart {attempt}: {reason}")


def check_limits(config: RestartConfig, progress: Progress, reason: str) -> None:
    """Exit if there must be no further attempt; the launcher can then restart the job."""
    limit = config.inprocess_max_iterations
    message = None
    if limit is not None and progress.attempt >= limit:
        message = f"--inprocess-max-iterations {limit} is reached"
    elif progress.fruitless >= _MAX_FRUITLESS:
        message = f"the last {progress.fruitless} attempts did not complete a single iteration"
    if message is not None:
        print_line(f"no further in-process restart: {message} ({reason})", file=sys.stderr)
        sys.exit(1)

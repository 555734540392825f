"""Programs of ranks that fail in different ways under --inprocess-restart.

    restart_programs NAME DIRECTORY [FIELD=VALUE of RestartConfig ...]

Every rank appends `attempt process` to DIRECTORY/RANK when an attempt of its begins.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.training.config.run_options import RestartConfig
from megatron.training.rendezvous import environment_rank, init_process_group
from megatron.training.restart import interruption
from megatron.training.restart.monitor import run_restartable

LOST_RANK = 1
WING = "megatron.planning.goodput"  # a module that is not imported otherwise


def wait_in_python() -> None:
    time.sleep(60)


def wait_for_thread() -> None:
    threading.Event().wait()


def wait_in_collective() -> None:
    init_process_group("gloo", timedelta(seconds=60), torch.device("cpu"))
    dist.all_reduce(torch.ones(1))


def kill_rank(wait: Callable[[], None], attempt: int) -> None:
    """Lose a rank in the first attempt while the others wait."""
    if attempt == 0 and environment_rank() == LOST_RANK:
        os.kill(os.getpid(), signal.SIGKILL)
    if attempt == 0:
        wait()


def kill_rank_while_others_join(attempt: int) -> None:
    """Lose a rank in the first attempt before it joins the process group; then communicate."""
    if attempt == 0 and environment_rank() == LOST_RANK:
        time.sleep(0.5)  # until the others wait for this rank
        os.kill(os.getpid(), signal.SIGKILL)
    wait_in_collective()


def kill_after_import(on_iteration: Callable[[], None], record: Path, attempt: int) -> None:
    """Lose a rank after its first iteration; record whether its next process has its imports."""
    is_imported = WING in sys.modules
    if attempt == 0:
        import_module(WING)
        on_iteration()
    elif environment_rank() == LOST_RANK:
        record.with_suffix(".imported").write_text(str(is_imported))
    kill_rank(wait_in_python, attempt)


def raise_error(error: Exception, attempt: int) -> None:
    """Fail on one rank in the first attempt."""
    if attempt == 0 and environment_rank() == LOST_RANK:
        raise error
    if attempt == 0:
        wait_in_python()


def always_kill_rank(attempt: int) -> None:
    if environment_rank() == LOST_RANK:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_in_python()


def ignore_interruption(attempt: int) -> None:
    """Lose a rank while another one does not react."""
    if attempt == 0 and environment_rank() == 0:
        # A suspended process runs no thread and handles no signal.
        os.kill(os.getpid(), signal.SIGSTOP)
    kill_rank(wait_in_python, attempt)


PROGRAMS: dict[str, Callable[[int], None]] = {
    "killed_while_others_compute": partial(kill_rank, wait_in_python),
    "killed_while_others_wait": partial(kill_rank, wait_for_thread),
    "killed_while_others_communicate": partial(kill_rank, wait_in_collective),
    "killed_while_others_join": kill_rank_while_others_join,
    "defect": partial(raise_error, KeyError("a defect")),
    "user_error": partial(raise_error, ValueError("wrong --lr")),
    "wait": lambda attempt: wait_for_thread(),
    "always_killed": always_kill_rank,
    "killed_while_another_is_suspended": ignore_interruption,
}


def main() -> None:
    """Run a program as one rank."""
    name, directory, *fields = sys.argv[1:]
    record = Path(directory) / str(environment_rank())
    config = RestartConfig(inprocess_restart=True)
    for field in fields:
        key, value = field.split("=")
        setattr(config, key, json.loads(value))

    def program(on_iteration: Callable[[], None]) -> None:
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        with record.open("a") as file:
            file.write(f"{attempt} {os.getpid()}\n")
        after_import = partial(kill_after_import, on_iteration, record)
        programs = PROGRAMS | {"killed_after_import": after_import}
        programs[name](attempt)

    if name != "killed_while_others_communicate":
        # A busy machine may take longer to leave an attempt.
        interruption.PATIENCE = 60
    run_restartable(config, timedelta(seconds=60), program)

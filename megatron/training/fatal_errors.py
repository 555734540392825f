"""Errors that end the program: one message for the user instead of a traceback from every rank."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.core.flags import explain_error
from megatron.core.parallel_state import ParallelState
from megatron.core.terminal import INTERRUPTED, escape_lines, print_text
from megatron.training.rendezvous import environment_rank

_WAIT_FOR_RANK_0 = 10.0  # seconds in which a launcher ends the other ranks after rank 0 has failed
# Words in the RuntimeError of PyTorch's allocators; the one for the CPU has no class of its own.
_OUT_OF_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "not enough memory: you tried")


class LostRankError(RuntimeError):
    """Another rank died or did not arrive in time."""


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C during training; the message names the newest checkpoint and the way to resume."""


@contextmanager
def errors_explained_once(status: int = 1) -> Iterator[None]:
    """End the process on an error that the user can correct, with a message and no traceback.

    These are ValueError, an OSError that names a file, lack of memory and Ctrl-C. If all ranks have
    the same error, rank 0 reports it: the others wait before they report, and if rank 0 fails, too,
    the launcher ends them in the meantime; otherwise they report their own error. torchrun shows
    the first error of all ranks as the root cause. The exit code is `status`, or the `exit_code` of
    the error.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        if environment_rank() == 0:
            print_text(f"\n{str(error) or 'interrupted'}", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except LostRankError as error:
        _write_error_file(str(error), time.time())
        raise
    except Exception as error:
        explained: str | None = explain_error(error)
        # An OSError of a connection names no file.
        names_file = isinstance(error, OSError) and error.filename is not None
        if not isinstance(error, ValueError) and not names_file:
            explained = explain_lack_of_memory(error)
        if explained is None:
            _write_error_file(traceback.format_exc(), time.time())
            raise
        _report_and_exit(explained, getattr(error, "exit_code", status))


def _report_and_exit(explained: str, status: int) -> None:
    rank = environment_rank()
    when = time.time()
    message = f"error: {explained}"
    if rank > 0:
        time.sleep(_WAIT_FOR_RANK_0)
        message = f"error on rank {rank}: {explained}"
    _write_error_file(message, when)
    print_text(message, file=sys.stderr)
    sys.exit(status)


def explain_lack_of_memory(error: BaseException) -> str | None:
    """Return a message for an error of an allocator, None for any other error."""
    text = str(error)
    is_out_of_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if isinstance(error, RuntimeError):
        is_out_of_memory |= any(words in text for words in _OUT_OF_MEMORY)
    if not is_out_of_memory:
        return None
    # PyTorch appends its C++ stack in further lines.
    reason = text.partition("\n")[0] or type(error).__name__
    return (
        f"out of memory ({reason}). Use a smaller --micro-batch-size or --seq-length, recompute "
        "activations (--recompute-activations), or spread the model over more ranks; "
        "tools/plan_run.py estimates the memory of each rank"
    )


def _write_error_file(message: str, when: float) -> None:
    """Write torchrun's error file; torchrun shows the message with the earliest time of all ranks.

    The file appears as a whole: torchrun may read it at any time.
    """
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if name is None:
        return
    message = escape_lines(message)  # torchrun prints it as it is
    # The form of torch.distributed.elastic's ErrorHandler, which always adds the traceback.
    error = {
        "message": message,
        "extraInfo": {"py_callstack": message, "timestamp": str(int(when))},
    }
    temporary = Path(f"{name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        temporary.write_text(json.dumps({"message": error}), encoding="utf-8")
        os.replace(temporary, name)


@contextmanager
def lost_ranks_explained(ps: ParallelState, timeout_minutes: float) -> Iterator[None]:
    """Turn the failure of a collective into an error that names the likely cause."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        raise LostRankError(
            f"rank {ps.rank} of {ps.world_size} ({ps.place}) stops: another rank has died, or did "
            f"not come within --distributed-timeout-minutes {timeout_minutes:g}; look for the "
            f"first error of the other ranks ({str(error).splitlines()[0]})"
        ) from error


def is_lost_rank(error: BaseException) -> bool:
    """Return whether `error` is that of a collective or of the store, due to another process."""
    if isinstance(error, LostRankError | dist.DistError):
        return True
    words = ("gloo", "NCCL", "has died")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)

"""Steps that are repeated: after a rejected loss, or to measure determinism (--rerun-mode)."""

from __future__ import annotations

import itertools
import logging
import math
import random
import socket
from collections.abc import Iterator, Sequence

from torch import Tensor

from megatron.core.dist_checkpointing.policy import is_multiple
from megatron.core.parallel_state import gather_objects
from megatron.training.operations.reexecution import (
    WrongResultError,
    execute,
    is_true_anywhere,
    local_gradients,
    receive_step,
    record_step,
    shift,
)
from megatron.training.run import Batch, Run, forward_backward

logger = logging.getLogger(__name__)

SPIKE = 10.0  # a loss is spiky from this many times the maximum of the first steps
NUM_FIRST_STEPS = 100
# Exit codes, as in Megatron-LM
UNDETERMINED = 16
REJECTED = 17


def get_loss(losses: Tensor) -> float | None:
    """Return the mean loss of this rank's step; None on ranks that compute no loss."""
    numerator, denominator = losses[0].tolist()
    return numerator / denominator if denominator else None


def is_same(loss: float | None, repeated: float | None) -> bool:
    if loss is None or repeated is None:
        return loss is repeated
    return loss == repeated or (math.isnan(loss) and math.isnan(repeated))


class ResultValidator:
    """Validator that repeats steps with a rejected loss and reports why (validate_results)."""

    def __init__(self, run: Run) -> None:
        self._config = run.config.operations
        self._checks_finite = run.config.training.check_for_nan_in_loss_and_grad
        self._injection = random.Random(f"{run.config.training.seed} {run.ps.rank}")
        self._num_losses = 0
        self._largest = 0.0

    def compute_gradients(
        self, run: Run, batches: Iterator[Batch] | None, num_microbatches: int
    ) -> Tensor:
        """Compute the gradients of a step.

        Raises WrongResultError on all ranks if a result is rejected, except for spikes.
        """
        step = record_step(run, batches, num_microbatches)
        losses = forward_backward(run, iter(step.microbatches), num_microbatches)
        loss = get_loss(losses)
        reason = self._reject(loss)
        if not is_true_anywhere(run, reason is not None):
            return losses

        # Finish reductions that have started, and repeat the step here and on the next replica.
        for chunk in run.chunks:
            chunk.finish_grad_sync()
        with local_gradients(run):
            repeated = get_loss(execute(run, step))
            by_next = None
            has_replicas = run.ps.dp.size > 1
            if has_replicas:
                previous = receive_step(run, step)
                by_next = shift(run, get_loss(execute(run, previous)), -1)
        verdict = None
        if reason is not None:
            diagnosis = self._diagnose(reason, loss, repeated, by_next, has_replicas)
            name = f"rank {run.ps.rank} ({socket.gethostname()})"
            verdict = (f"{reason} on {name}: {diagnosis}", reason, diagnosis)
        verdicts = [row for row in gather_objects(verdict) if row is not None]
        messages = "; ".join(row[0] for row in verdicts)
        message = f"iteration {run.state.iteration + 1}: {messages}"
        if all(reason.startswith("spiky loss") for _, reason, _ in verdicts):
            logger.warning(f"{message}. Training continues")
            return execute(run, step)
        is_undetermined = any(row[2] == _UNDETERMINED for row in verdicts)
        raise WrongResultError(
            f"{message}. The step is not applied; continue from the newest checkpoint",
            UNDETERMINED if is_undetermined else REJECTED,
        )

    def _reject(self, loss: float | None) -> str | None:
        """Return why a loss is rejected, None if it is accepted."""
        if loss is None:
            return None
        rate = self._config.error_injection_rate
        if rate > 0 and self._injection.randrange(rate) == 0:
            return f"injected {self._config.error_injection_type}, loss {loss:.6g}"
        if not math.isfinite(loss):
            return f"loss {loss}" if self._checks_finite else None
        if not self._config.check_for_spiky_loss:
            return None
        if self._num_losses < NUM_FIRST_STEPS:
            self._num_losses += 1
            self._largest = max(self._largest, abs(loss))
            return None
        if abs(loss) < SPIKE * self._largest:
            return None
        return f"spiky loss {loss:.6g}"

    def _diagnose(
        self,
        reason: str,
        loss: float | None,
        repeated: float | None,
        by_next: float | None,
        has_replicas: bool,
    ) -> str:
        is_reproducible = is_same(loss, repeated)
        is_confirmed = is_same(loss, by_next)
        if reason.startswith("injected"):
            is_reproducible = self._config.error_injection_type != "transient_error"
            is_confirmed = self._config.error_injection_type == "correct_result"
        if not is_reproducible:
            return f"transient error, not reproducible on the same rank (loss {repeated})"
        if not has_replicas:
            return _UNDETERMINED
        if not is_confirmed:
            return f"persistent error, another replica computes the loss {by_next}"
        return "correct result, another replica computes the same (data or hyperparameters)"


_UNDETERMINED = (
    "reproducible on the same rank; there is no replica to compare with, so resume on another "
    "device to distinguish a persistent error from a correct result"
)


class DeterminismReport:
    """Report of the differences between two executions of each step (report_determinism_stats)."""

    def __init__(self, run: Run) -> None:
        self._differences: list[float] = []
        self._log_interval = run.config.logging.log_interval

    def compute_gradients(
        self, run: Run, batches: Iterator[Batch] | None, num_microbatches: int
    ) -> Tensor:
        """Compute the gradients of a step, twice."""
        step = record_step(run, batches, num_microbatches)
        with local_gradients(run):
            first = get_loss(execute(run, step))
        losses = execute(run, step)
        second = get_loss(losses)
        if first is not None and second is not None:
            self._differences.append(compute_difference(first, second))
        if is_multiple(run.state.iteration + 1, self._log_interval):
            differences = itertools.chain.from_iterable(gather_objects(self._differences))
            self._differences = []
            logger.info(format_differences(list(differences)))
        return losses


def compute_difference(first: float, second: float) -> float:
    """Return the relative difference of two results, infinite if only one of them is finite."""
    if is_same(first, second):
        return 0.0
    if not (math.isfinite(first) and math.isfinite(second)):
        return math.inf
    return abs((first - second) / (first + second) * 2)


def format_differences(differences: Sequence[float]) -> str:
    """Return the statistics of relative differences in Megatron-LM's form."""
    title = "determinism of the loss of repeated steps: "
    ordered = sorted(differences)
    num_identical = ordered.count(0.0)
    if num_identical == len(ordered):
        return f"{title}{num_identical:,} samples, all identical"
    # Quantiles are elements of the sorted list, without interpolation.
    texts = [f"avg= {sum(ordered) / len(ordered):.3E}"]
    for label, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999)):
        index = int(len(ordered) * share)
        texts.append(f"{label}= {ordered[index]:.3E}")
    return (
        f"{title}{len(ordered):,}/{num_identical:,} total/identical samples, rel. variability: "
        f"{', '.join(texts)}, max: {ordered[-1]:.3E}"
    )

"""Training steps that are executed again, on the same rank and on another replica.

The gradients of a step are a function of its micro-batches, the generators of random numbers and
the weights, which all data-parallel replicas have. Another replica can therefore repeat the step of
a rank, and with deterministic kernels it gets the same bits.
"""

from __future__ import annotations

import logging
import math
import random
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.dist_checkpointing.policy import is_multiple
from megatron.core.module import param_info
from megatron.core.tensor_parallel.layers import open_main_grad
from megatron.training.checkpoint.contents import get_rng_state, set_rng_state
from megatron.training.exit import NotFiniteError
from megatron.training.run import Batch, ComputeGradients, Run, forward_backward

logger = logging.getLogger(__name__)

SPIKE = 10.0  # a loss is spiky from this many times the maximum of the first steps
NUM_FIRST_STEPS = 100
# Exit codes, as in Megatron-LM
UNDETERMINED = 16
REJECTED = 17
_DIGEST_CHUNK = 1 << 22  # elements
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_MAX_LISTED = 3  # parameters


class WrongResultError(NotFiniteError):
    """A rank has computed something that cannot be trusted; its step is not applied."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass
class Step:
    """What determines the gradients of a step on a rank, besides the weights."""

    microbatches: list[Batch]  # empty on stages that need no data
    num_microbatches: int
    rng_state: dict[str, Any]


def observe_results(run: Run) -> None:
    """Let `run` execute its steps as --rerun-mode and the checks of replicas require."""
    config = run.config.operations
    if config.rerun_mode == "validate_results":
        run.compute_gradients = ResultValidator(run).compute_gradients
    elif config.rerun_mode != "disabled":
        run.compute_gradients = DeterminismReport(run).compute_gradients
    if config.gradient_check_interval is not None and has_replicas(run):
        if run.device.type == "cuda" and not run.config.distributed.deterministic_mode:
            raise ValueError(
                "--gradient-check-interval compares bits: on GPUs it requires --deterministic-mode"
            )
        interval = config.gradient_check_interval
        run.compute_gradients = partial(_check_at_interval, interval, run.compute_gradients)
    if config.check_weight_hash_across_dp_replicas_interval is not None and has_replicas(run):
        run.on_iteration = partial(_check_weights_at_interval, run, run.on_iteration)


def has_replicas(run: Run) -> bool:
    """Return whether the model has replicas to compare; warns if it does not."""
    if run.ps.dp.size > 1:
        return True
    logger.warning(
        "gradients and weights are not compared with those of a replica: there is only one "
        "(data-parallel size 1)"
    )
    return False


# ---- Execution ----


def record_step(run: Run, batches: Iterator[Batch] | None, num_microbatches: int) -> Step:
    """Fetch the micro-batches of a step."""
    microbatches = []
    if any(run.needs_batch(chunk) for chunk in range(len(run.chunks))):
        assert batches is not None
        microbatches = [next(batches) for _ in range(num_microbatches)]
    return Step(microbatches, num_microbatches, get_rng_state(run.rng))


def execute(run: Run, step: Step) -> Tensor:
    """Compute the gradients of a step again, and return its losses as `forward_backward` does.

    Call it when no reduction is in progress.
    """
    for chunk in run.chunks:
        chunk.zero_grad_buffer()
    set_rng_state(step.rng_state, run.rng)
    return forward_backward(run, iter(step.microbatches), step.num_microbatches)


@contextmanager
def local_gradients(run: Run) -> Iterator[None]:
    """Let gradients stay those of this rank, without starting reductions."""
    config = run.config.ddp
    overlaps = config.overlap_grad_reduce
    config.overlap_grad_reduce = False
    try:
        yield
    finally:
        config.overlap_grad_reduce = overlaps


def shift(run: Run, value: Any, distance: int) -> Any:
    """Send `value` to the rank with the same shards, `distance` replicas ahead.

    Returns the value that this rank receives. `distance` is 1 or -1. Collective over the replicas.
    """
    dp = run.ps.dp
    group = run.ps.dp_cp.group
    target = dp.ranks[(dp.rank + distance) % dp.size]
    source = dp.ranks[(dp.rank - distance) % dp.size]
    received = [None]
    # Sending waits for the receiver, so that not all ranks may send first.
    if dp.rank % 2 == 0:
        dist.send_object_list([value], target, group=group)
        dist.recv_object_list(received, source, group=group)
    else:
        dist.recv_object_list(received, source, group=group)
        dist.send_object_list([value], target, group=group)
    return received[0]


def receive_step(run: Run, step: Step) -> Step:
    """Send `step` to the next replica, and return that of the previous one."""
    on_host = []
    for batch in step.microbatches:
        on_host.append({name: tensor.cpu() for name, tensor in batch.items()})
    received = shift(run, Step(on_host, step.num_microbatches, step.rng_state), 1)
    microbatches = []
    for batch in received.microbatches:
        microbatches.append({name: tensor.to(run.device) for name, tensor in batch.items()})
    return Step(microbatches, received.num_microbatches, received.rng_state)


# ---- Gradients of another replica (--gradient-check-interval) ----


class Disagreement(NamedTuple):
    """Gradients of one step on which two replicas, of data-parallel ranks `pair`, disagree."""

    pair: tuple[int, int]
    ranks: tuple[int, int]
    suspects: tuple[int, ...]
    """Those of the pair that may be wrong."""
    is_transient: bool
    """Whether repeating the step on both has led to the same gradients."""
    parameters: tuple[str, ...]


def _check_at_interval(
    interval: int,
    compute_gradients: ComputeGradients,
    run: Run,
    batches: Iterator[Batch] | None,
    num_microbatches: int,
) -> Tensor:
    if not is_multiple(run.state.iteration + 1, interval):
        return compute_gradients(run, batches, num_microbatches)
    return check_gradients(run, record_step(run, batches, num_microbatches))


def check_gradients(run: Run, step: Step) -> Tensor:
    """Compute the gradients of a step on this rank and on the next replica, and compare them.

    Returns the losses; the gradients are ready to be reduced. After a transient error the step is
    repeated. Raises WrongResultError on all ranks if replicas disagree again. Collective.
    """
    names = name_gradients(run)
    with local_gradients(run):
        previous = receive_step(run, step)
        execute(run, previous)
        by_next = shift(run, digest_gradients(run), -1)
        losses = execute(run, step)
        local = digest_gradients(run)
        differs = not torch.equal(local, by_next)
        if not _is_true_anywhere(run, differs):
            return losses
        # Repeat the step on both, to find out which of them was wrong.
        execute(run, previous)
        by_next_again = shift(run, digest_gradients(run), -1)
        losses = execute(run, step)
        local_again = digest_gradients(run)

    disagreement = None
    dp = run.ps.dp
    if differs or not torch.equal(local_again, by_next_again):
        rows = (local != by_next) | (local_again != by_next_again)
        listed = [name for name, row in zip(names, rows.any(dim=1), strict=True) if row]
        following = (dp.rank + 1) % dp.size
        suspects, is_transient = judge(
            *(table.flatten().tolist() for table in (local, by_next, local_again, by_next_again))
        )
        pair = (dp.rank, following)
        disagreement = Disagreement(
            pair,
            (run.ps.rank, dp.ranks[following]),
            tuple(pair[suspect] for suspect in suspects),
            is_transient,
            tuple(listed),
        )
    gathered: list[Any] = [None] * run.ps.world_size
    dist.all_gather_object(gathered, (socket.gethostname(), disagreement))
    hosts = [host for host, _ in gathered]
    disagreements = [report for _, report in gathered if report is not None]
    message = f"iteration {run.state.iteration + 1}: {describe(disagreements, hosts)}"
    if not all(report.is_transient for report in disagreements):
        raise WrongResultError(f"{message} The step is not applied")
    if run.ps.rank == 0:
        logger.warning(f"{message} The step was repeated, and training continues")
    return losses


def judge(
    local: Sequence[int],
    by_next: Sequence[int],
    local_again: Sequence[int],
    by_next_again: Sequence[int],
) -> tuple[tuple[int, ...], bool]:
    """Return which of two replicas, 0 and 1, may be wrong, and whether the error is transient.

    The arguments are digests of the same gradients: by replica 0 and 1, and by both again.
    """
    changed = []
    if local != local_again:
        changed.append(0)
    if by_next != by_next_again:
        changed.append(1)
    agrees_again = local_again == by_next_again
    if agrees_again or changed:
        # A replica that has computed something else before was wrong at least once.
        return tuple(changed), agrees_again
    return (0, 1), False


def locate(disagreements: Sequence[Disagreement]) -> list[int]:
    """Return the replicas that are wrong, or may be wrong if that cannot be determined."""
    suspects = [set(report.suspects) for report in disagreements]
    # A replica that always errs disagrees with both of its neighbors.
    common = set.intersection(*suspects)
    return sorted(common or set.union(*suspects))


def describe(disagreements: Sequence[Disagreement], hosts: Sequence[str]) -> str:
    """Return sentences about which ranks computed which gradients wrongly."""
    replicas = locate(disagreements)
    ranks = set()
    parameters: dict[str, None] = {}
    for report in disagreements:
        for replica, rank in zip(report.pair, report.ranks, strict=True):
            if replica in replicas:
                ranks.add(rank)
        parameters |= dict.fromkeys(report.parameters)
    names = [f"rank {rank} ({hosts[rank]})" for rank in sorted(ranks)]
    certain = len(replicas) == 1 and len(ranks) == 1
    listed = ", ".join(list(parameters)[:_MAX_LISTED])
    if len(parameters) > _MAX_LISTED:
        listed += f" and {len(parameters) - _MAX_LISTED} more"
    is_transient = all(report.is_transient for report in disagreements)
    repeated = "agrees" if is_transient else "does not agree"
    subject = names[0] if certain else f"one of {' and '.join(names)}"
    return (
        f"{subject} has computed wrong gradients of {listed}: another replica has got other bits "
        f"for the same samples. The repeated step {repeated}. Test the device before using it "
        "again."
    )


def _is_true_anywhere(run: Run, value: bool) -> bool:
    gathered = [False] * run.ps.world_size
    dist.all_gather_object(gathered, value)
    return any(gathered)


def _iterate_params(run: Run) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of this rank with their chunk, bucket and name."""
    for index, chunk in enumerate(run.chunks):
        prefix = f"chunk {index}, " if len(run.chunks) > 1 else ""
        for bucket_index, bucket in enumerate(chunk.buckets):
            for span, param in zip(bucket.plan.spans, bucket.params, strict=True):
                yield f"{span.spec.name} ({prefix}bucket {bucket_index})", param


def name_gradients(run: Run) -> list[str]:
    """Return the names of the rows of `digest_gradients`."""
    return [name for name, _ in _iterate_params(run)]


def digest_gradients(run: Run) -> Tensor:
    """Return two 64-bit sums of the local gradient of each parameter, `[parameters, 2]`."""
    return torch.stack([digest(open_main_grad(param)) for _, param in _iterate_params(run)]).cpu()


def digest(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bit patterns, and that weighted by position, modulo 2^64."""
    bits = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for start in range(0, len(bits), _DIGEST_CHUNK):
        values = bits[start : start + _DIGEST_CHUNK].long()
        positions = torch.arange(start + 1, start + 1 + len(values), device=tensor.device)
        sums += torch.stack((values.sum(), (values * positions).sum()))
    return sums


# ---- Weights of replicas (--check-weight-hash-across-dp-replicas-interval) ----


def _check_weights_at_interval(run: Run, on_iteration: Callable[[], None]) -> None:
    interval = run.config.operations.check_weight_hash_across_dp_replicas_interval
    if is_multiple(run.state.iteration, interval):
        check_weights(run)
    on_iteration()


def check_weights(run: Run) -> None:
    """Compare the weights of all replicas. Collective.

    Raises ValueError on all ranks if they differ, with the ranks that deviate from most others.
    """
    for chunk in run.chunks:
        chunk.finish_param_sync()
    names = []
    digests = []
    for name, param in _iterate_params(run):
        if not param_info(param).sharding.is_expert:  # replicas of experts are other ranks
            names.append(name)
            digests.append(tuple(digest(param).tolist()))
    axis = run.ps.dp_cp
    by_replica: list[list[tuple[int, ...]]] = [[]] * axis.size
    dist.all_gather_object(by_replica, digests, group=axis.group)

    deviations = []
    for index, name in enumerate(names):
        counts = Counter(rows[index] for rows in by_replica)
        (most_common, count), *next_common = counts.most_common()
        is_tie = bool(next_common) and next_common[0][1] == count
        for rank, rows in zip(axis.ranks, by_replica, strict=True):
            if is_tie or rows[index] != most_common:
                deviations.append((rank, name))
    gathered: list[list[tuple[int, str]]] = [[]] * run.ps.world_size
    dist.all_gather_object(gathered, deviations)
    unique = sorted({deviation for rows in gathered for deviation in rows})
    if unique:
        listed = ", ".join(f"{name} on rank {rank}" for rank, name in unique[:_MAX_LISTED])
        raise ValueError(
            f"iteration {run.state.iteration}: the weights of data-parallel replicas differ: "
            f"{listed}{' and more' if len(unique) > _MAX_LISTED else ''}. Continue from a "
            "checkpoint before the last successful comparison"
        )


# ---- Rejected results (--rerun-mode) ----


def get_loss(losses: Tensor) -> float | None:
    """Return the mean loss of this rank's step; None on ranks that compute no loss."""
    numerator, denominator = losses[0].tolist()
    return numerator / denominator if denominator else None


def is_same(loss: float | None, repeated: float | None) -> bool:
    if loss is None or repeated is None:
        return loss is repeated
    return loss == repeated or (math.isnan(loss) and math.isnan(repeated))


class ResultValidator:
    """Repeats steps with a rejected loss, and reports what was wrong (validate_results)."""

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
        if not _is_true_anywhere(run, reason is not None):
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
        gathered: list[Any] = [None] * run.ps.world_size
        dist.all_gather_object(gathered, verdict)
        verdicts = [row for row in gathered if row is not None]
        message = f"iteration {run.state.iteration + 1}: " + "; ".join(row[0] for row in verdicts)
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
        return f"spiky loss {loss:.6g}" if abs(loss) >= SPIKE * self._largest else None

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
    """Executes every step twice, and reports how the losses differ (report_determinism_stats)."""

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
            gathered: list[list[float]] = [[]] * run.ps.world_size
            dist.all_gather_object(gathered, self._differences)
            self._differences = []
            logger.info(format_differences([value for rank in gathered for value in rank]))
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
    texts = [f"avg= {sum(ordered) / len(ordered):.3E}"]
    for label, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999)):
        texts.append(f"{label}= {ordered[int(len(ordered) * share)]:.3E}")
    return (
        f"{title}{len(ordered):,}/{num_identical:,} total/identical samples, rel. variability: "
        f"{', '.join(texts)}, max: {ordered[-1]:.3E}"
    )

"""Comparison of data-parallel replicas: their gradients of the same steps, and their weights."""

from __future__ import annotations

import itertools
import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.dist_checkpointing.policy import is_multiple
from megatron.core.module import param_info
from megatron.core.parallel_state import gather_objects
from megatron.core.tensor_parallel.layers import open_main_grad
from megatron.training.operations.reexecution import (
    Step,
    WrongResultError,
    execute,
    is_true_anywhere,
    local_gradients,
    receive_step,
    record_step,
    shift,
)
from megatron.training.run import Batch, ComputeGradients, Run

logger = logging.getLogger(__name__)

_DIGEST_CHUNK = 1 << 22  # elements
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_MAX_LISTED = 3  # parameters

Digests = list[list[int]]
"""Two 64-bit sums for each parameter."""


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


def check_gradients_at_interval(
    interval: int,
    compute_gradients: ComputeGradients,
    run: Run,
    batches: Iterator[Batch] | None,
    num_microbatches: int,
) -> Tensor:
    """Compute the gradients of a step, with `check_gradients` if it is its turn."""
    if not is_multiple(run.state.iteration + 1, interval):
        return compute_gradients(run, batches, num_microbatches)
    return check_gradients(run, record_step(run, batches, num_microbatches))


def check_gradients(run: Run, step: Step) -> Tensor:
    """Compute the gradients of a step on this rank and on the next replica, and compare them.

    Returns the losses; the gradients are ready to be reduced. After a transient error the step is
    repeated. Raises WrongResultError on all ranks if replicas disagree again. Collective.
    """
    with local_gradients(run):
        previous = receive_step(run, step)
        execute(run, previous)
        by_next = shift(run, digest_gradients(run), -1)
        losses = execute(run, step)
        local = digest_gradients(run)
        differs = local != by_next
        if not is_true_anywhere(run, differs):
            return losses
        # Repeat the step on both, to find out which of them was wrong.
        execute(run, previous)
        by_next_again = shift(run, digest_gradients(run), -1)
        losses = execute(run, step)
        local_again = digest_gradients(run)

    disagreement = None
    if differs or local_again != by_next_again:
        disagreement = _compare(run, local, by_next, local_again, by_next_again)
    hosts = gather_objects(socket.gethostname())
    reports = gather_objects(disagreement)
    disagreements = [report for report in reports if report is not None]
    message = f"iteration {run.state.iteration + 1}: {describe(disagreements, hosts)}"
    if not all(report.is_transient for report in disagreements):
        raise WrongResultError(f"{message} The step is not applied")
    if run.ps.rank == 0:
        logger.warning(f"{message} The step was repeated, and training continues")
    return losses


def _compare(
    run: Run, local: Digests, by_next: Digests, local_again: Digests, by_next_again: Digests
) -> Disagreement:
    """Return how this replica and the next one disagree. The arguments are those of `judge`."""
    parameters = []
    names = [name for name, _ in _iterate_params(run)]
    for row, name in enumerate(names):
        agrees = local[row] == by_next[row]
        agrees_again = local_again[row] == by_next_again[row]
        if not agrees or not agrees_again:
            parameters.append(name)

    dp = run.ps.dp
    following = (dp.rank + 1) % dp.size
    pair = (dp.rank, following)
    ranks = (run.ps.rank, dp.ranks[following])
    suspects, is_transient = judge(local, by_next, local_again, by_next_again)
    suspected = tuple(pair[suspect] for suspect in suspects)
    return Disagreement(pair, ranks, suspected, is_transient, tuple(parameters))


def judge(
    local: Digests, by_next: Digests, local_again: Digests, by_next_again: Digests
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
    # The ranks
    names = [f"rank {rank} ({hosts[rank]})" for rank in sorted(ranks)]
    subject = " and ".join(names)
    is_certain = len(replicas) == 1 and len(ranks) == 1
    if not is_certain:
        subject = f"one of {subject}"

    # The gradients
    listed = ", ".join(list(parameters)[:_MAX_LISTED])
    if len(parameters) > _MAX_LISTED:
        listed += f" and {len(parameters) - _MAX_LISTED} more"
    repeated = "does not agree"
    if all(report.is_transient for report in disagreements):
        repeated = "agrees"
    return (
        f"{subject} has computed wrong gradients of {listed}: another replica has got other bits "
        f"for the same samples. The repeated step {repeated}. Test the device before using it "
        "again."
    )


def _iterate_params(run: Run) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of this rank with their chunk, bucket and name."""
    for index, chunk in enumerate(run.chunks):
        prefix = f"chunk {index}, " if len(run.chunks) > 1 else ""
        for bucket_index, bucket in enumerate(chunk.buckets):
            for span, param in zip(bucket.plan.spans, bucket.params, strict=True):
                yield f"{span.spec.name} ({prefix}bucket {bucket_index})", param


def digest_gradients(run: Run) -> Digests:
    """Return two 64-bit sums of the local gradient of each parameter."""
    digests = [digest(open_main_grad(param)) for _, param in _iterate_params(run)]
    rows: Digests = torch.stack(digests).tolist()
    return rows


def digest(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bit patterns, and that weighted by position, modulo 2^64."""
    bits = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for start in range(0, len(bits), _DIGEST_CHUNK):
        values = bits[start : start + _DIGEST_CHUNK].long()
        first = start + 1  # positions count from 1
        positions = torch.arange(first, first + len(values), device=tensor.device)
        sums += torch.stack((values.sum(), (values * positions).sum()))
    return sums


# ---- Weights of replicas (--check-weight-hash-across-dp-replicas-interval) ----


def check_weights_at_interval(run: Run, on_iteration: Callable[[], None]) -> None:
    """Compare the weights of all replicas if it is their turn, then call `on_iteration`."""
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
    digests = {}
    for name, param in _iterate_params(run):
        if not param_info(param).sharding.is_expert:  # replicas of experts are other ranks
            digests[name] = tuple(digest(param).tolist())
    axis = run.ps.dp_cp
    by_replica = gather_objects(digests, axis.group)

    # Digests that differ from those of most replicas; in a tie, all of them may be wrong.
    deviations = []
    for name in digests:
        values = [digests_of_replica[name] for digests_of_replica in by_replica]
        right = _find_majority(values)
        for rank, value in zip(axis.ranks, values, strict=True):
            if value != right:
                deviations.append((rank, name))
    unique = set(itertools.chain.from_iterable(gather_objects(deviations)))
    if unique:
        texts = [f"{name} on rank {rank}" for rank, name in sorted(unique)]
        listed = ", ".join(texts[:_MAX_LISTED])
        if len(texts) > _MAX_LISTED:
            listed += " and more"
        raise ValueError(
            f"iteration {run.state.iteration}: the weights of data-parallel replicas differ: "
            f"{listed}. Continue from a checkpoint before the last successful comparison"
        )


def _find_majority(values: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """Return the most common value, or None if another one is as common."""
    (most_common, count), *next_common = Counter(values).most_common(2)
    if next_common:
        _, next_count = next_common[0]
        if next_count == count:
            return None
    return most_common

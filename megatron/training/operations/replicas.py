"""Comparison of data-parallel replicas: their gradients of the same steps, and their weights."""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.dist_checkpointing.policy import is_multiple
from megatron.core.module import param_info
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
    names = name_gradients(run)
    with local_gradients(run):
        previous = receive_step(run, step)
        execute(run, previous)
        by_next = shift(run, digest_gradients(run), -1)
        losses = execute(run, step)
        local = digest_gradients(run)
        differs = not torch.equal(local, by_next)
        if not is_true_anywhere(run, differs):
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

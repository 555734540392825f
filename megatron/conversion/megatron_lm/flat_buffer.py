"""Megatron-LM's flat buffers of the distributed optimizer: which elements belong to which parameter.

A buffer holds a chunk's parameters in reverse module order, each at a multiple of 64 elements, in buckets. Positions
here are relative to the concatenation of the buckets without the padding at their ends, as the files have them.
(Source: Megatron-LM core 0.12 to 0.20, checked against files of 0.16.1.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron.conversion.model_space.rank_layout import LocalParameter
from megatron.core.utils import round_up

ALIGNMENT = 64
_DEFAULT_BUCKET, _DEFAULT_BUCKET_PER_RANK = 40_000_000, 1_000_000


class Placed(NamedTuple):
    """`parameter` begins at element `start` of bucket `bucket`."""

    parameter: LocalParameter
    bucket: int
    start: int


def plan_buckets(parameters: Sequence[LocalParameter], bucket_size: int | None) -> tuple[list[Placed], list[int]]:
    """Where each parameter lies, and the unpadded size of each bucket; `bucket_size` None: no limit."""
    placed: list[Placed] = []
    sizes: list[int] = []
    end = 0  # of the last parameter, in the open bucket
    for parameter in reversed(parameters):
        start = round_up(end, ALIGNMENT)
        if parameter.info.shared_embedding and start > 0:
            sizes.append(start)
            start = 0
        end = start + parameter.numel
        placed.append(Placed(parameter, len(sizes), start))
        if parameter.info.shared_embedding or (bucket_size is not None and end >= bucket_size):
            sizes.append(end)
            end = 0
    if end:
        sizes.append(end)
    return placed, sizes


def fit_buckets(parameters: Sequence[LocalParameter], sizes: Sequence[int], where: str) -> list[Placed]:
    """Where each parameter lies, given the unpadded sizes of the buckets.

    The sizes tell where the buckets were closed, whatever rule closed them. Raises ValueError if they do not fit.
    """
    placed: list[Placed] = []
    bucket, end = 0, 0  # end of the last parameter in the open bucket
    for parameter in reversed(parameters):
        start = round_up(end, ALIGNMENT)
        if end and bucket < len(sizes) and sizes[bucket] in (end, start):  # `start` where a tied one closed it
            bucket, start = bucket + 1, 0
        end = start + parameter.numel
        if bucket >= len(sizes) or end > sizes[bucket]:
            raise ValueError(
                f"{where}: buckets of {list(sizes)} elements do not fit the model that the arguments describe "
                f"(at {parameter.name} {list(parameter.shape)})"
            )
        placed.append(Placed(parameter, bucket, start))
    if bucket + 1 != len(sizes) or end != sizes[bucket]:
        raise ValueError(
            f"{where}: buckets of {list(sizes)} elements hold more than the model that the arguments describe, which "
            f"ends at element {end} of bucket {bucket}"
        )
    return placed


def bucket_size_of(args: Mapping[str, Any], pp_rank: int, chunk: int, num_parameters: int) -> int | None:
    """Elements after which a run with these arguments closed its buckets; None: one bucket.

    `num_parameters` counts the elements of all chunks of the rank.
    """
    bucketed = args.get("overlap_grad_reduce") and not args.get("overlap_param_gather_with_optimizer_step")
    if not bucketed or pp_rank > 0 or chunk > 0:
        return None
    if args.get("ddp_num_buckets"):
        return num_parameters // int(args["ddp_num_buckets"])
    replicas = (args.get("data_parallel_size") or 1) * (args.get("context_parallel_size") or 1)
    return args.get("ddp_bucket_size") or max(_DEFAULT_BUCKET, _DEFAULT_BUCKET_PER_RANK * replicas)

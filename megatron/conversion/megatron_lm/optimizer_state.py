"""The optimizer state in Megatron-LM's checkpoints: flat buffers, and checks of main parameters.

A buffer of the distributed optimizer contains a chunk's parameters in reverse module order, each at
a multiple of 64 elements, in buckets. Positions here are relative to the concatenated buckets
without the padding at their ends, as in the files. (Source: Megatron-LM core 0.12 to 0.20, checked
against files of 0.16.1.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megatron.conversion.model_space.lazy_tensors import unflatten
from megatron.conversion.model_space.optimizer_states import (
    OPTIMIZER_STATES,
    optimizer_key,
    optimizer_states,
)
from megatron.conversion.model_space.pieces import is_bitwise_equal, paste_boxes
from megatron.core.arithmetic import round_up
from megatron.core.dist_checkpointing import CheckpointError, Shape
from megatron.core.dist_checkpointing.mapping import Extent, LazyTensor
from megatron.core.optimizer import UPDATE_RULES, get_update_rule
from megatron.core.run_checkpoint.keys import is_trained, is_weight, split_key

if TYPE_CHECKING:
    from megatron.conversion.model_space.layouts import LocalParameter

# All in elements.
ALIGNMENT = 64
_DEFAULT_BUCKET = 40_000_000
_DEFAULT_BUCKET_PER_RANK = 1_000_000
_SAMPLE = 256  # compared at each end of a piece

# SOAP rotates gradients by Q_L and Q_R before it accumulates them. The first moment could be
# rotated back (Q_L m Q_R^T); the second one is a mean of squares, which has no value in another
# basis. Megatron-LM writes SOAP's state in legacy files only: its sharding of optimizer state
# asserts that each tensor has the shape of the parameter, which L, R, Q_L and Q_R do not have.
_REASONS = {
    "soap": (
        ". SOAP's second moments belong to the eigenbases of the Kronecker factors of each rank's "
        "matrices and cannot be converted to those of another optimizer"
    )
}


class Placed(NamedTuple):
    """Place of a parameter in a flat buffer."""

    parameter: LocalParameter
    bucket: int
    start: int  # element of the bucket


@dataclass(frozen=True)
class BufferPlan:
    """Places of the parameters of one chunk, and the unpadded size of each bucket."""

    placed: list[Placed]
    sizes: list[int]

    @property
    def size(self) -> int:
        """Number of elements in all buckets."""
        return sum(self.sizes)

    def list_positions(self) -> Iterator[tuple[LocalParameter, int]]:
        """Yield each parameter with its first element in the concatenated buckets."""
        starts = [0, *itertools.accumulate(self.sizes)]
        for parameter, bucket, start in self.placed:
            yield parameter, starts[bucket] + start


def count_elements(chunks: Iterable[Iterable[LocalParameter]]) -> int:
    """Return the number of elements in the parameters of all chunks."""
    return sum(parameter.numel for parameter in itertools.chain.from_iterable(chunks))


def split_by_optimizer(
    chunks: Sequence[Sequence[LocalParameter]], has_expert_optimizer: bool
) -> list[list[list[LocalParameter]]]:
    """Return the trained parameters of a rank's chunks for each optimizer.

    With `has_expert_optimizer` these are one for dense layers and one for experts.
    """
    dense: list[list[LocalParameter]] = []
    experts: list[list[LocalParameter]] = []
    for chunk in chunks:
        dense.append([])
        experts.append([])
        for parameter in chunk:
            if not parameter.info.trained:
                continue
            belongs_to_experts = has_expert_optimizer and parameter.info.sharding.is_expert
            selected = experts if belongs_to_experts else dense
            selected[-1].append(parameter)
    if has_expert_optimizer:
        return [dense, experts]
    return [dense]


def plan_buckets(
    parameters: Sequence[LocalParameter], bucket_size: int | None, alignment: int = ALIGNMENT
) -> BufferPlan:
    """Return the place of each parameter in the buckets of a chunk.

    A bucket is closed once it has `bucket_size` elements; None means no limit. Parameters start at
    multiples of `alignment`, which is 1 in core 0.7 and earlier.
    """
    placed: list[Placed] = []
    sizes: list[int] = []
    end = 0  # of the last parameter in the open bucket
    for parameter in reversed(parameters):
        start = round_up(end, alignment)
        # Megatron-LM reduces the tied embedding separately, so it closes the bucket before and
        # after it.
        if parameter.info.shared_embedding and start > 0:
            sizes.append(start)
            start = 0
        end = start + parameter.numel
        placed.append(Placed(parameter, len(sizes), start))
        is_full = bucket_size is not None and end >= bucket_size
        if parameter.info.shared_embedding or is_full:
            sizes.append(end)
            end = 0
    if end:
        sizes.append(end)
    return BufferPlan(placed, sizes)


def fit_buckets(
    parameters: Sequence[LocalParameter], sizes: Sequence[int], location: str
) -> list[Placed]:
    """Return the place of each parameter, given the unpadded sizes of the buckets.

    The sizes show where the buckets were closed, by any rule. Raises ValueError if they do not fit.
    """
    placed: list[Placed] = []
    bucket = 0
    end = 0  # of the last parameter in the open bucket
    for parameter in reversed(parameters):
        start = round_up(end, ALIGNMENT)
        # A bucket before a tied embedding ends at `start`, others at `end`.
        is_bucket_full = end > 0 and bucket < len(sizes) and sizes[bucket] in (end, start)
        if is_bucket_full:
            bucket += 1
            start = 0
        end = start + parameter.numel
        if bucket >= len(sizes) or end > sizes[bucket]:
            raise ValueError(
                f"{location}: buckets of {list(sizes)} elements do not fit the model that the "
                f"arguments describe (at {parameter.name} {list(parameter.shape)})"
            )
        placed.append(Placed(parameter, bucket, start))
    if bucket + 1 != len(sizes) or end != sizes[bucket]:
        raise ValueError(
            f"{location}: buckets of {list(sizes)} elements hold more than the model that the "
            f"arguments describe, which ends at element {end} of bucket {bucket}, or include "
            "padding (core 0.11 and earlier, fully_sharded_bucket_space). Leave the optimizer out "
            "(--no-optim of convert.py, --no-load-optim of a run)"
        )
    return placed


def compute_bucket_size(
    args: Mapping[str, Any], pp_rank: int, chunk: int, num_parameters: int
) -> int | None:
    """Return the number of elements after which a run with these arguments closed its buckets.

    `num_parameters` counts the elements of all chunks of the rank. None means a single bucket.
    """
    # Buckets serve the overlap of communication and computation, in the first chunk only.
    is_bucketed = args.get("overlap_grad_reduce")
    if args.get("overlap_param_gather_with_optimizer_step"):
        is_bucketed = False
    if not is_bucketed or pp_rank > 0 or chunk > 0:
        return None

    # An explicit number or size of buckets takes precedence over the default.
    if args.get("ddp_num_buckets"):
        return num_parameters // int(args["ddp_num_buckets"])
    if args.get("ddp_bucket_size"):
        return int(args["ddp_bucket_size"])
    replicas = (args.get("data_parallel_size") or 1) * (args.get("context_parallel_size") or 1)
    return max(_DEFAULT_BUCKET, _DEFAULT_BUCKET_PER_RANK * replicas)


def refuse_unknown_optimizer(
    args: Mapping[str, Any], names: Iterable[str], location: str, allows_mixed: bool = False
) -> None:
    """Raise CheckpointError unless the states `names` belong to an optimizer that can be read.

    The arguments decide first: Muon stores its momentum under the name of SGD's. Optimizers with
    other states of matrices (Muon, Lion) are accepted with `allows_mixed`.
    """
    optimizer = args.get("optimizer") or "adam"
    rule = get_update_rule(optimizer) if optimizer in UPDATE_RULES else None
    supported = {"param"}
    if rule is not None and rule.HAS_UNIFORM_STATE:
        supported |= set(OPTIMIZER_STATES)
    elif rule is not None and allows_mixed:
        supported |= set(itertools.chain.from_iterable(rule.STATE_SETS))
    unknown = sorted(set(names) - supported)
    is_readable = rule is not None and (rule.HAS_UNIFORM_STATE or allows_mixed)
    if not is_readable or unknown:
        listed = ""
        if unknown:
            listed = f" ({', '.join(unknown)})"
        raise CheckpointError(
            f"{location}: the optimizer is {optimizer}, whose state{listed} is not supported: "
            "leave it out (--no-optim of convert.py, --no-load-optim of a run)"
            f"{_REASONS.get(optimizer, '')}"
        )


def has_optimizer(
    args: Mapping[str, Any], tensors: Iterable[str], groups: list[dict[str, Any]] | None
) -> bool:
    """Return whether a checkpoint with these tensors and parameter groups contains an optimizer.

    SGD without momentum has groups only. Adam's groups without moments are not a usable state.
    """
    has_moments = any(state != "param" for state in optimizer_states(tensors))
    return has_moments or (args.get("optimizer") == "sgd" and groups is not None)


class PieceTable:
    """The stored pieces of weights and optimizer state, by key.

    If several pieces contain the same elements, the first is read. A main parameter, rounded, must
    be bitwise equal to its weight. This proves that flat buffers were cut where they had been
    joined: a buffer does not record which element belongs to which parameter, and Megatron-core up
    to 0.19.2 shifts the parameters of fully_reshardable state after a padded bucket. Training would
    continue with the moments of other parameters. Only a repair reads without this comparison.
    """

    def __init__(self, location: str, compares_weights: bool = True) -> None:
        self._location = location
        self._compares_weights = compares_weights
        self.tensors: dict[str, LazyTensor] = {}
        # Key -> (offset, shape) of each piece -> the piece.
        self._pieces: dict[str, dict[Extent, LazyTensor]] = {}
        # Main parameters that are the weights themselves.
        self._implied: set[str] = set()

    def add(self, key: str, global_shape: Shape, offset: Shape, stored_box: LazyTensor) -> None:
        """Add a stored box of a tensor of `global_shape`.

        Raises ValueError if the box disagrees with an earlier one about the tensor.
        """
        tensor = LazyTensor(global_shape, stored_box.dtype, partial(self._read, key))
        first = self.tensors.setdefault(key, tensor)
        if first != tensor:
            raise ValueError(
                f"{key}: {first.dtype} {first.shape} in one file, {tensor.dtype} "
                f"{tensor.shape} in another"
            )
        self._pieces.setdefault(key, {}).setdefault((offset, stored_box.shape), stored_box)

    def add_whole(self, key: str, tensor: LazyTensor) -> None:
        """Add a tensor that is one piece."""
        self.add(key, tensor.shape, (0,) * len(tensor.shape), tensor)

    def add_local(
        self, key: str, parameter: LocalParameter, elements: LazyTensor, first: int = 0
    ) -> None:
        """Add a rank's part of a parameter or of its state: contiguous elements from `first` on."""
        for (offset, shape), start in parameter.locate_boxes():
            stored_box = unflatten(elements, first + start, shape)
            self.add(key, parameter.global_shape, offset, stored_box)

    def is_implied(self, key: str) -> bool:
        """Return whether a main parameter is not stored, because it equals its fp32 weight."""
        return key in self._implied

    def complete(self, has_optimizer: bool) -> None:
        """Add implied main parameters, and check both ends of every stored one.

        Call this after the last piece was added. `has_optimizer` states that the files contain an
        optimizer, which SGD without momentum does not show in its tensors.
        """
        # The loop adds entries, so it works on a copy of the keys.
        for key in list(self.tensors):
            if not is_weight(key):
                continue
            main = optimizer_key("param", key)
            is_fp32 = self.tensors[key].dtype == torch.float32
            if main in self.tensors:
                self._check_ends(main)
            elif has_optimizer and is_trained(key) and is_fp32:
                # An fp32 model without the distributed optimizer stores no main parameters.
                self.tensors[main] = replace(self.tensors[key], read=partial(self._read, main))
                self._pieces[main] = self._pieces[key]
                self._implied.add(main)

    def _check_ends(self, main: str) -> None:
        """Read the first and the last elements of each piece, which compares them."""
        for first, extent in self._pieces[main]:
            if not extent:
                continue
            # A few elements of the last axis, at one index of the others.
            num_sampled = min(_SAMPLE, extent[-1])
            other_axes = len(extent) - 1
            shape = (1,) * other_axes + (num_sampled,)
            last = []
            for start, length, sample in zip(first, extent, shape, strict=True):
                last.append(start + length - sample)
            for offset in sorted({first, tuple(last)}):
                self._read(main, offset, shape)

    def _read(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        """Return the box of `key`.

        Raises ValueError if no piece contains an element, and CheckpointError if a main parameter
        differs from its weight.
        """
        value = self._paste(key, offset, shape)
        parameter, state = split_key(key)
        is_checked = self._compares_weights and state == "param" and parameter in self.tensors
        if not is_checked or key in self._implied:
            return value

        # Compare a main parameter with its weight.
        weight = self._paste(parameter, offset, shape)
        if not is_bitwise_equal(value.to(weight.dtype), weight):
            raise CheckpointError(
                f"{self._location}: the main parameter of {parameter} at {offset} is not the "
                "stored weight, so the optimizer state is that of other parameters. Either "
                "Megatron-core wrote it wrongly (its fully_reshardable form, up to 0.19.2, where "
                "buckets end in padding: tools/checkpoint/inspect_checkpoint.py repair), or flat "
                "buffers were filled by other arguments than the stored ones. Take the weights "
                "alone (--no-optim of convert.py, --no-load-optim of a run), or another save of "
                "that run (--ckpt-format torch, or torch_dist without "
                "--dist-ckpt-optim-fully-reshardable)"
            )
        return value

    def _paste(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        """Return the box, assembled from all pieces that overlap it."""
        pieces = self._pieces[key]
        boxes = ((origin, stored_box) for (origin, _), stored_box in pieces.items())
        values, num_read = paste_boxes(boxes, self.tensors[key].dtype, offset, shape)
        if num_read != math.prod(shape):
            raise ValueError(
                f"{key}: of the box at {offset} of shape {shape} the files hold {num_read} of "
                f"{math.prod(shape)} elements"
            )
        return values

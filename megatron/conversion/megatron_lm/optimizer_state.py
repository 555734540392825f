"""The optimizer state in Megatron-LM's checkpoints: what must hold of it, and how its flat buffers
are filled.

A buffer of the distributed optimizer holds a chunk's parameters in reverse module order, each at a
multiple of 64 elements, in buckets. Positions here are relative to the concatenation of the buckets
without the padding at their ends, as the files have them. (Source: Megatron-LM core 0.12 to 0.20,
checked against files of 0.16.1.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from megatron.conversion.model_space.pieces import (
    ReadFlat,
    ReadRegion,
    is_bitwise_equal,
    make_region_reader,
)
from megatron.conversion.model_space.source import (
    OPTIMIZER_STATES,
    TensorInfo,
    is_trained,
    optimizer_key,
    optimizer_states,
    split_key,
)
from megatron.core.arithmetic import round_up
from megatron.core.dist_checkpointing import CheckpointError, Shape
from megatron.core.dist_checkpointing.mapping import Extent, compute_overlap, narrow
from megatron.core.optimizer import UPDATE_RULES

if TYPE_CHECKING:
    from megatron.conversion.model_space.model import LocalParameter

_SAMPLE = 256  # elements compared per piece
ALIGNMENT = 64  # elements
_DEFAULT_BUCKET = 40_000_000
_DEFAULT_BUCKET_PER_RANK = 1_000_000


def by_optimizer(
    chunks: Sequence[Sequence[LocalParameter]], apart: bool
) -> list[list[list[LocalParameter]]]:
    """The trained parameters of a rank's chunks by their optimizer: that of all, or of dense layers
    and of experts.
    """
    kinds = ({False}, {True}) if apart else ({False, True},)
    return [
        [
            [p for p in chunk if p.info.trained and p.info.sharding.is_expert in kind]
            for chunk in chunks
        ]
        for kind in kinds
    ]


Placed = tuple["LocalParameter", int, int]  # a parameter begins in this bucket, at this element


def plan_buckets(
    parameters: Sequence[LocalParameter], bucket_size: int | None
) -> tuple[list[Placed], list[int]]:
    """Where each parameter lies, and the unpadded size of each bucket; `bucket_size` None: no
    limit.
    """
    placed: list[Placed] = []
    sizes: list[int] = []
    end = 0  # of the last parameter, in the open bucket
    for parameter in reversed(parameters):
        start = round_up(end, ALIGNMENT)
        # The tied embedding is reduced separately, so Megatron-LM closes the bucket before it and
        # after it.
        if parameter.info.shared_embedding and start > 0:
            sizes.append(start)
            start = 0
        end = start + parameter.numel
        placed.append((parameter, len(sizes), start))
        if parameter.info.shared_embedding or (bucket_size is not None and end >= bucket_size):
            sizes.append(end)
            end = 0
    if end:
        sizes.append(end)
    return placed, sizes


def fit_buckets(
    parameters: Sequence[LocalParameter], sizes: Sequence[int], where: str
) -> list[Placed]:
    """Where each parameter lies, given the unpadded sizes of the buckets.

    The sizes show where the buckets were closed, whatever rule closed them. Raises ValueError if
    they do not fit.
    """
    placed: list[Placed] = []
    # end of the last parameter in the open bucket
    bucket = 0
    end = 0
    for parameter in reversed(parameters):
        start = round_up(end, ALIGNMENT)
        if (
            end and bucket < len(sizes) and sizes[bucket] in (end, start)
        ):  # `start` where a tied one closed it
            bucket = bucket + 1
            start = 0
        end = start + parameter.numel
        if bucket >= len(sizes) or end > sizes[bucket]:
            raise ValueError(
                f"{where}: buckets of {list(sizes)} elements do not fit the model that the arguments describe "
                f"(at {parameter.name} {list(parameter.shape)})"
            )
        placed.append((parameter, bucket, start))
    if bucket + 1 != len(sizes) or end != sizes[bucket]:
        raise ValueError(
            f"{where}: buckets of {list(sizes)} elements hold more than the model that the arguments describe, which "
            f"ends at element {end} of bucket {bucket}"
        )
    return placed


def bucket_size_of(
    args: Mapping[str, Any], pp_rank: int, chunk: int, num_parameters: int
) -> int | None:
    """Elements after which a run with these arguments closed its buckets; None: one bucket.

    `num_parameters` counts the elements of all chunks of the rank.
    """
    bucketed = args.get("overlap_grad_reduce") and not args.get(
        "overlap_param_gather_with_optimizer_step"
    )
    if not bucketed or pp_rank > 0 or chunk > 0:
        return None
    if args.get("ddp_num_buckets"):
        return num_parameters // int(args["ddp_num_buckets"])
    replicas = (args.get("data_parallel_size") or 1) * (args.get("context_parallel_size") or 1)
    return args.get("ddp_bucket_size") or max(_DEFAULT_BUCKET, _DEFAULT_BUCKET_PER_RANK * replicas)


def refuse_unknown_optimizer(args: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    """Raise CheckpointError unless the states `names` belong to an optimizer that converts.

    The arguments decide first: Muon stores its momentum under the name of SGD's.
    """
    optimizer = args.get("optimizer") or "adam"
    rule = UPDATE_RULES.get(optimizer)
    strange = sorted(set(names) - {*OPTIMIZER_STATES})
    if rule is None or not rule.IS_CONVERTIBLE or strange:
        what = f" ({', '.join(strange)})" if strange else ""
        raise CheckpointError(
            f"{where}: the optimizer is {optimizer}, whose state{what} is not supported: leave it out (--no-optim of "
            "convert.py, --no-load-optim of a run)"
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
    """The pieces that weights and optimizer state are stored in, by key; where several hold the
    same elements the first is read. Main parameters, rounded, must be the weights, to the bit.

    This proves that flat buffers were cut where they had been joined: a buffer does not record
    which element belongs to which parameter, and Megatron-core up to 0.19.2 shifts the parameters
    of fully_reshardable state behind a padded bucket. Training would continue with the moments of
    other parameters.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self.tensors: dict[str, TensorInfo] = {}
        self._pieces: dict[str, dict[Extent, ReadRegion]] = {}  # by key, then by (offset, shape)
        self._implied: set[str] = set()  # main parameters that are the weights themselves

    def add(
        self, key: str, info: TensorInfo, offset: Shape, shape: Shape, read: ReadRegion
    ) -> None:
        """A piece, any region of which `read` gives. Raises ValueError when pieces disagree about
        the tensor.
        """
        known = self.tensors.setdefault(key, info)
        if known != info:
            raise ValueError(
                f"{key}: {known.dtype} {known.shape} in one file, {info.dtype} {info.shape} in another"
            )
        self._pieces.setdefault(key, {}).setdefault((offset, shape), read)

    def add_local(
        self,
        key: str,
        parameter: LocalParameter,
        dtype: torch.dtype,
        read_flat: ReadFlat,
        first: int,
    ) -> None:
        """What a rank holds of a parameter, or of a state of it: its local elements in a row from
        element `first`.
        """
        info = TensorInfo(parameter.global_shape, dtype)
        for box in parameter.boxes:
            self.add(
                key,
                info,
                box.offset,
                box.shape,
                make_region_reader(read_flat, first + box.start, box.shape),
            )

    def complete(self, has_optimizer: bool) -> None:
        """Add implied main parameters, and check both ends of every stored one.

        Call this after the last piece was added. `has_optimizer` states that the files contain an
        optimizer, which SGD without momentum does not show in its tensors.
        """
        for key in [key for key in self.tensors if not key.startswith("optimizer.")]:
            main = optimizer_key("param", key)
            if main in self.tensors:
                self._check_ends(main)
            elif has_optimizer and is_trained(key) and self.tensors[key].dtype == torch.float32:
                # An fp32 model without the distributed optimizer stores no main parameters.
                self.tensors[main] = self.tensors[key]
                self._pieces[main] = self._pieces[key]
                self._implied.add(main)

    def _check_ends(self, main: str) -> None:
        for first, extent in self._pieces[main]:
            if extent:
                shape = (1,) * (len(extent) - 1) + (min(_SAMPLE, extent[-1]),)
                end = tuple(o + n - m for o, n, m in zip(first, extent, shape, strict=True))
                for offset in sorted({first, end}):
                    self.read(main, offset, shape)

    def read(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        """The box of `key`. Raises KeyError for an unknown key, ValueError where no piece holds an
        element, CheckpointError where a main parameter is not the weight.
        """
        value = self._paste(key, offset, shape)
        parameter, state = split_key(key)
        if state != "param" or key in self._implied or parameter not in self.tensors:
            return value
        weight = self._paste(parameter, offset, shape)
        if not is_bitwise_equal(value.to(weight.dtype), weight):
            raise CheckpointError(
                f"{self._where}: the main parameter of {parameter} at {offset} is not the stored weight, so the "
                "optimizer state is that of other parameters. Either Megatron-core wrote it wrongly (its "
                "fully_reshardable form, up to 0.19.2, where buckets end in padding), or flat buffers were filled by "
                "other arguments than the stored ones. Take the weights alone (--no-optim of convert.py, "
                "--no-load-optim of a run), or another save of that run (--ckpt-format torch, or torch_dist without "
                "--dist-ckpt-optim-fully-reshardable)"
            )
        return value

    def _paste(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        whole: torch.Tensor | None = None
        found = 0
        for piece, read in self._pieces[key].items():
            common = compute_overlap(piece, (offset, shape))
            if common is None:
                continue
            part = read(common.in_first, common.shape)
            # Most boxes lie within one piece, and need no copy.
            if common.shape == shape:
                return part
            if whole is None:
                whole = torch.empty(shape, dtype=self.tensors[key].dtype)
            narrow(whole, common.in_second, common.shape).copy_(part)
            found += part.numel()
        if found != math.prod(shape):
            raise ValueError(
                f"{key}: of the box at {offset} of shape {shape} the files hold {found} of {math.prod(shape)} elements"
            )
        return torch.empty(shape, dtype=self.tensors[key].dtype) if whole is None else whole

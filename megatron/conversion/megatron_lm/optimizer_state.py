"""The optimizer state in Megatron-LM's checkpoints: what must hold of it, and how its flat buffers are filled.

A buffer of the distributed optimizer holds a chunk's parameters in reverse module order, each at a multiple of 64
elements, in buckets. Positions here are relative to the concatenation of the buckets without the padding at their ends,
as the files have them. (Source: Megatron-LM core 0.12 to 0.20, checked against files of 0.16.1.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megatron.conversion.model_space.pieces import LocalParameter, PieceTable, bits
from megatron.conversion.model_space.source import OPTIMIZER_STATES, Shape, optimizer_key, optimizer_states, split_key
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.utils import round_up

_SAMPLE = 256  # elements compared per piece
ALIGNMENT = 64  # elements
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
        # The tied embedding is reduced separately, so Megatron-LM closes the bucket before it and after it.
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

    The sizes show where the buckets were closed, whatever rule closed them. Raises ValueError if they do not fit.
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


def refuse_unknown_optimizer(args: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    """Raises CheckpointError unless the states `names` are those of Adam or SGD.

    Muon keeps a momentum under SGD's name, and means another one: the arguments decide first.
    """
    optimizer = args.get("optimizer") or "adam"
    strange = sorted(set(names) - {*OPTIMIZER_STATES})
    if optimizer not in ("adam", "sgd") or strange:
        what = f" ({', '.join(strange)})" if strange else ""
        raise CheckpointError(
            f"{where}: the optimizer is {optimizer}, whose state{what} is not supported: leave it out (--no-optim of "
            "convert.py, --no-load-optim of a run)"
        )


class CheckedTable(PieceTable):
    """Pieces of weights and optimizer state whose main parameters, rounded, must be the weights, to the bit.

    This proves that flat buffers were cut where they had been joined: a buffer does not record which element belongs to
    which parameter, and Megatron-core up to 0.19.2 shifts the parameters of fully_reshardable state behind a padded
    bucket. Training would continue with the moments of other parameters.
    """

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where
        self._implied: set[str] = set()  # main parameters that are the weights themselves

    def complete(self) -> None:
        """Call when all pieces are added: adds implied main parameters, and checks both ends of every stored piece."""
        moments = [state for state in optimizer_states(self.tensors) if state != "param"]
        for key in [key for key in self.tensors if not key.startswith("optimizer.")]:
            main, dtype = optimizer_key("param", key), self.tensors[key].dtype
            has_state = any(optimizer_key(state, key) in self.tensors for state in moments)
            if main in self.tensors:
                self._check_ends(main)
            elif has_state and dtype == torch.float32:
                # An fp32 model without the distributed optimizer stores no main parameters.
                self.tensors[main], self.pieces[main] = self.tensors[key], self.pieces[key]
                self._implied.add(main)

    def _check_ends(self, main: str) -> None:
        for piece in self.pieces[main].values():
            if piece.shape:
                shape = (1,) * (len(piece.shape) - 1) + (min(_SAMPLE, piece.shape[-1]),)
                end = tuple(o + n - m for o, n, m in zip(piece.offset, piece.shape, shape, strict=True))
                for offset in sorted({piece.offset, end}):
                    self.read(main, offset, shape)

    def read(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        """The box of `key`. Raises CheckpointError where a main parameter is not the weight."""
        value = super().read(key, offset, shape)
        parameter, state = split_key(key)
        if state != "param" or key in self._implied or parameter not in self.tensors:
            return value
        weight = super().read(parameter, offset, shape)
        if not torch.equal(bits(value.to(weight.dtype)), bits(weight)):
            raise CheckpointError(
                f"{self._where}: the main parameter of {parameter} at {offset} is not the stored weight, so the "
                "optimizer state is that of other parameters. Either Megatron-core wrote it wrongly (its "
                "fully_reshardable form, up to 0.19.2, where buckets end in padding), or flat buffers were filled by "
                "other arguments than the stored ones. Take the weights alone (--no-optim of convert.py, "
                "--no-load-optim of a run), or another save of that run (--ckpt-format torch, or torch_dist without "
                "--dist-ckpt-optim-fully-reshardable)"
            )
        return value

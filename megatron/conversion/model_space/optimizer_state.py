"""What must hold of the optimizer state of any Megatron checkpoint, whatever form it has."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from megatron.conversion.model_space.pieces import Piece, PieceTable
from megatron.conversion.model_space.source import OPTIMIZER_STATES, TensorInfo, optimizer_key
from megatron.core.dist_checkpointing import CheckpointError

_SAMPLE = 256  # elements compared per piece


def add_implied_main_parameters(table: PieceTable) -> None:
    """An fp32 model without the distributed optimizer stores no main parameters: they are the weights."""
    for key, info in list(table.tensors.items()):
        main = optimizer_key("param", key)
        has_moments = optimizer_key("exp_avg", key) in table.tensors
        if has_moments and main not in table.tensors and info.dtype == torch.float32:
            piece = Piece((0,) * len(info.shape), info.shape, partial(table.read, key))
            table.add(main, info, piece)


def check_complete(tensors: Mapping[str, TensorInfo], where: str) -> None:
    """Every parameter has all of its optimizer state, of its shape, or none has any.

    Raises CheckpointError naming what is missing or of another shape.
    """
    shapes = {key: info.shape for key, info in tensors.items() if not key.startswith("optimizer.")}
    wanted = {optimizer_key(state, key): shape for key, shape in shapes.items() for state in OPTIMIZER_STATES}
    missing = [key for key in wanted if key not in tensors]
    if missing and len(missing) < len(wanted):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(f"{where}: optimizer state is missing: {', '.join(missing[:3])}{more}")
    for key, shape in wanted.items():
        if key in tensors and tensors[key].shape != shape:
            raise CheckpointError(f"{where}: {key} has shape {tensors[key].shape}, its parameter {shape}")


def check_main_parameters(table: PieceTable, where: str) -> None:
    """The main parameters, rounded, are the weights: a proof that flat buffers were cut where they were joined.

    A buffer does not say which element belongs to which parameter; modules of another kind or other buckets than the
    arguments tell would give moments of the wrong parameters, and training would go on. So the beginning of every piece
    is compared. Raises CheckpointError naming the first parameter that differs.
    """
    for key, info in table.tensors.items():
        main = optimizer_key("param", key)
        for piece in table.pieces(main) if main in table.tensors else ():
            if not piece.shape:
                continue
            sample = (1,) * (len(piece.shape) - 1) + (min(_SAMPLE, piece.shape[-1]),)
            weights = table.read(key, piece.offset, sample)
            if not torch.equal(piece.read((0,) * len(sample), sample).to(info.dtype), weights):
                raise CheckpointError(
                    f"{where}: the main parameter of {key} at {piece.offset} is not the stored weight. The flat "
                    "optimizer buffers were filled by another order of parameters or another bucket size than the "
                    "stored arguments tell: convert without the optimizer (--no-optim), or save the run again with "
                    "--ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable"
                )

"""Whether a checkpoint can be loaded at a layout, and what each rank reads; from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.conversion.model_space.model import WORD_EMBEDDINGS, check_parameters, model_config
from megatron.conversion.model_space.rank_layout import Layout, rank_parameters
from megatron.conversion.model_space.source import Source

_STATES = ("param", "exp_avg", "exp_avg_sq", "momentum_buffer")


@dataclass(frozen=True)
class RankPlan:
    """What one model-parallel rank holds of a checkpoint. Bytes are as stored."""

    tp: int
    pp: int
    layers: tuple[range, ...]  # global numbers, by chunk
    parameters: int  # elements, padding of the vocabulary left out
    weight_bytes: int
    optimizer_bytes: int  # of the whole rank: its replicas share them with the distributed optimizer


def plan_load(source: Source, layout: Layout) -> list[RankPlan]:
    """What every model-parallel rank of `layout` reads of `source`, TP fastest.

    Raises ValueError where the model cannot be split like that, or the checkpoint lacks what the model needs.
    """
    if WORD_EMBEDDINGS not in source.tensors:
        raise ValueError(f"{source.description} has no {WORD_EMBEDDINGS}: it is no model that we know")
    config = model_config(source.args, source.tensors[WORD_EMBEDDINGS].shape[0], source.description)
    plans = []
    for tp, pp in layout.ranks:
        parameters = [p for chunk in rank_parameters(config, layout, tp, pp) for p in chunk]
        check_parameters(source.tensors, {p.key: p.global_shape for p in parameters}, source.description)
        numels = {p.key: sum(torch.Size(box.shape).numel() for box in p.boxes) for p in parameters}
        plans.append(
            RankPlan(
                tp,
                pp,
                layout.stages[pp],
                sum(numels.values()),
                _stored_bytes(source, numels, [""]),
                _stored_bytes(source, numels, [f"optimizer.state.{state}." for state in _STATES]),
            )
        )
    return plans


def _stored_bytes(source: Source, numels: dict[str, int], prefixes: list[str]) -> int:
    """Of `numels` elements of each key, under those of the prefixes that the source has."""
    total = 0
    for key, numel in numels.items():
        for prefix in prefixes:
            info = source.tensors.get(prefix + key)
            total += 0 if info is None else numel * info.dtype.itemsize
    return total

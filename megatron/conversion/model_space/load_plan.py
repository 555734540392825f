"""Whether a checkpoint can be loaded at a layout, and what each rank reads; from shapes alone."""

from __future__ import annotations

import re
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
    parts: dict[str, dict[str, int]]  # these bytes by part of the model and kind


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
        parts: dict[str, dict[str, int]] = {}
        for key, numel in numels.items():
            part = parts.setdefault(part_of(key), {"weights": 0, "optimizer": 0})
            part["weights"] += _stored_bytes(source, {key: numel}, [""])
            part["optimizer"] += _stored_bytes(source, {key: numel}, [f"optimizer.state.{s}." for s in _STATES])
        weights, optimizer = (sum(part[kind] for part in parts.values()) for kind in ("weights", "optimizer"))
        plans.append(RankPlan(tp, pp, layout.stages[pp], sum(numels.values()), weights, optimizer, parts))
    return plans


def part_of(key: str) -> str:
    """The part of the model that a tensor of this name belongs to, for people: `layer 3`, `embedding`."""
    name = key.removeprefix("optimizer.state.").partition(".")[2] if key.startswith("optimizer.state.") else key
    layer = re.match(r"decoder\.layers\.(\d+)\.", name)
    if layer is not None:
        return f"layer {layer[1]}"
    named = {"embedding": "embedding", "output_layer": "output layer", "decoder.final_layernorm": "final norm"}
    return next((text for prefix, text in named.items() if name.startswith(prefix)), name.split(".")[0])


def _stored_bytes(source: Source, numels: dict[str, int], prefixes: list[str]) -> int:
    """Of `numels` elements of each key, under those of the prefixes that the source has."""
    total = 0
    for key, numel in numels.items():
        for prefix in prefixes:
            info = source.tensors.get(prefix + key)
            total += 0 if info is None else numel * info.dtype.itemsize
    return total

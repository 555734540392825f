"""Scales of fp8 in a checkpoint: under Megatron-core's keys of extra states, as tensors that no code is needed to read.

They go on where recipe and place are the same; anywhere else they start anew, which costs a few steps of precision.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, ShardedTensor
from megatron.core.transformer.layer_spec import Quantized
from megatron.training.run import Run

logger = logging.getLogger(__name__)


def fp8_state(run: Run, model: ShardedStateDict) -> dict[str, ShardedObject]:
    """What of the run's modules is to be stored; every rank of a stage has the same, but for the experts of others."""
    scales = {key: module.scales() for key, module in _quantized(run, model).items()}
    return {key: ShardedObject(key, state) for key, state in scales.items() if state is not None}


def fp8_state_to_load(run: Run, model: ShardedStateDict, stored: Collection[str]) -> dict[str, ShardedObject]:
    """What to ask a checkpoint with these objects for."""
    if run.config.model.fp8 is None:
        return {}
    return {key: ShardedObject(key, None) for key in _quantized(run, model) if key in stored}


def restore_fp8_state(
    run: Run, model: ShardedStateDict, objects: Mapping[str, Any], source_args: Mapping[str, Any]
) -> None:
    """Take what fits, and say in one line what does not."""
    config, modules = run.config.model, _quantized(run, model)
    restored = [
        isinstance(objects.get(key), dict) and module.restore_scales(objects[key], config)
        for key, module in modules.items()
    ]
    if any(restored):
        run.optimizer.requantize()
    if source_args.get("fp8") and not any(restored):
        now = f"of --fp8-recipe {config.fp8_recipe}" if config.fp8 is not None else "without fp8"
        logger.info(f"the scales of fp8 in the checkpoint are not used: this run is {now}, or of another layout")


def _quantized(run: Run, model: ShardedStateDict) -> dict[str, Quantized]:
    """The modules by the keys of their state, which follow from those of their weights."""
    keys = {id(entry.local): key for key, entry in model.items() if isinstance(entry, ShardedTensor)}
    found: dict[str, Quantized] = {}
    for chunk in run.chunks:
        for module in chunk.modules():
            if isinstance(module, Quantized):
                key = keys[id(module.weight)]
                ep = run.ps.ep if ".experts." in key else None
                place = f"{ep.rank}_{ep.size}" if ep is not None else "0_1"
                found[f"{key.removesuffix('weight')}_extra_state/shard_{place}"] = module
    return found

"""Writer of torch_dist directories for runs of this program and of Megatron-LM.

One process writes them, a few megabytes at a time, with numbered or stacked layers.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.conversion.megatron_lm.args import (
    build_grad_scaler,
)
from megatron.conversion.megatron_lm.hybrid import (
    HybridLayers,
    make_hybrid_key,
)
from megatron.conversion.megatron_lm.torch_dist import (
    IGNORED_OBJECTS,
    split_stored_key,
)
from megatron.conversion.model_space.foreign import foreign_name
from megatron.conversion.model_space.lazy_tensors import stack
from megatron.conversion.model_space.model import model_config, split_layer_key
from megatron.conversion.model_space.views import SourceView
from megatron.core.dist_checkpointing import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    save,
)
from megatron.core.dist_checkpointing.files import COMMON_STATE
from megatron.core.dist_checkpointing.mapping import LazyTensor
from megatron.core.dist_checkpointing.saving.commit import Progress, no_progress
from megatron.core.run_checkpoint.checks import COMMON
from megatron.core.run_checkpoint.common_state import (
    LOADER_DEFAULTS,
    add_loader_defaults,
    build_common_state,
    split_by_expert_optimizer,
)
from megatron.core.run_checkpoint.keys import WORD_EMBEDDINGS, build_extra_states, is_foreign
from megatron.core.run_checkpoint.source import Source

_HEAD_STATE = "output_layer._extra_state/shard_0_1"  # HybridModel requests it, GPTModel does not


class StackedLayers(SourceView):
    """A view of `source` with stacked layers, which must have equal shapes."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.by_layer = source.tensors
        self.num_layers = int(source.args["num_layers"])
        self.tensors = {}

        # Group the tensors of layers: stacked key -> number of the layer -> its tensor.
        layers_of_key: dict[str, dict[int, LazyTensor]] = defaultdict(dict)
        for key, tensor in source.tensors.items():
            layer_key = split_layer_key(key)
            if layer_key is None:
                self.tensors[key] = tensor
            else:
                prefix, layer, name = layer_key
                layers_of_key[prefix + name][layer] = tensor

        # Stack them. All layers must have the tensor, with the same shape and dtype.
        for key, layers in layers_of_key.items():
            if len(set(layers.values())) > 1 or len(layers) != self.num_layers:
                raise ValueError(
                    f"{self.description}: {key} differs between the {self.num_layers} layers"
                )
            self.tensors[key] = stack([layers[index] for index in range(self.num_layers)])


def make_stacked_key(key: str, num_layers: int) -> str:
    """Return the key of a layer's object in the grid of all layers.

    The end of an object's key is its index in a grid and the size of the grid, e.g., shard_3_8 for
    expert 3 of 8. Stacking adds an axis of layers: shard_5.3_24.8 for layer 5 of 24.
    """
    layer_key = split_layer_key(key)
    if layer_key is None:
        return key
    prefix, layer, name = layer_key
    module, _, grid = (prefix + name).rpartition("/shard_")
    if grid == "0_1":  # one object per layer
        return f"{module}/shard_{layer}_{num_layers}"
    expert, _, experts = grid.partition("_")
    return f"{module}/shard_{layer}.{expert}_{num_layers}.{experts}"


def write_torch_dist(
    source: Source,
    directory: Path,
    files: int = 1,
    progress: Progress = no_progress,
    extra_files: Mapping[str, bytes] | None = None,
) -> list[str]:
    """Write `directory` (an iteration), which appears once it is complete; `files` files at once.

    `extra_files` are small files that it contains, by path. Returns an empty list: no part is lost.
    """
    state: ShardedStateDict = {}
    for key, tensor in source.tensors.items():
        name = _make_stored_name(source, key)
        state[name] = ShardedTensor.lazy(name, tensor)
    state.update(_build_extra_states(source))
    # Only a run with the layout of the source can use its generators.
    if source.training is not None:
        for key, read_state in source.training.rng.items():
            state[key] = ShardedObject(key, read_state())
    # Newer Megatron-LM reads the common state from an object, older releases from common.pt.
    common = _build_common(source)
    state[COMMON_STATE] = ShardedObject(COMMON_STATE, common)
    save(
        state,
        directory,
        common=common,
        workers=files,
        progress=progress,
        extra_files=extra_files,
    )
    return []


def _make_stored_name(source: Source, key: str) -> str:
    """Return the name of a tensor in the files.

    Raises ValueError for a foreign tensor with the name of another part of the checkpoint.
    """
    name = foreign_name(key)
    is_taken = name in source.tensors or split_stored_key(name) != (name, None)
    if is_foreign(key) and (is_taken or name.startswith(IGNORED_OBJECTS)):
        raise ValueError(
            f"{source.description}: torch_dist checkpoints store another tensor as {name}: "
            "rename it (--rename) or leave foreign tensors out (--keep-foreign)"
        )
    return name


def _build_extra_states(source: Source) -> ShardedStateDict:
    """Return the extra states that Megatron-core requires for the layers of `source`."""
    experts = int(source.args.get("num_experts") or 0)
    if not isinstance(source, StackedLayers | HybridLayers):
        return dict(build_extra_states(source.tensors, experts))
    renamed: ShardedStateDict = {}
    for entry in build_extra_states(source.by_layer, experts).values():
        if isinstance(source, StackedLayers):
            key = make_stacked_key(entry.key, source.num_layers)
        else:
            key = make_hybrid_key(entry.key)
        renamed[key] = ShardedObject(key, entry.value)
    if isinstance(source, HybridLayers):
        renamed[_HEAD_STATE] = ShardedObject(_HEAD_STATE, None)
    return renamed


def _build_common(source: Source) -> dict[str, Any]:
    """Return `common.pt` with the arguments and the training state of `source`."""
    # Arguments and counters
    training = source.training
    args = _build_args(source)
    is_stacked = isinstance(source, StackedLayers)
    common = build_common_state(argparse.Namespace(**args), training, stacked=is_stacked)

    # Parameter groups and schedule, without tensors
    if training is not None and training.param_groups is not None:
        optimizer: dict[str, Any] = {"optimizer": {"param_groups": training.param_groups}}
        if training.grad_scaler is not None:
            optimizer["grad_scaler"] = build_grad_scaler(training.grad_scaler)
        optimizer["param_state_sharding_type"] = "fully_reshardable"
        common["optimizer"] = split_by_expert_optimizer(optimizer, args)
    if training is not None and training.scheduler is not None:
        common["opt_param_scheduler"] = training.scheduler
    return COMMON(common, source.description)  # the schema of the readers


def _build_args(source: Source) -> dict[str, Any]:
    """Return the arguments of `source`, complete for Megatron-LM's reader."""
    training = source.training
    weights = source.tensors[WORD_EMBEDDINGS]

    # Defaults first, then the model, then the arguments of the source. A None in the source must
    # not hide a default.
    config = model_config(source.args, weights.shape[0], source.description)
    args = dataclasses.asdict(config)
    del args["transformer_impl"]  # how layers are computed is not a property of the checkpoint
    args["params_dtype"] = weights.dtype
    for name, value in source.args.items():
        if value is not None or name not in LOADER_DEFAULTS:
            args[name] = value
    args = add_loader_defaults(args)

    # The state next to the weights: Megatron-LM's reader requests only the parts that are listed.
    args["ckpt_format"] = "torch_dist"
    args["use_dist_ckpt"] = True
    if isinstance(source, HybridLayers):
        args = source.replace_arguments(args)
    args["no_save_optim"] = training is None or training.param_groups is None
    args["no_save_rng"] = training is None or not training.rng
    args.setdefault("consumed_train_samples", 0)
    args.setdefault("consumed_valid_samples", 0)
    return args

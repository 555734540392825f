"""Checkpoints that DeepSpeed's engine saves, as a `Source`.

<root>/latest: name of the directory <tag>, whose files `engine_files.py` describes
<root>/config.json: the model of transformers, which its trainer stores there
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.deepspeed.engine_files import (
    EngineFiles,
    RankTensors,
    check_states,
    find_step,
    list_names,
)
from megatron.conversion.deepspeed.engine_megatron import MegatronEngineFiles
from megatron.conversion.deepspeed.names import has_megatron_names
from megatron.conversion.deepspeed.training_state import (
    check_groups,
    decays_all,
    list_lost_state,
    read_training,
)
from megatron.conversion.deepspeed.universal import UniversalSource
from megatron.conversion.huggingface.directory import HuggingFaceSource, find_config
from megatron.conversion.model_space.lazy_tensors import cast, make_zeros
from megatron.conversion.model_space.model import check_optimizer_complete, model_parameters
from megatron.conversion.model_space.optimizer_states import optimizer_key
from megatron.conversion.options import ReadOptions
from megatron.core.dist_checkpointing.mapping import LazyTensor
from megatron.core.run_checkpoint.keys import ENGINE_LATEST, ENGINE_MODEL_FILES, ZERO
from megatron.core.run_checkpoint.source import Source, TrainingState

_SCHEDULE_MARK = "lr_decay_style"  # of Megatron's schedule


def describe_engine_checkpoint(root: Path) -> str | None:
    """Return how to name one of the engine's checkpoints in `root`, None if there is none.

    The one that `latest` names is read.
    """
    tags = []
    for path in root.glob(f"*/{ENGINE_MODEL_FILES}"):
        if not (path.parent / ZERO).is_dir():
            tags.append(path.parent.name)
    if not tags:
        return None
    return (
        f"{root} has checkpoints of DeepSpeed's engine ({', '.join(sorted(set(tags))[:8])}), but "
        f"no file {ENGINE_LATEST!r} that names one of them: give the directory of one"
    )


def open_engine_checkpoint(directory: Path, read_options: ReadOptions | None = None) -> Source:
    """Open a checkpoint of DeepSpeed's engine. Raises ValueError if it is incomplete."""
    read_options = read_options or ReadOptions()
    files = EngineFiles(directory, not read_options.no_optim)
    if has_megatron_names(list_names(files.ranks)):
        return UniversalSource(directory, read_options, MegatronEngineFiles(files))
    return TransformersEngineSource(files, read_options)


class TransformersEngineSource:
    """A model of transformers that DeepSpeed has trained, with its optimizer.

    The weights of a bf16 or fp16 run are its main parameters, cast.
    """

    def __init__(self, files: EngineFiles, read_options: ReadOptions) -> None:
        self.description = files.description
        if len(files.ranks) > 1:
            raise ValueError(
                f"{self.description} is split over {len(files.ranks)} tensor- or pipeline-parallel "
                "ranks with the names of transformers (AutoTP), which is not supported: save a "
                "model of transformers in DeepSpeed (save_16bit_model())"
            )
        (rank,) = files.ranks
        candidates = (files.directory, files.directory.parent)
        self._config_dir = find_config(self.description, candidates, read_options.hf_config)
        model_args = _read_precision(rank.state) | dict(read_options.args)
        self._read_options = replace(read_options, args=model_args, no_optim=True)
        model = self._open(rank.param)
        self.args: dict[str, Any] = model.args
        shared = rank.state.get("shared_params") or {}
        self.unused = [name for name in model.unused if name not in shared]
        self.tensors: dict[str, LazyTensor] = {}
        for key, tensor in model.tensors.items():
            self.tensors[key] = cast(tensor, model.config.params_dtype)

        # Optimizer
        state = dict(rank.state)
        optimizer = None
        has_full_decay = False
        if not read_options.no_optim:
            optimizer = {"param_groups": rank.groups}
            has_full_decay = decays_all(rank.groups, rank.members)
            self._add_optimizer(model, rank)
        scheduler = state.get("lr_scheduler")
        if not isinstance(scheduler, dict) or _SCHEDULE_MARK not in scheduler:
            state["lr_scheduler"] = None
            if scheduler:
                self.unused.append("state: lr_scheduler")
        self.unused += [f"state: {name}" for name in list_lost_state(state, optimizer)]
        self.training: TrainingState | None = read_training(
            state, optimizer, find_step(rank, self.description), self.args, has_full_decay
        )

    def _open(self, weights: Mapping[str, LazyTensor]) -> HuggingFaceSource:
        """Return the model with these weights under the names of transformers."""
        return HuggingFaceSource(self._config_dir, self._read_options, weights)

    def _add_optimizer(self, model: HuggingFaceSource, rank: RankTensors) -> None:
        """Add the main parameters and the moments, which are zero for frozen parameters."""
        check_states(rank, self.description)
        decays = {}
        for parameter in model_parameters(model.config):
            decays[parameter.name] = parameter.group.weight_decay
        decayed = {name: decays[key] for name, key in model.map_names().items()}
        check_groups(rank.groups, rank.members, decayed, self.description)
        states = {"param": rank.param}
        frozen = list(rank.state.get("frozen_param_shapes") or {})
        for state, trained in rank.moments.items():
            states[state] = dict(trained)
            for name in frozen:
                states[state][name] = make_zeros(rank.param[name].shape, torch.float32)
        # A moment has the names and the layout of the weights.
        for state, tensors in states.items():
            for key, tensor in self._open(tensors).tensors.items():
                self.tensors[optimizer_key(state, key)] = cast(tensor, torch.float32)
        check_optimizer_complete(self.tensors, self.args, self.description)
        if frozen:
            self.unused.append(f"state: {len(frozen)} frozen parameters, which are trained here")


def _read_precision(state: Mapping[str, Any]) -> dict[str, bool]:
    """Return the arguments of the dtype in which the model was trained."""
    config = state.get("ds_config")
    precision = {}
    for name in ("bf16", "fp16"):
        section = config.get(name) if isinstance(config, dict) else None
        precision[name] = isinstance(section, dict) and section.get("enabled") is True
    return precision

"""Write a `Source` as a DeepSpeed universal checkpoint, one tensor at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.deepspeed.args import parts_without_place, write_args, write_groups, write_scheduler
from megatron.conversion.deepspeed.files import (
    LATEST,
    OPTIMIZER_STATE,
    STATE_FILES,
    STEP,
    STYLES,
    ZERO,
    Style,
    model_state_name,
)
from megatron.conversion.files import Options, Progress, make_empty_directory, no_progress, run_jobs, write_archive
from megatron.conversion.model_space.model import check_parameters, exported_config, model_parameters, plain_args
from megatron.conversion.model_space.row_maps import pack_rows, qkv_blocks
from megatron.conversion.model_space.source import (
    ADAM,
    Source,
    TrainingState,
    full_precision_key,
    optimizer_key,
    optimizer_states,
)
from megatron.core.dist_checkpointing.format.schema import file_name
from megatron.core.durable_files import committed, fsync_tree
from megatron.core.transformer.transformer_config import TransformerConfig

_DS_VERSION = "0.19.8"  # the release whose loader this was checked with; loaders want 0.3.17 at least


def write_universal(
    source: Source, directory: Path, options: Options | None = None, progress: Progress = no_progress
) -> list[str]:
    """Write `source` below the empty `directory`; returns what could not be carried.

    `latest_universal` is written last. A source without an optimizer gets the state of one that has not begun: the
    loader needs it. Raises ValueError for a model that the programs in question lack, before anything is written.
    """
    options = options or Options()
    writer = _UniversalWriter(source, options)
    names = {key: writer.style.of(key, writer.config) for key in writer.parameters}
    make_empty_directory(directory)
    training = source.training or TrainingState()
    target = directory / file_name(f"global_step{training.iteration}_universal", "the iteration")
    (target / ZERO).mkdir(parents=True)
    jobs = [partial(writer.write_parameter, target / ZERO / name, key, progress) for key, name in names.items()]
    run_jobs(jobs, options.workers)
    _save(target / ZERO / OPTIMIZER_STATE, writer.optimizer_state(training))
    _save(target / model_state_name(0), writer.model_state(training, names))
    # `latest_universal` makes the directory a checkpoint: it must not be durable before the rest is.
    fsync_tree(directory)
    with committed(directory / LATEST) as temporary:
        temporary.write_text(target.name)
    fsync_tree(directory)
    lost = parts_without_place(writer.config)
    lost += [] if writer.has_optimizer else ["optimizer state: there is none, so moments are zero and the step is 0"]
    return lost + (["random number state: it belongs to one layout"] if training.rng else [])


class _UniversalWriter:
    def __init__(self, source: Source, options: Options) -> None:
        self.source = source
        self.config = config = exported_config(source, options.vocab_size)
        if config.multi_latent_attention:
            raise ValueError(
                f"{source.description} has --multi-latent-attention: universal checkpoints have no names for its parts"
            )
        if config.has_experts:
            raise ValueError(
                f"{source.description} has --num-experts {config.experts}: universal checkpoints have no names for the "
                "experts of a layer. Write torch_dist, legacy or hf"
            )
        self.parameters = {parameter.name: parameter for parameter in model_parameters(config)}
        shapes = {key: parameter.shape for key, parameter in self.parameters.items()}
        check_parameters(source.tensors, shapes, source.description, config.vocab_size)
        self.style = _style(options.universal_style, config)
        tensor_parallel = options.tensor_parallel or source.args.get("tensor_model_parallel_size") or 1
        self.blocks = tensor_parallel if options.qkv_blocks else None
        heads, groups, head_dim = config.num_attention_heads, config.query_groups, config.head_dim
        self._qkv_map = qkv_blocks(heads, groups, head_dim, self.blocks) if self.blocks else None
        if self.blocks and groups != heads:
            raise ValueError("Megatron-DeepSpeed that stores blocks of q, k and v has no --group-query-attention")
        self.states = optimizer_states(source.tensors)
        self.has_optimizer = bool(self.states)
        steps = [group.get("step") for group in (source.training and source.training.param_groups) or []]
        taken = source.training.iteration if source.training is not None else 0  # SGD does not count
        self.step = float(next((step for step in steps if step is not None), taken)) if self.has_optimizer else 0.0

    def write_parameter(self, folder: Path, key: str, progress: Progress) -> None:
        folder.mkdir()
        for state in self.states or ADAM:
            tensor = self._value(key, state)
            if self._qkv_map is not None and ".linear_qkv." in key and "layer_norm" not in key:
                tensor = pack_rows(self._qkv_map, 0, tensor)
            _save(folder / STATE_FILES[state], self._marks(key) | {"param": tensor.contiguous()})
            progress(tensor.nbytes)
            del tensor  # before the next one is read
        _save(folder / STEP, torch.tensor(self.step))

    def _value(self, key: str, state: str) -> torch.Tensor:
        """The fp32 main parameter or the weight; a moment, or zeros of one that has not begun."""
        shape = self.parameters[key].shape
        if state != "param" and not self.has_optimizer:
            return torch.zeros(shape)
        stored = full_precision_key(key, self.source.tensors) if state == "param" else optimizer_key(state, key)
        return self.source.read(stored, (0,) * len(shape), shape).float()

    def _marks(self, key: str) -> dict[str, Any]:
        """How a loader cuts the tensor for its own tensor parallelism."""
        parameter = self.parameters[key]
        marks = {
            "cat_dim": parameter.info.tp_dim,
            "vocab_tensor": parameter.group.embedding or None,
            "param_n_sub_params": parameter.info.tp_blocks if parameter.info.tp_blocks > 1 else None,
        }
        return {name: value for name, value in marks.items() if value is not None}

    def optimizer_state(self, training: TrainingState) -> dict[str, Any]:
        counts = (2, 1) if self.style.name == "bigscience" else (1, 1)
        return {
            "clip_grad": self.source.args.get("clip_grad", 1.0),
            "group_paddings": [0] * sum(counts),
            "partition_count": [1] * sum(counts),
            "ds_version": _DS_VERSION,
            "param_groups": write_groups(training, counts),
        }

    def model_state(self, training: TrainingState, names: Mapping[str, str]) -> dict[str, Any]:
        args = write_args(self.config, self.source.args, training, blocks=self.blocks)
        vocabulary = {"original_vocab_size": self.config.vocab_size, "padded_vocab_size": self.config.vocab_size}
        tokens = training.consumed_train_samples * int(self.source.args.get("seq_length") or 0)
        state = {
            "module": None,
            "buffer_names": [],
            "optimizer": None,
            "param_shapes": self._param_shapes(names),
            "frozen_param_shapes": None,
            "shared_params": {},
            "frozen_param_fragments": None,
            "lr_scheduler": write_scheduler(training, tokens, bigscience=self.style.name == "bigscience"),
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": training.iteration - int(self.step) if self.has_optimizer else 0,
            "global_steps": training.iteration,
            "global_samples": training.consumed_train_samples,
            "dp_world_size": 1,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": self.blocks or 1},
            "ds_config": {},
            "ds_version": _DS_VERSION,
            "universal_checkpoint_info": {"universal_checkpoint_version": 0.4} | vocabulary | self._patterns(names),
            "args": args,
            "checkpoint_version": 3.0,
            "iteration": training.iteration,
            "tokens": tokens,
            # No loader of DeepSpeed asks for these; the way back does.
            "megatron_param_groups": training.param_groups and [plain_args(group) for group in training.param_groups],
            "num_floating_point_operations_so_far": training.num_floating_point_operations_so_far,
            "grad_scaler": training.grad_scaler,
        }
        return state | ({"checkpoint_info": vocabulary} if self.style.name == "bigscience" else {})

    def _param_shapes(self, names: Mapping[str, str]) -> list[OrderedDict[str, torch.Size]]:
        """By group: with weight decay (matrices), without (vectors)."""
        groups: list[OrderedDict[str, torch.Size]] = [OrderedDict(), OrderedDict()]
        for key, name in names.items():
            groups[not self.parameters[key].group.weight_decay][name] = torch.Size(self.parameters[key].shape)
        return groups

    def _patterns(self, names: Mapping[str, str]) -> dict[str, list[str]]:
        def having(mark: str, value: Any) -> list[str]:
            return [name for key, name in names.items() if self._marks(key).get(mark) == value]

        return {
            "vocabulary_parameter_patterns": having("vocab_tensor", True),
            "tp_replicated_parameter_patterns": having("cat_dim", None),
            "parameter_with_row_parallelism_patterns": having("cat_dim", 1),
            "parameter_with_2_sub_params_cat_dim_0": having("param_n_sub_params", 2),
        }


def _style(name: str | None, config: TransformerConfig) -> Style:
    """BigScience's fork trains ALiBi and a normalized embedding, Megatron-DeepSpeed neither."""
    like_bloom = config.position_embedding_type == "alibi" or config.embedding_layernorm
    name = name or ("bigscience" if like_bloom else "pipeline")
    if name not in STYLES:
        raise ValueError(f"--universal-style {name!r}: give one of {', '.join(STYLES)}")
    if like_bloom and name != "bigscience":
        raise ValueError(f"--universal-style {name}: Megatron-DeepSpeed has no ALiBi and no normalized embedding")
    return STYLES[name]


def _save(path: Path, value: Any) -> None:
    with committed(path) as temporary:
        write_archive(temporary, value)

"""A DeepSpeed universal checkpoint as a `Source`, and a `Source` written as one, one tensor at a
time.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.deepspeed.files import (
    BLOCKS_MARK,
    MODEL_STATE_SCHEMA,
    OPTIMIZER_SCHEMA,
    OPTIMIZER_STATE,
    STATE_FILES,
    STEP,
    STYLES,
    UniversalFiles,
    lost_state,
    model_state_name,
    parts_without_place,
    read_args,
    read_training,
    write_args,
    write_groups,
    write_scheduler,
)
from megatron.conversion.file_names import LATEST, ZERO
from megatron.conversion.model_space.model import (
    check_parameters,
    make_export_config,
    model_config,
    model_parameters,
    model_tensors,
    resolve_arguments,
)
from megatron.conversion.model_space.pieces import (
    make_empty_directory,
    map_fused_qkv,
    map_unchanged,
    pack_rows,
    run_jobs,
    unpack_rows,
    write_archive,
)
from megatron.conversion.model_space.source import (
    ADAM,
    WORD_EMBEDDINGS,
    Progress,
    Shape,
    Source,
    TensorInfo,
    TrainingState,
    full_precision_key,
    no_progress,
    optimizer_key,
    optimizer_states,
    plain_args,
    split_key,
)
from megatron.conversion.options import QKV_LAYOUTS, ReadOptions, WriteOptions
from megatron.core.dist_checkpointing.format.schema import file_name
from megatron.core.durable_files import committed, fsync_tree
from megatron.core.transformer.transformer_config import TransformerConfig, flag_name

_POSITIONS = "embedding.position_embeddings.weight"
_VOCABULARY = (WORD_EMBEDDINGS, "output_layer.weight")


class UniversalSource:
    """Full-precision parameters, moments and run of a universal checkpoint.

    The weights of a bf16 or fp16 run are its main parameters, cast. A `vocab_size` that is given is
    the number of tokens to keep.
    """

    def __init__(self, directory: Path, read_options: ReadOptions | None = None) -> None:
        read_options = read_options or ReadOptions()
        self._files = files = UniversalFiles(directory)
        self.description = files.description
        files.args = read_args(files.args, self.description) if files.args else {}
        told = files.args | dict(read_options.args)
        self.args: dict[str, Any] = _implied(files, told) | told
        config = model_config(self.args, _vocabulary(files, read_options.args), self.description)
        self.args |= resolve_arguments(config)
        self.tensors = _tensors(files, config, read_options.optimizer)
        blocks = self._blocks(
            read_options.qkv_layout, config
        )  # None: by query group, as the model has it
        heads = config.num_attention_heads, config.query_groups, config.head_dim
        self._qkv_map = None if blocks is None else map_fused_qkv(*heads, blocks)
        self.unused = [f"model states: {name}" for name in lost_state(files.state)]
        self.training: TrainingState | None = read_training(
            files.state, files.optimizer_state(), files.step(), self.args
        )
        if not read_options.optimizer:
            self.training.param_groups = self.training.grad_scaler = None

    def read(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        info = self.tensors[key]
        parameter, state = split_key(key)
        stored = self._files.tensor(
            parameter, state or "param"
        )  # weights are main parameters, cast
        if stored.dim() != len(info.shape):
            stored = stored.view(info.shape)  # flat, from ZeRO-3
        columns = tuple(slice(o, o + n) for o, n in zip(offset[1:], shape[1:], strict=True))

        def read_rows(source: int, first: int, count: int) -> torch.Tensor:
            return stored[(slice(first, first + count), *columns)]

        is_qkv = parameter.endswith(("linear_qkv.weight", "linear_qkv.bias"))
        row_map = (
            self._qkv_map if is_qkv and self._qkv_map is not None else map_unchanged(info.shape[0])
        )
        return unpack_rows(row_map, offset[0], offset[0] + shape[0], read_rows).to(
            info.dtype, copy=True
        )

    def _blocks(self, layout: str | None, config: TransformerConfig) -> int | None:
        """Number of [q; k; v] blocks, None for the layout by groups; the arguments decide unless
        `layout` does.
        """
        if layout not in (None, *QKV_LAYOUTS):
            raise ValueError(
                f"--universal-qkv-layout {layout!r}: give one of {', '.join(QKV_LAYOUTS)}"
            )
        if layout is None and BLOCKS_MARK in self._files.args:
            layout = "tp-blocks"
        if layout != "tp-blocks":
            return None
        if config.query_groups != config.num_attention_heads:
            raise ValueError(
                f"{self.description}: a version of Megatron-DeepSpeed that stores blocks of q, k and v computes "
                "something else than grouped-query attention from them, which no other model does. If another version "
                "trained it, give --universal-qkv-layout groups"
            )
        sizes = self._files.state.get("checkpoint_parallel_dimensions") or {}
        blocks = sizes.get("tp_degree") or self.args.get("tensor_model_parallel_size")
        if not blocks:
            flag = "--tensor-model-parallel-size"
            raise ValueError(
                f"{self.description} does not say how many ranks split q, k and v: give {flag}"
            )
        return int(blocks)


def _vocabulary(files: UniversalFiles, given: Mapping[str, Any]) -> int:
    """Number of tokens: given, or recorded; else the rows, if the converter has cut the padding
    off.
    """
    if not files.shapes.get(WORD_EMBEDDINGS):
        raise ValueError(f"{files.description} has no word embedding")
    rows = files.shapes[WORD_EMBEDDINGS][0]
    info = files.state.get("universal_checkpoint_info") or files.state.get("checkpoint_info") or {}
    wanted = given.get("vocab_size") or info.get("original_vocab_size")
    if wanted is None:
        entry = files.entry(WORD_EMBEDDINGS, "param")
        if not (isinstance(entry, dict) and entry.get("vocab_tensor")):
            raise ValueError(
                f"{files.description} does not tell tokens from padding: give --vocab-size (rows: {rows})"
            )
        wanted = rows
    if len(files.shapes[WORD_EMBEDDINGS]) > 1 and wanted > rows:
        raise ValueError(
            f"--vocab-size {wanted} is more than the {rows} rows of {files.description}"
        )
    return int(wanted)


def _implied(files: UniversalFiles, told: Mapping[str, Any]) -> dict[str, Any]:
    """What follows from names and shapes, for directories without arguments."""
    names = files.names
    shapes = files.shapes
    implied: dict[str, Any] = {
        "num_layers": sum(key.endswith("linear_qkv.layer_norm_weight") for key in names),
        "normalization": "LayerNorm" if "decoder.final_layernorm.bias" in names else "RMSNorm",
        "add_bias_linear": "decoder.layers.0.mlp.linear_fc2.bias" in names,
        "untie_embeddings_and_output_weights": "output_layer.weight" in names,
        "embedding_layernorm": "embedding.word_embeddings_layernorm.weight" in names,
    }
    fc1, fc2, proj, qkv = (
        shapes.get(f"decoder.layers.0.{name}.weight", ())
        for name in (
            "mlp.linear_fc1",
            "mlp.linear_fc2",
            "self_attention.linear_proj",
            "self_attention.linear_qkv",
        )
    )
    heads = told.get("num_attention_heads")
    if len(fc1) == len(fc2) == 2:
        implied |= {
            "hidden_size": fc2[0],
            "ffn_hidden_size": fc2[1],
            "swiglu": fc1[0] == 2 * fc2[1],
        }
    if heads and len(proj) == len(qkv) == 2 and proj[1] >= heads:
        head_dim = proj[1] // heads
        groups = (qkv[0] // head_dim - heads) // 2
        implied |= {
            "kv_channels": head_dim,
            "num_query_groups": groups,
            "group_query_attention": groups != heads,
        }
    if len(shapes.get(_POSITIONS, ())) == 2:
        implied |= {
            "position_embedding_type": "learned_absolute",
            "max_position_embeddings": shapes[_POSITIONS][0],
        }
    elif "position_embedding_type" not in told:
        flag = flag_name("position_embedding_type")
        raise ValueError(
            f"{files.description} does not say how positions enter the model: give {flag}"
        )
    return implied


def _tensors(
    files: UniversalFiles, config: TransformerConfig, optimizer: bool
) -> dict[str, TensorInfo]:
    """Weights and states; raises ValueError unless files and arguments describe the same model."""
    wanted = model_tensors(config)
    missing = [key for key in wanted if key not in files.names]
    extra = [files.names[key] for key in files.names if key not in wanted]
    if missing or extra:
        problem = f"lacks {', '.join(missing)}" if missing else f"also has {', '.join(extra)}"
        raise ValueError(f"{files.description} is not the model of its arguments: it {problem}")
    for key, shape in wanted.items():
        found = files.shapes[key]
        flat = found == (math.prod(shape),)
        padded = key in _VOCABULARY and found[1:] == shape[1:] and found[0] >= shape[0]
        if found != shape and not flat and not padded:
            raise ValueError(
                f"{files.description}: {files.names[key]} has shape {list(found)}, its arguments make it {list(shape)}"
            )
    tensors = {key: TensorInfo(shape, config.params_dtype) for key, shape in wanted.items()}
    for state in files.states() if optimizer else ():
        tensors |= {
            optimizer_key(state, key): TensorInfo(shape, torch.float32)
            for key, shape in wanted.items()
        }
    return tensors


_DS_VERSION = (
    "0.19.8"  # the release whose loader this was checked with; loaders want 0.3.17 at least
)


def write_universal(
    source: Source,
    directory: Path,
    options: WriteOptions | None = None,
    progress: Progress = no_progress,
) -> list[str]:
    """Write `source` below the empty `directory`; returns what could not be carried.

    `latest_universal` is written last. A source without an optimizer gets the state of one that has not begun: the
    loader needs it. Raises ValueError for a model that the programs in question lack, before
    anything is written.
    """
    options = options or WriteOptions()
    writer = _UniversalWriter(source, options)
    layers = writer.config.num_layers
    tied = not writer.config.untie_embeddings_and_output_weights
    names = {key: STYLES[writer.style].of(key, layers, tied) for key in writer.parameters}
    lost = parts_without_place(writer.config)
    make_empty_directory(directory)
    training = source.training or TrainingState()
    target = directory / file_name(f"global_step{training.iteration}_universal", "the iteration")
    (target / ZERO).mkdir(parents=True)
    jobs = [
        partial(writer.write_parameter, target / ZERO / name, key, progress)
        for key, name in names.items()
    ]
    run_jobs(jobs, options.workers)
    # Apply the schemas of the reader, so that a result is never unreadable.
    optimizer_state = writer.optimizer_state(training)
    _save(target / ZERO / OPTIMIZER_STATE, OPTIMIZER_SCHEMA(optimizer_state, source.description))
    model_state = writer.model_state(training, names)
    _save(target / model_state_name(0), MODEL_STATE_SCHEMA(model_state, source.description))
    # `latest_universal` makes the directory a checkpoint: it must not be durable before the rest
    # is.
    fsync_tree(directory)
    with committed(directory / LATEST) as temporary:
        temporary.write_text(target.name)
    fsync_tree(directory)
    lost += (
        []
        if writer.has_optimizer
        else ["optimizer state: there is none, so moments are zero and the step is 0"]
    )
    return lost + (["random number state: it belongs to one layout"] if training.rng else [])


class _UniversalWriter:
    def __init__(self, source: Source, options: WriteOptions) -> None:
        self.source = source
        self.config = config = make_export_config(source, options.vocab_size)
        self.parameters = {parameter.name: parameter for parameter in model_parameters(config)}
        shapes = {key: parameter.shape for key, parameter in self.parameters.items()}
        check_parameters(source.tensors, shapes, source.description, config.vocab_size)
        self.style = _style(options.universal_style, config)
        tensor_parallel = (
            options.tensor_parallel or source.args.get("tensor_model_parallel_size") or 1
        )
        self.blocks = tensor_parallel if options.qkv_blocks else None
        heads = config.num_attention_heads
        groups = config.query_groups
        head_dim = config.head_dim
        self._qkv_map = map_fused_qkv(heads, groups, head_dim, self.blocks) if self.blocks else None
        if self.blocks and groups != heads:
            raise ValueError(
                "Megatron-DeepSpeed that stores blocks of q, k and v has no --group-query-attention"
            )
        self.states = optimizer_states(source.tensors)
        self.has_optimizer = bool(self.states)
        steps = [
            group.get("step") for group in (source.training and source.training.param_groups) or []
        ]
        taken = (
            source.training.iteration if source.training is not None else 0
        )  # SGD does not count
        self.step = (
            float(next((step for step in steps if step is not None), taken))
            if self.has_optimizer
            else 0.0
        )

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
        stored = (
            full_precision_key(key, self.source.tensors)
            if state == "param"
            else optimizer_key(state, key)
        )
        return self.source.read(stored, (0,) * len(shape), shape).float()

    def _marks(self, key: str) -> dict[str, Any]:
        """How a loader cuts the tensor for its own tensor parallelism."""
        parameter = self.parameters[key]
        sharding = parameter.info.sharding
        marks = {
            "cat_dim": sharding.dim,
            "vocab_tensor": parameter.group.embedding or None,
            "param_n_sub_params": sharding.blocks if sharding.blocks > 1 else None,
        }
        return {name: value for name, value in marks.items() if value is not None}

    def optimizer_state(self, training: TrainingState) -> dict[str, Any]:
        counts = (2, 1) if self.style == "bigscience" else (1, 1)
        return {
            "clip_grad": self.source.args.get("clip_grad", 1.0),
            "group_paddings": [0] * sum(counts),
            "partition_count": [1] * sum(counts),
            "ds_version": _DS_VERSION,
            "param_groups": write_groups(training, counts),
        }

    def model_state(self, training: TrainingState, names: Mapping[str, str]) -> dict[str, Any]:
        args = write_args(self.config, self.source.args, training, blocks=self.blocks)
        vocabulary = {
            "original_vocab_size": self.config.vocab_size,
            "padded_vocab_size": self.config.vocab_size,
        }
        tokens = training.consumed_train_samples * int(self.source.args.get("seq_length") or 0)
        state = {
            "module": None,
            "buffer_names": [],
            "optimizer": None,
            "param_shapes": self._param_shapes(names),
            "frozen_param_shapes": None,
            "shared_params": {},
            "frozen_param_fragments": None,
            "lr_scheduler": write_scheduler(
                training, tokens, bigscience=self.style == "bigscience"
            ),
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
            "universal_checkpoint_info": {"universal_checkpoint_version": 0.4}
            | vocabulary
            | self._patterns(names),
            "args": args,
            "checkpoint_version": 3.0,
            "iteration": training.iteration,
            "tokens": tokens,
            # No loader of DeepSpeed asks for these; the way back does.
            "megatron_param_groups": training.param_groups
            and [plain_args(group) for group in training.param_groups],
            "num_floating_point_operations_so_far": training.num_floating_point_operations_so_far,
            "grad_scaler": training.grad_scaler,
        }
        return state | ({"checkpoint_info": vocabulary} if self.style == "bigscience" else {})

    def _param_shapes(self, names: Mapping[str, str]) -> list[OrderedDict[str, torch.Size]]:
        """By group: with weight decay (matrices), without (vectors)."""
        groups: list[OrderedDict[str, torch.Size]] = [OrderedDict(), OrderedDict()]
        for key, name in names.items():
            groups[not self.parameters[key].group.weight_decay][name] = torch.Size(
                self.parameters[key].shape
            )
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


def _style(name: str | None, config: TransformerConfig) -> str:
    """BigScience's fork trains ALiBi and a normalized embedding, Megatron-DeepSpeed neither."""
    like_bloom = config.position_embedding_type == "alibi" or config.embedding_layernorm
    name = name or ("bigscience" if like_bloom else "pipeline")
    if name not in STYLES:
        raise ValueError(f"--universal-style {name!r}: give one of {', '.join(STYLES)}")
    if like_bloom and name != "bigscience":
        raise ValueError(
            f"--universal-style {name}: Megatron-DeepSpeed has no ALiBi and no normalized embedding"
        )
    return name


def _save(path: Path, value: Any) -> None:
    with committed(path) as temporary:
        write_archive(temporary, value)

"""Reader and writer of DeepSpeed universal checkpoints, one tensor at a time."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.deepspeed.files import (
    FOREIGN_FILE,
    MODEL_STATE_SCHEMA,
    OPTIMIZER_SCHEMA,
    OPTIMIZER_STATE,
    STATE_FILES,
    STEP,
    UniversalFiles,
    model_state_name,
)
from megatron.conversion.deepspeed.names import STYLES
from megatron.conversion.deepspeed.training_state import (
    BLOCKS_MARK,
    build_args,
    build_groups,
    build_scheduler,
    check_groups,
    list_lost_state,
    list_unsupported_parts,
    read_args,
    read_training,
)
from megatron.conversion.model_space.arguments import plain_args
from megatron.conversion.model_space.foreign import open_foreign_file, write_foreign_file
from megatron.conversion.model_space.model import (
    check_parameters,
    find_native_key,
    make_export_config,
    model_config,
    model_parameters,
    model_tensors,
    resolve_arguments,
)
from megatron.conversion.model_space.optimizer_states import (
    ADAM,
    full_precision_key,
    optimizer_key,
    optimizer_states,
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
from megatron.conversion.options import QKV_LAYOUTS, ReadOptions, WriteOptions
from megatron.conversion.stored_tokenizer import (
    copy_tokenizer_files,
    find_stored_tokenizer,
    write_tokenizer_files,
)
from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape, TensorInfo
from megatron.core.dist_checkpointing.saving.commit import Progress, no_progress
from megatron.core.durable_files import committed, fsync_tree
from megatron.core.run_checkpoint.keys import (
    LATEST,
    WORD_EMBEDDINGS,
    ZERO,
    foreign_key,
    split_key,
)
from megatron.core.run_checkpoint.source import Source, TrainingState
from megatron.core.safe_files.schema import file_name
from megatron.core.transformer.transformer_config import TransformerConfig, flag_name

_POSITIONS = "embedding.position_embeddings.weight"
_VOCABULARY = (WORD_EMBEDDINGS, "output_layer.weight")
# The release whose loader this was checked with. Loaders require at least 0.3.17.
_DS_VERSION = "0.19.8"


# ---- Reading ----


class UniversalSource:
    """Full-precision parameters, moments and training state of a universal checkpoint.

    The weights of a bf16 or fp16 run are its main parameters, cast. A given `vocab_size` is the
    number of tokens to keep.
    """

    def __init__(self, directory: Path, read_options: ReadOptions | None = None) -> None:
        read_options = read_options or ReadOptions()
        files = UniversalFiles(directory)
        self._files = files
        self.description = files.description

        # Arguments and model. The command line has precedence over stored arguments, and these over
        # inferred ones.
        if files.args:
            files.args = read_args(files.args, self.description)
        stored_tokenizer = find_stored_tokenizer(files.args, files.directory)
        known_args = files.args | stored_tokenizer | dict(read_options.args)
        self.args: dict[str, Any] = _infer_args(files, known_args) | known_args
        vocab_size = _find_vocab_size(files, read_options.args)
        config = model_config(self.args, vocab_size, self.description)
        self.args |= resolve_arguments(config)

        # Parameters. Before foreign mixers the norm is a module of its own.
        for key in list(files.names):
            native = find_native_key(key, config)
            if native is not None and native != key:
                files.rename(key, native)
        self._qkv_map = None
        blocks = self._find_qkv_blocks(read_options.qkv_layout, config)
        if blocks is not None:
            heads = config.num_attention_heads
            self._qkv_map = map_fused_qkv(heads, config.query_groups, config.head_dim, blocks)
        self.tensors: dict[str, LazyTensor] = {}
        for key, info in _list_tensors(files, config, not read_options.no_optim).items():
            self.tensors[key] = LazyTensor(info.shape, info.dtype, partial(self._read, key))

        # Parts that are not converted
        optimizer = None
        if not read_options.no_optim:
            optimizer = files.read_optimizer_state()
        self.unused = [f"state: {name}" for name in list_lost_state(files.state, optimizer)]
        foreign = open_foreign_file(files.directory / FOREIGN_FILE)
        if read_options.keep_foreign:
            for name, tensor in foreign.items():
                self.tensors[foreign_key(name)] = tensor
        else:
            self.unused += foreign

        # Training state
        self._check_groups(optimizer, config)
        step = files.read_step()
        training = read_training(files.state, optimizer, step, self.args)
        if read_options.no_optim:
            training.param_groups = None
            training.grad_scaler = None
        self.training: TrainingState | None = training

    def _check_groups(self, optimizer: Mapping[str, Any] | None, config: TransformerConfig) -> None:
        """Raise ValueError for parameter groups that runs here do not have."""
        if optimizer is None or self._files.state.get("megatron_param_groups"):
            return
        decayed = {}
        for parameter in model_parameters(config):
            decayed[self._files.names[parameter.name]] = parameter.group.weight_decay
        members = self._files.state.get("param_shapes") or []
        check_groups(optimizer["param_groups"], members, decayed, self.description)

    def _read(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        """Return a box of a weight or an optimizer state."""
        # Weights are main parameters, cast.
        info = self.tensors[key]
        parameter, state = split_key(key)
        tensor = self._files.read_tensor(parameter, state or "param")
        is_flat = tensor.dim() != len(info.shape)  # from ZeRO-3
        if is_flat:
            tensor = tensor.view(-1, *info.shape[1:])

        # Rows of the box are cut out of all other dimensions.
        columns = []
        for start, length in zip(offset[1:], shape[1:], strict=True):
            columns.append(slice(start, start + length))

        def read_rows(source: int, first: int, count: int) -> torch.Tensor:
            """Return stored rows. There is only one `source`, 0."""
            rows = slice(first, first + count)
            return tensor[(rows, *columns)]

        # The rows of q, k and v may be stored in another order.
        row_map = map_unchanged(info.shape[0])
        is_qkv = parameter.endswith(("linear_qkv.weight", "linear_qkv.bias"))
        if is_qkv and self._qkv_map is not None:
            row_map = self._qkv_map
        first_row = offset[0]
        box = unpack_rows(row_map, first_row, first_row + shape[0], read_rows)
        return box.to(info.dtype, copy=True)

    def _find_qkv_blocks(self, layout: str | None, config: TransformerConfig) -> int | None:
        """Return the number of [q; k; v] blocks, None for the layout by query groups.

        The arguments determine the layout unless `layout` is given.
        """
        if layout not in (None, *QKV_LAYOUTS):
            raise ValueError(
                f"--universal-qkv-layout {layout!r}: give one of {', '.join(QKV_LAYOUTS)}"
            )
        if layout is None and BLOCKS_MARK in self._files.args:
            layout = "tp-blocks"
        if layout != "tp-blocks":
            return None
        # Blocks of [q; k; v] have as many rows for k and v as for q.
        if config.query_groups != config.num_attention_heads:
            raise ValueError(
                f"{self.description}: a version of Megatron-DeepSpeed that stores blocks of q, k "
                "and v computes something else than grouped-query attention from them, which no "
                "other model does. If another version trained it, give --universal-qkv-layout "
                "groups"
            )
        sizes = self._files.state.get("checkpoint_parallel_dimensions") or {}
        blocks = sizes.get("tp_degree") or self.args.get("tensor_model_parallel_size")
        if not blocks:
            raise ValueError(
                f"{self.description} does not record how many ranks split q, k and v: give "
                "--tensor-model-parallel-size"
            )
        return int(blocks)


def _find_vocab_size(files: UniversalFiles, known_args: Mapping[str, Any]) -> int:
    """Return the number of tokens: given, or recorded, or that of rows without padding.

    Raises ValueError if it is unknown.
    """
    shape = files.shapes.get(WORD_EMBEDDINGS)
    if not shape:
        raise ValueError(f"{files.description} has no word embedding")
    rows = shape[0]

    # BigScience's fork has the older name.
    state = files.state
    info = state.get("universal_checkpoint_info") or state.get("checkpoint_info") or {}
    vocab_size = known_args.get("vocab_size") or info.get("original_vocab_size")
    if vocab_size is None:
        # DeepSpeed's converter marks embeddings whose padding it has removed.
        entry = files.read_entry(WORD_EMBEDDINGS, "param")
        is_marked = isinstance(entry, dict) and entry.get("vocab_tensor")
        if not is_marked:
            raise ValueError(
                f"{files.description} does not separate tokens from padding: give --vocab-size "
                f"(rows: {rows})"
            )
        vocab_size = rows
    is_flat = len(shape) == 1  # from ZeRO-3: its rows are unknown
    if not is_flat and vocab_size > rows:
        raise ValueError(
            f"--vocab-size {vocab_size} is more than the {rows} rows of {files.description}"
        )
    return int(vocab_size)


def _infer_args(files: UniversalFiles, known_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that names and shapes imply, for directories without arguments."""
    # Properties of the whole model. Every layer has one norm before its attention.
    names = files.names
    shapes = files.shapes
    num_layers = 0
    for key in names:
        if key.endswith("linear_qkv.layer_norm_weight"):
            num_layers += 1
    normalization = "RMSNorm"
    if "decoder.final_layernorm.bias" in names:
        normalization = "LayerNorm"
    inferred: dict[str, Any] = {
        "num_layers": num_layers,
        "normalization": normalization,
        "add_bias_linear": "decoder.layers.0.mlp.linear_fc2.bias" in names,
        "untie_embeddings_and_output_weights": "output_layer.weight" in names,
        "embedding_layernorm": "embedding.word_embeddings_layernorm.weight" in names,
    }

    # Sizes of the first layer. fc1: [ffn, hidden], twice as many rows with SwiGLU; fc2: [hidden,
    # ffn]; proj: [hidden, heads * head_dim]; qkv: [(heads + 2 * groups) * head_dim, hidden].
    layer = "decoder.layers.0"
    fc1 = shapes.get(f"{layer}.mlp.linear_fc1.weight", ())
    fc2 = shapes.get(f"{layer}.mlp.linear_fc2.weight", ())
    proj = shapes.get(f"{layer}.self_attention.linear_proj.weight", ())
    qkv = shapes.get(f"{layer}.self_attention.linear_qkv.weight", ())
    if len(fc1) == len(fc2) == 2:
        inferred["hidden_size"] = fc2[0]
        inferred["ffn_hidden_size"] = fc2[1]
        inferred["swiglu"] = fc1[0] == 2 * fc2[1]
    heads = known_args.get("num_attention_heads")
    if heads and len(proj) == len(qkv) == 2 and proj[1] >= heads:
        head_dim = proj[1] // heads
        heads_and_groups = qkv[0] // head_dim  # heads + 2 * groups
        groups = (heads_and_groups - heads) // 2
        inferred["kv_channels"] = head_dim
        inferred["num_query_groups"] = groups
        inferred["group_query_attention"] = groups != heads

    # Positions
    if len(shapes.get(_POSITIONS, ())) == 2:
        inferred["position_embedding_type"] = "learned_absolute"
        inferred["max_position_embeddings"] = shapes[_POSITIONS][0]
    elif "position_embedding_type" not in known_args:
        flag = flag_name("position_embedding_type")
        raise ValueError(f"{files.description} does not record the position embedding: give {flag}")
    return inferred


def _list_tensors(
    files: UniversalFiles, config: TransformerConfig, optimizer: bool
) -> dict[str, TensorInfo]:
    """Return weights and optimizer states.

    Raises ValueError unless files and arguments describe the same model.
    """
    # Compare the files with the arguments.
    model_shapes = model_tensors(config)
    _check_names(files, model_shapes)
    for key, shape in model_shapes.items():
        stored_shape = files.shapes[key]
        read_shape = stored_shape
        row_size = math.prod(shape[1:])
        if len(stored_shape) == 1 and stored_shape[0] % row_size == 0:  # flat, from ZeRO-3
            read_shape = (stored_shape[0] // row_size, *shape[1:])
        is_padded = key in _VOCABULARY and read_shape[1:] == shape[1:] and read_shape[0] >= shape[0]
        if read_shape != shape and not is_padded:
            raise ValueError(
                f"{files.description}: {files.names[key]} has shape {list(stored_shape)}, its "
                f"arguments make it {list(shape)}"
            )

    # The weights have the dtype of the run, optimizer states are fp32.
    tensors = {}
    for key, shape in model_shapes.items():
        tensors[key] = TensorInfo(shape, config.params_dtype)
    if optimizer:
        for state in files.find_states():
            for key, shape in model_shapes.items():
                state_key = optimizer_key(state, key)
                tensors[state_key] = TensorInfo(shape, torch.float32)
    return tensors


def _check_names(files: UniversalFiles, model_keys: Collection[str]) -> None:
    """Raise ValueError unless the files contain the parameters with the keys `model_keys`."""
    problem = None
    extra = [name for key, name in files.names.items() if key not in model_keys]
    if extra:
        problem = f"also has {', '.join(extra)}"
    missing = [key for key in model_keys if key not in files.names]
    if missing:
        problem = f"lacks {', '.join(missing)}"
    if problem is not None:
        raise ValueError(f"{files.description} is not the model of its arguments: it {problem}")


# ---- Writing ----


def write_universal(
    source: Source,
    directory: Path,
    options: WriteOptions | None = None,
    progress: Progress = no_progress,
) -> list[str]:
    """Write `source` to the empty `directory`; return a note for each lost part.

    `latest_universal` is written last. A source without an optimizer gets an initial optimizer
    state, which DeepSpeed's loader requires. Raises ValueError before anything is written for a
    model that the programs in question lack.
    """
    # Check that the model has this form.
    options = options or WriteOptions()
    writer = _UniversalWriter(source, options)
    num_layers = writer.config.num_layers
    is_tied = not writer.config.untie_embeddings_and_output_weights
    style = STYLES[writer.style]
    names = {}
    for key in writer.parameters:
        names[key] = style.make_name(key, num_layers, is_tied)
    lost = list_unsupported_parts(writer.config)

    # Write the parameters with their optimizer state, a directory each.
    make_empty_directory(directory)
    training = source.training or TrainingState()
    target = directory / file_name(f"global_step{training.iteration}_universal", "the iteration")
    parameters = target / ZERO
    parameters.mkdir(parents=True)
    jobs = []
    for key, name in names.items():
        jobs.append(partial(writer.write_parameter, parameters / name, key, progress))
    run_jobs(jobs, options.workers)
    write_foreign_file(source, target / FOREIGN_FILE, options.workers, progress)

    # Write the other state. The schemas of the reader ensure that it is readable.
    optimizer_state = writer.build_optimizer_state(training)
    OPTIMIZER_SCHEMA(optimizer_state, source.description)
    _save(parameters / OPTIMIZER_STATE, optimizer_state)
    model_state = writer.build_model_state(training, names)
    MODEL_STATE_SCHEMA(model_state, source.description)
    _save(target / model_state_name(0), model_state)
    write_tokenizer_files(copy_tokenizer_files(source.args, options.trusted), target)

    # `latest_universal` makes the directory a checkpoint, so everything else must be durable first.
    fsync_tree(directory)
    with committed(directory / LATEST) as temporary:
        temporary.write_text(target.name)
    fsync_tree(directory)

    if not writer.has_optimizer:
        lost.append("optimizer state: there is none, so moments are zero and the step is 0")
    if training.rng:
        lost.append("random number state: it belongs to one layout")
    return lost


class _UniversalWriter:
    """Writes the files of a universal checkpoint."""

    def __init__(self, source: Source, options: WriteOptions) -> None:
        # Model
        config = make_export_config(source, options.true_vocab_size)
        self.source = source
        self.config = config
        self.parameters = {parameter.name: parameter for parameter in model_parameters(config)}
        shapes = {key: parameter.shape for key, parameter in self.parameters.items()}
        check_parameters(source.tensors, shapes, source.description, config.vocab_size)
        self.style = _choose_style(options.universal_style, config)

        # QKV layout: by query groups, or a number of [q; k; v] blocks.
        heads = config.num_attention_heads
        groups = config.query_groups
        self.blocks: int | None = None
        self._qkv_map = None
        if options.qkv_blocks:
            stored_size = source.args.get("tensor_model_parallel_size")
            self.blocks = options.tensor_parallel or stored_size or 1
            self._qkv_map = map_fused_qkv(heads, groups, config.head_dim, self.blocks)
            if groups != heads:
                raise ValueError(
                    "Megatron-DeepSpeed that stores blocks of q, k and v has no "
                    "--group-query-attention"
                )
            if config.attention_output_gate:
                raise ValueError(
                    "Megatron-DeepSpeed that stores blocks of q, k and v has no "
                    "--attention-output-gate"
                )

        # Optimizer
        self.states = optimizer_states(source.tensors)
        self.has_optimizer = bool(self.states)
        self.step = 0.0
        if self.has_optimizer:
            self.step = self._find_step()

    def _find_step(self) -> float:
        """Return the step of the parameter groups; SGD, which does not count, has the iteration."""
        training = self.source.training
        if training is None:
            return 0.0
        for group in training.param_groups or []:
            if group.get("step") is not None:
                return float(group["step"])
        return float(training.iteration)

    def write_parameter(self, folder: Path, key: str, progress: Progress) -> None:
        """Write the files of a parameter."""
        folder.mkdir()
        # The norm before the projection is named after it, but has no rows of q, k and v.
        is_qkv = ".linear_qkv." in key and "layer_norm" not in key
        for state in self.states or ADAM:
            tensor = self._read_state(key, state)
            if is_qkv and self._qkv_map is not None:
                tensor = pack_rows(self._qkv_map, 0, tensor)
            content = self._make_marks(key) | {"param": tensor.contiguous()}
            _save(folder / STATE_FILES[state], content)
            progress(tensor.nbytes)
            del tensor, content  # free the memory before reading the next state
        _save(folder / STEP, torch.tensor(self.step))

    def _read_state(self, key: str, state: str) -> torch.Tensor:
        """Return a state of a parameter in fp32.

        It is the main parameter (or the weight) for "param", otherwise a moment, which is zero
        without an optimizer.
        """
        shape = self.parameters[key].shape
        if state == "param":
            source_key = full_precision_key(key, self.source.tensors)
        elif self.has_optimizer:
            source_key = optimizer_key(state, key)
        else:
            return torch.zeros(shape)
        # Without rows that pad the vocabulary.
        tensor = replace(self.source.tensors[source_key], shape=shape)
        return tensor.read_all().float()

    def _make_marks(self, key: str) -> dict[str, Any]:
        """Return the marks by which a loader splits the tensor for its own tensor parallelism."""
        parameter = self.parameters[key]
        sharding = parameter.info.sharding
        marks: dict[str, Any] = {}
        if sharding.dim is not None:
            marks["cat_dim"] = sharding.dim
        if parameter.group.embedding:
            marks["vocab_tensor"] = True
        if sharding.blocks > 1:
            marks["param_n_sub_params"] = sharding.blocks
        return marks

    def build_optimizer_state(self, training: TrainingState) -> dict[str, Any]:
        """Return the content of `optimizer_state.pt`."""
        counts = (1, 1)  # groups with and without weight decay
        if self.style == "bigscience":
            counts = (2, 1)
        num_groups = sum(counts)
        return {
            "clip_grad": self.source.args.get("clip_grad", 1.0),
            "group_paddings": [0] * num_groups,
            "partition_count": [1] * num_groups,
            "ds_version": _DS_VERSION,
            "param_groups": build_groups(training, counts),
        }

    def build_model_state(
        self, training: TrainingState, names: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return the content of the model-state file."""
        args = build_args(self.config, self.source.args, training, blocks=self.blocks)
        vocabulary = {
            "original_vocab_size": self.config.vocab_size,
            "padded_vocab_size": self.config.vocab_size,
        }
        info = {"universal_checkpoint_version": 0.4, **vocabulary, **self._list_patterns(names)}
        tokens = training.consumed_train_samples * int(self.source.args.get("seq_length") or 0)
        is_bigscience = self.style == "bigscience"
        skipped_steps = 0
        if self.has_optimizer:
            # The optimizer does not count skipped steps, the iteration does.
            skipped_steps = training.iteration - int(self.step)
        groups = training.param_groups
        if groups is not None:
            groups = [plain_args(group) for group in groups]
        state = {
            "module": None,
            "buffer_names": [],
            "optimizer": None,
            "param_shapes": self._list_param_shapes(names),
            "frozen_param_shapes": None,
            "shared_params": {},
            "frozen_param_fragments": None,
            "lr_scheduler": build_scheduler(training, tokens, is_bigscience),
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": skipped_steps,
            "global_steps": training.iteration,
            "global_samples": training.consumed_train_samples,
            "dp_world_size": 1,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": self.blocks or 1},
            "ds_config": {},
            "ds_version": _DS_VERSION,
            "universal_checkpoint_info": info,
            "args": args,
            "checkpoint_version": 3.0,
            "iteration": training.iteration,
            "tokens": tokens,
            # DeepSpeed's loaders ignore these; our reader uses them.
            "megatron_param_groups": groups,
            "num_floating_point_operations_so_far": training.num_floating_point_operations_so_far,
            "grad_scaler": training.grad_scaler,
        }
        if is_bigscience:
            state["checkpoint_info"] = vocabulary
        return state

    def _list_param_shapes(self, names: Mapping[str, str]) -> list[OrderedDict[str, torch.Size]]:
        """Return the shapes by group: with weight decay (matrices), without (vectors)."""
        decayed: OrderedDict[str, torch.Size] = OrderedDict()
        undecayed: OrderedDict[str, torch.Size] = OrderedDict()
        for key, name in names.items():
            parameter = self.parameters[key]
            group = decayed if parameter.group.weight_decay else undecayed
            group[name] = torch.Size(parameter.shape)
        return [decayed, undecayed]

    def _list_patterns(self, names: Mapping[str, str]) -> dict[str, list[str]]:
        """Return the names of parameters by the way they are split."""

        marks_of_name = {name: self._make_marks(key) for key, name in names.items()}

        def select(mark: str, value: Any) -> list[str]:
            """Return the names whose mark has this value; None selects those without the mark."""
            return [name for name, marks in marks_of_name.items() if marks.get(mark) == value]

        return {
            "vocabulary_parameter_patterns": select("vocab_tensor", True),
            "tp_replicated_parameter_patterns": select("cat_dim", None),
            "parameter_with_row_parallelism_patterns": select("cat_dim", 1),
            "parameter_with_2_sub_params_cat_dim_0": select("param_n_sub_params", 2),
        }


def _choose_style(name: str | None, config: TransformerConfig) -> str:
    """Return the style of names.

    BigScience's fork trains ALiBi and a normalized embedding, Megatron-DeepSpeed neither.
    """
    is_like_bloom = config.position_embedding_type == "alibi" or config.embedding_layernorm
    if name is None:
        return "bigscience" if is_like_bloom else "pipeline"
    if name not in STYLES:
        raise ValueError(f"--universal-style {name!r}: give one of {', '.join(STYLES)}")
    if is_like_bloom and name != "bigscience":
        raise ValueError(
            f"--universal-style {name}: Megatron-DeepSpeed has no ALiBi and no normalized embedding"
        )
    return name


def _save(path: Path, value: Any) -> None:
    """Write an archive of torch.save, atomically."""
    with committed(path) as temporary:
        write_archive(temporary, value)

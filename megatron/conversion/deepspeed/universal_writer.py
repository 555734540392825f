"""Writer of DeepSpeed universal checkpoints, one tensor at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.deepspeed.names import STYLES
from megatron.conversion.deepspeed.training_state import (
    build_args,
    build_groups,
    build_scheduler,
    list_unsupported_parts,
)
from megatron.conversion.deepspeed.universal_files import (
    FOREIGN_FILE,
    MODEL_STATE,
    MODEL_STATE_SCHEMA,
    OPTIMIZER_SCHEMA,
    OPTIMIZER_STATE,
    STATE_FILES,
    STEP,
)
from megatron.conversion.model_space.foreign import write_foreign_file
from megatron.conversion.model_space.foreign_arguments import plain_args
from megatron.conversion.model_space.model import (
    check_parameters,
    make_export_config,
    model_parameters,
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
    pack_rows,
    run_jobs,
    write_archive,
)
from megatron.conversion.options import WriteOptions
from megatron.conversion.stored_tokenizer import (
    copy_tokenizer_files,
    write_tokenizer_files,
)
from megatron.core.dist_checkpointing.saving.commit import Progress, no_progress
from megatron.core.durable_files import committed, fsync_tree
from megatron.core.run_checkpoint.keys import (
    LATEST,
    ZERO,
)
from megatron.core.run_checkpoint.source import Source, TrainingState
from megatron.core.safe_files.schema import file_name
from megatron.core.transformer.transformer_config import TransformerConfig

# ---- Writing ----

# The release whose loader this was checked with. Loaders require at least 0.3.17.
_DS_VERSION = "0.19.8"


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
    _save(target / MODEL_STATE, model_state)
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

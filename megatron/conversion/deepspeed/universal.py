"""Reader of DeepSpeed universal checkpoints, one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.deepspeed.engine_megatron import MegatronEngineFiles
from megatron.conversion.deepspeed.training_state import (
    BLOCKS_MARK,
    check_groups,
    decays_all,
    list_lost_state,
    read_args,
    read_training,
)
from megatron.conversion.deepspeed.universal_files import (
    FOREIGN_FILE,
    UniversalFiles,
)
from megatron.conversion.model_space.foreign import foreign_key, open_foreign_file
from megatron.conversion.model_space.lazy_tensors import unflatten
from megatron.conversion.model_space.model import (
    find_native_key,
    model_config,
    model_parameters,
    model_tensors,
    resolve_arguments,
)
from megatron.conversion.model_space.optimizer_states import (
    optimizer_key,
)
from megatron.conversion.model_space.pieces import (
    map_fused_qkv,
    map_unchanged,
    unpack_rows,
)
from megatron.conversion.options import QKV_LAYOUTS, ReadOptions
from megatron.conversion.stored_tokenizer import (
    find_stored_tokenizer,
)
from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape, TensorInfo
from megatron.core.run_checkpoint.keys import WORD_EMBEDDINGS, split_key
from megatron.core.run_checkpoint.source import TrainingState
from megatron.core.transformer.transformer_config import TransformerConfig, flag_name

ModelFiles = UniversalFiles | MegatronEngineFiles
_POSITIONS = "embedding.position_embeddings.weight"
_VOCABULARY = (WORD_EMBEDDINGS, "output_layer.weight")


class UniversalSource:
    """Full-precision parameters, moments and training state of a universal checkpoint.

    The weights of a bf16 or fp16 run are its main parameters, cast. A given `vocab_size` is the
    number of tokens to keep.
    """

    def __init__(
        self,
        directory: Path,
        read_options: ReadOptions | None = None,
        engine_files: MegatronEngineFiles | None = None,
    ) -> None:
        read_options = read_options or ReadOptions()
        files = engine_files or UniversalFiles(directory)
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
        has_full_decay = self._check_groups(optimizer, config)
        step = files.read_step()
        training = read_training(files.state, optimizer, step, self.args, has_full_decay)
        if read_options.no_optim:
            training.param_groups = None
            training.grad_scaler = None
        self.training: TrainingState | None = training

    def _check_groups(self, optimizer: Mapping[str, Any] | None, config: TransformerConfig) -> bool:
        """Return whether all parameters have weight decay.

        Raises ValueError for parameter groups that runs here do not have.
        """
        if optimizer is None or self._files.state.get("megatron_param_groups"):
            return False
        decayed = {}
        for parameter in model_parameters(config):
            decayed[self._files.names[parameter.name]] = parameter.group.weight_decay
        members = self._files.state.get("param_shapes") or []
        check_groups(optimizer["param_groups"], members, decayed, self.description)
        return decays_all(optimizer["param_groups"], members)

    def _read(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        """Return a box of a weight or an optimizer state."""
        # Weights are main parameters, cast.
        info = self.tensors[key]
        parameter, state = split_key(key)
        tensor = self._files.open_tensor(parameter, state or "param")
        if len(tensor.shape) != len(info.shape):  # flat, from ZeRO-3
            rows = tensor.shape[0] // math.prod(info.shape[1:])
            tensor = unflatten(tensor, 0, (rows, *info.shape[1:]))

        def read_rows(source: int, first: int, count: int) -> torch.Tensor:
            """Return stored rows. There is only one `source`, 0."""
            return tensor.read((first, *offset[1:]), (count, *shape[1:]))

        # The rows of q, k and v may be stored in another order.
        row_map = map_unchanged(info.shape[0])
        is_qkv = parameter.endswith(("linear_qkv.weight", "linear_qkv.bias"))
        if is_qkv and self._qkv_map is not None:
            row_map = self._qkv_map
        first_row = offset[0]
        box = unpack_rows(row_map, first_row, first_row + shape[0], read_rows)
        return box.to(info.dtype)

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


def _find_vocab_size(files: ModelFiles, known_args: Mapping[str, Any]) -> int:
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
        if not files.has_padding_marks():
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


def _infer_args(files: ModelFiles, known_args: Mapping[str, Any]) -> dict[str, Any]:
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
    files: ModelFiles, config: TransformerConfig, optimizer: bool
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


def _check_names(files: ModelFiles, model_keys: Collection[str]) -> None:
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

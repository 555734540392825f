"""The model that a checkpoint's arguments describe: its configuration and its parameters.

Both come from the layers' own definition. The model is built on the meta device, without memory.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron.conversion.model_space.optimizer_states import (
    complete_mixed_states,
    complete_states,
    has_mixed_states,
    list_parameter_states,
    optimizer_key,
    optimizer_states,
)
from megatron.core.dist_checkpointing import CheckpointError, ShardedTensor
from megatron.core.dist_checkpointing.mapping import Shape, TensorInfo
from megatron.core.distributed.param_and_grad_buffer import ParamSpec
from megatron.core.flags import find_value_problems, flag
from megatron.core.models import GPTModel
from megatron.core.module import param_info
from megatron.core.run_checkpoint.checks import ARGUMENTS
from megatron.core.run_checkpoint.keys import (
    WORD_EMBEDDINGS,
    is_trained,
    is_weight,
)
from megatron.core.run_checkpoint.source import Source
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.core.transformer.transformer_config import (
    LOCAL_BACKEND_FIELDS,
    TransformerConfig,
    find_conditions,
    flag_name,
    is_used,
    select_architecture_fields,
)

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
# The number of a layer in the key of its parameter, or of the state of one.
_LAYER_KEY = re.compile(r"((?:optimizer\.state\.\w+\.|ema\.)?decoder\.layers\.)(\d+)\.(.+)")
_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads")


@dataclass
class StoredConfig(TransformerConfig):
    """The model of a checkpoint. Parts of its layers may be foreign: this program cannot run them,
    and their tensors are copied under the names of the files (`foreign_key`).
    """

    foreign_mixers: list[str] | None = flag(None, decides="shapes")
    """For each layer the kind of its token mixer, e.g. "gated delta net", if it is foreign, and ""
    if it is our attention. Default: no layer has a foreign one.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        mixers = self.foreign_mixers
        if mixers is not None and len(mixers) != self.num_layers:
            raise ValueError(
                f"foreign_mixers has {len(mixers)} entries for {self.num_layers} layers"
            )


_FIELDS = {field.name: field for field in dataclasses.fields(StoredConfig)}


def model_config(args: Mapping[str, Any], vocab_size: int, description: str) -> StoredConfig:
    """Return the configuration in a checkpoint's arguments.

    `vocab_size` is the number of rows of the word embedding. It may exceed the number of trained
    tokens, because Megatron-LM's files have rows of padding. Raises ValueError, naming the flag,
    where an argument that defines the model is missing.
    """
    for name in _REQUIRED:
        if not args.get(name):
            raise ValueError(f"{description} lacks {name}: give {flag_name(name)}")
    architecture = {}
    for name in _FIELDS:
        # Recomputation of activations does not change the model, and Megatron-LM has other kinds
        # of it.
        if name in args and not name.startswith("recompute_"):
            architecture[name] = args[name]
    ARGUMENTS(architecture, description)
    fields: dict[str, Any] = {}
    for name, value in architecture.items():
        if not _is_foreign_choice(name, value):
            fields[name] = value
    fields |= LOCAL_BACKEND_FIELDS
    fields["vocab_size"] = vocab_size
    return StoredConfig(**fields)


def _is_foreign_choice(name: str, value: Any) -> bool:
    """Return whether a field that does not define the model has an unsupported choice.

    For example, Megatron-LM has more token dispatchers. The default gives the same model.
    """
    metadata = _FIELDS[name].metadata
    if metadata["choices"] is None or metadata["decides"] or value is None:
        return False
    return any(find_value_problems(flag_name(name), value, metadata))


def read_vocabulary_rows(tensors: Mapping[str, TensorInfo], location: str) -> int:
    """Return the number of rows of the word embedding. Raises CheckpointError if it is missing."""
    embedding = tensors.get(WORD_EMBEDDINGS)
    if embedding is None:
        raise CheckpointError(f"{location} has no {WORD_EMBEDDINGS}: it is not a GPT model")
    if len(embedding.shape) != 2:
        raise CheckpointError(
            f"{location} has {list(embedding.shape)} as {WORD_EMBEDDINGS}: it is not a GPT model"
        )
    return embedding.shape[0]


def make_export_config(source: Source, vocab_size: int | None) -> TransformerConfig:
    """Return the model of `source` with its first `vocab_size` tokens, by default all rows.

    Raises ValueError if it has fewer.
    """
    rows = read_vocabulary_rows(source.tensors, source.description)
    if vocab_size is not None and vocab_size > rows:
        raise ValueError(
            f"--true-vocab-size {vocab_size} is more than the {rows} rows of {source.description}"
        )
    return model_config(source.args, vocab_size or rows, source.description)


def check_parameters(
    tensors: Mapping[str, TensorInfo],
    expected_shapes: Mapping[str, Shape],
    location: str,
    vocab_size: int | None = None,
) -> None:
    """Raise CheckpointError for the first parameter that is missing or has the wrong shape.

    Tensors with `vocab_size` rows may have more rows, which pad the vocabulary.
    """
    for key, shape in expected_shapes.items():
        if key not in tensors:
            raise CheckpointError(f"{location} lacks {key}, which its arguments call for")
        stored_shape = tensors[key].shape
        is_padded = (
            shape[0] == vocab_size and stored_shape[0] > shape[0] and stored_shape[1:] == shape[1:]
        )
        if stored_shape != shape and not is_padded:
            raise CheckpointError(
                f"{location}: {key} has shape {stored_shape}, its arguments make it {shape}"
            )


def check_optimizer_complete(
    tensors: Mapping[str, TensorInfo], args: Mapping[str, Any], location: str
) -> None:
    """Raise CheckpointError unless all trained parameters have complete optimizer state, or none.

    The message names states that are missing or have another shape than their parameter.
    """
    stored_states = optimizer_states(tensors)
    if not stored_states:
        return
    is_mixed = has_mixed_states(args)
    states = complete_states(stored_states)
    if states is None and not is_mixed:
        raise CheckpointError(
            f"{location}: {', '.join(stored_states)} are not the state of one optimizer: leave it "
            "out (--no-optim of convert.py, --no-load-optim of a run)"
        )

    # Every trained parameter has every state, in its own shape.
    missing = []
    for parameter, info in tensors.items():
        if not is_weight(parameter) or not is_trained(parameter):
            continue
        if is_mixed:
            parameter_states = list_parameter_states(parameter, tensors)
            states = complete_mixed_states(args, parameter_states)
        for state in states or stored_states:
            key = optimizer_key(state, parameter)
            if key not in tensors:
                missing.append(key)
            elif tensors[key].shape != info.shape:
                raise CheckpointError(
                    f"{location}: {key} has shape {tensors[key].shape}, its parameter {info.shape}"
                )
    if missing:
        listed = ", ".join(missing[:3])
        if len(missing) > 3:
            listed += f" and {len(missing) - 3} more"
        raise CheckpointError(f"{location}: optimizer state is missing: {listed}")


def resolve_arguments(config: TransformerConfig) -> dict[str, Any]:
    """Return every argument that defines the model, including those that the files do not state."""
    values = {field.name: getattr(config, field.name) for field in select_architecture_fields()}
    return values | {"group_query_attention": config.query_groups != config.num_attention_heads}


def model_parameters(config: TransformerConfig) -> list[ParamSpec]:
    """Return every parameter of the whole model, as its layers define it.

    Raises ValueError for impossible sizes.
    """
    # Building all layers of a large model takes minutes, even on the meta device. Layers of a kind
    # (dense, with experts) have the same parameters, so one of each is enough. Those that are
    # foreign are left out at the end.
    pattern = config.moe_layer_pattern
    models: dict[int, list[ParamSpec]] = {}  # kind of layer -> parameters of a model with one
    try:
        for layer, layer_type in enumerate(pattern):
            if layer_type not in models:
                models[layer_type] = _list_parameters_with_layer(config, layer)
    except RuntimeError as error:  # more elements than 64 bits can count
        raise ValueError(f"no model has these sizes: {error}") from error

    # Repeat the layers.
    all_layers = []
    for layer, layer_type in enumerate(pattern):
        prefix = f"decoder.layers.{layer}."
        for parameter in models[layer_type]:
            if _LAYER.match(parameter.name):
                name = _LAYER.sub(prefix, parameter.name)
                all_layers.append(dataclasses.replace(parameter, name=name))

    # Parameters before and after the layers are the same in each model.
    before: list[ParamSpec] = []
    after: list[ParamSpec] = []
    section = before
    for parameter in models[pattern[0]]:
        if _LAYER.match(parameter.name):
            section = after
        else:
            section.append(parameter)
    native = []
    for parameter in before + all_layers + after:
        key = find_native_key(parameter.name, config)
        if key is not None:
            native.append(dataclasses.replace(parameter, name=key))
    return native


def split_layer_key(key: str) -> tuple[str, int, str] | None:
    """Return (prefix, layer, name) of the key `{prefix}{layer}.{name}`; None outside layers.

    The prefix of a parameter is "decoder.layers."; its optimizer state and average precede that.
    """
    match = _LAYER_KEY.fullmatch(key)
    if match is None:
        return None
    prefix, layer, name = match.groups()
    return prefix, int(layer), name


# The norm before attention, which is part of its first projection, and its name without one.
_FUSED_NORM = "self_attention.linear_qkv.layer_norm_"
_SEPARATE_NORM = "input_layernorm."


def find_native_key(key: str, config: TransformerConfig) -> str | None:
    """Return the key of a parameter in a model with foreign parts; None if it is foreign.

    The norm before a foreign mixer is a module of its own, as before latent attention.
    """
    match = _LAYER.match(key)
    if match is None or not isinstance(config, StoredConfig) or config.foreign_mixers is None:
        return key
    if not config.foreign_mixers[int(match[1])]:
        return key
    name = key[match.end() :]
    if name.startswith(_FUSED_NORM):
        return separate_input_norm(key)
    if name.startswith("self_attention."):
        return None
    return key


def separate_input_norm(name: str) -> str:
    """Return the name of the norm before attention as a module of its own."""
    return name.replace(_FUSED_NORM, _SEPARATE_NORM)


def _list_parameters_with_layer(config: TransformerConfig, layer: int) -> list[ParamSpec]:
    """Return the parameters of a model whose only layer is number `number`."""
    layers = range(layer, layer + 1)
    model = GPTModel(
        config, layers=layers, rng=TensorParallelRng(0, 0), device=torch.device("meta")
    )
    parameters = []
    for key, entry in model.sharded_state_dict().items():
        assert isinstance(entry, ShardedTensor) and isinstance(entry.local, torch.nn.Parameter), key
        parameters.append(ParamSpec(key, entry.global_shape, param_info(entry.local)))
    return parameters


def model_tensors(config: TransformerConfig) -> dict[str, Shape]:
    """Return key and global shape of every parameter, in the order of the model."""
    return {parameter.name: parameter.shape for parameter in model_parameters(config)}


def compute_model_signature(config: TransformerConfig) -> dict[str, Any]:
    """Return a description of the computed function.

    Two configurations of the same model have the same signature even if their flags differ.
    """
    signature: dict[str, Any] = {"vocab_size": config.vocab_size}
    conditions = find_conditions(vars(config))
    for field in dataclasses.fields(config):
        if not field.metadata["decides"]:
            continue
        # A derived property states the meaning of fields that have several spellings.
        name = field.metadata["meaning"] or field.name
        if not is_used(field, conditions):
            # Another field may have stated the same property.
            signature.setdefault(name, None)
            continue
        value = getattr(config, name)
        if isinstance(value, list):
            value = tuple(value)
        signature[name] = value
    return signature


def spell_out_mup(config: TransformerConfig) -> TransformerConfig:
    """Return the same model without --use-mup, with the factors of other flags instead."""
    if not config.use_mup:
        return config
    return dataclasses.replace(
        config,
        use_mup=False,
        embedding_multiplier=config.embedding_factor,
        logits_scaling=config.logits_divisor,
        softmax_scale=config.chosen_score_scale,
    )

"""The model that a checkpoint's arguments describe: its configuration and its parameters."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import torch

from megatron.conversion.model_space.source import (
    ADAM,
    ARGUMENTS,
    SGD,
    Shape,
    Source,
    TensorInfo,
    flag_name,
    optimizer_key,
    optimizer_states,
)
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed.param_and_grad_buffer import ParamSpec
from megatron.core.models import GPTModel
from megatron.core.module import param_info
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.core.transformer.transformer_config import COMPUTED_LOCALLY, TransformerConfig, deciding_fields

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
_FIELDS = {field.name: field for field in dataclasses.fields(TransformerConfig)}
_LAYER = re.compile(r"decoder\.layers\.\d+\.")
_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads")


def plain_args(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are plain data, as files of other programs can hold them."""
    return {name: value for name, value in args.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(type(name) is str and _is_plain(item) for name, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def model_config(args: Mapping[str, Any], vocab_size: int, description: str) -> TransformerConfig:
    """The configuration in a checkpoint's arguments, with `vocab_size` tokens (the rows of its word embedding).

    Raises ValueError, naming the flag, where an argument that defines the model is missing.
    """
    for name in _REQUIRED:
        if not args.get(name):
            raise ValueError(f"{description} lacks {name}: give {flag_name(name)}")
    known = {name: args[name] for name in _FIELDS if name in args}
    ARGUMENTS(known, description)
    return TransformerConfig(**(known | COMPUTED_LOCALLY | {"vocab_size": vocab_size}))


def vocabulary_rows(tensors: Mapping[str, TensorInfo], where: str) -> int:
    """Rows of the word embedding; CheckpointError where there is none."""
    found = tensors.get(WORD_EMBEDDINGS)
    if found is None or len(found.shape) != 2:
        what = "no" if found is None else f"{list(found.shape)} as"
        raise CheckpointError(f"{where} has {what} {WORD_EMBEDDINGS}: it is not a GPT model")
    return found.shape[0]


def exported_config(source: Source, vocab_size: int | None) -> TransformerConfig:
    """The model of `source` with its first `vocab_size` tokens (None: all of its rows), for an export.

    Raises ValueError where it has fewer.
    """
    rows = vocabulary_rows(source.tensors, source.description)
    if vocab_size is not None and vocab_size > rows:
        raise ValueError(f"--true-vocab-size {vocab_size} is more than the {rows} rows of {source.description}")
    return model_config(source.args, vocab_size or rows, source.description)


def check_parameters(
    tensors: Mapping[str, TensorInfo], wanted: Mapping[str, Shape], where: str, vocab_size: int | None = None
) -> None:
    """Raises CheckpointError, naming the first, for a parameter that is missing or has another shape than `wanted`.

    What has `vocab_size` rows may have more of them: they pad the vocabulary.
    """
    for key, shape in wanted.items():
        if key not in tensors:
            raise CheckpointError(f"{where} lacks {key}, which its arguments call for")
        found = tensors[key].shape
        padded = shape[0] == vocab_size and found[0] > shape[0] and found[1:] == shape[1:]
        if found != shape and not padded:
            raise CheckpointError(f"{where}: {key} has shape {found}, its arguments make it {shape}")


def check_optimizer_complete(tensors: Mapping[str, TensorInfo], where: str) -> None:
    """Every trained parameter has all of its optimizer state, of its shape, or none has any.

    Raises CheckpointError naming what is missing or of another shape.
    """
    found = optimizer_states(tensors)
    states = SGD if "momentum_buffer" in found else ADAM if found != ("param",) and found else found
    parameters = [key for key in tensors if not key.startswith("optimizer.") and is_trained(key)]
    wanted = {optimizer_key(state, key): tensors[key].shape for key in parameters for state in states}
    missing = [key for key in wanted if key not in tensors]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(f"{where}: optimizer state is missing: {', '.join(missing[:3])}{more}")
    for key, shape in wanted.items():
        if tensors[key].shape != shape:
            raise CheckpointError(f"{where}: {key} has shape {tensors[key].shape}, its parameter {shape}")


def is_trained(key: str) -> bool:
    """Whether the optimizer knows the parameter: the bias of a router follows the load."""
    return not key.endswith(".router.expert_bias")


def resolved(config: TransformerConfig) -> dict[str, Any]:
    """The arguments whose defaults follow from others, as the model has them."""
    values = {field.name: getattr(config, field.name) for field in deciding_fields() if field.default is None}
    derived = {name: value for name, value in values.items() if value is not None}
    return derived | {"group_query_attention": config.query_groups != config.num_attention_heads}


def model_parameters(config: TransformerConfig) -> list[ParamSpec]:
    """Every parameter of the whole model by its key, as its layers define it.

    They are built on the meta device; the layers of a kind (dense, with experts) are alike, so one of each is enough.
    Raises ValueError for impossible sizes.
    """
    # Building all layers of a large model takes minutes, even on the meta device.
    pattern = config.moe_layer_pattern
    first = {kind: pattern.index(kind) for kind in set(pattern)}
    try:
        models = {kind: _parameters_with_layer(config, number) for kind, number in first.items()}
    except RuntimeError as error:  # more elements than 64 bits can count
        raise ValueError(f"no model has these sizes: {error}") from error
    outside = models[pattern[0]]
    layers = {kind: [p for p in models[kind] if _LAYER.match(p.name)] for kind in models}
    begin = outside.index(layers[pattern[0]][0])
    outside[begin : begin + len(layers[pattern[0]])] = [
        dataclasses.replace(parameter, name=_LAYER.sub(f"decoder.layers.{number}.", parameter.name))
        for number, kind in enumerate(pattern)
        for parameter in layers[kind]
    ]
    return outside


def _parameters_with_layer(config: TransformerConfig, number: int) -> list[ParamSpec]:
    """Those of a model whose only layer is that one."""
    layers = range(number, number + 1)
    model = GPTModel(config, layers=layers, rng=TensorParallelRng(0, 0), device=torch.device("meta"))
    parameters = []
    for key, entry in model.sharded_state_dict().items():
        assert isinstance(entry, ShardedTensor) and isinstance(entry.local, torch.nn.Parameter), key
        parameters.append(ParamSpec(key, entry.global_shape, param_info(entry.local)))
    return parameters


def model_tensors(config: TransformerConfig) -> dict[str, Shape]:
    """Key and global shape of every parameter, in the order of the model."""
    return {parameter.name: parameter.shape for parameter in model_parameters(config)}

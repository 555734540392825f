"""The merge of a LoRA adapter of PEFT into its base model, as a view of a source of any format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from megatron.conversion.huggingface.directory_writer import get_stored_fields
from megatron.conversion.huggingface.families import choose_family
from megatron.conversion.huggingface.family import Family
from megatron.conversion.huggingface.lora_adapter import LoraAdapter
from megatron.conversion.huggingface.stored_parameters import (
    OUTPUT,
    StoredParameter,
    store_parameters,
    stored_parameters,
)
from megatron.conversion.huggingface.stored_weights import StoredWeights
from megatron.conversion.huggingface.wrappers import find_text_family
from megatron.conversion.model_space.foreign import foreign_name
from megatron.conversion.model_space.lazy_tensors import cast
from megatron.conversion.model_space.model import (
    check_parameters,
    make_export_config,
    model_tensors,
)
from megatron.conversion.model_space.optimizer_states import (
    average_key,
    full_precision_key,
    optimizer_states,
)
from megatron.conversion.model_space.views import SourceView, get_dtype
from megatron.conversion.options import WriteOptions
from megatron.core.run_checkpoint.keys import WORD_EMBEDDINGS, is_foreign
from megatron.core.run_checkpoint.source import Source


def merge_adapters(source: Source, directories: Sequence[Path], options: WriteOptions) -> Source:
    """Return `source` with the adapters in `directories`, merged one after the other."""
    if optimizer_states(source.tensors):
        options.note("optimizer state: dropped, since it belongs to the weights before the merge")
    if average_key(WORD_EMBEDDINGS) in source.tensors:
        options.note("average of the weights (ema.*): dropped, like the optimizer state")
    source = PlainWeights(source, get_dtype(options.dtype))
    for directory in directories:
        family = _choose_family(source)
        adapter = LoraAdapter(directory, family)
        source = _separate_head(source, adapter, family, options)
        merged = MergedAdapter(source, adapter, family)
        options.note(f"{directory}: changed {merged.num_changed} tensors")
        source = merged
    return source


def _choose_family(source: Source) -> Family:
    """Return the family of transformers that the model belongs to.

    Adapters name modules of transformers, so the model must be one that an export can have.
    """
    config = make_export_config(source, None)
    foreign = [key for key in source.tensors if is_foreign(key)]
    fields = get_stored_fields(source.args)
    model_type = source.args.get("hf_model_type")
    text_family = find_text_family(model_type)
    if text_family is not None:
        return text_family
    try:
        return choose_family(config, model_type, foreign, fields)
    except ValueError as error:
        raise ValueError(
            f"--lora: {source.description} is not a model of transformers: {error}"
        ) from error


class PlainWeights(SourceView):
    """The weights alone, cast to `dtype`, which is by default theirs.

    As in an export, they are cast from the fp32 main parameters, if the source has them.
    """

    def __init__(self, source: Source, dtype: torch.dtype | None) -> None:
        super().__init__(source)
        self.set_weights(source, dtype, lambda key: full_precision_key(key, source.tensors))


# ---- Tied embeddings ----


def _get_module(parameter: StoredParameter) -> str:
    """Return the name of the module that a weight belongs to."""
    return parameter.names[0].removesuffix(".weight")


def _separate_head(
    source: Source, adapter: LoraAdapter, family: Family, options: WriteOptions
) -> Source:
    """Return `source` with an output layer of its own if the adapter requires one.

    PEFT trains each of two tied modules alone, except for rows of the embedding. They stay tied
    only if their changes are equal (`ensure_weight_tying`).
    """
    config = make_export_config(source, None)
    if config.untie_embeddings_and_output_weights:
        return source
    untied = UntiedHead(source)
    modules = {}
    for parameter in _list_parts(untied, family, adapter):
        if parameter.key in (WORD_EMBEDDINGS, OUTPUT):
            modules[parameter.key] = _get_module(parameter)
    embedding = modules[WORD_EMBEDDINGS]
    head = modules[OUTPUT]
    is_tied = adapter.config.ties_saved_modules and adapter.config.is_saved(embedding)
    is_one_trained = adapter.trains(embedding) != adapter.trains(head)
    may_differ = adapter.trains_rows(head) or (is_one_trained and not is_tied)
    if may_differ or not adapter.drop_copy(head, embedding):
        options.note(f"{adapter.directory}: embedding and output layer differ after the merge")
        return untied
    return source


class UntiedHead(SourceView):
    """A model with a copy of the embedding as its output layer."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.tensors[OUTPUT] = self.tensors[WORD_EMBEDDINGS]
        self.args["untie_embeddings_and_output_weights"] = True


# ---- The merge ----


def _list_parts(source: Source, family: Family, adapter: LoraAdapter) -> list[StoredParameter]:
    """Return the weights of the model under the names that the adapter uses.

    Of packed and separate experts, which are the same weights, adapters name one or the other.
    """
    config = make_export_config(source, None)
    shapes = model_tensors(config)
    check_parameters(source.tensors, shapes, source.description)
    rows = family.select_rows(config)
    return list(stored_parameters(shapes, rows, family.layers, config, adapter.changes))


class MergedAdapter(SourceView):
    """A model with an adapter merged into its weights.

    The weights are presented as transformers stores them, changed, and read back as any model of
    transformers is.
    """

    def __init__(self, source: Source, adapter: LoraAdapter, family: Family) -> None:
        super().__init__(source)
        config = make_export_config(source, None)
        parameters = _list_parts(source, family, adapter)
        tensors = store_parameters(
            parameters, lambda parameter: parameter.select_in(source.tensors[parameter.key])
        )
        foreign: dict[str, str] = {}  # name that the adapter uses -> key
        for key in source.tensors:
            if is_foreign(key):
                name = _find_adapter_name(foreign_name(key), adapter)
                foreign[name] = key
                tensors[name] = source.tensors[key]
        transposed = {
            name for parameter in parameters if parameter.transposed for name in parameter.names
        }
        changed = adapter.apply(tensors, transposed)
        self.num_changed = len(changed)

        for name, tensor in changed.items():
            if name in foreign:
                self.tensors[foreign[name]] = tensor
        weights = StoredWeights(adapter.directory, tensors | changed, family, config, ())
        for parameter in parameters:
            if not changed.keys().isdisjoint(parameter.names):
                key = parameter.key
                self.tensors[key] = cast(weights.tensors[key], source.tensors[key].dtype)


def _find_adapter_name(name: str, adapter: LoraAdapter) -> str:
    """Return the name that an adapter uses for a tensor that the model does not have.

    Releases of transformers differ in whether the towers of multimodal models are in `model.`.
    """
    for candidate in (name, f"model.{name}", name.removeprefix("model.")):
        if adapter.changes(candidate):
            return candidate
    return name

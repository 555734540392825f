"""Write a `Source` as a Hugging Face directory, a few rows at a time."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from megatron.conversion.files import Options, Progress, make_empty_directory, no_progress
from megatron.conversion.huggingface import sidecar as hf_sidecar
from megatron.conversion.huggingface.families import choose_family
from megatron.conversion.huggingface.parameters import StoredParameter
from megatron.conversion.huggingface.tokenizer import export_tokenizer, write_generation_config
from megatron.conversion.huggingface.weight_files import Outgoing, write_weight_files
from megatron.conversion.model_space.model import WORD_EMBEDDINGS, check_parameters, exported_config, model_tensors
from megatron.conversion.model_space.row_maps import as_is
from megatron.conversion.model_space.source import Source, TensorInfo, full_precision_key
from megatron.core.durable_files import fsync_tree, write_json
from megatron.core.transformer.transformer_config import TransformerConfig


def write_huggingface(
    source: Source, directory: Path, options: Options | None = None, progress: Progress = no_progress
) -> list[str]:
    """Write `source` into the empty `directory`; returns what it holds that could not be carried.

    config.json is written last, so an interrupted export is no model. Raises ValueError for a model that transformers
    cannot express, before anything is written.
    """
    options = options or Options()
    config = _config(source, options)
    family = choose_family(config, source.args.get("hf_model_type"))
    places = family.places(config)
    _check_complete(source, config, places)
    optimizer = hf_sidecar.sidecar_tensors(source, model_tensors(config)) if options.optim_sidecar else {}

    make_empty_directory(directory)
    limits = (options.max_shard_size, options.workers, progress)
    # Weights come from the fp32 main parameters where there are some, and are cast only once.
    keys = [full_precision_key(place.key, source.tensors) for place in places]
    weights = [_outgoing(source, key, place, config.params_dtype) for key, place in zip(keys, places, strict=True)]
    write_weight_files(directory, "model", weights, *limits)
    if optimizer:
        states = [
            _outgoing(source, read, StoredParameter(key, (), info.shape, (key,), as_is(info.shape[0])), info.dtype)
            for key, (read, info) in optimizer.items()
        ]
        folder = directory / hf_sidecar.DIRECTORY
        folder.mkdir()
        hf_sidecar.write_state(folder, source, write_weight_files(folder, "optimizer", states, *limits))
    tokenizer = export_tokenizer(source.args, options.tokenizer, directory, options.trusted)
    write_generation_config(directory, tokenizer.ids)
    for copied in tokenizer.copied:
        options.note(f"tokenizer: {copied}")
    # Readers recognise a model by config.json: it must not be durable before the weights are.
    fsync_tree(directory)
    write_json(directory / "config.json", {**family.write_config(config), **tokenizer.ids, "use_cache": True})
    fsync_tree(directory)
    return tokenizer.lost + _not_carried(source, bool(optimizer))


def _config(source: Source, options: Options) -> TransformerConfig:
    dtype = options.dtype or source.tensors[WORD_EMBEDDINGS].dtype
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"weights of {dtype} cannot be written: give --dtype fp32, bf16 or fp16")
    config = exported_config(source, options.vocab_size)
    return dataclasses.replace(config, bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16)


def _check_complete(source: Source, config: TransformerConfig, places: list[StoredParameter]) -> None:
    """Every parameter of the model is in the source, and has a place in the family or is a bias of zeros."""
    shapes = model_tensors(config)
    placed = {place.key for place in places}
    check_parameters(source.tensors, shapes, source.description, config.vocab_size)
    for key, shape in shapes.items():
        if key not in placed and torch.count_nonzero(source.read(key, (0,) * len(shape), shape)):
            raise ValueError(f"{source.description}: {key} is not zero, and models of this family have no such bias")
    extra = [k for k in source.tensors if k not in shapes and not k.startswith("optimizer.")]
    if extra:
        raise ValueError(f"{source.description}: {', '.join(extra)} are not part of the model its arguments describe")


def _outgoing(source: Source, key: str, part: StoredParameter, dtype: torch.dtype) -> Outgoing:
    """`part`, read from the tensor `key`."""
    lead, rest = part.lead, part.shape[1:]

    def read(first: int, count: int) -> torch.Tensor:
        box = source.read(key, (*lead, first, *[0] * len(rest)), (*[1] * len(lead), count, *rest))
        return box.view(count, *rest).to(dtype)

    infos = [TensorInfo(shape, dtype) for shape in part.stored_shapes()]
    return Outgoing(part.names, infos, part.row_map, read, part.transposed)


def _not_carried(source: Source, sidecar: bool) -> list[str]:
    lost = []
    if any(key.startswith("optimizer.") for key in source.tensors) and not sidecar:
        lost.append("optimizer state and training state: give --save-optim-sidecar to keep them beside the model")
    if source.training is not None and source.training.rng:
        lost.append("random number state: it belongs to one layout")
    return lost

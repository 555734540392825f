"""Write a `Source` as a Hugging Face directory, one tensor at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.conversion import hf_sidecar
from megatron.conversion.files import (
    Progress,
    committed,
    make_empty_directory,
    no_progress,
    run_jobs,
    sync_tree,
    write_json,
)
from megatron.conversion.hf_families import Family, Place, choose_family
from megatron.conversion.hf_tokenizer import export_tokenizer, write_generation_config
from megatron.conversion.model_config import WORD_EMBEDDINGS, model_config, model_tensors
from megatron.conversion.model_space import Source, TensorInfo, optimizer_key
from megatron.conversion.row_maps import scatter
from megatron.conversion.safetensors_file import SafetensorsWriter
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class HuggingFaceOptions:
    dtype: torch.dtype | None = None  # of the weights; default: the model's
    max_shard_size: int = 5 * 10**9
    vocab_size: int | None = None  # rows beyond it are cut; default: all that the source has
    tokenizer: Path | None = None  # a directory or SentencePiece model; default: the one in the arguments
    optim_sidecar: bool = False
    workers: int = 1


@dataclass(frozen=True)
class _Item:
    """One tensor of a file: its rows `source` of a place, or a whole tensor of the sidecar."""

    name: str
    info: TensorInfo
    produce: Callable[[dict[str, torch.Tensor]], torch.Tensor]


def write_huggingface(
    source: Source, directory: Path, options: HuggingFaceOptions | None = None, progress: Progress = no_progress
) -> list[str]:
    """Write `source` into the empty `directory`; returns what it holds that could not be carried.

    config.json is written last, so an interrupted export is no model. Raises ValueError for a model that transformers
    cannot express, before anything is written.
    """
    options = options or HuggingFaceOptions()
    config = _config(source, options)
    family = choose_family(config, source.args.get("hf_model_type"))
    places = family.places(config)
    _check_complete(source, config, places)
    optimizer = hf_sidecar.sidecar_tensors(source, model_tensors(config)) if options.optim_sidecar else {}

    make_empty_directory(directory)
    weights = [item for place in places for item in _weight_items(source, place, config.params_dtype)]
    _write_files(directory, "model", weights, options, progress)
    if optimizer:
        states = [_state_item(source, key, *where) for key, where in optimizer.items()]
        folder = directory / hf_sidecar.DIRECTORY
        folder.mkdir()
        hf_sidecar.write_state(folder, source, _write_files(folder, "optimizer", states, options, progress))
    token_ids, lost = export_tokenizer(source.args, options.tokenizer, directory)
    write_generation_config(directory, token_ids)
    sync_tree(directory)
    write_json(directory / "config.json", _config_json(family, config, token_ids))
    sync_tree(directory)
    return lost + _not_carried(source, bool(optimizer))


def _config(source: Source, options: HuggingFaceOptions) -> TransformerConfig:
    info = source.tensors[WORD_EMBEDDINGS]
    rows, dtype = info.shape[0], options.dtype or info.dtype
    vocab_size = options.vocab_size or rows
    if vocab_size > rows:
        raise ValueError(f"--true-vocab-size {vocab_size} is more than the {rows} rows of {source.description}")
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"weights of {dtype} cannot be written: give --dtype fp32, bf16 or fp16")
    config = model_config(source.args, vocab_size, source.description)
    return dataclasses.replace(config, bf16=dtype == torch.bfloat16, fp16=dtype == torch.float16)


def _check_complete(source: Source, config: TransformerConfig, places: list[Place]) -> None:
    """Every parameter of the model is in the source, and has a place in the family or is a bias of zeros."""
    shapes = model_tensors(config)
    placed = {place.key for place in places}
    for key, shape in shapes.items():
        if key not in source.tensors:
            raise ValueError(f"{source.description} lacks {key}, which its arguments call for")
        found = source.tensors[key].shape
        if found[1:] != shape[1:] or found[0] < shape[0] or (found[0] > shape[0] and shape[0] != config.vocab_size):
            raise ValueError(f"{source.description}: {key} has shape {found}, its arguments make it {shape}")
        if key not in placed and torch.count_nonzero(source.read(key, (0,) * len(shape), shape)):
            raise ValueError(f"{source.description}: {key} is not zero, and models of this family have no such bias")
    extra = [k for k in source.tensors if k not in shapes and not k.startswith("optimizer.")]
    if extra:
        raise ValueError(f"{source.description}: {', '.join(extra)} are not part of the model its arguments describe")


def _weight_items(source: Source, place: Place, dtype: torch.dtype) -> list[_Item]:
    return [
        _Item(name, TensorInfo(shape, dtype), partial(_stored_tensor, source, place, number, dtype))
        for number, (name, shape) in enumerate(zip(place.names, place.stored_shapes(), strict=True))
    ]


def _stored_tensor(
    source: Source, place: Place, number: int, dtype: torch.dtype, cache: dict[str, torch.Tensor]
) -> torch.Tensor:
    """`cache` keeps the last model-space tensor: q, k and v follow each other."""
    if place.key not in cache:
        cache.clear()
        cache[place.key] = _best(source, place).to(dtype)
    stored = scatter(place.row_map, number, cache[place.key])
    return stored.t() if place.transposed else stored


def _best(source: Source, place: Place) -> torch.Tensor:
    """The fp32 main parameter, cast only once, where there is one."""
    main = optimizer_key("param", place.key)
    key = main if main in source.tensors else place.key
    return source.read(key, (0,) * len(place.shape), place.shape)


def _state_item(source: Source, key: str, read: str, info: TensorInfo) -> _Item:
    def produce(cache: dict[str, torch.Tensor]) -> torch.Tensor:
        return source.read(read, (0,) * len(info.shape), info.shape).to(info.dtype)

    return _Item(key, info, produce)


def _write_files(
    directory: Path, stem: str, items: list[_Item], options: HuggingFaceOptions, progress: Progress
) -> list[str]:
    """One file or numbered shards with an index; returns the names of the files."""
    shards = _shards(items, options.max_shard_size)
    names = [f"{stem}.safetensors"]
    if len(shards) > 1:
        names = [f"{stem}-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    jobs = [partial(_write_file, directory / name, shard, progress) for name, shard in zip(names, shards, strict=True)]
    run_jobs(jobs, options.workers)
    if len(shards) > 1:
        metadata = {
            "total_size": sum(item.info.nbytes for item in items),
            "total_parameters": sum(item.info.nbytes // item.info.dtype.itemsize for item in items),
        }
        weight_map = {item.name: name for name, shard in zip(names, shards, strict=True) for item in shard}
        write_json(directory / f"{stem}.safetensors.index.json", {"metadata": metadata, "weight_map": weight_map})
    return names


def _write_file(path: Path, items: list[_Item], progress: Progress) -> None:
    cache: dict[str, torch.Tensor] = {}
    with committed(path) as temporary, SafetensorsWriter(temporary, {item.name: item.info for item in items}) as file:
        for item in items:
            file.write(item.name, item.produce(cache))
            progress(item.info.nbytes)


def _shards(items: list[_Item], limit: int) -> list[list[_Item]]:
    """Filled in order; a tensor larger than the limit has a file of its own."""
    shards: list[list[_Item]] = [[]]
    size = 0
    for item in items:
        if shards[-1] and size + item.info.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += item.info.nbytes
    return shards


def _config_json(family: Family, config: TransformerConfig, token_ids: dict[str, Any]) -> dict[str, Any]:
    return {**family.write_config(config), **token_ids, "use_cache": True}


def _not_carried(source: Source, sidecar: bool) -> list[str]:
    lost = []
    if any(key.startswith("optimizer.") for key in source.tensors) and not sidecar:
        lost.append("optimizer state and training state: give --save-optim-sidecar to keep them beside the model")
    if source.training is not None and source.training.rng:
        lost.append("random number state: it belongs to one layout")
    return lost

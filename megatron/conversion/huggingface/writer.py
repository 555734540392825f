"""Write a `Source` as a Hugging Face directory, a few rows at a time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.files import Progress, make_empty_directory, no_progress
from megatron.conversion.huggingface import sidecar as hf_sidecar
from megatron.conversion.huggingface.families import Family, choose_family
from megatron.conversion.huggingface.parameters import StoredParameter
from megatron.conversion.huggingface.tokenizer import export_tokenizer, write_generation_config
from megatron.conversion.huggingface.weight_files import Outgoing, write_weight_files
from megatron.conversion.model_space.model import WORD_EMBEDDINGS, check_parameters, exported_config, model_tensors
from megatron.conversion.model_space.row_maps import RowMap, as_is
from megatron.conversion.model_space.source import Shape, Source, TensorInfo, full_precision_key
from megatron.core.durable_files import fsync_tree, write_json
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class HuggingFaceOptions:
    dtype: torch.dtype | None = None  # of the weights; default: the model's
    max_shard_size: int = 5 * 10**9
    vocab_size: int | None = None  # rows beyond it are cut; default: all that the source has
    tokenizer: Path | None = None  # a directory or SentencePiece model; default: the one in the arguments, if it is
    trusted: tuple[Path, ...] = ()  # in one of these: the user has named them
    optim_sidecar: bool = False
    workers: int = 1
    note: Callable[[str], None] = lambda text: None  # told which files of a tokenizer were copied


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
    limits = (options.max_shard_size, options.workers, progress)
    weights = [_weight(source, place, config.params_dtype) for place in places]
    write_weight_files(directory, "model", weights, *limits)
    if optimizer:
        states = [_state(source, key, *where) for key, where in optimizer.items()]
        folder = directory / hf_sidecar.DIRECTORY
        folder.mkdir()
        hf_sidecar.write_state(folder, source, write_weight_files(folder, "optimizer", states, *limits))
    tokenizer = export_tokenizer(source.args, options.tokenizer, directory, options.trusted)
    write_generation_config(directory, tokenizer.ids)
    for copied in tokenizer.copied:
        options.note(f"tokenizer: {copied}")
    fsync_tree(directory)
    write_json(directory / "config.json", _config_json(family, config, tokenizer.ids))
    fsync_tree(directory)
    return tokenizer.lost + _not_carried(source, bool(optimizer))


def _config(source: Source, options: HuggingFaceOptions) -> TransformerConfig:
    info = source.tensors[WORD_EMBEDDINGS]
    dtype = options.dtype or info.dtype
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


def _weight(source: Source, place: StoredParameter, dtype: torch.dtype) -> Outgoing:
    """From the fp32 main parameter, cast only once, where there is one."""
    infos = [TensorInfo(shape, dtype) for shape in place.stored_shapes()]
    key = full_precision_key(place.key, source.tensors)
    outgoing = _outgoing(source, key, place.names, infos, place.matrix, place.row_map, place.transposed)
    if len(place.shape) < 3:
        return outgoing
    _, rows, columns = place.shape

    def read(first: int, count: int) -> torch.Tensor:
        """Rows of one expert: runs end where a stored tensor does."""
        box = source.read(key, (first // rows, first % rows, 0), (1, count, columns))
        return box.view(count, columns).to(dtype)

    return dataclasses.replace(outgoing, read=read)


def _state(source: Source, key: str, read: str, info: TensorInfo) -> Outgoing:
    return _outgoing(source, read, [key], [info], info.shape, as_is(info.shape[0]))


def _outgoing(
    source: Source,
    key: str,
    names: Sequence[str],
    infos: Sequence[TensorInfo],
    shape: Shape,
    row_map: RowMap,
    transposed: bool = False,
) -> Outgoing:
    dtype = infos[0].dtype

    def read(first: int, count: int) -> torch.Tensor:
        return source.read(key, (first,) + (0,) * (len(shape) - 1), (count, *shape[1:])).to(dtype)

    return Outgoing(names, infos, row_map, transposed, shape[0], math.prod(shape[1:]), read)


def _config_json(family: Family, config: TransformerConfig, token_ids: dict[str, Any]) -> dict[str, Any]:
    return {**family.write_config(config), **token_ids, "use_cache": True}


def _not_carried(source: Source, sidecar: bool) -> list[str]:
    lost = []
    if any(key.startswith("optimizer.") for key in source.tensors) and not sidecar:
        lost.append("optimizer state and training state: give --save-optim-sidecar to keep them beside the model")
    if source.training is not None and source.training.rng:
        lost.append("random number state: it belongs to one layout")
    return lost

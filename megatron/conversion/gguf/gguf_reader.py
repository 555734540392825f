"""A GGUF file as a `Source`, by the config.json and the tensors that transformers would have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.gguf.architectures import (
    MODEL_MODULES,
    ROPE_FACTORS,
    Architecture,
    find_architecture,
    read_config,
)
from megatron.conversion.gguf.blocks import BlockEncoding
from megatron.conversion.gguf.file_format import GGUFModel, GGUFTensor, open_model
from megatron.conversion.gguf.tokenizer_reading import find_unread_tokenizer
from megatron.conversion.huggingface.directory import HuggingFaceSource
from megatron.conversion.model_space.lazy_tensors import (
    cast,
    gather_rows,
    reshape,
    select,
    view_stored,
)
from megatron.conversion.model_space.pieces import RowMap, RowRun
from megatron.conversion.options import ReadOptions
from megatron.conversion.quantization.encoded_matrix import EncodedMatrix
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape
from megatron.core.safe_files import FileTensor

_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TOKENIZER_HINT = "give --tokenizer for an export, or the tokenizer's flags for a run"
_PROJECTOR = "mmproj"  # begins the names of files with the vision tower of a model


def open_gguf(path: Path, read_options: ReadOptions | None = None) -> HuggingFaceSource:
    """Return the model in a file, or in the only one of a directory.

    Raises ValueError for a damaged file, or a model that is not supported.
    """
    read_options = replace(read_options or ReadOptions(), no_optim=True)
    path = _find_file(path)
    model = open_model(path)
    try:
        config, weights = _read_model(model)
        source = HuggingFaceSource(path.parent, read_options, weights, config)
    except ValueError as error:
        raise CheckpointError(f"{path}, as a model of transformers: {error}") from error
    source.description = f"GGUF file {path}"
    _add_tokenizer(source, model.metadata, path)
    return source


def _add_tokenizer(source: HuggingFaceSource, metadata: Mapping[str, Any], path: Path) -> None:
    """Name the tokenizer in the file, unless there is one next to it or in the user's arguments."""
    is_contained = metadata.get("tokenizer.ggml.model", "none") != "none"
    if not is_contained or source.args.get("tokenizer_type") is not None:
        return
    problem = find_unread_tokenizer(metadata)
    if problem is not None:
        source.unused.append(f"the tokenizer in the GGUF file ({problem}: {_TOKENIZER_HINT})")
        return
    source.args["tokenizer_type"] = "HuggingFaceTokenizer"
    source.args["tokenizer_model"] = str(path)


def _find_file(path: Path) -> Path:
    """Return `path`, or the first file of the only model in this directory."""
    if path.is_file():
        return path
    models: dict[str, Path] = {}
    for file in sorted(path.glob("*.gguf")):
        if not file.name.startswith(_PROJECTOR):
            models.setdefault(re.sub(r"-\d{5}-of-", "-*-of-", file.name), file)
    if not models:
        raise CheckpointError(f"{path} has no GGUF file of a language model: give the path of one")
    if len(models) > 1:
        names = ", ".join(file.name for file in models.values())
        raise CheckpointError(f"{path} has several GGUF models ({names}): give the path of one")
    (file,) = models.values()
    return file


def _read_model(model: GGUFModel) -> tuple[dict[str, Any], dict[str, LazyTensor]]:
    """Return the config.json and the tensors of a model as transformers names them."""
    _, architecture = find_architecture(model.metadata)
    stored = dict(model.tensors)
    factors = None
    if ROPE_FACTORS in stored:
        factors = _read_elements(stored.pop(ROPE_FACTORS)).read_all()
    config = read_config(model.metadata, stored, factors)
    embedding = stored.get("token_embd.weight")
    if embedding is None:
        raise ValueError("it has no token_embd.weight: give the file of a language model")
    config["vocab_size"] = embedding.shape[0]
    dtype = _choose_dtype(stored)
    config["dtype"] = str(dtype).removeprefix("torch.")

    weights: dict[str, LazyTensor] = {}
    for name, tensor in stored.items():
        try:
            weights.update(_convert_tensor(name, tensor, architecture, config, dtype))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return config, weights


def _choose_dtype(stored: Mapping[str, GGUFTensor]) -> torch.dtype:
    """Return fp32, which has the values of quantized matrices, or the dtype of 16-bit files.

    Such files have routers in fp32, as norms and biases.
    """
    dtypes = {tensor.encoding.dtype for tensor in stored.values() if len(tensor.shape) > 1}
    if dtypes != {torch.float32}:
        dtypes.discard(torch.float32)
    if len(dtypes) != 1:
        return torch.float32
    (dtype,) = dtypes
    return dtype or torch.float32


def _convert_tensor(
    name: str,
    tensor: GGUFTensor,
    architecture: Architecture,
    config: Mapping[str, Any],
    dtype: torch.dtype,
) -> dict[str, LazyTensor]:
    """Return a tensor, or those of all experts in it, by the name in transformers.

    A tensor that is not part of the architecture keeps its name.
    """
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None:
        module, _, suffix = name.rpartition(".")
        target = MODEL_MODULES.get(module)
        prefix = ""
    else:
        layer, module, suffix = match.groups()
        target = architecture.layer.get(module)
        prefix = f"model.layers.{int(layer)}."
    if target is None:
        return {name: _decode(name, tensor, dtype)}

    # Rows of q and k in the order of transformers
    row_map = None
    if architecture.pairs_neighbors and module in ("attn_q", "attn_k"):
        row_map = map_halves(tensor.shape[0], config["head_dim"])
    decoded = _decode(name, tensor, dtype, row_map)
    if architecture.norm_offset and module.endswith("norm"):
        decoded = cast(add(_decode(name, tensor, torch.float32), -architecture.norm_offset), dtype)
    if module == "ffn_gate_inp_shexp" and len(tensor.shape) == 1:
        decoded = reshape(decoded, (1, *decoded.shape))

    # Experts
    if "{}" not in target:
        return {f"{prefix}{target}.{suffix}": decoded}
    experts = {}
    for index in range(tensor.shape[0]):
        experts[f"{prefix}{target.format(index)}.{suffix}"] = select(decoded, index)
    return experts


def map_halves(rows: int, head_dim: int) -> RowMap:
    """Return the map of rows whose pairs are neighbors to the two halves of each head."""
    if head_dim <= 0 or head_dim % 2 or rows % head_dim:
        raise ValueError(f"{rows} rows are not heads of {head_dim}")
    runs = []
    for first in range(0, rows, head_dim):
        runs.append(RowRun(0, range(first, first + head_dim, 2)))
        runs.append(RowRun(0, range(first + 1, first + head_dim, 2)))
    return tuple(runs)


def add(tensor: LazyTensor, offset: int) -> LazyTensor:
    """Return the tensor plus a number."""
    return replace(tensor, read=partial(_read_sum, tensor, offset))


def _read_sum(tensor: LazyTensor, summand: int, offset: Shape, shape: Shape) -> torch.Tensor:
    """Return a box plus a number."""
    return tensor.read(offset, shape) + summand


# ---- Decoding ----


def _read_elements(tensor: GGUFTensor) -> LazyTensor:
    """Return a tensor that is not quantized."""
    if tensor.encoding.dtype is None:
        raise ValueError(f"it must not be quantized, but is {tensor.encoding.name}")
    return view_stored(
        FileTensor(tensor.path, tensor.position, tensor.encoding.dtype, tensor.shape)
    )


def _decode(
    name: str, tensor: GGUFTensor, dtype: torch.dtype, row_map: RowMap | None = None
) -> LazyTensor:
    """Return a tensor in `dtype`, with its rows in the order of `row_map`."""
    encoding = tensor.encoding
    if encoding.dtype is not None:
        elements = _read_elements(tensor)
        if row_map is not None:
            elements = gather_rows([elements], row_map)
        return cast(elements, dtype)

    # Blocks: [..., rows, bytes]
    *lead, columns = tensor.shape
    row_bytes = columns // encoding.block_size * encoding.block_bytes
    file_tensor = FileTensor(tensor.path, tensor.position, torch.uint8, (*lead, row_bytes))
    blocks = view_stored(file_tensor)
    if row_map is not None:
        blocks = gather_rows([blocks], row_map)
    if not lead:
        raise ValueError(f"it has one dimension, but is {encoding.name}")
    matrix = EncodedMatrix(name, {"blocks": blocks}, {"blocks": name}, {}, dtype, tensor.path)
    return matrix.decode(tensor.shape, partial(_decode_rows, matrix, encoding))


def _decode_rows(
    matrix: EncodedMatrix, encoding: BlockEncoding, lead: Shape, first: int, count: int
) -> torch.Tensor:
    """Decode rows: [count, columns]."""
    assert encoding.decode is not None
    blocks = matrix.read_rows("blocks", lead, first, count).reshape(-1, encoding.block_bytes)
    rows = encoding.decode(blocks).view(count, -1)
    if not torch.isfinite(rows).all():
        raise CheckpointError(
            f"{matrix.directory}: {matrix.name} has values that are not finite, so its scales are "
            "damaged: download the file again"
        )
    return rows

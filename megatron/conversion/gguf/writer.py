"""A `Source` written as a GGUF file, a few rows at a time: the weights of a model of transformers.

Matrices are Q8_0 or have the dtype of the model, all else is fp32, as by llama.cpp's converter.
"""

from __future__ import annotations

import re
import struct
import tempfile
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
    choose_architecture,
    compute_llama3_factors,
    make_metadata,
    read_config,
)
from megatron.conversion.gguf.blocks import ENCODINGS, BlockEncoding, encode_q8_0
from megatron.conversion.gguf.gguf_reader import add, map_halves
from megatron.conversion.gguf.tokenizer_writing import make_tokenizer_metadata
from megatron.conversion.huggingface.directory_writer import collect_model
from megatron.conversion.huggingface.families import find_family
from megatron.conversion.huggingface.model_tokenizer import export_tokenizer
from megatron.conversion.model_space.lazy_tensors import (
    cast,
    cut_blocks,
    scatter_rows,
    stack,
    view_tensor,
)
from megatron.conversion.model_space.model import compute_model_signature, model_config
from megatron.conversion.model_space.pieces import make_empty_directory, run_jobs
from megatron.conversion.model_space.views import get_dtype
from megatron.conversion.options import WriteOptions
from megatron.core.dist_checkpointing.mapping import Extent, LazyTensor, Shape
from megatron.core.dist_checkpointing.saving.commit import Progress
from megatron.core.dist_checkpointing.saving.placed_file import write_at
from megatron.core.durable_files import committed
from megatron.core.run_checkpoint.keys import WORD_EMBEDDINGS
from megatron.core.run_checkpoint.source import Source

_MAGIC = b"GGUF"
_VERSION = 3
_ALIGNMENT = 32
_MAX_ELEMENTS = 4 << 20  # that a worker encodes at once, or one expert
_TYPES = {encoding.name: number for number, encoding in ENCODINGS.items()}
_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}  # general.file_type
_DTYPES = {encoding.dtype: encoding for encoding in ENCODINGS.values() if encoding.dtype}
_Q8_0 = ENCODINGS[_TYPES["Q8_0"]]
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_ROUTERS = ("ffn_gate_inp", "ffn_gate_inp_shexp")  # in fp32


def write_gguf(
    source: Source, directory: Path, options: WriteOptions, progress: Progress
) -> list[str]:
    """Write `model.gguf` into the empty `directory`; return notes about parts that are left out.

    Raises ValueError for a model that GGUF cannot express, before anything is written.
    """
    # The model of transformers, in fp32, which is encoded once
    dtype = get_dtype(options.dtype) or source.tensors[WORD_EMBEDDINGS].dtype
    encoding = _DTYPES[dtype]
    if options.quantization is not None:
        encoding = _Q8_0
    config, weights = collect_model(source, replace(options, dtype="fp32", quantization=None))
    name, architecture = choose_architecture(config["model_type"])

    # The metadata and the tensors of the file
    factors = _make_factors(config)
    tensors = _convert_tensors(weights, architecture, config)
    if factors is not None:
        tensors[ROPE_FACTORS] = view_tensor(factors)
    metadata = make_metadata(name, architecture, config)
    metadata["general.file_type"] = _FILE_TYPES[encoding.name]
    _check_expressed(metadata, list(tensors), factors, config)
    tokenizer, notes = _describe_tokenizer(source, options, config["vocab_size"])
    metadata |= tokenizer
    encodings = {}
    for tensor_name, tensor in tensors.items():
        encodings[tensor_name] = _choose_encoding(tensor_name, tensor, encoding)

    make_empty_directory(directory)
    _write_file(directory / "model.gguf", metadata, tensors, encodings, options, progress)
    return notes + _list_notes(source, tensors, encodings, encoding)


def _describe_tokenizer(
    source: Source, options: WriteOptions, vocab_size: int
) -> tuple[dict[str, Any], list[str]]:
    """Return the entries of the tokenizer that an export to transformers would copy.

    Also returns notes about the parts that the file does not have.
    """
    with tempfile.TemporaryDirectory() as work:
        # The files of transformers
        directory = Path(work)
        exported = export_tokenizer(
            source.args,
            options.tokenizer,
            directory,
            options.trusted,
        )
        if exported.lost:
            return {}, exported.lost
        if not exported.copied:
            return {}, [
                "the tokenizer: the model has none, so programs take another one; give --tokenizer"
            ]

        # As metadata
        try:
            metadata = make_tokenizer_metadata(directory, vocab_size, exported.ids)
        except ValueError as error:
            return {}, [f"the tokenizer, which llama.cpp does not have: {error}"]

    for copied in exported.copied:
        path, _, _ = copied.partition(" -> ")
        options.note(f"tokenizer: {path}")
    return metadata, []


def _make_factors(config: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the factors of wavelengths of Llama 3's scaling, None for other scalings."""
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") != "llama3":
        return None
    head_dim = config["head_dim"]
    return compute_llama3_factors(config["rope_theta"], head_dim, scaling["factor"]).float()


def _check_expressed(
    metadata: Mapping[str, Any],
    names: list[str],
    factors: torch.Tensor | None,
    config: Mapping[str, Any],
) -> None:
    """Raise ValueError if the file that is read back would be another model."""
    reread = read_config(metadata, names, factors)
    reread["vocab_size"] = config["vocab_size"]
    result = _compute_signature(reread)
    differing = []
    for name, value in _compute_signature(config).items():
        if result[name] != value:
            differing.append(f"{name} ({value} -> {result[name]})")
    if differing:
        raise ValueError(
            f"--saver gguf: the metadata of GGUF cannot express {', '.join(differing)}: give "
            "--saver hf"
        )


def _compute_signature(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that determine the model of a config.json."""
    fields = dict(config)
    args = find_family(fields).read_config(fields, {})
    model = model_config(args, args["vocab_size"], "the model")
    return compute_model_signature(model)


# ---- Tensors ----


def _convert_tensors(
    weights: Mapping[str, LazyTensor], architecture: Architecture, config: Mapping[str, Any]
) -> dict[str, LazyTensor]:
    """Return the tensors under their names in GGUF; experts are stacks.

    Raises ValueError for a tensor without a name in GGUF.
    """
    layer_modules = {target: module for module, target in architecture.layer.items()}
    model_modules = {target: module for module, target in MODEL_MODULES.items()}
    tensors: dict[str, LazyTensor] = {}
    experts: dict[str, dict[int, LazyTensor]] = {}
    for name, tensor in weights.items():
        # The name in GGUF
        match = _LAYER.fullmatch(name)
        if match is None:
            path, _, suffix = name.rpartition(".")
            module = model_modules.get(path)
            target = f"{module}.{suffix}"
        else:
            layer, path, suffix = match.groups()
            module = layer_modules.get(_EXPERT.sub(".experts.{}.", path))
            target = f"blk.{layer}.{module}.{suffix}"
        if module is None:
            raise ValueError(
                f"--saver gguf: GGUF has no name for {name}: give --saver hf, or leave "
                "--keep-foreign out if it is a foreign tensor"
            )

        # Experts are collected first.
        expert = _EXPERT.search(name)
        if expert is not None:
            index = int(expert[1])
            experts.setdefault(target, {})[index] = tensor
        else:
            tensors[target] = _convert_tensor(module, tensor, architecture, config)

    for target, members in experts.items():
        members_in_order = [members[index] for index in range(len(members))]
        tensors[target] = stack(members_in_order)
    return tensors


def _convert_tensor(
    module: str, tensor: LazyTensor, architecture: Architecture, config: Mapping[str, Any]
) -> LazyTensor:
    """Return a tensor in the order of rows and with the offset that GGUF has."""
    if architecture.pairs_neighbors and module in ("attn_q", "attn_k"):
        return scatter_rows(tensor, map_halves(tensor.shape[0], config["head_dim"]), 0)
    if architecture.norm_offset and module.endswith("norm"):
        return add(tensor, architecture.norm_offset)
    return tensor


def _choose_encoding(name: str, tensor: LazyTensor, encoding: BlockEncoding) -> BlockEncoding:
    """Return `encoding` for a matrix, fp32 for other tensors, fp16 for rows without blocks."""
    module = name.split(".")[-2]
    if len(tensor.shape) == 1 or module in _ROUTERS:
        return _DTYPES[torch.float32]
    if tensor.shape[-1] % encoding.block_size:
        return _DTYPES[torch.float16]
    return encoding


def _encode(name: str, tensor: LazyTensor, encoding: BlockEncoding) -> LazyTensor:
    """Return the elements, or the bytes of their blocks: [..., rows, bytes]."""
    if encoding.dtype is not None:
        return cast(tensor, encoding.dtype)
    *lead, columns = tensor.shape
    row_bytes = columns // encoding.block_size * encoding.block_bytes
    return LazyTensor((*lead, row_bytes), torch.uint8, partial(_read_blocks, name, tensor))


def _read_blocks(name: str, tensor: LazyTensor, offset: Shape, shape: Shape) -> torch.Tensor:
    """Return the blocks of whole rows. Raises ValueError for values without a finite scale."""
    columns = tensor.shape[-1]
    rows = tensor.read((*offset[:-1], 0), (*shape[:-1], columns))
    blocks = rows.reshape(-1, _Q8_0.block_size)
    try:
        return encode_q8_0(blocks).view(shape)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


# ---- The file ----


def _write_file(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, LazyTensor],
    encodings: Mapping[str, BlockEncoding],
    options: WriteOptions,
    progress: Progress,
) -> None:
    """Write the header, then rows of tensors in any order.

    Args:
        path: file to write.
        metadata: its metadata.
        tensors: its tensors before they are encoded.
        encodings: encoding of each.
        options: number of workers.
        progress: receives the numbers of bytes.
    """
    # Compute the position of each tensor.
    encoded = {name: _encode(name, tensor, encodings[name]) for name, tensor in tensors.items()}
    offsets = {}
    end = 0
    for name, tensor in encoded.items():
        offsets[name] = end
        end += _align(tensor.nbytes)
    header = _encode_header(metadata, tensors, encodings, offsets)

    def write(target: Path, name: str, box: Extent) -> None:
        tensor = encoded[name]
        rows = tensor.read(*box).contiguous()
        row_bytes = tensor.nbytes // tensor.shape[0]
        write_at(target, rows, len(header) + offsets[name] + box[0][0] * row_bytes)
        progress(rows.nbytes)

    # Write it.
    with committed(path) as target:
        target.write_bytes(header)
        with target.open("r+b") as file:
            file.truncate(len(header) + end)
        jobs = (
            partial(write, target, name, box)
            for name, tensor in encoded.items()
            for box in cut_blocks(tensor, _MAX_ELEMENTS)
        )
        run_jobs(jobs, options.workers)


def _align(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _encode_header(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, LazyTensor],
    encodings: Mapping[str, BlockEncoding],
    offsets: Mapping[str, int],
) -> bytes:
    """Return the bytes before the data (see `file_format`)."""
    content = _MAGIC
    content += struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))
    for name, value in metadata.items():
        content += _encode_string(name)
        content += _encode_value(value)

    # Dimensions begin with the fastest.
    for name, tensor in tensors.items():
        dimensions = tensor.shape[::-1]
        type_number = _TYPES[encodings[name].name]
        content += _encode_string(name)
        content += struct.pack("<I", len(dimensions))
        content += struct.pack(f"<{len(dimensions)}Q", *dimensions)
        content += struct.pack("<IQ", type_number, offsets[name])
    return content.ljust(_align(len(content)), b"\0")


def _encode_string(text: str) -> bytes:
    content = text.encode()
    return struct.pack("<Q", len(content)) + content


def _encode_value(value: str | bool | int | float | list[Any]) -> bytes:
    """Return the type and the value: string, boolean, u32, fp32 or an array."""
    if isinstance(value, list):
        return struct.pack("<I", 9) + _encode_array(value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _encode_string(value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    return struct.pack("<If", 6, value)


def _encode_array(values: list[Any]) -> bytes:
    """Return the type of the elements, their number and the elements.

    Elements are strings, fp32 or i32, as the first one is.
    """
    count = len(values)
    first = values[0] if values else 0

    if isinstance(first, str):
        elements = b"".join(map(_encode_string, values))
        return struct.pack("<IQ", 8, count) + elements

    if isinstance(first, float):
        elements = struct.pack(f"<{count}f", *values)
        return struct.pack("<IQ", 6, count) + elements

    elements = struct.pack(f"<{count}i", *values)
    return struct.pack("<IQ", 5, count) + elements


def _list_notes(
    source: Source,
    tensors: Mapping[str, LazyTensor],
    encodings: Mapping[str, BlockEncoding],
    encoding: BlockEncoding,
) -> list[str]:
    """Return notes about the parts that the file does not have."""
    notes = []
    if any(key.startswith("optimizer.") for key in source.tensors):
        notes.append("optimizer state and training state")
    if encoding.name != "F16":
        halves = [name for name in tensors if encodings[name].name == "F16"]
        if halves:
            notes.append(
                f"{encoding.name} of {len(halves)} matrices, e.g. {halves[0]}, whose rows are not "
                f"blocks of {encoding.block_size}: they are F16"
            )
    return notes

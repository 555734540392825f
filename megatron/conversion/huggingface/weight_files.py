"""The weight files of a Hugging Face directory: one file or shards with an index, safetensors or pickles of torch.

Boxes of safetensors files are read without mapping the file, and files are written as a stream.
Format (https://github.com/huggingface/safetensors): u64 length of the header, the header as JSON
`{name: {"dtype", "shape", "data_offsets"}}`, then the row-major data. Memory is one piece of one tensor both ways:
mapped pages would count as resident, and the library's writer wants all tensors of a file at once. Its `get_slice` was
measured for the reader: rows came at a tenth of the speed.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.huggingface.parameters import Row
from megatron.conversion.model_space.pieces import (
    RowMap,
    alternating,
    as_is,
    cut,
    pack_rows,
    qkv_apart,
    qkv_blocks,
    run_jobs,
    stacked,
    stored_rows,
    write_at,
)
from megatron.conversion.model_space.source import Progress, Shape, Source, TensorInfo
from megatron.core.dist_checkpointing import FileTensor
from megatron.core.dist_checkpointing.format import schema
from megatron.core.dist_checkpointing.format.unpickler import safe_load
from megatron.core.durable_files import committed, write_json
from megatron.core.transformer.transformer_config import TransformerConfig

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_ENTRY = schema.record(
    {"shape": schema.SHAPE, "dtype": schema.one_of(*_DTYPES), "data_offsets": schema.sequence(schema.COUNT, 2, least=2)}
)
_HEADER = schema.mapping(_ENTRY, keys=schema.key)
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER = 100 << 20  # the limit of the reference implementation
_BLOCK = 16 << 20  # bytes that are read at once where only some columns are wanted


class SafetensorsFile:
    """The tensors of one file; raises ValueError where the file is truncated or its header is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, TensorInfo] = {}
        self._stored: dict[str, FileTensor] = {}
        with schema.open_file(path) as file:
            size, length = file.size, int.from_bytes(file.read(0, 8), "little")
            if size < 8 or length > min(_MAX_HEADER, size - 8):
                raise ValueError(f"{path} is truncated or no safetensors file: header of {length} bytes in {size}")
            header = schema.parse_json(file.read(8, length), f"{path}: the header", object_pairs_hook=self._once)
        end = 8 + length
        for name, entry in sorted(_HEADER(header, str(path)).items(), key=lambda item: item[1]["data_offsets"]):
            end = self._add(name, entry, 8 + length, end)
        if end != size:
            raise ValueError(f"{path} has {size} bytes, its header describes {end}: it is truncated or damaged")

    def _once(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """A dictionary whose names are all different."""
        result = dict(pairs)
        if len(result) < len(pairs):
            raise ValueError("a name is there twice")
        result.pop("__metadata__", None)
        return result

    def _add(self, name: str, entry: Any, base: int, expected: int) -> int:
        """Tensors lie back to back: this one begins at byte `expected`. Returns where it ends."""
        info = TensorInfo(tuple(entry["shape"]), _DTYPES[entry["dtype"]])
        start, stop = entry["data_offsets"]
        if stop - start != info.nbytes:
            raise ValueError(f"{self.path}: {name!r} has {stop - start} bytes, shape {info.shape} needs {info.nbytes}")
        if base + start != expected:
            raise ValueError(f"{self.path}: {name!r} begins at byte {base + start}, the one before ends at {expected}")
        self.tensors[name] = info
        self._stored[name] = FileTensor(self.path, base + start, info.dtype, info.shape)
        return base + int(stop)

    def read(self, name: str, offset: Shape, shape: Shape) -> torch.Tensor:
        """The box of `name` at `offset` with extent `shape`."""
        # The file is opened for each read: a model may have more shards than a process may have open files.
        stored, first = self._stored[name], offset[0] if offset else 0
        row = math.prod(stored.shape[1:])
        if shape[1:] == stored.shape[1:]:
            return stored.read_flat(first * row, math.prod(shape)).view(shape)
        # Of columns whole rows are read in blocks: one large read beats many small ones.
        result = torch.empty(shape, dtype=stored.dtype)
        columns = tuple(slice(o, o + n) for o, n in zip(offset[1:], shape[1:], strict=True))
        for part in result.split(max(1, _BLOCK // (row * stored.dtype.itemsize))):
            block = stored.read_flat(first * row, len(part) * row).view(len(part), *stored.shape[1:])
            part.copy_(block[(slice(None), *columns)])
            first += len(part)
        return result


class SafetensorsWriter:
    """Write one file, any rows of any tensor in any order and from several threads: their places are known before."""

    def __init__(self, path: Path, tensors: Mapping[str, TensorInfo]) -> None:
        self._tensors = dict(tensors)
        self._starts: dict[str, int] = {}
        self._lock = threading.Lock()
        self._missing = sum(info.nbytes for info in tensors.values())
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # older `transformers` insist on it
        position = 0
        for name, info in tensors.items():
            header[name] = {
                "dtype": _DTYPE_NAMES[info.dtype],
                "shape": list(info.shape),
                "data_offsets": [position, position + info.nbytes],
            }
            self._starts[name] = position
            position += info.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # data starts at a multiple of eight
        self._base = 8 + len(text)
        self._path = path
        path.write_bytes(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: torch.Tensor, row: int = 0) -> None:
        """`tensor` is the rows of `name` from `row` on."""
        info = self._tensors[name]
        assert tensor.dtype == info.dtype and tuple(tensor.shape[1:]) == info.shape[1:], (name, tensor.shape)
        position = row * math.prod(info.shape[1:]) * info.dtype.itemsize
        assert position + tensor.nbytes <= info.nbytes, (name, row, tensor.shape)
        # Relative to the tensor until here, in the file from here on.
        position += self._base + self._starts[name]
        write_at(self._path, tensor.contiguous(), position)
        with self._lock:
            self._missing -= tensor.nbytes

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        assert kind is not None or not self._missing, f"{self._missing} bytes of {self._path} were not written"


class TorchFile:
    """`pytorch_model.bin` of old repositories, read without running anything."""

    def __init__(self, path: Path) -> None:
        state = schema.mapping(schema.anything, keys=schema.key)(safe_load(path), str(path))
        self._state = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        self.tensors = {name: TensorInfo(tuple(value.shape), value.dtype) for name, value in self._state.items()}

    def read(self, name: str, offset: Shape, shape: Shape) -> torch.Tensor:
        return self._state[name][tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))].clone()


class ScaledMatrix:
    """A matrix of 8-bit floats with a scale for each block of it, seen as what is computed with: stored * scale.

    (Source: DeepSeek-V3's files, whose scales are called `weight_scale_inv`.)
    """

    def __init__(
        self, name: str, file: TensorFile, scales: TensorFile, block: Sequence[int], dtype: torch.dtype
    ) -> None:
        self._file, self._scales, self._block = file, scales, block
        stored, scale = file.tensors[name], scales.tensors[name + SCALES]
        wanted = tuple(-(-n // size) for n, size in zip(stored.shape, block, strict=False))
        if len(stored.shape) != 2 or scale.shape != wanted or scale.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"{name} of shape {list(stored.shape)} has scales in {scale.dtype} of shape {list(scale.shape)}, but "
                f"blocks of {list(block)} need floating-point numbers of shape {list(wanted)}"
            )
        self.tensors: dict[str, TensorInfo] = {name: TensorInfo(stored.shape, dtype)}

    def read(self, name: str, offset: Shape, shape: Shape) -> torch.Tensor:
        scales = self._scales.read(name + SCALES, (0, 0), self._scales.tensors[name + SCALES].shape).float()
        rows, columns = (torch.arange(o, o + n) // size for o, n, size in zip(offset, shape, self._block, strict=True))
        values = self._file.read(name, offset, shape).float() * scales[rows][:, columns]
        return values.to(self.tensors[name].dtype)


SCALES = "_scale_inv"
_QUANTIZATION = schema.record(
    {"quant_method": schema.text(256), "weight_block_size?": schema.sequence(schema.integer(1), 2, least=2)}
)


def scaled_blocks(quantization: Any) -> Sequence[int]:
    """Rows and columns of a block with a scale, as `quantization_config` says; ValueError for other kinds."""
    _QUANTIZATION(quantization, "config.json: quantization_config")
    block = quantization.get("weight_block_size")
    if quantization["quant_method"] != "fp8" or block is None:
        raise ValueError(
            f"config.json: quantization_config of {schema.shown(quantization['quant_method'])} is not supported, only "
            "fp8 with weight_block_size is: load the model in transformers with dequantize=True in its quantization "
            "config, save and convert that; or, if nothing is quantized, give --hf-ignore-fields quantization_config"
        )
    size: Sequence[int] = block
    return size


def dequantized(files: Mapping[str, TensorFile], block: Sequence[int], dtype: torch.dtype) -> dict[str, TensorFile]:
    """`files` with matrices in `dtype` in place of 8-bit ones and their scales. ValueError where these do not fit."""
    result = {name: file for name, file in files.items() if not name.endswith(SCALES)}
    for name in [name for name in files if name.endswith(SCALES)]:
        matrix = name.removesuffix(SCALES)
        if matrix not in files:
            raise ValueError(f"{name} is there, but not {matrix}, which it is for")
        result[matrix] = ScaledMatrix(matrix, files[matrix], files[name], block, dtype)
    return result


TensorFile = SafetensorsFile | TorchFile | ScaledMatrix
_INDEX = schema.record({"weight_map": schema.mapping(schema.file_name, keys=schema.key)})
_KINDS: dict[str, Callable[[Path], TensorFile]] = {"model.safetensors": SafetensorsFile, "pytorch_model.bin": TorchFile}


def open_weights(directory: Path) -> dict[str, TensorFile]:
    """Tensor name -> the file that holds it.

    Raises ValueError where a shard is missing, truncated, or lacks a tensor that the index promises.
    """
    for name, kind in _KINDS.items():
        index = directory / f"{name}.index.json"
        if index.exists():
            return _open_shards(directory, index, kind)
        if (directory / name).exists():
            file = kind(directory / name)
            return dict.fromkeys(file.tensors, file)
    raise ValueError(
        f"{directory} has neither model.safetensors nor model.safetensors.index.json (nor pytorch_model.bin)"
    )


def _open_shards(directory: Path, index: Path, kind: Callable[[Path], TensorFile]) -> dict[str, TensorFile]:
    weight_map = _INDEX(schema.read_json(index), str(index))["weight_map"]
    paths = {name: schema.named_file(directory, name, str(index)) for name in sorted(set(weight_map.values()))}
    missing = [name for name, path in paths.items() if not path.exists()]
    if missing:
        raise ValueError(f"{directory} lacks {len(missing)} of {len(paths)} shards: {', '.join(missing)}")
    files = {name: kind(path) for name, path in paths.items()}
    for tensor, name in weight_map.items():
        if tensor not in files[name].tensors:
            raise ValueError(f"{index} places {tensor} in {name}, which does not have it")
    return {tensor: files[name] for tensor, name in weight_map.items()}


_KEY = re.compile(r"(?:decoder\.layers\.(\d+)\.)?(.*?)(weight|bias|softmax_offset)")


@dataclass(frozen=True)
class StoredParameter:
    """A row for one tensor of one model, or for the matrix of one expert: where exactly its values are."""

    key: str
    lead: Shape  # the number of the expert, if it is one's
    shape: Shape  # without that axis
    names: tuple[str, ...]
    row_map: RowMap
    transposed: bool = False
    packed: int | None = None  # in tensors of so many experts

    def stored_shapes(self) -> list[Shape]:
        shapes = [(rows, *self.shape[1:]) for rows in stored_rows(self.row_map)]
        lead = () if self.packed is None else (self.packed,)
        return [lead + (shape[::-1] if self.transposed else shape) for shape in shapes]


def stored_parameters(
    shapes: Mapping[str, Shape],
    rows: Mapping[str, Row],
    layers: str,
    config: TransformerConfig,
    has: Callable[[str], bool],
) -> list[StoredParameter]:
    """Every parameter among `shapes` that has a row; the names of layer N begin with `layers` and N.

    `has` says whether the files have a tensor: then it holds all experts.
    """
    parameters = []
    for key, shape in shapes.items():
        match = _KEY.fullmatch(key)
        if match is None or match[2] not in rows or (match[3] == "bias" and not rows[match[2]].biased):
            continue
        row, prefix = rows[match[2]], "" if match[1] is None else f"{layers}{match[1]}."
        if row.fused is not None and has(prefix + row.fused):
            parameters.append(StoredParameter(key, (), shape, (prefix + row.fused,), as_is(shape[0])))
            continue
        of_experts, suffix = row.packed or len(shape) == 3, row.suffixes.get(match[3], match[3])
        own = shape[1:] if of_experts else shape
        row_map = _row_map(row, own[0], config)
        form = row_map, row.transposed and len(own) == 2, shape[0] if row.packed else None
        for expert in range(shape[0]) if of_experts else [None]:
            names = tuple(prefix + name.replace("{e}", str(expert)) + suffix for name in row.names)
            parameters.append(StoredParameter(key, () if expert is None else (expert,), own, names, *form))
    return parameters


def _row_map(row: Row, rows: int, config: TransformerConfig) -> RowMap:
    heads = config.num_attention_heads, config.query_groups, config.head_dim
    if row.qkv:
        return qkv_apart(*heads) if len(row.names) == 3 else qkv_blocks(*heads, blocks=1)
    if row.alternating:
        return alternating(rows // 2, 2)
    return stacked(rows // len(row.names), len(row.names))


_RUN_BYTES = 16 << 20  # what a worker holds of a tensor, in the dtype it is read in (at most four bytes an element)


@dataclass(frozen=True)
class Outgoing:
    """The tensor `key` of a source, or an expert of it, and where it goes."""

    source: Source
    key: str
    part: StoredParameter
    dtype: torch.dtype

    def infos(self) -> dict[str, TensorInfo]:
        """The stored tensors."""
        shapes = zip(self.part.names, self.part.stored_shapes(), strict=True)
        return {name: TensorInfo(shape, self.dtype) for name, shape in shapes}

    @property
    def whole(self) -> bool:
        """Whether it is written at once: rows of the model are not rows of the file."""
        return self.part.transposed or self.part.packed is not None

    @property
    def rows_at_once(self) -> int:
        rows, elements = self.part.shape[0], math.prod(self.part.shape)
        return rows if self.whole else max(1, _RUN_BYTES // 4 * rows // max(1, elements))

    def write(self, writers: Mapping[str, SafetensorsWriter], first: int, progress: Progress) -> None:
        """The model rows from `first` on, as many as fit."""
        part, lead, rest = self.part, self.part.lead, self.part.shape[1:]
        count = min(self.rows_at_once, part.shape[0] - first)
        box = self.source.read(self.key, (*lead, first, *[0] * len(rest)), (*[1] * len(lead), count, *rest))
        rows = box.view(count, *rest).to(self.dtype)
        if self.whole:
            for number, name in enumerate(part.names):
                stored = pack_rows(part.row_map, number, rows)
                stored = stored.t() if part.transposed else stored
                if part.packed is None:
                    writers[name].write(name, stored)
                else:
                    writers[name].write(name, stored[None], lead[0])
        else:
            found = list(cut(part.row_map, first, first + count))
            for run, piece in zip(found, rows.split([run.rows for run in found]), strict=True):
                writers[part.names[run.source]].write(part.names[run.source], piece, run.start)
        progress(rows.nbytes)


def write_weight_files(
    directory: Path, stem: str, tensors: Sequence[Outgoing], max_size: int, workers: int, progress: Progress
) -> list[str]:
    """One file, or numbered shards of at most `max_size` bytes with an index; returns the names of the files."""
    shards = _shards({name: info for tensor in tensors for name, info in tensor.infos().items()}, max_size)
    files = [f"{stem}.safetensors"]
    if len(shards) > 1:
        files = [f"{stem}-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    # All shards are laid out first, since any worker may write to any of them; each is renamed when all are complete.
    with ExitStack() as stack:
        writers: dict[str, SafetensorsWriter] = {}
        for file, shard in zip(files, shards, strict=True):
            temporary = stack.enter_context(committed(directory / file))
            writers |= dict.fromkeys(shard, stack.enter_context(SafetensorsWriter(temporary, shard)))
        jobs = (
            partial(tensor.write, writers, first, progress)
            for tensor in tensors
            for first in range(0, tensor.part.shape[0], tensor.rows_at_once)
        )
        run_jobs(jobs, workers)
    if len(shards) > 1:
        _write_index(directory / f"{stem}.safetensors.index.json", files, shards)
    return files


def _shards(tensors: dict[str, TensorInfo], limit: int) -> list[dict[str, TensorInfo]]:
    """Filled in order; a tensor larger than the limit has a file of its own."""
    shards: list[dict[str, TensorInfo]] = [{}]
    size = 0
    for name, info in tensors.items():
        if shards[-1] and size + info.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = info
        size += info.nbytes
    return shards


def _write_index(path: Path, files: list[str], shards: list[dict[str, TensorInfo]]) -> None:
    infos = [info for shard in shards for info in shard.values()]
    metadata = {
        "total_size": sum(info.nbytes for info in infos),
        "total_parameters": sum(info.nbytes // info.dtype.itemsize for info in infos),
    }
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    write_json(path, {"metadata": metadata, "weight_map": weight_map})

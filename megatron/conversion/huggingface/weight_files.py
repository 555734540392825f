"""The weight files of a Hugging Face directory: one file or shards with an index, safetensors or
pickles of torch.

Boxes of safetensors files are read without mapping the file, and files are written as a stream.
Format (https://github.com/huggingface/safetensors): u64 length of the header, the header as JSON
`{name: {"dtype", "shape", "data_offsets"}}`, then the row-major data. Memory is one piece of one
tensor both ways: mapped pages would count as resident, and the library's writer wants all tensors
of a file at once. Its `get_slice` was measured for the reader: rows came at a tenth of the speed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch

from megatron.conversion.huggingface.parameters import Row
from megatron.conversion.model_space.pieces import (
    ReadRegion,
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
from megatron.core.dist_checkpointing import FileTensor, safe_load
from megatron.core.dist_checkpointing.format import schema
from megatron.core.dist_checkpointing.mapping import narrow
from megatron.core.durable_files import committed, write_json
from megatron.core.transformer.transformer_config import TransformerConfig

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_ENTRY = schema.record(
    {
        "shape": schema.SHAPE,
        "dtype": schema.one_of(*_DTYPES),
        "data_offsets": schema.sequence(schema.COUNT, 2, least=2),
    }
)
_HEADER = schema.mapping(_ENTRY, keys=schema.key)
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER = 100 << 20  # the limit of the reference implementation
_BLOCK = 16 << 20  # bytes that are read at once where only some columns are wanted


class Stored(NamedTuple):
    """A tensor in a file; `read(offset, shape)` gives any box of it."""

    shape: Shape
    dtype: torch.dtype
    read: ReadRegion


def open_safetensors(path: Path) -> dict[str, Stored]:
    """The tensors of one file; raises ValueError where it is truncated or its header is damaged."""
    with schema.open_file(path) as file:
        size = file.size
        length = int.from_bytes(file.read(0, 8), "little")
        if size < 8 or length > min(_MAX_HEADER, size - 8):
            raise ValueError(
                f"{path} is truncated or no safetensors file: header of {length} bytes in {size}"
            )
        header = schema.parse_json(
            file.read(8, length), f"{path}: the header", object_pairs_hook=_once
        )
    tensors: dict[str, Stored] = {}
    base = end = 8 + length
    for name, entry in sorted(
        _HEADER(header, str(path)).items(), key=lambda item: item[1]["data_offsets"]
    ):
        info = TensorInfo(tuple(entry["shape"]), _DTYPES[entry["dtype"]])
        start, stop = (base + place for place in entry["data_offsets"])
        if stop - start != info.nbytes:
            raise ValueError(
                f"{path}: {name!r} has {stop - start} bytes, shape {info.shape} needs {info.nbytes}"
            )
        if start != end:  # tensors lie back to back
            raise ValueError(
                f"{path}: {name!r} begins at byte {start}, the one before ends at {end}"
            )
        place = FileTensor(path, start, info.dtype, info.shape)
        tensors[name] = Stored(info.shape, info.dtype, partial(_read_box, place))
        end = stop
    if end != size:
        raise ValueError(
            f"{path} has {size} bytes, its header describes {end}: it is truncated or damaged"
        )
    return tensors


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A dictionary whose names are all different."""
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a name is there twice")
    result.pop("__metadata__", None)
    return result


def _read_box(stored: FileTensor, offset: Shape, shape: Shape) -> torch.Tensor:
    # The file is opened for each read: a model may have more shards than a process may have open
    # files.
    first = offset[0] if offset else 0
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


def open_torch_file(path: Path) -> dict[str, Stored]:
    """`pytorch_model.bin` of old repositories, read without running anything."""

    def stored(tensor: torch.Tensor) -> Stored:
        return Stored(tuple(tensor.shape), tensor.dtype, lambda *box: narrow(tensor, *box).clone())

    state = schema.mapping(schema.anything, keys=schema.key)(safe_load(path), str(path))
    return {name: stored(value) for name, value in state.items() if isinstance(value, torch.Tensor)}


SCALES = "_scale_inv"
_QUANTIZATION = schema.record(
    {
        "quant_method": schema.text(256),
        "weight_block_size?": schema.sequence(schema.integer(1), 2, least=2),
    }
)


def scaled_blocks(quantization: Any) -> Sequence[int]:
    """Rows and columns of a block with a scale, as `quantization_config` says; ValueError for other
    kinds.
    """
    _QUANTIZATION(quantization, "config.json: quantization_config")
    block = quantization.get("weight_block_size")
    if quantization["quant_method"] != "fp8" or block is None:
        raise ValueError(
            f"config.json: quantization_config of {schema.format_value(quantization['quant_method'])} "
            "is not supported, only "
            "fp8 with weight_block_size is: load the model in transformers with dequantize=True in its quantization "
            "config, save and convert that; or, if nothing is quantized, give --hf-ignore-fields quantization_config"
        )
    size: Sequence[int] = block
    return size


def dequantized(
    tensors: Mapping[str, Stored], block: Sequence[int], dtype: torch.dtype
) -> dict[str, Stored]:
    """`tensors` with matrices in `dtype` in place of 8-bit ones and their scales. ValueError where these do not fit."""
    result = {name: tensor for name, tensor in tensors.items() if not name.endswith(SCALES)}
    for name in (name for name in tensors if name.endswith(SCALES)):
        matrix = name.removesuffix(SCALES)
        if matrix not in result:
            raise ValueError(f"{name} is there, but not {matrix}, which it is for")
        result[matrix] = _scaled(matrix, tensors[matrix], tensors[name], block, dtype)
    return result


def _scaled(
    name: str, stored: Stored, scales: Stored, block: Sequence[int], dtype: torch.dtype
) -> Stored:
    """A matrix of 8-bit floats with a scale for each block of it, as what is computed with: stored
    * scale.

    (Source: DeepSeek-V3's files, whose scales are called `weight_scale_inv`.)
    """
    wanted = tuple(-(-n // size) for n, size in zip(stored.shape, block, strict=False))
    if (
        len(stored.shape) != 2
        or scales.shape != wanted
        or scales.dtype not in (torch.float32, torch.bfloat16)
    ):
        raise ValueError(
            f"{name} of shape {list(stored.shape)} has scales in {scales.dtype} of shape {list(scales.shape)}, but "
            f"blocks of {list(block)} need floating-point numbers of shape {list(wanted)}"
        )

    def read(offset: Shape, shape: Shape) -> torch.Tensor:
        factors = scales.read((0, 0), scales.shape).float()
        rows, columns = (
            torch.arange(o, o + n) // size for o, n, size in zip(offset, shape, block, strict=True)
        )
        return (stored.read(offset, shape).float() * factors[rows][:, columns]).to(dtype)

    return Stored(stored.shape, dtype, read)


_INDEX = schema.record({"weight_map": schema.mapping(schema.file_name, keys=schema.key)})
_KINDS: dict[str, Callable[[Path], dict[str, Stored]]] = {
    "model.safetensors": open_safetensors,
    "pytorch_model.bin": open_torch_file,
}


def open_weights(directory: Path) -> dict[str, Stored]:
    """The tensors of a model by name.

    Raises ValueError where a shard is missing, truncated, or lacks a tensor that the index
    promises.
    """
    for name, open_file in _KINDS.items():
        index = directory / f"{name}.index.json"
        if index.exists():
            return _open_shards(directory, index, open_file)
        if (directory / name).exists():
            return open_file(directory / name)
    raise ValueError(
        f"{directory} has neither model.safetensors nor model.safetensors.index.json (nor pytorch_model.bin)"
    )


def _open_shards(
    directory: Path, index: Path, open_file: Callable[[Path], dict[str, Stored]]
) -> dict[str, Stored]:
    weight_map = _INDEX(schema.read_json(index), str(index))["weight_map"]
    paths = {
        name: schema.named_file(directory, name, str(index))
        for name in sorted(set(weight_map.values()))
    }
    missing = [name for name, path in paths.items() if not path.exists()]
    if missing:
        raise ValueError(
            f"{directory} lacks {len(missing)} of {len(paths)} shards: {', '.join(missing)}"
        )
    shards = {name: open_file(path) for name, path in paths.items()}
    for tensor, name in weight_map.items():
        if tensor not in shards[name]:
            raise ValueError(f"{index} places {tensor} in {name}, which does not have it")
    return {tensor: shards[name][tensor] for tensor, name in weight_map.items()}


_KEY = re.compile(r"(?:decoder\.layers\.(\d+)\.)?(.*?)(weight|bias|softmax_offset)")


@dataclass(frozen=True)
class StoredParameter:
    """A row for one tensor of one model, or for the matrix of one expert: where exactly its values
    are.
    """

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
) -> Iterator[StoredParameter]:
    """Yield every parameter in `shapes` that has a row, one per expert where experts are separate.

    Names of layer N start with `layers` and N. `has(name)` reports whether the files contain a
    tensor; the fused form of experts is used where it exists. A generator, because config.json may
    name 1e5 experts in each of 1e4 layers: callers stop at the first tensor that is missing.
    """
    for key, shape in shapes.items():
        match = _KEY.fullmatch(key)
        if match is None or match[2] not in rows:
            continue
        layer, module, kind = match.groups()
        row = rows[module]
        if kind == "bias" and not row.biased:
            continue
        prefix = "" if layer is None else f"{layers}{layer}."
        if row.fused is not None and has(prefix + row.fused):
            yield StoredParameter(key, (), shape, (prefix + row.fused,), as_is(shape[0]))
            continue
        suffix = row.suffixes.get(kind, kind)
        if not row.packed and len(shape) < 3:
            names = tuple(prefix + name + suffix for name in row.names)
            row_map = _row_map(row, shape[0], config)
            transposed = row.transposed and len(shape) == 2
            yield StoredParameter(key, (), shape, names, row_map, transposed)
            continue
        # Experts: the first dimension of the model's parameter counts them.
        count, *rest = shape
        row_map = _row_map(row, rest[0], config)
        transposed = row.transposed and len(rest) == 2
        packed = count if row.packed else None
        for expert in range(count):
            names = tuple(prefix + name.replace("{e}", str(expert)) + suffix for name in row.names)
            yield StoredParameter(key, (expert,), tuple(rest), names, row_map, transposed, packed)


def _row_map(row: Row, rows: int, config: TransformerConfig) -> RowMap:
    heads = config.num_attention_heads, config.query_groups, config.head_dim
    if row.qkv:
        return qkv_apart(*heads) if len(row.names) == 3 else qkv_blocks(*heads, blocks=1)
    if row.alternating:
        return alternating(rows // 2, 2)
    return stacked(rows // len(row.names), len(row.names))


_RUN_BYTES = (
    16 << 20
)  # what a worker holds of a tensor, in the dtype it is read in (at most four bytes an element)


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
        rows = self.part.shape[0]
        elements = math.prod(self.part.shape)
        return rows if self.whole else max(1, _RUN_BYTES // 4 * rows // max(1, elements))

    def write(self, files: Mapping[str, SafetensorsWriter], first: int, progress: Progress) -> None:
        """The model rows from `first` on, as many as fit; `files`: where each stored tensor is."""
        part = self.part
        lead = self.part.lead
        rest = self.part.shape[1:]
        count = min(self.rows_at_once, part.shape[0] - first)
        box = self.source.read(
            self.key, (*lead, first, *[0] * len(rest)), (*[1] * len(lead), count, *rest)
        )
        rows = box.view(count, *rest).to(self.dtype)
        if self.whole:
            for number, name in enumerate(part.names):
                stored = pack_rows(part.row_map, number, rows)
                stored = stored.t() if part.transposed else stored
                if part.packed is None:
                    files[name].write(name, stored)
                else:
                    files[name].write(name, stored[None], lead[0])
        else:
            found = list(cut(part.row_map, first, first + count))
            for run, piece in zip(found, rows.split([run.rows for run in found]), strict=True):
                name = part.names[run.source]
                files[name].write(name, piece, run.start)
        progress(rows.nbytes)


class SafetensorsWriter:
    """A file of these tensors: any rows of any of them may be written next, by any thread.

    Raises AssertionError for rows that are not theirs and, when the file is closed, if bytes of it
    were not written.
    """

    def __init__(self, path: Path, tensors: Mapping[str, TensorInfo]) -> None:
        self._path = path
        self._tensors = dict(tensors)
        self._starts: dict[str, int] = {}
        header: dict[str, Any] = {
            "__metadata__": {"format": "pt"}
        }  # older `transformers` insist on it
        end = 0
        for name, info in tensors.items():
            start = end
            end = end + info.nbytes
            dtype = _DTYPE_NAMES[info.dtype]
            header[name] = {"dtype": dtype, "shape": list(info.shape), "data_offsets": [start, end]}
            self._starts[name] = start
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # data starts at a multiple of eight
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        self._base = 8 + len(text)
        self._missing = end
        self._lock = Lock()

    def write(self, name: str, rows: torch.Tensor, first: int = 0) -> None:
        """The rows of `name` from `first` on."""
        info = self._tensors[name]
        assert rows.dtype == info.dtype and tuple(rows.shape[1:]) == info.shape[1:], (
            name,
            rows.dtype,
            rows.shape,
        )
        start = first * rows[:1].nbytes if rows.dim() else 0
        assert start + rows.nbytes <= info.nbytes, (name, first, rows.shape)
        write_at(self._path, rows.contiguous(), self._base + self._starts[name] + start)
        with self._lock:
            self._missing -= rows.nbytes

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        assert kind is not None or not self._missing, (
            f"{self._missing} bytes of {self._path} were not written"
        )


def write_weight_files(
    directory: Path,
    stem: str,
    tensors: Sequence[Outgoing],
    max_size: int,
    workers: int,
    progress: Progress,
) -> list[str]:
    """One file, or numbered shards of at most `max_size` bytes with an index; returns the names of
    the files.
    """
    shards = _shards(
        {name: info for tensor in tensors for name, info in tensor.infos().items()}, max_size
    )
    files = [f"{stem}.safetensors"]
    if len(shards) > 1:
        files = [f"{stem}-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    # All shards are laid out first, since any worker may write to any of them; each is renamed when
    # all are complete.
    with ExitStack() as stack:
        writers: dict[str, SafetensorsWriter] = {}
        for file, shard in zip(files, shards, strict=True):
            path = stack.enter_context(committed(directory / file))
            writers |= dict.fromkeys(shard, stack.enter_context(SafetensorsWriter(path, shard)))
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

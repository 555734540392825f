"""The weight files of a Hugging Face directory: one file, or shards with an index.

They are safetensors, or, in old repositories, pickles of torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megatron.conversion.huggingface.other_layouts import join_consolidated, open_dcp
from megatron.conversion.huggingface.quantized_weights import (
    BLOCK_SIZE,
    SCALES,
    count_blocks,
    quantize,
)
from megatron.conversion.huggingface.safetensors_files import (
    SafetensorsWriter,
    Stored,
    open_safetensors,
)
from megatron.conversion.huggingface.stored_parameters import StoredParameter
from megatron.conversion.model_space.pieces import (
    cut_runs,
    is_bitwise_equal,
    pack_rows,
    read_stored_rows,
    run_jobs,
)
from megatron.core.dist_checkpointing.files import METADATA
from megatron.core.dist_checkpointing.mapping import Shape, TensorInfo, cut_rows, narrow
from megatron.core.dist_checkpointing.saving.commit import Progress
from megatron.core.durable_files import committed, encode_json, write_json
from megatron.core.object_path import ObjectPath
from megatron.core.run_checkpoint.keys import CONSOLIDATED, foreign_name
from megatron.core.run_checkpoint.source import Source
from megatron.core.safe_files import safe_load, schema
from megatron.core.safe_files.reading import named_file, read_json

_INDEX = schema.record({"weight_map": schema.mapping(schema.file_name, keys=schema.key)})
_ZERO_SCRIPT = "zero_to_fp32.py"  # DeepSpeed saves it next to its files
_PICKLE = schema.mapping(schema.anything, keys=schema.key)


def open_torch_file(path: Path) -> dict[str, Stored]:
    """Return the tensors of a `pytorch_model.bin`, read without running anything."""
    tensors: dict[str, Stored] = {}
    for name, value in _PICKLE(safe_load(path), str(path)).items():
        if isinstance(value, torch.Tensor):
            read = partial(_copy_box, value)
            tensors[name] = Stored(tuple(value.shape), value.dtype, read)
    return tensors


def _copy_box(tensor: torch.Tensor, offset: Shape, shape: Shape) -> torch.Tensor:
    return narrow(tensor, offset, shape).clone()


_OPENERS: dict[str, Callable[[Path], dict[str, Stored]]] = {
    "model.safetensors": open_safetensors,
    "pytorch_model.bin": open_torch_file,
}


def open_weights(directory: Path) -> dict[str, Stored]:
    """Return the tensors of a model by name.

    Raises ValueError where a shard is missing or truncated, lacks a tensor of the index, or has one
    that the index does not list, and for an index next to a file of the whole model.
    """
    for name, open_file in _OPENERS.items():
        index = directory / f"{name}.index.json"
        if index.exists():
            return _open_shards(directory, index, open_file)
        if (directory / name).exists():
            return open_file(directory / name)
    # Layouts of other programs.
    consolidated = sorted(directory.glob(CONSOLIDATED))
    if consolidated:
        return join_consolidated([open_torch_file(path) for path in consolidated], str(directory))
    if (directory / METADATA).exists():
        return open_dcp(directory)
    hint = ""
    if (directory / _ZERO_SCRIPT).exists():
        # The trainer of transformers, without stage3_gather_16bit_weights_on_model_save.
        hint = f". With ZeRO-3, only DeepSpeed has saved it: run {_ZERO_SCRIPT} in that directory"
    raise ValueError(
        f"{directory} has neither model.safetensors nor model.safetensors.index.json "
        f"(nor pytorch_model.bin){hint}"
    )


def _open_shards(
    directory: Path, index: Path, open_file: Callable[[Path], dict[str, Stored]]
) -> dict[str, Stored]:
    """Return the tensors of all shards that the index lists."""
    weight_map = _INDEX(read_json(index), str(index))["weight_map"]
    paths: dict[str, Path] = {}
    for name in sorted(set(weight_map.values())):
        paths[name] = named_file(directory, name, str(index))
    missing = [name for name, path in paths.items() if not path.exists()]
    if missing:
        raise ValueError(
            f"{directory} lacks {len(missing)} of {len(paths)} shards: {', '.join(missing)}"
        )
    _check_shards_listed(directory, index, paths)
    # Programs disagree about which of the two has precedence: transformers ignores the index.
    whole = index.name.removesuffix(".index.json")
    if whole not in paths and (directory / whole).exists():
        raise ValueError(
            f"{directory} contains two models, {whole} and the shards of {index.name}: remove the "
            "files of one of them"
        )
    # Open every file once, then look up each tensor in its file.
    shards = {name: open_file(path) for name, path in paths.items()}
    tensors: dict[str, Stored] = {}
    for tensor, name in weight_map.items():
        if tensor not in shards[name]:
            raise ValueError(f"{index} places {tensor} in {name}, which does not have it")
        tensors[tensor] = shards[name][tensor]
    _check_listed(index, tensors, shards)
    _check_repeated(index, weight_map, shards)
    return tensors


def _check_shards_listed(directory: Path, index: Path, listed: Collection[str]) -> None:
    """Raise ValueError for shards of the same save that the index does not list."""
    saves = {re.sub(r"-\d+-of-", "-*-of-", name) for name in listed}
    shard_names: set[str] = set()
    for pattern in saves:
        if "-*-of-" in pattern:
            shard_names.update(path.name for path in directory.glob(pattern))
    unlisted = sorted(shard_names.difference(listed))
    if unlisted:
        raise ValueError(
            f"{index} does not list {len(unlisted)} of {len(shard_names)} shards: "
            f"{', '.join(unlisted)}"
        )


def _check_listed(
    index: Path, listed: Mapping[str, Stored], shards: Mapping[str, Mapping[str, Stored]]
) -> None:
    """Raise ValueError for tensors of the shards that the index does not list."""
    unlisted = []
    for shard in shards.values():
        unlisted += [tensor for tensor in shard if tensor not in listed]
    if unlisted:
        raise ValueError(
            f"{index} does not list {len(unlisted)} tensors of its shards, e.g. {unlisted[0]}: "
            "index and shards are of different saves, or the index is incomplete"
        )


def _check_repeated(
    index: Path, weight_map: Mapping[str, str], shards: Mapping[str, Mapping[str, Stored]]
) -> None:
    """Raise ValueError if shards have different values of a tensor.

    transformers ignores the index and takes the last shard.
    """
    for name, shard in shards.items():
        for tensor, value in shard.items():
            listed = weight_map[tensor]
            if listed != name and not _is_equal(value, shards[listed][tensor]):
                raise ValueError(
                    f"{index} places {tensor} in {listed}, and {name} has another value of it: "
                    "programs disagree about which one is used. Remove the wrong one"
                )


def _is_equal(first: Stored, second: Stored) -> bool:
    """Return whether two tensors are equal bitwise; a few rows are read at a time."""
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    for offset, shape in cut_rows(first.shape, first.dtype.itemsize, _RUN_BYTES):
        if not is_bitwise_equal(first.read(offset, shape), second.read(offset, shape)):
            return False
    return True


def check_weight_files(directory: Path, tensors: Sequence[OutgoingTensor]) -> None:
    """Read the headers of the weight files back: they must contain exactly `tensors`.

    Raises ValueError otherwise, or if the index and the files do not list the same tensors.
    """
    expected: dict[str, TensorInfo] = {}
    for tensor in tensors:
        expected |= tensor.stored_tensors()
    written = {}
    for name, weight in open_weights(directory).items():
        written[name] = TensorInfo(weight.shape, weight.dtype)
    if written != expected:
        differing = sorted(name for name, _ in written.items() ^ expected.items())
        raise ValueError(
            f"{directory}: {len(written)} tensors were written, {len(expected)} were expected; "
            f"{differing[0]} differs"
        )


# Bytes of a tensor that a worker holds, in the dtype it is read in (at most four bytes an element).
_RUN_BYTES = 16 << 20


@dataclass(frozen=True)
class Outgoing:
    """A tensor of a source, or one expert of it, and its location in the files."""

    source: Source
    key: str
    parameter: StoredParameter
    dtype: torch.dtype

    def stored_tensors(self) -> dict[str, TensorInfo]:
        """Return shape and dtype of the tensors in the files, by name."""
        tensors = {}
        for name, shape in zip(self.parameter.names, self.parameter.stored_shapes(), strict=True):
            tensors[name] = TensorInfo(shape, self.dtype)
        return tensors

    @property
    def is_written_at_once(self) -> bool:
        """Return whether rows of the model differ from rows of the file."""
        parameter = self.parameter
        differs = parameter.transposed or parameter.matrix_rows > 0 or parameter.skips_rows
        return differs or parameter.packed is not None

    @property
    def rows_at_once(self) -> int:
        """Number of rows that one job writes."""
        rows = self.parameter.shape[0]
        if self.is_written_at_once:
            return rows
        elements = max(1, math.prod(self.parameter.shape))
        max_elements = _RUN_BYTES // 4
        return max(1, max_elements * rows // elements)

    def list_jobs(
        self, files: Mapping[str, SafetensorsWriter], progress: Progress
    ) -> Iterator[Callable[[], None]]:
        """Yield jobs that write a few rows each."""
        for first in range(0, self.parameter.shape[0], self.rows_at_once):
            yield partial(self.write, files, first, progress)

    def write(self, files: Mapping[str, SafetensorsWriter], first: int, progress: Progress) -> None:
        """Write the model's rows from `first` on, at most `rows_at_once`, to the files by name."""
        parameter = self.parameter
        count = min(self.rows_at_once, parameter.shape[0] - first)
        rows = self._read_rows(first, count)
        if self.is_written_at_once:
            self._write_whole(files, rows)
        else:
            # Rows of one parameter may belong to several tensors, e.g., q, k and v.
            runs = list(cut_runs(parameter.row_map, first, first + count))
            runs_of_rows = rows.split([run.rows for run in runs])
            for run, values in zip(runs, runs_of_rows, strict=True):
                name = parameter.names[run.source]
                files[name].write(name, values, run.start)
        progress(rows.nbytes)

    def _write_whole(self, files: Mapping[str, SafetensorsWriter], rows: torch.Tensor) -> None:
        """Write a tensor, or one expert of it, whose files have other rows than the model."""
        parameter = self.parameter
        for index, name in enumerate(parameter.names):
            tensor = pack_rows(parameter.row_map, index, rows)
            if parameter.transposed:
                tensor = tensor.t()
            if parameter.matrix_rows:
                files[name].write(name, tensor.view(parameter.stored_shapes()[index]))
            elif parameter.packed is None:
                files[name].write(name, tensor)
            else:
                (expert,) = parameter.lead
                files[name].write(name, tensor[None], expert)

    def _read_rows(self, first: int, count: int) -> torch.Tensor:
        """Return rows of the model: [count, ...]."""
        lead = self.parameter.lead
        row_shape = self.parameter.shape[1:]
        offset = (*lead, first) + (0,) * len(row_shape)
        shape = (1,) * len(lead) + (count, *row_shape)
        return self.source.read(self.key, offset, shape).view(count, *row_shape).to(self.dtype)


@dataclass(frozen=True)
class OutgoingQuantized:
    """A matrix of a source, or of one expert of it, in fp8 with a scale for each block."""

    source: Source
    key: str
    parameter: StoredParameter

    def stored_tensors(self) -> dict[str, TensorInfo]:
        """Return shape and dtype of the matrices and their scales, by name."""
        tensors = {}
        for name, (rows, columns) in self._list_matrices():
            tensors[name] = TensorInfo((rows, columns), torch.float8_e4m3fn)
            scales = (count_blocks(rows), count_blocks(columns))
            tensors[name + SCALES] = TensorInfo(scales, torch.float32)
        return tensors

    def list_jobs(
        self, files: Mapping[str, SafetensorsWriter], progress: Progress
    ) -> Iterator[Callable[[], None]]:
        """Yield jobs that write a few rows of blocks each."""
        for index, (_, (rows, columns)) in enumerate(self._list_matrices()):
            # fp32, and its copies while it is quantized
            bytes_of_block_row = 4 * BLOCK_SIZE * columns
            step = BLOCK_SIZE * max(1, _RUN_BYTES // 4 // bytes_of_block_row)
            for first in range(0, rows, step):
                count = min(step, rows - first)
                yield partial(self._write, files, index, first, count, progress)

    def _list_matrices(self) -> list[tuple[str, tuple[int, int]]]:
        """Return name, rows and columns of each stored matrix."""
        matrices = []
        for name, shape in zip(self.parameter.names, self.parameter.stored_shapes(), strict=True):
            rows, columns = shape
            matrices.append((name, (rows, columns)))
        return matrices

    def _write(
        self,
        files: Mapping[str, SafetensorsWriter],
        index: int,
        first: int,
        count: int,
        progress: Progress,
    ) -> None:
        """Write `count` rows of stored matrix `index`, which start at a block."""
        name = self.parameter.names[index]
        rows = self._read_stored_rows(index, first, count)
        values, scales = quantize(rows, name)
        files[name].write(name, values, first)
        files[name + SCALES].write(name + SCALES, scales, first // BLOCK_SIZE)
        progress(rows.nbytes)

    def _read_stored_rows(self, index: int, first: int, count: int) -> torch.Tensor:
        """Return rows of stored matrix `index`: [count, columns]."""
        columns = self.parameter.shape[-1]
        lead = self.parameter.lead

        def read_rows(first: int, count: int) -> torch.Tensor:
            shape = (*(1,) * len(lead), count, columns)
            return self.source.read(self.key, (*lead, first, 0), shape).view(count, columns)

        result = torch.empty(count, columns, dtype=self.source.tensors[self.key].dtype)
        read_stored_rows(self.parameter.row_map, index, first, result, read_rows)
        return result


@dataclass(frozen=True)
class OutgoingForeign:
    """A tensor that the model does not have, written as it is."""

    source: Source
    key: str
    name: str  # in the files

    def stored_tensors(self) -> dict[str, TensorInfo]:
        """Return shape and dtype of the tensor by its name in the files."""
        return {self.name: self.source.tensors[self.key]}

    def list_jobs(
        self, files: Mapping[str, SafetensorsWriter], progress: Progress
    ) -> Iterator[Callable[[], None]]:
        """Yield jobs that write a few rows each."""
        info = self.source.tensors[self.key]
        if not info.shape:  # a scalar
            yield partial(self._write, files, (), (), progress)
            return
        rows, *row_shape = info.shape
        row_bytes = math.prod(row_shape) * info.dtype.itemsize
        if row_bytes == 0:
            return
        step = max(1, _RUN_BYTES // row_bytes)
        for first in range(0, rows, step):
            offset = (first,) + (0,) * len(row_shape)
            shape = (min(step, rows - first), *row_shape)
            yield partial(self._write, files, offset, shape, progress)

    def _write(
        self,
        files: Mapping[str, SafetensorsWriter],
        offset: Shape,
        shape: Shape,
        progress: Progress,
    ) -> None:
        """Write one box of whole rows."""
        rows = self.source.read(self.key, offset, shape)
        first = offset[0] if offset else 0
        files[self.name].write(self.name, rows, first)
        progress(rows.nbytes)


OutgoingTensor = Outgoing | OutgoingQuantized | OutgoingForeign


def write_weight_files(
    directory: Path,
    stem: str,
    tensors: Sequence[OutgoingTensor],
    max_size: int,
    workers: int,
    progress: Progress,
) -> list[str]:
    """Write one file, or numbered shards of at most `max_size` bytes with an index.

    Returns the names of the files.
    """
    infos: dict[str, TensorInfo] = {}
    for tensor in tensors:
        written = tensor.stored_tensors()
        if isinstance(tensor, OutgoingForeign) and not infos.keys().isdisjoint(written):
            raise ValueError(
                f"{foreign_name(tensor.key)} is a foreign tensor with the name of a parameter of "
                "the model: rename it (--rename) or leave foreign tensors out (--keep-foreign)"
            )
        infos |= written
    files = lay_out_weight_files(stem, infos, max_size)

    # Write them. Any worker may write to any shard, so all are created first, and renamed when all
    # are complete. An upload sends its bytes in order: with one worker, at most the rows of one
    # parameter wait for their turn.
    if isinstance(directory, ObjectPath):
        workers = 1
    with ExitStack() as stack:
        writers: dict[str, SafetensorsWriter] = {}
        for file, shard in files.items():
            path = directory / file
            if not isinstance(path, ObjectPath):
                path = stack.enter_context(committed(path))
            writer = stack.enter_context(SafetensorsWriter(path, shard))
            writers |= dict.fromkeys(shard, writer)
        jobs = (job for tensor in tensors for job in tensor.list_jobs(writers, progress))
        run_jobs(jobs, workers)
    write_index(directory, stem, files)
    return list(files)


def lay_out_weight_files(
    stem: str, tensors: Mapping[str, TensorInfo], max_size: int
) -> dict[str, dict[str, TensorInfo]]:
    """Return the tensors of each file by its name: one file, or numbered shards of at most
    `max_size` bytes.
    """
    shards = _split_into_shards(tensors, max_size)
    count = len(shards)
    if count == 1:
        return {f"{stem}.safetensors": shards[0]}
    files = {}
    for shard_number, shard in enumerate(shards, 1):
        files[f"{stem}-{shard_number:05d}-of-{count:05d}.safetensors"] = shard
    return files


def _split_into_shards(
    tensors: Mapping[str, TensorInfo], limit: int
) -> list[dict[str, TensorInfo]]:
    """Fill shards in order; a tensor larger than the limit has a file of its own."""
    shards: list[dict[str, TensorInfo]] = [{}]
    size = 0
    for name, info in tensors.items():
        if shards[-1] and size + info.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = info
        size += info.nbytes
    return shards


def write_index(directory: Path, stem: str, files: Mapping[str, Mapping[str, TensorInfo]]) -> None:
    """Write the index of a model of several files: the file of each tensor, and the total size."""
    if len(files) == 1:
        return
    weight_map: dict[str, str] = {}
    total_size = 0
    total_parameters = 0
    for file, shard in files.items():
        weight_map |= dict.fromkeys(shard, file)
        for info in shard.values():
            total_size += info.nbytes
            total_parameters += math.prod(info.shape)
    metadata = {"total_size": total_size, "total_parameters": total_parameters}
    path = directory / f"{stem}.safetensors.index.json"
    content = {"metadata": metadata, "weight_map": weight_map}
    if isinstance(path, ObjectPath):
        path.store.put(path.key, encode_json(content))
    else:
        write_json(path, content)

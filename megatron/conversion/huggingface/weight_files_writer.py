"""Writes tensors of model space as safetensors files, a few rows at a time, with several workers in one file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megatron.conversion.files import Progress, run_jobs
from megatron.conversion.huggingface.weight_files import SafetensorsWriter
from megatron.conversion.model_space.row_maps import RowMap, Run, pack_rows, runs
from megatron.conversion.model_space.source import TensorInfo
from megatron.core.durable_files import committed, write_json

_RUN_BYTES = 16 << 20  # what a worker holds of a tensor, in the dtype it is read in (at most four bytes an element)


@dataclass(frozen=True)
class Outgoing:
    """One tensor of model space, and the stored tensors that its rows go to."""

    names: Sequence[str]
    infos: Sequence[TensorInfo]
    row_map: RowMap
    transposed: bool
    rows: int
    row_elements: int
    read: Callable[[int, int], torch.Tensor]  # (first, count) -> model rows, in the dtype of `infos`

    def write_run(self, writers: dict[str, SafetensorsWriter], run: Run) -> None:
        rows = self.read(run.first, run.rows)
        for share in run.shares:
            name = self.names[share.source]
            writers[name].write(name, share.of(rows), share.at)

    def write_transposed(self, writers: dict[str, SafetensorsWriter]) -> None:
        """Whole: its rows are columns of the file."""
        tensor = self.read(0, self.rows)
        for number, name in enumerate(self.names):
            writers[name].write(name, pack_rows(self.row_map, number, tensor).t())


def write_weight_files(
    directory: Path, stem: str, tensors: Sequence[Outgoing], max_size: int, workers: int, progress: Progress
) -> list[str]:
    """One file, or numbered shards of at most `max_size` bytes with an index; returns the names of the files."""
    shards = _shards({name: info for t in tensors for name, info in zip(t.names, t.infos, strict=True)}, max_size)
    files = [f"{stem}.safetensors"]
    if len(shards) > 1:
        files = [f"{stem}-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    with ExitStack() as stack:
        writers: dict[str, SafetensorsWriter] = {}
        for file, shard in zip(files, shards, strict=True):
            temporary = stack.enter_context(committed(directory / file))
            writers |= dict.fromkeys(shard, stack.enter_context(SafetensorsWriter(temporary, shard)))
        run_jobs(_jobs(tensors, writers, progress), workers)
    if len(shards) > 1:
        _write_index(directory / f"{stem}.safetensors.index.json", files, shards)
    return files


def _jobs(
    tensors: Sequence[Outgoing], writers: dict[str, SafetensorsWriter], progress: Progress
) -> Iterator[Callable[[], None]]:
    for tensor in tensors:
        itemsize = tensor.infos[0].dtype.itemsize
        if tensor.transposed:
            nbytes = tensor.rows * tensor.row_elements * itemsize
            yield partial(_job, partial(tensor.write_transposed, writers), progress, nbytes)
            continue
        for run in runs(tensor.row_map, max(1, _RUN_BYTES // (4 * tensor.row_elements))):
            nbytes = run.rows * tensor.row_elements * itemsize
            yield partial(_job, partial(tensor.write_run, writers, run), progress, nbytes)


def _job(write: Callable[[], None], progress: Progress, nbytes: int) -> None:
    write()
    progress(nbytes)


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

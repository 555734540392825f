"""Loading a checkpoint of any format into the tensors of a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing import LoadReport, ShardedStateDict, ShardedTensor, fill
from megatron.core.dist_checkpointing.loading.load import RAISE, STRICTNESS, BoxReader
from megatron.core.dist_checkpointing.loading.reader import Request
from megatron.core.progress import ProgressBar
from megatron.core.run_checkpoint.keys import split_key
from megatron.core.run_checkpoint.native_reader import RunCheckpoint
from megatron.core.run_checkpoint.source import Source

logger = logging.getLogger(__name__)


class _SourceReader:
    """Adapts a `Source` to the loader's reader interface."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.metadata = self
        self.tensors = source.tensors
        self.objects: Collection[str] = ()
        if source.training is not None:
            # Generators are the only objects that other formats have.
            self.objects = source.training.rng
        self.bytes_needed = 0
        self.bytes_read = 0

    def read_into(self, requests: Sequence[Request], workers: int = 1) -> None:
        """Read in one thread: a `Source` need not support more."""
        for key, offset, target in requests:
            target.copy_(self._source.read(key, offset, tuple(target.shape)))
            self.bytes_needed += target.numel() * self.tensors[key].dtype.itemsize
            self.bytes_read = self.bytes_needed

    def read_object(self, key: str) -> Any:
        assert self._source.training is not None
        return self._source.training.rng[key]()


class _MainParametersFromWeights:
    """A reader that reads main parameters which the checkpoint lacks from its weights.

    Main parameters determine the weights of the run, so they must never keep their random initial
    values. An fp32 weight is its main parameter. The value of a bf16 or fp16 weight is rounded, so
    it is used only if `strictness` tolerates missing keys.
    """

    def __init__(self, reader: BoxReader, state: ShardedStateDict, strictness: str) -> None:
        self._reader = reader
        self.bytes_needed = 0
        self.bytes_read = 0
        self.metadata = self
        self.objects = reader.metadata.objects
        self.tensors: dict[str, Any] = dict(reader.metadata.tensors)
        self._weights: dict[str, str] = {}  # main parameter -> weight
        # An unknown value is an error of `fill`, which checks it.
        tolerates_missing = strictness not in STRICTNESS or STRICTNESS[strictness][0] != RAISE

        # Find the main parameters that the run wants and the checkpoint lacks.
        rounded = []
        for entry in state.values():
            weight, optimizer_state = split_key(entry.key)
            if optimizer_state != "param" or entry.key in self.tensors:
                continue
            if weight not in self.tensors:
                continue
            is_exact = self.tensors[weight].dtype == torch.float32
            if is_exact or tolerates_missing:
                self.tensors[entry.key] = self.tensors[weight]
                self._weights[entry.key] = weight
            if tolerates_missing and not is_exact:
                rounded.append(entry.key)
        if rounded:
            logger.warning(
                f"{len(rounded)} main parameters are not in the checkpoint, {rounded[0]} first: "
                "they are taken from its weights, which are rounded"
            )

    def is_substitute(self, key: str) -> bool:
        """Return whether the weight `key` is read as a main parameter."""
        return key in self._weights.values()

    def read_into(self, requests: Sequence[Request], workers: int = 1) -> None:
        stored_requests = []
        for request in requests:
            stored_key = self._weights.get(request.key, request.key)
            stored_requests.append(request._replace(key=stored_key))
        self._reader.read_into(stored_requests, workers)
        self.bytes_needed = self._reader.bytes_needed
        self.bytes_read = self._reader.bytes_read

    def read_object(self, key: str) -> Any:
        return self._reader.read_object(key)


def load_from_source(
    state: ShardedStateDict,
    source: Source,
    *,
    strictness: str = "raise_all",
    skip: Callable[[str], bool] = lambda key: False,
    parallelization_group: dist.ProcessGroup | None = None,
) -> LoadReport:
    """Fill the tensors of `state` in place from `source`. The options are those of `fill`.
    Collective.

    Raises CheckpointError on every rank if any rank fails; the tensors are undefined then.
    """
    # A checkpoint under its own keys is read directly, in parallel.
    source_reader: BoxReader = _SourceReader(source)
    if isinstance(source, RunCheckpoint):
        source_reader = source.reader
    reader = _MainParametersFromWeights(source_reader, state, strictness)

    # Rank 0 shows its own share: it represents those of the others.
    total = 0
    for entry in state.values():
        if isinstance(entry, ShardedTensor):
            total += sum(box.tensor.nbytes for box in entry.boxes)
    quiet = dist.is_initialized() and dist.get_rank() > 0
    with ProgressBar(
        f"loading {source.description}", total, count=lambda: source_reader.bytes_read, quiet=quiet
    ):
        return fill(
            state,
            reader,
            source.description,
            strictness=strictness,
            skip=lambda key: reader.is_substitute(key) or skip(key),
            parallelization_group=parallelization_group,
        )

"""Reader of a checkpoint in the native format, with the keys of the run that saved it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing import (
    CheckpointError,
    LoadReport,
    Reader,
    ShardedStateDict,
    ShardedTensor,
    fill,
    load_common,
)
from megatron.core.dist_checkpointing.files import COMMON as COMMON_FILE
from megatron.core.dist_checkpointing.loading.load import RAISE, STRICTNESS, BoxReader
from megatron.core.dist_checkpointing.loading.reader import Request
from megatron.core.progress import ProgressBar
from megatron.core.run_checkpoint.checks import COMMON
from megatron.core.run_checkpoint.common_state import find_param_groups, read_training_state
from megatron.core.run_checkpoint.keys import find_norm_key, is_hybrid, is_weight, split_key
from megatron.core.run_checkpoint.source import Source, TrainingState
from megatron.core.safe_files.schema import COUNT, number, record

logger = logging.getLogger(__name__)


def list_generators(reader: Reader) -> dict[str, Callable[[], Any]]:
    """Return a reader of each rank's random generators by key."""
    readers: dict[str, Callable[[], Any]] = {}
    for key in reader.metadata.objects:
        if key.startswith("rng_state/"):
            readers[key] = partial(reader.read_object, key)
    return readers


_POSITION = record({"iteration": COUNT, "num_floating_point_operations_so_far": number(0)})
_CONSUMED = record({"consumed_train_samples": COUNT, "consumed_valid_samples": COUNT})


class RunCheckpoint:
    """A torch_dist directory that a run of this program saved, with its own keys.

    Its keys are model space for every model. `common` is the content of its common.pt.

    In addition to the interface of a `Source` it has its `reader`, which resuming needs: it reads
    batches of boxes with several threads, and the objects that modules store (scales of fp8).
    """

    def __init__(
        self,
        directory: Path,
        common: Mapping[str, Any],
        verify: bool = True,
        waits_for_shards: bool = False,
    ) -> None:
        self.description = str(directory)
        if "args" not in common:
            raise CheckpointError(
                f"{directory} holds tensors, but not the arguments and the state of a training run"
            )

        # Arguments. A released model consists of weights alone.
        self.args: dict[str, Any] = dict(vars(common["args"]))
        is_released = "iteration" not in common and "optimizer" not in common
        if not is_released:
            _POSITION(common, f"{directory}: the state of the run")
            _CONSUMED(self.args, f"{directory}: the arguments of the run")

        # Tensors.
        self.reader = Reader(directory, verify=verify, waits_for_shards=waits_for_shards)
        self.unused: list[str] = []
        self.tensors = {key: self.reader.view(key) for key in self.reader.metadata.tensors}

        # Training state.
        groups = find_param_groups(common.get("optimizer"))
        self.training: TrainingState | None = read_training_state(common, self.args, groups)
        self.training.rng = list_generators(self.reader)


def open_run_checkpoint(
    directory: Path, verify: bool = True, waits_for_shards: bool = False
) -> RunCheckpoint | None:
    """Return the reader of a checkpoint that a run of this version saved, None for any other."""
    common = COMMON(load_common(directory, verify=verify), str(directory / COMMON_FILE))
    content_metadata = common.get("content_metadata") or {}
    if not content_metadata.get("non_homogeneous_layers"):
        return None
    run = RunCheckpoint(directory, common, verify, waits_for_shards)
    if not _has_current_keys(run.tensors) or run.args.get("foreign_mixers"):
        return None
    return run


def _has_current_keys(tensors: Collection[str]) -> bool:
    """Return whether the keys of all weights are those of this version.

    Earlier versions had another key for the norm before experts, and HybridModel has other keys.
    Only the reader of all forms knows them.
    """
    if is_hybrid(tensors):
        return False
    weights = filter(is_weight, tensors)
    return all(find_norm_key(key, tensors) == key for key in weights)


# ---- Loading a checkpoint of any format into the tensors of a run ----


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
        for key, box in requests:
            tensor = self.tensors[key]
            box.tensor.copy_(tensor.read(box.offset, box.shape))
            self.bytes_needed += box.tensor.numel() * tensor.dtype.itemsize
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
        stored_requests = [(self._weights.get(key, key), box) for key, box in requests]
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

"""Loading a run's state from any checkpoint: its own is a `Source` like the others, and one engine reads them all."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.conversion.megatron_lm.args import param_groups, training_state
from megatron.conversion.model_space.source import Shape, Source, TensorInfo, TrainingState
from megatron.core.dist_checkpointing import CheckpointError, LoadReport, Reader, ShardedStateDict, ShardedTensor, fill
from megatron.core.dist_checkpointing.format.schema import COUNT, number, record
from megatron.core.dist_checkpointing.loading.reader import Request
from megatron.core.progress import Progress

_POSITION = record({"iteration": COUNT, "num_floating_point_operations_so_far": number(0)})
_CONSUMED = record({"consumed_train_samples": COUNT, "consumed_valid_samples": COUNT})


class RunCheckpoint:
    """A torch_dist directory that a run of this program saved: its keys are model space, whatever the model is.

    `common` is the content of its common.pt. With `verify` all that is read is compared with the checksums.
    """

    def __init__(self, directory: Path, common: Mapping[str, Any], verify: bool = False) -> None:
        self.description = str(directory)
        if "args" not in common:
            raise CheckpointError(f"{directory} holds tensors, but not the arguments and the state of a training run")
        self.args: dict[str, Any] = dict(vars(common["args"]))
        if "iteration" in common or "optimizer" in common:  # else it is a released model, converted
            _POSITION(common, f"{directory}: the state of the run")
            _CONSUMED(self.args, f"{directory}: the arguments of the run")
        self.reader = Reader(directory, verify=verify)
        self.unused: list[str] = []
        stored = self.reader.metadata
        self.tensors = {key: TensorInfo(tensor.shape, tensor.dtype) for key, tensor in stored.tensors.items()}
        self.training: TrainingState | None = training_state(common, self.args, param_groups(common.get("optimizer")))
        generators = [key for key in stored.objects if key.startswith("rng_state/")]
        self.training.rng = {key: partial(self.reader.read_object, key) for key in generators}

    def read(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        return self.reader.read(key, offset, shape)


class _SourceReader:
    """What the engine reads a `Source` of another program by: tensors box by box, generators as objects."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.metadata = self
        self.tensors = source.tensors
        self.objects: Collection[str] = source.training.rng if source.training is not None else ()
        self.bytes_needed = self.bytes_read = 0

    def read_into(self, requests: Sequence[Request], workers: int = 1) -> None:
        """In one thread: sources make no promise about more."""
        for key, offset, target in requests:
            target.copy_(self._source.read(key, offset, tuple(target.shape)))
            self.bytes_needed += target.numel() * self.tensors[key].dtype.itemsize
            self.bytes_read = self.bytes_needed

    def read_object(self, key: str) -> Any:
        assert self._source.training is not None
        return self._source.training.rng[key]()


def load_from_source(state: ShardedStateDict, source: Source, **options: Any) -> LoadReport:
    """Fill the tensors of `state` in place from `source`; a collective. Options are those of `fill`.

    Raises CheckpointError on every rank if any rank fails; the tensors are undefined then.
    """
    reader = source.reader if isinstance(source, RunCheckpoint) else _SourceReader(source)
    total = sum(
        box.tensor.nbytes for entry in state.values() if isinstance(entry, ShardedTensor) for box in entry.boxes
    )
    quiet = dist.is_initialized() and dist.get_rank() > 0  # the first rank's share stands for all
    with Progress(f"loading {source.description}", total, count=lambda: reader.bytes_read, quiet=quiet):
        return fill(state, reader, source.description, **options)

"""Reader of a checkpoint in the native format, with the keys of the run that saved it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing import CheckpointError, Reader, load_common
from megatron.core.dist_checkpointing.files import COMMON as COMMON_FILE
from megatron.core.dist_checkpointing.files import COMMON_STATE
from megatron.core.dist_checkpointing.mapping import Shape, TensorInfo
from megatron.core.run_checkpoint.checks import COMMON
from megatron.core.run_checkpoint.common_state import find_param_groups, read_training_state
from megatron.core.run_checkpoint.keys import find_norm_key, is_hybrid, is_weight
from megatron.core.run_checkpoint.source import TrainingState
from megatron.core.safe_files.schema import COUNT, number, record


def read_common(reader: Reader, directory: Path, verify: bool = True) -> dict[str, Any]:
    """Return `common.pt`, or the object that replaces it in newer Megatron-LM."""
    common = load_common(directory, verify=verify)
    if not common and COMMON_STATE in reader.metadata.objects:
        common_state: dict[str, Any] = reader.read_object(COMMON_STATE)
        return common_state
    return common


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
        self.tensors: dict[str, TensorInfo] = {}
        for key, tensor in self.reader.metadata.tensors.items():
            self.tensors[key] = TensorInfo(tensor.shape, tensor.dtype)

        # Training state.
        groups = find_param_groups(common.get("optimizer"))
        self.training: TrainingState | None = read_training_state(common, self.args, groups)
        self.training.rng = list_generators(self.reader)

    def read(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        return self.reader.read(key, offset, shape)


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


def _has_current_keys(tensors: Mapping[str, TensorInfo]) -> bool:
    """Return whether the keys of all weights are those of this version.

    Earlier versions had another key for the norm before experts, and HybridModel has other keys.
    Only the reader of all forms knows them.
    """
    if is_hybrid(tensors):
        return False
    weights = filter(is_weight, tensors)
    return all(find_norm_key(key, tensors) == key for key in weights)

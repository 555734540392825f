"""Merging of checkpoints: the weighted sum of the parameters of checkpoints of one model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.conversion.model_space.foreign import foreign_name, list_foreign
from megatron.conversion.model_space.model import (
    compute_model_signature,
    model_config,
    read_vocabulary_rows,
)
from megatron.conversion.model_space.optimizer_states import full_precision_key, optimizer_states
from megatron.conversion.model_space.pieces import is_bitwise_equal
from megatron.conversion.model_space.views import SourceView
from megatron.core.dist_checkpointing import CheckpointDirectory
from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape
from megatron.core.run_checkpoint.formats import (
    NoCheckpointError,
    find_named_checkpoint,
    find_problem,
    is_checkpoint_itself,
    list_newest_first,
)
from megatron.core.run_checkpoint.keys import split_key
from megatron.core.run_checkpoint.source import Source
from megatron.core.transformer.transformer_config import flag_name

_SUM_TOLERANCE = 1e-6
SCHEDULES = ("uniform", "linear", "one_minus_sqrt", "ema:DECAY")


class WeightedInput(NamedTuple):
    """A checkpoint to merge."""

    path: str
    weight: float | None  # None: a schedule specifies it


# ---- Weights ----


def parse_input(text: str) -> WeightedInput:
    """Return the path and the weight of `PATH:WEIGHT`, or of `PATH` without a weight."""
    path, separator, weight_text = text.rpartition(":")
    try:
        weight = float(weight_text)
    except ValueError:
        return WeightedInput(text, None)
    if not separator or not path:
        return WeightedInput(text, None)
    if not math.isfinite(weight):
        raise ValueError(f"--input {text}: the weight must be a finite number")
    return WeightedInput(path, weight)


def compute_schedule_weights(schedule: str, count: int) -> list[float]:
    """Return the weights of `count` checkpoints, oldest first. They sum to 1.

    A merge with weights c[0], ..., c[count - 1] scales the update between checkpoints i - 1 and i
    by w[i] = c[i] + ... + c[count - 1], as a learning rate that decays along w does. So `linear`
    and `one_minus_sqrt` take w[i] from the decay of that name, with w[0] = 1 and w[count] = 0. A
    linear decay results in equal weights.
    """
    if schedule in ("uniform", "linear"):
        return [1 / count] * count

    # c[i] is the difference between two consecutive points of a curve between 0 and 1.
    name, _, parameter = schedule.partition(":")
    if name == "ema":
        decay = _parse_decay(schedule, parameter)
        # The average starts at the oldest checkpoint.
        sums = [0.0] + [decay ** (count - index) for index in range(1, count)] + [1.0]
        return [after - before for before, after in itertools.pairwise(sums)]
    if schedule == "one_minus_sqrt":
        decays = [1 - math.sqrt(index / count) for index in range(count + 1)]
        return [before - after for before, after in itertools.pairwise(decays)]
    raise ValueError(f"--schedule {schedule} is not one of {', '.join(SCHEDULES)}")


def _parse_decay(schedule: str, text: str) -> float:
    """Return the DECAY of `ema:DECAY`; raise ValueError unless it is at least 0 and below 1."""
    try:
        decay = float(text)
    except ValueError:
        decay = math.nan
    if not 0 <= decay < 1:
        raise ValueError(
            f"--schedule {schedule}: DECAY must be at least 0 and less than 1, e.g. ema:0.9"
        )
    return decay


def resolve_weights(
    inputs: Sequence[WeightedInput], schedule: str | None = None, normalize: bool = False
) -> list[float]:
    """Return the weights of `inputs`, which sum to 1."""
    # From a schedule.
    if schedule is not None:
        for item in inputs:
            if item.weight is not None:
                raise ValueError(
                    f"--schedule {schedule} and the weight of --input {item.path}:"
                    f"{item.weight:g} are mutually exclusive"
                )
        return compute_schedule_weights(schedule, len(inputs))

    # From the inputs.
    weights = []
    for item in inputs:
        if item.weight is None:
            raise ValueError(
                f"--input {item.path} has no weight: append one ({item.path}:0.5), or give "
                "--schedule"
            )
        weights.append(item.weight)

    # Their sum must be 1.
    total = math.fsum(weights)
    if normalize:
        if abs(total) < _SUM_TOLERANCE:
            raise ValueError(f"--normalize: the weights sum to {total:g} and cannot be scaled to 1")
        return [weight / total for weight in weights]
    if abs(total - 1) > _SUM_TOLERANCE:
        listed = ", ".join(f"{weight:g}" for weight in weights)
        raise ValueError(
            f"the weights {listed} sum to {total:g}, not 1: change them, or give --normalize to "
            "divide them by their sum"
        )
    return weights


# ---- Checkpoints of a run ----


def find_last_checkpoints(root: Path, count: int, step: int | None = None) -> list[Path]:
    """Return the last `count` complete checkpoints of the run in `root`, oldest first.

    They end with iteration `step`, by default with the checkpoint that the tracker names. Raises
    NoCheckpointError if there are fewer.
    """
    if is_checkpoint_itself(root):
        raise NoCheckpointError(
            f"--average-last {count}: {root} is one checkpoint, not the directory of a run"
        )
    head, _ = find_named_checkpoint(root, step)
    if step is not None and (head is None or not head.is_dir()):
        raise NoCheckpointError(f"--ckpt-step {step}: {head} does not exist")

    # List the iterations up to the last one to merge, newest first. A copy under the name of
    # another iteration (`cp -r iter_0000004 iter_0009999`) is not another checkpoint of the run.
    directory = CheckpointDirectory(root)
    copies = []
    for iteration, lineage in directory.read_lineages().items():
        if lineage.iteration != iteration:
            copies.append(directory.path(iteration))
    candidates = []
    for path in list_newest_first(root, head):
        if _read_iteration(path) >= 0 and path not in copies:
            candidates.append(path)
    if head is not None and head in candidates:
        candidates = candidates[candidates.index(head) :]

    # Take as many complete ones as requested.
    complete: list[Path] = []
    problems = []
    for path in candidates:
        if len(complete) == count:
            break
        problem = find_problem(path)
        if problem is None:
            complete.append(path)
        else:
            problems.append(f"\n  {path.name}: {problem}")
    if len(complete) < count:
        names = ", ".join(path.name for path in complete) or "none"
        raise NoCheckpointError(
            f"--average-last {count}: {root} has {len(complete)} complete checkpoints ({names})"
            + "".join(problems)
        )
    return complete[::-1]


def _read_iteration(path: Path) -> int:
    """Return the iteration in the name of a checkpoint, or -1 without one."""
    name = path.name.removeprefix("iter_").removeprefix("global_step").removesuffix("_universal")
    if name.isascii() and name.isdigit():
        return int(name)
    return -1


# ---- The merged checkpoint ----


def check_same_model(sources: Sequence[Source]) -> None:
    """Raise ValueError with all differences unless all sources are checkpoints of one model."""
    first = sources[0]
    expected = _describe_model(first)
    for source in sources[1:]:
        differences = []
        model = _describe_model(source)
        for name, value in expected.items():
            if model[name] != value:
                differences.append(f"{flag_name(name)} is {model[name]}, not {value}")
        if differences:
            raise ValueError(
                f"{source.description} is another model than {first.description}: "
                f"{'; '.join(differences)}"
            )


def check_same_foreign(sources: Sequence[Source]) -> None:
    """Raise ValueError unless all sources have the same foreign tensors."""
    first = sources[0]
    expected = _list_foreign_shapes(first)
    for source in sources[1:]:
        shapes = _list_foreign_shapes(source)
        for key in sorted(expected.keys() | shapes.keys()):
            if shapes.get(key) != expected.get(key):
                raise ValueError(
                    f"--keep-foreign: {foreign_name(key)} has shape {shapes.get(key)} in "
                    f"{source.description}, but {expected.get(key)} in {first.description} (None: "
                    "it is missing), so it cannot be merged"
                )


def _list_foreign_shapes(source: Source) -> dict[str, Shape]:
    """Return the shape of each foreign tensor by its key."""
    return {key: source.tensors[key].shape for key in list_foreign(source.tensors)}


def _describe_model(source: Source) -> dict[str, Any]:
    """Return the values that define the model in `source`."""
    rows = read_vocabulary_rows(source.tensors, source.description)
    return compute_model_signature(model_config(source.args, rows, source.description))


class MergedSource(SourceView):
    """The weighted sum of several checkpoints of one model.

    Parameters are summed in fp32, from the main parameters of inputs that have them, and rounded
    once to `dtype`. Arguments and training state are those of `sources[base]`, by default the last.
    Its optimizer state is kept with `keep_optimizer`; its main parameters are the merged ones then.
    Foreign tensors are summed as well, except integers and fp8, which must be equal in all sources.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[float],
        base: int = -1,
        dtype: torch.dtype | None = None,
        keep_optimizer: bool = False,
    ) -> None:
        assert len(sources) == len(weights) > 0
        check_same_model(sources)
        check_same_foreign(sources)
        super().__init__(sources[base])
        self._sources = sources
        self._weights = weights
        self.unused = []
        for source in sources:
            self.unused += [f"{name} of {source.description}" for name in source.unused]
        names = [source.description for source in sources]
        self.description = f"{len(names)} merged checkpoints, {names[0]} to {names[-1]}"

        # Tensors. The average of one input is not that of the result.
        self.drop_average()
        if not keep_optimizer:
            self.drop_optimizer()
        elif not optimizer_states(self.tensors):
            raise ValueError(
                f"--optimizer: {self._source.description} has no optimizer state: choose another "
                "input, or drop the flag"
            )
        # Weights and main parameters are sums.
        for key, new_dtype in self.choose_dtypes(dtype).items():
            parameter, state = split_key(key)
            if state not in (None, "param"):
                continue
            tensor = self.tensors[key]
            if self._is_summable(key):
                read = partial(self._read_sum, parameter, new_dtype)
                self.tensors[key] = LazyTensor(tensor.shape, new_dtype, read)
            else:
                self.tensors[key] = replace(tensor, read=partial(self._read_equal, key))

    def _read_sum(
        self, parameter: str, dtype: torch.dtype, offset: Shape, shape: Shape
    ) -> torch.Tensor:
        """Return a box of the weighted sum in fp32, rounded once."""
        total = torch.zeros(shape, dtype=torch.float32)
        for source, weight in zip(self._sources, self._weights, strict=True):
            if weight == 0:  # such an input is not read, and may have any values
                continue
            source_key = full_precision_key(parameter, source.tensors)
            total.add_(source.tensors[source_key].read(offset, shape), alpha=weight)
        result = total.to(dtype)
        self._require_finite(parameter, offset, total, result)
        return result

    def _is_summable(self, key: str) -> bool:
        """Return whether the values are numbers in every source, not codes of a quantization."""
        for source in self._sources:
            dtype = source.tensors[key].dtype if key in source.tensors else None
            if dtype is not None and not (dtype.is_floating_point and dtype.itemsize > 1):
                return False
        return True

    def _read_equal(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        """Return a box that all sources have; raise ValueError if their values differ."""
        value = self._source.tensors[key].read(offset, shape)
        for source in self._sources:
            source_value = source.tensors[key].read(offset, shape)
            if source_value.dtype != value.dtype or not is_bitwise_equal(source_value, value):
                raise ValueError(
                    f"{source.description}: {foreign_name(key)} ({source_value.dtype}) differs "
                    f"from that of {self._source.description}: integers and fp8 cannot be merged, "
                    "so they must be equal"
                )
        return value

    def _require_finite(
        self, parameter: str, offset: Shape, total: torch.Tensor, result: torch.Tensor
    ) -> None:
        """Raise ValueError, with the cause, if the result has a value that is not finite."""
        # The sum of all elements is finite unless one of them is not, or they are huge.
        if torch.isfinite(result.sum(dtype=torch.float64)):
            return
        # Find the input that is not finite.
        shape = tuple(total.shape)
        for source in self._sources:
            source_key = full_precision_key(parameter, source.tensors)
            if not torch.isfinite(source.tensors[source_key].read(offset, shape)).all():
                raise ValueError(
                    f"{source.description}: {parameter} contains values that are not finite: leave "
                    "this input out"
                )
        # All inputs are finite, so the sum overflowed.
        if not torch.isfinite(result).all():
            raise ValueError(
                f"the merged {parameter} exceeds the range of {result.dtype} (largest absolute "
                f"value {total.abs().max().item():g}): choose other weights, or another --dtype"
            )

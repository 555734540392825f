"""The files of a checkpoint of DeepSpeed's engine, as named tensors of each model-parallel rank.

<tag>/[zero_pp_rank_D_]mp_rank_MM_model_states.pt: names, shapes and counters
<tag>/[bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt: flat fp32 shards of data-parallel rank D

A flat shard contains ranges of parameters. With ZeRO-1 and 2 (and the optimizer for bf16), the
parameters of a group are one flat tensor, which is split over the ranks: a parameter is in one of
them, or in consecutive ones. With ZeRO-3, each parameter is padded and split over all ranks. Files
are opened without reading tensors, which are assembled box by box.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.model_space.lazy_tensors import (
    concatenate,
    unflatten,
    view_box,
    view_elements,
    view_stored,
)
from megatron.conversion.model_space.optimizer_states import OPTIMIZER_STATES
from megatron.conversion.options import DROP_OPTIMIZER
from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape
from megatron.core.run_checkpoint.checks import PARAM_GROUP, RANKS, check_scalar
from megatron.core.safe_files import CheckpointError, FileTensor, safe_open
from megatron.core.safe_files.safe_globals import Placeholder
from megatron.core.safe_files.schema import (
    COUNT,
    MAX_COUNT,
    anything,
    mapping,
    number,
    optional,
    record,
    sequence,
    tensor_shape,
)
from megatron.core.safe_files.schema import key as check_key

MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})_model_states\.pt")
OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt")
_EXPERT_FILES = ("expp_rank_*_optim_states.pt", "layer_*_expert_*_model_states.pt")
_MAX_MISSING = 8  # files that a message names

_SHAPES = mapping(tensor_shape, keys=check_key)
_NAMED = mapping(anything, keys=check_key)
_MODEL_STATE = record(
    {
        "module?": optional(_NAMED),
        "buffer_names?": optional(sequence(check_key)),
        "param_shapes?": optional(sequence(_SHAPES)),
        "frozen_param_shapes?": optional(_SHAPES),
        "frozen_param_fragments?": optional(_NAMED),
        "shared_params?": optional(mapping(check_key, keys=check_key)),
        "dp_world_size?": optional(RANKS),
        "mp_world_size?": optional(RANKS),
    }
)
_TORCH_STATE = record({"state": mapping(_NAMED, keys=COUNT), "param_groups": sequence(PARAM_GROUP)})
_ADDRESS = record({"start": COUNT, "numel": COUNT})
_TENSORS = sequence(anything)
_PARTITIONED = record(  # ZeRO-1 and 2, and the optimizer for bf16
    {
        "base_optimizer_state": anything,
        "single_partition_of_fp32_groups": _TENSORS,
        "partition_count": sequence(RANKS),
        "param_slice_mappings": sequence(_NAMED),
    }
)
_SHARDED = record(  # ZeRO-3
    {"optimizer_state_dict": _TORCH_STATE, "fp32_flat_groups": _TENSORS, "partition_count": RANKS}
)


@dataclass
class RankTensors:
    """The tensors of one model-parallel rank by name, and the state of its training.

    Tensors have the shapes that they have on this rank: they are shards of those of the model.
    """

    state: dict[str, Any]  # contents of the model-state file
    param: dict[str, LazyTensor] = field(default_factory=dict)  # fp32, frozen ones as stored
    moments: dict[str, dict[str, LazyTensor]] = field(default_factory=dict)  # by optimizer state
    groups: list[Mapping[str, Any]] = field(default_factory=list)  # hyperparameters
    members: list[list[str]] = field(default_factory=list)  # parameters of each group
    steps: set[int] = field(default_factory=set)  # of the optimizer


class EngineFiles:
    """The contents of the files by model-parallel rank. Raises ValueError if some are missing."""

    def __init__(self, directory: Path, with_optimizer: bool = True) -> None:
        self.directory = directory
        self.description = f"DeepSpeed checkpoint {directory}"
        damage = list_engine_damage(directory)
        if damage:
            raise ValueError(f"{self.description} is incomplete: {'; '.join(damage)}")
        for pattern in _EXPERT_FILES:
            for path in directory.glob(pattern):
                raise ValueError(
                    f"{self.description} has experts of DeepSpeed's MoE ({path.name}), which are "
                    "not supported: convert the model in DeepSpeed"
                )
        model_files = group_files(directory, MODEL_FILE)
        optimizer_files = group_files(directory, OPTIMIZER_FILE)
        self.ranks: list[RankTensors] = []
        for mp_rank, model_paths in model_files.items():
            optimizer_paths = optimizer_files.get(mp_rank, {})
            rank = self._open_rank(
                list(model_paths.values()),
                list(optimizer_paths.values()),
            )
            self.ranks.append(rank)
        if not with_optimizer:
            for rank in self.ranks:
                rank.moments = {}

    def _open_rank(
        self, model_paths: Sequence[Path], optimizer_paths: Sequence[Path]
    ) -> RankTensors:
        """Return the tensors of a model-parallel rank with the files of data-parallel ranks."""
        states = []
        for path in model_paths:
            content = safe_open(path)
            state = _MODEL_STATE(content, str(path))
            states.append(dict(state))
        rank = RankTensors(states[0])
        optimizers = []
        for path in optimizer_paths:
            optimizers.append(_read_optimizer(path))
        if not optimizers:
            raise ValueError(
                f"{self.description} has no *_optim_states.pt, which ZeRO and the optimizer for "
                "bf16 write: load it in DeepSpeed, and save a model of transformers "
                "(save_pretrained(), save_16bit_model())"
            )
        is_stage_3 = "fp32_flat_groups" in optimizers[0]
        if any(("fp32_flat_groups" in optimizer) != is_stage_3 for optimizer in optimizers):
            raise ValueError(f"{self.description} has files of ZeRO-3 and of other stages")
        _check_count(optimizers, optimizer_paths)
        if is_stage_3:
            read_sharded(rank, optimizers, self.description)
        else:
            read_partitioned(rank, optimizers, self.description)
        _add_frozen(rank, states, is_stage_3, self.description)
        _add_buffers(rank)
        return rank


# ---- Files ----


def group_files(directory: Path, pattern: re.Pattern[str]) -> dict[int, dict[int, Path]]:
    """Return the files of each model-parallel rank by data-parallel rank, in order.

    Without ZeRO-3, data-parallel ranks share a file of model states, which is that of rank 0.
    """
    paths: dict[int, dict[int, Path]] = defaultdict(dict)
    for path in directory.iterdir():
        match = pattern.fullmatch(path.name)
        if match is not None:
            paths[int(match[2])][int(match[1] or 0)] = path
    ordered = {}
    for mp_rank in sorted(paths):
        ordered[mp_rank] = dict(sorted(paths[mp_rank].items()))
    return ordered


def list_engine_damage(directory: Path) -> list[str]:
    """Return a message for each missing file: ranks are numbered without gaps."""
    missing: list[str] = []
    for pattern, suffix in ((MODEL_FILE, "model_states"), (OPTIMIZER_FILE, "optim_states")):
        files = group_files(directory, pattern)
        dp_ranks: set[int] = set()
        is_numbered = False
        for paths in files.values():
            dp_ranks.update(paths)
            is_numbered |= any("zero_pp_rank" in path.name for path in paths.values())
        mp_size = max(files, default=-1) + 1
        dp_size = max(dp_ranks, default=-1) + 1
        for mp_rank, dp_rank in itertools.product(range(mp_size), range(dp_size)):
            if dp_rank in files.get(mp_rank, {}):
                continue
            prefix = f"zero_pp_rank_{dp_rank}_" if is_numbered else ""
            missing.append(f"{prefix}mp_rank_{mp_rank:02d}_{suffix}.pt is missing")
            if len(missing) == _MAX_MISSING:  # numbers in names of files may be arbitrary
                return missing
    return missing


def _read_optimizer(path: Path) -> dict[str, Any]:
    """Return the optimizer state in a file, checked."""
    content = record({"optimizer_state_dict": _NAMED})(safe_open(path), str(path))
    state: dict[str, Any] = content["optimizer_state_dict"]
    if "fp32_flat_groups" in state:
        return dict(_SHARDED(state, str(path)))
    if "single_partition_of_fp32_groups" not in state:
        raise CheckpointError(
            f"{path} is not of a supported optimizer of DeepSpeed (ZeRO 1 to 3, bf16): it has "
            f"{', '.join(sorted(state)[:8])}"
        )
    return dict(_PARTITIONED(state, str(path)))


def _check_count(optimizers: Sequence[Mapping[str, Any]], paths: Sequence[Path]) -> None:
    """Raise CheckpointError unless there is a file for every data-parallel rank."""
    counts = optimizers[0]["partition_count"]
    if isinstance(counts, int):
        counts = [counts]
    if counts and max(counts) != len(paths):
        raise CheckpointError(
            f"{paths[0].parent} has optimizer states of {len(paths)} data-parallel ranks, but was "
            f"saved by {max(counts)}: copy the files *_optim_states.pt of all ranks"
        )


# ---- ZeRO-1 and 2 ----


def read_partitioned(
    rank: RankTensors, optimizers: Sequence[Mapping[str, Any]], description: str
) -> None:
    """Add the parameters and moments of groups, whose flat tensors are split over the ranks.

    `optimizers` are the optimizer states of the data-parallel ranks.
    """
    shapes = rank.state.get("param_shapes") or []
    bases = [_read_base(optimizer, description) for optimizer in optimizers]
    rank.groups = bases[0]["param_groups"]
    for name in ("single_partition_of_fp32_groups", "param_slice_mappings"):
        per_rank = [optimizer[name] for optimizer in optimizers]
        _check_length(shapes, per_rank, description)
    for group, group_shapes in enumerate(shapes):
        rank.members.append(list(group_shapes))
        flats = [optimizer["single_partition_of_fp32_groups"][group] for optimizer in optimizers]
        shards = _open_shards(rank, flats, bases, group, description)
        addresses = []
        for optimizer in optimizers:
            mappings = optimizer["param_slice_mappings"][group]
            addresses.append(_read_addresses(mappings, description))

        for name, shape in group_shapes.items():
            for state in shards[0]:
                # The ranges of a parameter on consecutive ranks
                ranges = []
                for shard, shard_addresses in zip(shards, addresses, strict=True):
                    if name in shard_addresses:
                        start, count = shard_addresses[name]
                        ranges.append(view_range(shard[state], start, count))
                _add_tensor(rank, state, name, _assemble(ranges, shape, name, description))


def _read_base(optimizer: Mapping[str, Any], description: str) -> dict[str, Any]:
    """Return the state of torch's optimizer. Raises ValueError for that of elastic checkpoints."""
    base = optimizer["base_optimizer_state"]
    if not isinstance(base, dict):
        raise ValueError(
            f"{description}: elastic checkpoints of ZeRO are not supported: save with "
            '"elastic_checkpoint": false'
        )
    return dict(_TORCH_STATE(base, description))


def _read_addresses(value: Mapping[str, Any], description: str) -> dict[str, tuple[int, int]]:
    """Return (start, number of elements) by name from objects `fragment_address`."""
    addresses = {}
    for name, address in value.items():
        content = None
        if isinstance(address, Placeholder):
            content = address.state
        location = f"{description}: param_slice_mappings of {name}"
        checked = _ADDRESS(content, location)
        addresses[name] = (checked["start"], checked["numel"])
    return addresses


# ---- ZeRO-3 ----


def read_sharded(
    rank: RankTensors, optimizers: Sequence[Mapping[str, Any]], description: str
) -> None:
    """Add parameters and moments that are split evenly over the ranks and padded at the end.

    Each of `param_shapes` is a sub-group of parameters, a flat tensor on each rank. `optimizers`
    are the optimizer states of the data-parallel ranks.
    """
    bases = [optimizer["optimizer_state_dict"] for optimizer in optimizers]
    rank.groups = bases[0]["param_groups"]
    shapes = rank.state.get("param_shapes") or []
    num_ranks = len(optimizers)
    all_flats = [optimizer["fp32_flat_groups"] for optimizer in optimizers]
    _check_length(shapes, all_flats, description)
    for sub_group, group_shapes in enumerate(shapes):
        flats = [rank_flats[sub_group] for rank_flats in all_flats]
        shards = _open_shards(rank, flats, bases, sub_group, description)
        start = 0  # of a parameter in the flat tensor
        for name, shape in group_shapes.items():
            numel = math.prod(shape)
            size = -(-numel // num_ranks)  # per rank, rounded up
            for state in shards[0]:
                ranges = []
                for index, shard in enumerate(shards):
                    count = min(size, numel - index * size)
                    if count > 0:
                        ranges.append(view_range(shard[state], start, count))
                _add_tensor(rank, state, name, _assemble(ranges, shape, name, description))
            start += size
    for group in rank.groups:
        names: list[str] = []
        # The "parameters" of a group are indices of sub-groups.
        sub_groups = group["params"]
        for sub_group, group_shapes in enumerate(shapes):
            if sub_group in sub_groups:
                names += group_shapes
        rank.members.append(names)


# ---- Ranges of flat tensors ----


def _check_length(
    shapes: Sequence[Any], flat_groups: Iterable[Sequence[Any]], description: str
) -> None:
    """Raise ValueError unless every rank has a flat tensor for each group of parameters."""
    lengths = {len(shapes), *map(len, flat_groups)}
    if len(lengths) > 1:
        raise ValueError(
            f"{description}: the files have different numbers of parameter groups "
            f"({', '.join(map(str, sorted(lengths)))}): some of them belong to another checkpoint"
        )


def _open_shards(
    rank: RankTensors,
    flats: Sequence[Any],
    bases: Sequence[Mapping[str, Any]],
    group: int,
    description: str,
) -> list[dict[str, LazyTensor]]:
    """Return the flat parameters and moments of a group on each rank by name of the state."""
    shards = []
    for flat, base in zip(flats, bases, strict=True):
        moments = base["state"].get(group, {})
        shards.append(_select_states(rank, flat, moments, description))
    names = {tuple(sorted(shard)) for shard in shards}
    if len(names) > 1:
        raise ValueError(
            f"{description}: the optimizers of its ranks have different states: some of the files "
            "belong to another checkpoint"
        )
    return shards


def _select_states(
    rank: RankTensors, flat: Any, moments: Mapping[str, Any], description: str
) -> dict[str, LazyTensor]:
    """Return the flat parameters and moments by name of the state.

    The optimizer's step is added to the steps of `rank`.
    """
    if not isinstance(flat, FileTensor | torch.Tensor):
        raise ValueError(
            f"{description}: its fp32 parameters are not stored in it (offloaded to NVMe)"
        )
    states = {"param": view_elements(flat)}
    for name, value in moments.items():
        if name == "step":
            step = value.read() if isinstance(value, FileTensor) else value
            location = f"{description}: the step of its optimizer"
            step = float(check_scalar(step, location))
            rank.steps.add(int(number(0, MAX_COUNT)(step, location)))
        elif isinstance(value, FileTensor | torch.Tensor):
            # Moments on the last rank may lack the padding that the parameters have.
            states[name] = view_elements(value)
        elif value is not None:
            raise ValueError(
                f"{description}: {name} of its optimizer is not a value per parameter: "
                f"{DROP_OPTIMIZER}"
            )
    return states


def view_range(flat: LazyTensor, start: int, count: int) -> LazyTensor:
    """Return elements `[start, start + count)` of a flat tensor, which may be shorter."""
    available = max(0, min(count, flat.shape[0] - start))
    return view_box(flat, (start,), (available,))


def _assemble(
    ranges: Sequence[LazyTensor], shape: Shape, name: str, description: str
) -> LazyTensor:
    """Return the parameter that consists of these ranges of elements."""
    numel = sum(elements.shape[0] for elements in ranges)
    if numel != math.prod(shape):
        raise ValueError(
            f"{description}: {name} has shape {list(shape)}, but {numel} elements in the files of "
            "all ranks: some of these files belong to another checkpoint"
        )
    return unflatten(concatenate(ranges, 0), 0, shape)


def _add_tensor(rank: RankTensors, state: str, name: str, tensor: LazyTensor) -> None:
    """Add a parameter, or a moment of one."""
    if state == "param":
        rank.param[name] = tensor
    else:
        rank.moments.setdefault(state, {})[name] = tensor


# ---- Tensors that are not trained ----


def _add_frozen(
    rank: RankTensors, states: Sequence[Mapping[str, Any]], is_stage_3: bool, description: str
) -> None:
    """Add the frozen parameters, which ZeRO-3 splits over the ranks.

    `states` are the contents of the model-state files of the data-parallel ranks.
    """
    frozen_shapes = rank.state.get("frozen_param_shapes") or {}
    for name, shape in frozen_shapes.items():
        ranges = []
        num_missing = math.prod(shape)  # elements, without padding
        for state in states if is_stage_3 else states[:1]:
            fragments = state.get("frozen_param_fragments") or {}
            fragment = fragments.get(name)
            if not isinstance(fragment, FileTensor | torch.Tensor):
                raise ValueError(f"{description}: the frozen parameter {name} is not stored in it")
            elements = view_range(view_elements(fragment), 0, num_missing)
            num_missing -= elements.shape[0]
            ranges.append(elements)
        rank.param[name] = _assemble(ranges, shape, name, description)


def _add_buffers(rank: RankTensors) -> None:
    """Add buffers, and the second names of parameters that are shared."""
    module = rank.state.get("module") or {}
    for name in rank.state.get("buffer_names") or ():
        value = module.get(name)
        if isinstance(value, FileTensor | torch.Tensor):
            rank.param[name] = view_stored(value)
    for name, original in (rank.state.get("shared_params") or {}).items():
        for tensors in (rank.param, *rank.moments.values()):
            if original in tensors:
                tensors[name] = tensors[original]


def list_names(ranks: Iterable[RankTensors]) -> list[str]:
    """Return the names of all parameters."""
    names: dict[str, None] = {}
    for rank in ranks:
        names.update(dict.fromkeys(rank.param))
    return list(names)


# ---- Optimizer ----


def check_states(rank: RankTensors, description: str) -> None:
    """Raise ValueError for moments of an optimizer that runs here do not have."""
    unknown = [state for state in rank.moments if state not in OPTIMIZER_STATES]
    if unknown or not rank.moments:
        contents = f"the state {', '.join(unknown)}" if unknown else "no state"
        raise ValueError(
            f"{description}: its optimizer has {contents} of each parameter, unlike those here: "
            f"{DROP_OPTIMIZER}"
        )


def find_step(rank: RankTensors, description: str) -> int:
    """Return the optimizer's step: stored, or counted by the engine."""
    if len(rank.steps) > 1:
        raise ValueError(f"{description}: parameters are at different steps: {sorted(rank.steps)}")
    if rank.steps:
        return next(iter(rank.steps))
    num_steps: int = rank.state.get("global_steps") or 0
    num_skipped: int = rank.state.get("skipped_steps") or 0
    return num_steps - num_skipped

"""torch_dist directories: reading a run's own and all of Megatron-LM's variants, and writing them.

One process writes them, a few megabytes at a time. Layers may be stacked: one tensor for each kind
of parameter, with a leading axis of layers. Megatron-core writes this form for models whose layers
all have equal shapes, and its newer model classes require it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.formats import is_extra_state
from megatron.conversion.megatron_lm.args import (
    LOADER_DEFAULTS,
    add_loader_defaults,
    build_common_state,
    build_grad_scaler,
    find_param_groups,
    read_arguments,
    read_training_state,
    split_by_expert_optimizer,
)
from megatron.conversion.megatron_lm.bridge import RUN_CONFIG, read_bridge_common
from megatron.conversion.megatron_lm.extra_states import build_extra_states
from megatron.conversion.megatron_lm.legacy_files import MegatronRank
from megatron.conversion.megatron_lm.optimizer_state import (
    PieceTable,
    fit_buckets,
    has_optimizer,
    refuse_unknown_optimizer,
    split_by_optimizer,
)
from megatron.conversion.model_space.model import (
    Layout,
    LocalParameter,
    check_optimizer_complete,
    check_parameters,
    find_norm_key,
    model_config,
    model_tensors,
    rank_parameters,
    read_vocabulary_rows,
)
from megatron.conversion.model_space.pieces import ReadFlat, ReadRegion, make_region_reader
from megatron.conversion.model_space.source import (
    COMMON,
    OPTIMIZER_STATES,
    WORD_EMBEDDINGS,
    Progress,
    Shape,
    Source,
    TensorInfo,
    TrainingState,
    no_progress,
    optimizer_key,
)
from megatron.conversion.options import ReadOptions
from megatron.core.dist_checkpointing import (
    CheckpointError,
    Reader,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    load_common,
    save,
)
from megatron.core.dist_checkpointing.files import COMMON as COMMON_FILE
from megatron.core.dist_checkpointing.format.schema import (
    COUNT,
    SHAPE,
    mapping,
    number,
    optional,
    record,
)

_COMMON_STATE = "common_state/shard_0_1"  # replaces common.pt in newer Megatron-LM
_STATE = re.compile(r"optimizer\.state\.(\w+)\.(.+)")
_RENAMED_STATES = {"fp32_param": "param"}
_BUCKET = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)"
    r"\.dtype_\(.*\)\.bucket_idx_(\d+)\.(\w+)"
)
Buckets = dict[tuple[int, int, int, int, str], str]  # optimizer, rank, chunk, number, state -> key
_OPTIMIZER_OBJECT = "optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1"
_ORIGINAL_SHAPE = "nd_reformulated_orig_global_shape"  # of a tensor in fragments
_ORIGINALS = mapping(optional(record({f"{_ORIGINAL_SHAPE}?": optional(SHAPE)})))
_OURS = ("embedding.", "decoder.", "output_layer.", "optimizer.")
_NUMBERED = re.compile(r"decoder\.layers\.\d+\.")
# Objects without content to convert, or that are read elsewhere.
_IGNORED_OBJECTS = (
    "rng_state/",
    "optimizer.distributed.",
    "chained_",
    "common_state/",
    "rerun_state",
)


def read_common(reader: Reader, directory: Path, verify: bool = True) -> dict[str, Any]:
    """Return `common.pt`, or the object that replaces it in newer Megatron-LM."""
    common = load_common(directory, verify=verify)
    if not common and _COMMON_STATE in reader.metadata.objects:
        stored: dict[str, Any] = reader.read_object(_COMMON_STATE)
        return stored
    return common


def open_torch_dist(directory: Path, read_options: ReadOptions) -> Source:
    """Open a checkpoint, converting its keys to model space.

    With `as_saved`, the keys of a checkpoint that a run of this program saved are kept.
    """
    if read_options.as_saved:
        verify = read_options.verify is not False
        common = COMMON(load_common(directory, verify=verify), str(directory / COMMON_FILE))
        if (common.get("content_metadata") or {}).get("non_homogeneous_layers"):
            run = RunCheckpoint(directory, common, verify)
            weights = [key for key in run.tensors if not key.startswith("optimizer.")]
            # Earlier versions had another key for the norm before experts, which the reader of all
            # forms knows.
            if all(find_norm_key(key, run.tensors) == key for key in weights):
                return run
    return TorchDistSource(directory, read_options)


def _list_generators(reader: Reader) -> dict[str, Callable[[], Any]]:
    """Return a reader of each rank's random generators by key."""
    keys = [key for key in reader.metadata.objects if key.startswith("rng_state/")]
    return {key: partial(reader.read_object, key) for key in keys}


class TorchDistSource:
    """A torch_dist iteration directory of any variant.

    Layers may be stacked or numbered. The optimizer may have any of Megatron-LM's forms:
    fully_reshardable, dp_reshardable (flat buckets), fully_sharded_model_space (0.12), or not
    distributed.
    """

    def __init__(self, directory: Path, read_options: ReadOptions | None = None) -> None:
        read_options = read_options or ReadOptions()
        with_optimizer = read_options.optimizer
        verify = read_options.verify is not False
        self.description = f"torch_dist checkpoint {directory}"
        self._reader = Reader(directory, verify=verify)
        stored = self._reader.metadata
        _refuse_fsdp(stored.tensors, directory)

        # Arguments.
        common = read_common(self._reader, directory, verify)
        if "args" not in common and (directory / RUN_CONFIG).is_file():
            common = read_bridge_common(directory, common)
        self.args = read_arguments(common, str(directory))
        self._num_layers = int(self.args["num_layers"])
        self._originals = _ORIGINALS(stored.extra.get("mcore_data", {}), f"{directory}: mcore_data")

        # Weights, and optimizer state except flat buckets.
        self.unused: list[str] = []
        self._table = PieceTable(self.description)
        if with_optimizer:
            self._check_optimizer_states(stored.tensors)
        buckets: Buckets = {}
        for key in stored.tensors:
            bucket = _BUCKET.fullmatch(key)
            if bucket is not None and with_optimizer:
                optimizer, rank, chunk, number, state = bucket.groups()
                place = (int(optimizer or 0), int(rank), int(chunk), int(number), state)
                buckets[place] = key
            elif with_optimizer or not key.startswith(("optimizer.", "chained_")):
                self._add(key)

        # The stored rows define the vocabulary: Megatron-LM stores its padding, runs here do not.
        rows = read_vocabulary_rows(self._table.tensors, str(directory))
        self.args["model_vocab_size"] = rows
        self.config = model_config(self.args, rows, self.description)

        # Flat buckets, which need the model.
        groups = find_param_groups(common.get("optimizer")) if with_optimizer else None
        if buckets:
            self._add_buckets(buckets)
            groups = groups or self._read_bucket_groups()
        self._table.complete(has_optimizer(self.args, self._table.tensors, groups))
        self.training: TrainingState | None = read_training_state(common, self.args, groups)
        self.training.rng = _list_generators(self._reader)
        self.tensors = self._table.tensors
        self._check_model(directory)

    def read(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        return self._table.read(key, offset, shape)

    def _check_optimizer_states(self, keys: Iterable[str]) -> None:
        states = []
        for key in keys:
            if (match := _BUCKET.fullmatch(key)) is not None:
                states.append(match[5])
            elif (match := _STATE.fullmatch(key)) is not None:
                states.append(_RENAMED_STATES.get(match[1], match[1]))
        if states:
            refuse_unknown_optimizer(self.args, states, self.description)

    def _add(self, key: str) -> None:
        """Add one stored tensor: a whole global tensor, or the tensor of all layers stacked."""
        match = _STATE.fullmatch(key)
        state = None if match is None else _RENAMED_STATES.get(match[1], match[1])
        name = key if match is None else match[2]
        name = find_norm_key(name, self._reader.metadata.tensors)
        stored = self._reader.metadata.tensors[key]
        is_stacked = name.startswith("decoder.layers.") and not _NUMBERED.match(name)
        if not is_stacked:
            self._add_layer(key, name, state, ())
            return
        if stored.shape[:1] != (self._num_layers,):
            raise CheckpointError(
                f"{self.description}: {key} has shape {stored.shape}, the arguments specify "
                f"{self._num_layers} layers"
            )
        for layer in range(self._num_layers):
            own = name.replace("decoder.layers.", f"decoder.layers.{layer}.", 1)
            self._add_layer(key, own, state, (layer,))

    def _add_layer(self, key: str, name: str, state: str | None, lead: Shape) -> None:
        """Add the part of the stored tensor `key` at index `lead` as the parameter `name`."""
        target = optimizer_key(state, name) if state else name
        stored = self._reader.metadata.tensors[key]
        original = (self._originals.get(key) or {}).get(_ORIGINAL_SHAPE)
        if original is not None:
            self._add_fragments(key, target, lead, tuple(original)[len(lead) :])
            return
        shape = stored.shape[len(lead) :]
        info = TensorInfo(shape, stored.dtype)
        self._table.add(target, info, (0,) * len(shape), shape, self._region_reader(key, lead))

    def _region_reader(self, key: str, lead: Shape) -> ReadRegion:
        def read(offset: Shape, shape: Shape) -> torch.Tensor:
            return self._reader.read(key, lead + offset, (1,) * len(lead) + shape).view(shape)

        return read

    def _add_fragments(self, key: str, target: str, lead: Shape, shape: Shape) -> None:
        """Add a tensor of 0.12's model space: a grid of equal fragments, each stored flat."""
        stored = self._reader.metadata.tensors[key]
        grid = stored.shape[len(lead) : -1]
        # Each fragment is a piece of its own in the files, which also bounds their number.
        fits = len(grid) == len(shape) and 0 < math.prod(grid) <= len(stored.chunks)
        if not fits or any(map(operator.mod, shape, grid)):
            raise CheckpointError(
                f"{self.description}: {key} of shape {shape} is stored as a grid of {grid} "
                "fragments"
            )
        extent = tuple(n // parts for n, parts in zip(shape, grid, strict=True))
        info = TensorInfo(shape, stored.dtype)
        for index in itertools.product(*map(range, grid)):
            offset = tuple(i * n for i, n in zip(index, extent, strict=True))
            region = make_region_reader(self._flat_reader(key, (*lead, *index)), 0, extent)
            self._table.add(target, info, offset, extent, region)

    def _add_buckets(self, buckets: Buckets) -> None:
        """Add dp_reshardable state: flat buckets of every model-parallel rank.

        They are cut by the rules that filled them.
        """
        layout = Layout.from_args(self.args)
        has_expert_optimizer = layout.parallel.ep_size > 1

        # (optimizer, index among its ranks, rank)
        ranks: list[tuple[int, int, MegatronRank]] = []
        for index, (tp, pp) in enumerate(layout.ranks):
            ranks.append((0, index, MegatronRank(tp, pp)))
        if has_expert_optimizer:
            # Every rank of the experts' grid without their replicas, ETP fastest.
            sizes = (layout.parallel.pp_size, layout.parallel.ep_size, layout.parallel.etp_size)
            for index, (pp, ep, etp) in enumerate(itertools.product(*map(range, sizes))):
                ranks.append((1, index, MegatronRank(0, pp, (etp, ep))))

        for optimizer, index, rank in ranks:
            chunks = rank_parameters(
                self.config, layout, rank.tp, rank.pp, 1, rank.expert, self.args
            )
            own = split_by_optimizer(chunks, has_expert_optimizer)[optimizer]
            for chunk, parameters in enumerate(own):
                if parameters:
                    place = (optimizer, index, chunk)
                    self._add_chunk(buckets, place, parameters, f"{self.description}, {rank}")
        self.unused += sorted(buckets.values())

    def _add_chunk(
        self,
        buckets: Buckets,
        place: tuple[int, int, int],
        parameters: Sequence[LocalParameter],
        where: str,
    ) -> None:
        """Add the buckets of one chunk and remove them from `buckets`.

        `place` is (optimizer, rank, chunk).
        """
        for state in sorted({state for *_, state in buckets}):
            # Buckets are numbered without gaps; the remaining ones are reported as unused.
            keys: list[str] = []
            while (*place, len(keys), state) in buckets:
                keys.append(buckets.pop((*place, len(keys), state)))
            stored = [self._reader.metadata.tensors[key] for key in keys]
            shapes = [entry.shape for entry in stored]
            if any(len(shape) != 1 for shape in shapes):
                raise CheckpointError(f"{where}: buckets of shapes {shapes} are not flat")
            sizes = [shape[0] for shape in shapes]
            for parameter, bucket, start in fit_buckets(parameters, sizes, where):
                key = optimizer_key(state, parameter.key)
                flat = self._flat_reader(keys[bucket], ())
                self._table.add_local(key, parameter, stored[bucket].dtype, flat, start)

    def _read_bucket_groups(self) -> list[dict[str, Any]] | None:
        """Return the parameter groups that dp_reshardable state has in an object."""
        for key in (_OPTIMIZER_OBJECT, f"chained_0.{_OPTIMIZER_OBJECT}"):
            if key in self._reader.metadata.objects:
                return find_param_groups(self._reader.read_object(key))
        return None

    def _flat_reader(self, key: str, index: Shape) -> ReadFlat:
        """Return a reader of the stored tensor's last axis, at `index` on the other axes."""

        def read(start: int, count: int) -> torch.Tensor:
            return self._reader.read(key, (*index, start), (1,) * len(index) + (count,)).view(-1)

        return read

    def _check_model(self, directory: Path) -> None:
        """Raise CheckpointError unless the arguments describe exactly the stored weights."""
        wanted = model_tensors(self.config)
        check_parameters(self.tensors, wanted, str(directory))
        known = set(wanted)
        for state in OPTIMIZER_STATES:
            known |= {optimizer_key(state, key) for key in wanted}
        self.unused += sorted(set(self.tensors) - known)
        for key in sorted(self._reader.metadata.objects):
            if not is_extra_state(key) and not key.startswith(_IGNORED_OBJECTS):
                self.unused.append(key)
        self.tensors = {key: info for key, info in self.tensors.items() if key in known}
        check_optimizer_complete(self.tensors, str(directory))


def _refuse_fsdp(keys: Iterable[str], directory: Path) -> None:
    """Raise CheckpointError for a checkpoint of Megatron-FSDP."""
    names = list(keys)
    has_ours = any(name.startswith(_OURS) for name in names)
    if not has_ours and any("model." in name for name in names):
        raise CheckpointError(
            f"{directory}: a checkpoint of Megatron-FSDP (fsdp_dtensor, keys such as {names[0]}) "
            "is not read here: save that run with --ckpt-format torch_dist"
        )


_POSITION = record({"iteration": COUNT, "num_floating_point_operations_so_far": number(0)})
_CONSUMED = record({"consumed_train_samples": COUNT, "consumed_valid_samples": COUNT})


class RunCheckpoint:
    """A torch_dist directory that a run of this program saved, with its own keys.

    Its keys are model space for every model. `common` is the content of its common.pt.
    """

    def __init__(self, directory: Path, common: Mapping[str, Any], verify: bool = True) -> None:
        self.description = str(directory)
        if "args" not in common:
            raise CheckpointError(
                f"{directory} holds tensors, but not the arguments and the state of a training run"
            )
        self.args: dict[str, Any] = dict(vars(common["args"]))
        is_released = "iteration" not in common and "optimizer" not in common
        if not is_released:
            _POSITION(common, f"{directory}: the state of the run")
            _CONSUMED(self.args, f"{directory}: the arguments of the run")
        self.reader = Reader(directory, verify=verify)
        self.unused: list[str] = []
        self.tensors: dict[str, TensorInfo] = {}
        for key, tensor in self.reader.metadata.tensors.items():
            self.tensors[key] = TensorInfo(tensor.shape, tensor.dtype)
        groups = find_param_groups(common.get("optimizer"))
        self.training: TrainingState | None = read_training_state(common, self.args, groups)
        self.training.rng = _list_generators(self.reader)

    def read(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        return self.reader.read(key, offset, shape)


_LAYER = re.compile(r"((?:optimizer\.state\.\w+\.)?decoder\.layers\.)(\d+)\.(.+)")


class StackedLayers:
    """A view of `source` with stacked layers, which must have equal shapes."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.by_layer = source.tensors
        self.num_layers = int(source.args["num_layers"])
        self.description = source.description
        self.args = source.args
        self.unused = source.unused
        self.training: TrainingState | None = source.training
        self.tensors: dict[str, TensorInfo] = {}
        self._layers: dict[str, list[str]] = {}  # stacked key -> the key of every layer

        # Group the keys of layers.
        found: dict[str, dict[int, str]] = {}
        for key, info in source.tensors.items():
            match = _LAYER.fullmatch(key)
            if match is None:
                self.tensors[key] = info
            else:
                prefix, layer, name = match.groups()
                found.setdefault(prefix + name, {})[int(layer)] = key

        # Stack those that all layers have, with the same shape and dtype.
        for key, layers in found.items():
            infos = {source.tensors[layer] for layer in layers.values()}
            if len(infos) > 1 or len(layers) != self.num_layers:
                raise ValueError(
                    f"{self.description}: {key} differs between the {self.num_layers} layers"
                )
            (info,) = infos
            self.tensors[key] = TensorInfo((len(layers), *info.shape), info.dtype)
            self._layers[key] = [layers[number] for number in range(self.num_layers)]

    def read(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        if key not in self._layers:
            return self._source.read(key, offset, shape)
        layers = self._layers[key][offset[0] : offset[0] + shape[0]]
        parts = [self._source.read(layer, offset[1:], shape[1:]) for layer in layers]
        return torch.stack(parts)


def make_stacked_key(key: str, num_layers: int) -> str:
    """Return the key of a layer's object in the grid of all layers."""
    match = _LAYER.fullmatch(key)
    if match is None:
        return key
    prefix, layer, name = match.groups()
    module, _, grid = (prefix + name).rpartition("/shard_")
    if grid == "0_1":
        return f"{module}/shard_{layer}_{num_layers}"
    expert, _, experts = grid.partition("_")
    return f"{module}/shard_{layer}.{expert}_{num_layers}.{experts}"


def write_torch_dist(
    source: Source, directory: Path, files: int = 1, progress: Progress = no_progress
) -> list[str]:
    """Write `directory` (an iteration), which appears once it is complete; `files` files at once.

    Returns an empty list: no part is lost.
    """
    state: ShardedStateDict = {}
    for key, info in source.tensors.items():
        read = partial(source.read, key)
        state[key] = ShardedTensor.lazy(key, info.shape, info.dtype, read)
    state |= _build_extra_states(source)
    # Only a run with the layout of the source can use its generators.
    if source.training is not None:
        for key, read_state in source.training.rng.items():
            state[key] = ShardedObject(key, read_state())
    save(state, directory, common=_build_common(source), workers=files, progress=progress)
    return []


def _build_extra_states(source: Source) -> ShardedStateDict:
    """Return the extra states that Megatron-core requires for the layers of `source`."""
    experts = int(source.args.get("num_experts") or 0)
    if not isinstance(source, StackedLayers):
        return {**build_extra_states(source.tensors, experts)}
    stacked: ShardedStateDict = {}
    for entry in build_extra_states(source.by_layer, experts).values():
        key = make_stacked_key(entry.key, source.num_layers)
        stacked[key] = ShardedObject(key, entry.value)
    return stacked


def _build_common(source: Source) -> dict[str, Any]:
    """Return `common.pt` with the arguments and the training state of `source`."""
    training = source.training
    weights = source.tensors[WORD_EMBEDDINGS]

    # Arguments: defaults first, then the model, then those of the source. A None in the source must
    # not hide a default.
    config = dataclasses.asdict(model_config(source.args, weights.shape[0], source.description))
    del config["transformer_impl"]  # nothing is computed here
    args = {**config, "params_dtype": weights.dtype}
    for name, value in source.args.items():
        if value is not None or name not in LOADER_DEFAULTS:
            args[name] = value
    args = add_loader_defaults(args)
    args |= {"ckpt_format": "torch_dist", "use_dist_ckpt": True}
    # Megatron-LM's reader requests only what these arguments announce.
    args["no_save_optim"] = training is None or training.param_groups is None
    args["no_save_rng"] = training is None or not training.rng
    args.setdefault("consumed_train_samples", 0)
    args.setdefault("consumed_valid_samples", 0)

    is_stacked = isinstance(source, StackedLayers)
    common = build_common_state(argparse.Namespace(**args), training, stacked=is_stacked)
    if training is not None and training.param_groups is not None:
        optimizer: dict[str, Any] = {"optimizer": {"param_groups": training.param_groups}}
        if training.grad_scaler is not None:
            optimizer["grad_scaler"] = build_grad_scaler(training.grad_scaler)
        optimizer["param_state_sharding_type"] = "fully_reshardable"
        common["optimizer"] = split_by_expert_optimizer(optimizer, args)
    if training is not None and training.scheduler is not None:
        common["opt_param_scheduler"] = training.scheduler
    return COMMON(common, source.description)  # the schema of the readers

"""torch_dist directories: a run's own, all of Megatron-LM's variants as a `Source`, and a `Source`
written as one.

Written in one process, a few megabytes at a time. Layers may be stacked: one tensor for each kind
of parameter, with a leading axis of layers. It is the form that Megatron-core writes for models
whose layers are all alike, and the only one that its newer model classes ask for.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
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
from megatron.conversion.megatron_lm.bridge import RUN_CONFIG, bridge_common
from megatron.conversion.megatron_lm.extra_states import build_extra_states
from megatron.conversion.megatron_lm.legacy_files import MegatronRank
from megatron.conversion.megatron_lm.optimizer_state import (
    PieceTable,
    by_optimizer,
    fit_buckets,
    has_optimizer,
    refuse_unknown_optimizer,
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
from megatron.conversion.model_space.pieces import ReadFlat, make_region_reader
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

_COMMON_STATE = "common_state/shard_0_1"  # in newer Megatron-LM in place of common.pt
_STATE = re.compile(r"optimizer\.state\.(\w+)\.(.+)")
_NAMES = {"fp32_param": "param"}  # of states, where they differ
_BUCKET = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_\(.*\)\.bucket_idx_(\d+)\.(\w+)"
)
Buckets = dict[tuple[int, int, int, int, str], str]  # optimizer, rank, chunk, number, state -> key
_ORIGINAL_SHAPE = "nd_reformulated_orig_global_shape"  # of a tensor in fragments
_ORIGINALS = mapping(optional(record({f"{_ORIGINAL_SHAPE}?": optional(SHAPE)})))
_OURS = ("embedding.", "decoder.", "output_layer.", "optimizer.")
_NUMBERED = re.compile(r"decoder\.layers\.\d+\.")


def stored_common(reader: Reader, directory: Path, verify: bool = True) -> dict[str, Any]:
    """What stands beside the tensors: `common.pt`, or an object in newer Megatron-LM."""
    common = load_common(directory, verify=verify)
    return (
        reader.read_object(_COMMON_STATE)
        if not common and _COMMON_STATE in reader.metadata.objects
        else common
    )


def open_torch_dist(directory: Path, read_options: ReadOptions) -> Source:
    """What a run here saved is presented as it is, if that is asked for, and all else in model
    space.
    """
    if read_options.as_saved:
        verify = read_options.verify is not False
        common = COMMON(load_common(directory, verify=verify), str(directory / COMMON_FILE))
        if (common.get("content_metadata") or {}).get("non_homogeneous_layers"):
            run = RunCheckpoint(directory, common, verify)
            # Earlier versions had another key for the norm before experts: the reader of all forms
            # knows both.
            if all(
                find_norm_key(key, run.tensors) == key
                for key in run.tensors
                if not key.startswith("optimizer.")
            ):
                return run
    return TorchDistSource(directory, read_options)


def _generators(reader: Reader) -> dict[str, Callable[[], Any]]:
    """The state of every rank's random generators, read when it is asked for."""
    return {
        key: partial(reader.read_object, key)
        for key in reader.metadata.objects
        if key.startswith("rng_state/")
    }


class TorchDistSource:
    """One iteration directory. Layers may be stacked or numbered, and the optimizer in any of
    Megatron-LM's forms: fully_reshardable, dp_reshardable (flat buckets), fully_sharded_model_space
    (0.12), or not distributed.
    """

    def __init__(self, directory: Path, read_options: ReadOptions | None = None) -> None:
        read_options = read_options or ReadOptions()
        optimizer = read_options.optimizer
        verify = read_options.verify is not False
        self.description = f"torch_dist checkpoint {directory}"
        self._reader = Reader(directory, verify=verify)
        stored = self._reader.metadata
        if not any(key.startswith(_OURS) for key in stored.tensors) and any(
            "model." in key for key in stored.tensors
        ):
            raise CheckpointError(
                f"{directory}: a checkpoint of Megatron-FSDP (fsdp_dtensor, keys such as {next(iter(stored.tensors))}) "
                "is not read here: save that run with --ckpt-format torch_dist"
            )
        common = stored_common(self._reader, directory, verify)
        if "args" not in common and (directory / RUN_CONFIG).is_file():
            common = bridge_common(directory, common)
        self.args = read_arguments(common, str(directory))
        self.unused: list[str] = []
        self._table = PieceTable(self.description)
        self._num_layers = int(self.args["num_layers"])
        self._originals = _ORIGINALS(stored.extra.get("mcore_data", {}), f"{directory}: mcore_data")
        if optimizer:
            states = [match[5] for match in map(_BUCKET.fullmatch, stored.tensors) if match]
            states += [
                _NAMES.get(match[1], match[1])
                for match in map(_STATE.fullmatch, stored.tensors)
                if match
            ]
            if states:
                refuse_unknown_optimizer(self.args, states, self.description)
        buckets: Buckets = {}
        for key in stored.tensors:
            if optimizer and (match := _BUCKET.fullmatch(key)):
                place = (int(match[1] or 0), int(match[2]), int(match[3]), int(match[4]), match[5])
                buckets[place] = key
            elif optimizer or not key.startswith(("optimizer.", "chained_")):
                self._add(key)
        # The rows that are stored define the vocabulary: Megatron-LM stores its padding, runs here
        # do not.
        rows = read_vocabulary_rows(self._table.tensors, str(directory))
        self.args["model_vocab_size"] = rows
        self.config = model_config(self.args, rows, self.description)
        groups = find_param_groups(common.get("optimizer")) if optimizer else None
        if buckets:
            self._add_buckets(buckets)
            name = "optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1"
            keys = [key for key in (name, f"chained_0.{name}") if key in stored.objects]
            groups = groups or (
                find_param_groups(self._reader.read_object(keys[0])) if keys else None
            )
        self._table.complete(has_optimizer(self.args, self._table.tensors, groups))
        self.training: TrainingState | None = read_training_state(common, self.args, groups)
        self.training.rng = _generators(self._reader)
        self.tensors = self._table.tensors
        self._check_model(directory)

    def read(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        return self._table.read(key, offset, shape)

    def _add(self, key: str) -> None:
        """One stored tensor: a whole global tensor, or that of all layers stacked."""
        match = _STATE.fullmatch(key)
        name = find_norm_key(match[2] if match else key, self._reader.metadata.tensors)
        state = _NAMES.get(match[1], match[1]) if match else None
        stored = self._reader.metadata.tensors[key]
        original = (self._originals.get(key) or {}).get(_ORIGINAL_SHAPE)
        stacked = name.startswith("decoder.layers.") and not _NUMBERED.match(name)
        if stacked and stored.shape[:1] != (self._num_layers,):
            raise CheckpointError(
                f"{self.description}: {key} has shape {stored.shape}, the arguments say {self._num_layers} layers"
            )
        for layer in range(self._num_layers) if stacked else [None]:
            lead: Shape = () if layer is None else (layer,)
            own = (
                name
                if layer is None
                else name.replace("decoder.layers.", f"decoder.layers.{layer}.", 1)
            )
            target = optimizer_key(state, own) if state else own
            if original is None:
                shape = stored.shape[len(lead) :]
                info = TensorInfo(shape, stored.dtype)
                self._table.add(target, info, (0,) * len(shape), shape, self._region(key, lead))
            else:
                self._add_fragments(key, target, lead, tuple(original)[len(lead) :])

    def _region(self, key: str, lead: Shape) -> Callable[[Shape, Shape], torch.Tensor]:
        def read(offset: Shape, shape: Shape) -> torch.Tensor:
            return self._reader.read(key, lead + offset, (1,) * len(lead) + shape).view(shape)

        return read

    def _add_fragments(self, key: str, target: str, lead: Shape, shape: Shape) -> None:
        """0.12's model space: the tensor is cut into a grid of equal fragments, each stored flat."""
        stored = self._reader.metadata.tensors[key]
        grid = stored.shape[len(lead) : -1]
        # Each is a piece of its own in the files, which also bounds how many there are.
        if (
            len(grid) != len(shape)
            or not 0 < math.prod(grid) <= len(stored.chunks)
            or any(map(operator.mod, shape, grid))
        ):
            raise CheckpointError(
                f"{self.description}: {key} of shape {shape} lies in a grid of {grid} fragments"
            )
        extent = tuple(n // parts for n, parts in zip(shape, grid, strict=True))
        for index in (
            torch.cartesian_prod(*(torch.arange(n) for n in grid)).view(-1, len(grid)).tolist()
        ):
            offset = tuple(i * n for i, n in zip(index, extent, strict=True))
            region = make_region_reader(self._flat_reader(key, (*lead, *index)), 0, extent)
            self._table.add(target, TensorInfo(shape, stored.dtype), offset, extent, region)

    def _add_buckets(self, buckets: Buckets) -> None:
        """dp_reshardable: flat buckets of every model-parallel rank, cut by the rules that filled
        them.
        """
        layout = Layout.from_args(self.args)
        apart = layout.parallel.ep_size > 1  # experts have an optimizer of their own
        ranks: list[tuple[int, int, MegatronRank]] = []  # optimizer, its place among those, rank
        ranks += [(0, place, MegatronRank(*rank)) for place, rank in enumerate(layout.ranks)]
        # Every rank of the experts' grid but their replicas, ETP fastest.
        sizes = (layout.parallel.pp_size, layout.parallel.ep_size, layout.parallel.etp_size)
        grid = itertools.product(*map(range, sizes)) if apart else ()
        ranks += [
            (1, place, MegatronRank(0, pp, (etp, ep))) for place, (pp, ep, etp) in enumerate(grid)
        ]
        for optimizer, place, rank in ranks:
            chunks = rank_parameters(
                self.config, layout, rank.tp, rank.pp, 1, rank.expert, self.args
            )
            for chunk, parameters in enumerate(by_optimizer(chunks, apart)[optimizer]):
                if parameters:
                    self._add_chunk(
                        buckets,
                        (optimizer, place, chunk),
                        parameters,
                        f"{self.description}, {rank}",
                    )
        self.unused += sorted(buckets.values())

    def _add_chunk(
        self,
        buckets: Buckets,
        place: tuple[int, int, int],
        parameters: Sequence[LocalParameter],
        where: str,
    ) -> None:
        """The buckets of one chunk, taken out of `buckets`; `place` is (optimizer, rank, chunk)."""
        for state in sorted({state for *_, state in buckets}):
            keys: list[str] = []
            # Buckets are numbered without gaps; whatever is left over at the end is reported as
            # unused.
            while (*place, len(keys), state) in buckets:
                keys.append(buckets.pop((*place, len(keys), state)))
            stored = [self._reader.metadata.tensors[key] for key in keys]
            if any(len(entry.shape) != 1 for entry in stored):
                raise CheckpointError(
                    f"{where}: buckets of shapes {[entry.shape for entry in stored]} are not flat"
                )
            for parameter, bucket, start in fit_buckets(
                parameters, [entry.shape[0] for entry in stored], where
            ):
                key = optimizer_key(state, parameter.key)
                flat = self._flat_reader(keys[bucket], ())
                self._table.add_local(key, parameter, stored[bucket].dtype, flat, start)

    def _flat_reader(self, key: str, place: Shape) -> ReadFlat:
        """Elements of the stored tensor along its last axis, at `place` on the others."""

        def read(start: int, count: int) -> torch.Tensor:
            return self._reader.read(key, (*place, start), (1,) * len(place) + (count,)).view(-1)

        return read

    def _check_model(self, directory: Path) -> None:
        """The arguments describe exactly the weights that are there."""
        wanted = model_tensors(self.config)
        check_parameters(self.tensors, wanted, str(directory))
        known = set(wanted) | {
            optimizer_key(state, key) for state in OPTIMIZER_STATES for key in wanted
        }
        self.unused += sorted(set(self.tensors) - known)
        # Objects that carry nothing to convert, or that are read elsewhere.
        read = ("rng_state/", "optimizer.distributed.", "chained_", "common_state/", "rerun_state")
        objects = [
            key
            for key in self._reader.metadata.objects
            if not is_extra_state(key) and not key.startswith(read)
        ]
        self.unused += sorted(objects)
        self.tensors = {key: info for key, info in self.tensors.items() if key in known}
        check_optimizer_complete(self.tensors, str(directory))


_POSITION = record({"iteration": COUNT, "num_floating_point_operations_so_far": number(0)})
_CONSUMED = record({"consumed_train_samples": COUNT, "consumed_valid_samples": COUNT})


class RunCheckpoint:
    """A torch_dist directory that a run of this program saved: its keys are model space, whatever
    the model is.

    `common` is the content of its common.pt.
    """

    def __init__(self, directory: Path, common: Mapping[str, Any], verify: bool = True) -> None:
        self.description = str(directory)
        if "args" not in common:
            raise CheckpointError(
                f"{directory} holds tensors, but not the arguments and the state of a training run"
            )
        self.args: dict[str, Any] = dict(vars(common["args"]))
        if "iteration" in common or "optimizer" in common:  # else it is a released model, converted
            _POSITION(common, f"{directory}: the state of the run")
            _CONSUMED(self.args, f"{directory}: the arguments of the run")
        self.reader = Reader(directory, verify=verify)
        self.unused: list[str] = []
        stored = self.reader.metadata
        self.tensors = {
            key: TensorInfo(tensor.shape, tensor.dtype) for key, tensor in stored.tensors.items()
        }
        self.training: TrainingState | None = read_training_state(
            common, self.args, find_param_groups(common.get("optimizer"))
        )
        self.training.rng = _generators(self.reader)

    def read(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        return self.reader.read(key, offset, shape)


_LAYER = re.compile(r"((?:optimizer\.state\.\w+\.)?decoder\.layers\.)(\d+)\.(.+)")


class StackedLayers:
    """`source` with stacked layers; its layers must be alike."""

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
        found: dict[str, dict[int, str]] = {}
        for key, info in source.tensors.items():
            match = _LAYER.fullmatch(key)
            if match is None:
                self.tensors[key] = info
                continue
            found.setdefault(match[1] + match[3], {})[int(match[2])] = key
        for key, layers in found.items():
            infos = {source.tensors[layer] for layer in layers.values()}
            if len(infos) > 1 or len(layers) != self.num_layers:
                raise ValueError(
                    f"{self.description}: {key} is not alike in all {self.num_layers} layers"
                )
            (info,) = infos
            self.tensors[key] = TensorInfo((len(layers), *info.shape), info.dtype)
            self._layers[key] = [layers[number] for number in range(self.num_layers)]

    def read(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        if key not in self._layers:
            return self._source.read(key, offset, shape)
        layers = self._layers[key][offset[0] : offset[0] + shape[0]]
        return torch.stack([self._source.read(layer, offset[1:], shape[1:]) for layer in layers])


def stacked_key(key: str, num_layers: int) -> str:
    """The key of a layer's object as a place in the grid of all layers."""
    match = _LAYER.fullmatch(key)
    if match is None:
        return key
    module, _, grid = (match[1] + match[3]).rpartition("/shard_")
    if grid == "0_1":
        return f"{module}/shard_{match[2]}_{num_layers}"
    expert, _, experts = grid.partition("_")
    return f"{module}/shard_{match[2]}.{expert}_{num_layers}.{experts}"


def write_torch_dist(
    source: Source, directory: Path, files: int = 1, progress: Progress = no_progress
) -> list[str]:
    """Write `directory` (an iteration), `files` files at once; it appears complete or not at all.

    Returns what could not be carried: nothing.
    """
    state: ShardedStateDict = {
        key: ShardedTensor.lazy(key, info.shape, info.dtype, partial(source.read, key))
        for key, info in source.tensors.items()
    }
    # What Megatron-core asks for, and the generators, for a run that goes on at the layout they
    # belong to.
    state |= _extra_states(source)
    rng = source.training.rng if source.training is not None else {}
    state |= {key: ShardedObject(key, read()) for key, read in rng.items()}
    save(state, directory, common=_common(source), workers=files, progress=progress)
    return []


def _extra_states(source: Source) -> ShardedStateDict:
    experts = int(source.args.get("num_experts") or 0)
    if not isinstance(source, StackedLayers):
        return {**build_extra_states(source.tensors, experts)}
    entries = build_extra_states(source.by_layer, experts).values()
    keys = [stacked_key(entry.key, source.num_layers) for entry in entries]
    return {key: ShardedObject(key, entry.value) for key, entry in zip(keys, entries, strict=True)}


def _common(source: Source) -> dict[str, Any]:
    """`common.pt` of a checkpoint with the arguments and the training state of `source`."""
    training = source.training
    weights = source.tensors[WORD_EMBEDDINGS]
    config = dataclasses.asdict(model_config(source.args, weights.shape[0], source.description))
    # Defaults first, then the model, then what the source says: None in the source must not hide a
    # default.
    told = {
        name: value
        for name, value in source.args.items()
        if value is not None or name not in LOADER_DEFAULTS
    }
    del config["transformer_impl"]  # nothing is computed here
    args = add_loader_defaults(config | {"params_dtype": weights.dtype} | told)
    args |= {"ckpt_format": "torch_dist", "use_dist_ckpt": True}
    # Megatron-LM's reader takes the checkpoint's word for what it may ask for.
    args["no_save_optim"] = training is None or training.param_groups is None
    args["no_save_rng"] = training is None or not training.rng
    args.setdefault("consumed_train_samples", 0)
    args.setdefault("consumed_valid_samples", 0)
    common = build_common_state(
        argparse.Namespace(**args), training, stacked=isinstance(source, StackedLayers)
    )
    if training is not None and training.param_groups is not None:
        optimizer: dict[str, Any] = {"optimizer": {"param_groups": training.param_groups}}
        if training.grad_scaler is not None:
            optimizer["grad_scaler"] = build_grad_scaler(training.grad_scaler)
        optimizer["param_state_sharding_type"] = "fully_reshardable"
        common["optimizer"] = split_by_expert_optimizer(optimizer, args)
    if training is not None and training.scheduler is not None:
        common["opt_param_scheduler"] = training.scheduler
    return COMMON(common, source.description)  # the schema of the readers

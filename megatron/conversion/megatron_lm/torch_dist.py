"""Reader of torch_dist directories: a run's own, and all of Megatron-LM's variants.

Layers may be stacked: one tensor for each kind of parameter, with a leading axis of layers.
Megatron-core writes this form for models whose layers all have equal shapes, and its newer model
classes require it.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.conversion.megatron_lm.args import (
    find_all_param_groups,
    read_arguments,
    read_common,
)
from megatron.conversion.megatron_lm.bridge import RUN_CONFIG, read_bridge_common
from megatron.conversion.megatron_lm.fsdp import MegatronFsdpSource, is_megatron_fsdp
from megatron.conversion.megatron_lm.hybrid import (
    find_pattern,
    make_gpt_arguments,
    make_gpt_key,
)
from megatron.conversion.megatron_lm.legacy_files import MegatronRank, list_expert_ranks
from megatron.conversion.megatron_lm.nemo_context import is_nemo, read_nemo_common
from megatron.conversion.megatron_lm.optimizer_state import (
    PieceTable,
    fit_buckets,
    has_optimizer,
    refuse_unknown_optimizer,
    split_by_optimizer,
)
from megatron.conversion.model_space.foreign import foreign_key
from megatron.conversion.model_space.layouts import Layout, LocalParameter, rank_parameters
from megatron.conversion.model_space.lazy_tensors import select, unflatten
from megatron.conversion.model_space.model import (
    check_optimizer_complete,
    check_parameters,
    model_config,
    model_tensors,
    read_vocabulary_rows,
)
from megatron.conversion.model_space.optimizer_states import (
    OPTIMIZER_STATES,
    average_key,
    has_mixed_states,
    list_parameter_states,
    optimizer_key,
)
from megatron.conversion.options import ReadOptions, rename_tensors
from megatron.conversion.stored_tokenizer import find_stored_tokenizer
from megatron.core.dist_checkpointing import (
    CheckpointError,
    Reader,
    is_complete,
    read_metadata,
)
from megatron.core.dist_checkpointing.mapping import LazyTensor, Shape
from megatron.core.run_checkpoint.common_state import (
    find_param_groups,
    read_training_state,
)
from megatron.core.run_checkpoint.keys import (
    AVERAGE,
    WORD_EMBEDDINGS,
    find_norm_key,
    is_extra_state,
    is_hybrid,
    split_key,
)
from megatron.core.run_checkpoint.native_reader import list_generators
from megatron.core.run_checkpoint.source import Source, TrainingState
from megatron.core.safe_files.schema import mapping, optional, record, tensor_shape

_TITAN_EMBEDDING = "tok_embeddings.weight"  # also of torchtune
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
_RENAMED_STATES = {"fp32_param": "param"}
_BUCKET = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)"
    r"\.dtype_\(.*\)\.bucket_idx_(\d+)\.(\w+)"
)

_GATHERED_STATE = re.compile(
    r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.param_state/.*"
)


class _ChunkPlace(NamedTuple):
    """Place of a model chunk in dp_reshardable state."""

    optimizer: int  # 0 of dense layers, 1 of experts
    rank: int  # among the model-parallel ranks of that optimizer
    chunk: int


# Keys of flat buckets by (chunk, number of the bucket, optimizer state).
Buckets = dict[tuple[_ChunkPlace, int, str], str]
_OPTIMIZER_OBJECT = "optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1"
_ORIGINAL_SHAPE = "nd_reformulated_orig_global_shape"  # of a tensor in fragments
_ORIGINALS = mapping(optional(record({f"{_ORIGINAL_SHAPE}?": optional(tensor_shape)})))
_NUMBERED = re.compile(r"decoder\.layers\.\d+\.")
# Objects without content to convert, or that are read elsewhere.
IGNORED_OBJECTS = (
    "rng_state/",
    "reference_margins/",
    "optimizer.distributed.",
    "chained_",
    "common_state/",
    "rerun_state",
)


def open_torch_dist(directory: Path, read_options: ReadOptions) -> Source:
    """Open a checkpoint of any program, converting its keys to model space."""
    # Without `common.pt` another program may have written the directory through DCP.
    if not is_complete(directory):
        keys = read_metadata(directory).tensors
        if is_megatron_fsdp(keys):
            return MegatronFsdpSource(directory, read_options)
        if _TITAN_EMBEDDING in keys or f"model.{_TITAN_EMBEDDING}" in keys:
            raise CheckpointError(
                f"{directory}: a DCP directory of torchtitan or torchtune: copy the model's "
                "config.json of transformers into it, which defines the model"
            )
    return TorchDistSource(directory, read_options)


class TorchDistSource:
    """A torch_dist iteration directory of any variant.

    Layers may be stacked or numbered. The optimizer may have any of Megatron-LM's forms:
    fully_reshardable, dp_reshardable (flat buckets), fully_sharded_model_space (0.12), or not
    distributed.
    """

    def __init__(
        self,
        directory: Path,
        read_options: ReadOptions | None = None,
        compares_weights: bool = True,
    ) -> None:
        read_options = read_options or ReadOptions()
        with_optimizer = not read_options.no_optim
        verify = read_options.verify_source is not False
        location = str(directory)
        self.description = f"torch_dist checkpoint {directory}"
        self._reader = Reader(
            directory, verify=verify, waits_for_shards=read_options.waits_for_shards
        )
        metadata = self._reader.metadata
        # Name of every tensor -> its key in the files.
        names = {key: key for key in metadata.tensors}
        self._keys = rename_tensors(names, read_options.renames, self.description)

        # Arguments
        common = self._read_common(directory, verify)
        self.args = read_arguments(common, location)
        self.args |= find_stored_tokenizer(self.args, directory)
        self._num_layers = int(self.args["num_layers"])
        self._originals = _ORIGINALS(
            metadata.extra.get("mcore_data", {}), f"{location}: mcore_data"
        )

        # Weights, and optimizer state except flat buckets
        self.unused: list[str] = []
        self._table = PieceTable(self.description, compares_weights)
        if with_optimizer:
            self._refuse_gathered_optimizer()
            self._check_optimizer_states(self._keys)
        buckets = self._add_stored_tensors(with_optimizer)

        # The model. The stored rows define the vocabulary: Megatron-LM stores its padding, runs
        # here do not.
        rows = read_vocabulary_rows(self._table.tensors, location)
        self.args["model_vocab_size"] = rows
        self.config = model_config(self.args, rows, self.description)

        # Flat buckets, which need the model
        groups = None
        if with_optimizer:
            groups = self._read_groups(common.get("optimizer"))
        if buckets:
            self._add_buckets(buckets)
        self._table.complete(has_optimizer(self.args, self._table.tensors, groups))

        # Training state
        self.training: TrainingState | None = read_training_state(common, self.args, groups)
        self.training.rng = list_generators(self._reader)
        self.tensors: dict[str, LazyTensor] = self._table.tensors
        self._check_model(directory, read_options.keep_foreign is True)

    def _read_common(self, directory: Path, verify: bool) -> dict[str, Any]:
        """Return the common state, with arguments of a GPT model.

        Renames the tensors of a HybridModel as in a GPT model.
        """
        common = read_common(self._reader, directory, verify)
        # Megatron-Bridge stores its configuration in a file of its own.
        if "args" not in common and (directory / RUN_CONFIG).is_file():
            common = read_bridge_common(directory, common)
        elif "args" not in common and is_nemo(directory.parent):
            common = read_nemo_common(directory.parent, common)
            dtype = self._reader.metadata.tensors[self._keys[WORD_EMBEDDINGS]].dtype
            common["args"].params_dtype = dtype
        if "args" in common and is_hybrid(self._keys):
            pattern = find_pattern(self._keys, self.description)
            args = make_gpt_arguments(common["args"], pattern, self._keys)
            common = common | {"args": args}
            self._keys = {make_gpt_key(name): key for name, key in self._keys.items()}
        return common

    def _add_stored_tensors(self, with_optimizer: bool) -> Buckets:
        """Add all tensors except flat buckets of the optimizer, which are returned."""
        buckets: Buckets = {}
        for name, key in self._keys.items():
            match = _BUCKET.fullmatch(name)
            if match is not None and with_optimizer:
                optimizer, rank, chunk, bucket, state = match.groups()
                owner = int(optimizer or 0)
                if has_mixed_states(self.args):
                    owner = 0  # 0 has the matrices, one by one; the rest is in flat buckets
                chunk_place = _ChunkPlace(owner, int(rank), int(chunk))
                buckets[chunk_place, int(bucket), state] = key
                continue
            is_optimizer_state = name.startswith(("optimizer.", "chained_"))
            if with_optimizer or not is_optimizer_state:
                self._add(name, key)
        return buckets

    def _refuse_gathered_optimizer(self) -> None:
        """Raise CheckpointError for optimizer state in an object instead of tensors.

        Core 0.12 and earlier gather it on a rank without --ckpt-fully-parallel-save.
        """
        for key in self._reader.metadata.objects:
            if _GATHERED_STATE.fullmatch(key):
                raise CheckpointError(
                    f"{self.description}: the optimizer state was gathered on a rank ({key}), "
                    "which is not read: save it again with --ckpt-fully-parallel-save or "
                    "--ckpt-format torch in Megatron-LM, or leave it out (--no-optim of "
                    "convert.py, --no-load-optim of a run)"
                )

    def _check_optimizer_states(self, keys: Iterable[str]) -> None:
        """Raise CheckpointError if the keys contain the state of an unsupported optimizer."""
        states: list[str] = []
        for key in keys:
            bucket = _BUCKET.fullmatch(key)
            if bucket is not None:
                states.append(bucket[5])
                continue
            _, state = split_stored_key(key)
            if state is not None and state != AVERAGE:
                states.append(state)
        if states:
            refuse_unknown_optimizer(self.args, states, self.description, allows_mixed=True)

    def _add(self, name: str, key: str) -> None:
        """Add one stored tensor: a whole global tensor, or the tensor of all layers stacked."""
        parameter, state = split_stored_key(name)
        parameter = find_norm_key(parameter, self._keys)
        layers = "decoder.layers."
        is_stacked = parameter.startswith(layers) and not _NUMBERED.match(parameter)
        if not is_stacked:
            self._add_layer(key, parameter, state, lead=())
            return

        # The first axis of a stacked tensor is that of the layers.
        entry = self._reader.metadata.tensors[key]
        if entry.shape[:1] != (self._num_layers,):
            raise CheckpointError(
                f"{self.description}: {key} has shape {entry.shape}, the arguments specify "
                f"{self._num_layers} layers"
            )
        for layer in range(self._num_layers):
            layer_parameter = parameter.replace(layers, f"{layers}{layer}.", 1)
            self._add_layer(key, layer_parameter, state, lead=(layer,))

    def _add_layer(self, key: str, parameter: str, state: str | None, lead: Shape) -> None:
        """Add the part of the stored tensor `key` at index `lead` of its first axes.

        It is the weight of a parameter, or an optimizer state or average of it.
        """
        target = parameter
        if state == AVERAGE:
            target = average_key(parameter)
        elif state is not None:
            target = optimizer_key(state, parameter)

        # Flattened optimizer state is stored in fragments of the original shape.
        extra = self._originals.get(key) or {}
        original_shape = extra.get(_ORIGINAL_SHAPE)
        if original_shape is not None:
            shape = tuple(original_shape)[len(lead) :]
            self._add_fragments(key, target, lead, shape)
            return

        self._table.add_whole(target, self._view(key, lead))

    def _view(self, key: str, lead: Shape) -> LazyTensor:
        """Return the stored tensor at index `lead` of its first axes."""
        tensor = self._reader.view(key)
        for index in lead:
            tensor = select(tensor, index)
        return tensor

    def _add_fragments(self, key: str, target: str, lead: Shape, shape: Shape) -> None:
        """Add a tensor of 0.12's model space: a grid of equal fragments, each stored flat.

        The stored tensor is [*lead axes, *grid, elements of a fragment].
        """
        entry = self._reader.metadata.tensors[key]
        grid = entry.shape[len(lead) : -1]
        # Each fragment is a piece of its own in the files, which also bounds their number.
        is_grid = len(grid) == len(shape) and 0 < math.prod(grid) <= len(entry.chunks)
        if not is_grid or any(map(operator.mod, shape, grid)):
            raise CheckpointError(
                f"{self.description}: {key} of shape {shape} is stored as a grid of {grid} "
                "fragments"
            )

        extent = tuple(map(operator.floordiv, shape, grid))  # of each fragment
        for index in itertools.product(*map(range, grid)):
            offset = tuple(map(operator.mul, index, extent))
            fragment = unflatten(self._view(key, lead + index), 0, extent)
            self._table.add(target, shape, offset, fragment)

    def _add_buckets(self, buckets: Buckets) -> None:
        """Add dp_reshardable state: flat buckets of every model-parallel rank.

        They are cut by the rules that filled them.
        """
        # The ranks of the optimizer of dense layers, and of that of experts
        layout = Layout.from_args(self.args)
        has_expert_optimizer = layout.parallel.ep_size > 1
        ranks_by_optimizer = [[MegatronRank(tp, pp) for tp, pp in layout.ranks]]
        if has_expert_optimizer:
            ranks_by_optimizer.append(list_expert_ranks(layout.parallel))

        # Before any bucket is added, the table has the states that are not in buckets: matrices of
        # a layer-wise optimizer, which have tensors of their own.
        stored_apart = set(self._table.tensors)
        for optimizer, ranks in enumerate(ranks_by_optimizer):
            for index, rank in enumerate(ranks):
                chunks = rank_parameters(
                    self.config, layout, rank.tp, rank.pp, 1, rank.expert, self.args
                )
                trained_chunks = split_by_optimizer(chunks, has_expert_optimizer)[optimizer]
                for chunk, trained in enumerate(trained_chunks):
                    in_buckets = []
                    for parameter in trained:
                        if not list_parameter_states(parameter.key, stored_apart):
                            in_buckets.append(parameter)
                    if in_buckets:
                        chunk_place = _ChunkPlace(optimizer, index, chunk)
                        self._add_chunk(
                            buckets, chunk_place, in_buckets, f"{self.description}, {rank}"
                        )
        self.unused += sorted(buckets.values())

    def _add_chunk(
        self,
        buckets: Buckets,
        chunk_place: _ChunkPlace,
        parameters: Sequence[LocalParameter],
        location: str,
    ) -> None:
        """Add the buckets of one chunk and remove them from `buckets`."""
        states = {state for _, _, state in buckets}
        for state in sorted(states):
            # Buckets are numbered without gaps; the remaining ones are reported as unused.
            keys: list[str] = []
            while (chunk_place, len(keys), state) in buckets:
                key = buckets.pop((chunk_place, len(keys), state))
                keys.append(key)

            # Each bucket is a tensor of one axis.
            entries = [self._reader.metadata.tensors[key] for key in keys]
            shapes = [entry.shape for entry in entries]
            if any(len(shape) != 1 for shape in shapes):
                raise CheckpointError(f"{location}: buckets of shapes {shapes} are not flat")
            sizes = [shape[0] for shape in shapes]

            # Cut the parameters out of them.
            for parameter, bucket, start in fit_buckets(parameters, sizes, location):
                key = optimizer_key(state, parameter.key)
                self._table.add_local(key, parameter, self._reader.view(keys[bucket]), start)

    def _read_groups(self, optimizer: Any) -> list[dict[str, Any]] | None:
        """Return the parameter groups of the optimizer, if they are stored.

        They are in `optimizer` of the common state, or in an object for dp_reshardable state.
        """
        group_keys = []
        for prefix in ("", "chained_0.", "chained_1."):
            key = f"{prefix}{_OPTIMIZER_OBJECT}"
            if key in self._reader.metadata.objects:
                group_keys.append(key)
        if has_mixed_states(self.args):
            objects = [self._reader.read_object(key) for key in group_keys]
            return find_all_param_groups([optimizer, *objects])
        groups = find_param_groups(optimizer)
        if groups is None and group_keys:
            groups = find_param_groups(self._reader.read_object(group_keys[0]))
        return groups

    def _check_model(self, directory: Path, keep_foreign: bool) -> None:
        """Raise CheckpointError unless the arguments describe exactly the stored weights.

        Other tensors become foreign tensors with `keep_foreign`, else they are unused.
        """
        expected_shapes = model_tensors(self.config)
        check_parameters(self.tensors, expected_shapes, str(directory))

        # Set tensors aside that are neither weights nor optimizer state of the model.
        kept_tensors: dict[str, LazyTensor] = {}
        known_states = (None, AVERAGE, *OPTIMIZER_STATES)
        for key, tensor in self.tensors.items():
            parameter, state = split_key(key)
            if parameter in expected_shapes and state in known_states:
                kept_tensors[key] = tensor
            elif keep_foreign and state is None:
                kept_tensors[foreign_key(key)] = tensor
            elif not self._table.is_implied(key):
                self.unused.append(key)
        self.unused.sort()

        # The same for objects.
        for key in sorted(self._reader.metadata.objects):
            if not is_extra_state(key) and not key.startswith(IGNORED_OBJECTS):
                self.unused.append(key)
        self.tensors = kept_tensors
        check_optimizer_complete(self.tensors, self.args, str(directory))


def split_stored_key(key: str) -> tuple[str, str | None]:
    """Return the parameter of a stored key, and its optimizer state under our name, if any."""
    match = _STATE.fullmatch(key)
    if match is None:
        return split_key(key)
    state, parameter = match.groups()
    return parameter, _RENAMED_STATES.get(state, state)

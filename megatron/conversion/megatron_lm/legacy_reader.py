"""Reader for Megatron-LM's legacy directories (`mp_rank_XX[_YYY]/model_optim_rng.pt`)."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.conversion.megatron_lm.args import read_arguments
from megatron.conversion.megatron_lm.legacy_files import (
    FOREIGN,
    MegatronRank,
    find_first_legacy_file,
    open_legacy,
)
from megatron.conversion.megatron_lm.legacy_foreign import (
    ForeignPart,
    join_foreign,
)
from megatron.conversion.megatron_lm.optimizer_state import (
    BufferPlan,
    PieceTable,
    compute_bucket_size,
    count_elements,
    has_optimizer,
    plan_buckets,
    refuse_unknown_optimizer,
    split_by_optimizer,
)
from megatron.conversion.model_space.foreign import check_stored_tensor, foreign_key, open_foreign
from megatron.conversion.model_space.layouts import (
    Layout,
    LocalParameter,
    make_local_name,
    rank_parameters,
    rename_prediction_layer,
)
from megatron.conversion.model_space.lazy_tensors import (
    flatten,
    transpose,
    unflatten,
    view_elements,
    view_stored,
)
from megatron.conversion.model_space.model import check_optimizer_complete, model_config
from megatron.conversion.model_space.optimizer_states import optimizer_key
from megatron.conversion.options import ReadOptions
from megatron.conversion.stored_tokenizer import find_stored_tokenizer
from megatron.core.dist_checkpointing import CheckpointError, Shape
from megatron.core.dist_checkpointing.mapping import LazyTensor
from megatron.core.run_checkpoint.checks import COMMON, check_scalar
from megatron.core.run_checkpoint.common_state import (
    find_param_groups,
    read_training_state,
    rng_key,
)
from megatron.core.run_checkpoint.keys import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    WORD_EMBEDDINGS,
    find_norm_key,
)
from megatron.core.run_checkpoint.source import TrainingState
from megatron.core.safe_files import FileTensor, load_file_tensors, schema
from megatron.core.safe_files.schema import COUNT, anything, mapping, record, sequence

Stored = FileTensor | torch.Tensor | LazyTensor


@dataclass(frozen=True)
class _RankFiles:
    """The directory of one rank, with the content of its model file except tensors."""

    rank: MegatronRank
    folder: Path
    content: dict[str, Any]


class _Surplus(NamedTuple):
    """An entry of a rank's model that is not one of its parameters."""

    file: _RankFiles
    layers: range  # of the chunk
    name: str
    value: Stored


class LegacySource:
    """A legacy iteration directory. Tensors stay in the files until they are read."""

    def __init__(self, directory: Path, read_options: ReadOptions | None = None) -> None:
        read_options = read_options or ReadOptions()
        with_optimizer = not read_options.no_optim
        self.description = f"legacy checkpoint {directory}"

        # The arguments in the first file determine the layout.
        first_file = find_first_legacy_file(directory)
        self.args = read_arguments(open_legacy(first_file), str(first_file))
        self.args |= find_stored_tokenizer(self.args, directory)
        self._layout = Layout.from_args(self.args)
        files = self._open_model_files(directory)
        self.unused = self._list_stale_folders(directory, files)
        first = files[0]

        # Files record the padded vocabulary only as the number of rows per rank. Megatron-LM trains
        # the rows of padding, so they are part of its model; ours records the size.
        rows_per_rank = _read_vocabulary_rows(first.content, first.folder)
        padded_size = rows_per_rank * self._layout.parallel.tp_size
        vocab_size = self.args.setdefault("model_vocab_size", padded_size)
        self.config = model_config(self.args, vocab_size, self.description)

        # Weights and optimizer state of each rank
        self._table = PieceTable(self.description)
        self._surplus: list[_Surplus] = []
        self._add_ranks(files, rows_per_rank, with_optimizer)

        # Parameter groups, which are the same on every rank, show whether there is an optimizer.
        groups = None
        if with_optimizer:
            groups = find_param_groups(first.content.get("optimizer"))
        self._table.complete(has_optimizer(self.args, self._table.tensors, groups))
        self.tensors: dict[str, LazyTensor] = dict(self._table.tensors)
        check_optimizer_complete(self.tensors, self.args, self.description)
        self._add_foreign(first, read_options)

        # Training state, and the generators of each rank
        self.training: TrainingState | None = read_training_state(first.content, self.args, groups)
        # With expert parallelism, several ranks share the key of a (tp, pp) pair.
        if self._layout.parallel.ep_size == 1:
            self.training.rng = _collect_generators(files, self._layout)

    def _open_model_files(self, directory: Path) -> list[_RankFiles]:
        """Return the opened model file of each rank of the layout."""
        parallel = self._layout.parallel
        world_size = int(self.args.get("world_size") or 0)
        files = []
        for rank in MegatronRank.list_all(parallel, world_size):
            folder = directory / rank.directory(parallel)
            path = folder / MODEL_FILE
            content = COMMON(open_legacy(path), str(path))
            files.append(_RankFiles(rank, folder, content))
        return files

    def _list_stale_folders(self, directory: Path, files: Sequence[_RankFiles]) -> list[str]:
        """Return the directories that look like a rank's but do not belong to the layout."""
        parallel = self._layout.parallel
        sizes = f"tensor parallel {parallel.tp_size}, pipeline parallel {parallel.pp_size}"
        rank_folders = {file.folder.name for file in files}
        all_folders = {path.name for path in directory.glob("mp_rank_*")}
        stale = []
        for name in sorted(all_folders - rank_folders):
            stale.append(f"{name} (the arguments specify {sizes})")
        return stale

    def _add_ranks(
        self, files: Sequence[_RankFiles], rows_per_rank: int, with_optimizer: bool
    ) -> None:
        """Add weights and optimizer state of all ranks."""
        is_sharded = with_optimizer and _has_sharded_optimizer(files)
        for file in files:
            expected = self._list_parameters(file.rank, rows_per_rank)
            chunks = self._add_weights(file, expected)
            if is_sharded:
                path = file.folder / OPTIMIZER_FILE
                optimizer = open_legacy(path, list, dict)
                self._add_optimizers(optimizer, path, file, chunks)
            elif with_optimizer:
                path = file.folder / MODEL_FILE
                optimizer = file.content.get("optimizer") or {}
                self._add_optimizers(optimizer, path, file, chunks)

    def _list_parameters(
        self, rank: MegatronRank, rows_per_rank: int
    ) -> list[list[LocalParameter]]:
        """Return the parameters of each chunk of the rank, which its layers determine."""
        return rank_parameters(
            self.config, self._layout, rank.tp, rank.pp, rows_per_rank, rank.expert, self.args
        )

    def _add_weights(
        self, file: _RankFiles, chunks: list[list[LocalParameter]]
    ) -> list[list[LocalParameter]]:
        """Add the weights of a rank.

        Returns the parameters with the names and in the order of the file. This is the order of the
        modules, in which flat optimizer buffers were filled.
        """
        path = file.folder / MODEL_FILE
        models = _list_models(file.content, path)
        if len(models) != len(chunks):
            raise CheckpointError(
                f"{file.folder}: {len(models)} model chunks, but the arguments specify "
                f"{len(chunks)}"
            )
        result = []
        layers = self._layout.stages[file.rank.pp]
        for model, parameters, chunk_layers in zip(models, chunks, layers, strict=True):
            # Find each parameter of the chunk in the file.
            model = _split_grouped_experts(model, parameters, path)
            by_name: dict[str, LocalParameter] = {}  # by name in the file
            for parameter in parameters:
                name = _find_stored_name(model, parameter, path)
                by_name[name] = replace(parameter, name=name)
                self._add_tensor(parameter.key, parameter, model[name], path)

            # Keep the rest of the file apart; extra states are empty.
            for name in sorted(model.keys() - by_name.keys()):
                if not name.endswith("_extra_state"):
                    self._surplus.append(_Surplus(file, chunk_layers, name, model[name]))
            result.append([by_name[name] for name in model if name in by_name])
        return result

    def _add_foreign(self, first: _RankFiles, read_options: ReadOptions) -> None:
        """Add the tensors that the model does not have, or record them as unused.

        A conversion stores whole ones in the first rank's file; those of Megatron-LM are in the
        models of all ranks.
        """
        location = f"{first.folder / MODEL_FILE}: {FOREIGN}"
        whole_tensors = open_foreign(first.content.get(FOREIGN) or {}, location)
        if not read_options.keep_foreign:
            for surplus in self._surplus:
                self.unused.append(f"{surplus.file.folder.name}: {surplus.name}")
            self.unused += whole_tensors
            return

        # Join those of Megatron-LM.
        members = []
        for file, layers, name, value in self._surplus:
            tensor = view_stored(check_stored_tensor(value, f"{file.folder}: {name}"))
            member = ForeignPart(file.rank, file.folder.name, layers, name, tensor)
            members.append(member)
        tp_size = self._layout.parallel.tp_size
        joined_tensors = join_foreign(members, tp_size, read_options.foreign_splits)

        # Add those of a conversion.
        for name, tensor in (joined_tensors | whole_tensors).items():
            self.tensors[foreign_key(name)] = tensor

    def _add_tensor(self, key: str, parameter: LocalParameter, tensor: Stored, path: Path) -> None:
        """Add a tensor of the parameter's local shape."""
        _check_tensor(tensor, f"{path}: {key}")
        shape = tuple(tensor.shape)
        if shape != parameter.shape:
            raise CheckpointError(
                f"{path}: {key} has shape {shape}, but the stored arguments make it "
                f"{parameter.shape}"
            )
        self._table.add_local(key, parameter, _list_elements(tensor))

    def _add_optimizers(
        self, content: Any, path: Path, file: _RankFiles, chunks: list[list[LocalParameter]]
    ) -> None:
        """Add the state in `content`, which was read from `path`.

        It is that of one optimizer, or with expert parallelism of one for dense layers and one for
        experts.
        """
        has_expert_optimizer = file.rank.expert is not None
        optimizers = [content]
        if has_expert_optimizer:
            optimizers = sequence(anything, 2, least=2)(content or [{}, {}], str(path))
        is_grouped = _has_grouped_experts(_list_models(file.content, path))
        by_optimizer = split_by_optimizer(chunks, has_expert_optimizer)
        for optimizer, optimizer_chunks in zip(optimizers, by_optimizer, strict=True):
            if optimizer is None or not any(optimizer_chunks):
                continue
            if optimizer and is_grouped:
                raise CheckpointError(
                    f"{path}: the optimizer of experts of --moe-use-legacy-grouped-gemm is "
                    "transposed like their weights and is not read: leave it out (convert.py "
                    "--no-optim, --no-load-optim for training)"
                )
            # The distributed optimizer has flat buffers, other optimizers have a state per
            # parameter.
            if path.name == OPTIMIZER_FILE:
                self._add_buffers(optimizer, path, optimizer_chunks, file.rank.pp)
            else:
                self._add_states(optimizer, optimizer_chunks, path)

    def _add_buffers(
        self, content: Any, path: Path, chunks: list[list[LocalParameter]], pp: int
    ) -> None:
        """Add the state in `distrib_optim.pt`: flat tensors of whole chunks.

        Each is the concatenation of the buckets of its chunk.
        """
        buffers = mapping(anything, keys=anything)(content, str(path))
        # --ddp-num-buckets divides the parameters of all chunks of the rank.
        num_parameters = count_elements(chunks)
        for index, parameters in enumerate(chunks):
            if not parameters:
                continue
            location = f"{path}: model chunk {index}"
            buffer = buffers.get(index)
            is_single = isinstance(buffer, dict) and len(buffer) == 1
            if not buffers.get("buckets_coalesced") or not is_single:
                raise CheckpointError(
                    f"{location} is not one buffer of coalesced buckets, as core 0.7 and later "
                    "write it: leave the optimizer out (--no-optim of convert.py, --no-load-optim "
                    "of a run)"
                )
            # The only key is a pair of dtypes, of parameters and gradients.
            (states,) = buffer.values()
            _BUFFER(states, location)

            bucket_size = compute_bucket_size(self.args, pp, index, num_parameters)
            plan = plan_buckets(parameters, bucket_size)
            unaligned = plan_buckets(parameters, bucket_size, alignment=1)
            if states["numel_unpadded"] == unaligned.size:  # of core 0.7
                plan = unaligned
            self._add_buffer(states, path, plan)

    def _add_buffer(self, states: Mapping[str, Any], path: Path, plan: BufferPlan) -> None:
        """Add the flat tensors of one chunk: one tensor for each optimizer state."""
        num_elements = states["numel_unpadded"]
        if plan.size != num_elements:
            raise CheckpointError(
                f"{path}: {num_elements} elements, but the stored arguments make it {plan.size}"
            )
        names = [name for name in states if name != "numel_unpadded"]
        refuse_unknown_optimizer(self.args, names, str(path))
        for state in names:
            # The buffer may be longer: Megatron-LM pads it at the end.
            flat = _check_tensor(states[state], f"{path}: {state}")
            num_stored = math.prod(flat.shape)
            if num_stored < plan.size:
                raise CheckpointError(f"{path}: {state} has {num_stored} elements of {plan.size}")
            elements = _list_elements(flat)
            for parameter, first in plan.list_positions():
                key = optimizer_key(state, parameter.key)
                self._table.add_local(key, parameter, elements, first)

    def _add_states(
        self, optimizer: dict[str, Any], chunks: list[list[LocalParameter]], path: Path
    ) -> None:
        """Add the state in torch's own form: parameters are numbered group by group.

        With half precision the main parameters are stored separately.
        """
        # Check the form. With half precision, torch's state is nested.
        location = f"{path}: optimizer"
        mapping(anything)(optimizer, location)
        inner = optimizer.get("optimizer", optimizer) or {}
        if "state" not in inner:
            return
        _NUMBERED(inner, location)
        main = optimizer.get("fp32_from_fp16_params")
        _MAIN_PARAMETERS(main, f"{location}: fp32_from_fp16_params")
        states = inner["state"]
        names = set().union(*states.values())
        refuse_unknown_optimizer(self.args, names - {"step"}, str(path))

        # Add the parameters group by group: those with weight decay, and those without.
        parameters = list(itertools.chain.from_iterable(chunks))
        for index, group in enumerate(inner["param_groups"]):
            members = _select_members(parameters, group, f"{path}: parameter group {index}")
            state_ids = group["params"]
            for position, parameter in enumerate(members):
                self._add_moments(states, state_ids[position], parameter, path)
                if main is None:
                    continue
                is_stored = index < len(main) and position < len(main[index])
                if not is_stored:
                    raise CheckpointError(
                        f"{path}: the main parameter of {parameter.key} is missing"
                    )
                key = optimizer_key("param", parameter.key)
                self._add_tensor(key, parameter, main[index][position], path)

    def _add_moments(
        self,
        states: Mapping[int, Mapping[str, Any]],
        state_id: int,
        parameter: LocalParameter,
        path: Path,
    ) -> None:
        """Add the state that torch's optimizer has of parameter `state_id`, if any."""
        for state, value in states.get(state_id, {}).items():
            if state == "step":
                continue
            tensor = _check_tensor(value, f"{path}: optimizer: state[{state_id}]: {state}")
            key = optimizer_key(state, parameter.key)
            self._add_tensor(key, parameter, tensor, path)


def _select_members(
    parameters: Iterable[LocalParameter], group: Mapping[str, Any], location: str
) -> list[LocalParameter]:
    """Return the parameters in a parameter group, in the order of its numbers."""
    # Some releases store the factor as a tensor.
    factor = load_file_tensors(group.get("wd_mult", 1.0))
    has_weight_decay = float(factor) > 0.0
    members = []
    for parameter in parameters:
        if parameter.group.weight_decay == has_weight_decay:
            members.append(parameter)
    num_stored = len(group["params"])
    if len(members) != num_stored:
        raise CheckpointError(
            f"{location} (wd_mult {group.get('wd_mult')}) has {num_stored} parameters, the model "
            f"has {len(members)} of that kind"
        )
    return members


def _check_tensor(value: Any, location: str) -> Stored:
    """Accept a stored tensor."""
    if isinstance(value, Stored):
        return value
    schema.refuse(location, value, "a tensor")


_BUFFER = record({"numel_unpadded": COUNT, "param": _check_tensor})
_MAIN_PARAMETERS = schema.optional(sequence(sequence(_check_tensor)))  # by group
_NUMBERED = record(
    {
        "state": mapping(mapping(anything), keys=COUNT),
        "param_groups": sequence(record({"params": sequence(COUNT), "wd_mult?": check_scalar})),
    }
)


def _list_models(content: dict[str, Any], path: Path) -> list[dict[str, Stored]]:
    """Return the weights of each chunk by name."""
    # The chunks are numbered (model0, ...) if there are several.
    chunk_names = [f"model{chunk}" for chunk in range(len(content))]
    if "model" in content:
        chunk_names = ["model"]

    check = mapping(anything, keys=schema.key)
    models = []
    for chunk_name in chunk_names:
        if chunk_name in content:
            chunk_state = check(content[chunk_name], f"{path}: {chunk_name}")
            model = {rename_prediction_layer(name): value for name, value in chunk_state.items()}
            models.append(model)
    return models


def _read_vocabulary_rows(content: dict[str, Any], folder: Path) -> int:
    """Return the number of rows of the rank's word embedding.

    Raises CheckpointError if the file does not contain a model of Megatron-core.
    """
    path = folder / MODEL_FILE
    models = _list_models(content, path)
    if not models or WORD_EMBEDDINGS not in models[0]:
        names = "no model"
        if models:
            names = ", ".join(list(models[0])[:3])
        raise CheckpointError(
            f"{path} has no {WORD_EMBEDDINGS} (it has {names}): only models of Megatron-core are "
            "read. Load one of the older classes with Megatron-LM's tools/checkpoint and save it "
            "again."
        )
    location = f"{path}: {WORD_EMBEDDINGS}"
    embedding = _check_tensor(models[0][WORD_EMBEDDINGS], location)
    shape = schema.tensor_shape(tuple(embedding.shape), location)
    if not shape:
        schema.refuse(location, embedding, "a matrix")
    rows: int = shape[0]
    return rows


def _find_stored_name(model: Mapping[str, Any], parameter: LocalParameter, path: Path) -> str:
    """Return the name of the parameter in the file.

    The names depend on the kind of the modules. Raises CheckpointError if it is missing.
    """
    in_transformer_engine = parameter.name
    in_local_modules = make_local_name(parameter.name)
    of_separate_norm = find_norm_key(parameter.name, model)
    # experts.local_experts.3.linear_fc1.weight is experts.linear_fc1.weight3.
    of_grouped_expert = re.sub(r"\.local_experts\.(\d+)\.(.+)", r".\2\1", parameter.name)
    names = (in_transformer_engine, in_local_modules, of_separate_norm, of_grouped_expert)
    for name in names:
        if name in model:
            return name
    raise CheckpointError(f"{path}: {parameter.name} is missing")


# Names of the matrices of all experts, with --moe-use-legacy-grouped-gemm.
_GROUPED = {"linear_fc1.weight": "weight1", "linear_fc2.weight": "weight2"}
_EXPERT_MATRIX = re.compile(r"(.+\.experts\.)local_experts\.(\d+)\.(.+)")


def _has_grouped_experts(models: Iterable[Mapping[str, Stored]]) -> bool:
    """Return whether the experts of a rank are stored as one matrix."""
    for model in models:
        for name in model:
            if name.endswith(".experts.weight1"):
                return True
    return False


def _split_grouped_experts(
    model: dict[str, Stored], parameters: Sequence[LocalParameter], path: Path
) -> dict[str, Stored]:
    """Return `model` with a name for each expert instead of GroupedMLP's one for all of them."""
    # Stored matrix of all experts -> the matrices of single experts in it, with their numbers.
    members: dict[str, list[tuple[int, LocalParameter]]] = defaultdict(list)
    for parameter in parameters:
        match = _EXPERT_MATRIX.fullmatch(parameter.name)
        if match is None:
            continue
        experts_module, expert, matrix = match.groups()
        if matrix in _GROUPED:
            grouped = experts_module + _GROUPED[matrix]
            members[grouped].append((int(expert), parameter))

    # Replace each stored matrix by its experts.
    result = dict(model)
    for grouped, experts in members.items():
        if grouped not in model:
            continue
        grouped_tensor = _check_tensor(result.pop(grouped), f"{path}: {grouped}")
        shape = _compute_grouped_shape(grouped, experts[0][1].shape, len(experts))
        if tuple(grouped_tensor.shape) != shape:
            raise CheckpointError(
                f"{path}: {grouped} has shape {tuple(grouped_tensor.shape)}, but the stored "
                f"arguments make it {shape}"
            )
        # The file contains the experts of a rank contiguously, each transposed, although the shape
        # of the stored tensor suggests otherwise. (Source: Megatron-core's GroupedMLP, which views
        # its weights as [experts, columns, rows].)
        elements = _list_elements(grouped_tensor)
        for expert, parameter in experts:
            # The experts of a rank are numbered from 0 in its file.
            first = expert * parameter.numel
            transposed_shape = parameter.shape[::-1]
            result[parameter.name] = transpose(unflatten(elements, first, transposed_shape))
    return result


def _compute_grouped_shape(grouped: str, expert_shape: Shape, num_experts: int) -> Shape:
    """Return the nominal shape of a stored matrix of all experts, from that of one expert."""
    rows, columns = expert_shape
    if grouped.endswith(_GROUPED["linear_fc2.weight"]):
        return (num_experts * columns, rows)
    return (columns, num_experts * rows)


def _list_elements(tensor: Stored) -> LazyTensor:
    """Return the row-major elements as one axis."""
    if isinstance(tensor, LazyTensor):
        return flatten(tensor)
    return view_elements(tensor)


def _has_sharded_optimizer(files: Sequence[_RankFiles]) -> bool:
    """Return whether the optimizer is stored in `distrib_optim.pt`.

    Raises CheckpointError if only some of the ranks have the file.
    """
    missing = []
    for file in files:
        path = file.folder / OPTIMIZER_FILE
        if not path.is_file():
            missing.append(path)
    if missing and len(missing) < len(files):
        raise CheckpointError(f"{missing[0]} is missing: other ranks have theirs")
    return not missing


def _collect_generators(
    files: Sequence[_RankFiles], layout: Layout
) -> dict[str, Callable[[], Any]]:
    """Return a reader of each rank's generators, under the keys that they have in torch_dist."""
    readers: dict[str, Callable[[], Any]] = {}
    for file in files:
        state = file.content.get("rng_state")
        if state is not None:
            key = rng_key((file.rank.tp, file.rank.pp), layout.parallel)
            readers[key] = partial(load_file_tensors, state)
    return readers

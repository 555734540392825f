"""Reads Megatron-LM's legacy directories (`mp_rank_XX[_YYY]/model_optim_rng.pt`) as a `Source`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.file_names import MODEL_FILE, OPTIMIZER_FILE
from megatron.conversion.megatron_lm.args import (
    find_param_groups,
    read_arguments,
    read_training_state,
)
from megatron.conversion.megatron_lm.generators import rng_key
from megatron.conversion.megatron_lm.legacy_files import (
    MegatronRank,
    find_first_legacy_file,
    open_legacy,
)
from megatron.conversion.megatron_lm.optimizer_state import (
    PieceTable,
    bucket_size_of,
    by_optimizer,
    has_optimizer,
    plan_buckets,
    refuse_unknown_optimizer,
)
from megatron.conversion.model_space.model import (
    Layout,
    LocalParameter,
    check_optimizer_complete,
    find_norm_key,
    make_local_name,
    model_config,
    rank_parameters,
)
from megatron.conversion.model_space.pieces import ReadFlat
from megatron.conversion.model_space.source import (
    COMMON,
    WORD_EMBEDDINGS,
    TensorInfo,
    TrainingState,
    check_scalar,
    optimizer_key,
)
from megatron.conversion.options import ReadOptions
from megatron.core.dist_checkpointing import CheckpointError, FileTensor, Shape, load_file_tensors
from megatron.core.dist_checkpointing.format import schema
from megatron.core.dist_checkpointing.format.schema import (
    COUNT,
    anything,
    mapping,
    record,
    sequence,
)


@dataclass(frozen=True)
class _GroupedExpert:
    """One expert's matrix of GroupedMLP, as the linear layer of the expert has it: [rows, columns].

    Stored are all experts of a rank in a row, each transposed; the shape of what is stored says
    otherwise. (Source: Megatron-core's GroupedMLP, which views its weights as [experts, columns,
    rows].)
    """

    stored: FileTensor | torch.Tensor
    first: int  # element
    shape: Shape

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    def numel(self) -> int:
        return math.prod(self.shape)

    def read_flat(self, start: int, count: int) -> torch.Tensor:
        """All of the matrix is read: its rows are columns in the file."""
        flat = _flat_reader(self.stored)(self.first, self.numel())
        return flat.view(self.shape[::-1]).t().reshape(-1)[start : start + count]


Stored = FileTensor | torch.Tensor | _GroupedExpert


class LegacySource:
    """One iteration directory. Tensors stay in the files until they are read."""

    def __init__(self, directory: Path, read_options: ReadOptions | None = None) -> None:
        optimizer = read_options is None or read_options.optimizer
        self.description = f"legacy checkpoint {directory}"
        first_file = find_first_legacy_file(directory)
        first = open_legacy(first_file)
        self.args = read_arguments(first, str(first_file))
        layout = Layout.from_args(self.args)
        writers = MegatronRank.list_all(layout.parallel, int(self.args.get("world_size") or 0))
        folders = {rank: directory / rank.directory(layout.parallel) for rank in writers}
        paths = {rank: folder / MODEL_FILE for rank, folder in folders.items()}
        files = {rank: COMMON(open_legacy(path), str(path)) for rank, path in paths.items()}
        begin = writers[0]
        # Files record the padded vocabulary only as the number of rows per rank.
        rows_per_rank = _vocabulary_rows(files[begin], folders[begin])
        # Megatron-LM trains the rows that pad the vocabulary, so they are part of its model; ours
        # says how many count.
        vocab_size = self.args.setdefault(
            "model_vocab_size", rows_per_rank * layout.parallel.tp_size
        )
        self.config = model_config(self.args, vocab_size, self.description)
        stale = {path.name for path in directory.glob("mp_rank_*")} - {
            folder.name for folder in folders.values()
        }
        sizes = f"tensor parallel {layout.parallel.tp_size}, pipeline parallel {layout.parallel.pp_size}"
        self.unused = [f"{name} (the arguments say {sizes})" for name in sorted(stale)]
        self._table = PieceTable(self.description)
        sharded = optimizer and _sharded_optimizer(list(folders.values()))
        for rank, content in files.items():
            folder = folders[rank]
            # What this rank holds follows from the layers; the order of its parameters from its
            # file, since flat optimizer buffers were filled in the order of the modules.
            chunks = rank_parameters(
                self.config, layout, rank.tp, rank.pp, rows_per_rank, rank.expert, self.args
            )
            chunks = self._add_weights(content, chunks, folder)
            grouped = any(
                name.endswith(".experts.weight1")
                for model in _models(content, folder)
                for name in model
            )
            where = folder / (OPTIMIZER_FILE if sharded else MODEL_FILE)
            found = (
                open_legacy(where, list, dict)
                if sharded
                else content.get("optimizer") or {}
                if optimizer
                else None
            )
            kinds = (
                [found]
                if rank.expert is None
                else sequence(anything, 2, least=2)(found or [{}, {}], str(where))
            )
            for kind, own in zip(kinds, by_optimizer(chunks, rank.expert is not None), strict=True):
                if kind and any(own) and grouped:
                    raise CheckpointError(
                        f"{where}: the optimizer of experts of --moe-use-legacy-grouped-gemm is transposed like their "
                        "weights and is not read: leave it out (convert.py --no-optim, --no-load-optim for training)"
                    )
                if kind is not None and any(own) and sharded:
                    self._add_buffers(kind, where, own, rank.pp)
                elif kind is not None and any(own):
                    self._add_states(kind, own, where)
        groups = find_param_groups(files[begin].get("optimizer")) if optimizer else None
        self._table.complete(has_optimizer(self.args, self._table.tensors, groups))
        self.tensors: Mapping[str, TensorInfo] = self._table.tensors
        check_optimizer_complete(self.tensors, self.description)
        self.training: TrainingState | None = read_training_state(files[begin], self.args, groups)
        if layout.parallel.ep_size == 1:
            self.training.rng = _generators(
                {(rank.tp, rank.pp): content for rank, content in files.items()}, layout
            )

    def read(self, key: str, offset: Shape, shape: Shape) -> torch.Tensor:
        return self._table.read(key, offset, shape)

    def _add_weights(
        self, content: dict[str, Any], chunks: list[list[LocalParameter]], folder: Path
    ) -> list[list[LocalParameter]]:
        """Returns the parameters by the names and in the order of the file, which is that of the
        modules.
        """
        where = folder / MODEL_FILE
        models = _models(content, where)
        if len(models) != len(chunks):
            raise CheckpointError(
                f"{folder}: {len(models)} model chunks, but the arguments say {len(chunks)}"
            )
        result = []
        for model, parameters in zip(models, chunks, strict=True):
            model = _by_expert(model, parameters, where)
            stored = {
                name: replace(p, name=name)
                for p in parameters
                for name in [_stored_name(model, p, where)]
            }
            for name, parameter in stored.items():
                self._add_tensor(parameter.key, parameter, model[name], where)
            extra = sorted(
                name for name in model.keys() - stored.keys() if not name.endswith("_extra_state")
            )
            self.unused += [f"{folder.name}: {name}" for name in extra]
            result.append([stored[name] for name in model if name in stored])
        return result

    def _add_tensor(self, key: str, parameter: LocalParameter, tensor: Stored, where: Path) -> None:
        """A tensor of the parameter's local shape."""
        if tuple(_tensor(tensor, f"{where}: {key}").shape) != parameter.shape:
            raise CheckpointError(
                f"{where}: {key} has shape {tuple(tensor.shape)}, but the stored arguments make it {parameter.shape}"
            )
        self._table.add_local(key, parameter, tensor.dtype, _flat_reader(tensor), 0)

    def _add_buffers(
        self, content: Any, path: Path, chunks: list[list[LocalParameter]], pp: int
    ) -> None:
        """`distrib_optim.pt`: flat tensors of whole chunks, buckets end to end."""
        buffers = mapping(anything, keys=anything)(content, str(path))
        num_parameters = sum(parameter.numel for parameters in chunks for parameter in parameters)
        for index, parameters in enumerate(chunks):
            if not parameters:
                continue
            found = buffers.get(index)
            if (
                not buffers.get("buckets_coalesced")
                or not isinstance(found, dict)
                or len(found) != 1
            ):
                raise CheckpointError(
                    f"{path}: model chunk {index} is not one buffer of coalesced buckets"
                )
            states = _BUFFER(next(iter(found.values())), f"{path}: model chunk {index}")
            placed, sizes = plan_buckets(
                parameters, bucket_size_of(self.args, pp, index, num_parameters)
            )
            if sum(sizes) != states["numel_unpadded"]:
                raise CheckpointError(
                    f"{path}: {states['numel_unpadded']} elements, but the stored arguments make it {sum(sizes)}"
                )
            names = [name for name in states if name != "numel_unpadded"]
            refuse_unknown_optimizer(self.args, names, str(path))
            for state in names:
                if _tensor(states[state], f"{path}: {state}").numel() < sum(sizes):
                    raise CheckpointError(
                        f"{path}: {state} has {states[state].numel()} elements of {sum(sizes)}"
                    )
            for parameter, bucket, start in placed:
                for state in names:
                    key = optimizer_key(state, parameter.key)
                    flat = states[state]
                    first = sum(sizes[:bucket]) + start
                    self._table.add_local(key, parameter, flat.dtype, _flat_reader(flat), first)

    def _add_states(
        self, optimizer: dict[str, Any], chunks: list[list[LocalParameter]], where: Path
    ) -> None:
        """torch's own form: parameters numbered group by group; half precision has its main
        parameters apart.
        """
        mapping(anything)(optimizer, f"{where}: optimizer")
        inner = optimizer.get("optimizer", optimizer) or {}
        if "state" not in inner:
            return
        _NUMBERED(inner, f"{where}: optimizer")
        main = schema.optional(sequence(sequence(_tensor)))(
            optimizer.get("fp32_from_fp16_params"), f"{where}: optimizer: fp32_from_fp16_params"
        )
        states = inner["state"]
        refuse_unknown_optimizer(
            self.args, {name for state in states.values() for name in state} - {"step"}, str(where)
        )
        everything = [parameter for parameters in chunks for parameter in parameters]
        for index, group in enumerate(inner["param_groups"]):
            decay = float(load_file_tensors(group.get("wd_mult", 1.0))) > 0.0
            members = [
                parameter for parameter in everything if parameter.group.weight_decay == decay
            ]
            if len(members) != len(group["params"]):
                raise CheckpointError(
                    f"{where}: parameter group {index} (wd_mult {group.get('wd_mult')}) has {len(group['params'])} "
                    f"parameters, the model has {len(members)} of that kind"
                )
            for position, (number, parameter) in enumerate(
                zip(group["params"], members, strict=True)
            ):
                for state in [name for name in states.get(number, {}) if name != "step"]:
                    tensor = _tensor(
                        states[number][state], f"{where}: optimizer: state[{number}]: {state}"
                    )
                    self._add_tensor(optimizer_key(state, parameter.key), parameter, tensor, where)
                if main is not None:
                    if index >= len(main) or position >= len(main[index]):
                        raise CheckpointError(
                            f"{where}: the main parameter of {parameter.key} is missing"
                        )
                    self._add_tensor(
                        optimizer_key("param", parameter.key),
                        parameter,
                        main[index][position],
                        where,
                    )


def _tensor(value: Any, where: str) -> Stored:
    return value if isinstance(value, Stored) else schema.refuse(where, value, "a tensor")


_BUFFER = record({"numel_unpadded": COUNT, "param": _tensor})
_NUMBERED = record(
    {
        "state": mapping(mapping(anything), keys=COUNT),
        "param_groups": sequence(record({"params": sequence(COUNT), "wd_mult?": check_scalar})),
    }
)


def _models(content: dict[str, Any], where: Path) -> list[dict[str, Stored]]:
    """The weights of every chunk."""
    chunks = [f"model{number}" for number in range(len(content)) if f"model{number}" in content]
    names = ["model"] if "model" in content else chunks
    return [mapping(anything, keys=schema.key)(content[name], f"{where}: {name}") for name in names]


def _vocabulary_rows(content: dict[str, Any], folder: Path) -> int:
    models = _models(content, folder / MODEL_FILE)
    if not models or WORD_EMBEDDINGS not in models[0]:
        names = ", ".join(list(models[0])[:3]) if models else "no model"
        raise CheckpointError(
            f"{folder / MODEL_FILE} has no {WORD_EMBEDDINGS} (it has {names}): only models of Megatron-core are read. "
            "Load one of the older classes with Megatron-LM's tools/checkpoint and save it again."
        )
    where = f"{folder / MODEL_FILE}: {WORD_EMBEDDINGS}"
    embedding = _tensor(models[0][WORD_EMBEDDINGS], where)
    shape = schema.SHAPE(tuple(embedding.shape), where)
    return shape[0] if shape else schema.refuse(where, embedding, "a matrix")


def _stored_name(model: Mapping[str, Any], parameter: LocalParameter, where: Path) -> str:
    # Megatron-core's grouped experts: experts.linear_fc1.weight3 is what others call
    # experts.local_experts.3...
    grouped = re.sub(r"\.local_experts\.(\d+)\.(.+)", r".\2\1", parameter.name)
    for name in (
        parameter.name,
        make_local_name(parameter.name),
        find_norm_key(parameter.name, model),
        grouped,
    ):
        if name in model:
            return name
    raise CheckpointError(f"{where}: {parameter.name} is missing")


_GROUPED = {
    "linear_fc1.weight": "weight1",
    "linear_fc2.weight": "weight2",
}  # of --moe-use-legacy-grouped-gemm


def _by_expert(
    model: dict[str, Stored], parameters: Sequence[LocalParameter], where: Path
) -> dict[str, Stored]:
    """`model` with a name for each expert in place of GroupedMLP's one for all of them."""
    result = dict(model)
    for parameter in parameters:
        match = re.fullmatch(r"(.+\.experts\.)local_experts\.(\d+)\.(.+)", parameter.name)
        if match is None or match[3] not in _GROUPED:
            continue
        grouped = match[1] + _GROUPED[match[3]]
        if grouped not in model:
            continue
        result.pop(grouped, None)
        stored = _tensor(model[grouped], f"{where}: {grouped}")
        rows = parameter.shape
        experts = sum(
            p.name.startswith(f"{match[1]}local_experts.") and p.name.endswith(match[3])
            for p in parameters
        )
        shape = (
            (rows[1], experts * rows[0])
            if match[3] == "linear_fc1.weight"
            else (experts * rows[1], rows[0])
        )
        if isinstance(stored, _GroupedExpert) or tuple(stored.shape) != shape:
            raise CheckpointError(
                f"{where}: {grouped} has shape {tuple(stored.shape)}, but the stored arguments make it {shape}"
            )
        result[parameter.name] = _GroupedExpert(stored, int(match[2]) * parameter.numel, rows)
    return result


def _flat_reader(tensor: Stored) -> ReadFlat:
    if not isinstance(tensor, torch.Tensor):
        return tensor.read_flat
    flat = tensor.reshape(-1)
    return lambda start, count: flat[start : start + count]


def _sharded_optimizer(folders: Sequence[Path]) -> bool:
    """Whether the optimizer lies in `distrib_optim.pt` files: of all ranks or of none."""
    missing = [folder for folder in folders if not (folder / OPTIMIZER_FILE).is_file()]
    if missing and len(missing) < len(folders):
        raise CheckpointError(f"{missing[0] / OPTIMIZER_FILE} is missing: other ranks have theirs")
    return not missing


def _generators(
    files: Mapping[tuple[int, int], dict[str, Any]], layout: Layout
) -> dict[str, Callable[[], Any]]:
    """The state of every rank's generators, under the keys that they have in torch_dist."""

    def reader(state: Any) -> Callable[[], Any]:
        return lambda: load_file_tensors(state)

    return {
        rng_key(rank, layout.parallel): reader(content["rng_state"])
        for rank, content in files.items()
        if content.get("rng_state") is not None
    }

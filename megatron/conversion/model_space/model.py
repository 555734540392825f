"""The model that a checkpoint's arguments describe: its configuration, its parameters, and those of
every rank.

Both come from the layers' own definition of their sharding: the model is built on the meta device,
for ranks one by one, so no memory and no process group is needed. Thus it is known from shapes
alone whether a checkpoint can be loaded at a layout, and what each rank reads.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron.conversion.model_space.source import (
    ARGUMENTS,
    OPTIMIZER_STATES,
    RANKS,
    WORD_EMBEDDINGS,
    Shape,
    Source,
    TensorInfo,
    complete_states,
    is_trained,
    optimizer_key,
    optimizer_states,
    split_key,
)
from megatron.core.dist_checkpointing import CheckpointError, ShardedTensor
from megatron.core.distributed.param_and_grad_buffer import ParamSpec
from megatron.core.models import GPTModel
from megatron.core.module import param_info
from megatron.core.parallel_state import Axis, ExpertAxes, ParallelConfig, ParallelState
from megatron.core.pipeline_parallel import pipeline_layer_ranges
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.core.transformer.transformer_config import (
    LOCAL_BACKEND_FIELDS,
    TransformerConfig,
    flag_name,
    select_architecture_fields,
)

_FIELDS = {field.name: field for field in dataclasses.fields(TransformerConfig)}
_LAYER = re.compile(r"decoder\.layers\.\d+\.")
_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads")


def model_config(args: Mapping[str, Any], vocab_size: int, description: str) -> TransformerConfig:
    """The configuration in a checkpoint's arguments, with `vocab_size` tokens (the rows of its word
    embedding), which may be more than were trained: Megatron-LM's files have rows that pad it.

    Raises ValueError, naming the flag, where an argument that defines the model is missing.
    """
    for name in _REQUIRED:
        if not args.get(name):
            raise ValueError(f"{description} lacks {name}: give {flag_name(name)}")
    # How the run recomputed activations changes nothing, and may be one of Megatron-LM's ways that
    # we do not have.
    known = {
        name: args[name] for name in _FIELDS if name in args and not name.startswith("recompute_")
    }
    ARGUMENTS(known, description)
    return TransformerConfig(**(known | LOCAL_BACKEND_FIELDS | {"vocab_size": vocab_size}))


def vocabulary_rows(tensors: Mapping[str, TensorInfo], where: str) -> int:
    """Rows of the word embedding; CheckpointError where there is none."""
    found = tensors.get(WORD_EMBEDDINGS)
    if found is None or len(found.shape) != 2:
        what = "no" if found is None else f"{list(found.shape)} as"
        raise CheckpointError(f"{where} has {what} {WORD_EMBEDDINGS}: it is not a GPT model")
    return found.shape[0]


def exported_config(source: Source, vocab_size: int | None) -> TransformerConfig:
    """The model of `source` with its first `vocab_size` tokens (None: all of its rows), for an
    export.

    Raises ValueError where it has fewer.
    """
    rows = vocabulary_rows(source.tensors, source.description)
    if vocab_size is not None and vocab_size > rows:
        raise ValueError(
            f"--true-vocab-size {vocab_size} is more than the {rows} rows of {source.description}"
        )
    return model_config(source.args, vocab_size or rows, source.description)


def check_parameters(
    tensors: Mapping[str, TensorInfo],
    wanted: Mapping[str, Shape],
    where: str,
    vocab_size: int | None = None,
) -> None:
    """Raises CheckpointError, naming the first, for a parameter that is missing or has another
    shape than `wanted`.

    What has `vocab_size` rows may have more of them: they pad the vocabulary.
    """
    for key, shape in wanted.items():
        if key not in tensors:
            raise CheckpointError(f"{where} lacks {key}, which its arguments call for")
        found = tensors[key].shape
        padded = shape[0] == vocab_size and found[0] > shape[0] and found[1:] == shape[1:]
        if found != shape and not padded:
            raise CheckpointError(
                f"{where}: {key} has shape {found}, its arguments make it {shape}"
            )


def check_optimizer_complete(tensors: Mapping[str, TensorInfo], where: str) -> None:
    """Every trained parameter has all of its optimizer state, of its shape, or none has any.

    Raises CheckpointError naming what is missing or of another shape.
    """
    found = optimizer_states(tensors)
    states = complete_states(found) if found else ()
    if states is None:
        raise CheckpointError(
            f"{where}: {', '.join(found)} are not the state of one optimizer: leave it out "
            "(--no-optim of convert.py, --no-load-optim of a run)"
        )
    parameters = [key for key in tensors if not key.startswith("optimizer.") and is_trained(key)]
    wanted = {
        optimizer_key(state, key): tensors[key].shape for key in parameters for state in states
    }
    missing = [key for key in wanted if key not in tensors]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(
            f"{where}: optimizer state is missing: {', '.join(missing[:3])}{more}"
        )
    for key, shape in wanted.items():
        if tensors[key].shape != shape:
            raise CheckpointError(
                f"{where}: {key} has shape {tensors[key].shape}, its parameter {shape}"
            )


def resolved(config: TransformerConfig) -> dict[str, Any]:
    """Every argument that decides the model, as it has it: also those that the files do not
    mention.
    """
    values = {field.name: getattr(config, field.name) for field in select_architecture_fields()}
    return values | {"group_query_attention": config.query_groups != config.num_attention_heads}


def model_parameters(config: TransformerConfig) -> list[ParamSpec]:
    """Every parameter of the whole model by its key, as its layers define it.

    They are built on the meta device; the layers of a kind (dense, with experts) are alike, so one
    of each is enough. Raises ValueError for impossible sizes.
    """
    # Building all layers of a large model takes minutes, even on the meta device.
    pattern = config.moe_layer_pattern
    first = {kind: pattern.index(kind) for kind in set(pattern)}
    try:
        models = {kind: _parameters_with_layer(config, number) for kind, number in first.items()}
    except RuntimeError as error:  # more elements than 64 bits can count
        raise ValueError(f"no model has these sizes: {error}") from error
    outside = models[pattern[0]]
    layers = {kind: [p for p in models[kind] if _LAYER.match(p.name)] for kind in models}
    begin = outside.index(layers[pattern[0]][0])
    outside[begin : begin + len(layers[pattern[0]])] = [
        dataclasses.replace(parameter, name=_LAYER.sub(f"decoder.layers.{number}.", parameter.name))
        for number, kind in enumerate(pattern)
        for parameter in layers[kind]
    ]
    return outside


def _parameters_with_layer(config: TransformerConfig, number: int) -> list[ParamSpec]:
    """Those of a model whose only layer is that one."""
    layers = range(number, number + 1)
    model = GPTModel(
        config, layers=layers, rng=TensorParallelRng(0, 0), device=torch.device("meta")
    )
    parameters = []
    for key, entry in model.sharded_state_dict().items():
        assert isinstance(entry, ShardedTensor) and isinstance(entry.local, torch.nn.Parameter), key
        parameters.append(ParamSpec(key, entry.global_shape, param_info(entry.local)))
    return parameters


def model_tensors(config: TransformerConfig) -> dict[str, Shape]:
    """Key and global shape of every parameter, in the order of the model."""
    return {parameter.name: parameter.shape for parameter in model_parameters(config)}


# How stages may differ: Megatron-LM's argument -> that of `pipeline_layer_ranges`.
SPLITS = {
    "decoder_first_pipeline_num_layers": "first_stage_layers",
    "decoder_last_pipeline_num_layers": "last_stage_layers",
    "account_for_embedding_in_pipeline_split": "account_for_embedding",
    "account_for_loss_in_pipeline_split": "account_for_loss",
    "pipeline_model_parallel_layout": "layout",
}


@dataclass(frozen=True)
class Layout:
    """Sizes of the model-parallel axes and where the layers stand: [stage][chunk]."""

    parallel: ParallelConfig
    stages: tuple[tuple[range, ...], ...]
    splits: Mapping[str, Any]  # those of SPLITS that are in use

    @classmethod
    def of(
        cls,
        num_layers: int,
        tp: int,
        pp: int,
        vpp: int = 1,
        args: Mapping[str, Any] | None = None,
        experts: tuple[int, int | None] = (1, None),
    ) -> Layout:
        """`args` may hold SPLITS, among others; `experts` is (ep, etp). ValueError where nothing splits like that."""
        RANKS(tp * pp, f"{tp} x {pp} ranks")
        ep, etp = experts
        RANKS(ep * (etp or tp), f"{ep} x {etp or tp} ranks of experts")
        parallel = ParallelConfig(tp, pp, vpp if vpp > 1 else None)
        parallel.dp_size(tp * pp)
        of_experts: dict[str, Any] = {
            "expert_model_parallel_size": ep,
            "expert_tensor_parallel_size": etp,
        }
        parallel = replace(parallel, **of_experts)
        splits = {name: args[name] for name in SPLITS if args.get(name)} if args else {}
        rules: dict[str, Any] = {SPLITS[name]: value for name, value in splits.items()}
        stages = pipeline_layer_ranges(num_layers, pp, vpp, **rules)
        return cls(parallel, tuple(tuple(chunks) for chunks in stages), splits)

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> Layout:
        """The layout that a Megatron-LM Namespace records."""
        kinds = ("tensor", "pipeline", "virtual_pipeline")
        tp, pp, vpp = (args.get(f"{kind}_model_parallel_size") or 1 for kind in kinds)
        ep, etp = (args.get(f"expert_{axis}_parallel_size") for axis in ("model", "tensor"))
        experts = (ep or 1, etp) if (args.get("num_experts") or 0) > 1 else (1, None)
        return cls.of(args["num_layers"], tp, pp, vpp, args, experts)

    def arguments(self) -> dict[str, Any]:
        """What `from_args` reads: a layout in Megatron-LM's arguments."""
        parallel = self.parallel
        chunks = self.parallel.vpp_size if self.parallel.vpp_size > 1 else None
        return {
            "tensor_model_parallel_size": parallel.tp_size,
            "context_parallel_size": 1,
            "expert_tensor_parallel_size": parallel.etp_size,
            "expert_model_parallel_size": parallel.ep_size,
            "pipeline_model_parallel_size": parallel.pp_size,
            "transformer_pipeline_model_parallel_size": parallel.pp_size,
            "virtual_pipeline_model_parallel_size": chunks,
            "num_layers_per_virtual_pipeline_stage": None,
            "num_virtual_stages_per_pipeline_rank": chunks,
            **{
                name: self.splits.get(name, False if name.startswith("account_") else None)
                for name in SPLITS
            },
        }

    @property
    def ranks(self) -> list[tuple[int, int]]:
        """(tp, pp) of every model-parallel rank, TP fastest."""
        return [
            (tp, pp) for pp in range(self.parallel.pp_size) for tp in range(self.parallel.tp_size)
        ]


@dataclass(frozen=True)
class LocalBox:
    """Elements from `start` of the row-major local tensor are the box at `offset` of the global
    one.
    """

    offset: Shape
    shape: Shape
    start: int


@dataclass(frozen=True)
class LocalParameter(ParamSpec):
    """A parameter of one rank's chunk; `name` is Megatron-LM's, with the chunk's own layer numbers."""

    key: str
    global_shape: Shape
    boxes: tuple[LocalBox, ...]


def rank_parameters(
    config: TransformerConfig,
    layout: Layout,
    tp_rank: int,
    pp_rank: int,
    divisible_by: int = 1,
    expert_rank: tuple[int, int] | None = None,
    args: Mapping[str, Any] | None = None,
) -> list[list[LocalParameter]]:
    """The parameters of every chunk of a rank, in module order; each expert by itself.

    `expert_rank` is its (etp, ep), by default that of a run whose experts are split as its dense layers are. `args` are
    those of a run of Megatron-LM: names, order and shapes are then those of its modules.
    """
    # The ranks of dense layers do not depend on how experts are spread, so they need no world with
    # room for both.
    dense = replace(layout.parallel, expert_model_parallel_size=1, expert_tensor_parallel_size=None)
    world = dense.tp_size * dense.pp_size
    ps = ParallelState.for_rank(dense, world, tp_rank + dense.tp_size * pp_rank)
    etp = Axis(tp_rank, dense.tp_size)
    ep = Axis()
    if expert_rank is not None:
        sizes = layout.parallel.etp_size, layout.parallel.ep_size
        etp, ep = (Axis(rank, size) for rank, size in zip(expert_rank, sizes, strict=True))
    chunks = []
    for index, layers in enumerate(layout.stages[pp_rank]):
        model = GPTModel(
            config,
            layers=layers,
            pre_process=ps.is_first_chunk(index),
            post_process=ps.is_last_chunk(index),
            tp=ps.tp,
            experts=ExpertAxes(etp, ep),
            make_vocab_size_divisible_by=divisible_by,
            rng=TensorParallelRng(0, tp_rank),
            device=torch.device("meta"),
        )
        chunks.append(_parameters_of(model))
    return (
        chunks
        if args is None
        else [_in_modules(parameters, args, tp_rank) for parameters in chunks]
    )


def _parameters_of(model: GPTModel) -> list[LocalParameter]:
    entries = {
        entry.local: entry
        for entry in model.sharded_state_dict().values()
        if isinstance(entry, ShardedTensor)
    }
    parameters = [
        LocalParameter(
            name,
            tuple(param.shape),
            param_info(param),
            entries[param].key,
            entries[param].global_shape,
            tuple(
                LocalBox(b.offset, b.shape, int(b.tensor.storage_offset()))
                for b in entries[param].boxes
            ),
        )
        for name, param in model.named_parameters()
    ]
    result: list[LocalParameter] = []
    for module, group in itertools.groupby(
        parameters, lambda p: p.info.sharding.is_expert and p.name.split(".linear_fc")[0]
    ):
        members = list(group)
        result += members if not module else _each_expert(members, str(module))
    return result


def _each_expert(projections: Sequence[LocalParameter], module: str) -> list[LocalParameter]:
    """The parameters of a rank's experts, expert by expert, under the names of Megatron-LM's
    modules.
    """
    result = []
    for expert in range(projections[0].shape[0]):
        for parameter in projections:
            numel = parameter.numel // parameter.shape[0]
            name = f"{module}.local_experts.{expert}.{parameter.name.removeprefix(module + '.')}"
            boxes = []
            for box in parameter.boxes:
                inside = expert * numel - box.start  # the first element of this expert, in the box
                if box.shape[0] > 1 or box.start // numel == expert:
                    offset = (
                        box.offset[0] + max(inside, 0) // math.prod(box.shape[1:]),
                        *box.offset[1:],
                    )
                    boxes.append(LocalBox(offset, (1, *box.shape[1:]), max(-inside, 0)))
            shape = parameter.shape[1:]
            result.append(replace(parameter, name=name, shape=shape, boxes=tuple(boxes)))
    return result


# Norms by their names in Megatron-core's local modules and, as part of the projection that follows,
# in ours and Transformer Engine's. Those that no single projection follows (before experts, before
# latent attention) stand by themselves in all of them, but Megatron-core writes that before experts
# under the fused name from local modules.
_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}


def norm_key(name: str, names: Container[str]) -> str:
    """The key of a norm's parameter that goes by either of its names; others are their own.
    `names`: all weights.
    """
    for local, fused in _NORMS.items():
        before, found, part = name.partition("." + local if "." + local in name else "." + fused)
        if found:
            projection = f"{before}.{fused}".replace(".layer_norm_", ".weight")
            return f"{before}.{fused if projection in names else local}{part}"
    return name


def local_name(name: str) -> str:
    """The name of a parameter in Megatron-core's local modules, which have no fused norms."""
    for local, fused in _NORMS.items():
        name = name.replace("." + fused, "." + local)
    return name


def _in_modules(
    parameters: Sequence[LocalParameter], args: Mapping[str, Any], tp: int
) -> list[LocalParameter]:
    """A chunk's parameters of rank `tp` by the names, in the order and of the shapes that the
    modules of a Megatron-LM run with these arguments had: ours, which are Transformer Engine's, or
    Megatron-core's local ones.

    These have the norm before attention in front of linear_proj, those within latent attention
    behind its projections, and what its queries, keys and values come from split over TP, too.
    """
    if args.get("transformer_impl", "transformer_engine") != "local":
        return list(parameters)
    tp_size = args.get("tensor_model_parallel_size") or 1
    renamed = [replace(parameter, name=local_name(parameter.name)) for parameter in parameters]
    place: dict[str, float] = {parameter.name: index for index, parameter in enumerate(renamed)}

    def order(parameter: LocalParameter) -> float:
        before, norm, _ = parameter.name.partition("input_layernorm.")
        if norm:
            return place[f"{before}self_attention.linear_proj.weight"] - 0.5
        before, norm, _ = parameter.name.partition("_layernorm.")
        latent = f"{before.rpartition('.')[0]}.linear_kv_up_proj.weight"
        if norm and latent in place:
            return place[latent] + (0.25 if before.endswith(".q") else 0.5)
        return place[parameter.name]

    renamed.sort(key=order)
    return [_split_rows(p, tp, tp_size) if "_down_proj." in p.name else p for p in renamed]


def _split_rows(parameter: LocalParameter, rank: int, size: int) -> LocalParameter:
    if parameter.shape[0] % size:
        raise ValueError(
            f"{parameter.key} has {parameter.shape[0]} rows, which {size} ranks cannot split evenly as Megatron-core's "
            "local modules do: give --target-transformer-impl transformer_engine, or another tensor-parallel size"
        )
    (box,), shape = parameter.boxes, (parameter.shape[0] // size, *parameter.shape[1:])
    return replace(
        parameter, shape=shape, boxes=(replace(box, offset=(rank * shape[0], 0), shape=shape),)
    )


@dataclass(frozen=True)
class RankLoad:
    """What one model-parallel rank holds of a checkpoint. Bytes are as stored."""

    tp: int
    pp: int
    layers: tuple[range, ...]  # global numbers, by chunk
    parameters: int  # elements, padding of the vocabulary left out
    parts: dict[str, dict[str, int]]  # bytes of weights and optimizer, by part of the model

    def nbytes(self, kind: str) -> int:
        """Of the optimizer those of the whole rank: its replicas share them with the distributed
        optimizer.
        """
        return sum(part[kind] for part in self.parts.values())


def plan_load(source: Source, layout: Layout) -> list[RankLoad]:
    """What every model-parallel rank of `layout` reads of `source`, TP fastest.

    Raises ValueError where the model cannot be split like that, or the checkpoint lacks what the
    model needs.
    """
    config = model_config(
        source.args, vocabulary_rows(source.tensors, source.description), source.description
    )
    plans = []
    for tp, pp in layout.ranks:
        parameters = [p for chunk in rank_parameters(config, layout, tp, pp) for p in chunk]
        check_parameters(
            source.tensors, {p.key: p.global_shape for p in parameters}, source.description
        )
        parts: dict[str, dict[str, int]] = {}
        numels = [sum(math.prod(box.shape) for box in parameter.boxes) for parameter in parameters]
        for parameter, numel in zip(parameters, numels, strict=True):
            part = parts.setdefault(part_of(parameter.key), {"weights": 0, "optimizer": 0})
            part["weights"] += numel * source.tensors[parameter.key].dtype.itemsize
            states = [
                source.tensors.get(optimizer_key(state, parameter.key))
                for state in OPTIMIZER_STATES
            ]
            part["optimizer"] += sum(
                numel * state.dtype.itemsize for state in states if state is not None
            )
        plans.append(RankLoad(tp, pp, layout.stages[pp], sum(numels), parts))
    return plans


def part_of(key: str) -> str:
    """The part of the model that a tensor of this name belongs to, for people: `layer 3`,
    `embedding`.
    """
    name, _ = split_key(key)
    layer = re.match(r"decoder\.layers\.(\d+)\.", name)
    if layer is not None:
        return f"layer {layer[1]}"
    named = {
        "embedding": "embedding",
        "output_layer": "output layer",
        "decoder.final_layernorm": "final norm",
    }
    return next(
        (text for prefix, text in named.items() if name.startswith(prefix)), name.split(".")[0]
    )

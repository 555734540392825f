"""What every rank of a layout holds, from the layers' own definition of their sharding.

The model is built on the meta device, rank by rank: no memory, no process group. So it is known from shapes alone
whether a checkpoint can be loaded at a layout, and what each rank reads.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron.conversion.model_space.model import check_parameters, model_config, vocabulary_rows
from megatron.conversion.model_space.pieces import LocalBox, LocalParameter
from megatron.conversion.model_space.source import OPTIMIZER_STATES, RANKS, Source, optimizer_key, split_key
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models import GPTModel
from megatron.core.module import param_info
from megatron.core.parallel_state import Axis, ExpertAxes, ParallelConfig, ParallelState
from megatron.core.pipeline_parallel import pipeline_layer_ranges
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.core.transformer.transformer_config import TransformerConfig

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
        of_experts: dict[str, Any] = {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": etp}
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
        parallel, chunks = self.parallel, self.parallel.vpp_size if self.parallel.vpp_size > 1 else None
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
            **{name: self.splits.get(name, False if name.startswith("account_") else None) for name in SPLITS},
        }

    @property
    def ranks(self) -> list[tuple[int, int]]:
        """(tp, pp) of every model-parallel rank, TP fastest."""
        return [(tp, pp) for pp in range(self.parallel.pp_size) for tp in range(self.parallel.tp_size)]

    @property
    def expert_ranks(self) -> list[tuple[int, int, int]]:
        """(etp, ep, pp) of every rank of the experts' grid but their replicas, ETP fastest."""
        sizes = (self.parallel.pp_size, self.parallel.ep_size, self.parallel.etp_size)
        return [(etp, ep, pp) for pp, ep, etp in itertools.product(*map(range, sizes))]


def rank_parameters(
    config: TransformerConfig,
    layout: Layout,
    tp_rank: int,
    pp_rank: int,
    divisible_by: int = 1,
    expert_rank: tuple[int, int] | None = None,
) -> list[list[LocalParameter]]:
    """The parameters of every chunk of a rank, in module order; each expert by itself.

    `expert_rank` is its (etp, ep), by default that of a run whose experts are split as its dense layers are.
    """
    # The ranks of dense layers do not depend on how experts are spread, so they need no world with room for both.
    dense = replace(layout.parallel, expert_model_parallel_size=1, expert_tensor_parallel_size=None)
    world = dense.tp_size * dense.pp_size
    ps = ParallelState.for_rank(dense, world, tp_rank + dense.tp_size * pp_rank)
    etp, ep = Axis(tp_rank, dense.tp_size), Axis()
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
    return chunks


def _parameters_of(model: GPTModel) -> list[LocalParameter]:
    entries = {entry.local: entry for entry in model.sharded_state_dict().values() if isinstance(entry, ShardedTensor)}
    parameters = [
        LocalParameter(
            name,
            tuple(param.shape),
            param_info(param),
            entries[param].key,
            entries[param].global_shape,
            tuple(LocalBox(b.offset, b.shape, int(b.tensor.storage_offset())) for b in entries[param].boxes),
        )
        for name, param in model.named_parameters()
    ]
    result: list[LocalParameter] = []
    for module, group in itertools.groupby(parameters, lambda p: p.info.expert and p.name.split(".linear_fc")[0]):
        members = list(group)
        result += members if not module else _each_expert(members, str(module))
    return result


def _each_expert(projections: Sequence[LocalParameter], module: str) -> list[LocalParameter]:
    """The parameters of a rank's experts, expert by expert, under the names of Megatron-LM's modules."""
    result = []
    for expert in range(projections[0].shape[0]):
        for parameter in projections:
            numel = parameter.numel // parameter.shape[0]
            name = f"{module}.local_experts.{expert}.{parameter.name.removeprefix(module + '.')}"
            boxes = []
            for box in parameter.boxes:
                inside = expert * numel - box.start  # the first element of this expert, in the box
                if box.shape[0] > 1 or box.start // numel == expert:
                    offset = (box.offset[0] + max(inside, 0) // math.prod(box.shape[1:]), *box.offset[1:])
                    boxes.append(LocalBox(offset, (1, *box.shape[1:]), max(-inside, 0)))
            shape = parameter.shape[1:]
            result.append(replace(parameter, name=name, shape=shape, boxes=tuple(boxes)))
    return result


# Norms by their names in Megatron-core's local modules and, as part of the projection that follows, in ours and
# Transformer Engine's. Those that no single projection follows (before experts, before latent attention) stand by
# themselves in all of them, but Megatron-core writes that before experts under the fused name from local modules.
_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}


def norm_key(name: str, names: Container[str]) -> str:
    """The key of a norm's parameter that goes by either of its names; others are their own. `names`: all weights."""
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


def in_modules(parameters: Sequence[LocalParameter], args: Mapping[str, Any], tp: int) -> list[LocalParameter]:
    """A chunk's parameters of rank `tp` by the names, in the order and of the shapes that the modules of a Megatron-LM
    run with these arguments had: ours, which are Transformer Engine's, or Megatron-core's local ones.

    These have the norm before attention in front of linear_proj, those within latent attention behind its projections,
    and what its queries, keys and values come from split over TP, too.
    """
    if has_fused_norms(args):
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
    return replace(parameter, shape=shape, boxes=(replace(box, offset=(rank * shape[0], 0), shape=shape),))


def has_fused_norms(args: Mapping[str, Any]) -> bool:
    """Whether a run of Megatron-LM with these arguments used Transformer Engine's modules, its default."""
    return args.get("transformer_impl", "transformer_engine") != "local"


@dataclass(frozen=True)
class RankLoad:
    """What one model-parallel rank holds of a checkpoint. Bytes are as stored."""

    tp: int
    pp: int
    layers: tuple[range, ...]  # global numbers, by chunk
    parameters: int  # elements, padding of the vocabulary left out
    weight_bytes: int
    optimizer_bytes: int  # of the whole rank: its replicas share them with the distributed optimizer
    parts: dict[str, dict[str, int]]  # these bytes by part of the model and kind


def plan_load(source: Source, layout: Layout) -> list[RankLoad]:
    """What every model-parallel rank of `layout` reads of `source`, TP fastest.

    Raises ValueError where the model cannot be split like that, or the checkpoint lacks what the model needs.
    """
    config = model_config(source.args, vocabulary_rows(source.tensors, source.description), source.description)
    plans = []
    for tp, pp in layout.ranks:
        parameters = [p for chunk in rank_parameters(config, layout, tp, pp) for p in chunk]
        check_parameters(source.tensors, {p.key: p.global_shape for p in parameters}, source.description)
        numels: Counter[str] = Counter()  # an expert is a part of its key
        for parameter in parameters:
            numels[parameter.key] += sum(math.prod(box.shape) for box in parameter.boxes)
        parts: dict[str, dict[str, int]] = {}
        for key, numel in numels.items():
            part = parts.setdefault(part_of(key), {"weights": 0, "optimizer": 0})
            for stored in (key, *(optimizer_key(state, key) for state in OPTIMIZER_STATES)):
                if stored in source.tensors:
                    kind = "weights" if stored == key else "optimizer"
                    part[kind] += numel * source.tensors[stored].dtype.itemsize
        weights, optimizer = (sum(part[kind] for part in parts.values()) for kind in ("weights", "optimizer"))
        plans.append(RankLoad(tp, pp, layout.stages[pp], sum(numels.values()), weights, optimizer, parts))
    return plans


def part_of(key: str) -> str:
    """The part of the model that a tensor of this name belongs to, for people: `layer 3`, `embedding`."""
    name, _ = split_key(key)
    layer = re.match(r"decoder\.layers\.(\d+)\.", name)
    if layer is not None:
        return f"layer {layer[1]}"
    named = {"embedding": "embedding", "output_layer": "output layer", "decoder.final_layernorm": "final norm"}
    return next((text for prefix, text in named.items() if name.startswith(prefix)), name.split(".")[0])

"""Layouts of a model: the layers of each pipeline stage, and the parameters of each rank.

The model is built for one rank at a time, without memory or process groups. So shapes alone
determine whether a checkpoint can be loaded at a layout, and which parts each rank reads.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron.conversion.model_space.model import (
    check_parameters,
    find_native_key,
    model_config,
    read_vocabulary_rows,
    separate_input_norm,
)
from megatron.conversion.model_space.optimizer_states import (
    OPTIMIZER_STATES,
    optimizer_key,
)
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import Extent, Shape
from megatron.core.distributed.param_and_grad_buffer import ParamSpec
from megatron.core.models import GPTModel
from megatron.core.module import param_info
from megatron.core.parallel_config import ParallelConfig
from megatron.core.parallel_state import Axis, ExpertAxes, ParallelState
from megatron.core.pipeline_parallel import pipeline_layer_ranges
from megatron.core.run_checkpoint.checks import RANKS
from megatron.core.run_checkpoint.keys import (
    NORMS,
    split_key,
)
from megatron.core.run_checkpoint.source import Source
from megatron.core.tensor_parallel import TensorParallelRng
from megatron.core.transformer.transformer_config import (
    TransformerConfig,
)

# Uneven pipeline stages: Megatron-LM's argument -> parameter of `pipeline_layer_ranges`.
SPLITS = {
    "decoder_first_pipeline_num_layers": "first_stage_layers",
    "decoder_last_pipeline_num_layers": "last_stage_layers",
    "account_for_embedding_in_pipeline_split": "account_for_embedding",
    "account_for_loss_in_pipeline_split": "account_for_loss",
    "pipeline_model_parallel_layout": "layout",
}


@dataclass(frozen=True)
class Layout:
    """Sizes of the model-parallel axes, and the layers of each [stage][chunk]."""

    parallel: ParallelConfig
    stages: tuple[tuple[range, ...], ...]
    splits: Mapping[str, Any]  # the arguments of SPLITS that are set

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
        """Return a layout; `args` may contain SPLITS, and `experts` is (ep, etp).

        Raises ValueError if the model cannot be split like that.
        """
        # Check the sizes. Those of the experts are added later, because they need not divide the
        # smallest world of dense layers.
        RANKS(tp * pp, f"{tp} x {pp} ranks")
        ep, etp = experts
        RANKS(ep * (etp or tp), f"{ep} x {etp or tp} ranks of experts")
        parallel = ParallelConfig(tp, pp, vpp if vpp > 1 else None)
        parallel.dp_size(tp * pp)
        parallel = replace(parallel, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)

        # Split the layers.
        splits: dict[str, Any] = {}
        rules: dict[str, Any] = {}
        for name, rule in SPLITS.items():
            if args and args.get(name):
                splits[name] = args[name]
                rules[rule] = args[name]
        stages = pipeline_layer_ranges(num_layers, pp, vpp, **rules)
        return cls(parallel, tuple(tuple(chunks) for chunks in stages), splits)

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> Layout:
        """Return the layout in the arguments of Megatron-LM."""
        tp = args.get("tensor_model_parallel_size") or 1
        pp = args.get("pipeline_model_parallel_size") or 1
        vpp = args.get("virtual_pipeline_model_parallel_size") or 1
        experts: tuple[int, int | None] = (1, None)
        if (args.get("num_experts") or 0) > 1:
            ep = args.get("expert_model_parallel_size") or 1
            experts = (ep, args.get("expert_tensor_parallel_size"))
        return cls.of(args["num_layers"], tp, pp, vpp, args, experts)

    def arguments(self) -> dict[str, Any]:
        """Return the layout in Megatron-LM's arguments, the inverse of `from_args`."""
        parallel = self.parallel
        chunks = None
        if parallel.vpp_size > 1:
            chunks = parallel.vpp_size
        splits: dict[str, Any] = {}
        for name in SPLITS:
            is_flag = name.startswith("account_")
            splits[name] = self.splits.get(name, False if is_flag else None)
        # Checkpoints do not depend on context parallelism, so its size is 1.
        arguments: dict[str, Any] = {
            "tensor_model_parallel_size": parallel.tp_size,
            "context_parallel_size": 1,
            "expert_tensor_parallel_size": parallel.etp_size,
            "expert_model_parallel_size": parallel.ep_size,
            "pipeline_model_parallel_size": parallel.pp_size,
            "transformer_pipeline_model_parallel_size": parallel.pp_size,
            "virtual_pipeline_model_parallel_size": chunks,
            "num_layers_per_virtual_pipeline_stage": None,
            "num_virtual_stages_per_pipeline_rank": chunks,
        }
        return arguments | splits

    @property
    def ranks(self) -> list[tuple[int, int]]:
        """(tp, pp) of every model-parallel rank, TP fastest."""
        ranks = []
        for pp in range(self.parallel.pp_size):
            for tp in range(self.parallel.tp_size):
                ranks.append((tp, pp))
        return ranks


# ---- Parameters of a rank ----


@dataclass(frozen=True)
class LocalParameter(ParamSpec):
    """A parameter of one rank's chunk. `name` is Megatron-LM's, with the chunk's layer numbers."""

    key: str
    global_shape: Shape
    boxes: tuple[Extent, ...]  # of the global tensor; they fill the local one in order

    def locate_boxes(self) -> Iterator[tuple[Extent, int]]:
        """Yield each box with the position of its first element in the local tensor."""
        start = 0
        for offset, shape in self.boxes:
            yield (offset, shape), start
            start += math.prod(shape)


def rank_parameters(
    config: TransformerConfig,
    layout: Layout,
    tp_rank: int,
    pp_rank: int,
    divisible_by: int = 1,
    expert_rank: tuple[int, int] | None = None,
    args: Mapping[str, Any] | None = None,
) -> list[list[LocalParameter]]:
    """Return the parameters of every chunk of a rank, in module order, experts one by one.

    `expert_rank` is (etp, ep); by default experts are split like dense layers. With the `args` of a
    run of Megatron-LM, names, order and shapes are those of its modules.
    """
    # Ranks of dense layers do not depend on the layout of experts, so their world has no such axes.
    dense = replace(layout.parallel, expert_model_parallel_size=1, expert_tensor_parallel_size=None)
    world = dense.tp_size * dense.pp_size
    ps = ParallelState.for_rank(dense, world, tp_rank + dense.tp_size * pp_rank)
    etp = Axis(tp_rank, dense.tp_size)
    ep = Axis()
    if expert_rank is not None:
        etp_rank, ep_rank = expert_rank
        etp = Axis(etp_rank, layout.parallel.etp_size)
        ep = Axis(ep_rank, layout.parallel.ep_size)

    # Build each chunk without memory, as a run would build it.
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
        parameters = _list_chunk_parameters(model)
        if args is not None:
            parameters = _arrange_as_modules(parameters, args, tp_rank)
        chunks.append(_select_native(parameters, config))
    return chunks


def _select_native(
    parameters: Iterable[LocalParameter], config: TransformerConfig
) -> list[LocalParameter]:
    """Return the parameters of a chunk that are not foreign."""
    selected = []
    for parameter in parameters:
        key = find_native_key(parameter.key, config)
        if key == parameter.key:
            selected.append(parameter)
        elif key is not None:
            name = separate_input_norm(parameter.name)
            selected.append(replace(parameter, name=name, key=key))
    return selected


def _list_chunk_parameters(model: GPTModel) -> list[LocalParameter]:
    """Return the parameters of a chunk, experts one by one."""
    # The entry of each parameter in the checkpoint.
    entries: dict[Any, ShardedTensor] = {}
    for entry in model.sharded_state_dict().values():
        if isinstance(entry, ShardedTensor):
            entries[entry.local] = entry

    # The parameters, in module order.
    parameters = []
    for name, param in model.named_parameters():
        entry = entries[param]
        boxes = [(box.offset, box.shape) for box in entry.boxes]
        parameters.append(
            LocalParameter(
                name,
                tuple(param.shape),
                param_info(param),
                entry.key,
                entry.global_shape,
                tuple(boxes),
            )
        )

    # Split the experts. Both projections of a module's experts are taken together.
    result: list[LocalParameter] = []
    for module, group in itertools.groupby(parameters, _get_experts_module):
        members = list(group)
        if module is not None:
            members = _split_experts(members, module)
        result += members
    return result


def _get_experts_module(parameter: LocalParameter) -> str | None:
    """Return the module of a parameter of experts; None for all others."""
    if not parameter.info.sharding.is_expert:
        return None
    return parameter.name.split(".linear_fc")[0]


def _split_experts(projections: Sequence[LocalParameter], module: str) -> list[LocalParameter]:
    """Return the parameters of a rank's experts one by one, under Megatron-LM's names.

    `projections` are the stacked parameters of all experts, [experts, rows, columns] each.
    """
    num_experts = projections[0].shape[0]
    result = []
    for expert in range(num_experts):
        for parameter in projections:
            suffix = parameter.name.removeprefix(module + ".")
            name = f"{module}.local_experts.{expert}.{suffix}"
            shape = parameter.shape[1:]
            boxes = _select_expert_boxes(parameter, expert)
            result.append(replace(parameter, name=name, shape=shape, boxes=boxes))
    return result


def _select_expert_boxes(parameter: LocalParameter, expert: int) -> tuple[Extent, ...]:
    """Return the parts of a stacked parameter's boxes that belong to one of the rank's experts.

    A box contains all experts, or with several blocks per expert (gate and up) a block of one.
    """
    numel = parameter.numel // parameter.shape[0]  # of one expert
    boxes = []
    for (offset, shape), start in parameter.locate_boxes():
        has_expert = shape[0] > 1 or start // numel == expert
        if not has_expert:
            continue
        inside = expert * numel - start  # first element of this expert in the box
        first = offset[0] + max(inside, 0) // math.prod(shape[1:])
        boxes.append(((first, *offset[1:]), (1, *shape[1:])))
    return tuple(boxes)


def rename_prediction_layer(name: str) -> str:
    """Return the name of a parameter with our name of the layer for multi-token prediction.

    Megatron-LM from 0.17 on has another one, except in torch_dist files.
    """
    return name.replace(".mtp_model_layer.", ".transformer_layer.", 1)


def make_local_name(name: str) -> str:
    """Return the name of a parameter in Megatron-core's local modules, without fused norms."""
    for local, fused in NORMS.items():
        name = name.replace("." + fused, "." + local)
    return name


def _arrange_as_modules(
    parameters: Sequence[LocalParameter], args: Mapping[str, Any], tp: int
) -> list[LocalParameter]:
    """Return a chunk's parameters of rank `tp` with names, order and shapes of Megatron-LM's
    modules.

    Ours are those of Transformer Engine. Megatron-core's local modules differ: the norm before
    attention precedes linear_proj, norms within latent attention follow its projections, and the
    inputs of its queries, keys and values are split over TP, too.
    """
    if args.get("transformer_impl", "transformer_engine") != "local":
        return list(parameters)

    # Names.
    renamed: list[LocalParameter] = []
    position: dict[str, float] = {}
    for parameter in parameters:
        name = make_local_name(parameter.name)
        position[name] = len(renamed)
        renamed.append(replace(parameter, name=name))

    # Order: a fraction places a norm before or after the parameter at the whole number.
    def get_position(parameter: LocalParameter) -> float:
        before, is_input_norm, _ = parameter.name.partition("input_layernorm.")
        if is_input_norm:
            return position[f"{before}self_attention.linear_proj.weight"] - 0.5
        before, is_norm, _ = parameter.name.partition("_layernorm.")
        attention, _, norm = before.rpartition(".")
        latent = f"{attention}.linear_kv_up_proj.weight"
        if is_norm and latent in position:
            if norm == "q":  # before that of keys and values
                return position[latent] + 0.25
            return position[latent] + 0.5
        return position[parameter.name]

    # Shapes.
    tp_size = args.get("tensor_model_parallel_size") or 1
    arranged = []
    for parameter in sorted(renamed, key=get_position):
        if "_down_proj." in parameter.name:
            parameter = _split_rows(parameter, tp, tp_size)
        arranged.append(parameter)
    return arranged


def _split_rows(parameter: LocalParameter, rank: int, size: int) -> LocalParameter:
    """Return the share of a replicated parameter's rows that local modules give to one of
    `size`.
    """
    all_rows = parameter.shape[0]
    if all_rows % size:
        raise ValueError(
            f"{parameter.key} has {all_rows} rows, which {size} ranks cannot split evenly "
            "as Megatron-core's local modules do: give --target-transformer-impl "
            "transformer_engine, or another tensor-parallel size"
        )
    rows = all_rows // size
    shape = (rows, *parameter.shape[1:])
    assert len(parameter.boxes) == 1, parameter
    return replace(parameter, shape=shape, boxes=(((rank * rows, 0), shape),))


@dataclass(frozen=True)
class RankLoad:
    """The part of a checkpoint that one model-parallel rank loads. Bytes are as stored."""

    tp: int
    pp: int
    layers: tuple[range, ...]  # global numbers, by chunk
    parameters: int  # elements, padding of the vocabulary left out
    modules: dict[str, dict[str, int]]  # bytes of weights and optimizer, by part of the model

    def nbytes(self, content: str) -> int:
        """Return the bytes of "weights" or "optimizer" of the rank.

        With the distributed optimizer its replicas share those of the optimizer.
        """
        return sum(sizes[content] for sizes in self.modules.values())


def plan_load(source: Source, layout: Layout) -> list[RankLoad]:
    """Return the part of `source` that each model-parallel rank of `layout` reads, TP fastest.

    Raises ValueError if the model cannot be split like that, or the checkpoint is incomplete.
    """
    rows = read_vocabulary_rows(source.tensors, source.description)
    config = model_config(source.args, rows, source.description)
    plans = []
    for tp, pp in layout.ranks:
        chunks = rank_parameters(config, layout, tp, pp)
        parameters = list(itertools.chain.from_iterable(chunks))
        shapes = {parameter.key: parameter.global_shape for parameter in parameters}
        check_parameters(source.tensors, shapes, source.description)
        total, modules = _sum_loaded_bytes(source, parameters)
        plans.append(RankLoad(tp, pp, layout.stages[pp], total, modules))
    return plans


def _sum_loaded_bytes(
    source: Source, parameters: Iterable[LocalParameter]
) -> tuple[int, dict[str, dict[str, int]]]:
    """Return the elements of a rank's parameters, and the `parts` of `RankLoad`."""
    total = 0
    modules: dict[str, dict[str, int]] = {}
    for parameter in parameters:
        # Elements in the global tensor: local padding is not loaded.
        numel = sum(math.prod(shape) for _, shape in parameter.boxes)
        total += numel
        sizes = modules.setdefault(name_model_part(parameter.key), {"weights": 0, "optimizer": 0})
        sizes["weights"] += numel * source.tensors[parameter.key].dtype.itemsize
        for state in OPTIMIZER_STATES:
            info = source.tensors.get(optimizer_key(state, parameter.key))
            if info is not None:
                sizes["optimizer"] += numel * info.dtype.itemsize
    return total, modules


def name_model_part(key: str) -> str:
    """Return a readable name for the part of the model that has this tensor, e.g. `layer 3`."""
    name, _ = split_key(key)
    layer = re.match(r"decoder\.layers\.(\d+)\.", name)
    if layer is not None:
        return f"layer {layer[1]}"
    depth = re.match(r"mtp\.layers\.(\d+)\.", name)
    if depth is not None:
        return f"prediction layer {depth[1]}"
    modules = {
        "embedding": "embedding",
        "output_layer": "output layer",
        "decoder.final_layernorm": "final norm",
    }
    for prefix, module in modules.items():
        if name.startswith(prefix):
            return module
    return name.split(".")[0]

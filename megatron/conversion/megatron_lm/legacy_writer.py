"""Writes a `Source` as a Megatron-LM legacy iteration directory, for any TP, PP, VPP, EP and ETP.

Where every byte of every file goes is known before the first is read. So the tensors are streamed:
each is read once, a few rows at a time, and every rank's part is written to its place.
"""

from __future__ import annotations

import argparse
import os
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.file_names import MODEL_FILE, OPTIMIZER_FILE
from megatron.conversion.megatron_lm.args import (
    build_common_state,
    build_grad_scaler,
    split_by_expert_optimizer,
)
from megatron.conversion.megatron_lm.generators import build_initial_rng_state, rng_key
from megatron.conversion.megatron_lm.legacy_files import MegatronRank, compute_minimum_world_size
from megatron.conversion.megatron_lm.optimizer_state import (
    bucket_size_of,
    by_optimizer,
    plan_buckets,
)
from megatron.conversion.model_space.model import (
    Layout,
    LocalBox,
    LocalParameter,
    model_config,
    rank_parameters,
)
from megatron.conversion.model_space.pieces import (
    FilePlace,
    run_jobs,
    write_archive,
    write_to_places,
)
from megatron.conversion.model_space.source import (
    COMMON,
    WORD_EMBEDDINGS,
    Progress,
    Source,
    TrainingState,
    no_progress,
    optimizer_key,
    optimizer_states,
)
from megatron.core.dist_checkpointing.format.torch_zip import TensorSlot
from megatron.core.durable_files import fsync_tree, put_in_place, remove
from megatron.core.tensor_parallel import compute_padded_vocab_size

_WITH_EXTRA_STATE = (
    "linear_proj", "linear_qkv", "linear_fc1", "linear_fc2", "output_layer",
    "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj",
)  # fmt: skip
# defaults of Megatron-LM
_DIVISIBLE_BY = 128
_SEED = 1234

Chunks = list[list[LocalParameter]]


def write_legacy(
    source: Source,
    directory: Path,
    layout: Layout,
    workers: int = 1,
    progress: Progress = no_progress,
) -> list[str]:
    """Write `directory` (an iteration), which appears when it is complete; returns what could not
    be carried.

    The optimizer is written as the run had it: sharded (`distrib_optim.pt`) with the distributed
    optimizer, numbered states without. Rows that pad the vocabulary, and gaps in the flat buffers,
    are zero. Raises ValueError where the model cannot be split like that.
    """
    args = _target_args(source, layout)
    contents = _Contents(source, args)
    ranks = MegatronRank.list_all(layout.parallel, args["world_size"])
    _check_directories(layout, ranks)
    pending = directory.with_name(f".saving-{directory.name}-{os.getpid()}")
    pending.mkdir(parents=True)
    try:
        places: dict[str, list[FilePlace]] = defaultdict(list)
        for rank in ranks:
            folder = pending / rank.directory(layout.parallel)
            folder.mkdir()
            for name, content in contents.of_rank(layout, rank).items():
                path = folder / name
                for slot, position in write_archive(path, content):
                    for key, box, start in contents.held.get(slot, ()):
                        place = position + start * slot.dtype.itemsize
                        places[key].append(FilePlace(box.offset, box.shape, path, place))
        # Only now is every file laid out, and a tensor that several ranks hold is read once.
        assert places.keys() | contents.implied == source.tensors.keys(), "every tensor has a place"
        run_jobs(
            [
                partial(write_to_places, source, key, wanted, progress)
                for key, wanted in places.items()
            ],
            workers,
        )
        fsync_tree(pending)
        put_in_place(pending, directory)
    except BaseException:
        remove(pending)
        raise
    return contents.not_carried


def _check_directories(layout: Layout, ranks: Sequence[MegatronRank]) -> None:
    """Directories are named after (tp, pp, ep): each must be one rank's, and all dense ranks must
    have one.
    """
    named = {rank.directory(layout.parallel) for rank in ranks}
    dense = {rank[:2] for rank in ranks}
    if len(named) < len(ranks) or dense < set(layout.ranks):
        tp = layout.parallel.tp_size
        etp = layout.parallel.etp_size
        ep = layout.parallel.ep_size
        raise ValueError(
            f"TP {tp} with expert tensor parallelism {etp} and expert parallelism {ep}: Megatron-LM's legacy files "
            f"have no place for all of these ranks. Take expert tensor parallelism {tp}"
        )


def _target_args(source: Source, layout: Layout) -> dict[str, Any]:
    """The source's arguments, but for what the layout decides."""
    vocab_size = source.tensors[WORD_EMBEDDINGS].shape[0]
    divisible_by = int(source.args.get("make_vocab_size_divisible_by") or _DIVISIBLE_BY)
    tp = layout.parallel.tp_size
    pp = layout.parallel.pp_size
    args = dict(source.args)
    args.setdefault("use_distributed_optimizer", True)
    least = compute_minimum_world_size(layout.parallel)
    replicas = int(args.get("data_parallel_size") or 1)
    world = tp * pp * replicas if tp * pp * replicas % least == 0 else least
    placed = layout.arguments()
    if (
        "pipeline_model_parallel_layout" not in args
        and placed["pipeline_model_parallel_layout"] is None
    ):
        del placed["pipeline_model_parallel_layout"]  # releases before 0.13 do not have it
    return (
        args
        | placed
        | {
            "world_size": world,
            **({"data_parallel_size": world // (tp * pp)} if layout.parallel.ep_size > 1 else {}),
            "make_vocab_size_divisible_by": divisible_by,
            "padded_vocab_size": compute_padded_vocab_size(vocab_size, divisible_by, tp),
            "model_vocab_size": vocab_size,
            "ckpt_format": "torch",
            "use_dist_ckpt": False,
        }
    )


class _Contents:
    """What the files of a rank hold, with slots in place of tensors.

    `held` says what goes into a slot: boxes of the tensor `key`, from element `start` of the slot.
    """

    def __init__(self, source: Source, args: dict[str, Any]) -> None:
        self._source = source
        self._args = args
        self._config = model_config(args, args["model_vocab_size"], source.description)
        self.held: dict[TensorSlot, list[tuple[str, LocalBox, int]]] = defaultdict(list)
        self.implied: set[str] = (
            set()
        )  # main parameters that the format leaves out: they are the weights
        self.not_carried: list[str] = []

    def of_rank(self, layout: Layout, rank: MegatronRank) -> dict[str, Any]:
        """By file name."""
        args = self._args
        training = self._source.training
        divisible_by = args["make_vocab_size_divisible_by"]
        chunks = rank_parameters(
            self._config, layout, rank.tp, rank.pp, divisible_by, rank.expert, args
        )
        content = build_common_state(argparse.Namespace(**args), training, torch_dist=False)
        for index, parameters in enumerate(chunks):
            content["model" if len(chunks) == 1 else f"model{index}"] = self._model(parameters)
        files: dict[str, Any] = {MODEL_FILE: content}
        if training is not None:
            content["rng_state"] = self._generators(training, layout, rank)
        if not optimizer_states(self._source.tensors):
            return files
        if training is None or training.param_groups is None:
            raise ValueError(
                f"{self._source.description} has the state of an optimizer, but not its parameter groups (learning "
                "rate, betas), which legacy files need: leave it out (--no-optim)"
            )
        content["opt_param_scheduler"] = training.scheduler
        kinds = by_optimizer(chunks, rank.expert is not None)
        optimizers = [
            split_by_expert_optimizer({"optimizer": {"param_groups": training.param_groups}}, args)
        ]
        if rank.expert is not None:  # an optimizer for dense layers, one for experts
            optimizers = list(optimizers[0].values())
        if args["use_distributed_optimizer"]:
            buffers: list[Any] = [self._buffers(kind, rank.pp) for kind in kinds]
            if not rank.dense_optimizer:
                buffers[0] = None
            files[OPTIMIZER_FILE] = buffers if len(kinds) == 2 else buffers[0]
        else:
            groups = [optimizer["optimizer"]["param_groups"] for optimizer in optimizers]
            optimizers = [self._numbered(*kind) for kind in zip(groups, kinds, strict=True)]
        if training.grad_scaler is not None:
            scaler = build_grad_scaler(training.grad_scaler)
            optimizers = [optimizer | {"grad_scaler": scaler} for optimizer in optimizers]
        content["optimizer"] = optimizers if len(kinds) == 2 else optimizers[0]
        COMMON(content, self._source.description)  # the schema of the reader
        return files

    def _model(self, parameters: list[LocalParameter]) -> OrderedDict[str, TensorSlot | None]:
        """Local tensors by Megatron-LM's names, with the empty extra states where its modules have
        them.
        """
        model: OrderedDict[str, TensorSlot | None] = OrderedDict()
        for position, parameter in enumerate(parameters):
            model[parameter.name] = self._slot(parameter.key, parameter)
            module = parameter.name.rpartition(".")[0]
            following = parameters[position + 1].name if position + 1 < len(parameters) else ""
            if module.endswith(_WITH_EXTRA_STATE) and following.rpartition(".")[0] != module:
                model[f"{module}._extra_state"] = None
        if any(parameter.name.startswith("decoder.final_layernorm") for parameter in parameters):
            model.setdefault("output_layer._extra_state", None)
        return model

    def _slot(self, key: str, parameter: LocalParameter) -> TensorSlot:
        slot = TensorSlot(self._source.tensors[key].dtype, parameter.shape)
        self._hold(slot, key, parameter, 0)
        return slot

    def _hold(self, slot: TensorSlot, key: str, parameter: LocalParameter, first: int) -> None:
        """The local elements of `parameter` lie in the slot from element `first`."""
        self.held[slot] += [(key, box, first + box.start) for box in parameter.boxes]

    def _buffers(self, chunks: Chunks, pp: int) -> dict[Any, Any]:
        """`distrib_optim.pt`: the flat optimizer state of every chunk."""
        content: dict[Any, Any] = {"buckets_coalesced": True}
        num_parameters = sum(parameter.numel for parameters in chunks for parameter in parameters)
        for index, parameters in enumerate(chunks):
            if not parameters:
                continue
            placed, sizes = plan_buckets(
                parameters, bucket_size_of(self._args, pp, index, num_parameters)
            )
            states: dict[str, Any] = {}
            for state in optimizer_states(self._source.tensors):
                states[state] = TensorSlot(torch.float32, (sum(sizes),))
                for parameter, bucket, start in placed:
                    first = sum(sizes[:bucket]) + start
                    self._hold(states[state], optimizer_key(state, parameter.key), parameter, first)
            dtypes = (self._source.tensors[parameters[0].key].dtype, torch.float32)
            content[index] = {dtypes: states | {"numel_unpadded": sum(sizes)}}
        return content

    def _numbered(self, param_groups: list[dict[str, Any]], chunks: Chunks) -> dict[str, Any]:
        """torch's own form: parameters with weight decay first, then those without."""
        everything = [parameter for parameters in chunks for parameter in parameters]
        members = [
            [p for p in everything if p.group.weight_decay is decayed] for decayed in (True, False)
        ]
        state: dict[int, dict[str, TensorSlot]] = {}
        groups = []
        decays = [float(group.get("wd_mult", 1.0)) > 0 for group in param_groups]
        if decays != [True, False][: len(decays)] or (members[1] and len(decays) < 2):
            raise ValueError(
                f"{self._source.description}: the optimizer has groups of wd_mult "
                f"{[group.get('wd_mult') for group in param_groups]}; legacy files have one with weight decay and one "
                "without: leave it out (--no-optim), or write torch_dist"
            )
        for group, parameters in zip(
            param_groups, members, strict=False
        ):  # the second may be empty, and not there
            groups.append(group | {"params": list(range(len(state), len(state) + len(parameters)))})
            for parameter in parameters:
                state[len(state)] = {
                    name: self._slot(optimizer_key(name, parameter.key), parameter)
                    for name in optimizer_states(self._source.tensors)
                    if name != "param"
                }
        inner = {"state": state, "param_groups": groups}
        main_keys = {optimizer_key("param", parameter.key) for parameter in everything}
        if self._source.tensors[everything[0].key].dtype == torch.float32:
            self.implied |= main_keys
            return inner
        main = [
            [self._slot(optimizer_key("param", p.key), p) for p in parameters]
            for parameters in members
        ]
        return {"optimizer": inner, "fp32_from_fp16_params": main}

    def _generators(
        self, training: TrainingState, layout: Layout, rank: MegatronRank
    ) -> list[dict[str, Any]]:
        """Those of the source if it had them for this rank of this layout, else as a run begins
        with its seed.
        """
        key = rng_key((rank.tp, rank.pp), layout.parallel)
        if key in training.rng and rank.expert is None:
            state: list[dict[str, Any]] = training.rng[key]()
            return state
        seed = int(self._args.get("seed") or _SEED)
        note = f"random number generators of another layout (they begin anew from seed {seed})"
        if note not in self.not_carried:
            self.not_carried.append(note)
        return build_initial_rng_state(seed, *rank[:3])

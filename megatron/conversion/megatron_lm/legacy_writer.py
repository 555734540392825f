"""Writer for Megatron-LM's legacy iteration directories, for any TP, PP, VPP, EP and ETP.

The place of every byte in every file is known before the first tensor is read. So tensors are
streamed: each is read once, a few rows at a time, and every rank's part is written to its place.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.conversion.megatron_lm.args import build_grad_scaler
from megatron.conversion.megatron_lm.legacy_files import (
    FOREIGN,
    MegatronRank,
    compute_minimum_world_size,
)
from megatron.conversion.megatron_lm.optimizer_state import (
    compute_bucket_size,
    count_elements,
    plan_buckets,
    split_by_optimizer,
)
from megatron.conversion.model_space.foreign import foreign_name
from megatron.conversion.model_space.layouts import Layout, LocalParameter, rank_parameters
from megatron.conversion.model_space.model import model_config
from megatron.conversion.model_space.optimizer_states import optimizer_key, optimizer_states
from megatron.conversion.model_space.pieces import (
    run_jobs,
    write_archive,
    write_to_places,
)
from megatron.core.dist_checkpointing.box_table import Location, StoredChunk
from megatron.core.dist_checkpointing.mapping import Extent
from megatron.core.dist_checkpointing.saving.commit import Progress, no_progress
from megatron.core.durable_files import fsync_tree, put_in_place, remove
from megatron.core.run_checkpoint.checks import COMMON
from megatron.core.run_checkpoint.common_state import (
    SEEDS_PER_STAGE,
    build_common_state,
    build_initial_cuda_state,
    rng_key,
    split_by_expert_optimizer,
)
from megatron.core.run_checkpoint.keys import (
    MODEL_FILE,
    OPTIMIZER_FILE,
    WORD_EMBEDDINGS,
    is_foreign,
)
from megatron.core.run_checkpoint.source import Source, TrainingState
from megatron.core.safe_files.torch_zip import TensorSlot
from megatron.core.tensor_parallel import compute_padded_vocab_size

_WITH_EXTRA_STATE = (
    "linear_proj", "linear_qkv", "linear_fc1", "linear_fc2", "output_layer",
    "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj",
    "linear_kv_up_proj", "eh_proj",
)  # fmt: skip
# Defaults of Megatron-LM.
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
    """Write `directory` (an iteration), which appears once it is complete.

    The optimizer has the form of the run: sharded (`distrib_optim.pt`) with the distributed
    optimizer, numbered states without. Rows that pad the vocabulary, and gaps in flat buffers, are
    zero. Returns a note for each part that is lost. Raises ValueError if the model cannot be split.
    """
    args = _make_target_args(source, layout)
    contents = _Contents(source, args)
    ranks = MegatronRank.list_all(layout.parallel, args["world_size"])
    _check_directories(layout, ranks)

    # Write to a directory that a reader does not find, and rename it at the end.
    pending = directory.with_name(f".saving-{directory.name}-{os.getpid()}")
    pending.mkdir(parents=True)
    try:
        # Write every file with empty slots first, so that a tensor of several ranks is read once.
        chunks: dict[str, list[StoredChunk]] = defaultdict(list)
        for rank in ranks:
            _lay_out_files(pending, contents, layout, rank, chunks)
        assert chunks.keys() | contents.implied == source.tensors.keys(), "a tensor is not written"

        # Then stream each tensor to its places.
        jobs = []
        for key, key_chunks in chunks.items():
            jobs.append(partial(write_to_places, source.tensors[key], key_chunks, progress))
        run_jobs(jobs, workers)
        fsync_tree(pending)
        put_in_place(pending, directory)
    except BaseException:
        remove(pending)
        raise
    return contents.not_carried


def _lay_out_files(
    directory: Path,
    contents: _Contents,
    layout: Layout,
    rank: MegatronRank,
    chunks: dict[str, list[StoredChunk]],
) -> None:
    """Write the rank's files without the bytes of tensors, and add the places of these bytes.

    `chunks` maps the key of a tensor to its boxes in the files of all ranks.
    """
    folder = directory / rank.directory(layout.parallel)
    folder.mkdir()
    for name, content in contents.build_files(layout, rank).items():
        path = folder / name
        for slot, slot_position in write_archive(path, content):
            itemsize = slot.dtype.itemsize
            for key, (offset, shape), start in contents.sources.get(slot, ()):
                position = slot_position + start * itemsize
                location = Location(str(path), position, math.prod(shape) * itemsize)
                chunks[key].append(StoredChunk(offset, shape, location))


def _check_directories(layout: Layout, ranks: Sequence[MegatronRank]) -> None:
    """Raise ValueError unless each directory belongs to one rank, and each dense rank has one.

    Directories are named after (tp, pp, ep).
    """
    names = {rank.directory(layout.parallel) for rank in ranks}
    has_shared_directory = len(names) < len(ranks)
    dense_ranks = {(rank.tp, rank.pp) for rank in ranks}
    lacks_dense_rank = dense_ranks < set(layout.ranks)
    if has_shared_directory or lacks_dense_rank:
        tp = layout.parallel.tp_size
        etp = layout.parallel.etp_size
        ep = layout.parallel.ep_size
        raise ValueError(
            f"TP {tp} with expert tensor parallelism {etp} and expert parallelism {ep}: "
            "Megatron-LM's legacy files have no place for all of these ranks. Take expert tensor "
            f"parallelism {tp}"
        )


def _make_target_args(source: Source, layout: Layout) -> dict[str, Any]:
    """Return the source's arguments with those that the layout determines."""
    tp = layout.parallel.tp_size
    pp = layout.parallel.pp_size
    args = dict(source.args)
    args.setdefault("use_distributed_optimizer", True)

    # Sizes of the parallel groups
    by_layout = layout.arguments()
    stage_layout = "pipeline_model_parallel_layout"
    if stage_layout not in args and by_layout[stage_layout] is None:
        del by_layout[stage_layout]  # releases before 0.13 do not have it
    args |= by_layout

    # Keep the number of replicas if the experts fit.
    minimum = compute_minimum_world_size(layout.parallel)
    replicas = int(source.args.get("data_parallel_size") or 1)
    world_size = tp * pp * replicas
    if world_size % minimum != 0:
        world_size = minimum
    args["world_size"] = world_size
    if layout.parallel.ep_size > 1:
        args["data_parallel_size"] = world_size // (tp * pp)

    # Vocabulary, whose padding depends on TP
    vocab_size = source.tensors[WORD_EMBEDDINGS].shape[0]
    divisible_by = int(source.args.get("make_vocab_size_divisible_by") or _DIVISIBLE_BY)
    args["make_vocab_size_divisible_by"] = divisible_by
    args["padded_vocab_size"] = compute_padded_vocab_size(vocab_size, divisible_by, tp)
    args["model_vocab_size"] = vocab_size

    # Format
    args["ckpt_format"] = "torch"
    args["use_dist_ckpt"] = False
    return args


def _get_module(parameter: LocalParameter) -> str:
    """Return the name of the module that a parameter belongs to."""
    return parameter.name.rpartition(".")[0]


class _Contents:
    """The contents of each rank's files, with slots instead of tensors.

    `sources` maps a slot to the tensors stored in it: boxes of the tensor `key`, from element
    `start` of the slot.
    """

    def __init__(self, source: Source, args: dict[str, Any]) -> None:
        self._source = source
        self._args = args
        self._config = model_config(args, args["model_vocab_size"], source.description)

        # Results, which grow with each rank.
        self.sources: dict[TensorSlot, list[tuple[str, Extent, int]]] = defaultdict(list)
        self.implied: set[str] = set()  # main parameters that are the weights, and not stored
        self.not_carried: list[str] = []

    def build_files(self, layout: Layout, rank: MegatronRank) -> dict[str, Any]:
        """Return the contents of a rank's files by name."""
        args = self._args
        training = self._source.training
        divisible_by = args["make_vocab_size_divisible_by"]
        chunks = rank_parameters(
            self._config, layout, rank.tp, rank.pp, divisible_by, rank.expert, args
        )

        # Model
        content = build_common_state(argparse.Namespace(**args), training, torch_dist=False)
        if len(chunks) == 1:
            content["model"] = self._build_model(chunks[0])
        else:
            for index, parameters in enumerate(chunks):
                content[f"model{index}"] = self._build_model(parameters)

        # Foreign tensors are whole, and stored once.
        if rank.is_first:
            foreign = self._build_foreign()
            if foreign:
                content[FOREIGN] = foreign

        # Generators
        if training is not None:
            content["rng_state"] = self._build_generators(training, layout, rank)
        files: dict[str, Any] = {MODEL_FILE: content}
        if not optimizer_states(self._source.tensors):
            return files

        # Optimizer
        if training is None or training.param_groups is None:
            raise ValueError(
                f"{self._source.description} has the state of an optimizer, but not its parameter "
                "groups (learning rate, betas), which legacy files need: leave it out (--no-optim)"
            )
        content["opt_param_scheduler"] = training.scheduler
        optimizers, buffers = self._build_optimizers(training, rank, chunks)
        has_expert_optimizer = rank.expert is not None
        content["optimizer"] = optimizers if has_expert_optimizer else optimizers[0]
        if args["use_distributed_optimizer"]:
            files[OPTIMIZER_FILE] = buffers if has_expert_optimizer else buffers[0]
        COMMON(content, self._source.description)  # the schema of the reader
        return files

    def _build_optimizers(
        self, training: TrainingState, rank: MegatronRank, chunks: Chunks
    ) -> tuple[list[dict[str, Any]], list[Any]]:
        """Return the state of each optimizer in the model file, and in the optimizer file.

        There is one optimizer, or with expert parallelism one for dense layers and one for experts.
        """
        # Parameter groups
        has_expert_optimizer = rank.expert is not None
        optimizer: dict[str, Any] = {"optimizer": {"param_groups": training.param_groups}}
        optimizers: list[dict[str, Any]] = [split_by_expert_optimizer(optimizer, self._args)]
        if has_expert_optimizer:
            optimizers = list(optimizers[0].values())

        # Tensors: flat buffers in a file of their own, or numbered ones next to the groups.
        by_optimizer = split_by_optimizer(chunks, has_expert_optimizer)
        buffers: list[Any] = []
        if self._args["use_distributed_optimizer"]:
            buffers = [
                self._build_buffers(optimizer_chunks, rank.pp) for optimizer_chunks in by_optimizer
            ]
            # Dense parameters are replicated over expert-parallel ranks: one of them stores their
            # state.
            if not rank.dense_optimizer:
                buffers[0] = None
        else:
            numbered = []
            for state, optimizer_chunks in zip(optimizers, by_optimizer, strict=True):
                param_groups = state["optimizer"]["param_groups"]
                numbered.append(self._build_numbered(param_groups, optimizer_chunks))
            optimizers = numbered

        if training.grad_scaler is not None:
            scaler = build_grad_scaler(training.grad_scaler)
            optimizers = [state | {"grad_scaler": scaler} for state in optimizers]
        return optimizers, buffers

    def _build_model(self, parameters: list[LocalParameter]) -> OrderedDict[str, TensorSlot | None]:
        """Return local tensors, and empty extra states, by Megatron-LM's names."""
        model: OrderedDict[str, TensorSlot | None] = OrderedDict()
        is_last_stage = False
        for module, members in itertools.groupby(parameters, key=_get_module):
            for parameter in members:
                model[parameter.name] = self._make_slot(parameter.key, parameter)
            # The extra state of a module follows its parameters.
            if module.endswith(_WITH_EXTRA_STATE):
                model[f"{module}._extra_state"] = None
            if module == "decoder.final_layernorm":
                is_last_stage = True
        if is_last_stage:
            # With tied embeddings the output layer has no parameter, but an extra state.
            model.setdefault("output_layer._extra_state", None)
        return model

    def _build_foreign(self) -> dict[str, TensorSlot]:
        """Return the tensors that the model does not have by name, each of them whole."""
        foreign = {}
        for key, info in self._source.tensors.items():
            if is_foreign(key):
                slot = TensorSlot(info.dtype, info.shape)
                origin = (0,) * len(info.shape)
                self.sources[slot].append((key, (origin, info.shape), 0))
                foreign[foreign_name(key)] = slot
        return foreign

    def _make_slot(self, key: str, parameter: LocalParameter) -> TensorSlot:
        """Return a slot for a tensor of the parameter's local shape."""
        slot = TensorSlot(self._source.tensors[key].dtype, parameter.shape)
        self._assign(slot, key, parameter, 0)
        return slot

    def _assign(self, slot: TensorSlot, key: str, parameter: LocalParameter, first: int) -> None:
        """Store the local elements of `key` in the slot, from element `first` on."""
        # A gated projection has two boxes in the local tensor: gate, then up.
        for box, start in parameter.locate_boxes():
            self.sources[slot].append((key, box, first + start))

    def _build_buffers(self, chunks: Chunks, pp: int) -> dict[Any, Any]:
        """Return the contents of `distrib_optim.pt`: the flat optimizer state of each chunk."""
        tensors = self._source.tensors
        content: dict[Any, Any] = {"buckets_coalesced": True}
        # --ddp-num-buckets divides the parameters of all chunks of the rank.
        num_parameters = count_elements(chunks)
        for index, parameters in enumerate(chunks):
            if not parameters:
                continue
            # The positions are those that Megatron-LM's buffers have at this layout.
            bucket_size = compute_bucket_size(self._args, pp, index, num_parameters)
            plan = plan_buckets(parameters, bucket_size)
            states: dict[str, Any] = {}
            for state in optimizer_states(tensors):
                slot = TensorSlot(torch.float32, (plan.size,))
                for parameter, first in plan.list_positions():
                    key = optimizer_key(state, parameter.key)
                    self._assign(slot, key, parameter, first)
                states[state] = slot
            states["numel_unpadded"] = plan.size
            # Of parameters and of gradients
            dtypes = (tensors[parameters[0].key].dtype, torch.float32)
            content[index] = {dtypes: states}
        return content

    def _build_numbered(self, param_groups: list[dict[str, Any]], chunks: Chunks) -> dict[str, Any]:
        """Return the state in torch's own form, in which parameters are numbered.

        Those with weight decay are first.
        """
        parameters = list(itertools.chain.from_iterable(chunks))
        decayed = [parameter for parameter in parameters if parameter.group.weight_decay]
        undecayed = [parameter for parameter in parameters if not parameter.group.weight_decay]
        self._check_groups(param_groups, has_others=len(undecayed) > 0)

        # Moments of each group's parameters. The second group may be missing.
        state: dict[int, dict[str, TensorSlot]] = {}  # by number
        groups = []
        for group, members in zip(param_groups, (decayed, undecayed), strict=False):
            state_ids = []
            for parameter in members:
                state_id = len(state)
                state_ids.append(state_id)
                state[state_id] = self._make_moment_slots(parameter)
            groups.append(group | {"params": state_ids})
        inner = {"state": state, "param_groups": groups}

        # Main parameters. fp32 weights are main parameters themselves.
        weight_dtype = self._source.tensors[parameters[0].key].dtype
        if weight_dtype == torch.float32:
            for parameter in parameters:
                self.implied.add(optimizer_key("param", parameter.key))
            return inner
        main = [self._make_main_slots(decayed), self._make_main_slots(undecayed)]
        return {"optimizer": inner, "fp32_from_fp16_params": main}

    def _make_moment_slots(self, parameter: LocalParameter) -> dict[str, TensorSlot]:
        """Return a slot for each optimizer state of a parameter, except the main parameter."""
        slots = {}
        for name in optimizer_states(self._source.tensors):
            if name != "param":
                key = optimizer_key(name, parameter.key)
                slots[name] = self._make_slot(key, parameter)
        return slots

    def _make_main_slots(self, parameters: Iterable[LocalParameter]) -> list[TensorSlot]:
        """Return a slot for each main parameter."""
        slots = []
        for parameter in parameters:
            key = optimizer_key("param", parameter.key)
            slots.append(self._make_slot(key, parameter))
        return slots

    def _check_groups(self, param_groups: list[dict[str, Any]], has_others: bool) -> None:
        """Raise ValueError unless the groups are one with weight decay and one without."""
        factors = [group.get("wd_mult") for group in param_groups]
        decays = [float(group.get("wd_mult", 1.0)) > 0 for group in param_groups]
        is_known = decays in ([True], [True, False], [])
        has_all_groups = len(decays) == 2 or not has_others
        if is_known and has_all_groups:
            return
        raise ValueError(
            f"{self._source.description}: the optimizer has groups of wd_mult {factors}; legacy "
            "files have one with weight decay and one without: leave it out (--no-optim), or "
            "write torch_dist"
        )

    def _build_generators(
        self, training: TrainingState, layout: Layout, rank: MegatronRank
    ) -> list[dict[str, Any]]:
        """Return the source's generators for this rank and layout, or initial ones without them."""
        key = rng_key((rank.tp, rank.pp), layout.parallel)
        if key in training.rng and rank.expert is None:
            state: list[dict[str, Any]] = training.rng[key]()
            return state

        # Initial generators, reported once for all ranks.
        seed = int(self._args.get("seed") or _SEED)
        note = f"random number generators of another layout (they start again from seed {seed})"
        if note not in self.not_carried:
            self.not_carried.append(note)
        return _build_initial_rng_state(seed, rank.tp, rank.pp, rank.expert)


def _build_initial_rng_state(
    seed: int, tp: int, pp: int, expert: tuple[int, int] | None = None
) -> list[dict[str, Any]]:
    """Return the generators of a rank in Megatron-LM's form, as its `--seed` initializes them.

    `expert` is the rank's (etp, ep), by default (tp, 0).
    """
    base = seed + SEEDS_PER_STAGE * pp
    state = {
        "random_rng_state": random.Random(base).getstate(),
        "np_rng_state": np.random.RandomState(base).get_state(),
        "torch_rng_state": torch.Generator().manual_seed(base).get_state(),
    }
    return [state | build_initial_cuda_state(seed, tp, pp, expert)]

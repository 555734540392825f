"""Writes a `Source` as a Megatron-LM legacy iteration directory, for any TP, PP and VPP."""

from __future__ import annotations

import argparse
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.files import Progress, no_progress
from megatron.conversion.flat_buffer import bucket_size_of, plan_buckets
from megatron.conversion.legacy import MODEL_FILE, OPTIMIZER_FILE, rank_directory
from megatron.conversion.megatron_common import stored_model
from megatron.conversion.model_config import WORD_EMBEDDINGS
from megatron.conversion.model_space import OPTIMIZER_STATES, Source, optimizer_key
from megatron.conversion.rank_layout import Layout, LocalParameter, rank_parameters

_WITH_EXTRA_STATE = ("linear_proj", "linear_qkv", "linear_fc1", "linear_fc2", "output_layer")


def write_legacy(source: Source, directory: Path, layout: Layout, progress: Progress = no_progress) -> list[str]:
    """Write `directory` (an iteration) rank by rank; returns what could not be carried.

    The memory of one rank's file is needed at a time: the format is one archive per rank. The optimizer is written as
    the run had it: sharded (`distrib_optim.pt`) with the distributed optimizer, numbered states without.
    Raises ValueError where the model cannot be split like that.
    """
    vocab_size = source.tensors[WORD_EMBEDDINGS].shape[0]
    tp_size, pp_size = layout.parallel.tp_size, layout.parallel.pp_size
    divisible_by = int(source.args.get("make_vocab_size_divisible_by") or 1)
    if vocab_size % tp_size == 0:
        divisible_by = 1  # the rows as they are: they may be padded already
    config = stored_model(source.args, vocab_size, source.description)
    args = _target_args(source, layout, divisible_by, vocab_size)
    for tp, pp in layout.ranks:
        chunks = rank_parameters(config, layout, tp, pp, divisible_by)
        folder = directory / rank_directory(tp, pp, pp_size)
        folder.mkdir(parents=True)
        content, buffers = _rank_content(source, args, chunks, pp)
        if buffers is not None:
            _save(buffers, folder / OPTIMIZER_FILE, progress)
        _save(content, folder / MODEL_FILE, progress)
    return [] if _same_layout(source, layout) else ["random number generators (they belong to the writing layout)"]


def _target_args(source: Source, layout: Layout, divisible_by: int, vocab_size: int) -> argparse.Namespace:
    tp_size, pp_size, vpp_size = (layout.parallel.tp_size, layout.parallel.pp_size, layout.parallel.vpp_size)
    rows = -(-vocab_size // (divisible_by * tp_size)) * divisible_by * tp_size
    args = dict(source.args) | {
        "tensor_model_parallel_size": tp_size,
        "pipeline_model_parallel_size": pp_size,
        "virtual_pipeline_model_parallel_size": vpp_size if vpp_size > 1 else None,
        "padded_vocab_size": rows,
        "model_vocab_size": vocab_size,
    }
    return argparse.Namespace(**args)


def _same_layout(source: Source, layout: Layout) -> bool:
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    return tuple(source.args.get(name, 1) for name in names) == (layout.parallel.tp_size, layout.parallel.pp_size)


def _rank_content(
    source: Source, args: argparse.Namespace, chunks: list[list[LocalParameter]], pp: int
) -> tuple[dict[str, Any], dict[Any, Any] | None]:
    """`model_optim_rng.pt`, and `distrib_optim.pt` or None."""
    training = source.training
    content: dict[str, Any] = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": training.iteration if training else 0,
        "num_floating_point_operations_so_far": training.num_floating_point_operations_so_far if training else 0.0,
    }
    for index, parameters in enumerate(chunks):
        content["model" if len(chunks) == 1 else f"model{index}"] = _model(source, parameters)
    if training is None or training.param_groups is None:
        return content, None
    content["opt_param_scheduler"] = training.scheduler
    if training.rng.get("rng_state") is not None:
        content["rng_state"] = training.rng["rng_state"]
    half = source.tensors[chunks[0][0].key].dtype != torch.float32
    buffers = None
    if vars(args).get("use_distributed_optimizer", True):
        content["optimizer"] = {"optimizer": {"param_groups": training.param_groups}}
        buffers = {"buckets_coalesced": True} | {
            index: _buffer(source, vars(args), parameters, pp, index) for index, parameters in enumerate(chunks)
        }
    else:
        content["optimizer"] = _numbered(source, training.param_groups, chunks, half)
    if training.grad_scaler is not None:
        content["optimizer"]["grad_scaler"] = training.grad_scaler
    return content, buffers


def _model(source: Source, parameters: list[LocalParameter]) -> OrderedDict[str, torch.Tensor | None]:
    """Local tensors by Megatron-LM's names, with the empty extra states where its modules have them."""
    model: OrderedDict[str, torch.Tensor | None] = OrderedDict()
    for position, parameter in enumerate(parameters):
        model[parameter.name] = local_tensor(source, parameter.key, parameter)
        module = parameter.name.rpartition(".")[0]
        following = parameters[position + 1].name if position + 1 < len(parameters) else ""
        if module.endswith(_WITH_EXTRA_STATE) and following.rpartition(".")[0] != module:
            model[f"{module}._extra_state"] = None
    if any(parameter.name.startswith("decoder.final_layernorm") for parameter in parameters):
        model.setdefault("output_layer._extra_state", None)
    return model


def local_tensor(source: Source, key: str, parameter: LocalParameter) -> torch.Tensor:
    """This rank's part of `key`, a tensor tiled like `parameter`; rows that pad the vocabulary are zero."""
    local = torch.zeros(parameter.numel, dtype=source.tensors[key].dtype)
    for box in parameter.boxes:
        values = source.read(key, box.offset, box.shape)
        local[box.start : box.start + values.numel()] = values.reshape(-1)
    return local.view(parameter.shape)


def _buffer(
    source: Source, args: dict[str, Any], parameters: list[LocalParameter], pp: int, chunk: int
) -> dict[Any, Any]:
    """One chunk's flat optimizer state."""
    placed, sizes = plan_buckets(parameters, bucket_size_of(args, pp, chunk))
    states: dict[str, Any] = {}
    for state in OPTIMIZER_STATES:
        flat = torch.zeros(sum(sizes))
        for parameter, bucket, start in placed:
            first = sum(sizes[:bucket]) + start
            local = local_tensor(source, optimizer_key(state, parameter.key), parameter)
            flat[first : first + parameter.numel] = local.view(-1)
        states[state] = flat
    dtypes = (source.tensors[parameters[0].key].dtype, torch.float32)
    return {dtypes: states | {"numel_unpadded": sum(sizes)}}


def _numbered(
    source: Source, param_groups: list[dict[str, Any]], chunks: list[list[LocalParameter]], half: bool
) -> dict[str, Any]:
    """torch's own form: parameters with weight decay first, then those without."""
    everything = [parameter for parameters in chunks for parameter in parameters]
    members = [[p for p in everything if p.weight_decay], [p for p in everything if not p.weight_decay]]
    state: dict[int, dict[str, torch.Tensor]] = {}
    groups = []
    for group, parameters in zip(param_groups, members, strict=True):
        groups.append(group | {"params": list(range(len(state), len(state) + len(parameters)))})
        for parameter in parameters:
            moments = ("exp_avg", "exp_avg_sq")
            keys = {moment: optimizer_key(moment, parameter.key) for moment in moments}
            state[len(state)] = {moment: local_tensor(source, key, parameter) for moment, key in keys.items()}
    inner = {"state": state, "param_groups": groups}
    if not half:
        return inner
    main = [[local_tensor(source, optimizer_key("param", p.key), p) for p in parameters] for parameters in members]
    return {"optimizer": inner, "fp32_from_fp16_params": main}


def _save(content: dict[Any, Any], path: Path, progress: Progress) -> None:
    """Durable before it has its name."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    progress(path.stat().st_size)

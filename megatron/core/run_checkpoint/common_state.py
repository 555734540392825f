"""The common state of a checkpoint in Megatron-LM's form: arguments, counters, optimizer groups."""

from __future__ import annotations

import argparse
import struct
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from megatron.core.parallel_config import ParallelConfig
from megatron.core.run_checkpoint.checks import plain_numbers
from megatron.core.run_checkpoint.source import TrainingState
from megatron.core.safe_files import load_file_tensors

CHECKPOINT_VERSION = 3.0  # since Megatron-LM groups QKV rows by query group

# Arguments that loaders of Megatron-LM and Megatron-Bridge require, with the values of a model that
# uses none of these features.
LOADER_DEFAULTS: dict[str, Any] = {
    "multi_latent_attention": False,
    "qk_l2_norm": False,
    "heterogeneous_layers_config_path": None,
    "heterogeneous_layers_config_encoded_json": None,
    "no_persist_layer_norm": False,
    "overlap_p2p_comm": False,
    "num_experts": None,
    "moe_grouped_gemm": False,
    "mtp_num_layers": None,
    "is_hybrid_model": False,
    "rotary_interleaved": False,
    "fp8_param_gather": False,
    "bias_swiglu_fusion": True,
    "squared_relu": False,
    "init_method_xavier_uniform": False,
    "init_model_with_meta_device": False,
    "config_logger_dir": "",
    "cp_comm_type": ["p2p"],
    "transformer_impl": "transformer_engine",
    "fp16_lm_cross_entropy": False,
    "make_vocab_size_divisible_by": 128,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
}


def add_loader_defaults(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with the ones that loaders require."""
    result = LOADER_DEFAULTS | dict(args)
    if args.get("transformer_impl") == "local":
        # Local layers without Apex use torch's norms, which do not support persistent kernels.
        result["no_persist_layer_norm"] = True
    return result


# The form of the optimizer state in torch_dist files, in Megatron-core's terms: one key per layer,
# with the shape of the parameter.
_BY_LAYER = "non_homogeneous_layers"
_CONTENT_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
    _BY_LAYER: True,
}


class Counters(Protocol):
    """Progress of a run."""

    iteration: int
    num_floating_point_operations_so_far: float


# ---- Arguments ----


def build_common_state(
    args: argparse.Namespace,
    training: Counters | None,
    torch_dist: bool = True,
    stacked: bool = False,
) -> dict[str, Any]:
    """Return the state that every checkpoint of Megatron-LM contains besides tensors and schedules.

    `torch_dist` adds the metadata of the optimizer's form. With `stacked` layers that metadata does
    not mention layers: Megatron-core's default is one tensor for all of them.
    """
    common = {
        "args": args,
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": 0,
        "num_floating_point_operations_so_far": 0.0,
    }
    if training is not None:
        operations = training.num_floating_point_operations_so_far
        common["iteration"] = training.iteration
        common["num_floating_point_operations_so_far"] = operations
    if torch_dist:
        metadata = dict(_CONTENT_METADATA)
        if stacked:
            del metadata[_BY_LAYER]
        common["content_metadata"] = metadata
    return common


# ---- Training state ----


def read_training_state(
    common: Mapping[str, Any], args: Mapping[str, Any], groups: list[dict[str, Any]] | None
) -> TrainingState:
    """Return the training state; `groups` are the optimizer's parameter groups."""
    operations = common.get("num_floating_point_operations_so_far", 0.0)
    param_groups = None
    if groups:
        param_groups = _sort_groups(groups)
    return TrainingState(
        iteration=common.get("iteration", 0),
        # Consumed samples are arguments, unlike the iteration, and may be stored as None.
        consumed_train_samples=args.get("consumed_train_samples") or 0,
        consumed_valid_samples=args.get("consumed_valid_samples") or 0,
        num_floating_point_operations_so_far=float(operations),
        param_groups=param_groups,
        scheduler=common.get("opt_param_scheduler"),
        grad_scaler=_read_grad_scaler(common.get("optimizer")),
    )


def _sort_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups without their parameters, the one with weight decay first.

    Megatron-core 0.12 has them in either order.
    """
    result = []
    for group in groups:
        hyperparameters = dict(group)
        hyperparameters.pop("params", None)
        plain = plain_numbers(hyperparameters)
        if plain.get("step") is not None:
            plain["step"] = int(plain["step"])
        result.append(plain)
    return sorted(result, key=_get_weight_decay_factor, reverse=True)


def _get_weight_decay_factor(group: Mapping[str, Any]) -> float:
    return float(group.get("wd_mult") or 0.0)


def list_optimizers(optimizer: Any) -> list[Mapping[str, Any]]:
    """Return the optimizers of a run.

    There is one, or with EP > 1 that of the dense layers and that of the experts.
    """
    # Several optimizers are numbered (0, 1) in torch_dist and listed in legacy files.
    if isinstance(optimizer, Mapping) and 0 in optimizer:
        return [optimizer[index] for index in sorted(optimizer)]
    if isinstance(optimizer, list):
        return optimizer
    return [optimizer]


def split_by_expert_optimizer(optimizer: dict[str, Any], args: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the `optimizer` of common.pt as a run with these arguments stores it.

    With EP > 1 it contains an optimizer for the dense layers (0) and one for the experts (1). Of
    the experts' parameters, only biases are without weight decay.
    """
    num_experts = args.get("num_experts") or 0
    ep_size = args.get("expert_model_parallel_size") or 1
    if num_experts <= 1 or ep_size == 1:
        return optimizer

    groups = optimizer["optimizer"]["param_groups"]
    expert_groups = groups
    if not args.get("add_bias_linear", True):
        expert_groups = groups[:1]  # without biases, experts have no group without weight decay
    dense = _mark_groups(groups, is_expert=False)
    experts = _mark_groups(expert_groups, is_expert=True)
    return {
        0: optimizer | {"optimizer": {"param_groups": dense}},
        1: optimizer | {"optimizer": {"param_groups": experts}},
    }


def _mark_groups(groups: list[dict[str, Any]], is_expert: bool) -> list[dict[str, Any]]:
    """Return the groups with the entry that distinguishes the two optimizers."""
    return [group | {"is_expert_parallel": is_expert} for group in groups]


def find_param_groups(optimizer: Any) -> list[dict[str, Any]] | None:
    """Return the parameter groups in any variant of `optimizer`.

    With half precision or sharding they are nested one level deeper. The groups of experts have the
    hyperparameters of the others and are not returned.
    """
    optimizer = list_optimizers(optimizer)[0]
    while optimizer is not None:
        if "param_groups" in optimizer:
            groups: list[dict[str, Any]] = load_file_tensors(optimizer["param_groups"])
            return groups
        optimizer = optimizer.get("optimizer")
    return None


def _read_grad_scaler(optimizer: Any) -> dict[str, Any] | None:
    """Return the state of the loss scaler as plain numbers."""
    optimizer = list_optimizers(optimizer)[0]
    if not isinstance(optimizer, Mapping):
        return None
    scaler = optimizer.get("grad_scaler") or {}
    return plain_numbers(scaler) or None


# ---- Random number generators in Megatron-LM's checkpoints ----

# Offsets by which Megatron-LM derives the seeds of its ranks from one seed.
_MODEL_PARALLEL = 2718
_EXPERT_PARALLEL = 1024
SEEDS_PER_STAGE = 100


def rng_key(rank: tuple[int, int], parallel: ParallelConfig) -> str:
    """Return the key in torch_dist of the generators of a model-parallel rank (tp, pp)."""
    tp, pp = rank
    return f"rng_state/shard_{pp}.{tp}_{parallel.pp_size}.{parallel.tp_size}"


def build_initial_cuda_state(
    seed: int, tp: int, pp: int, expert: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Return the CUDA generators of a rank as Megatron-LM's `--seed` initializes them.

    `expert` is the rank's (etp, ep), by default (tp, 0).
    """
    base = seed + SEEDS_PER_STAGE * pp
    etp, ep = expert or (tp, 0)
    model_parallel = base + _MODEL_PARALLEL + tp
    expert_parallel = base + _EXPERT_PARALLEL + SEEDS_PER_STAGE * ep + etp
    return {
        "cuda_rng_state": _build_philox_state(base),
        "rng_tracker_states": {
            "data-parallel-rng": _build_philox_state(base),
            "model-parallel-rng": _build_philox_state(model_parallel),
            "expert-parallel-rng": _build_philox_state(expert_parallel),
        },
    }


def _build_philox_state(seed: int) -> torch.Tensor:
    """Return the state of a CUDA generator (Philox): a seed and an offset, 16 bytes."""
    offset = 0  # numbers drawn so far
    packed_state = struct.pack("<QQ", seed, offset)
    return torch.frombuffer(bytearray(packed_state), dtype=torch.uint8)

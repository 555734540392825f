"""What Megatron-LM and we store beside tensors: arguments, schedules, generators, and empty states."""

from __future__ import annotations

import argparse
import math
import random
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from megatron.conversion.file_names import MODEL_FILE, OPTIMIZER_FILE
from megatron.conversion.model_space.pieces import archive_faults
from megatron.conversion.model_space.source import (
    COMMON,
    RANKS,
    TrainingState,
    plain_numbers,
    refuse_other_models,
)
from megatron.core.dist_checkpointing import CheckpointError, in_memory, safe_open
from megatron.core.dist_checkpointing.format.safe_globals import Placeholder
from megatron.core.dist_checkpointing.format.schema import format_value
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.parallel_state import ParallelConfig, ParallelState

CHECKPOINT_VERSION = 3.0  # Megatron-LM's, since it groups QKV rows by query group

# What loaders of Megatron-LM and Megatron-Bridge read of the arguments, of a model that has none of
# it.
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
    """The arguments, with those that loaders ask for."""
    # Local layers without Apex use torch's norms, which refuse to persist.
    local = args.get("transformer_impl") == "local"
    return {**LOADER_DEFAULTS, **args, **({"no_persist_layer_norm": True} if local else {})}


# How the optimizer state lies in torch_dist files, in Megatron-core's terms: a key per layer, at
# the parameter's shape.
_BY_LAYER = "non_homogeneous_layers"
_CONTENT_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
    _BY_LAYER: True,
}


class Counters(Protocol):
    """How far a run is."""

    iteration: int
    num_floating_point_operations_so_far: float


def arguments(common: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The run's arguments under our names.

    Raises CheckpointError where there are none, ValueError where they describe a model that we do
    not have.
    """
    COMMON(common, where)
    if "args" not in common:
        raise CheckpointError(
            f"{where}: no arguments are stored with this checkpoint, so its model is unknown"
        )
    version = common.get("checkpoint_version", CHECKPOINT_VERSION)
    if version < CHECKPOINT_VERSION:
        raise CheckpointError(
            f"{where}: checkpoint version {version} has its QKV rows in another order. Load and save it with a "
            f"Megatron-LM that writes version {CHECKPOINT_VERSION}."
        )
    args = {name: _plain(value) for name, value in vars(common["args"]).items()}
    unknown = [
        name for name in ("num_layers", "hidden_size", "num_attention_heads") if not args.get(name)
    ]
    if unknown:
        raise CheckpointError(f"{where}: the stored arguments lack {', '.join(unknown)}")
    if "layernorm_epsilon" in args:
        args.setdefault("norm_epsilon", args["layernorm_epsilon"])
    if not args.get("group_query_attention", False):
        args["num_query_groups"] = args.get("num_attention_heads")
    if args.get("window_size") is not None:
        args["window_size"] = tuple(args["window_size"])
    if isinstance(args.get("num_experts"), list | tuple):
        raise CheckpointError(
            f"{where}: num_experts is {args['num_experts']}, but must be a whole number"
        )
    refuse_other_models(args, _MODEL, where)
    return args


def _plain(value: Any) -> Any:
    """Values as they are, but objects of Megatron-LM's own classes (its enums) as text: nobody else
    could load them.
    """
    if isinstance(value, Placeholder):
        return f"{type(value).__qualname__}({', '.join(map(format_value, value.args))})"
    return value


def common_state(
    args: argparse.Namespace,
    training: Counters | None,
    torch_dist: bool = True,
    stacked: bool = False,
) -> dict[str, Any]:
    """What every checkpoint of Megatron-LM holds beside tensors and schedules.

    Where nothing is said of layers that differ, Megatron-core asks for `stacked` ones.
    """
    common = {
        "args": args,
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": training.iteration if training else 0,
        "num_floating_point_operations_so_far": training.num_floating_point_operations_so_far
        if training
        else 0.0,
    }
    form = {
        name: value
        for name, value in _CONTENT_METADATA.items()
        if not (stacked and name == _BY_LAYER)
    }
    return common | ({"content_metadata": form} if torch_dist else {})


def training_state(
    common: Mapping[str, Any], args: Mapping[str, Any], groups: list[dict[str, Any]] | None
) -> TrainingState:
    """`groups` are the optimizer's param groups, wherever the format keeps them."""
    return TrainingState(
        iteration=common.get("iteration", 0),
        consumed_train_samples=args.get("consumed_train_samples") or 0,
        consumed_valid_samples=args.get("consumed_valid_samples") or 0,
        num_floating_point_operations_so_far=float(
            common.get("num_floating_point_operations_so_far", 0.0)
        ),
        param_groups=_ordered(groups) if groups else None,
        scheduler=common.get("opt_param_scheduler"),
        grad_scaler=_grad_scaler(common.get("optimizer")),
    )


def _ordered(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups without their parameters, the one with weight decay first.

    Megatron-core 0.12 has them in either order.
    """
    plain = []
    for group in groups:
        plain.append(
            plain_numbers({name: value for name, value in group.items() if name != "params"})
        )
        if plain[-1].get("step") is not None:
            plain[-1]["step"] = int(plain[-1]["step"])
    return sorted(plain, key=lambda group: -float(group.get("wd_mult") or 0.0))


def chained(optimizer: Any) -> list[Mapping[str, Any]]:
    """The optimizers of a run: one, or that of the dense layers and that of the experts (EP > 1)."""
    if isinstance(optimizer, Mapping) and 0 in optimizer:
        return [optimizer[number] for number in sorted(optimizer)]
    return optimizer if isinstance(optimizer, list) else [optimizer]


def split_by_expert_optimizer(optimizer: dict[str, Any], args: Mapping[str, Any]) -> dict[Any, Any]:
    """`optimizer` of common.pt as a run with these arguments has it: with EP > 1 experts have one of their own.

    Of their parameters only biases are without weight decay.
    """
    if (args.get("num_experts") or 0) <= 1 or (args.get("expert_model_parallel_size") or 1) == 1:
        return optimizer
    groups = optimizer["optimizer"]["param_groups"]
    kinds = {False: groups, True: groups if args.get("add_bias_linear", True) else groups[:1]}
    marked = [
        [group | {"is_expert_parallel": experts} for group in kind]
        for experts, kind in kinds.items()
    ]
    return {
        number: optimizer | {"optimizer": {"param_groups": kind}}
        for number, kind in enumerate(marked)
    }


def param_groups(optimizer: Any) -> list[dict[str, Any]] | None:
    """The groups in the `optimizer` of any variant (formats: one level deeper with half precision
    or sharding).

    Those of experts have the hyperparameters of the others.
    """
    optimizer = chained(optimizer)[0]
    while optimizer is not None:
        if "param_groups" in optimizer:
            groups: list[dict[str, Any]] = in_memory(optimizer["param_groups"])
            return groups
        optimizer = optimizer.get("optimizer")
    return None


def _grad_scaler(optimizer: Any) -> dict[str, Any] | None:
    """Return the state of the loss scaler as plain numbers."""
    optimizer = chained(optimizer)[0]
    scaler = optimizer.get("grad_scaler") if isinstance(optimizer, Mapping) else None
    return plain_numbers(scaler or {}) or None


def stored_grad_scaler(scaler: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of the loss scaler as Megatron-LM stores it: its scale is a tensor."""
    stored = dict(scaler)
    if "scale" in stored:
        stored["scale"] = torch.tensor([float(stored["scale"])])
    return stored


# Argument -> the values with which a run is the model that we know; None stands for "not given".
_MODEL: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("learned_absolute", "rope", "yarn", "alibi", "none"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "apply_residual_connection_post_layernorm": (False, None),
    "no_rope_freq": (None,),
    "qk_l2_norm": (False, None),
    "attention_output_gate": (False, None),
    "experimental_attention_variant": (None,),
    "linear_attention_freq": (None,),
    "is_hybrid_model": (False, None),
    "hybrid_override_pattern": (None,),
    "hybrid_layer_pattern": (None,),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,),
    "mtp_num_layers": (None, 0),
}


# how Megatron-LM spreads one seed over its ranks
_MODEL_PARALLEL = 2718
_EXPERT_PARALLEL = 1024
_PER_STAGE = 100


def rng_key(rank: tuple[int, int], parallel: ParallelConfig) -> str:
    """The key in torch_dist of the generators of a model-parallel rank (tp, pp)."""
    tp, pp = rank
    return f"rng_state/shard_{pp}.{tp}_{parallel.pp_size}.{parallel.tp_size}"


def initial_rng_state(
    seed: int, tp: int, pp: int, expert: tuple[int, int] | None = None
) -> list[dict[str, Any]]:
    """The generators of a rank in Megatron-LM's form, as its `--seed` sets them before any number
    is drawn.

    `expert`: its (etp, ep), by default those of a run whose experts are split as its dense layers are.
    """
    base = seed + _PER_STAGE * pp
    host = {
        "random_rng_state": random.Random(base).getstate(),
        "np_rng_state": np.random.RandomState(base).get_state(),
        "torch_rng_state": torch.Generator().manual_seed(base).get_state(),
    }
    return [host | initial_cuda_state(seed, tp, pp, expert)]


def initial_cuda_state(
    seed: int, tp: int, pp: int, expert: tuple[int, int] | None = None
) -> dict[str, Any]:
    """The part of it that belongs to CUDA."""
    base = seed + _PER_STAGE * pp
    etp, ep = expert or (tp, 0)
    seeds = {
        "data-parallel-rng": base,
        "model-parallel-rng": base + _MODEL_PARALLEL + tp,
        "expert-parallel-rng": base + _EXPERT_PARALLEL + _PER_STAGE * ep + etp,
    }
    states = {name: _cuda_state(value) for name, value in seeds.items()}
    return {"cuda_rng_state": _cuda_state(base), "rng_tracker_states": states}


def _cuda_state(seed: int) -> torch.Tensor:
    """A CUDA generator (Philox) is a seed and an offset."""
    return torch.frombuffer(bytearray(struct.pack("<QQ", seed, 0)), dtype=torch.uint8)


# Megatron-core's modules ask for an `_extra_state` each (the scales of FP8 training), and its
# reader stops at the first one that is not there, even though all of them are empty in other
# precisions.

# Modules that have a state, by their weight. Transformer Engine's attention and norms have one,
# Megatron-core's own do not ask for it; each expert of a layer is a module.
_STATEFUL = re.compile(
    r"(decoder\.layers\.\d+\.(?:self_attention\.linear_(?:qkv|proj|q_proj|(?:q|kv)_(?:down|up)_proj)"
    r"|mlp\.(?:shared_experts\.|experts\.experts\.)?linear_fc[12]"
    r"|(?:self_attention\.[qk]|input|pre_mlp)_layernorm)"
    r"|decoder\.final_layernorm)\.weight"
)
_EMPTY = torch.empty(0, dtype=torch.uint8)  # how norms say it; the others say None


def extra_states(keys: Iterable[str], experts: int = 0) -> dict[str, ShardedObject]:
    """One entry per module, of the model whose weights are among `keys` and which has so many
    experts in a layer.
    """
    states: dict[str, torch.Tensor | None] = {}
    for key in keys:
        if match := _STATEFUL.fullmatch(key):
            module = match[1]
            count = experts if ".experts.experts." in module else 1
            for place in range(count):
                states[f"{module}._extra_state/shard_{place}_{count}"] = (
                    _EMPTY if module.endswith("norm") else None
                )
            if module.endswith("self_attention.linear_proj"):
                states[
                    module.replace("linear_proj", "core_attention") + "._extra_state/shard_0_1"
                ] = None
    return {key: ShardedObject(key, value) for key, value in states.items()}


class MegatronRank(NamedTuple):
    """A rank that writes a directory; with expert parallelism those that hold the first replica of
    their experts.
    """

    tp: int
    pp: int
    expert: tuple[int, int] | None = None  # (etp, ep)
    dense_optimizer: bool = True  # it writes the sharded optimizer of the dense layers, too

    @classmethod
    def of(cls, parallel: ParallelConfig, world_size: int) -> list[MegatronRank]:
        if parallel.ep_size == 1:
            return [cls(tp, pp) for pp in range(parallel.pp_size) for tp in range(parallel.tp_size)]
        world = world_size
        least = least_world(parallel)
        world = world if world and world % least == 0 else least
        RANKS(world, f"a world of {world} ranks")
        states = [ParallelState.for_rank(parallel, world, rank) for rank in range(world)]
        return [
            cls(ps.tp.rank, ps.pp.rank, (ps.etp.rank, ps.ep.rank), ps.dp.is_first)
            for ps in states
            if ps.edp.is_first
        ]

    def __str__(self) -> str:
        etp, ep = self.expert or (self.tp, None)
        experts = "" if ep is None else f"expert rank {ep} of "
        return f"{experts}tensor-parallel rank {etp}, pipeline rank {self.pp}"

    def directory(self, parallel: ParallelConfig) -> str:
        stage = f"_{self.pp:03d}" if parallel.pp_size > 1 else ""
        return f"mp_rank_{self.tp:02d}{stage}" + (f"_{self.expert[1]:03d}" if self.expert else "")


def least_world(parallel: ParallelConfig) -> int:
    """The smallest number of processes with room for dense layers and experts."""
    return math.lcm(parallel.tp_size, parallel.etp_size * parallel.ep_size) * parallel.pp_size


def open_legacy(path: Path, *kinds: type) -> Any:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the stored arguments call for this rank")
    content = safe_open(path)
    if not isinstance(content, kinds or dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a checkpoint")
    return content


def first_legacy(directory: Path) -> Path:
    files = sorted(directory.glob(f"mp_rank_*/{MODEL_FILE}"))
    if not files:
        raise CheckpointError(
            f"{directory} is no legacy checkpoint: it has no mp_rank_*/{MODEL_FILE}"
        )
    return files[0]


def list_legacy_damage(directory: Path) -> list[str]:
    """Files that are missing or damaged: those of every rank that the stored arguments call for."""
    first = first_legacy(directory)
    stored = COMMON(open_legacy(first), str(first)).get("args")
    args = vars(stored) if isinstance(stored, argparse.Namespace) else {}
    has_experts = isinstance(args.get("num_experts"), int) and args["num_experts"] > 1
    axes = (
        "tensor_model",
        "pipeline_model",
        *(("expert_model", "expert_tensor") if has_experts else ()),
    )
    sizes = {f"{axis}_parallel_size": args.get(f"{axis}_parallel_size") or None for axis in axes}
    parallel = ParallelConfig(**{name: size for name, size in sizes.items() if size is not None})
    RANKS(
        parallel.tp_size * parallel.pp_size,
        f"{first}: {parallel.tp_size} x {parallel.pp_size} ranks",
    )
    ranks = {
        rank.directory(parallel)
        for rank in MegatronRank.of(parallel, int(args.get("world_size") or 0))
    }
    if not args or first.parent.name not in ranks:
        return []  # of a layout or an age that is refused when it is opened
    names = [MODEL_FILE]
    if any(directory.glob(f"mp_rank_*/{OPTIMIZER_FILE}")):
        names.append(OPTIMIZER_FILE)
    return archive_faults(
        [directory / rank / name for rank in sorted(ranks) for name in names], directory
    )

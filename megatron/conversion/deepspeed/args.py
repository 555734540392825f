"""Arguments and training state between DeepSpeed's files and ours.

Megatron-DeepSpeed and BigScience's fork descend from older Megatron-LM: most names are the same, a few differ or are
missing, and a few of their options are no model of ours.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron.conversion.model_space.model import plain_args
from megatron.conversion.model_space.source import TrainingState
from megatron.core.dist_checkpointing.format.safe_globals import Placeholder
from megatron.core.dist_checkpointing.format.schema import shown
from megatron.core.transformer.transformer_config import TransformerConfig

# Their argument -> the only value that our model can express.
_REQUIRED = {
    "apply_residual_connection_post_layernorm": False,
    "glu_activation": None,
    "num_experts": [1],
    "onnx_safe": None,
}
# The change of Megatron-DeepSpeed that brought blocks of q, k and v also brought this option.
BLOCKS_MARK = "ds_sequence_parallel_fpdt"
_RENAMED = {"layernorm_epsilon": "norm_epsilon", "embed_layernorm": "embedding_layernorm", "rope_theta": "rotary_base"}
_NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
_POSITION_TYPES = {1: "rope", 2: "learned_absolute", 3: "alibi"}  # PositionEmbeddingType of BigScience's fork
_SCHEDULE = (
    "max_lr", "lr_warmup_steps", "num_steps", "lr_decay_style", "lr_decay_steps", "min_lr", "start_wd", "end_wd",
    "wd_incr_style", "wd_incr_steps",
)  # fmt: skip
_RENAMED_SCHEDULE = {name: f"lr_{name}" for name in ("warmup_steps", "decay_steps", "decay_style")}
_BY_TOKENS = ("lr_decay_tokens", "decay_tokens")


def read_args(namespace: Mapping[str, Any], description: str) -> dict[str, Any]:
    """Their arguments under our names; values that are not plain data are left out."""
    for name, value in _REQUIRED.items():
        if namespace.get(name, value) not in (value, None):
            raise ValueError(
                f"{description} was trained with {name} = {shown(namespace[name])}, which is not supported"
            )
    args = {_RENAMED.get(name, name): value for name, value in plain_args(namespace).items()}
    args["num_experts"] = None  # their [1] is Megatron-LM's None
    args["position_embedding_type"] = _position_type(namespace)
    normalization = args.get("normalization", "layernorm")
    args["normalization"] = _NORMS.get(normalization, normalization)
    if args.get("num_key_value_heads") is not None:
        args["num_query_groups"] = args["num_key_value_heads"]
        args["group_query_attention"] = args["num_query_groups"] != args.get("num_attention_heads")
    return args


def _position_type(namespace: Mapping[str, Any]) -> str:
    kind = namespace.get("position_embedding_type")
    if isinstance(kind, Placeholder):
        if kind.args not in [(number,) for number in _POSITION_TYPES]:
            raise ValueError(f"position_embedding_type {kind} is not supported")
        return _POSITION_TYPES[kind.args[0]]
    if kind is not None:
        return str(kind)
    if namespace.get("use_rotary_position_embeddings"):
        return "rope"
    return "learned_absolute" if namespace.get("add_position_embedding", True) else "none"


_WITHOUT_FORM = (
    "quick_geglu", "geglu", "rotary_interleaved", "rotary_seq_len_interpolation_factor", "norm_placement",
    "qk_layernorm_across_heads", "softmax_scale", "attn_logit_softcapping", "final_logit_softcapping",
    "scale_embeddings", "window_attn_skip_freq", "softmax_type",
)  # fmt: skip


def write_args(
    config: TransformerConfig, args: Mapping[str, Any], training: TrainingState, blocks: int | None
) -> argparse.Namespace:
    """All arguments under our names and under theirs, with the consumed samples: else their data would start over.

    `blocks` of q, k and v are marked as their writers mark them. ValueError for a model that they do not have.
    """
    for name in _WITHOUT_FORM:
        if getattr(config, name) not in (None, False, "pre", "vanilla"):
            raise ValueError(f"--{name.replace('_', '-')}: Megatron-DeepSpeed has no such model to write this one as")
    rope, learned = (config.position_embedding_type == kind for kind in ("rope", "learned_absolute"))
    theirs: dict[str, Any] = {
        "num_key_value_heads": config.query_groups,
        "add_position_embedding": learned,
        "use_rotary_position_embeddings": rope,
        "rope_theta": config.rotary_base,
        "normalization": {ours: theirs for theirs, ours in _NORMS.items()}[config.normalization],
        "layernorm_epsilon": config.norm_epsilon,
        "embed_layernorm": config.embedding_layernorm,
        "tensor_model_parallel_size": blocks or 1,
        "pipeline_model_parallel_size": 1,
        "iteration": training.iteration,
        "consumed_train_samples": training.consumed_train_samples,
        "consumed_valid_samples": training.consumed_valid_samples,
    }
    if args.get("vocab_size") is not None:
        theirs["vocab_size"] = args["vocab_size"]  # of the tokenizer; the model's is in the vocabulary's record
    everything = {**plain_args(args), **dataclasses.asdict(config), **theirs}
    everything.pop(BLOCKS_MARK, None)  # the source's own
    return argparse.Namespace(**everything, **({BLOCKS_MARK: False} if blocks else {}))


def parts_without_place(config: TransformerConfig) -> list[str]:
    """What of the model their programs lack: the files hold it, but only a reader that knows it computes the same."""
    parts = {
        "window_size": config.window_size is not None,
        "use_rope_scaling": config.use_rope_scaling,
        "qk_layernorm": config.qk_layernorm,
        "add_qkv_bias": config.has_qkv_bias and not config.add_bias_linear,
    }
    return [
        f"{name}: Megatron-DeepSpeed has no such model; other readers need to know" for name in parts if parts[name]
    ]


def read_training(
    state: Mapping[str, Any], optimizer: Mapping[str, Any] | None, step: int, args: Mapping[str, Any]
) -> TrainingState:
    """From a model-state file, `optimizer_state.pt` (BLOOM-era directories have none) and the Adam step."""
    scheduler = _read_scheduler(state.get("lr_scheduler"), args)
    operations = "num_floating_point_operations_so_far"
    return TrainingState(
        iteration=state.get("iteration") or state.get("global_steps") or 0,
        consumed_train_samples=args.get("consumed_train_samples") or state.get("global_samples") or 0,
        consumed_valid_samples=args.get("consumed_valid_samples") or 0,
        num_floating_point_operations_so_far=float(state.get(operations) or 0.0),
        grad_scaler=state.get("grad_scaler"),
        param_groups=state.get("megatron_param_groups") or _read_groups(optimizer, scheduler, step, args),
        scheduler=scheduler,
    )


def _read_scheduler(state: Mapping[str, Any] | None, args: Mapping[str, Any]) -> dict[str, Any] | None:
    """Megatron-LM's schedule; one that counts tokens has no counterpart (`lost_state` names it)."""
    if not state or any(state.get(name) for name in _BY_TOKENS):
        return None
    renamed = {_RENAMED_SCHEDULE.get(name, name): value for name, value in state.items()}
    weight_decay = args.get("weight_decay", 0.0)  # BigScience's fork has no schedule for it
    defaults = {"start_wd": weight_decay, "end_wd": weight_decay, "wd_incr_style": "constant"}
    renamed = defaults | {"wd_incr_steps": renamed.get("lr_decay_steps")} | renamed
    return {name: renamed[name] for name in _SCHEDULE if name in renamed}


def _read_groups(
    optimizer: Mapping[str, Any] | None, scheduler: Mapping[str, Any] | None, step: int, args: Mapping[str, Any]
) -> list[dict[str, Any]] | None:
    """Megatron-LM's two groups, with and without weight decay (BigScience's fork splits the first in two)."""
    if optimizer is None and "lr" not in args:
        return None
    schedule, groups = scheduler or {}, list(optimizer["param_groups"]) if optimizer is not None else []
    fixed = {"is_expert_parallel": False, "is_decoupled_lr": False, "bias_correction": True, "step": step}
    implied = {
        "lr": args.get("lr"),
        "betas": (args.get("adam_beta1", 0.9), args.get("adam_beta2", 0.999)),
        "eps": args.get("adam_eps", 1e-8),
        "weight_decay": schedule.get("end_wd", args.get("weight_decay", 0.01)),
        "lr_mult": 1.0,
    }
    limits = {name: schedule.get(name, args.get(ours)) for name, ours in (("max_lr", "lr"), ("min_lr", "min_lr"))}
    result = []
    for decays in (True, False):
        known = [g for g in groups if bool(g.get("wd_mult", 1.0) and g.get("weight_decay")) == decays]
        group = {name: (known[0] if known else {}).get(name, value) for name, value in implied.items()}
        group |= {"betas": tuple(group["betas"]), "weight_decay": group["weight_decay"] if decays else 0.0}
        result.append(fixed | limits | group | {"wd_mult": float(decays)})
    return result


def write_groups(training: TrainingState, counts: tuple[int, int]) -> list[dict[str, Any]]:
    """`counts` groups with and without weight decay, in DeepSpeed's terms; the loader copies every key."""
    result = []
    for number in range(sum(counts)):
        decayed = number < counts[0]
        name = "wd_no_scale_lr" if decayed else "no_wd_no_scale_lr"
        group = {"name": name, "wd_mult": float(decayed), "lr_mult": 1.0}
        for known in training.param_groups or []:
            if bool(known.get("wd_mult", 1.0)) == decayed:
                kept = ("lr", "betas", "eps", "weight_decay", "lr_mult")
                group |= {name: known[name] for name in kept if known.get(name) is not None}
        result.append(group | {"params": [number]})
    return result


def write_scheduler(training: TrainingState, tokens: int, bigscience: bool) -> dict[str, Any] | None:
    """Megatron's schedule with the token counts of its descendants; BigScience's fork has older names."""
    if training.scheduler is None:
        return None
    state = {name: training.scheduler[name] for name in _SCHEDULE if name in training.scheduler}
    if bigscience:
        old = {new: name for name, new in _RENAMED_SCHEDULE.items()}
        state = {old.get(name, name): value for name, value in state.items()}
        return state | {"warmup_tokens": 0, "num_tokens": tokens}
    return state | {"lr_warmup_tokens": None, "num_tokens": tokens, "lr_decay_tokens": None}


def lost_state(state: Mapping[str, Any]) -> list[str]:
    """What a model-state file holds that a `Source` has no place for."""
    lost = [name for name in ("rng_state", "random_rng_state", "data_sampler", "random_ltd") if state.get(name)]
    scheduler = state.get("lr_scheduler") or {}
    return lost + [f"lr_scheduler.{name}" for name in _BY_TOKENS if scheduler.get(name)]

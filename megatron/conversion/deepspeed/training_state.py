"""Arguments and training state of DeepSpeed's programs, converted to ours and back.

Megatron-DeepSpeed and BigScience's fork descend from older Megatron-LM: most of their arguments
have the same names, a few differ or are missing, and a few describe models that are not supported
here.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megatron.conversion.model_space.foreign_arguments import plain_args, refuse_other_models
from megatron.core.run_checkpoint.checks import plain_numbers
from megatron.core.run_checkpoint.source import TrainingState
from megatron.core.safe_files.safe_globals import Placeholder
from megatron.core.transformer.transformer_config import TransformerConfig

# Their argument -> the supported values.
_REQUIRED = {
    "apply_residual_connection_post_layernorm": (False, None),
    "glu_activation": (None,),
    "num_experts": ([1], 1, 0, None),  # without experts; numbers in files of this program
    "onnx_safe": (None,),
}
# The change of Megatron-DeepSpeed that brought blocks of q, k and v also brought this option.
BLOCKS_MARK = "ds_sequence_parallel_fpdt"
_RENAMED = {
    "layernorm_epsilon": "norm_epsilon",
    "embed_layernorm": "embedding_layernorm",
    "rope_theta": "rotary_base",
}
_NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
# PositionEmbeddingType of BigScience's fork.
_POSITION_TYPES = {1: "rope", 2: "learned_absolute", 3: "alibi"}
_SCHEDULE = (
    "max_lr", "lr_warmup_steps", "num_steps", "lr_decay_style", "lr_decay_steps", "min_lr",
    "start_wd", "end_wd",
    "wd_incr_style", "wd_incr_steps", "init_lr", "wsd_decay_steps", "wsd_decay_style",
)  # fmt: skip
# Name in BigScience's fork -> name in Megatron-LM.
_RENAMED_SCHEDULE = {
    "warmup_steps": "lr_warmup_steps",
    "decay_steps": "lr_decay_steps",
    "decay_style": "lr_decay_style",
}
_BY_TOKENS = ("lr_decay_tokens", "decay_tokens")


# ---- Arguments ----


def read_args(namespace: Mapping[str, Any], description: str) -> dict[str, Any]:
    """Return their arguments under our names, without values that are not plain data."""
    refuse_other_models(namespace, _REQUIRED, description)
    args = _rename(plain_args(namespace), _RENAMED)
    args["num_experts"] = None  # the other accepted values mean the same
    args["position_embedding_type"] = _read_position_type(namespace)
    normalization = args.get("normalization", "layernorm")
    args["normalization"] = _NORMS.get(normalization, normalization)
    groups = args.get("num_key_value_heads")
    if groups is not None:
        args["num_query_groups"] = groups
        args["group_query_attention"] = groups != args.get("num_attention_heads")
    return args


def _rename(values: Mapping[str, Any], new_names: Mapping[str, str]) -> dict[str, Any]:
    """Return the values under new names, those that `new_names` lacks unchanged."""
    return {new_names.get(name, name): value for name, value in values.items()}


def _invert(names: Mapping[str, str]) -> dict[str, str]:
    """Return the mapping from values to keys."""
    return {new: old for old, new in names.items()}


def _copy_fields(source: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the fields of `source` with these names, in the order of the names."""
    return {name: source[name] for name in names if name in source}


def _read_position_type(namespace: Mapping[str, Any]) -> str:
    """Return the position embedding, which some programs store as flags instead of a name."""
    position_type = namespace.get("position_embedding_type")
    if isinstance(position_type, Placeholder):  # an enum of BigScience's fork
        # The argument is of a file, and possibly not hashable.
        if position_type.args not in [(type_index,) for type_index in _POSITION_TYPES]:
            raise ValueError(f"position_embedding_type {position_type} is not supported")
        return _POSITION_TYPES[position_type.args[0]]
    if position_type is not None:
        return str(position_type)
    if namespace.get("use_rotary_position_embeddings"):
        return "rope"
    if namespace.get("add_position_embedding", True):
        return "learned_absolute"
    return "none"


def build_args(
    config: TransformerConfig, args: Mapping[str, Any], training: TrainingState, blocks: int | None
) -> argparse.Namespace:
    """Return all arguments under our names and under theirs.

    They include the consumed samples, without which their data would start over. `blocks` is the
    number of [q; k; v] blocks, if any; they are marked as their writers do.
    """
    position = config.position_embedding_type
    norms = _invert(_NORMS)
    deepspeed_args: dict[str, Any] = {
        "num_key_value_heads": config.query_groups,
        "add_position_embedding": position == "learned_absolute",
        "use_rotary_position_embeddings": position == "rope",
        "rope_theta": config.rotary_base,
        "normalization": norms[config.normalization],
        "layernorm_epsilon": config.norm_epsilon,
        "embed_layernorm": config.embedding_layernorm,
        "num_experts": [1],  # models with experts are refused
        "tensor_model_parallel_size": blocks or 1,
        "pipeline_model_parallel_size": 1,
        "iteration": training.iteration,
        "consumed_train_samples": training.consumed_train_samples,
        "consumed_valid_samples": training.consumed_valid_samples,
    }
    if args.get("vocab_size") is not None:
        # The tokenizer's size; the model's is recorded with the vocabulary.
        deepspeed_args["vocab_size"] = args["vocab_size"]
    result = {**plain_args(args), **dataclasses.asdict(config), **deepspeed_args}
    result.pop(BLOCKS_MARK, None)  # of the source
    if blocks:
        result[BLOCKS_MARK] = False
    return argparse.Namespace(**result)


_WITHOUT_FORM = (
    "quick_geglu", "geglu", "rotary_interleaved", "rotary_seq_len_interpolation_factor",
    "norm_placement",
    "qk_layernorm_across_heads", "qk_layernorm_per_head", "softmax_scale", "attn_logit_softcapping",
    "final_logit_softcapping",
    "scale_embeddings", "window_attn_skip_freq", "softmax_type",
    "parallel_residual",
    "no_rope_freq", "embedding_multiplier", "residual_multiplier", "logits_scaling",
    "use_mup",
)  # fmt: skip


def list_unsupported_parts(config: TransformerConfig) -> list[str]:
    """Return a line for each part of the model that their programs lack.

    The files contain these parts, but only a reader that knows them computes the same. Raises
    ValueError if the files cannot represent the model.
    """
    defaults = TransformerConfig.__dataclass_fields__
    for name in _WITHOUT_FORM:
        if getattr(config, name) != defaults[name].default:
            raise ValueError(
                f"--{name.replace('_', '-')}: Megatron-DeepSpeed has no such model to write this "
                "one as"
            )
    has_rope = config.position_embedding_type == "rope"
    # Other programs ignore these parts of the model without an error.
    features = {
        "window_size": config.window_size is not None,
        "use_rope_scaling": config.use_rope_scaling,
        "rope_type": has_rope and config.rope_type == "yarn",
        "qk_layernorm": config.qk_layernorm,
        "add_qkv_bias": config.has_qkv_bias and not config.add_bias_linear,
    }
    messages = []
    for name, is_used in features.items():
        if is_used:
            messages.append(
                f"{name}: Megatron-DeepSpeed has no such model; other readers need to know"
            )
    return messages


# ---- Training state ----


def read_training(
    state: Mapping[str, Any],
    optimizer: Mapping[str, Any] | None,
    step: int,
    args: Mapping[str, Any],
    decays_all: bool = False,
) -> TrainingState:
    """Return the training state.

    It comes from a model-state file, `optimizer_state.pt` (missing in BLOOM-era directories) and
    Adam's step. With `decays_all`, biases and norms have weight decay, too.
    """
    scheduler = _read_scheduler(state.get("lr_scheduler"), args)
    samples = args.get("consumed_train_samples") or state.get("global_samples") or 0
    operations = state.get("num_floating_point_operations_so_far") or 0.0
    grad_scaler = plain_numbers(state.get("grad_scaler") or {})
    groups = state.get("megatron_param_groups")  # in directories that this program wrote
    return TrainingState(
        iteration=state.get("iteration") or state.get("global_steps") or 0,
        consumed_train_samples=samples,
        consumed_valid_samples=args.get("consumed_valid_samples") or 0,
        num_floating_point_operations_so_far=float(operations),
        grad_scaler=grad_scaler or None,
        param_groups=groups or _read_groups(optimizer, scheduler, step, args, decays_all),
        scheduler=scheduler,
    )


def _read_scheduler(
    state: Mapping[str, Any] | None, args: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return Megatron-LM's schedule, or None for one that counts tokens (see `list_lost_state`)."""
    if not state or any(state.get(name) for name in _BY_TOKENS):
        return None
    renamed = _rename(state, _RENAMED_SCHEDULE)
    # BigScience's fork has no schedule for the weight decay.
    weight_decay = args.get("weight_decay", 0.0)
    schedule = {
        "start_wd": weight_decay,
        "end_wd": weight_decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": renamed.get("lr_decay_steps"),
    }
    schedule |= renamed
    return _copy_fields(schedule, _SCHEDULE)


def _read_groups(
    optimizer: Mapping[str, Any] | None,
    scheduler: Mapping[str, Any] | None,
    step: int,
    args: Mapping[str, Any],
    decays_all: bool,
) -> list[dict[str, Any]] | None:
    """Return Megatron-LM's two groups: matrices, and biases and norms.

    The second one has no weight decay, unless all parameters have. BigScience's fork splits the
    first one in two. Values that the groups lack come from the schedule and the arguments.
    """
    if optimizer is None and "lr" not in args:
        return None
    schedule = scheduler or {}
    optimizer_groups: list[Mapping[str, Any]] = []
    if optimizer is not None:
        optimizer_groups = optimizer["param_groups"]
    # Values for files that lack a group or a field of it.
    defaults = {
        "lr": args.get("lr"),
        "betas": (args.get("adam_beta1", 0.9), args.get("adam_beta2", 0.999)),
        "eps": args.get("adam_eps", 1e-8),
        "weight_decay": schedule.get("end_wd", args.get("weight_decay", 0.01)),
        "lr_mult": 1.0,
    }
    result = []
    for decays in (True, decays_all):
        group: dict[str, Any] = {
            "is_expert_parallel": False,
            "is_decoupled_lr": False,
            "bias_correction": True,
            "step": step,
            "max_lr": schedule.get("max_lr", args.get("lr")),
            "min_lr": schedule.get("min_lr", args.get("min_lr")),
        }
        group |= defaults
        group |= _copy_fields(_find_group(optimizer_groups, decays), defaults)
        group["betas"] = tuple(group["betas"])
        # Otherwise, the stored defaults would apply.
        if not decays:
            group["weight_decay"] = 0.0
        group["wd_mult"] = float(decays)
        result.append(group)
    return result


def _find_group(groups: Iterable[Mapping[str, Any]], decays: bool) -> Mapping[str, Any]:
    """Return the first group with (or without) weight decay.

    Without such a group, return the first one, whose learning rate and betas apply to all
    parameters, or an empty one if there are no groups.
    """
    for group in groups:
        if _has_weight_decay(group) == decays:
            return group
    return next(iter(groups), {})


def _has_weight_decay(group: Mapping[str, Any]) -> bool:
    return bool(group.get("wd_mult", 1.0) and group.get("weight_decay"))


def check_groups(
    groups: Sequence[Mapping[str, Any]],
    members: Sequence[Iterable[str]],
    decayed: Mapping[str, bool],
    description: str,
) -> None:
    """Raise ValueError for parameter groups other than those that `_read_groups` returns.

    `members` are the names of the parameters in each group, and `decayed` states which parameters
    have weight decay here. Training would continue with other hyperparameters.
    """
    problem = _compare_groups(groups)
    # With or without weight decay of all parameters, they are treated equally.
    is_uniform = decays_all(groups, members) or not any(map(_has_weight_decay, groups))
    if problem is None and len(members) == len(groups) and not is_uniform:
        problem = _compare_members(groups, members, decayed)
    if problem is not None:
        raise ValueError(
            f"{description}: {problem}. Runs here have two parameter groups: matrices with weight "
            "decay, biases and norms without, or with the same one. Leave the optimizer out "
            "(--no-optim of convert.py, --no-load-optim of a run)"
        )


def decays_all(groups: Sequence[Mapping[str, Any]], members: Sequence[Iterable[str]]) -> bool:
    """Return whether all parameters are known to have weight decay, biases and norms included."""
    are_known = len(groups) > 0 and len(members) == len(groups)
    return are_known and all(map(_has_weight_decay, groups))


def _compare_groups(groups: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the difference between groups of the same kind, None if there is none."""
    for decays in (True, False):
        of_kind = [group for group in groups if _has_weight_decay(group) == decays]
        for group in of_kind:
            for name in ("lr", "betas", "eps", "weight_decay", "lr_mult"):
                value, first = group.get(name), of_kind[0].get(name)
                if value != first:
                    return f"parameter groups have different values of {name}, {first} and {value}"
    return None


def _compare_members(
    groups: Sequence[Mapping[str, Any]],
    members: Sequence[Iterable[str]],
    decayed: Mapping[str, bool],
) -> str | None:
    """Return the first parameter whose group differs from ours, None if there is none."""
    for group, names in zip(groups, members, strict=True):
        for name in names:
            if name in decayed and decayed[name] != _has_weight_decay(group):
                state = "with" if _has_weight_decay(group) else "without"
                return f"{name} is in a parameter group {state} weight decay"
    return None


def build_groups(training: TrainingState, counts: tuple[int, int]) -> list[dict[str, Any]]:
    """Return DeepSpeed's parameter groups, `counts` of them with and without weight decay.

    Its loader copies every key.
    """
    num_decayed, num_others = counts
    stored_groups = training.param_groups or []
    if num_others > 0 and stored_groups and all(group.get("wd_mult") for group in stored_groups):
        raise ValueError(
            "the optimizer has weight decay of biases and norms, which DeepSpeed's universal files "
            "of Megatron cannot express: leave it out (--no-optim), or write torch_dist"
        )
    result = []
    for index in range(num_decayed + num_others):
        is_decayed = index < num_decayed
        group: dict[str, Any] = {
            "name": "wd_no_scale_lr" if is_decayed else "no_wd_no_scale_lr",
            "wd_mult": float(is_decayed),
            "lr_mult": 1.0,
        }
        # Copy hyperparameters from the stored group with the same weight decay.
        for run_group in training.param_groups or []:
            if bool(run_group.get("wd_mult", 1.0)) != is_decayed:
                continue
            for name in ("lr", "betas", "eps", "weight_decay", "lr_mult"):
                if run_group.get(name) is not None:
                    group[name] = run_group[name]
        group["params"] = [index]
        result.append(group)
    return result


def build_scheduler(
    training: TrainingState, tokens: int, bigscience: bool
) -> dict[str, Any] | None:
    """Return the schedule with the token counts of Megatron-LM's descendants.

    BigScience's fork uses older names.
    """
    if training.scheduler is None:
        return None
    state = _copy_fields(training.scheduler, _SCHEDULE)
    if bigscience:
        state = _rename(state, _invert(_RENAMED_SCHEDULE))
        return state | {"warmup_tokens": 0, "num_tokens": tokens}
    return state | {"lr_warmup_tokens": None, "num_tokens": tokens, "lr_decay_tokens": None}


def list_lost_state(state: Mapping[str, Any], optimizer: Mapping[str, Any] | None) -> list[str]:
    """Return the names of state in the model-state file and in `optimizer_state.pt` that a `Source`
    cannot hold.
    """
    lost = []
    if optimizer is not None and optimizer.get("dynamic_loss_scale"):
        lost.append("loss_scaler")
    for name in ("rng_state", "random_rng_state", "data_sampler", "random_ltd"):
        if state.get(name):
            lost.append(name)
    scheduler = state.get("lr_scheduler") or {}
    for name in _BY_TOKENS:
        if scheduler.get(name):
            lost.append(f"lr_scheduler.{name}")
    return lost

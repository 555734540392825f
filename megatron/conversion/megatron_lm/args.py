"""Arguments and optimizer groups in Megatron-LM's checkpoints, as this program understands them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.model_space.foreign_arguments import refuse_other_models
from megatron.core.dist_checkpointing import CheckpointError, Reader, load_common
from megatron.core.dist_checkpointing.files import COMMON_STATE
from megatron.core.run_checkpoint.checks import COMMON
from megatron.core.run_checkpoint.common_state import (
    CHECKPOINT_VERSION,
    find_param_groups,
    list_optimizers,
)
from megatron.core.safe_files.safe_globals import Placeholder
from megatron.core.safe_files.schema import format_value

# Argument -> the values with which a run is a supported model. None means "not given".
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("learned_absolute", "rope", "yarn", "alibi", "none"),
    "normalization": ("LayerNorm", "RMSNorm"),
    "apply_residual_connection_post_layernorm": (False, None),
    "qk_l2_norm": (False, None),
    "experimental_attention_variant": (None,),
    "linear_attention_freq": (None,),
    "is_hybrid_model": (False, None),
    "hybrid_override_pattern": (None,),
    "hybrid_layer_pattern": (None,),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,),
    "mtp_use_repeated_layer": (False, None),
    "mtp_hybrid_override_pattern": (None,),
}


def read_common(reader: Reader, directory: Path, verify: bool = True) -> dict[str, Any]:
    """Return `common.pt`, or the object that replaces it in newer Megatron-LM."""
    common = load_common(directory, verify=verify)
    if not common and COMMON_STATE in reader.metadata.objects:
        common_state: dict[str, Any] = reader.read_object(COMMON_STATE)
        return common_state
    return common


def read_arguments(common: Mapping[str, Any], location: str) -> dict[str, Any]:
    """Return the run's arguments under our names.

    Raises CheckpointError if there are none, ValueError if they describe an unsupported model.
    """
    COMMON(common, location)
    _check_common(common, location)

    args: dict[str, Any] = {}
    for name, value in vars(common["args"]).items():
        args[name] = _make_plain(value)
    _check_model_arguments(args, location)

    # Convert the conventions of Megatron-LM to ours.
    if isinstance(args.get("optimizer"), str):  # dist_muon is the layer-wise Muon of 0.16
        args["optimizer"] = args["optimizer"].removeprefix("dist_")
    if "layernorm_epsilon" in args:
        args.setdefault("norm_epsilon", args["layernorm_epsilon"])
    if not args.get("group_query_attention", False):
        # Multi-head attention ignores the stored number, which is the flag's default.
        args["num_query_groups"] = args.get("num_attention_heads")
    if args.get("window_size") is not None:
        args["window_size"] = tuple(args["window_size"])

    refuse_other_models(args, _SUPPORTED, location)
    return args


def _check_common(common: Mapping[str, Any], location: str) -> None:
    """Raise CheckpointError unless `common` contains arguments and has a readable version."""
    if "args" not in common:
        raise CheckpointError(
            f"{location}: no arguments are stored with this checkpoint, so its model is unknown"
        )
    version = common.get("checkpoint_version", CHECKPOINT_VERSION)
    if version < CHECKPOINT_VERSION:
        raise CheckpointError(
            f"{location}: checkpoint version {version} has another order of QKV rows. Load and "
            f"save it with a Megatron-LM that writes version {CHECKPOINT_VERSION}."
        )


def _check_model_arguments(args: Mapping[str, Any], location: str) -> None:
    """Raise CheckpointError unless the arguments contain the sizes of a model."""
    missing = []
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if not args.get(name):
            missing.append(name)
    if missing:
        raise CheckpointError(f"{location}: the stored arguments lack {', '.join(missing)}")
    # A list is valid only in the arguments of Megatron-DeepSpeed.
    if isinstance(args.get("num_experts"), list | tuple):
        raise CheckpointError(
            f"{location}: num_experts is {args['num_experts']}, but must be a whole number"
        )


def _make_plain(value: Any) -> Any:
    """Return an object of Megatron-LM's own classes (its enums) as text, other values unchanged.

    Other programs could not load such an object.
    """
    if not isinstance(value, Placeholder):
        return value
    arguments = ", ".join(map(format_value, value.args))
    return f"{type(value).__qualname__}({arguments})"


def find_all_param_groups(optimizers: Sequence[Any]) -> list[dict[str, Any]] | None:
    """Return the parameter groups of all optimizers of a run, e.g., of matrices and of the rest.

    Some do not count their steps: all groups get the step of those that do.
    """
    groups: list[dict[str, Any]] = []
    for optimizer in optimizers:
        for inner_optimizer in list_optimizers(optimizer):
            groups += find_param_groups(inner_optimizer) or []
    steps = [group["step"] for group in groups if group.get("step") is not None]
    if steps:
        groups = [{"step": steps[0]} | group for group in groups]
    return groups or None


def build_grad_scaler(scaler: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of the loss scaler as Megatron-LM stores it: its scale is a tensor."""
    state = dict(scaler)
    if "scale" in state:
        state["scale"] = torch.tensor([float(state["scale"])])
    return state

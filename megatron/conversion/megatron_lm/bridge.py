"""Megatron-Bridge's checkpoints: torch_dist, with `run_config.yaml` and `train_state.pt` in place
of the arguments.

Bridge builds its model from a configuration of Megatron-core, so most names of the `model:` section
are arguments of Megatron-LM; a few differ. (Source: Megatron-Bridge 0.6.2, checked against a file
of it.)
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.megatron_lm.plain_yaml import PlainYamlError, parse_yaml
from megatron.conversion.model_space.source import check_scalar, plain_args, refuse_other_models
from megatron.core.dist_checkpointing import CheckpointError, safe_load
from megatron.core.dist_checkpointing.format.schema import anything, mapping, read_regular, text

RUN_CONFIG = "run_config.yaml"
TRAIN_STATE = "train_state.pt"
_TOKENIZER = "tokenizer"

_RENAMED = {
    "num_moe_experts": "num_experts",
    "rope_scaling": "use_rope_scaling",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}
# Settings without a counterpart among the arguments -> the only values that are our model.
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "use_mup": (False, None),
    "heterogeneous_block_specs": (False, None),
    "rotary_scaling_factor": (None, 1.0),
    "fp32_residual_connection": (False, None),
}
# Function, gated; Megatron-core's fused GELU is the tanh approximation.
_ACTIVATIONS = {("torch.nn.functional.silu", True), ("torch.nn.functional.gelu", False)}
_TRAINING = (
    "use_distributed_optimizer", "optimizer", "lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps",
    "sgd_momentum", "clip_grad", "global_batch_size", "micro_batch_size", "train_iters", "seed", "overlap_grad_reduce",
    "tokenizer_type", "tokenizer_model", "vocab_file", "merge_file",
)  # fmt: skip

_TRAIN_STATE = mapping(check_scalar)
_MAX_CONFIG_BYTES = 256 * 1024  # a file of Bridge 0.6.2 has 20 kB


def bridge_common(directory: Path, common: Mapping[str, Any]) -> dict[str, Any]:
    """`common` with the arguments and counters that Megatron-LM would have put there.

    Raises CheckpointError for files that are damaged or of another kind, ValueError for a model
    that we do not have.
    """
    path = directory / RUN_CONFIG
    try:
        config = parse_yaml(read_regular(path, _MAX_CONFIG_BYTES).decode("utf-8"))
    except (PlainYamlError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    mapping(anything)(config, str(path))
    model = mapping(anything, keys=text(256))(config.get("model"), f"{path}: model")
    counters = _counters(directory / TRAIN_STATE)
    args = _arguments(model, str(path)) | _training_arguments(config, directory)
    args["consumed_train_samples"] = counters.get("consumed_train_samples", 0)
    args["consumed_valid_samples"] = counters.get("consumed_valid_samples", 0)
    return {
        **common,
        "args": argparse.Namespace(**args),
        "iteration": counters.get("step", common.get("iteration", 0)),
        "num_floating_point_operations_so_far": counters.get(
            "floating_point_operations_so_far", 0.0
        ),
    }


def _counters(path: Path) -> dict[str, Any]:
    """Numbers of steps and samples: scalars, each a tensor of its own."""
    if not path.is_file():
        return {}
    stored = _TRAIN_STATE(safe_load(path), str(path))
    return {name: value.item() for name, value in stored.items() if isinstance(value, torch.Tensor)}


def _arguments(model: Mapping[str, Any], where: str) -> dict[str, Any]:
    refuse_other_models(model, _REQUIRED, where)
    # The only nested values that are arguments.
    lists = ("window_size", "window_attn_skip_freq", "moe_layer_freq")
    flat = {name: value for name, value in model.items() if _is_flat(value, name in lists)}
    args = {_RENAMED.get(name, name): value for name, value in plain_args(flat).items()}
    heads = args.get("num_attention_heads")
    groups = args.get("num_query_groups")
    spec = _target(model.get("transformer_layer_spec"))
    return args | {
        **_activation(model, where),
        "group_query_attention": groups is not None and groups != heads,
        "untie_embeddings_and_output_weights": not model.get(
            "share_embeddings_and_output_weights", True
        ),
        "max_position_embeddings": model.get("seq_length"),
        "params_dtype": _dtype(model, where),
        "transformer_impl": "local" if "local" in spec else "transformer_engine",
    }


def _is_flat(value: Any, is_list: bool) -> bool:
    items = value if is_list and isinstance(value, list) else [value]
    return not any(isinstance(item, dict | list) for item in items)


def _activation(model: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = _target(model.get("activation_func"))
    gated = bool(model.get("gated_linear_unit"))
    if (function, gated) not in _ACTIVATIONS:
        kind = "gated " if gated else ""
        raise ValueError(
            f"{where} is of a model that is not supported here: its activation is {kind}{function}"
        )
    approximate = isinstance(model["activation_func"], Mapping) and model["activation_func"].get(
        "approximate"
    )
    return {
        "swiglu": gated,
        "bias_gelu_fusion": bool(model.get("bias_activation_fusion")) and not gated,
        "openai_gelu": approximate == "tanh",
    }


def _dtype(model: Mapping[str, Any], where: str) -> torch.dtype:
    name = _target(model.get("params_dtype")).removeprefix("torch.")
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise ValueError(
            f"{where}: weights of {name or 'an unknown type'} are not supported: only {', '.join(known)}"
        )
    return known[name]


def _training_arguments(config: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """What of the other sections has a name among the arguments; the tokenizer is the one beside
    the weights.
    """
    sections = [config.get(name) for name in ("rng", "tokenizer", "train", "ddp", "optimizer")]
    known = {
        name: value
        for section in sections
        if isinstance(section, Mapping)
        for name, value in section.items()
    }
    args = plain_args({name: known[name] for name in _TRAINING if name in known})
    if args.get("tokenizer_type") == "HuggingFaceTokenizer" and (directory / _TOKENIZER).is_dir():
        args["tokenizer_model"] = str(directory / _TOKENIZER)
    return args


def _target(value: Any) -> str:
    """The object that a value of the configuration stands for."""
    named = value.get("_target_") if isinstance(value, Mapping) else value
    return named if isinstance(named, str) else ""

"""Megatron-Bridge's checkpoints: torch_dist with `run_config.yaml` and `train_state.pt`.

These two files replace the arguments of Megatron-LM. Bridge builds its model from a configuration
of Megatron-core, so most names in the `model:` section are arguments of Megatron-LM; a few differ.
(Source: Megatron-Bridge 0.6.2, checked against one of its files.)
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.conversion.model_space.foreign_arguments import plain_args, refuse_other_models
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.run_checkpoint.checks import check_scalar
from megatron.core.safe_files import safe_load
from megatron.core.safe_files.reading import read_regular
from megatron.core.safe_files.schema import anything, mapping, text

RUN_CONFIG = "run_config.yaml"
TRAIN_STATE = "train_state.pt"

_RENAMED = {
    "num_moe_experts": "num_experts",
    "rope_scaling": "use_rope_scaling",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}
# Settings without a counterpart among the arguments -> the supported values.
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "use_mup": (False, None),
    "heterogeneous_block_specs": (False, None),
    "rotary_scaling_factor": (None, 1.0),
    "fp32_residual_connection": (False, None),
}
_LISTS = (
    "window_size",
    "window_attn_skip_freq",
    "moe_layer_freq",
    "no_rope_freq",
)  # nested arguments
# Function without its module, gated; Megatron-core's fused GELU is the tanh approximation.
_ACTIVATIONS = {("silu", True), ("gelu", False), ("squared_relu", False)}
_TRAINING = (
    "use_distributed_optimizer", "optimizer", "lr", "min_lr", "weight_decay", "adam_beta1",
    "adam_beta2", "adam_eps",
    "sgd_momentum", "clip_grad", "global_batch_size", "micro_batch_size", "train_iters", "seed",
    "overlap_grad_reduce",
    "tokenizer_type", "tokenizer_model", "vocab_file", "merge_file",
)  # fmt: skip

_TRAIN_STATE = mapping(check_scalar)
_MAX_CONFIG_BYTES = 256 * 1024  # a file of Bridge 0.6.2 has 20 kB


def read_bridge_common(directory: Path, common: Mapping[str, Any]) -> dict[str, Any]:
    """Return `common` with the arguments and counters that Megatron-LM would have stored in it.

    Raises CheckpointError for damaged or malformed files, ValueError for an unsupported model.
    """
    # Imported here, because other checkpoints do not need PyYAML.
    from megatron.conversion.megatron_lm.plain_yaml import PlainYamlError, parse_yaml

    # Parse the configuration.
    path = directory / RUN_CONFIG
    try:
        config = parse_yaml(read_regular(path, _MAX_CONFIG_BYTES).decode("utf-8"))
    except (PlainYamlError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    mapping(anything)(config, str(path))
    model = mapping(anything, keys=text(256))(config.get("model"), f"{path}: model")

    # Convert it to Megatron-LM's arguments, which include the numbers of consumed samples.
    counters = _read_counters(directory / TRAIN_STATE)
    args = convert_model(model, str(path)) | convert_training(config)
    args["consumed_train_samples"] = counters.get("consumed_train_samples", 0)
    args["consumed_valid_samples"] = counters.get("consumed_valid_samples", 0)
    operations = counters.get("floating_point_operations_so_far", 0.0)
    return {
        **common,
        "args": argparse.Namespace(**args),
        "iteration": counters.get("step", common.get("iteration", 0)),
        "num_floating_point_operations_so_far": operations,
    }


def _read_counters(path: Path) -> dict[str, Any]:
    """Return the numbers of steps and samples, which are stored as scalar tensors."""
    if not path.is_file():
        return {}
    raw_counters = _TRAIN_STATE(safe_load(path), str(path))
    counters = {}
    for name, value in raw_counters.items():
        if isinstance(value, torch.Tensor):
            counters[name] = value.item()
    return counters


def convert_model(model: Mapping[str, Any], location: str) -> dict[str, Any]:
    """Return the model section as arguments of Megatron-LM."""
    refuse_other_models(model, _REQUIRED, location)
    args = _rename_settings(model)

    # Derive the arguments that Bridge stores in another form.
    heads = args.get("num_attention_heads")
    groups = args.get("num_query_groups")
    is_tied = model.get("share_embeddings_and_output_weights", True)
    spec = _get_target(model.get("transformer_layer_spec"))
    implementation = "transformer_engine"
    if "local" in spec:
        implementation = "local"
    return args | {
        **_convert_activation(model, location),
        "group_query_attention": groups is not None and groups != heads,
        "untie_embeddings_and_output_weights": not is_tied,
        "max_position_embeddings": model.get("seq_length"),
        "params_dtype": _read_dtype(model, location),
        "transformer_impl": implementation,
    }


def _rename_settings(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are plain data, under the names of Megatron-LM's arguments."""
    flat = {}
    for name, value in model.items():
        if _is_flat(value, allow_list=name in _LISTS):
            flat[name] = value
    args = {}
    for name, value in plain_args(flat).items():
        args[_RENAMED.get(name, name)] = value
    return args


def _is_flat(value: Any, allow_list: bool) -> bool:
    """Return whether the value is a scalar, or with `allow_list` possibly a list of scalars."""
    items = [value]
    if allow_list and isinstance(value, list):
        items = value
    return not any(isinstance(item, dict | list) for item in items)


def _convert_activation(model: Mapping[str, Any], location: str) -> dict[str, Any]:
    """Return the arguments of the activation; raise ValueError for an unsupported one."""
    # E.g. torch.nn.functional.silu and torch._C._nn.gelu
    target = _get_target(model.get("activation_func"))
    function = target.rpartition(".")[2]
    gated = bool(model.get("gated_linear_unit"))
    if (function, gated) not in _ACTIVATIONS:
        if gated:
            target = f"gated {target}"
        raise ValueError(
            f"{location} is of a model that is not supported here: its activation is {target}"
        )
    setting = model["activation_func"]
    is_tanh = isinstance(setting, Mapping) and setting.get("approximate") == "tanh"
    return {
        "swiglu": gated,
        "squared_relu": function == "squared_relu",
        "bias_gelu_fusion": bool(model.get("bias_activation_fusion")) and function == "gelu",
        "openai_gelu": is_tanh,
    }


def _read_dtype(model: Mapping[str, Any], location: str) -> torch.dtype:
    """Return the dtype of the weights; raise ValueError for an unsupported one."""
    name = _get_target(model.get("params_dtype")).removeprefix("torch.")
    supported = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in supported:
        raise ValueError(
            f"{location}: weights of {name or 'an unknown type'} are not supported: only "
            f"{', '.join(supported)}"
        )
    return supported[name]


def convert_training(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the other sections as arguments."""
    # Merge the sections; later ones take precedence.
    fields: dict[str, Any] = {}
    for name in ("rng", "tokenizer", "train", "ddp", "optimizer"):
        section = config.get(name)
        if isinstance(section, Mapping):
            fields |= section
    args = plain_args({name: fields[name] for name in _TRAINING if name in fields})

    return args


def _get_target(value: Any) -> str:
    """Return the name of the object that a value refers to, or an empty text without one.

    Bridge writes an object as its name, or as a mapping with the name under `_target_`.
    """
    if isinstance(value, Mapping):
        value = value.get("_target_")
    if not isinstance(value, str):
        return ""
    return value

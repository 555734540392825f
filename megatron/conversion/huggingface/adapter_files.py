"""The files of a LoRA adapter of PEFT: its configuration and its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.conversion.huggingface.adapters import ADAPTER_CONFIG
from megatron.conversion.huggingface.module_patterns import ModulePatterns
from megatron.conversion.huggingface.safetensors_files import open_safetensors
from megatron.conversion.huggingface.weight_files import open_torch_file
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.dist_checkpointing.mapping import LazyTensor
from megatron.core.safe_files import schema
from megatron.core.safe_files.reading import confine_links, read_json
from megatron.core.safe_files.schema import (
    anything,
    boolean,
    format_value,
    integer,
    mapping,
    number,
    optional,
    sequence,
    text,
)

_OPENERS: dict[str, Callable[[Path], dict[str, LazyTensor]]] = {
    "adapter_model.safetensors": open_safetensors,
    "adapter_model.bin": open_torch_file,
}
_MAX_RANK = 1 << 20
_RANK = integer(1, _MAX_RANK)
_SCALE = number(-1e9, 1e9)
_NAMES = optional(sequence(text(1024), 10**5))
_TOKENS = sequence(integer(0, 2**31), 10**7)


def _check_tokens(value: Any, location: str) -> Any:
    """Check the tokens of the embedding, or of each named module."""
    check = mapping(_TOKENS) if isinstance(value, Mapping) else _TOKENS
    return check(value, location)


# Names of initial values that leave the base model as it is. PiSSA and others change its weights.
_HARMLESS_INITIAL_VALUES = ("gaussian", "eva", "orthogonal")

# Fields of LoraConfig that determine the merged weights.
_CHECKS = {
    "r": _RANK,
    "lora_alpha": _SCALE,
    "rank_pattern": optional(mapping(_RANK)),
    "alpha_pattern": optional(mapping(_SCALE)),
    "use_rslora": boolean,
    "use_dora": boolean,
    "modules_to_save": _NAMES,
    "target_parameters": _NAMES,
    "trainable_token_indices": optional(_check_tokens),
    "ensure_weight_tying": boolean,
}
# Fields that do not: the tensors have the names of the modules that were trained.
_WITHOUT_EFFECT = (
    "auto_mapping base_model_name_or_path bias corda_config eva_config exclude_modules "
    "fan_in_fan_out inference_mode init_lora_weights layers_pattern layers_to_transform "
    "loftq_config lora_bias lora_dropout lora_ga_config megatron_core peft_type peft_version "
    "qalora_group_size revision runtime_config target_modules task_type"
)
# Other fields must not be set.
_REFUSED = {
    "alora_invocation_tokens": "activates the adapter for some tokens only",
    "arrow_config": "chooses between adapters for each token",
    "kasa_config": "changes the weights of the base model",
    "layer_replication": "repeats layers of the base model: repeat them with --layers first, and "
    "remove the field",
    "megatron_config": "names modules of Megatron-core",
    "monteclora_config": "samples its matrices",
    "use_bdlora": "stores blocks of its matrices",
    "use_qalora": "averages the inputs of quantized layers",
    "velora_config": "stores more than the matrices",
}


@dataclass(frozen=True)
class AdapterConfig:
    """The fields of adapter_config.json that determine the merged weights."""

    rank: int
    alpha: float
    rank_pattern: ModulePatterns[int]
    alpha_pattern: ModulePatterns[float]
    has_root_scaling: bool  # rsLoRA divides by the square root of the rank
    has_magnitudes: bool  # DoRA
    saved_modules: tuple[str, ...]  # modules that were trained as a whole
    target_parameters: tuple[str, ...]  # trained parameters other than weights of linear layers
    tokens: Mapping[str, list[int]] | list[int]  # trained rows of the embedding, or by module
    ties_saved_modules: bool  # a trained embedding is also the output layer

    def get_rank(self, module: str) -> int:
        """Return the rank of the matrices of a module or parameter."""
        return self.rank_pattern.find(module) or self.rank

    def get_scaling(self, module: str) -> float:
        """Return the factor of the product of the matrices of a module or parameter."""
        alpha = self.alpha_pattern.find(module)
        if alpha is None:
            alpha = self.alpha
        rank = self.get_rank(module)
        return alpha / (math.sqrt(rank) if self.has_root_scaling else rank)

    def is_saved(self, module: str) -> bool:
        """Return whether a module was trained as a whole."""
        return any(_ends_with(module, name) for name in self.saved_modules)

    def is_target_parameter(self, name: str) -> bool:
        """Return whether a parameter was trained that is not the weight of a linear layer."""
        return any(_ends_with(name, target) for target in self.target_parameters)

    def get_tokens(self, module: str) -> list[int]:
        """Return the rows of a module that were trained."""
        if isinstance(self.tokens, list):
            return self.tokens
        for name, rows in self.tokens.items():
            if _ends_with(module, name):
                return rows
        return []


def _ends_with(name: str, end: str) -> bool:
    """Return whether the last parts of a name between dots are `end`."""
    return name == end or name.endswith(f".{end}")


def read_adapter_config(directory: Path) -> AdapterConfig:
    """Return the configuration of the LoRA adapter in a directory.

    Raises CheckpointError for other kinds of adapters, and for options that change more than the
    weights that the adapter contains.
    """
    location = str(directory / ADAPTER_CONFIG)
    fields = mapping(anything)(read_json(directory / ADAPTER_CONFIG), location)
    peft_type = fields.get("peft_type")
    if peft_type != "LORA":
        raise CheckpointError(
            f"{location}: peft_type {format_value(peft_type)} is not supported, only LORA is: "
            "merge this adapter with merge_and_unload() of peft if it can do that"
        )
    _refuse_fields(fields, location)
    for name in ("r", "lora_alpha"):
        if name not in fields:
            raise CheckpointError(f"{location} has no {name!r}")
    for name, check in _CHECKS.items():
        if name in fields:
            check(fields[name], f"{location}: {name}")
    return AdapterConfig(
        fields["r"],
        fields["lora_alpha"],
        ModulePatterns(fields.get("rank_pattern") or {}, f"{location}: rank_pattern"),
        ModulePatterns(fields.get("alpha_pattern") or {}, f"{location}: alpha_pattern"),
        fields.get("use_rslora", False),
        fields.get("use_dora", False),
        tuple(fields.get("modules_to_save") or ()),
        tuple(fields.get("target_parameters") or ()),
        fields.get("trainable_token_indices") or [],
        fields.get("ensure_weight_tying", False),
    )


def _refuse_fields(fields: Mapping[str, Any], location: str) -> None:
    """Raise CheckpointError for options that cannot be merged, and for unknown ones."""
    initial = fields.get("init_lora_weights")
    if isinstance(initial, str) and initial.lower() not in _HARMLESS_INITIAL_VALUES:
        raise CheckpointError(
            f"{location}: init_lora_weights = {format_value(initial)} is not supported, because "
            "such initial values change the weights of the base model. Convert the adapter with "
            "path_initial_model_for_weight_conversion of peft's save_pretrained(), or give the "
            "changed base model and set the field to true"
        )
    unknown = []
    for name, value in fields.items():
        is_set = value not in (None, False, 0, "") and value != {} and value != []
        if not is_set or name in _CHECKS or name in _WITHOUT_EFFECT.split():
            continue
        if name in _REFUSED:
            raise CheckpointError(f"{location}: {name} is not supported: it {_REFUSED[name]}")
        unknown.append(format_value(name))
    if unknown:
        raise CheckpointError(
            f"{location} has fields that are not known and may change the merged weights: "
            f"{schema.abbreviate(unknown, between=', ')}. If they do not, remove them"
        )


def open_adapter_tensors(directory: Path) -> dict[str, LazyTensor]:
    """Return the tensors of the adapter in a directory by name."""
    for name, open_file in _OPENERS.items():
        path = directory / name
        if path.exists():
            return open_file(path)
    raise CheckpointError(f"{directory} has neither {' nor '.join(_OPENERS)}")


def require_adapter(directory: Path) -> None:
    """Raise CheckpointError unless a directory contains an adapter of PEFT."""
    confine_links(directory)
    if (directory / ADAPTER_CONFIG).is_file():
        return
    hint = ""
    if directory.is_dir():
        # PEFT saves adapters with a name of their own in a folder of that name.
        names = sorted(path.parent.name for path in directory.glob(f"*/{ADAPTER_CONFIG}"))
        if names:
            hint = f"; adapters are in its folders {schema.abbreviate(names, 8, ', ')}"
    raise CheckpointError(f"--lora: {directory} has no {ADAPTER_CONFIG}{hint}")

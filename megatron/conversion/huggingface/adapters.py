"""Adapters of PEFT, which are not read: a model without its adapter is another model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.dist_checkpointing.format.schema import format_value, read_json

ADAPTER_CONFIG = "adapter_config.json"
# Names of low-rank matrices, and those that PEFT gives to the modules that it wraps.
_ADAPTED = re.compile(r"\.(?:lora_\w+|base_layer|original_module|modules_to_save)(?:\.|$)")


def describe_adapter(directory: Path) -> str | None:
    """Return the way to convert the adapter in a directory, None if it contains none."""
    path = directory / ADAPTER_CONFIG
    if not path.is_file():
        return None
    fields = read_json(path)
    base = fields.get("base_model_name_or_path") if isinstance(fields, dict) else None
    return (
        f"{directory} contains an adapter of PEFT ({ADAPTER_CONFIG}, base model "
        f"{format_value(base)}), which is not read. Merge it into its base model, and convert the "
        f"result: peft.AutoPeftModelForCausalLM.from_pretrained({str(directory)!r})"
        ".merge_and_unload().save_pretrained(MODEL)"
    )


def refuse_adapter(directory: Path) -> None:
    """Raise CheckpointError for a model with an adapter in the same directory."""
    adapter = describe_adapter(directory)
    if adapter is not None:
        raise CheckpointError(
            f"{adapter}. To use the weights next to it alone, e.g. because they are merged "
            f"already, remove {ADAPTER_CONFIG}"
        )


def refuse_adapted_modules(names: Iterable[str], directory: Path) -> None:
    """Raise CheckpointError if tensors have the names of modules that PEFT has wrapped."""
    for name in names:
        if _ADAPTED.search(name):
            raise CheckpointError(
                f"{directory}: the weights contain modules of PEFT ({name}), which are not read: "
                "merge them with merge_and_unload() and save the model again"
            )

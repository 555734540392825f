"""Adapters of PEFT where a model is expected: refused, because the model without them is another
one, with the command that merges them.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.safe_files.reading import read_json
from megatron.core.safe_files.schema import format_value

ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_FILES = f"{ADAPTER_CONFIG} and adapter_model.*"
# Names of low-rank matrices, and those that PEFT gives to the modules that it wraps.
_ADAPTED = re.compile(r"\.(?:lora_\w+|base_layer|original_module|modules_to_save)(?:\.|$)")


def describe_adapter(directory: Path) -> str | None:
    """Return the way to merge the adapter in a directory, None if it contains none."""
    if not (directory / ADAPTER_CONFIG).is_file():
        return None
    fields = _read_fields(directory)
    base = fields.get("base_model_name_or_path")
    text = (
        f"{directory} contains an adapter of PEFT ({ADAPTER_CONFIG}, base model "
        f"{format_value(base)}), not a model. "
    )
    if fields.get("peft_type") != "LORA":
        return text + (
            "Merge it into its base model with merge_and_unload() of peft, and convert the result"
        )
    local = _find_base(fields)
    if local is not None:
        return f"{text}Merge it into its base model: {_make_command(local, directory)}"
    command = _make_command("BASE", directory)
    return f"{text}Download its base model as BASE, and merge it: {command}"


def _read_fields(directory: Path) -> dict[str, Any]:
    """Return the configuration of an adapter, empty if it is damaged."""
    fields = read_json(directory / ADAPTER_CONFIG)
    return fields if isinstance(fields, dict) else {}


def _find_base(fields: Mapping[str, Any]) -> str | None:
    """Return the base model of an adapter if it is a local directory."""
    base = fields.get("base_model_name_or_path")
    if isinstance(base, str) and base != "" and os.path.isdir(base):
        return base
    return None


def _make_command(base: str | Path, adapter: Path) -> str:
    """Return the command that merges an adapter into a model."""
    return (
        f"python tools/checkpoint/convert.py --saver hf --load-dir {shlex.quote(str(base))} "
        f"--lora {shlex.quote(str(adapter))} --save-dir MERGED"
    )


def refuse_adapter(directory: Path) -> None:
    """Raise CheckpointError for a model with an adapter in the same directory."""
    if not (directory / ADAPTER_CONFIG).is_file():
        return
    base = _find_base(_read_fields(directory))
    if base is not None and Path(base).resolve() != directory.resolve():
        merge = f"To merge the adapter into its base model, run {_make_command(base, directory)}"
    else:
        moved = directory / "adapter"
        merge = (
            f"To merge it into this model, move {_ADAPTER_FILES} to {moved}, and run "
            f"{_make_command(directory, moved)}"
        )
    raise CheckpointError(
        f"{directory} contains a model and an adapter of PEFT. If the adapter is merged already, "
        f"or to use the model without it, remove {ADAPTER_CONFIG}. {merge}"
    )


def refuse_adapted_modules(names: Iterable[str], directory: Path) -> None:
    """Raise CheckpointError if tensors have the names of modules that PEFT has wrapped."""
    for name in names:
        if _ADAPTED.search(name):
            raise CheckpointError(
                f"{directory}: the weights contain modules of PEFT ({name}), which are not read: "
                "merge them with merge_and_unload() and save the model again"
            )

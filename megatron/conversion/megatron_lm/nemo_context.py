"""Directories of NeMo 2, with `context/model.yaml`, in terms of Megatron-LM and Lightning.

    context/model.yaml      model, optimizer and tokenizer, each with the name of its class
    context/...             files of the tokenizer
    weights/                torch_dist; common.pt is a checkpoint of Lightning

(Source: NeMo 2.5, `MegatronStrategy.save_checkpoint`, `TrainerContext.io_dump` and
`nemo.collections.llm`.)
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.conversion.megatron_lm.bridge import convert_model, convert_training
from megatron.conversion.megatron_lm.nemo_config import NEMO_CONFIG, read_archive_common
from megatron.core.dist_checkpointing import CheckpointError
from megatron.core.run_checkpoint.checks import COUNT
from megatron.core.run_checkpoint.common_state import find_param_groups, list_optimizers
from megatron.core.run_checkpoint.keys import NEMO_CONTEXT
from megatron.core.safe_files.reading import read_regular
from megatron.core.safe_files.schema import anything, format_value, mapping

EXPORT = (
    "export it to a model of transformers with NeMo (nemo.collections.llm.export_ckpt, target "
    "'hf'), and give that"
)
_MAX_BYTES = 1 << 20
# Modules of models that their configuration defines completely
_FAMILIES = "nemo.collections.llm.gpt.model."
_MODULES = (
    "base", "llama", "mistral", "mixtral", "nemotron", "phi3mini", "qwen2", "qwen3", "starcoder",
    "starcoder2",
)  # fmt: skip
# Llama 3's scaling of RoPE, which NeMo applies to a model that has these fields
_ROPE_SCALING = {
    "scale_factor": "rope_scaling_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "old_context_len": "rope_original_max_position_embeddings",
}
# Class of a tokenizer -> type here, and field of its file or directory
_TOKENIZERS = {
    "AutoTokenizer": ("HuggingFaceTokenizer", "pretrained_model_name"),
    "SentencePieceTokenizer": ("SentencePieceTokenizer", "model_path"),
}
# Fields of tokens that a tokenizer gets besides those of its files
_ADDED_TOKENS = (
    "additional_special_tokens", "special_tokens", "mask_token", "bos_token", "eos_token",
    "pad_token", "sep_token", "cls_token", "unk_token", "vocab_file", "merges_file",
)  # fmt: skip


def is_nemo(directory: Path) -> bool:
    """Return whether a directory or an archive has a configuration of NeMo 1 or 2."""
    return any((directory / name).is_file() for name in (NEMO_CONFIG, NEMO_CONTEXT))


def read_nemo_common(directory: Path, common: Mapping[str, Any]) -> dict[str, Any]:
    """Return `common` with arguments from the configuration of NeMo 1 or 2."""
    if (directory / NEMO_CONFIG).is_file():
        return read_archive_common(directory, common)
    return read_context_common(directory, common)


def read_context(directory: Path) -> dict[str, Any]:
    """Return the content of `context/model.yaml`; raise CheckpointError unless it is plain YAML."""
    # Imported here, because other checkpoints do not need PyYAML.
    from megatron.conversion.megatron_lm.plain_yaml import PlainYamlError, parse_yaml

    path = directory / NEMO_CONTEXT
    try:
        context = parse_yaml(read_regular(path, _MAX_BYTES).decode())
    except (PlainYamlError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    sections: dict[str, Any] = mapping(anything)(context, str(path))
    return sections


def read_context_common(directory: Path, common: Mapping[str, Any]) -> dict[str, Any]:
    """Return Lightning's `common` as Megatron-LM would have stored it.

    Raises ValueError for another model than a GPT of Megatron-core.
    """
    location = str(directory / NEMO_CONTEXT)
    context = read_context(directory)
    model = mapping(anything)(context.get("config"), f"{location}: config")
    family, _, name = str(model.get("_target_")).removeprefix(_FAMILIES).partition(".")
    if family not in _MODULES or not name:
        raise ValueError(
            f"{location}: models of {format_value(model.get('_target_'))} are not read, only those "
            f"of {_FAMILIES}{{{','.join(_MODULES)}}}: {EXPORT}"
        )

    # The model. Null means the default.
    args = convert_model({k: v for k, v in model.items() if v is not None}, location)
    if "scale_factor" in model:
        args["use_rope_scaling"] = True
        args |= {new: model[old] for old, new in _ROPE_SCALING.items() if old in model}

    # Training
    optim = context.get("optim")
    section = optim.get("config") if isinstance(optim, Mapping) else None
    args |= convert_training({"optimizer": section})
    for state in common.values():
        if isinstance(state, Mapping) and "consumed_samples" in state:  # of a data module
            args["consumed_train_samples"] = COUNT(state["consumed_samples"], "consumed_samples")
    result: dict[str, Any] = {
        "args": argparse.Namespace(**args),
        "iteration": common.get("global_step", 0),
        "content_metadata": common.get("content_metadata"),
    }
    optimizers = common.get("optimizer")
    if isinstance(optimizers, list) and optimizers:
        (optimizer,) = list_optimizers(optimizers[0])[:1]
        groups = [_restore_group(group) for group in find_param_groups(optimizer) or []]
        result["optimizer"] = {**optimizer, "optimizer": {"param_groups": groups}}
    return result


def _restore_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter group with the factors that NeMo has replaced by their products."""
    restored = dict(group)
    for name in ("lr_mult", "wd_mult"):
        if f"pre_{name}" in group:
            restored[name] = restored.pop(f"pre_{name}")
    if "pre_mult_wd" in group:
        restored["weight_decay"] = restored.pop("pre_mult_wd")
    restored.pop("pre_mult_lr", None)
    return restored


def find_context_tokenizer(directory: Path) -> tuple[dict[str, Any], str | None]:
    """Return the arguments of the tokenizer, and a note about one that cannot be used.

    Raises CheckpointError for a file outside of the checkpoint.
    """
    tokenizer = read_context(directory).get("tokenizer")
    if not isinstance(tokenizer, Mapping):
        return {}, None
    name = str(tokenizer.get("_target_")).rpartition(".")[2]
    tokenizer_type, field = _TOKENIZERS.get(name, ("", ""))
    value = tokenizer.get(field)
    is_on_hub = False
    if isinstance(value, Mapping):  # of the class DirOrStringArtifact
        is_on_hub = True
        value = value.get("attr")
    added = [field for field in _ADDED_TOKENS if tokenizer.get(field)]
    if not isinstance(value, str) or added:
        reason = f" with {' and '.join(added)}" if added else ""
        return {}, f"the tokenizer {name}{reason}: give --tokenizer, or the flags of one"
    if not is_on_hub:
        if os.path.isabs(value) or os.pardir in Path(value).parts:
            raise CheckpointError(
                f"{directory / NEMO_CONTEXT}: the tokenizer is {format_value(value)}, which is "
                "outside of the checkpoint: write the name of a file in context/"
            )
        value = str((directory / NEMO_CONTEXT).parent / value)
    return {"tokenizer_type": tokenizer_type, "tokenizer_model": value}, None

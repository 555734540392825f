"""Checkpoints of NeMo around torch_dist weights as a `Source`.

    model_config.yaml       of an archive `.nemo`, packed or unpacked
    model_weights/          torch_dist: keys begin with `model.`
    <hash>_tokenizer.model

    context/model.yaml      of a directory of NeMo 2, see `nemo_context`
    weights/                torch_dist: keys begin with `module.`

An archive is read without unpacking it. (Source: NeMo 2.0.0, `NLPSaveRestoreConnector.save_to`.)
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.conversion.megatron_lm.archive_path import ArchivePath
from megatron.conversion.megatron_lm.nemo_config import NEMO_CONFIG, read_nemo_config
from megatron.conversion.megatron_lm.nemo_context import (
    EXPORT,
    find_context_tokenizer,
    is_nemo,
)
from megatron.conversion.megatron_lm.torch_dist import TorchDistSource
from megatron.conversion.options import ReadOptions, Rename
from megatron.core.dist_checkpointing import CheckpointError, read_metadata
from megatron.core.dist_checkpointing.files import METADATA
from megatron.core.run_checkpoint.keys import NEMO_CONTEXT, NEMO_WEIGHTS
from megatron.core.safe_files.schema import file_name

# Prefixes of Megatron-core's keys: the state of an optimizer, and modules of NeMo's model
_PREFIX = re.compile(r"((?:chained_\d+\.)?optimizer\.state\.\w+\.)?(?:(?:model|module)\.)+")
_CONTEXT_WEIGHTS = "weights"
_ARTIFACT = "nemo:"  # prefix of the name of a file in the archive
_FILE_FIELD = f"{NEMO_CONFIG}: a file of the tokenizer"
_TOKENIZER_FILES = {
    "model": "tokenizer_model",
    "vocab_file": "vocab_file",
    "merge_file": "merge_file",
}
# Library -> type here, and the arguments that it requires
_TOKENIZERS = {
    "sentencepiece": ("SentencePieceTokenizer", ("tokenizer_model",)),
    "megatron": ("GPT2BPETokenizer", ("vocab_file", "merge_file")),
}
# Fields of tokens that NeMo adds to those of the files
_ADDED_TOKENS = ("special_tokens", "additional_special_tokens")
_ARCHIVE_MESSAGE = (
    "model_weights.ckpt",
    "convert it to a model of transformers with NeMo (scripts/checkpoint_converters), and give "
    "that",
)


def open_nemo(path: Path, read_options: ReadOptions | None = None) -> TorchDistSource:
    """Open an archive, the directory of an unpacked one, or a directory of NeMo 2.

    Raises ValueError for weights in another format, or another model than GPT of Megatron-core.
    """
    read_options = read_options or ReadOptions()
    root = ArchivePath(str(path)) if path.is_file() else path
    is_directory = (root / NEMO_CONTEXT).is_file()
    weights = root / (_CONTEXT_WEIGHTS if is_directory else NEMO_WEIGHTS)
    if not is_nemo(root):
        raise CheckpointError(f"{path} has no {NEMO_CONFIG}: it is not an archive of NeMo")
    if not (weights / METADATA).is_file():
        names = ", ".join(sorted(entry.name for entry in root.iterdir()))
        unread, solution = ("fsdp_dtensor", EXPORT) if is_directory else _ARCHIVE_MESSAGE
        raise CheckpointError(
            f"{path}: only weights in {weights.name}/ in the format torch_dist are read, not zarr "
            f"or {unread} (it contains {names}): {solution}"
        )

    # Keys of Megatron-core have the prefix of the module in NeMo's model.
    renames = {rename: None for rename in read_options.renames}
    for key in read_metadata(weights).tensors:
        match = _PREFIX.match(key)
        if match is not None:
            renames[Rename(f"{match[0]}*", f"{match[1] or ''}*")] = None
    source = TorchDistSource(weights, replace(read_options, renames=list(renames)))
    source.description = f"NeMo checkpoint {path}"
    if is_directory:
        arguments, note = find_context_tokenizer(root)
        source.args |= arguments
        source.unused += [] if note is None else [note]
    else:
        _add_tokenizer(source, root)
    return source


def _add_tokenizer(source: TorchDistSource, root: Path) -> None:
    """Add the arguments of the tokenizer in an archive, or a note if it cannot be used."""
    tokenizer = read_nemo_config(root).get("tokenizer")
    if not isinstance(tokenizer, dict):
        return
    arguments: dict[str, Any] = {}
    for field, argument in _TOKENIZER_FILES.items():
        name = tokenizer.get(field)
        if isinstance(name, str) and name.startswith(_ARTIFACT):
            arguments[argument] = str(root / file_name(name.removeprefix(_ARTIFACT), _FILE_FIELD))
    library = str(tokenizer.get("library"))
    tokenizer_type, names = _TOKENIZERS.get(library, ("", ()))
    added = [field for field in _ADDED_TOKENS if tokenizer.get(field)]
    if library == "huggingface" and tokenizer.get("type") and not added:
        # The name of a tokenizer on the hub, or a directory of the machine that trained the model.
        source.args |= {"tokenizer_type": "HuggingFaceTokenizer"}
        source.args |= {"tokenizer_model": str(tokenizer["type"])}
    elif tokenizer_type and arguments.keys() >= set(names) and not added:
        source.args |= {"tokenizer_type": tokenizer_type}
        source.args |= {name: arguments[name] for name in names}
    elif arguments:
        reason = f"with {' and '.join(added)}" if added else f"of the library {library}"
        files = ", ".join(arguments.values())
        source.unused.append(
            f"the tokenizer {files} {reason} (extract it from the archive, and give --tokenizer "
            "for an export, or the tokenizer's flags for a run)"
        )

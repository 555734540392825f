"""The tokenizer in a checkpoint: `iter_0000010/tokenizer/` of newer Megatron-LM and its Bridge."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.object_path import path_of
from megatron.core.run_checkpoint.keys import GGUF_FILES, NEMO_ARCHIVES, PROCESSOR_FILES
from megatron.core.wings import resolve

DIRECTORY = "tokenizer"

# Argument -> name of its file, by type of the tokenizer. An empty name is the directory itself.
_SENTENCEPIECE = {"tokenizer_model": "tokenizer.model"}
FILES: dict[str, dict[str, str]] = {
    "HuggingFaceTokenizer": {"tokenizer_model": ""},
    "SentencePieceTokenizer": _SENTENCEPIECE,
    "GPTSentencePieceTokenizer": _SENTENCEPIECE,
    "Llama2Tokenizer": _SENTENCEPIECE,
    "GPT2BPETokenizer": {"vocab_file": "vocab.json", "merge_file": "merges.txt"},
    "TikTokenizer": {"tokenizer_model": "tokenizer.json"},
}


# Files of a Hugging Face tokenizer, or of a processor with one. Those of generation may name more
# tokens that end a text than config.json.
_HUGGING_FACE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
    *PROCESSOR_FILES,
)


_READ_GGUF = "megatron.conversion.gguf.tokenizer_reading:read_tokenizer_files"
_ARCHIVE_PATH = "megatron.conversion.megatron_lm.archive_path:ArchivePath"


def make_tokenizer_path(name: str) -> Path:
    """Return the path of a tokenizer, which may be a file in an archive of NeMo."""
    path = path_of(name)
    if is_in_archive(path):
        path = resolve(_ARCHIVE_PATH)(name)
    return path


def is_in_archive(path: Path) -> bool:
    """Return whether a path is that of a file in an archive of NeMo."""
    return path.parent.match(NEMO_ARCHIVES) and os.path.isfile(path.parent)


def read_tokenizer_files(args: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the content of the tokenizer's files by their path in a checkpoint, as Megatron-LM
    stores them; empty for a tokenizer without files here.
    """
    contents: dict[str, bytes] = {}
    for name, path in list_paths(args).items():
        if path.is_file() and path.match(GGUF_FILES):
            contents |= read_gguf_tokenizer(path)
        elif path.is_file():
            contents[f"{DIRECTORY}/{name}"] = path.read_bytes()
    return contents


def read_gguf_tokenizer(path: Path) -> dict[str, bytes]:
    """Return the content of `read_tokenizer_files` for the tokenizer in a GGUF file."""
    files = resolve(_READ_GGUF)(path)
    return {f"{DIRECTORY}/{name}": content for name, content in files.items()}


def list_paths(args: Mapping[str, Any]) -> dict[str, Path]:
    """Return the paths that the arguments may mean, by the names of the files in a checkpoint."""
    paths: dict[str, Path] = {}
    for argument, name in FILES.get(str(args.get("tokenizer_type")), {}).items():
        value = args.get(argument)
        if not value or type(value) is not str or "\0" in value:
            continue
        tokenizer_path = make_tokenizer_path(value)
        if name or tokenizer_path.match(GGUF_FILES):
            paths[name] = tokenizer_path
        else:
            # Only the files that exist are copied.
            paths |= {file_name: tokenizer_path / file_name for file_name in _HUGGING_FACE}
    return paths

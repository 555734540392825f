"""The tokenizer in a checkpoint: `iter_0000010/tokenizer/` of newer Megatron-LM and its Bridge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.durable_files import committed
from megatron.core.object_path import path_of
from megatron.core.run_checkpoint.keys import PROCESSOR_FILES
from megatron.core.safe_files.reading import MAX_JSON, read_regular

DIRECTORY = "tokenizer"

# Argument -> name of its file, by type of the tokenizer. An empty name is the directory itself.
_SENTENCEPIECE = {"tokenizer_model": "tokenizer.model"}
_FILES: dict[str, dict[str, str]] = {
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


def read_tokenizer_files(args: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the content of the tokenizer's files by their path in a checkpoint, as Megatron-LM
    stores them; empty for a tokenizer without files here.
    """
    contents = {}
    for name, path in _list_paths(args).items():
        if path.is_file():
            contents[f"{DIRECTORY}/{name}"] = path.read_bytes()
    return contents


def copy_tokenizer_files(args: Mapping[str, Any], trusted: Sequence[Path]) -> dict[str, bytes]:
    """Return the content of `read_tokenizer_files` for arguments of a checkpoint, which may name
    any file: only files in `trusted` directories, links resolved, are read.
    """
    roots = [root.resolve() for root in trusted]
    contents = {}
    for name, path in _list_paths(args).items():
        target = path.resolve()
        if any(target.is_relative_to(root) for root in roots) and target.is_file():
            contents[f"{DIRECTORY}/{name}"] = read_regular(target, MAX_JSON)
    return contents


def write_tokenizer_files(contents: Mapping[str, bytes], directory: Path) -> None:
    """Write the files of a tokenizer to a checkpoint's directory."""
    for name, content in contents.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        with committed(path) as temporary:
            temporary.write_bytes(content)


def _list_paths(args: Mapping[str, Any]) -> dict[str, Path]:
    """Return the paths that the arguments may mean, by the names of the files in a checkpoint."""
    paths: dict[str, Path] = {}
    for argument, name in _FILES.get(str(args.get("tokenizer_type")), {}).items():
        value = args.get(argument)
        if not value or type(value) is not str or "\0" in value:
            continue
        tokenizer_path = path_of(value)
        if name:
            paths[name] = tokenizer_path
        else:
            # Only the files that exist are copied.
            paths |= {file_name: tokenizer_path / file_name for file_name in _HUGGING_FACE}
    return paths


def find_stored_tokenizer(args: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Return the arguments that name the tokenizer in the iteration `directory`; empty without one.

    The path in the arguments of the checkpoint was valid on the machine that trained the model.
    """
    folder = directory / DIRECTORY
    if not folder.is_dir() or not any(folder.iterdir()):
        return {}
    tokenizer_args: dict[str, Any] = {}
    for argument, name in _FILES.get(str(args.get("tokenizer_type")), {}).items():
        path = folder / name
        if not path.exists():
            return {}
        tokenizer_args[argument] = str(path)
    return tokenizer_args

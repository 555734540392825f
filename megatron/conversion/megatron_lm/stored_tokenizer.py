"""The tokenizer in a checkpoint: `iter_0000010/tokenizer/` of newer Megatron-LM and its Bridge."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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


# Files of a Hugging Face tokenizer.
_HUGGING_FACE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def read_tokenizer_files(args: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the content of the tokenizer's files by their path in a checkpoint, as Megatron-LM
    stores them; empty for a tokenizer without files here.
    """
    paths: dict[str, Path] = {}
    for argument, name in _FILES.get(str(args.get("tokenizer_type")), {}).items():
        if not args.get(argument):
            continue
        given = Path(args[argument])
        if name:
            paths[name] = given
        else:
            paths |= {each: given / each for each in _HUGGING_FACE}
    contents = {}
    for name, path in paths.items():
        if path.is_file():
            contents[f"{DIRECTORY}/{name}"] = path.read_bytes()
    return contents


def find_stored_tokenizer(args: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Return the arguments that name the tokenizer in the iteration `directory`; empty without one.

    The path in the arguments of the checkpoint was valid on the machine that trained the model.
    """
    folder = directory / DIRECTORY
    if not folder.is_dir() or not any(folder.iterdir()):
        return {}
    found: dict[str, Any] = {}
    for argument, name in _FILES.get(str(args.get("tokenizer_type")), {}).items():
        path = folder / name
        if not path.exists():
            return {}
        found[argument] = str(path)
    return found

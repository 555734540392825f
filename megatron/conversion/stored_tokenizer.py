"""The tokenizer in a checkpoint: find it, copy it and write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.durable_files import committed
from megatron.core.run_checkpoint.keys import GGUF_FILES
from megatron.core.run_checkpoint.tokenizer_files import (
    DIRECTORY,
    FILES,
    list_paths,
    read_gguf_tokenizer,
)
from megatron.core.safe_files.reading import MAX_JSON, read_regular


def copy_tokenizer_files(args: Mapping[str, Any], trusted: Sequence[Path]) -> dict[str, bytes]:
    """Return the content of `read_tokenizer_files` for arguments of a checkpoint, which may name
    any file: only files in `trusted` directories, links resolved, are read.
    """
    roots = [root.resolve() for root in trusted]
    contents: dict[str, bytes] = {}
    for name, path in list_paths(args).items():
        target = path.resolve()
        if not any(target.is_relative_to(root) for root in roots) or not target.is_file():
            continue
        if target.match(GGUF_FILES):
            contents |= read_gguf_tokenizer(target)
        else:
            contents[f"{DIRECTORY}/{name}"] = read_regular(target, MAX_JSON)
    return contents


def write_tokenizer_files(contents: Mapping[str, bytes], directory: Path) -> None:
    """Write the files of a tokenizer to a checkpoint's directory."""
    for name, content in contents.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        with committed(path) as temporary:
            temporary.write_bytes(content)


def find_stored_tokenizer(args: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Return the arguments that name the tokenizer in the iteration `directory`; empty without one.

    The path in the arguments of the checkpoint was valid on the machine that trained the model.
    """
    folder = directory / DIRECTORY
    if not folder.is_dir() or not any(folder.iterdir()):
        return {}
    tokenizer_args: dict[str, Any] = {}
    for argument, name in FILES.get(str(args.get("tokenizer_type")), {}).items():
        path = folder / name
        if not path.exists():
            return {}
        tokenizer_args[argument] = str(path)
    return tokenizer_args

"""Token files of the text that --data-path names, tokenized once by worker processes.

The documents, their tokens and therefore the samples are those of token files that
tools/preprocess_data.py writes for the same files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron.core.datasets import GPTDatasetConfig, token_dtype
from megatron.core.datasets.gpt_dataset import find_cache_directory
from megatron.core.datasets.index_cache import compute_digest
from megatron.core.datasets.indexed_dataset import is_dataset
from megatron.core.progress import ProgressBar
from megatron.core.run_checkpoint.keys import GGUF_FILES
from megatron.core.run_checkpoint.tokenizer_files import (
    is_in_archive,
    make_tokenizer_path,
    read_gguf_tokenizer,
)
from megatron.training.data.data_files import find_data_files
from megatron.training.data.document_encoder import (
    DOCUMENT_CPU_SECONDS,
    DocumentEncoder,
    WorkerLimits,
    encode_chunks,
)
from megatron.training.data.documents import (
    MAX_DOCUMENT_MB,
    BadLine,
    Chunk,
    check_bad_lines,
    count_bytes,
    has_fields,
    read_chunks,
)
from megatron.training.data.token_cache import SMALL_BYTES, cached_tokens, compute_file_digest
from megatron.training.data.tokenizer import Tokenizer
from megatron.training.data.tokenizer_libraries import load_huggingface

logger = logging.getLogger(__name__)

CACHE_VERSION = 1  # of the tokens that the same input results in
TOKENIZER_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py")


def tokenize_data_paths(config: GPTDatasetConfig, tokenizer: Tokenizer) -> dict[str, str]:
    """Return the prefix of the token files of each path that names text, tokenized if necessary.

    Prefixes of datasets are left out, also misspelled ones.
    """
    texts = [path for path in config.data_paths() if is_text(path)]
    if not texts:
        return {}
    tokenizer_digest = compute_tokenizer_digest(tokenizer)
    prefixes = {}
    for path in texts:
        prefixes[path] = str(_find_or_tokenize(path, config, tokenizer, tokenizer_digest))
    return prefixes


def is_text(path: str) -> bool:
    """Return whether a data path names text instead of token files."""
    if is_dataset(path):
        return False
    if has_fields(path) or os.path.isdir(path):
        return True
    return any(map(has_fields, glob.iglob(path, recursive=True)))


def compute_tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Return the digest of everything in the tokenizer that determines tokens."""
    config = tokenizer.config
    description = dataclasses.asdict(config)
    for name in ("tokenizer_model", "vocab_file", "merge_file"):
        value = description[name]
        path = None if value is None else make_tokenizer_path(value)
        if path is not None and path.exists():
            description[name] = _compute_path_digest(path)
    # A name on the hub is a tokenizer that may change there.
    model = config.tokenizer_model
    if model is not None and not make_tokenizer_path(model).exists():
        with tempfile.TemporaryDirectory() as directory:
            load_huggingface(config).save_pretrained(directory)
            description["tokenizer_model"] = _compute_path_digest(Path(directory))
    del description["make_vocab_size_divisible_by"]
    return compute_digest({**description, "size": tokenizer.vocab_size, "eod": tokenizer.eod})


def _compute_path_digest(path: Path) -> str:
    """Return the digest of a file, or of the files of a tokenizer in a directory.

    A tokenizer.json may have a tokenizer_config.json next to it, which is read, too.
    """
    if path.match(GGUF_FILES):
        contents = read_gguf_tokenizer(path)
        return compute_digest({name: contents[name].hex() for name in sorted(contents)})
    if is_in_archive(path):
        return compute_digest({path.name: path.read_bytes().hex()})
    files = [path]
    if path.is_dir():
        files = sorted({file for pattern in TOKENIZER_FILES for file in path.glob(pattern)})
    elif (path.parent / "tokenizer_config.json").is_file():
        files.append(path.parent / "tokenizer_config.json")
    return compute_digest({file.name: compute_file_digest(str(file)) for file in files})


def _find_or_tokenize(
    path: str, config: GPTDatasetConfig, tokenizer: Tokenizer, tokenizer_digest: str
) -> Path:
    """Return the prefix of the token files of a path."""
    files = find_data_files(path)
    directory = find_cache_directory(config, files[0])
    # Equal digests mean equal tokens.
    digest = compute_digest(
        {
            "class": "text",
            "version": CACHE_VERSION,
            "files": [compute_file_digest(file, directory) for file in files],
            "tokenizer": tokenizer_digest,
            "key": config.json_keys,
            "append_eod": config.append_eod,
            "skip_bad_lines": config.skip_bad_lines,
        }
    )
    prefix = directory / f"{digest}-text"
    if not Path(f"{prefix}.idx").exists():
        _tokenize(path, files, prefix, config, tokenizer)
    logger.info("%s: tokens in %s.bin", path, prefix)
    return prefix


def _tokenize(
    path: str, files: list[str], prefix: Path, config: GPTDatasetConfig, tokenizer: Tokenizer
) -> None:
    """Write the token files of some files. Raises ValueError if there are no tokens."""
    num_bytes = sum(os.path.getsize(file) for file in files)
    num_workers = 0
    if num_bytes > SMALL_BYTES:
        num_workers = config.tokenization_workers or len(os.sched_getaffinity(0))
    limits = WorkerLimits(num_workers, DOCUMENT_CPU_SECONDS)
    encoder = DocumentEncoder(tokenizer, [config.json_keys], config.append_eod, limits)
    bad_lines: list[BadLine] = []
    with (
        cached_tokens(prefix, token_dtype(tokenizer.vocab_size), path) as builder,
        ProgressBar(f"tokenizing {path}", count_bytes(files)) as progress,
        _single_threaded_tokenizers(),
        contextlib.closing(encode_chunks(_read_all(files, config), encoder, num_workers)) as chunks,
    ):
        for chunk, encoded in chunks:
            bad_lines += encoded.bad_lines
            check_bad_lines(bad_lines, config.skip_bad_lines)
            builder.add(*encoded.tokens[config.json_keys])
            progress.add(chunk.num_bytes)
        if builder.num_documents == 0:
            raise ValueError(
                f"--data-path {path}: no document of {len(files)} files has a token of the field "
                f"{config.json_keys!r} (--json-keys): the files or texts are empty"
            )
    for bad in bad_lines:
        logger.warning("skipped %s", bad)


def _read_all(files: list[str], config: GPTDatasetConfig) -> Iterator[Chunk]:
    for file in files:
        yield from read_chunks(file, True, "line", int(MAX_DOCUMENT_MB * 1e6), [config.json_keys])


@contextlib.contextmanager
def _single_threaded_tokenizers() -> Iterator[None]:
    """Disable the threads of tokenizers: they would compete with the worker processes."""
    name = "TOKENIZERS_PARALLELISM"
    previous = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        del os.environ[name]
        if previous is not None:
            os.environ[name] = previous

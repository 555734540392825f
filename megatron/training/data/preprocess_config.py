"""Flags of tools/preprocess_data.py: input, its documents, and output.

This module does not import torch, because tools parse these flags before they import it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.flags import FlagSection, flag
from megatron.training.data.documents import MAX_DOCUMENT_MB, has_fields


@dataclass
class PreprocessConfig(FlagSection):
    """Input, its documents, and output."""

    input: list[str] | None = flag(None)
    """Files or patterns ('corpus/**/*.txt', in quotes), read in this order; the files that match a
    pattern are sorted.
    """
    output_prefix: str | None = flag(None)
    """Prefix of the output files <prefix>_<key>_document.bin and .idx."""
    input_format: str = flag("auto", choices=("auto", "jsonl", "text"))
    """auto: .jsonl, .ndjson and .json (also .gz, .zst) contain one JSON object per line, .parquet
    and .arrow a table, other files plain text.
    """
    json_keys: list[str] | None = flag(None)
    """Fields of the JSON objects, or columns of tables, each written to its own files. A field is
    a string, or a list of strings that is one document of several sequences. Default: text.
    """
    text_documents: str = flag("file", choices=("file", "block", "line"))
    """Documents of plain text: each file, each block of lines between blank lines, or each line."""
    append_eod: bool = flag(False)
    """Append the end-of-document token to every document."""
    workers: int | None = flag(None, positive=True)
    """Number of processes that tokenize. Default: one per core."""
    skip_bad_lines: int = flag(0, at_least=0)
    """Skip up to N lines that cannot be tokenized, and report them, instead of stopping at the
    first one.
    """
    max_document_mb: float = flag(MAX_DOCUMENT_MB, positive=True)
    """Size of a document, in MB, above which it is a bad line."""
    document_cpu_seconds: float = flag(60.0, positive=True)
    """Processor time for a small document, in seconds, after which it is a bad line; large
    documents get more.
    """
    log_interval: int = flag(1000, positive=True)
    """Number of documents between progress lines, if the output is not a terminal."""

    def find_problems(self) -> Iterator[str]:
        if not self.input or self.output_prefix is None:
            yield "--input and --output-prefix are required (--help lists all flags)"

    @property
    def num_workers(self) -> int:
        return self.workers or os.cpu_count() or 1

    @property
    def keys(self) -> list[str]:
        return self.json_keys or ["text"]

    def is_json(self, path: str) -> bool:
        """Return whether a file contains JSON lines or a table."""
        if self.input_format == "auto":
            return has_fields(path)
        return self.input_format == "jsonl"

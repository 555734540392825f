"""Examples of fine-tuning data: the files of a path, their records, and the checks of a record."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.safe_files.schema import format_value
from megatron.core.terminal import escape_control_chars
from megatron.training.data.documents import Chunk, is_json_file, read_chunks

JSON_LINES = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
TABLES = (".parquet", ".arrow")
COLUMNS = ("messages", "prompt", "completion", "tools")
ROWS_PER_CHUNK = 512
MAX_EXAMPLE_BYTES = 256 << 20
ROLES = ("system", "developer", "user", "assistant", "tool")

Message = dict[str, Any]  # role, content, and optional fields that the chat template reads


@dataclass(frozen=True)
class Conversation:
    """Messages to render with the chat template.

    `num_context` is the number of messages before a completion; None means that the roles define
    which messages are trained on.
    """

    messages: list[Message]
    tools: list[Any] | None = None
    num_context: int | None = None


@dataclass(frozen=True)
class TextPair:
    """Plain text without a chat template."""

    prompt: str
    completion: str


# ---- Files ----


def find_data_files(path: str) -> list[str]:
    """Return the data files of a file, a pattern ('data/train-*.parquet') or a folder, sorted.

    A folder contains a data set of the Hugging Face hub, or of `save_to_disk`. If some of its files
    or folders have "train" in their names, the others belong to other splits.
    """
    name = escape_control_chars(path)
    if not Path(path).is_dir():
        paths = [path] if Path(path).exists() else sorted(glob.glob(path, recursive=True))
        if not paths:
            raise ValueError(f"--data-path {name}: no such file or folder, and no file matches it")
        for file in paths:
            if not is_json_file(file) and not file.endswith(TABLES):
                raise ValueError(
                    f"{escape_control_chars(file)}: --sft reads .jsonl, .ndjson, .json (also .gz), "
                    ".parquet and .arrow; convert it to JSON lines with messages or prompt and "
                    "completion"
                )
        return paths

    paths = []
    for file_path in sorted(Path(path).rglob("*")):
        # JSON files of a data set's folder contain its metadata.
        if file_path.name.endswith(JSON_LINES + TABLES):
            paths.append(str(file_path))
    train = [file for file in paths if "train" in str(Path(file).relative_to(path))]
    if not paths:
        raise ValueError(
            f"--data-path {name}: the folder has no .jsonl, .ndjson, .parquet or .arrow file; give "
            "the path of a file"
        )
    return train or paths


def read_example_chunks(files: list[str]) -> Iterator[Chunk]:
    """Yield the records of files as chunks of undecoded JSON, with the number of each line or row.

    Raises ValueError if a file cannot be read.
    """
    for path in files:
        chunks = _read_table(path)
        if is_json_file(path):
            chunks = read_chunks(path, True, "line", MAX_EXAMPLE_BYTES)
        for chunk in chunks:
            for bad in chunk.bad_lines:
                raise ValueError(str(bad))
            yield chunk


def _read_table(path: str) -> Iterator[Chunk]:
    name = escape_control_chars(path)
    try:
        import pyarrow
        from pyarrow import ipc, parquet
    except ImportError:
        raise ValueError(
            f"{name}: this file needs the package pyarrow: pip install pyarrow, or convert it to "
            "JSON lines"
        ) from None
    try:
        if path.endswith(".parquet"):
            batches = parquet.ParquetFile(path).iter_batches(ROWS_PER_CHUNK)
        else:
            batches = ipc.open_stream(path)
        num_rows = 0
        for batch in batches:
            # Other columns may have types that JSON lacks.
            names = [column for column in batch.schema.names if column in COLUMNS]
            documents = []
            for record in batch.select(names).to_pylist():
                num_rows += 1
                documents.append((num_rows, json.dumps(record).encode()))
            yield Chunk(path, True, documents, [], sum(len(content) for _, content in documents))
    except (OSError, TypeError, pyarrow.ArrowException) as error:
        raise ValueError(f"{name}: cannot be read: {error}") from error


# ---- Records ----


def parse_example(content: bytes) -> Conversation | TextPair:
    """Return the example of a JSON object. Raises ValueError with the reason and the fix."""
    try:
        record = json.loads(content)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"not JSON: {error}; write one JSON object per line") from None
    except RecursionError:
        raise ValueError("not JSON: nested too deep") from None
    if not isinstance(record, dict):
        raise ValueError(
            f"expected a JSON object, got {type(record).__name__}; write one object per line"
        )
    tools = record.get("tools")
    if isinstance(tools, str):  # as TRL stores them
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise ValueError(f"tools is not JSON: {error}; write a list of functions") from None

    if record.get("messages") is not None:
        return Conversation(_check_messages(record["messages"], "messages"), tools)
    prompt = record.get("prompt")
    completion = record.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return TextPair(prompt, completion)
    if isinstance(prompt, list) and isinstance(completion, list):
        context = _check_messages(prompt, "prompt")
        messages = context + _check_messages(completion, "completion")
        return Conversation(messages, tools, len(context))
    fields = ", ".join(format_value(name) for name in list(record)[:8])
    raise ValueError(
        f"the fields are {fields or 'empty'}: expected messages, or prompt and completion (both "
        "strings or both lists of messages); rename the fields"
    )


def _check_messages(messages: Any, field: str) -> list[Message]:
    """Return messages without their null fields. Raises ValueError for malformed ones."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            f"{field} is {format_value(messages)}: expected a list of at least one "
            '{"role": ..., "content": ...}; remove the example'
        )
    checked = []
    for index, message in enumerate(messages):
        location = f"{field}[{index}]"
        if not isinstance(message, dict):
            raise ValueError(
                f'{location} is {format_value(message)}: expected {{"role": ..., "content": ...}}'
            )
        # Tables have the columns of all messages in every message.
        message = {name: value for name, value in message.items() if value is not None}
        role = message.get("role")
        if role not in ROLES:
            raise ValueError(
                f"{location} has the role {format_value(role)}: expected {', '.join(ROLES)}; "
                "rename the role, or the fields of another format to role and content"
            )
        content = message.get("content")
        is_call = role == "assistant" and message.get("tool_calls")
        if not isinstance(content, str) and not (content is None and is_call):
            raise ValueError(
                f"{location} ({role}) has the content {format_value(content)}: expected a string; "
                "only an assistant message with tool_calls may have none"
            )
        checked.append(message)
    return checked

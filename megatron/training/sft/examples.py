"""Examples of fine-tuning data: the records of files, and the checks of a record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.safe_files.schema import format_value
from megatron.training.data.documents import Chunk, read_chunks

COLUMNS = ("messages", "prompt", "completion", "tools")
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


def read_example_chunks(files: list[str]) -> Iterator[Chunk]:
    """Yield the records of files as chunks of undecoded JSON, with the number of each line or row.

    Raises ValueError if a file cannot be read.
    """
    for path in files:
        for chunk in read_chunks(path, True, "line", MAX_EXAMPLE_BYTES, COLUMNS):
            for bad in chunk.bad_lines:
                raise ValueError(str(bad))
            yield chunk


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

"""Examples of fine-tuning data: the records of files, and the checks of a record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.safe_files.schema import format_value
from megatron.training.data.documents import Chunk, read_chunks

COLUMNS = ("messages", "prompt", "completion", "chosen", "rejected", "tools")
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


Example = Conversation | TextPair


def read_example_chunks(files: list[str]) -> Iterator[Chunk]:
    """Yield the records of files as chunks of undecoded JSON, with the number of each line or row.

    Raises ValueError if a file cannot be read.
    """
    for path in files:
        for chunk in read_chunks(path, True, "line", MAX_EXAMPLE_BYTES, COLUMNS):
            for bad in chunk.bad_lines:
                raise ValueError(str(bad))
            yield chunk


def parse_example(content: bytes) -> Example:
    """Return the example of a JSON object. Raises ValueError with the reason and the fix."""
    record, tools = _parse_record(content)
    if record.get("messages") is not None:
        return Conversation(_check_messages(record["messages"], "messages"), tools)
    prompt = record.get("prompt")
    completion = record.get("completion")
    example = _join_completion(prompt, completion, "completion", tools)
    if example is None:
        raise ValueError(
            f"the fields are {_list_fields(record)}: expected messages, or prompt and completion "
            "(both strings or both lists of messages); rename the fields, or use --dpo for pairs "
            "of chosen and rejected"
        )
    return example


def parse_preference(content: bytes) -> tuple[Example, Example]:
    """Return the chosen and the rejected example of a JSON object. Raises ValueError as above.

    Without a list of messages as the prompt, it is what both conversations begin with.
    """
    record, tools = _parse_record(content)
    prompt = record.get("prompt")
    completions = {"chosen": record.get("chosen"), "rejected": record.get("rejected")}
    are_messages = all(isinstance(completion, list) for completion in completions.values())
    if are_messages and not isinstance(prompt, list):
        return _split_prompt(record["chosen"], record["rejected"], tools)
    examples = []
    for field, completion in completions.items():
        example = _join_completion(prompt, completion, field, tools)
        if example is None:
            raise ValueError(
                f"the fields are {_list_fields(record)}: --dpo expects prompt, chosen and rejected "
                "(strings or lists of messages), or chosen and rejected conversations; rename the "
                "fields"
            )
        examples.append(example)
    chosen, rejected = examples
    return chosen, rejected


def _parse_record(content: bytes) -> tuple[dict[str, Any], list[Any] | None]:
    """Return a JSON object and its tools."""
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
    return record, tools


def _list_fields(record: dict[str, Any]) -> str:
    return ", ".join(format_value(name) for name in list(record)[:8]) or "empty"


def _join_completion(
    prompt: Any, completion: Any, field: str, tools: list[Any] | None
) -> Example | None:
    """Return a prompt with a completion, None unless both are text or both are messages."""
    if isinstance(prompt, str) and isinstance(completion, str):
        return TextPair(prompt, completion)
    if isinstance(prompt, list) and isinstance(completion, list):
        context = _check_messages(prompt, "prompt")
        messages = context + _check_messages(completion, field)
        return Conversation(messages, tools, len(context))
    return None


def _split_prompt(
    chosen: list[Any], rejected: list[Any], tools: list[Any] | None
) -> tuple[Conversation, Conversation]:
    """Return two conversations, whose first messages in common are the prompt."""
    chosen = _check_messages(chosen, "chosen")
    rejected = _check_messages(rejected, "rejected")
    num_context = 0
    max_context = min(len(chosen), len(rejected)) - 1  # both end with a completion
    while num_context < max_context and chosen[num_context] == rejected[num_context]:
        num_context += 1
    if num_context == 0:
        raise ValueError(
            "chosen and rejected begin with different messages, or have one message: begin both "
            "with the messages of the prompt, or give these as prompt"
        )
    return Conversation(chosen, tools, num_context), Conversation(rejected, tools, num_context)


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

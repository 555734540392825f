"""Messages on standard output: text, or one JSON object per line (--log-format).

Every module logs with `logging.getLogger(__name__)`. Infos and warnings are printed once, by rank
0; errors, and messages marked with `EVERY_RANK`, by the rank that logs them.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from megatron.core.terminal import drop_unwritable_output, print_text
from megatron.training.reporting.run_record import to_json_value

logger = logging.getLogger(__name__)

EVERY_RANK = {"every_rank": True}  # logger.info(..., extra=EVERY_RANK)


def configure_logging(rank: int, log_format: str = "text") -> None:
    """Print the messages of this package. A second call replaces the first."""
    package = logging.getLogger("megatron")
    # Several runs of one process, as in tests, must not print every message twice.
    for handler in list(package.handlers):
        if isinstance(handler, _Printer):
            package.removeHandler(handler)
    format_record = _format_json if log_format == "json" else _format_text
    package.addHandler(_Printer(rank, format_record))
    package.setLevel(logging.INFO)


def report_line(message: str, **fields: Any) -> None:
    """Print a measurement: `message` in text, `fields` in JSON."""
    logger.info("%s", message, extra={"fields": fields})


def format_summary(topics: dict[str, str]) -> str:
    """Return a summary as printed: one line per topic."""
    rows = [f"   {topic:11} {text}" for topic, text in topics.items()]
    return "\n".join(rows)


def format_arguments(flags: dict[str, Any]) -> str:
    """Return all arguments in the form of Megatron-LM (--print-args)."""
    rows = []
    for name, value in flags.items():
        num_dots = 48 - len(name)
        dots = "." * num_dots
        rows.append(f"  {name} {dots} {value}")
    # Megatron-LM sorts without regard to case.
    rows.sort(key=str.lower)
    first = f"{' arguments ':-^59}"
    last = f"{' end of arguments ':-^59}"
    return "\n".join([first, *rows, last])


class _Printer(logging.Handler):
    """Handler that prints to the standard output of the moment, which tests replace.

    A run does not end because its log cannot be written, e.g. to a full disk.
    """

    def __init__(self, rank: int, format_record: Callable[[logging.LogRecord], str]) -> None:
        super().__init__()
        self._rank = rank
        self._format_record = format_record
        self._has_failed = False

    def emit(self, record: logging.LogRecord) -> None:
        # An error may concern one rank only, which then is the only one that can report it.
        is_for_all = record.levelno >= logging.ERROR or vars(record).get("every_rank")
        if self._rank == 0 or is_for_all:
            try:
                print_text(self._format_record(record))
            except OSError as error:
                self._report_failure(error)

    def _report_failure(self, error: OSError) -> None:
        """Warn once that the output cannot be written."""
        if self._has_failed:
            return
        self._has_failed = True
        atexit.register(drop_unwritable_output)
        with contextlib.suppress(OSError):
            print_text(
                f"WARNING: messages are lost: the output cannot be written ({error})",
                file=sys.stderr,
            )


def _format_text(record: logging.LogRecord) -> str:
    """Return a line for people."""
    # Measurements are complete lines of their own.
    if "fields" in vars(record):
        return record.getMessage()
    message = record.getMessage()
    if record.levelno >= logging.WARNING:
        message = f"{record.levelname}: {message}"
    return f" > {message}"


def _format_json(record: logging.LogRecord) -> str:
    """Return a line of JSON: the time and the measurements, or the level and the message."""
    fields = vars(record).get("fields")
    if not fields:
        fields = {"level": record.levelname.lower(), "message": record.getMessage()}
    created = datetime.fromtimestamp(record.created, timezone.utc)
    time = created.isoformat(timespec="milliseconds")
    return json.dumps(to_json_value({"time": time, **fields}))

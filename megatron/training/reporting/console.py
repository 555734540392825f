"""What a run says on its output: rank 0 alone, as text or as one JSON object per line (--log-format).

Every module logs with `logging.getLogger(__name__)`: infos and warnings are printed once, by rank 0. `EVERY_RANK` marks
a message that only its own rank knows, and errors are always printed.
"""

from __future__ import annotations

import json
import logging
from datetime import datetime, timezone
from typing import Any

from megatron.training.reporting.run_record import finite

logger = logging.getLogger(__name__)

EVERY_RANK = {"every_rank": True}  # logger.info(..., extra=EVERY_RANK)


def configure_logging(rank: int, log_format: str = "text") -> None:
    """Print the messages of this package; a second call replaces the first."""
    package = logging.getLogger("megatron")
    for handler in [handler for handler in package.handlers if isinstance(handler, _Printer)]:
        package.removeHandler(handler)
    package.addHandler(_Printer(rank, _as_json if log_format == "json" else _as_text))
    package.setLevel(logging.INFO)


def report(line: str, **fields: Any) -> None:
    """A measurement: `line` as it is in text, `fields` in JSON."""
    logger.info("%s", line, extra={"fields": fields})


class _Printer(logging.Handler):
    """Writes to whatever standard output is at that moment."""

    def __init__(self, rank: int, form: Any) -> None:
        super().__init__()
        self._rank, self._form = rank, form

    def emit(self, record: logging.LogRecord) -> None:
        if self._rank == 0 or record.levelno >= logging.ERROR or vars(record).get("every_rank"):
            print(self._form(record), flush=True)


def _as_text(record: logging.LogRecord) -> str:
    if "fields" in vars(record):
        return record.getMessage()
    level = f"{record.levelname}: " if record.levelno >= logging.WARNING else ""
    return f" > {level}{record.getMessage()}"


def _as_json(record: logging.LogRecord) -> str:
    fields = vars(record).get("fields") or {"level": record.levelname.lower(), "message": record.getMessage()}
    time = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
    return json.dumps(finite({"time": time, **fields}))

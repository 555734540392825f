"""Output of all programs. Text from files cannot control the terminal, or forge another line.

Everything is printed via these functions; `tests/unit_tests/tools/test_terminal_output.py` checks
that. If the reader of a pipe has gone (`| head`), the rest of the output is dropped.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, TextIO

INTERRUPTED = 130  # exit code of a program that Ctrl-C has ended, as of every shell


def format_size(nbytes: float) -> str:
    """Return a size in powers of 1000, such as `9.87 MB`."""
    limit, unit = select_unit(nbytes)
    if unit == "B":
        return f"{nbytes:.0f} B"
    return f"{nbytes / limit:.2f} {unit}"


def select_unit(nbytes: float) -> tuple[float, str]:
    """Return the bytes and the name of the largest unit that is not larger than a size."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= limit:
            return limit, unit
    return 1.0, "B"


def escape_control_chars(text: str) -> str:
    """Escape everything that could move the cursor, reorder text or start another line."""
    # The usual case, without a new string. Control characters and bidirectional overrides are not
    # printable.
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def _escape(char: str) -> str:
    return char.encode("unicode_escape", "surrogatepass").decode()


def escape_lines(text: str) -> str:
    """Escape control characters, but keep line breaks."""
    return "\n".join(escape_control_chars(text_line) for text_line in text.split("\n"))


def format_error(error: BaseException | str) -> str:
    """Return an error or its message with its lines kept and control characters escaped."""
    return escape_lines(str(error))


def print_line(text: str = "", *, file: TextIO | None = None) -> None:
    """Print one line. Line breaks in `text` are escaped like other control characters."""
    _write(escape_control_chars(text), file)


def print_text(text: str, *, file: TextIO | None = None) -> None:
    """Print text of several lines, at once."""
    _write(escape_lines(text), file)


def print_json(value: Any, indent: int | None = None) -> None:
    """Print JSON, in which everything but ASCII is escaped."""
    _write(json.dumps(value, indent=indent, default=str), None)


def drop_unwritable_output() -> None:
    """Discard buffered standard output that cannot be written.

    Python would write it again when the program ends, and change the exit code.
    """
    try:
        sys.stdout.flush()
    except OSError:
        _discard(sys.stdout)


def _write(text: str, file: TextIO | None) -> None:
    file = sys.stdout if file is None else file
    try:
        print(text, file=file, flush=True)
    except BrokenPipeError:
        _discard(file)


def _discard(file: TextIO) -> None:
    """Discard the buffer of `file` and everything that is written to it later."""
    # Replace the descriptor: the buffer is flushed into it when the program ends.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, file.fileno())
    os.close(null)

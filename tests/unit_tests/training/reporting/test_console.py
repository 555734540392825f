"""Messages are printed once, by rank 0, as text or JSON."""

import json
import logging
import math

import pytest

from megatron.training.reporting.console import EVERY_RANK, configure_logging, report_line

core = logging.getLogger("megatron.core.some_module")


@pytest.fixture(autouse=True)
def restored():
    yield
    package = logging.getLogger("megatron")
    package.handlers.clear()
    package.setLevel(logging.NOTSET)


def say_everything():
    core.debug("never")
    core.info("an info of %d words", 5)
    core.warning("a warning")
    core.info("my rank alone knows", extra=EVERY_RANK)
    core.error("an error")
    report_line(" [now] iteration 3 |", event="interval", iteration=3, lm_loss=math.nan)


def test_rank_0_prints_every_message_once(capsys):
    configure_logging(0)
    configure_logging(0)
    say_everything()
    assert capsys.readouterr().out.splitlines() == [
        " > an info of 5 words",
        " > WARNING: a warning",
        " > my rank alone knows",
        " > ERROR: an error",
        " [now] iteration 3 |",
    ]


def test_text_of_files_cannot_control_the_terminal(capsys):
    configure_logging(0)
    core.warning("of the checkpoint: \x1b]0;pwn\x07\x1b[2J\u202e\nnext")
    assert capsys.readouterr().out == (
        " > WARNING: of the checkpoint: \\x1b]0;pwn\\x07\\x1b[2J\\u202e\nnext\n"
    )


def test_other_ranks_print_errors_and_marked_messages(capsys):
    configure_logging(1)
    say_everything()
    assert capsys.readouterr().out.splitlines() == [" > my rank alone knows", " > ERROR: an error"]


def test_json(capsys):
    configure_logging(0, "json")
    say_everything()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(line.pop("time").endswith("+00:00") for line in lines)
    assert lines[1] == {"level": "warning", "message": "a warning"}
    assert lines[-1] == {"event": "interval", "iteration": 3, "lm_loss": None}

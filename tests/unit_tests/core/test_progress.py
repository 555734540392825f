"""Progress of long work, told by a clock that the test moves."""

import io

import pytest

from megatron.core.utils import BETWEEN_LINES, Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_lines_where_there_is_no_terminal(clock):
    out = io.StringIO()
    progress = Progress("reading x", 4_000_000_000, file=out, clock=clock)
    for _ in range(4):
        clock.now += 4
        progress.add(400_000_000)
        progress.tell()
    assert out.getvalue() == "reading x: 30 %, 1.20 GB of 4.00 GB, 100.00 MB/s, 0:00:28 left\n"
    clock.now += BETWEEN_LINES
    progress.tell()
    assert len(out.getvalue().splitlines()) == 2


def test_a_terminal_has_one_line_that_is_written_over(clock):
    out = Terminal()
    with Progress("steps", 10, "steps", file=out, clock=clock) as progress:
        clock.now += 4
        progress.add(2)
        progress.tell()
        assert out.getvalue() == "\rsteps: 20 %, 2 steps of 10 steps, 0.50 steps/s, 0:00:16 left"
    assert "\n" not in out.getvalue() and out.getvalue().endswith(" \r")


@pytest.mark.parametrize("out", [io.StringIO(), Terminal()])
def test_short_work_says_nothing(clock, out):
    with Progress("short", 10, file=out, clock=clock) as progress:
        clock.now += 1.9
        progress.add(10)
        progress.tell()
    assert out.getvalue() == ""


def test_work_that_cannot_count_says_how_long_it_runs(clock):
    progress = Progress("sorting", file=io.StringIO(), clock=clock)
    clock.now += 75
    assert progress.text() == "sorting: 0:01:15"
    progress.add(3_000_000)
    assert progress.text() == "sorting: 3.00 MB, 40.00 kB/s"


def test_the_amount_can_be_asked_for_and_begin_anew(clock):
    read = [0]
    progress = Progress("loading", 100, count=lambda: read[0], file=io.StringIO(), clock=clock)
    clock.now += 1
    read[0] = 250  # more than was planned
    assert progress.text() == "loading: 100 %, 250 B of 100 B, 250 B/s, 0:00:00 left"
    again = Progress("writing", 100, file=io.StringIO(), clock=clock)
    again.add(50)
    again.restart(10)
    clock.now += 1
    again.add(5)
    assert again.text() == "writing: 50 %, 5 B of 10 B, 5 B/s, 0:00:01 left"

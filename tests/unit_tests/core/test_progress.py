"""Progress bars, driven by a clock that the test advances."""

import io

import pytest

from megatron.core.progress import LINE_INTERVAL, ProgressBar
from megatron.core.terminal import format_size


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


def test_log_file_gets_one_line_per_interval(clock):
    out = io.StringIO()
    progress = ProgressBar("reading x", 4_000_000_000, file=out, clock=clock)
    for _ in range(4):
        clock.now += 4
        progress.add(400_000_000)
        progress.print_if_due()
    (line,) = out.getvalue().splitlines()
    assert line.startswith("reading x:  30%|")
    assert line.endswith("| 1.20G/4.00G [00:12<00:28, 100MB/s]")
    clock.now += LINE_INTERVAL
    progress.print_if_due()
    assert len(out.getvalue().splitlines()) == 2


def test_terminal_has_one_line_that_is_cleared_at_the_end(clock):
    out = Terminal()
    with ProgressBar("steps", 10, "steps", file=out, clock=clock) as progress:
        clock.now += 4
        progress.add(2)
        progress.print_if_due()
        line = out.getvalue().rpartition("\r")[2]
        assert line.startswith("steps:  20%|")
        assert line.endswith("| 2/10 [00:04<00:16,  2.00s/ steps]")
    assert "\n" not in out.getvalue()
    assert out.getvalue().endswith(" \r")


@pytest.mark.parametrize("out", [io.StringIO(), Terminal()], ids=["log", "terminal"])
def test_short_operation_prints_nothing(clock, out):
    with ProgressBar("short", 10, file=out, clock=clock) as progress:
        clock.now += 1.9
        progress.add(10)
        progress.print_if_due()
    assert out.getvalue() == ""


def test_unknown_total_shows_elapsed_time(clock):
    progress = ProgressBar("sorting", file=io.StringIO(), clock=clock)
    clock.now += 75
    assert str(progress) == "sorting: 0.00B [01:15, ?B/s]"
    progress.add(3_000_000)
    assert str(progress) == "sorting: 3.00MB [01:15, 40.0kB/s]"


def test_count_is_polled(clock):
    done = [0]
    progress = ProgressBar("loading", 100, count=lambda: done[0], file=io.StringIO(), clock=clock)
    clock.now += 1
    done[0] = 25
    assert str(progress).endswith("| 25.0/100 [00:01<00:03, 25.0B/s]")
    done[0] = 250  # more than expected
    assert str(progress) == "loading: 250B [00:01, 250B/s]"


def test_restart_counts_towards_the_new_total(clock):
    progress = ProgressBar("writing", 100, file=io.StringIO(), clock=clock)
    progress.add(50)
    progress.restart(10)
    clock.now += 1
    progress.add(5)
    assert str(progress).startswith("writing:  50%|")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(999, "999 B"), (1000, "1.00 kB"), (9_870_000, "9.87 MB"), (4e12, "4000.00 GB")],
)
def test_format_size(nbytes, text):
    assert format_size(nbytes) == text

"""Order of results and errors, and the end of the stream when a worker dies."""

import os
import signal
import sys
import threading
import time

import pytest

from megatron.core.datasets.ordered_workers import OrderedWorkers

LARGE = 5_000_000  # bytes: no pipe holds them


def square(number):
    time.sleep(0.02 if number % 3 == 0 else 0)
    return number * number


@pytest.mark.parametrize("count", [0, 1, 5, 40])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_results_are_in_order(num_workers, count):
    assert list(OrderedWorkers(square, range(count), num_workers, 4)) == [
        (n, n * n) for n in range(count)
    ]


def test_number_of_items_taken_ahead_is_limited():
    taken = []
    stream = OrderedWorkers(square, (taken.append(n) or n for n in range(100)), 2, 3)
    assert next(stream) == (0, 0)
    assert len(taken) == 2 * 3 + 1
    stream.close()


def fails_at_seven(number):
    if number == 7:
        raise ValueError("seven")
    return number


def test_error_is_raised_at_its_position():
    stream = OrderedWorkers(fails_at_seven, range(100), 2, 4)
    assert [next(stream)[0] for _ in range(7)] == list(range(7))
    with pytest.raises(ValueError, match="seven"):
        next(stream)


def large_both_ways(data):
    return data[::-1]


def test_items_and_results_larger_than_a_pipe():
    items = [bytes([n]) * LARGE for n in range(4)]
    assert all(result == item for item, result in OrderedWorkers(large_both_ways, items, 2, 2))


def own_pid_and_much(number):
    return os.getpid(), bytes(LARGE)


def test_worker_killed_while_working():
    stream = OrderedWorkers(suicide_at_three, range(100), 2, 4)
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        for index, _ in stream:
            assert index < 3


def suicide_at_three(number):
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_worker_killed_while_sending_a_result():
    """The worker has begun to send, the pipe is full, and the rest never arrives."""
    stream = OrderedWorkers(own_pid_and_much, range(100), 1, 2)
    _, (pid, _) = next(stream)
    time.sleep(1)  # for the worker to begin sending the next result
    os.kill(pid, signal.SIGKILL)
    signal.signal(signal.SIGALRM, hangs)
    signal.alarm(120)  # far above the time of a loaded machine
    try:
        with pytest.raises(RuntimeError, match="DataLoader worker"):
            list(stream)
    finally:
        signal.alarm(0)


def hangs(number, frame):
    raise TimeoutError("still waiting for the rest of the result")


def interrupt_at(event_index):
    """Let Ctrl-C arrive at an event of the code that runs next; return the number of events."""
    num_events = 0

    def trace(frame, event, argument):
        nonlocal num_events
        num_events += 1
        if num_events == event_index:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    return lambda: num_events


def test_workers_close_after_an_interrupt_at_any_point():
    event_index = 1
    while True:
        workers = OrderedWorkers(square, range(9), 0)
        next(workers)
        count_events = interrupt_at(event_index)
        try:
            next(workers)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        closing = threading.Thread(target=workers.close, daemon=True)
        closing.start()
        closing.join(20)
        assert not closing.is_alive(), f"close waits after an interrupt at event {event_index}"
        if count_events() < event_index:
            break
        event_index += 1
    assert event_index > 30

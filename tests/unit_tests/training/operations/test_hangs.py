"""Which ranks a hang report names."""

import threading

from megatron.training.operations.collectives import describe_ranks
from megatron.training.operations.hangs import Status, find_missing, format_stacks, format_summary

WORLD = "world (ranks 0, 1, 2)"


def make_status(rank, heartbeats=5, is_waiting=True, count=7):
    return Status(
        rank, f"node{rank}", heartbeats, 3, f"allreduce {count} of {WORLD}", is_waiting,
        {WORLD: count},
    )  # fmt: skip


def publish_again(statuses):
    return {rank: status._replace(heartbeats=8) for rank, status in statuses.items()}


def test_rank_without_heartbeats_does_not_respond():
    before = {rank: make_status(rank) for rank in range(3)}
    now = publish_again(before) | {1: before[1]}
    assert find_missing(before, now) == {1: "does not respond"}
    rows = format_summary(before, now, 30.4).splitlines()
    assert rows[0] == "no progress for 30 s; missing:"
    assert rows[1].startswith("  rank 1 (node1) does not respond: iteration 3, waits in collective")
    assert rows[2] == f"  ranks 0, 2: iteration 3, waits in collective allreduce 7 of {WORLD}"


def test_rank_outside_of_a_collective_is_missing():
    before = {rank: make_status(rank, is_waiting=rank != 2) for rank in range(3)}
    assert find_missing(before, publish_again(before)) == {2: "is not in a collective"}


def test_rank_that_has_skipped_a_collective_is_missing():
    before = {rank: make_status(rank) for rank in range(3)}
    before[0] = make_status(0, count=6)
    missing = find_missing(before, publish_again(before))
    assert missing == {0: f"has started 6 of 7 collectives of {WORLD}"}


def test_no_rank_is_missing_if_all_wait_for_the_same():
    before = {rank: make_status(rank) for rank in range(3)}
    now = publish_again(before)
    assert find_missing(before, now) == {}
    assert "all wait in the same collective" in format_summary(before, now, 30)


def test_stacks_begin_with_the_training_thread():
    release = threading.Event()
    texts = []
    training = threading.main_thread().ident
    other = threading.Thread(target=release.wait, name="data")
    other.start()
    reporter = threading.Thread(target=lambda: texts.append(format_stacks(training)), name="hangs")
    reporter.start()
    reporter.join()
    release.set()
    other.join()
    assert texts[0].startswith("  thread MainThread:")
    main_stack, _, data_stack = texts[0].partition("thread data:")
    assert "in test_stacks_begin_with_the_training_thread" in main_stack
    assert "in wait" in data_stack
    assert "thread hangs:" not in texts[0]


def test_long_lists_of_ranks_are_shortened():
    assert describe_ranks([3]) == "rank 3"
    assert describe_ranks(range(512)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7, ..., 511: 512 of them"

"""Batch sizes over a run compared with a walk through it, sample by sample."""

import pytest

from megatron.training.config.batch_schedule import BatchSchedule
from megatron.training.config.batch_steps import make_rampup_steps, make_token_steps


def batches(size, micro_batch_size, dp_size, rampup=None, decrease_if_needed=False):
    steps = ((0, size),) if rampup is None else make_rampup_steps(rampup, size)
    return BatchSchedule(steps, micro_batch_size, dp_size, decrease_if_needed)


def test_constant_batch_size():
    schedule = batches(64, 4, 2)
    for consumed in (0, 64, 10**12):
        assert schedule.global_batch_size_at(consumed) == 64
        assert schedule.num_microbatches_at(consumed) == 8
    assert schedule.consumed_after(10) == 640
    assert schedule.consumed_after(10, 128) == 768
    assert schedule.iterations_for(639) == 9
    assert schedule.iterations_for(640) == 10
    assert schedule.iterations_for(0) == 0
    assert schedule.iterations_for(640, 100) == 8  # where earlier iterations had another batch size


def test_rampup_takes_equal_shares_of_the_samples():
    schedule = batches(32, 2, 2, [8, 8, 300])
    for consumed in range(0, 1000, 4):
        expected = 8 if consumed < 100 else 16 if consumed < 200 else 24 if consumed < 300 else 32
        assert schedule.global_batch_size_at(consumed) == expected
        assert schedule.num_microbatches_at(consumed) == expected // 4


@pytest.mark.parametrize("rampup", [None, [8, 8, 300], [32, 8, 300], [8, 4, 0], [4, 28, 1000]])
def test_iterations_and_samples_match_a_walk_through_the_run(rampup):
    schedule = batches(32, 2, 2, rampup)
    consumed = 0
    boundaries = [0]
    for iteration in range(1, 120):
        consumed += schedule.global_batch_size_at(consumed)
        boundaries.append(consumed)
        assert schedule.consumed_after(iteration) == consumed
        assert (
            schedule.consumed_after(iteration - iteration // 2, boundaries[iteration // 2])
            == consumed
        )
    for samples in range(boundaries[-1]):
        assert (
            schedule.iterations_for(samples)
            == sum(boundary <= samples for boundary in boundaries) - 1
        )


def test_long_ramp_ups_are_not_walked_through():
    """Every iteration computes the number of remaining ones; a walk would take 10^15 steps here."""
    schedule = batches(32, 2, 2, [8, 8, 3 * 10**16])
    iterations = 10**16 // 8 + 10**16 // 16 + -(-(10**16) // 24)
    assert (
        schedule.iterations_for(3 * 10**16) == iterations - 1
    )  # the last one before 32 takes 8 samples too many
    assert schedule.consumed_after(iterations) == 3 * 10**16 + 8
    assert schedule.iterations_for(10**17) == iterations + (7 * 10**16 - 8) // 32


def test_batch_sizes_can_be_rounded_down():
    schedule = batches(40, 3, 2, [10, 10, 90], decrease_if_needed=True)
    assert [schedule.global_batch_size_at(consumed) for consumed in (0, 30, 60, 90)] == [
        6,
        18,
        30,
        36,
    ]
    assert [schedule.num_microbatches_at(consumed) for consumed in (0, 30, 60, 90)] == [1, 3, 5, 6]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (30, 4, 2),
            "global batch size 30 is not a multiple of micro-batch size 4 x data-parallel size 2 = "
            "8",
        ),
        (
            (4, 4, 2),
            "global batch size 4 is less than micro-batch size 4 x data-parallel size 2 = 8",
        ),
        ((4, 4, 2, None, True), "global batch size 4 is less than"),
        (
            (-8, 4, 2),
            "global batch size -8 is less than micro-batch size 4 x data-parallel size 2 = 8",
        ),
        ((32, 4, 2, [8, 4, 100]), "global batch size 12 is not a multiple"),  # a step of the ramp
        ((32, 4, 2, [8, 8]), "--rampup-batch-size 8 8: requires START INCREMENT SAMPLES"),
        (
            (32, 4, 2, [64, 8, 100]),
            "--rampup-batch-size 64 8 100: START is larger than --global-batch-size 32",
        ),
        ((32, 4, 2, [8, 16, 100]), "steps of 16 do not lead from 8 to --global-batch-size 32"),
        ((32, 4, 2, [8, 0, 100]), "START and INCREMENT must be positive"),
        ((32, 4, 2, [8, 8, -1]), "SAMPLES not negative"),
    ],
)
def test_impossible_batches(arguments, message):
    with pytest.raises(ValueError, match=message):
        batches(*arguments)


def test_step_schedule_counts_tokens():
    """Megatron-LM's --step-batch-size-schedule: batch sizes by consumed tokens."""
    assert make_token_steps("0:4 1K:8, 1.5k:16", 10) == ((0, 4), (100, 8), (150, 16))
    steps = BatchSchedule(make_token_steps("0:4 1K:8 1.5K:16", 10), 2, 2)
    assert [steps.global_batch_size_at(n) for n in (0, 99, 100, 149, 150, 10**9)] == [
        4,
        4,
        8,
        8,
        16,
        16,
    ]
    assert steps.sizes() == [4, 8, 16]
    assert steps.global_batch_size == 16
    # 25 iterations of 4, then 7 of 8 until 156, then of 16
    assert steps.consumed_after(25) == 100
    assert steps.consumed_after(33) == 172
    assert steps.iterations_for(172) == 33


@pytest.mark.parametrize("text", ["0:4 x:8", "10:4", "0:4 0:8", "", "0:4 20:8 10:16"])
def test_impossible_step_schedules(text):
    with pytest.raises(ValueError, match="--step-batch-size-schedule"):
        make_token_steps(text, 1)

"""Simulated schedules: no deadlock, matching messages, textbook order, memory and bubble."""

from collections.abc import Iterator

import pytest

from megatron.core.pipeline_parallel import Action, Message, Tick, schedule
from tests.unit_tests.core.pipeline_parallel.pipeline_simulator import Deadlock, simulate

LAYOUTS = [(pp, vpp) for pp in range(1, 9) for vpp in range(1, 5) if pp > 1 or vpp == 1]


def list_microbatch_counts(pp: int, vpp: int) -> list[int]:
    if vpp == 1:
        return sorted({1, 2, pp - 1, pp, pp + 1, 2 * pp + 1, 32} - {0})
    return list(range(pp, 33, pp))


def list_groups(pp: int, vpp: int) -> list[tuple[int, int]]:
    """Return (microbatches, group size) with groups larger than the pipeline."""
    if vpp == 1:
        return []
    groups = []
    for size in (pp, pp + 1, 2 * pp + 1):
        for m in (size, size + pp, 3 * size, 2 * size + pp + 1, pp):
            last_group = m % size or size
            if last_group >= pp:
                groups.append((m, size))
    return groups


def list_ticks(
    pp: int, vpp: int, m: int, forward_only: bool = False, group: int | None = None
) -> list[list[Tick]]:
    return [list(schedule(rank, pp, vpp, m, forward_only, group)) for rank in range(pp)]


def iterate_ranks(pp: int, vpp: int) -> Iterator[tuple[int, int, list[Tick]]]:
    """Yield (microbatches, rank, ticks of the rank)."""
    for m in list_microbatch_counts(pp, vpp):
        for rank, ticks in enumerate(list_ticks(pp, vpp, m)):
            yield m, rank, ticks


def list_actions(ticks: list[Tick]) -> list[Action]:
    return [tick.action for tick in ticks if tick.action]


def textbook_warmup(rank: int, pp: int, vpp: int, size: int | None = None) -> int:
    """Return the forward passes before the first (forward, backward) pair (Narayanan et al.
    2021).
    """
    later_stages = pp - rank - 1
    if vpp == 1:
        return later_stages
    return 2 * later_stages + (vpp - 1) * (size or pp)


def textbook_order(rank: int, pp: int, vpp: int, m: int, size: int | None = None) -> list[Action]:
    """Return warmup, pairs and cooldown, from an explicit loop."""
    count = m * vpp
    if vpp == 1:
        size = m
    elif size is None:
        size = pp

    forward = []
    backward = []
    for start in range(0, m, size):
        group = range(start, min(start + size, m))
        for chunk in range(vpp):
            for microbatch in group:
                forward.append(Action("forward", chunk, microbatch))
                backward.append(Action("backward", vpp - 1 - chunk, microbatch))

    warmup = min(textbook_warmup(rank, pp, vpp, min(size, m)), count)
    order = forward[:warmup]
    for pair in zip(forward[warmup:], backward, strict=False):
        order += pair
    return order + backward[count - warmup :]


def peak_in_flight(actions: list[Action]) -> int:
    """Return the maximum number of forward passes without their backward pass."""
    peak = in_flight = 0
    for action in actions:
        in_flight += 1 if action.kind == "forward" else -1
        peak = max(peak, in_flight)
    return peak


def test_number_of_configurations():
    assert sum(len(list_microbatch_counts(pp, vpp)) for pp, vpp in LAYOUTS) >= 200


@pytest.mark.parametrize("mode", ["rendezvous", "overlap", "buffered"])
@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("pp,vpp", LAYOUTS)
def test_no_deadlock_matching_messages_and_ideal_bubble(pp, vpp, forward_only, mode):
    for m in list_microbatch_counts(pp, vpp):
        ticks = list_ticks(pp, vpp, m, forward_only)
        traces = simulate(ticks, mode, forward=1.0, backward=2.0)
        per_action = 1.0 if forward_only else 3.0
        ideal = m * vpp * per_action
        bubble = (pp - 1) * per_action
        case = (pp, vpp, m)
        assert max(trace.end for trace in traces) == ideal + bubble, case
        assert max(trace.peak_unused_inputs for trace in traces) <= 2, case


@pytest.mark.parametrize("pp,vpp", LAYOUTS)
def test_passes_have_the_textbook_order(pp, vpp):
    for m, rank, ticks in iterate_ranks(pp, vpp):
        actions = list_actions(ticks)
        assert actions == textbook_order(rank, pp, vpp, m)
        time = {action: i for i, action in enumerate(actions)}
        assert len(actions) == 2 * vpp * m
        assert len(time) == len(actions), "an action is repeated"
        for chunk in range(vpp):
            for microbatch in range(m):
                forward = time["forward", chunk, microbatch]
                backward = time["backward", chunk, microbatch]
                assert forward < backward


@pytest.mark.parametrize("pp,vpp", LAYOUTS)
def test_peak_of_activations_in_flight(pp, vpp):
    for m, rank, ticks in iterate_ranks(pp, vpp):
        textbook = textbook_warmup(rank, pp, vpp) + 1
        assert peak_in_flight(list_actions(ticks)) == min(textbook, m * vpp)


@pytest.mark.parametrize("pp,vpp", [(2, 2), (3, 3), (4, 2), (5, 4)])
def test_groups_larger_than_the_pipeline(pp, vpp):
    for m, size in list_groups(pp, vpp):
        ticks = list_ticks(pp, vpp, m, group=size)
        for mode in ("rendezvous", "overlap", "buffered"):
            traces = simulate(ticks, mode, forward=1.0, backward=2.0)
            end = max(trace.end for trace in traces)
            unused_inputs = max(trace.peak_unused_inputs for trace in traces)
            case = (m, size, mode)
            assert end == 3.0 * (m * vpp + pp - 1), case
            assert unused_inputs <= 2 + 2 * (size - pp), case

        for rank in range(pp):
            actions = list_actions(ticks[rank])
            assert actions == textbook_order(rank, pp, vpp, m, size)
            in_flight = (vpp - 1) * min(size, m) + 2 * (pp - rank) - 1
            assert peak_in_flight(actions) == min(in_flight, m * vpp)


@pytest.mark.parametrize("pp,vpp", LAYOUTS)
def test_no_messages_beyond_the_ends_of_the_model(pp, vpp):
    last = pp * vpp - 1
    for _, rank, ticks in iterate_ranks(pp, vpp):
        received = set()
        for tick in ticks:
            if tick.action:
                virtual_stage = tick.action.chunk * pp + rank
                is_first = virtual_stage == 0
                is_last = virtual_stage == last
                if tick.action.kind == "backward":
                    is_first, is_last = is_last, is_first
                assert (tick.action in received) == (not is_first)
                assert (tick.send is not None) == (not is_last)
            else:
                assert tick.send is None
                assert tick.receive is not None

            if tick.receive:
                received.add(tick.receive.input_of)


@pytest.mark.parametrize("pp,vpp", LAYOUTS)
def test_warmup_steady_and_cooldown_phases(pp, vpp):
    for m, rank, ticks in iterate_ranks(pp, vpp):
        phases = [tick.phase for tick in ticks]
        assert phases == sorted(phases, key=["warmup", "steady", "cooldown"].index)
        passes = {"warmup": [], "steady": [], "cooldown": []}
        for tick in ticks:
            if tick.action:
                passes[tick.phase].append(tick.action.kind)
        warmup = min(textbook_warmup(rank, pp, vpp), m * vpp - 1)
        assert passes["warmup"] == ["forward"] * warmup
        assert passes["steady"] == ["forward", "backward"] * (m * vpp - warmup)
        assert passes["cooldown"] == ["backward"] * warmup


@pytest.mark.parametrize("pp,vpp", LAYOUTS)
def test_forward_only_has_only_forward_passes(pp, vpp):
    m = list_microbatch_counts(pp, vpp)[-1]
    training = list_ticks(pp, vpp, m)
    evaluation = list_ticks(pp, vpp, m, forward_only=True)
    for training_ticks, ticks in zip(training, evaluation, strict=True):
        actions = list_actions(training_ticks)
        forward = [action for action in actions if action.kind == "forward"]
        assert list_actions(ticks) == forward
        assert {tick.phase for tick in ticks} == {"steady"}


def test_one_stage_is_gradient_accumulation():
    assert list_actions(list(schedule(0, 1, 1, 2))) == [
        Action("forward", 0, 0),
        Action("backward", 0, 0),
        Action("forward", 0, 1),
        Action("backward", 0, 1),
    ]
    for tick in schedule(0, 1, 1, 4):
        assert tick.send is None
        assert tick.receive is None


def test_ticks_of_two_stages():
    def f(m):
        return Action("forward", 0, m)

    def b(m):
        return Action("backward", 0, m)

    assert list(schedule(0, 2, 1, 2)) == [
        Tick(0, "warmup", f(0), Message(1, f(0)), None),
        Tick(1, "steady", f(1), Message(1, f(1)), None),
        Tick(2, "steady", None, None, Message(1, b(0))),
        Tick(3, "steady", b(0), None, None),
        Tick(4, "cooldown", None, None, Message(1, b(1))),
        Tick(5, "cooldown", b(1), None, None),
    ]


def test_simulator_detects_deadlocks():
    """Receiving an input right after the action before its use deadlocks the interleaved schedule
    under rendezvous.
    """
    pipeline = list_ticks(2, 2, 4)
    late = []
    for ticks in pipeline:
        arrivals = {tick.receive.input_of: tick.receive for tick in ticks if tick.receive}
        acting = [tick for tick in ticks if tick.action]
        inputs = [arrivals.get(tick.action) for tick in acting]
        late_ticks = [Tick(-1, "warmup", None, None, inputs[0])]
        for tick, next_input in zip(acting, [*inputs[1:], None], strict=True):
            late_ticks.append(tick._replace(receive=next_input))
        late.append(late_ticks)

    simulate(late, "buffered")
    with pytest.raises(Deadlock):
        simulate(late, "rendezvous")


def test_simulator_detects_wrong_message_order():
    pipeline = list_ticks(2, 1, 2)
    ticks = pipeline[1]
    first, second = (i for i, tick in enumerate(ticks) if tick.receive)
    first_message = ticks[first].receive
    ticks[first] = ticks[first]._replace(receive=ticks[second].receive)
    ticks[second] = ticks[second]._replace(receive=first_message)

    with pytest.raises(AssertionError, match="is sent where"):
        simulate(pipeline, "buffered")


@pytest.mark.parametrize(
    "arguments,message",
    [
        ((0, 2, 2, 3), "3 microbatches leave 1"),
        ((0, 4, 2, 8, False, 3), "stage 3 must be at least the 4 stages"),
        (
            (0, 4, 2, 13, False, 5),
            "groups of 5; .* at least 4 microbatches .* 13 microbatches leave 3",
        ),
        ((0, 1, 2, 2), "needs more than one pipeline stage"),
        ((2, 2, 1, 2), "pipeline rank 2 is not part of a pipeline of 2"),
        ((0, 2, 1, 0), "number of microbatches 0 must be positive"),
    ],
)
def test_impossible_sizes_are_rejected(arguments, message):
    with pytest.raises(ValueError, match=message):
        next(schedule(*arguments))

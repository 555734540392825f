"""Pipeline schedules as data: the work of each rank, tick by tick.

Each action (the forward or backward pass of one micro-batch through one model chunk) has a *clock*,
in closed form, such that its input is produced at an earlier clock. A message is exchanged at the
clock of the action that produces it, at both ends. This has two consequences:

- A deadlock cannot occur. Each rank passes its clocks in order; once all exchanges before clock t
  are complete, both ends of each message of clock t arrive at its exchange. This holds even if a
  send completes only when it is received and if a rank waits for the whole exchange before
  continuing; within an exchange the order of posting does not matter.
- Messages between two ranks match in order, because both ends sort them by clock.

The order of actions on each rank is that of Narayanan et al. 2021 ("Efficient Large-Scale Language
Model Training on GPU Clusters Using Megatron-LM"), and so are bubble and memory. With P stages,
rank p, V chunks per stage, m micro-batches and groups of g >= P micro-batches that pass a chunk
before the next one (g = P by default):

============= =================================== =================
schedule      activations in flight on rank p     bubble / ideal
============= =================================== =================
1F1B (V = 1)  min(P - p, m)                       (P - 1) / m
interleaved   min((V - 1) g + 2 (P - p) - 1, m V) (P - 1) / (m V)
============= =================================== =================

P = 1 is plain gradient accumulation: forward and backward of each micro-batch in turn. Groups
larger than P cost memory and give the exchange between the last and the first stage g - P passes
more time; the last group may be smaller, so m need not be a multiple of P.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

Pass = Literal["forward", "backward"]
Phase = Literal["warmup", "steady", "cooldown"]


class Action(NamedTuple):
    """One pass of one micro-batch through one of a rank's model chunks."""

    kind: Pass
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} of microbatch {self.microbatch}, chunk {self.chunk}"


class Message(NamedTuple):
    """An activation or gradient in transit."""

    peer: int  # pipeline rank at the other end
    input_of: Action  # action of the receiving rank that consumes the message


class Tick(NamedTuple):
    """At most one action, followed by an exchange of at most one message in each direction."""

    clock: int
    phase: Phase
    action: Action | None
    send: Message | None  # result of the action
    receive: Message | None  # input of a later action

    def __str__(self) -> str:
        return f"tick {self.clock} ({self.phase}, {self.action or 'no pass'})"


def schedule(
    pp_rank: int,
    pp_size: int,
    vpp_size: int,
    num_microbatches: int,
    forward_only: bool = False,
    group_size: int | None = None,
) -> Iterator[Tick]:
    """Yield the ticks of a rank: 1F1B if `vpp_size` is 1, otherwise interleaved.

    The interleaved schedule runs groups of `group_size` micro-batches. Clocks at which the rank
    neither computes nor receives are omitted. Raises ValueError for sizes without a schedule.
    """
    group_size = group_size or pp_size
    _check_sizes(pp_rank, pp_size, vpp_size, num_microbatches, group_size)
    sizes = (pp_size, vpp_size, num_microbatches, forward_only, group_size)
    actions = _make_timetable(pp_rank, *sizes)

    # The messages of the neighbors follow from their timetables, without negotiation at run time.
    arrivals: dict[int, Message] = {}
    for peer in {(pp_rank - 1) % pp_size, (pp_rank + 1) % pp_size}:
        for clock, peer_action in _make_timetable(peer, *sizes).items():
            message = consumer(peer, peer_action, pp_size, vpp_size)
            if message is not None and message.peer == pp_rank:
                assert clock not in arrivals, "one message per clock"
                arrivals[clock] = Message(peer, message.input_of)

    # A rank also stops at clocks at which it only receives, because the exchange takes place when
    # the sender gets there.
    steady = _find_steady_clocks(actions)
    for clock in sorted(actions.keys() | arrivals.keys()):
        phase: Phase = "steady"
        if clock < steady.start:
            phase = "warmup"
        elif clock >= steady.stop:
            phase = "cooldown"
        action = actions.get(clock)
        send = None
        if action is not None:
            send = consumer(pp_rank, action, pp_size, vpp_size)
        yield Tick(clock, phase, action, send, arrivals.get(clock))


def list_actions(
    pp_rank: int,
    pp_size: int,
    vpp_size: int,
    num_microbatches: int,
    group_size: int | None = None,
) -> list[Action]:
    """Return the forward and backward passes of a rank in order, without its messages."""
    group_size = group_size or pp_size
    _check_sizes(pp_rank, pp_size, vpp_size, num_microbatches, group_size)
    timetable = _make_timetable(pp_rank, pp_size, vpp_size, num_microbatches, False, group_size)
    return [timetable[clock] for clock in sorted(timetable)]


def check_group_size(pp_size: int, group_size: int) -> None:
    """Raise ValueError if groups of the interleaved schedule are smaller than the pipeline."""
    if group_size < pp_size:
        raise ValueError(
            f"--microbatch-group-size-per-virtual-pipeline-stage {group_size} must be at least the "
            f"{pp_size} stages of the pipeline: the first stage would wait for the last one"
        )


def groups_fit(num_microbatches: int, pp_size: int, group_size: int) -> bool:
    """Return whether the last group of the interleaved schedule is as large as the pipeline."""
    remainder = num_microbatches % group_size
    return remainder == 0 or remainder >= pp_size


def consumer(pp_rank: int, action: Action, pp_size: int, vpp_size: int) -> Message | None:
    """Return the message that carries the result of `action`, addressed to its consumer.

    None at the end of the model (forward) or at its beginning (backward). Stage and chunk number
    the virtual stages of the model: chunk c of rank p is virtual stage c * pp_size + p.
    """
    step = 1 if action.kind == "forward" else -1
    chunk_step, peer = divmod(pp_rank + step, pp_size)
    chunk = action.chunk + chunk_step
    if not 0 <= chunk < vpp_size:
        return None
    return Message(peer, action._replace(chunk=chunk))


def _make_timetable(
    pp_rank: int,
    pp_size: int,
    vpp_size: int,
    num_microbatches: int,
    forward_only: bool,
    group_size: int,
) -> dict[int, Action]:
    """Return the action of a rank at each of its clocks."""
    if vpp_size == 1:
        group_size = num_microbatches  # all micro-batches pass the only chunk one after the other
    order = _make_forward_order(vpp_size, num_microbatches, group_size)
    first_group = min(group_size, num_microbatches)
    forward, backward = _compute_clocks(pp_rank, pp_size, vpp_size, len(order), first_group)
    timetable: dict[int, Action] = {}
    for clock, (chunk, microbatch) in zip(forward, order, strict=True):
        timetable[clock] = Action("forward", chunk, microbatch)
    if not forward_only:
        # Backward passes have the same order of micro-batches, and the chunks in reverse.
        for clock, (chunk, microbatch) in zip(backward, order, strict=True):
            timetable[clock] = Action("backward", vpp_size - 1 - chunk, microbatch)
        assert len(timetable) == 2 * len(order), "one action per clock"
    return timetable


def _compute_clocks(
    pp_rank: int, pp_size: int, vpp_size: int, count: int, first_group: int
) -> tuple[list[int], list[int]]:
    """Return the clocks of a rank's `count` forward and `count` backward passes, each in order."""
    if vpp_size == 1:
        # Each forward pass is one clock later than on the previous stage. A rank fills the pipeline
        # up to the last stage, then waits for the first gradient and continues at every second
        # clock; the backward passes take the clocks in between.
        in_flight = pp_size - pp_rank
        first_backward = pp_size + in_flight - 1
        forward = []
        for index in range(count):
            step = 1 if index < in_flight else 2
            forward.append(pp_rank + step * index)
    else:
        # A forward pass at each even clock and a backward pass at each odd one, at least 2 clocks
        # after the previous virtual stage: the first stage starts the next chunk a group later, and
        # no group is smaller than the pipeline. The communication of a forward pass thus overlaps
        # with a backward pass, and vice versa.
        first_gradient = (vpp_size - 1) * first_group + 2 * (pp_size - 1) - pp_rank
        first_backward = 2 * first_gradient + 1
        forward = [2 * (pp_rank + index) for index in range(count)]
    backward = [first_backward + 2 * index for index in range(count)]
    return forward, backward


def _make_forward_order(
    vpp_size: int, num_microbatches: int, group_size: int
) -> list[tuple[int, int]]:
    """Return (chunk, micro-batch) of a rank's forward passes, in order.

    A group of micro-batches passes chunk 0, then chunk 1, and so on; then comes the next group.
    """
    order = []
    for start in range(0, num_microbatches, group_size):
        stop = min(start + group_size, num_microbatches)
        for chunk in range(vpp_size):
            for microbatch in range(start, stop):
                order.append((chunk, microbatch))
    return order


def _find_steady_clocks(actions: dict[int, Action]) -> range:
    """Return the clocks of the steady phase, in which forward and backward passes alternate.

    It begins with the forward pass before the first backward pass, and ends with the backward pass
    after the last forward pass.
    """
    clocks: dict[Pass, list[int]] = {"forward": [], "backward": []}
    for clock, action in actions.items():
        clocks[action.kind].append(clock)
    forward = clocks["forward"]
    backward = clocks["backward"]
    if not backward:  # forward only: a single phase
        return range(forward[-1] + 1)
    start = max(clock for clock in forward if clock < backward[0])
    last = min(clock for clock in backward if clock > forward[-1])
    return range(start, last + 1)


def _check_sizes(
    pp_rank: int, pp_size: int, vpp_size: int, num_microbatches: int, group_size: int
) -> None:
    """Raise ValueError for sizes without a schedule, with the sizes that have one."""
    if min(pp_size, vpp_size, num_microbatches) < 1:
        raise ValueError(
            f"pipeline size {pp_size}, virtual pipeline size {vpp_size} and number of microbatches "
            f"{num_microbatches} must be positive"
        )
    if not 0 <= pp_rank < pp_size:
        raise ValueError(f"pipeline rank {pp_rank} is not part of a pipeline of {pp_size} stages")
    # The remaining rules are those of the interleaved schedule.
    if vpp_size == 1:
        return
    if pp_size == 1:
        raise ValueError(
            f"the interleaved schedule ({vpp_size} chunks per stage) needs more than one pipeline "
            "stage"
        )
    check_group_size(pp_size, group_size)
    if not groups_fit(num_microbatches, pp_size, group_size):
        raise ValueError(
            f"the interleaved schedule ({vpp_size} chunks per stage) runs microbatches in groups "
            f"of {group_size}; the last group may be smaller, but must have at least {pp_size} "
            f"microbatches (the number of stages): {num_microbatches} microbatches leave "
            f"{num_microbatches % group_size}; change --global-batch-size, --micro-batch-size or "
            "--microbatch-group-size-per-virtual-pipeline-stage, or use one chunk per stage"
        )

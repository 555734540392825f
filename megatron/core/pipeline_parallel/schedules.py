"""Pipeline schedules as data: what each rank computes, sends and receives, tick by tick.

Every action (the forward or backward pass of one microbatch through one model chunk) has a *clock*, in closed form,
such that its input is produced at an earlier clock. A message is exchanged at the clock of the action that produces it,
on both of its ends. Two things follow:

- No deadlock. Every rank passes its clocks in order; once all exchanges before clock t are complete, both ends of every
  message of clock t arrive at its exchange. This holds even if a send completes only when it is received, and if a rank
  waits for the whole exchange before it goes on; within an exchange the order of posting does not matter.
- Messages between two ranks match in order: both ends sort them by clock.

The order of actions on each rank is that of Narayanan et al. 2021 ("Efficient Large-Scale Language Model Training on
GPU Clusters Using Megatron-LM"), and so are bubble and memory. With P stages, p the rank, V chunks per stage and m
microbatches:

================  =======================================  ==============
schedule          activations in flight on rank p          bubble / ideal
================  =======================================  ==============
1F1B (V = 1)      min(P - p, m)                            (P - 1) / m
interleaved       min((V - 1) P + 2 (P - p) - 1, m V)      (P - 1) / (m V)
================  =======================================  ==============

(interleaved in groups of N > P microbatches: N in place of P in the first term)

P = 1 is plain gradient accumulation: forward and backward of each microbatch in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

Pass = Literal["forward", "backward"]
Phase = Literal["warmup", "steady", "cooldown"]


class Action(NamedTuple):
    """One pass of one microbatch through one of a rank's model chunks."""

    kind: Pass
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind} of microbatch {self.microbatch}, chunk {self.chunk}"


class Message(NamedTuple):
    """An activation or gradient on its way; `input_of` names the action of the receiving rank that consumes it."""

    peer: int  # pipeline rank at the other end
    input_of: Action


class Tick(NamedTuple):
    """At most one action, then one exchange of at most one message each way."""

    clock: int
    phase: Phase
    action: Action | None
    send: Message | None  # the action's result
    receive: Message | None  # the input of a later action

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
    """The ticks of one rank: 1F1B for `vpp_size` 1, interleaved above, in groups of `group_size` (`pp_size`).

    Clocks at which the rank neither computes nor receives are left out.
    Raises ValueError for sizes that no schedule exists for.
    """
    group_size = group_size or pp_size
    _check_sizes(pp_rank, pp_size, vpp_size, num_microbatches, group_size)
    sizes = (pp_size, vpp_size, num_microbatches, forward_only, group_size)
    actions = _timetable(pp_rank, *sizes)
    arrivals: dict[int, Message] = {}
    for peer in {(pp_rank - 1) % pp_size, (pp_rank + 1) % pp_size}:
        for clock, sent_by in _timetable(peer, *sizes).items():
            message = consumer(peer, sent_by, pp_size, vpp_size)
            if message is not None and message.peer == pp_rank:
                assert clock not in arrivals, "one message per clock"
                arrivals[clock] = Message(peer, message.input_of)

    steady = _steady_clocks(actions)
    for clock in sorted(actions.keys() | arrivals.keys()):
        phase: Phase = "steady" if clock in steady else "warmup" if clock < steady.start else "cooldown"
        action = actions.get(clock)
        send = consumer(pp_rank, action, pp_size, vpp_size) if action else None
        yield Tick(clock, phase, action, send, arrivals.get(clock))


def consumer(pp_rank: int, action: Action, pp_size: int, vpp_size: int) -> Message | None:
    """Where the result of `action` goes; None at the end of the model (forward) or its beginning (backward).

    Stage and chunk number the virtual stages of the model: chunk c of rank p is virtual stage c * pp_size + p.
    """
    step = 1 if action.kind == "forward" else -1
    chunk_step, peer = divmod(pp_rank + step, pp_size)
    chunk = action.chunk + chunk_step
    return Message(peer, action._replace(chunk=chunk)) if 0 <= chunk < vpp_size else None


def _timetable(
    pp_rank: int, pp_size: int, vpp_size: int, num_microbatches: int, forward_only: bool, group_size: int
) -> dict[int, Action]:
    """Clock -> action of one rank."""
    count = num_microbatches * vpp_size
    forward, backward = _clocks(pp_rank, pp_size, vpp_size, count, group_size)
    order = [_nth_forward(i, group_size, vpp_size, num_microbatches) for i in range(count)]
    table = {clock: Action("forward", c, m) for clock, (c, m) in zip(forward, order, strict=True)}
    if not forward_only:
        # Backward passes go through the microbatches alike, through the chunks in reverse.
        last = vpp_size - 1
        table |= {clock: Action("backward", last - c, m) for clock, (c, m) in zip(backward, order, strict=True)}
        assert len(table) == 2 * count, "one action per clock"
    return table


def _clocks(pp_rank: int, pp_size: int, vpp_size: int, count: int, group_size: int) -> tuple[list[int], list[int]]:
    """Clocks of a rank's `count` forward and `count` backward passes, each in order."""
    if vpp_size == 1:
        # The i-th forward follows its predecessor stage by one clock. A rank fills the pipeline up to the last stage,
        # then waits for the first gradient and goes on at every second clock; the backward passes take the others.
        in_flight = pp_size - pp_rank
        forward = [pp_rank + (i if i < in_flight else 2 * i) for i in range(count)]
        backward = [pp_size + in_flight - 1 + 2 * i for i in range(count)]
    else:
        # A forward pass at every even clock, a backward pass at every odd one, each 2 clocks after its predecessor
        # virtual stage. The communication of a forward pass thus overlaps with a backward pass, and vice versa.
        # A chunk's output is needed one group later, so a group must be as long as the pipeline.
        forward = [2 * (pp_rank + i) for i in range(count)]
        first_gradient = group_size * (vpp_size - 1) + pp_size - 1 + (pp_size - 1 - pp_rank)
        backward = [2 * (first_gradient + i) + 1 for i in range(count)]
    return forward, backward


def _nth_forward(n: int, group_size: int, vpp_size: int, num_microbatches: int) -> tuple[int, int]:
    """(chunk, microbatch): groups of microbatches pass chunk 0, then chunk 1, and so on; the last may be shorter."""
    if vpp_size == 1:
        return 0, n
    group, rest = divmod(n, group_size * vpp_size)
    chunk, offset = divmod(rest, min(group_size, num_microbatches - group * group_size))
    return chunk, group * group_size + offset


def _steady_clocks(actions: dict[int, Action]) -> range:
    """From the forward pass that the first backward pass follows to the backward pass that follows the last forward."""
    forward = [clock for clock, action in actions.items() if action.kind == "forward"]
    backward = [clock for clock, action in actions.items() if action.kind == "backward"]
    if not backward:  # forward only: one phase
        return range(forward[-1] + 1)
    first_pair = max(clock for clock in forward if clock < backward[0])
    last_pair = min(clock for clock in backward if clock > forward[-1])
    return range(first_pair, last_pair + 1)


def group_problem(pp_size: int, num_microbatches: int, group_size: int) -> str | None:
    """Why the interleaved schedule cannot run so many microbatches in groups of `group_size`."""
    if group_size < pp_size:
        return f"groups of {group_size} microbatches are shorter than the pipeline of {pp_size} stages"
    if 0 < num_microbatches % group_size < pp_size or num_microbatches < pp_size:
        return (
            f"{num_microbatches} microbatches are not groups of {group_size}: the last one, of "
            f"{num_microbatches % group_size}, would be shorter than the pipeline of {pp_size} stages"
        )
    return None


def _check_sizes(pp_rank: int, pp_size: int, vpp_size: int, num_microbatches: int, group_size: int) -> None:
    if min(pp_size, vpp_size, num_microbatches) < 1:
        raise ValueError(
            f"pipeline size {pp_size}, virtual pipeline size {vpp_size} and number of microbatches {num_microbatches} "
            "must be positive"
        )
    if not 0 <= pp_rank < pp_size:
        raise ValueError(f"pipeline rank {pp_rank} is not part of a pipeline of {pp_size} stages")
    if vpp_size > 1 and pp_size == 1:
        raise ValueError(f"the interleaved schedule ({vpp_size} chunks per stage) needs more than one pipeline stage")
    problem = group_problem(pp_size, num_microbatches, group_size)
    if vpp_size > 1 and problem is not None:
        raise ValueError(
            f"the interleaved schedule ({vpp_size} chunks per stage) runs microbatches in groups: {problem}; change "
            "--global-batch-size, --micro-batch-size or --microbatch-group-size-per-virtual-pipeline-stage, or use one "
            "chunk per stage"
        )

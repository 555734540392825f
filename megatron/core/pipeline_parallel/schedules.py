"""Which layers stand on which pipeline stage, and schedules as data: what each rank does, tick by
tick.

Every action (the forward or backward pass of one microbatch through one model chunk) has a *clock*,
in closed form, such that its input is produced at an earlier clock. A message is exchanged at the
clock of the action that produces it, on both of its ends. Two things follow:

- No deadlock. Every rank passes its clocks in order; once all exchanges before clock t are complete, both ends of every
  message of clock t arrive at its exchange. This holds even if a send completes only when it is received, and if a rank
  waits for the whole exchange before it goes on; within an exchange the order of posting does not matter.
- Messages between two ranks match in order: both ends sort them by clock.

The order of actions on each rank is that of Narayanan et al. 2021 ("Efficient Large-Scale Language
Model Training on GPU Clusters Using Megatron-LM"), and so are bubble and memory. With P stages, p
the rank, V chunks per stage, m microbatches and groups of g >= P microbatches that pass one chunk
before the next (P unless it is said otherwise):

================  =======================================  ============== schedule
activations in flight on rank p          bubble / ideal ================
=======================================  ============== 1F1B (V = 1)      min(P - p, m)
(P - 1) / m interleaved       min((V - 1) g + 2 (P - p) - 1, m V)      (P - 1) / (m V)
================  =======================================  ==============

P = 1 is plain gradient accumulation: forward and backward of each microbatch in turn. Groups larger
than P cost memory and give the exchange between the last stage and the first g - P passes more
time; the last group may be smaller, so m need not be a multiple of P.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

FIRST = "--decoder-first-pipeline-num-layers"
LAST = "--decoder-last-pipeline-num-layers"
LAYOUT = "--pipeline-model-parallel-layout"


def pipeline_layer_ranges(
    num_layers: int,
    pp_size: int,
    vpp_size: int = 1,
    first_stage_layers: int | None = None,
    last_stage_layers: int | None = None,
    account_for_embedding: bool = False,
    account_for_loss: bool = False,
    layout: str | None = None,
) -> list[list[range]]:
    """Layers follow the chunks: all stages' chunk 0, then all stages' chunk 1, and so on.

    Returns global layer numbers indexed [stage][chunk]. Stages hold equally many layers, except the
    first and the last where a number is given; a stage's layers are split equally over its
    `vpp_size` chunks. The embedding and the loss may count as a layer. `layout` says it all in
    Megatron-LM's notation instead. Raises ValueError for numbers that do not divide, with values
    that would.
    """
    if layout is not None:
        counts = parse_layout(layout)
        if sum(counts) != num_layers or len(counts) != pp_size * vpp_size:
            raise ValueError(
                f"{LAYOUT} {layout} has {sum(counts)} layers on {len(counts)} chunks: the model has {num_layers} "
                f"layers, and there are {pp_size} pipeline stages x {vpp_size} chunks"
            )
    else:
        ends = (first_stage_layers, last_stage_layers)
        counts = _counts(
            num_layers, pp_size, vpp_size, ends, account_for_embedding, account_for_loss
        )
    starts = [0, *itertools.accumulate(counts)]
    ranges = [range(start, start + count) for start, count in zip(starts, counts, strict=False)]
    return [ranges[stage::pp_size] for stage in range(pp_size)]


def parse_layout(layout: str) -> list[int]:
    """Layers of every chunk in the order of the model, from Megatron-LM's notation; ValueError
    where it is another.
    """
    text = re.sub(r"\(([^()]+)\)\*(\d+)", _repeated, layout.replace(",", ""))
    text = re.sub(r"(.)\*(\d+)", _repeated, text)
    if "m" in text:
        raise ValueError(
            f"{LAYOUT} {layout}: Megatron-LM's multi-token prediction (m) is not implemented here"
        )
    if not re.fullmatch(r"E[t|]*L", text):
        raise ValueError(
            f"{LAYOUT} {layout}: expected E, then t and |, then L, with *n behind a letter or (group)"
        )
    chunks = text.split("|")
    if any(not chunk for chunk in chunks):
        raise ValueError(f"{LAYOUT} {layout}: chunk {chunks.index('')} has nothing on it")
    return [chunk.count("t") for chunk in chunks]


def _repeated(match: re.Match[str]) -> str:
    if len(match[2]) > 4:
        raise ValueError(f"{LAYOUT}: a repetition of {match[2]} is more than any model has")
    return match[1] * int(match[2])


def _counts(
    num_layers: int,
    pp_size: int,
    vpp_size: int,
    ends: tuple[int | None, int | None],
    embedding: bool,
    loss: bool,
) -> list[int]:
    """Layers of every chunk in the order of the model; `ends`: the numbers given for the first and
    the last stage.
    """
    first, last = ends
    if (embedding or loss) and ends != (None, None):
        raise ValueError(f"{FIRST} and {LAST} exclude --account-for-...-in-pipeline-split")
    slots = num_layers + embedding + loss
    _check_split(num_layers, pp_size, vpp_size, first, last)
    stages = _stage_sizes(slots, pp_size, vpp_size, first, last)
    if stages is None:
        raise ValueError(_explain(slots, pp_size, vpp_size, first, last))
    counts = [layers // vpp_size for layers in stages] * vpp_size
    counts[0] -= embedding
    counts[-1] -= loss
    return counts


def _check_split(
    num_layers: int, pp_size: int, vpp_size: int, first: int | None, last: int | None
) -> None:
    if min(num_layers, pp_size, vpp_size) < 1:
        raise ValueError(
            f"the number of layers ({num_layers}), of pipeline stages ({pp_size}) and of chunks per stage ({vpp_size}) "
            "must be positive"
        )
    if vpp_size > 1 and pp_size == 1:
        raise ValueError(f"{vpp_size} chunks per stage need more than one pipeline stage")
    for name, layers in ((FIRST, first), (LAST, last)):
        if layers is not None and pp_size == 1:
            raise ValueError(f"{name} {layers} needs more than one pipeline stage")


def _stage_sizes(
    num_layers: int, pp_size: int, vpp_size: int, first: int | None, last: int | None
) -> list[int] | None:
    """Layers of each stage; None if they cannot be split that way."""
    given = [layers for layers in (first, last) if layers is not None]
    other_stages = pp_size - len(given)
    rest = num_layers - sum(given)
    if rest % max(other_stages, 1) != 0 or (other_stages == 0 and rest != 0):
        return None
    stages = [rest // max(other_stages, 1)] * pp_size
    if first is not None:
        stages[0] = first
    if last is not None:
        stages[-1] = last
    return stages if all(layers > 0 and layers % vpp_size == 0 for layers in stages) else None


def _explain(
    num_layers: int, pp_size: int, vpp_size: int, first: int | None, last: int | None
) -> str:
    """Every number, and which values of the first one that can be changed would do."""
    chunks = f" x {vpp_size} chunks" if vpp_size > 1 else ""
    given = [
        f"{name} {layers}" for name, layers in ((FIRST, first), (LAST, last)) if layers is not None
    ]
    uneven = f" with {' and '.join(given)}" if given else ""
    problem = f"{num_layers} layers cannot be split over {pp_size} pipeline stages{chunks}{uneven}"

    candidates = range(1, num_layers)
    if first is not None:
        works = [n for n in candidates if _stage_sizes(num_layers, pp_size, vpp_size, n, last)]
        advice = f"with the other numbers as they are, {FIRST} could be {_list(works)}"
    elif last is not None:
        works = [n for n in candidates if _stage_sizes(num_layers, pp_size, vpp_size, first, n)]
        advice = f"with the other numbers as they are, {LAST} could be {_list(works)}"
    else:
        unit = pp_size * vpp_size
        lower = num_layers // unit * unit
        works = [n for n in candidates if _stage_sizes(num_layers, pp_size, vpp_size, n, None)]
        advice = f"--num-layers could be {_list([n for n in (lower, lower + unit) if n])}, {FIRST} {_list(works)}"
    return f"{problem}: every chunk needs the same whole number of layers within its stage, at least one; {advice}"


def _list(values: list[int]) -> str:
    return ", ".join(map(str, values)) if values else "no value"


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
    """An activation or gradient on its way; `input_of` names the action of the receiving rank that
    consumes it.
    """

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
    """The ticks of one rank: 1F1B for `vpp_size` 1, interleaved above, in groups of `group_size`
    microbatches.

    Clocks at which the rank neither computes nor receives are left out. Raises ValueError for sizes
    that no schedule exists for.
    """
    group_size = group_size or pp_size
    _check_sizes(pp_rank, pp_size, vpp_size, num_microbatches, group_size)
    sizes = (pp_size, vpp_size, num_microbatches, forward_only, group_size)
    actions = _timetable(pp_rank, *sizes)
    # What the neighbours send at which clock follows from their timetables: nothing is negotiated
    # while running.
    arrivals: dict[int, Message] = {}
    for peer in {(pp_rank - 1) % pp_size, (pp_rank + 1) % pp_size}:
        for clock, sent_by in _timetable(peer, *sizes).items():
            message = consumer(peer, sent_by, pp_size, vpp_size)
            if message is not None and message.peer == pp_rank:
                assert clock not in arrivals, "one message per clock"
                arrivals[clock] = Message(peer, message.input_of)

    # A rank also stops at clocks where it only receives: the exchange must happen when its sender
    # gets there.
    steady = _steady_clocks(actions)
    for clock in sorted(actions.keys() | arrivals.keys()):
        phase: Phase = (
            "steady" if clock in steady else "warmup" if clock < steady.start else "cooldown"
        )
        action = actions.get(clock)
        send = consumer(pp_rank, action, pp_size, vpp_size) if action else None
        yield Tick(clock, phase, action, send, arrivals.get(clock))


def check_group_size(pp_size: int, group_size: int) -> None:
    """ValueError for groups of the interleaved schedule that are smaller than the pipeline: it
    would run dry.
    """
    if group_size < pp_size:
        raise ValueError(
            f"--microbatch-group-size-per-virtual-pipeline-stage {group_size} must be at least the {pp_size} stages of "
            "the pipeline: the first stage would wait for the last one"
        )


def groups_fit(num_microbatches: int, pp_size: int, group_size: int) -> bool:
    """Whether the last group of the interleaved schedule, too, is as large as the pipeline."""
    rest = num_microbatches % group_size
    return rest == 0 or rest >= pp_size


def consumer(pp_rank: int, action: Action, pp_size: int, vpp_size: int) -> Message | None:
    """Where the result of `action` goes; None at the end of the model (forward) or its beginning
    (backward).

    Stage and chunk number the virtual stages of the model: chunk c of rank p is virtual stage c *
    pp_size + p.
    """
    step = 1 if action.kind == "forward" else -1
    chunk_step, peer = divmod(pp_rank + step, pp_size)
    chunk = action.chunk + chunk_step
    return Message(peer, action._replace(chunk=chunk)) if 0 <= chunk < vpp_size else None


def _timetable(
    pp_rank: int,
    pp_size: int,
    vpp_size: int,
    num_microbatches: int,
    forward_only: bool,
    group_size: int,
) -> dict[int, Action]:
    """Clock -> action of one rank."""
    if vpp_size == 1:
        group_size = num_microbatches  # one chunk: all micro-batches pass it one after the other
    order = _forward_order(vpp_size, num_microbatches, group_size)
    count = len(order)
    first_group = min(group_size, num_microbatches)
    forward, backward = _clocks(pp_rank, pp_size, vpp_size, count, first_group)
    table = {clock: Action("forward", c, m) for clock, (c, m) in zip(forward, order, strict=True)}
    if not forward_only:
        # Backward passes go through the microbatches alike, through the chunks in reverse.
        last = vpp_size - 1
        table |= {
            clock: Action("backward", last - c, m)
            for clock, (c, m) in zip(backward, order, strict=True)
        }
        assert len(table) == 2 * count, "one action per clock"
    return table


def _clocks(
    pp_rank: int, pp_size: int, vpp_size: int, count: int, first_group: int
) -> tuple[list[int], list[int]]:
    """Clocks of a rank's `count` forward and `count` backward passes, each in order."""
    if vpp_size == 1:
        # The i-th forward follows its predecessor stage by one clock. A rank fills the pipeline up
        # to the last stage, then waits for the first gradient and goes on at every second clock;
        # the backward passes take the others.
        in_flight = pp_size - pp_rank
        forward = [pp_rank + (i if i < in_flight else 2 * i) for i in range(count)]
        backward = [pp_size + in_flight - 1 + 2 * i for i in range(count)]
    else:
        # A forward pass at every even clock, a backward pass at every odd one, each at least 2
        # clocks after its predecessor virtual stage: the first stage takes up the next chunk a
        # group later, and no group is smaller than the pipeline. The communication of a forward
        # pass thus overlaps with a backward pass, and vice versa.
        forward = [2 * (pp_rank + i) for i in range(count)]
        first_gradient = (vpp_size - 1) * first_group + 2 * (pp_size - 1) - pp_rank
        backward = [2 * (first_gradient + i) + 1 for i in range(count)]
    return forward, backward


def _forward_order(vpp_size: int, num_microbatches: int, group_size: int) -> list[tuple[int, int]]:
    """(chunk, microbatch): a group of microbatches passes chunk 0, then chunk 1, and so on; then the next group."""
    return [
        (chunk, microbatch)
        for start in range(0, num_microbatches, group_size)
        for chunk in range(vpp_size)
        for microbatch in range(start, min(start + group_size, num_microbatches))
    ]


def _steady_clocks(actions: dict[int, Action]) -> range:
    """From the forward pass that the first backward pass follows to the backward pass that follows
    the last forward.
    """
    forward = [clock for clock, action in actions.items() if action.kind == "forward"]
    backward = [clock for clock, action in actions.items() if action.kind == "backward"]
    if not backward:  # forward only: one phase
        return range(forward[-1] + 1)
    first_pair = max(clock for clock in forward if clock < backward[0])
    last_pair = min(clock for clock in backward if clock > forward[-1])
    return range(first_pair, last_pair + 1)


def _check_sizes(
    pp_rank: int, pp_size: int, vpp_size: int, num_microbatches: int, group_size: int
) -> None:
    """Raise ValueError for sizes that no schedule exists for, and say which would do."""
    if min(pp_size, vpp_size, num_microbatches) < 1:
        raise ValueError(
            f"pipeline size {pp_size}, virtual pipeline size {vpp_size} and number of microbatches {num_microbatches} "
            "must be positive"
        )
    if not 0 <= pp_rank < pp_size:
        raise ValueError(f"pipeline rank {pp_rank} is not part of a pipeline of {pp_size} stages")
    if vpp_size > 1 and pp_size == 1:
        raise ValueError(
            f"the interleaved schedule ({vpp_size} chunks per stage) needs more than one pipeline stage"
        )
    if vpp_size > 1:
        check_group_size(pp_size, group_size)
    if vpp_size > 1 and not groups_fit(num_microbatches, pp_size, group_size):
        raise ValueError(
            f"the interleaved schedule ({vpp_size} chunks per stage) runs microbatches in groups of {group_size}, of "
            f"which the last may be smaller, but not than the {pp_size} stages: {num_microbatches} microbatches leave "
            f"{num_microbatches % group_size}; change --global-batch-size, --micro-batch-size or "
            "--microbatch-group-size-per-virtual-pipeline-stage, or use one chunk per stage"
        )

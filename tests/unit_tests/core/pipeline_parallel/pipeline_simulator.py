"""Discrete-event simulation of ranks that run ticks, which detects deadlocks and mismatched
messages and measures the makespan.

A message is complete when both ends are posted. Between two ranks, the n-th send is matched with
the n-th receive (NCCL has no tags); the simulation fails if their actions differ.
"""

from collections import defaultdict, deque
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Literal

from megatron.core.pipeline_parallel import Tick

# rendezvous: a send completes when it is received, and a rank waits for each exchange at once.
# overlap:    like rendezvous, but a rank waits when it needs the input, and before it posts the
#             next exchange, as the executor does.
# buffered:   a send completes at once (small messages), and a rank waits only for its inputs.
Mode = Literal["rendezvous", "overlap", "buffered"]


class Deadlock(Exception):
    pass


@dataclass
class Post:
    """One end of a message; `done` is the time at which it completes."""

    label: tuple
    time: float
    done: float | None = None


@dataclass
class Network:
    mode: Mode
    sends: dict[tuple[int, int], deque[Post]] = field(default_factory=lambda: defaultdict(deque))
    receives: dict[tuple[int, int], deque[Post]] = field(default_factory=lambda: defaultdict(deque))

    def post(self, rank: int, tick: Tick, time: float) -> tuple[list[Post], Post | None]:
        """Return all posts of the tick's exchange, and that of its receive."""
        posts = []
        received = None
        if tick.send:
            pair = (rank, tick.send.peer)
            sent = Post((*pair, tick.send.input_of), time)
            if self.mode == "buffered":
                sent.done = time
            posts.append(sent)
            self.sends[pair].append(sent)
            self._match(pair)

        if tick.receive:
            pair = (tick.receive.peer, rank)
            received = Post((*pair, tick.receive.input_of), time)
            posts.append(received)
            self.receives[pair].append(received)
            self._match(pair)
        return posts, received

    def _match(self, pair: tuple[int, int]) -> None:
        while self.sends[pair] and self.receives[pair]:
            send = self.sends[pair].popleft()
            receive = self.receives[pair].popleft()
            assert send.label == receive.label, (
                f"{send.label} is sent where {receive.label} is expected"
            )
            receive.done = max(send.time, receive.time)
            if send.done is None:
                send.done = receive.done


@dataclass
class Trace:
    """Actions and exchanges of one rank."""

    end: float = 0.0
    peak_unused_inputs: int = 0


def run_rank(
    rank: int, ticks: list[Tick], network: Network, seconds: dict[str, float], trace: Trace
) -> Generator[list[Post], float, None]:
    """Yield the posts to wait for; receive the time at which the last of them completed."""
    inputs: dict = {}
    previous: list[Post] = []
    now = 0.0
    for tick in ticks:
        if tick.action:
            if tick.action in inputs:
                now = max(now, (yield [inputs.pop(tick.action)]))
            now += seconds[tick.action.kind]
        if network.mode == "overlap":
            now = max(now, (yield previous))
        previous, received = network.post(rank, tick, now)
        if tick.receive:
            inputs[tick.receive.input_of] = received
            trace.peak_unused_inputs = max(trace.peak_unused_inputs, len(inputs))
        if network.mode == "rendezvous":
            now = max(now, (yield previous))

    trace.end = max(now, (yield previous))
    assert not inputs, f"rank {rank} received what it never used: {list(inputs)}"


def simulate(
    pipeline: list[list[Tick]], mode: Mode, forward: float = 1.0, backward: float = 2.0
) -> list[Trace]:
    """Run all ranks; raises Deadlock if a rank waits forever."""
    network = Network(mode)
    seconds = {"forward": forward, "backward": backward}
    traces = [Trace() for _ in pipeline]
    running = {}
    waiting = {}
    for rank, ticks in enumerate(pipeline):
        running[rank] = run_rank(rank, ticks, network, seconds, traces[rank])
        waiting[rank] = next(running[rank])

    while running:
        has_progress = False
        for rank in list(running):
            while rank in running and not list_incomplete(waiting[rank]):
                has_progress = True
                times = [post.done or 0.0 for post in waiting[rank]]
                try:
                    waiting[rank] = running[rank].send(max(times, default=0.0))
                except StopIteration:
                    del running[rank]
        if not has_progress:
            raise Deadlock({rank: list_incomplete(waiting[rank]) for rank in running})
    return traces


def list_incomplete(posts: list[Post]) -> list[tuple]:
    """Return the labels of the posts that are not complete."""
    return [post.label for post in posts if post.done is None]

"""Profile of a training step: time per kind of operator, and time without any operator.

Runs `pretrain_gpt.py --profile` on the model of `training.py`; phases are those of its timers. The
profiler adds time around every operator, so the share without an operator (Python and the autograd
engine) is an upper bound.

    python benchmarks/step_profile.py                # bf16
    python benchmarks/step_profile.py --dtype fp32 --steps 6
"""

import argparse
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scratch import create_scratch_directory
from training import SKIP, train_ours

Event = dict[str, Any]  # of the trace: ts, dur in microseconds

KINDS = {  # substring of an operator's name -> its kind
    "scaled_dot_product": "attention",
    "adam": "optimizer",
    "mm": "matrix products",
    "copy_": "copies",
    "clone": "copies",
    "cat": "copies",
}


def find_kind(name: str) -> str:
    """Return the kind of an operator by its name."""
    for part, kind in KINDS.items():
        if part in name:
            return kind
    return "other operators"


@dataclass
class Operators:
    """Operators of one thread."""

    # (start, end) of operators that no other operator has called.
    outermost: list[tuple[float, float]]
    # Name with shapes, and time without that of called operators.
    own_times: list[tuple[str, float]]


def name_with_shapes(event: Event) -> str:
    """Return the name of an operator with the shapes of its inputs that have one."""
    shapes = event.get("args", {}).get("Input Dims", [])
    shapes = list(filter(None, shapes))
    return f"{event['name']} {shapes}"


def order_by_start(event: Event) -> tuple[float, float]:
    """Return a sort key: of operators that start together, the caller comes first."""
    return event["ts"], -event["dur"]


def split_nested_operators(events: Iterable[Event]) -> Operators:
    """Subtract from each operator of one thread the time of the operators that it calls."""
    operators = Operators([], [])
    own_times = operators.own_times
    open_calls: list[tuple[float, int]] = []  # (end, index in `own_times`)
    for event in sorted(events, key=order_by_start):
        start = event["ts"]
        duration = event["dur"]
        end = start + duration
        while open_calls and open_calls[-1][0] <= start:
            open_calls.pop()
        if open_calls:
            # The time of this operator is not the caller's own.
            _, caller = open_calls[-1]
            name, time = own_times[caller]
            own_times[caller] = (name, time - duration)
        else:
            operators.outermost.append((start, end))
        open_calls.append((end, len(own_times)))
        own_times.append((name_with_shapes(event), duration))
    return operators


def measure_union(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the total length covered by the intervals."""
    total = 0.0
    reached = float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


@dataclass
class Trace:
    """Contents of a trace file."""

    duration: float  # microseconds from the first phase to the last
    threads: list[list[Event]]  # the operators of each thread


def read_trace(path: Path) -> Trace:
    """Read the phases and operators of a trace."""
    starts: list[float] = []
    ends: list[float] = []
    threads: dict[int, list[Event]] = defaultdict(list)
    content = json.loads(path.read_text())
    for event in content["traceEvents"]:
        if event.get("ph") != "X":
            continue  # not a span of time
        if event["cat"] == "user_annotation":  # a phase
            start = event["ts"]
            starts.append(start)
            ends.append(start + event["dur"])
        elif event["cat"] == "cpu_op":
            threads[event["tid"]].append(event)
    duration = max(ends) - min(starts)
    return Trace(duration, list(threads.values()))


class Profile:
    """Time of operators and of their kinds, over all threads."""

    def __init__(self, trace: Trace) -> None:
        self.duration = trace.duration
        self.kinds: Counter[str] = Counter()
        self.operators: Counter[str] = Counter()
        intervals: list[tuple[float, float]] = []
        for events in trace.threads:
            operators = split_nested_operators(events)
            intervals += operators.outermost
            for name, time in operators.own_times:
                kind = find_kind(name)
                self.kinds[kind] += time
                self.operators[name] += time
        self.kinds["no operator"] = trace.duration - measure_union(intervals)

    def print(self, least: float) -> None:
        """Print all kinds, and the operators that take at least `least` per cent."""
        for name, time in self.kinds.most_common():
            share = 100 * time / self.duration
            print(f"  {share:5.1f} %  {name}")
        print("operators and the shapes of their inputs:")
        for name, time in self.operators.most_common():
            share = 100 * time / self.duration
            if share >= least:
                print(f"  {share:5.1f} %  {name[:140]}")


def parse_arguments() -> argparse.Namespace:
    """Return the flags of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="bf16", choices=["fp32", "bf16"])
    parser.add_argument("--steps", type=int, default=4, help="profiled steps, after the warm-up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--least",
        type=float,
        default=0.5,
        help="per cent of a step that an operator must take to be listed",
    )
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    first = SKIP + 1
    end = first + args.steps
    with create_scratch_directory("profile") as directory:
        flags = f"""
            --profile
            --profile-step-start {first}
            --profile-step-end {end}
            --profile-dir {directory}
        """
        # As many steps follow without the profiler.
        times = train_ours(args.dtype, 2 * end, args.threads, extra=tuple(flags.split()))
        (path,) = directory.glob("*.json")
        profile = Profile(read_trace(path))

    plain = statistics.median(times[end:])
    profiled = profile.duration / args.steps / 1e3
    print(
        f"{args.dtype}: {plain:.0f} ms/step, {profiled:.0f} while profiled; shares of the latter:"
    )
    profile.print(args.least)


if __name__ == "__main__":
    main()

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

from scratch import create_scratch_directory
from training import SKIP, train_ours

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
class Call:
    """One call of an operator; times are in microseconds."""

    name: str
    shapes: list[list[int]]  # of the inputs that have one
    start: float
    duration: float

    @property
    def end(self) -> float:
        return self.start + self.duration

    @property
    def title(self) -> str:
        """Name and shapes, by which calls are summed."""
        return f"{self.name} {self.shapes}"

    def order(self) -> tuple[float, float]:
        """Return a sort key: of calls that start together, the caller comes first."""
        return self.start, -self.duration


@dataclass
class Operators:
    """Calls of one thread, and their times without the calls that they make."""

    outermost: list[Call]  # that no other operator has made
    own_times: list[tuple[Call, float]]


def split_nested_calls(calls: Iterable[Call]) -> Operators:
    """Subtract from each call of one thread the time of the calls that it makes."""
    operators = Operators([], [])
    own_times = operators.own_times
    open_calls: list[int] = []  # indices in `own_times`
    for call in sorted(calls, key=Call.order):
        # Close the calls that have ended.
        while open_calls:
            last, _ = own_times[open_calls[-1]]
            if last.end > call.start:
                break
            open_calls.pop()

        # The time of this call is not the caller's own.
        if open_calls:
            index = open_calls[-1]
            caller, time = own_times[index]
            own_times[index] = (caller, time - call.duration)
        else:
            operators.outermost.append(call)

        open_calls.append(len(own_times))
        own_times.append((call, call.duration))
    return operators


def measure_union(calls: Iterable[Call]) -> float:
    """Return the total time in which at least one of the calls was running."""
    total = 0.0
    reached = float("-inf")
    for call in sorted(calls, key=Call.order):
        start = max(call.start, reached)
        total += max(0.0, call.end - start)
        reached = max(reached, call.end)
    return total


@dataclass
class Trace:
    """Contents of a trace file."""

    duration: float  # microseconds from the first phase to the last
    threads: list[list[Call]]


def read_trace(path: Path) -> Trace:
    """Read the phases and the calls of each thread."""
    phases: list[Call] = []
    threads: dict[int, list[Call]] = defaultdict(list)
    content = json.loads(path.read_text())
    for event in content["traceEvents"]:
        if event.get("ph") != "X":
            continue  # not a span of time

        shapes = event.get("args", {}).get("Input Dims", [])
        shapes = list(filter(None, shapes))
        call = Call(event["name"], shapes, event["ts"], event["dur"])
        if event["cat"] == "user_annotation":
            phases.append(call)
        elif event["cat"] == "cpu_op":
            thread = event["tid"]
            threads[thread].append(call)

    start = min(phase.start for phase in phases)
    end = max(phase.end for phase in phases)
    return Trace(end - start, list(threads.values()))


class Profile:
    """Time of operators and of their kinds, over all threads."""

    def __init__(self, trace: Trace) -> None:
        self.duration = trace.duration
        self.kinds: Counter[str] = Counter()
        self.operators: Counter[str] = Counter()
        outermost: list[Call] = []
        for calls in trace.threads:
            operators = split_nested_calls(calls)
            outermost += operators.outermost
            for call, time in operators.own_times:
                kind = find_kind(call.name)
                self.kinds[kind] += time
                self.operators[call.title] += time
        idle = trace.duration - measure_union(outermost)
        self.kinds["no operator"] = idle

    def print(self, least: float) -> None:
        """Print all kinds, and the operators that take at least `least` per cent."""
        for name, time in self.kinds.most_common():
            self._print_share(name, time)
        print("operators and the shapes of their inputs:")
        for name, time in self.operators.most_common():
            if 100 * time / self.duration >= least:
                self._print_share(name[:140], time)

    def _print_share(self, name: str, time: float) -> None:
        share = 100 * time / self.duration
        print(f"  {share:5.1f} %  {name}")


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

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
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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


def split_nested_operators(
    events: Iterable[Event],
) -> tuple[list[tuple[float, float]], list[tuple[str, float]]]:
    """Return the intervals of the outermost operators of one thread, and (name with shapes,
    exclusive time) of each operator.
    """
    outermost = []
    own: list[tuple[str, float]] = []
    open_calls: list[tuple[float, int]] = []  # (end, index in `own`)
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        start = event["ts"]
        end = event["ts"] + event["dur"]
        while open_calls and open_calls[-1][0] <= start:
            open_calls.pop()
        if open_calls:
            # The time of this operator is not the caller's own.
            _, caller = open_calls[-1]
            name, time = own[caller]
            own[caller] = (name, time - event["dur"])
        else:
            outermost.append((start, end))
        open_calls.append((end, len(own)))
        shapes = [shape for shape in event.get("args", {}).get("Input Dims", []) if shape]
        own.append((f"{event['name']} {shapes}", event["dur"]))
    return outermost, own


def measure_union(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the total length covered by the intervals."""
    total = 0.0
    reached = float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def read_trace(path: Path) -> tuple[float, list[list[Event]]]:
    """Return the microseconds from the first phase to the last, and the operators of each
    thread.
    """
    starts: list[float] = []
    ends: list[float] = []
    threads: dict[int, list[Event]] = defaultdict(list)
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("ph") != "X":
            continue  # not a span of time
        if event["cat"] == "user_annotation":  # a phase
            starts.append(event["ts"])
            ends.append(event["ts"] + event["dur"])
        elif event["cat"] == "cpu_op":
            threads[event["tid"]].append(event)
    return max(ends) - min(starts), list(threads.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="bf16", choices=["fp32", "bf16"])
    parser.add_argument(
        "--steps", type=int, default=4, help="how many are profiled, after the warm-up"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--least",
        type=float,
        default=0.5,
        help="per cent of a step that an operator must take to be listed",
    )
    args = parser.parse_args()

    first = SKIP + 1
    end = SKIP + args.steps + 1
    with tempfile.TemporaryDirectory() as directory:
        flags = f"--profile --profile-step-start {first} --profile-step-end {end} --profile-dir"
        extra = (*flags.split(), directory)
        times = train_ours(args.dtype, 2 * end, args.threads, extra=extra)
        whole, threads = read_trace(next(Path(directory).glob("*.json")))

    # Sum the exclusive times of all threads.
    all_intervals: list[tuple[float, float]] = []
    kinds: Counter[str] = Counter()
    operators: Counter[str] = Counter()
    for events in threads:
        intervals, own_times = split_nested_operators(events)
        all_intervals += intervals
        for name, time in own_times:
            kinds[find_kind(name)] += time
            operators[name] += time
    kinds["no operator"] = whole - measure_union(all_intervals)
    plain = statistics.median(times[end:])
    print(
        f"{args.dtype}: {plain:.0f} ms/step, {whole / args.steps / 1e3:.0f} while profiled; shares "
        "of the latter:"
    )
    for name, time in kinds.most_common():
        print(f"  {100 * time / whole:5.1f} %  {name}")
    print("operators and the shapes of their inputs:")
    for name, time in operators.most_common():
        if 100 * time / whole >= args.least:
            print(f"  {100 * time / whole:5.1f} %  {name[:140]}")


if __name__ == "__main__":
    main()

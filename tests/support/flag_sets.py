"""Real command lines for Megatron-LM: count which ones start here, and list the obstacles of the
others.

    python -m tests.support.flag_sets FILE.jsonl        FILE: one {"id", "group", "argv", ...} per line

A line counts as "parses" if `parse_args` returns a configuration for the minimum number of ranks.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron.training.config.parsing import parse_args

OUTCOMES = ("parses", "refused", "unknown flag", "crash")
_AXES = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
)


def read(path: Path) -> list[dict[str, Any]]:
    rows = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(row) for row in rows]


def smallest_world(argv: Sequence[str]) -> int:
    """Return the number of ranks of one model replica."""
    size_of = dict(zip(argv, argv[1:], strict=False))
    tp, pp, cp = (int(size_of.get(axis, 1)) for axis in _AXES)
    ep = int(size_of.get("--expert-model-parallel-size", 1))
    etp = int(size_of.get("--expert-tensor-parallel-size", tp))
    return math.lcm(tp * pp * cp, etp * ep * pp)


def outcome(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Return one of OUTCOMES and the lines of the error."""
    try:
        parse_args(argv, smallest_world(argv))
    except ValueError as error:
        problems = str(error).splitlines()
        has_unknown = any(problem.startswith("unknown flag") for problem in problems)
        return "unknown flag" if has_unknown else "refused", problems
    except Exception as error:  # counted, because it must not happen
        return "crash", [repr(error)]
    return "parses", []


def report(sets: Iterable[dict[str, Any]]) -> str:
    """Print outcomes by group, then the most frequent obstacles."""
    groups: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: Counter[str] = Counter()
    for row in sets:
        group = row["group"]
        result, problems = outcome(row["argv"])
        groups[group][result] += 1
        for problem in dict.fromkeys(problems):
            reasons[f"{group:14}  {problem[:150]}"] += 1

    header = "".join(f"{name:>14}" for name in OUTCOMES)
    table = [f"{'':16}{header}"]
    for group, counts in sorted(groups.items()):
        total = counts.total()
        cells = ""
        for name in OUTCOMES:
            percentage = 100 * counts[name] / total
            cells += f"{counts[name]:>7} {percentage:4.0f} %"
        table.append(f"{group:16}{cells}  of {total}")

    table.append("")
    for reason, count in reasons.most_common(60):
        table.append(f"{count:5}  {reason}")
    return "\n".join(table)


if __name__ == "__main__":
    print(report(read(Path(sys.argv[1]))))

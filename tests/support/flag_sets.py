"""Real command lines for Megatron-LM: count which ones start here, and list the obstacles of the
others.

    python -m tests.support.flag_sets FILE.jsonl        FILE: one {"id", "group", "argv", ...} per line

A line counts as "parses" if `parse_args` returns a configuration for the minimum number of ranks.
"""

from __future__ import annotations

import collections
import json
import math
import sys
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
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def smallest_world(argv: Sequence[str]) -> int:
    """Return the number of ranks of one model replica."""
    sizes = dict(zip(argv, argv[1:], strict=False))
    world = 1
    for axis in _AXES:
        world *= int(sizes.get(axis, 1))
    experts = int(
        sizes.get("--expert-tensor-parallel-size", sizes.get("--tensor-model-parallel-size", 1))
    )
    for axis in ("--expert-model-parallel-size", "--pipeline-model-parallel-size"):
        experts *= int(sizes.get(axis, 1))
    return math.lcm(world, experts)


def outcome(argv: Sequence[str]) -> tuple[str, list[str]]:
    """Return one of OUTCOMES and the lines of the error."""
    try:
        parse_args(argv, smallest_world(argv))
    except ValueError as error:
        lines = str(error).splitlines()
        return "unknown flag" if any(
            line.startswith("unknown flag") for line in lines
        ) else "refused", lines
    except Exception as error:  # counted, because it must not happen
        return "crash", [repr(error)]
    return "parses", []


def report(sets: Iterable[dict[str, Any]]) -> str:
    """Print outcomes by group, then the most frequent obstacles."""
    groups: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    reasons: collections.Counter[str] = collections.Counter()
    for row in sets:
        result, lines = outcome(row["argv"])
        groups[row["group"]][result] += 1
        reasons.update(f"{row['group']:14}  {line[:150]}" for line in dict.fromkeys(lines))
    table = [f"{'':16}" + "".join(f"{name:>14}" for name in OUTCOMES)]
    for group, counts in sorted(groups.items()):
        total = counts.total()
        cells = "".join(
            f"{counts[name]:>7} {100 * counts[name] / total:4.0f} %" for name in OUTCOMES
        )
        table.append(f"{group:16}{cells}  of {total}")
    return "\n".join(
        [*table, "", *(f"{count:5}  {reason}" for reason, count in reasons.most_common(60))]
    )


if __name__ == "__main__":
    print(report(read(Path(sys.argv[1]))))

"""Print how far each feature is from the run of one process, on each axis of parallelism.

    make proof

The table has the largest differences of all models that contain the feature, relative to the values
of one process: of losses and gradient norms / of an element of a gradient, update or state of the
optimizer.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping
from time import monotonic

from tests.functional_tests.test_layout_equivalence import (
    LOSS_TOLERANCE,
    STATE_TOLERANCE,
    Difference,
    compare,
    get_seeds,
    is_applicable,
    train_case,
    train_one_process,
)
from tests.support.distributed import DistributedPool
from tests.support.layout_cases import FEATURES, LAYOUTS, ONE_AXIS, flags_of

Cells = Mapping[tuple[str, str], list[Difference]]


def measure() -> Cells:
    """Run every model at every layout of one axis."""
    cells: dict[tuple[str, str], list[Difference]] = defaultdict(list)
    pool = DistributedPool(max_workers=2)
    try:
        for model in get_seeds():
            for name in ONE_AXIS:
                if not is_applicable(model, name):
                    continue
                layout = LAYOUTS[name]
                flags = flags_of(model)
                curves = pool.run(train_case, layout.processes, f"{flags} {layout.flags}")
                difference = compare(curves, train_one_process(pool, flags))
                for value in zip(FEATURES, model, strict=True):
                    cells[" ".join(value), name].append(difference)
    finally:
        pool.close()
    return cells


def format_table(cells: Cells) -> str:
    """Return a Markdown table with a row per feature and a column per axis."""
    rows = [["feature", *ONE_AXIS], ["---"] * (1 + len(ONE_AXIS))]
    for group, values in FEATURES.items():
        for name in values:
            row = f"{group} {name}"
            rows.append(
                [row.replace("_", " "), *(_format(cells.get((row, axis), [])) for axis in ONE_AXIS)]
            )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _format(differences: list[Difference]) -> str:
    if not differences:
        return ""
    curves = max(difference.curves for difference in differences) * LOSS_TOLERANCE
    states = max(difference.states for difference in differences) * STATE_TOLERANCE
    return f"{curves:.0e} / {states:.0e}"


def main() -> int:
    """Print the table; return the exit status."""
    start = monotonic()
    cells = measure()
    print(format_table(cells))
    worst = [max(d.curves, d.states) for differences in cells.values() for d in differences]
    num_runs = sum(len(differences) for differences in cells.values()) // len(FEATURES)
    print(
        f"\n{num_runs} runs in {monotonic() - start:.0f} s; worst {max(worst):.3f} of the tolerance"
    )
    return int(max(worst) >= 1)


if __name__ == "__main__":
    sys.exit(main())

"""Save intervals that lose the least time to saves and failures, given the costs of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from megatron.training.reporting.recorded_launches import RecordedLaunch, compute_goodput

LOST_NODES_FACTOR = 10  # default MTBF of losing a node with its replicas, in MTBFs of any failure


def find_best_interval(cost: float, mtbf: float) -> float:
    """Return the seconds of training between saves that lose the least time.

    A save costs `cost` seconds and the mean time between failures is `mtbf` seconds (J. T. Daly, A
    higher order estimate of the optimum checkpoint interval, 2006).
    """
    if cost >= 2 * mtbf:
        return mtbf
    # The first factor is Young's interval of 1974, the second one Daly's correction of it.
    first_order = math.sqrt(2 * cost * mtbf)
    ratio = cost / (2 * mtbf)
    correction = 1 + math.sqrt(ratio) / 3 + ratio / 9
    return first_order * correction - cost


def propose_save_intervals(
    launches: Sequence[RecordedLaunch],
    mtbf_hours: Sequence[float],
) -> list[str]:
    """Return a line for each tier that saved in these launches, with its best interval.

    The cost of a save is the time that it blocked training; the next one cannot start before it
    ends.
    """
    # The mean time of an iteration, and of a restart.
    num_iterations = 0
    seconds = 0.0
    for launch in launches:
        for row in launch.intervals:
            num_iterations += row["iterations"]
            seconds += row["seconds"]
    if not num_iterations:
        raise ValueError("--measured: this run has recorded no iterations")
    iteration_seconds = seconds / num_iterations
    spent = compute_goodput(launches)
    startup_seconds = spent["loading"] + spent["starting"]
    restart_seconds = startup_seconds / len(launches)

    # Local checkpoints survive most failures; then the persistent tier is only for lost nodes.
    local_saves = _find_save_times(launches, "local-")
    persistent_saves = _find_save_times(launches, "")
    local_hours = mtbf_hours[0]
    persistent_hours = mtbf_hours[0]
    if local_saves:
        persistent_hours = LOST_NODES_FACTOR * mtbf_hours[0]
        if len(mtbf_hours) > 1:
            persistent_hours = mtbf_hours[1]

    # One line per tier.
    tiers = (
        ("--non-persistent-save-interval", local_saves, local_hours),
        ("--save-interval", persistent_saves, persistent_hours),
    )
    proposals = []
    for flag_name, saves, hours in tiers:
        if not saves:
            continue
        blocked = median(blocking for blocking, _ in saves)
        total = median(total for _, total in saves)
        best_interval = find_best_interval(blocked, 3600 * hours)
        interval = max(best_interval, total)  # saves do not overlap
        num_between = 1
        if iteration_seconds > 0:
            num_iterations = round(interval / iteration_seconds)
            num_between = max(1, num_iterations)
        proposals.append(
            f"{flag_name} {num_between}: every {interval:.0f} s, for a failure every {hours:g} h; "
            f"a save blocks {blocked:.3f} s and takes {total:.1f} s, an iteration "
            f"{iteration_seconds:.3f} s, a restart {restart_seconds:.0f} s"
        )
    return proposals


def _find_save_times(launches: Sequence[RecordedLaunch], tier: str) -> list[tuple[float, float]]:
    """Return the (blocking, total) seconds of each save of a tier, by the prefix of its metrics."""
    times = []
    for launch in launches:
        for row in launch.points:
            values = row["values"]
            blocking = values.get(f"{tier}save-blocking-time")
            total = values.get(f"{tier}save-total-time")
            if blocking is None or total is None:
                continue  # a point of an evaluation, or of the other tier
            # Clocks of damaged or edited records may have run backward.
            times.append((max(0.0, blocking), max(0.0, total)))
    return times

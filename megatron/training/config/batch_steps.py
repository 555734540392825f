"""Steps of the global batch size: --rampup-batch-size and --step-batch-size-schedule."""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron.training.config.batch_schedule import Step

_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def make_rampup_steps(rampup_batch_size: Sequence[int], global_batch_size: int) -> tuple[Step, ...]:
    """Return the steps of --rampup-batch-size START INCREMENT SAMPLES: equal steps over SAMPLES
    samples. Raises ValueError if they do not lead to the global batch size.
    """
    name = f"--rampup-batch-size {' '.join(map(str, rampup_batch_size))}"
    if len(rampup_batch_size) != 3:
        raise ValueError(f"{name}: requires START INCREMENT SAMPLES")
    start, increment, samples = rampup_batch_size
    if start < 1 or increment < 1 or samples < 0:
        raise ValueError(f"{name}: START and INCREMENT must be positive, SAMPLES not negative")
    if start > global_batch_size:
        raise ValueError(f"{name}: START is larger than --global-batch-size {global_batch_size}")
    # The last step must be the global batch size itself.
    num_steps, remainder = divmod(global_batch_size - start, increment)
    if remainder:
        raise ValueError(
            f"{name}: steps of {increment} do not lead from {start} to --global-batch-size "
            f"{global_batch_size}"
        )
    if samples == 0 or num_steps == 0:
        return ((0, global_batch_size),)
    steps = []
    for step in range(num_steps + 1):
        # A step begins with the first iteration that starts at or after its share of SAMPLES.
        begin = -(-step * samples // num_steps)  # rounded up
        size = start + step * increment
        steps.append((begin, size))
    return tuple(steps)


def make_token_steps(schedule: str, seq_length: int) -> tuple[Step, ...]:
    """Return the steps of --step-batch-size-schedule, e.g. 0:384 1.5B:768, which counts tokens.
    Raises ValueError if it is malformed.
    """
    steps = []
    for entry in schedule.replace(",", " ").split():
        match = re.fullmatch(r"([\d.]+)([KMBT]?):(\d+)", entry.upper())
        if match is None:
            raise ValueError(
                f"--step-batch-size-schedule: {entry!r} is not TOKENS:SIZE, e.g. 0:384 or 1.5B:768"
            )
        count, unit, size = match.groups()
        # The schedule counts tokens, the run counts samples.
        factor = _UNITS.get(unit, 1)
        tokens = int(float(count) * factor)
        steps.append((tokens // seq_length, int(size)))

    # A step ends where the next one begins, so they must be in order.
    starts = [start for start, _ in steps]
    is_ordered = starts == sorted(set(starts))
    if not steps or starts[0] != 0 or not is_ordered:
        raise ValueError(
            f"--step-batch-size-schedule {schedule}: the first step must begin at 0, each other "
            "step after the one before it"
        )
    return tuple(steps)

"""The line and the metrics of --goodput."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from megatron.training.reporting.console import report_line
from megatron.training.reporting.recorded_launches import measure_goodput
from megatron.training.reporting.run_record import RECORDS
from megatron.training.reporting.writers import Writer

logger = logging.getLogger(__name__)


def report_goodput(save: Path, writers: Sequence[Writer], iteration: int) -> None:
    """Report how the time of all launches was spent."""
    try:
        spent = measure_goodput(save)
    except (OSError, ValueError, LookupError) as error:
        # A gap in the record must not end the run.
        logger.warning(
            f"--goodput: the record in {save / RECORDS} cannot be read ({type(error).__name__}: "
            f"{error})"
        )
        return
    total = sum(spent.values()) or 1.0
    shares = [f"{name} {seconds:.1f} s" for name, seconds in spent.items()]
    message = (
        f"goodput {spent['training'] / total:.1%} of {total:.1f} s since the first launch: "
        f"{', '.join(shares)}"
    )
    report_line(f" > {message}", event="goodput", seconds=spent)
    points = {}
    for name, seconds in spent.items():
        points[f"goodput/{name.replace(' ', '-')}"] = seconds
    for writer in writers:
        writer.scalars(points, iteration)

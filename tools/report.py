"""One self-contained HTML page about a run: curves over all its starts, saves, goodput,
checkpoints.

    python tools/report.py RUN [--output RUN/report.html] [--verify]

RUN is a --save directory. What it shows comes from the record of the run (`run.json` and `runs/` in
it) and from the checkpoints themselves. --verify reads them whole and compares checksums. The page
loads nothing from elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from megatron.conversion.formats import find_problem, iteration_directory, saved_iterations
from megatron.core.dist_checkpointing import on_branch, read_lineage, read_tracker, verify
from megatron.core.dist_checkpointing.lineage import read_parent
from megatron.core.dist_checkpointing.verification import total_bytes
from megatron.core.durable_files import write_durably
from megatron.core.progress import ProgressBar
from megatron.training.reporting.run_record import (
    RecordedStart,
    goodput,
    kept_until,
    plain,
    read_record,
)

PAGE = Path(__file__).with_name("report_page.html")
MAX_POINTS = 1500  # of a curve; more are averaged

Row = dict[str, Any]


def saves_of(start: RecordedStart) -> list[Row]:
    """The points of its committed saves."""
    return [row for row in start.points if "save-total-time" in row["values"]]


def curve(start: RecordedStart, name: str) -> list[tuple[float, float]]:
    """(iteration, value) of the intervals, averaged where they are many."""
    points = [(row["iteration"], row[name]) for row in start.intervals if row.get(name) is not None]
    step = -(-len(points) // MAX_POINTS) or 1
    groups = [points[i : i + step] for i in range(0, len(points), step)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def checkpoints(root: Path, starts: Sequence[RecordedStart], check: bool) -> list[Row]:
    """Every checkpoint that is there: when, how large, by which start, where it descends from,
    whether whole.
    """
    writers = {
        row["iteration"]: index for index, start in enumerate(starts) for row in saves_of(start)
    }
    directories = {
        iteration: iteration_directory(root, iteration) for iteration in saved_iterations(root)
    }
    lineages = {iteration: read_lineage(directory) for iteration, directory in directories.items()}
    head = None
    with contextlib.suppress(ValueError):  # a garbled tracker is no reason not to report
        head = lineages.get(cast(int, read_tracker(root)))
    current = on_branch(lineages, head)
    rows = []
    for iteration, directory in directories.items():
        writer = writers.get(iteration)
        files = [path for path in directory.rglob("*") if path.is_file()]
        rows.append(
            {
                "iteration": iteration,
                "time": max((path.stat().st_mtime for path in files), default=None),
                "bytes": sum(path.stat().st_size for path in files),
                "files": len(files),
                "start": None if writer is None else writer + 1,
                "layout": None if writer is None else starts[writer].start["layout"],
                "parent": parent(directory, None if writer is None else starts[writer]),
                "branch": "current" if iteration in current else "left",
                "state": state(directory, check),
            }
        )
    return rows


def parent(directory: Path, writer: RecordedStart | None) -> str | None:
    """The checkpoint that it descends from, by name; the first of a directory, what its start began
    with.
    """
    before = read_parent(directory)
    if before is not None:
        return iteration_directory("", before).name
    if writer is None:
        return None
    return Path(writer.start["loaded"]).name if writer.start["loaded"] else "random weights"


def state(directory: Path, check: bool) -> str:
    if any(directory.glob("mp_rank_*")):
        return "legacy format"
    problem = find_problem(directory)
    if problem is not None:
        return problem
    if not check:
        return "complete"
    with ProgressBar(f"verify {directory.name}", total_bytes(directory)) as progress:
        problems = verify(directory, progress=progress.add).problems
    return f"DAMAGED: {problems[0]}" if problems else "verified"


def facts(root: Path, check: bool) -> Row:
    """Everything the page shows, as plain values. Raises ValueError where there is no record."""
    starts = read_record(root)
    if not starts:
        raise ValueError(
            f"{root}: no record of a run (runs/*.jsonl); give the --save directory of a run"
        )
    run = starts[-1].start
    return {
        "name": str(root),
        "summary": run["summary"],
        "command": run["command"],
        "train_iters": run["train_iters"],
        "goodput": goodput(starts),
        "starts": [
            start_facts(start, limit)
            for start, limit in zip(starts, kept_until(starts), strict=True)
        ],
        "checkpoints": checkpoints(root, starts, check),
    }


def start_facts(start: RecordedStart, limit: int) -> Row:
    points = [(row["iteration"], row["values"]) for row in start.points]
    return {
        "layout": start.start["layout"],
        "began": start.began,
        "ended": start.ended,
        "first": start.first,
        "last": start.last,
        "kept": min(limit, start.last),
        "loaded": start.start["loaded"],
        "reason": start.end["reason"] if start.end else "no end recorded: killed, or still running",
        "failed": start.end is None or start.end["failed"],
        "loss": curve(start, "lm_loss"),
        "throughput": curve(start, "tokens_per_second"),
        "validation": [
            (i, values["lm loss validation"])
            for i, values in points
            if "lm loss validation" in values
        ],
        "saves": [(row["iteration"], save_stages(row["values"])) for row in saves_of(start)],
    }


def save_stages(values: dict[str, float]) -> dict[str, float]:
    """Seconds of a save one after the other; `training waited` overlaps with them."""
    staged, written, total = (
        values[f"save-{name}-time"] for name in ("staging", "writing", "total")
    )
    return {
        "copy to host memory": staged,
        "write": max(0.0, written - staged),
        "commit": max(0.0, total - max(staged, written)),
        "training waited": values["save-blocking-time"],
        "bytes": values["save-gigabytes"] * 1e9,
    }


def page(values: Row) -> str:
    """The page with its data inside; `<` is escaped, so that no text can end the script."""
    data = json.dumps(plain(values)).replace("<", "\\u003c")
    return PAGE.read_text(encoding="utf-8").replace('"__DATA__"', data)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the --save directory of a run")
    parser.add_argument("--output", type=Path, help="HTML file to write (default: RUN/report.html)")
    parser.add_argument(
        "--verify", action="store_true", help="read every checkpoint and compare its checksums"
    )
    args = parser.parse_args(argv)
    output = args.output or args.run / "report.html"
    write_durably(output, page(facts(args.run, args.verify)).encode())
    print(f"report: {output}")
    return 0


def cli() -> None:
    """Run this process's command line; also the console entry point."""
    try:
        sys.exit(main(sys.argv[1:]))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    cli()

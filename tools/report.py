"""Write one self-contained HTML page about a run: verdict, curves over all launches, saves,
goodput, launches and checkpoints.

    python tools/report.py RUN [--output RUN/report.html] [--verify]
    python tools/report.py RUN --serve [PORT]
    python tools/report.py RUN OTHER --compare [--output report.html]

RUN is a --save directory. The data come from the record of the run (`runs/` in it) and from the
checkpoints themselves. --verify reads all checkpoints and compares their checksums. --serve shows
the page of a run in progress at http://127.0.0.1:PORT. --compare shows the curves of several runs
in one chart, and the flags that differ. The page needs no network.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.core.imports import program_imports
from megatron.core.terminal import INTERRUPTED, format_error


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="the --save directory of a run"
    )
    parser.add_argument("--output", type=Path, help="HTML file to write (default: RUN/report.html)")
    parser.add_argument(
        "--verify", action="store_true", help="read every checkpoint and compare its checksums"
    )
    parser.add_argument(
        "--compare", action="store_true", help="show the curves of several runs in one chart"
    )
    parser.add_argument(
        "--serve",
        type=int,
        nargs="?",
        const=8000,
        metavar="PORT",
        help="serve the page at 127.0.0.1, with new data at each visit, instead of writing a file",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.compare != (len(args.runs) > 1):
        parser.error("--compare and two or more runs go together")
    if args.serve is not None and args.output is not None:
        parser.error("--serve and --output are mutually exclusive")

    # Imported after parsing, because importing torch takes seconds.
    with program_imports():
        from megatron.commands.reporting import run

    run(args)
    return 0


def cli() -> None:
    """Run this process's command line; also the console entry point."""
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:  # the end of --serve
        sys.exit(INTERRUPTED)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {format_error(error)}")


if __name__ == "__main__":
    cli()

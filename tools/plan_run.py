"""Plan a run before it is started: memory, checkpoint bytes, pipeline bubble and traffic of every
stage.

    python tools/plan_run.py --world-size 8 --device-memory-gb 80 FLAGS OF pretrain_gpt.py
    LAUNCH="python tools/plan_run.py --world-size 8 --device-memory-gb 80" \\
        bash examples/one_node_8_gpus.sh

--search prints the fastest layouts that fit, as flags; so does a run that does not fit with any
single change. --goodput simulates a month with failures. --json prints the plan in bytes, for
programs; --plot PNG draws the schedule and the memory. The vocabulary size is --vocab-size, or that
of the tokenizer, whose files are needed only then. The exit status is 1 if the run does not fit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.core.flags import explain_error
from megatron.core.imports import program_imports
from megatron.core.terminal import INTERRUPTED, format_error

MTBF_HELP = (
    "propose save intervals for a failure every H hours, and one that loses a node with its "
    "replicas every H2 hours (default: 10 H), from the costs in --measured. With --goodput: these "
    "failures; H defaults to that of Llama 3 on as many GPUs"
)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of this tool, and the other words, which are flags of the run."""
    # Abbreviations would take flags of the run, such as --device.
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--world-size", type=int, default=1, help="number of ranks, one per GPU")
    parser.add_argument(
        "--device-memory-gb", type=float, help="memory of a GPU in GB of 10^9 bytes, as it is sold"
    )
    parser.add_argument(
        "--reserve-gb",
        type=float,
        default=4.0,
        help="memory for CUDA, NCCL and gaps of the allocator (default: 4)",
    )
    parser.add_argument("--mtbf-hours", type=float, nargs="+", metavar=("H", "H2"), help=MTBF_HELP)
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="RUN",
        help="the --save directory of a run, for --mtbf-hours",
    )
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="PNG",
        help="draw the pipeline schedule and the memory of stages",
    )
    add_search_options(parser)
    add_goodput_options(parser)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead; sizes in bytes"
    )
    # The scripts in examples/ pass the name of the program that they launch.
    words = [word for word in argv if not word.endswith("pretrain_gpt.py")]
    options, flags = parser.parse_known_args(words)
    if options.search is not None and (options.device_memory_gb is None or options.search < 1):
        raise ValueError("--search takes a positive number, and requires --device-memory-gb")
    hours = options.mtbf_hours
    if hours is not None and (min(hours) <= 0 or len(hours) > 2):
        raise ValueError(f"--mtbf-hours {hours}: give one or two positive numbers")
    if hours is not None and options.measured is None and not options.goodput:
        raise ValueError(
            "--mtbf-hours requires --measured, the --save directory of a run, or --goodput"
        )
    if options.goodput and (options.step_seconds is None or options.step_seconds <= 0):
        raise ValueError("--goodput requires --step-seconds, the time of an iteration")
    return options, flags


def add_search_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--search",
        type=int,
        nargs="?",
        const=5,
        metavar="N",
        help="print the N (default: 5) fastest layouts that fit: TP, PP, chunks per stage, CP, EP, "
        "micro-batch size and recomputation",
    )
    speeds: dict[str, tuple[float, str]] = {
        "--device-tflops": (400, "achieved TFLOP/s of matrix products on a GPU"),
        "--memory-gbps": (3350, "GB/s of the memory of a GPU"),
        "--node-gbps": (450, "GB/s that a GPU sends to others of its node"),
        "--network-gbps": (50, "GB/s that a GPU sends to other nodes"),
    }
    for name, (default, text) in speeds.items():
        parser.add_argument(
            name, type=float, default=default, help=f"for --search: {text} (default: {default})"
        )
    parser.add_argument(
        "--devices-per-node", type=int, default=8, help="for --search: GPUs of a node (default: 8)"
    )


def add_goodput_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--goodput",
        action="store_true",
        help="simulate 30 days with failures, and print the share of time that becomes progress "
        "and the save intervals with the largest share",
    )
    parser.add_argument(
        "--step-seconds", type=float, metavar="S", help="for --goodput: time of an iteration"
    )
    costs: dict[str, tuple[float, str]] = {
        "--storage-gbps": (50, "GB/s of the storage of --save, of all ranks together"),
        "--local-gbps": (1, "GB/s of a rank to the node's disk and its replicas"),
        "--blocking-seconds": (0.05, "time for which an asynchronous save blocks training"),
        "--restart-seconds": (180, "time from a failure until loading begins"),
    }
    for name, (default, text) in costs.items():
        parser.add_argument(
            name, type=float, default=default, help=f"for --goodput: {text} (default: {default})"
        )


def main(argv: Sequence[str]) -> int:
    options, flags = parse(argv)

    # Imported after parsing, because importing torch takes seconds.
    with program_imports():
        from megatron.commands.run_planning import run
        from pretrain_gpt import model_provider

    return run(options, flags, model_provider)


def cli() -> None:
    """Run this process's command line; also the console entry point."""
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except ValueError as error:
        sys.exit(f"error: {format_error(explain_error(error))}")


if __name__ == "__main__":
    cli()

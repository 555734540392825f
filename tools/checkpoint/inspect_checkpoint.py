"""Inspect checkpoints: contents, completeness, and differences between two of them.

    T=tools/checkpoint/inspect_checkpoint.py
    python $T show run/checkpoints                  contents, origin, files
    python $T verify run/checkpoints                files, coverage of every tensor, checksums
    python $T diff run/checkpoints other/model      any two formats, any two layouts
    python $T digest run/checkpoints                one digest per tensor, independent of the layout
    python $T plan run/checkpoints --tensor-model-parallel-size 4      can this layout load it?
    python $T repair run/checkpoints repaired       put back shifted optimizer state
    python $T choose --load run --save run ...      which checkpoint a launch would start from

PATH is an iteration's directory or a run's --save directory (then its newest checkpoint, or
--ckpt-step). One process, no GPU, no model; tensors are read a slice at a time. Exit status 1:
damaged (verify), different (diff), or not loadable at that layout (plan); 2: an error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from megatron.core.imports import program_imports
from megatron.core.object_path import path_of
from megatron.core.terminal import INTERRUPTED, format_error, print_line

COMMANDS = {
    "show": "print contents: iteration, layout that wrote it, tensors, files",
    "verify": "check whether the checkpoint is complete and undamaged",
    "diff": "compare two checkpoints, across formats and layouts",
    "plan": "check whether a layout can load it, and list the parts that each rank reads",
    "digest": "print a digest per tensor that is independent of layout and format",
    "choose": "print which checkpoint a launch with these flags would start from, and why",
    "repair": "write a copy with the optimizer state that Megatron-core stored shifted put back",
}


def _path_argument(text: str) -> Path:
    """Return `path_of(text)`, for argparse, which replaces the text of a ValueError by its own."""
    try:
        return path_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _print_error(error: BaseException | str) -> None:
    """Print `error: ` and the message to stderr."""
    message = format_error(error) if isinstance(error, BaseException) else error
    for message_line in f"error: {message}".split("\n"):
        print_line(message_line, file=sys.stderr)


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if name == "choose":
            command.usage = f"{command.prog} FLAGS-OF-THE-LAUNCH"
            continue
        command.add_argument(
            "path",
            type=_path_argument,
            metavar="PATH",
            help="an iteration's directory, or a --save directory",
        )
        ADD_ARGUMENTS[name](command)
        command.add_argument(
            "--ckpt-step", type=int, help="the iteration, if PATH is a --save directory"
        )
        command.add_argument(
            "--follow-links", action="store_true", help="follow links that leave the checkpoint"
        )
        command.add_argument("--json", action="store_true", help="print JSON")
        command.add_argument("--quiet", action="store_true", help="no progress bar")
    # The flags of a launch are those of another program.
    if argv[:1] == ["choose"] and argv[1:] not in (["-h"], ["--help"]):
        return argparse.Namespace(command="choose", flags=argv[1:], follow_links=False)
    return parser.parse_args(argv)


def add_keys(command: argparse.ArgumentParser) -> None:
    command.add_argument("--keys", default="*", help="only keys that match this pattern")


def add_plot(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--plot", type=Path, metavar="PNG", help="plot the contents of each file or rank"
    )


def add_show_arguments(command: argparse.ArgumentParser) -> None:
    add_keys(command)
    add_plot(command)
    command.add_argument(
        "--all",
        action="store_true",
        help="print all tensors and files, in stored order, not only the largest ones",
    )


def add_verify_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--workers", type=int, default=4, help="files read at once")
    command.add_argument(
        "--write-integrity-json",
        action="store_true",
        help="if intact, write integrity.json, which Megatron-LM's --verify-integrity requires",
    )


def add_diff_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "other", type=_path_argument, metavar="OTHER", help="checkpoint to compare with"
    )
    command.add_argument(
        "--atol", type=float, default=0.0, help="largest difference that counts as equal"
    )
    add_keys(command)


def add_plan_arguments(command: argparse.ArgumentParser) -> None:
    for axis in ("tensor-model", "pipeline-model", "virtual-pipeline-model", "data"):
        command.add_argument(f"--{axis}-parallel-size", type=int, default=1, metavar="N")
    for end in ("first", "last"):
        command.add_argument(f"--decoder-{end}-pipeline-num-layers", type=int, metavar="N")
    add_plot(command)


def add_repair_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "output",
        type=_path_argument,
        metavar="OUTPUT",
        help="directory of the result; must not exist",
    )


ADD_ARGUMENTS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "show": add_show_arguments,
    "verify": add_verify_arguments,
    "diff": add_diff_arguments,
    "plan": add_plan_arguments,
    "digest": add_keys,
    "repair": add_repair_arguments,
}


def main(argv: list[str]) -> int:
    """Run a command; return the exit status."""
    args = parse(argv)

    # Imported after parsing, because importing torch takes seconds.
    with program_imports():
        from megatron.commands.inspection.subcommands import run

    try:
        return run(args)
    except MemoryError:
        _print_error("out of memory; a damaged or hostile checkpoint can claim any size")
    except (ValueError, OSError) as error:
        _print_error(error)
    return 2


def cli() -> None:
    """Run this process's command line; also the console entry point."""
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    cli()

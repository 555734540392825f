"""Command line and report of the tools that write checkpoints.

This module does not import torch, so that errors in the command line are reported at once.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NoReturn, TypeVar

from megatron.conversion.options import (
    READ_FORMATS,
    SAVERS,
    EditOptions,
    ReadOptions,
    WriteOptions,
)
from megatron.core.flags import (
    CHANGED,
    FlagRule,
    FlagSection,
    explain_error,
    find_rule_problems,
    flag,
    list_shared_rules,
    raise_problems,
    spell_flag,
)
from megatron.core.object_path import path_of
from megatron.core.parallel_config import ParallelConfig
from megatron.core.terminal import format_error, print_line, print_text
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.arguments import FlagParser, build, flag_fields, parse_flags
from megatron.training.config.flag_help import format_help

if TYPE_CHECKING:
    from megatron.conversion.checkpoint_conversion import ConversionReport

STOPPING = (signal.SIGINT, signal.SIGTERM)
_MAX_LINES = 30  # about foreign tensors

_T = TypeVar("_T", bound=FlagSection)


@dataclass(frozen=True)
class ConvertOptions(FlagSection):
    """Source and target."""

    load_dir: Path | None = flag(None, parse=path_of)
    """A run's --save directory, an iteration, or a model."""
    loader: str = flag("auto", choices=("auto", *READ_FORMATS))
    """Format of the source."""
    ckpt_step: int | None = flag(None)
    """Iteration to convert. Default: the newest."""
    save_dir: Path | None = flag(None, parse=path_of)
    """Directory of the result; must not exist."""
    saver: str | None = flag(None, choices=SAVERS)
    """Format of the result."""
    overwrite: bool = flag(False)
    """Replace an existing --save-dir."""
    verify_target: bool = flag(False, "--verify-target", "--verify")
    """Read the result back and compare it with the source, tensor by tensor."""

    def find_problems(self) -> Iterator[str]:
        if None in (self.load_dir, self.save_dir, self.saver):
            yield "--load-dir, --save-dir and --saver are required (--help lists all flags)"


@dataclass(frozen=True)
class MergeOptions(FlagSection):
    """Inputs and target."""

    input: list[str] = flag(())
    """Checkpoints to merge, PATH or PATH:WEIGHT; each is a run's --save directory, an iteration, or
    a model.
    """
    average_last: int | None = flag(None, at_least=1)
    """Merge the last N complete checkpoints of the run in --input."""
    # --input may contain several runs, for which one step has no meaning.
    ckpt_step: int | None = flag(
        None,
        requires={"average_last": True},
        reason="to merge one iteration of a run, give its directory to --input",
    )
    """For --average-last: the last iteration to merge."""
    schedule: str | None = flag(None)
    """Weights of inputs that have none, in the order of --input, oldest first: uniform, linear or
    one_minus_sqrt (as after a learning rate decay of that shape), ema:DECAY.
    """
    normalize: bool = flag(False)
    """Divide the weights by their sum."""
    optimizer: str | None = flag(None, excludes={"no_optim": True})
    """Keep the optimizer state of one input: from=LAST, from=FIRST or from=N, the number of an
    input. Default: drop it.
    """
    save_dir: Path | None = flag(None, "--output", "--save-dir", parse=path_of)
    """Directory of the result; must not exist."""
    saver: str | None = flag(None, choices=SAVERS)
    """Format of the result. Default: as the last input."""
    overwrite: bool = flag(False)
    """Replace an existing --output."""
    verify_target: bool = flag(False, "--verify-target", "--verify")
    """Read the result back and compare it with the source, tensor by tensor."""

    RULES: ClassVar[tuple[FlagRule, ...]] = (
        FlagRule(
            {"optimizer": CHANGED},
            excludes={"weights": "ema"},
            reason="the optimizer state belongs to the model's own weights",
        ),
    )

    def find_problems(self) -> Iterator[str]:
        if not self.input or self.save_dir is None:
            yield "--input and --output are required (--help lists all flags)"


def parse_options(
    argv: Sequence[str], tool: type[_T], description: str
) -> tuple[_T, ReadOptions, WriteOptions]:
    """Return the options of a tool, and those of reading and writing, on the command line.

    Flags of training are the model's arguments, which the files lack. --help exits the program.
    """
    sections: dict[str, type] = {
        "files": tool,
        "reading": ReadOptions,
        "writing": WriteOptions,
        "changes of the model": EditOptions,
    }
    if "-h" in argv or "--help" in argv:
        print_text(f"{description}\n{format_help(sections)}")
        sys.exit(0)
    model = {"model": TransformerConfig, "layout": ParallelConfig}
    flag_values, ignored = parse_flags(FlagParser(sections | model), argv)
    if ignored:
        raise ValueError(f"{', '.join(ignored)}: no effect on a checkpoint")

    # Build the sections, and check the rules between them.
    options = build(tool, flag_values)
    read_options = build(ReadOptions, flag_values)
    write_options = build(WriteOptions, flag_values)
    rules = list_shared_rules(sections.values())
    raise_problems(find_rule_problems(rules, options, read_options, write_options))

    model_args = dict(flag_values)
    for section in sections.values():
        for field in flag_fields(section):
            model_args.pop(field.name, None)
    foreign = read_options.keep_foreign
    write_options = dataclasses.replace(
        write_options,
        optimizer=not read_options.no_optim,
        foreign=foreign if isinstance(foreign, Path) else None,
        edits=build(EditOptions, flag_values),
    )
    read_options = dataclasses.replace(read_options, args=model_args, keep_foreign=foreign is True)
    return options, read_options, write_options


def list_flags_without_effect(options: WriteOptions, saver: str) -> list[str]:
    """Return the flags with a value that files of the format `saver` do not depend on."""
    unused_flags = []
    for field in flag_fields(WriteOptions):
        savers = field.metadata["when"].get("saver", SAVERS)
        if getattr(options, field.name) != field.default and saver not in savers:
            unused_flags.append(f"{spell_flag(field)} (for {', '.join(savers)})")
    return unused_flags


def print_report(outcome: ConversionReport, options: WriteOptions, notes: Sequence[str]) -> None:
    """Print the source, the target, notes, and the parts that were not carried over."""
    print_line(str(outcome.source))
    print_line(f"-> {outcome.target} ({outcome.saver}, {outcome.num_tensors} tensors)")
    for text in notes:
        print_line(f"   {text}")
    for name in list_flags_without_effect(options, outcome.saver):
        print_line(f"   no effect: {name}")
    for name in outcome.not_carried:
        print_line(f"   not carried: {name}")
    by_action: dict[str, list[str]] = {}
    for name, action in outcome.foreign.items():
        by_action.setdefault(action, []).append(name)
    for action, names in by_action.items():
        if len(names) > _MAX_LINES:
            names = [f"{len(names)} tensors, e.g. {names[0]}"]
        for name in names:
            print_line(f"   foreign, {action}: {name}")
    if outcome.verified is not None:
        exact = outcome.verified - outcome.rounded
        rounded = ""
        if outcome.rounded:
            rounded = f", {outcome.rounded} are rounded to a smaller dtype"
        print_line(f"   verified: {exact} tensors are bitwise those of the source{rounded}")


def stop(signal_number: int, frame: object) -> NoReturn:
    """Exit, which removes the partial result; a second Ctrl-C does not interrupt that."""
    for stop_signal in STOPPING:
        signal.signal(stop_signal, signal.SIG_IGN)
    raise SystemExit(128 + signal_number)


@contextmanager
def reported_errors() -> Iterator[None]:
    """End the process with a message for an expected error or a signal."""
    for signal_number in STOPPING:
        signal.signal(signal_number, stop)
    try:
        yield
    except (ValueError, OSError) as error:
        sys.exit(f"error: {format_error(explain_error(error))}")
    except MemoryError:
        sys.exit("error: out of memory; a damaged or hostile source can claim any size")
    except SystemExit as error:
        if error.code in [128 + signal_number for signal_number in STOPPING]:
            print_line("interrupted: nothing was written", file=sys.stderr)
        raise

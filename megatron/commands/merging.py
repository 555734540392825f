"""Merging of checkpoints, for tools/checkpoint/merge.py."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron.api import ConversionReport, merge
from megatron.commands.conversion_options import MergeOptions
from megatron.conversion.editing.merged_source import (
    WeightedInput,
    find_last_checkpoints,
    parse_input,
    resolve_weights,
)
from megatron.conversion.options import ReadOptions, WriteOptions
from megatron.core.object_path import path_of
from megatron.core.progress import ProgressBar
from megatron.core.safe_files.reading import allow_links


def choose_inputs(args: MergeOptions) -> tuple[list[Path], list[float]]:
    """Return the paths of the checkpoints to merge and their weights."""
    inputs = [parse_input(text) for text in args.input]

    # Each input is a checkpoint.
    if args.average_last is None:
        paths = [path_of(item.path) for item in inputs]
        return paths, resolve_weights(inputs, args.schedule, args.normalize)

    # The input is a run, of which the last checkpoints are merged.
    if len(inputs) > 1 or inputs[0].weight is not None:
        raise ValueError(
            f"--average-last {args.average_last} takes one --input, the directory of a run, "
            f"without a weight; got {' '.join(args.input)}"
        )
    root = path_of(inputs[0].path)
    paths = find_last_checkpoints(root, args.average_last, args.ckpt_step)
    inputs = [WeightedInput(str(path), None) for path in paths]
    schedule = args.schedule or "uniform"
    return paths, resolve_weights(inputs, schedule, args.normalize)


def find_base(optimizer: str | None, count: int) -> int:
    """Return the index of the input whose training state, and with --optimizer state, is kept."""
    if optimizer is None or optimizer == "from=LAST":
        return count - 1
    if optimizer == "from=FIRST":
        return 0
    # The command line numbers the inputs from 1.
    match = re.fullmatch(r"from=(\d+)", optimizer)
    input_number = 0
    if match is not None:
        input_number = int(match[1])
    if not 1 <= input_number <= count:
        raise ValueError(
            f"--optimizer {optimizer}: give from=LAST, from=FIRST or from=N with N from 1 to "
            f"{count}"
        )
    return input_number - 1


@contextmanager
def explain_removals(paths: Sequence[Path]) -> Iterator[None]:
    """Turn an error into one that names an input which has been removed in the meantime, if any.

    A run in progress removes its old checkpoints (--keep-last-n).
    """
    try:
        yield
    except (ValueError, OSError) as error:
        for path in paths:
            if not path.exists():
                raise ValueError(
                    f"{path} was removed during the merge, perhaps by the run that writes this "
                    "directory: merge again, or let it keep more checkpoints (--keep-last-n)"
                ) from error
        raise


def run(
    args: MergeOptions,
    read_options: ReadOptions,
    write_options: WriteOptions,
    note: Callable[[str], None] = lambda text: None,
) -> ConversionReport:
    """Merge as the command line specifies. `note` receives notes for the user."""
    assert args.save_dir is not None
    if read_options.follow_links:
        allow_links()

    # Choose the inputs.
    paths, weights = choose_inputs(args)
    base = find_base(args.optimizer, len(paths))
    for path, weight in zip(paths, weights, strict=True):
        note(f"{weight:.6g} x {path}")

    # Merge them. A path of the command line may never have existed.
    existing = paths
    if args.average_last is None:
        existing = [path for path in paths if path.exists()]
    label = args.saver or "merged"
    with explain_removals(existing), ProgressBar(f"-> {label}") as progress:
        report = merge(
            paths,
            args.save_dir,
            weights=weights,
            format=args.saver,
            base=base,
            keep_optimizer=args.optimizer is not None,
            read_options=read_options,
            write_options=dataclasses.replace(write_options, note=note),
            overwrite=args.overwrite,
            verify=args.verify_target,
            progress=progress.add,
            starting=progress.restart,
        )
    if report.unused and not read_options.keep_foreign and write_options.foreign is None:
        note("unused tensors are merged with --keep-foreign")
    return report

"""Conversion of a checkpoint, for tools/checkpoint/convert.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from megatron.api import ConversionReport, convert
from megatron.commands.conversion_options import ConvertOptions
from megatron.conversion.options import ReadOptions, WriteOptions
from megatron.core.progress import ProgressBar
from megatron.core.safe_files.reading import allow_links


def run(
    options: ConvertOptions,
    read_options: ReadOptions,
    write_options: WriteOptions,
    note: Callable[[str], None] = lambda text: None,
) -> ConversionReport:
    """Convert as the command line specifies."""
    assert options.load_dir is not None and options.save_dir is not None
    assert options.saver is not None
    if read_options.follow_links:
        allow_links()
    # Everything is checked before the first tensor is read.
    with ProgressBar(f"-> {options.saver}") as progress:
        report = convert(
            options.load_dir,
            options.save_dir,
            options.saver,
            source_format=options.loader,
            iteration=options.ckpt_step,
            read_options=read_options,
            write_options=dataclasses.replace(write_options, note=note),
            overwrite=options.overwrite,
            verify=options.verify_target,
            progress=progress.add,
            starting=progress.restart,
        )
    if report.unused and not read_options.keep_foreign and write_options.foreign is None:
        note("unused tensors are copied with --keep-foreign")
    return report

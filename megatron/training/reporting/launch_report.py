"""Report of a launch: summary, arguments, record in --save, and the writers of its metrics."""

from __future__ import annotations

import logging
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.durable_files import encode_json, write_json
from megatron.core.object_path import ObjectPath, path_of
from megatron.core.wings import resolve
from megatron.training.config.run_config import ModelProvider
from megatron.training.reporting.console import (
    format_arguments,
    format_summary,
    report_line,
)
from megatron.training.reporting.run_record import (
    RUN_FILE,
    RunRecord,
    to_json_value,
)
from megatron.training.reporting.writers import RecordWriter, Writer, make_writers
from megatron.training.run import Run

logger = logging.getLogger(__name__)

_REPORT_GOODPUT = "megatron.training.reporting.goodput_line:report_goodput"
_START_SUMMARY = "megatron.planning.summary:summarize_start"


@contextmanager
def reporting(
    run: Run, model_provider: ModelProvider, writers: Sequence[Writer]
) -> Iterator[Callable[[], None]]:
    """Print the summary; inside the block rank 0 has `writers` and those of the flags.

    Yields a function that records the start of the run in --save; call it as the owner of that
    directory. The end is recorded when the block is left.
    """
    if run.ps.rank > 0:
        yield lambda: None
        return
    config = run.config
    flags = run.config.flags()
    start = f"iteration {run.state.iteration}, from random weights"
    if run.loaded:
        start = f"iteration {run.state.iteration} of {run.loaded}"
    world_size = run.ps.world_size
    topics: dict[str, str] = resolve(_START_SUMMARY)(
        config, world_size, model_provider, run.device, start
    )
    report_line(format_summary(topics), event="start", **topics)
    if config.logging.print_args:
        report_line(
            format_arguments(flags),
            event="arguments",
            arguments={name: str(value) for name, value in flags.items()},
        )
    # Records and logs are appended to line by line, which object storage cannot: they need a
    # directory of their own.
    directory = config.checkpoint.save
    if directory is not None and isinstance(path_of(directory), ObjectPath):
        directory = None
    state = run.state
    dashboards = make_writers(
        config.logging, directory, flags, state.iteration, state.consumed_train_samples
    )
    run.writers = [*writers, *dashboards]
    record = None
    if directory is not None:
        record = RunRecord(directory)
        run.writers.append(RecordWriter(record))
    ended: dict[str, Any] = {"reason": "stopped", "failed": True}
    try:
        yield partial(_record_start, run, record, topics)
        ended = {"reason": run.exit_reason or "complete", "failed": False}
    except BaseException as error:
        ended["reason"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        if record is not None:
            record.write("end", iteration=run.state.iteration, **ended)
            if config.logging.goodput and directory is not None:
                resolve(_REPORT_GOODPUT)(Path(directory), run.writers, run.state.iteration)
        for writer in run.writers:
            writer.close()


def _record_start(run: Run, record: RunRecord | None, topics: dict[str, str]) -> None:
    """Write `run.json`, which only the owner of --save may replace, and begin the record."""
    if record is None:
        return
    config = run.config
    now = time.time()
    assert config.checkpoint.save is not None
    start = {
        "command": sys.argv,
        "began": round(now - (run.clock() - run.started), 3),  # of the program
        "iteration": run.state.iteration,
        "consumed_samples": run.state.consumed_train_samples,
        "loaded": run.loaded,
        "loading": round(run.loading_seconds, 3),
        "train_iters": run.train_iters,
        "world_size": run.ps.world_size,
        "layout": config.describe_layout(run.ps.world_size),
        "host": socket.gethostname(),
        "summary": topics,
    }
    flags = config.flags()
    content = to_json_value({**start, "arguments": flags})
    save = Path(config.checkpoint.save)
    try:
        if run.saver.generation is None:
            write_json(save / RUN_FILE, content)
        else:
            run.saver.generation.publish(RUN_FILE, encode_json(content))
        # Temporary files of a launch that was killed.
        for path in save.glob(f"{RUN_FILE}.tmp-*"):
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning(f"{RUN_FILE} could not be written: {error}")
    arguments = {name: str(value) for name, value in flags.items()}
    record.write("start", **start, arguments=arguments)

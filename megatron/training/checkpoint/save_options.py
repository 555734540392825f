"""The saver of a training run: its options from the flags, and the reports of its saves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import SaveReport, is_complete, iteration_in_name
from megatron.core.dist_checkpointing.background import default_workers
from megatron.core.dist_checkpointing.policy import CheckpointOptions
from megatron.core.dist_checkpointing.saving.retention import RetentionRules
from megatron.core.dist_checkpointing.saving.run_saver import RunSaver
from megatron.core.run_checkpoint.formats import FORMATS
from megatron.core.wings import resolve
from megatron.training.config.run_options import CheckpointConfig
from megatron.training.reporting.console import report_line

_TOKENIZER_FILES = "megatron.core.run_checkpoint.tokenizer_files:read_tokenizer_files"


class SaveLog:
    """Prints committed saves, and keeps their metrics for TensorBoard and the run record."""

    def __init__(self) -> None:
        self._metrics: list[tuple[int, dict[str, float]]] = []

    def add(self, report: SaveReport, is_local: bool) -> None:
        """Report a committed checkpoint; with `is_local` it is on the disks of the nodes."""
        iteration = iteration_in_name(report.directory)
        metrics = get_save_metrics(report)
        label = "checkpoint"
        event = "save"
        prefix = ""  # of the metrics' names
        if is_local:
            label = "local checkpoint"
            event = "local-save"
            prefix = "local-"
        named = {f"{prefix}{name}": value for name, value in metrics.items()}
        self._metrics.append((iteration, named))

        # Other programs look for this line of Megatron-LM.
        report_line(
            f"  successfully saved {label} from iteration {iteration:7d} to "
            f"{report.directory.parent}",
            event=event,
            directory=str(report.directory),
            iteration=iteration,
            **metrics,
        )

    def take_metrics(self) -> list[tuple[int, dict[str, float]]]:
        """Return (iteration, metrics) of the saves that were committed since the last call."""
        metrics = self._metrics
        self._metrics = []
        return metrics


def make_saver(
    config: CheckpointConfig,
    log: SaveLog | None = None,
    tokenizer: Mapping[str, Any] | None = None,
) -> RunSaver:
    """Return the saver that `config` describes; it reports committed saves to `log`.

    Checkpoints contain the files of the `tokenizer`, whose arguments are given.
    """
    options = make_options(config)
    if tokenizer is not None and config.save_tokenizer_assets:
        options = replace(options, files=resolve(_TOKENIZER_FILES)(tokenizer))
    return RunSaver(options, (log or SaveLog()).add)


def make_options(config: CheckpointConfig) -> CheckpointOptions:
    """Return the options for the checkpoints of a run from its flags."""
    # The flag is in GiB.
    staging_mem_limit = None
    if config.ckpt_staging_mem_limit is not None:
        staging_mem_limit = int(config.ckpt_staging_mem_limit * 2**30)
    retention = RetentionRules(
        keep_last=config.keep_last_n,
        keep_every=config.save_retain_interval,
        keep_best=config.keep_best_n,
    )
    # A conversion consists of one save, whose failure must end the program with an error.
    must_succeed = config.exit_on_save_failure or config.ckpt_convert_save is not None
    saves_locally = config.non_persistent_ckpt_type is not None
    return CheckpointOptions(
        async_save=config.async_save,
        fully_parallel=config.ckpt_fully_parallel_save,
        workers=config.dist_ckpt_workers or default_workers(),
        staging_mem_limit=staging_mem_limit,
        timeout=60 * config.ckpt_save_timeout_minutes,
        assume_constant_structure=config.ckpt_assume_constant_structure,
        must_succeed=must_succeed,
        retention=retention,
        is_checkpoint=is_native_checkpoint,
        replication_interval=config.replication_interval,
        save_interval=config.save_interval,
        save_seconds=config.save_interval_secs,
        local_directory=config.non_persistent_local_ckpt_dir if saves_locally else None,
        local_interval=config.non_persistent_save_interval,
        local_replicas=config.replication_factor if config.replication else 1,
        local_replica_distance=config.replication_jump,
    )


def is_native_checkpoint(directory: Path) -> bool:
    """Return whether `directory` is a checkpoint that training wrote, in either format."""
    return is_complete(directory) or FORMATS["legacy"].is_format(directory)


def get_save_metrics(report: SaveReport) -> dict[str, float]:
    """Return the metrics of a committed save, for TensorBoard and the record of the run."""
    return {
        "save-blocking-time": report.blocking,
        "save-update-wait-time": report.update_wait,
        "save-end-wait-time": report.end_wait,
        "save-slowdown-time": report.slowdown,
        "save-staging-time": report.staging,
        "save-writing-time": report.writing,
        "save-commit-time": report.commit,
        "save-total-time": report.total,
        "save-gigabytes": report.total_bytes / 1e9,
        "save-gigabytes-per-second": report.gb_per_second,
    }

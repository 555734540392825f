"""Where measurements go besides the log: the record of the run, TensorBoard and Weights & Biases."""

from __future__ import annotations

import os
from typing import Any

from megatron.training.config.options import LoggingConfig
from megatron.training.reporting.logging import Interval, Writer, as_fields, points
from megatron.training.reporting.run_record import RunRecord


def make_writers(config: LoggingConfig, save: str | None, args: dict[str, Any]) -> list[Writer]:
    """The writers that `config` asks for; for rank 0."""
    writers: list[Writer] = []
    if config.tensorboard_dir is not None:
        writers.append(TensorBoardWriter(config, args))
    if config.wandb_project is not None:
        writers.append(WandbWriter(config, save, args))
    return writers


class TensorBoardWriter:
    """Scalars under Megatron-LM's names, over iterations and (`... vs samples`) over consumed samples."""

    def __init__(self, config: LoggingConfig, args: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter  # here: it takes half a second to import

        self._every = config.tensorboard_log_interval
        self._writer = SummaryWriter(log_dir=config.tensorboard_dir, max_queue=config.tensorboard_queue_size)
        for name, value in args.items():
            self._writer.add_text(name, str(value))

    def interval(self, interval: Interval) -> None:
        for iteration in interval.iterations:
            if iteration.iteration % self._every == 0:
                self.scalars(points(iteration), iteration.iteration, iteration.consumed_train_samples)
        last = interval.last
        self.scalars({"world-size": interval.world_size}, last.iteration, last.consumed_train_samples)
        self.scalars(rates(interval), last.iteration)
        self._writer.flush()

    def scalars(self, values: dict[str, float], iteration: int, samples: int | None = None) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, iteration)
            if samples is not None:
                self._writer.add_scalar(f"{name} vs samples", value, samples)

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """The same scalars to a project of Weights & Biases."""

    def __init__(self, config: LoggingConfig, save: str | None, args: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise ValueError("--wandb-project needs the package wandb: pip install wandb") from None
        directory = config.wandb_save_dir or os.path.join(save or ".", "wandb")
        os.makedirs(directory, exist_ok=True)
        self._every = config.tensorboard_log_interval
        self._run = wandb.init(
            project=config.wandb_project,
            name=config.wandb_exp_name,
            entity=config.wandb_entity,
            dir=directory,
            config=args,
        )

    def interval(self, interval: Interval) -> None:
        for iteration in interval.iterations:
            last = iteration is interval.last
            if last or iteration.iteration % self._every == 0:
                self.scalars(points(iteration) | (rates(interval) if last else {}), iteration.iteration)

    def scalars(self, values: dict[str, float], iteration: int, samples: int | None = None) -> None:
        self._run.log(values, step=iteration)

    def close(self) -> None:
        self._run.finish()


class RecordWriter:
    """The record of this start under `<save>/runs`."""

    def __init__(self, record: RunRecord) -> None:
        self._record = record

    def interval(self, interval: Interval) -> None:
        self._record.write("interval", **as_fields(interval))

    def scalars(self, values: dict[str, float], iteration: int, samples: int | None = None) -> None:
        self._record.write("point", iteration=iteration, values=values)

    def close(self) -> None:
        """Every line was written at once."""


def rates(interval: Interval) -> dict[str, float]:
    """The speed of an interval."""
    return {
        "iteration-time": interval.seconds_per_iteration,
        "throughput": interval.tflops_per_device,
        "tokens-per-second": interval.tokens_per_second,
    }

"""Writers of metrics to TensorBoard and Weights & Biases, imported if a flag requests them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from megatron.core.transformer.config_parts import LOAD
from megatron.training.config.options import LoggingConfig
from megatron.training.reporting.intervals import Interval, Iteration
from megatron.training.reporting.writers import Writer, compute_mean

logger = logging.getLogger(__name__)


def make_dashboards(config: LoggingConfig, save: str | None, args: dict[str, Any]) -> list[Writer]:
    """Return the writers that `config` requests.

    Raises ValueError if a destination cannot be created.
    """
    writers: list[Writer] = []
    if config.tensorboard_dir is not None:
        try:
            tensorboard = TensorBoardWriter(config, args)
        except OSError as error:
            raise ValueError(
                f"--tensorboard-dir {config.tensorboard_dir} cannot be written: {error}"
            ) from error
        writers.append(FaultTolerantWriter(tensorboard, "TensorBoard"))
    if config.wandb_project is not None:
        writers.append(FaultTolerantWriter(WandbWriter(config, save, args), "Weights & Biases"))
    return writers


def make_iteration_scalars(iteration: Iteration) -> dict[str, float]:
    """Return the scalars of an iteration under Megatron-LM's names."""
    values: dict[str, float | None] = {
        "lm loss": iteration.lm_loss,
        "learning-rate": iteration.learning_rate,
        "batch-size": iteration.batch_size,
        "loss-scale": iteration.loss_scale,
        "grad-norm": iteration.grad_norm,
        "num-zeros": iteration.num_zeros_in_grad,
        "params-norm": iteration.params_norm,
    }
    for depth, loss in enumerate(iteration.mtp_losses, start=1):
        values[f"mtp_{depth} loss"] = loss

    # Metrics of experts: the mean over layers, and each layer
    for name, layer_values in iteration.experts.items():
        mean_name = "moe/max-load-over-mean" if name == LOAD else name
        values[mean_name] = compute_mean(layer_values)
        for index, value in enumerate(layer_values):
            values[f"moe/{name}_layer_{index}"] = value

    # Metrics that the flags do not request are None.
    return {name: float(value) for name, value in values.items() if value is not None}


def make_throughput_scalars(interval: Interval) -> dict[str, float]:
    """Return the speed of an interval."""
    return {
        "iteration-time": interval.seconds_per_iteration,
        "throughput": interval.tflops_per_device,
        "tokens-per-second": interval.tokens_per_second,
    }


class FaultTolerantWriter:
    """Passes metrics to another writer until that fails.

    The metrics of a run are worth less than the run, which continues without them. Libraries raise
    errors of any kind, e.g. if a disk is full or a connection is lost.
    """

    def __init__(self, writer: Writer, name: str) -> None:
        self._writer: Writer | None = writer
        self._name = name

    def interval(self, interval: Interval) -> None:
        self._write(lambda writer: writer.interval(interval))

    def scalars(self, values: dict[str, float], iteration: int, samples: int | None = None) -> None:
        self._write(lambda writer: writer.scalars(values, iteration, samples))

    def close(self) -> None:
        self._write(lambda writer: writer.close())

    def _write(self, write: Callable[[Writer], None]) -> None:
        """Call a method of the writer, unless an earlier call failed."""
        if self._writer is None:
            return
        try:
            write(self._writer)
        except Exception as error:
            self._writer = None
            logger.warning(
                f"no more metrics are written to {self._name}: {type(error).__name__}: {error}"
            )


class TensorBoardWriter:
    """Writes scalars under Megatron-LM's names to TensorBoard.

    Each has a curve over iterations, and one over consumed samples (`... vs samples`).
    """

    def __init__(self, config: LoggingConfig, args: dict[str, Any]) -> None:
        # Imported on first use: it takes half a second.
        from torch.utils.tensorboard import SummaryWriter

        self._every = config.tensorboard_log_interval
        self._writer = SummaryWriter(
            log_dir=config.tensorboard_dir, max_queue=config.tensorboard_queue_size
        )
        # The arguments are in the tab for texts.
        for name, value in args.items():
            self._writer.add_text(name, str(value))

    def interval(self, interval: Interval) -> None:
        for iteration in interval.iterations:
            if iteration.iteration % self._every == 0:
                values = make_iteration_scalars(iteration)
                samples = iteration.consumed_train_samples
                self.scalars(values, iteration.iteration, samples)
        last = interval.last
        world_size = {"world-size": float(interval.world_size)}
        self.scalars(world_size, last.iteration, last.consumed_train_samples)
        self.scalars(make_throughput_scalars(interval), last.iteration)
        self._writer.flush()

    def scalars(self, values: dict[str, float], iteration: int, samples: int | None = None) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, iteration)
            if samples is not None:
                self._writer.add_scalar(f"{name} vs samples", value, samples)

    def close(self) -> None:
        self._writer.close()


class WandbWriter:
    """Writes the scalars of TensorBoard to a project of Weights & Biases."""

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
            # wandb stores one row per step, so the speed belongs to the row of the last iteration.
            is_last = iteration is interval.last
            if not is_last and iteration.iteration % self._every != 0:
                continue
            values = make_iteration_scalars(iteration)
            if is_last:
                values |= make_throughput_scalars(interval)
            self.scalars(values, iteration.iteration)

    def scalars(self, values: dict[str, float], iteration: int, samples: int | None = None) -> None:
        self._run.log(values, step=iteration)

    def close(self) -> None:
        self._run.finish()

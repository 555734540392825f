"""Writers of metrics to TensorBoard and Weights & Biases, imported if a flag requests them."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.core.durable_files import write_durably
from megatron.core.transformer.config_parts import LOAD
from megatron.training.config.options import LoggingConfig
from megatron.training.reporting.intervals import Interval, Iteration
from megatron.training.reporting.writers import Writer, compute_mean

logger = logging.getLogger(__name__)

_WANDB_RUN = ".wandb-run"  # in --save: the id of its run at Weights & Biases
_BRANCH_FLAGS = ("ckpt_step", "finetune", "override_existing_run")


def make_dashboards(
    config: LoggingConfig, save: str | None, args: dict[str, Any], iteration: int
) -> list[Writer]:
    """Return the writers that `config` requests, for a launch that begins after `iteration`.

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
        wandb_writer = WandbWriter(config, save, args, iteration)
        writers.append(FaultTolerantWriter(wandb_writer, "Weights & Biases"))
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


def import_wandb() -> Any:
    """Return the package of --wandb-project. Raises ValueError if it is not installed."""
    try:
        import wandb
    except ImportError:
        raise ValueError("--wandb-project needs the package wandb: pip install wandb") from None
    return wandb


class WandbWriter:
    """Writes the scalars of TensorBoard to a project of Weights & Biases.

    A launch that continues the run in `save` continues its W&B run, which ignores the steps that it
    has already. One that begins a branch begins a W&B run. The variables WANDB_RUN_ID and
    WANDB_RESUME override that.
    """

    def __init__(
        self, config: LoggingConfig, save: str | None, args: dict[str, Any], iteration: int
    ) -> None:
        wandb = import_wandb()
        directory = config.wandb_save_dir or os.path.join(save or ".", "wandb")
        os.makedirs(directory, exist_ok=True)
        self._every = config.tensorboard_log_interval
        self._run = wandb.init(
            project=config.wandb_project,
            name=config.wandb_exp_name,
            entity=config.wandb_entity,
            dir=directory,
            config=args,
            id=os.environ.get("WANDB_RUN_ID") or _choose_wandb_id(save, args, iteration),
            resume=os.environ.get("WANDB_RESUME") or "allow",
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


def _choose_wandb_id(save: str | None, args: dict[str, Any], iteration: int) -> str | None:
    """Return the id of the W&B run of `save`, a new one for a new branch; None without `save`."""
    if save is None:
        return None
    begins_branch = iteration == 0 or any(args.get(flag) for flag in _BRANCH_FLAGS)
    path = Path(save) / _WANDB_RUN
    if not begins_branch and path.is_file():
        run_id = path.read_text(errors="replace").strip()
        if run_id.isascii() and run_id.isalnum():
            return run_id
    run_id = secrets.token_hex(8)
    write_durably(path, run_id.encode())
    return run_id

"""Writers of metrics to TensorBoard and trackers, imported if a flag requests them."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron.core.durable_files import write_durably
from megatron.core.transformer.config_parts import LOAD
from megatron.training.config.run_options import LoggingConfig
from megatron.training.reporting.intervals import Interval, Iteration
from megatron.training.reporting.writers import Writer, compute_mean

logger = logging.getLogger(__name__)

_SAMPLES = "samples"  # in --tensorboard-dir: curves over consumed samples
_BRANCH_FLAGS = ("ckpt_step", "finetune", "override_existing_run")


def make_dashboards(
    config: LoggingConfig,
    save: str | None,
    args: dict[str, Any],
    iteration: int,
    consumed_samples: int,
) -> list[Writer]:
    """Return the writers that `config` requests, for a launch that begins after `iteration`.

    Raises ValueError if a destination cannot be created.
    """
    run = TrackedRun(save, args, iteration, consumed_samples)
    writers: list[Writer] = []
    for name, (dashboard, make_writer) in DASHBOARDS.items():
        if getattr(config, name) is not None:
            writer = make_writer(config, run, args)
            writers.append(FaultTolerantWriter(writer, dashboard))
    return writers


def check_dashboards(config: LoggingConfig) -> None:
    """Raise ValueError for a flag whose package is not installed."""
    for name in PACKAGES:
        if getattr(config, name) is not None:
            import_package(name)


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
    values |= iteration.metrics

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
    """Writer of scalars to TensorBoard, under Megatron-LM's names.

    Each scalar has a curve over iterations and one over consumed samples (`... vs samples`).

    TensorBoard drops what earlier launches wrote after the position at which this one begins, so
    that it shows repeated iterations once. That applies to all curves of a directory: those over
    samples have a directory of their own, because their steps are other numbers.
    """

    def __init__(self, config: LoggingConfig, run: TrackedRun, args: dict[str, Any]) -> None:
        # Imported on first use: it takes half a second.
        from torch.utils.tensorboard import SummaryWriter

        assert config.tensorboard_dir is not None
        self._every = config.tensorboard_log_interval
        try:
            self._writer = SummaryWriter(
                config.tensorboard_dir,
                purge_step=run.iteration + 1,
                max_queue=config.tensorboard_queue_size,
            )
            self._sample_writer = SummaryWriter(
                os.path.join(config.tensorboard_dir, _SAMPLES),
                purge_step=run.consumed_samples + 1,
                max_queue=config.tensorboard_queue_size,
            )
        except OSError as error:
            raise ValueError(
                f"--tensorboard-dir {config.tensorboard_dir} cannot be written: {error}"
            ) from error
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
        self._sample_writer.flush()

    def scalars(self, values: dict[str, float], iteration: int, samples: int | None = None) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, iteration)
            if samples is not None:
                self._sample_writer.add_scalar(f"{name} vs samples", value, samples)

    def close(self) -> None:
        self._writer.close()
        self._sample_writer.close()


# Packages by the field of `LoggingConfig` that requires them
PACKAGES = {
    "wandb_project": ("wandb", "wandb"),
    "mlflow_experiment": ("mlflow", "mlflow-skinny"),
    "trackio_project": ("trackio", "trackio"),
}


def import_package(name: str) -> Any:
    """Return the package of a flag. Raises ValueError if it is not installed."""
    package, distribution = PACKAGES[name]
    try:
        return import_module(package)
    except ImportError:
        flag = "--" + name.replace("_", "-")
        raise ValueError(
            f"{flag} needs the package {package}: pip install {distribution}"
        ) from None


class TrackedRun:
    """The run in `save`: its position at this launch, and its ids at dashboards in files there.

    A launch that continues the run in `save` continues its runs at the dashboards. One that begins
    a branch begins new ones.
    """

    def __init__(
        self, save: str | None, args: dict[str, Any], iteration: int, consumed_samples: int
    ) -> None:
        self.save = save
        self.iteration = iteration
        self.consumed_samples = consumed_samples
        self._begins_branch = iteration == 0 or any(args.get(flag) for flag in _BRANCH_FLAGS)

    def read(self, package: str) -> str | None:
        """Return the id of the run that this launch continues, if any."""
        if self.save is None or self._begins_branch:
            return None
        path = Path(self.save) / f".{package}-run"
        if path.is_file():
            run_id = path.read_text(errors="replace").strip()
            if run_id.isascii() and run_id.isalnum():
                return run_id
        return None

    def write(self, package: str, run_id: str) -> None:
        """Store the id of a new run. Without `save`, no launch continues it."""
        if self.save is not None:
            write_durably(Path(self.save) / f".{package}-run", run_id.encode())

    def choose(self, package: str) -> str | None:
        """Return the id of the run to continue, or a new one; None without `save`."""
        if self.save is None:
            return None
        run_id = self.read(package)
        if run_id is None:
            run_id = secrets.token_hex(8)
            self.write(package, run_id)
        return run_id


class IntervalWriter:
    """A writer that has one row of scalars for an iteration."""

    def __init__(self, config: LoggingConfig) -> None:
        self._every = config.tensorboard_log_interval

    def interval(self, interval: Interval) -> None:
        for iteration in interval.iterations:
            # The speed belongs to the row of the last iteration.
            is_last = iteration is interval.last
            if not is_last and iteration.iteration % self._every != 0:
                continue
            values = make_iteration_scalars(iteration)
            if is_last:
                values |= make_throughput_scalars(interval)
            self.scalars(values, iteration.iteration)

    def scalars(self, values: dict[str, float], iteration: int, samples: int | None = None) -> None:
        raise NotImplementedError


class WandbWriter(IntervalWriter):
    """Writes the scalars of TensorBoard to a project of Weights & Biases.

    A continued run ignores the steps that it has already. The variables WANDB_RUN_ID and
    WANDB_RESUME override which one is continued.
    """

    def __init__(self, config: LoggingConfig, run: TrackedRun, args: dict[str, Any]) -> None:
        super().__init__(config)
        wandb = import_package("wandb_project")
        directory = config.wandb_save_dir or os.path.join(run.save or ".", "wandb")
        os.makedirs(directory, exist_ok=True)
        self._run = wandb.init(
            project=config.wandb_project,
            name=config.wandb_exp_name,
            entity=config.wandb_entity,
            dir=directory,
            config=args,
            id=os.environ.get("WANDB_RUN_ID") or run.choose("wandb"),
            resume=os.environ.get("WANDB_RESUME") or "allow",
        )

    def scalars(self, values: dict[str, float], iteration: int, samples: int | None = None) -> None:
        self._run.log(values, step=iteration)

    def close(self) -> None:
        self._run.finish()


class MlflowWriter(IntervalWriter):
    """Writes the scalars of TensorBoard to an experiment of MLflow (MLFLOW_TRACKING_URI)."""

    def __init__(self, config: LoggingConfig, run: TrackedRun, args: dict[str, Any]) -> None:
        super().__init__(config)
        self._mlflow = import_package("mlflow_experiment")
        self._client = self._mlflow.MlflowClient()
        run_id = run.read("mlflow")
        if run_id is None:
            experiment = self._mlflow.set_experiment(config.mlflow_experiment)
            run_id = self._client.create_run(experiment.experiment_id).info.run_id
            run.write("mlflow", run_id)
            # Parameters of a run cannot change: they are those of its first launch.
            params = [self._mlflow.entities.Param(*item) for item in _shorten_values(args)]
            self._client.log_batch(run_id, params=params)
        else:
            self._client.update_run(run_id, status="RUNNING")
        self._run_id = run_id

    def scalars(self, values: dict[str, float], iteration: int, samples: int | None = None) -> None:
        now = int(1000 * time.time())
        metric = self._mlflow.entities.Metric
        metrics = [metric(name, value, now, iteration) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _shorten_values(args: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the arguments as texts within the limits of MLflow: 100 of 500 characters.

    Those without a value come last.
    """
    by_presence = sorted(args.items(), key=lambda item: item[1] in (None, False))
    return [(name, str(value)[:500]) for name, value in by_presence[:100]]


class TrackioWriter(IntervalWriter):
    """Writes the scalars of TensorBoard to a project of trackio, which stores them on this machine
    (TRACKIO_DIR).
    """

    def __init__(self, config: LoggingConfig, run: TrackedRun, args: dict[str, Any]) -> None:
        super().__init__(config)
        trackio = import_package("trackio_project")
        self._run = trackio.init(
            project=config.trackio_project,
            name=run.choose("trackio"),
            config={name: str(value) for name, value in args.items()},
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def scalars(self, values: dict[str, float], iteration: int, samples: int | None = None) -> None:
        self._run.log(values, step=iteration)

    def close(self) -> None:
        self._run.finish()


# The destinations, by the field of `LoggingConfig` that requests them
DASHBOARDS: dict[str, tuple[str, Callable[[LoggingConfig, TrackedRun, dict[str, Any]], Writer]]] = {
    "tensorboard_dir": ("TensorBoard", TensorBoardWriter),
    "wandb_project": ("Weights & Biases", WandbWriter),
    "mlflow_experiment": ("MLflow", MlflowWriter),
    "trackio_project": ("trackio", TrackioWriter),
}

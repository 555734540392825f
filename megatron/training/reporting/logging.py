"""What a run reports: lines on its output, one per interval, and one point per iteration for
TensorBoard and Weights & Biases.

On its output rank 0 alone says something, as text or as one JSON object per line (--log-format).
Every module logs with `logging.getLogger(__name__)`: infos and warnings are printed once, by rank
0. `EVERY_RANK` marks a message that only its own rank knows, and errors are always printed.

Losses stay on the device until a line is due, so that no iteration waits for the device.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from megatron.core.optimizer import StepResult
from megatron.core.parallel_state import ParallelState
from megatron.core.transformer.moe.router import LOAD, get_metric_names
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.options import LoggingConfig
from megatron.training.reporting.run_record import RunRecord, to_json_value

logger = logging.getLogger(__name__)

EVERY_RANK = {"every_rank": True}  # logger.info(..., extra=EVERY_RANK)


def configure_logging(rank: int, log_format: str = "text") -> None:
    """Print the messages of this package; a second call replaces the first."""
    package = logging.getLogger("megatron")
    for handler in [handler for handler in package.handlers if isinstance(handler, _Printer)]:
        package.removeHandler(handler)
    package.addHandler(_Printer(rank, _as_json if log_format == "json" else _as_text))
    package.setLevel(logging.INFO)


def report_line(line: str, **fields: Any) -> None:
    """A measurement: `line` as it is in text, `fields` in JSON."""
    logger.info("%s", line, extra={"fields": fields})


class _Printer(logging.Handler):
    """Writes to whatever standard output is at that moment."""

    def __init__(self, rank: int, form: Any) -> None:
        super().__init__()
        self._rank = rank
        self._form = form

    def emit(self, record: logging.LogRecord) -> None:
        if self._rank == 0 or record.levelno >= logging.ERROR or vars(record).get("every_rank"):
            print(self._form(record), flush=True)


def _as_text(record: logging.LogRecord) -> str:
    if "fields" in vars(record):
        return record.getMessage()
    level = f"{record.levelname}: " if record.levelno >= logging.WARNING else ""
    return f" > {level}{record.getMessage()}"


def _as_json(record: logging.LogRecord) -> str:
    fields = vars(record).get("fields") or {
        "level": record.levelname.lower(),
        "message": record.getMessage(),
    }
    time = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
    return json.dumps(to_json_value({"time": time, **fields}))


@dataclass(frozen=True)
class Iteration:
    """The numbers of one iteration; those from `lm_loss` on are filled in when they are read from
    the device.
    """

    iteration: int
    consumed_train_samples: int
    batch_size: int
    learning_rate: float
    loss_scale: float
    lm_loss: float = math.nan
    grad_norm: float = math.nan
    skipped: bool = False  # the update was left out because the gradient was not finite
    num_zeros_in_grad: float | None = None
    params_norm: float | None = None
    experts: dict[str, list[float]] = field(
        default_factory=dict
    )  # auxiliary losses and loads, of each layer with some


class OnDevice(NamedTuple):
    """What an iteration has left on the device."""

    # fp32 [numerator, denominator] of this rank's micro-batches on the last stage, zeros elsewhere
    loss: torch.Tensor
    step: StepResult
    params_norm: torch.Tensor | None = None
    experts: torch.Tensor | None = None  # this rank's share of `measured` of the experts, by layer


@dataclass(frozen=True)
class Interval:
    """The iterations between two lines of the log."""

    iterations: Sequence[Iteration]
    seconds: float  # training time, without evaluations and saves
    tokens: int
    flops: float
    world_size: int

    @property
    def last(self) -> Iteration:
        return self.iterations[-1]

    @property
    def seconds_per_iteration(self) -> float:
        return self.seconds / len(self.iterations)

    def seconds_to_go(self, train_iters: int) -> float:
        """Until iteration `train_iters` at the speed of this interval; evaluations and saves come
        on top.
        """
        return max(0, train_iters - self.last.iteration) * self.seconds_per_iteration

    @property
    def tflops_per_device(self) -> float:
        return self.flops / self.seconds / self.world_size / 1e12

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def num_nan(self) -> int:
        return sum(not math.isfinite(it.lm_loss) for it in self.iterations)

    @property
    def num_skipped(self) -> int:
        return sum(it.skipped for it in self.iterations)

    @property
    def mean_loss(self) -> float:
        """Over the iterations that were not skipped (over all, if all were)."""
        losses = [it.lm_loss for it in self.iterations if not it.skipped] or [
            it.lm_loss for it in self.iterations
        ]
        return sum(losses) / len(losses)

    def as_fields(self) -> dict[str, Any]:
        """The numbers of a line of the log by name; times in seconds."""
        last = self.last
        return {
            "iteration": last.iteration,
            "iterations": len(self.iterations),
            "consumed_samples": last.consumed_train_samples,
            "batch_size": last.batch_size,
            "lm_loss": self.mean_loss,
            "grad_norm": last.grad_norm,
            "learning_rate": last.learning_rate,
            "loss_scale": last.loss_scale,
            "num_zeros": last.num_zeros_in_grad,
            "params_norm": last.params_norm,
            "skipped": self.num_skipped,
            "nan": self.num_nan,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "tflops_per_gpu": self.tflops_per_device,
        }


class Writer(Protocol):
    """A place that measurements go to; used on rank 0 only."""

    def interval(self, interval: Interval) -> None: ...

    def scalars(self, values: dict[str, float], iteration: int, samples: int | None = None) -> None:
        """Points at an iteration; also over `samples`, the training samples consumed by then, if
        given.
        """

    def close(self) -> None: ...


class TrainingLog:
    """Collects iterations and reports them an interval at a time.

    Per iteration `record`; per interval `close_interval`, which is collective; `paused` around what
    is not training.
    """

    def __init__(
        self,
        ps: ParallelState,
        device: torch.device,
        flops_per_token: float,
        seq_length: int,
        model: TransformerConfig | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._ps = ps
        self._device = device
        self._model = model
        self._clock = clock
        self._seq_length = seq_length
        self._flops_per_token = flops_per_token
        self._pending: list[tuple[Iteration, OnDevice]] = []
        self._excluded = 0.0
        self._start = self._clock()

    def record(self, iteration: Iteration, on_device: OnDevice) -> None:
        self._pending.append((iteration, on_device))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the block from the interval."""
        start = self._now()
        yield
        self._excluded += self._now() - start

    def close_interval(self) -> Interval:
        """All iterations since the last call, with their losses, the same on every rank.
        Collective.
        """
        assert self._pending
        losses = reduce_losses([on_device.loss for _, on_device in self._pending], self._ps)
        rows = zip(self._pending, losses, self._of_experts(), strict=True)
        iterations = [
            _read(iteration, on_device, loss, experts)
            for (iteration, on_device), loss, experts in rows
        ]
        now = self._now()
        tokens = self._seq_length * sum(it.batch_size for it in iterations)
        seconds = max(now - self._start - self._excluded, 1e-9)
        self._pending = []
        self._excluded = 0.0
        self._start = now
        return Interval(
            iterations, seconds, tokens, tokens * self._flops_per_token, self._ps.world_size
        )

    def _of_experts(self) -> list[dict[str, list[float]]]:
        """Of every pending iteration the measurements of the layers with experts. Collective where
        there are any.
        """
        shares = [
            on_device.experts for _, on_device in self._pending if on_device.experts is not None
        ]
        if not shares or self._model is None:
            return [{} for _ in self._pending]
        total = torch.stack(shares)
        dist.all_reduce(total)
        layers = torch.tensor(self._model.moe_layer_pattern, dtype=torch.bool)
        names = get_metric_names(self._model)
        return [dict(zip(names, rows[:, layers].tolist(), strict=True)) for rows in total.cpu()]

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return self._clock()


def _read(
    iteration: Iteration, on_device: OnDevice, loss: float, experts: dict[str, list[float]]
) -> Iteration:
    """`iteration` with its numbers from the device; waits for them."""
    num_zeros = on_device.step.num_zeros
    norm = on_device.params_norm
    return replace(
        iteration,
        lm_loss=loss,
        grad_norm=on_device.step.grad_norm.item(),
        skipped=bool(on_device.step.skipped.item()),
        num_zeros_in_grad=None if num_zeros is None else num_zeros.item(),
        params_norm=None if norm is None else norm.item(),
        experts=experts,
    )


def reduce_losses(losses: Sequence[torch.Tensor], ps: ParallelState) -> list[float]:
    """From [numerator, denominator] pairs of every rank to losses over the whole batch, on every
    rank.

    The last stage has them; its tensor-parallel ranks hold the same values, so only the first one
    contributes.
    """
    pairs = torch.stack(list(losses)).to(torch.float64)
    if not (ps.pp.is_last and ps.tp.is_first):
        pairs.zero_()
    dist.all_reduce(pairs)
    return [
        numerator / denominator if denominator else math.nan
        for numerator, denominator in pairs.tolist()
    ]


def format_throughput(tflops: float) -> str:
    """Format with one decimal, or three significant digits below 10; never with an exponent."""
    if tflops >= 10:
        return f"{tflops:.1f}"
    magnitude = math.floor(math.log10(tflops)) if tflops > 0 else 0
    return f"{tflops:.{2 - magnitude}f}"


def log_line(interval: Interval, train_iters: int) -> str:
    """Return the log line of an interval: Megatron-LM's fields in its order, then our own."""
    last = interval.last
    parts = [
        f" [{datetime.now():%Y-%m-%d %H:%M:%S.%f}] iteration {last.iteration:8d}/{train_iters:8d}",
        f"consumed samples: {last.consumed_train_samples:12d}",
        f"elapsed time per iteration (ms): {1000 * interval.seconds_per_iteration:.1f}",
        f"throughput per GPU (TFLOP/s/GPU): {format_throughput(interval.tflops_per_device)}",
        f"learning rate: {last.learning_rate:.6E}",
        f"global batch size: {last.batch_size:5d}",
        f"lm loss: {interval.mean_loss:.6E}",
        *(f"{name}: {_mean(values):.6E}" for name, values in last.experts.items() if name != LOAD),
        f"loss scale: {last.loss_scale:.1f}",
        f"grad norm: {last.grad_norm:.3f}",
        f"num zeros: {last.num_zeros_in_grad:.0f}" if last.num_zeros_in_grad is not None else "",
        f"params norm: {last.params_norm:.3f}" if last.params_norm is not None else "",
        f"number of skipped iterations: {interval.num_skipped:3d}",
        f"number of nan iterations: {interval.num_nan:3d}",
        # Fields that Megatron-LM does not have come last: scripts cut its line by position.
        f"tokens/s: {interval.tokens_per_second:.0f}",
        f"ETA: {timedelta(seconds=round(interval.seconds_to_go(train_iters)))}",
    ]
    return " | ".join(part for part in parts if part) + " |"


def points(iteration: Iteration) -> dict[str, float]:
    """The scalars of one iteration under Megatron-LM's names."""
    values: dict[str, float | None] = {
        "lm loss": iteration.lm_loss,
        "learning-rate": iteration.learning_rate,
        "batch-size": iteration.batch_size,
        "loss-scale": iteration.loss_scale,
        "grad-norm": iteration.grad_norm,
        "num-zeros": iteration.num_zeros_in_grad,
        "params-norm": iteration.params_norm,
    }
    for name, of_layers in iteration.experts.items():
        values[name if name != LOAD else "moe/max-load-over-mean"] = _mean(of_layers)
        values |= {f"moe/{name}_layer_{index}": value for index, value in enumerate(of_layers)}
    return {name: float(value) for name, value in values.items() if value is not None}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def make_writers(config: LoggingConfig, save: str | None, args: dict[str, Any]) -> list[Writer]:
    """The writers that `config` asks for; for rank 0."""
    writers: list[Writer] = []
    if config.tensorboard_dir is not None:
        writers.append(TensorBoardWriter(config, args))
    if config.wandb_project is not None:
        writers.append(WandbWriter(config, save, args))
    return writers


class RecordWriter:
    """Writes measurements to the record of the run."""

    def __init__(self, record: RunRecord) -> None:
        self._record = record

    def interval(self, interval: Interval) -> None:
        self._record.write("interval", **interval.as_fields())

    def scalars(self, values: dict[str, float], iteration: int, samples: int | None = None) -> None:
        self._record.write("point", iteration=iteration, values=values)

    def close(self) -> None:
        pass  # every line is written at once


class TensorBoardWriter:
    """Scalars under Megatron-LM's names, over iterations and (`... vs samples`) over consumed
    samples.
    """

    def __init__(self, config: LoggingConfig, args: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter  # here: it takes half a second to import

        self._every = config.tensorboard_log_interval
        self._writer = SummaryWriter(
            log_dir=config.tensorboard_dir, max_queue=config.tensorboard_queue_size
        )
        for name, value in args.items():
            self._writer.add_text(name, str(value))

    def interval(self, interval: Interval) -> None:
        for iteration in interval.iterations:
            if iteration.iteration % self._every == 0:
                self.scalars(
                    points(iteration), iteration.iteration, iteration.consumed_train_samples
                )
        last = interval.last
        self.scalars(
            {"world-size": interval.world_size}, last.iteration, last.consumed_train_samples
        )
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
                self.scalars(
                    points(iteration) | (rates(interval) if last else {}), iteration.iteration
                )

    def scalars(self, values: dict[str, float], iteration: int, samples: int | None = None) -> None:
        self._run.log(values, step=iteration)

    def close(self) -> None:
        self._run.finish()


def rates(interval: Interval) -> dict[str, float]:
    """The speed of an interval."""
    return {
        "iteration-time": interval.seconds_per_iteration,
        "throughput": interval.tflops_per_device,
        "tokens-per-second": interval.tokens_per_second,
    }

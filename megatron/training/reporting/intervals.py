"""Metrics of iterations, collected and reduced over ranks for each interval between log lines.

Losses stay on the device until a line is due, so that no iteration waits for the device.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypedDict

import torch
import torch.distributed as dist

from megatron.core.optimizer import StepResult
from megatron.core.parallel_state import ParallelState
from megatron.core.transformer.config_parts import LOAD, get_metric_names
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.reporting.measurements import measure_max_memory


@dataclass(frozen=True)
class Iteration:
    """Metrics of one iteration; those from `lm_loss` on are filled in when the device is read."""

    iteration: int
    consumed_train_samples: int
    batch_size: int
    learning_rate: float
    loss_scale: float
    lm_loss: float = math.nan
    grad_norm: float = math.nan
    skipped: bool = False  # no update, because the gradient was not finite
    num_zeros_in_grad: float | None = None
    params_norm: float | None = None
    # E.g., losses of each depth of multi-token prediction
    metrics: dict[str, float] = field(default_factory=dict)
    # Auxiliary losses and loads of each layer with experts.
    experts: dict[str, list[float]] = field(default_factory=dict)


class OnDevice(NamedTuple):
    """Metrics of an iteration that are still on the device."""

    # fp32 [numerator, denominator] of this rank's micro-batches on the last stage, zeros elsewhere:
    # of the next token and of each metric, [1 + metrics, 2].
    losses: torch.Tensor
    step: StepResult
    params_norm: torch.Tensor | None = None
    # This rank's share of the metrics of experts, [metric, layer].
    experts: torch.Tensor | None = None


@dataclass(frozen=True)
class Interval:
    """The iterations between two log lines."""

    iterations: Sequence[Iteration]
    seconds: float  # training time, without evaluations and saves
    tokens: int
    flops: float
    world_size: int
    max_memory_bytes: Sequence[float] = ()  # of each rank since its start
    input_seconds: Sequence[float] = ()  # for which each rank waited for its data

    @property
    def last(self) -> Iteration:
        return self.iterations[-1]

    @property
    def seconds_per_iteration(self) -> float:
        return self.seconds / len(self.iterations)

    @property
    def tflops_per_device(self) -> float:
        return self.flops / self.seconds / self.world_size / 1e12

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def num_nan(self) -> int:
        return sum(not math.isfinite(iteration.lm_loss) for iteration in self.iterations)

    @property
    def num_skipped(self) -> int:
        return sum(iteration.skipped for iteration in self.iterations)

    @property
    def mean_loss(self) -> float:
        """Mean over the iterations that were not skipped, or over all if all were."""
        counted = self._select_counted()
        return sum(iteration.lm_loss for iteration in counted) / len(counted)

    @property
    def mean_metrics(self) -> dict[str, float]:
        """Mean of each metric, e.g. of the losses of multi-token prediction."""
        counted = self._select_counted()
        means = {}
        for name in self.last.metrics:
            means[name] = sum(iteration.metrics[name] for iteration in counted) / len(counted)
        return means

    def _select_counted(self) -> Sequence[Iteration]:
        """Return the iterations that were not skipped, or all if all were."""
        # A skipped iteration may have an infinite loss, which would hide all others.
        counted = [iteration for iteration in self.iterations if not iteration.skipped]
        return counted or self.iterations

    @property
    def max_load_over_mean(self) -> float | None:
        """The load of the fullest expert divided by the mean, averaged over layers.

        From the last iteration; None without experts.
        """
        loads = self.last.experts.get(LOAD)
        return sum(loads) / len(loads) if loads else None

    def estimate_remaining_seconds(self, train_iters: int) -> float:
        """Return the time until iteration `train_iters` at this speed, without evaluations and
        saves.
        """
        num_remaining = max(0, train_iters - self.last.iteration)
        return num_remaining * self.seconds_per_iteration

    def as_fields(self) -> dict[str, Any]:
        """Return the numbers of a log line by name; times in seconds."""
        last = self.last
        return {
            "iteration": last.iteration,
            "iterations": len(self.iterations),
            "consumed_samples": last.consumed_train_samples,
            "batch_size": last.batch_size,
            "lm_loss": self.mean_loss,
            **{name.replace(" ", "_"): mean for name, mean in self.mean_metrics.items()},
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
            "max_memory_bytes": max(self.max_memory_bytes, default=math.nan),
            "max_memory_rank": _find_largest(self.max_memory_bytes),
            "min_memory_bytes": min(self.max_memory_bytes, default=math.nan),
            "input_seconds": max(self.input_seconds, default=math.nan),
            "input_rank": _find_largest(self.input_seconds),
            "max_load_over_mean": self.max_load_over_mean,
        }


def _find_largest(values: Sequence[float]) -> int | None:
    """Return the rank with the largest value, or None without values."""
    if not values:
        return None
    return max(range(len(values)), key=values.__getitem__)


class TrainingLog:
    """Collects iterations and returns them an interval at a time.

    Sequence of calls: `record` for each iteration, `paused` around work other than training, and
    `close_interval`, which is collective, for each interval.
    """

    def __init__(
        self,
        ps: ParallelState,
        device: torch.device,
        flops_per_token: float,
        seq_length: int,
        model: TransformerConfig | None = None,
        metric_names: Sequence[str] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._ps = ps
        self._device = device
        self._model = model
        self._metric_names = metric_names
        self._clock = clock
        self._seq_length = seq_length
        self._flops_per_token = flops_per_token
        self._pending: list[tuple[Iteration, OnDevice]] = []  # of the current interval
        self._excluded = 0.0  # seconds of evaluations and saves
        self._input_seconds = 0.0
        self._start = self._clock()

    def time_input(
        self, batches: Iterator[dict[str, torch.Tensor]]
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the batches, and add the time that this rank waits for each to the interval."""
        began = self._clock()
        for batch in batches:
            self._input_seconds += self._clock() - began
            yield batch
            began = self._clock()

    def record(self, iteration: Iteration, on_device: OnDevice) -> None:
        self._pending.append((iteration, on_device))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the block from the interval."""
        start = self._now()
        yield
        self._excluded += self._now() - start

    def close_interval(self) -> Interval:
        """Return all iterations since the last call. Collective.

        They have the same losses on every rank.
        """
        # Read all iterations with one transfer and one collective per kind of measurement.
        assert self._pending
        measured = [on_device for _, on_device in self._pending]
        of_rank = [measure_max_memory(self._device), self._input_seconds]
        losses, (memory, input_seconds) = reduce_losses(
            [on_device.losses for on_device in measured], self._ps, of_rank
        )
        scalars = _read_scalars(measured)
        experts = self._reduce_expert_metrics()

        iterations = []
        for index, (iteration, _) in enumerate(self._pending):
            lm_loss, *metrics = losses[index]
            complete = replace(
                iteration,
                lm_loss=lm_loss,
                metrics=dict(zip(self._metric_names, metrics, strict=True)),
                experts=experts[index],
                **scalars[index],
            )
            iterations.append(complete)

        # Reading the losses has waited for the device, so that the clock includes all its work.
        now = self._now()
        seconds = max(now - self._start - self._excluded, 1e-9)
        num_samples = sum(iteration.batch_size for iteration in iterations)
        tokens = self._seq_length * num_samples
        flops = tokens * self._flops_per_token

        # Start the next interval.
        self._pending = []
        self._excluded = 0.0
        self._input_seconds = 0.0
        self._start = now
        return Interval(
            iterations, seconds, tokens, flops, self._ps.world_size, memory, input_seconds
        )

    def _reduce_expert_metrics(self) -> list[dict[str, list[float]]]:
        """Return the metrics of the layers with experts for every pending iteration. Collective if
        there are any.
        """
        shares = []
        for _, on_device in self._pending:
            if on_device.experts is not None:
                shares.append(on_device.experts)
        if not shares or self._model is None:
            return [{} for _ in self._pending]
        # Every rank has the metrics of its own tokens and layers, and zeros for all other layers.
        total = torch.stack(shares)  # [iteration, metric, layer]
        dist.all_reduce(total)

        # Select the layers with experts: the rows of dense layers are zero.
        has_experts = torch.tensor(self._model.moe_layer_pattern_with_mtp, dtype=torch.bool)
        names = get_metric_names(self._model)
        metrics = []
        for of_iteration in total.cpu():  # [metric, layer]
            values = of_iteration[:, has_experts].tolist()
            metrics.append(dict(zip(names, values, strict=True)))
        return metrics

    def _now(self) -> float:
        """Return the time, after the kernels that are queued on the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()  # kernels are asynchronous
        return self._clock()


class _Scalars(TypedDict, total=False):
    """Fields of `Iteration` that are scalars on the device."""

    grad_norm: float
    skipped: bool
    num_zeros_in_grad: float
    params_norm: float


def _read_scalars(interval: Sequence[OnDevice]) -> list[_Scalars]:
    """Return the scalars of each iteration; waits once for the device."""
    scalars: list[torch.Tensor] = []
    for on_device in interval:
        step = on_device.step
        for scalar in (step.grad_norm, step.skipped, step.num_zeros, on_device.params_norm):
            if scalar is not None:
                scalars.append(scalar.to(torch.float64))  # exact for all of them
    values = iter(torch.stack(scalars).tolist())

    metrics = []
    for on_device in interval:
        fields = _Scalars(grad_norm=next(values), skipped=bool(next(values)))
        if on_device.step.num_zeros is not None:
            fields["num_zeros_in_grad"] = next(values)
        if on_device.params_norm is not None:
            fields["params_norm"] = next(values)
        metrics.append(fields)
    return metrics


def reduce_losses(
    losses: Sequence[torch.Tensor], ps: ParallelState, of_rank: Sequence[float] = ()
) -> tuple[list[list[float]], list[list[float]]]:
    """Reduce [numerator, denominator] pairs of every rank to losses of the whole batch.

    Each tensor has several losses, [losses, 2]. Also returns the values of all ranks for each value
    `of_rank`, in the same message.

    Only the last stage has losses. Its tensor-parallel ranks have the same values, so only the
    first of them contributes. Collective.
    """
    # In fp64, so that the sum over ranks does not round.
    pairs = torch.stack(list(losses)).to(torch.float64)  # [iteration, losses, 2]
    if not (ps.pp.is_last and ps.tp.is_first):
        pairs.zero_()
    # A sum with zeros is a gather. Filling does not wait for the device.
    table = pairs.new_zeros(len(of_rank), ps.world_size)
    for row, value in zip(table, of_rank, strict=True):
        row[ps.rank].fill_(value)
    total = torch.cat((pairs.flatten(), table.flatten()))
    dist.all_reduce(total)

    total = total.cpu()  # waits for the device once
    sums = total[: pairs.numel()].view_as(pairs).tolist()
    values = total[pairs.numel() :].view_as(table).tolist()
    return [[_divide(*pair) for pair in of_iteration] for of_iteration in sums], values


def _divide(numerator: float, denominator: float) -> float:
    """Return a loss, which is not defined without a token that counts."""
    if denominator == 0:
        return math.nan
    return numerator / denominator

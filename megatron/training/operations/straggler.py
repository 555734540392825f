"""Times of all ranks, with the slowest one by name (--log-straggler)."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from megatron.core.deferred import start_max_reduce
from megatron.core.parallel_state import gather_objects
from megatron.training.config.run_options import OperationsConfig
from megatron.training.operations.collectives import CollectiveRecorder
from megatron.training.reporting.measurements import Timers
from megatron.training.restart.monitor import listen_at_node_address
from megatron.training.run import Run

logger = logging.getLogger(__name__)

INTERVAL = 15.0  # seconds after which a report is due, before --log-interval
SLOW = 1.1  # a rank is slow if it works this many times the median
_FORWARD = "forward-compute"
_BATCH = "batch-generator"
_NUM_PASSES = 3  # a backward pass, which is not timed, has twice the operations of a forward pass


class Measurement(NamedTuple):
    """Means over the iterations of a rank since its last report, in seconds."""

    rank: int
    host: str
    iteration: float
    work: float
    """Time of an iteration without waiting for other ranks; on a GPU, time of the forward passes,
    because its kernels wait instead of the host.
    """
    forward: float
    batch: float
    tflops: float
    power: float = 0.0  # W
    temperature: float = 0.0  # degrees Celsius
    utilization: float = 0.0  # %
    clock: float = 0.0  # MHz
    is_enabled: bool = True


class PhaseTimers(Timers):
    """The timers of a run, which also measure the forward passes and reading data."""

    def __init__(
        self, timers: Timers, device: torch.device, is_training: Callable[[], bool]
    ) -> None:
        vars(self).update(vars(timers))  # continue the measurements of `timers`
        self._is_training = is_training
        self._on_device = device.type == "cuda"
        self._totals: defaultdict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self, name: str, level: int = 1) -> Iterator[None]:
        with super().__call__(name, level):
            if name not in (_FORWARD, _BATCH) or not self._is_training():
                yield
            elif self._on_device and name == _FORWARD:
                # The host does not wait: the device records the times.
                start = torch.cuda.Event(enable_timing=True)
                stop = torch.cuda.Event(enable_timing=True)
                start.record()
                yield
                stop.record()
                self._events.append((name, start, stop))
            else:
                since = time.perf_counter()
                yield
                self._totals[name] += time.perf_counter() - since

    def take_phases(self) -> dict[str, float]:
        """Return the seconds by phase since the last call."""
        if self._events:
            torch.cuda.synchronize()
        for name, start, stop in self._events:
            self._totals[name] += start.elapsed_time(stop) / 1000
        self._events = []
        totals = dict(self._totals)
        self._totals.clear()
        return totals


class StragglerDetector:
    """Measures the iterations of this rank, and compares those of all ranks at intervals."""

    def __init__(self, config: OperationsConfig, run: Run, recorder: CollectiveRecorder) -> None:
        self._config = config
        self._run = run
        self._recorder = recorder
        self._timers = PhaseTimers(run.timers, run.device, lambda: run.chunks[0].training)
        run.timers = self._timers
        self._is_enabled = not config.disable_straggler_on_startup
        self._requested = self._is_enabled  # by the control port
        self._began = 0.0
        self._num_iterations = 0
        self._seconds = 0.0
        self._waited = 0.0
        self._last_report = time.monotonic()
        self._finish_vote: Callable[[], list[int]] | None = None
        self._listener = self._listen() if run.ps.rank == 0 else None

    def close(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # ends `accept`
            self._listener.close()

    def before_iteration(self) -> None:
        """Start the measurement of an iteration."""
        self._began = time.perf_counter()
        self._recorder.waited_seconds = 0.0

    def after_iteration(self) -> None:
        """End the measurement of an iteration, and report if it is time. Collective."""
        self._seconds += time.perf_counter() - self._began
        self._waited += self._recorder.waited_seconds
        self._num_iterations += 1
        iteration = self._run.state.iteration
        if not self._is_due(iteration):
            return
        measurements = gather_objects(self._measure())
        if self._is_enabled and self._run.ps.rank == 0:
            for row in format_report(measurements, self._config.straggler_minmax_count):
                logger.info(row)
            self._report_slowest(measurements, iteration)
        self._is_enabled = measurements[0].is_enabled  # all ranks follow rank 0

        # Measure the next interval.
        self._num_iterations = 0
        self._seconds = 0.0
        self._waited = 0.0
        self._last_report = time.monotonic()

    def _report_slowest(self, measurements: Sequence[Measurement], iteration: int) -> None:
        """Warn of a rank that is clearly slower, and send the slowest one to the writers."""
        text = describe_slowest(measurements)
        if text is not None:
            logger.warning(f"iteration {iteration}: {text}")
        if len(measurements) == 1:
            return
        slowest, median = find_slowest(measurements)
        ratio = slowest.work / max(median, 1e-9)
        for writer in self._run.writers:
            writer.scalars({"slowest-rank": slowest.rank, "slowest-rank-ratio": ratio}, iteration)

    def _is_due(self, iteration: int) -> bool:
        """Return whether to report after `iteration`, the same on all ranks.

        Clocks differ, so the ranks vote; the result is used one iteration later.
        """
        is_late = self._finish_vote is not None and self._finish_vote() == [1]
        seconds = time.monotonic() - self._last_report
        self._finish_vote = start_max_reduce([int(seconds >= INTERVAL)], self._run.device)
        return is_late or iteration % self._run.config.logging.log_interval == 0

    def _measure(self) -> Measurement:
        """Return the means per iteration since the last report."""
        run = self._run
        count = max(1, self._num_iterations)
        phases = self._timers.take_phases()
        forward = phases.get(_FORWARD, 0.0) / count
        work = (self._seconds - self._waited) / count
        on_device = run.device.type == "cuda"
        batch_size = run.batches.global_batch_size_at(run.state.consumed_train_samples)
        tokens = batch_size * run.config.data.seq_length / run.ps.world_size
        power, temperature, utilization, clock = measure_device(run.device)
        return Measurement(
            rank=run.ps.rank,
            host=socket.gethostname(),
            iteration=self._seconds / count,
            work=forward if on_device else work,
            forward=forward,
            batch=phases.get(_BATCH, 0.0) / count,
            tflops=run.flops_per_token * tokens / max(forward * _NUM_PASSES, 1e-9) / 1e12,
            power=power,
            temperature=temperature,
            utilization=utilization,
            clock=clock,
            is_enabled=self._requested,
        )

    def _listen(self) -> socket.socket | None:
        """Let a request to --straggler-ctrlr-port on rank 0 turn the reports on and off."""
        address = os.environ.get("MASTER_ADDR", "127.0.0.1")
        port = self._config.straggler_ctrlr_port
        try:
            listener = listen_at_node_address(address, port)
        except OSError as error:
            logger.warning(
                f"--straggler-ctrlr-port {port} cannot be used, so reports cannot be turned on or "
                f"off during the run: {error}"
            )
            return None
        thread = threading.Thread(
            target=self._serve, args=(listener,), name="straggler-control", daemon=True
        )
        thread.start()
        return listener

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(1.0)
                connection.recv(4096)
                self._requested = not self._requested
                state = "on" if self._requested else "off"
                text = f"straggler reports are {state} from the next report\n"
                head = f"HTTP/1.0 200 OK\r\nContent-Length: {len(text)}\r\n\r\n"
                connection.sendall((head + text).encode())


def measure_device(device: torch.device) -> tuple[float, float, float, float]:
    """Return power (W), temperature (degrees Celsius), utilization (%) and clock (MHz) of a GPU.

    All are 0 for a CPU, and without NVML (package nvidia-ml-py).
    """
    if device.type != "cuda":
        return 0.0, 0.0, 0.0, 0.0
    try:
        return (
            torch.cuda.power_draw(device) / 1000,
            torch.cuda.temperature(device),
            torch.cuda.utilization(device),
            torch.cuda.clock_rate(device),
        )
    except (ModuleNotFoundError, RuntimeError):
        return 0.0, 0.0, 0.0, 0.0


_COLUMNS = (  # label, field, factor, unit
    ("Rtt", "forward", 1000.0, "ms"),
    ("Pwr", "power", 1.0, "W"),
    ("Tmp", "temperature", 1.0, "C"),
    ("Utl", "utilization", 1.0, "%"),
    ("Clk", "clock", 1.0, "MHz"),
    ("DRtt", "batch", 1000.0, "ms"),
    ("Etpt", "tflops", 1.0, "TF"),
)


def format_report(measurements: Sequence[Measurement], count: int) -> list[str]:
    """Return the lines of a report in Megatron-LM's form: minima and maxima with their ranks.

    With `count` above 1, also the ranks with the lowest and highest throughput.
    """
    row = ""
    for label, field, factor, unit in _COLUMNS:
        ordered = sorted(measurements, key=lambda measurement: getattr(measurement, field))
        if getattr(ordered[-1], field) == 0:  # not measured
            continue
        for prefix, measurement in (("Mn", ordered[0]), ("Mx", ordered[-1])):
            value = factor * getattr(measurement, field)
            row += f" | {prefix}{label}/Rnk: {value:.2f}{unit}/{measurement.rank}"
    rows = [row.strip()]
    if count > 1:
        ordered = sorted(measurements, key=lambda measurement: measurement.tflops)
        for title, chosen in (
            (f"Bottom {count} Ranks with lowest  Etpt(TF)", ordered[:count]),
            (f"Top    {count} Ranks with highest Etpt(TF)", ordered[-count:]),
        ):
            listed = ", ".join(f"{rank.tflops:.2f}/{rank.rank}" for rank in chosen)
            rows.append(f"^^^^ {title}: {listed}")
    return rows


def find_slowest(measurements: Sequence[Measurement]) -> tuple[Measurement, float]:
    """Return the rank that works the longest, and the median work of the other ranks."""
    slowest = max(measurements, key=lambda measurement: measurement.work)
    works = [rank.work for rank in measurements if rank.rank != slowest.rank]
    return slowest, statistics.median(works)


def describe_slowest(measurements: Sequence[Measurement]) -> str | None:
    """Return a text about the slowest rank, None if no rank is clearly slower than the others."""
    if len(measurements) == 1:
        return None
    slowest, median = find_slowest(measurements)
    if slowest.work < SLOW * median:
        return None
    return (
        f"rank {slowest.rank} ({slowest.host}) is the slowest: it works "
        f"{1000 * slowest.work:.1f} ms per iteration, the median of the others is "
        f"{1000 * median:.1f} ms; an iteration takes {1000 * slowest.iteration:.1f} ms"
    )

"""What is measured besides the loss: memory in use, the norm of the parameters, operations per
token, timers of the phases of an iteration, and traces (`--profile`).
"""

from __future__ import annotations

import logging
import os
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from megatron.core.distributed import DistributedDataParallel
from megatron.core.module import param_info
from megatron.core.optimizer import counts_for_model
from megatron.core.parallel_state import ParallelState
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.options import ProfilingConfig
from megatron.training.reporting.logging import EVERY_RANK

logger = logging.getLogger(__name__)

_STATM = Path("/proc/self/statm")  # Linux


def memory(device: torch.device) -> dict[str, float]:
    """Numbers of this process, which trains on `device`; those called bytes are."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        return {
            "mem-allocated-bytes": stats.get("allocated_bytes.all.current", 0),
            "mem-max-allocated-bytes": stats.get("allocated_bytes.all.peak", 0),
            "mem-reserved-bytes": stats.get("reserved_bytes.all.current", 0),
            "mem-max-reserved-bytes": stats.get("reserved_bytes.all.peak", 0),
            "mem-alloc-retries": stats.get("num_alloc_retries", 0),
        }
    values: dict[str, float] = {
        "mem-max-resident-bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    }
    if _STATM.exists():
        values["mem-resident-bytes"] = int(_STATM.read_text().split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )
    return values


def memory_line(iteration: int, device: torch.device) -> str:
    """The maximum of every number over all ranks, with its rank. Collective."""
    gathered: list[dict[str, float]] = [{}] * dist.get_world_size()
    dist.all_gather_object(gathered, memory(device))
    parts = []
    for name in gathered[0]:
        largest = max(range(len(gathered)), key=lambda rank: gathered[rank][name])
        value = gathered[largest][name]
        what = name.removeprefix("mem-").removesuffix("-bytes").replace("-", " ")
        amount = f"{value / 1e9:.3f} GB" if name.endswith("-bytes") else f"{value:.0f}"
        parts.append(f"{what} {amount} (rank {largest})")
    return f"memory after iteration {iteration}, maximum over ranks: {', '.join(parts)}"


@torch.no_grad()
def params_norm(chunks: Sequence[DistributedDataParallel], ps: ParallelState) -> torch.Tensor:
    """Euclidean norm over the whole model, each parameter counted once; a scalar on the device.
    Collective.
    """
    total = torch.zeros((), dtype=torch.float64, device=chunks[0].flat_buffers[0].param_data.device)
    for chunk in chunks:
        chunk.finish_param_sync()
        for param in chunk.parameters():
            info = param_info(param)
            if counts_for_model(info, ps, sharded=False):
                for values in info.fp8.tensors if info.fp8 is not None else (param,):
                    total += torch.linalg.vector_norm(values.float()).double().square()
    if ps.config.splits_experts:
        dist.all_reduce(total)
    elif ps.model.size > 1:
        dist.all_reduce(total, group=ps.model.group)
    return total.sqrt()


def model_flops_per_token(config: TransformerConfig, seq_length: int, vocab_size: int) -> float:
    """Operations of forward and backward per token: 2 per multiply-add, backward twice the forward.

    Counts the matrix products that the mathematics needs: projections, MLP, attention over the keys
    that the causal mask (and the window) leaves, logits. Neither recomputed activations nor
    element-wise work count (Chowdhery et al. 2022, "PaLM", appendix B; the convention of
    Megatron-LM's TFLOP/s).
    """
    heads = config.num_attention_heads
    qkv = config.hidden_size * (heads + 2 * config.query_groups) * config.head_dim
    if config.multi_latent_attention:
        query = config.q_lora_rank
        latent = config.kv_lora_rank
        qkv = config.hidden_size * (latent + config.qk_pos_emb_head_dim)
        qkv += latent * heads * (config.qk_head_dim + config.v_head_dim)
        qkv += (query or config.hidden_size) * heads * config.qk_width + config.hidden_size * (
            query or 0
        )
    windows = sum(config.window_pattern) / config.num_layers
    keys = windows * attended_keys(config, seq_length) + (1 - windows) * seq_length / 2
    scores_and_values = heads * (config.qk_width + config.v_width) * keys
    projection = heads * config.v_width * config.hidden_size
    per_width = (3 if config.gated else 2) * config.hidden_size
    mlps = per_width * config.ffn_size * (config.num_layers - sum(config.moe_layer_pattern))
    if config.has_experts:  # those that a token goes to
        widths = config.moe_router_topk * config.moe_ffn_size + (
            config.moe_shared_expert_intermediate_size or 0
        )
        mlps += sum(config.moe_layer_pattern) * (
            per_width * widths + config.hidden_size * config.experts
        )
    logits = config.hidden_size * vocab_size
    return 6 * (config.num_layers * (qkv + scores_and_values + projection) + mlps + logits)


def attended_keys(config: TransformerConfig, seq_length: int) -> float:
    """Keys that a token sees on average in a layer with the window, if the model has one: at most
    half the sequence.
    """
    left = (
        seq_length
        if config.window_size is None or config.window_size[0] < 0
        else config.window_size[0]
    )
    left = min(left, seq_length)
    return left - left * left / (2 * seq_length)


class Timers:
    """Accumulates seconds per name; a timer above `level` costs nothing.

    On CUDA an active timer synchronizes the device at both ends, so level 0 keeps the device
    running ahead of Python. While `traced`, the blocks of all levels are ranges in the profiler's
    trace.
    """

    def __init__(self, level: int, option: str, device: torch.device) -> None:
        self.level = level
        self._option = option
        self._device = device
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self.traced = False

    @contextmanager
    def __call__(self, name: str, level: int = 1) -> Iterator[None]:
        """Time the block under `name`."""
        with torch.profiler.record_function(name) if self.traced else nullcontext():
            if level > self.level:
                yield
                return
            start = self._now()  # waits for the device: kernels are asynchronous
            yield
            self._seconds[name] += self._now() - start

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def take(self) -> dict[str, list[float]]:
        """Seconds of every rank by name since the last call, and start again. Collective if the
        level is above 0.
        """
        if self.level == 0:
            return {}
        gathered: list[dict[str, float]] = [{}] * dist.get_world_size()
        dist.all_gather_object(gathered, dict(self._seconds))
        self._seconds.clear()
        names = list(dict.fromkeys(name for seconds in gathered for name in seconds))
        return {name: [seconds.get(name, 0.0) for seconds in gathered] for name in names}

    def report(self, taken: dict[str, list[float]], iterations: int) -> str:
        """The lines of the log for what `take` gave, in milliseconds per iteration."""
        if not taken:
            return ""
        title, form = _SHOWN[self._option]
        rows = {name: [1000 * s / iterations for s in seconds] for name, seconds in taken.items()}
        return "\n".join(
            [
                f"{title} (ms):",
                *(f"    {name + ' ':.<46}: {form(row)}" for name, row in rows.items()),
            ]
        )


# By --timing-log-option, of the seconds of all ranks: what the lines show, and how.
_SHOWN: dict[str, tuple[str, Callable[[list[float]], str]]] = {
    "max": ("max time across ranks", lambda values: f"{max(values):.2f}"),
    "minmax": (
        "(min, max) time across ranks",
        lambda values: f"({min(values):.2f}, {max(values):.2f})",
    ),
    "all": (
        "times across ranks",
        lambda values: "  ".join(f"rank {r}: {v:.2f}" for r, v in enumerate(values)),
    ),
}


class StepProfiler:
    """Sequence of calls: `before` every iteration, on any rank; leaving the context ends a trace
    that is still open.

    The phases of an iteration are ranges of the trace, under the names of the timers.
    """

    def __init__(
        self, config: ProfilingConfig, tensorboard_dir: str | None, rank: int, timers: Timers
    ) -> None:
        self._config = config
        self._rank = rank
        self._timers = timers
        self._directory = Path(config.profile_dir or tensorboard_dir or "profile")
        self._wanted = config.profile and rank in (config.profile_ranks or [0])
        self._profiler: profile | None = None
        self._first = self._last = 0
        if self._wanted:
            _make_writable(self._directory)

    def __enter__(self) -> StepProfiler:
        return self

    def before(self, iteration: int) -> None:
        """Begin or end the trace where `iteration` is the first that is in it or no longer in it."""
        if self._profiler is not None and iteration >= self._config.profile_step_end:
            self._finish(iteration - 1)
        if (
            self._wanted
            and self._config.profile_step_start <= iteration < self._config.profile_step_end
        ):
            self._start(iteration)
        self._last = iteration

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._profiler is not None:
            self._finish(self._last)
        elif self._wanted and kind is None:
            window = f"{self._config.profile_step_start} to {self._config.profile_step_end - 1}"
            logger.warning(
                f"rank {self._rank} trained none of iterations {window}: no trace", extra=EVERY_RANK
            )

    def _start(self, iteration: int) -> None:
        self._wanted = False
        self._first = iteration
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities, record_shapes=True, profile_memory=True)
        self._profiler.start()
        self._timers.traced = True

    def _finish(self, last: int) -> None:
        assert self._profiler is not None
        self._profiler.stop()
        self._timers.traced = False
        name = f"rank_{self._rank}_iterations_{self._first}_to_{last}"
        trace = (
            self._directory / f"{name}.pt.trace.json"
        )  # the ending by which TensorBoard finds traces
        self._profiler.export_chrome_trace(str(trace))
        where = "device" if torch.cuda.is_available() else "cpu"
        table = self._profiler.key_averages().table(
            sort_by=f"self_{where}_time_total", row_limit=40
        )
        (self._directory / f"{name}.txt").write_text(table)
        logger.info(
            f"rank {self._rank}: trace of iterations {self._first} to {last} in {trace}",
            extra=EVERY_RANK,
        )
        self._profiler = None


def _make_writable(directory: Path) -> None:
    """ValueError before training if no trace could be written there after it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK):
            raise PermissionError("it is not writable")
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(
            f"--profile: no traces in {directory}: {reason}; give another --profile-dir"
        ) from None

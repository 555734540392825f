"""Learning rate and weight decay as functions of the number of consumed samples."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron.core.optimizer.config import OptimizerConfig, SchedulerConfig

logger = logging.getLogger(__name__)

# What is left of (max - min) after fraction r of the decay.
DECAY: dict[str, Callable[[float], float]] = {
    "linear": lambda r: 1.0 - r,
    "cosine": lambda r: 0.5 * (math.cos(math.pi * r) + 1.0),
    "exponential": lambda r: 2.0 * 0.5**r - 1.0,
    "minus_sqrt": lambda r: 1.0 - math.sqrt(r),
}


@dataclass(frozen=True)
class Schedule:
    """Pure functions of `num_steps`; steps are samples. Fields are named as in Megatron-LM's
    checkpoints.
    """

    max_lr: float
    min_lr: float
    lr_decay_steps: int
    lr_warmup_steps: float = 0
    lr_decay_style: str = "linear"
    init_lr: float = 0.0
    wsd_decay_steps: int | None = None
    wsd_decay_style: str = "exponential"
    start_wd: float = 0.0
    end_wd: float = 0.0
    wd_incr_steps: int = 0
    wd_incr_style: str = "constant"

    def __post_init__(self) -> None:
        if self.lr_decay_steps < 1 or not 0 <= self.lr_warmup_steps < self.lr_decay_steps:
            raise ValueError(
                f"the learning rate would warm up over {self.lr_warmup_steps} samples and end its decay at sample "
                f"{self.lr_decay_steps}: the warm-up must be shorter; change --lr-warmup-* or --lr-decay-*"
            )
        if not 0 <= self.init_lr <= self.max_lr:
            raise ValueError(
                f"--lr-warmup-init {self.init_lr} must lie between 0 and --lr {self.max_lr}"
            )
        if (
            self.lr_decay_style == "WSD"
            and not 0 < (self.wsd_decay_steps or 0) <= self.lr_decay_steps
        ):
            raise ValueError(
                f"--lr-decay-style WSD needs the length of its decay phase, --lr-wsd-decay-iters or "
                f"--lr-wsd-decay-samples, from 1 sample to the {self.lr_decay_steps} of the whole schedule; got "
                f"{self.wsd_decay_steps} samples"
            )

    def learning_rate(
        self, num_steps: int, max_lr: float | None = None, min_lr: float | None = None
    ) -> float:
        """Learning rate after `num_steps` samples, between other ends if given."""
        max_lr = self.max_lr if max_lr is None else max_lr
        min_lr = self.min_lr if min_lr is None else min_lr
        # The order of these cases is Megatron-LM's: warm-up first, and the end of the decay is an
        # exact minimum.
        if self.lr_warmup_steps > 0 and num_steps <= self.lr_warmup_steps:
            return self.init_lr + (max_lr - self.init_lr) * num_steps / self.lr_warmup_steps
        if self.lr_decay_style == "constant":
            return max_lr
        if num_steps > self.lr_decay_steps:
            return min_lr
        if self.lr_decay_style == "inverse-square-root":
            return max(
                min_lr,
                max_lr * math.sqrt(max(self.lr_warmup_steps, 1)) / math.sqrt(max(num_steps, 1)),
            )
        if self.lr_decay_style == "WSD":
            assert self.wsd_decay_steps is not None
            into_decay = max(0, num_steps - (self.lr_decay_steps - self.wsd_decay_steps))
            left = DECAY[self.wsd_decay_style](into_decay / self.wsd_decay_steps)
        else:
            ratio = (num_steps - self.lr_warmup_steps) / (
                self.lr_decay_steps - self.lr_warmup_steps
            )
            left = DECAY[self.lr_decay_style](ratio)
        return min_lr + left * (max_lr - min_lr)

    def weight_decay(self, num_steps: int) -> float:
        """Weight decay after `num_steps` samples."""
        if self.wd_incr_style == "constant" or num_steps > self.wd_incr_steps:
            return self.end_wd
        left = DECAY[self.wd_incr_style](num_steps / self.wd_incr_steps)
        return self.end_wd + left * (self.start_wd - self.end_wd)


def make_schedule(
    config: OptimizerConfig,
    scheduler: SchedulerConfig,
    *,
    global_batch_size: int,
    train_iters: int | None = None,
    train_samples: int | None = None,
) -> Schedule:
    """The schedule of a run whose length is given in iterations, of `global_batch_size` samples
    each, or in samples.
    """
    if config.lr is None:
        raise ValueError("--lr must be given")
    if (train_iters is None) == (train_samples is None):
        raise ValueError(
            f"give one of --train-iters (got {train_iters}) and --train-samples (got {train_samples})"
        )
    unit = "samples" if train_iters is None else "iters"
    other = "iters" if train_iters is None else "samples"
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        if value := getattr(scheduler, f"{name}_{other}"):
            flags = (f"--{name.replace('_', '-')}-{u}" for u in (other, unit))
            raise ValueError(
                f"{next(flags)} {value} goes with --train-{other}; with --train-{unit} give {next(flags)}"
            )
    scale = global_batch_size if train_samples is None else 1
    length = (train_iters or train_samples or 0) * scale
    decay, warmup, wsd = (
        getattr(scheduler, f"{name}_{unit}") for name in ("lr_decay", "lr_warmup", "lr_wsd_decay")
    )
    decay_steps = length if decay is None else decay * scale
    fraction = scheduler.lr_warmup_fraction
    start_wd, end_wd = config.weight_decay_range
    return Schedule(
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_decay_steps=decay_steps,
        lr_warmup_steps=warmup * scale if fraction is None else fraction * decay_steps,
        lr_decay_style=scheduler.lr_decay_style,
        init_lr=scheduler.lr_warmup_init,
        wsd_decay_steps=None if wsd is None else wsd * scale,
        wsd_decay_style=scheduler.lr_wsd_decay_style,
        start_wd=start_wd,
        end_wd=end_wd,
        wd_incr_steps=length,
        wd_incr_style=config.weight_decay_incr_style,
    )


_STORED = (
    "max_lr", "lr_warmup_steps", "lr_decay_style", "lr_decay_steps", "min_lr",
    "start_wd", "end_wd", "wd_incr_style", "wd_incr_steps", "init_lr", "wsd_decay_steps", "wsd_decay_style",
)  # fmt: skip


_IDLE: dict[
    str, Callable[[Mapping[str, Any]], bool]
] = {  # field -> the schedules in which it means nothing
    "lr_decay_steps": lambda state: state.get("lr_decay_style") == "constant",
    "min_lr": lambda state: state.get("lr_decay_style") == "constant",
    "start_wd": lambda state: state.get("wd_incr_style") == "constant",
    "wd_incr_steps": lambda state: state.get("wd_incr_style") == "constant",
    "wsd_decay_steps": lambda state: state.get("lr_decay_style") != "WSD",
    "wsd_decay_style": lambda state: state.get("lr_decay_style") != "WSD",
    "init_lr": lambda state: not state.get("lr_warmup_steps"),
}


class OptimizerParamScheduler:
    """Writes `lr` and `weight_decay` into the optimizer's `param_groups`, at once and after every
    `step`.
    """

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        schedule: Schedule,
        *,
        override: bool = False,
        use_checkpoint: bool = False,
    ) -> None:
        """`override`: on load the given schedule wins; `use_checkpoint`: the stored one; neither: they must agree."""
        assert not (override and use_checkpoint)
        self.param_groups = param_groups
        self.schedule = schedule
        self.num_steps = 0
        self._override = override
        self._use_checkpoint = use_checkpoint
        self._apply()

    def step(self, increment: int) -> None:
        """`increment` more samples have been consumed."""
        self.num_steps += increment
        self._apply()

    def _apply(self) -> None:
        for group in self.param_groups:
            if not group["is_decoupled_lr"]:
                group["max_lr"] = self.schedule.max_lr
                group["min_lr"] = self.schedule.min_lr
            lr = self.schedule.learning_rate(self.num_steps, group["max_lr"], group["min_lr"])
            group["lr"] = lr * group["lr_mult"]
            group["weight_decay"] = self.schedule.weight_decay(self.num_steps) * group["wd_mult"]

    def state_dict(self) -> dict[str, Any]:
        """Megatron-LM's `opt_param_scheduler`."""
        return {
            "num_steps": self.num_steps,
            **{name: getattr(self.schedule, name) for name in _STORED},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the position, and settle differences between the stored and the given schedule.

        Raises ValueError naming all of them if neither is to win. A constant rate has no length: it
        may go on longer.
        """
        now = {name: getattr(self.schedule, name) for name in _STORED}
        different = {
            name: state[name] for name in _STORED if name in state and state[name] != now[name]
        }
        if self._use_checkpoint:
            self.schedule = replace(self.schedule, **different)
        elif not self._override:
            idle = {name for name, is_idle in _IDLE.items() if is_idle(state) and is_idle(now)}
            different = {name: value for name, value in different.items() if name not in idle}
        if different:
            what = ", ".join(
                f"{name}: {value} (now {now[name]})" for name, value in different.items()
            )
            if not (self._use_checkpoint or self._override):
                raise ValueError(
                    f"the checkpoint has another schedule: {what}; steps are samples. Give "
                    "--override-opt_param-scheduler to go on with the flags, --use-checkpoint-opt_param-scheduler to "
                    "go on with the checkpoint's, or the flags of the first run"
                )
            source, other = (
                ("checkpoint", "flags") if self._use_checkpoint else ("flags", "checkpoint")
            )
            logger.warning("schedule taken from the %s, not from the %s: %s", source, other, what)
        if "num_steps" not in state:
            raise ValueError(
                "the checkpoint's schedule has no num_steps: give --finetune or --no-load-optim"
            )
        self.num_steps = state["num_steps"]
        self._apply()

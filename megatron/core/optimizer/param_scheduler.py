"""Learning rate and weight decay as functions of the number of consumed samples."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.core.optimizer.optimizer_config import OptimizerConfig, SchedulerConfig

logger = logging.getLogger(__name__)

# Remaining fraction of (max - min) after fraction r of the decay.
DECAY: dict[str, Callable[[float], float]] = {
    "linear": lambda r: 1.0 - r,
    "cosine": lambda r: 0.5 * (math.cos(math.pi * r) + 1.0),
    "exponential": lambda r: 2.0 * 0.5**r - 1.0,
    "minus_sqrt": lambda r: 1.0 - math.sqrt(r),
}


@dataclass(frozen=True)
class Schedule:
    """Learning rate and weight decay as pure functions of `num_steps`; a step is a sample.

    Fields are named as in Megatron-LM's checkpoints.
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
                f"the warmup of the learning rate ({self.lr_warmup_steps} samples) must be shorter "
                f"than its decay (until sample {self.lr_decay_steps}): change --lr-warmup-* or "
                "--lr-decay-*"
            )
        if not 0 <= self.init_lr <= self.max_lr:
            raise ValueError(
                f"--lr-warmup-init {self.init_lr} must be between 0 and --lr {self.max_lr}"
            )
        decay_phase = -1 if self.wsd_decay_steps is None else self.wsd_decay_steps
        if self.lr_decay_style == "WSD" and not 0 <= decay_phase <= self.lr_decay_steps:
            raise ValueError(
                "--lr-decay-style WSD requires the length of its decay phase, --lr-wsd-decay-iters "
                f"or --lr-wsd-decay-samples, between 0 and {self.lr_decay_steps} samples (the "
                f"whole schedule); got {self.wsd_decay_steps} samples"
            )

    def learning_rate(
        self, num_steps: int, max_lr: float | None = None, min_lr: float | None = None
    ) -> float:
        """Return the learning rate after `num_steps` samples, with other limits if given."""
        if max_lr is None:
            max_lr = self.max_lr
        if min_lr is None:
            min_lr = self.min_lr
        warmup = self.lr_warmup_steps
        # The order of these cases is Megatron-LM's: the warmup first, then the exact minimum at the
        # end of the decay.
        if warmup > 0 and num_steps <= warmup:
            return self.init_lr + (max_lr - self.init_lr) * num_steps / warmup
        if self.lr_decay_style == "constant":
            return max_lr
        if num_steps > self.lr_decay_steps:
            return min_lr
        # Continuous at the end of the warmup, where it equals max_lr.
        if self.lr_decay_style == "inverse-square-root":
            lr = max_lr * math.sqrt(max(warmup, 1)) / math.sqrt(max(num_steps, 1))
            return max(min_lr, lr)
        if self.lr_decay_style == "WSD":
            # Stable until the decay phase at the end.
            assert self.wsd_decay_steps is not None
            decay_start = self.lr_decay_steps - self.wsd_decay_steps
            # The phase may be empty: the rate is then constant, as in Megatron-LM.
            ratio = max(0, num_steps - decay_start) / max(1, self.wsd_decay_steps)
            remaining = DECAY[self.wsd_decay_style](ratio)
        else:
            ratio = (num_steps - warmup) / (self.lr_decay_steps - warmup)
            remaining = DECAY[self.lr_decay_style](ratio)
        return min_lr + remaining * (max_lr - min_lr)

    def weight_decay(self, num_steps: int) -> float:
        """Return the weight decay after `num_steps` samples."""
        if self.wd_incr_style == "constant" or num_steps > self.wd_incr_steps:
            return self.end_wd
        ratio = num_steps / self.wd_incr_steps
        remaining = DECAY[self.wd_incr_style](ratio)
        return self.end_wd + remaining * (self.start_wd - self.end_wd)


def make_schedule(
    config: OptimizerConfig,
    scheduler: SchedulerConfig,
    *,
    global_batch_size: int,
    train_iters: int | None = None,
    train_samples: int | None = None,
) -> Schedule:
    """Return the schedule of a run.

    Its length is given in iterations, of `global_batch_size` samples each, or in samples.
    """
    if config.lr is None:
        raise ValueError("--lr must be given")
    if (train_iters is None) == (train_samples is None):
        raise ValueError(
            f"give one of --train-iters (got {train_iters}) and --train-samples "
            f"(got {train_samples})"
        )
    # The schedule counts samples, so that the batch size may change during a run.
    if train_samples is None:
        unit = "iters"
        samples_per_unit = global_batch_size
        _check_unit(scheduler, unit, other_unit="samples")
    else:
        unit = "samples"
        samples_per_unit = 1
        _check_unit(scheduler, unit, other_unit="iters")

    def to_samples(name: str) -> int | None:
        """Return the value of the flag for this unit."""
        value: int | None = getattr(scheduler, f"{name}_{unit}")
        if value is None:
            return None
        return value * samples_per_unit

    # By default the learning rate decays until the end of training.
    length = (train_iters or train_samples or 0) * samples_per_unit
    decay_steps = to_samples("lr_decay")
    if decay_steps is None:
        decay_steps = length
    # A fraction of the decay may be a fractional number of samples, as in Megatron-LM.
    warmup_steps: float = to_samples("lr_warmup") or 0
    if scheduler.lr_warmup_fraction is not None:
        warmup_steps = scheduler.lr_warmup_fraction * decay_steps
    start_wd, end_wd = config.weight_decay_range
    return Schedule(
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_decay_steps=decay_steps,
        lr_warmup_steps=warmup_steps,
        lr_decay_style=scheduler.lr_decay_style,
        init_lr=scheduler.lr_warmup_init,
        wsd_decay_steps=to_samples("lr_wsd_decay"),
        wsd_decay_style=scheduler.lr_wsd_decay_style,
        start_wd=start_wd,
        end_wd=end_wd,
        wd_incr_steps=length,
        wd_incr_style=config.weight_decay_incr_style,
    )


def _check_unit(scheduler: SchedulerConfig, unit: str, other_unit: str) -> None:
    """Raise ValueError for a length in `other_unit` when the run's length is in `unit`."""
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        value = getattr(scheduler, f"{name}_{other_unit}")
        if value:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{flag}-{other_unit} {value} requires --train-{other_unit}; with --train-{unit} "
                f"use {flag}-{unit}"
            )


# Fields of a schedule that checkpoints store.
_STORED = (
    "max_lr",
    "lr_warmup_steps",
    "lr_decay_style",
    "lr_decay_steps",
    "min_lr",
    "start_wd",
    "end_wd",
    "wd_incr_style",
    "wd_incr_steps",
    "init_lr",
    "wsd_decay_steps",
    "wsd_decay_style",
)


def _has_effect(name: str, state: Mapping[str, Any]) -> bool:
    """Return whether the stored field `name` has an effect in the schedule `state`."""
    if name in ("lr_decay_steps", "min_lr"):
        return state.get("lr_decay_style") != "constant"
    if name in ("start_wd", "wd_incr_steps"):
        return state.get("wd_incr_style") != "constant"
    if name in ("wsd_decay_steps", "wsd_decay_style"):
        return state.get("lr_decay_style") == "WSD"
    if name == "init_lr":
        return bool(state.get("lr_warmup_steps"))
    return True


_DECOUPLED = "--decoupled-lr and --decoupled-min-lr"


def _find_decoupled_limits(groups: Sequence[Mapping[str, Any]]) -> tuple[Any, Any] | None:
    """Return the maximum and minimum of the separate learning rate; None if there is none.

    They are None where another program has not stored them.
    """
    for group in groups:
        if group.get("is_decoupled_lr"):
            return group.get("max_lr"), group.get("min_lr")
    return None


class OptimizerParamScheduler:
    """Writes `lr` and `weight_decay` into the `param_groups` of an optimizer.

    It does so on construction, after each `step`, and after a load.
    """

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        schedule: Schedule,
        *,
        override: bool = False,
        use_checkpoint: bool = False,
    ) -> None:
        """Initialize at sample 0.

        On load, `override` selects the given schedule and `use_checkpoint` the stored one; without
        either they must agree.
        """
        assert not (override and use_checkpoint)
        self.param_groups = param_groups
        self.schedule = schedule
        self.num_steps = 0
        self._override = override
        self._use_checkpoint = use_checkpoint
        self._apply()

    def step(self, increment: int) -> None:
        """Advance by `increment` consumed samples."""
        self.num_steps += increment
        self._apply()

    def _apply(self) -> None:
        """Write the values of the current step into the groups."""
        # A pure function of the position: a resumed run gets the same values.
        schedule = self.schedule
        weight_decay = schedule.weight_decay(self.num_steps)
        for group in self.param_groups:
            if not group["is_decoupled_lr"]:
                # A load may have changed the schedule.
                scale = group.get("lr_scale", 1.0)
                group["max_lr"] = schedule.max_lr * scale
                group["min_lr"] = schedule.min_lr * scale
            lr = schedule.learning_rate(self.num_steps, group["max_lr"], group["min_lr"])
            # Multipliers as Megatron-LM stores them; `wd_mult` is 0 for parameters without weight
            # decay.
            group["lr"] = lr * group["lr_mult"]
            group["weight_decay"] = weight_decay * group["wd_mult"]

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the form of Megatron-LM's `opt_param_scheduler`."""
        return {"num_steps": self.num_steps, **self._collect_fields()}

    def load_state_dict(
        self, state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Restore the position, and resolve differences between the stored and the given schedule.

        `groups` are the stored parameter groups, with the limits of --decoupled-lr. Raises
        ValueError naming all differences unless one of the schedules has precedence. A field that
        has no effect may differ: a constant learning rate, for example, may go on longer.
        """
        # Compare the schedules.
        current = self._collect_fields()
        different: dict[str, Any] = {}
        for name in _STORED:
            if name in state and state[name] != current[name]:
                different[name] = state[name]
        if groups:
            stored_limits = _find_decoupled_limits(groups)
            current[_DECOUPLED] = _find_decoupled_limits(self.param_groups)
            is_known = stored_limits is None or None not in stored_limits
            if is_known and stored_limits != current[_DECOUPLED]:
                different[_DECOUPLED] = stored_limits

        # Select one of them.
        if self._use_checkpoint:
            if _DECOUPLED in different:
                self._use_decoupled_limits(different[_DECOUPLED])
            fields = {name: value for name, value in different.items() if name != _DECOUPLED}
            self.schedule = replace(self.schedule, **fields)
        elif not self._override:
            for name in list(different):
                has_effect = _has_effect(name, state) or _has_effect(name, current)
                if not has_effect and name != _DECOUPLED:
                    del different[name]
        if different:
            self._report_differences(different, current)

        # Restore the position.
        if "num_steps" not in state:
            raise ValueError(
                "the checkpoint's schedule has no num_steps: use --finetune or --no-load-optim"
            )
        self.num_steps = state["num_steps"]
        self._apply()

    def _use_decoupled_limits(self, limits: tuple[Any, Any] | None) -> None:
        """Set the limits of the learning rate of the embedding and the output layer."""
        decoupled = [group for group in self.param_groups if group["is_decoupled_lr"]]
        # The flag creates a parameter group of its own, which the optimizer of this run has or not.
        if limits is None or not decoupled:
            fix = "remove --decoupled-lr"
            if limits is not None:
                fix = f"give --decoupled-lr {limits[0]} --decoupled-min-lr {limits[1]}"
            raise ValueError(
                "--use-checkpoint-opt_param-scheduler: the checkpoint has another separate "
                f"learning rate of the embedding and the output layer: {fix}"
            )
        for group in decoupled:
            group["max_lr"], group["min_lr"] = limits

    def _collect_fields(self) -> dict[str, Any]:
        """Return the fields of the schedule that checkpoints store."""
        return {name: getattr(self.schedule, name) for name in _STORED}

    def _report_differences(self, different: Mapping[str, Any], current: Mapping[str, Any]) -> None:
        """Log the stored values that differ, or raise ValueError without precedence."""
        values = []
        for name, value in different.items():
            values.append(f"{name}: {value} (now {current[name]})")
        listed = ", ".join(values)
        # Without a flag that gives one of them precedence, both could be meant.
        if self._use_checkpoint:
            logger.warning("schedule taken from the checkpoint, not from the flags: %s", listed)
        elif self._override:
            logger.warning("schedule taken from the flags, not from the checkpoint: %s", listed)
        else:
            raise ValueError(
                f"the checkpoint has another schedule: {listed}; steps are samples. Use "
                "--override-opt_param-scheduler to continue with the schedule of the flags, "
                "--use-checkpoint-opt_param-scheduler to continue with the checkpoint's, or the "
                "flags of the first run"
            )

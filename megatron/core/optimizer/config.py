"""Options of the optimizer and of its schedules. Field names and defaults are Megatron-LM's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.flags import find_range_problems, flag, raise_problems


@dataclass
class OptimizerConfig:
    """The update rule, clipping, and loss scaling."""

    optimizer: str = flag("adam", choices=("adam", "sgd", "ademamix", "muon"))
    """Update rule: adam is AdamW (decoupled weight decay), sgd has momentum and weight decay in the
    gradient, muon orthogonalizes the updates of matrices and leaves the rest to adam, ademamix is
    adam with a second, slower mean.
    """
    optimizer_impl: str = flag("torch", choices=("torch", "apex"))
    """Whose kernels compute adam and the norm of gradients."""
    lr: float | None = flag(None, at_least=0)
    """Highest learning rate of the schedule."""
    min_lr: float = flag(0.0, at_least=0)
    """Learning rate at and after the end of the decay."""
    decoupled_lr: float | None = flag(None)
    """Highest learning rate of the word embedding and the output layer, when it differs."""
    decoupled_min_lr: float | None = flag(None)
    """Their learning rate at the end of the decay. Default: 0."""
    weight_decay: float = flag(0.01, at_least=0)
    """Weight decay of matrices and embeddings; biases and norms have none."""
    start_weight_decay: float | None = flag(None)
    """First weight decay, with --weight-decay-incr-style other than constant."""
    end_weight_decay: float | None = flag(None)
    """Last weight decay, with --weight-decay-incr-style other than constant."""
    weight_decay_incr_style: str = flag("constant", choices=("constant", "linear", "cosine"))
    """How weight decay goes from its first to its last value over the run."""
    adam_beta1: float = flag(0.9)
    """Decay of the running mean of the gradient."""
    adam_beta2: float = flag(0.999)
    """Decay of the running mean of its square."""
    adam_eps: float = flag(1e-8, at_least=0)
    """Added to the denominator of Adam."""
    sgd_momentum: float = flag(0.9, at_least=0)
    """Momentum of SGD."""
    ademamix_beta3: float | None = flag(None, at_least=0, at_most=1)
    """Decay of AdEMAMix's slow running mean of the gradient."""
    ademamix_alpha: float | None = flag(None, at_least=0)
    """Weight of the slow mean."""
    ademamix_beta3_warmup: int | None = flag(None, at_least=0)
    """Iterations over which the decay of the slow mean rises to --ademamix-beta3."""
    ademamix_alpha_warmup: int | None = flag(None, at_least=0)
    """Iterations over which the weight of the slow mean rises to --ademamix-alpha."""
    muon_momentum: float = flag(0.9)
    """Decay of Muon's running mean of the gradient."""
    muon_nesterov: bool = flag(False, "--muon-nesterov", "--muon-use-nesterov")
    """Orthogonalize the mean as it will be after the next gradient."""
    muon_split_qkv: bool = flag(True, "--muon-no-split-qkv")
    """Queries, keys and values are one matrix for Muon, not three."""
    muon_scale_mode: str = flag("spectral", choices=("spectral", "unit_rms_norm", "shape_scaling"))
    """How Muon scales the update of a matrix of r rows and c columns: sqrt of max(r, c), of r / c,
    of max(1, r / c).
    """
    muon_extra_scale_factor: float = flag(1.0)
    """Further factor of the update; 0.2 gives it about the size of Adam's."""
    muon_num_ns_steps: int = flag(5, positive=True)
    """Newton-Schulz iterations of an orthogonalization."""
    muon_coefficient_type: str = flag("quintic", choices=("simple", "quintic"))
    """Coefficients of these iterations."""
    muon_fp32_matmul_prec: str = flag("medium", choices=("medium", "high", "highest"))
    """Precision of their fp32 matrix products on a GPU, as torch.set_float32_matmul_precision has
    it.
    """
    clip_grad: float = flag(1.0, at_least=0)
    """Global norm to which larger gradients are scaled down; 0 turns clipping off."""
    loss_scale: float | None = flag(None, positive=True)
    """Fixed loss scale, best a power of 2. Default: a dynamic one with --fp16, else 1."""
    initial_loss_scale: float = flag(2.0**32)
    """First dynamic loss scale."""
    min_loss_scale: float = flag(1.0)
    """Smallest dynamic loss scale."""
    loss_scale_window: int = flag(1000, positive=True)
    """Iterations without overflow after which the dynamic loss scale is doubled."""
    hysteresis: int = flag(2, positive=True)
    """The dynamic loss scale is halved from this overflow on, counted since it last grew."""

    def __post_init__(self) -> None:
        raise_problems(
            [*find_range_problems(self), *self._problems(), *self._check_weight_decay_schedule()]
        )

    def _problems(self) -> Iterator[str]:
        if self.lr is not None and self.min_lr > self.lr:
            yield f"--min-lr {self.min_lr} must not be larger than --lr {self.lr}"
        if not 0 <= (self.decoupled_min_lr or 0.0) <= (self.decoupled_lr or 0.0):
            yield (
                f"--decoupled-min-lr {self.decoupled_min_lr} must lie between 0 and --decoupled-lr {self.decoupled_lr}"
            )
        if not (0 <= self.adam_beta1 < 1 and 0 <= self.adam_beta2 < 1):
            yield f"--adam-beta1 {self.adam_beta1} and --adam-beta2 {self.adam_beta2} must be in [0, 1)"
        if not 0 <= self.muon_momentum < 1:
            yield f"--muon-momentum {self.muon_momentum} must be in [0, 1)"
        if self.optimizer_impl == "apex" and self.optimizer != "adam":
            yield f"--optimizer-impl apex has --optimizer adam alone: for {self.optimizer} leave it out"
        if not 0 < self.min_loss_scale <= self.initial_loss_scale:
            yield (
                f"--min-loss-scale {self.min_loss_scale} must be positive and at most "
                f"--initial-loss-scale {self.initial_loss_scale}"
            )
        if self.optimizer == "ademamix":
            yield from self._ademamix_problems()

    def _ademamix_problems(self) -> Iterator[str]:
        beta3 = self.ademamix_beta3
        alpha = self.ademamix_alpha
        if beta3 is None or alpha is None:
            yield "--optimizer ademamix needs --ademamix-beta3 (as 0.9999) and --ademamix-alpha (as 5)"
        elif not 0 < self.adam_beta1 <= beta3 < 1 or alpha < 0:
            yield (
                f"--ademamix-beta3 {beta3} must lie between --adam-beta1 {self.adam_beta1} and 1, both above 0 (it is "
                f"the decay of the slower mean), and --ademamix-alpha {alpha} must not be negative"
            )

    def _check_weight_decay_schedule(self) -> Iterator[str]:
        start = self.start_weight_decay
        end = self.end_weight_decay
        if self.weight_decay_incr_style == "constant":
            if start is not None or end is not None:
                yield (
                    f"--start-weight-decay {start} and --end-weight-decay {end} need --weight-decay-incr-style "
                    "linear or cosine; for a constant one give --weight-decay"
                )
        elif start is None or end is None or not 0 <= start <= end:
            yield (
                f"--weight-decay-incr-style {self.weight_decay_incr_style} needs 0 <= --start-weight-decay <= "
                f"--end-weight-decay, got {start} and {end}"
            )

    @property
    def weight_decay_range(self) -> tuple[float, float]:
        """First and last weight decay."""
        if self.start_weight_decay is None or self.end_weight_decay is None:
            return self.weight_decay, self.weight_decay
        return self.start_weight_decay, self.end_weight_decay


@dataclass
class SchedulerConfig:
    """The course of the learning rate, in iterations (with --train-iters) or samples (with
    --train-samples).
    """

    lr_decay_style: str = flag(
        "linear", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    """Shape of the decay after the warm-up; WSD is warm-up, stable, decay (Hu et al. 2024)."""
    lr_decay_iters: int | None = flag(None, positive=True)
    """Iterations until --min-lr is reached. Default: --train-iters."""
    lr_decay_samples: int | None = flag(None)
    """Samples until --min-lr is reached. Default: --train-samples."""
    lr_warmup_fraction: float | None = flag(None)
    """Fraction of the decay length over which the learning rate rises linearly, in place of the two
    below.
    """
    lr_warmup_iters: int = flag(0, at_least=0)
    """Iterations over which the learning rate rises linearly."""
    lr_warmup_samples: int = flag(0, at_least=0)
    """Samples over which the learning rate rises linearly."""
    lr_warmup_init: float = flag(0.0)
    """Learning rate at the start of the warm-up."""
    lr_wsd_decay_style: str = flag(
        "exponential", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    """Shape of the decay phase of WSD."""
    lr_wsd_decay_iters: int | None = flag(None, at_least=0)
    """Iterations of the decay phase of WSD, the last of the schedule."""
    lr_wsd_decay_samples: int | None = flag(None)
    """Samples of the decay phase of WSD, the last of the schedule."""
    override_opt_param_scheduler: bool = flag(
        False, "--override-opt_param-scheduler", "--override-opt-param-scheduler"
    )
    """On resume, take the schedule from the flags, whatever the checkpoint says."""
    use_checkpoint_opt_param_scheduler: bool = flag(
        False, "--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler"
    )
    """On resume, take the schedule from the checkpoint, whatever the flags say."""

    def __post_init__(self) -> None:
        raise_problems(self._problems())

    def _problems(self) -> Iterator[str]:
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            yield "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler exclude each other"
        if self.lr_warmup_fraction is not None:
            if not 0 <= self.lr_warmup_fraction < 1:
                yield f"--lr-warmup-fraction must be in [0, 1), got {self.lr_warmup_fraction}"
            if self.lr_warmup_iters or self.lr_warmup_samples:
                yield (
                    f"--lr-warmup-fraction {self.lr_warmup_fraction} excludes --lr-warmup-iters "
                    f"{self.lr_warmup_iters} and --lr-warmup-samples {self.lr_warmup_samples}"
                )

"""Options of the optimizer and of its schedules. Field names and defaults are Megatron-LM's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron.core.flags import FlagSection, flag

_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}


@dataclass
class OptimizerConfig(FlagSection):
    """Options of the update rule, clipping, and loss scaling."""

    optimizer: str = flag(
        "adam", choices=("adam", "sgd", "ademamix", "muon", "lion"), aliases={"dist_muon": "muon"}
    )
    """Update rule: adam is AdamW (decoupled weight decay), sgd has momentum and weight decay in the
    gradient, muon orthogonalizes the updates of matrices, lion takes their signs, and both use adam
    for the other parameters; ademamix is adam with a second, slower mean.
    """
    optimizer_impl: str = flag("torch", choices=("torch", "apex"), requires={"optimizer": "adam"})
    """Implementation of adam and of the gradient norm."""
    lr: float | None = flag(None, at_least=0)
    """Maximum learning rate of the schedule."""
    min_lr: float = flag(0.0, at_least=0)
    """Learning rate at and after the end of the decay."""
    decoupled_lr: float | None = flag(None, at_least=0)
    """Separate maximum learning rate of the word embedding and the output layer."""
    decoupled_min_lr: float | None = flag(None, at_least=0)
    """Learning rate of the word embedding and the output layer at the end of the decay, with
    --decoupled-lr. Default: 0.
    """
    weight_decay: float = flag(0.01, at_least=0)
    """Weight decay of matrices and embeddings; biases and norms have none."""
    start_weight_decay: float | None = flag(None, at_least=0)
    """Initial weight decay, with --weight-decay-incr-style other than constant."""
    end_weight_decay: float | None = flag(None, at_least=0)
    """Final weight decay, with --weight-decay-incr-style other than constant."""
    weight_decay_incr_style: str = flag("constant", choices=("constant", "linear", "cosine"))
    """Shape of the change from the initial to the final weight decay over the run."""
    adam_beta1: float = flag(0.9, at_least=0, below=1)
    """Decay of the running mean of the gradient."""
    adam_beta2: float = flag(0.999, at_least=0, below=1)
    """Decay of the running mean of the squared gradient."""
    exp_avg_dtype: str = flag("fp32", choices=tuple(_DTYPES))
    """Data type in which Adam's running mean of the gradient is kept between steps. A step computes
    in fp32 and rounds the result. fp16 and fp8 have an fp32 scale for each parameter and shard.
    Checkpoints contain fp32.
    """
    exp_avg_sq_dtype: str = flag("fp32", choices=tuple(_DTYPES))
    """Data type of Adam's running mean of the squared gradient, as --exp-avg-dtype."""
    main_params_dtype: str = flag(
        "fp32",
        choices=("fp32", "fp16"),
        excludes={"fp8_param_gather": True, "ema_decay": True},
        reason="weights in fp8 and the average follow fp32 main parameters",
    )
    """Data type in which the main parameters of a bf16 or fp16 model are kept between steps, as
    --exp-avg-dtype. The model's parameters are the main parameters after rounding.
    """
    adam_eps: float = flag(1e-8, at_least=0)
    """Term added to the denominator of Adam for numerical stability."""
    sgd_momentum: float = flag(0.9, at_least=0)
    """Momentum of SGD."""
    ademamix_beta3: float | None = flag(None, at_least=0, below=1)
    """Decay of AdEMAMix's slow running mean of the gradient."""
    ademamix_alpha: float | None = flag(None, at_least=0)
    """Weight of AdEMAMix's slow mean."""
    ademamix_beta3_warmup: int | None = flag(None, at_least=0)
    """Iterations over which the decay of the slow mean rises to --ademamix-beta3."""
    ademamix_alpha_warmup: int | None = flag(None, at_least=0)
    """Iterations over which the weight of the slow mean rises to --ademamix-alpha."""
    muon_momentum: float = flag(0.9, at_least=0, below=1)
    """Decay of Muon's running mean of the gradient."""
    muon_nesterov: bool = flag(False, "--muon-nesterov", "--muon-use-nesterov")
    """Use Nesterov momentum in Muon."""
    muon_split_qkv: bool = flag(True, "--muon-no-split-qkv")
    """Orthogonalize queries, keys and values as three matrices; --muon-no-split-qkv treats them as
    one matrix.
    """
    muon_scale_mode: str = flag("spectral", choices=("spectral", "unit_rms_norm", "shape_scaling"))
    """Scale of Muon's update of a matrix of r rows and c columns: the square root of max(r, c),
    r / c, or max(1, r / c).
    """
    muon_extra_scale_factor: float = flag(1.0)
    """Additional factor of Muon's update; 0.2 gives it about the size of Adam's."""
    muon_num_ns_steps: int = flag(5, positive=True)
    """Newton-Schulz iterations per orthogonalization."""
    muon_coefficient_type: str = flag("quintic", choices=("simple", "quintic"))
    """Coefficients of the Newton-Schulz iterations."""
    muon_fp32_matmul_prec: str = flag("medium", choices=("medium", "high", "highest"))
    """Precision of the fp32 matrix products of the Newton-Schulz iterations on a GPU, as in
    torch.set_float32_matmul_precision.
    """
    ema_decay: float | None = flag(None, at_least=0, below=1)
    """Keep an exponential moving average of the weights in fp32: after each optimizer step it moves
    towards the weights by 1 - DECAY of the difference. It is saved with every checkpoint. Default:
    no average.
    """
    clip_grad: float = flag(1.0, at_least=0)
    """Maximum global norm of the gradient; 0 disables clipping."""
    loss_scale: float | None = flag(None, positive=True)
    """Fixed loss scale, preferably a power of 2. Default: a dynamic scale with --fp16, else 1."""
    initial_loss_scale: float = flag(2.0**32)
    """Initial dynamic loss scale."""
    min_loss_scale: float = flag(1.0, positive=True)
    """Minimum dynamic loss scale."""
    loss_scale_window: int = flag(1000, positive=True)
    """Iterations without overflow after which the dynamic loss scale is doubled."""
    hysteresis: int = flag(2, positive=True)
    """Overflows, counted since the dynamic loss scale last grew, from which on it is halved."""

    def find_problems(self) -> Iterator[str]:
        if self.lr is not None and self.min_lr > self.lr:
            yield f"--min-lr {self.min_lr} must not be larger than --lr {self.lr}"
        if (self.decoupled_min_lr or 0.0) > (self.decoupled_lr or 0.0):
            yield (
                f"--decoupled-min-lr {self.decoupled_min_lr} must be between 0 and "
                f"--decoupled-lr {self.decoupled_lr}"
            )
        yield from self._find_dtype_problems()
        if self.min_loss_scale > self.initial_loss_scale:
            yield (
                f"--min-loss-scale {self.min_loss_scale} must be at most "
                f"--initial-loss-scale {self.initial_loss_scale}"
            )
        # Rules of single optimizers and of weight decay.
        if self.optimizer == "ademamix":
            yield from self._find_ademamix_problems()
        yield from self._find_weight_decay_problems()

    def _find_dtype_problems(self) -> Iterator[str]:
        if self.has_rounded_states and (self.optimizer, self.optimizer_impl) != ("adam", "torch"):
            yield (
                f"--exp-avg-dtype {self.exp_avg_dtype}, --exp-avg-sq-dtype "
                f"{self.exp_avg_sq_dtype} and --main-params-dtype {self.main_params_dtype} require "
                "--optimizer adam and --optimizer-impl torch"
            )

    def _find_ademamix_problems(self) -> Iterator[str]:
        beta3 = self.ademamix_beta3
        alpha = self.ademamix_alpha
        if beta3 is None or alpha is None:
            yield (
                "--optimizer ademamix requires --ademamix-beta3 (e.g. 0.9999) and "
                "--ademamix-alpha (e.g. 5)"
            )
        elif not 0 < self.adam_beta1 <= beta3:
            yield (
                f"--ademamix-beta3 {beta3}, the decay of the slower mean, must be at least "
                f"--adam-beta1 {self.adam_beta1}, and both must be positive"
            )

    def _find_weight_decay_problems(self) -> Iterator[str]:
        start = self.start_weight_decay
        end = self.end_weight_decay
        if self.weight_decay_incr_style == "constant":
            if start is not None or end is not None:
                yield (
                    f"--start-weight-decay {start} and --end-weight-decay {end} require "
                    "--weight-decay-incr-style linear or cosine; for a constant weight decay use "
                    "--weight-decay"
                )
        elif start is None or end is None or start > end:
            yield (
                f"--weight-decay-incr-style {self.weight_decay_incr_style} requires "
                f"0 <= --start-weight-decay <= --end-weight-decay, got {start} and {end}"
            )

    @property
    def has_rounded_states(self) -> bool:
        """Return whether a state tensor or the main parameters have less precision than fp32."""
        names = {self.exp_avg_dtype, self.exp_avg_sq_dtype, self.main_params_dtype}
        return names != {"fp32"}

    def get_state_dtype(self, name: str) -> torch.dtype:
        """Return the data type in which the state tensor `name`, or `param` for the main
        parameters, is kept between steps.
        """
        names = {
            "exp_avg": self.exp_avg_dtype,
            "exp_avg_sq": self.exp_avg_sq_dtype,
            "param": self.main_params_dtype,
        }
        return _DTYPES[names.get(name, "fp32")]

    @property
    def weight_decay_range(self) -> tuple[float, float]:
        """Initial and final weight decay."""
        if self.start_weight_decay is None or self.end_weight_decay is None:
            return self.weight_decay, self.weight_decay
        return self.start_weight_decay, self.end_weight_decay


@dataclass
class SchedulerConfig(FlagSection):
    """Schedule of the learning rate, in iterations (with --train-iters) or in samples (with
    --train-samples).
    """

    lr_decay_style: str = flag(
        "linear", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    """Shape of the decay after the warmup; WSD is warmup, stable, decay (Hu et al. 2024)."""
    lr_decay_iters: int | None = flag(None, positive=True)
    """Iterations until --min-lr is reached. Default: --train-iters."""
    lr_decay_samples: int | None = flag(None)
    """Samples until --min-lr is reached. Default: --train-samples."""
    lr_warmup_fraction: float | None = flag(
        None,
        at_least=0,
        below=1,
        excludes={"lr_warmup_iters": True, "lr_warmup_samples": True},
    )
    """Fraction of the decay length over which the learning rate rises linearly; replaces
    --lr-warmup-iters and --lr-warmup-samples.
    """
    lr_warmup_iters: int = flag(0, at_least=0)
    """Iterations over which the learning rate rises linearly."""
    lr_warmup_samples: int = flag(0, at_least=0)
    """Samples over which the learning rate rises linearly."""
    lr_warmup_init: float = flag(0.0)
    """Learning rate at the start of the warmup."""
    lr_wsd_decay_style: str = flag(
        "exponential",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
        aliases={"1-sqrt": "minus_sqrt"},
    )
    """Shape of the decay phase of WSD."""
    lr_wsd_decay_iters: int | None = flag(None, at_least=0)
    """Length of the final decay phase of WSD in iterations."""
    lr_wsd_decay_samples: int | None = flag(None)
    """Length of the final decay phase of WSD in samples."""
    override_opt_param_scheduler: bool = flag(
        False,
        "--override-opt_param-scheduler",
        "--override-opt-param-scheduler",
        excludes={"use_checkpoint_opt_param_scheduler": True},
    )
    """On resume, use the schedule of the flags instead of the checkpoint's."""
    use_checkpoint_opt_param_scheduler: bool = flag(
        False, "--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler"
    )
    """On resume, use the checkpoint's schedule instead of that of the flags."""

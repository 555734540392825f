"""AdamW, SGD, AdEMAMix and Muon, over flat shards; the result does not depend on the layout.

AdEMAMix is Adam with a second, much slower running mean of the gradient (Pagliardini et al. 2024).

Muon orthogonalizes the momentum of matrices before it is applied. Jordan et al. 2024 ("Muon: An
optimizer for hidden layers in neural networks"), with the scale of Liu et al. 2025 ("Muon is
Scalable for LLM Training"). Matrices are all weights with weight decay but the word embedding and
the output layer; AdamW updates the others. Momentum is one more flat tensor of a shard, so it is
sharded, saved and resharded like Adam's moments. Orthogonalization needs whole matrices: the
momentum of a bucket is gathered over data parallelism, and every matrix in a rank's shard over
tensor parallelism. Each expert has matrices of its own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megatron.core.apex import import_apex
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.distributed.param_and_grad_buffer import Bucket
from megatron.core.module import param_info
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.mappings import all_gather_into_tensor


def slow_weight(step: Tensor, alpha: float, warmup: int | None) -> Tensor:
    """Weight of the slow mean at `step`, which rises linearly to `alpha`."""
    return (
        torch.full_like(step, alpha) if not warmup else (step * (alpha / warmup)).clamp(max=alpha)
    )


def slow_beta(step: Tensor, beta_start: float, beta_end: float, warmup: int | None) -> Tensor:
    """Decay of the slow mean at `step`: its half-life grows linearly from that of `beta_start` to
    `beta_end`'s.
    """
    if not warmup:
        return torch.full_like(step, beta_end)
    done = (step / warmup).clamp(max=1.0)
    log_start = math.log(beta_start)
    log_end = math.log(beta_end)
    return torch.exp(log_start * log_end / ((1.0 - done) * log_end + done * log_start)).clamp(
        max=beta_end
    )


class UpdateRule:
    """Groups of flat fp32 tensors, the state of each, and how a step changes them.

    Gradients are divided by `grad_scale`; a step with `found_inf` 1 changes nothing. This is no
    `torch.optim.Optimizer`: their constructor imports torch's compiler, which takes as long as
    importing torch itself.
    """

    grad_scale: Tensor
    found_inf: Tensor

    def __init__(self, groups: Sequence[dict[str, Any]], **hyperparameters: Any) -> None:
        """`groups`: as for torch's optimizers; `hyperparameters` hold for groups that do not say otherwise."""
        self.param_groups = [hyperparameters | group for group in groups]
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            if group["params"]:
                self.update(group)

    def update(self, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def gradients(self, group: dict[str, Any]) -> list[Tensor]:
        """Not divided yet."""
        grads = [param.grad for param in group["params"]]
        return [grad for grad in grads if grad is not None]

    def states(self, group: dict[str, Any], name: str) -> list[Tensor]:
        return [self.state[param][name] for param in group["params"]]

    def usable_gradient(self, param: Tensor) -> Tensor:
        """A copy, divided, of zeros where the step is to change nothing."""
        assert param.grad is not None
        return (param.grad / self.grad_scale).masked_fill_(self.found_inf.bool(), 0.0)


class AdamW(UpdateRule):
    """torch's fused AdamW (Loshchilov and Hutter 2019). State: `step`, `exp_avg`, `exp_avg_sq`."""

    def update(self, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        adamw(
            group["params"],
            self.gradients(group),
            self.states(group, "exp_avg"),
            self.states(group, "exp_avg_sq"),
            [],
            self.states(group, "step"),
            fused=True,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


_APEX = "--optimizer-impl"
LARGEST = (
    1 << 30
)  # elements of a tensor, as a kernel gets it: they count in 32 bits, and a bucket may have more


class ApexAdam(UpdateRule):
    """--optimizer-impl apex: `apex.optimizers.FusedAdam`, to which moments and steps are lent; torch's is the oracle.

    To it this is the gradient scaler, which has `grad_scale` and `found_inf`. The gradients are
    divided in place. Nothing waits for the device.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], **hyperparameters: Any) -> None:
        super().__init__(groups, **hyperparameters)
        parts = [
            group
            | {
                "lr": torch.tensor(group["lr"]),
                "params": [x for p in group["params"] for x in p.split(LARGEST)],
            }
            for group in self.param_groups
        ]
        self._adam = import_apex("apex.optimizers", _APEX).FusedAdam(parts, capturable=True)

    @torch.no_grad()
    def step(self) -> None:
        # of the step before; it would hold back the number of this one
        self._adam._dummy_overflow_buf.zero_()
        for ours, theirs in zip(self.param_groups, self._adam.param_groups, strict=True):
            if ours["params"]:
                theirs["lr"].fill_(ours["lr"])
                theirs["weight_decay"] = ours["weight_decay"]
                theirs["step"] = self.states(ours, "step")[0].int().view(1)
                self._lend(ours, theirs["params"])
        self._adam.step(grad_scaler=self)
        for state in self.state.values():
            state["step"].add_(1.0 - self.found_inf)

    def _lend(self, group: dict[str, Any], parts: Sequence[Tensor]) -> None:
        """Views of gradients and moments, to the `parts` of the group's parameters."""
        tensors = (
            self.gradients(group),
            self.states(group, "exp_avg"),
            self.states(group, "exp_avg_sq"),
        )
        cut = ([view for tensor in kind for view in tensor.split(LARGEST)] for kind in tensors)
        for part, gradient, mean, square in zip(parts, *cut, strict=True):
            part.grad = gradient
            self._adam.state[part] = {"exp_avg": mean, "exp_avg_sq": square}

    def _check_inf_per_device(self, optimizer: Any) -> dict[torch.device, Tensor]:
        return {self.found_inf.device: self.found_inf}

    def _get_scale_async(self) -> Tensor:
        return self.grad_scale


def apex_sum_of_squares(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    """`optimizer.sum_of_squares` in one kernel, which sums blocks in fp32."""
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    overflow = torch.zeros(
        1, dtype=torch.int, device=device
    )  # it is set by other kernels of this kind
    parts = [part for grad in grads for part in grad.split(LARGEST)]
    norm, _ = import_apex("amp_C", _APEX).multi_tensor_l2norm(2048 * 32, overflow, [parts], False)
    return norm.squeeze().double().square()  # type: ignore[no-any-return]


class SGD(UpdateRule):
    """torch's fused SGD; weight decay is part of the gradient. State: `momentum_buffer` unless
    `momentum` is 0.
    """

    def update(self, group: dict[str, Any]) -> None:
        buffers: list[Tensor | None] = [
            self.state[param].get("momentum_buffer") for param in group["params"]
        ]
        sgd(
            group["params"],
            self.gradients(group),
            buffers,
            fused=True,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


class AdEMAMix(UpdateRule):
    """With decoupled weight decay. State: `step`, `exp_avg` (fast mean), `exp_avg_slow`,
    `exp_avg_sq`.
    """

    def update(self, group: dict[str, Any]) -> None:
        for param in group["params"]:
            self._update(param, group, 1.0 - self.found_inf)

    def _update(self, param: Tensor, group: dict[str, Any], keep: Tensor) -> None:
        beta1, beta2, beta3 = group["betas"]
        state = self.state[param]
        step = state["step"].add_(keep)
        now = step.clamp(min=1.0)  # a first step that is skipped must not divide by zero
        gradient = self.usable_gradient(param)
        slow = 1.0 - slow_beta(now, beta1, beta3, group["beta3_warmup"])
        state["exp_avg"].lerp_(gradient, (1.0 - beta1) * keep)
        state["exp_avg_slow"].lerp_(gradient, slow * keep)
        state["exp_avg_sq"].lerp_(gradient.square_(), (1.0 - beta2) * keep)
        update = state["exp_avg"] / (1.0 - beta1**now)
        update.addcmul_(
            state["exp_avg_slow"], slow_weight(now, group["alpha"], group["alpha_warmup"])
        )
        update /= (state["exp_avg_sq"] / (1.0 - beta2**now)).sqrt_().add_(group["eps"])
        update.add_(param, alpha=group["weight_decay"])
        param.sub_(update.mul_(group["lr"] * keep))


# (a, b, c) of x <- a x + (b x x^T + c (x x^T)^2) x; where there are several, one for each step in
# turn.
COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}


def orthogonalize(matrix: Tensor, coefficient_type: str = "quintic", num_steps: int = 5) -> Tensor:
    """A matrix with the singular vectors of `matrix` `[rows, columns]` and singular values near 1
    (Newton-Schulz).
    """
    coefficients = COEFFICIENTS[coefficient_type]
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.mT if tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    for step in range(num_steps):
        a, b, c = coefficients[step % len(coefficients)]
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def scale_factor(rows: int, columns: int, mode: str) -> float:
    """By what the orthogonalized update of a `rows` x `columns` matrix is multiplied."""
    if mode == "spectral":
        return float(max(rows, columns)) ** 0.5
    if mode == "unit_rms_norm":
        return (rows / columns) ** 0.5
    assert mode == "shape_scaling", mode
    return max(1.0, rows / columns) ** 0.5


@dataclass(frozen=True)
class MatrixLayout:
    """How a rank's part of a parameter lies in the whole one."""

    split_dim: int | None
    """The dimension of a matrix that is split over `tp`."""
    tp: Axis = Axis()
    """For experts ETP."""
    row_blocks: tuple[int, ...] = ()
    """Rows repeat in blocks of these sizes; the first of all blocks are a matrix of their own, and
    so on (Q, K, V).
    """


def matrix_layouts(
    model_state: ShardedStateDict,
    matrices: Collection[nn.Parameter],
    split_qkv: bool,
    tp: Axis,
    etp: Axis,
) -> dict[nn.Parameter, MatrixLayout]:
    """The layouts of a rank's `matrices`, from the layers' own definition of their sharding."""
    layouts = {}
    for entry in model_state.values():
        if not isinstance(entry, ShardedTensor) or not isinstance(entry.local, nn.Parameter):
            continue
        if entry.local not in matrices:
            continue
        info = param_info(entry.local)
        local = entry.local.shape[-2:]
        whole = entry.global_shape[-2:]
        split = next((dim for dim in range(2) if local[dim] != whole[dim]), None)
        layouts[entry.local] = MatrixLayout(
            split, etp if info.expert else tp, info.row_blocks if split_qkv else ()
        )
    return layouts


class Muon(AdamW):
    """Muon for the groups with `use_muon`, AdamW for the others. Collective over the shard and
    tensor parallelism.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        buckets: Mapping[Tensor, Bucket],
        config: OptimizerConfig,
        layouts: Mapping[nn.Parameter, MatrixLayout],
    ) -> None:
        """`buckets`: that of every flat tensor."""
        super().__init__(groups, betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps)
        self._buckets = buckets
        self._config = config
        self._layouts = layouts

    def update(self, group: dict[str, Any]) -> None:
        if not group.get("use_muon"):
            super().update(group)
            return
        keep = 1.0 - self.found_inf
        for param in group["params"]:
            momentum = self._momentum(param, group["momentum"], keep)
            update = self._orthogonalized(self._buckets[param], momentum)
            param.mul_(1.0 - group["lr"] * group["weight_decay"] * keep)
            param.sub_(update.mul_(group["lr"] * keep))

    def _momentum(self, param: Tensor, momentum: float, keep: Tensor) -> Tensor:
        """The running mean of the gradient, a step later; with Nesterov's look ahead."""
        buffer = self.state[param]["momentum_buffer"]
        gradient = self.usable_gradient(param)
        buffer.lerp_(gradient, (1.0 - momentum) * keep)
        return gradient.lerp_(buffer, momentum) if self._config.muon_nesterov else buffer

    def _orthogonalized(self, bucket: Bucket, update: Tensor) -> Tensor:
        """`update`, this rank's shard of a bucket, with every matrix in it replaced."""
        whole = bucket.gather(update)
        result = torch.zeros_like(update)
        for piece in bucket.pieces():
            start = bucket.shard_start + piece.start - piece.param_start
            matrix = whole[start : start + piece.param.numel()].view(piece.param.shape)
            flat = self._whole_matrices(matrix, self._layouts[piece.param]).reshape(-1)
            result[piece.start : piece.stop] = flat[
                piece.param_start : piece.param_start + piece.stop - piece.start
            ]
        return result

    def _whole_matrices(self, local: Tensor, layout: MatrixLayout) -> Tensor:
        """This rank's part of the orthogonalized matrix, or matrices, that `local` is a part of."""
        if local.dim() == 3:
            return torch.stack([self._whole_matrix(expert, layout) for expert in local])
        if not layout.row_blocks:
            return self._whole_matrix(local, layout)
        columns = local.shape[1]
        blocks = local.view(-1, sum(layout.row_blocks), columns).split(layout.row_blocks, dim=1)
        parts = [self._whole_matrix(block.reshape(-1, columns), layout) for block in blocks]
        whole = torch.cat(
            [part.view(block.shape) for part, block in zip(parts, blocks, strict=True)], dim=1
        )
        return whole.view(local.shape)

    def _whole_matrix(self, local: Tensor, layout: MatrixLayout) -> Tensor:
        config = self._config
        split_dim = layout.split_dim
        # Gate and up are stacked on every rank, so that the rows of a gathered matrix may come in
        # another order. That changes nothing: orthogonalizing a matrix with its rows permuted
        # permutes those of the result.
        matrix = local if split_dim is None else _gather(local, split_dim, layout.tp)
        with _matmul_precision(config.muon_fp32_matmul_prec, matrix.device):
            result = orthogonalize(matrix, config.muon_coefficient_type, config.muon_num_ns_steps)
        rows, columns = matrix.shape
        result = result * (
            config.muon_extra_scale_factor * scale_factor(rows, columns, config.muon_scale_mode)
        )
        if split_dim is None:
            return result
        return result.narrow(
            split_dim, layout.tp.rank * local.shape[split_dim], local.shape[split_dim]
        )


def _gather(local: Tensor, dim: int, tp: Axis) -> Tensor:
    parts = local.new_empty(tp.size * local.numel())
    all_gather_into_tensor(parts, local.reshape(-1), group=tp.group)
    return torch.cat(list(parts.view(tp.size, *local.shape)), dim=dim)


@contextmanager
def _matmul_precision(precision: str, device: torch.device) -> Iterator[None]:
    """Of fp32 products on a GPU; a CPU computes them in fp32."""
    if device.type == "cpu":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)

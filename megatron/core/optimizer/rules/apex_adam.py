"""Adam of apex (--optimizer-impl apex)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.apex import import_apex, split_for_kernels
from megatron.core.optimizer.update_rules import AdamW, OptimizerGroup, UpdateRule


class ApexAdam(UpdateRule):
    """`apex.optimizers.FusedAdam` over the flat state (--optimizer-impl apex).

    Moments and steps are views of this object's state. This object also acts as the gradient scaler
    that FusedAdam reads `grad_scale` and `found_inf` from. Gradients are divided in place. No call
    waits for the device.
    """

    STATE_SETS = AdamW.STATE_SETS
    MUP_POWERS = AdamW.MUP_POWERS

    def __init__(
        self, groups: Sequence[OptimizerGroup], hyperparameters: Mapping[str, Any]
    ) -> None:
        super().__init__(groups, hyperparameters)
        apex_groups = []
        for group in self.param_groups:
            slices = split_for_kernels(group["params"])
            # The learning rate on the device, where `step` changes it.
            lr = torch.tensor(group["lr"])
            apex_groups.append(group | {"lr": lr, "params": slices})
        optimizers = import_apex("apex.optimizers", "--optimizer-impl")
        self._adam = optimizers.FusedAdam(apex_groups, capturable=True)

    @torch.no_grad()
    def step(self) -> None:
        # FusedAdam does not reset its overflow flag, and would not count this step after a bad one.
        self._adam._dummy_overflow_buf.zero_()
        for group, apex_group in zip(self.param_groups, self._adam.param_groups, strict=True):
            if group["params"]:
                apex_group["lr"].fill_(group["lr"])
                apex_group["weight_decay"] = group["weight_decay"]
                # The parameters of a group have taken the same number of steps.
                first_step = self.collect_states(group, "step")[0]
                apex_group["step"] = first_step.int().view(1)
                self._share_tensors(group, apex_group["params"])
        self._adam.step(grad_scaler=self)
        # A skipped step does not count.
        for state in self.state.values():
            state["step"].add_(1.0 - self.found_inf)

    def _share_tensors(self, group: OptimizerGroup, slices: Sequence[Tensor]) -> None:
        """Give views of gradients and moments to the `slices` of the group's parameters."""
        gradients = split_for_kernels(self.collect_gradients(group))
        means = split_for_kernels(self.collect_states(group, "exp_avg"))
        squares = split_for_kernels(self.collect_states(group, "exp_avg_sq"))
        for param_slice, gradient, mean, square in zip(
            slices, gradients, means, squares, strict=True
        ):
            param_slice.grad = gradient
            self._adam.state[param_slice] = {"exp_avg": mean, "exp_avg_sq": square}

    def _check_inf_per_device(self, optimizer: Any) -> dict[torch.device, Tensor]:
        return {self.found_inf.device: self.found_inf}

    def _get_scale_async(self) -> Tensor:
        return self.grad_scale


def apex_sum_of_squares(grads: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return `sum_of_squares`, computed by one apex kernel that sums blocks in fp32."""
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    amp_c = import_apex("amp_C", "--optimizer-impl")
    # Kernels of this family report overflow in this argument; the norm kernel does not use it.
    overflow = torch.zeros(1, dtype=torch.int, device=device)
    chunk_size = 2048 * 32  # elements, as in apex's own optimizers
    per_tensor = False
    tensors = [split_for_kernels(grads)]
    norm, _ = amp_c.multi_tensor_l2norm(chunk_size, overflow, tensors, per_tensor)
    return norm.squeeze().double().square()  # type: ignore[no-any-return]

"""--optimizer-impl apex: the update and the norm of gradients by apex's multi-tensor kernels.

Main parameters, moments and steps stay ours, flat and under their names in checkpoints; torch's kernels are the oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.optimizer.update_rules import UpdateRule
from megatron.core.utils import import_apex

_FLAG = "--optimizer-impl"
_CHUNK = 2048 * 32  # elements of a block, as in apex
LARGEST = 1 << 30  # elements of a tensor, as a kernel gets it: they count in 32 bits, and a bucket may have more


class ApexAdam(UpdateRule):
    """`apex.optimizers.FusedAdam`. To it this is the gradient scaler, which has `grad_scale` and `found_inf`.

    The gradients are divided in place. Nothing waits for the device.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], **hyperparameters: Any) -> None:
        super().__init__(groups, **hyperparameters)
        parts = [
            group | {"lr": torch.tensor(group["lr"]), "params": [x for p in group["params"] for x in p.split(LARGEST)]}
            for group in self.param_groups
        ]
        self._adam = import_apex("apex.optimizers", _FLAG).FusedAdam(parts, capturable=True)

    @torch.no_grad()
    def step(self) -> None:
        self._adam._dummy_overflow_buf.zero_()  # of the step before; it would hold back the number of this one
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
        tensors = (self.gradients(group), self.states(group, "exp_avg"), self.states(group, "exp_avg_sq"))
        cut = ([view for tensor in kind for view in tensor.split(LARGEST)] for kind in tensors)
        for part, gradient, mean, square in zip(parts, *cut, strict=True):
            part.grad = gradient
            self._adam.state[part] = {"exp_avg": mean, "exp_avg_sq": square}

    def _check_inf_per_device(self, optimizer: Any) -> dict[torch.device, Tensor]:
        return {self.found_inf.device: self.found_inf}

    def _get_scale_async(self) -> Tensor:
        return self.grad_scale


def sum_of_squares(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    """`grad_scaler.sum_of_squares` in one kernel, which sums blocks in fp32."""
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    overflow = torch.zeros(1, dtype=torch.int, device=device)  # it is set by other kernels of this kind
    parts = [part for grad in grads for part in grad.split(LARGEST)]
    norm, _ = import_apex("amp_C", _FLAG).multi_tensor_l2norm(_CHUNK, overflow, [parts], False)
    return norm.squeeze().double().square()  # type: ignore[no-any-return]

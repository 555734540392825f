"""See ../../../README.md."""

import amp_C
import torch


class FusedAdam(torch.optim.Optimizer):
    """Stand-in for `capturable=True` only: every value that changes is a tensor on the device."""

    def __init__(
        self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True, weight_decay=0.0,
        amsgrad=False, set_grad_none=True, capturable=False, master_weights=False,
    ):  # fmt: skip
        assert capturable
        assert adam_w_mode
        assert not (amsgrad or master_weights)

        defaults = {
            "lr": torch.tensor(lr),
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
        }
        super().__init__(params, defaults | {"weight_decay": weight_decay})
        assert all(isinstance(group["lr"], torch.Tensor) for group in self.param_groups)

        self._dummy_overflow_buf = torch.tensor([0], dtype=torch.int)

    def step(self, closure=None, grad_scaler=None):
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] += (self._dummy_overflow_buf != 1).to(torch.int)  # of the call before
            self._dummy_overflow_buf.copy_(
                grad_scaler._check_inf_per_device(self)[group["params"][0].device]
            )
            states = [self.state[param] for param in group["params"]]
            moments = [[state[name] for state in states] for name in ("exp_avg", "exp_avg_sq")]
            amp_C.multi_tensor_adam_capturable(
                2048 * 32, self._dummy_overflow_buf, [[p.grad for p in group["params"]], group["params"], *moments],
                group["lr"], *group["betas"], group["eps"], group["step"], 1, 1, group["weight_decay"],
                grad_scaler._get_scale_async().double().reciprocal().float(),
            )  # fmt: skip

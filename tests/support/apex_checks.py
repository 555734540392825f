"""Compare apex's optimizer, gradient norms and layer norms with torch's, on any device."""

from __future__ import annotations

import torch

from megatron.core.optimizer.grad_norm import sum_of_squares
from megatron.core.optimizer.rules.apex_adam import ApexAdam, apex_sum_of_squares
from megatron.core.optimizer.update_rules import AdamW
from megatron.core.transformer.norm import Norm
from megatron.core.transformer.transformer_config import TransformerConfig


def check_adam(device: str, tolerance: float) -> None:
    """Compare several steps with different learning rates and weight decays, one skipped; two
    groups and an empty one.
    """
    torch.manual_seed(0)
    values = [torch.randn(size) for size in (1000, 70_000, 64)]
    rules = []
    for make in (ApexAdam, AdamW):
        params = [value.to(device, copy=True) for value in values]
        groups = [
            {"params": group, "lr": 1e-2, "weight_decay": 0.1}
            for group in (params[:2], params[2:], [])
        ]
        rule = make(groups, {"betas": (0.9, 0.95), "eps": 1e-8})
        for param in params:
            zeros = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
            rule.state[param] = zeros | {"step": torch.zeros((), device=device)}
        rules.append((rule, params))

    for index in range(5):
        gradients = [3.0 * torch.randn(len(value)) for value in values]
        for rule, params in rules:
            rule.param_groups[0]["lr"] = 1e-2 / (index + 1)
            rule.param_groups[1]["weight_decay"] = 0.05 * index
            rule.grad_scale = torch.tensor(2.0 + index, device=device)
            rule.found_inf = torch.tensor(float(index == 2), device=device)
            for param, gradient in zip(params, gradients, strict=True):
                param.grad = gradient.to(device, copy=True)
                param.grad[7] = torch.nan if index == 2 else param.grad[7]
            rule.step()

        (apex_rule, apex_params), (torch_rule, torch_params) = rules
        num_steps = index + (index < 2)  # step 2 is skipped
        for param, expected in zip(apex_params, torch_params, strict=True):
            torch.testing.assert_close(param, expected, rtol=tolerance, atol=tolerance)
            state = apex_rule.state[param]
            expected_state = torch_rule.state[expected]
            assert state["step"] == num_steps
            assert expected_state["step"] == num_steps
            for name in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(
                    state[name],
                    expected_state[name],
                    rtol=tolerance,
                    atol=tolerance,
                )


def check_sum_of_squares(device: str) -> None:
    grads = [torch.randn(size, device=device) for size in (5, 100_000)]
    expected = sum_of_squares(grads, torch.device(device))
    torch.testing.assert_close(
        apex_sum_of_squares(grads, torch.device(device)),
        expected,
        rtol=1e-5,
        atol=0.0,
    )
    assert apex_sum_of_squares([], torch.device(device)) == 0.0


def check_norms(device: str, tolerance: float) -> None:
    """Compare values and gradients in fp32 and bf16, with weights around 1 and around 0."""
    for normalization in ("RMSNorm", "LayerNorm"):
        for from_one in (False, True):
            for bf16 in (False, True):
                results = [
                    _normed(impl, normalization, from_one, bf16, device)
                    for impl in ("apex", "torch")
                ]
                for mine, expected in zip(*results, strict=True):
                    tolerated = (2e-2 if bf16 else tolerance) * float(expected.abs().max())
                    torch.testing.assert_close(mine, expected, rtol=0.0, atol=tolerated)


def _normed(
    impl: str, normalization: str, from_one: bool, bf16: bool, device: str
) -> list[torch.Tensor]:
    torch.manual_seed(1)
    config = TransformerConfig(
        1,
        64,
        4,
        normalization=normalization,
        apply_layernorm_1p=from_one,
        bf16=bf16,
        norm_impl=impl,
    )
    norm = Norm(config, 64, partial_grad=False, device=torch.device(device))
    for param in norm.parameters():
        param.data.copy_(torch.randn(64))
    x = torch.randn(16, 2, 64).to(device, config.params_dtype).requires_grad_()
    y = norm(x)
    y.backward(torch.randn(16, 2, 64).to(y))
    gradients = [param.grad for param in (x, *norm.parameters())]
    return [tensor.detach().float() for tensor in (y, *gradients) if tensor is not None]

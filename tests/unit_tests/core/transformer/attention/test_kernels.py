"""Attention kernels that return a log-sum-exp, compared with torch's SDPA."""

import pytest
import torch
import torch.nn.functional as F

from megatron.core.transformer.attention import kernels
from megatron.core.transformer.attention.kernels import (
    Block,
    CpuAttention,
    Scoring,
    attend,
    attend_backward,
)

requires_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
DEVICES = ["cpu", pytest.param("cuda", marks=requires_cuda)]
LENGTH = 24
HEAD_DIM = 16


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("masked", [False, True])
def test_single_block_equals_sdpa(device, dtype, tolerance, masked):
    """Output and gradients equal torch's; the log-sum-exp is that of the scores."""
    generator = torch.Generator().manual_seed(0)

    def make_tensor(heads):
        values = torch.randn(2, heads, LENGTH, HEAD_DIM, generator=generator)
        return values.to(device, dtype)

    def assert_close(actual, expected):
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)

    q = make_tensor(4)
    k = make_tensor(2)
    v = make_tensor(2)
    dout = make_tensor(4)
    mask = None
    if masked:
        mask = torch.zeros(1, 1, LENGTH, LENGTH, dtype=dtype, device=device)
        mask[..., 7:] = torch.finfo(dtype).min / 2

    # Output
    block = Block(slice(None), slice(None), causal=not masked, mask=mask)
    out, lse = attend(q, k, v, block, Scoring())
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*leaves, mask, is_causal=not masked, enable_gqa=True)
    assert_close(out, expected)

    # Log-sum-exp
    keys = k.repeat_interleave(2, 1).float()
    scores = q.float() @ keys.mT / HEAD_DIM**0.5
    future = torch.full_like(scores, -torch.inf).triu(1)
    scores = scores + (mask if masked else future)
    assert_close(lse, scores.logsumexp(-1))

    # Gradients
    expected.backward(dout)
    gradients = attend_backward(dout, q, k, v, out, lse, block, Scoring())
    for gradient, leaf in zip(gradients, leaves, strict=True):
        assert_close(gradient, leaf.grad)


def make_mask(kind):
    """Return a mask in which a query sees itself and five keys before it; None if causal."""
    if kind == "causal":
        return None
    ones = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    is_visible = ones.tril() & ~ones.tril(-6)
    if kind == "boolean":
        return is_visible
    zeros = torch.zeros(1, 1, LENGTH, LENGTH)
    return zeros.masked_fill(~is_visible, -3.5).bfloat16()


@pytest.mark.parametrize("amx", [False, True])
@pytest.mark.parametrize("kind", ["causal", "boolean", "additive"])
def test_bf16_on_cpu(kind, amx, monkeypatch):
    """In bf16 the output is that of the fp32 kernel, rounded, and with AMX that of the bf16 kernel.

    Gradients are as close to those of fp32 as the gradients of torch's bf16 kernel.
    """
    monkeypatch.setattr(kernels, "_HAS_AMX", amx)
    generator = torch.Generator().manual_seed(2)
    q, dout = torch.randn(2, 2, 8, LENGTH, HEAD_DIM, generator=generator).bfloat16()
    k, v = torch.randn(2, 2, 4, LENGTH, HEAD_DIM, generator=generator).bfloat16()
    mask = make_mask(kind)
    scale = 0.2

    def run(attention, dtype):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        cast_mask = mask
        if kind == "additive":
            cast_mask = mask.to(dtype)
        out = attention(*leaves, cast_mask)
        out.backward(dout.to(dtype))
        gradients = [leaf.grad for leaf in leaves]
        return out.detach(), gradients

    def run_sdpa(q, k, v, mask):
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            mask,
            is_causal=mask is None,
            enable_gqa=True,
            scale=scale,
        )

    def run_kernel(q, k, v, mask):
        return CpuAttention.apply(q, k, v, mask, scale)

    exact_out, exact_gradients = run(run_sdpa, torch.float32)
    torch_out, torch_gradients = run(run_sdpa, torch.bfloat16)
    out, gradients = run(run_kernel, torch.bfloat16)
    expected_out = torch_out if amx else exact_out.bfloat16()
    assert torch.equal(out, expected_out)

    for index, name in enumerate(("dq", "dk", "dv")):
        gradient = gradients[index]
        exact = exact_gradients[index]
        assert gradient.dtype == torch.bfloat16
        error = (gradient - exact).abs().max()
        error_of_torch = (torch_gradients[index] - exact).abs().max()
        assert error <= 1.1 * error_of_torch, name

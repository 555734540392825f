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

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("masked", [False, True])
def test_single_block_equals_sdpa(device, dtype, tolerance, masked):
    """Output and gradients equal torch's; the log-sum-exp is that of the scores."""
    generator = torch.Generator().manual_seed(0)

    def make_tensor(heads):
        return torch.randn(2, heads, 24, 16, generator=generator).to(device, dtype)

    q = make_tensor(4)
    k = make_tensor(2)
    v = make_tensor(2)
    dout = make_tensor(4)
    mask = torch.zeros(1, 1, 24, 24, dtype=dtype, device=device) if masked else None
    if mask is not None:
        mask[..., 7:] = torch.finfo(dtype).min / 2
    block = Block(slice(None), slice(None), causal=mask is None, mask=mask)
    out, lse = attend(q, k, v, block, Scoring())
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(
        *inputs, mask, is_causal=mask is None, enable_gqa=True
    )
    expected.backward(dout)
    scores = q.float() @ k.repeat_interleave(2, 1).float().transpose(2, 3) / 4
    scores = scores + (mask if mask is not None else torch.full_like(scores, -torch.inf).triu(1))
    torch.testing.assert_close(lse, scores.logsumexp(-1), atol=tolerance, rtol=tolerance)
    gradients = attend_backward(dout, q, k, v, out, lse, block, Scoring())
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
    for gradient, leaf in zip(gradients, inputs, strict=True):
        torch.testing.assert_close(gradient, leaf.grad, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("amx", [False, True])
@pytest.mark.parametrize("kind", ["causal", "boolean", "additive"])
def test_bf16_on_cpu(kind, amx, monkeypatch):
    """In bf16 the output is that of the fp32 kernel, rounded, and with AMX that of the bf16 kernel.

    Gradients are as close to those of fp32 as the gradients of torch's bf16 kernel.
    """
    monkeypatch.setattr(kernels, "_HAS_AMX", amx)
    generator = torch.Generator().manual_seed(2)
    q, g = torch.randn(2, 2, 8, 24, 16, generator=generator).bfloat16()
    k, v = torch.randn(2, 2, 4, 24, 16, generator=generator).bfloat16()
    ones = torch.ones(24, 24, dtype=torch.bool)
    visible = ones.tril() & ~ones.tril(-6)
    mask = {
        "causal": None,
        "boolean": visible,
        "additive": torch.zeros(1, 1, 24, 24).masked_fill(~visible, -3.5).bfloat16(),
    }[kind]

    def run(attention, dtype):
        inputs = [x.to(dtype).requires_grad_() for x in (q.clone(), k.clone(), v.clone())]
        cast_mask = mask.to(dtype) if kind == "additive" else mask
        out = attention(*inputs, cast_mask)
        out.backward(g.to(dtype))
        return [out.detach(), *(x.grad for x in inputs)]

    def sdpa(q, k, v, mask):
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, enable_gqa=True, scale=0.2
        )

    exact = run(sdpa, torch.float32)
    torch_bf16 = run(sdpa, torch.bfloat16)
    ours = run(lambda q, k, v, mask: CpuAttention.apply(q, k, v, mask, 0.2), torch.bfloat16)
    expected = torch_bf16[0] if amx else exact[0].bfloat16()
    assert torch.equal(ours[0], expected)
    names = ("dq", "dk", "dv")
    for name, got, want, peer in zip(names, ours[1:], exact[1:], torch_bf16[1:], strict=True):
        assert got.dtype == torch.bfloat16
        assert (got - want).abs().max() <= 1.1 * (peer - want).abs().max(), name

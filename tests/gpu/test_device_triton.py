"""Triton kernels on a GPU, compared with their references on the CPU."""

import pytest
import torch

from tests.support.fake_cuda import is_fake_cuda

pytest.importorskip("triton", reason="Triton is not in the environment: pip install triton")

from megatron.core import triton_kernels as kernels  # noqa: E402
from megatron.core import triton_norms as norms  # noqa: E402
from megatron.core import triton_rotary as rotary  # noqa: E402

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCES = {torch.float32: 4e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def assert_close(actual, expected):
    """Compare a CUDA tensor with a CPU tensor: one rounding of different fp32 values."""
    tolerance = TOLERANCES[expected.dtype]
    torch.testing.assert_close(actual.cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(37, 5632), (5, 1001), (1, 1)])
def test_swiglu(rows, size, dtype):
    x = torch.randn(rows, 2 * size).to(dtype)
    dy = torch.randn(rows, size).to(dtype)
    assert_close(kernels.swiglu(x.cuda()), kernels.compute_swiglu(x))
    dx = kernels.swiglu_backward(dy.cuda(), x.cuda())
    assert_close(dx, kernels.compute_swiglu_backward(dy, x))


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "valid"), [(32000, 32000), (50304, 50257), (1001, 77), (64, 0)])
def test_loss(width, valid, dtype, softcap):
    logits = (3 * torch.randn(9, width)).to(dtype)
    columns = torch.randint(max(1, valid), (9,))
    columns[3] = -1
    device_logits = logits.cuda()
    statistics = kernels.compute_softmax(logits, columns, valid)
    device_statistics = kernels.softmax(device_logits, columns.cuda(), valid)

    for actual, expected in zip(device_statistics, statistics, strict=True):
        assert_close(actual, expected)

    largest = torch.full((9,), 10.0)
    total = torch.full((9,), 100.0)
    dloss = torch.rand(9)
    kernels.compute_softmax_gradient(logits, columns, largest, total, dloss, valid, softcap)
    vectors = [tensor.cuda() for tensor in (columns, largest, total, dloss)]
    kernels.softmax_gradient(device_logits, *vectors, valid, softcap)
    assert_close(device_logits, logits)


@pytest.mark.skipif(is_fake_cuda(), reason="takes 4.4 GB of host memory there")
def test_loss_of_more_than_2_to_31_logits():
    rows = (1 << 31) // 32000 + 100
    logits = torch.randn(rows, 32000, dtype=torch.bfloat16, device="cuda")
    columns = torch.randint(32000, (rows,), device="cuda")
    expected = kernels.compute_softmax(logits[-9:].cpu(), columns[-9:].cpu(), 32000)
    statistics = kernels.softmax(logits, columns, 32000)
    for actual, last_rows in zip(statistics, expected, strict=True):
        assert_close(actual[-9:], last_rows)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_adamw(dtype, found_inf):
    tensors = [torch.randn(100_003) for _ in range(4)]
    tensors[3].square_()
    scalars = torch.tensor([2.0, found_inf, 1e-2, 1.5])
    weight = None if dtype is None else torch.zeros(100_003, dtype=dtype)
    device_tensors = [tensor.cuda() for tensor in tensors]
    device_weight = None if weight is None else weight.cuda()
    hyperparameters = (1e-2, 0.9, 0.999, 1e-8, 0.1)
    kernels.compute_adamw(*tensors, weight, scalars, *hyperparameters)
    kernels.adamw(*device_tensors, device_weight, scalars.cuda(), *hyperparameters)

    for actual, expected in zip(device_tensors, tensors, strict=True):
        assert_close(actual, expected)
    if device_weight is not None:
        assert torch.equal(device_weight, device_tensors[0].to(dtype)) or found_inf


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "width", "pairs"), [(3, 128, 64), (5, 80, 20), (2, 64, 32)])
def test_rotation(heads, width, pairs, dtype, interleaved):
    x = torch.randn(33, 2, 4, heads, width).to(dtype)
    angles = torch.outer(torch.arange(33.0), 1.0 / 100 ** (torch.arange(pairs) / pairs))
    cos = angles.cos().view(33, 1, 1, 1, pairs).to(dtype)
    sin = angles.sin().view(33, 1, 1, 1, pairs).to(dtype)
    for inverse in (False, True):
        expected = torch.empty_like(x)
        rotary.compute_rotation(x, expected, cos, sin, inverse, interleaved)
        device_x = x.cuda()
        # In the layout of the gradients of attention
        by_head = device_x.permute(1, 2, 3, 0, 4).contiguous().permute(3, 0, 1, 2, 4)
        y = torch.empty_like(device_x)
        rotary.rotate(by_head, y, cos.cuda(), sin.cuda(), inverse, interleaved)
        assert_close(y, expected)
        rotary.rotate(device_x, device_x, cos.cuda(), sin.cuda(), inverse, interleaved)
        assert torch.equal(device_x, y)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_split_and_rotation(dtype, interleaved):
    mixed = torch.randn(33, 2, 4, 5, 80).to(dtype)
    angles = torch.outer(torch.arange(33.0), 1.0 / 100 ** (torch.arange(20) / 20))
    cos = angles.cos().view(33, 1, 1, 1, 20).to(dtype)
    sin = angles.sin().view(33, 1, 1, 1, 20).to(dtype)
    expected = rotary.compute_split(mixed, cos, sin, interleaved)
    device_mixed = mixed.cuda().requires_grad_()
    results = rotary.split_and_rotate(device_mixed, cos.cuda(), sin.cuda(), interleaved)

    for actual, reference in zip(results, expected, strict=True):
        assert_close(actual.detach(), reference)

    gradients = [torch.randn_like(x) for x in expected]
    torch.autograd.backward(results, [dy.cuda() for dy in gradients])
    dmixed = rotary.compute_split_backward(*gradients, cos, sin, interleaved)
    assert_close(device_mixed.grad, dmixed)


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(3001, 2048), (7, 1001), (2, 16384)])
def test_residual_norm(rows, size, dtype, norm):
    x, branch, dy, dtotal = (torch.randn(rows, size).to(dtype) for _ in range(4))
    weight = torch.randn(size).to(dtype)
    bias = torch.randn(size).to(dtype) if norm == "layer" else None
    device_bias = None if bias is None else bias.cuda()
    options = (1e-5, norm == "rms", True)
    expected = norms.compute_residual_norm(x, branch, weight, bias, *options)
    actual = norms.residual_norm(x.cuda(), branch.cuda(), weight.cuda(), device_bias, *options)

    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other)

    total, _, mean, scale = expected
    dx, dparams = norms.compute_residual_norm_backward(
        dy,
        dtotal,
        total,
        weight,
        mean,
        scale,
        bias is not None,
        True,
    )
    saved = [tensor.cuda() for tensor in (dy, dtotal, total, weight, mean, scale)]
    device_dx, device_dparams = norms.residual_norm_backward(*saved, bias is not None, True)
    # Elements are sums of terms that partly cancel: tolerance relative to the largest.
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(
        device_dx.cpu(),
        dx,
        rtol=tolerance,
        atol=tolerance * dx.abs().max().item(),
    )

    scale = dparams.abs().max().item()
    torch.testing.assert_close(device_dparams.cpu(), dparams, rtol=0, atol=1e-5 * scale)

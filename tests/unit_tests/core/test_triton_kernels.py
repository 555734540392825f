"""Triton kernels in Triton's interpreter, compared with their references and with autograd."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.optim.adamw import adamw as torch_adamw

from tests import ROOT

pytest.importorskip("triton", reason="Triton is not in the environment: pip install triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 is not set: there is a GPU", allow_module_level=True)

from megatron.core import triton_kernels as kernels  # noqa: E402
from megatron.core import triton_norms as norms  # noqa: E402
from megatron.core import triton_rotary as rotary  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Rounding to each dtype once. The interpreter truncates bf16 instead of rounding it.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Make small tensors span several blocks, the last one incomplete."""
    monkeypatch.setattr(kernels, "_BLOCK", 32)
    monkeypatch.setattr(kernels, "_LOGITS_BLOCK", 32)
    monkeypatch.setattr(rotary, "_HEADS_BLOCK", 4)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def assert_close(actual, expected, dtype=torch.float32, scale=1.0):
    tolerance = TOLERANCES[dtype] * scale
    torch.testing.assert_close(
        actual.double(),
        expected.double(),
        rtol=tolerance,
        atol=tolerance,
        equal_nan=True,
    )


SHAPES = [(3, 2, 1), (2, 3, 32), (5, 45), (1, 100), (0, 7), (3, 0)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_swiglu(shape, dtype):
    *rows, size = shape
    x = (3 * torch.randn(*rows, 2 * size)).to(dtype)
    dy = torch.randn(shape).to(dtype)
    wide = x.double().requires_grad_()
    gate, up = wide.chunk(2, -1)
    expected = F.silu(gate) * up
    expected.backward(dy.double())

    assert_close(kernels.run_swiglu(x), expected, dtype)
    assert_close(kernels.swiglu(x), expected, dtype)
    assert_close(kernels.run_swiglu_backward(dy, x), wide.grad, dtype, scale=4)
    assert_close(kernels.swiglu_backward(dy, x), wide.grad, dtype, scale=4)


def test_swiglu_of_strided_tensors():
    x = torch.randn(4, 40, 3).transpose(1, 2)
    dy = torch.randn(20, 4, 3).permute(1, 2, 0)
    assert not x.is_contiguous()
    assert not dy.is_contiguous()
    assert_close(kernels.run_swiglu(x), kernels.compute_swiglu(x))

    dx = kernels.run_swiglu_backward(dy, x)
    assert_close(dx, kernels.compute_swiglu_backward(dy, x))
    assert dx.is_contiguous()


def test_swiglu_of_extreme_values():
    extremes = torch.tensor([-1e38, -90.0, -0.0, 0.0, 90.0, 1e38, torch.nan, torch.inf, -torch.inf])
    x = torch.cat((extremes, torch.ones(9))).unsqueeze(0)
    dy = torch.ones(1, 9)
    assert_close(kernels.run_swiglu(x), kernels.compute_swiglu(x))
    assert_close(kernels.run_swiglu_backward(dy, x), kernels.compute_swiglu_backward(dy, x))


def make_logits(rows, width, dtype):
    """Return logits that are not contiguous, as after a slice of columns."""
    return (4 * torch.randn(rows, width + 3)).to(dtype)[:, :width]


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "width", "valid"),
    [(5, 100, 100), (3, 77, 65), (2, 1, 1), (0, 9, 9)],
)
def test_loss_equals_autograd(rows, width, valid, dtype, softcap):
    raw = make_logits(rows, width, dtype)
    labels = torch.randint(valid, (rows,))
    dloss = torch.rand(rows)
    wide = raw.double().requires_grad_()
    logits = raw.clone() if softcap is None else (softcap * torch.tanh(raw / softcap)).to(dtype)
    capped = logits.double()
    if softcap is None:
        expected = F.cross_entropy(wide[:, :valid], labels, reduction="none")
        expected.backward(dloss.double())
        dlogits = wide.grad
    else:
        # The gradient at the rounded logits
        leaf = capped.clone().requires_grad_()
        expected = F.cross_entropy(leaf[:, :valid], labels, reduction="none")
        expected.backward(dloss.double())
        dlogits = leaf.grad * (1 - (capped / softcap).square())

    for run, run_gradient in (
        (kernels.run_softmax, kernels.run_softmax_gradient),
        (kernels.compute_softmax, kernels.compute_softmax_gradient),
        (kernels.softmax, kernels.softmax_gradient),
    ):
        largest, total, predicted = run(logits, labels, valid)
        assert_close(total.log() + largest - predicted, expected, scale=4)
        target = logits.clone()
        run_gradient(target, labels, largest, total, dloss, valid, softcap)
        assert_close(target, dlogits, dtype)


@pytest.mark.parametrize("valid", [0, 1, 40, 64])
def test_loss_of_one_rank_with_padding_and_labels_of_others(valid):
    logits = make_logits(4, 64, torch.float32)
    logits[1] = -torch.inf
    logits[2, :40] = -torch.inf
    columns = torch.tensor([-1, 0, 39, 63])
    actual = kernels.run_softmax(logits, columns, valid)
    expected = kernels.compute_softmax(logits, columns, valid)

    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, scale=4)
    assert not actual[1][1]
    assert actual[2][0] == 0
    assert valid == 64 or actual[2][3] == -torch.inf

    largest = torch.full((4,), 20.0)
    total = torch.full((4,), 3.0)
    dloss = torch.rand(4)
    one = logits.clone()
    other = logits.clone()
    kernels.run_softmax_gradient(one, columns, largest, total, dloss, valid, None)
    kernels.compute_softmax_gradient(other, columns, largest, total, dloss, valid, None)

    assert_close(one, other)
    assert one.isfinite().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nonfinite_logits_give_a_loss_of_nan(bad):
    logits = torch.randn(2, 70)
    logits[1, 50] = bad
    largest, total, predicted = kernels.run_softmax(logits, torch.tensor([0, 0]), 70)
    loss = total.log() + largest - predicted
    assert loss[0].isfinite()
    assert loss[1].isnan()


def make_scalars(grad_scale, found_inf, step, lr, beta1, beta2):
    step_size = lr / (1 - beta1**step)
    return torch.tensor([grad_scale, found_inf, step_size, (1 - beta2**step) ** -0.5])


@pytest.mark.parametrize("numel", [1, 32, 1000])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_adamw_equals_that_of_torch(numel, dtype):
    tensors = [torch.randn(numel) for _ in range(3)]
    tensors[2].square_()
    expected = [tensor.clone() for tensor in tensors]
    reference = [tensor.clone() for tensor in tensors]
    weight = None if dtype is None else torch.empty(numel, dtype=dtype)
    lr, beta1, beta2, epsilon, decay = 1e-2, 0.9, 0.999, 1e-8, 0.1
    their_step = torch.zeros(())
    for step in range(1, 4):
        grad = torch.randn(numel)
        torch_adamw(
            [expected[0]], [grad / 2], [expected[1]], [expected[2]], [], [their_step], fused=True, amsgrad=False,
            beta1=beta1, beta2=beta2, lr=lr, weight_decay=decay, eps=epsilon, maximize=False,
        )  # fmt: skip
        scalars = make_scalars(2.0, 0.0, step, lr, beta1, beta2)
        hyperparameters = (scalars, lr, beta1, beta2, epsilon, decay)
        param, mean, square = tensors
        kernels.run_adamw(param, grad, mean, square, weight, *hyperparameters)
        param, mean, square = reference
        kernels.adamw(param, grad, mean, square, None, *hyperparameters)

    for actual, other, torchs in zip(tensors, reference, expected, strict=True):
        assert_close(actual, torchs)
        assert_close(other, torchs)
    if weight is not None:
        assert_close(weight, tensors[0], dtype)


def test_adamw_that_is_skipped_changes_nothing():
    tensors = [torch.randn(50) for _ in range(3)]
    expected = [tensor.clone() for tensor in tensors]
    weight = torch.full((50,), 7.0, dtype=torch.bfloat16)
    grad = torch.full((50,), torch.nan)
    for run in (kernels.run_adamw, kernels.adamw):
        scalars = torch.tensor([torch.nan, 1.0, torch.inf, torch.inf])
        param, mean, square = tensors
        run(param, grad, mean, square, weight, scalars, 1e-2, 0.9, 0.999, 1e-8, 0.1)
        assert all(map(torch.equal, tensors, expected))
        assert (weight == 7).all()


def make_tables(length, pairs, dtype):
    angles = torch.outer(torch.arange(length).float(), 1.0 / 10 ** torch.arange(pairs))
    angles = angles.view(length, 1, 1, 1, pairs)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "pairs"),
    [((5, 2, 3, 2, 16), 8), ((2, 3, 5, 1, 10), 3), ((1, 1, 1, 1, 6), 3), ((0, 2, 1, 1, 4), 2)],
)
def test_rotation(shape, pairs, dtype, interleaved):
    x = torch.randn(shape).to(dtype)
    cos, sin = make_tables(shape[0], pairs, dtype)
    for inverse in (False, True):
        expected = torch.empty_like(x)
        rotary.compute_rotation(x, expected, cos, sin, inverse, interleaved)
        y = torch.empty_like(x)
        rotary.run_rotation(x, y, cos, sin, inverse, interleaved)
        assert_close(y, expected, dtype, scale=2)
        in_place = x.clone()
        rotary.run_rotation(in_place, in_place, cos, sin, inverse, interleaved)
        assert torch.equal(in_place, y)

    # Back to the input
    rotary.run_rotation(y, y, cos, sin, False, interleaved)
    assert_close(y, x, dtype, scale=8)


def test_rotation_of_views():
    """Queries and keys in the output of the projection, and gradients in the layout of attention."""
    mixed = torch.randn(5, 2, 3, 4, 12)
    cos, sin = make_tables(5, 5, torch.float32)
    expected = mixed.clone()
    rotary.compute_rotation(mixed[..., :3, :], expected[..., :3, :], cos, sin, False, False)
    rotated = mixed.clone()
    heads = rotated[..., :3, :]
    rotary.run_rotation(heads, heads, cos, sin, False, False)

    assert_close(rotated, expected)
    assert torch.equal(rotated[..., 3, :], mixed[..., 3, :])

    dq = torch.randn(2, 3, 3, 5, 12).permute(3, 0, 1, 2, 4)
    assert not dq.is_contiguous()

    dmixed = torch.full_like(mixed, 7.0)
    rotary.run_rotation(dq, dmixed[..., :3, :], cos, sin, True, False)
    gradient = torch.empty_like(dq)
    rotary.compute_rotation(dq, gradient, cos, sin, True, False)

    assert_close(dmixed[..., :3, :], gradient)
    assert (dmixed[..., 3, :] == 7).all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "pairs"),
    [((5, 2, 3, 4, 16), 8), ((2, 3, 5, 3, 10), 3), ((0, 2, 1, 3, 4), 2)],
)
def test_split_and_rotation(shape, pairs, dtype, interleaved):
    mixed = torch.randn(shape).to(dtype)
    tables = make_tables(shape[0], pairs, dtype)
    expected = rotary.compute_split(mixed, *tables, interleaved)
    actual = rotary.run_split(mixed, *tables, interleaved)

    for result, reference in zip(actual, expected, strict=True):
        assert result.is_contiguous()
        assert_close(result, reference, dtype, scale=2)

    # Gradients in the layout of attention, and one that is expanded
    dq, dk, dv = (
        torch.randn_like(x).permute(1, 2, 3, 0, 4).contiguous().permute(3, 0, 1, 2, 4)
        for x in expected
    )
    dv = dv[..., :1].expand_as(dv)
    dmixed = rotary.run_split_backward(dq, dk, dv, *tables, interleaved)
    reference = rotary.compute_split_backward(dq, dk, dv, *tables, interleaved)
    assert_close(dmixed, reference, dtype, scale=2)


def test_gradient_of_split_and_rotation():
    mixed = torch.randn(5, 2, 3, 4, 12, dtype=torch.float64, requires_grad=True)
    tables = make_tables(5, 5, torch.float64)
    gradients = [torch.randn_like(x) for x in rotary.split_and_rotate(mixed, *tables, False)]
    results = rotary.split_and_rotate(mixed, *tables, False)
    (dmixed,) = torch.autograd.grad(results, mixed, gradients)
    with torch.no_grad():
        change = torch.randn_like(mixed)
        changed = rotary.split_and_rotate(mixed + change, *tables, False)
    # The operation is linear.
    expected = sum(
        ((y - x) * dy).sum() for x, y, dy in zip(results, changed, gradients, strict=True)
    )
    assert_close((dmixed * change).sum(), expected, scale=10)


NORM_SHAPES = [((3, 2, 33), "sum"), ((7, 64), None), ((1, 1), "sum"), ((0, 5), "sum")]


@pytest.mark.parametrize("norm", ["rms", "rms, zero-centered", "rms, plain", "layer", "layer, 1p"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "branch"), NORM_SHAPES)
def test_residual_norm_equals_autograd(shape, branch, dtype, norm):
    size = shape[-1]
    rms = "rms" in norm
    zero_centered = "1p" in norm or "zero-centered" in norm
    x, dy, dtotal = (torch.randn(shape).to(dtype) for _ in range(3))
    branch = None if branch is None else torch.randn(shape).to(dtype)
    weight = None if "plain" in norm else torch.randn(size).to(dtype)
    bias = None if rms else torch.randn(size).to(dtype)

    # The sum is rounded, then normalized.
    summed = x if branch is None else x + branch
    wide = summed.double().requires_grad_()
    params = [param.double().requires_grad_() for param in (weight, bias) if param is not None]
    wide_weight = None
    if weight is not None:
        wide_weight = params[0] + float(zero_centered)
    if rms:
        expected = F.rms_norm(wide, (size,), wide_weight, 1e-5)
    else:
        expected = F.layer_norm(wide, (size,), wide_weight, params[1], 1e-5)

    torch.autograd.backward((wide, expected), (dtotal.double(), dy.double()))

    # Statistics of the rounded sum: the interpreter truncates its own.
    _, _, *statistics = norms.compute_residual_norm(
        summed,
        None,
        weight,
        bias,
        1e-5,
        rms,
        zero_centered,
    )
    saved = (summed, weight, *statistics, bias is not None, zero_centered)
    for run, run_backward in (
        (norms.run_residual_norm, norms.run_residual_norm_backward),
        (norms.residual_norm, norms.residual_norm_backward),
    ):
        total, y, mean, scale = run(x, branch, weight, bias, 1e-5, rms, zero_centered)
        assert total.shape == (shape if branch is not None else (0,))
        if branch is not None:
            assert_close(total, summed, dtype)
        assert_close(y, expected.detach(), dtype, scale=4)
        for actual, statistic in zip((mean, scale), statistics, strict=True):
            assert_close(actual, statistic, dtype, scale=4)

        dx, dparams = run_backward(dy, dtotal, *saved)
        assert dparams.dtype == torch.float32
        assert len(dparams) == len(params)
        assert_close(dx, wide.grad, dtype, scale=8)
        for gradient, param in zip(dparams, params, strict=True):
            assert_close(gradient, param.grad, scale=16)

        alone, _ = run_backward(dy, None, *saved)
        assert_close(alone, wide.grad - dtotal.double(), dtype, scale=8)


def test_norms_of_any_size_have_a_power_of_2_of_warps():
    """The interpreter ignores the number, which Triton's launcher checks."""
    counts = {size: norms._count_norm_warps(size) for size in (1, 1001, 2048, 3072, 5120, 16384)}
    assert counts == {1: 1, 1001: 4, 2048: 8, 3072: 16, 5120: 16, 16384: 16}


def test_residual_norm_of_strided_tensors():
    x, branch, dy = (torch.randn(6, 40, 3).transpose(1, 2) for _ in range(3))
    options = (1e-5, False, False)
    actual = norms.run_residual_norm(x, branch, None, None, *options)
    expected = norms.compute_residual_norm(x, branch, None, None, *options)

    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other)

    _, _, mean, scale = expected
    saved = (x, None, mean, scale, False, False)
    dx, _ = norms.run_residual_norm_backward(dy, branch, *saved)
    assert_close(dx, norms.compute_residual_norm_backward(dy, branch, *saved)[0])


def test_kernels_compile_for_gpus(tmp_path):
    """The kernels are compiled in a process without the interpreter."""
    environment = dict(os.environ, TRITON_CACHE_DIR=str(tmp_path))
    del environment["TRITON_INTERPRET"]
    program = [sys.executable, "-m", "tests.unit_tests.core.compile_triton_kernels"]
    result = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    assert int(result.stdout) == 45
